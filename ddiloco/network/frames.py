"""What endpoints of the network transport say to each other, under the protocol's messages.

On a connection, frame follows frame: `PREFIX` says how long this one is and how many raw bytes of a
payload come after it; the frame itself is one msgpack list [kind, [fields...]]. `decode` accepts
only exactly well-formed frames and raises `MalformedMessage` on everything else, like
`protocol.messages.decode`.
"""

from __future__ import annotations

import dataclasses
import struct
import typing
from typing import Annotated

from msgspec import Meta

from ddiloco.protocol.messages import MAX_HEADER_BYTES, Count, MalformedMessage, Schema, Text

PREFIX = struct.Struct(">IQ")
MAX_FRAME_BYTES = MAX_HEADER_BYTES + 4096
SESSION_BYTES = 8
Session = Annotated[bytes, Meta(max_length=SESSION_BYTES)]
Header = Annotated[bytes, Meta(max_length=MAX_HEADER_BYTES)]


@dataclasses.dataclass(frozen=True)
class Greeting:
  """I am `address`: the first frame of a connection for control; the answer is a greeting too."""

  run_id: Text
  plan_id: Text
  address: Text
  incarnation: Count
  session: Session  # random, of this endpoint
  streams: Count  # connections for fragments that the dialing side makes


@dataclasses.dataclass(frozen=True)
class Attach:
  """I belong to a session: the first frame of a connection for fragments."""

  session: Session  # of the dialing side
  stream: Count  # which of its connections


@dataclasses.dataclass(frozen=True)
class GreetingRefused:
  """You may not speak here, and why."""

  fenced: bool  # for good: a newer incarnation has your address
  reason: Text
  after: Count = 0  # the least incarnation that may have it once the newer one is dead; 0: none
  silent_seconds: Count = 0  # since the newer one was heard


@dataclasses.dataclass(frozen=True)
class Beat:
  """I am still here."""


@dataclasses.dataclass(frozen=True)
class Dropped:
  """So many of your messages I have dropped since I last said so, the newest for this reason."""

  count: Count
  reason: Text


@dataclasses.dataclass(frozen=True)
class Control:
  """A message of the protocol without payload: its header."""

  header: Header


@dataclasses.dataclass(frozen=True)
class Bulk:
  """A message with payload. Every stream carries its part of the payload after such a frame."""

  number: Count  # counts the sender's messages with payload to this peer
  total: Count  # bytes of the whole payload
  header: Header


Frame = Greeting | Attach | GreetingRefused | Beat | Dropped | Control | Bulk
_SCHEMA = Schema(typing.get_args(Frame))


def encode(frame: Frame, payload_bytes: int = 0) -> bytes:
  """A frame as it is sent, before so many bytes of payload."""
  data = _SCHEMA.encode(frame)
  return PREFIX.pack(len(data), payload_bytes) + data


def decode(data: bytes) -> Frame:
  """The frame in `data`, which is what came after the prefix.

  Raises:
    MalformedMessage: it is none.
  """
  if len(data) > MAX_FRAME_BYTES:
    raise MalformedMessage(f"frame of {len(data)} bytes exceeds {MAX_FRAME_BYTES}")
  kind, values = _SCHEMA.decode(data)
  return kind(*values)


def part(stream: int, streams: int, total: int) -> slice:
  """The bytes of a payload that this one of so many streams carries."""
  size = -(-total // streams)
  return slice(min(total, stream * size), min(total, (stream + 1) * size))
