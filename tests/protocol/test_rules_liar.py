"""One member with a valid key that says anything, in hundreds of random worlds."""

from __future__ import annotations

import pytest

from tests.protocol import liar
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
