"""Frozen values, the parts of states and messages: copies with changes, JSON, and lists. PURE.

States are written as JSON where they outlive a process. The JSON has exactly the fields of the
values, by their type hints; anything else is refused, so that a text of another format is never
taken for a state. The same holds of the lists that messages are on the wire.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, dataclass_transform

import msgspec
from msgspec import msgpack
from msgspec.structs import replace as replace

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


# --- Lists on the wire

MAX_ERROR = 200  # characters of an error's text
_REFUSED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # no UTF-8; nested too deeply


class OnWire(Frozen, tag=True, array_like=True):
  """What is written as a msgpack list: the name of its class, and then every field."""


class MalformedMessage(ValueError):
  """A frame that is not exactly what this protocol sends; the text says what is wrong."""


def exactly(kinds: Iterable[type[OnWire]], what: str) -> Callable[[bytes], Any]:
  """A decoder of these classes, which takes only what `msgpack.encode` makes of them.

  So each value has one encoding only, no default replaces a missing field, and an integer is never
  taken for a float. The decoder raises `MalformedMessage`, whose text says `what` is not valid, and
  names the field where there is one.
  """
  decoder = msgpack.Decoder(typing.Union[tuple(kinds)])  # noqa: UP007
  fields = {msgpack.encode(kind.__name__): ("kind", *kind.__struct_fields__) for kind in kinds}

  def decode(data: bytes) -> Any:
    try:
      value = decoder.decode(data)
    except _REFUSED as error:
      # The error repeats a wrong name, which may be long, or control a terminal.
      text = "".join(c if c.isprintable() else "?" for c in str(error)[:MAX_ERROR])
      # A list's own bytes, three at most, come before the name of the kind.
      found = (names for kind, names in fields.items() if kind in data[: 3 + len(kind)])
      raise MalformedMessage(f"{what} is not valid: {_named(text, next(found, ()))}") from error
    if (again := msgpack.encode(value)) != data:
      both = [msgpack.decode(each, type=list[msgspec.Raw])[1:] for each in (data, again)]
      odd = [f"`{name}`" for name, x, y in zip(value.__struct_fields__, *both) if x != y]
      which = f"{type(value).__name__}: {', '.join(odd) or 'it'}"
      raise MalformedMessage(f"{which} is of another type, or written in another way")
    return value

  return decode


def _named(text: str, names: Sequence[str]) -> str:
  """msgspec's text about a list, with the names of fields for their places in the list."""
  for place, name in enumerate(names):
    text = text.replace(f"`$[{place}]", f"`{name}")
  return text
