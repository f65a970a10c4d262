"""Decision table, grace formula and screening, derived by hand."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.config import SyncConfig
from ddiloco.protocol import rules
from ddiloco.protocol.rules import Decision, decide, grace_seconds

NONE = math.inf  # no quorum yet
TWO = SyncConfig(min_quorum=2, overlap_steps=2, grace_safety=0.5)


def screen(norms, steps, past, ratio, period, settled=True, lasting=False):
  sync = SyncConfig(max_norm_ratio=ratio, sync_period=period, overlap_steps=0)
  own = {m: past[m] * max(steps[m], period) for m in norms}
  return rules.screen(norms, steps, own, sync, settled, lasting)


def test_first_rounds_are_spread_over_a_period_and_later_ones_are_a_period_apart():
  sync = SyncConfig(num_fragments=4, sync_period=6)
  assert [rules.due_after(p, 0, sync) for p in range(4)] == [2, 3, 5, 6]
  assert {rules.due_after(p, version, sync) for p in range(4) for version in (1, 9)} == {6}


def test_a_round_at_another_place_than_its_own_makes_the_next_period_shorter_or_longer():
  sync = SyncConfig(num_fragments=4, sync_period=6)
  for p, place in enumerate((2, 3, 5, 6)):
    begins = [20]  # all of them at once; a learner counts from a step later
    for _ in range(8):
      begins.append(begins[-1] + 1 + rules.due_after(p, 1, sync, begins[-1]))
    apart = [b - a for a, b in itertools.pairwise(begins)]
    assert 4 <= apart[0] <= 10 and set(apart[1:]) <= {6, 7}
    assert {(b - place) % 13 % 6 for b in begins[1:]} <= {0, 1}, "it keeps its place from then on"
  alone = SyncConfig(num_shards=1, num_fragments=1, sync_period=1, overlap_steps=0)
  assert {rules.due_after(0, 1, alone, began) for began in range(4)} == {1}


@pytest.mark.parametrize(
  "now, pushed, pending, quorum_at, grace, expected",
  [
    (5.0, 0, [0, 1], NONE, 0.5, Decision(False, "quorum: 0 of 2 have answered, waiting for 0, 1")),
    (5.0, 1, [4], NONE, 0.5, Decision(False, "quorum: 1 of 2 have answered, waiting for 4")),
    (5.0, 0, [1], NONE, 0.5, Decision(True, "only 1 of 2 needed are left")),
    (5.0, 1, [], NONE, 0.5, Decision(True, "only 1 of 2 needed are left")),
    (5.0, 2, [], 5.0, 0.5, Decision(True, "all 2 asked have answered")),
    (9.0, 3, [], 5.0, 0.5, Decision(True, "all 3 asked have answered")),
    (5.0, 2, [7], 5.0, 0.5, Decision(False, "grace: 0.500 s left for 7", 5.5)),
    (
      5.0,
      1,
      [*range(10)],
      NONE,
      0.5,
      Decision(
        False, "quorum: 1 of 2 have answered, waiting for 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
      ),
    ),
    (5.25, 3, [7, 8], 5.0, 0.5, Decision(False, "grace: 0.250 s left for 7, 8", 5.5)),
    (
      5.5,
      2,
      [7],
      5.0,
      0.5,
      Decision(True, "quorum of 2, grace of 0.500 s is over without 7"),
    ),
    (
      5.0,
      2,
      [7],
      5.0,
      0.0,
      Decision(True, "quorum of 2, grace of 0.000 s is over without 7"),
    ),
  ],
)
def test_decision_table(now, pushed, pending, quorum_at, grace, expected):
  assert decide(now, pushed, pending, quorum_at, grace, TWO.min_quorum) == expected


@pytest.mark.parametrize(
  "step, quorum, sync, expected",
  [
    (1.0, 0.5, 0.5, 0.5),  # slack 2 * 1 - 1 = 1, half of it
    (1.0, 0.0, 0.0, 1.0),  # slack 2, half of it: exactly one step
    (1.0, 1.5, 0.75, 0.0),  # no slack left: never negative
    (0.0, 0.0, 0.0, 0.0),  # nothing measured yet
    (0.2, 0.1, 0.1, 0.1),
  ],
)
def test_grace_formula(step, quorum, sync, expected):
  assert grace_seconds(step, quorum, sync, TWO) == pytest.approx(expected)


def test_grace_is_at_most_a_step_and_zero_without_overlap_or_safety():
  long = SyncConfig(overlap_steps=8, grace_safety=0.9)
  assert grace_seconds(1.0, 0.1, 0.1, long) == 1.0
  assert grace_seconds(1.0, 0.1, 0.1, SyncConfig(overlap_steps=0)) == 0.0
  assert grace_seconds(1.0, 0.1, 0.1, SyncConfig(grace_safety=0.0)) == 0.0


def over(norm: float, usual: float) -> str:
  return f"norm {norm:.3g} is over sync.max_norm_ratio (10) x {usual:g}"


@pytest.mark.parametrize(
  "norms, past, expected",
  [
    ({0: 1.0, 1: 1.0, 2: 10.0}, {0: 0.0, 1: 0.0, 2: 0.0}, {}),  # exactly the ratio passes
    ({0: 1.0, 1: 1.0, 2: 10.1}, {0: 0.0, 1: 0.0, 2: 0.0}, {2: over(10.1, 1)}),
    ({0: 1.0, 1: 50.0}, {0: 5.0, 1: 5.0}, {}),  # as is usual
    ({0: 1.0, 1: 51.0}, {0: 5.0, 1: 5.0}, {1: over(51, 5)}),
    ({0: 9.0, 1: 90.0}, {0: 1.0, 1: 1.0}, {}),  # the other one is no more than it may be
    (  # all grew together
      {0: 90.0, 1: 99.0},
      {0: 1.0, 1: 1.0},
      {0: over(90, 1), 1: over(99, 1)},
    ),
    (  # most are bad in the same way
      {0: 1.0, **dict.fromkeys(range(1, 6), 99.0)},
      dict.fromkeys(range(6), 1.0),
      dict.fromkeys(range(1, 6), over(99, 1)),
    ),
    (  # two at once, and one honest answer: it ended a run
      {1: 1.0, 2: 1e12, 3: 1e12},
      {1: 1.0, 2: 1.0, 3: 1.0},
      {2: over(1e12, 1), 3: over(1e12, 1)},
    ),
    ({3: 1e9}, {3: 0.0}, {}),  # alone and new
    ({3: 1e30}, {3: 0.0}, {3: "norm 1e+30 is longer than any push"}),
    (
      {2: 1e30, 3: 1e30},
      {2: 1.0, 3: 1.0},
      dict.fromkeys((2, 3), "norm 1e+30 is longer than any push"),
    ),
    ({3: 1e9}, {3: 1.0}, {3: over(1e09, 1)}),  # alone, with a past
    ({0: math.nan, 1: 1.0}, {0: 0.0, 1: 0.0}, {0: "not finite (norm nan)"}),
    ({0: math.inf, 1: 1e9}, {0: 0.0, 1: 0.0}, {0: "not finite (norm inf)"}),
    ({0: 0.0, 1: 3.0}, {0: 0.0, 1: 0.0}, {0: "all zeros, after 1 steps"}),  # others no reference
    ({0: 0.0, 1: 0.0, 2: 0.0, 3: 3.0}, {0: 1.0, 1: 0.0, 2: 0.0, 3: 0.0}, {}),  # most are at rest
    ({0: 0.0}, {0: 1.0}, {}),  # alone, as at the end of a schedule
    ({}, {}, {}),
  ],
)
def test_screen(norms, past, expected):
  assert screen(norms, dict.fromkeys(norms, 1), past, 10.0, 1) == expected


def test_growth_that_all_share_passes_once_it_has_lasted():
  norms, past = {0: 90.0, 1: 99.0, 2: 1e3}, dict.fromkeys(range(3), 1.0)
  assert screen(norms, past, past, 10.0, 1, lasting=True) == {2: over(1e03, 90)}
  together = rules.grown_together
  assert together({**norms, 3: math.inf, 4: 1e30}, past, SyncConfig()) == [0, 1, 2]
  for sound in (0.0, 10.0):
    assert not together({**norms, 3: sound}, {**past, 3: 1.0}, SyncConfig())
  assert not together({**norms, 3: 1e9}, {**past, 3: 0.0}, SyncConfig()), "one without a past"
  assert not together({0: 90.0, 3: math.inf}, {**past, 3: 1.0}, SyncConfig()), "one alone"


def test_one_update_that_is_far_too_short_does_not_have_the_others_rejected():
  """While no past protects them; it had them rejected in every round, and was merged alone."""
  norms, steps = {0: 1.0, 1: 1.0, 2: 1e-6}, {0: 1, 1: 1, 2: 1}
  for past in (0.0, 1e-6):  # from that one's own pushes
    assert screen(norms, steps, dict.fromkeys(norms, past), 10.0, 1, settled=False) == {}
  assert screen(norms, steps, {0: 0.5, 1: 0.5, 2: 1e-6}, 10.0, 1) == {}
  long = {0: 1.0, 1: 1.0, 2: 11.0}
  assert list(screen(long, steps, dict.fromkeys(long, 0.0), 10.0, 1, settled=False)) == [2]


def test_a_longer_update_of_more_steps_is_in_proportion():
  """29 steps that all went one way, beside one step: 29 times as long, and not rejected."""
  for past in ({0: 0.0, 1: 0.0}, {0: 0.0, 1: 1.0}):
    assert screen({0: 1.0, 1: 29.0}, {0: 1, 1: 29}, past, 10.0, 1) == {}
    assert list(screen({0: 1.0, 1: 29.0}, {0: 1, 1: 1}, past, 10.0, 1)) == [1]
  # A single step beside 29 that cancelled each other is not too long either.
  assert screen({0: 1.0, 1: 29**0.5}, {0: 1, 1: 29}, {0: 29**-0.5, 1: 29**-0.5}, 10.0, 1) == {}


def test_one_step_alone_after_many_that_cancelled_out_is_in_proportion():
  """300 steps are 17 times as long as one; were one refused, the next push would have one again."""
  past = {0: 300**0.5 / 300}
  assert list(screen({0: 1.0}, {0: 1}, past, 10.0, period=1)) == [0]
  assert screen({0: 1.0}, {0: 1}, past, 10.0, period=100) == {}
  assert list(screen({0: 60.0}, {0: 1}, past, 10.0, period=100)) == [0], "more than ten periods"


NORMS = st.one_of(st.floats(0, 100), st.sampled_from([0.0, 1.0, 50.0, math.inf, math.nan]))


@given(
  st.lists(st.tuples(NORMS, st.integers(1, 4), st.floats(0, 10)), max_size=12),
  st.integers(1, 4),
  st.booleans(),
  st.booleans(),
)
def test_screening_compares_with_the_median_of_all_others(updates, period, settled, lasting):
  """As the docstring says it, with one look at everybody for each."""
  norms, steps, past = ({m: u[i] for m, u in enumerate(updates)} for i in range(3))
  own = {m: past[m] * max(steps[m], period) for m in norms}
  expected = set()
  for m, norm in norms.items():
    others = [n for n in norms if n != m and math.isfinite(norms[n])]
    moved = bool(others) and statistics.median_high([norms[n] for n in others]) > 0
    if settled and not lasting:
      others = [n for n in others if not own[n] or norms[n] <= 5.0 * own[n]]
    middle = statistics.median_low if settled else statistics.median_high
    usual = middle([norms[n] * max(1.0, steps[m] / steps[n]) for n in others] or [0.0])
    references = [r for r in (usual, own[m]) if r > 0]
    too_long = bool(references) and norm > 5.0 * max(references)
    if not math.isfinite(norm) or (norm == 0 and moved) or too_long:
      expected.add(m)
  assert screen(norms, steps, past, 5.0, period, settled, lasting).keys() == expected


@given(
  st.floats(0, 1e6),
  st.integers(0, 5),
  st.lists(st.integers(0, 9), unique=True, max_size=5),
  st.floats(0, 10),
  st.integers(1, 4),
)
def test_a_verdict_always_keeps_quorum_and_patience(now, pushed, pending, grace, quorum):
  decision = decide(now, pushed, pending, now if pushed >= quorum else math.inf, grace, quorum)
  assert decision.reason
  if decision.over and pushed >= quorum:
    assert not pending or now + grace <= now
  elif decision.over:
    assert pushed + len(pending) < quorum
  else:
    assert pending and (decision.wake_at == math.inf) == (pushed < quorum)
    # Woken then, it is over: no alarm rings for nothing.
    if decision.wake_at < math.inf:
      assert decide(decision.wake_at, pushed, pending, now, grace, quorum).over


@pytest.mark.parametrize(
  ("common", "towards", "opposes"),
  [(0.06, -0.031, True), (0.06, -0.029, False), (0.049, -0.9, False), (0.3, 0.3, False)],
)
def test_a_push_opposes_three_others_that_agree(common, towards, opposes):
  """By the mean of its cosines to them, and of theirs among themselves; lengths do not matter."""
  length = {0: 1.0, 1: 30.0, 2: 0.1, 3: 5.0}
  products = {
    (a, b): length[a] * length[b] * (1.0 if a == b else towards if b == 3 else common)
    for a, b in itertools.combinations_with_replacement(length, 2)
  }
  found = rules.opposing(products, list(length))
  assert found == ({3: pytest.approx(towards)} if opposes else {})
  pairs = [common] * 3 + [towards] * 3
  assert rules.agreement(products, list(length)) == pytest.approx(statistics.mean(pairs))
