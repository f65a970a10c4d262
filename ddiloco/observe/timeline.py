"""The report's timeline: what every island and shard was doing when, with the faults marked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddiloco.observe.events import Event, parse_role
from ddiloco.observe.history import Span, kills, role_spans
from ddiloco.observe.plots import new_figure, say_empty
from ddiloco.observe.style import GLOBAL_MODEL, MUTED, island_colour
from ddiloco.observe.view import role_name

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

ROW_INCHES = 0.42
BAR_HEIGHT = 0.62
MARKS = {  # marker, face colour, legend
  "kill": ("X", "#111111", "fault: kill"),
  "fault": ("v", "#FFFFFF", "other fault"),
  "exit": ("x", "#111111", "crash"),
  "restart": ("^", "#FFFFFF", "restart"),
  "merged": ("*", "#FFD21F", "first merge after rejoining"),
}
_SHARD_COLOUR = "#7C8794"


def timeline_figure(events: Sequence[Event]) -> Figure:
  """Islands and shards as rows over time, coloured by state; faults and rejoins are marked."""
  spans = role_spans(events)
  order = sorted(spans, key=lambda role: (role.startswith("syncer"), parse_role(role)[1]))
  figure, (axes,) = new_figure(1.8 + ROW_INCHES * max(2, len(order)))
  axes.set_title("Islands and shards over time")
  if not order:
    say_empty(axes, "no learner and no shard in the log")
    return figure
  for row, role in enumerate(order):
    for span in spans[role]:
      _bar(axes, row, role, span)
    _commit_marks(axes, row, role, events)
  used = _marks(axes, events, {role: row for row, role in enumerate(order)})
  states = {span.state for each in spans.values() for span in each}
  axes.set_yticks(range(len(order)), [role_name(role) for role in order])
  axes.set_ylim(max(2, len(order)) - 0.45, -0.55)
  axes.set_xlim(0, max(1e-3, events[-1]["time"]))
  axes.set_xlabel("seconds since the run started")
  axes.tick_params(axis="y", length=0)
  axes.grid(False, axis="y")
  axes.spines["left"].set_visible(False)
  _legend(axes, states, used)
  return figure


def _bar_style(state: str, colour: str) -> dict:
  if state == "running":
    return {"facecolor": colour, "edgecolor": "none"}
  if state == "joining":
    return {"facecolor": colour, "edgecolor": "none", "alpha": 0.3}
  hatch = {"stalled": "////", "quarantined": "xxxx"}.get(state)
  if hatch:
    return {"facecolor": "white", "edgecolor": colour, "hatch": hatch, "lw": 0.8}
  return {"facecolor": "#F1F1F1", "edgecolor": MUTED, "lw": 0.8, "ls": (0, (3, 2))}  # down


def _bar(axes: Axes, row: int, role: str, span: Span) -> None:
  kind, number = parse_role(role)
  colour = island_colour(number) if kind == "learner" else _SHARD_COLOUR
  place = {"left": span.start, "height": BAR_HEIGHT}
  axes.barh(row, span.end - span.start, **place, **_bar_style(span.state, colour))


def _commit_marks(axes: Axes, row: int, role: str, events: Sequence[Event]) -> None:
  """On a shard's row, a fine line per commit."""
  times = [e["time"] for e in events if e["kind"] == "commit" and e["role"] == role]
  width = min(1.0, max(0.25, 200 / max(1, len(times))))
  axes.vlines(times, row - BAR_HEIGHT / 2, row + BAR_HEIGHT / 2, color="white", lw=width, alpha=0.8)


def _marks(axes: Axes, events: Sequence[Event], rows: dict[str, int]) -> list[str]:
  """Draws the marks and returns which kinds there were, for the legend."""
  places: dict[str, list[tuple[float, int]]] = {name: [] for name in MARKS}
  planned: list[tuple[str, float]] = []
  finished = math.inf
  for event in events:
    kind = event["kind"]
    finished = event["time"] if kind in ("run_finished", "stopped") else finished
    if kind not in ("fault", "exit", "restart"):
      continue
    target = "-".join(map(str, parse_role(event["target"])))
    if kind == "fault" and event["action"] == "kill":
      kind = "kill"
      planned.append((target, event["time"]))
    due = any(role == target and 0 <= event["time"] - at < 2.0 for role, at in planned)
    over = event["time"] >= finished
    if target in rows and not (kind == "exit" and (due or over)):
      places[kind].append((event["time"], rows[target]))
  for kill in kills(events):
    role = f"learner-{kill.learner}"
    if math.isfinite(kill.merged) and role in rows:
      places["merged"].append((kill.merged, rows[role]))
  for name, where in places.items():
    if where:
      marker, face, _ = MARKS[name]
      edge = {} if marker == "x" else {"edgecolor": GLOBAL_MODEL}
      size = 190 if marker == "*" else 90
      options = {"marker": marker, "s": size, "color": face, "lw": 1.2, "zorder": 6, **edge}
      axes.scatter(*zip(*where), clip_on=False, **options)
  return [name for name, where in places.items() if where]


def _legend(axes: Axes, states: set[str], marks: Sequence[str]) -> None:
  from matplotlib.lines import Line2D
  from matplotlib.patches import Patch

  names = [s for s in ("joining", "running", "stalled", "quarantined", "down") if s in states]
  handles: list = [Patch(label=name, **_bar_style(name, island_colour(0))) for name in names]
  for name in marks:
    marker, face, label = MARKS[name]
    look = {"marker": marker, "markerfacecolor": face, "markeredgecolor": GLOBAL_MODEL}
    handles.append(Line2D([], [], ls="", ms=12 if marker == "*" else 8, label=label, **look))
  columns = len(handles) if len(handles) <= 6 else -(-len(handles) // 2)
  axes.figure.legend(handles=handles, loc="outside lower center", ncols=columns)
