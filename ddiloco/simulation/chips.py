"""Failing chips, up to millions of them: the fleet, its failures, and where its time goes."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np

from ddiloco.checks import must, not_negative, option, positive, typed
from ddiloco.config.schema import MAX_LEARNERS

# --- A fleet of chips that fail, and every assumption about what a failure costs
# [paper]: "Decoupled DiLoCo for Resilient Distributed Pre-training" (arXiv 2604.21428) says so.
# [inferred]: the paper does not say; these are the round values with which one set of assumptions
# gives all of the paper's Table 1 (`scripts/reproduce_table1.py` also shows the effect of each).

SECONDS_PER_DAY = 86_400.0
SECONDS_PER_YEAR = 365.25 * SECONDS_PER_DAY
MOST_FAILURES = 10_000_000  # they take up to 7 GB of memory
Span = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Fleet:
  """Chips, how they fail, and what a failure costs. Wrong values raise ConfigError by name."""

  chips: int = option(1_200_000, "Chips of the whole fleet.")
  learners: int = option(8, "Learners that share the chips equally and never wait for each other.")
  days: float = option(30.0, "Simulated time, days.")
  seed: int = option(0, "Seed of the failures, which are the same for any number of learners.")
  mtbi_chip_years: float = option(
    1.0, "Mean time between interruptions of one chip, years; Poisson [paper]."
  )
  chips_per_slice: int = option(
    256, "Chips that go and come back together [inferred: a whole TPU v6e slice, Google's manual]."
  )
  notice_seconds: float = option(
    2.0, "Training goes on this long after a failure: the step under way is finished [inferred]."
  )
  downscale_pause_seconds: float = option(
    22.0, "A learner stands still this long to go on without the failed slices [inferred]."
  )
  upscale_pause_seconds: float = option(
    22.0, "A learner stands still this long to take recovered slices in [inferred: as long]."
  )
  recovery_seconds: float = option(
    120.0, "From a failure until its slice could work again [inferred]."
  )
  rejoin_wait_seconds: float = option(
    180.0, "A recovered slice waits this long for some pause to end before it asks for one of its"
    " own [inferred: 2 to 3 minutes]."
  )  # fmt: skip
  inelastic_pause_seconds: float = option(
    80.0, "Without elasticity: all stand still this long until the failed slice is replaced and"
    " the last checkpoint is restored [inferred]."
  )  # fmt: skip

  def __post_init__(self):
    typed("simulate", self)
    names = ("chips", "learners", "days", "mtbi_chip_years", "chips_per_slice")
    positive("simulate", self, *names)
    not_negative("simulate", self, *(f.name for f in dataclasses.fields(self)))
    most = min(self.chips, MAX_LEARNERS)
    rule = f"must not be more than chips = {self.chips}, or {MAX_LEARNERS}"
    fix = f"use at most {most}"
    must("simulate", self, "learners", self.learners <= most, rule, fix)
    count = self.expected_failures
    rule = f"means {count:,.0f} failures, more than {MOST_FAILURES:,}"
    must("simulate", self, "days", count <= MOST_FAILURES, rule, "simulate fewer days")

  @property
  def seconds(self) -> float:
    """The simulated time."""
    return self.days * SECONDS_PER_DAY

  @property
  def expected_failures(self) -> float:
    """Mean number of failures of the whole fleet in the simulated time."""
    return self.seconds * self.chips / (self.mtbi_chip_years * SECONDS_PER_YEAR)

  @property
  def slices_per_learner(self) -> int:
    """Whole slices of a learner: as near as possible to `chips_per_slice`, and at least one."""
    return max(1, round(self.chips / self.learners / self.chips_per_slice))


# --- Which failures strike, and when learners stand still because of them


@dataclasses.dataclass
class Job:
  """What happens to one job, each kind in order: (from, until) in seconds, also past the simulated
  time. It pauses to go on with fewer slices (`shrinks`) and to take some in again (`grows`); in
  `away` is each absence of one slice."""

  shrinks: list[Span] = dataclasses.field(default_factory=list)
  grows: list[Span] = dataclasses.field(default_factory=list)
  away: list[Span] = dataclasses.field(default_factory=list)


def strike(fleet: Fleet) -> tuple[np.ndarray, np.ndarray]:
  """(Seconds of all failures, ascending; places in the fleet as shares in [0, 1)). Both f64 [n].

  They depend on chips, days, seed and the rate alone: the same failures strike for any division of
  the chips among learners.
  """
  rng = np.random.default_rng(fleet.seed)
  count = rng.poisson(fleet.expected_failures)
  return np.sort(rng.uniform(0.0, fleet.seconds, count)), rng.uniform(0.0, 1.0, count)


def elastic_job(fleet: Fleet, failures: Iterable[tuple[float, int]]) -> Job:
  """One learner, which shrinks by its failed slices and later grows again.

  A failure begins a pause, of which all failures until its end are a part. A repaired slice comes
  back at the end of whichever pause ends next, or begins one when it has waited long enough.

  Args:
    fleet: all durations.
    failures: (seconds, number of the slice), ascending.
  """
  job, repaired_at, struck = Job(), dict[int, float](), collections.deque[float]()
  for when, which in failures:
    if when > repaired_at.get(which, -math.inf):  # else it changes nothing: the slice is away
      repaired_at[which] = when + fleet.recovery_seconds
      struck.append(when)
  away = collections.deque[Span]()  # slices that are away: since when, and when each is repaired
  while struck or away:
    failed_at = struck[0] if struck else math.inf
    asked_at = away[0][1] + fleet.rejoin_wait_seconds if away else math.inf
    if failed_at <= asked_at:
      start = failed_at + fleet.notice_seconds
      end = start + fleet.downscale_pause_seconds
      job.shrinks.append((start, end))
    else:
      start, end = asked_at, asked_at + fleet.upscale_pause_seconds
      job.grows.append((start, end))
    while struck and struck[0] <= end:
      when = struck.popleft()
      away.append((max(when, start), when + fleet.recovery_seconds))
    while away and away[0][1] <= end:
      since, _ = away.popleft()
      job.away.append((since, end))
  return job


def stiff_job(failures: Iterable[float], notice_seconds: float, away_seconds: float) -> Job:
  """One job of one part, which is back so long after a failure; until then others do not count."""
  job, until = Job(), -math.inf
  for when in failures:
    if when > until:
      until = when + away_seconds
      job.away.append((when + notice_seconds, until))
  return job


# --- Where the chips' time went: every chip-second is useful, paused or absent


@dataclasses.dataclass(frozen=True)
class ChipTime:
  """Chip-seconds by their use, over all learners, and what happened meanwhile.

  useful + downscale + upscale + restart + absent = total. A slice that is away counts as absent
  also while its learner stands still.
  """

  total: float
  useful: float
  downscale: float  # standing still to go on with fewer slices
  upscale: float  # standing still to take slices in again
  absent: float  # of slices from when their learner goes on without them until they are back
  uptime: float  # share of time in which at least one learner trains
  failures: int
  restart: float = 0.0  # standing still until everything has started again (not elastic)

  @property
  def goodput(self) -> float:
    """Share of all chip time that trained."""
    return self.useful / self.total


def inelastic(fleet: Fleet) -> ChipTime:
  """Data-parallel over all chips, which needs all of them: each failure stops and restarts it.

  `fleet.learners` has no meaning.
  """
  times, _ = strike(fleet)
  away_seconds = fleet.notice_seconds + fleet.inelastic_pause_seconds
  job = stiff_job(times.tolist(), fleet.notice_seconds, away_seconds)
  spent = _account(fleet, [job], 1, len(times))
  return dataclasses.replace(spent, absent=0.0, restart=spent.absent)


def decoupled(fleet: Fleet) -> ChipTime:
  """`fleet.learners` learners, each data-parallel and elastic, none waiting for another.

  A learner of one slice cannot shrink: it stands still until its slice is back.
  """
  (times, places), count = strike(fleet), fleet.slices_per_learner
  learners, slices = np.divmod((places * (fleet.learners * count)).astype(np.int64), count)
  order = np.argsort(learners, kind="stable")
  bounds = np.searchsorted(learners[order], np.arange(1, fleet.learners))
  away_seconds = max(fleet.recovery_seconds, fleet.notice_seconds) + fleet.upscale_pause_seconds
  jobs = []
  for mine in np.split(order, bounds):
    failures = times[mine].tolist()
    if count == 1:
      jobs.append(stiff_job(failures, fleet.notice_seconds, away_seconds))
    else:
      jobs.append(elastic_job(fleet, zip(failures, slices[mine].tolist())))
  return _account(fleet, jobs, count, len(times))


def elastic(fleet: Fleet) -> ChipTime:
  """Elastic data-parallel over all chips: one learner."""
  return decoupled(dataclasses.replace(fleet, learners=1))


def _account(fleet: Fleet, jobs: Sequence[Job], slices: int, failures: int) -> ChipTime:
  """Adds up jobs of so many slices each. Between two times at which anything changes all counts
  stay the same."""
  spans, counts = list[Span](), list[int]()
  for job in jobs:
    for mine in ([(0.0, fleet.seconds)], job.away, job.shrinks, job.grows):
      spans += mine
      counts.append(len(mine))
  owners, kinds = np.divmod(np.repeat(np.arange(len(counts), dtype=np.int32), counts), 4)
  times = np.transpose(spans).clip(0.0, fleet.seconds).ravel()  # all starts, then all ends
  changes = np.zeros((4, len(times)), np.int8)
  changes[np.tile(kinds, 2), np.arange(len(times))] = np.repeat([1, -1], len(spans))
  order = np.lexsort((times, np.tile(owners, 2)))  # a job after the other, each from 0 to the end
  times = times[order]
  there, away, shrinks, grows = changes[:, order].cumsum(axis=1, dtype=np.int32)
  there = slices * there.astype(np.int64)
  present = np.maximum(there - away, 0)
  trains = present * (shrinks + grows == 0)
  seconds = np.diff(times, append=fleet.seconds)
  chips = fleet.chips / (len(jobs) * slices)  # of a slice
  useful, downscale, upscale, absent = (
    chips * float(seconds @ use)
    for use in (trains, present * shrinks, present * grows, there - present)
  )
  change, order = np.diff(np.sign(trains), prepend=0), np.argsort(times)
  up_seconds = float(np.diff(times[order]) @ (change[order].cumsum()[:-1] > 0))
  return ChipTime(
    total=fleet.chips * fleet.seconds,
    useful=useful,
    downscale=downscale,
    upscale=upscale,
    absent=absent,
    uptime=up_seconds / fleet.seconds,
    failures=failures,
  )
