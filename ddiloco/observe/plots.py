"""The report's pictures: one function each, from a run's state to a matplotlib figure.

matplotlib is imported on first use (training never pays for it). Only its object API with the Agg
canvas is used, so that no window system and no global state is touched.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ddiloco.observe.history import MOST_CURVES, Series, Thinned
from ddiloco.observe.islands import LogEvent, role_name
from ddiloco.observe.run_state import RunState
from ddiloco.observe.style import (
  FAINT,
  GLOBAL_MODEL,
  MUTED,
  island_colour,
  loss_text,
  percent,
  shard_colour,
)
from ddiloco.protocol.events import Commit, parse_role

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

DPI = 144
WIDTH_INCHES = 10.0
_STYLE: Mapping[str, Any] = {
  "font.family": "DejaVu Sans",
  "font.size": 10.5,
  "axes.titlesize": 12,
  "axes.titleweight": "bold",
  "axes.titlelocation": "left",
  "axes.titlepad": 10,
  "axes.spines.top": False,
  "axes.spines.right": False,
  "axes.edgecolor": MUTED,
  "axes.labelcolor": "#333333",
  "axes.grid": True,
  "axes.axisbelow": True,
  "grid.color": "#ECECEC",
  "xtick.color": "#555555",
  "ytick.color": "#555555",
  "legend.frameon": False,
  "legend.fontsize": 10,
  "hatch.linewidth": 0.7,
}


@contextmanager
def styled() -> Iterator[None]:
  """Every figure of the report is made in this context: the report's style, no other settings."""
  import matplotlib

  with matplotlib.rc_context():
    matplotlib.rcdefaults()
    matplotlib.rcParams.update(_STYLE)
    yield


def new_figure(height_inches: float, rows: int = 1, **options: Any) -> tuple[Figure, list[Axes]]:
  """A figure of the report's width with `rows` panels, one below the other."""
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  figure = Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained")
  FigureCanvasAgg(figure)
  axes = figure.subplots(rows, 1, squeeze=False, **options)[:, 0]
  return figure, list(axes)


def save(figure: Figure, path: Path) -> None:
  """Writes the PNG; without `savefig`, which draws everything twice for the same picture."""
  figure.set_dpi(DPI)
  figure.set_facecolor("white")
  figure.canvas.print_png(path)


def say_empty(axes: Axes, text: str) -> None:
  """A panel without data says so instead of showing empty axes."""
  axes.set_axis_off()
  axes.text(0.5, 0.5, text, ha="center", va="center", color=MUTED, transform=axes.transAxes)


def say_left_out(axes: Axes, *texts: str) -> None:
  """Writes, to the right of the title, what a picture of a long run leaves out."""
  place = {"transform": axes.transAxes, "ha": "right", "va": "bottom", "color": MUTED}
  axes.text(1.0, 1.02, "; ".join(filter(None, texts)), fontsize=8.5, **place)


def every(thinned: Thinned, what: str) -> str:
  """Says in words which share of the items is drawn; "" if all are."""
  return f"of {thinned.count:,} {what} 1 in {thinned.stride}" if thinned.stride > 1 else ""


MOST_NAMES = 24  # in a legend
TALLEST_INCHES = 40.0  # of all rows of a panel: thousands would take a GB and no program shows them
NAME_INCHES = 0.2  # of a row's name


def _unnamed(lines: Collection[Any]) -> str:
  """Says that the legend does not name these lines; "" if they are few enough."""
  return f"{len(lines):,} lines without their names" if len(lines) > MOST_NAMES else ""


def _rows(count: int, row_inches: float) -> tuple[float, int]:
  """(Inches of so many rows together, 1 in how many has its name): thousands of rows are lower."""
  inches = min(TALLEST_INCHES, count * row_inches)
  return inches, math.ceil(count * NAME_INCHES / inches)


