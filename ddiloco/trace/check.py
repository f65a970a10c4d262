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
from collections.abc import Iterable, Mapping, Sequence
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
)
from ddiloco.trace.operations import INITIAL, Entry, Key, Trace, round_name

# --- Which inner steps a learner has made, and which rounds merged them
# A step is (incarnation, number) of a learner. The unmerged steps of a learner, and so its pushes,
# are the last steps of its history, since steps are merged or discarded from the beginning on.


class StepRange(typing.NamedTuple):
  """Steps `first` to `last` of one incarnation."""

  incarnation: int
  first: int
  last: int

  def __str__(self) -> str:
    return f"steps {self.first} to {self.last} of incarnation {self.incarnation}"


def ranges(steps: Iterable[events.Step]) -> list[StepRange]:
  """These steps, consecutive ones together."""
  found: list[StepRange] = []
  for each in steps:
    if found and found[-1][::2] == (each.incarnation, each.step - 1):
      found[-1] = found[-1]._replace(last=each.step)
    else:
      found.append(StepRange(each.incarnation, each.step, each.step))
  return found


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


class LearnerSymbols(LearnerAlgebra):
  """A learner's history, and for each fragment the place from which on steps are not merged.

  The content of a push is its steps, and the place after its last one in the history.
  """

  def begin(self, started: events.Started | None) -> None:
    self._history: list[events.Step] = []
    self._begins: dict[int, int] = {}

  def step(self, entry: Entry) -> None:
    self._history.append(entry.operation)

  def copy_out(self, op: events.CopyOut) -> tuple[int, int, tuple[list[StepRange], int]]:
    end = len(self._history)
    begin = self._begins.setdefault(op.fragment, end)
    steps = self._history[begin:]
    return len(steps), sum(each.tokens for each in steps), (ranges(steps), end)

  def stage(self, op: events.Stage, version: Version | None, included: Pushed | None) -> int | None:
    return None if included is None else included.content[1]

  def apply(self, fragment: int, staged: int | None, mode: str) -> None:
    if mode not in events.KEEPS_WORK:
      self._begins[fragment] = len(self._history)
    elif staged is not None:
      self._begins[fragment] = staged

  def capture(self, entry: Entry, fragments: Mapping[int, Held]) -> Any:
    return self._history, len(self._history), dict(self._begins)  # the history only grows

  def restore(self, state: Any) -> None:
    history, end, begins = state
    self._history, self._begins = history[:end], dict(begins)


class ShardSymbols(ShardAlgebra):
  """The rounds that merged each learner's steps; shared by all shards, as a fragment may move."""

  def __init__(self, proof: Proof):
    self.counts: collections.Counter[str] = collections.Counter()
    self._proof = proof
    self._merged: dict[tuple[int, int, int], MergedSteps] = collections.defaultdict(MergedSteps)

  def commit(self, entry: Entry, base: Version, new: Version, pushes: Sequence[Pushed]) -> None:
    self.counts["merged"] += len(pushes)
    for push in pushes:
      for steps in push.content[0]:
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


@dataclasses.dataclass(frozen=True)
class Checked:
  """The result: the problems, and how much was checked."""

  problems: tuple[str, ...]
  counts: collections.Counter[str]  # of operations by kind, learners, merged pushes, ...

  @property
  def summary(self) -> tuple[str, ...]:
    """What was checked, a line for each invariant."""
    c = self.counts
    return (
      f"{c['step']:,} steps of {c['learners']:,} learners in {c['incarnations']:,} incarnations:"
      " consecutive, global steps never go back, no batch twice in an incarnation",
      f"{c['copy_out']:,} pushes: each holds exactly the steps and tokens that it says",
      f"{c['commit']:,} commits of {c['merged']:,} pushes on the values these were made from:"
      " versions grow by one, rounds grow, tokens add up",
      f"{c['ranges']:,} ranges of steps merged, none twice on the way to any value",
      f"{c['apply']:,} versions applied: each exists, and contains the pushes that it must",
      f"{c['captured']:,} states captured, {c['restored']:,} restored,"
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
  fragments = {getattr(op, "fragment", None) for op in trace.operations()} - {None}
  initial = {Key("value", INITIAL, p): proof.add(Version(p, INITIAL, 0)) for p in fragments}
  Schedule(trace, initial, proof).perform_all(roles)
  counts = collections.Counter(op.kind for op in trace.operations())
  learners = [role for role in trace.roles if role.startswith("learner")]
  lives = {(op.role, op.incarnation) for op in trace.operations() if op.role in learners}
  counts.update(merged.counts, learners=len(learners), incarnations=len(lives))
  return Checked((*trace.problems, *proof.problems), counts)
