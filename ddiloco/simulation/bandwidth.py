"""The bytes that a run moves over its links, and the time that a round takes. Pure arithmetic.

Every learner pushes each fragment to the shard that owns it, and gets the new version from there,
once in H steps. Shard s stands beside island s mod M and shares its link; traffic within one place
does not cross the link. With as many shards as islands the traffic is that of a sharded all-reduce.
Shards with a link of their own stand at places M, M + 1, ...

With two shards or more, each also sends every commit to its buddy, as learners get it.

Not counted: headers and control (under 1 % of real fragments, `scripts/bench_wire.py`), and the
model that a joining island gets (once, in f32).
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections.abc import Sequence

from ddiloco.config import SyncConfig
from ddiloco.core import codec, fragments
from ddiloco.protocol import events, rules

F32_BYTES = 4
PUSH_VECTORS = 4  # that making a push touches: local, base, delta, and the delta as it arrives
STAGE_VECTORS = 3  # that taking up a version touches: payload, base, and the staged value
# The share of an Ethernet frame of 1,514 bytes that a fragment gets: without the headers (14 bytes
# and 52 of IP and TCP), and TLS's 22 bytes for 16,384.
PAYLOAD_SHARE = 1448 / 1514 * 16384 / (16384 + 22)


def payload_bytes_per_second(gbps: float) -> float:
  """Bytes of fragments a second, over a link of `gbps` Gbit/s."""
  return PAYLOAD_SHARE * gbps * 1e9 / 8


@dataclasses.dataclass(frozen=True)
class Exchanged:
  """Bytes of one learner in one period: all fragments once."""

  push_bytes: int  # to the shards
  publish_bytes: int  # back

  def per_step(self, sync: SyncConfig) -> float:
    """Bytes per inner step, both ways together."""
    return (self.push_bytes + self.publish_bytes) / sync.sync_period


@dataclasses.dataclass(frozen=True)
class LinkTraffic:
  """Bytes over one place's link in one period, each way."""

  sent_bytes: int
  received_bytes: int
  copy_bytes: int  # the part of the sum of both that is copies for buddies

  @property
  def busier_bytes(self) -> int:
    """Bytes of the direction that carries more: links are full duplex."""
    return max(self.sent_bytes, self.received_bytes)


def exchanged(sizes: Sequence[int], sync: SyncConfig) -> Exchanged:
  """What one learner pushes and receives while every fragment is synced once.

  Args:
    sizes: values of every fragment.
    sync: its codecs.
  """
  return Exchanged(
    sum(codec.payload_bytes(size, sync.push_codec) for size in sizes),
    sum(codec.payload_bytes(size, sync.publish_codec) for size in sizes),
  )


def state_vectors(sync: SyncConfig, momentum: bool) -> int:
  """f32 vectors a shard keeps of each fragment: value, published value, momentum."""
  return 1 + (sync.publish_codec != "f32") + momentum


def commit_vectors(sync: SyncConfig, momentum: bool, pushes: int) -> int:
  """f32 vectors that a commit touches: each push twice, and the state in and out."""
  return 2 * pushes + 2 * state_vectors(sync, momentum)


def owned_sizes(sizes: Sequence[int], shard: int, num_shards: int) -> list[int]:
  """Values of the fragments that this shard owns."""
  return [sizes[p] for p in fragments.owned_by(shard, num_shards, len(sizes))]


