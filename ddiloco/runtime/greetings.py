"""Who may speak: what a role says of itself when it connects, and what a shard objects to."""

from __future__ import annotations

import dataclasses
import time

from ddiloco.core import wire
from ddiloco.core.wire import MalformedMessage
from ddiloco.runtime.frames import SESSION_BYTES, Greeting
from ddiloco.runtime.transport import claimed_sender

FUTURE_SECONDS = 3600  # clocks differ, but not by so much
MAX_STREAMS = 64
CHUNK_BYTES = (4096, 1 << 30)


@dataclasses.dataclass(frozen=True)
class Run:
  """What a transport must know of its run; every role of it says the same."""

  run_id: str
  plan_id: str  # of all that the roles of a run must have in common
  max_payload_bytes: int  # of one message
  queue_bytes: int  # of fragments waiting for, or from, one peer


def seconds_since_2020() -> int:
  """The incarnation of a process that starts now: grows over restarts without stored state."""
  return int(time.time()) - 1_577_836_800


def control_route(session: bytes) -> bytes:
  """The routing id of a session's control connection."""
  return b"c" + session


def stream_route(session: bytes, stream: int) -> bytes:
  """The routing id of a session's connection number `stream` for fragments."""
  return b"s" + session + b"%d" % stream


def session_of(route: bytes) -> bytes:
  """Whose connection it is."""
  return route[1 : 1 + SESSION_BYTES]


def objection(
  run: Run, greeting: Greeting, owner: str | None, known: tuple[bytes, int] | None
) -> tuple[str, bool]:
  """Why a greeting is not accepted, "" if it is; and whether that is for good.

  Args:
    run: this side's.
    greeting: what the far end says.
    owner: whom the key of its connection belongs to; None: without keys.
    known: session and incarnation that have its address already.
  """
  address, number = greeting.address, greeting.incarnation
  low, high = CHUNK_BYTES
  if not 1 <= greeting.streams <= MAX_STREAMS or not low <= greeting.chunk_bytes <= high:
    return f"{greeting.streams} streams of {greeting.chunk_bytes} bytes are out of range", False
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
  if number > seconds_since_2020() + FUTURE_SECONDS:
    return f"incarnation {number} lies in the future: set that host's clock", False
  if known and known[0] != greeting.session and number <= known[1]:
    return f"incarnation {known[1]} of {address} is here already", True
  return "", False


def check_header(run: Run, sender: str, header: bytes) -> None:
  """Before a payload is let in: its header must be a message of this run in the sender's own name.

  Raises:
    MalformedMessage: it is not.
  """
  message = wire.decode(header, b"", run.run_id, run.plan_id)
  if claimed_sender(message) != sender:
    raise MalformedMessage(f"{sender} speaks as {claimed_sender(message)}")
