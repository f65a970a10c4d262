"""Curves stay small however long a run is, and lose neither a value nor its place."""

import math
import random

import pytest

from ddiloco.observe.history import FIRST_WIDTH_SECONDS, Series, Thinned


def test_values_of_a_bin_are_averaged_and_gaps_are_none():
  series = Series(most=10, width_seconds=1.0)
  series.add("a", 0.2, 1.0)
  series.add("a", 0.9, 3.0)
  series.add("a", 3.5, 7.0)
  assert series.means("a") == [2.0, None, None, 7.0]
  assert series.counts("a") == [2, 0, 0, 1]
  assert series.means("nobody") == [] == series.counts("nobody")


def test_bins_widen_together_so_that_curves_stay_comparable():
  series = Series(most=4, width_seconds=1.0)
  for second in range(4):
    series.add("a", second + 0.5, float(second))
  series.add("b", 5.5, 10.0)
  assert series.width_seconds == 2.0
  assert series.means("a") == [0.5, 2.5]
  assert series.means("b") == [None, None, 10.0]


@pytest.mark.parametrize("seed", range(5))
def test_size_is_bounded_and_nothing_gets_lost(seed):
  print("seed", seed)
  rng = random.Random(seed)
  series, times = (
    Series(most=50),
    sorted(rng.uniform(0, 10 ** rng.uniform(0, 7)) for _ in range(999)),
  )
  for time in times:
    series.add("x", time, 2.0)
  counts, means = series.counts("x"), series.means("x")
  assert len(counts) <= 50 and sum(counts) == 999
  assert set(means) <= {2.0, None}
  assert len(counts) == int(times[-1] / series.width_seconds) + 1, (
    "the last value is in the last bin"
  )
  doublings = math.log2(series.width_seconds / FIRST_WIDTH_SECONDS)
  assert doublings == int(doublings)


def test_what_is_not_finite_leaves_a_gap_and_times_before_the_start_count_as_its_start():
  series = Series(width_seconds=1.0)
  series.add("a", 1.0, math.nan)
  series.add("a", 1.0, math.inf)
  assert series.means("a") == []
  series.add("a", -3.0, 5.0)
  assert series.means("a") == [5.0]


def test_fewer_bins_may_be_asked_for_at_any_time():
  series = Series(most=100, width_seconds=1.0)
  for second in range(100):
    series.add("a", second, 1.0)
  series.keep_at_most(30)
  assert len(series.counts("a")) == 25 and sum(series.counts("a")) == 100
  series.keep_at_most(80)
  series.add("a", 150.0)
  assert len(series.counts("a")) <= 30, "it does not become more again"


def test_of_many_things_every_second_stays_and_always_the_newest():
  things = Thinned(10)
  assert things.items == []
  for n in range(1000):
    things.add(n)
    assert things.items[-1] == n and things.items[0] == 0 and len(things.items) <= 11
  assert (things.count, things.stride) == (1000, 128)
  assert things.items == [*range(0, 1000, 128), 999]
  things.keep_at_most(4)
  assert things.items == [0, 256, 512, 768, 999]
