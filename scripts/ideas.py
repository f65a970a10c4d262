"""Ideas that were tried and did not become settings, for scripts/compare.py.

A row of `compared.METHODS` names its ideas and their numbers:

restart        outer momentum begins again after so many versions of a fragment
warm_up        the outer learning rate grows from 0 over this share of the run's tokens
steady_step    the outer learning rate is scaled so that rate * (1 + m / (1 - m * rho)), m the
               momentum and rho the recent mean, equals its value at this rho: where updates point
               the same way, momentum adds up more of them
forget         an island sets this share of Adam's first moment to 0 where it applies a version
mean_of        the result is the mean of a fragment's newest so many versions
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np
from outer_gradients import Observer
from virtual_training import Trainer

from ddiloco.config import OuterConfig
from ddiloco.core.delta import Merged
from ddiloco.protocol.events import Commit
from ddiloco.protocol.messages import FragmentState
from ddiloco.protocol.values import replace

LATELY = 64  # commits
Recent = dict[int, collections.deque[np.ndarray]]  # by fragment, its newest values


class TriedMerger(Observer):
  """An observer whose outer step follows the ideas of its row."""

  ideas: Mapping[str, float]
  recent: Recent

  def follow(self, ideas: Mapping[str, float], recent: Recent) -> TriedMerger:
    """Sets the ideas, and `recent`, to which new values are added; returns this merger."""
    self.ideas, self.recent = ideas, recent
    return self

  def commit(self, what: Commit, state: FragmentState) -> Merged:
    whole, p = self.config, what.fragment
    self.config = dataclasses.replace(whole, outer=self._outer(whole.outer, what.progress))
    try:
      merged = super().commit(what, state)
    finally:
      self.config = whole
    new = self.committed[p]
    restart = int(self.ideas.get("restart", 0))
    if restart and new.momentum is not None and what.version % restart == 0:
      self.committed[p] = replace(new, momentum=np.zeros_like(new.momentum))
    if most := int(self.ideas.get("mean_of", 0)):
      values = self.recent.setdefault(p, collections.deque(maxlen=most))
      values.append(new.value.copy())
    return merged

  def _outer(self, config: OuterConfig, progress: float) -> OuterConfig:
    factor, momentum = 1.0, config.momentum
    if warm_up := self.ideas.get("warm_up", 0.0):
      factor *= min(1.0, max(0.01, progress / warm_up))
    if usual := self.ideas.get("steady_step", 0.0):
      lately = [each.rho for each in self.seen[-LATELY:] if each.rho is not None]
      rho = max(0.0, statistics.mean(lately)) if lately else usual
      factor *= gain(momentum, usual) / gain(momentum, rho)
    return dataclasses.replace(config, learning_rate=config.learning_rate * factor)


def gain(momentum: float, rho: float) -> float:
  """The sum of an update's contributions to this and all later steps, along the update.

  `rho`: the cosine of each update with the next.

  >>> [round(gain(0.8, rho), 2) for rho in (0, 0.25, 1)]
  [1.8, 2.0, 5.0]
  """
  return 1 + momentum / (1 - momentum * rho)


def mean_values(recent: Recent) -> list[np.ndarray]:
  """By fragment, the mean of its newest values."""
  return [np.asarray(np.mean(recent[p], axis=0, dtype=np.float32)) for p in sorted(recent)]


class ForgetfulTrainer(Trainer):
  """An island that reduces Adam's first moment of a fragment when it applies a version of it."""

  forgets = 0.0  # the share of the moment that is dropped

  def apply(self, fragment: int, staged: Any, keep: float, moments: bool = False) -> None:
    island = self._island
    island.apply(fragment, staged, keep, moments)
    if moments:
      return
    flat = island.to_host(island.copy_out(fragment, moments=True), fragment)
    flat[: flat.size // self.num_moments] *= np.float32(1 - self.forgets)
    island.apply(fragment, island.stage(fragment, flat, moments=True), 0.0, moments=True)
