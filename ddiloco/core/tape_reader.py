"""From the lines of event logs to a tape. PURE.

A tape hides nothing: an event of an unknown kind, one that lacks a field, and a torn line in the
middle of a life are problems that say where. Only the end of a life may be missing.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from ddiloco.core.tape import (
  Apply,
  Commit,
  Cut,
  Donated,
  Entry,
  Inherited,
  Life,
  Operation,
  Owns,
  Problem,
  Recorded,
  Resend,
  Restored,
  Saved,
  Stage,
  Started,
  Step,
  Tape,
)

MODES = ("overwrite", "mix", "rebase")
_BOTH = (Started, Recorded, Saved)
OF: Mapping[str, Mapping[str, type]] = {
  role: {cls.__name__.lower(): cls for cls in kinds}
  for role, kinds in {
    "learner": (*_BOTH, Restored, Step, Cut, Resend, Stage, Apply, Donated, Inherited),
    "syncer": (*_BOTH, Owns, Commit),
    "evaluator": (Stage, Apply),
  }.items()
}
# Events of these roles that moved nothing. Any other kind is an error: a tape hides nothing.
_ALL = {"joined", "stopped", "ignored", "crash", "traffic", "unsaved", "compiled", "no_donor"}
BYSTANDERS: Mapping[str, frozenset[str]] = {
  "learner": frozenset(_ALL | {"push", "refused"}),
  "syncer": frozenset(
    _ALL
    | {"member", "round", "abandoned", "unreplicated", "replicated", "lost", "recalled"}
    | {"snapshot", "uncommitted"}
  ),
  "evaluator": frozenset(_ALL | {"started", "evaluation", "refused"}),
}


def read(logs: Mapping[str, Iterable[Mapping[str, Any] | None]]) -> Tape:
  """The tape in the lines of every role's event log, in order; None is a line that is torn.

  A kill tears the last line an incarnation writes; a torn one anywhere else is a problem, as is an
  event of an unknown kind, or one whose fields are not as they must be.
  """
  roles: dict[str, tuple[Life, ...]] = {}
  problems: list[Problem] = []
  for role, lines in sorted(logs.items()):
    kind, number = _parse_role(role)
    if kind not in OF:
      continue
    lives: dict[int, list[Entry]] = {}
    incarnation, torn_at = -1, 0
    for line, event in enumerate(lines, 1):
      if event is None:
        torn_at = line
        continue
      previous, incarnation = incarnation, int(event.get("incarnation", 0))
      if torn_at and previous == incarnation:
        problems.append(Problem(role, incarnation, torn_at, "cannot be read, and more follows"))
      torn_at = 0
      entries = lives.setdefault(incarnation, [])
      operation = _operation(kind, event)
      if isinstance(operation, str):
        problems.append(Problem(role, incarnation, line, operation))
      elif operation is not None:
        entries.append(Entry(role, number, incarnation, line, float(event["time"]), operation))
    if lives:
      roles[role] = tuple(
        Life(role, number, i, tuple(entries)) for i, entries in sorted(lives.items())
      )
  return Tape(roles, tuple(problems))


def _parse_role(role: str) -> tuple[str, int]:
  kind, _, number = role.partition("-")
  return kind, int(number) if number.isdigit() else -1


def _operation(role: str, event: Mapping[str, Any]) -> Operation | str | None:
  """The event's operation; None: it moved nothing; a text: what is wrong with it."""
  kind = event["kind"]
  cls = OF[role].get(kind)
  if cls is None:
    return None if kind in BYSTANDERS[role] else f"event of unknown kind {kind!r}"
  values: dict[str, Any] = {}
  for field, hint in _FIELDS[cls]:
    if field.name not in event:
      if field.default is dataclasses.MISSING:
        return f"{kind} lacks {field.name!r}"
      continue
    value = _typed(event[field.name], hint)
    if value is None and event[field.name] is not None:
      return f"{kind}.{field.name} = {event[field.name]!r} is not a valid {hint}"
    values[field.name] = value
  operation = cls(**values)
  return _odd(operation) or operation


def _odd(operation: Operation) -> str:
  """What no operation may say of itself, or ''."""
  match operation:
    case Stage(mode=mode) | Apply(mode=mode) if mode not in MODES:
      return f"mode = {mode!r} is none of {', '.join(MODES)}"
    case Commit() as op:
      if not len(op.incarnations) == len(op.learners) == len(set(op.learners)) > 0:
        return f"commit names learners {op.learners} and incarnations {op.incarnations}"
  return ""


def _typed(value: Any, hint: Any) -> Any:
  """The value as that type; None if it is not one."""
  if hint is int:
    return value if type(value) is int else None
  if hint is bool:
    return value if type(value) is bool else None
  if hint is str:
    return value if type(value) is str else None
  if hint == tuple[int, ...]:
    good = isinstance(value, list | tuple) and all(type(each) is int for each in value)
    return tuple(value) if good else None
  if hint == Mapping[str, int]:
    return value if isinstance(value, Mapping) else None
  return float(value) if type(value) in (int, float) else None


def _fields(cls: type) -> list[tuple[dataclasses.Field, Any]]:
  hints = typing.get_type_hints(cls)
  return [(field, hints[field.name]) for field in dataclasses.fields(cls)]


_FIELDS = {cls: _fields(cls) for kinds in OF.values() for cls in kinds.values()}
