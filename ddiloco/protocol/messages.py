"""The messages between learners and syncer shards, and their form on the wire. PURE.

Learner -1 is the evaluator: a member that receives and never trains. Shards speak
to each other only about copies of what they committed (`checkpoint/buddy.py`).

A frame is one header and one raw payload (a fragment in a wire codec, or nothing). The header is
the message as a msgpack list, never pickle, and its CRC-32. `decode` accepts only exactly
well-formed frames; everything else raises `MalformedMessage`, which the transports count and drop.
A connection says once to which run and format its messages belong (`network.frames.Greeting`).
"""

from __future__ import annotations

import sys
import typing
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, msgpack

from ddiloco.config.schema import MAX_LEARNERS
from ddiloco.protocol.values import Frozen, MalformedMessage, OnWire, exactly, replace

EVALUATOR = -1
INITIAL, NOTHING = -1, -2  # in place of a round: the initial value; no value at all
MADE = "made"  # codec of an initial value that its receiver makes: the payload is its digest
MAX_GLOBAL_STEP = 1 << 40
MAX_NUMBER = 1 << 62

# The types and ranges of fields: `decode` and `values.py` refuse everything else.
Count = Annotated[int, Meta(ge=0, lt=MAX_NUMBER)]
CountOrNone = Annotated[int, Meta(ge=-1, lt=MAX_NUMBER)]  # -1: there is none
RoundId = Annotated[int, Meta(ge=NOTHING, lt=MAX_NUMBER)]
GlobalStep = Annotated[int, Meta(ge=0, lt=MAX_GLOBAL_STEP)]  # bounded: one liar cannot end the run
Learner = Annotated[int, Meta(ge=EVALUATOR, lt=MAX_LEARNERS)]
Donor = Annotated[int, Meta(ge=0, lt=MAX_LEARNERS)]
Seconds = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
Text = Annotated[str, Meta(max_length=1 << 12)]
_Long = Meta(max_length=1 << 16)
Counts = Annotated[tuple[Count, ...], _Long]
CountsOrNone = Annotated[tuple[CountOrNone, ...], _Long]
RoundIds = Annotated[tuple[RoundId, ...], _Long]
ByLearner = Mapping[Learner, CountOrNone]  # its round, or its global step
if TYPE_CHECKING:
  Payload = Any  # bytes-like to the transports, opaque to the protocol, no part of a header
else:
  Payload = None  # a saved state, which is read by these hints, has no payload either


# --- learner -> shard -----------------------------------------------------------------------------


class ToShard(OnWire):
  """A message of a learner, or of the evaluator."""

  learner: Learner
  incarnation: Count  # of the learner


class Report(ToShard):
  """Sent after every inner step: how far I am, per fragment of this shard (same order as owned).

  The first report to a shard makes its sender a member, to which the shard sends what it lacks.
  """

  global_step: GlobalStep  # as I know it
  step_seconds: Seconds  # smoothed duration of my inner step
  versions: CountsOrNone  # last version received, -1: none yet
  rounds: RoundIds  # that made these versions: a version number may come twice, a round id never
  steps_since_sync: Counts  # inner steps, as the due rule counts them
  leaving: bool  # I make no more steps: merge what I have, then I leave
  snapshot: Count  # the newest snapshot that my state is captured for
  idle_seconds: Seconds = 0.0  # how long the newest version waited here for the ends of my steps
  joins: bool = False  # I do not know yet whether my values are the newest: welcome me
  whole: bool = False  # I cannot make the initial values that you have: send them


class Push(ToShard):
  """My outer gradient for one round: delta = base - local, in the wire codec."""

  fragment: CountOrNone
  round: CountOrNone
  base_version: CountOrNone
  steps: Count  # inner steps in this delta
  tokens: Count  # tokens in this delta
  snapshot: Count
  count: Count  # pushes I have made, for consistent snapshots (`protocol/states.py`)
  codec: Text
  payload: Payload = None


class Value(ToShard):
  """A fragment's value as I last received it, for its shard, which lost it and asked me."""

  publish: Publish  # that made it, without its payload
  snapshot: Count
  count: Count  # as in `Push`
  payload: Payload = None


class RequestMoments(ToShard):
  """I join a run under way: send me a peer's inner optimizer moments of these fragments."""

  fragments: Counts  # (): I wait for none any more


class Moments(ToShard):
  """My inner optimizer's moments of one fragment, for the learners that asked."""

  fragment: CountOrNone
  donation: Count  # number of this donation in my incarnation, from 1
  count: Count  # the optimizer's steps so far
  payload: Payload = None  # f32, one vector of the fragment's size after the other


class Goodbye(ToShard):
  """I leave on purpose; do not wait for me."""


# --- shard -> learner -----------------------------------------------------------------------------


class ToLearner(OnWire):
  """A message of a shard to one incarnation of a learner, which ignores those to earlier ones."""

  shard: Count
  incarnation: Count  # of the shard
  learner_incarnation: Count


class Welcome(ToLearner):
  """Answer to a learner that joins: the run's step, and my fragments; what you lack follows."""

  global_step: GlobalStep
  fragments: Counts
  rounds: RoundIds  # that made the newest values of these fragments
  snapshot: Count


class Pull(ToLearner):
  """Send me your outer gradient for this fragment at your next step boundary."""

  fragment: CountOrNone
  round: CountOrNone
  base_version: CountOrNone
  snapshot: Count


class RequestValue(ToLearner):
  """You have a newer value of this fragment than I: send it to me."""

  fragment: CountOrNone


class ProvideMoments(ToLearner):
  """A learner joins: send me your inner optimizer's moments of this fragment."""

  fragment: CountOrNone


