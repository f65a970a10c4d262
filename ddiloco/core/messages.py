"""What learners and syncer shards say to each other, and how it looks on the wire. PURE.

A frame is one msgpack header and one raw payload (a fragment in a wire codec, or nothing). The
header is a short list, never pickle: [format, run id, plan id, kind, fields...]. `decode` accepts
only exactly well-formed frames; everything else raises `MalformedMessage`, which the transports
count and drop. Learner -1 is the evaluator: a member that receives and never trains. Shards speak
to each other only about copies of what they committed (`runtime/replica.py`).
"""

from __future__ import annotations

import dataclasses
import math
import reprlib
import typing
from collections.abc import Mapping
from typing import Any

import msgpack

WIRE_FORMAT = 1
MAX_HEADER_BYTES = 1 << 20
EVALUATOR = -1
INITIAL, NOTHING = -1, -2  # rounds: what made the initial value; no value at all
MAX_LEARNERS = 1 << 16  # their numbers are smaller
Payload = Any  # bytes-like to the transports, opaque to the protocol


class MalformedMessage(ValueError):
  """A frame that is not exactly what this protocol sends; the text says what is wrong."""


# --- learner -> shard ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Hello:
  """I am (newly) here: welcome me and send what I lack of the fragments you own."""

  learner: int
  incarnation: int
  rounds: tuple[int, ...]  # that made what I have, as in `Report`; (): I have nothing


@dataclasses.dataclass(frozen=True)
class Report:
  """Sent after every inner step: how far I am, per fragment of this shard (same order as owned)."""

  learner: int
  incarnation: int
  clock: int  # the run's step as I know it
  step_seconds: float  # smoothed duration of my inner step
  versions: tuple[int, ...]  # last version received, -1: none yet
  rounds: tuple[int, ...]  # that made them: versions may be counted twice, rounds never
  since: tuple[int, ...]  # inner steps since the last sync, what the due rule counts
  leaving: bool  # I make no more steps: take what I have, and I am gone
  snapshot: int  # the newest I have recorded my state for


@dataclasses.dataclass(frozen=True)
class Push:
  """My outer gradient for one round: delta = base - local, in the wire codec."""

  learner: int
  incarnation: int
  fragment: int
  round: int
  base_version: int
  steps: int  # inner steps in this delta
  tokens: int  # tokens in this delta
  clock: int
  snapshot: int
  seen: tuple[int, ...]  # vector clock (`core/causality.py`)
  codec: str
  payload: Payload = None


@dataclasses.dataclass(frozen=True)
class Value:
  """The value of a fragment as I last received it: what a shard that lost it asked me for."""

  learner: int
  incarnation: int
  fragment: int
  version: int
  round: int
  merged_tokens: int
  participants: tuple[int, ...]
  merged_rounds: tuple[int, ...]
  snapshot: int
  seen: tuple[int, ...]
  payload: Payload = None


@dataclasses.dataclass(frozen=True)
class Ask:
  """I come into a run under way: send me somebody's inner optimizer moments of these fragments."""

  learner: int
  incarnation: int
  fragments: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Moments:
  """My inner optimizer's moments of one fragment, for whoever asked."""

  learner: int
  incarnation: int
  fragment: int
  donation: int  # how many I had made before in this incarnation, and this one
  clock: int
  count: int  # the optimizer's steps so far
  payload: Payload = None  # f32, one vector of the fragment's size after the other


@dataclasses.dataclass(frozen=True)
class Goodbye:
  """I leave on purpose; do not wait for me."""

  learner: int
  incarnation: int


# --- shard -> learner ---------------------------------------------------------------------------
# Each names the incarnation it is meant for, so that a restarted learner never takes up what was
# said to its predecessor.


@dataclasses.dataclass(frozen=True)
class Welcome:
  """Answer to hello: the run's step, and which fragments I own; what you lack follows."""

  shard: int
  incarnation: int
  learner_incarnation: int
  clock: int
  fragments: tuple[int, ...]
  rounds: tuple[int, ...]  # that made their newest values
  snapshot: int


@dataclasses.dataclass(frozen=True)
class Pull:
  """Send me your outer gradient for this fragment at your next step boundary."""

  shard: int
  incarnation: int
  learner_incarnation: int
  fragment: int
  round: int
  base_version: int
  snapshot: int


@dataclasses.dataclass(frozen=True)
class Recall:
  """You have a newer value of this fragment than I: send it to me."""

  shard: int
  incarnation: int
  learner_incarnation: int
  fragment: int


@dataclasses.dataclass(frozen=True)
class Donate:
  """Somebody joins: send me your inner optimizer's moments of this fragment."""

  shard: int
  incarnation: int
  learner_incarnation: int
  fragment: int


@dataclasses.dataclass(frozen=True)
class Inherit:
  """What a peer gave for you, as `Moments`."""

  shard: int
  incarnation: int
  learner_incarnation: int
  fragment: int
  donor: int
  donor_incarnation: int
  donation: int
  clock: int
  count: int
  payload: Payload = None


