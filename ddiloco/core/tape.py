"""The tape of a run: the events that moved the model, as typed operations. PURE.

Every role's event log has the order in which things happened to it; between roles only data counts:
an operation may be performed when what it `needs` was made by another. So a tape has no global
clock, and performing it in any such order gives the same bits. `perform_all` does so role by role:
`core/invariants.py` with symbols for values; `engines/replay.py` with arrays and a thread a role.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

INITIAL = -1  # the round of an initial value

# --- what happened --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Started:
  """A learner or shard begins; of a learner: where it lives, and the schedule it follows."""

  devices: int = 0
  mesh: tuple[int, ...] = ()
  batch_size: int = 0
  learners: int = 0  # that its config plans; 0: as the saved config does
  planned_steps: int = 0


@dataclasses.dataclass(frozen=True)
class Restored:
  """My state is what that incarnation recorded for that snapshot."""

  snapshot: int
  of_incarnation: int


@dataclasses.dataclass(frozen=True)
class Step:
  """One inner step of a learner."""

  step: int  # counted in this incarnation
  clock: int  # of the run, after the step
  position: int  # of the batch
  tokens: int
  schedule_step: int | None = None  # that the learning rate was for; None: the clock before it
  rate_scale: float = 1.0
  loss: float | None = None


@dataclasses.dataclass(frozen=True)
class Cut:
  """My push for this round: what I have of the fragment beyond (fragment, base_round)."""

  fragment: int
  round: int
  version: int
  base_round: int
  steps: int
  tokens: int
  factor: float = 1.0  # it was poisoned by plan: what I have, times this


@dataclasses.dataclass(frozen=True)
class Resend:
  """The push that was cut for `old_round` answers `round` now."""

  fragment: int
  round: int
  old_round: int


@dataclasses.dataclass(frozen=True)
class Stage:
  """The value (fragment, round) arrived; what it changes here is on its way to the devices."""

  fragment: int
  version: int
  round: int  # the one I have already: my push was rejected, and I go back to it
  mode: str
  included: bool  # my newest push of this fragment is part of it


@dataclasses.dataclass(frozen=True)
class Apply:
  """The oldest staged value of the fragment was put into the parameters."""

  fragment: int
  version: int
  round: int
  mode: str
  included: bool


@dataclasses.dataclass(frozen=True)
class Recorded:
  """My state now is my part of this snapshot."""

  snapshot: int


@dataclasses.dataclass(frozen=True)
class Saved:
  """The part that was recorded is on disk: CRC-32 of every array of it."""

  snapshot: int
  arrays: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Donated:
  """The fragment's inner optimizer moments were copied for a peer."""

  fragment: int
  donation: int


@dataclasses.dataclass(frozen=True)
class Inherited:
  """Mine are now what that learner donated."""

  fragment: int
  learner: int
  incarnation_of_donor: int
  donation: int


@dataclasses.dataclass(frozen=True)
class Owns:
  """A shard serves a fragment with this value and the momentum of that round.

  An older round's momentum: a learner gave the value back, which knew nothing else of it.
  """

  fragment: int
  version: int
  round: int
  momentum_round: int


@dataclasses.dataclass(frozen=True)
class Commit:
  """(fragment, round) is the outer step on (fragment, base_round) with these pushes."""

  fragment: int
  round: int
  version: int
  base_round: int
  learners: tuple[int, ...]
  incarnations: tuple[int, ...]
  steps: int  # of all pushes together
  tokens: int
  merged_tokens: int


Operation = (
  Started | Restored | Step | Cut | Resend | Stage | Apply | Recorded | Saved
  | Donated | Inherited | Owns | Commit
)  # fmt: skip
# --- what operations need and make ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Value:
  """A fragment after that round: its global value and what learners are sent of it."""

  fragment: int
  round: int

  def __str__(self) -> str:
    return f"the value of fragment {self.fragment} after {round_name(self.round)}"


@dataclasses.dataclass(frozen=True)
class Momentum:
  """The outer momentum of a fragment after that round."""

  fragment: int
  round: int

  def __str__(self) -> str:
    return f"the momentum of fragment {self.fragment} after {round_name(self.round)}"


@dataclasses.dataclass(frozen=True)
class Pushed:
  """The push of one incarnation of a learner for a round."""

  learner: int
  incarnation: int
  fragment: int
  round: int

  def __str__(self) -> str:
    who = f"learner {self.learner} (incarnation {self.incarnation})"
    return f"the push of {who} of fragment {self.fragment} for {round_name(self.round)}"


@dataclasses.dataclass(frozen=True)
class Donation:
  """Inner moments of one fragment, on their way to a peer."""

  learner: int
  incarnation: int
  fragment: int
  donation: int

  def __str__(self) -> str:
    who = f"learner {self.learner} (incarnation {self.incarnation})"
    return f"donation {self.donation} of fragment {self.fragment} by {who}"


