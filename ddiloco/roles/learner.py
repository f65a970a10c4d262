"""A learner at work: the training loop of one island, which waits for no other role.

Each incarnation: compile, say hello, receive every fragment, then step after step; between two
steps the boundary of `roles.exchange` answers pulls and applies published versions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from ddiloco.chaos import Faults
from ddiloco.checkpoint.restore import ResumeState, learner_part
from ddiloco.config import Config
from ddiloco.core.fragments import Plan
from ddiloco.protocol import events, learner
from ddiloco.protocol.actions import StepDone
from ddiloco.protocol.states import LearnerState, schedule_step
from ddiloco.roles.exchange import LOOK_SECONDS, Exchange
from ddiloco.runtime import Loop, Runtime, drive, short_collections

Batches = Callable[[int], Iterator[Any]]


class Learner:
  """One incarnation of a learner.

  Args:
    beginning: the state it starts with (`checkpoint.restore`); the island holds the device arrays.
    config: the run's.
    plan: how the model is partitioned.
    island: devices, compiled step and parameters (`training.island.Island`); outlives incarnations.
    batches: `batches(position)` iterates over this learner's batches from that position on.
    runtime: endpoint, log, clock, ...
  """

  def __init__(
    self,
    beginning: ResumeState,
    config: Config,
    plan: Plan,
    island,
    batches: Batches,
    runtime: Runtime,
  ):
    self.config = config
    self.island = island
    self.batches = batches
    self.recorder, self.time = runtime.recorder, runtime.time
    self._saver = runtime.saver
    self._min_step_seconds = config.islands.island(beginning.state.learner).min_step_seconds
    self._planned_tokens = config.planned_tokens_per_step
    self._step_tokens = config.tokens_per_step(beginning.state.learner)
    state = self._began = beginning.state
    # Data position - global step when the state was captured. Data goes on at the present global
    # step plus this difference.
    self._ahead = beginning.position - state.global_step
    self._fresh = beginning.fresh
    self._joined: LearnerState | None = None  # the state when it opened its data, at `_position`
    self._position = 0
    save = None if runtime.saver is None else self._save
    self.exchange = Exchange(state, config, plan, island, runtime, save)
    self.exchange.restore(beginning.arrays)

  def run(
    self,
    faults: Faults,
    stopped: Callable[[], bool],
    drain_seconds: float = 0.0,
    at_once: Callable[[], bool] = lambda: False,
  ) -> None:
    """Trains on this thread until the run's tokens are merged or `stopped()`. Then it has
    `drain_seconds` to get its last work merged before it leaves, unless `at_once()`.

    Raises:
      Killed: by plan.
      Quarantined: a shard found this learner's updates bad; restart it.
    """
    with short_collections():
      drive(
        self.live(faults, stopped, drain_seconds, at_once), self.exchange.endpoint, LOOK_SECONDS
      )

  def live(
    self,
    faults: Faults,
    stopped: Callable[[], bool],
    drain_seconds: float,
    at_once: Callable[[], bool] = lambda: False,
  ) -> Loop[None]:
    """The loop of `run`."""
    now = self.time.now
    exchange, batches = self.exchange, None
    exchange.poison = lambda: faults.poison
    self.recorder.record(
      events.Started(
        **self.island.describe(),
        learners=self.config.islands.num_learners,
        planned_steps=self.config.planned_steps(),
      )
    )
    last, blocked = now(), 0.0
    told, give_up_at = False, math.inf
    try:
      while not exchange.state.done:
        faults.check(exchange.state.global_step)
        yield None  # a planned stall may have passed
        if stopped() and not told:
          told, give_up_at = True, now() + drain_seconds
          exchange.drain()
        if told and (at_once() or now() >= give_up_at):
          exchange.leave("the run was stopped")
        elif learner.can_step(exchange.state, self.config.sync):
          batches = batches or self._open()
          last = yield from self._step(next(batches), faults, last, blocked)
          blocked = 0.0
        else:
          before = now()
          yield from exchange.wait(give_up_at)
          blocked += now() - before
          if exchange.state.step == self._began.step:
            last, blocked = now(), 0.0  # joining, not blocked
    finally:
      if batches is not None:
        batches.close()
      exchange.close()

  def _open(self) -> Iterator[Any]:
    """This learner's batches, from the present global step on."""
    state = self.exchange.state
    self._joined, self._position = state, state.global_step + self._ahead
    return self.batches(self._position)

  def _next_position(self, state: LearnerState) -> int:
    """The number of the batch that the step after `state` trains on."""
    if self._joined is None:
      return state.global_step + self._ahead
    return self._position + state.step - self._joined.step

  def _rate_scale(self, state: LearnerState) -> float:
    """Warms up fresh moments in the middle of a run: Adam's first updates are large."""
    warmup = self.config.checkpoint.warmup_steps
    if not (self._fresh and self._joined.global_step and warmup):
      return 1.0
    return min(1.0, (state.step - self._joined.step + 1) / warmup)

  def _save(self, snapshot: int, state: LearnerState, arrays: dict[str, Any]) -> None:
    self._saver.save(snapshot, learner_part(state, self._next_position(state)), arrays)

  def _step(self, batch: Any, faults: Faults, last: float, blocked: float) -> Loop[float]:
    """One inner step and the boundary after it; returns when the step ended."""
    now = self.time.now
    state = self.exchange.state
    started = now()
    position, rate_scale = self._next_position(state), self._rate_scale(state)
    at = schedule_step(state, self._planned_tokens)
    metrics = self.island.step(batch, at, rate_scale)
    if (early := self._min_step_seconds - (now() - started)) > 0:
      self.time.sleep(early)
    faults.drag(now() - started)
    yield None
    ended = now()
    trained = self._step_tokens
    self.recorder.record(  # before the boundary's events: the log is in the order of events
      events.Step(
        step=state.step + 1,
        global_step=state.global_step + 1,
        position=position,
        tokens=trained,
        seconds=ended - started,
        gap_seconds=ended - last,
        blocked_seconds=blocked,
        schedule_step=at,
        rate_scale=rate_scale,
        **(metrics or {}),
      )
    )
    self.exchange.boundary(StepDone(ended, trained, ended - started))
    return ended
