"""Curves of a run that stay small however long it lasts. PURE: nothing here reads a clock."""

from __future__ import annotations

import math

FIRST_WIDTH_SECONDS = 0.25


class Series:
  """Values over time by name, averaged in bins that all names share.

  When a time does not fit into `most` bins any more, all bins become twice as wide: memory and what
  is sent to a page are bounded, and curves on one time axis stay comparable.
  """

  def __init__(self, most: int = 240, width_seconds: float = FIRST_WIDTH_SECONDS):
    self.width_seconds = width_seconds
    self._most = most
    self._sums: dict[str, list[float]] = {}
    self._counts: dict[str, list[int]] = {}

  def add(self, name: str, time: float, value: float = 1.0) -> None:
    """One value at `time` (seconds, finite); what is not finite leaves a gap."""
    if not math.isfinite(value):
      return
    while (bin_ := int(max(0.0, time) / self.width_seconds)) >= self._most:
      self._widen()
    sums, counts = self._sums.setdefault(name, []), self._counts.setdefault(name, [])
    missing = bin_ + 1 - len(sums)
    sums.extend([0.0] * missing)
    counts.extend([0] * missing)
    sums[bin_] += value
    counts[bin_] += 1

  def means(self, name: str, digits: int = 4) -> list[float | None]:
    """By bin, the mean of its values, None where it has none; a bin's time is its middle."""
    pairs = zip(self._sums.get(name, ()), self._counts.get(name, ()))
    return [round(total / count, digits) if count else None for total, count in pairs]

  def counts(self, name: str) -> list[int]:
    """By bin, how many values it has."""
    return list(self._counts.get(name, ()))

  def keep_at_most(self, most: int) -> None:
    """Fewer bins from now on: the more curves there are, the coarser each may be."""
    self._most = min(self._most, max(1, most))
    while any(len(counts) > self._most for counts in self._counts.values()):
      self._widen()

  def _widen(self) -> None:
    self.width_seconds *= 2
    self._sums = {name: _pairs(each) for name, each in self._sums.items()}
    self._counts = {name: _pairs(each) for name, each in self._counts.items()}


def _pairs(values: list) -> list:
  """The sums of neighbours, two by two."""
  return [sum(values[i : i + 2]) for i in range(0, len(values), 2)]
