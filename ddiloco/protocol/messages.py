"""What learners and syncer shards say to each other, and how that looks on the wire. PURE.

Learner -1 is the evaluator: a member that receives and never trains. Shards speak
to each other only about copies of what they committed (`checkpoint/buddy.py`).

A frame is one header and one raw payload (a fragment in a wire codec, or nothing). The header is a
msgpack list, never pickle: [format, run id, plan id, [kind, [fields...]]], and its CRC-32. `decode`
accepts only exactly well-formed frames; everything else raises `MalformedMessage`, which the
transports count and drop.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import reprlib
import sys
import types
import typing
import zlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta, msgpack

EVALUATOR = -1
INITIAL, NOTHING = -1, -2  # rounds: what made the initial value; no value at all
MADE = "made"  # codec of an initial value that its receiver makes: the payload is its digest
MAX_LEARNERS = 1 << 16  # their numbers are smaller
MAX_GLOBAL_STEP = 1 << 40
MAX_NUMBER = 1 << 62

# What a field may hold: `decode` and `values.py` refuse everything else.
Count = Annotated[int, Meta(ge=0, lt=MAX_NUMBER)]
CountOrNone = Annotated[int, Meta(ge=-1, lt=MAX_NUMBER)]  # -1: there is none
RoundId = Annotated[int, Meta(ge=NOTHING, lt=MAX_NUMBER)]
GlobalStep = Annotated[int, Meta(ge=0, lt=MAX_GLOBAL_STEP)]  # one liar must not end the run
Learner = Annotated[int, Meta(ge=EVALUATOR, lt=MAX_LEARNERS)]
Donor = Annotated[int, Meta(ge=0, lt=MAX_LEARNERS)]
Seconds = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
Text = Annotated[str, Meta(max_length=1 << 12)]
_Long = Meta(max_length=1 << 16)
Counts = Annotated[tuple[Count, ...], _Long]
CountsOrNone = Annotated[tuple[CountOrNone, ...], _Long]
RoundIds = Annotated[tuple[RoundId, ...], _Long]
Learners = Annotated[tuple[Learner, ...], _Long]
if TYPE_CHECKING:
  Payload = Any  # bytes-like to the transports, opaque to the protocol, no part of a header
else:
  Payload = None  # nor of a state at rest, which is read by these hints


# --- learner -> shard -----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Hello:
  """I am (newly) here: welcome me and send what I lack of the fragments you own."""

  learner: Learner
  incarnation: Count
  rounds: RoundIds  # that made what I have, as in `Report`; (): I have nothing
  whole: bool = False  # I cannot make the initial values that you have: send them


@dataclasses.dataclass(frozen=True)
class Report:
  """Sent after every inner step: how far I am, per fragment of this shard (same order as owned)."""

  learner: Learner
  incarnation: Count
  global_step: GlobalStep  # as I know it
  step_seconds: Seconds  # smoothed duration of my inner step
  versions: CountsOrNone  # last version received, -1: none yet
  rounds: RoundIds  # that made them: versions may be counted twice, rounds never
  steps_since_sync: Counts  # inner steps, what the due rule counts
  leaving: bool  # I make no more steps: take what I have, and I am gone
  snapshot: Count  # the newest that my state is captured for
  idle_seconds: Seconds = 0.0  # that the newest version waited here for the ends of my steps


@dataclasses.dataclass(frozen=True)
class Push:
  """My outer gradient for one round: delta = base - local, in the wire codec."""

  learner: Learner
  incarnation: Count
  fragment: CountOrNone
  round: CountOrNone
  base_version: CountOrNone
  steps: Count  # inner steps in this delta
  tokens: Count  # tokens in this delta
  global_step: GlobalStep
  snapshot: Count
  count: Count  # pushes I have made, for consistent snapshots (`protocol/states.py`)
  codec: Text
  payload: Payload = None


@dataclasses.dataclass(frozen=True)
class Value:
  """The value of a fragment as I last received it: what a shard that lost it asked me for."""

  learner: Learner
  incarnation: Count
  fragment: CountOrNone
  version: Count
  round: CountOrNone
  merged_tokens: Count
  participants: Learners
  merged_rounds: CountsOrNone
  snapshot: Count
  count: Count  # as in `Push`
  seal: Text  # as it came with the value
  payload: Payload = None


@dataclasses.dataclass(frozen=True)
class RequestMoments:
  """I come into a run under way: send me a peer's inner optimizer moments of these fragments."""

  learner: Learner
  incarnation: Count
  fragments: Counts