def flows(
  sizes: Sequence[int], sync: SyncConfig, islands: int, apart: bool, listeners: int = 0
) -> list[LinkTraffic]:
  """The traffic of every place's link in one period: islands first, then shards that stand apart.

  Args:
    sizes: values of every fragment.
    sync: codecs and `num_shards`.
    islands: M, each with one learner.
    apart: shards have links of their own, instead of standing beside islands.
    listeners: members somewhere else that get every version and push nothing: the evaluator.
  """
  count = sync.num_shards
  at = [islands + s if apart else s % islands for s in range(count)]
  places = islands + count if apart else islands
  owned = [exchanged(owned_sizes(sizes, s, count), sync) for s in range(count)]
  push_bytes, publish_bytes = [0] * places, [0] * places  # of a place's shards, per learner
  copies_sent, copies_received = [0] * places, [0] * places
  for s, (place, mine) in enumerate(zip(at, owned)):
    push_bytes[place] += mine.push_bytes
    publish_bytes[place] += mine.publish_bytes
    buddy = at[(s + 1) % count]
    if buddy != place:
      copies_sent[place] += mine.publish_bytes
      copies_received[buddy] += mine.publish_bytes
  found = []
  for place in range(places):
    here = int(place < islands)  # learners at this place
    away = islands - here
    to_shards = here * (sum(push_bytes) - push_bytes[place])
    from_shards = here * (sum(publish_bytes) - publish_bytes[place])
    found.append(
      LinkTraffic(
        sent_bytes=to_shards + (away + listeners) * publish_bytes[place] + copies_sent[place],
        received_bytes=from_shards + away * push_bytes[place] + copies_received[place],
        copy_bytes=copies_sent[place] + copies_received[place],
      )
    )
  return found


# --- The time of a round where learners are at random points of their steps: the mean of many draws
#
# One fragment and its shard. The round begins at time 0 with the report of a learner, at the end of
# its step. Every learner that is asked copies out at the end of its step, makes a push and sends
# it. Pushes of all learners share the shard's link; a learner's own link is shared by the fragments
# that it copied out at the same end of a step. The commit waits for all pushes, or for the end of
# the grace window. A version is taken up at the end of a learner's step, and applied at the end of
# a later step.
#
# The draws are the same every time.

DRAWS = 100
# Fragments are due in turn, P in H steps. A late fragment may fall together with the next one; the
# closer they are, the likelier. With d = P / H fragments due in a step, virtual runs have 0.04
# (d = 1/3) and 0.4 to 0.5 (d = 1) other fragments at the same end of a step by chance; for greater
# d 0.4 to 1.4, beside those due in turn. The planner takes this factor times d min(d, 1).
TOGETHER = 0.5


@dataclasses.dataclass(frozen=True)
class RoundCosts:
  """Seconds, except the counts `islands` and `away`."""

  islands: int
  away: int  # learners behind a link; the others stand beside the shard
  step: float
  latency: float  # one way
  encode: float  # by a learner's host
  push: float  # one push alone, over its learner's link ...
  shard_push: float  # ... and over the shard's
  merge: float
  copy: float  # to the buddy, and the receipt back
  publish: float  # until all learners have the version
  stage: float  # by a learner's host


@dataclasses.dataclass(frozen=True)
class TypicalRound:
  """Means over many rounds."""

  applied_steps: float  # from a participant's copy-out to its apply
  participation: float  # share of the learners
  period_steps: float  # until the fragment's next round begins
  round_seconds: float  # from its beginning to the commit
  delivery_seconds: float  # from the commit until learners take the version up


