"""From event logs to a trace. PURE.

A trace hides nothing: an event of an unknown kind, one that lacks a field, and a torn line in the
middle of an incarnation are problems that say where. Only the end of one may be missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ddiloco.protocol import events
from ddiloco.protocol.events import Event, parse_role
from ddiloco.trace.operations import Entry, Incarnation, Problem, Trace

_EXCHANGED = (events.CopyOut, events.Resend, events.Donated, events.Inherited)
_TAKEN = (events.Stage, events.Apply)
_SAVED = (events.Started, events.Captured, events.Saved)
OF: Mapping[str, tuple[type[Event], ...]] = {
  "learner": (*_SAVED, events.Restored, events.Step, *_EXCHANGED, *_TAKEN),
  "syncer": (*_SAVED, events.Owns, events.Commit),
  "evaluator": _TAKEN,
}
# Events of these roles that moved nothing. Any other kind is an error: a trace hides nothing.
_ALL = (
  *(events.Joined, events.Stopped, events.Ignored, events.Dropped, events.Crash),
  *(events.Traffic, events.Unsaved, events.Compiled, events.Hung),
  *(events.Launched, events.Profiled, events.Unprofiled),
)
BYSTANDERS: Mapping[str, tuple[type[Event], ...]] = {
  "learner": (*_ALL, events.Push, events.Refused, events.NoDonor),
  "syncer": (
    *(*_ALL, events.Member, events.Round, events.Abandoned, events.Unreplicated),
    *(events.Replicated, events.Lost, events.Recalled, events.Snapshot, events.Uncommitted),
  ),
  "evaluator": (*(*_ALL, events.Started, events.Evaluation, events.Unevaluated, events.Refused),),
}


def read(logs: Mapping[str, Iterable[Event | None]]) -> Trace:
  """The trace in the lines of every role's event log, in order; None is a line that is torn.

  A kill tears the last line an incarnation writes; a torn one anywhere else is a problem, as is an
  event of an unknown kind, or one whose fields are not as they must be.
  """
  roles: dict[str, tuple[Incarnation, ...]] = {}
  problems: list[Problem] = []
  for role, lines in sorted(logs.items()):
    kind, number = parse_role(role)
    if kind not in OF:
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
      elif isinstance(event, OF[kind]):
        entries.append(Entry(role, number, incarnation, line, event.time, event))
    if lives:
      roles[role] = tuple(
        Incarnation(role, number, i, tuple(entries)) for i, entries in sorted(lives.items())
      )
  return Trace(roles, tuple(problems))


def _odd(role: str, event: Event) -> str:
  """What is wrong with an event of such a role, or ''."""
  match event:
    case events.Odd():
      return event.reason
    case events.Commit() as op:
      if not len(op.incarnations) == len(op.learners) == len(set(op.learners)) > 0:
        return f"commit names learners {op.learners} and incarnations {op.incarnations}"
  known = isinstance(event, OF[role] + BYSTANDERS[role])
  return "" if known else f"event of unknown kind {event.kind!r}"
