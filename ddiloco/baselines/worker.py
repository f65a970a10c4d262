"""What an island does in one world of data-parallel: step after step, until it is killed."""

from __future__ import annotations

import json
import time
from pathlib import Path

from ddiloco.baselines import states
from ddiloco.baselines.orders import Order
from ddiloco.baselines.world import World
from ddiloco.config import from_dict
from ddiloco.observe.events import Recorder
from ddiloco.training import data

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
    self._stream = data.Stream(data.open_corpus(self._config.data), self._config, learner)

  def train(self, order: Order) -> None:
    """Trains in the order's world; does not return, unless the order is not to train."""
    name = f"learner-{self._learner}"
    with Recorder(self._workdir, name, order.number, order.started, time.time) as recorder:
      world = World(self._config, order.rank, order.size, order.port)
      seconds = world.compile(self._workdir / PROGRAMS)
      recorder.event("compiled", target=f"learner/{self._learner}", seconds=round(seconds, 3))
      if not order.train:
        return
      world.load(states.load(Path(order.state)))
      recorder.event(
        "started",
        devices=1,
        learners=self._config.islands.num_learners,
        planned_steps=self._config.planned_steps(),
      )
      self._steps(world, order, recorder)

  def _steps(self, world: World, order: Order, recorder: Recorder) -> None:
    pace_seconds = self._config.islands.pace_seconds
    memory = states.folder(self._workdir, recorder.role)
    done, last = order.step, time.monotonic()
    while True:
      tokens = self._stream.batch(done)
      started = time.monotonic()
      metrics = world.step(tokens, done)
      # As on islands that do not wait. The exchange is in it: it costs nothing if it fits.
      if (early := pace_seconds - (time.monotonic() - started)) > 0:
        time.sleep(early)
      ended = time.monotonic()
      done += 1
      if order.remember:  # before the log: what counts as done is not lost
        states.save(memory, done, world.state())
      recorder.event(
        "step",
        step=done,
        clock=done,
        position=done - 1,
        tokens=tokens.shape[0] * (tokens.shape[1] - 1),
        seconds=ended - started,
        gap_seconds=ended - last,
        blocked_seconds=0.0,
        **metrics,
      )
      recorder.flush()  # the process may be killed at any time, also because another one was
      last = ended
      if order.rank == 0:
        self._checkpoint(world, done, recorder)

  def _checkpoint(self, world: World, done: int, recorder: Recorder) -> None:
    every = self._config.sync.snapshot_steps
    if every and done % every == 0:
      began = time.monotonic()
      folder = states.folder(self._workdir, states.CHECKPOINT)
      states.save(folder, done, world.state(), durable=True)
      recorder.event("recorded", seconds=time.monotonic() - began)
