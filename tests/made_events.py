"""Events made by hand: what a test does not care about is nothing of its type."""

from __future__ import annotations

import functools
import typing

import msgspec

from ddiloco.protocol.events import KINDS, Event

NOTHING = {int: 0, float: 0.0, str: "", bool: False}


def made(time: float, role: str, kind: str, incarnation: int = 0, **fields) -> Event:
  """An event of this kind, as its reader gets it."""
  fields = {name: _as_json(value) for name, value in fields.items()}
  head = {"time": time, "role": role, "incarnation": incarnation, "kind": kind}
  return msgspec.convert({**nothing(kind), **head, **fields}, KINDS[kind], str_keys=True)


def changed(event: Event, **fields) -> Event:
  """The same with other fields."""
  return msgspec.structs.replace(event, **fields)


@functools.cache
def nothing(kind: str) -> dict:
  """What this kind cannot do without."""
  hints = typing.get_type_hints(KINDS[kind])
  found = {}
  for field in msgspec.structs.fields(KINDS[kind]):
    if field.required:
      hint = hints[field.name]
      of = typing.get_origin(hint)
      found[field.name] = (
        "rebase" if of is typing.Literal else NOTHING[hint] if hint in NOTHING else of()
      )
  return found


def _as_json(value):
  return {str(key): each for key, each in value.items()} if isinstance(value, dict) else value
