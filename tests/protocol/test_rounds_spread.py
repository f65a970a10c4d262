"""Fragments are synced one after the other, also after what makes all of them due together."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from ddiloco.config import SyncConfig
from tests.protocol.virtual import STEP_TOKENS, Pace, World

FRAGMENTS, PERIOD, LEARNERS = 6, 18, 4  # so a fragment is due in every third step
STEP_SECONDS = 0.1
STEPS = 15 * PERIOD


def world_of(**fields) -> World:
  sync = SyncConfig(
    num_fragments=FRAGMENTS, num_shards=2, sync_period=PERIOD, overlap_steps=2, **fields
  )
  return World(
    sync,
    Pace((STEP_SECONDS,) * LEARNERS, jitter=0.05),
    0,
    target_tokens=STEPS * LEARNERS * STEP_TOKENS,
    num_learners=LEARNERS,
  )


def calm(world: World) -> None:
  """Nothing happens."""


def all_come_back(world: World) -> None:
  for m in range(LEARNERS):
    world.kill(("learner", m), 1.0)


def one_comes_back(world: World) -> None:
  world.kill(("learner", 0), 1.0)


def a_shard_loses_all(world: World) -> None:
  world.kill(("syncer", 0))
  world.at(world.now + 1.5 * PERIOD * STEP_SECONDS, world.restore, ("syncer", 0), None, 9.0)


def one_leaves(world: World) -> None:
  world.actors["learner", 0].drain()


@pytest.mark.parametrize(
  ("happens", "min_quorum"),
  [(calm, 1), (all_come_back, 1), (a_shard_loses_all, 1), (one_leaves, 1), (one_comes_back, 4)],
)
def test_rounds_keep_their_distances(happens: Callable[[World], None], min_quorum: int):
  """Without places in the period all of them would be due in the same step for ever after."""
  world = world_of(min_quorum=min_quorum)
  first, last = (share * STEPS * STEP_SECONDS for share in (0.6, 0.9))
  world.at(5 * PERIOD * STEP_SECONDS, happens, world)
  world.run(last)
  began: dict[tuple[int, int], float] = {}
  for at, _, event in world.history:
    if event.kind == "round":
      began.setdefault((event.fragment, event.round), at)
  times = sorted(began.values())
  later = [at for at in times if first < at < last]
  assert len(later) == pytest.approx(FRAGMENTS * (last - first) / (PERIOD * STEP_SECONDS), rel=0.2)
  close = [b - a < 1.5 * STEP_SECONDS for a, b in itertools.pairwise(later)]
  assert sum(close) <= 0.1 * len(close), f"{sum(close)} of {len(close)} begin together"


@pytest.mark.parametrize("happens", [one_comes_back, all_come_back])
@pytest.mark.parametrize("after", [0, 1, 2, 3])  # steps: at a fragment's place, and past it
def test_in_lock_step_one_step_of_a_learner_that_comes_back_is_waited_for(happens, after):
  """The others waited until it had made one to two periods of steps."""
  world = world_of(min_quorum=LEARNERS, blocking=True, apply="mix")
  world.at((5 * PERIOD + after) * STEP_SECONDS, happens, world)
  world.run(0.9 * STEPS * STEP_SECONDS)
  when = {
    kind: [at for at, _, event in world.history if event.kind == kind]
    for kind in ("joined", "commit")
  }
  back = when["joined"][-1]
  waited = min(at for at in when["commit"] if at > back) - back
  assert waited < (PERIOD / FRAGMENTS + 2) * STEP_SECONDS  # to the next place, where all were away
  period = [at for at in when["commit"] if back < at < back + 1.5 * PERIOD * STEP_SECONDS]
  assert len(period) >= FRAGMENTS, "none of them is waited for much longer than calm times need"
