"""What a round takes where learners are anywhere in their steps: the mean of many, drawn by chance.

One fragment and its shard. The round begins at time 0 with the report of a learner, at the end of
its step. Every learner that is asked copies out at the end of its step, makes a push and sends it;
pushes share the shard's link, and a learner's own with those of other fragments that it copied out
at the same end of a step. The commit waits for all, or for the grace window's end. A version is
taken up at the end of a learner's step, and applied at a later one.

Pure arithmetic: the draws are the same every time.
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics

from ddiloco.config import SyncConfig
from ddiloco.protocol import rules

DRAWS = 100
# Fragments are due in turn at first; jitter mixes that up, and pulls put it in order again. In
# virtual runs half as many more are copied out together as chance alone would bring together.
TOGETHER = 0.5


@dataclasses.dataclass(frozen=True)
class RoundCosts:
  """Seconds, but for numbers."""

  islands: int
  away: int  # learners behind a link; the others stand beside the shard
  step: float
  latency: float  # one way
  encode: float  # by a learner's host
  push: float  # of one alone, over its own link ...
  shard_push: float  # ... and over the shard's
  merge: float
  copy: float  # to the buddy and its receipt
  publish: float  # until all have it
  stage: float  # by a learner's host


@dataclasses.dataclass(frozen=True)
class TypicalRound:
  """Means."""

  applied_steps: float  # from a participant's copy-out to its apply
  participation: float  # share of the learners
  period_steps: float  # until the fragment's next round begins
  round_seconds: float  # from its beginning to the commit
  delivery_seconds: float  # from then until learners take the version up


def typical(costs: RoundCosts, sync: SyncConfig) -> TypicalRound:
  """Of rounds in which nothing fails and no learner waits (`sync.blocking` is not set)."""
  chance = random.Random(0)
  drawn = [_copied_out(costs, chance) for _ in range(DRAWS)]
  least = min(sync.min_quorum, costs.islands)
  arrived = [_arrivals(costs, at, sync, chance) for at in drawn]
  quorum_seconds = statistics.mean(sorted(each)[least - 1] for each in arrived)
  way_back = costs.merge + costs.copy + costs.publish + costs.latency + costs.stage
  known = 0.0 if sync.apply == "rebase" else way_back
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
      counted = at if merged else applied  # from here on its steps are of the next sync
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
  """By learner. Who reported has nearly a step before it, the others are anywhere in theirs."""
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
  """By learner, when its push is at the shard."""
  begun = [
    at + costs.encode + _others(sync, chance) * (costs.encode + costs.push) for at in copied_out
  ]
  over = dict(shared(begun[: costs.away], costs.push, costs.shard_push))
  return [over[i] + costs.latency if i in over else at for i, at in enumerate(begun)]


def _others(sync: SyncConfig, chance: random.Random) -> int:
  """How many other fragments a learner copies out at the same end of a step."""
  in_turn, share = sync.num_fragments // sync.sync_period, TOGETHER / sync.sync_period
  by_chance = sum(chance.random() < share for _ in range(sync.num_fragments - 1))
  return max(0, in_turn - 1) + by_chance


def shared(begun: list[float], alone: float, narrow: float) -> list[tuple[int, float]]:
  """(which, when it is over) of equal transfers that begin at these times and share one link.

  Args:
    begun: seconds.
    alone: what one takes over its own link.
    narrow: what one takes over the shared link, if that is all its.
  """
  waiting = sorted(range(len(begun)), key=lambda i: begun[i])
  left: dict[int, float] = {}  # of those under way, the share of it that has not moved
  over: list[tuple[int, float]] = []
  now = 0.0
  while waiting or left:
    seconds = max(alone, narrow * len(left))  # for a whole one, at the present rate
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
