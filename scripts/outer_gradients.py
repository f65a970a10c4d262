"""Statistics of the islands' outer gradients, commit by commit, for scripts/compare.py.

cosine   mean over the pairs of pushes of a commit: how much of them is common
length   |merged| / mean |push|: with the average sqrt(c + (1 - c) / M) for M equal pushes of
         cosine c; about 1 under radial-directional averaging, which keeps the length
rho      cosine of a fragment's merged outer gradient with the one before: what momentum adds up
pushes   in the commit
steps    of a push, mean
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from ddiloco.config import OuterConfig
from ddiloco.core import codec, outer
from ddiloco.core.delta import Committed, Merged, Merger
from ddiloco.protocol.events import Commit
from ddiloco.protocol.messages import FragmentState

PARTS = 10  # of a run, by its commits


@dataclasses.dataclass(frozen=True)
class Seen:
  """One commit; None: the value is not defined, for example for a vector of zeros."""

  fragment: int
  pushes: int
  steps: float
  cosine: float | None
  length: float | None
  rho: float | None


class Observer(Merger):
  """A merger that records the statistics of every commit in `seen`."""

  seen: list[Seen]
  _before: dict[int, np.ndarray]  # by fragment, the newest merged outer gradient

  def watch(self, seen: list[Seen]) -> Observer:
    """Sets the list for the statistics; returns this merger."""
    self.seen, self._before = seen, {}
    return self

  def commit(self, what: Commit, state: FragmentState) -> Merged:
    p = what.fragment
    old, size = self.committed[p], self.committed[p].value.size
    arrived = self.arrivals[p][1]
    sent = [arrived[m].push for m in what.learners]
    pushes = [codec.decode(push.payload, size, push.codec) for push in sent]
    found = super().commit(what, state)
    merged = merged_gradient(old, self.committed[p], outer.at(self.config.outer, what.progress))
    self.seen.append(
      Seen(
        fragment=p,
        pushes=len(pushes),
        steps=statistics.mean(what.steps),
        cosine=mean_cosine(pushes),
        length=found.length,
        rho=cosine(merged, self._before[p]) if p in self._before else None,
      )
    )
    self._before[p] = merged
    return found


def merged_gradient(old: Committed, new: Committed, config: OuterConfig) -> np.ndarray:
  """The merged delta behind an outer step: `core.outer.update`, solved for it."""
  step = (old.value - new.value) / np.float32(config.learning_rate)
  if not config.momentum:
    return step
  momentum = np.zeros_like(step) if old.momentum is None else old.momentum
  if not config.nesterov:
    return step - config.momentum * momentum
  return (step - config.momentum**2 * momentum) / (1 + config.momentum)


def cosine(a: np.ndarray, b: np.ndarray) -> float | None:
  """The cosine of two vectors; None if one is zero."""
  lengths = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
  return float(a @ b) / lengths if lengths else None


def mean_cosine(vectors: Sequence[np.ndarray]) -> float | None:
  """The mean cosine over all pairs; None if there are none."""
  return mean(cosine(a, b) for a, b in itertools.combinations(vectors, 2))


def mean(values) -> float | None:
  """The mean of the values that are not None."""
  known = [value for value in values if value is not None]
  return round(statistics.mean(known), 4) if known else None


NAMES = ("cosine", "length", "rho", "pushes", "steps")


def summary(seen: Sequence[Seen]) -> dict[str, float | None]:
  """The mean of each statistic over all commits."""
  return {name: mean(getattr(each, name) for each in seen) for name in NAMES}


def course(seen: Sequence[Seen]) -> Mapping[str, list[float | None]]:
  """The means of each of the run's parts, in order."""
  cuts = [round(i * len(seen) / PARTS) for i in range(PARTS + 1)]
  parts = [seen[a:b] for a, b in itertools.pairwise(cuts)]
  return {
    name: [mean(getattr(each, name) for each in part) for part in parts]
    for name in ("cosine", "length", "rho")
  }
