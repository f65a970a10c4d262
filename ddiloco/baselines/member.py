"""The process of one island in data-parallel: `python -m ddiloco.baselines.member`.

It imports everything once. For every world it forks a child that trains in it, so that who survives
a failure need not import again: a new world costs it to meet the others, to load the program and
its state. Nothing of a dead world is left in the child, and a collective that hangs ends with it.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import pickle
import select
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import serialize_executable
from jax.sharding import NamedSharding, PartitionSpec

from ddiloco import custom, environment
from ddiloco.baselines import orders
from ddiloco.baselines.orders import END, READY, Lines, Order, line
from ddiloco.config import Config, IslandConfig, from_dict
from ddiloco.models.model import Batch
from ddiloco.observe.eventlog import Recorder
from ddiloco.protocol import events
from ddiloco.roles import initial
from ddiloco.training import data, inner
from ddiloco.training.devices import make_execution, make_mesh
from ddiloco.training.programs import StateLayout, placed, placed_inputs

# --- One world of synchronous data-parallel: the processes that train together, a replica in each
# It lasts until one dies or comes back; then there is another world, of another size. The model,
# loss and optimizer are those of an island, and so is the step: one program over all processes, in
# which the compiler averages the gradients (gloo on CPUs).

MEET_SECONDS = 60  # for all processes of a world to find each other
POLL_SECONDS = 0.01


class ProcessGroup:
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
    self._model = custom.load_model(config.model)
    inputs = self._model.inputs(batch, config.data.sequence_length)
    self._inputs = placed_inputs(inputs, self._mesh)
    self._step: Any = None  # (state, batch, learning rate) -> (state, metrics)
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
    return step.lower(self._layout.leaves, self._inputs, rate).compile()

  def _traced_step(self) -> Callable[..., Any]:
    island, dtype = self._config.islands.island(0), self._config.model.compute_dtype
    execution = make_execution(self._mesh, island, dtype)
    train_step = inner.make_train_step(self._model, self._config.inner, execution)

    def step(state: dict[str, jax.Array], batch: Batch, rate: jax.Array):
      params, opt_state = self._layout.trees(state)
      params, opt_state, metrics = train_step(params, opt_state, batch, rate)
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

  def step(self, batch: Batch, global_step: int) -> dict[str, float]:
    """One step of all islands together, this one on its own batch; waits for its end.

    Returns:
      {"loss", "load_balance", "grad_norm", "learning_rate"} over all islands' batches.
    """
    everybodys = jax.tree.map(
      lambda leaf, mine: jax.make_array_from_process_local_data(leaf.sharding, mine, leaf.shape),
      self._inputs,
      batch,
    )
    rate = inner.learning_rate(self._config.inner, self._planned_steps, global_step)
    self._state, metrics = self._step(self._state, everybodys, np.float32(rate))
    return dict(zip(inner.METRICS, np.asarray(jax.block_until_ready(metrics)).tolist()))

  def state(self) -> dict[str, np.ndarray]:
    """The whole state on the host."""
    return {name: np.asarray(array) for name, array in self._state.items()}


def program(programs: Path, config: Config, size: int) -> Path:
  """The file of the compiled step of this config for worlds of this size."""
  parts = [(dataclasses.asdict(p), custom.identity(p)) for p in (config.model, config.inner)]
  traced = [*parts, dataclasses.asdict(config.islands.island(0)), config.data.sequence_length]
  text = json.dumps([jax.__version__, *traced], sort_keys=True)
  return programs / f"world-{size}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.pickle"


def layout(config: Config, sharding: NamedSharding) -> StateLayout:
  """The names and shapes of the state, every array lying as `sharding` says."""
  shapes = custom.load_model(config.model).shapes()
  leaves = {name: placed(leaf, sharding) for name, leaf in shapes.items()}
  return StateLayout(inner.optimizer(config.inner), leaves, sharding)


def initial_state(config: Config) -> dict[str, np.ndarray]:
  """What every run of this config begins with: the islands' parameters, and fresh moments."""
  params = initial.initial_params(config)
  mesh = make_mesh(jax.local_devices(backend="cpu")[:1], IslandConfig())
  moments = inner.optimizer(config.inner).init(params)
  state = layout(config, NamedSharding(mesh, PartitionSpec())).flat(params, moments)
  return {name: np.asarray(array) for name, array in state.items()}


# --- What an island does in one world of data-parallel: step after step, until it is killed

PROGRAMS = "compiled"


