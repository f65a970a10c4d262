"""How long every island's steps took over time, beside its own median: the heat map. PURE.

A row is an island, a cell a stretch of time. A cell says the mean step time in it, or what the
island did instead of making steps.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ddiloco.observe.series import FIRST_WIDTH_SECONDS, Median, Series
from ddiloco.protocol.events import Step

MOST_BINS = 240
LEAST_BINS = 60
MOST_CELLS = 100_000  # of all islands: of five hundred 200 each
LEVELS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"  # of step times, each a fifth of an octave longer
PER_OCTAVE = 5
LEAST_RATIO = 0.5  # of level A, to the median; Z is 16 times the median
WAITING = "w"  # at least half of the time between two steps went into waiting for a shard
STATES = {"joining": "j", "stalled": "s", "quarantined": "q", "down": "d"}
ABSENT = "."


class Heat:
  """Takes an island's steps; its size depends on the number of islands alone."""

  def __init__(self) -> None:
    self._cells = Series(MOST_BINS, FIRST_WIDTH_SECONDS)  # "M": seconds; "M w": of these, waiting
    self._medians: dict[int, Median] = defaultdict(Median)

  def limit(self, islands: int) -> None:
    """The more islands there are, the longer stretches of time are."""
    self._cells.keep_at_most(max(LEAST_BINS, MOST_CELLS // max(1, islands)))

  def add(self, event: Step, m: int) -> None:
    """A step of island `m`; the first of an incarnation says too little of what is usual."""
    waited = min(event.blocked_seconds, event.gap_seconds)
    seconds = event.gap_seconds - waited
    if event.step > 1 and 0 <= seconds < math.inf:
      self._medians[m].add(seconds)
      self._cells.add(f"{m}", event.time, seconds)
      self._cells.add(f"{m} w", event.time, waited)

  def as_json(
    self, spans: Mapping[str, Sequence[Sequence[Any]]], islands: Sequence[int], now: float
  ) -> dict[str, Any]:
    """By island a text with a letter for each stretch, up to `now`.

    `spans`: by role, [start, end, state], of `observe.tracks`.
    """
    width = self._cells.width_seconds
    bins = min(MOST_BINS, math.ceil(max(0.0, now) / width))
    return {
      "width_seconds": width,
      "levels": LEVELS,
      "least_ratio": LEAST_RATIO,
      "per_octave": PER_OCTAVE,
      "median_seconds": {str(m): _rounded(self._medians[m].value) for m in islands},
      "rows": {str(m): self._row(m, spans.get(f"learner-{m}", ()), bins) for m in islands},
    }

  def _row(self, m: int, spans: Sequence[Sequence[Any]], bins: int) -> str:
    """A stretch in which no step ended has that of the step that was under way."""
    width, median = self._cells.width_seconds, self._medians[m].value
    seconds, counts = self._cells.sums(f"{m}"), self._cells.counts(f"{m}")
    waited = self._cells.sums(f"{m} w")
    row, states, under_way = [ABSENT] * bins, _states(spans, width, bins), ""
    for i in reversed(range(bins)):
      if i < len(counts) and counts[i]:
        under_way = level(seconds[i] / counts[i], median)
        under_way = WAITING if waited[i] > seconds[i] else under_way
        row[i] = under_way
      else:
        row[i] = (under_way or ABSENT) if states[i] == "running" else STATES.get(states[i], ABSENT)
      if states[i] != "running":
        under_way = ""
    return "".join(row)


def level(seconds: float, median: float) -> str:
  """The letter of a step that takes so long."""
  if not (seconds > 0 and median > 0):
    return LEVELS[0]
  octaves = math.log2(seconds / median / LEAST_RATIO)
  return LEVELS[min(len(LEVELS) - 1, max(0, round(octaves * PER_OCTAVE)))]


def _states(spans: Sequence[Sequence[Any]], width: float, bins: int) -> list[str]:
  """What the island did in the middle of each stretch."""
  found, at = [""] * bins, 0
  for i in range(bins):
    middle = (i + 0.5) * width
    while at < len(spans) and spans[at][1] < middle:
      at += 1
    if at < len(spans) and spans[at][0] <= middle:
      found[i] = spans[at][2]
  return found


def _rounded(value: float) -> float | None:
  return round(value, 6) if math.isfinite(value) else None
