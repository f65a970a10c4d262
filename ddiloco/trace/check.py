"""Checks a trace: performs it with symbols that say which inner steps are in which value. PURE.

The invariants: a value's version is its base's plus one; pushes were made on the value they were
merged into; no step is merged twice on the way to any value; counts of steps and tokens are those
of the steps themselves; rounds only grow; global steps never go back within an incarnation; each
value that is used was made. The end of an incarnation may be missing, since a kill may lose it.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from ddiloco.protocol import events
from ddiloco.trace.interpreter import (
  Held,
  LearnerAlgebra,
  LearnerRole,
  Proof,
  Pushed,
  Schedule,
  ShardAlgebra,
  ShardRole,
  TraceRole,
  Version,
  perform_all,
)
from ddiloco.trace.operations import INITIAL, Entry, Incarnation, Key, Problem, Trace, round_name

# --- Which inner steps a learner has made, and which rounds merged them
# A step is (incarnation, number) of a learner. The unmerged steps of a learner, and so its pushes,
# are consecutive ranges of its history, since steps are merged or discarded from the beginning on.


class StepRange(typing.NamedTuple):
  """Steps `first` to `last` of one incarnation."""

  incarnation: int
  first: int
  last: int

  def __str__(self) -> str:
    return f"steps {self.first} to {self.last} of incarnation {self.incarnation}"


class StepHistory:
  """All steps in a learner's parameters, in order."""

  def __init__(self) -> None:
    # By range of consecutive steps: the place, incarnation and number of its first step.
    self._starts: list[tuple[int, int, int]] = []
    self._tokens = [0]  # of all steps before a place

  def __len__(self) -> int:
    return len(self._tokens) - 1

  def add(self, incarnation: int, step: int, tokens: int) -> None:
    """Adds a step."""
    start, *last = self._starts[-1] if self._starts else (0, -1, 0)
    if last != [incarnation, step - (len(self) - start)]:
      self._starts.append((len(self), incarnation, step))
    self._tokens.append(self._tokens[-1] + tokens)

  def copy(self) -> StepHistory:
    """An independent copy."""
    copy = StepHistory()
    copy._starts, copy._tokens = list(self._starts), list(self._tokens)
    return copy

  def tokens(self, begin: int, end: int) -> int:
    """The tokens of the steps at places `begin` to `end` - 1."""
    return self._tokens[end] - self._tokens[begin]

  def ranges(self, begin: int, end: int) -> tuple[StepRange, ...]:
    """The steps at places `begin` to `end` - 1."""
    found = []
    stop = end
    for place, incarnation, step in reversed(self._starts):
      low = max(begin, place)
      if low < stop:
        found.append(StepRange(incarnation, step + low - place, step + stop - 1 - place))
        stop = low
    return tuple(reversed(found))


class MergedSteps:
  """The rounds that merged the steps of one incarnation: ranges with their round."""

  def __init__(self) -> None:
    # First, last, round, and the greatest `last` so far: ranges come nearly in order.
    self._entries: list[tuple[int, int, int, int]] = []

  def rounds(self, first: int, last: int) -> list[int]:
    """The rounds that have merged any of these steps."""
    near = itertools.takewhile(lambda entry: entry[3] >= first, reversed(self._entries))
    return [round_id for a, b, round_id, _ in near if a <= last and b >= first]

  def add(self, first: int, last: int, round_id: int) -> None:
    """Notes that this round merged these steps."""
    top = max(last, self._entries[-1][3]) if self._entries else last
    self._entries.append((first, last, round_id, top))


# --- The symbolic algebra: an array is represented by the steps in it


@dataclasses.dataclass(frozen=True)
class Steps:
  """The content of a push."""

  ranges: tuple[StepRange, ...]
  end: int  # the place after its last step in the learner's history


