"""The trace of a run: the events that moved the model, in order. PURE.

An operation is an event of such a kind. The operations of one role are ordered by its event log;
between roles only data sets an order: an operation may be performed once the values that it `needs`
are made. So a trace has no global clock, and performing it in any such order gives the same bits.
`trace/interpreter.py` performs it, for `trace/check.py` with symbols as values, for
`trace/replay.py` with arrays and a thread a role.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from ddiloco.protocol import events
from ddiloco.protocol.events import Event, parse_role
from ddiloco.protocol.messages import INITIAL

Operation = (
  events.Started
  | events.Restored
  | events.Step
  | events.CopyOut
  | events.Resend
  | events.Stage
  | events.Apply
  | events.Captured
  | events.Saved
  | events.Donated
  | events.Inherited
  | events.Owns
  | events.Commit
)

# --- the values that operations need and make -----------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Key:
  """The name of a value that one operation makes and others need.

  A fragment has, after a round, a "value" (the published one included) and a "momentum". One
  incarnation of a role has its "push" for a round, a "donation" of inner moments to a peer, and its
  "state", as captured for a snapshot.
  """

  kind: str
  number: int  # of the round, donation or snapshot
  fragment: int = -1  # a state, which has all fragments, has -1
  role: str = ""  # the role that made it; shards' values are named by their round alone
  incarnation: int = -1

  def __str__(self) -> str:
    fragment, who = f"fragment {self.fragment}", f"(incarnation {self.incarnation})"
    learner = f"{self.role.replace('-', ' ')} {who}"
    match self.kind:
      case "push":
        return f"the push of {learner} of {fragment} for {round_name(self.number)}"
      case "donation":
        return f"donation {self.number} of {fragment} by {learner}"
      case "state":
        return f"what {self.role} {who} captured for snapshot {self.number}"
    return f"the {self.kind} of {fragment} after {round_name(self.number)}"


def round_name(round_id: int) -> str:
  return "no round (initial)" if round_id == INITIAL else f"round {round_id}"


@dataclasses.dataclass(frozen=True)
class Entry:
  """One line of the trace."""

  role: str
  number: int  # of the learner or shard
  incarnation: int
  line: int  # in the role's event log, from 1
  time: float  # seconds since the run started, by the role's own clock
  operation: Operation

  def problem(self, text: str) -> Problem:
    """A problem that this line shows."""
    return Problem(self.role, self.incarnation, self.line, text)


@dataclasses.dataclass(frozen=True)
class Problem:
  """An error in a trace, and its place."""

  role: str
  incarnation: int
  line: int
  text: str

  def __str__(self) -> str:
    return f"{self.role}, incarnation {self.incarnation}, line {self.line}: {self.text}"


@dataclasses.dataclass(frozen=True)
class Incarnation:
  """One incarnation of a role: its entries in order."""

  role: str
  number: int
  incarnation: int
  entries: tuple[Entry, ...]


@dataclasses.dataclass(frozen=True)
class Trace:
  """All incarnations of all roles; `problems`: errors in the logs."""

  roles: Mapping[str, tuple[Incarnation, ...]]
  problems: tuple[Problem, ...] = ()

  def entries(self) -> list[Entry]:
    """The entries of all roles; in order only within each role."""
    return [e for role in self.roles for e in self.entries_of(role)]

  def entries_of(self, role: str) -> list[Entry]:
    """The entries of one role, in order."""
    return [e for incarnation in self.roles[role] for e in incarnation.entries]

  def devices(self) -> dict[int, int]:
    """By learner, the number of devices of its largest island, in order of learners."""
    most: dict[int, int] = {}
    for entry in self.entries():
      if entry.role.startswith("learner") and isinstance(entry.operation, events.Started):
        most[entry.number] = max(most.get(entry.number, 0), entry.operation.devices)
    return dict(sorted(most.items()))

  def fragments(self) -> list[int]:
    """The fragments that operations mention."""
    found = (getattr(e.operation, "fragment", None) for e in self.entries())
    return sorted({p for p in found if p is not None})


def needs(entry: Entry) -> tuple[Key, ...]:
  """The values that must be made before the operation is performed, in a fixed order."""
  match entry.operation:
    case events.Restored(snapshot=snapshot, of_incarnation=incarnation):
      return (Key("state", snapshot, role=entry.role, incarnation=incarnation),)
    case events.Stage() as op:
      return (Key("value", op.round, op.fragment),)
    case events.Inherited() as op:
      donor = f"learner-{op.learner}"
      return (Key("donation", op.donation, op.fragment, donor, op.incarnation_of_donor),)
    case events.Owns() as op:
      momentum = Key("momentum", op.momentum_round, op.fragment)
      value = Key("value", op.round, op.fragment)
      return (value,) if op.momentum_round == INITIAL else (value, momentum)
    case events.Commit() as op:
      whose = zip(op.learners, op.incarnations)
      return tuple(Key("push", op.round, op.fragment, f"learner-{m}", i) for m, i in whose)
  return ()


def makes(entry: Entry) -> tuple[Key, ...]:
  """The values that the operation makes, in a fixed order."""
  mine = entry.role, entry.incarnation
  match entry.operation:
    case events.CopyOut() | events.Resend() as op:
      return (Key("push", op.round, op.fragment, *mine),)
    case events.Captured(snapshot=snapshot):
      return (Key("state", snapshot, -1, *mine),)
    case events.Donated() as op:
      return (Key("donation", op.donation, op.fragment, *mine),)
    case events.Commit() as op:
      return Key("value", op.round, op.fragment), Key("momentum", op.round, op.fragment)
  return ()


# --- From event logs to a trace
# Nothing is skipped silently: an event of an unknown kind, one that lacks a field, and a torn line
# in the middle of an incarnation are problems. Only the end of an incarnation may be missing.

_EXCHANGED = (events.CopyOut, events.Resend, events.Donated, events.Inherited)
_TAKEN = (events.Stage, events.Apply)
_SAVED = (events.Started, events.Captured, events.Saved)
MOVERS: Mapping[str, tuple[type[Event], ...]] = {
  "learner": (*_SAVED, events.Restored, events.Step, *_EXCHANGED, *_TAKEN),
  "syncer": (*_SAVED, events.Owns, events.Commit),
  "evaluator": _TAKEN,
}
# Events of each kind of role that do not move the model. Any other event is a problem.
_ALL = (
  *(events.Joined, events.Stopped, events.Ignored, events.Dropped, events.Crash),
  *(events.Traffic, events.Unsaved, events.Compiled, events.Hung),
  *(events.Launched, events.Profiled, events.Unprofiled),
)
BYSTANDERS: Mapping[str, tuple[type[Event], ...]] = {
  "learner": (*_ALL, events.Push, events.Rejected, events.NoDonor),
  "syncer": (
    *(*_ALL, events.Member, events.Round, events.Abandoned, events.Unreplicated),
    *(events.Replicated, events.Lost, events.Regained, events.Snapshot, events.Uncommitted),
  ),
  "evaluator": (*(*_ALL, events.Started, events.Evaluation, events.Unevaluated, events.Rejected),),
}


def read_logs(logs: Mapping[str, Iterable[Event | None]]) -> Trace:
  """The trace in the lines of every role's event log, in order; None is a torn line.

  A kill may tear the last line of an incarnation. A torn line anywhere else is a problem, as is an
  event of an unknown kind or with wrong fields.
  """
  roles: dict[str, tuple[Incarnation, ...]] = {}
  problems: list[Problem] = []
  for role, lines in sorted(logs.items()):
    kind, number = parse_role(role)
    if kind not in MOVERS:
      continue
    lives: dict[int, list[Entry]] = {}
    incarnation, torn_at = -1, 0
    for line, event in enumerate(lines, 1):
      if event is None:
        torn_at = line
        continue
      previous, incarnation = incarnation, event.incarnation
      if torn_at and previous == incarnation:
        problems.append(Problem(role, incarnation, torn_at, "cannot be read, and more follows"))
      torn_at = 0
      entries = lives.setdefault(incarnation, [])
      if text := _odd(kind, event):
        problems.append(Problem(role, incarnation, line, text))
      elif isinstance(event, MOVERS[kind]):
        entries.append(Entry(role, number, incarnation, line, event.time, event))
    if lives:
      roles[role] = tuple(
        Incarnation(role, number, i, tuple(entries)) for i, entries in sorted(lives.items())
      )
  return Trace(roles, tuple(problems))


def _odd(role: str, event: Event) -> str:
  """The problem with an event of this role, or ''."""
  match event:
    case events.Odd():
      return event.reason
    case events.Commit() as op:
      if not len(op.incarnations) == len(op.learners) == len(set(op.learners)) > 0:
        return f"commit names learners {op.learners} and incarnations {op.incarnations}"
  known = isinstance(event, MOVERS[role] + BYSTANDERS[role])
  return "" if known else f"event of unknown kind {event.kind!r}"
