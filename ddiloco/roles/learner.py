"""A learner at work: the training loop of one island, which waits for no other role.

Each incarnation: compile, report, receive every fragment, then step after step. Between two
inner steps the `boundary` of the exchange feeds arrived messages to `protocol.learner` and performs
its actions: cheap dispatches only. Copies to the host, differences, encoding, decoding and
transfers to the devices are jobs of one worker in the background, in order.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np

from ddiloco.chaos import Faults
from ddiloco.config import ConfigError
from ddiloco.core import codec
from ddiloco.network.transport import Delivery, syncer_address
from ddiloco.protocol import actions, events, learner
from ddiloco.protocol.messages import MADE, ForwardMoments, Moments, Publish, Push, Value
from ddiloco.protocol.states import LearnerState, learner_part, schedule_step
from ddiloco.protocol.values import replace
from ddiloco.runtime import Job, Loop, Runtime, WorkingRole, drive

Batches = Callable[[int], Iterator[Any]]
LOOK_SECONDS = 0.05  # between two checks of the stop signal during a wait
HEARTBEAT_SECONDS = 0.5


class Quarantined(Exception):
  """A shard says this learner's state is bad: it must start afresh as a new incarnation."""


@dataclasses.dataclass
class Staging:
  """A published version on its way to the devices: the worker fills in the fields."""

  flat: np.ndarray | None = None  # the vector that `apply` adds
  placed: Any = None  # the same vector on the devices