@dataclasses.dataclass(frozen=True)
class Moments:
  """My inner optimizer's moments of one fragment, for the learners that asked."""

  learner: Learner
  incarnation: Count
  fragment: CountOrNone
  donation: Count  # how many I had made before in this incarnation, and this one
  global_step: GlobalStep
  count: Count  # the optimizer's steps so far
  payload: Payload = None  # f32, one vector of the fragment's size after the other


@dataclasses.dataclass(frozen=True)
class Goodbye:
  """I leave on purpose; do not wait for me."""

  learner: Learner
  incarnation: Count


# --- shard -> learner -----------------------------------------------------------------------------
# Each names the incarnation it is meant for, so that a restarted learner never takes up what was
# said to its predecessor.


@dataclasses.dataclass(frozen=True)
class Welcome:
  """Answer to hello: the run's step, and which fragments I own; what you lack follows."""

  shard: Count
  incarnation: Count
  learner_incarnation: Count
  global_step: GlobalStep
  fragments: Counts
  rounds: RoundIds  # that made their newest values
  snapshot: Count


@dataclasses.dataclass(frozen=True)
class Pull:
  """Send me your outer gradient for this fragment at your next step boundary."""

  shard: Count
  incarnation: Count
  learner_incarnation: Count
  fragment: CountOrNone
  round: CountOrNone
  base_version: CountOrNone
  snapshot: Count


@dataclasses.dataclass(frozen=True)
class RequestValue:
  """You have a newer value of this fragment than I: send it to me."""

  shard: Count
  incarnation: Count
  learner_incarnation: Count
  fragment: CountOrNone


@dataclasses.dataclass(frozen=True)
class ProvideMoments:
  """A learner joins: send me your inner optimizer's moments of this fragment."""

  shard: Count
  incarnation: Count
  learner_incarnation: Count
  fragment: CountOrNone


@dataclasses.dataclass(frozen=True)
class ForwardMoments:
  """What a peer gave for you, as `Moments`."""

  shard: Count
  incarnation: Count
  learner_incarnation: Count
  fragment: CountOrNone
  donor: Donor
  donor_incarnation: Count
  donation: Count
  global_step: GlobalStep
  count: Count
  payload: Payload = None


@dataclasses.dataclass(frozen=True)
class Publish:
  """A fragment's new version. `base_version` -1: a full value; else the update to that version."""

  shard: Count
  incarnation: Count
  learner_incarnation: Count
  fragment: CountOrNone
  round: CountOrNone  # the round that made it; -1: the initial value
  version: Count
  base_version: CountOrNone
  base_round: RoundId  # that made the base: version numbers may come twice; -2 if there is none
  global_step: GlobalStep
  merged_tokens: Count  # merged into this fragment so far
  participants: Learners  # of the round that made this version
  merged_rounds: CountsOrNone  # learner and the last round its push was merged in, in turn
  snapshot: Count
  count: Count  # commits of this shard, for consistent snapshots (`protocol/states.py`)
  seal: Text  # proves that this value is the shard's (`network/keys.py`); "": it has no key
  codec: Text
  payload: Payload = None

  def merged_round(self, learner: int) -> int:
    """The last round this learner's push was merged in; -1: none."""
    learners, rounds = self.merged_rounds[::2], self.merged_rounds[1::2]  # no dict: may be long
    at = learners.index(learner) if learner in learners else len(rounds)
    return rounds[at] if at < len(rounds) else -1


