"""What endpoints of the network transport say to each other, under the protocol's messages.

One msgpack list per frame: [kind, fields...]; a chunk of a fragment is followed by its raw bytes in
a part of its own. `decode` accepts only exactly well-formed frames and raises `MalformedMessage` on
everything else, like `core.messages.decode`.
"""

from __future__ import annotations

import dataclasses
import reprlib
import typing
from typing import Any

import msgpack

from ddiloco.core.wire import MAX_HEADER_BYTES, MalformedMessage

MAX_FRAME_BYTES = MAX_HEADER_BYTES + 4096
SESSION_BYTES = 8


@dataclasses.dataclass(frozen=True)
class Greeting:
  """I am `address`. Sent until answered; the answer is a greeting too and names my session."""

  run_id: str
  plan_id: str
  address: str
  incarnation: int
  session: bytes  # random, of this endpoint: nobody else can speak in it
  answers: bytes  # the session this answers, b"": nobody's
  oldest: int  # transfer that I may still send chunks of; all before it are over
  chunk_bytes: int  # the smaller one of both ends counts
  streams: int  # connections for chunks


@dataclasses.dataclass(frozen=True)
class Refused:
  """You may not speak here, and why."""

  session: bytes  # yours
  fenced: bool  # for good: a newer incarnation has your address
  reason: str


@dataclasses.dataclass(frozen=True)
class Unknown:
  """I do not know you (any more): greet me again."""


@dataclasses.dataclass(frozen=True)
class Beat:
  """I am still here."""


@dataclasses.dataclass(frozen=True)
class Acknowledged:
  """These chunks have arrived, pairs of transfer and offset flattened."""

  chunks: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Control:
  """A message of the protocol without payload: its header."""

  header: bytes


@dataclasses.dataclass(frozen=True)
class Chunk:
  """A part of a message with payload; its bytes follow. Every chunk can be the first to arrive."""

  session: bytes  # the sender's
  transfer: int  # counts the sender's messages with payload to this peer
  offset: int
  total: int  # bytes of the whole payload
  header: bytes


Frame = Greeting | Refused | Unknown | Beat | Acknowledged | Control | Chunk
_KINDS = {
  cls.__name__: cls for cls in (Greeting, Refused, Unknown, Beat, Acknowledged, Control, Chunk)
}
_HINTS = {name: tuple(typing.get_type_hints(cls).items()) for name, cls in _KINDS.items()}
_MOST_BYTES = {"header": MAX_HEADER_BYTES, "session": SESSION_BYTES, "answers": SESSION_BYTES}


def encode(frame: Frame) -> bytes:
  """The bytes of a frame."""
  kind = type(frame).__name__
  return msgpack.packb([kind, *(getattr(frame, name) for name, _ in _HINTS[kind])])


def decode(data: bytes | memoryview) -> Frame:
  """The frame in `data`.

  Raises:
    MalformedMessage: it is none.
  """
  if len(data) > MAX_FRAME_BYTES:
    raise MalformedMessage(f"frame of {len(data)} bytes exceeds {MAX_FRAME_BYTES}")
  try:
    parts = msgpack.unpackb(data, use_list=False, max_array_len=1 << 16, max_str_len=1 << 12)
  except (ValueError, msgpack.exceptions.UnpackException) as error:
    raise MalformedMessage(f"frame is not msgpack: {error}") from error
  if not isinstance(parts, tuple) or not parts or not isinstance(parts[0], str):
    raise MalformedMessage("frame is not a list that starts with its kind")
  hints = _HINTS.get(parts[0])
  if hints is None or len(parts) - 1 != len(hints):
    raise MalformedMessage(f"unknown kind or number of fields: {reprlib.repr(parts)}")
  for (name, hint), value in zip(hints, parts[1:]):
    if not _valid(name, hint, value):
      raise MalformedMessage(f"{parts[0]}.{name} = {reprlib.repr(value)} is not a valid {hint}")
  return _KINDS[parts[0]](*parts[1:])


def _valid(name: str, hint: Any, value: Any) -> bool:
  if hint is int:
    return type(value) is int and 0 <= value < 1 << 62
  if hint is bytes:
    return type(value) is bytes and len(value) <= _MOST_BYTES[name]
  if hint in (str, bool):
    return type(value) is hint
  return (
    isinstance(value, tuple)
    and len(value) % 2 == 0
    and all(type(v) is int and 0 <= v < 1 << 62 for v in value)
  )
