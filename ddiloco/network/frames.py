"""What endpoints say to each other, under the protocol's messages, and who may speak.

On a connection, frame follows frame: `PREFIX` says how long this one is and how many raw bytes of a
payload come after it; the frame itself is one msgpack list [kind, [fields...]]. `decode` accepts
only exactly well-formed frames and raises `MalformedMessage` on everything else, like
`protocol.messages.decode`.
"""

from __future__ import annotations

import dataclasses
import struct
import time
import typing
from typing import Annotated, Protocol

from msgspec import Meta

from ddiloco.network.transport import open_frame
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


# --- Who may speak: what a role says of itself when it connects, and what a shard objects to

FUTURE_SECONDS = 86_400  # clocks are wrong by hours; further ahead none is let in, on either side
MAX_STREAMS = 64


@dataclasses.dataclass(frozen=True)
class RunIdentity:
  """What a transport must know of its run; every role of it says the same."""

  run_id: str
  plan_id: str  # of all that the roles of a run must have in common
  max_payload_bytes: int  # of one message
  queue_bytes: int  # of fragments waiting for, or from, one peer


class Newer(Protocol):
  """A peer with a greater incarnation than the one that asks for its address."""

  incarnation: int
  heard_at: float


def incarnation_at(unix_seconds: float) -> int:
  """The incarnation of a process that starts at this time: seconds since 2020."""
  return int(unix_seconds) - 1_577_836_800


def seconds_since_2020() -> int:
  """The incarnation of a process that starts now, unless a former life had a greater one."""
  return incarnation_at(time.time())


def ahead(incarnation: int) -> str:
  """Why an incarnation is not let in by this host's clock, "" if it is."""
  seconds = incarnation - seconds_since_2020()
  if seconds <= FUTURE_SECONDS:
    return ""
  return (
    f"incarnation {incarnation} is {seconds / 3600:.0f} h ahead of the clock of who is asked."
    " Fix: set the clock that is wrong, there or here"
  )


def objection(
  run: RunIdentity, greeting: Greeting, owner: str | None, known: tuple[bytes, int] | None
) -> tuple[str, bool]:
  """Why a greeting is not accepted, "" if it is; and whether that is for good.

  Args:
    run: this side's.
    greeting: what the far end says.
    owner: the role that the key of its connection belongs to; None: without keys.
    known: session and incarnation that have its address already.
  """
  address, number = greeting.address, greeting.incarnation
  if not 1 <= greeting.streams <= MAX_STREAMS or len(greeting.session) != SESSION_BYTES:
    return (
      f"{greeting.streams} streams (1 to {MAX_STREAMS}), or its session, are out of range",
      False,
    )
  if owner is not None and owner != address:
    return f"this key belongs to {owner}, not to {address}", False
  if greeting.run_id != run.run_id:
    return f"this is run {run.run_id!r}, not {greeting.run_id!r}", False
  if greeting.plan_id != run.plan_id:
    return (
      "this run was started with other settings of model, data, inner, sync, outer, seed or"
      f" run.total_tokens ({run.plan_id} here, {greeting.plan_id} there)",
      False,
    )
  if reason := ahead(number):
    return reason, False
  if known and known[0] != greeting.session and number <= known[1]:
    return f"incarnation {known[1]} of {address} is here already", True
  return "", False


def doubt(incarnation: int, known: int) -> str:
  """Why a shard that was dialed is not believed, "" if it is; `known`: its newest incarnation."""
  if incarnation < known:
    return f"incarnation {incarnation} is an old one, {known} was here before"
  return ahead(incarnation)


def refusal(reason: str, newer: Newer | None) -> GreetingRefused:
  """What answers a greeting that is not accepted; `newer` has its address, or None."""
  if not newer:
    return GreetingRefused(False, reason)
  silent_seconds = int(time.monotonic() - newer.heard_at)
  return GreetingRefused(True, reason, newer.incarnation + 1, silent_seconds)


def check_header(run: RunIdentity, sender: str, incarnation: int, header: bytes) -> None:
  """Before a payload is let in: its header must be a message of this run in the sender's own name.

  Raises:
    MalformedMessage: it is not.
  """
  open_frame((run.run_id, run.plan_id), sender, incarnation, header, b"")
