"""The reproductions that play the protocol in virtual time, shortened."""

from __future__ import annotations

import math

import pytest

from tests.scripts import commands


@pytest.fixture
def drawn(here, tmp_path):
  """The last line of a script that draws a picture."""

  def found(line):
    picture = tmp_path / "picture.png"
    said = commands.last(here(line, f"--picture={picture}"))
    assert picture.stat().st_size > 10_000
    return said

  return found


def test_the_picture_of_a_round_is_of_one_that_waited(drawn):
  assert 1 < drawn("round_picture.py")["seconds"] < 6


@pytest.mark.slow
def test_only_lock_step_waits_for_slow_islands(drawn):
  found = drawn("reproduce_heterogeneous.py --quick")
  goodput, part = found["goodput"], found["participation"]
  assert abs(goodput["K = 8"] - found["published"]["K = 8"]) < 5
  assert goodput["K = 1"] == goodput["K = 1 + grace"] == goodput["rebase"] == 100
  assert part["K = 8"] == 100 and part["K = 1 + grace"] > 70 > 30 > part["K = 1"]
  assert found["merged"]["rebase"] > 98 > 80 > found["merged"]["K = 1 + grace"]
  for row, value in found["published"].items():
    assert found["errors"][row] == pytest.approx(goodput[row] - value, abs=0.02)


@pytest.mark.slow
def test_compute_that_comes_and_goes_shortens_a_run(drawn):
  found = drawn("reproduce_scavenging.py --quick")
  times = found["decoupled"]
  assert list(times) == list(found["published"]["decoupled"])
  assert max(times["+100 %"], times["+300 %"]) < 0.95, "one seed and 200 steps say no more"
  for name, value in times.items():
    miss = value - found["published"]["decoupled"][name]
    assert found["errors"]["decoupled"][name] == pytest.approx(miss, abs=0.002)


@pytest.mark.slow
def test_no_fault_leaves_rounds_behind_that_most_learners_miss(here):
  found = commands.last(here("aftermath.py --quick"))
  assert len(found) == 8 and all(row["islands"] == 4 for row in found.values())
  assert min(row["pushes"] for row in found.values()) > 3.5
  assert min(row["steps"] for row in found.values()) > 0.8


@pytest.mark.slow
def test_slow_links_between_regions_hold_up_no_island(here):
  found = commands.last(here("reproduce_regions.py --quick --merge_gbytes=25"))
  for row in ("2 Gbit/s", "5 Gbit/s"):
    each = found[row]
    assert each["utilisation"] > 99 and each["data_parallel"] > 20
    assert each["planned_join_seconds"] < each["join_seconds"] < 1.5 * each["planned_join_seconds"]
    assert each["planned_sync_seconds"] < each["sync_seconds"], "which waits for ends of steps"
    assert each["participation"] > 90, "of 96 steps, with start and end; 95 % and more of 240"


def test_a_data_parallel_job_stands_still_at_each_change(script):
  module = script("reproduce_scavenging")
  data_parallel, pause, always = module.data_parallel, module.PAUSE_SECONDS, module.ALWAYS
  assert data_parallel([], 100, 1.0) == pytest.approx(100.0)
  # One more from second 20 to 60: pauses at both, five islands in between, four else.
  left = 100 * always - 20 * always - (40 - pause) * (always + 1)
  assert data_parallel([(20.0, 60.0)], 100, 1.0) == pytest.approx(60 + pause + left / always)
  # A change in the middle of a pause is part of it; what is there from the start causes none.
  both = data_parallel([(20.0, 1e9), (30.0, 1e9)], 100, 1.0)
  assert both == pytest.approx(20 + pause + (100 - 20) * always / (always + 2))
  assert data_parallel([(0.0, 1e9)], 100, 1.0) == pytest.approx(100 * always / (always + 1))
  # By night as many tokens as by day, in less time: 4 * 25 = (4 + 1) * 20.
  assert module.spells(1, 100.0) == [(25.0, 45.0), (70.0, math.inf)]
  assert len(module.spells(4, 100.0)) == 2 * 4
