"""What learners and syncer shards say to each other (`wire.py`: how it looks in bytes). PURE.

Learner -1 is the evaluator: a member that receives and never trains. Shards speak
to each other only about copies of what they committed (`checkpoint/buddy.py`).
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

EVALUATOR = -1
INITIAL, NOTHING = -1, -2  # rounds: what made the initial value; no value at all
MADE = "made"  # codec of an initial value that its receiver makes: the payload is its digest
MAX_LEARNERS = 1 << 16  # their numbers are smaller
MAX_GLOBAL_STEP = 1 << 40
MAX_NUMBER = 1 << 62

# What a field may hold: `wire.py` and `values.py` refuse everything else.
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
  count: Count  # pushes I have made, for consistent snapshots (`protocol/causality.py`)
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
  count: Count  # commits of this shard, for consistent snapshots (`protocol/causality.py`)
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
