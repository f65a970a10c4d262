"""How messages look on the wire. PURE.

A frame is one header and one raw payload (a fragment in a wire codec, or nothing). The header is a
msgpack list, never pickle: [format, run id, plan id, [kind, [fields...]]], and its CRC-32. `decode`
accepts only exactly well-formed frames; everything else raises `MalformedMessage`, which the
transports count and drop.
"""

from __future__ import annotations

import functools
import reprlib
import types
import typing
import zlib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import msgpack

from ddiloco.protocol.messages import BULK, KINDS, Message, Payload, Report, Text

WIRE_FORMAT = 6
SEAL_BYTES = 4  # at the end of every header
MAX_HEADER_BYTES = 1 << 20
SHOWN_BYTES = 256  # a wrong value that is longer is not repeated in the error
Parts = Annotated[list[msgspec.Raw], msgspec.Meta(max_length=64)]  # values as they are in bytes
_REFUSED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # no text; too deep
_KIND_AND_FIELDS = msgpack.Decoder(tuple[Text, msgspec.Raw])


class MalformedMessage(ValueError):
  """A frame that is not exactly what this protocol sends; the text says what is wrong."""


class Schema:
  """Dataclasses as msgpack lists [kind, [fields...]], each field as its type hint says.

  A value can be written in one way only: what is accepted encodes to the same bytes again, so an
  integer is never taken for a float. A `payload` is no field here, it travels beside the list.
  """

  def __init__(self, kinds: Iterable[type]):
    self._kinds: dict[str, tuple[type, Mapping[str, Any], msgpack.Decoder]] = {}
    for kind in kinds:
      hints = typing.get_type_hints(kind, include_extras=True)
      hints.pop("payload", None)
      decoder = msgpack.Decoder(types.GenericAlias(tuple, tuple(hints.values())))
      self._kinds[kind.__name__] = kind, hints, decoder

  def encode(self, value: Any) -> bytes:
    """The list of a value of one of the kinds."""
    name = type(value).__name__
    return msgpack.encode((name, [getattr(value, field) for field in self._kinds[name][1]]))

  def decode(self, data: bytes) -> tuple[type, tuple[Any, ...]]:
    """(kind, fields) of a list.

    Raises:
      MalformedMessage: an unknown kind, or a field of wrong type or range, which is named.
    """
    try:
      name, fields = _KIND_AND_FIELDS.decode(data)
    except _REFUSED as error:
      raise MalformedMessage(f"not a msgpack list of kind and fields: {error}") from error
    if name not in self._kinds:
      raise MalformedMessage(f"unknown kind {reprlib.repr(name)}")
    kind, hints, decoder = self._kinds[name]
    try:
      values = decoder.decode(fields)
    except _REFUSED as error:
      raise MalformedMessage(_fault(name, hints, fields)) from error
    if msgpack.encode((name, values)) != data:
      raise MalformedMessage(_fault(name, hints, fields))
    return kind, values


def _fault(kind: str, hints: Mapping[str, Any], fields: msgspec.Raw) -> str:
  """What is wrong with the fields of a kind."""
  try:
    parts = msgpack.decode(fields, type=Parts)
  except _REFUSED as error:
    return f"the fields of {kind} are not a msgpack list: {error}"
  if len(parts) != len(hints):
    return f"{kind} has {len(hints)} fields, got {len(parts)}"
  for (name, hint), part in zip(hints.items(), parts):
    try:
      if msgpack.encode(msgpack.decode(part, type=hint)) == bytes(part):
        continue
      reason = "another type, or written in another way"
    except _REFUSED as error:
      reason = str(error)
    return f"{kind}.{name} = {_shown(part)} is not valid: {reason}"
  return f"{kind} is written in another way"


def _shown(part: msgspec.Raw) -> str:
  """A value for an error, shortened."""
  data = bytes(part)
  if len(data) > SHOWN_BYTES:
    return f"({len(data)} bytes of msgpack)"
  try:
    return reprlib.repr(msgpack.decode(data))
  except (*_REFUSED, TypeError, ValueError):  # a key that cannot be one, ...
    return reprlib.repr(data)


_SCHEMA = Schema(KINDS.values())


def encode(message: Message, run_id: str, plan_id: str) -> tuple[bytes, Payload]:
  """(header, payload) of a message; the payload is passed on as it is, without a copy."""
  header = seal(envelope(run_id, plan_id) + _SCHEMA.encode(message))
  return header, getattr(message, "payload", None)


def seal(body: bytes) -> bytes:
  """A header: its body and their CRC-32, so that a flipped bit is never taken for a number.

  Payloads have none: links off loopback are authenticated (TLS), and a sum over all bytes would
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
  body, start = bytes(header[:-SEAL_BYTES]), envelope(run_id, plan_id)
  if seal(body) != bytes(header):
    raise MalformedMessage("header is damaged: its CRC-32 does not fit")
  if not body.startswith(start):
    raise MalformedMessage(_stranger(body, run_id, plan_id))
  kind, values = _SCHEMA.decode(body[len(start) :])
  if (kind in BULK) != (payload is not None):
    wrong = "without its payload" if kind in BULK else "carries no payload"
    raise MalformedMessage(f"{kind.__name__} {wrong}")
  return kind(*values) if payload is None else kind(*values, payload)


@functools.lru_cache(maxsize=16)
def envelope(run_id: str, plan_id: str) -> bytes:
  """How every header of a run begins: all before the message, for which None stands here."""
  return msgpack.encode((WIRE_FORMAT, run_id, plan_id, None))[:-1]


def report_start(run_id: str, plan_id: str) -> bytes:
  """How the header of every report begins, so that it is known without decoding it."""
  return envelope(run_id, plan_id) + msgpack.encode((Report.__name__, None))[:-1]


def _stranger(body: bytes, run_id: str, plan_id: str) -> str:
  """Why a header that does not begin as this run's do is none."""
  try:
    parts = msgpack.decode(body, type=Parts)
  except _REFUSED as error:
    return f"header is not a msgpack list of format, run id, plan id and message: {error}"
  expected = {"format": WIRE_FORMAT, "run id": run_id, "plan id": plan_id}
  for (name, want), part in zip(expected.items(), parts):
    if bytes(part) != msgpack.encode(want):
      return f"{name} is {_shown(part)}, this run has {want!r}"
  return f"header is a list of {len(parts)} values, not of format, run id, plan id and message"


def frame_bytes(header: bytes, payload: Payload) -> int:
  """Size of a frame on the wire."""
  return len(header) + (memoryview(payload).nbytes if payload is not None else 0)
