"""Where a replayed learner lives: the same kind of island and the same data as in its run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ddiloco.config import ChaosConfig, Config, IslandsConfig
from ddiloco.core.tape import Started, Tape
from ddiloco.engines.players import Home
from ddiloco.runtime import initial
from ddiloco.training import data, devices
from ddiloco.training.island import Island


def starts(tape: Tape) -> dict[int, list[Started]]:
  """What each learner said when its incarnations started."""
  found: dict[int, list[Started]] = {}
  for role, lives in sorted(tape.roles.items(), key=lambda item: item[1][0].number):
    for entry in (e for life in lives for e in life.entries):
      if role.startswith("learner") and isinstance(entry.operation, Started):
        found.setdefault(entry.number, []).append(entry.operation)
  return found


def live_config(config: Config, learner: int, started: Started) -> Config:
  """The config as that incarnation had it: its islands may differ from the saved ones."""
  data_axis, fsdp, tensor = started.mesh
  mine = {"devices": started.devices, "data": data_axis, "fsdp": fsdp, "tensor": tensor}
  mine |= {"batch_size": started.batch_size}
  islands = dataclasses.replace(
    config.islands,
    num_learners=started.learners or config.islands.num_learners,
    overrides={**config.islands.overrides, str(learner): mine},
  )
  decay_steps = config.inner.decay_steps or started.planned_steps or config.planned_steps()
  inner = dataclasses.replace(config.inner, decay_steps=decay_steps)
  return dataclasses.replace(config, islands=islands, inner=inner, chaos=ChaosConfig())


class Homes:
  """Islands and data of all learners of a tape, each compiled when its learner's thread asks.

  Args:
    config: the run's.
    tape: its tape.
    visible: devices to use; learners take theirs in order of their numbers.

  Raises:
    ConfigError: there are too few devices.
  """

  def __init__(self, config: Config, tape: Tape, visible: Sequence[Any]):
    self._config, self._plan = config, initial.make_plan(config)
    self._corpus = data.open_corpus(config.data)
    counts = {m: max(s.devices for s in found) for m, found in starts(tape).items()}
    overrides = {
      str(i): {"devices": count, "data": 1, "fsdp": -1, "tensor": 1}
      for i, count in enumerate(counts.values())
    }
    islands = IslandsConfig(num_learners=len(counts), overrides=overrides)
    self._devices = dict(zip(counts, devices.partition(visible, islands)))
    self._made: dict[int, tuple[Started, Home]] = {}

  def __call__(self, learner: int, started: Started) -> Home:
    """The island and data for an incarnation that started like this; the same again if it can be.

    Raises:
      ConfigError: it cannot be the same here.
    """
    before = self._made.pop(learner, None)
    if before is None or before[0] != started:
      before = started, self._make(learner, started)
    self._made[learner] = before
    return before[1]

  def batches(self, learner: int, started: Started) -> Callable[[int], np.ndarray]:
    """Its batch [B, T+1] of a position."""
    config = live_config(self._config, learner, started)
    return data.Stream(self._corpus, config, learner).batch

  def _make(self, learner: int, started: Started) -> Home:
    config = live_config(self._config, learner, started)
    island = Island(config, learner, self._devices[learner][: started.devices], self._plan)
    island.compile()
    return island, self.batches(learner, started)
