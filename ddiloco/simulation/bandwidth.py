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

import collections
import dataclasses
import math
import random
import statistics
from collections.abc import Sequence
from typing import Any

from ddiloco.checks import must, not_negative, option, positive, require, typed
from ddiloco.config import Config, SyncConfig
from ddiloco.core import codec, fragments
from ddiloco.protocol import events, rules

F32_BYTES = 4
PUSH_VECTORS = 4  # that making a push touches: local, base, delta, and payload in f32
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
) -> list[tuple[int, int]]:
  """(sent, received) bytes over every place's link in one period: islands first, then shards that
  stand apart.

  Args:
    sizes: values of every fragment.
    sync: codecs and `num_shards`.
    islands: M, each with one learner.
    apart: shards have links of their own, instead of standing beside islands.
    listeners: members somewhere else that get every version and push nothing: the evaluator.
  """
  count, whole = sync.num_shards, exchanged(sizes, sync)
  at = [islands + s if apart else s % islands for s in range(count)]
  here = int(not apart)  # learners beside a shard: what they exchange with it crosses no link
  away, more = islands - here, [0] * (count if apart else 0)
  sent, received = [whole.push_bytes] * islands + more, [whole.publish_bytes] * islands + more
  for s, place in enumerate(at):
    mine = exchanged(owned_sizes(sizes, s, count), sync)
    sent[place] += (away + listeners) * mine.publish_bytes - here * mine.push_bytes
    received[place] += away * mine.push_bytes - here * mine.publish_bytes
    buddy = at[(s + 1) % count]
    if buddy != place:
      sent[place] += mine.publish_bytes
      received[buddy] += mine.publish_bytes
  return list(zip(sent, received))


# --- The time of one sync, if it has the links to itself

CORE_GBYTES = 4.0
ABOUT_SHARD_GBPS = (
  "Gbit/s of shards that stand on their own; 0: they stand beside the islands and share links."
)
ABOUT_HOST_GBYTES = "GB/s of f32 that a learner's host touches beside its step."
CONNECTION_BYTES = 4 << 20  # under way over one TCP connection at most: Linux's default


def require_shards(sync: SyncConfig) -> None:
  rule = "without shards nothing is exchanged, so there is nothing to plan or to simulate"
  require(sync.num_shards > 0, "sync.num_shards", sync.num_shards, rule, "use 1 or more")


@dataclasses.dataclass(frozen=True)
class Setting:
  """The run, and the links and machines that it runs on."""

  sizes: tuple[int, ...]  # values of every fragment
  sync: SyncConfig
  islands: int
  step_seconds: float
  gbps: float  # of every island's link, in each direction
  latency_seconds: float = 0.0  # one way, between any two places
  momentum: bool = False  # of the outer optimizer
  shard_gbps: float = option(0.0, ABOUT_SHARD_GBPS)
  merge_gbytes: float = option(CORE_GBYTES, "GB/s of f32 that a shard merges.")
  host_gbytes: float = option(CORE_GBYTES, ABOUT_HOST_GBYTES)
  evaluator: bool = False  # one more member that gets every version, at a place of its own
  window_bytes: int = 0  # under way to one peer at most; 0: no limit

  def __post_init__(self):
    typed("plan", self)
    positive("plan", self, "islands", "step_seconds", "gbps", "merge_gbytes", "host_gbytes")
    not_negative("plan", self, "latency_seconds", "shard_gbps", "window_bytes")
    require_shards(self.sync)
    count = self.sync.num_fragments
    good = len(self.sizes) == count and min(self.sizes) > 0
    rule = f"must be positive, one for each of sync.num_fragments = {count}"
    must("plan", self, "sizes", good, rule, "use the sizes of the plan")

  @classmethod
  def of(cls, config: Config, sizes: tuple[int, ...], **rates: Any) -> Setting:
    """The setting of this config's run, with fragments of these sizes; `rates`: other fields."""
    return cls(
      sizes=sizes,
      sync=config.sync,
      islands=config.islands.num_learners,
      momentum=config.outer.momentum > 0,
      evaluator=config.run.evaluations > 0,
      window_bytes=config.network.streams * CONNECTION_BYTES,
      **rates,
    )

  @property
  def apart(self) -> bool:
    """Whether shards have links of their own."""
    return self.shard_gbps > 0

  @property
  def away(self) -> int:
    """Learners whose pushes of a fragment cross a link."""
    return self.islands if self.apart else self.islands - 1

  @property
  def rates(self) -> tuple[float, float]:
    """Bytes of fragments a second over an island's link, and over a shard's."""
    both = self.gbps, self.shard_gbps or self.gbps
    return payload_bytes_per_second(both[0]), payload_bytes_per_second(both[1])

  @property
  def period_seconds(self) -> float:
    """H steps."""
    return self.sync.sync_period * self.step_seconds

  @property
  def overlap_seconds(self) -> float:
    """tau steps: what a sync may take."""
    return self.sync.overlap_steps * self.step_seconds


