"""The chip-level simulator: against a naive one, by hand, and by properties."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from ddiloco.config import ConfigError
from ddiloco.simulation import chips as chip_time
from ddiloco.simulation.chips import SECONDS_PER_YEAR, Fleet
from tests.simulation import naive

BUCKETS = ("useful", "downscale", "upscale", "restart", "absent")
SECONDS = [f.name for f in dataclasses.fields(Fleet) if f.name.endswith("_seconds")]
DURATION = st.one_of(st.just(0.0), st.floats(0.0, 300.0))
FLEETS = st.builds(
  Fleet,
  chips=st.integers(10_000, 1_000_000),
  learners=st.integers(1, 12),
  days=st.floats(0.1, 1.0),
  seed=st.integers(0, 1000),
  chips_per_slice=st.sampled_from([64, 256, 1000, 100_000]),
  **{name: DURATION for name in SECONDS},
)


def shares(spent: chip_time.ChipTime) -> dict[str, float]:
  return {name: getattr(spent, name) / spent.total for name in BUCKETS}


@pytest.mark.parametrize(
  "changes",
  [
    {"chips": 150_000, "learners": 1},
    {"chips": 2_400_000, "learners": 1, "days": 2},
    {"chips": 1_200_000, "learners": 8, "days": 3},
    {"chips": 600_000, "learners": 16, "days": 5},
    {"chips": 2_400_000, "learners": 1, "days": 2, "chips_per_slice": 4096},
    {"chips": 1_200_000, "learners": 4, "days": 3, "recovery_seconds": 24.0},
    {"chips": 1_200_000, "learners": 4, "days": 3, "recovery_seconds": 0.0, "notice_seconds": 0.0},
    {"chips": 600_000, "learners": 2, "recovery_seconds": 1800.0, "rejoin_wait_seconds": 10.0},
    {"chips": 600_000, "learners": 2, "rejoin_wait_seconds": 0.0, "upscale_pause_seconds": 5.0},
    {"chips": 8192, "learners": 8, "chips_per_slice": 1024, "mtbi_chip_years": 0.02, "days": 60},
    {"chips": 8192, "learners": 4, "chips_per_slice": 1024, "mtbi_chip_years": 0.2, "days": 60},
  ],
  ids=str,
)
def test_agrees_with_a_naive_event_loop(changes):
  fleet = Fleet(**{"days": 10, **changes}, seed=7)
  times, places = chip_time.strike(fleet)
  assert len(times) > 500
  wanted, wanted_uptime = naive.decoupled(fleet, times.tolist(), places.tolist())
  found = chip_time.decoupled(fleet)
  for name, share in wanted.items():
    assert shares(found)[name] == pytest.approx(share, abs=0.005), name
  assert found.uptime == pytest.approx(wanted_uptime, abs=0.005)
  stiff = chip_time.inelastic(fleet)
  assert stiff.goodput == pytest.approx(naive.inelastic(fleet, times.tolist()), abs=1e-9)


def test_two_jobs_by_hand(monkeypatch):
  """Two slices of a learner fail, one in the other's pause; both come back in one more pause."""
  fleet = Fleet(chips=1000, learners=2, chips_per_slice=50, days=1)
  first = chip_time.elastic_job(fleet, [(1000.0, 0), (1010.0, 2)])
  # Notice 2, pause 22; recovery 120, wait 180.
  assert (first.shrinks, first.grows) == ([(1002, 1024)], [(1300, 1322)])
  assert first.away == [(1002, 1322), (1010, 1322)]
  second = chip_time.elastic_job(fleet, [(5000.0, 9)])
  assert (second.shrinks, second.grows) == ([(5002, 5024)], [(5300, 5322)])
  assert second.away == [(5002, 5322)]
  struck = np.array([1000.0, 1010.0, 5000.0]), np.array([0.0, 0.1, 0.99])
  monkeypatch.setattr(chip_time, "strike", lambda _: struck)
  spent = chip_time.decoupled(fleet)
  assert spent.absent == pytest.approx(50 * (320 + 312 + 320))
  assert spent.downscale == pytest.approx(22 * 2 * 500 - 50 * (22 + 14 + 22))
  assert spent.upscale == pytest.approx(22 * 2 * 500 - 50 * 22 * 3)
  assert spent.uptime == 1 and spent.failures == 3


def test_a_pause_takes_in_whatever_has_recovered():
  """The second failure comes while the first slice waits: no upscale pause for the first."""
  fleet = Fleet(chips=1000, learners=1, chips_per_slice=100, days=1)
  job = chip_time.elastic_job(fleet, [(1000.0, 0), (1200.0, 9)])
  assert job.shrinks == [(1002, 1024), (1202, 1224)] and job.grows == [(1500, 1522)]
  assert job.away == [(1002, 1224), (1202, 1522)]


def test_a_slice_under_repair_is_not_struck_again():
  fleet = Fleet(chips=1000, learners=1, chips_per_slice=100, days=1)
  job = chip_time.elastic_job(fleet, [(1000.0, 3), (1100.0, 3), (1121.0, 3)])
  assert job.shrinks == [(1002, 1024), (1123, 1145)]


