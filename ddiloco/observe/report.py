"""WORKDIR/report: pictures, summary.json and one static page, from the events on disk.

Works on any workdir: of a run that crashed, of a run without a syncer, or an empty folder.
"""

from __future__ import annotations

import html
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ddiloco.config import Config
from ddiloco.observe.eventlog import FLUSH_SECONDS, EventStream
from ddiloco.observe.goodput import CAUSES
from ddiloco.observe.islands import OUTER_GRADIENTS, RECENT_GAPS
from ddiloco.observe.run_state import RunState
from ddiloco.observe.style import (
  bytes_text,
  clock_time,
  compact,
  loss_text,
  percent,
  plain,
  rounded,
  time_unit,
)
from ddiloco.protocol.events import Event, Fault, Hung, Snapshot, finite

# --- The key numbers of a run, from its events alone


def summarise(events: Iterable[Event], config: Config | None = None) -> dict[str, Any]:
  """`numbers` of these events, which are sorted by time; the log may be cut off anywhere."""
  return numbers(RunState(config).read(events))


def numbers(run: RunState) -> dict[str, Any]:
  """The numbers of summary.json that follow from the events; `None` where they do not say.

  Returns:
    Plain JSON values. `merged_tokens` are those of the fragment with the fewest, as everywhere: so
    many the whole model has seen, and at `total_tokens` the run ends.
    `participation` is by learner, the share of all commits it took part in;
    `bytes_sent` and `bytes_received` add up all roles, so each message counts once in either;
    `survivor_max_gap_ratio` is the longest pause of a surviving island around a planned kill of
    another (kill to its first merge after rejoining; 30 s if it was killed for good) over its own
    median step gap.
    `tokens_per_second_per_chip` and `mfu` (docs/accelerators.md) are those of islands at the median
    of their last 511 steps, on the chips that they had last; a CPU has no MFU.
    `goodput`, `uptime` and the causes in `lost_time` are those of `observe/goodput.py`.
  """
  kinds, traffic = run.kinds, run.traffic.by_role.values()
  return {
    "name": run.name or None,
    "finished": run.finished or None,
    "seconds": round(run.time, 3) if run.num_events else None,
    "num_learners": len(run.islands),
    "num_shards": len(run.shards),
    "num_fragments": len(run.fragments),
    "total_tokens": run.total_tokens or None,
    "merged_tokens": run.least_merged,
    "trained_tokens": sum(island.tokens for island in run.islands.values()),
    "commits": run.commits,
    "loss_unit": run.loss_unit or None,
    "participation": {str(m): run.participation(m) for m in sorted(run.islands)},
    "outer_gradients": {name: rounded(each) for name, each in run.outer_gradients.items()},
    "rejected_pushes": run.rejected,
    "bytes_sent": sum(sent for sent, _ in traffic),
    "bytes_received": sum(received for _, received in traffic),
    "heldout_loss_first": rounded(next((e.loss for e in run.curves.evaluations.items), math.nan)),
    "heldout_loss_last": rounded(run.heldout_loss),
    "heldout_seconds_last": rounded(run.heldout_time),  # when it was measured
    "faults": kinds[Fault],
    "snapshots": kinds[Snapshot],
    "restarts": run.restarts,
    **run.usual_speed.as_json(),
    **_kills(run),
    "blocked_seconds": rounded(run.blocked_seconds),
    "data_seconds": rounded(sum(island.data_seconds for island in run.islands.values())),
    "rejoins": run.rejoins.as_json(),
    "learners": _learners(run),
    **run.ledger.report().as_json(),
    "torn_lines": run.torn_lines,
    **{name: value for name, value in _only_if_any(run).items() if value},
  }


def _only_if_any(run: RunState) -> dict[str, Any]:
  return {
    # The newest evaluation's other measures, if the model has any beside its loss.
    "heldout_measures_last": {name: rounded(each) for name, each in run.heldout_measures.items()},
    "odd_events": run.odd_events,  # events that this version does not write so
    "solo_rounds": run.solo_rounds,  # of one island round after round, though there were others
    "rejoins_left_out": run.rejoins.left_out,  # older than those in `rejoins` and `kills`
    "num_hangs": run.kinds[Hung],
    "clocks": run.clocks.text(),
  }


