"""Small runs under random plans of every kind of fault."""

from __future__ import annotations

import pytest

from tests.simulation import faulted
from tests.worlds import check_all, struck

BLOCKS, WORLDS = 2, 30


@pytest.mark.parametrize("block", range(BLOCKS))
def test_runs_under_any_kinds_of_faults_end_and_lose_nothing(block):
  counted = check_all(faulted.check, range(block * WORLDS, (block + 1) * WORLDS))
  assert struck(counted, faulted.KINDS), counted
  assert counted["commits"] > 5 * WORLDS and counted["snapshots"] > WORLDS, counted
