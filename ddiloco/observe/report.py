"""WORKDIR/report: pictures, summary.json and one static page, from the events on disk.

Works on whatever is there: a run that crashed, one without a syncer, or an empty folder.
"""

from __future__ import annotations

import html
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ddiloco.observe.events import EventLog, finite, read_events
from ddiloco.observe.style import clock_time, compact, loss_text
from ddiloco.observe.summary import summarise

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
    "the islands' weights in the merge.",
  ),
  "traffic.png": (
    "Traffic",
    "Bytes sent by every role, and all of them together per second.",
  ),
}


def write_report(workdir: str | os.PathLike[str], extra: Mapping[str, Any] | None = None) -> Path:
  """Writes WORKDIR/report/ and returns its path.

  Args:
    workdir: of the run; its events/ are read.
    extra: what only the caller knows, put over the numbers from the events (see `summarise`): the
      page shows `loss_untrained`, `loss_merged`, `loss_best_island_alone` (held-out, nats per
      token), `seconds` and `sample` (generated text); summary.json takes anything JSON can say.

  Raises:
    OSError: the folder cannot be written.
  """
  events = read_events(workdir)
  extra = dict(extra or {})
  summary = {**summarise(events), **extra}
  folder = Path(workdir) / "report"
  folder.mkdir(parents=True, exist_ok=True)
  text = json.dumps(finite(summary), indent=2, allow_nan=False, default=str)
  (folder / "summary.json").write_text(text + "\n")
  _draw(folder, events, extra)
  (folder / "index.html").write_text(page(summary))
  return folder


def _draw(folder: Path, events: EventLog, extra: Mapping[str, Any]) -> None:
  from ddiloco.observe import plots, timeline

  alone = extra.get("loss_best_island_alone")
  figures: dict[str, Callable[[], Any]] = {
    "loss.png": lambda: plots.loss_figure(events, None if alone is None else float(alone)),
    "timeline.png": lambda: timeline.timeline_figure(events),
    "participation.png": lambda: plots.participation_figure(events),
    "traffic.png": lambda: plots.traffic_figure(events),
  }
  with plots.styled():
    for name, make in figures.items():
      plots.save(make(), folder / name)


def key_numbers(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
  """(what, value with its unit) for the page; what the run does not have is left out."""
  rows = [
    ("held-out loss, untrained", _loss(summary.get("loss_untrained"))),
    ("held-out loss, merged model", _loss(_first(summary, "loss_merged", "heldout_loss_last"))),
    ("held-out loss, best island alone", _loss(summary.get("loss_best_island_alone"))),
    ("time (min:s)", _with(summary.get("seconds"), clock_time)),
    ("tokens merged", _tokens(summary)),
    ("commits", _with(summary.get("commits"), str)),
    ("updates rejected", _with(summary.get("rejected_updates"), str)),
    ("faults and restarts", f"{summary.get('faults', 0)} and {summary.get('restarts', 0)}"),
    (
      "longest pause of a survivor around a kill",
      _with(summary.get("survivor_max_gap_ratio"), lambda r: f"{r:.2f} × its median step"),
    ),
    ("goodput, without the first start-up", _share(summary.get("goodput_training"))),
    ("goodput", _share(summary.get("goodput"))),
    ("where the rest of the chip time went", _causes(summary)),
    ("uptime", _share(summary.get("uptime"))),
    ("time learners were blocked", _with(summary.get("blocked_seconds"), lambda s: f"{s:.3g} s")),
    ("bytes sent", _with(summary.get("bytes_sent"), lambda b: f"{compact(b)}B")),
    ("how the run ended", summary.get("finished") or "it did not end in good order"),
  ]
  return [(name, value) for name, value in rows if value]


def page(summary: Mapping[str, Any]) -> str:
  """The static page: no scripts, nothing from elsewhere, pictures by relative name."""
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
  body = f"<h1>{name}</h1><table>{numbers}</table>{_learner_table(summary)}{pictures}{text}"
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
  rows = "".join(
    f"<tr><td>{html.escape(m)}</td><td>{each['lives']}</td><td>{each['steps']}</td>"
    f"<td>{compact(each['tokens'])}</td><td>{_loss(each['loss']) or '–'}</td>"
    f"<td>{_share(alive.get(m)) or '–'}</td>"
    f"<td>{_with(shares.get(m), lambda share: f'{share:.0%}') or '–'}</td>"
    f"<td>{_with(each['median_step_gap_seconds'], lambda s: f'{1000 * s:.0f} ms') or '–'}</td></tr>"
    for m, each in learners.items()
  )
  names = ("island", "lives", "steps", "tokens", "last loss")
  names += ("time training", "commits joined", "median step")
  header = "".join(f"<th>{name}</th>" for name in names)
  return f'<table class="wide"><tr>{header}</tr>{rows}</table>'


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
