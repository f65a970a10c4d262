"""The evaluator: a member that receives every version, never trains, and measures held-out loss."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping

import numpy as np

from ddiloco.config import Config
from ddiloco.core.fragments import Plan, shard_of
from ddiloco.observe.guards import result, warn
from ddiloco.protocol import events, learner
from ddiloco.protocol.messages import EVALUATOR, INITIAL
from ddiloco.roles import initial
from ddiloco.roles.exchange import LOOK_SECONDS, Exchange
from ddiloco.runtime import Loop, Runtime, drive, short_collections

Measure = Callable[[Mapping[str, np.ndarray]], Mapping[str, float]]
MEASURE_SECONDS = 3600.0  # for the measurement under way when the run ends


class GlobalView:
  """The newest value of every fragment, on the host: a store for `Exchange` that only receives.

  It keeps the very vectors that the exchange adds updates to (`Deltas.base`), which are not written
  again: they are the one copy of the model that there is here.
  """

  def __init__(self, config: Config, plan: Plan):
    self.values: dict[int, np.ndarray] = {}
    self._config, self._plan = config, plan

  def params(self) -> initial.Assembled:
    """The parameters as they are now, whatever comes later.

    Raises:
      KeyError: a parameter is asked for of which something has not come yet.
    """
    return initial.Assembled(self._plan, self._config, self.values)

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
    self.values[fragment] = staged


class Evaluator:
  """Follows the global model and measures it `run.evaluations` times, evenly over the run's tokens.

  Args:
    config: the run's.
    plan: how the model is partitioned.
    measure: what held-out data say of a parameter tree: "loss", and what else there is; not called
      where run.evaluations = 0.
    runtime: what it lives with.
    incarnation: how often it was started before.
    save: keeps the model of the end of the run; called before that is measured.
  """

  def __init__(
    self,
    config: Config,
    plan: Plan,
    measure: Measure | None,
    runtime: Runtime,
    incarnation: int = 0,
    save: Callable[[initial.Assembled], None] = lambda params: None,
  ):
    owners = tuple(shard_of(p, config.sync.num_shards) for p in range(len(plan.fragments)))
    state = learner.init(EVALUATOR, incarnation, owners, config.run.total_tokens, trains=False)
    self.store = GlobalView(config, plan)
    self.exchange = Exchange(state, config, plan, self.store, runtime)
    self.recorder = runtime.recorder
    self.saved = False  # the model of the end of the run is
    self.untrained_loss: float | None = None  # of what the run started from, if it was seen
    self._heldout, self._save = measure, save
    self._evaluations = config.run.evaluations if measure is not None else 0
    self._every = config.run.total_tokens / max(1, self._evaluations)

  def run(self, stopped: Callable[[], bool]) -> None:
    """Until the run's tokens are merged or `stopped()`; the model of the end is saved and measured.

    Measuring takes its time on a thread of its own: meanwhile versions are received, and the shards
    hear that a member is here that awaits the end of the run. What is measured when it is stopped
    is not waited for: what the run has come to is to be saved first.
    """
    with short_collections():
      drive(self._live(stopped), self.exchange.endpoint, LOOK_SECONDS)

  def _live(self, stopped: Callable[[], bool]) -> Loop[None]:
    due, measured, measuring = 0.0, -1, None
    background = concurrent.futures.ThreadPoolExecutor(1, "measure")
    try:
      while not self.exchange.state.done and not stopped():
        yield from self.exchange.wait()
        if measuring is not None and measuring.done():
          measuring = None
        merged = self.exchange.state.merged_tokens
        going_on = self.joined and not self.finished
        if self._evaluations and going_on and merged >= due and measuring is None:
          measuring = background.submit(self._measure, *self._now())
          due, measured = (merged // self._every + 1) * self._every, merged
      if self.finished:
        self._save_end()
        if measuring is not None:
          result(measuring, MEASURE_SECONDS, "measuring the held-out loss")
        if self._evaluations and measured < self.exchange.state.merged_tokens:
          self._measure(*self._now())
      self.exchange.leave("the run was stopped")
    finally:
      background.shutdown(wait=False)
      self.exchange.close()

  @property
  def joined(self) -> bool:
    """Whether it has the whole model."""
    return self.exchange.state.joined

  @property
  def finished(self) -> bool:
    """Whether it has the model of the end of the run."""
    return self.joined and self.exchange.state.merged_tokens >= self.exchange.state.target_tokens

  def _now(self) -> tuple[initial.Assembled, int, int, bool]:
    state = self.exchange.state
    untrained = all(fragment.round == INITIAL for fragment in state.fragments)
    return self.store.params(), state.merged_tokens, state.global_step, untrained

  def _save_end(self) -> None:
    """Before anything else is done with it; who asked for the run tries again where this fails."""
    try:
      self._save(self.store.params())
      self.saved = True
    except Exception as error:  # every layer and file system has kinds of its own
      warn(f"the result is not saved before it is measured: {error}. It goes on.")

  def _measure(
    self, params: initial.Assembled, merged_tokens: int, global_step: int, untrained: bool
  ) -> None:
    """One evaluation; one that fails is said, and the model is followed on: it is the result."""
    at = {"merged_tokens": merged_tokens, "global_step": global_step}
    assert self._heldout is not None, "there are evaluations"
    try:
      measures = dict(self._heldout(params))
      loss = measures.pop("loss")
    except Exception as error:  # no memory for it, ...
      reason = f"{type(error).__name__}: {error}"
      warn(f"the held-out loss at {merged_tokens} merged tokens is missing: {reason}. It goes on.")
      self.recorder.record(events.Unevaluated(**at, reason=reason))
    else:
      if untrained:
        self.untrained_loss = loss
      self.recorder.record(events.Evaluation(**at, loss=loss, measures=measures))
