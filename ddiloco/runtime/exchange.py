"""A learner's side of the exchange: reducer, host copies, and a background thread that moves bytes.

Between two inner steps `boundary` feeds what arrived to `core.learner` and performs what it
decides: cheap dispatches only. Copies to the host, differences, encoding, decoding and transfers
to the devices are jobs of one background thread, in order.
"""

from __future__ import annotations

import collections
import dataclasses
import queue
import threading
import time
from typing import Any, Protocol

import numpy as np

from ddiloco.config import Config
from ddiloco.core import codec, learner
from ddiloco.core.fragments import Plan
from ddiloco.core.learner_state import LearnerState
from ddiloco.core.messages import Publish, Push
from ddiloco.core.protocol import (
  Apply,
  Cut,
  LearnerEvent,
  Note,
  Received,
  Rejoin,
  Resend,
  Send,
  Stage,
  Staged,
  Tick,
)
from ddiloco.observe.events import Recorder
from ddiloco.runtime.transport import Endpoint, syncer_address

WAIT_SECONDS = 0.05  # between two ticks while there is nothing to do but wait
HEARTBEAT_SECONDS = 0.5
TRAFFIC_SECONDS = 1.0


class Quarantined(Exception):
  """A shard says this learner's state is bad: it must start afresh as a new incarnation."""


class Holder(Protocol):
  """Where parameters live: `training.island.Island`, or plain arrays in the evaluator and tests."""

  def cut(self, fragment: int) -> Any:
    """A copy of one fragment, taken now without blocking."""
    ...

  def to_host(self, pieces: Any, fragment: int) -> np.ndarray:
    """That copy as a flat f32 vector [size]; called in the background."""
    ...

  def stage(self, fragment: int, flat: np.ndarray) -> Any:
    """Brings a flat f32 vector to the devices; called in the background."""
    ...

  def apply(self, fragment: int, staged: Any, keep: float) -> None:
    """parameters <- keep * parameters + staged, without blocking; keep 0 forgets them."""
    ...


