"""Which inner steps a learner has made, and which of them are merged where. PURE.

A step is (incarnation, number) of a learner. Learners and their pushes hold consecutive stretches
of a learner's own history, since whatever is merged or discarded is the beginning of it.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import typing

from ddiloco.core.tape import INITIAL, Entry, Problem, round_name


class Stretch(typing.NamedTuple):
  """Steps `first` to `last` of one incarnation."""

  incarnation: int
  first: int
  last: int

  def __str__(self) -> str:
    return f"steps {self.first} to {self.last} of incarnation {self.incarnation}"


class History:
  """All steps of a learner in the order in which its parameters had them."""

  def __init__(self) -> None:
    self._starts: list[tuple[int, int, int]] = []  # place, incarnation and number of first step
    self._tokens = [0]  # of all steps before a place

  def __len__(self) -> int:
    return len(self._tokens) - 1

  def add(self, incarnation: int, step: int, tokens: int) -> None:
    """One more step."""
    start, *last = self._starts[-1] if self._starts else (0, -1, 0)
    if last != [incarnation, step - (len(self) - start)]:
      self._starts.append((len(self), incarnation, step))
    self._tokens.append(self._tokens[-1] + tokens)

  def until(self, place: int) -> History:
    """A copy of the history as it was when it had so many steps."""
    copy = History()
    copy._starts = [start for start in self._starts if start[0] < place]
    copy._tokens = self._tokens[: place + 1]
    return copy

  def tokens(self, begin: int, end: int) -> int:
    """Of the steps at places `begin` to `end` - 1."""
    return self._tokens[end] - self._tokens[begin]

  def stretches(self, begin: int, end: int) -> tuple[Stretch, ...]:
    """The steps at places `begin` to `end` - 1."""
    found = []
    stop = end
    for place, incarnation, step in reversed(self._starts):
      low = max(begin, place)
      if low < stop:
        found.append(Stretch(incarnation, step + low - place, step + stop - 1 - place))
        stop = low
    return tuple(reversed(found))


class Merged:
  """Where the steps of one incarnation went: stretches with the round that merged them."""

  def __init__(self) -> None:
    self._entries: list[tuple[int, int, int]] = []  # first, last, round; by first
    self._tops: list[int] = []  # the greatest `last` so far

  def rounds(self, first: int, last: int) -> list[int]:
    """The rounds that have merged any of these steps."""
    found = []
    i = bisect.bisect_right(self._entries, (last, 1 << 62, 0))
    while i and self._tops[i - 1] >= first:
      i -= 1
      if self._entries[i][1] >= first:
        found.append(self._entries[i][2])
    return found

  def add(self, first: int, last: int, round_id: int) -> None:
    """They are merged in that round."""
    i = bisect.bisect_right(self._entries, (first, last, round_id))
    self._entries.insert(i, (first, last, round_id))
    del self._tops[i:]
    for _, end, _ in self._entries[i:]:
      self._tops.append(max(end, self._tops[-1] if self._tops else end))


@dataclasses.dataclass(frozen=True)
class Push:
  """What a learner cut: steps of its history beyond a base."""

  learner: int
  incarnation: int
  round: int
  base_round: int
  stretches: tuple[Stretch, ...]
  steps: int
  tokens: int
  end: int  # place in the learner's history behind its last step


@dataclasses.dataclass(frozen=True)
class Version:
  """A fragment's value: its base and what was merged into that."""

  fragment: int
  round: int
  version: int
  base_round: int | None
  merged_tokens: int
  pushes: frozenset[tuple[int, int]] = frozenset()  # learner, incarnation


class Ledger:
  """What all roles share: the problems, every value by round, and where each step was merged."""

  def __init__(self) -> None:
    self.problems: list[Problem] = []
    self.counts: collections.Counter[str] = collections.Counter()
    self.values: dict[tuple[int, int], Version] = {}
    self._merged: dict[tuple[int, int, int], Merged] = collections.defaultdict(Merged)

  def say(self, entry: Entry, text: str) -> None:
    self.problems.append(Problem(entry.role, entry.incarnation, entry.line, text))

  def initial(self, fragment: int) -> Version:
    first = Version(fragment, INITIAL, 0, None, 0)
    return self.values.setdefault((fragment, INITIAL), first)

  def ancestor(self, value: Version, round_id: int) -> Version | None:
    """The value or the one of its bases that this round made, if any."""
    at: Version | None = value
    while at is not None and at.round > round_id:
      base = at.base_round
      at = None if base is None or base >= at.round else self.values.get((at.fragment, base))
    return at if at is not None and at.round == round_id else None

  def merge(self, entry: Entry, value: Version, push: Push) -> None:
    for incarnation, first, last in push.stretches:
      merged = self._merged[value.fragment, push.learner, incarnation]
      for before in merged.rounds(first, last):
        if self.ancestor(value, before) is not None:
          steps = f"{Stretch(incarnation, first, last)} of learner {push.learner}"
          self.say(entry, f"merges {steps}, of which {round_name(before)} has merged some already")
      merged.add(first, last, value.round)
      self.counts["stretches"] += 1
