"""The report's pictures: one function each, from events to a matplotlib figure.

matplotlib is imported on first use (training never pays for it) and only through its object API
with the Agg canvas, so that no window system and no global state is touched.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ddiloco.observe.events import Event, parse_role
from ddiloco.observe.history import learner_steps
from ddiloco.observe.style import FAINT, GLOBAL_MODEL, MUTED, island_colour, shard_colour

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
  """Every figure of the report is made inside this: its look, and nobody else's settings."""
  import matplotlib

  with matplotlib.rc_context():
    matplotlib.rcdefaults()
    matplotlib.rcParams.update(_STYLE)
    yield


def new_figure(height_inches: float, rows: int = 1, **options: Any) -> tuple[Figure, list[Axes]]:
  """A figure of the report's width with `rows` panels below each other."""
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  figure = Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained")
  FigureCanvasAgg(figure)
  axes = figure.subplots(rows, 1, squeeze=False, **options)[:, 0]
  return figure, list(axes)


def save(figure: Figure, path: Path) -> None:
  """Writes the PNG."""
  figure.savefig(path, dpi=DPI, facecolor="white")


def say_empty(axes: Axes, text: str) -> None:
  """A panel without data says so instead of showing empty axes."""
  axes.set_axis_off()
  axes.text(0.5, 0.5, text, ha="center", va="center", color=MUTED, transform=axes.transAxes)


def loss_figure(events: Sequence[Event], alone: float | None = None) -> Figure:
  """Training loss of every island (smoothed) and held-out loss of the global model against tokens.

  The x axis counts the tokens all islands have trained, so a curve is where the run was, and the
  global model's points stand at the tokens merged into it. `alone`: held-out loss of the best
  island that trained alone on as many of its own steps, a horizontal line.
  """
  figure, (axes,) = new_figure(5.0)
  axes.set_title("Loss against tokens")
  tokens_at = _cumulative_tokens(events)
  drawn: list[float] = []
  for learner, steps in learner_steps(events).items():
    drawn += _island_curve(axes, learner, steps, tokens_at)
  points = [
    (event["merged_tokens"], event["loss"])
    for event in events
    if event["kind"] == "evaluation" and math.isfinite(event["loss"])
  ]
  if points:
    x, y = zip(*points)
    options = {"color": GLOBAL_MODEL, "lw": 2.0, "marker": "o", "ms": 5, "zorder": 5}
    axes.plot(x, y, label="global model, held-out", **options)
    drawn += y
    last = f"{y[-1]:.3f}"
    place = {"xytext": (8, -3), "textcoords": "offset points", "annotation_clip": False}
    axes.annotate(last, (x[-1], y[-1]), color=GLOBAL_MODEL, weight="bold", **place)
  if not drawn:
    say_empty(axes, "no steps and no evaluations in the log")
    return figure
  if alone is not None and math.isfinite(alone):
    label = f"best island alone, held-out ({alone:.3f})"
    axes.axhline(alone, color=GLOBAL_MODEL, ls=(0, (5, 3)), lw=1.3, label=label)
    drawn.append(alone)
  _loss_axes(axes, drawn)
  return figure


def _island_curve(
  axes: Axes, learner: int, steps: Sequence[Event], tokens_at: Mapping[int, int]
) -> list[float]:
  """One line per life of the learner, so that nothing is drawn while it was down."""
  lives: dict[int, list[tuple[int, float]]] = defaultdict(list)
  for step in steps:
    loss = step.get("loss", math.nan)
    if math.isfinite(loss):
      lives[step["incarnation"]].append((tokens_at[id(step)], loss))
  drawn: list[float] = []
  half_width = max(1, len(steps) // 80)
  for number, life in enumerate(lives.values()):
    tokens, losses = np.array(life, float).T
    smooth = _smooth(losses, half_width)
    label = f"island {learner}" if number == 0 else None
    axes.plot(tokens, smooth, lw=1.6, color=island_colour(learner), label=label, alpha=0.9)
    drawn += list(smooth)
  return drawn


def _loss_axes(axes: Axes, drawn: list[float]) -> None:
  from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

  axes.set_yscale("log")  # the long flat end is the interesting part
  axes.set_ylim(min(drawn) * 0.96, max(drawn) * 1.04)
  wide = max(drawn) / min(drawn) > 1.5
  subs = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8) if wide else tuple(1 + k / 20 for k in range(180))
  axes.yaxis.set_major_locator(LogLocator(subs=subs))
  axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
  axes.yaxis.set_minor_formatter(NullFormatter())
  axes.yaxis.set_tick_params(which="minor", length=0)
  axes.xaxis.set_major_formatter(FuncFormatter(_tokens_tick))
  axes.set_xlim(0, axes.dataLim.x1 * 1.07)
  axes.set_xlabel("tokens trained by all islands / merged into the global model")
  axes.set_ylabel("loss (nats per token, log scale)")
  axes.legend(loc="upper right", ncols=2 if len(axes.get_lines()) > 6 else 1)