class Exchange(WorkingRole):
  """One incarnation of a learner, except its training.

  Args:
    state: the reducer's first state, from `protocol.learner.init`.
    store: where the parameters live: `training.island.Island`, or a stand-in with its methods.
    runtime: config, clock, workers, endpoint, ...
  """

  def __init__(self, state: LearnerState, store, runtime: Runtime):
    # At most half of the cores: this process also dispatches the inner steps.
    super().__init__(runtime, f"exchange-{state.learner}", max(runtime.plan.sizes), share=0.5)
    self.state = state
    self._sync, self._plan = self.config.sync, runtime.plan
    self._store = store
    self._deltas = runtime.deltas(self._sync)
    self._deltas.share = self._threads.share
    self._make = runtime.initial
    self._made: Mapping[int, Any] = {}  # initial values, until it has joined
    self._given: dict[int, weakref.ref[Any]] = {}  # fragment -> payload of its value, given back
    self._stagings = collections.defaultdict[int, collections.deque[Staging]](collections.deque)
    self.poison: Callable[[], float] = lambda: 1.0  # factor of a planned fault on pushes
    self.position: Callable[[LearnerState], int] = lambda state: 0  # of its data, for a snapshot
    self.warms_up = False  # whether its learning rate does, since its inner moments are new
    self._started_at = self.time.now()
    self._reports: list[actions.LearnerAction] = []  # sent last, at ...
    self._heartbeat_at = -math.inf

  # --- in the role's own loop, between two inner steps --------------------------------------------

  def boundary(self, *happened: actions.LearnerEvent) -> None:
    """Feeds what `happened`, then everything that has arrived, then reports to the shards."""
    for event in happened:
      self._feed(event)
    self._take_in()
    self._report()

  def _take_in(self) -> None:
    for event in iter(self._arrived, None):
      self._feed(event)

  def wait(self, until: float = math.inf) -> Loop[None]:
    """Waits, without a step to make, for a message or a time; reports what changes, and that it
    lives."""
    alive_at = self._heartbeat_at + HEARTBEAT_SECONDS
    arrived = yield min(until, alive_at)
    if arrived and (received := self._received(arrived)):
      self._feed(received)
    self._take_in()
    now = self.time.now()  # after all arrived messages, since this process may have stood still
    self._feed(actions.Tick(now))
    if now >= alive_at or learner.reports(self.state, self._sync) != self._reports:
      self._report()

  def drain(self) -> None:
    """Makes no more steps; leaves when all its work is merged."""
    self.state = learner.drain(self.state)
    self._report()

  def leave(self, reason: str = "the run was stopped") -> None:
    """Says goodbye to the shards, and is done."""
    if not self.state.done:
      self.state, todo = learner.leave(self.state, reason)
      self._perform(todo)

  def close(self) -> None:
    """Ends the worker; the jobs left are dropped."""
    self._count_traffic(always=True)
    super().close()
    # The old one refers to the learner, a cycle that only a garbage collection would free.
    self.position = lambda state: 0

  def _arrived(self) -> actions.LearnerEvent | None:
    if (event := self._told()) is not None:
      return event
    while arrived := self.endpoint.receive(0.0):
      if received := self._received(arrived):
        return received
    return None

  def _received(self, arrived: Delivery) -> actions.Received | None:
    """A message for the reducer; an initial value without its payload is completed first."""
    message = arrived.message
    if not isinstance(message, Publish) or message.codec != MADE:
      return actions.Received(message, arrived.at)
    self._worker.put(self._complete(message))
    return None

  def _feed(self, event: actions.LearnerEvent) -> None:
    self.state, todo = learner.learner_on(self.state, event, self._sync)
    self._perform(todo)

  def _report(self) -> None:
    if self.state.done:
      return
    self._heartbeat_at = self.time.now()
    self._reports = learner.reports(self.state, self._sync)
    self._perform(self._reports)
    self._count_traffic()

  def _perform(self, todo) -> None:
    for action in todo:
      match action:
        case actions.Send(to, Value() as value):
          self._worker.put(self._give(to, value))
        case actions.Send(_, Push() as push):
          self._copy_out(push)
        case actions.Send(to, Moments() as moments):
          self._give_moments(to, moments)
        case actions.Send(to, message):
          self.endpoint.send(syncer_address(to), message)
        case actions.Resend(push):
          self._worker.put(self._push_again(push))
        case actions.Stage(publish):
          staging = Staging()
          self._stagings[publish.fragment].append(staging)
          self.recorder.record(
            events.Stage(
              fragment=publish.fragment,
              version=publish.version,
              round=publish.round,
              mode=action.mode,
              included=action.included,
            )
          )
          self._worker.put(self._stage(action, staging))
        case actions.TakeSnapshot(state):
          self._capture(state)
        case actions.TakeMoments(forwarded):
          self._worker.put(self._take_moments(forwarded))
        case actions.ApplyMoments(content=(forwarded, staged)):
          self._apply_moments(forwarded, staged)
        case events.Joined():
          self._made = {}
          seconds = self.time.now() - self._started_at
          self.recorder.record(replace(action, seconds=round(seconds, 3)))
        case events.Apply():
          self._apply(action)
        case events.Event():
          self.recorder.record(action)
          if isinstance(action, events.Rejected) and action.rejoin:
            raise Quarantined(action.reason)

  def _copy_out(self, push: Push) -> None:
    factor = self.poison()
    job = self._push(push, self._store.copy_out(push.fragment), factor)  # it alone holds the copy
    base_round = self.state.fragments[push.fragment].round
    self.recorder.record(events.CopyOut(**_said(push), base_round=base_round, factor=factor))
    self._worker.put(job)  # last: it flushes the log

  def _apply(self, action: events.Apply) -> None:
    staging = self._stagings[action.fragment].popleft()
    self._store.apply(action.fragment, staging.placed, self._deltas.keep(action.mode))
    self.recorder.record(action)

  def _capture(self, state: LearnerState) -> None:
    """My part of a snapshot: the devices' state now, the rest when earlier jobs are done."""
    if self._saver is None:
      return
    reason = self._saver.refusal  # no step should wait for a copy that would be dropped
    if lacks := [p for p, f in enumerate(state.fragments) if not f.here]:
      reason = f"it has not joined: it waits for fragments {lacks}"
    elif state.wants or self.warms_up:  # a later incarnation would use them at full rate
      reason = "its inner moments are new: its learning rate has not warmed up"
    if reason:
      self._saver.decline(state.snapshot, reason)
      return
    began = self.time.now()
    captured = self._store.capture()
    seconds = round(self.time.now() - began, 6)
    self.recorder.record(events.Captured(snapshot=state.snapshot, seconds=seconds))
    staged = {f"staged/{p}/{i}": v for p, q in self._stagings.items() for i, v in enumerate(q)}
    self._worker.put(self._hand_over(state, self.position(state), captured, staged))

  def _give_moments(self, shard: int, moments: Moments) -> None:
    p, donation = moments.fragment, moments.donation
    count = self._store.count()
    job = self._send_moments(shard, moments, self._store.copy_out(p, moments=True), count)
    self.recorder.record(events.Donated(fragment=p, donation=donation))
    self._worker.put(job)

  def _apply_moments(self, forwarded: ForwardMoments, staged: Any) -> None:
    self._store.apply(forwarded.fragment, staged, 0.0, moments=True)
    self._store.set_count(forwarded.count)
    self.recorder.record(
      events.Inherited(
        fragment=forwarded.fragment,
        learner=forwarded.donor,
        incarnation_of_donor=forwarded.donor_incarnation,
        donation=forwarded.donation,
      )
    )

  # --- jobs of the worker -------------------------------------------------------------------------

  def _complete(self, publish: Publish) -> Job:
    """Makes the initial values, and checks this one: another machine may compute other bits."""
    p, reason = publish.fragment, "it is another one here, or none"
    # It may have come again meanwhile. To make it anew would take the memory of a whole model.
    if publish.round <= self.state.fragments[p].newest_round:
      return
    if p not in self._made:
      try:
        self._made = self._make()
      except ConfigError as error:
        reason = str(error)
    value = self._made.get(p)
    complete = None if value is None else self._deltas.made(publish, value)
    yield None
    if complete is None:
      text = f"the initial value of fragment {p} has to be sent: {reason}"
      self.recorder.record(events.Ignored(message="Publish", reason=text))
    now = self.time.now()
    self._tell(actions.Unmade(now) if complete is None else actions.Received(complete, now))

  def _push(self, push: Push, pieces: Any, factor: float) -> Job:
    """Encodes and sends a push."""
    local = self._store.to_host(pieces, push.fragment)
    del pieces  # the devices need no copy while the push is made
    self._deltas.push(push.fragment, local, factor)
    del local
    yield None
    self.recorder.record(events.Push(**_said(push), bytes=self._send_push(push)))

  def _push_again(self, push: Push) -> Job:
    shard = self.state.fragments[push.fragment].shard
    if not self.endpoint.unsent(syncer_address(shard)):  # else this push may still be queued
      self._send_push(push)
    yield None

  def _send_push(self, push: Push) -> int:
    self.recorder.flush()  # the log on disk has every push that a shard may merge
    to = syncer_address(self.state.fragments[push.fragment].shard)
    payload = self._deltas.sent[push.fragment]
    return self.endpoint.send(to, replace(push, codec=self._sync.push_codec, payload=payload))

  def _give(self, shard: int, value: Value) -> Job:
    """Gives back a value that its shard lost; not again while it waits to be sent: on a slow link
    the shard asks again before a value of gigabytes has left."""
    to = syncer_address(shard)
    before = self._given.get(value.publish.fragment)
    if before is not None and before() is not None and self.endpoint.unsent(to):
      return
    payload = self._deltas.base[value.publish.fragment].view(np.uint8)
    self._given[value.publish.fragment] = weakref.ref(payload)
    yield None
    self.endpoint.send(to, replace(value, payload=payload))

  def _send_moments(self, shard: int, moments: Moments, pieces: Any, count: Any) -> Job:
    payload = self._store.to_host(pieces, moments.fragment).view(np.uint8)
    del pieces
    yield None
    self.recorder.flush()  # the log on disk has all moments that a peer may take over
    moments = replace(moments, count=int(count), payload=payload)
    self.endpoint.send(syncer_address(shard), moments)

  def _take_moments(self, forwarded: ForwardMoments) -> Job:
    p, content = forwarded.fragment, None
    size = self._plan.fragments[p].size * self._store.num_moments
    try:
      flat = self._deltas.take_moments(forwarded.payload, size)
    except codec.CodecError as error:  # wait for another donor's moments, or go on without
      reason = str(error)
      self.recorder.record(
        events.Ignored(message="ForwardMoments", learner=forwarded.donor, reason=reason)
      )
    else:
      content = replace(forwarded, payload=None), self._store.stage(p, flat, moments=True)
    yield None
    self._tell(actions.Taken(p, self.time.now(), content))

  def _stage(self, action: actions.Stage, staging: Staging) -> Job:
    publish = action.publish
    p = publish.fragment
    size = self._plan.fragments[p].size
    staging.flat = self._deltas.receive(publish, size, action.mode, action.included)
    staging.placed = self._store.stage(p, staging.flat)
    yield None
    self._tell(actions.Staged(p, self.time.now()))

  def _hand_over(
    self,
    state: LearnerState,
    position: int,
    captured: Mapping[str, Any],
    staged: Mapping[str, Staging],
  ) -> Job:
    arrays = {**captured, **self._deltas.arrays(), **{n: each.flat for n, each in staged.items()}}
    self._saver.save(state.snapshot, learner_part(state, position), arrays)
    yield None

  # --- after a restart, before the loop runs ------------------------------------------------------

  def restore(self, arrays: MutableMapping[str, np.ndarray]) -> None:
    """Takes over a snapshot's vectors; the reducer's state was revived from the same part.

    Empties `arrays`: a caller that still held them would keep outdated vectors in memory.
    """
    self._deltas.restore(arrays)
    for p, f in enumerate(self.state.fragments):
      for i, _ in enumerate(f.incoming):
        flat = arrays[f"staged/{p}/{i}"]
        self._stagings[p].append(Staging(flat, self._store.stage(p, flat)))
    arrays.clear()