class LearnerSymbols(LearnerAlgebra):
  """A learner's history, and for each fragment the place from which on steps are not merged."""

  def begin(self, incarnation: Incarnation) -> None:
    self._history = StepHistory()
    self._begins: dict[int, int] = {}

  def step(self, entry: Entry, op: events.Step) -> None:
    self._history.add(entry.incarnation, op.step, op.tokens)

  def copy_out(self, op: events.CopyOut) -> tuple[int, int, Steps]:
    end = len(self._history)
    begin = self._begins.setdefault(op.fragment, end)
    content = Steps(self._history.ranges(begin, end), end)
    return end - begin, self._history.tokens(begin, end), content

  def stage(self, op: events.Stage, version: Version | None, included: Pushed | None) -> int | None:
    self._begins.setdefault(op.fragment, len(self._history))
    return None if included is None else included.content.end

  def apply(self, fragment: int, staged: int | None, mode: str) -> None:
    if mode not in events.KEEPS_WORK:
      self._begins[fragment] = len(self._history)
    elif staged is not None:
      self._begins[fragment] = staged

  def capture(self, entry: Entry, fragments: Mapping[int, Held]) -> Any:
    return self._history.copy(), dict(self._begins)

  def restore(self, state: Any) -> None:
    history, begins = state
    self._history, self._begins = history.copy(), dict(begins)


class ShardSymbols(ShardAlgebra):
  """The rounds that merged each learner's steps; shared by all shards, as a fragment may move."""

  def __init__(self, proof: Proof):
    self.counts: collections.Counter[str] = collections.Counter()
    self._proof = proof
    self._merged: dict[tuple[int, int, int], MergedSteps] = collections.defaultdict(MergedSteps)

  def commit(self, entry: Entry, base: Version, new: Version, pushes: Sequence[Pushed]) -> None:
    self.counts["merged"] += len(pushes)
    for push in pushes:
      for steps in push.content.ranges:
        self._merge(entry, new, push.learner, steps)

  def _merge(self, entry: Entry, new: Version, learner: int, steps: StepRange) -> None:
    merged = self._merged[new.fragment, learner, steps.incarnation]
    for before in merged.rounds(steps.first, steps.last):
      if self._proof.ancestor(new, before) is not None:
        text = f"of which {round_name(before)} has merged some already"
        self._proof.say(entry, f"merges {steps} of learner {learner}, {text}")
    merged.add(steps.first, steps.last, new.round)
    self.counts["ranges"] += 1


# --- The verdict

_COUNTED: Mapping[type, str] = {
  events.Step: "steps",
  events.CopyOut: "pushes",
  events.Commit: "commits",
  events.Apply: "applies",
  events.Captured: "snapshots",
  events.Restored: "restores",
  events.Inherited: "inherited",
}


@dataclasses.dataclass(frozen=True)
class Checked:
  """The result: the problems, and how much was checked."""

  problems: tuple[Problem, ...]
  counts: Mapping[str, int]  # learners, incarnations, steps, pushes, merged, commits, applies, ...

  @property
  def summary(self) -> tuple[str, ...]:
    """What was checked, a line for each invariant."""
    c: Mapping[str, int] = collections.defaultdict(int, self.counts)
    return (
      f"{c['steps']:,} steps of {c['learners']:,} learners in {c['incarnations']:,} incarnations:"
      " consecutive, global steps never go back, no batch twice in an incarnation",
      f"{c['pushes']:,} pushes: each holds exactly the steps and tokens that it says",
      f"{c['commits']:,} commits of {c['merged']:,} pushes on the values these were made from:"
      " versions grow by one, rounds grow, tokens add up",
      f"{c['ranges']:,} ranges of steps merged, none twice on the way to any value",
      f"{c['applies']:,} versions applied: each exists, and contains the pushes that it must",
      f"{c['snapshots']:,} states captured, {c['restores']:,} restored,"
      f" {c['inherited']:,} optimizer states inherited",
    )


def check(trace: Trace) -> Checked:
  """Performs the trace with symbols; never raises for the trace's content."""
  proof = Proof()
  merged = ShardSymbols(proof)
  roles: dict[str, TraceRole] = {}
  for role in trace.roles:
    shard = role.startswith("syncer")
    roles[role] = ShardRole(proof, merged) if shard else LearnerRole(proof, LearnerSymbols())
  initial = {Key("value", INITIAL, p): proof.add(Version(p, INITIAL, 0)) for p in trace.fragments()}
  perform_all(Schedule(trace, initial, proof), roles)
  learners = [found for role, found in trace.roles.items() if role.startswith("learner")]
  found = collections.Counter(
    _COUNTED[type(e.operation)] for e in trace.entries() if type(e.operation) in _COUNTED
  )
  counts = {**found, **merged.counts, "learners": len(learners)}
  counts["incarnations"] = sum(map(len, learners))
  return Checked((*trace.problems, *proof.problems), counts)
