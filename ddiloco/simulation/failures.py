"""Which failures strike, and when learners stand still because of them. No loop over events.

All learners lie one after the other on one axis of time, each on a stretch of its own with a margin
behind it, so that one pass works through all of them: learner m's second t is at m * span + t.
What happens next after an event depends on that event alone, so that a history is the orbit of the
first event under "the next one that counts", found in log2(n) steps by doubling.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ddiloco.simulation.fleet import Fleet


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
  """Seconds of all failures, ascending, and where in the fleet: a share in [0, 1). Both f64 [n].

  Depends on chips, days, seed and the rate alone: the same failures strike however the chips are
  shared out.
  """
  rng = np.random.default_rng(fleet.seed)
  count = rng.poisson(fleet.expected_failures)
  return np.sort(rng.uniform(0.0, fleet.seconds, count)), rng.uniform(0.0, 1.0, count)


def inelastic_history(fleet: Fleet) -> History:
  """One job over all chips that needs all of them: each failure stops and restarts it."""
  times, _ = strike(fleet)
  struck = times[_orbit(_first_after(times, times + _inelastic_hold(fleet)))]
  starts = struck + fleet.notice_seconds
  none = np.zeros(0)
  ends = starts + fleet.inelastic_pause_seconds
  span = fleet.seconds + _inelastic_hold(fleet) + 1.0
  quiet = np.zeros(len(starts), bool)
  return History(1, 1, span, len(times), starts, ends, quiet, none, none)


def elastic_history(fleet: Fleet) -> History:
  """`fleet.learners` jobs, each of which shrinks by the failed slices and later grows again.

  A learner of one slice cannot shrink: it stands still until its slice is back.
  """
  times, places = strike(fleet)
  count = fleet.slices_per_learner
  slices = (places * (fleet.learners * count)).astype(np.int64)
  span = fleet.seconds + 2.0 * _longest(fleet)
  kept = _strikes_on_present(times, slices, fleet.recovery_seconds, span)
  failures = np.sort(times[kept] + (slices[kept] // count) * span)
  if count == 1:
    return _waiting_for_its_only_slice(fleet, failures, span, len(times))
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


def _pauses(fleet: Fleet, failures: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """(starts, ends, is_upscale) of all pauses, in order.

  Two things can begin a pause: a failure, and a recovered slice that has waited long enough. After
  a pause that ends at E these are the first failure after E and the first end of patience of a
  slice that has recovered after E; all that were ready before came back at E.
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


def _waiting_for_its_only_slice(
  fleet: Fleet, failures: np.ndarray, span: float, num_failures: int
) -> History:
  """Learners of one slice: away until it has recovered, then a pause to take it in."""
  away = max(fleet.recovery_seconds, fleet.notice_seconds) + fleet.upscale_pause_seconds
  struck = failures[_orbit(_first_after(failures, failures + away))]
  stops, back = struck + fleet.notice_seconds, struck + away
  upscale = np.ones(len(struck), bool)
  return History(fleet.learners, 1, span, num_failures, stops, back, upscale, stops, back)


def _strikes_on_present(
  times: np.ndarray, slices: np.ndarray, recovery_seconds: float, span: float
) -> np.ndarray:
  """Indices of the failures that count: those on chips of a slice under repair change nothing."""
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
  end = len(following)
  jump = np.append(following, end)
  orbit = np.zeros(1, np.int64)
  while orbit[-1] != end:
    orbit = np.concatenate([orbit, jump[orbit]])
    jump = jump[jump]
  return orbit[orbit != end]


def _inelastic_hold(fleet: Fleet) -> float:
  return fleet.notice_seconds + fleet.inelastic_pause_seconds


def _longest(fleet: Fleet) -> float:
  """Seconds by which one failure can reach beyond the simulated time."""
  return 1.0 + sum(
    (
      fleet.notice_seconds,
      fleet.downscale_pause_seconds,
      fleet.upscale_pause_seconds,
      fleet.recovery_seconds,
      fleet.rejoin_wait_seconds,
    )
  )