@dataclasses.dataclass(frozen=True)
class SyncTime:
  """Seconds of one sync of the largest fragment, in order of time, up to the staged version."""

  copy_outs: float  # from the first learner's end of a step to the last learner's
  encode: float  # by a learner's host: the push
  push: float
  merge: float
  copy: float  # to the buddy, before any learner hears of the version
  publish: float
  stage: float  # by a learner's host: the value to stage
  latency: float

  @property
  def total(self) -> float:
    """From the first learner's copy-out until the version is ready at the learners."""
    return sum(dataclasses.astuple(self))


def pull_waits(setting: Setting) -> tuple[int, float]:
  """In lock-step learners that are due wait for the pull, while a report goes to the shard and the
  pull comes back: (how often in a period, seconds)."""
  turns = min(setting.sync.num_fragments, setting.sync.sync_period)  # at which fragments are due
  return turns, 2 * setting.latency_seconds if setting.away else 0.0


def _copy_outs(setting: Setting) -> list[float]:
  """Mean times of the learners' copy-outs, in steps since they were asked, ascending.

  The learner whose report began the round has a whole step before it, less the latency.
  """
  if setting.sync.blocking:
    return [0.0] * setting.islands
  asker = 1 - math.fmod(2 * setting.latency_seconds / setting.step_seconds, 1.0)
  return sorted([asker, *(k / setting.islands for k in range(1, setting.islands))])


def pushes(setting: Setting, size: int) -> list[tuple[float, float]]:
  """Bounds on the time at which all pushes of `size` values are there, of which the latest holds.

  Each is (begin, seconds on the link): the last learner's push over its own link, and all pushes
  from the k-th copy-out on over the shard's link without a gap. `begin` is in seconds from the last
  copy-out: 0 or less.
  """
  m, away, at = setting.islands, setting.away, _copy_outs(setting)
  if not away:
    return [(0.0, 0.0)]
  push_bytes = exchanged([size], setting.sync).push_bytes
  alone, each = (push_bytes / rate for rate in setting.rates)
  begun = [(at[k] - at[-1]) * setting.step_seconds for k in range(m - away, m)]
  return [(0.0, alone), *((before, (away - k) * each) for k, before in enumerate(begun))]


def sync_time(setting: Setting, size: int) -> SyncTime:
  """One sync of a fragment of `size` values."""
  sync, m = setting.sync, setting.islands
  one, away, (rate, shard_rate) = exchanged([size], sync), setting.away, setting.rates
  at = _copy_outs(setting)
  listeners = away + setting.evaluator
  publish = max(1 / rate, listeners / shard_rate) * one.publish_bytes if away else 0.0
  # Else the buddy is the shard itself, or its neighbour at one place.
  copied = sync.num_shards > 1 and (setting.apart or m > 1)
  hops = 2 * min(away, 1) + 2 * copied  # push and publish, copy and its receipt
  touched = 1 + commit_vectors(sync, setting.momentum, m)  # the last push, the commit
  vector = F32_BYTES * size / 1e9
  return SyncTime(
    copy_outs=(at[-1] - at[0]) * setting.step_seconds,
    encode=PUSH_VECTORS * vector / setting.host_gbytes,
    push=max(begun + seconds for begun, seconds in pushes(setting, size)),
    merge=touched * vector / setting.merge_gbytes,
    copy=copied * one.publish_bytes / shard_rate,
    publish=publish,
    stage=STAGE_VECTORS * vector / setting.host_gbytes,
    latency=hops * setting.latency_seconds,
  )


