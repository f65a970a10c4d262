"""The process of one island in one world of data-parallel: `python -m ddiloco.baselines.member`.

The process is forked from a server that has imported everything (`engines/children.py`), so that a
survivor of a failure need not import again: for a new world it only meets the others, and loads the
program and its state. Nothing of an ended world is left: a collective that hangs ends with its
process.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import pickle
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable

from ddiloco import custom, environment
from ddiloco.config import Config
from ddiloco.engines.role_spec import end_with_parent
from ddiloco.models.model import Batch
from ddiloco.network.transport import learner_address
from ddiloco.observe.eventlog import Recorder
from ddiloco.protocol import events
from ddiloco.roles import initial
from ddiloco.training import data
from ddiloco.training.devices import make_mesh
from ddiloco.training.step import METRICS, IslandStep, learning_rate
from ddiloco.workdir import saved_config


@dataclasses.dataclass(frozen=True)
class Order:
  """The order to train in a world, until killed."""

  number: int  # counts the run's worlds
  rank: int
  size: int
  meeting: str  # HOST:PORT of rank 0, free
  started: float  # unix seconds; event times count from there
  state: str  # file with the state to begin with; its name says how many steps that has had
  remember: bool  # keep every step's state for the next world, as an elastic island's memory does
  train: bool = True  # else only compile this world's program


def command(workdir: Path, learner: int, order: Order) -> list[str]:
  """The command line of the learner's process for this order."""
  flags = f"--workdir={workdir}", f"--learner={learner}"
  order_flag = f"--order={json.dumps(dataclasses.asdict(order))}"
  return [sys.executable, "-m", "ddiloco.baselines.member", *flags, order_flag]


# --- Data-parallel's states, which outlive a process: a file for each step that is kept
# WORKDIR/states/checkpoint is written every `sync.snapshot_steps`; WORKDIR/states/learner-M stands
# for the memory of an elastic island, which only the death of this island erases.

CHECKPOINT = "checkpoint"


def folder(workdir: Path, name: str) -> Path:
  """The folder of the checkpoints, or of one island's memory ("learner-3")."""
  return workdir / "states" / name


def save(into: Path, step: int, arrays: Mapping[str, np.ndarray], durable: bool = False) -> None:
  """Saves the state after `step` steps atomically, and removes the one before.

  `durable`: the state is on the disk when this returns, as a checkpoint must be; a file that stands
  for an island's memory need not be.
  """
  into.mkdir(parents=True, exist_ok=True)
  path = into / f"{step:09}.npz"
  mine = into / "new"
  with mine.open("wb") as file:
    np.savez(file, **arrays)
    if durable:
      file.flush()
      os.fsync(file.fileno())
  mine.replace(path)
  for old in into.glob("*.npz"):
    if old.name < path.name:
      old.unlink()


def load(path: Path) -> dict[str, np.ndarray]:
  """The arrays of a saved state."""
  with np.load(path) as file:
    return {name: file[name] for name in file.files}


def newest(workdir: Path) -> Path:
  """The file of the newest state that any island has; a run begins with one."""
  return max((workdir / "states").glob("*/*.npz"), key=lambda path: path.name)


# --- One world of synchronous data-parallel: the processes that train together, a replica in each
# A world lasts until an island dies or comes back; then another world begins. The model, loss and
# optimizer are those of an island, and so is the step: one program over all processes, in which the
# compiler averages the gradients (gloo on CPUs).

MEET_SECONDS = 60  # for all processes of a world to find each other
POLL_SECONDS = 0.01


class ProcessGroup:
  """Joins the world of `order`; then call `load` once, and `step` for each step."""

  def __init__(self, config: Config, order: Order):
    rank, size = order.rank, order.size
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(order.meeting, size, rank, initialization_timeout=MEET_SECONDS)
    self._config, self._rank, self._size = config, rank, size
    self._parts = replicas(config, jax.devices())
    self._planned_steps = config.planned_steps()
    self._step: Any = None  # (state, batch, learning rate, frozen) -> (state, metrics)
    self._state: dict[str, jax.Array] = {}

  def compile(self, programs: Path) -> float:
    """Loads the step's program from the folder, or compiles it; returns the seconds this took.

    Rank 0 compiles a missing program, and the others load it from the folder. (JAX's own cache
    serves programs of several CPU processes to rank 0 only: every rank has a cache key of its own.)
    """
    start = time.perf_counter()
    path = program(programs, self._config, self._size)
    if self._rank == 0 and not path.exists():
      programs.mkdir(parents=True, exist_ok=True)
      mine = path.with_suffix(".new")
      mine.write_bytes(pickle.dumps(serialize_executable.serialize(self._parts.lower().compile())))
      mine.replace(path)
    while not path.exists():
      time.sleep(POLL_SECONDS)
    self._step = serialize_executable.deserialize_and_load(*pickle.loads(path.read_bytes()))
    self._frozen = self._parts.place_frozen()
    return time.perf_counter() - start

  def load(self, arrays: Mapping[str, np.ndarray]) -> None:
    """Takes over a state, which must be the same in all processes."""
    self._parts.layout.check(arrays)
    self._state = {
      name: jax.make_array_from_process_local_data(self._parts.replicated, array)
      for name, array in arrays.items()
    }

  def step(self, batch: Batch, global_step: int) -> dict[str, float]:
    """One step of all islands together, this one on its own batch; waits for its end.

    Returns:
      {"loss", "load_balance", "grad_norm", "learning_rate"} over all islands' batches.
    """
    everybodys = jax.tree.map(
      lambda leaf, mine: jax.make_array_from_process_local_data(leaf.sharding, mine, leaf.shape),
      self._parts.inputs,
      batch,
    )
    rate = learning_rate(self._config.inner, self._planned_steps, global_step)
    self._state, metrics = self._step(self._state, everybodys, np.float32(rate), self._frozen)
    return dict(zip(METRICS, np.asarray(jax.block_until_ready(metrics)).tolist()))

  def state(self) -> dict[str, np.ndarray]:
    """The whole state on the host."""
    return {name: np.asarray(array) for name, array in self._state.items()}


