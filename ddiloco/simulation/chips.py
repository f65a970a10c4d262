"""Failing chips, up to millions of them: the fleet, its failures, and where its time goes."""

from __future__ import annotations

import dataclasses

import numpy as np

from ddiloco.checks import must, not_negative, option, positive, typed
from ddiloco.config.schema import MAX_LEARNERS

# --- A fleet of chips that fail, and every assumption about what a failure costs
# [paper]: "Decoupled DiLoCo for Resilient Distributed Pre-training" (arXiv 2604.21428) says so.
# [inferred]: the paper does not say; these are the round values with which one set of assumptions
# gives all of the paper's Table 1 (`scripts/reproduce_table1.py` also shows the effect of each).

SECONDS_PER_DAY = 86_400.0
SECONDS_PER_YEAR = 365.25 * SECONDS_PER_DAY
MOST_FAILURES = 10_000_000  # they take about 3 GB of memory


@dataclasses.dataclass(frozen=True)
class Fleet:
  """Chips, how they fail, and what a failure costs. Wrong values raise ConfigError by name."""

  chips: int = option(1_200_000, "Chips of the whole fleet.")
  learners: int = option(8, "Learners that share the chips equally and never wait for each other.")
  days: float = option(30.0, "Simulated time, days.")
  seed: int = option(0, "Of the failures; the same ones strike whatever the number of learners.")
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
# All learners lie one after the other on one axis of time, each on a stretch of its own with a
# margin behind it, so that one pass handles all learners: learner m's second t is at m * span + t.
# The next event that counts depends on the current event alone. So a history is the orbit of the
# first event under "the next event that counts".


@dataclasses.dataclass(frozen=True)
class History:
  """What happens to jobs on the axis of `num_jobs` stretches of `span` seconds.

  Pauses do not overlap within a job and are in order. Nothing is clipped to the simulated time.
  """

  num_jobs: int
  slices_per_job: int
  span: float
  num_failures: int
  pause_starts: np.ndarray  # [pauses] f64
  pause_ends: np.ndarray  # [pauses] f64
  is_upscale: np.ndarray  # [pauses] bool; the others shrink or restart the job
  absent_from: np.ndarray  # [absences] f64; one slice each
  absent_until: np.ndarray  # [absences] f64


def strike(fleet: Fleet) -> tuple[np.ndarray, np.ndarray]:
  """(Seconds of all failures, ascending; places in the fleet as shares in [0, 1)). Both f64 [n].

  They depend on chips, days, seed and the rate alone: the same failures strike for any division of
  the chips among learners.
  """
  rng = np.random.default_rng(fleet.seed)
  count = rng.poisson(fleet.expected_failures)
  return np.sort(rng.uniform(0.0, fleet.seconds, count)), rng.uniform(0.0, 1.0, count)


