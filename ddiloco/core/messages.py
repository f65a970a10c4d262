"""What learners and syncer shards say to each other (`core/wire.py`: how it looks in bytes). PURE.

Learner -1 is the evaluator: a member that receives and never trains. Shards speak
to each other only about copies of what they committed (`runtime/replica.py`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

EVALUATOR = -1
INITIAL, NOTHING = -1, -2  # rounds: what made the initial value; no value at all
MAX_LEARNERS = 1 << 16  # their numbers are smaller
Payload = Any  # bytes-like to the transports, opaque to the protocol


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
    learners, rounds = self.merged_rounds[::2], self.merged_rounds[1::2]  # no dict: may be long
    at = learners.index(learner) if learner in learners else len(rounds)
    return rounds[at] if at < len(rounds) else -1


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


def pairs(flat: tuple[int, ...]) -> list[tuple[int, int]]:
  """((a, b), (c, d)) of (a, b, c, d); an odd end is left out."""
  return list(zip(flat[::2], flat[1::2]))


def flat(mapping: Mapping[int, int]) -> tuple[int, ...]:
  """A mapping as messages carry it: keys and values in turn, in order of the keys."""
  return tuple(itertools.chain.from_iterable(sorted(mapping.items())))
