"""One member with a valid key that says anything, in hundreds of random worlds.

`scripts/liar_worlds.py` runs as many as you like.
"""

from __future__ import annotations

import collections

import pytest

from tests.protocol import liar

BLOCKS, WORLDS = 10, 30


@pytest.mark.parametrize("block", range(BLOCKS))
def test_a_liar_stops_rewrites_and_owns_nothing(block):
  """Commits and snapshots go on, every number stays possible, its share is bounded."""
  counted: collections.Counter = collections.Counter()
  for seed in range(block * WORLDS, (block + 1) * WORLDS):
    try:
      counted.update(liar.check(seed))
    except Exception as error:
      raise AssertionError(f"world {seed}: {error!r}") from error
  assert counted["lies"] > 50 * WORLDS and counted["merged"] > WORLDS, counted
  assert counted["rejected"] > 0 and counted["adopted"] > 0, counted