class Worker:
  """Everything an island needs that outlives its worlds; touches no device.

  Args:
    workdir: of the run; `config.json` is there.
    learner: its number.
  """

  def __init__(self, workdir: Path, learner: int):
    self._config = from_dict(json.loads((workdir / "config.json").read_text()))
    self._workdir, self._learner = workdir, learner
    self._stream = data.Stream(data.open_data(self._config.data), self._config, learner)

  def train(self, order: Order) -> None:
    """Trains in the order's world; does not return, unless the order is not to train."""
    name = f"learner-{self._learner}"
    with Recorder(self._workdir, name, order.number, order.started, time.time) as recorder:
      world = ProcessGroup(self._config, order.rank, order.size, order.port)
      seconds = world.compile(self._workdir / PROGRAMS)
      recorder.record(events.Compiled(target=f"learner-{self._learner}", seconds=round(seconds, 3)))
      if not order.train:
        return
      world.load(orders.load(Path(order.state)))
      recorder.record(
        events.Started(
          devices=1,
          learners=self._config.islands.num_learners,
          planned_steps=self._config.planned_steps(),
        )
      )
      self._steps(world, order, recorder)

  def _steps(self, world: ProcessGroup, order: Order, recorder: Recorder) -> None:
    min_step_seconds = self._config.islands.min_step_seconds
    memory = orders.folder(self._workdir, recorder.role)
    done, last = order.step, time.monotonic()
    while True:
      batch = self._stream.batch(done)
      started = time.monotonic()
      metrics = world.step(batch, done)
      # As on islands that do not wait. The exchange is in it: it costs nothing if it fits.
      if (early := min_step_seconds - (time.monotonic() - started)) > 0:
        time.sleep(early)
      ended = time.monotonic()
      done += 1
      if order.remember:  # before the log: what counts as done is not lost
        orders.save(memory, done, world.state())
      recorder.record(
        events.Step(
          step=done,
          global_step=done,
          position=done - 1,
          tokens=self._config.tokens_per_step(self._learner),
          seconds=ended - started,
          gap_seconds=ended - last,
          blocked_seconds=0.0,
          **metrics,
        )
      )
      recorder.flush()  # the process may be killed at any time, also because another one was
      last = ended
      if order.rank == 0:
        self._checkpoint(world, done, recorder)

  def _checkpoint(self, world: ProcessGroup, done: int, recorder: Recorder) -> None:
    every = self._config.sync.snapshot_steps
    if every and done % every == 0:
      began = time.monotonic()
      folder = orders.folder(self._workdir, orders.CHECKPOINT)
      orders.save(folder, done, world.state(), durable=True)
      recorder.record(events.Captured(snapshot=done, seconds=time.monotonic() - began))


TURN_SECONDS = 0.01


class MemberProcess:
  """Does what it is told on file descriptor 0 and answers on 1. One thread, since it forks.

  Args:
    train: what the child of an order does.
  """

  def __init__(self, train: Callable[[Order], None]):
    self._train = train
    self._child = 0  # its process id; 0: none
    self._number = 0  # of its order

  def run(self) -> None:
    """Until its input ends."""
    lines = Lines()
    os.write(1, line(READY))
    try:
      while True:
        readable, _, _ = select.select([0], [], [], TURN_SECONDS)
        data = os.read(0, 4096) if readable else None
        if data == b"":
          return
        for message in lines.take(data or b""):
          self._end()
          if message != END:
            self._begin(Order(**message))
        self._reap(os.WNOHANG)
    finally:
      self._end()

  def _begin(self, order: Order) -> None:
    child = os.fork()
    if child:
      self._child, self._number = child, order.number
      return
    status = 1
    try:
      os.close(0)
      os.dup2(2, 1)  # 1 is ours to answer on; what gloo prints goes to the log
      self._train(order)
      status = 0
    except BaseException:  # the child must not go on as a second member, whatever it was
      traceback.print_exc()
    finally:
      os._exit(status)

  def _end(self) -> None:
    if self._child:
      os.kill(self._child, signal.SIGKILL)
      self._reap(0)

  def _reap(self, options: int) -> None:
    if self._child and os.waitpid(self._child, options)[0]:
      self._child = 0
      os.write(1, line(self._number))


def main() -> None:
  parser = argparse.ArgumentParser(description="One island of data-parallel.")
  parser.add_argument("--workdir", type=Path, required=True)
  parser.add_argument("--learner", type=int, required=True)
  arguments = parser.parse_args()
  environment.prepare(num_cpu_devices=1, cpu_only=True)
  import jax

  # What one world compiles, another may be handed from a folder that both use; with several
  # processes it then lacks functions ("NOT_FOUND: Function ... not found", JAX 0.10).
  jax.config.update("jax_enable_compilation_cache", False)
  pass

  MemberProcess(Worker(arguments.workdir, arguments.learner).train).run()


if __name__ == "__main__":
  main()