def elastic_history(fleet: Fleet) -> History:
  """`fleet.learners` jobs, each of which shrinks by the failed slices and later grows again.

  A learner of one slice cannot shrink: it stands still until its slice is back.
  """
  times, places = strike(fleet)
  count = fleet.slices_per_learner
  slices = (places * (fleet.learners * count)).astype(np.int64)
  span = fleet.seconds + 2.0 * _longest(fleet)
  if count == 1:
    away = max(fleet.recovery_seconds, fleet.notice_seconds) + fleet.upscale_pause_seconds
    return _all_or_nothing(fleet, np.sort(times + slices * span), span, away)
  kept = _strikes_on_present(times, slices, fleet.recovery_seconds, span)
  failures = np.sort(times[kept] + (slices[kept] // count) * span)
  starts, ends, upscale = _pauses(fleet, failures)
  absorbed_by = np.searchsorted(ends, failures, side="left")
  rejoins_at = np.searchsorted(ends, failures + fleet.recovery_seconds, side="left")
  return History(
    num_jobs=fleet.learners,
    slices_per_job=count,
    span=span,
    num_failures=len(times),
    pause_starts=starts,
    pause_ends=ends,
    is_upscale=upscale,
    absent_from=np.maximum(failures, starts[absorbed_by]),
    absent_until=ends[rejoins_at],
  )


def _all_or_nothing(fleet: Fleet, failures: np.ndarray, span: float, away: float) -> History:
  """`fleet.learners` jobs of one slice, which is back `away` seconds after a failure; failures
  until then do not count."""
  struck = failures[_orbit(_first_after(failures, failures + away))]
  none, absent = np.zeros(0), (struck + fleet.notice_seconds, struck + away)
  return History(fleet.learners, 1, span, len(failures), none, none, none.astype(bool), *absent)


def _pauses(fleet: Fleet, failures: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """(starts, ends, is_upscale) of all pauses, in order.

  Two things can begin a pause: a failure, and a recovered slice that has waited long enough. After
  a pause that ends at E, the next pause begins with the first failure after E, or with the first
  end of a wait of a slice that recovered after E. Slices that had recovered before came back at E.
  """
  num_failures = len(failures)
  recovered = failures + fleet.recovery_seconds
  patience = recovered + fleet.rejoin_wait_seconds
  stops = np.concatenate([failures + fleet.notice_seconds, patience])
  ends = np.concatenate(
    [stops[:num_failures] + fleet.downscale_pause_seconds, patience + fleet.upscale_pause_seconds]
  )
  failure = _first_after(failures, ends)
  impatient = _first_after(recovered, ends)
  failed_at = np.append(failures, np.inf)[failure]
  asked_at = np.append(patience, np.inf)[impatient]
  following = np.where(failed_at <= asked_at, failure, num_failures + impatient)
  following[np.isinf(failed_at) & np.isinf(asked_at)] = len(stops)
  chosen = _orbit(following)
  return stops[chosen], ends[chosen], chosen >= num_failures


def _strikes_on_present(
  times: np.ndarray, slices: np.ndarray, recovery_seconds: float, span: float
) -> np.ndarray:
  """Indices of the failures that count: failures in a slice under repair change nothing."""
  order = np.lexsort((times, slices))
  axis = times[order] + slices[order] * span
  return order[_orbit(_first_after(axis, axis + recovery_seconds))]


def _first_after(times: np.ndarray, moments: np.ndarray) -> np.ndarray:
  """For each moment the index of the first of `times` after it; len(times) if there is none."""
  return np.searchsorted(times, moments, side="right")


def _orbit(following: np.ndarray) -> np.ndarray:
  """Indices 0, following[0], following[following[0]], ... below n = len(following), in order.

  following: [n] int; n stands for the end, which every orbit must reach.
  """
  then, at, found = following.tolist(), 0, []
  while at < len(then):
    found.append(at)
    at = then[at]
  return np.array(found, np.int64)


def _longest(fleet: Fleet) -> float:
  """An upper bound on the seconds by which one failure can reach beyond the simulated time."""
  return 1.0 + sum(v for name, v in dataclasses.asdict(fleet).items() if name.endswith("_seconds"))


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
  away = fleet.notice_seconds + fleet.inelastic_pause_seconds
  whole = dataclasses.replace(fleet, learners=1)
  spent = _account(whole, _all_or_nothing(whole, times, fleet.seconds + away + 1.0, away))
  return dataclasses.replace(spent, absent=0.0, restart=spent.absent)


def decoupled(fleet: Fleet) -> ChipTime:
  """`fleet.learners` learners, each data-parallel and elastic, none waiting for another."""
  return _account(fleet, elastic_history(fleet))


def elastic(fleet: Fleet) -> ChipTime:
  """Elastic data-parallel over all chips: one learner."""
  return decoupled(dataclasses.replace(fleet, learners=1))


def _account(fleet: Fleet, history: History) -> ChipTime:
  """Adds up a history: between two moments at which anything changes all counts stay the same."""
  stretches = np.arange(history.num_jobs) * history.span
  pauses, upscale = np.array([history.pause_starts, history.pause_ends]), history.is_upscale
  intervals = [
    (stretches, stretches + fleet.seconds),
    (history.absent_from, history.absent_until),
    pauses[:, ~upscale],
    pauses[:, upscale],
  ]
  times = np.sort(np.concatenate([edge for pair in intervals for edge in pair]))
  inside, absent, shrinks, grows = (_covering(*pair, times)[:-1] for pair in intervals)
  slice_chips = fleet.chips / (history.num_jobs * history.slices_per_job)
  lengths = np.diff(times) * inside
  away = np.minimum(absent, history.slices_per_job)
  present = history.slices_per_job - away
  still = (shrinks + grows) > 0

  def chip_seconds(slices: np.ndarray) -> float:
    return slice_chips * float(lengths @ slices)

  return ChipTime(
    total=fleet.chips * fleet.seconds,
    useful=chip_seconds(present * ~still),
    downscale=chip_seconds(present * (shrinks > 0)),
    upscale=chip_seconds(present * (grows > 0)),
    absent=chip_seconds(away),
    uptime=_any_share(times, (inside > 0) & ~still & (present > 0), history, fleet.seconds),
    failures=history.num_failures,
  )


def _covering(starts: np.ndarray, ends: np.ndarray, times: np.ndarray) -> np.ndarray:
  """How many of these intervals contain each of the times; an end is outside."""
  begun, over = (np.searchsorted(np.sort(edge), times, side="right") for edge in (starts, ends))
  return begun - over


def _any_share(times: np.ndarray, trains: np.ndarray, history: History, seconds: float) -> float:
  """Share of the simulated time in which at least one job trains; trains: [t - 1] bool."""
  change = np.diff(trains.astype(np.int32), prepend=0, append=0)
  half_a_margin = (history.span - seconds) / 2  # so that rounding reaches no other job's stretch
  moments = times - np.floor((times + half_a_margin) / history.span) * history.span
  order = np.sort(moments)
  training = _covering(moments[change > 0], moments[change < 0], order)
  return float(np.diff(order, append=seconds) @ (training > 0)) / seconds