# --- The time of a round where learners are at random points of their steps: the mean of many draws
#
# One fragment and its shard. The round begins at time 0 with the report of a learner, at the end of
# its step. Every learner that is asked copies out at the end of its step, makes a push and sends
# it. Pushes of all learners share the shard's link; a learner's own link is shared by the fragments
# that it copied out at the same end of a step. The commit waits for all pushes, or for the end of
# the grace window. A version is taken up at the end of a learner's step, and applied at the end of
# a later step.
#
# The draws are the same every time. Of the learners, the first `away` are behind a link; the others
# stand beside the shard.

DRAWS = 100
# Fragments are due in turn, P in H steps. A late fragment may fall together with the next one; the
# closer they are, the likelier. With d = P / H fragments due in a step, virtual runs have 0.04
# (d = 1/3) and 0.4 to 0.5 (d = 1) other fragments at the same end of a step by chance; for greater
# d 0.4 to 1.4, beside those due in turn. The planner takes this factor times d min(d, 1).
TOGETHER = 0.5


@dataclasses.dataclass(frozen=True)
class TypicalRound:
  """Means over many rounds."""

  applied_steps: float  # from a participant's copy-out to its apply
  participation: float  # share of the learners: grace may end before the last push is there
  period_steps: float  # until the fragment's next round begins
  round_seconds: float  # from its beginning to the commit
  delivery_seconds: float  # from the commit until learners take the version up


def typical(setting: Setting, size: int) -> TypicalRound:
  """The means of rounds of a fragment of `size` values, in which nothing fails."""
  config, step, sync = setting.sync, setting.step_seconds, sync_time(setting, size)
  if config.blocking:  # all learners copy out together, and wait for the version
    before = sync.encode + sync.push + sync.merge + min(1, setting.away) * setting.latency_seconds
    after = sync.total - before - sync.stage
    turns, pull_seconds = pull_waits(setting)
    pulls = max(0.0, config.overlap_steps * turns / config.sync_period - 1)  # of others meanwhile
    together = (config.num_fragments / turns - 1) / 2  # others due at once, of which half are first
    seconds = sync.total + together * (sync.total - sync.latency)
    steps = max(config.overlap_steps + pulls * pull_seconds / step, seconds / step)
    return TypicalRound(steps, 1.0, float(config.sync_period), before, after)
  chance = random.Random(0)
  drawn = [_copied_out(setting, chance) for _ in range(DRAWS)]
  least = min(config.min_quorum, setting.islands)
  push_bytes = exchanged([size], config).push_bytes
  pushed = sync.encode, *(push_bytes / rate for rate in setting.rates)
  arrived = [_arrivals(setting, at, chance, *pushed) for at in drawn]
  quorum_seconds = statistics.mean(sorted(each)[least - 1] for each in arrived)
  copied = sync.copy and sync.copy + 2 * setting.latency_seconds  # with the buddy's receipt
  way_back = sync.merge + copied + sync.stage
  # A shard knows that of the median learner, of two the one that is beside it.
  if setting.away > setting.islands // 2:
    way_back += sync.publish + setting.latency_seconds
  known = 0.0 if config.apply in events.KEEPS_WORK else way_back
  grace = rules.grace_seconds(step, quorum_seconds, known, config)
  taken: list[float] = []  # from copy-out to apply, of participants
  periods: list[float] = []
  rounds: list[float] = []
  deliveries: list[float] = []
  # A round that began late makes the next period shorter, by half at most (`rules.due_after`).
  in_turn = setting.period_seconds + step / 2
  for copied_out, there in zip(drawn, arrived):
    decided = min(max(there), sorted(there)[least - 1] + grace)
    rounds.append(decided + sync.merge)
    due = []
    for i, at in enumerate(copied_out):
      latency = _latency(setting, i)
      here = rounds[-1] + copied + (sync.publish + latency if i < setting.away else 0.0)
      taken_up = at + max(1, math.ceil((here - at) / step - 1e-9)) * step
      applied = taken_up + math.ceil(sync.stage / step) * step
      deliveries.append(taken_up - rounds[-1])
      merged = there[i] <= decided
      if merged:
        taken.append(applied - at)
      counted = at if merged else applied  # from then on steps count towards the next sync
      due.append(max(counted + setting.period_seconds / 2, applied) + latency)
    periods.append(max(sorted(due)[least - 1], in_turn))
  return TypicalRound(
    applied_steps=statistics.mean(taken) / step,
    participation=len(taken) / (DRAWS * setting.islands),
    period_steps=statistics.mean(periods) / step,
    round_seconds=statistics.mean(rounds),
    delivery_seconds=statistics.mean(deliveries),
  )


