"""Training in virtual time, for the scripts beside this file: roles unchanged, and real vectors.

Roles, reducers, deltas, merges and outer steps are those of every run; islands are real ones, whose
steps take virtual time. So a run is a pure function of its config, seed and pace, whatever else the
machine does, and two runs differ only by their configs.

An island makes its quota of steps and leaves, and all learning rates reach the end of their
schedule with the run: all runs of one budget train on equally many tokens, merged or not. Steps
that are lost with a killed island count as made; the island goes on with the data after them.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import common
import jax
import numpy as np

from ddiloco.config import ChaosConfig, Config, Fault
from ddiloco.config.schema import DataConfig, InnerConfig, IslandsConfig, ModelConfig, SyncConfig
from ddiloco.core.delta import Committed, Deltas, Merger
from ddiloco.core.fragments import Fragment, Plan, gather, scatter
from ddiloco.network.transport import learner_address
from ddiloco.protocol.messages import FragmentState
from ddiloco.roles import initial
from ddiloco.simulation.stand_ins import VirtualIsland
from ddiloco.simulation.world import Actor, Pace, World
from ddiloco.training.data import Stream, open_data
from ddiloco.training.evaluate import HeldoutLoss
from ddiloco.training.island import Island
from ddiloco.training.step import learning_rate

STEP_SECONDS = 0.1  # of virtual time
HELDOUT_ROWS = 64  # evaluated at once


class Problem(Protocol):
  """A model with its data and islands."""

  config: Config
  plan: Plan
  initial: list[np.ndarray]  # by fragment

  def island(self, world: Any, number: int, seed: str) -> Any:
    """An island that trains in virtual time."""
    ...

  def loss(self, values: list[np.ndarray]) -> float:
    """The loss of a model with these fragments."""
    ...


class Valued(World):
  """A world with real vectors.

  Args:
    problem: the model, its data and islands.
    seed: of paces, and of data that a problem makes itself.
    faults: of the run.
    slowness: by learner, the factor by which its steps are longer; empty: all are equal.
    presence: by learner, the shares of the run between which it takes part; others always do.

  Attributes:
    quotas: by learner, the steps it is to make.
    made: by learner, the steps it has made, in all its lives.
  """

  def __init__(
    self,
    problem: Problem,
    seed: int,
    faults: Sequence[Fault] = (),
    slowness: Sequence[float] = (),
    presence: Mapping[str, tuple[float, float]] | None = None,
  ):
    self.problem = problem
    config, learners = problem.config, problem.config.num_islands()
    times = np.array(slowness or (1.0,) * learners)
    self.presence = [(presence or {}).get(learner_address(m), (0.0, 1.0)) for m in range(learners)]
    weights = np.array([end - begin for begin, end in self.presence]) / times
    total = config.islands.num_learners * config.planned_steps()
    self.quotas = [round(total * share) for share in weights / weights.sum()]
    self.made = [0] * learners
    pace = Pace(tuple((STEP_SECONDS * times).tolist()))
    chaos = ChaosConfig(tuple(faults))
    super().__init__(dataclasses.replace(problem.config, chaos=chaos), pace, seed, problem.plan)

  def put(self, state: FragmentState) -> None:
    value = self.problem.initial[state.index]
    self.kept[state.index] = Committed(state, value, value, None)

  def island(self, actor: Actor) -> Any:
    return self.problem.island(self, actor.number, f"{self.seed} {actor.role}")

  def deltas(self, actor: Actor) -> Deltas:
    return Deltas(self.sync)

  def merger(self, actor: Actor, fragments: Mapping[int, Fragment]) -> Merger:
    return Merger(fragments, self.kept, self.config)

  def loss(self) -> float:
    """The loss of the global model."""
    return self.problem.loss([self.kept[p].value for p in range(self.sync.num_fragments)])

  def train(self) -> float:
    """Runs until all islands have left for good; returns the loss."""
    self.run(math.inf, self._all_left)
    return self.loss()

  def _all_left(self) -> bool:
    if self.planned_faults.hopeless:
      raise RuntimeError("the run can never end. Fix: plan fewer kills of one role")
    return not self.working and all(made >= of for made, of in zip(self.made, self.quotas))


# --- The model and data of a config


class Text:
  """The problem of a config: its model and data, with the config's seed."""

  def __init__(self, config: Config):
    self.config, self.plan = config, initial.make_plan(config)
    self._first = initial.initial_params(config)
    self.initial = [gather(f, self._first) for f in self.plan.fragments]

  def island(self, world: Valued, number: int, seed: str) -> Trainer:
    return Trainer(self.config, world, number, seed)

  def loss(self, values: list[np.ndarray]) -> float:
    params = {name: np.array(value) for name, value in self._first.items()}
    for fragment, flat in zip(self.plan.fragments, values):
      scatter(fragment, flat, params)
    return heldout_loss(self.config, params)

  def trained_alone(self, steps: int) -> float:
    """The loss of one island without any exchange, after its whole schedule of so many steps."""
    island, stream = new_island(self.config), _stream(self.config, 0)
    island.load(self._first)
    for step in range(steps):
      rate = learning_rate(self.config.inner, steps, step)
      island.step(stream.batch(step), 0, rate)
    return heldout_loss(self.config, island.params_on_host())