def _kills(run: RunState) -> dict[str, Any]:
  found = [way for way in run.rejoins.found if way.planned]
  # Silence at the end of a log may be that of a clock, or of lines that are not written yet.
  known = run.time - run.clocks.apart - FLUSH_SECONDS
  ratios = [run.rejoins.gap_ratio(way, known) for way in found]
  kills = [
    {
      "learner": way.learner,
      "seconds": way.died,
      "down_seconds": rounded(way.seconds("receive")),
      "merged_again_seconds": rounded(way.seconds()),
      "survivor_gap_ratio": rounded(ratio),
    }
    for way, ratio in zip(found, ratios)
  ]
  worst = max(filter(math.isfinite, ratios), default=math.nan)
  return {"kills": kills, "survivor_max_gap_ratio": rounded(worst)}


def _learners(run: RunState) -> dict[str, Any]:
  return {
    str(m): {
      "lives": island.lives,
      "chips": island.chips,
      "chip_kinds": list(island.chip_kinds),
      "steps": island.steps,
      "tokens": island.tokens,
      "loss": rounded(island.loss),
      "median_step_gap_seconds": rounded(island.usual_gap),
      "data_seconds": rounded(island.data_seconds),
      **island.usual_speed.as_json(),
      "rejected_pushes": island.rejected,
    }
    for m, island in sorted(run.islands.items())
  }


PICTURES = {  # file: (title, caption)
  "loss.png": (
    "Loss",
    "Training loss of every island, smoothed, and the held-out loss of the merged global model.",
  ),
  "timeline.png": (
    "Timeline",
    "What every island and every syncer shard was doing.",
  ),
  "participation.png": (
    "Participation",
    "Above, one tick per commit: tall and coloured if the island took part, short and grey if it "
    "did not, a cross if its push was rejected; at the right its share of all commits. Below, "
    "the mean cosine of two islands' pushes: what both "
    "have learned, against the noise of their batches. Grey: of a fragment's merge with the one "
    "before, which outer momentum adds up.",
  ),
  "traffic.png": (
    "Traffic",
    "Bytes sent by every role: islands send mostly their pushes, shards new versions, to members "
    "and to their buddies.",
  ),
}


_TITLE = ": ddiloco report</title>"


def write_report(
  workdir: str | os.PathLike[str],
  extra: Mapping[str, Any] | None = None,
  run: RunState | None = None,
) -> Path:
  """Writes WORKDIR/report/ and returns its path.

  Args:
    workdir: of the run; its events/ are read.
    extra: entries that only the caller knows; they override the numbers from the events (see
      `numbers`). The page shows `loss_untrained`, `loss_merged`, `loss_best_island_alone`
      (held-out), `began` (a date), `seconds`, `sample` (generated text) and, where no engine says
      why the run ended, `reason` or that it is `under_way`; summary.json takes any JSON value.
    run: the state of the run, if the events were read already.

  Raises:
    OSError: the folder cannot be written, or has such files that are not of ddiloco.
  """
  run = run or RunState().read(EventStream(workdir))
  extra = dict(extra or {})
  summary = {**numbers(run), **extra}
  folder = Path(workdir) / "report"
  index = folder / "index.html"
  there = index.read_text(errors="replace") if index.exists() else None
  ours = there == "" or (there is not None and _TITLE in there)  # empty: a full disk cut it off
  if not ours and any((folder / name).exists() for name in (index.name, *PICTURES)):
    raise FileExistsError(f"{folder}: has files of such names that are not of ddiloco")
  folder.mkdir(parents=True, exist_ok=True)
  # First: by it the folder is known again. A locale may have other characters than UTF-8.
  index.write_text(page(summary), "utf-8")
  text = json.dumps(finite(summary), indent=2, allow_nan=False, default=str)
  (folder / "summary.json").write_text(text + "\n")
  _draw(folder, run, extra)
  return folder


def _draw(folder: Path, run: RunState, extra: Mapping[str, Any]) -> None:
  from ddiloco.observe import plots

  alone = extra.get("loss_best_island_alone")
  with plots.styled():
    loss = plots.loss_figure(run, None if alone is None else float(alone))
    plots.save(loss, folder / "loss.png")
    plots.save(plots.timeline_figure(run), folder / "timeline.png")
    plots.save(plots.participation_figure(run), folder / "participation.png")
    plots.save(plots.traffic_figure(run), folder / "traffic.png")