def loss_figure(run: RunState, alone: float | None = None) -> Figure:
  """Training loss of every island (smoothed) and held-out loss of the global model against tokens.

  The x axis counts the tokens that all islands together have trained; the global model's points
  stand at the tokens merged into it. `alone`: held-out loss of the best island that trained alone
  for as many steps, drawn as a horizontal line.
  """
  figure, (axes,) = new_figure(5.0)
  axes.set_title("Loss against tokens")
  drawn: list[float] = []
  for learner in sorted(run.islands):
    drawn += _island_curve(axes, learner, run.curves.loss, not _unnamed(run.islands))
  points = run.curves.evaluations.items
  if points:
    x, y = np.array([(e.merged_tokens, e.loss) for e in points], float).T
    back = np.flatnonzero(np.diff(x) < 0) + 1  # here the run went on from a snapshot
    options = {"color": GLOBAL_MODEL, "lw": 2.0, "marker": "o", "ms": 5, "zorder": 5}
    axes.plot(*np.insert((x, y), back, np.nan, 1), label="global model, held-out", **options)
    drawn += list(y)
    place = {"xytext": (8, -3), "textcoords": "offset points", "annotation_clip": False}
    place["bbox"] = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
    axes.annotate(loss_text(y[-1]), (x[-1], y[-1]), color=GLOBAL_MODEL, weight="bold", **place)
  if not drawn:
    say_empty(axes, "no steps and no evaluations in the log")
    return figure
  say_left_out(axes, every(run.curves.evaluations, "evaluations"), _unnamed(run.islands))
  if alone is not None and math.isfinite(alone):
    label = f"best island alone, held-out ({loss_text(alone)})"
    axes.axhline(alone, color=GLOBAL_MODEL, ls=(0, (5, 3)), lw=1.3, label=label)
    drawn.append(alone)
  _loss_axes(axes, drawn, run.loss_unit)
  return figure