@pytest.mark.parametrize("job", [chip_time.inelastic, chip_time.elastic, chip_time.decoupled])
def test_without_failures_everything_is_useful(job):
  spent = job(Fleet(mtbi_chip_years=1e12))
  assert spent.failures == 0
  assert spent.goodput == pytest.approx(1, abs=1e-12) and spent.uptime == pytest.approx(
    1, abs=1e-12
  )


@pytest.mark.parametrize("chips", [150_000, 2_400_000])
def test_inelastic_is_a_renewal_process(chips):
  """Mean time up 1/rate + notice, then a pause: the one closed form there is."""
  fleet = Fleet(chips=chips, days=365 if chips < 1e6 else 30, seed=3, learners=4)  # means nothing
  up = SECONDS_PER_YEAR / chips + fleet.notice_seconds
  wanted = up / (up + fleet.inelastic_pause_seconds)
  assert chip_time.inelastic(fleet).goodput == pytest.approx(wanted, abs=0.004)


@settings(max_examples=60)
@given(FLEETS)
def test_every_chip_second_is_accounted_for(fleet):
  for job in (chip_time.inelastic, chip_time.elastic, chip_time.decoupled):
    spent = job(fleet)
    parts = shares(spent)
    note(f"{job.__name__}: {parts}")
    assert min(parts.values()) >= 0
    assert sum(parts.values()) == pytest.approx(1, abs=1e-9)
    # nobody trains while nobody is up, and one slice of one learner at least while somebody is
    least = spent.uptime / (fleet.learners * fleet.slices_per_learner)
    assert -1e-9 <= least - 1e-9 <= spent.goodput <= spent.uptime + 1e-9 <= 1 + 2e-9


@settings(max_examples=60)
@given(FLEETS, st.integers(1, 50))
def test_pauses_are_in_order_and_absences_end_with_one(fleet, slices):
  times, places = chip_time.strike(fleet)
  job = chip_time.elastic_job(fleet, zip(times.tolist(), (slices * places).astype(int).tolist()))
  pauses = sorted(job.shrinks + job.grows)
  assert all(start <= end for start, end in pauses)
  assert all(end <= start for (_, end), (start, _) in itertools.pairwise(pauses))
  ends = {end for _, end in pauses}
  assert all(since <= until and until in ends for since, until in job.away)


@settings(max_examples=8)
@given(st.integers(100_000, 2_000_000), st.integers(1, 8), st.integers(0, 1000))
def test_goodput_falls_with_the_failure_rate(chips, learners, seed):
  fleet = Fleet(chips=chips, learners=learners, seed=seed, days=10)
  often = dataclasses.replace(fleet, mtbi_chip_years=0.5)
  for job in (chip_time.inelastic, chip_time.elastic, chip_time.decoupled):
    assert job(often).goodput < job(fleet).goodput, job.__name__


@settings(max_examples=8)
@given(st.integers(200_000, 2_400_000), st.integers(0, 1000))
def test_goodput_and_uptime_rise_with_the_number_of_learners(chips, seed):
  fleets = [Fleet(chips=chips, learners=m, seed=seed, days=10) for m in (1, 2, 4, 8, 16)]
  spent = [chip_time.inelastic(fleets[0]), *map(chip_time.decoupled, fleets)]
  goodputs = [each.goodput for each in spent]
  assert goodputs == sorted(goodputs) and len(set(goodputs)) == 6
  uptimes = [round(each.uptime, 9) for each in spent]
  assert uptimes == sorted(uptimes)


def test_the_same_failures_strike_whatever_the_number_of_learners():
  fleet = Fleet(days=5)
  spent = [chip_time.decoupled(dataclasses.replace(fleet, learners=m)) for m in (1, 4, 16)]
  assert len({each.failures for each in [*spent, chip_time.inelastic(fleet)]}) == 1
  assert chip_time.decoupled(fleet) == chip_time.decoupled(fleet)
  assert chip_time.decoupled(fleet) != chip_time.decoupled(dataclasses.replace(fleet, seed=1))


@pytest.mark.parametrize(
  "changes, says",
  [
    ({"chips": 0}, "chips = 0: must be greater than 0"),
    ({"chips": 1.5}, "chips = 1.5: must be of type int"),
    ({"learners": 0}, "learners = 0: must be greater than 0"),
    ({"chips": 4, "learners": 5}, "learners = 5: must not be more than chips = 4"),
    ({"days": -1.0}, "days = -1.0: must be greater than 0"),
    ({"days": float("nan")}, "days = nan: must be a finite number"),
    ({"days": 1e5}, "days = 100000.0: means 328,542,094 failures"),
    ({"seed": -1}, "seed = -1: must not be negative"),
    ({"mtbi_chip_years": 0.0}, "mtbi_chip_years = 0.0: must be greater than 0"),
    ({"chips_per_slice": 0}, "chips_per_slice = 0: must be greater than 0"),
    *[({name: -1.0}, f"{name} = -1.0: must not be negative. Fix: set 0 or") for name in SECONDS],
    ({"recovery_seconds": float("inf")}, "recovery_seconds = inf: must be a finite number"),
  ],
)  # fmt: skip
def test_bad_assumptions_are_refused_by_name(changes, says):
  with pytest.raises(ConfigError) as error:
    Fleet(**changes)
  assert str(error.value).startswith(f"simulate.{says}")
