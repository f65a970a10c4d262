"""WORKDIR/report: pictures, summary.json and one static page, from the events on disk.

Works on any workdir: of a run that crashed, of a run without a syncer, or an empty folder.
"""

from __future__ import annotations

import html
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddiloco.observe.eventlog import stream_events
from ddiloco.observe.goodput import Goodput
from ddiloco.observe.islands import OUTER_GRADIENTS, PHASES
from ddiloco.observe.run_state import RunState
from ddiloco.observe.style import clock_time, compact, loss_text, plain, rounded
from ddiloco.protocol.events import Event, Fault, Restart, RunStarted, Snapshot, finite

# --- The key numbers of a run, from its events alone


def summarise(events: Iterable[Event]) -> dict[str, Any]:
  """`numbers` of these events, which are sorted by time; the log may be cut off anywhere."""
  return numbers(RunState().read(events))


def numbers(run: RunState) -> dict[str, Any]:
  """The numbers of summary.json that follow from the events; `None` where they do not say.

  Returns:
    Plain JSON values. `participation` is by learner, the share of all commits it took part in;
    `bytes_sent` and `bytes_received` add up all roles, so each message counts once in either;
    `survivor_max_gap_ratio` is the longest pause of a surviving island around a planned kill of
    another (kill to its first merge after rejoining, else 30 s) over its own median step gap.
    `tokens_per_second_per_chip` and `mfu` (docs/accelerators.md) are those of islands at their
    median step on the chips that they had last; a CPU has no MFU.
    `goodput`, `uptime` and the causes in `lost_time` are those of `observe/goodput.py`.
  """
  kinds, (sent, received) = run.kinds, run.traffic.totals()
  return {
    "name": run.name or None,
    "finished": run.finished or None,
    "seconds": round(run.time, 3) if run.num_events else None,
    "num_learners": len(run.islands),
    "num_shards": len(run.shards),
    # Without an engine no event says how many there are.
    "num_fragments": max([run.num_fragments, *(p + 1 for p in run.versions)]),
    "total_tokens": run.total_tokens if kinds[RunStarted] else None,
    "merged_tokens": round(run.tokens_done) if run.num_shards else 0,
    "trained_tokens": sum(island.tokens for island in run.islands.values()),
    "commits": run.commits,
    "participation": {str(m): run.participation(m) for m in sorted(run.islands)},
    "outer_gradients": {name: rounded(each) for name, each in run.outer_gradients.items()},
    "rejected_updates": run.rejected,
    "bytes_sent": sent,
    "bytes_received": received,
    "heldout_loss_first": rounded(run.first_loss),
    "heldout_loss_last": rounded(run.heldout_loss),
    "faults": kinds[Fault],
    "snapshots": kinds[Snapshot],
    "restarts": kinds[Restart],
    **run.usual_speed.as_json(),
    **_kills(run),
    "blocked_seconds": rounded(run.blocked_seconds),
    "rejoins": run.rejoins.as_json(),
    "learners": _learners(run),
    **_account(run.ledger.report()),
    "torn_lines": run.torn_lines,
    **{name: value for name, value in _only_if_any(run).items() if value},
  }


def _only_if_any(run: RunState) -> dict[str, Any]:
  return {
    # The newest evaluation's other measures, if the model has any beside its loss.
    "heldout_measures_last": {name: rounded(each) for name, each in run.heldout_measures.items()},
    "odd_events": run.odd_events,  # events that this version does not write so
    "solo_rounds": run.solo_rounds,  # of one island round after round, though there were others
    "rejoins_left_out": run.rejoins.left_out,  # older than those in `rejoins`
    "kills_left_out": run.kills.left_out,  # older than those in `kills`
    "num_hangs": run.num_hangs,
    "hangs": [  # the newest, with the stacks of every thread
      {"role": e.target, "seconds": e.time, "silent_seconds": e.seconds, "stacks": e.stacks}
      for e in run.hangs
    ],
  }