class Exchange:
  """Everything of one incarnation of a learner that is not training.

  Args:
    state: the reducer's first state, from `core.learner.init`.
    config: the run's.
    plan: how the model is cut.
    holder: where the parameters live.
    endpoint: this learner's connection.
    recorder: event log.
  """

  def __init__(
    self,
    state: LearnerState,
    config: Config,
    plan: Plan,
    holder: Holder,
    endpoint: Endpoint,
    recorder: Recorder,
  ):
    self.state = state
    self.config = config
    self.endpoint = endpoint
    self.recorder = recorder
    self._sync = config.sync
    self._plan = plan
    self._holder = holder
    self._base: dict[int, np.ndarray] = {}  # what the global model was when last received
    self._sent: dict[int, np.ndarray] = {}  # my outstanding push, as the shard decodes it
    self._outbox: dict[int, Push] = {}
    self._residual: dict[int, np.ndarray] = {}  # what rounding lost; only with error_feedback
    self._rounding: dict[int, np.ndarray] = {}  # the residual if the outstanding push is merged
    self._staged: dict[int, collections.deque] = collections.defaultdict(collections.deque)
    self._finished: queue.SimpleQueue[Staged] = queue.SimpleQueue()
    self._jobs: queue.SimpleQueue = queue.SimpleQueue()
    self._failure: BaseException | None = None
    self._closing = False
    self._started_at = time.monotonic()
    self._heartbeat_at = 0.0
    self._traffic_at = 0.0
    self._worker = threading.Thread(
      target=self._work, name=f"exchange-{state.learner}", daemon=True
    )
    self._worker.start()

  # --- on the role's own thread, between two inner steps ------------------------------------------

  def boundary(self, *events: LearnerEvent) -> None:
    """Feeds `events`, then everything that has arrived, then reports to the shards."""
    for event in events:
      self._feed(event)
    while (event := self._arrived()) is not None:
      self._feed(event)
    self._report()

  def wait(self) -> None:
    """Nothing to train now: waits a moment for something to arrive, and says that I live."""
    arrived = self.endpoint.receive(WAIT_SECONDS)
    now = time.monotonic()
    if arrived:
      self._feed(Received(arrived[1], now))
    self._feed(Tick(now))
    news = arrived is not None
    while (event := self._arrived()) is not None:
      self._feed(event)
      news = True
    if now - self._heartbeat_at >= HEARTBEAT_SECONDS or news:
      self._report()

  def drain(self) -> None:
    """Makes no more steps; leaves when everything is merged."""
    self.state = learner.drain(self.state)
    self._report()

  def leave(self, reason: str) -> None:
    """Says goodbye on purpose."""
    if not self.state.done:
      self.state, actions = learner.leave(self.state, reason)
      self._perform(actions)

  def close(self) -> None:
    """Ends the background thread; what it still had to do is dropped."""
    self._count_traffic(always=True)
    self._closing = True
    self._jobs.put(None)
    self._worker.join()

  def _arrived(self) -> LearnerEvent | None:
    if self._failure is not None:
      raise RuntimeError(f"the background thread failed: {self._failure!r}") from self._failure
    try:
      return self._finished.get_nowait()
    except queue.Empty:
      arrived = self.endpoint.receive(0.0)
      return Received(arrived[1], time.monotonic()) if arrived else None

  def _feed(self, event: LearnerEvent) -> None:
    self.state, actions = learner.learner_on(self.state, event, self._sync)
    self._perform(actions)

  def _report(self) -> None:
    if self.state.done:
      return
    self._heartbeat_at = time.monotonic()
    self._perform(learner.reports(self.state))
    self._count_traffic()

  def _count_traffic(self, always: bool = False) -> None:
    now = time.monotonic()
    if always or now - self._traffic_at >= TRAFFIC_SECONDS:
      self._traffic_at = now
      self.recorder.event("traffic", **dataclasses.asdict(self.endpoint.counters))

  def _perform(self, actions) -> None:
    for action in actions:
      match action:
        case Send(to, message):
          self.endpoint.send(syncer_address(to), message)
        case Cut(push):
          pieces = self._holder.cut(push.fragment)
          self._jobs.put((self._push, push, pieces))
        case Resend(push):
          self._jobs.put((self._push_again, push))
        case Stage():
          self._jobs.put((self._stage, action))
        case Apply():
          self._apply(action)
        case Note(kind="joined", fields=fields):
          seconds = time.monotonic() - self._started_at
          self.recorder.event("joined", seconds=round(seconds, 3), **fields)
        case Note(kind, fields):
          self.recorder.event(kind, **fields)
        case Rejoin(reason):
          raise Quarantined(reason)

  def _apply(self, action: Apply) -> None:
    keep = {"overwrite": 0.0, "mix": self._sync.mix_alpha, "rebase": 1.0}[action.mode]
    self._holder.apply(action.fragment, self._staged[action.fragment].popleft(), keep)
    self.recorder.event(
      "apply",
      fragment=action.fragment,
      version=action.version,
      mode=action.mode,
      included=action.included,
    )

  # --- on the background thread -------------------------------------------------------------------

  def _work(self) -> None:
    while (job := self._jobs.get()) is not None and not self._closing:
      function, *arguments = job
      try:
        function(*arguments)
      except Exception as error:  # the role's thread raises it at its next boundary
        self._failure = error
        self.endpoint.wake()
        return

  def _push(self, push: Push, pieces: Any) -> None:
    """delta = base - local, encoded and sent; kept until a publish has answered it."""
    p, name = push.fragment, self._sync.push_codec
    delta = self._base[p] - self._holder.to_host(pieces, p)
    if self._sync.error_feedback and p in self._residual:
      delta += self._residual[p]
    payload = codec.encode(delta, name)
    self._sent[p] = codec.decode(payload, delta.size, name)
    if self._sync.error_feedback:
      self._rounding[p] = delta - self._sent[p]
    self._outbox[p] = dataclasses.replace(push, codec=name, payload=payload)
    sent_bytes = self._send_push(p)
    self.recorder.event(
      "push",
      fragment=p,
      round=push.round,
      version=push.base_version,
      steps=push.steps,
      tokens=push.tokens,
      bytes=sent_bytes,
    )

  def _push_again(self, push: Push) -> None:
    kept = self._outbox.get(push.fragment)
    if kept is not None and kept.round == push.round:
      self._send_push(push.fragment)

  def _send_push(self, p: int) -> int:
    shard = self.state.fragments[p].shard
    return self.endpoint.send(syncer_address(shard), self._outbox[p])

  def _stage(self, action: Stage) -> None:
    """Decodes a version and stages what `apply` adds: overwrite g', mix (1-a) g', rebase g' - ref.

    `ref` is what of my parameters the new version g' already knows: the base, less my push if it
    is part of g'. What is left of the local value, rounding errors included, stays mine.
    """
    p, base = action.publish.fragment, self._base.get(action.publish.fragment)
    value = self._value(action.publish, base)
    sent = self._sent.pop(p, None)
    self._outbox.pop(p, None)
    rounding = self._rounding.pop(p, None)
    if action.included and rounding is not None:
      self._residual[p] = rounding
    if action.mode == "overwrite":
      flat = value
    elif action.mode == "mix":
      flat = np.float32(1 - self._sync.mix_alpha) * value
    else:
      flat = value - (base - sent if action.included else base)
    self._staged[p].append(self._holder.stage(p, flat))
    self._base[p] = value
    self._finished.put(Staged(p, action.publish.version, time.monotonic()))
    self.endpoint.wake()

  def _value(self, publish: Publish, base: np.ndarray | None) -> np.ndarray:
    if publish.payload is None:  # back to the base: my push was rejected
      self._residual.pop(publish.fragment, None)
      return base
    size = self._plan.fragments[publish.fragment].size
    decoded = codec.decode(publish.payload, size, publish.codec)
    return decoded if publish.base_version < 0 else base + decoded
