"""One world of synchronous data-parallel: the processes that train together, a replica in each.

It lasts until somebody dies or comes back; then there is another one, of another size. The model,
loss and optimizer are those of an island, and so is the step: one program over all processes, in
which the compiler averages the gradients (gloo on CPUs).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pickle
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import serialize_executable
from jax.sharding import NamedSharding, PartitionSpec

from ddiloco.config import Config, IslandConfig
from ddiloco.models import transformer
from ddiloco.runtime import initial
from ddiloco.training import inner
from ddiloco.training.devices import make_mesh, param_sharding
from ddiloco.training.programs import placed
from ddiloco.training.state import StateLayout

MEET_SECONDS = 60  # for all processes of a world to find each other
POLL_SECONDS = 0.01


class World:
  """Joins the world `rank` of `size` meets at `port` of loopback; then `load`, and `step` by step.

  Args:
    config: the run's; all islands are alike.
    rank: of this process, from 0.
    size: number of processes.
    port: of rank 0, free.
  """

  def __init__(self, config: Config, rank: int, size: int, port: int):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", size, rank, initialization_timeout=MEET_SECONDS)
    self._config, self._rank, self._size = config, rank, size
    batch = size * config.islands.batch_size
    island = dataclasses.replace(
      config.islands, devices=size, data=-1, fsdp=1, tensor=1, batch_size=batch
    )
    self._mesh = make_mesh(jax.devices(), island)
    self._planned_steps = config.planned_steps()
    self._replicated = NamedSharding(self._mesh, PartitionSpec())
    self._layout = layout(config, self._replicated)
    shape = (batch, config.data.sequence_length + 1)
    self._tokens = jax.ShapeDtypeStruct(
      shape, jnp.int32, sharding=param_sharding(("batch", None), shape, self._mesh)
    )
    self._step: Any = None  # (state, tokens, learning rate) -> (state, metrics)
    self._state: dict[str, jax.Array] = {}

  def compile(self, programs: Path) -> float:
    """Has the step's program, from the folder if it is there; returns the seconds it took.

    Rank 0 compiles what is missing, and the others take it from there. (JAX's own cache knows the
    programs of several CPU processes on rank 0 only: every rank has a key of its own.)
    """
    start = time.perf_counter()
    path = program(programs, self._config, self._size)
    if self._rank == 0 and not path.exists():
      programs.mkdir(parents=True, exist_ok=True)
      mine = path.with_suffix(".new")
      mine.write_bytes(pickle.dumps(serialize_executable.serialize(self._compiled())))
      mine.replace(path)
    while not path.exists():
      time.sleep(POLL_SECONDS)
    self._step = serialize_executable.deserialize_and_load(*pickle.loads(path.read_bytes()))
    return time.perf_counter() - start

  def _compiled(self) -> Any:
    rate = jax.ShapeDtypeStruct((), jnp.float32, sharding=self._replicated)
    step = jax.jit(
      self._traced_step(),
      out_shardings=(self._layout.shardings, self._replicated),
      donate_argnums=0,
    )
    return step.lower(self._layout.leaves, self._tokens, rate).compile()

  def _traced_step(self) -> Callable[..., Any]:
    config = self._config

    def constrain(x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
      return jax.lax.with_sharding_constraint(x, param_sharding(axes, x.shape, self._mesh))

    train_step = inner.make_train_step(config.model, config.inner, constrain)

    def step(state: dict[str, jax.Array], tokens_BxT1: jax.Array, rate: jax.Array):
      params, opt_state = self._layout.trees(state)
      params, opt_state, metrics = train_step(params, opt_state, tokens_BxT1, rate)
      small = jnp.stack([metrics[name] for name in inner.METRICS])
      return self._layout.flat(params, opt_state), small

    return step

  def load(self, arrays: Mapping[str, np.ndarray]) -> None:
    """Takes over a state; all processes must be given the same."""
    self._layout.check(arrays)
    self._state = {
      name: jax.make_array_from_process_local_data(self._replicated, array)
      for name, array in arrays.items()
    }

  def step(self, tokens_BxT1: np.ndarray, clock: int) -> dict[str, float]:
    """One step on this island's own batch, of everybody together; waits for its end.

    Returns:
      {"loss", "load_balance", "grad_norm", "learning_rate"} over all islands' batches.
    """
    tokens = jax.make_array_from_process_local_data(
      self._tokens.sharding, tokens_BxT1, self._tokens.shape
    )
    rate = inner.learning_rate(self._config.inner, self._planned_steps, clock)
    self._state, metrics = self._step(self._state, tokens, np.float32(rate))
    return dict(zip(inner.METRICS, np.asarray(jax.block_until_ready(metrics)).tolist()))

  def state(self) -> dict[str, np.ndarray]:
    """The whole state on the host."""
    return {name: np.asarray(array) for name, array in self._state.items()}


def program(programs: Path, config: Config, size: int) -> Path:
  """The file of the compiled step of this config for worlds of this size."""
  parts = [dataclasses.asdict(part) for part in (config.model, config.inner)]
  traced = [*parts, config.islands.batch_size, config.data.sequence_length]
  text = json.dumps([jax.__version__, *traced], sort_keys=True)
  return programs / f"world-{size}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.pickle"


def layout(config: Config, sharding: NamedSharding) -> StateLayout:
  """The names and shapes of the state, every array lying as `sharding` says."""
  leaves = {name: placed(leaf, sharding) for name, leaf in transformer.shapes(config.model).items()}
  return StateLayout(inner.optimizer(config.inner), leaves, sharding)


def initial_state(config: Config) -> dict[str, np.ndarray]:
  """What every run of this config begins with: the islands' parameters, and fresh moments."""
  params = initial.initial_params(config)
  mesh = make_mesh(jax.local_devices(backend="cpu")[:1], IslandConfig())
  moments = inner.optimizer(config.inner).init(params)
  state = layout(config, NamedSharding(mesh, PartitionSpec())).flat(params, moments)
  return {name: np.asarray(array) for name, array in state.items()}