def key_numbers(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
  """(name, value with its unit) for the page; numbers that the run does not have are left out."""

  def said(text: Callable[[Any], str], *names: str) -> str:
    """The first of these numbers that is known, in words."""
    return next((text(summary[name]) for name in names if summary.get(name) is not None), "")

  gradients, merged = summary.get("outer_gradients", {}), said(compact, "merged_tokens")
  result = "best island" if "result_of_learner" in summary else "merged model"
  of = f" of {said(compact, 'total_tokens')}" if summary.get("total_tokens") else ""
  loss = said(_loss, "loss_merged")
  if not loss and (last := said(_loss, "heldout_loss_last")):  # perhaps of a much older model
    loss = last + said(lambda at: f", measured at {_time(at)}", "heldout_seconds_last")
  unfinished = "it did not end in good order"
  if summary.get("under_way"):
    unfinished = "it goes on: this is its report so far"
  damaged = (summary.get("torn_lines") or 0) + (summary.get("odd_events") or 0)
  done, wanted = (summary.get(f"{name}_tokens") or 0 for name in ("merged", "total"))
  finished = summary.get("finished") == "finished" and summary.get("num_shards")
  lacking = "commits of this run, which has finished: these numbers are too low"
  rows = [
    ("held-out loss, untrained", said(_loss, "loss_untrained")),
    (f"held-out loss, {result}", loss),
    *(
      (f"held-out {plain(name)}, merged model", _loss(each))
      for name, each in summary.get("heldout_measures_last", {}).items()
    ),
    ("held-out loss, best island alone", said(_loss, "loss_best_island_alone")),
    ("began", said(str, "began")),
    (f"time ({time_unit(summary.get('seconds') or 0)})", said(clock_time, "seconds")),
    ("tokens merged into every fragment", merged + of if summary.get("num_shards") else ""),
    ("commits: merges of a fragment", said(str, "commits")),
    ("commits that repeated one island alone", said(str, "solo_rounds")),
    *(
      (f"{what}, average of the last commits", f"{gradients[name]:.3g}")
      for name, what in OUTER_GRADIENTS.items()
      if gradients.get(name) is not None
    ),
    ("pushes rejected", said(str, "rejected_pushes")),
    ("faults and restarts", f"{summary.get('faults', 0)} and {summary.get('restarts', 0)}"),
    (
      "longest pause of a survivor around a kill",
      said("{:.2f} × its median step".format, "survivor_max_gap_ratio"),
    ),
    ("times that a role hung", said(str, "num_hangs")),
    ("goodput: chip time whose work is in the model", said(_share, "goodput")),
    ("the same without the first start-up", said(_share, "goodput_training")),
    ("where the rest of the chip time went", said(_causes, "lost_time")),
    ("uptime: some island trained, since the first step", said(_share, "uptime")),
    ("tokens per second and chip", said(compact, "tokens_per_second_per_chip")),
    ("MFU", said(_share, "mfu")),
    ("time learners were blocked", said(_seconds, "blocked_seconds")),
    ("time learners waited for data", said(_seconds, "data_seconds")),
    ("bytes sent", said(bytes_text, "bytes_sent")),
    ("lines of the log that cannot be read", f"{damaged:,}" if damaged else ""),
    ("clocks that differ", said(str, "clocks")),
    ("what the log lacks", lacking if finished and done < wanted else ""),
    ("how the run ended", said(str, "finished", "reason") or unfinished),
  ]
  return [(name, value) for name, value in rows if value]


def page(summary: Mapping[str, Any]) -> str:
  """The static page: no scripts, no external resources, pictures by relative name."""
  name = html.escape(str(summary.get("name") or "run"))
  numbers = "\n".join(
    f"<tr><th>{html.escape(what)}</th><td>{html.escape(value)}</td></tr>"
    for what, value in key_numbers(summary)
  )
  pictures = "\n".join(
    f'<figure id="{file[:-4]}"><h2>{title}</h2><img src="{file}" alt="{title}">'
    f"<figcaption>{caption}</figcaption></figure>"
    for file, (title, caption) in PICTURES.items()
  )
  sample = summary.get("sample")
  text = f"<h2>A sample of its text</h2><pre>{html.escape(str(sample))}</pre>" if sample else ""
  tables = f"<table>{numbers}</table>{_learner_table(summary)}"
  body = f"<h1>{name}</h1>{_about(summary)}{tables}{pictures}{text}"
  footer = '<p>All numbers: <a href="summary.json">summary.json</a></p>'
  head = f'<meta charset="utf-8"><title>{name}{_TITLE}<style>{_CSS}</style>'
  view = '<meta name="viewport" content="width=device-width, initial-scale=1">'
  start = f'<!doctype html>\n<html lang="en"><head>{head}{view}</head>'
  return f"{start}<body>{body}{footer}</body></html>\n"


def _about(summary: Mapping[str, Any]) -> str:
  """What took part in the run, for a reader who sees such a page for the first time."""
  if not summary.get("num_learners"):
    return ""
  text = "Each island ({num_learners}) trains a copy of one model"
  if summary["num_shards"]:
    text += "; syncer shards ({num_shards}) merge what the islands have learned, one of the model's"
    text += " fragments ({num_fragments}) at a time"
  losses = f" Losses are in {unit}." if (unit := summary.get("loss_unit")) else ""
  return f"<p>{text.format_map(summary)}.{losses}</p>"


def _learner_table(summary: Mapping[str, Any]) -> str:
  """A table of all islands; a dash stands for an unknown value."""
  shares, alive = summary.get("participation") or {}, summary.get("liveness") or {}
  names = ("island", "chip", "incarnations", "steps", "tokens", "last loss", "time training")
  names += ("commits joined", "median step", "waited for data", "tokens/s a chip", "MFU")
  rows = ["".join(f"<th>{name}</th>" for name in names)]
  for m, each in (summary.get("learners") or {}).items():
    gap, waited = each["median_step_gap_seconds"], each["data_seconds"]
    cells = (
      *(m, ", then ".join(each["chip_kinds"]), str(each["lives"]), str(each["steps"])),
      *(compact(each["tokens"]), _loss(each["loss"]), _share(alive.get(m)), _share(shares.get(m))),
      "" if gap is None else f"{1000 * gap:.0f} ms" if gap < 1 else _seconds(gap),
      "" if waited is None else _seconds(waited),
      compact(each["tokens_per_second_per_chip"] or math.nan),
      _share(each["mfu"]),
    )
    rows.append("".join(f"<td>{html.escape(cell or '–')}</td>" for cell in cells))
  table = f'<div class="wide"><table>{"".join(f"<tr>{row}</tr>" for row in rows)}</table></div>'
  speeds = f"Median step, tokens per second and MFU are of each island's last {RECENT_GAPS} steps"
  return f"{table}<p>{speeds} at most, on its present chips.</p>"


def _share(value: float | None) -> str:
  return "" if value is None else percent(value, 1)


def _seconds(value: float) -> str:
  return f"{value:.3g} s" if value < 999.5 else _time(value)


def _time(seconds: float) -> str:
  return f"{clock_time(seconds)} ({time_unit(seconds)})"


def _causes(lost_time: Mapping[str, float]) -> str:
  """The causes of at least half a percent, the greatest first."""
  lost = sorted(lost_time.items(), key=lambda each: -each[1])
  return ", ".join(f"{CAUSES[cause]} {percent(share, 1)}" for cause, share in lost if share >= 5e-3)


def _loss(value: Any) -> str:
  number = math.nan if value is None else float(value)  # a summary read back says "nan"
  return loss_text(number) if math.isfinite(number) else ""


_CSS = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem }
h1 { font-size: 1.7rem; overflow-wrap: anywhere } h2 { font-size: 1.15rem; margin: 2.2rem 0 .4rem }
table { border-collapse: collapse; margin: 1rem 0 }
th, td { padding: .25rem 1.2rem .25rem 0; text-align: left }
tr { border-bottom: 1px solid #eee } th { font-weight: normal; color: #666 }
td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere }
.wide { overflow-x: auto } .wide table { width: 100% }
.wide td, .wide th { text-align: right; overflow-wrap: normal }
.wide td:first-child, .wide th:first-child { text-align: left }
figure { margin: 0 } img { width: 100%; height: auto }
p { margin: .6rem 0 } figcaption { color: #666; font-size: .92rem }
pre { background: #f6f6f6; padding: 1rem; white-space: pre-wrap; overflow-wrap: anywhere }
@media print {
  .wide { font-size: .7rem } .wide td, .wide th { padding-right: .6rem }
  h2 { break-after: avoid } figure, tr { break-inside: avoid }
}
"""
