"""A syncer shard at work: receives, lets `protocol.syncer` decide, merges, publishes.

One loop, no device: NumPy on the CPU. What needs one push only (decoding, norms, dot products)
is done when the push arrives; only `Merger.commit` is in a round's latency.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

import msgspec

from ddiloco.chaos.faults import Faults
from ddiloco.checkpoint.buddy import Replication
from ddiloco.checkpoint.restore import syncer_part
from ddiloco.config import Config
from ddiloco.core.commit import Committed, FragmentStore
from ddiloco.core.fragments import Plan
from ddiloco.network.seals import Sealer
from ddiloco.network.transport import Delivery, learner_address
from ddiloco.protocol import events, syncer
from ddiloco.protocol.actions import (
  Abandon,
  Accept,
  Commit,
  InstallValue,
  Received,
  Resumed,
  Saved,
  Send,
  TakeSnapshot,
  Tick,
)
from ddiloco.protocol.messages import BETWEEN_SHARDS, Message, Publish, Push, Value
from ddiloco.protocol.syncer_state import FragmentState, SyncerState
from ddiloco.protocol.values import replace
from ddiloco.runtime import Job, Loop, Runtime, drive

LONGEST_WAIT_SECONDS = 0.5  # between two looks at faults and the stop signal
STOOD_STILL_SECONDS = 1.0  # a wait that took so much longer: the process was stopped
TRAFFIC_SECONDS = 1.0
IGNORED_SECONDS = 1.0


class Syncer:
  """One incarnation of a shard.

  Args:
    state: the reducer's first state, from `protocol.syncer.init`; its fragments are the store's.
    config: the run's.
    plan: how the model is partitioned; the same on every role.
    store: where committed fragments live; must hold the initial values of version 0.
    runtime: what it lives with; shard 0's saver also commits snapshots.
    replication: copies on other shards, of and for this one; None: the store outlives this role.

  Attributes:
    merger: its vectors.
    sealer: proves later that a value is this shard's; None: all members are trusted.
  """

  sealer: Sealer | None = None

  def __init__(
    self,
    state: SyncerState,
    config: Config,
    plan: Plan,
    store: FragmentStore,
    runtime: Runtime,
    replication: Replication | None = None,
  ):
    self.state = state
    self.config = config
    self.endpoint, self.recorder, self.time = runtime.endpoint, runtime.recorder, runtime.time
    self.store = store
    self.replication = replication
    self.lost: dict[int, int] = {}  # fragment -> version that a learner had and this shard never
    fragments = {f.index: plan.fragments[f.index] for f in state.fragments}
    self.merger = runtime.merger(fragments, store, config)
    self._saver = runtime.saver
    self._seals: dict[int, tuple[int, str]] = {}  # fragment -> round and seal of its newest value
    self._traffic_at = -math.inf
    self._ignored: dict[tuple, tuple[float, int]] = {}  # when it was said, and how often since
    self.recorder.record(events.Started(fragments=tuple(fragments)))
    for p in fragments:
      self._say_owned(p)

  @property
  def committed(self) -> Mapping[int, Committed]:
    """Its fragments as of their newest commits."""
    return self.merger.committed

  def _say_owned(self, fragment: int) -> None:
    """For the log: which value and momentum the next commit of this fragment builds on."""
    committed = self.committed[fragment]
    self.recorder.record(
      events.Owns(
        fragment=fragment,
        version=committed.state.version,
        round=committed.state.last_round,
        momentum_round=committed.momentum_round,
      )
    )

  def run(self, faults: Faults, stopped: Callable[[], bool]) -> None:
    """Serves until `stopped()`, on this thread.

    Raises:
      Killed: by plan.
    """
    drive(self.live(faults, stopped), self.endpoint, LONGEST_WAIT_SECONDS)

  def live(self, faults: Faults, stopped: Callable[[], bool]) -> Loop[None]:
    """The loop of `run`."""
    deadline, now = -math.inf, self.time.now
    while not stopped():
      faults.check(self.state.global_step)
      yield None  # it may have stood still
      wake_at = syncer.next_wake(self.state, self.config.sync)
      wake_at = deadline if wake_at is None else min(wake_at, deadline)
      started = yield from self._take_in(wake_at)
      deadline = math.inf if self.replication is None else self.replication.tick()
      yield from self.handle(Tick(now(), heard_until=started))
      if self.state.saving and not (self._saver and self._saver.busy):
        yield from self.handle(Saved(now()))
      faults.drag(now() - started)
      yield None
      self._count_traffic()
    self._count_traffic(always=True)

  def _take_in(self, until: float) -> Loop[float]:
    """Waits for a message, then takes in all that are there; returns when the wait was over.

    What comes meanwhile is for the next turn, so that a flood does not put off every decision.
    """
    began = self.time.now()
    until = max(began, min(until, began + LONGEST_WAIT_SECONDS))
    arrived = yield until
    if self.time.now() - until > STOOD_STILL_SECONDS:
      # This process was stopped, and members not heard meanwhile may well have spoken: their
      # messages have still to come through the sockets.
      self.time.sleep(LONGEST_WAIT_SECONDS)
      yield None
      yield from self.handle(Resumed(self.time.now()))
      arrived = arrived or self.endpoint.receive(0.0)
    started, left = self.time.now(), self.endpoint.waiting
    while arrived is not None:
      yield from self._take(arrived)
      arrived = self.endpoint.receive(0.0) if left > 0 else None
      left -= 1
    return started

  def _take(self, arrived: Delivery) -> Loop[None]:
    if not isinstance(arrived.message, BETWEEN_SHARDS):
      received = self.received(arrived.message, arrived.at)
      yield None
      yield from self.handle(received)
    elif self.replication is not None:
      self.replication.on(arrived.message)

  def received(self, message: Message, now: float) -> Received:
    """The event of a message that arrived `now`; it may have waited since.

    What has a payload is decoded and measured, so that the reducer can judge it.
    """
    if isinstance(message, Push):
      return self.merger.take_in(message, now)
    if not isinstance(message, Value):
      return Received(message, now)
    event = self.merger.take_back(message, now)
    if event.fault or self.sealer is None or self.sealer.fits(message, event.content):
      return event
    return Received(message, now, fault="is no value of this shard: its seal does not fit")

  def handle(self, event) -> Loop[None]:
    """One event through the reducer, and every action it decides, in order."""
    self.state, actions = syncer.syncer_on(self.state, event, self.config.sync)
    merged: Mapping = {}
    for action in actions:
      match action:
        case Send(to, message):
          self._send(to, message)
        case Accept():
          self.merger.accept(action)
        case Commit():
          merged = yield from self._commit(action)
        case InstallValue():
          self._adopt(action)
        case TakeSnapshot():
          self._capture(action)
        case Abandon(fragment):
          self.merger.abandon(fragment)
        case events.Commit():  # that was just made
          self.recorder.record(msgspec.structs.replace(action, **merged))
          self._announce(action.fragment)
        case events.Ignored():
          self._note_ignored(action)
        case events.Event():
          self._note(action)

  def _commit(self, what: Commit) -> Loop[Mapping]:
    """Merges, and stores before any role hears of it; returns weights and seconds, for the log."""
    started = self.time.now()
    weights = self.merger.commit(what, self._state_of(what.fragment))
    yield None
    self.store.save(self.committed[what.fragment])
    participants = {m: round(float(w), 6) for m, w in zip(what.learners, weights)}
    return {"participants": participants, "merge_seconds": self.time.now() - started}

  def _state_of(self, fragment: int) -> FragmentState:
    """As it outlives this incarnation: without the round under way."""
    state = next(f for f in self.state.fragments if f.index == fragment)
    return replace(state, round=None)

  def _adopt(self, what: InstallValue) -> None:
    """A learner has given back what was lost here."""
    self.merger.install(what, self._state_of(what.fragment))
    self.store.save(self.committed[what.fragment])
    self._say_owned(what.fragment)
    self._announce(what.fragment)

  def _announce(self, fragment: int) -> None:
    """The log first, then the buddy: what others know of is never missing there."""
    self.recorder.flush()
    if self.replication is not None:
      self.replication.committed(self.committed[fragment])

  def _capture(self, action: TakeSnapshot) -> None:
    """This shard's part of a snapshot."""
    if self._saver is None:
      return
    self.recorder.record(events.Captured(snapshot=action.snapshot))
    rounds = {p: c.momentum_round for p, c in self.committed.items()}
    part, arrays = syncer_part(action.state, rounds), self.merger.arrays()
    if self.state.shard:
      self._saver.save(action.snapshot, part, arrays)
    else:
      then = functools.partial(self._commit_snapshot, action)
      self._saver.save(action.snapshot, part, arrays, then)

  def _commit_snapshot(self, action: TakeSnapshot, snapshot: int) -> Job:
    """By the saver: once all members of the capture that still live have saved their parts."""
    then, settings = action.state.members, self.config.checkpoint

    def expected() -> list[str]:
      now = self.state.members
      return [
        f"learner-{m}"
        for m in action.learners
        if m in now and not now[m].lost and now[m].incarnation == then[m].incarnation
      ]

    shards = [f"syncer-{s}" for s in range(self.config.sync.num_shards)]
    return self._saver.commit_when_complete(
      snapshot, shards, expected, settings.patience_seconds, settings.keep
    )

  def _send(self, to: int, message) -> None:
    send = functools.partial(self.endpoint.send, learner_address(to))
    if not isinstance(message, Publish):
      send(message)
      return
    sealed = replace(message, seal=self._seal(message))
    publish = self.merger.with_payload(sealed)
    if self.replication is None:
      send(publish)
    else:
      self.replication.when_safe(publish.fragment, publish.version, lambda: send(publish))

  def _seal(self, publish: Publish) -> str:
    if self.sealer is None:
      return ""
    p = publish.fragment
    if self._seals.get(p, (None, ""))[0] != publish.round:
      self._seals[p] = (publish.round, self.sealer.seal(publish, self.committed[p].published_value))
    return self._seals[p][1]

  def _note(self, event: events.Event) -> None:
    if isinstance(event, events.Lost):
      for p, version in event.versions.items():
        self.lost[p] = max(version, self.lost.get(p, 0))
    self.recorder.record(event)

  def _note_ignored(self, event: events.Ignored) -> None:
    """A line a second for each learner and kind of message: one that floods must not fill disks."""
    key, now = (event.learner, event.message), self.time.now()
    said_at, times = self._ignored.get(key, (-math.inf, 0))
    if now - said_at < IGNORED_SECONDS:
      self._ignored[key] = (said_at, times + 1)
    else:
      self._ignored[key] = (now, 0)
      self.recorder.record(msgspec.structs.replace(event, times=times + 1))

  def _count_traffic(self, always: bool = False) -> None:
    now = self.time.now()
    if always or now - self._traffic_at >= TRAFFIC_SECONDS:
      self._traffic_at = now
      self.recorder.record(events.Traffic(**vars(self.endpoint.counters)))