@dataclasses.dataclass(frozen=True)
class Publish:
  """A fragment's new version. `base_version` -1: a full value; else the update to that version."""

  shard: int
  incarnation: int
  learner_incarnation: int
  fragment: int
  round: int  # the round that made it; -1: the initial value
  version: int
  base_version: int
  base_round: int  # that made the base: version numbers may come twice; -2 if there is none
  clock: int
  merged_tokens: int  # merged into this fragment so far
  participants: tuple[int, ...]  # of the round that made this version
  merged_rounds: tuple[int, ...]  # learner and the last round its push was merged in, in turn
  snapshot: int
  seen: tuple[int, ...]  # vector clock (`core/causality.py`)
  codec: str
  payload: Payload = None

  def merged_round(self, learner: int) -> int:
    """The last round this learner's push was merged in; -1: none."""
    return dict(pairs(self.merged_rounds)).get(learner, -1)


@dataclasses.dataclass(frozen=True)
class Refusal:
  """Your push was rejected, and why: go back to the fragment's base, your changes are discarded."""

  shard: int
  incarnation: int
  learner_incarnation: int
  fragment: int
  round: int
  rejoin: bool  # you are quarantined: start afresh and say hello
  reason: str


# --- shard -> shard -----------------------------------------------------------------------------
# A buddy holds a copy of the newest commit of every fragment of its neighbour. `shard` is the
# sender.


@dataclasses.dataclass(frozen=True)
class Replica:
  """A commit: from its owner to the buddy, or back to an owner that has restarted."""

  shard: int
  incarnation: int
  owner: int  # shard whose fragment this is
  fragment: int
  version: int
  merged_tokens: int
  last_round: int
  momentum_round: int  # that made the momentum: an older one if only the value was given back
  participants: tuple[int, ...]
  merged_rounds: tuple[int, ...]  # learner and its last merged round in turn
  snapshot: int  # the newest its owner had recorded before this commit
  has_view: bool  # payload, f32: value, then the view if it differs, then the momentum if any
  has_momentum: bool
  payload: Payload = None


@dataclasses.dataclass(frozen=True)
class Replicated:
  """I hold your fragment at this version now."""

  shard: int
  incarnation: int
  fragment: int
  version: int


@dataclasses.dataclass(frozen=True)
class Recover:
  """I have restarted: send me what you hold of mine."""

  shard: int
  incarnation: int


@dataclasses.dataclass(frozen=True)
class Recovered:
  """These of your fragments I hold; their replicas are on their way."""

  shard: int
  incarnation: int
  asked_by: int  # incarnation of the owner; what a dead one asked answers nobody
  fragments: tuple[int, ...]


ToShard = Hello | Report | Push | Value | Ask | Moments | Goodbye
ToLearner = Welcome | Pull | Recall | Donate | Inherit | Publish | Refusal
Message = ToShard | ToLearner | Replica | Replicated | Recover | Recovered
TO_SHARD = (Hello, Report, Push, Value, Ask, Moments, Goodbye)
TO_LEARNER = (Welcome, Pull, Recall, Donate, Inherit, Publish, Refusal)
BETWEEN_SHARDS = (Replica, Replicated, Recover, Recovered)
KINDS: Mapping[str, type] = {cls.__name__: cls for cls in (*TO_SHARD, *TO_LEARNER, *BETWEEN_SHARDS)}
BULK = (
  Push,
  Value,
  Moments,
  Inherit,
  Publish,
  Replica,
)  # everything else is control and never queues behind these
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


def encode(message: Message, run_id: str, plan_id: str) -> tuple[bytes, Payload]:
  """(header, payload) of a message; the payload is passed on as it is, without a copy."""
  values = [getattr(message, f.name) for f in _header_fields(type(message))]
  header = [WIRE_FORMAT, run_id, plan_id, type(message).__name__, *values]
  return msgpack.packb(header), getattr(message, "payload", None)


def decode(header: bytes, payload: Payload, run_id: str, plan_id: str) -> Message:
  """The message in a frame.

  Raises:
    MalformedMessage: not a frame of this format, run or plan, or a field of wrong type or range.
  """
  if len(header) > MAX_HEADER_BYTES:
    raise MalformedMessage(f"header of {len(header)} bytes exceeds {MAX_HEADER_BYTES}")
  try:
    parts = msgpack.unpackb(header, use_list=False, max_array_len=1 << 16, max_str_len=1 << 12)
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


def pairs(flat: tuple[int, ...]) -> list[tuple[int, int]]:
  """((a, b), (c, d)) of (a, b, c, d); an odd end is left out."""
  return list(zip(flat[::2], flat[1::2]))


def flat(mapping: Mapping[int, int]) -> tuple[int, ...]:
  """A mapping as messages carry it: keys and values in turn, in order of the keys."""
  return tuple(number for pair in sorted(mapping.items()) for number in pair)


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