class ForwardMoments(ToLearner):
  """A peer's moments of a fragment, for you; see `Moments`."""

  fragment: CountOrNone
  donor: Donor
  donor_incarnation: Count
  donation: Count
  count: Count
  payload: Payload = None


class Publish(ToLearner):
  """A fragment's new version: the update to the value that `base_round` made, or a whole value."""

  fragment: CountOrNone
  round: CountOrNone  # the round that made it; -1: the initial value
  version: Count
  base_round: RoundId  # NOTHING: whole; no version, since version numbers may come twice
  global_step: GlobalStep
  merged_tokens: Count  # merged into this fragment so far
  merged_rounds: ByLearner  # the last round that merged its push
  snapshot: Count
  count: Count  # commits of this shard, for consistent snapshots (`protocol/states.py`)
  seal: Text  # proves that this value is the shard's (`Sealer`); "": the run has no keys
  codec: Text
  payload: Payload = None

  def merged_round(self, learner: int) -> int:
    """The last round that merged this learner's push; -1: none."""
    return self.merged_rounds.get(learner, -1)


class Rejection(ToLearner):
  """Your push was rejected, and why: go back to the fragment's base, your changes are discarded.

  Round -1 without `rejoin`: your request for moments, since there is no donor.
  """

  fragment: CountOrNone
  round: CountOrNone
  rejoin: bool  # you are quarantined: start afresh
  reason: Text


# --- shard -> shard -------------------------------------------------------------------------------
# A buddy holds a copy of the newest commit of every fragment of its neighbour.


class BetweenShards(OnWire):
  """A message of a shard to another one."""

  shard: Count  # the sender
  incarnation: Count  # of the sender


class FragmentState(Frozen):
  """What its shard knows of a fragment's newest version, in all incarnations of the shard."""

  index: Count  # of the fragment
  version: Count = 0
  merged_tokens: Count = 0
  merged_rounds: ByLearner = {}  # the last round that merged its push
  merged_global_steps: ByLearner = {}  # the global step to which its merged steps can reach
  last_round: CountOrNone = INITIAL
  global_step: GlobalStep = 0  # when the last round began
  snapshot: Count = 0  # newest captured before this value, which may depend on later messages

  @property
  def participants(self) -> set[int]:
    """The learners whose pushes the last round merged."""
    return {m for m, merged in self.merged_rounds.items() if merged == self.last_round}


class Replica(BetweenShards):
  """A commit: from its owner to the buddy, or back to an owner that has restarted."""

  owner: Count  # shard whose fragment this is
  state: FragmentState
  momentum_round: CountOrNone  # that made the momentum: older if a learner gave back the value
  # Payload: either whole, in f32: the published value, then the momentum if any. Or the update that
  # learners get, to the value that `base_round` made.
  base_round: RoundId  # NOTHING: whole
  codec: Text
  payload: Payload = None


class Replicated(BetweenShards):
  """I hold your fragment as of this round now, or lack the base of the update."""

  fragment: CountOrNone
  round: CountOrNone  # of the copy: version numbers may come twice
  kept: bool  # False: send it whole


class Recover(BetweenShards):
  """I have restarted: send me the copies you hold of my fragments, and those of your own anew."""


class Recovered(BetweenShards):
  """I hold these of your fragments; their replicas are on their way."""

  asked_by: Count  # incarnation of the owner that asked; a later one ignores this answer
  fragments: Counts
  rounds: RoundIds  # that made these copies


Message = ToShard | ToLearner | BetweenShards
KINDS: Sequence[type[OnWire]] = [
  kind for family in typing.get_args(Message) for kind in family.__subclasses__()
]
# All other messages are control and never queue behind these.
BULK = tuple(kind for kind in KINDS if hasattr(kind, "payload"))


# --- on the wire ----------------------------------------------------------------------------------

WIRE_FORMAT = 12
CHECKSUM_BYTES = 4  # at the end of every header
MAX_HEADER_BYTES = 1 << 20
_decode = exactly(KINDS, "message")


def encode(message: Message) -> tuple[bytes, Payload]:
  """(header, payload) of a message; the payload is not copied."""
  payload = getattr(message, "payload", None)
  bare = message if payload is None else replace(message, payload=None)
  return with_checksum(msgpack.encode(bare)), payload


def with_checksum(body: bytes) -> bytes:
  """A header: its body and the body's CRC-32, so that a flipped bit never changes a number.

  Payloads have no checksum: links off loopback are authenticated (TLS), and a checksum over all
  bytes would cost as much as copying them. A shard screens the pushes that it merges.
  """
  return body + zlib.crc32(body).to_bytes(CHECKSUM_BYTES, "big")


def decode(header: bytes, payload: Payload) -> Message:
  """The message in a frame.

  Raises:
    MalformedMessage: not a frame of this format, or a field of wrong type or range.
  """
  if len(header) > MAX_HEADER_BYTES:
    raise MalformedMessage(f"header of {len(header)} bytes exceeds {MAX_HEADER_BYTES}")
  body = header[:-CHECKSUM_BYTES]
  if with_checksum(body) != header:
    raise MalformedMessage("header is damaged: its CRC-32 does not fit")
  message = _decode(body)
  if isinstance(message, BULK) != (payload is not None):
    wrong = "without its payload" if payload is None else "carries no payload"
    raise MalformedMessage(f"{type(message).__name__} {wrong}")
  return message if payload is None else replace(message, payload=payload)


def frame_bytes(header: bytes, payload: Payload) -> int:
  """Size of a frame on the wire."""
  return len(header) + (memoryview(payload).nbytes if payload is not None else 0)
