"""Where the chips' time went: every chip-second is useful, paused or absent."""

from __future__ import annotations

import dataclasses

import numpy as np

from ddiloco.simulation.failures import History, elastic_history, inelastic_history
from ddiloco.simulation.fleet import Fleet


@dataclasses.dataclass(frozen=True)
class ChipTime:
  """Chip-seconds by what became of them, over all learners, and what happened meanwhile.

  useful + downscale + upscale + restart + absent = total. A slice that is away counts as absent
  also while its learner stands still.
  """

  total: float
  useful: float
  downscale: float  # standing still to go on with fewer slices
  upscale: float  # standing still to take slices in again
  restart: float  # standing still until everything has started again (not elastic)
  absent: float  # of slices from when their learner goes on without them until they are back
  uptime: float  # share of time in which at least one learner trains
  failures: int
  pauses: int

  @property
  def goodput(self) -> float:
    """Share of all chip time that trained."""
    return self.useful / self.total


def inelastic(fleet: Fleet) -> ChipTime:
  """Data-parallel over all chips, which needs all of them. `fleet.learners` has no meaning."""
  history = inelastic_history(fleet)
  return _account(fleet, history, shrinking="restart")


def decoupled(fleet: Fleet) -> ChipTime:
  """`fleet.learners` learners, each data-parallel and elastic, none waiting for another."""
  return _account(fleet, elastic_history(fleet), shrinking="downscale")


def elastic(fleet: Fleet) -> ChipTime:
  """Elastic data-parallel over all chips: one learner."""
  return decoupled(dataclasses.replace(fleet, learners=1))


def _account(fleet: Fleet, history: History, shrinking: str) -> ChipTime:
  """Adds up a history. `shrinking`: what pauses that are no upscale pauses are called."""
  slice_chips = fleet.chips / (history.num_jobs * history.slices_per_job)
  times, (inside, absent, shrinks, grows) = _levels(fleet, history)
  lengths = np.diff(times) * inside
  away = np.minimum(absent, history.slices_per_job)
  present = history.slices_per_job - away
  still = (shrinks + grows) > 0
  spent = {
    "useful": present * ~still,
    shrinking: present * (shrinks > 0),
    "upscale": present * (grows > 0),
    "absent": away,
  }
  seconds = dict.fromkeys(("downscale", "upscale", "restart"), 0.0)
  seconds |= {name: slice_chips * float(lengths @ count) for name, count in spent.items()}
  trains = inside.astype(bool) & ~still & (present > 0)
  return ChipTime(
    total=fleet.chips * fleet.seconds,
    uptime=_any_share(times, trains, history, fleet.seconds),
    failures=history.num_failures,
    pauses=int(np.sum(history.pause_starts % history.span < fleet.seconds)),
    **seconds,
  )


def _levels(fleet: Fleet, history: History) -> tuple[np.ndarray, list[np.ndarray]]:
  """Times [t] at which anything changes, and what holds between them, each [t - 1] int.

  That is: is it inside the simulated time, slices that are absent, is it a pause of the one kind,
  or of the other.
  """
  stretches = np.arange(history.num_jobs) * history.span
  pauses = (history.pause_starts, history.pause_ends)
  intervals = [
    (stretches, stretches + fleet.seconds),
    (history.absent_from, history.absent_until),
    tuple(edge[~history.is_upscale] for edge in pauses),
    tuple(edge[history.is_upscale] for edge in pauses),
  ]
  edges = [np.concatenate(pair) for pair in intervals]
  times = np.concatenate(edges)
  order = np.argsort(times, kind="stable")
  levels, first = [], 0
  for edge in edges:
    change = np.zeros(len(times), np.int32)
    change[first : first + len(edge) // 2] = 1
    change[first + len(edge) // 2 : first + len(edge)] = -1
    levels.append(np.cumsum(change[order])[:-1])
    first += len(edge)
  return times[order], levels


def _any_share(times: np.ndarray, trains: np.ndarray, history: History, seconds: float) -> float:
  """Share of the simulated time in which at least one job trains; trains: [t - 1] bool."""
  change = np.diff(trains.astype(np.int32), prepend=0, append=0)
  at = np.flatnonzero(change)
  half_a_margin = (history.span - seconds) / 2  # so that rounding leads to no other job's stretch
  moments = times[at] - np.floor((times[at] + half_a_margin) / history.span) * history.span
  order = np.argsort(moments, kind="stable")
  training = np.cumsum(change[at][order])
  lengths = np.diff(moments[order], append=seconds)
  return float(lengths @ (training > 0)) / seconds
