"""Fragments are synced one after the other, also after what makes all of them due together."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from ddiloco.config import SyncConfig
from tests.protocol.virtual import STEP_TOKENS, Pace, World

FRAGMENTS, PERIOD, LEARNERS = 6, 18, 4  # so a fragment is due in every third step
STEP_SECONDS = 0.1


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
  sync = SyncConfig(
    num_fragments=FRAGMENTS,
    num_shards=2,
    sync_period=PERIOD,
    overlap_steps=2,
    min_quorum=min_quorum,
  )
  steps = 15 * PERIOD
  world = World(
    sync,
    Pace((STEP_SECONDS,) * LEARNERS, jitter=0.05),
    0,
    target_tokens=steps * LEARNERS * STEP_TOKENS,
    num_learners=LEARNERS,
  )
  first, last = (share * steps * STEP_SECONDS for share in (0.6, 0.9))
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
