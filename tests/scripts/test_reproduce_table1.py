"""Table 1 comes out within three points, with fewer days and seeds than the script takes."""

import time

import numpy as np
import pytest

from ddiloco.simulation import chips
from ddiloco.simulation.chips import Fleet
from tests.scripts import commands


@pytest.mark.slow
def test_all_cells_are_near_the_published_ones(script, here, tmp_path):
  picture = tmp_path / "table1.png"
  found = commands.last(here("reproduce_table1.py --quick", f"--picture={picture}"))
  assert picture.stat().st_size > 10_000
  published = script("reproduce_table1").PUBLISHED
  assert list(found["cells"]) == list(found["uptime"]) == list(published)
  ours, theirs = np.array(list(found["cells"].values())), np.array(list(published.values()))
  misses = np.abs(ours - theirs)
  assert misses.shape == (6, 5)
  assert found["max_error"] == pytest.approx(misses.max(), abs=0.01)
  assert found["mean_error"] == pytest.approx(misses.mean(), abs=0.01)
  assert misses.max() <= 3 and misses.mean() <= 1.2, misses
  for row in ("M=4", "M=8", "M=16"):
    assert min(found["uptime"][row]) >= 99, row


@pytest.mark.parametrize("learners", [1, 16])
def test_the_largest_fleet_takes_less_than_two_seconds(learners):
  """Of a core that sums a million numbers in 25 ms, which is how fast it is measured to be."""
  fleet = Fleet(chips=2_400_000, learners=learners, days=30)
  million = min(timed(lambda: sum(n for n in range(10**6)))[0] for _ in range(5))
  seconds, spent = timed(lambda: chips.decoupled(fleet))
  assert spent.failures > 190_000 and seconds < 2 * million / 0.025, (seconds, million)


def timed(work):
  """(the seconds that this process computed, as others may keep the machine busy; the result)."""
  start = time.process_time()
  result = work()
  return time.process_time() - start, result