def typical(costs: RoundCosts, sync: SyncConfig) -> TypicalRound:
  """The means of rounds in which nothing fails and no learner waits (without `sync.blocking`)."""
  chance = random.Random(0)
  drawn = [_copied_out(costs, chance) for _ in range(DRAWS)]
  least = min(sync.min_quorum, costs.islands)
  arrived = [_arrivals(costs, at, sync, chance) for at in drawn]
  quorum_seconds = statistics.mean(sorted(each)[least - 1] for each in arrived)
  way_back = costs.merge + costs.copy + costs.publish + costs.latency + costs.stage
  known = 0.0 if sync.apply in events.KEEPS_WORK else way_back
  grace = rules.grace_seconds(costs.step, quorum_seconds, known, sync)
  taken: list[float] = []  # from copy-out to apply, of participants
  periods: list[float] = []
  rounds: list[float] = []
  deliveries: list[float] = []
  for copied_out, there in zip(drawn, arrived):
    decided = min(max(there), sorted(there)[least - 1] + grace)
    rounds.append(decided + costs.merge)
    due = []
    for i, at in enumerate(copied_out):
      taken_up, merged = _taken_up(costs, i, at, rounds[-1]), there[i] <= decided
      applied = taken_up + max(1, math.ceil(costs.stage / costs.step)) * costs.step
      deliveries.append(taken_up - rounds[-1])
      if merged:
        taken.append(applied - at)
      counted = at if merged else applied  # from then on steps count towards the next sync
      due.append(max(counted + sync.sync_period * costs.step, applied) + _latency(costs, i))
    periods.append(sorted(due)[least - 1])
  return TypicalRound(
    applied_steps=statistics.mean(taken) / costs.step,
    participation=len(taken) / (DRAWS * costs.islands),
    period_steps=statistics.mean(periods) / costs.step,
    round_seconds=statistics.mean(rounds),
    delivery_seconds=statistics.mean(deliveries),
  )


def _latency(costs: RoundCosts, learner: int) -> float:
  return costs.latency if learner < costs.away else 0.0


def _copied_out(costs: RoundCosts, chance: random.Random) -> list[float]:
  """When each learner copies out. The learner that reported has nearly a whole step before it; the
  others are anywhere in their steps."""
  asker, found = chance.randrange(costs.islands), []
  for i in range(costs.islands):
    asked = _latency(costs, i)
    if i == asker:
      steps = math.floor(2 * asked / costs.step) + 1
      found.append(steps * costs.step - asked)
    else:
      found.append(asked + chance.random() * costs.step)
  return found


def _arrivals(
  costs: RoundCosts, copied_out: list[float], sync: SyncConfig, chance: random.Random
) -> list[float]:
  """When each learner's push is at the shard."""
  begun = [
    at + costs.encode + _others(sync, chance) * (costs.encode + costs.push) for at in copied_out
  ]
  over = dict(shared(begun[: costs.away], costs.push, costs.shard_push))
  return [over[i] + costs.latency if i in over else at for i, at in enumerate(begun)]


def _others(sync: SyncConfig, chance: random.Random) -> int:
  """How many other fragments a learner copies out at the same end of a step."""
  density = sync.num_fragments / sync.sync_period
  in_turn, by_chance = max(0.0, density - 1), TOGETHER * density * min(density, 1.0)
  return sum(math.floor(mean + chance.random()) for mean in (in_turn, by_chance))


def shared(begun: list[float], alone: float, narrow: float) -> list[tuple[int, float]]:
  """(index, end) of equal transfers that begin at these times and share one link.

  Args:
    begun: seconds.
    alone: seconds of one transfer over its own link.
    narrow: seconds of one transfer over the shared link, if no other uses it.
  """
  waiting = sorted(range(len(begun)), key=lambda i: begun[i])
  left: dict[int, float] = {}  # transfer under way -> the share of it that has not moved
  over: list[tuple[int, float]] = []
  now = 0.0
  while waiting or left:
    seconds = max(alone, narrow * len(left))  # of a whole transfer, at the present rate
    ends = now + min(left.values(), default=math.inf) * seconds
    begins = begun[waiting[0]] if waiting else math.inf
    until = min(ends, begins)
    moved = (until - now) / seconds if seconds else 1.0
    left = {i: share - moved for i, share in left.items()}
    now = until
    if begins < ends:
      left[waiting.pop(0)] = 1.0
    else:
      first = min(left, key=lambda i: left[i])
      del left[first]
      over.append((first, now))
  return over


def _taken_up(costs: RoundCosts, learner: int, copied_out: float, committed: float) -> float:
  here = committed + costs.copy
  if learner < costs.away:
    here += costs.publish + costs.latency
  return copied_out + max(1, math.ceil((here - copied_out) / costs.step - 1e-9)) * costs.step
