"""States of the reducers as JSON values and back, for what outlives a process. PURE.

Exactly the fields of the dataclasses, by their type hints; anything else is refused, so that a
record of another format is never taken for a state.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from ddiloco.core import learner_state, messages, syncer_state

T = TypeVar("T")


class NotAState(ValueError):
  """The values are not what `to_json` gives for this class; the text names the field."""


def to_json(value: Any) -> Any:
  """Dataclasses as objects, mappings as lists of pairs, tuples as lists."""
  if dataclasses.is_dataclass(value):
    return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
  if isinstance(value, Mapping):
    return [[to_json(k), to_json(v)] for k, v in sorted(value.items())]
  if isinstance(value, tuple):
    return [to_json(each) for each in value]
  if value is None or isinstance(value, bool | int | str):
    return value
  if isinstance(value, float):
    return value if math.isfinite(value) else str(value)
  raise TypeError(f"{type(value).__name__} is no part of a state")


def from_json(cls: type[T], value: Any) -> T:
  """The state that `to_json` was given.

  Raises:
    NotAState: a field is missing, unknown or of another type.
  """
  return _read(cls, value, cls.__name__)


def _read(hint: Any, value: Any, where: str) -> Any:
  origin, arguments = typing.get_origin(hint), typing.get_args(hint)
  if origin in (typing.Union, types.UnionType):  # only "something or None" occurs
    some = next(a for a in arguments if a is not type(None))
    return None if value is None else _read(some, value, where)
  if dataclasses.is_dataclass(hint):
    hints = _hints(typing.cast(type, hint))
    if not isinstance(value, dict) or value.keys() != hints.keys():
      raise NotAState(f"{where}: is no {typing.cast(type, hint).__name__}")
    return typing.cast(type, hint)(
      **{name: _read(h, value[name], f"{where}.{name}") for name, h in hints.items()}
    )
  if origin is tuple:
    if not isinstance(value, list):
      raise NotAState(f"{where}: is no list")
    return tuple(_read(arguments[0], each, f"{where}[{i}]") for i, each in enumerate(value))
  if isinstance(origin, type) and issubclass(origin, Mapping):
    if not isinstance(value, list) or not all(isinstance(e, list) and len(e) == 2 for e in value):
      raise NotAState(f"{where}: is no list of pairs")
    key, each = arguments
    return {_read(key, k, where): _read(each, v, f"{where}[{k}]") for k, v in value}
  if hint is float and value in ("inf", "-inf"):
    return float(value)
  if hint is Any and value is None:  # a payload, which is kept elsewhere
    return None
  if hint is float and type(value) is int:
    return float(value)
  if type(value) is not hint:
    raise NotAState(f"{where}: {value!r} is no {getattr(hint, '__name__', hint)}")
  return value


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
  names = {**vars(messages), **vars(learner_state), **vars(syncer_state)}
  return typing.get_type_hints(cls, names)