@dataclasses.dataclass(frozen=True)
class Refusal:
  """Your push was rejected, and why: go back to the fragment's base, your changes are discarded."""

  shard: Count
  incarnation: Count
  learner_incarnation: Count
  fragment: CountOrNone
  round: CountOrNone
  rejoin: bool  # you are quarantined: start afresh and say hello
  reason: Text


# --- shard -> shard -------------------------------------------------------------------------------
# A buddy holds a copy of the newest commit of every fragment of its neighbour. `shard` is the
# sender.


@dataclasses.dataclass(frozen=True)
class Replica:
  """A commit: from its owner to the buddy, or back to an owner that has restarted."""

  shard: Count
  incarnation: Count
  owner: Count  # shard whose fragment this is
  fragment: CountOrNone
  version: Count
  merged_tokens: Count
  last_round: CountOrNone
  global_step: GlobalStep  # when its round began
  momentum_round: (
    CountOrNone  # that made the momentum: an older one if only the value was given back
  )
  participants: Learners
  merged_rounds: CountsOrNone  # learner and its last merged round in turn
  merged_global_steps: CountsOrNone  # learner and the global step when that round began, in turn
  snapshot: Count  # the newest that its owner's state was captured for before this commit
  # Payload: whole, f32: the published value, then the momentum if any; or what learners get, as a
  # change of what that round made.
  base_round: RoundId  # NOTHING: whole
  codec: Text
  has_momentum: bool
  payload: Payload = None


@dataclasses.dataclass(frozen=True)
class Replicated:
  """I hold your fragment at this version now, or lack what the change was made of."""

  shard: Count
  incarnation: Count
  fragment: CountOrNone
  version: Count
  kept: bool  # False: send it whole


@dataclasses.dataclass(frozen=True)
class Recover:
  """I have restarted: send me what you hold of mine."""

  shard: Count
  incarnation: Count


@dataclasses.dataclass(frozen=True)
class Recovered:
  """These of your fragments I hold; their replicas are on their way."""

  shard: Count
  incarnation: Count
  asked_by: Count  # incarnation of the owner; an answer to a dead one is ignored
  fragments: Counts


ToShard = Hello | Report | Push | Value | RequestMoments | Moments | Goodbye
ToLearner = Welcome | Pull | RequestValue | ProvideMoments | ForwardMoments | Publish | Refusal
Message = ToShard | ToLearner | Replica | Replicated | Recover | Recovered
TO_SHARD = (Hello, Report, Push, Value, RequestMoments, Moments, Goodbye)
TO_LEARNER = (Welcome, Pull, RequestValue, ProvideMoments, ForwardMoments, Publish, Refusal)
BETWEEN_SHARDS = (Replica, Replicated, Recover, Recovered)
KINDS: Mapping[str, type] = {cls.__name__: cls for cls in (*TO_SHARD, *TO_LEARNER, *BETWEEN_SHARDS)}
# Everything else is control and never queues behind these.
BULK = (Push, Value, Moments, ForwardMoments, Publish, Replica)


def pairs(flat: tuple[int, ...]) -> list[tuple[int, int]]:
  """((a, b), (c, d)) of (a, b, c, d); an odd end is left out."""
  return list(zip(flat[::2], flat[1::2]))


def flat(mapping: Mapping[int, int]) -> tuple[int, ...]:
  """A mapping as messages carry it: keys and values in turn, in order of the keys."""
  return tuple(itertools.chain.from_iterable(sorted(mapping.items())))


# --- on the wire ----------------------------------------------------------------------------------

WIRE_FORMAT = 6
SEAL_BYTES = 4  # at the end of every header
MAX_HEADER_BYTES = 1 << 20
SHOWN_BYTES = 256  # a wrong value that is longer is not repeated in the error
Parts = Annotated[list[msgspec.Raw], Meta(max_length=64)]  # values as they are in bytes
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
