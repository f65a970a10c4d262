"""A learner at work: the training loop of one island, and nothing it ever waits for.

Each incarnation: compile, say hello, receive every fragment, then step after step; between two
steps the boundary of `runtime.exchange` answers pulls and applies published versions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np

from ddiloco.config import Config
from ddiloco.core import learner
from ddiloco.core.fragments import Plan, shard_of
from ddiloco.core.protocol import StepDone
from ddiloco.observe.events import Recorder
from ddiloco.resilience.chaos import Faults
from ddiloco.runtime.exchange import Exchange
from ddiloco.runtime.transport import Endpoint

Batches = Callable[[int], Iterator[np.ndarray]]


class Learner:
  """One incarnation of a learner.

  Args:
    number: which learner.
    incarnation: how often it was started before.
    config: the run's.
    plan: how the model is cut.
    island: devices, compiled step and parameters (`training.island.Island`); outlives incarnations.
    batches: `batches(position)` iterates over this learner's batches [B, T+1] from there on.
    endpoint: its connection.
    recorder: event log.
  """

  def __init__(
    self,
    number: int,
    incarnation: int,
    config: Config,
    plan: Plan,
    island,
    batches: Batches,
    endpoint: Endpoint,
    recorder: Recorder,
  ):
    alone = not config.sync.num_shards
    owners = (
      ()
      if alone
      else tuple(shard_of(p, config.sync.num_shards) for p in range(len(plan.fragments)))
    )
    share = config.planned_steps() * config.tokens_per_step(number)
    target = share if alone else config.run.total_tokens
    self.config = config
    self.island = island
    self.batches = batches
    self.recorder = recorder
    self.exchange = Exchange(
      learner.init(number, incarnation, owners, target), config, plan, island, endpoint, recorder
    )

  def run(self, faults: Faults, stopped: Callable[[], bool], drain_seconds: float = 0.0) -> None:
    """Trains until the run's tokens are merged or `stopped()`; then it has `drain_seconds` to leave
    without losing what is not merged yet.

    Raises:
      Killed: by plan.
      Quarantined: a shard found this learner's updates bad; restart it.
    """
    exchange, batches = self.exchange, None
    self.recorder.event("started", **self.island.describe())
    last = time.monotonic()
    blocked = 0.0
    give_up_at: float | None = None  # once told to stop
    try:
      while not exchange.state.done:
        faults.check(exchange.state.clock)
        if stopped() and give_up_at is None:
          give_up_at = time.monotonic() + drain_seconds
          exchange.drain()
        if give_up_at is not None and time.monotonic() >= give_up_at:
          exchange.leave("the run was stopped")
        elif learner.can_step(exchange.state, self.config.sync):
          batches = batches or self.batches(exchange.state.clock)
          last, blocked = self._step(next(batches), faults, last, blocked), 0.0
        else:
          before = time.monotonic()
          exchange.wait()
          blocked += time.monotonic() - before
          if not exchange.state.step:
            last, blocked = time.monotonic(), 0.0  # joining, not blocked
    finally:
      if batches is not None:
        batches.close()
      exchange.close()

  def _step(self, tokens: np.ndarray, faults: Faults, last: float, blocked: float) -> float:
    """One inner step and the boundary after it; returns when the step ended."""
    state = self.exchange.state
    started = time.monotonic()
    metrics = self.island.step(tokens, state.clock)
    faults.drag(time.monotonic() - started)
    ended = time.monotonic()
    trained = tokens.shape[0] * (tokens.shape[1] - 1)
    self.exchange.boundary(StepDone(ended, trained, ended - started))
    self.recorder.event(
      "step",
      step=state.step + 1,
      clock=state.clock + 1,
      tokens=trained,
      seconds=ended - started,
      gap_seconds=ended - last,
      blocked_seconds=blocked,
      **(metrics or {}),
    )
    return ended
