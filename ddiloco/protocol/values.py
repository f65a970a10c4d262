"""Frozen values, of which the reducers' states are made: copies with changes, and JSON. PURE.

States are written as JSON where they outlive a process. The JSON has exactly the fields of the
dataclasses, by their type hints; anything else is refused, so that a text of another format is
never taken for a state.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any, TypeVar, dataclass_transform

import msgspec

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
class Frozen:
  """The base of values that never change: every subclass is a frozen dataclass."""

  def __init_subclass__(cls) -> None:
    dataclasses.dataclass(frozen=True)(cls)


if TYPE_CHECKING:
  from dataclasses import replace
else:

  def replace(value: T, **changes: Any) -> T:
    """`dataclasses.replace`, four times as fast, for classes that are nothing but their fields.

    The original sets every field through `object.__setattr__`. The reducers copy states several
    times a message, and the number of messages grows as learners x shards x steps.

    Raises:
      TypeError: the class has no such field.
    """
    new = object.__new__(type(value))
    fields = new.__dict__
    fields.update(value.__dict__)
    if not changes.keys() <= fields.keys():
      raise TypeError(f"{type(value).__name__} has no field {sorted(changes.keys() - fields)}")
    fields.update(changes)
    return new


def put(values: tuple[T, ...], i: int, value: T) -> tuple[T, ...]:
  """The tuple with another value at position `i`."""
  return (*values[:i], value, *values[i + 1 :])


def less(values: tuple[T, ...], value: T) -> tuple[T, ...]:
  """The tuple without this value, which it has once."""
  i = values.index(value)
  return (*values[:i], *values[i + 1 :])


class NotAState(ValueError):
  """The JSON value is not one that `to_json` makes of this class; the text says why."""


def to_json(value: Any) -> Any:
  """Dataclasses and mappings as objects, tuples as lists; keys become text, as JSON requires.

  Raises:
    TypeError: the value has a part that no state has, for example keys that are tuples.
  """
  return msgspec.to_builtins(value, str_keys=True)


def readable(cls: type[T]) -> type[T]:
  """Class decorator: several threads may give the class to `from_json` at once.

  msgspec (0.22) analyses a dataclass at its first use, and crashes the process if two threads do so
  at the same time. Here the first use is during the import of the module, in one thread.
  """
  msgspec.json.Decoder(cls)
  return cls


def from_json(cls: type[T], value: Any) -> T:
  """The state, a dataclass, of which `to_json` made this value.

  Raises:
    NotAState: a field is missing, unknown, of another type, or out of its range.
  """
  try:
    state: Any = msgspec.convert(value, cls, str_keys=True)
  except msgspec.ValidationError as error:
    raise NotAState(f"{cls.__name__}: {error}") from error
  # msgspec fills missing fields with defaults and drops unknown ones: compare to find both.
  read = to_json(dataclasses.asdict(state))
  if json.dumps(read, sort_keys=True) != json.dumps(value, sort_keys=True):
    raise NotAState(f"{cls.__name__}: a field is missing, unknown or written in another way")
  return state


__all__ = ["Frozen", "NotAState", "from_json", "less", "put", "readable", "replace", "to_json"]
