"""A syncer shard at work: receives, lets `core.syncer` decide, merges, publishes.

One thread, no device: NumPy on the CPU. What needs one push only (decoding, norms, dot products)
is done when the push arrives; only `merge.commit` is in a round's latency.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping

import numpy as np

from ddiloco.config import Config
from ddiloco.core import codec, merge, syncer
from ddiloco.core.fragments import Plan
from ddiloco.core.messages import BETWEEN_SHARDS, Inherit, Moments, Publish, Push, Value
from ddiloco.core.protocol import (
  Abandon,
  Accept,
  Adopt,
  Commit,
  Merged,
  Note,
  Received,
  Record,
  Saved,
  Send,
  Tick,
)
from ddiloco.core.syncer_state import SyncerState
from ddiloco.observe.events import Recorder
from ddiloco.resilience.chaos import Faults
from ddiloco.runtime import commits
from ddiloco.runtime.commits import Arrivals, Update
from ddiloco.runtime.rejoin import syncer_part
from ddiloco.runtime.replica import Replication
from ddiloco.runtime.saver import Saver
from ddiloco.runtime.store import Committed, FragmentStore
from ddiloco.runtime.transport import Endpoint, learner_address

LONGEST_WAIT_SECONDS = 0.5  # between two looks at faults and the stop signal
TRAFFIC_SECONDS = 1.0


class Syncer:
  """One incarnation of a shard.

  Args:
    state: the reducer's first state, from `core.syncer.init`; its fragments are the store's.
    config: the run's.
    plan: how the model is cut; the same on every role.
    endpoint: this shard's connection.
    store: where committed fragments live; must hold the initial values of version 0.
    recorder: event log.
    replication: copies on other shards, of and for this one; None: the store outlives this role.
    saver: writes its parts of snapshots, and commits them if it is shard 0; None: nobody does.
  """

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
    self.arrivals: dict[int, Arrivals] = {}
    self.update: dict[int, Update] = {}  # fragment -> newest update, encoded
    self.last_commit: dict[int, Mapping] = {}  # fragment -> weights and seconds, for the event log
    self._saver = saver
    self._arrived: tuple[np.ndarray, np.ndarray] | None = None  # a push and its squared norms
    self._traffic_at = 0.0
    recorder.event("started", fragments=list(self.fragments))
    for p in self.fragments:
      self._say_owned(p)

  def _say_owned(self, fragment: int) -> None:
    """For the log: which value and momentum the next commit of this fragment builds on."""
    committed = self.committed[fragment]
    self.recorder.event(
      "owns",
      fragment=fragment,
      version=committed.state.version,
      round=committed.state.last_round,
      momentum_round=committed.momentum_round,
    )

  def run(self, faults: Faults, stopped: Callable[[], bool]) -> None:
    """Serves until `stopped()`.

    Raises:
      Killed: by plan.
    """
    while not stopped():
      faults.check(self.state.clock)
      wake_at = syncer.next_wake(self.state)
      now = time.monotonic()
      wait = LONGEST_WAIT_SECONDS if wake_at is None else min(wake_at - now, LONGEST_WAIT_SECONDS)
      if self.replication is not None:
        wait = min(wait, self.replication.tick() - now)
      arrived = self.endpoint.receive(max(0.0, wait))
      started = time.monotonic()
      if arrived and isinstance(arrived[1], BETWEEN_SHARDS):
        if self.replication is not None:
          self.replication.on(arrived[1])
      else:
        self.handle(self._event(arrived[1]) if arrived else Tick(started))
      if self.state.saving and not (self._saver and self._saver.busy):
        self.handle(Saved(time.monotonic()))
      faults.drag(time.monotonic() - started)
      self._count_traffic()
    self._count_traffic(always=True)

  def _event(self, message) -> Received:
    """Decodes a push and measures it, so that the reducer can judge it."""
    now = time.monotonic()
    if isinstance(message, Moments):
      self._moments = message.payload
      return Received(dataclasses.replace(message, payload=None), now)
    if isinstance(message, Value):
      return self._event_of_value(message, now)
    if not isinstance(message, Push):
      return Received(message, now)
    fragment = self.fragments.get(message.fragment)
    self._arrived = None
    if fragment is None or message.payload is None:
      return Received(message, now, fault="no payload, or not a fragment of this shard")
    try:
      delta = codec.decode(message.payload, fragment.size, message.codec)
    except codec.CodecError as error:
      return Received(message, now, fault=str(error))
    squares = merge.squared_norms(fragment, delta)
    self._arrived = (delta, squares)
    return Received(message, time.monotonic(), norm=math.sqrt(float(squares.sum())))

  def _event_of_value(self, message: Value, now: float) -> Received | Tick:
    """A value that this shard has asked for; one that cannot be it is dropped."""
    fragment = self.fragments.get(message.fragment)
    size = -1 if fragment is None else fragment.size
    try:
      value = codec.decode(message.payload, size, "f32")
    except codec.CodecError as error:
      self.recorder.event("ignored", message="Value", learner=message.learner, reason=str(error))
      return Tick(now)
    if not np.isfinite(value).all():
      self.recorder.event("ignored", message="Value", learner=message.learner, reason="not finite")
      return Tick(now)
    self._given = value
    return Received(message, now)

  def handle(self, event) -> None:
    """One event through the reducer, and every action it decides, in order."""
    self.state, actions = syncer.syncer_on(self.state, event, self.config.sync)
    for action in actions:
      match action:
        case Send(to, message):
          self._send(to, message)
        case Accept():
          self._accept(action)
        case Commit():
          self._commit(action)
        case Adopt(fragment):
          self._adopt(fragment)
        case Record():
          self._record(action)
        case Abandon(fragment):
          self.arrivals.pop(fragment, None)
        case Note(kind, fields):
          self._note(kind, fields)

  def _accept(self, accept: Accept) -> None:
    arrivals = self.arrivals.get(accept.fragment)
    if arrivals is None or arrivals.round != accept.round:
      arrivals = Arrivals(self.fragments[accept.fragment], accept.round)
      self.arrivals[accept.fragment] = arrivals
    arrivals.add(accept.learner, *self._arrived)

  def _commit(self, what: Commit) -> None:
    started = time.monotonic()
    p = what.fragment
    new, update, weights = commits.commit(
      self.fragments[p], self.committed[p], self.arrivals.pop(p), what, self.config
    )
    self._keep(p, new)
    if update is not None:
      self.update[p] = update
    seconds = time.monotonic() - started
    self.state, _ = syncer.syncer_on(
      self.state, Merged(time.monotonic(), seconds), self.config.sync
    )
    participants = {str(m): round(float(w), 6) for m, w in zip(what.learners, weights)}
    self.last_commit[p] = {"participants": participants, "merge_seconds": seconds}

  def _keep(self, fragment: int, new: Committed) -> None:
    """Stores what the fragment is from now on, before anybody hears of it."""
    state = next(f for f in self.state.fragments if f.index == fragment)
    new = dataclasses.replace(new, state=dataclasses.replace(state, round=None))
    self.store.save(new)
    self.committed[fragment] = new

  def _adopt(self, fragment: int) -> None:
    """A learner has given back what was lost here; the momentum stays that of an older round."""
    old, value = self.committed[fragment], self._given
    self.update.pop(fragment, None)
    self._keep(fragment, dataclasses.replace(old, value=value, view=value))
    self._say_owned(fragment)
    self._announce(fragment)

  def _announce(self, fragment: int) -> None:
    """The log first, then the buddy: what others know of is never missing there."""
    self.recorder.flush()
    if self.replication is not None:
      self.replication.committed(self.committed[fragment])

  def _record(self, record: Record) -> None:
    """This shard's part of a snapshot. Vectors are never written again, so nothing is copied."""
    if self._saver is None:
      return
    self.recorder.event("recorded", snapshot=record.snapshot)
    arrays: dict[str, np.ndarray] = {}
    for p, c in self.committed.items():
      arrays[f"{p}/value"] = c.value
      if c.view is not c.value:
        arrays[f"{p}/view"] = c.view
      if c.momentum is not None:
        arrays[f"{p}/momentum"] = c.momentum
    rounds = {p: c.momentum_round for p, c in self.committed.items()}
    part = syncer_part(record.state, rounds)
    if self.state.shard:
      self._saver.save(record.snapshot, part, arrays)
    else:
      then = functools.partial(self._commit_snapshot, record)
      self._saver.save(record.snapshot, part, arrays, then)

  def _commit_snapshot(self, record: Record, snapshot: int) -> None:
    """In the saver's thread: once everybody who was there and still lives has saved its part."""
    then, settings = record.state.members, self.config.checkpoint

    def expected() -> list[str]:
      now = self.state.members
      return [
        f"learner-{m}"
        for m in record.learners
        if m in now and not now[m].lost and now[m].incarnation == then[m].incarnation
      ]

    shards = [f"syncer-{s}" for s in range(self.config.sync.num_shards)]
    self._saver.commit_when_complete(
      snapshot, shards, expected, settings.patience_seconds, settings.keep
    )

  def _send(self, to: int, message) -> None:
    send = functools.partial(self.endpoint.send, learner_address(to))
    if isinstance(message, Inherit):
      send(dataclasses.replace(message, payload=self._moments))
    elif not isinstance(message, Publish):
      send(message)
    elif self.replication is None:
      send(self._with_payload(message))
    else:
      publish = self._with_payload(message)
      self.replication.when_safe(publish.fragment, publish.version, lambda: send(publish))

  def _with_payload(self, publish: Publish) -> Publish:
    update = self.update.get(publish.fragment)
    if publish.base_version >= 0 and update is not None:
      return dataclasses.replace(publish, codec=update[0], payload=update[1])
    payload = codec.encode(self.committed[publish.fragment].view, "f32")
    return dataclasses.replace(publish, base_version=-1, codec="f32", payload=payload)

  def _note(self, kind: str, fields: Mapping) -> None:
    if kind == "commit":
      fields = {**fields, **self.last_commit[fields["fragment"]]}
    if kind == "lost":
      for p, version in fields["versions"].items():
        self.lost[p] = max(version, self.lost.get(p, 0))
    self.recorder.event(kind, **fields)
    if kind == "commit":
      self._announce(fields["fragment"])

  def _count_traffic(self, always: bool = False) -> None:
    now = time.monotonic()
    if always or now - self._traffic_at >= TRAFFIC_SECONDS:
      self._traffic_at = now
      self.recorder.event("traffic", **dataclasses.asdict(self.endpoint.counters))
