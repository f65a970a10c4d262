"""What endpoints of the network transport say to each other, under the protocol's messages.

One msgpack list per frame: [kind, [fields...]]; a chunk of a fragment is followed by its raw bytes
in a part of its own. `decode` accepts only exactly well-formed frames and raises `MalformedMessage`
on everything else, like `protocol.wire.decode`.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Annotated

from msgspec import Meta

from ddiloco.protocol.messages import Count, Text
from ddiloco.protocol.wire import MAX_HEADER_BYTES, MalformedMessage, Schema

MAX_FRAME_BYTES = MAX_HEADER_BYTES + 4096
SESSION_BYTES = 8
Session = Annotated[bytes, Meta(max_length=SESSION_BYTES)]
Header = Annotated[bytes, Meta(max_length=MAX_HEADER_BYTES)]
Chunks = Annotated[tuple[tuple[Count, Count], ...], Meta(max_length=1 << 15)]


@dataclasses.dataclass(frozen=True)
class Greeting:
  """I am `address`. Sent until answered; the answer is a greeting too and names my session."""

  run_id: Text
  plan_id: Text
  address: Text
  incarnation: Count
  session: Session  # random, of this endpoint: nobody else can speak in it
  answers: Session  # the session this answers, b"": nobody's
  oldest: Count  # transfer that I may still send chunks of; all before it are over
  chunk_bytes: Count  # the smaller one of both ends counts
  streams: Count  # connections for chunks


@dataclasses.dataclass(frozen=True)
class GreetingRefused:
  """You may not speak here, and why."""

  session: Session  # yours
  fenced: bool  # for good: a newer incarnation has your address
  reason: Text
  after: Count = 0  # the least incarnation that may have it once the newer one is dead; 0: none
  silent_seconds: Count = 0  # since the newer one was heard


@dataclasses.dataclass(frozen=True)
class Unknown:
  """I do not know you (any more): greet me again."""


@dataclasses.dataclass(frozen=True)
class Beat:
  """I am still here."""


@dataclasses.dataclass(frozen=True)
class Dropped:
  """So many of your messages I have dropped since I last said so, the newest for this reason."""

  count: Count
  reason: Text


@dataclasses.dataclass(frozen=True)
class Acknowledged:
  """These chunks have arrived: transfer and offset of each."""

  chunks: Chunks


@dataclasses.dataclass(frozen=True)
class Wanted:
  """These chunks had no room here, and have now; pairs as in `Acknowledged`."""

  chunks: Chunks


@dataclasses.dataclass(frozen=True)
class Control:
  """A message of the protocol without payload: its header."""

  header: Header


@dataclasses.dataclass(frozen=True)
class Chunk:
  """A part of a message with payload; its bytes follow. Every chunk can be the first to arrive."""

  session: Session  # the sender's
  transfer: Count  # counts the sender's messages with payload to this peer
  offset: Count
  total: Count  # bytes of the whole payload
  header: Header


Frame = (
  Greeting | GreetingRefused | Unknown | Beat | Dropped | Acknowledged | Wanted | Control | Chunk
)
_SCHEMA = Schema(typing.get_args(Frame))


def encode(frame: Frame) -> bytes:
  """The bytes of a frame."""
  return _SCHEMA.encode(frame)


def decode(data: bytes) -> Frame:
  """The frame in `data`.

  Raises:
    MalformedMessage: it is none.
  """
  if len(data) > MAX_FRAME_BYTES:
    raise MalformedMessage(f"frame of {len(data)} bytes exceeds {MAX_FRAME_BYTES}")
  kind, values = _SCHEMA.decode(data)
  return kind(*values)
