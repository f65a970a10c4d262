"""One member with a valid key that says anything, in hundreds of random worlds."""

from __future__ import annotations

import pytest

from ddiloco.protocol.values import replace
from tests import says
from tests.protocol import liar
from tests.protocol.storms import calm
from tests.worlds import check_all, struck

BLOCKS, WORLDS = 10, 30
FEW = 3  # blocks that every look at the tests takes


@pytest.mark.parametrize(
  "block", [*range(FEW), *(pytest.param(b, marks=pytest.mark.slow) for b in range(FEW, BLOCKS))]
)
def test_a_liar_stops_rewrites_and_owns_nothing(block):
  """Commits and snapshots go on, every number stays possible, its share is bounded."""
  counted = check_all(liar.check, range(block * WORLDS, (block + 1) * WORLDS))
  assert struck(counted, liar.KINDS), counted
  assert sum(counted[lie] for lie in liar.LIES) > 50 * WORLDS, counted
  assert counted["merged"] > 0 and counted["rejected"] > 0 and counted["adopted"] > 0, counted


def test_a_round_ends_whose_only_push_is_from_a_life_that_is_over_when_it_is_measured():
  """It may not end while that is measured, and by then nothing of it counts any more."""
  assert liar.check(9953)["snapshots"]


@pytest.mark.parametrize("blocking", [False, True])
def test_one_that_says_to_one_shard_only_that_it_is_far_ahead_changes_no_rounds(blocking):
  """Snapshots began far ahead: in lock-step the other shard then ignored all that knew of them. And
  those that had come back took the shard's word for how far all are, and were always due."""
  world = calm(3, min_quorum=2, snapshot_steps=6, blocking=blocking)

  def boast() -> None:
    claim = replace(
      says.hello(3, 0), global_step=world.actors["syncer", 0].state.global_step + 10_000
    )
    world.enter(("learner", 3), ("syncer", 0), claim, 100)
    world.at(world.now + 0.1, boast)

  world.at(5.0, boast)
  for m in (0, 1):
    world.at(6.0 + m, world.strike, "kill_learner", ("learner", m), 0.1)
  world.run(20.0)
  assert world.actors["syncer", 0].state.global_step > 1000, "it is believed in part"
  for p in range(3):
    times = [t for t, _ in world.commits(p) if t > 8.0]
    assert 18 <= len(times) <= 22, f"fragment {p}: {len(times)} rounds of six steps in 120 steps"
  last = max(world.snapshots)
  assert last > 1000 and ("syncer", 1) in world.snapshots[last]