class Trainer:
  """A real island whose steps and copies take virtual time, until it has made its quota."""

  def __init__(self, config: Config, world: Valued, learner: int, seed: str):
    self._config, self._number, self._world = config, learner, world
    self._virtual: Any = VirtualIsland(world, learner, seed)
    self._island, self._stream = new_island(config), _stream(config, learner)
    self.describe, self.compile = self._virtual.describe, self._virtual.compile

  def __getattr__(self, name: str) -> Any:
    return getattr(self._island, name)

  def step(self, batch: Any, schedule_step: int, rate_scale: float) -> Mapping[str, float]:
    metrics = self._virtual.step(batch, schedule_step, rate_scale)
    world, planned = self._world, self._config.planned_steps()
    made, quota = world.made[self._number], world.quotas[self._number]
    begin, end = world.presence[self._number]
    now = round(begin * planned) + made * round((end - begin) * planned) // quota
    rate = learning_rate(self._config.inner, planned, now)
    self._island.step(self._stream.batch(made), 0, rate_scale * rate)
    world.made[self._number] += 1
    if made + 1 >= quota:
      world.actors["learner", self._number].asked_to_end = True
    return metrics

  def to_host(self, pieces: Any, fragment: int) -> np.ndarray:
    return self._island.to_host(self._virtual.to_host(pieces, fragment), fragment)

  def stage(self, fragment: int, flat: Any, moments: bool = False) -> Any:
    return self._island.stage(fragment, self._virtual.stage(fragment, flat), moments)

  def capture(self) -> Mapping[str, Any]:
    return {name: np.array(value) for name, value in self._island.capture().items()}

  def count(self) -> int:
    return int(self._island.count())


class Losses:
  """The losses of runs, a line each in `file`: a run that is there is not made again."""

  def __init__(self, file: Path):
    self._kept = common.Kept(file, lambda each: (each["kind"], each["config"]))

  def of(self, name: str, kind: str, config: Config, make: Callable[[Config], float]) -> float:
    """The loss of an earlier run of this kind and config, or of `make` now; `name`: for the log."""
    kept, began = config.to_json(), time.monotonic()
    line = lambda: {"name": name, "kind": kind, "config": kept, "loss": make(config)}
    loss = self._kept.made((kind, kept), line)["loss"]
    seconds = time.monotonic() - began
    print(f"{name} seed {config.seed} {kind}: {loss:.4f} in {seconds:.0f} s", flush=True)
    return loss


# --- Compiled or read once, and used by all runs of this process


def new_island(config: Config) -> Island:
  """An island of this config whose learning rate is 1: `rate_scale` is the rate."""
  of_plan = ("num_fragments", "fragmentation", "max_rows", "average_embeddings")
  constant: dict[str, Any] = {"learning_rate": 1.0, "warmup_steps": 0, "decay_steps": 1}
  compiled = _compiled(
    config.model,
    config.data,
    dataclasses.replace(config.inner, **constant, final_share=1.0),
    SyncConfig(num_shards=1, **{name: getattr(config.sync, name) for name in of_plan}),
    config.islands.batch_size,
  )
  return copy.copy(compiled)  # shares the programs, has a state of its own


@functools.cache
def _compiled(
  model: ModelConfig, data: DataConfig, inner: InnerConfig, sync: SyncConfig, batch_size: int
) -> Island:
  islands = IslandsConfig(num_learners=1, batch_size=batch_size)
  config = Config(model=model, data=data, inner=inner, islands=islands, sync=sync)
  island = Island(config, 0, jax.devices()[:1], initial.make_plan(config))
  island.compile()
  return island


_source = functools.cache(open_data)


def _stream(config: Config, learner: int) -> Stream:
  return Stream(_source(config.data), config, learner)


@functools.cache
def _heldout(model: ModelConfig, data: DataConfig) -> HeldoutLoss:
  batches = _source(data).heldout_batches(HELDOUT_ROWS)
  return HeldoutLoss(model, batches, jax.devices()[:1])


def heldout_loss(config: Config, params: Mapping[str, np.ndarray]) -> float:
  """Nats per token of the config's held-out sequences."""
  return _heldout(config.model, config.data).loss(params)
