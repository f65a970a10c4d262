"""A learner's side of the exchange: reducer, host copies, and a background thread that moves bytes.

Between two inner steps `boundary` feeds what arrived to `protocol.learner` and performs what it
decides: cheap dispatches only. Copies to the host, differences, encoding, decoding and transfers
to the devices are jobs of one background thread, in order.
"""

from __future__ import annotations

import collections
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec
import numpy as np

from ddiloco.config import Config
from ddiloco.core import codec
from ddiloco.core.delta import Deltas
from ddiloco.core.fragments import Plan
from ddiloco.network.transport import Endpoint, syncer_address
from ddiloco.observe.eventlog import Recorder
from ddiloco.observe.guards import ended
from ddiloco.protocol import events, learner
from ddiloco.protocol.actions import (
  Apply,
  ApplyMoments,
  CopyOut,
  LearnerEvent,
  Received,
  Rejoin,
  Resend,
  Send,
  SendMoments,
  SendValue,
  Stage,
  Staged,
  TakeMoments,
  Taken,
  TakeSnapshot,
  Tick,
)
from ddiloco.protocol.learner_state import LearnerState
from ddiloco.protocol.messages import ForwardMoments, Push, Value

# --- What holds a learner's parameters: an island, or plain arrays in the evaluator and in tests


class ParameterStore(Protocol):
  """Between two steps it is asked for copies and told what to put in; neither ever waits."""

  def copy_out(self, fragment: int) -> Any:
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

  def capture(self) -> Mapping[str, Any]:
    """Copies of all that is on the devices, by name, taken now without blocking; for a snapshot."""
    ...

  num_moments: int  # vectors of the inner optimizer that are as large as the parameters

  def copy_out_moments(self, fragment: int) -> Any:
    """A copy of one fragment's moments, taken now without blocking."""
    ...

  def count(self) -> Any:
    """The inner optimizer's steps so far; `int` of it may wait."""
    ...

  def moments_to_host(self, pieces: Any, fragment: int) -> np.ndarray:
    """That copy as flat f32 [num_moments * size]; called in the background."""
    ...

  def stage_moments(self, fragment: int, flat: np.ndarray) -> Any:
    """Brings moments to the devices; called in the background."""
    ...

  def apply_moments(self, fragment: int, staged: Any, count: int) -> None:
    """Puts them into the optimizer state, without blocking."""
    ...


WAIT_SECONDS = 0.05  # between two ticks while there is nothing to do but wait
CLOSE_SECONDS = 30.0  # for the background thread to finish what it is doing
HEARTBEAT_SECONDS = 0.5
TRAFFIC_SECONDS = 1.0


class Quarantined(Exception):
  """A shard says this learner's state is bad: it must start afresh as a new incarnation."""


@dataclasses.dataclass
class Staging:
  """A published version on its way: the background thread fills it in."""

  flat: np.ndarray | None = None  # what `apply` adds
  placed: Any = None  # the same on the devices


Save = Callable[[int, LearnerState, Mapping[str, Any]], None]  # (snapshot, state, arrays by name)