def _kills(run: RunState) -> dict[str, Any]:
  found = run.kills.found
  ratios = [run.kills.ratio(kill, run.time) for kill in found]
  kills = [
    {
      "learner": kill.learner,
      "seconds": kill.time,
      "down_seconds": rounded(kill.joined - kill.time),
      "merged_again_seconds": rounded(kill.merged - kill.time),
      "survivor_gap_ratio": rounded(ratio),
    }
    for kill, ratio in zip(found, ratios)
  ]
  worst = max(filter(math.isfinite, ratios), default=math.nan)
  return {"kills": kills, "survivor_max_gap_ratio": rounded(worst)}


def _account(account: Goodput) -> dict[str, Any]:
  """How chip time was spent, in shares; and each learner's liveness."""
  return {
    "chip_seconds": rounded(account.chip_seconds),
    "goodput": rounded(account.goodput),
    "goodput_training": rounded(account.goodput_training),
    "uptime": rounded(account.uptime),
    "lost_time": {cause: round(share, 6) for cause, share in account.causes.items()},
    "liveness": {str(m): rounded(each.liveness) for m, each in account.learners.items()},
  }


def _learners(run: RunState) -> dict[str, Any]:
  return {
    str(m): {
      "lives": island.lives,
      "chips": island.chips,
      "chip_kinds": list(island.chip_kinds),
      "steps": island.steps,
      "tokens": island.tokens,
      "loss": rounded(island.loss),
      "median_step_gap_seconds": rounded(run.kills.medians[m].value),
      **island.usual_speed.as_json(),
      "rejected_pushes": island.rejected,
    }
    for m, island in sorted(run.islands.items())
  }


SHOWN_REJOINS = 20
PICTURES = {  # file: (title, caption)
  "loss.png": (
    "Loss",
    "Training loss of every island, smoothed, and the held-out loss of the merged global model.",
  ),
  "timeline.png": (
    "Timeline",
    "What every island and every syncer shard was doing. Fine lines on a shard are its commits.",
  ),
  "participation.png": (
    "Participation",
    "Above, one tick per commit: tall and coloured if the island took part, short and grey if it "
    "did not, a cross if its update was rejected; at the right its share of all commits. Below, "
    "the islands' weights in the merge, and the mean cosine of two islands' updates: what both "
    "have learned, against the noise of their batches. Grey: of a fragment's update with the one "
    "before, which outer momentum adds up.",
  ),
  "traffic.png": (
    "Traffic",
    "Bytes sent by every role, and all of them together per second: islands send mostly their "
    "pushes, shards new versions, to members and to their buddies.",
  ),
}


def write_report(workdir: str | os.PathLike[str], extra: Mapping[str, Any] | None = None) -> Path:
  """Writes WORKDIR/report/ and returns its path.

  Args:
    workdir: of the run; its events/ are read.
    extra: entries that only the caller knows; they override the numbers from the events (see
      `numbers`). The page shows `loss_untrained`, `loss_merged`, `loss_best_island_alone`
      (held-out, nats per token), `seconds`, `sample` (generated text) and, where no engine says why
      the run ended, `reason`; summary.json takes any JSON value.

  Raises:
    OSError: the folder cannot be written.
  """
  run = RunState().read(stream_events(workdir))
  extra = dict(extra or {})
  summary = {**numbers(run), **extra}
  folder = Path(workdir) / "report"
  folder.mkdir(parents=True, exist_ok=True)
  text = json.dumps(finite(summary), indent=2, allow_nan=False, default=str)
  (folder / "summary.json").write_text(text + "\n")
  _draw(folder, run, extra)
  (folder / "index.html").write_text(page(summary))
  return folder