def _said(push: Push) -> dict[str, int]:
  """A push, as events name it."""
  said = {"fragment": push.fragment, "round": push.round, "version": push.base_version}
  return {**said, "steps": push.steps, "tokens": push.tokens}


class Learner:
  """One incarnation of a learner.

  Args:
    beginning: a `checkpoint.restore.ResumeState`, with which it starts; the island holds the arrays
      of the devices.
    island: devices, compiled step and parameters (`training.island.Island`); outlives incarnations.
    batches: `batches(position)` iterates over this learner's batches from that position on.
    runtime: config, endpoint, log, clock, ...
  """

  def __init__(self, beginning, island, batches: Batches, runtime: Runtime):
    config = self.config = runtime.config
    self.island = island
    self.batches = batches
    self.recorder, self.time = runtime.recorder, runtime.time
    self._min_step_seconds = config.islands.island(beginning.state.learner).min_step_seconds
    self._planned_tokens = config.planned_tokens_per_step
    self._step_tokens = config.tokens_per_step(beginning.state.learner)
    state = self._began = beginning.state
    # Data position - global step when the state was captured. Data goes on at the present global
    # step plus this difference.
    self._ahead = beginning.position - state.global_step
    self._fresh = beginning.fresh
    self._joined: LearnerState | None = None  # the state when it opened its data
    self.exchange = Exchange(state, island, runtime)
    self.exchange.position = self._next_position
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
      Quarantined: a shard found this learner's pushes bad; restart it.
    """
    loop = self.live(faults, stopped, drain_seconds, at_once)
    drive(loop, self.exchange.endpoint, LOOK_SECONDS)

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
        batch_sizes=self.config.islands.batch_sizes,
        planned_steps=self.config.planned_steps(),
      )
    )
    last, blocked, give_up_at = now(), 0.0, math.inf
    try:
      while not exchange.state.done:
        faults.check(exchange.state.global_step)
        yield None  # a planned stall may have passed
        if stopped() and not exchange.state.leaving:
          give_up_at = now() + drain_seconds
          exchange.drain()
        if exchange.state.leaving and (at_once() or now() >= give_up_at):
          exchange.leave()
        elif learner.can_step(exchange.state, self.config.sync):
          batches = batches or self._open()
          last = yield from self._step(batches, faults, last, blocked)
          blocked = 0.0
        else:
          before = now()
          yield from exchange.wait(give_up_at)
          blocked += now() - before
          if exchange.state.step == self._began.step:
            last, blocked = now(), 0.0  # joining, not blocked
    finally:
      exchange.close()  # first: a user's source may raise
      if batches is not None:
        batches.close()

  @property
  def usual_seconds(self) -> float | None:
    """Of a step; None before it is known: the first steps of an incarnation also load programs."""
    state = self.exchange.state
    return state.step_seconds if state.step > self._began.step + 1 else None

  def _open(self) -> Iterator[Any]:
    """This learner's batches, from the present global step on."""
    self._joined = self.exchange.state
    return self.batches(self._next_position(self._joined))

  def _next_position(self, state: LearnerState) -> int:
    """The number of the batch that the step after `state` trains on."""
    joined = self._joined or state
    return joined.global_step + self._ahead + state.step - joined.step

  def _rate_scale(self, state: LearnerState) -> float:
    """Warms up fresh moments in the middle of a run: Adam's first updates are large."""
    warmup = self.config.checkpoint.warmup_steps
    if not (self._fresh and self._joined.global_step and warmup):
      return 1.0
    return min(1.0, (state.step - self._joined.step + 1) / warmup)

  def _step(
    self, batches: Iterator[Any], faults: Faults, last: float, blocked: float
  ) -> Loop[float]:
    """One inner step and the boundary after it; returns when the step ended."""
    now = self.time.now
    state = self.exchange.state
    asked = now()
    batch = next(batches)
    started = asked if self.island.busy else now()  # a step that is still in flight hid the wait
    position, rate_scale = self._next_position(state), self._rate_scale(state)
    self.exchange.warms_up = rate_scale < 1
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
        data_seconds=round(started - asked, 6),
        schedule_step=at,
        rate_scale=rate_scale,
        **(metrics or {}),
      )
    )
    # A step that was only dispatched says nothing of its time: the next one waits for it.
    seconds = 0.0 if metrics is None else ended - started
    self.exchange.boundary(actions.StepDone(ended, trained, seconds))
    return ended
