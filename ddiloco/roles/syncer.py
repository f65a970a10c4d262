"""A syncer shard at work: receives, lets `protocol.syncer` decide, merges, publishes.

One thread, no device: NumPy on the CPU. What needs one push only (decoding, norms, dot products)
is done when the push arrives; only `merge.commit` is in a round's latency.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping

import msgspec
import numpy as np

from ddiloco.chaos.faults import Faults
from ddiloco.checkpoint.buddy import Replication
from ddiloco.checkpoint.restore import syncer_part
from ddiloco.checkpoint.saver import Saver
from ddiloco.config import Config
from ddiloco.core import codec, commit
from ddiloco.core.commit import Committed, FragmentStore, ReceivedPushes, Update
from ddiloco.core.fragments import Plan
from ddiloco.network.keys import Sealer
from ddiloco.network.transport import Delivery, Endpoint, learner_address
from ddiloco.observe.eventlog import Recorder
from ddiloco.protocol import events, syncer
from ddiloco.protocol.actions import (
  Abandon,
  Accept,
  Commit,
  InstallValue,
  Merged,
  Received,
  Saved,
  Send,
  TakeSnapshot,
  Tick,
)
from ddiloco.protocol.messages import BETWEEN_SHARDS, Publish, Push, Value
from ddiloco.protocol.syncer_state import SyncerState

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
    endpoint: this shard's connection.
    store: where committed fragments live; must hold the initial values of version 0.
    recorder: event log.
    replication: copies on other shards, of and for this one; None: the store outlives this role.
    saver: writes its parts of snapshots, and commits them if it is shard 0; None: nobody does.

  Attributes:
    sealer: proves later that a value is this shard's; None: all members are trusted.
  """

  sealer: Sealer | None = None

  def __init__(
    self,
    state: SyncerState,
    config: Config,
    plan: Plan,
    endpoint: Endpoint,
    store: FragmentStore,
    recorder: Recorder,
    replication: Replication | None = None,
    saver: Saver | None = None,
  ):
    self.state = state
    self.config = config
    self.endpoint = endpoint
    self.store = store
    self.recorder = recorder
    self.replication = replication
    self.lost: dict[int, int] = {}  # fragment -> version that somebody had and this shard never
    self.fragments = {f.index: plan.fragments[f.index] for f in state.fragments}
    self.committed: dict[int, Committed] = {p: store.load(p) for p in self.fragments}
    self.arrivals: dict[int, ReceivedPushes] = {}
    self.update: dict[int, Update] = {}  # fragment -> newest update, encoded
    self._saver = saver
    self._seals: dict[int, tuple[int, str]] = {}  # fragment -> round and seal of its newest value
    self._traffic_at = 0.0
    self._ignored: dict[tuple, tuple[float, int]] = {}  # when it was said, and how often since
    recorder.record(events.Started(fragments=tuple(self.fragments)))
    for p in self.fragments:
      self._say_owned(p)

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
    """Serves until `stopped()`.

    Raises:
      Killed: by plan.
    """
    deadline = -math.inf
    while not stopped():
      faults.check(self.state.global_step)
      wake_at = syncer.next_wake(self.state, self.config.sync)
      wake_at = deadline if wake_at is None else min(wake_at, deadline)
      started = self._take_in(wake_at)
      now = time.monotonic()
      deadline = math.inf if self.replication is None else self.replication.tick()
      self.handle(Tick(now, heard_until=started))
      if self.state.saving and not (self._saver and self._saver.busy):
        self.handle(Saved(time.monotonic()))
      faults.drag(time.monotonic() - started)
      self._count_traffic()
    self._count_traffic(always=True)

  def _take_in(self, until: float) -> float:
    """Waits for a message, then takes in all that are there; returns when the wait was over.

    What comes meanwhile is for the next turn, so that a flood does not put off every decision.
    """
    began = time.monotonic()
    until = max(began, min(until, began + LONGEST_WAIT_SECONDS))
    arrived = self.endpoint.receive(until - began)
    if time.monotonic() - until > STOOD_STILL_SECONDS:
      # This process was stopped, and who was not heard meanwhile may well have spoken: what they
      # said has still to come through the sockets.
      time.sleep(LONGEST_WAIT_SECONDS)
      arrived = arrived or self.endpoint.receive(0.0)
    started, left = time.monotonic(), self.endpoint.waiting
    while arrived is not None:
      self._take(arrived)
      arrived = self.endpoint.receive(0.0) if left > 0 else None
      left -= 1
    return started

  def _take(self, arrived: Delivery) -> None:
    if not isinstance(arrived.message, BETWEEN_SHARDS):
      self.handle(self._event(arrived.message, arrived.at))
    elif self.replication is not None:
      self.replication.on(arrived.message)

  def _event(self, message, now: float | None = None) -> Received | Tick:
    """Decodes a push and measures it, so that the reducer can judge it.

    Args:
      message: that was received.
      now: when it arrived; it may have waited since. None: now.
    """
    now = time.monotonic() if now is None else now
    if isinstance(message, Value):
      return self._event_of_value(message, now)
    if not isinstance(message, Push):
      return Received(message, now)
    fragment = self.fragments.get(message.fragment)
    if fragment is None or message.payload is None:
      return Received(message, now, fault="no payload, or not a fragment of this shard")
    try:
      delta = codec.decode(message.payload, fragment.size, message.codec)
    except codec.CodecError as error:
      return Received(message, now, fault=str(error))
    arrivals = self._arrivals_of(message.fragment, message.round)
    measured = arrivals.measure(delta)
    products, content = arrivals.products(message.learner, measured), (delta, measured)
    return Received(message, now, norm=measured.norm, products=products, content=content)

  def _event_of_value(self, message: Value, now: float) -> Received:
    """A value that this shard has asked for, and what speaks against it."""
    fragment = self.fragments.get(message.fragment)
    size = -1 if fragment is None else fragment.size
    try:
      value = codec.decode(message.payload, size, "f32")
    except codec.CodecError as error:
      return Received(message, now, fault=str(error))
    if not np.isfinite(value).all():
      return Received(message, now, fault="not finite")
    if self.sealer is not None and not self.sealer.fits(message, value):
      return Received(message, now, fault="is no value of this shard: its seal does not fit")
    return Received(message, now, content=value)

  def handle(self, event) -> None:
    """One event through the reducer, and every action it decides, in order."""
    self.state, actions = syncer.syncer_on(self.state, event, self.config.sync)
    merged: Mapping = {}
    for action in actions:
      match action:
        case Send(to, message):
          self._send(to, message)
        case Accept():
          self._accept(action)
        case Commit():
          merged = self._commit(action)
        case InstallValue(fragment, content=value):
          self._adopt(fragment, value)
        case TakeSnapshot():
          self._capture(action)
        case Abandon(fragment):
          self.arrivals.pop(fragment, None)
        case events.Commit():  # that was just made
          self.recorder.record(msgspec.structs.replace(action, **merged))
          self._announce(action.fragment)
        case events.Ignored():
          self._note_ignored(action)
        case events.Event():
          self._note(action)

  def _accept(self, accept: Accept) -> None:
    arrivals = self._arrivals_of(accept.fragment, accept.round)
    self.arrivals[accept.fragment] = arrivals
    arrivals.add(accept.learner, *accept.content)

  def _arrivals_of(self, fragment: int, round: int) -> ReceivedPushes:
    """What has arrived in this round so far; nothing yet if it has just begun."""
    arrivals = self.arrivals.get(fragment)
    if arrivals is None or arrivals.round != round:
      return ReceivedPushes(self.fragments[fragment], round)
    return arrivals

  def _commit(self, what: Commit) -> Mapping:
    """Merges; returns weights and seconds, for the event log."""
    started = time.monotonic()
    p = what.fragment
    new, update, weights = commit.commit(
      self.fragments[p], self.committed[p], self.arrivals.pop(p), what, self.config
    )
    self._keep(p, new)
    if update is not None:
      self.update[p] = update
    seconds = time.monotonic() - started
    self.state, _ = syncer.syncer_on(
      self.state, Merged(time.monotonic(), seconds), self.config.sync
    )
    participants = {m: round(float(w), 6) for m, w in zip(what.learners, weights)}
    return {"participants": participants, "merge_seconds": seconds}

  def _keep(self, fragment: int, new: Committed) -> None:
    """Stores what the fragment is from now on, before anybody hears of it."""
    state = next(f for f in self.state.fragments if f.index == fragment)
    new = dataclasses.replace(new, state=dataclasses.replace(state, round=None))
    self.store.save(new)
    self.committed[fragment] = new

  def _adopt(self, fragment: int, value: np.ndarray) -> None:
    """A learner has given back what was lost here; the momentum stays that of an older round."""
    old = self.committed[fragment]
    self.update.pop(fragment, None)
    self._keep(fragment, dataclasses.replace(old, value=value, published_value=value))
    self._say_owned(fragment)
    self._announce(fragment)

  def _announce(self, fragment: int) -> None:
    """The log first, then the buddy: what others know of is never missing there."""
    self.recorder.flush()
    if self.replication is not None:
      self.replication.committed(self.committed[fragment])

  def _capture(self, action: TakeSnapshot) -> None:
    """This shard's part of a snapshot. Vectors are never written again, so nothing is copied."""
    if self._saver is None:
      return
    self.recorder.record(events.Captured(snapshot=action.snapshot))
    arrays: dict[str, np.ndarray] = {}
    for p, c in self.committed.items():
      arrays[f"{p}/value"] = c.value
      if c.published_value is not c.value:
        arrays[f"{p}/published_value"] = c.published_value
      if c.momentum is not None:
        arrays[f"{p}/momentum"] = c.momentum
    rounds = {p: c.momentum_round for p, c in self.committed.items()}
    part = syncer_part(action.state, rounds)
    if self.state.shard:
      self._saver.save(action.snapshot, part, arrays)
    else:
      then = functools.partial(self._commit_snapshot, action)
      self._saver.save(action.snapshot, part, arrays, then)

  def _commit_snapshot(self, action: TakeSnapshot, snapshot: int) -> None:
    """In the saver's thread: once everybody who was there and still lives has saved its part."""
    then, settings = action.state.members, self.config.checkpoint

    def expected() -> list[str]:
      now = self.state.members
      return [
        f"learner-{m}"
        for m in action.learners
        if m in now and not now[m].lost and now[m].incarnation == then[m].incarnation
      ]

    shards = [f"syncer-{s}" for s in range(self.config.sync.num_shards)]
    self._saver.commit_when_complete(
      snapshot, shards, expected, settings.patience_seconds, settings.keep
    )

  def _send(self, to: int, message) -> None:
    send = functools.partial(self.endpoint.send, learner_address(to))
    if not isinstance(message, Publish):
      send(message)
    elif self.replication is None:
      send(self._with_payload(message))
    else:
      publish = self._with_payload(message)
      self.replication.when_safe(publish.fragment, publish.version, lambda: send(publish))

  def _seal(self, publish: Publish) -> str:
    if self.sealer is None:
      return ""
    p = publish.fragment
    if self._seals.get(p, (None, ""))[0] != publish.round:
      self._seals[p] = (publish.round, self.sealer.seal(publish, self.committed[p].published_value))
    return self._seals[p][1]

  def _with_payload(self, publish: Publish) -> Publish:
    publish = dataclasses.replace(publish, seal=self._seal(publish))
    update = self.update.get(publish.fragment)
    if publish.base_version >= 0 and update is not None:
      return dataclasses.replace(publish, codec=update[0], payload=update[1])
    payload = codec.encode(self.committed[publish.fragment].published_value, "f32")
    return dataclasses.replace(publish, base_version=-1, codec="f32", payload=payload)

  def _note(self, event: events.Event) -> None:
    if isinstance(event, events.Lost):
      for p, version in event.versions.items():
        self.lost[p] = max(version, self.lost.get(p, 0))
    self.recorder.record(event)

  def _note_ignored(self, event: events.Ignored) -> None:
    """A line a second for each learner and kind of message: one that floods must not fill disks."""
    key, now = (event.learner, event.message), time.monotonic()
    said_at, times = self._ignored.get(key, (-math.inf, 0))
    if now - said_at < IGNORED_SECONDS:
      self._ignored[key] = (said_at, times + 1)
    else:
      self._ignored[key] = (now, 0)
      self.recorder.record(msgspec.structs.replace(event, times=times + 1))

  def _count_traffic(self, always: bool = False) -> None:
    now = time.monotonic()
    if always or now - self._traffic_at >= TRAFFIC_SECONDS:
      self._traffic_at = now
      self.recorder.record(events.Traffic(**dataclasses.asdict(self.endpoint.counters)))