def _draw(folder: Path, run: RunState, extra: Mapping[str, Any]) -> None:
  from ddiloco.observe import plots

  alone = extra.get("loss_best_island_alone")
  figures: dict[str, Callable[[], Any]] = {
    "loss.png": lambda: plots.loss_figure(run, None if alone is None else float(alone)),
    "timeline.png": lambda: plots.timeline_figure(run),
    "participation.png": lambda: plots.participation_figure(run),
    "traffic.png": lambda: plots.traffic_figure(run),
  }
  with plots.styled():
    for name, make in figures.items():
      plots.save(make(), folder / name)


def key_numbers(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
  """(name, value with its unit) for the page; numbers that the run does not have are left out."""
  gradients = summary.get("outer_gradients", {})
  result = "best island" if "result_of_learner" in summary else "merged model"
  rows = [
    ("held-out loss, untrained", _loss(summary.get("loss_untrained"))),
    (f"held-out loss, {result}", _loss(_first(summary, "loss_merged", "heldout_loss_last"))),
    *(
      (f"held-out {plain(name)}, merged model", _loss(each))
      for name, each in summary.get("heldout_measures_last", {}).items()
    ),
    ("held-out loss, best island alone", _loss(summary.get("loss_best_island_alone"))),
    ("time (min:s)", _with(summary.get("seconds"), clock_time)),
    ("tokens merged", _tokens(summary)),
    ("commits", _with(summary.get("commits"), str)),
    ("commits that repeated one island alone", str(summary.get("solo_rounds") or "")),
    *(
      (f"{what}, at last", _with(gradients.get(name), lambda c: f"{c:.3g}"))
      for name, what in OUTER_GRADIENTS.items()
    ),
    ("updates rejected", _with(summary.get("rejected_updates"), str)),
    ("faults and restarts", f"{summary.get('faults', 0)} and {summary.get('restarts', 0)}"),
    (
      "longest pause of a survivor around a kill",
      _with(summary.get("survivor_max_gap_ratio"), lambda r: f"{r:.2f} × its median step"),
    ),
    ("times that a learner hung", str(summary.get("num_hangs") or "")),
    ("goodput, without the first start-up", _share(summary.get("goodput_training"))),
    ("goodput", _share(summary.get("goodput"))),
    ("where the rest of the chip time went", _causes(summary)),
    ("uptime", _share(summary.get("uptime"))),
    ("tokens per second and chip", _with(summary.get("tokens_per_second_per_chip"), compact)),
    ("MFU", _share(summary.get("mfu"))),
    ("time learners were blocked", _with(summary.get("blocked_seconds"), lambda s: f"{s:.3g} s")),
    ("bytes sent", _with(summary.get("bytes_sent"), lambda b: f"{compact(b)}B")),
    ("lines of the log that cannot be read", _damaged(summary)),
    ("how the run ended", _first(summary, "finished", "reason") or "it did not end in good order"),
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
  tables = _learner_table(summary) + _rejoin_table(summary) + _hang_texts(summary)
  body = f"<h1>{name}</h1><table>{numbers}</table>{tables}{pictures}{text}"
  footer = '<p>All numbers: <a href="summary.json">summary.json</a></p>'
  head = f'<meta charset="utf-8"><title>{name}: ddiloco report</title><style>{_CSS}</style>'
  view = '<meta name="viewport" content="width=device-width, initial-scale=1">'
  start = f'<!doctype html>\n<html lang="en"><head>{head}{view}</head>'
  return f"{start}<body>{body}{footer}</body></html>\n"


def _learner_table(summary: Mapping[str, Any]) -> str:
  learners = summary.get("learners") or {}
  if not learners:
    return ""
  shares, alive = summary.get("participation") or {}, summary.get("liveness") or {}
  rows = [
    (
      *(m, ", then ".join(each["chip_kinds"]), str(each["lives"]), str(each["steps"])),
      *(compact(each["tokens"]), _loss(each["loss"]), _share(alive.get(m))),
      _with(shares.get(m), lambda share: f"{share:.0%}"),
      _with(each["median_step_gap_seconds"], lambda s: f"{1000 * s:.0f} ms"),
      _with(each.get("tokens_per_second_per_chip"), compact),
      _share(each.get("mfu")),
    )
    for m, each in learners.items()
  ]
  names = ("island", "chips", "lives", "steps", "tokens", "last loss")
  names += ("time training", "commits joined", "median step", "tokens/s a chip", "MFU")
  return _table(names, rows)


def _rejoin_table(summary: Mapping[str, Any]) -> str:
  """The phases of recent rejoins in seconds, the newest last; phases that none has are left out."""
  rejoins = (summary.get("rejoins") or [])[-SHOWN_REJOINS:]
  if not rejoins:
    return ""
  phases = [phase for phase in PHASES if any(phase in each["phases"] for each in rejoins)]
  names = ("island", "died at", *(phase.replace("_", " ") for phase in phases), "all")
  rows = [
    (
      *(str(each["learner"]), clock_time(each["time"])),
      *(_with(each["phases"].get(phase), "{:.2f}".format) for phase in phases),
      _with(each["seconds"], "{:.2f}".format) or "not merged",
    )
    for each in rejoins
  ]
  return f"<h2>Rejoins, from death to merge, in seconds</h2>{_table(names, rows)}"


def _table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
  """A table in HTML; a dash stands for an unknown value."""
  header = "".join(f"<th>{name}</th>" for name in names)
  cells = ("".join(f"<td>{html.escape(cell or '–')}</td>" for cell in row) for row in rows)
  body = "".join(f"<tr>{row}</tr>" for row in cells)
  return f'<table class="wide"><tr>{header}</tr>{body}</table>'


def _hang_texts(summary: Mapping[str, Any]) -> str:
  return "".join(
    f"<details><summary>{html.escape(each['role'])} hung at {clock_time(each['seconds'])}:"
    f" where its threads were</summary><pre>{html.escape(each['stacks'])}</pre></details>"
    for each in summary.get("hangs") or []
  )


def _damaged(summary: Mapping[str, Any]) -> str:
  count = (summary.get("torn_lines") or 0) + (summary.get("odd_events") or 0)
  return f"{count:,}" if count else ""


def _first(summary: Mapping[str, Any], *names: str) -> Any:
  return next((summary[name] for name in names if summary.get(name) is not None), None)


def _with(value: Any, text: Callable[[Any], str]) -> str:
  return "" if value is None else text(value)


def _share(value: Any) -> str:
  return "" if value is None else f"{value:.1%}"


def _causes(summary: Mapping[str, Any]) -> str:
  """The causes of at least half a percent, the greatest first."""
  lost = sorted((summary.get("lost_time") or {}).items(), key=lambda each: -each[1])
  return ", ".join(
    f"{cause.replace('_', ' ')} {share:.1%}" for cause, share in lost if share >= 5e-3
  )


def _loss(value: Any) -> str:
  number = math.nan if value is None else float(value)  # a summary read back says "nan"
  return loss_text(number) if math.isfinite(number) else ""


def _tokens(summary: Mapping[str, Any]) -> str:
  if not summary.get("num_shards"):
    return ""
  total = summary.get("total_tokens")
  of = f" of {compact(total)}" if total else ""
  return f"{compact(summary.get('merged_tokens') or 0)}{of}"


_CSS = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem }
h1 { font-size: 1.7rem } h2 { font-size: 1.15rem; margin: 2.2rem 0 .4rem }
table { border-collapse: collapse; margin: 1rem 0 }
th, td { padding: .25rem 1.2rem .25rem 0; text-align: left }
tr { border-bottom: 1px solid #eee } th { font-weight: normal; color: #666 }
td { font-variant-numeric: tabular-nums }
.wide { width: 100% } .wide td, .wide th { text-align: right }
.wide td:first-child, .wide th:first-child { text-align: left }
figure { margin: 0 } img { width: 100%; height: auto }
figcaption { color: #666; font-size: .92rem }
pre { background: #f6f6f6; padding: 1rem; overflow-x: auto }
"""
