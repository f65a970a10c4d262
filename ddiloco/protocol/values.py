"""Frozen values, the parts of the reducers' states: copies with changes, and JSON. PURE.

States are written as JSON where they outlive a process. The JSON has exactly the fields of the
values, by their type hints; anything else is refused, so that a text of another format is never
taken for a state.
"""

from __future__ import annotations

import json
from typing import Any, TypeVar, dataclass_transform

import msgspec
from msgspec.structs import replace

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class Frozen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
  """The base of values that never change; `replace` makes changed copies.

  A default of {} is a new mapping for each value.
  """


def put(values: tuple[T, ...], i: int, value: T) -> tuple[T, ...]:
  """The tuple with another value at position `i`."""
  return (*values[:i], value, *values[i + 1 :])


def less(values: tuple[T, ...], value: T) -> tuple[T, ...]:
  """The tuple without this value, which occurs in it once."""
  i = values.index(value)
  return (*values[:i], *values[i + 1 :])


class NotAState(ValueError):
  """The JSON value is not one that `to_json` makes of this class; the text says why."""


def to_json(value: Any) -> Any:
  """Values and mappings as objects, tuples as lists; keys become text, as JSON requires.

  Raises:
    TypeError: the value has a part that no state has, for example keys that are tuples.
  """
  return msgspec.to_builtins(value, str_keys=True)


def readable(cls: type[T]) -> type[T]:
  """Class decorator: several threads may give the class to `from_json` at once.

  msgspec (0.22) analyses a class at its first use, and crashes the process if two threads do so at
  the same time. Here the first use is during the import of the module, in one thread.
  """
  msgspec.json.Decoder(cls)
  return cls


def from_json(cls: type[T], value: Any) -> T:
  """The inverse of `to_json`.

  Raises:
    NotAState: a field is missing, unknown, of another type, or out of its range.
  """
  try:
    state: Any = msgspec.convert(value, cls, str_keys=True)
  except msgspec.ValidationError as error:
    raise NotAState(f"{cls.__name__}: {error}") from error
  # msgspec fills missing fields with defaults and takes integers for floats: compare to find both.
  if json.dumps(to_json(state), sort_keys=True) != json.dumps(value, sort_keys=True):
    raise NotAState(f"{cls.__name__}: a field is missing, unknown or written in another way")
  return state


__all__ = ["Frozen", "NotAState", "from_json", "less", "put", "readable", "replace", "to_json"]
