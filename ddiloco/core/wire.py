"""How messages look on the wire. PURE.

A frame is one msgpack header and one raw payload (a fragment in a wire codec, or nothing). The
header is a short list, never pickle: [format, run id, plan id, kind, fields...], and its CRC-32.
`decode` accepts only exactly well-formed frames; everything else raises `MalformedMessage`, which
the transports count and drop.
"""

from __future__ import annotations

import dataclasses
import math
import reprlib
import typing
import zlib
from typing import Any

import msgpack

from ddiloco.core.messages import BULK, KINDS, MAX_LEARNERS, NOTHING, Message, Payload

WIRE_FORMAT = 2
SEAL_BYTES = 4  # at the end of every header
MAX_HEADER_BYTES = 1 << 20
LEAST = {  # of numbers that may be negative
  "rounds": NOTHING,
  "base_round": NOTHING,
  "seen": -(1 << 17),
  **dict.fromkeys(
    ("learner", "versions", "base_version", "round", "fragment", "participants", "last_round"), -1
  ),
  "merged_rounds": -1,
  "momentum_round": -1,
}
MAX_CLOCK = 1 << 40
LIMITS = {
  "learner": MAX_LEARNERS,
  "donor": MAX_LEARNERS,
  "participants": MAX_LEARNERS,
  "clock": MAX_CLOCK,
}


class MalformedMessage(ValueError):
  """A frame that is not exactly what this protocol sends; the text says what is wrong."""


def encode(message: Message, run_id: str, plan_id: str) -> tuple[bytes, Payload]:
  """(header, payload) of a message; the payload is passed on as it is, without a copy."""
  values = [getattr(message, f.name) for f in _header_fields(type(message))]
  header = [WIRE_FORMAT, run_id, plan_id, type(message).__name__, *values]
  return seal(msgpack.packb(header)), getattr(message, "payload", None)


def seal(body: bytes) -> bytes:
  """A header: its body and their CRC-32, so that a flipped bit is never taken for a number.

  Payloads have none: links off loopback are authenticated (CURVE), and a sum over all bytes would
  cost as much as copying them. What a shard merges is screened.
  """
  return body + zlib.crc32(body).to_bytes(SEAL_BYTES, "big")


def decode(header: bytes, payload: Payload, run_id: str, plan_id: str) -> Message:
  """The message in a frame.

  Raises:
    MalformedMessage: not a frame of this format, run or plan, or a field of wrong type or range.
  """
  if len(header) > MAX_HEADER_BYTES:
    raise MalformedMessage(f"header of {len(header)} bytes exceeds {MAX_HEADER_BYTES}")
  body = bytes(header[:-SEAL_BYTES])
  if seal(body) != bytes(header):
    raise MalformedMessage("header is damaged: its CRC-32 does not fit")
  try:
    parts = msgpack.unpackb(body, use_list=False, max_array_len=1 << 16, max_str_len=1 << 12)
  except (ValueError, msgpack.exceptions.UnpackException) as error:
    raise MalformedMessage(f"header is not msgpack: {error}") from error
  if not isinstance(parts, tuple) or len(parts) < 4:
    raise MalformedMessage("header is not a list of at least four values")
  expected = {"format": WIRE_FORMAT, "run id": run_id, "plan id": plan_id}
  for (name, want), got in zip(expected.items(), parts):
    if type(got) is not type(want) or got != want:  # True and 1.0 equal 1, and are not
      raise MalformedMessage(f"{name} is {reprlib.repr(got)}, this run has {want!r}")
  kind = KINDS.get(parts[3]) if isinstance(parts[3], str) else None
  if kind is None:
    raise MalformedMessage(f"unknown kind {reprlib.repr(parts[3])}")
  fields = _header_fields(kind)
  if len(parts) - 4 != len(fields):
    raise MalformedMessage(f"{kind.__name__} has {len(fields)} fields, got {len(parts) - 4}")
  values = {}
  for field, value in zip(fields, parts[4:]):
    _check(kind.__name__, field, value)
    values[field.name] = value
  if kind in BULK:
    if payload is None:
      raise MalformedMessage(f"{kind.__name__} without its payload")
    values["payload"] = payload
  elif payload is not None:
    raise MalformedMessage(f"{kind.__name__} carries no payload")
  return kind(**values)


def frame_bytes(header: bytes, payload: Payload) -> int:
  """Size of a frame on the wire."""
  return len(header) + (memoryview(payload).nbytes if payload is not None else 0)


def _header_fields(kind: type) -> tuple[dataclasses.Field, ...]:
  return tuple(f for f in dataclasses.fields(kind) if f.name != "payload")


def _check(kind: str, field: dataclasses.Field, value: Any) -> None:
  hint = _HINTS[kind][field.name]
  least = LEAST.get(field.name, 0)
  limit = LIMITS.get(field.name, 1 << 62)
  if hint == tuple[int, ...]:
    ok = isinstance(value, tuple) and all(type(v) is int and least <= v < limit for v in value)
  elif hint is int:
    ok = type(value) is int and least <= value < limit
  elif hint is float:
    ok = type(value) is float and math.isfinite(value) and value >= 0
  else:
    ok = type(value) is hint
  if not ok:
    raise MalformedMessage(f"{kind}.{field.name} = {reprlib.repr(value)} is not a valid {hint}")


_HINTS = {name: typing.get_type_hints(cls) for name, cls in KINDS.items()}
