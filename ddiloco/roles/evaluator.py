"""The evaluator: a member that receives every version, never trains, and measures held-out loss."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ddiloco.config import Config
from ddiloco.core.fragments import Plan, shard_of
from ddiloco.observe.guards import warn
from ddiloco.protocol import events, learner
from ddiloco.protocol.messages import EVALUATOR, INITIAL
from ddiloco.roles import initial
from ddiloco.roles.learner import LOOK_SECONDS, Exchange
from ddiloco.runtime import Loop, Runtime, drive

Measure = Callable[[Mapping[str, np.ndarray]], Mapping[str, float]]


class _TakenOnce(initial.Assembled):
  """Parameters that are looked up once each. Then their values are let go of: beside a measurement
  new versions arrive, and the old ones would be a second model."""

  def __init__(self, *arguments: Any):
    super().__init__(*arguments)
    self._left = {*self}

  def __getitem__(self, name: str) -> np.ndarray:
    found = super().__getitem__(name)
    self._left.discard(name)
    if not self._left:
      self.values_of.clear()
    return found


class GlobalView:
  """The newest value of every fragment, on the host: the part of a store that only receives.

  Its vectors are those of the exchange (`Deltas.base`), which are never written again: this process
  has only one copy of the model.
  """

  def __init__(self, config: Config, plan: Plan):
    self.values: dict[int, np.ndarray] = {}
    self._config, self._plan = config, plan

  def params(self, kind: type[initial.Assembled] = initial.Assembled) -> initial.Assembled:
    """The parameters as they are now; later versions do not change them.

    Raises:
      KeyError: when a parameter is looked up before all its fragments have arrived.
    """
    return kind(self._plan, self._config, self.values)

  def stage(self, fragment: int, flat: np.ndarray) -> np.ndarray:
    return flat

  def apply(self, fragment: int, staged: np.ndarray, keep: float) -> None:
    assert not keep, "the evaluator only overwrites"
    self.values[fragment] = staged


class Evaluator:
  """Follows the global model, and measures it at the start of each of `run.evaluations` equal parts
  of the run's tokens, and at the end.

  Args:
    measure: from a parameter tree, "loss" and other measures on held-out data; not called where
      run.evaluations = 0.
    runtime: config, endpoint, log, clock, ...
    incarnation: the number of this start, greater than that of each earlier one.
    save: keeps the final model, which has seen so many merged tokens; called before that is
      measured.
  """

  def __init__(
    self,
    measure: Measure | None,
    runtime: Runtime,
    incarnation: int = 0,
    save: Callable[[initial.Assembled, int], None] = lambda params, merged_tokens: None,
  ):
    config, plan = runtime.config, runtime.plan
    owners = tuple(shard_of(p, config.sync.num_shards) for p in range(len(plan.fragments)))
    state = learner.init(EVALUATOR, incarnation, owners, config.run.total_tokens, trains=False)
    self.store = GlobalView(config, plan)
    self.exchange = Exchange(state, self.store, runtime)
    self.recorder = runtime.recorder
    self.saved = False  # whether the final model is saved
    self.final_loss: float | None = None  # of the final model, once it is measured
    self._heldout, self._save = measure, save
    self._evaluations = config.run.evaluations if measure is not None else 0
    self._measuring: threading.Thread | None = None  # the newest measurement
    self._measured = -1  # the part of the run that it was of

  def run(self, stopped: Callable[[], bool]) -> None:
    """Runs until the run's tokens are merged or `stopped()`; saves and measures the final model.

    A measurement runs on a thread of its own: meanwhile this role receives versions, and reports to
    the shards as a member that awaits the end of the run. When it is stopped it does not wait for a
    measurement under way, also at the end. There it first saves the final model, and only then says
    goodbye to the shards: if it ends before that, they keep the model for its next incarnation.
    """
    drive(self._live(stopped), self.exchange.endpoint, LOOK_SECONDS)

  def _live(self, stopped: Callable[[], bool]) -> Loop[None]:
    try:
      while not self.finished and not stopped():
        yield from self.exchange.wait()
        if self.joined and not self.finished:
          self._measures()
      if self.finished:
        saving = _begin("saving the final model", self._save_end)
        while saving.is_alive():
          yield from self.exchange.wait()
        if self.saved:
          self.exchange.leave(f"{self.exchange.state.merged_tokens} tokens are merged")
        while not stopped() and self._measures():
          yield math.inf
    finally:
      self.exchange.close()

  @property
  def joined(self) -> bool:
    """Whether it has the whole model."""
    return self.exchange.state.joined

  @property
  def finished(self) -> bool:
    """Whether it has the final model."""
    return self.exchange.state.merged_tokens >= self.exchange.state.target_tokens

  def _measures(self) -> bool:
    """Begins the measurement of a new part of the run, of which the end is one, unless another one
    is under way; returns whether one is under way now."""
    state, under_way = self.exchange.state, self._measuring
    part = state.merged_tokens * self._evaluations // state.target_tokens
    if self._evaluations and part > self._measured and not (under_way and under_way.is_alive()):
      # Learners may have made steps already that the initial model has not seen.
      untrained = all(fragment.round == INITIAL for fragment in state.fragments)
      global_step = 0 if untrained else state.global_step
      now = self.store.params(_TakenOnce), state.merged_tokens, global_step
      self._measuring = _begin("measuring the held-out loss", self._measure, *now)
      self._measured = part
    return self._measuring is not None and self._measuring.is_alive()

  def _save_end(self) -> None:
    """Saves the final model before it is used."""
    try:
      self._save(self.store.params(), self.exchange.state.merged_tokens)
      self.saved = True
    except Exception as error:  # layers and file systems raise errors of many types
      warn(f"the result is not saved before it is measured: {error}. It goes on.")

  def _measure(self, params: initial.Assembled, merged_tokens: int, global_step: int) -> None:
    """One evaluation. A failure is logged, and the evaluator goes on: it must have the result."""
    at = {"merged_tokens": merged_tokens, "global_step": global_step}
    assert self._heldout is not None, "there are evaluations"
    try:
      measures = dict(self._heldout(params))
      loss = measures.pop("loss")
    except Exception as error:  # out of memory, for example
      reason = f"{type(error).__name__}: {error}"
      warn(f"the held-out loss at {merged_tokens} merged tokens is missing: {reason}. It goes on.")
      self.recorder.record(events.Unevaluated(**at, reason=reason))
    else:
      if merged_tokens >= self.exchange.state.target_tokens:
        self.final_loss = loss
      self.recorder.record(events.Evaluation(**at, loss=loss, measures=measures))


def _begin(name: str, work: Callable[..., None], *arguments: Any) -> threading.Thread:
  """Begins work on a thread of its own.

  It is no daemon: JAX aborts a user's program that ends while JAX computes. Commands end without
  Python's own shutdown (`environment.end_now`), and wait for no thread.
  """
  thread = threading.Thread(target=work, args=arguments, name=name, daemon=False)
  thread.start()
  return thread