class Exchange:
  """Everything of one incarnation of a learner that is not training.

  Args:
    state: the reducer's first state, from `protocol.learner.init`.
    config: the run's.
    plan: how the model is partitioned.
    store: where the parameters live.
    endpoint: this learner's connection.
    recorder: event log.
    save: takes this learner's part of a snapshot, called in the background; None: nobody does.
  """

  def __init__(
    self,
    state: LearnerState,
    config: Config,
    plan: Plan,
    store: ParameterStore,
    endpoint: Endpoint,
    recorder: Recorder,
    save: Save | None = None,
  ):
    self.state = state
    self.config = config
    self.endpoint = endpoint
    self.recorder = recorder
    self._sync = config.sync
    self._plan = plan
    self._store = store
    self._save = save
    self._deltas = Deltas(config.sync)
    self._outbox: dict[int, Push] = {}
    self._stagings: dict[int, collections.deque[Staging]] = collections.defaultdict(
      collections.deque
    )
    self._finished: queue.SimpleQueue[Staged | Taken] = queue.SimpleQueue()
    self._jobs: queue.SimpleQueue = queue.SimpleQueue()
    self._failure: BaseException | None = None
    self._closing = False
    self.poison: Callable[[], float] = lambda: 1.0  # what a planned fault multiplies pushes with
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
    news = arrived is not None
    if arrived:
      self._feed(Received(arrived.message, arrived.at))
    while (event := self._arrived()) is not None:
      self._feed(event)
      news = True
    now = time.monotonic()
    self._feed(Tick(now))  # after all that has arrived: this process may have stood still
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
    ended(self._worker, CLOSE_SECONDS)

  def _arrived(self) -> LearnerEvent | None:
    if self._failure is not None:
      raise RuntimeError(f"the background thread failed: {self._failure!r}") from self._failure
    try:
      return self._finished.get_nowait()
    except queue.Empty:
      arrived = self.endpoint.receive(0.0)
      return Received(arrived.message, arrived.at) if arrived else None

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
      self.recorder.record(events.Traffic(**dataclasses.asdict(self.endpoint.counters)))

  def _perform(self, actions) -> None:
    for action in actions:
      match action:
        case Send(to, message):
          self.endpoint.send(syncer_address(to), message)
        case CopyOut(push):
          self._copy_out(push)
        case Resend(push):
          self._jobs.put((self._push_again, push))
        case Stage(publish):
          staging = Staging()
          self._stagings[publish.fragment].append(staging)
          self._jobs.put((self._stage, action, staging))
          self.recorder.record(
            events.Stage(
              fragment=publish.fragment,
              version=publish.version,
              round=publish.round,
              mode=action.mode,
              included=action.included,
            )
          )
        case Apply():
          self._apply(action)
        case SendValue(value):
          self._jobs.put((self._give, value))
        case TakeSnapshot():
          self._capture(action)
        case SendMoments():
          self._give_moments(action)
        case TakeMoments(inherit):
          self._jobs.put((self._take_moments, inherit))
        case ApplyMoments(content=(inherit, staged)):
          self._apply_moments(inherit, staged)
        case events.Joined():
          seconds = time.monotonic() - self._started_at
          self.recorder.record(msgspec.structs.replace(action, seconds=round(seconds, 3)))
        case events.Event():
          self.recorder.record(action)
        case Rejoin(reason):
          raise Quarantined(reason)

  def _copy_out(self, push: Push) -> None:
    pieces, factor = self._store.copy_out(push.fragment), self.poison()
    self._jobs.put((self._push, push, pieces, factor))
    f = self.state.fragments[push.fragment]
    self.recorder.record(
      events.CopyOut(
        fragment=push.fragment,
        round=push.round,
        version=push.base_version,
        base_round=f.round,
        steps=push.steps,
        tokens=push.tokens,
        factor=factor,
      )
    )

  def _apply(self, action: Apply) -> None:
    staging = self._stagings[action.fragment].popleft()
    self._store.apply(action.fragment, staging.placed, self._deltas.keep(action.mode))
    self.recorder.record(
      events.Apply(
        fragment=action.fragment,
        version=action.version,
        round=action.round,
        mode=action.mode,
        included=action.included,
      )
    )

  def _capture(self, action: TakeSnapshot) -> None:
    """My part of a snapshot: what is on the devices now; the rest when earlier jobs are done."""
    if self._save is None:
      return
    began = time.monotonic()
    captured = self._store.capture()
    seconds = round(time.monotonic() - began, 6)
    self.recorder.record(events.Captured(snapshot=action.snapshot, seconds=seconds))
    stagings = {p: tuple(each) for p, each in self._stagings.items()}
    self._jobs.put((self._hand_over, action, captured, stagings))

  def _give_moments(self, give: SendMoments) -> None:
    p, donation = give.moments.fragment, give.moments.donation
    pieces, count = self._store.copy_out_moments(p), self._store.count()
    self._jobs.put((self._send_moments, give, pieces, count))
    self.recorder.record(events.Donated(fragment=p, donation=donation))

  def _apply_moments(self, inherit: ForwardMoments, staged: Any) -> None:
    self._store.apply_moments(inherit.fragment, staged, inherit.count)
    self.recorder.record(
      events.Inherited(
        fragment=inherit.fragment,
        learner=inherit.donor,
        incarnation_of_donor=inherit.donor_incarnation,
        donation=inherit.donation,
      )
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

  def _push(self, push: Push, pieces: Any, factor: float) -> None:
    """Encoded and sent; kept until a publish has answered it."""
    p = push.fragment
    payload = self._deltas.push(p, self._store.to_host(pieces, p), factor)
    self._outbox[p] = dataclasses.replace(push, codec=self._sync.push_codec, payload=payload)
    self.recorder.flush()  # nobody merges what the log does not know
    sent_bytes = self._send_push(p)
    self.recorder.record(
      events.Push(
        fragment=p,
        round=push.round,
        version=push.base_version,
        steps=push.steps,
        tokens=push.tokens,
        bytes=sent_bytes,
      )
    )

  def _push_again(self, push: Push) -> None:
    kept = self._outbox.get(push.fragment)
    if kept is None or kept.base_version != push.base_version:
      return
    if kept.round != push.round:  # in lock-step the same push may answer another round
      self.recorder.record(
        events.Resend(fragment=push.fragment, round=push.round, old_round=kept.round)
      )
      self.recorder.flush()
      self._outbox[push.fragment] = dataclasses.replace(kept, round=push.round)
    self._send_push(push.fragment)

  def _send_push(self, p: int) -> int:
    shard = self.state.fragments[p].shard
    return self.endpoint.send(syncer_address(shard), self._outbox[p])

  def _give(self, value: Value) -> None:
    shard = self.state.fragments[value.fragment].shard
    payload = codec.encode(self._deltas.base[value.fragment], "f32")
    self.endpoint.send(syncer_address(shard), dataclasses.replace(value, payload=payload))

  def _send_moments(self, give: SendMoments, pieces: Any, count: Any) -> None:
    flat = self._store.moments_to_host(pieces, give.moments.fragment)
    payload = codec.encode(flat, "f32")
    self.recorder.flush()  # nobody inherits what the log does not know
    moments = dataclasses.replace(give.moments, count=int(count), payload=payload)
    self.endpoint.send(syncer_address(give.shard), moments)

  def _take_moments(self, inherit: ForwardMoments) -> None:
    p = inherit.fragment
    size = self._plan.fragments[p].size * self._store.num_moments
    try:
      flat = codec.decode(inherit.payload, size, "f32")
    except codec.CodecError as error:  # another inner optimizer's, or damaged: goes on without
      reason = str(error)
      self.recorder.record(
        events.Ignored(message="ForwardMoments", learner=inherit.donor, reason=reason)
      )
      return
    if not np.isfinite(flat).all():  # it waits for another donor's, or goes on without
      reason = "not finite"
      self.recorder.record(
        events.Ignored(message="ForwardMoments", learner=inherit.donor, reason=reason)
      )
      return
    staged = self._store.stage_moments(p, flat)
    header = dataclasses.replace(inherit, payload=None)
    self._finished.put(Taken(p, time.monotonic(), (header, staged)))
    self.endpoint.wake()

  def _stage(self, action: Stage, staging: Staging) -> None:
    publish = action.publish
    p = publish.fragment
    self._outbox.pop(p, None)
    if publish.payload is None:  # my push was rejected
      staging.flat = self._deltas.back(p)
    else:
      decoded = codec.decode(publish.payload, self._plan.fragments[p].size, publish.codec)
      value = decoded if publish.base_version < 0 else self._deltas.base[p] + decoded
      staging.flat = self._deltas.stage(p, value, action.mode, action.included)
    staging.placed = self._store.stage(p, staging.flat)
    self._finished.put(Staged(p, publish.version, time.monotonic()))
    self.endpoint.wake()

  def _hand_over(
    self,
    action: TakeSnapshot,
    captured: Mapping[str, Any],
    stagings: Mapping[int, tuple[Staging, ...]],
  ) -> None:
    arrays = {**captured, **self._deltas.arrays()}
    for p, each in stagings.items():
      for i, staging in enumerate(each):
        arrays[f"staged/{p}/{i}"] = staging.flat
    for p, f in enumerate(action.state.fragments):
      if f.outstanding is not None:
        arrays[f"outbox/{p}"] = np.frombuffer(self._outbox[p].payload, np.uint8)
    self._save(action.snapshot, action.state, arrays)

  # --- before anything else -----------------------------------------------------------------------

  def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
    """Takes back what a snapshot has of this exchange; its state was revived from the same part."""
    self._deltas.restore(arrays)
    for p, f in enumerate(self.state.fragments):
      for i, _ in enumerate(f.incoming):
        flat = arrays[f"staged/{p}/{i}"]
        self._stagings[p].append(Staging(flat, self._store.stage(p, flat)))
      if f.outstanding is not None:
        payload = arrays[f"outbox/{p}"]
        name = self._sync.push_codec
        self._outbox[p] = dataclasses.replace(f.outstanding.push, codec=name, payload=payload)