def _tokens_tick(value: float, _: int) -> str:
  for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
    if value >= unit:
      return f"{value / unit:g}{name}"
  return f"{value:g}"


def _cumulative_tokens(events: Sequence[Event]) -> dict[int, int]:
  """Tokens all islands have trained up to and including each step event (by identity)."""
  total = 0
  result = {}
  for event in events:
    if event["kind"] == "step":
      total += event["tokens"]
      result[id(event)] = total
  return result


def _smooth(values: np.ndarray, half: int) -> np.ndarray:
  """A centred moving average over 2 * half + 1 points; shorter at the ends."""
  sums = np.concatenate([[0.0], np.cumsum(values)])
  index = np.arange(len(values))
  low = np.maximum(0, index - half)
  high = np.minimum(len(values), index + half + 1)
  return (sums[high] - sums[low]) / (high - low)


def participation_figure(events: Sequence[Event]) -> Figure:
  """Who took part in each commit: a row of ticks per island; below, the merge weights over time."""
  commits = [event for event in events if event["kind"] == "commit"]
  names = {int(m) for each in commits for m in (*each["participants"], *each["missing"])}
  names |= {int(m) for each in commits for m in each["rejected"]} | set(learner_steps(events))
  learners = sorted(m for m in names if m >= 0)
  height = 3.6 + 0.36 * max(1, len(learners))
  ratios = [0.55 + 0.36 * max(1, len(learners)), 2.2]
  figure, (rows, shares) = new_figure(
    height, rows=2, sharex=bool(commits), gridspec_kw={"height_ratios": ratios}
  )
  rows.set_title("Participation in every commit")
  if not commits:
    say_empty(rows, "no commits in the log")
    shares.set_axis_off()
    return figure
  for row, learner in enumerate(learners):
    _commit_ticks(rows, row, learner, commits)
  rows.set_yticks(range(len(learners)), [f"island {m}" for m in learners])
  rows.set_ylim(len(learners) - 0.4, -0.6)
  rows.grid(False)
  rows.tick_params(axis="y", length=0)
  rows.tick_params(axis="x", labelbottom=False)
  rows.tick_params(axis="x", length=0)
  rows.spines[["left", "bottom"]].set_visible(False)
  place = {"ha": "right", "color": "#555555", "transform": rows.transAxes}
  rows.text(1.055, 1.03, "share of all commits", **place)
  rows.set_xlim(0, events[-1]["time"])
  _share_bars(shares, learners, commits)
  return figure


def _commit_ticks(axes: Axes, row: int, learner: int, commits: Sequence[Event]) -> None:
  times: dict[str, list[float]] = {"participants": [], "rejected": [], "missing": []}
  for event in commits:
    for part in ("participants", "rejected"):
      if learner in {int(m) for m in event[part]}:
        times[part].append(event["time"])
        break
    else:
      times["missing"].append(event["time"])
  width = min(2.5, max(0.6, 420 / len(commits)))
  axes.vlines(times["missing"], row - 0.12, row + 0.12, color=FAINT, lw=width)
  axes.vlines(times["participants"], row - 0.36, row + 0.36, color=island_colour(learner), lw=width)
  marks = {"marker": "x", "color": GLOBAL_MODEL, "s": 42, "lw": 1.6, "zorder": 4}
  axes.scatter(times["rejected"], [row] * len(times["rejected"]), **marks)
  share = len(times["participants"]) / len(commits)
  place = {"va": "center", "transform": axes.get_yaxis_transform(), "color": "#555555"}
  axes.text(1.01, row, f"{share:.0%}", **place)