@dataclasses.dataclass(frozen=True)
class State:
  """What an incarnation was when it recorded its part of a snapshot."""

  role: str
  incarnation: int
  snapshot: int

  def __str__(self) -> str:
    return (
      f"what {self.role} (incarnation {self.incarnation}) recorded for snapshot {self.snapshot}"
    )


Key = Value | Momentum | Pushed | Donation | State


def round_name(round_id: int) -> str:
  return "no round (initial)" if round_id == INITIAL else f"round {round_id}"


@dataclasses.dataclass(frozen=True)
class Entry:
  """One line of the tape."""

  role: str
  number: int  # of the learner or shard
  incarnation: int
  line: int  # in the role's event log, from 1
  time: float  # seconds since the run started, by the role's own clock
  operation: Operation


@dataclasses.dataclass(frozen=True)
class Problem:
  """What is wrong with a tape, and where."""

  role: str
  incarnation: int
  line: int
  text: str

  def __str__(self) -> str:
    return f"{self.role}, incarnation {self.incarnation}, line {self.line}: {self.text}"


@dataclasses.dataclass(frozen=True)
class Life:
  """One incarnation of a role, in order."""

  role: str
  number: int
  incarnation: int
  entries: tuple[Entry, ...]


@dataclasses.dataclass(frozen=True)
class Tape:
  """All lives of all roles; `problems` is what of the logs makes no tape."""

  roles: Mapping[str, tuple[Life, ...]]
  problems: tuple[Problem, ...] = ()

  def entries(self) -> list[Entry]:
    """Of all roles; in order only within each."""
    return [e for lives in self.roles.values() for life in lives for e in life.entries]

  def fragments(self) -> list[int]:
    """Those that are mentioned."""
    found = (getattr(e.operation, "fragment", None) for e in self.entries())
    return sorted({p for p in found if p is not None})


def needs(entry: Entry) -> tuple[Key, ...]:
  """What must have been made before the operation is performed."""
  match entry.operation:
    case Restored(snapshot, incarnation):
      return (State(entry.role, incarnation, snapshot),)
    case Stage() as op:
      return (Value(op.fragment, op.round),)
    case Inherited() as op:
      return (Donation(op.learner, op.incarnation_of_donor, op.fragment, op.donation),)
    case Owns() as op:
      momentum = () if op.momentum_round == INITIAL else (Momentum(op.fragment, op.momentum_round),)
      return (Value(op.fragment, op.round), *momentum)
    case Commit() as op:
      whose = zip(op.learners, op.incarnations)
      return tuple(Pushed(m, i, op.fragment, op.round) for m, i in whose)
  return ()


def makes(entry: Entry) -> tuple[Key, ...]:
  """What exists once the operation was performed."""
  match entry.operation:
    case Cut() | Resend() as op:
      return (Pushed(entry.number, entry.incarnation, op.fragment, op.round),)
    case Recorded(snapshot):
      return (State(entry.role, entry.incarnation, snapshot),)
    case Donated() as op:
      return (Donation(entry.number, entry.incarnation, op.fragment, op.donation),)
    case Commit() as op:
      return Value(op.fragment, op.round), Momentum(op.fragment, op.round)
  return ()


class Actor(Protocol):
  """One role over all its lives: gives the operations their meaning."""

  def begin(self, life: Life) -> None:
    """Its next incarnation starts, with nothing."""
    ...

  def perform(self, entry: Entry, given: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Performs an operation with what it `needs`; returns what it `makes`."""
    ...


def perform_all(
  tape: Tape,
  actors: Mapping[str, Actor],
  made: dict[Key, Any],
  missing: Callable[[Entry, Key], None],
) -> None:
  """Performs every operation once, in an order in which all it needs is made before.

  Args:
    tape: of a run.
    actors: by role.
    made: what exists already (initial values); grows.
    missing: told of what an operation needs and nobody makes before it; the operation is performed
      without it.
  """
  ever = {*made, *(key for entry in tape.entries() for key in makes(entry))}
  queues = {role: collections.deque(_turns(lives)) for role, lives in tape.roles.items()}

  def go(role: str) -> None:
    turn = queues[role].popleft()
    if isinstance(turn, Life):
      actors[role].begin(turn)
      return
    for key in needs(turn):
      if key not in made:
        missing(turn, key)
    given = {key: made[key] for key in needs(turn) if key in made}
    made.update(actors[role].perform(turn, given))

  while any(queues.values()):
    moved = False
    for role, queue in queues.items():
      while queue and not any(key in ever and key not in made for key in _needed(queue[0])):
        go(role)
        moved = True
    if not moved:  # each waits for another: no run can have been like this
      go(next(role for role, queue in queues.items() if queue))


def _turns(lives: Sequence[Life]) -> Iterator[Life | Entry]:
  for life in lives:
    yield life
    yield from life.entries


def _needed(turn: Life | Entry) -> tuple[Key, ...]:
  return needs(turn) if isinstance(turn, Entry) else ()
