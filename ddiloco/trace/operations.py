"""The trace of a run: the events that moved the model, in order. PURE.

An operation is an event of such a kind. The operations of one role are ordered by its event log;
between roles only data sets an order: an operation may be performed once the values that it `needs`
are made. So a trace has no global clock, and performing it in any such order gives the same bits.
`trace/interpreter.py` performs it, for `trace/check.py` with symbols as values, for
`trace/replay.py` with arrays.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

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
    fragment = f" of fragment {self.fragment}" if self.fragment >= 0 else ""
    who = f" by {self.role} (incarnation {self.incarnation})" if self.role else ""
    return f"{self.kind} {self.number}{fragment}{who}"


def round_name(round_id: int) -> str:
  return "no round (initial)" if round_id == INITIAL else f"round {round_id}"


@dataclasses.dataclass(frozen=True)
class Entry:
  """One line of the trace: an operation, which names its role, incarnation and time."""

  line: int  # in the role's event log, from 1
  operation: Operation

  def problem(self, text: str) -> str:
    """A problem that this line shows."""
    return problem(self.operation.role, self.operation.incarnation, self.line, text)


def problem(role: str, incarnation: int, line: int, text: str) -> str:
  """An error in a trace, with its place."""
  return f"{role}, incarnation {incarnation}, line {line}: {text}"


@dataclasses.dataclass(frozen=True)
class Trace:
  """The entries of every role, in order; `problems`: errors in the logs.

  `left_out`: how many of the newest operations of a run under way are left out (`read_logs`).
  """

  roles: Mapping[str, Sequence[Entry]]
  problems: Sequence[str] = ()
  left_out: int = 0

  def operations(self) -> Iterator[Operation]:
    """The operations of all roles; in order only within each role."""
    return (entry.operation for entries in self.roles.values() for entry in entries)

  def devices(self) -> dict[int, int]:
    """By learner, the number of devices of its largest island, in order of learners."""
    most: dict[int, int] = {}
    for op in self.operations():
      kind, number = parse_role(op.role)
      if kind == "learner" and isinstance(op, events.Started):
        most[number] = max(most.get(number, 0), op.devices)
    return dict(sorted(most.items()))


def needs(op: Operation) -> tuple[Key, ...]:
  """The values that must be made before the operation is performed, in a fixed order."""
  match op:
    case events.Restored():
      return (Key("state", op.snapshot, role=op.role, incarnation=op.of_incarnation),)
    case events.Stage():
      return (Key("value", op.round, op.fragment),)
    case events.Inherited():
      donor = f"learner-{op.learner}"
      return (Key("donation", op.donation, op.fragment, donor, op.incarnation_of_donor),)
    case events.Owns():
      momentum = Key("momentum", op.momentum_round, op.fragment)
      value = Key("value", op.round, op.fragment)
      return (value,) if op.momentum_round == INITIAL else (value, momentum)
    case events.Commit():
      whose = zip(op.learners, op.incarnations)
      return tuple(Key("push", op.round, op.fragment, f"learner-{m}", i) for m, i in whose)
  return ()


def makes(op: Operation) -> tuple[Key, ...]:
  """The values that the operation makes, in a fixed order."""
  mine = op.role, op.incarnation
  match op:
    case events.CopyOut() | events.Resend():
      return (Key("push", op.round, op.fragment, *mine),)
    case events.Captured():
      return (Key("state", op.snapshot, -1, *mine),)
    case events.Donated():
      return (Key("donation", op.donation, op.fragment, *mine),)
    case events.Commit():
      return Key("value", op.round, op.fragment), Key("momentum", op.round, op.fragment)
  return ()


# --- From event logs to a trace


def read_logs(
  logs: Mapping[str, Iterable[Event | None]], late: Mapping[str, int] | None = None
) -> Trace:
  """The trace in the lines of every role's event log, in order; None is a torn line.

  A kill may tear the last line of an incarnation. A torn line anywhere else is a problem, as is an
  event of an unknown kind or with wrong fields.

  Args:
    logs: by role.
    late: by role, how many of its last lines may need what other logs did not have yet when they
      were read. Such an operation is no problem: it is left out, with all later ones of its role.
  """
  roles: dict[str, list[Entry]] = {}
  problems: list[str] = []
  first_late: dict[str, int] = {}  # line, by role
  for role, lines in sorted(logs.items()):
    if parse_role(role)[0] not in ("learner", "syncer", "evaluator"):
      continue
    incarnation, torn_at, line = -1, 0, 0
    for line, event in enumerate(lines, 1):
      if event is None:
        torn_at = line
        continue
      previous, incarnation = incarnation, event.incarnation
      if torn_at and previous == incarnation:
        problems.append(problem(role, incarnation, torn_at, "cannot be read, and more follows"))
      torn_at = 0
      entries = roles.setdefault(role, [])
      if text := _odd(event):
        problems.append(problem(role, incarnation, line, text))
      elif isinstance(event, Operation):
        entries.append(Entry(line, event))
    first_late[role] = line + 1 - (late or {}).get(role, 0)
  for entries in roles.values():
    # The last lines of a life may come after the next one's first. Lives are in the order in which
    # they began: where a clock was set back, one has a smaller number than the life before it.
    lives = [entry.operation.incarnation for entry in entries]
    order = {each: place for place, each in enumerate(dict.fromkeys(lives))}
    entries.sort(key=lambda entry: order[entry.operation.incarnation])
  return Trace(roles, problems, _leave_out(roles, first_late))


def _leave_out(roles: dict[str, list[Entry]], first_late: Mapping[str, int]) -> int:
  """Ends each role before its first late operation that needs what no role makes; returns how many
  operations that leaves out."""
  before = sum(map(len, roles.values()))
  late = {role: [e for e in roles[role] if e.line >= first_late[role]] for role in roles}
  while any(late.values()):
    made = {key for entries in roles.values() for each in entries for key in makes(each.operation)}
    open_ = {role: [e.line for e in late[role] if not _made(e, made)] for role in roles}
    if not any(open_.values()):
      break
    for role, lines in open_.items():
      for part in (roles, late):
        part[role] = [entry for entry in part[role] if entry.line < min(lines, default=math.inf)]
  return before - sum(map(len, roles.values()))


def _made(entry: Entry, made: Collection[Key]) -> bool:
  """Whether all is there that the operation needs; initial values always are."""
  return all(key in made or key.number == INITIAL for key in needs(entry.operation))


def _odd(event: Event) -> str:
  """The problem with an event, or ''."""
  match event:
    case events.Odd():
      return event.reason
    case events.Dropped() if event.peer == event.role:
      return f"{event.count} events before it could not be written ({event.reason})"
    case events.Commit() as op:
      each = op.learners, op.incarnations, op.steps, op.tokens, op.step_tokens
      if not op.learners or {*map(len, each)} != {len(set(op.learners))}:
        return f"commit has learners, incarnations, steps, tokens and tokens of a step {each}"
  return ""