def program(programs: Path, config: Config, size: int) -> Path:
  """The file of the compiled step of this config for worlds of this size."""
  parts = [(dataclasses.asdict(p), custom.identity(p)) for p in (config.model, config.inner)]
  traced = [*parts, dataclasses.asdict(config.islands.island(0)), config.data.sequence_length]
  text = json.dumps([jax.__version__, *traced], sort_keys=True)
  return programs / f"world-{size}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.pickle"


def replicas(config: Config, devices: Sequence[jax.Device]) -> IslandStep:
  """The step of all islands together, each of which has a whole model on one of these devices."""
  size = len(devices)
  islands = dataclasses.replace(
    config.islands,
    devices=size,
    data=-1,
    fsdp=1,
    tensor=1,
    batch_size=size * config.islands.batch_size,
    overrides={},
  )
  config = dataclasses.replace(config, islands=islands)
  return IslandStep(config, 0, make_mesh(devices, islands))


def initial_state(config: Config) -> dict[str, np.ndarray]:
  """The state in which every run of this config begins: initial parameters and fresh moments."""
  params = initial.initial_params(config)
  parts = replicas(config, jax.local_devices(backend="cpu")[:1])
  state = parts.layout.flat(params, parts.transform.init(params))
  return {name: np.asarray(array) for name, array in state.items()}


# --- An island in one world of data-parallel: step after step, until it is killed

PROGRAMS = "compiled"


def train(workdir: Path, learner: int, order: Order) -> None:
  """Trains in the order's world; does not return, unless the order is not to train."""
  name, config = learner_address(learner), saved_config(workdir)
  stream = data.Stream(data.open_data(config.data), config, learner)
  with Recorder(workdir, name, order.number, order.started, time.time) as recorder:
    world = ProcessGroup(config, order)
    seconds = world.compile(workdir / PROGRAMS)
    recorder.record(events.Compiled(target=name, seconds=round(seconds, 3)))
    if not order.train:
      return
    world.load(load(Path(order.state)))
    planned = config.planned_steps()
    recorder.record(
      events.Started(devices=1, learners=config.islands.num_learners, planned_steps=planned)
    )
    done, last = int(Path(order.state).stem), time.monotonic()
    while True:
      asked = time.monotonic()
      batch = stream.batch(done)
      started = time.monotonic()
      metrics = world.step(batch, done)
      done += 1
      if order.remember:  # before the log: a logged step is not lost
        save(folder(workdir, name), done, world.state())
      # The same pace as an island's. Exchange and memory are part of it: they are free if they fit.
      if (early := config.islands.min_step_seconds - (time.monotonic() - started)) > 0:
        time.sleep(early)
      ended = time.monotonic()
      recorder.record(
        events.Step(
          step=done,
          global_step=done,
          position=done - 1,
          tokens=config.tokens_per_step(0),
          seconds=ended - started,
          gap_seconds=ended - last,
          data_seconds=round(started - asked, 6),
          **metrics,
        )
      )
      recorder.flush()  # the process may be killed at any time, also when another island dies
      last = ended
      every = config.sync.snapshot_steps
      if order.rank == 0 and every and done % every == 0:
        began = time.monotonic()
        save(folder(workdir, CHECKPOINT), done, world.state(), durable=True)
        recorder.record(events.Captured(snapshot=done, seconds=time.monotonic() - began))


def main() -> None:
  parser = argparse.ArgumentParser(description="One island of data-parallel, in one world.")
  parser.add_argument("--workdir", type=Path, required=True)
  parser.add_argument("--learner", type=int, required=True)
  parser.add_argument("--order", type=json.loads, required=True)
  arguments = parser.parse_args()
  end_with_parent()
  environment.prepare(num_cpu_devices=1, cpu_only=True)
  # With several processes, a program that another world put into a common cache lacks functions
  # ("NOT_FOUND: Function ... not found", JAX 0.10).
  jax.config.update("jax_enable_compilation_cache", False)
  train(arguments.workdir, arguments.learner, Order(**arguments.order))


if __name__ == "__main__":
  main()