def _share_bars(axes: Axes, learners: Sequence[int], commits: Sequence[Event]) -> None:
  """Mean merge weight of each island, stacked, in equal slices of time."""
  times = np.array([event["time"] for event in commits])
  count = int(min(60, max(1, len(commits) // 2)))
  edges = np.linspace(times.min(), times.max() + 1e-6, count + 1)
  slices = np.clip(np.digitize(times, edges) - 1, 0, count - 1)
  weights = np.zeros((len(learners), count))
  for at, event in zip(slices, commits):
    total = sum(event["participants"].values()) or 1.0
    for m, weight in event["participants"].items():
      weights[learners.index(int(m)), at] += weight / total
  sums = weights.sum(axis=0)
  weights = np.divide(weights, sums, out=np.zeros_like(weights), where=sums > 0)
  bottom = np.zeros(count)
  for row, learner in enumerate(learners):
    options = {"align": "edge", "color": island_colour(learner), "edgecolor": "white", "lw": 0.4}
    axes.bar(edges[:-1], weights[row], np.diff(edges), bottom, **options)
    bottom += weights[row]
  axes.set_ylim(0, 1)
  axes.set_yticks([0, 0.25, 0.5, 0.75, 1.0], ["0%", "25%", "50%", "75%", "100%"])
  axes.set_ylabel("weight in the merge")
  axes.set_xlabel("seconds since the run started")
  axes.grid(False, axis="x")


def traffic_figure(events: Sequence[Event]) -> Figure:
  """Bytes on the wire over time: the sum by role, and the rate of all roles together."""
  series = _sent_bytes(events)
  figure, (total, rate) = new_figure(5.6, rows=2, sharex=bool(series), height_ratios=[1.5, 1])
  total.set_title("Bytes on the wire")
  if not series:
    say_empty(total, "no traffic in the log")
    rate.set_axis_off()
    return figure
  top = max(sent[-1] for _, sent in series.values())
  units = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
  unit, name = next((size, name) for size, name in units if top >= size)
  shards = sum(role.startswith("syncer") for role in series)
  for role, (times, sent) in series.items():
    kind, number = parse_role(role)
    learner = kind == "learner"
    colour = island_colour(number) if learner else shard_colour(max(0, number), shards)
    label = {"learner": f"island {number} (pushes)", "syncer": f"shard {number} (publishes)"}
    style = {"lw": 1.7, "color": colour, "ls": "-" if learner else (0, (4, 1.5))}
    total.plot(times, np.array(sent) / unit, label=label.get(kind, role), **style)
  total.set_ylabel(f"sent so far ({name})")
  total.set_ylim(bottom=0)
  total.legend(loc="upper left", ncols=2 if len(series) > 4 else 1)
  _rate_panel(rate, series, events[-1]["time"])
  return figure


def _rate_panel(
  axes: Axes, series: Mapping[str, tuple[list[float], list[int]]], end: float
) -> None:
  count = int(min(90, max(2, end)))
  edges = np.linspace(0.0, max(end, 1e-3), count + 1)
  sent = sum(np.interp(edges, times, values, left=0.0) for times, values in series.values())
  megabytes_per_second = np.diff(sent) / np.diff(edges) / 1e6
  axes.fill_between(edges[:-1], megabytes_per_second, step="post", color=MUTED, alpha=0.45, lw=0)
  mean = sent[-1] / edges[-1] / 1e6
  axes.axhline(mean, color=GLOBAL_MODEL, lw=1.1, ls=(0, (5, 3)))
  place = {"ha": "right", "va": "top", "color": GLOBAL_MODEL, "transform": axes.transAxes}
  axes.text(0.995, 0.98, f"mean {mean:.3g} MB/s", **place)
  axes.set_ylim(0, max(1e-6, megabytes_per_second.max()) * 1.25)
  axes.set_ylabel("all roles (MB/s)")
  axes.set_xlabel("seconds since the run started")
  axes.set_xlim(0, edges[-1])


def _sent_bytes(events: Sequence[Event]) -> dict[str, tuple[list[float], list[int]]]:
  """By role, (times, bytes sent so far); a new life goes on where the last one ended."""
  series: dict[str, tuple[list[float], list[int]]] = {}
  lives: dict[str, dict[int, int]] = defaultdict(dict)
  for event in events:
    role = event["role"]
    times, sent = series.setdefault(role, ([event["time"]], [0]))
    if event["kind"] == "traffic":
      lives[role][event["incarnation"]] = event["sent_bytes"]
      times.append(event["time"])
      sent.append(sum(lives[role].values()))
  return {role: each for role, each in sorted(series.items()) if each[1][-1] > 0}