def _latency(setting: Setting, learner: int) -> float:
  return setting.latency_seconds if learner < setting.away else 0.0


def _copied_out(setting: Setting, chance: random.Random) -> list[float]:
  """When each learner copies out. The learner whose report was there first has nearly a whole step
  before it; the others are anywhere in their steps."""
  step, found = setting.step_seconds, list[float]()
  reports = [chance.random() * step + _latency(setting, i) for i in range(setting.islands)]
  asker = reports.index(min(reports))
  for i in range(setting.islands):
    asked = _latency(setting, i)
    if i == asker:
      found.append((math.floor(2 * asked / step) + 1) * step - asked)
    else:
      found.append(asked + chance.random() * step)
  return found


def _arrivals(
  setting: Setting,
  copied_out: list[float],
  chance: random.Random,
  encode: float,
  alone: float,
  narrow: float,
) -> list[float]:
  """When each learner's push is at the shard; the last arguments are seconds of one push."""
  begun = [at + encode + _others(setting.sync, chance) * (encode + alone) for at in copied_out]
  over = shared(begun[: setting.away], alone, narrow)
  return [end + setting.latency_seconds for end in over] + begun[setting.away :]


def _others(sync: SyncConfig, chance: random.Random) -> int:
  """How many other fragments a learner copies out at the same end of a step."""
  density = sync.num_fragments / sync.sync_period
  in_turn, by_chance = max(0.0, density - 1), TOGETHER * density * min(density, 1.0)
  return sum(math.floor(mean + chance.random()) for mean in (in_turn, by_chance))


def shared(begun: list[float], alone: float, narrow: float) -> list[float]:
  """When equal transfers end that begin at these times and share one link.

  Args:
    begun: seconds.
    alone: seconds of one transfer over its own link.
    narrow: seconds of one transfer over the shared link, if no other uses it.
  """
  order = sorted(range(len(begun)), key=lambda i: begun[i])  # also that of the ends
  ends = [0.0] * len(begun)
  waiting, moving = collections.deque(order), collections.deque[tuple[int, float]]()
  now = moved = 0.0  # the sum of the shares by which each transfer under way has moved
  while waiting or moving:
    seconds = max(alone, narrow * len(moving))  # of a whole transfer, at the present rate
    until = now + (moving[0][1] - moved) * seconds if moving else math.inf
    if waiting and begun[waiting[0]] < until:
      moved += (begun[waiting[0]] - now) / seconds
      now = begun[waiting[0]]
      moving.append((waiting.popleft(), moved + 1))
    else:
      now = until
      first, moved = moving.popleft()
      ends[first] = now
  return ends
