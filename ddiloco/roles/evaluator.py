"""The evaluator: a member that receives every version, never trains, and measures held-out loss."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping

import numpy as np

from ddiloco.config import Config
from ddiloco.core.fragments import Plan, scatter, shard_of
from ddiloco.observe.guards import result, warn
from ddiloco.protocol import events, learner
from ddiloco.protocol.messages import EVALUATOR
from ddiloco.roles import initial
from ddiloco.roles.exchange import LOOK_SECONDS, Exchange
from ddiloco.runtime import Loop, Runtime, drive

MEASURE_SECONDS = 3600.0  # for the measurement under way when the run ends


class HostParams:
  """Parameters as plain arrays on the host: a store for `Exchange` that only receives."""

  def __init__(self, config: Config, plan: Plan):
    shapes = initial.shapes(config.model)
    self.params = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    self._plan = plan

  def copy_out(self, fragment: int):
    raise RuntimeError("the evaluator never pushes")

  def to_host(self, pieces, fragment: int) -> np.ndarray:
    raise RuntimeError("the evaluator never pushes")

  def stage(self, fragment: int, flat: np.ndarray) -> np.ndarray:
    return flat

  def capture(self):
    raise RuntimeError("the evaluator has no part in snapshots")

  def apply(self, fragment: int, staged: np.ndarray, keep: float) -> None:
    if keep:
      raise RuntimeError("the evaluator only overwrites")
    scatter(self._plan.fragments[fragment], staged, self.params)


class Evaluator:
  """Follows the global model and measures it `run.evaluations` times, evenly over the run's tokens.

  Args:
    config: the run's.
    plan: how the model is partitioned.
    measure: what held-out data say of a parameter tree: "loss", and what else there is.
    runtime: what it lives with.
    incarnation: how often it was started before.
  """

  def __init__(
    self,
    config: Config,
    plan: Plan,
    measure: Callable[[dict[str, np.ndarray]], Mapping[str, float]],
    runtime: Runtime,
    incarnation: int = 0,
  ):
    owners = tuple(shard_of(p, config.sync.num_shards) for p in range(len(plan.fragments)))
    state = learner.init(EVALUATOR, incarnation, owners, config.run.total_tokens, trains=False)
    self.store = HostParams(config, plan)
    self.exchange = Exchange(state, config, plan, self.store, runtime)
    self.recorder = runtime.recorder
    self._heldout = measure
    self._evaluations = config.run.evaluations
    self._every = config.run.total_tokens / max(1, self._evaluations)

  def run(self, stopped: Callable[[], bool]) -> None:
    """Until the run's tokens are merged or `stopped()`; then the last measurement.

    Measuring takes its time on a thread of its own: meanwhile versions are received, and the shards
    hear that a member is here that awaits the end of the run.
    """
    drive(self._live(stopped), self.exchange.endpoint, LOOK_SECONDS)

  def _live(self, stopped: Callable[[], bool]) -> Loop[None]:
    due, measured, measuring = 0.0, -1, None
    with concurrent.futures.ThreadPoolExecutor(1, "measure") as background:
      try:
        while not self.exchange.state.done and not stopped():
          yield from self.exchange.wait()
          if measuring is not None and measuring.done():
            measuring = None
          merged = self.exchange.state.merged_tokens
          if self._evaluations and self.joined and merged >= due and measuring is None:
            measuring = background.submit(self._measure, *self._snapshot())
            due, measured = (merged // self._every + 1) * self._every, merged
        if measuring is not None:
          result(measuring, MEASURE_SECONDS, "measuring the held-out loss")
        if self._evaluations and self.finished and measured < self.exchange.state.merged_tokens:
          self._measure(*self._snapshot())
        self.exchange.leave("the run was stopped")
      finally:
        self.exchange.close()

  @property
  def joined(self) -> bool:
    """Whether it has the whole model."""
    return self.exchange.state.joined

  @property
  def finished(self) -> bool:
    """Whether it has the model of the end of the run."""
    return self.joined and self.exchange.state.merged_tokens >= self.exchange.state.target_tokens

  def _snapshot(self) -> tuple[dict[str, np.ndarray], int, int]:
    state = self.exchange.state
    params = {name: value.copy() for name, value in self.store.params.items()}
    return params, state.merged_tokens, state.global_step

  def _measure(self, params: dict[str, np.ndarray], merged_tokens: int, global_step: int) -> None:
    """One evaluation; one that fails is said, and the model is followed on: it is the result."""
    at = {"merged_tokens": merged_tokens, "global_step": global_step}
    try:
      measures = dict(self._heldout(params))
      loss = measures.pop("loss")
    except Exception as error:  # no memory for it, ...
      reason = f"{type(error).__name__}: {error}"
      warn(f"the held-out loss at {merged_tokens} merged tokens is missing: {reason}. It goes on.")
      self.recorder.record(events.Unevaluated(**at, reason=reason))
    else:
      self.recorder.record(events.Evaluation(**at, loss=loss, measures=measures))
