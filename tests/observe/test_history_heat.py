"""The heat map: a letter for every stretch of time and island."""

from __future__ import annotations

import json
import math
import random
import statistics

import pytest

from ddiloco.observe.history import LEVELS, PAGE_BINS, Curves, heat_map, level
from tests.made_events import made


def heat(steps):
  """The curves, and the median of the times from step to step."""
  found = Curves()
  for n, (time, gap, blocked) in enumerate(steps):
    fields = {"step": n + 2, "gap_seconds": gap, "blocked_seconds": blocked}
    found.add_step(made(time, "learner-0", "step", **fields), 0, 1)
  return found.page, statistics.median([gap for _, gap, _ in steps] or [math.nan])


def row(found, now, spans=None):
  curves, median = found
  spans = [[0.0, now, "running"]] if spans is None else spans
  return heat_map(curves, {"learner-0": spans}, {0: median}, now)["rows"]["0"]


@pytest.mark.parametrize(
  "ratio, letter", [(0.1, "A"), (0.5, "A"), (1.0, "F"), (2.0, "K"), (16.0, "Z"), (99.0, "Z")]
)
def test_levels_are_fifths_of_an_octave(ratio, letter):
  assert level(0.2 * ratio, 0.2) == letter


def test_steps_waits_and_what_else_an_island_did():
  steps = [(0.25 * n + 0.2, 0.25, 0.0) for n in range(8)]  # a cell each, the median
  steps += [(2.6, 0.5, 0.0)]  # twice as long: cells in which it was under way have it as well
  steps += [(2.75, 0.25, 0.2)]  # blocked
  spans = [[0.0, 2.9, "running"], [2.9, 3.3, "down"], [3.3, 4.0, "joining"]]
  found = row(heat(steps), 4.0, spans)
  assert found == "FFFFFFFF" + "KKK" + "w" + "d" + "jjj"


def test_a_cell_in_which_no_step_ended_has_the_one_under_way():
  steps = [(0.1 * n, 0.1, 0.0) for n in range(1, 20)] + [(4.0, 2.1, 0.0)]
  found = row(heat(steps), 4.25)
  assert found[:7] == "FFFFFFF" and found[8:17] == "Z" * 9, found


def test_what_is_not_known_yet_is_absent():
  assert row(heat([(0.2, 0.1, 0.0)]), 1.0) == "F..."
  assert row(heat([]), 1.0, []) == "...."


def test_five_hundred_islands_stay_small_however_long_the_run_is():
  rng = random.Random(3)
  found = Curves()
  found.limit(500)
  for n in range(20_000):
    m = n % 500
    step = made(0.5 * n, f"learner-{m}", "step", step=n, gap_seconds=rng.random())
    found.add_step(step, m, 1)
  said = heat_map(found.page, {}, dict.fromkeys(range(500), 0.5), 10_000.0)
  assert len(json.dumps(said)) < 130_000
  assert len({len(each) for each in said["rows"].values()}) == 1
  assert set("".join(said["rows"].values())) <= {*LEVELS, "."}


def test_few_islands_have_fine_cells():
  found = heat([(float(n), 1.0, 0.0) for n in range(1, 1000)])
  assert PAGE_BINS / 2 <= len(row(found, 1000.0)) <= PAGE_BINS