def _island_curve(axes: Axes, learner: int, loss: Series, named: bool) -> list[float]:
  """One line per life of the learner, so that nothing is drawn while it was down."""
  lives = [loss.means(f"{learner} {life}") for life in range(MOST_CURVES + 1)]
  lives = [[(i, y) for i, y in enumerate(means) if y is not None] for means in lives]
  lives = [life for life in lives if life]
  drawn: list[float] = []
  half_width = max(1, sum(map(len, lives)) // 80)
  for number, life in enumerate(lives):
    bins, losses = np.array(life, float).T
    smooth = _smooth(losses, half_width)
    label = f"island {learner}" if named and number == 0 else None
    tokens = (bins + 0.5) * loss.width_seconds
    axes.plot(tokens, smooth, lw=1.6, color=island_colour(learner), label=label, alpha=0.9)
    drawn += list(smooth)
  return drawn


def _loss_axes(axes: Axes, drawn: list[float], unit: str) -> None:
  from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullLocator

  low, high = min(drawn), max(drawn)
  if low > 0:
    axes.set_yscale("log")  # the long flat end is the interesting part
    axes.set_ylim(low * 0.96, high * 1.04)
    subs = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8) if high < 10 * low else (1, 1.5, 2, 3, 4, 6)
    wide = high > 1.5 * low
    axes.yaxis.set_major_locator(LogLocator(subs=subs) if wide else MaxNLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
  else:  # a model of one's own may have such a loss: a log scale cannot show it
    margin = 0.04 * (high - low) or 1.0
    axes.set_ylim(low - margin, high + margin)
  axes.xaxis.set_major_formatter(EngFormatter(sep=""))
  axes.set_xlim(0, max(1.0, axes.dataLim.x1 * 1.07))
  axes.set_xlabel("tokens trained by all islands; of the global model, merged into it")
  said = ", ".join(filter(None, (unit, "log scale" if low > 0 else "")))
  axes.set_ylabel(f"loss ({said})" if said else "loss")
  if axes.get_legend_handles_labels()[0]:
    axes.legend(loc="upper right", ncols=2 if len(axes.get_lines()) > 6 else 1)


def _smooth(values: np.ndarray, half: int) -> np.ndarray:
  """A centred moving average over 2 * half + 1 points; shorter at the ends."""
  kernel = np.ones(min(2 * half + 1, len(values)))
  return np.convolve(values, kernel, "same") / np.convolve(np.ones(len(values)), kernel, "same")


def participation_figure(run: RunState) -> Figure:
  """The islands that took part in each commit: a row of ticks per island; below, over time, the
  mean cosines of two pushes."""
  learners = sorted(run.islands)
  commits = run.curves.commits.items
  inches, every_row = _rows(max(1, len(learners)), 0.36)
  ratios = [0.55 + inches, 1.4]
  figure, (rows, agreement) = new_figure(
    1.0 + sum(ratios), rows=2, sharex=bool(commits), height_ratios=ratios
  )
  rows.set_title("Participation in every commit")
  if not commits:
    say_empty(rows, "no commits in the log")
    agreement.set_axis_off()
    return figure
  say_left_out(rows, every(run.curves.commits, "commits"))
  _commit_ticks(rows, learners, commits)
  named = range(0, len(learners), every_row)
  for row in named:
    share = run.islands[learners[row]].commits / run.commits
    place = {"va": "center", "transform": rows.get_yaxis_transform(), "color": "#555555"}
    rows.text(1.01, row, percent(share), **place)
  rows.set_yticks(named, [f"island {learners[row]}" for row in named])
  rows.set_ylim(len(learners) - 0.4, -0.6)
  rows.grid(False)
  rows.tick_params(length=0, labelbottom=False)
  rows.spines[["left", "bottom"]].set_visible(False)
  place = {"ha": "right", "va": "top", "color": "#555555", "transform": rows.transAxes}
  rows.text(1.055, 0.0, "share of all commits", **place)
  _cosine_lines(agreement, run.curves.page)
  _time_axis(agreement, run.time)
  return figure


def _time_axis(axes: Axes, end: float) -> None:
  """The time from a run's start to its end; that of a long run in hours or days."""
  from matplotlib.ticker import MaxNLocator

  end, units = max(1e-3, end), {"days": 86400, "hours": 3600}
  unit, seconds = next((each for each in units.items() if end > 3 * each[1]), ("seconds", 1))
  every = MaxNLocator(10, steps=[1, 2, 5, 10]).tick_values(0, end / seconds)
  ticks = [tick for tick in every if tick * seconds <= end]
  axes.set_xticks([tick * seconds for tick in ticks], [f"{tick:g}" for tick in ticks])
  axes.set_xlim(0, end)
  axes.set_xlabel(f"{unit} since the run started")


def _cosine_lines(axes: Axes, curves: Series) -> None:
  """Mean cosines over time: of two islands' pushes, and of a fragment's successive merges."""
  merges = "a fragment's merge and the one before"
  lines = ("agreement", "two islands' pushes", GLOBAL_MODEL), ("rho", merges, MUTED)
  drawn = 0
  for name, label, color in lines:
    known = [(i, value) for i, value in enumerate(curves.means(name)) if value is not None]
    if known:
      bins, values = np.array(known, float).T
      apart = np.diff(bins)
      gaps = np.flatnonzero(apart > max(7, 3 * np.median([1, *apart]))) + 1  # as on the page
      line = np.insert(((bins + 0.5) * curves.width_seconds, values), gaps, np.nan, 1)
      axes.plot(*line, color=color, lw=1.4, label=label)
      drawn += 1
  if not drawn:
    say_empty(axes, "no commit had two pushes that could be compared")
    axes.set_axis_on()  # the ticks above have their times here
    return axes.set_yticks([])
  axes.legend(loc="lower right", bbox_to_anchor=(1.0, 0.96), ncols=2, frameon=False)
  axes.axhline(0.0, color=MUTED, lw=0.8)
  axes.set_ylabel("mean\ncosine")


def _commit_ticks(axes: Axes, learners: Sequence[int], commits: Sequence[Commit]) -> None:
  """A row for each learner; ticks that look alike are drawn together, since they may be 100,000."""
  from matplotlib.colors import to_rgba_array

  row = {learner: i for i, learner in enumerate(learners)}
  taken, rejected = np.zeros((2, len(learners), len(commits)), bool)
  for i, commit in enumerate(commits):
    taken[[row[m] for m in commit.weights], i] = True
    rejected[[row[m] for m in commit.rejected if m in row], i] = True
  times = np.array([commit.time for commit in commits])
  colours = to_rgba_array([island_colour(learner) for learner in learners])
  width = min(2.5, max(0.6, 420 / len(commits)))
  at, which = np.nonzero(~(taken | rejected))
  axes.vlines(times[which], at - 0.12, at + 0.12, color=FAINT, lw=width)
  at, which = np.nonzero(taken)
  axes.vlines(times[which], at - 0.36, at + 0.36, color=colours[at], lw=width)
  at, which = np.nonzero(rejected)
  axes.scatter(times[which], at, marker="x", color=GLOBAL_MODEL, s=42, lw=1.6, zorder=4)


def traffic_figure(run: RunState) -> Figure:
  """Bytes on the wire over time, by role."""
  from matplotlib.ticker import EngFormatter

  # By role, (time, bytes sent so far).
  series = {role: points.items for role, points in sorted(run.traffic.sent.items())}
  series = {role: points for role, points in series.items() if points[-1][1] > 0}
  figure, (axes,) = new_figure(3.8)
  axes.set_title("Bytes on the wire")
  say_left_out(axes, _unnamed(series))
  if not series:
    say_empty(axes, "no traffic in the log")
    return figure
  shards = sum(role.startswith("syncer") for role in series)
  for role, points in series.items():
    kind, number = parse_role(role)
    learner = kind == "learner"
    colour = island_colour(number) if learner else shard_colour(max(0, number), shards)
    dashes = (0, (4, 1.5)) if kind == "syncer" else (0, (1, 1))  # dotted: the evaluator
    style = {"lw": 1.7, "color": colour, "ls": "-" if learner else dashes}
    axes.plot(*zip((0.0, 0), *points), label=role_name(role), **style)
  axes.yaxis.set_major_formatter(EngFormatter("B"))
  axes.set_ylabel("sent so far")
  axes.set_ylim(bottom=0)
  _time_axis(axes, run.time)
  if not _unnamed(series):
    axes.legend(loc="upper left", ncols=2 if len(series) > 4 else 1)
  return figure


# --- The report's timeline: the states of every island and shard over time, with faults marked

ROW_INCHES = 0.42
BAR_HEIGHT = 0.62
MARKS = {  # marker, face colour, legend
  "kill": ("X", "#111111", "fault: kill"),
  "fault": ("v", "#FFFFFF", "fault other than a kill"),
  "exit": ("x", "#111111", "crash"),
  "hang": ("d", "#D55E00", "hung: stacks are in the log"),
  "restart": ("^", "#FFFFFF", "restart"),
  "merged": ("*", "#FFD21F", "first merge after rejoining"),
}
_SHARD_COLOUR = "#7C8794"


def timeline_figure(run: RunState) -> Figure:
  """Islands and shards as rows over time, coloured by state; faults and rejoins are marked."""
  end = run.time
  spans = run.spans(end, end)
  order = sorted(spans, key=lambda role: (role.startswith("syncer"), parse_role(role)[1]))
  inches, every_row = _rows(max(2, len(order)), ROW_INCHES)
  figure, (axes,) = new_figure(1.8 + inches)
  axes.set_title("Islands and shards over time")
  if not order:
    say_empty(axes, "no learner and no shard in the log")
    return figure
  _bars(axes, [(role, spans[role]) for role in order])
  used = _marks(axes, run.marks, {role: row for row, role in enumerate(order)})
  _left_out(axes, run)
  axes.set_yticks(range(0, len(order), every_row), list(map(role_name, order[::every_row])))
  axes.set_ylim(max(2, len(order)) - 0.45, -0.55)
  _time_axis(axes, end)
  axes.tick_params(axis="y", length=0)
  axes.grid(False, axis="y")
  axes.spines["left"].set_visible(False)
  _legend(axes, {state for each in spans.values() for _, _, state in each}, used)
  return figure


def _left_out(axes: Axes, run: RunState) -> None:
  drawn, absorbed = len(run.marks), run.absorbed
  count = run.mark_counts.total()
  marks = f"the newest {drawn} of {count:,} marks" if count > drawn else ""
  spans = f"{absorbed:,} short spans are part of others" if absorbed else ""
  say_left_out(axes, marks, spans)


def _bar_style(state: str, colour: str) -> dict:
  if state == "running":
    return {"facecolor": colour, "edgecolor": "none"}
  if state == "joining":
    return {"facecolor": colour, "edgecolor": "none", "alpha": 0.3}
  hatch = {"stalled": "////", "quarantined": "xxxx"}.get(state)
  if hatch:
    return {"facecolor": "white", "edgecolor": colour, "hatch": hatch, "lw": 0.8}
  return {"facecolor": "#F1F1F1", "edgecolor": MUTED, "lw": 0.8, "ls": (0, (3, 2))}  # down


def _bars(axes: Axes, rows: Iterable[tuple[str, Sequence[Sequence[Any]]]]) -> None:
  """Draws the spans of each role; those that look alike together, since they may be 100,000."""
  from matplotlib.collections import PolyCollection

  alike = defaultdict(list)
  for row, (role, spans) in enumerate(rows):
    kind, number = parse_role(role)
    colour = island_colour(number) if kind == "learner" else _SHARD_COLOUR
    low, high = row - BAR_HEIGHT / 2, row + BAR_HEIGHT / 2
    for a, b, state in spans:
      alike[state, colour].append([(a, low), (a, high), (b, high), (b, low)])
  for look, corners in alike.items():
    axes.add_collection(PolyCollection(corners, **_bar_style(*look)))


def _marks(axes: Axes, marks: Iterable[LogEvent], rows: dict[str, int]) -> list[str]:
  """Draws the marks and returns their kinds, for the legend."""
  places: dict[str, list[tuple[float, int]]] = {name: [] for name in MARKS}
  for each in marks:
    if each.role in rows:  # by a clock that is behind, a mark may be before the run's start
      places[each.mark].append((max(0.0, each.time), rows[each.role]))
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
