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
from ddiloco.core import codec, merge, outer, syncer
from ddiloco.core.fragments import Fragment, Plan, owned_by
from ddiloco.core.messages import BETWEEN_SHARDS, Publish, Push
from ddiloco.core.protocol import Abandon, Accept, Commit, Merged, Note, Received, Send, Tick
from ddiloco.core.syncer_state import FragmentState
from ddiloco.observe.events import Recorder
from ddiloco.resilience.chaos import Faults
from ddiloco.runtime.replica import Replication
from ddiloco.runtime.store import Committed, FragmentStore
from ddiloco.runtime.transport import Endpoint, learner_address

LONGEST_WAIT_SECONDS = 0.5  # between two looks at faults and the stop signal
TRAFFIC_SECONDS = 1.0


@dataclasses.dataclass
class Arrivals:
  """The outer gradients of one round so far, in order of arrival."""

  round: int
  learners: list[int]
  deltas: list[np.ndarray]
  gram: np.ndarray  # f64 [pieces, M, M]


class Syncer:
  """One incarnation of a shard.

  Args:
    shard: which one; it owns the fragments `owned_by(shard, ...)`.
    incarnation: how often this shard was started before.
    config: the run's.
    plan: how the model is cut; the same on every role.
    endpoint: this shard's connection.
    store: where committed fragments live; must hold the initial values of version 0.
    recorder: event log.
    faults: planned faults of this role.
    replication: copies on other shards, of and for this one; None: the store outlives this role.
  """

  def __init__(
    self,
    shard: int,
    incarnation: int,
    config: Config,
    plan: Plan,
    endpoint: Endpoint,
    store: FragmentStore,
    recorder: Recorder,
    faults: Faults,
    replication: Replication | None = None,
  ):
    self.config = config
    self.endpoint = endpoint
    self.store = store
    self.recorder = recorder
    self.faults = faults
    self.replication = replication
    self.lost: dict[int, int] = {}  # fragment -> version that somebody had and this shard never
    owned = owned_by(shard, config.sync.num_shards, config.sync.num_fragments)
    self.fragments: dict[int, Fragment] = {p: plan.fragments[p] for p in owned}
    self.committed: dict[int, Committed] = {p: store.load(p) for p in owned}
    self.arrivals: dict[int, Arrivals] = {}
    self.update: dict[int, tuple[str, np.ndarray]] = {}  # fragment -> newest update, encoded
    self.last_commit: dict[int, Mapping] = {}  # fragment -> weights and seconds, for the event log
    self.state = syncer.init(
      shard,
      incarnation,
      tuple(self.committed[p].state for p in owned),
      config.run.total_tokens,
    )
    self._traffic_at = 0.0
    recorder.event("started", fragments=list(owned))

  def run(self, stopped: Callable[[], bool]) -> None:
    """Serves until `stopped()`."""
    while not stopped():
      self.faults.check(self.state.clock)
      wake_at = syncer.next_wake(self.state, self.config.sync)
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
      self.faults.drag(time.monotonic() - started)
      self._count_traffic()
    self._count_traffic(always=True)

  def _event(self, message) -> Received:
    """Decodes a push and measures it, so that the reducer can judge it."""
    now = time.monotonic()
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
        case Abandon(fragment):
          self.arrivals.pop(fragment, None)
        case Note(kind, fields):
          self._note(kind, fields)

  def _accept(self, accept: Accept) -> None:
    delta, squares = self._arrived
    fragment = self.fragments[accept.fragment]
    arrivals = self.arrivals.get(accept.fragment)
    if arrivals is None or arrivals.round != accept.round:
      arrivals = Arrivals(accept.round, [], [], merge.empty_gram(fragment))
      self.arrivals[accept.fragment] = arrivals
    arrivals.gram = merge.extend_gram(fragment, arrivals.gram, arrivals.deltas, delta, squares)
    arrivals.learners.append(accept.learner)
    arrivals.deltas.append(delta)

  def _commit(self, commit: Commit) -> None:
    started = time.monotonic()
    fragment, old = self.fragments[commit.fragment], self.committed[commit.fragment]
    arrivals = self.arrivals.pop(commit.fragment)
    order = [arrivals.learners.index(m) for m in commit.learners]
    weights = merge.token_weights(commit.steps, commit.tokens)
    factors = merge.coefficients(fragment, merge.select_gram(arrivals.gram, order), weights)
    deltas = [arrivals.deltas[i] for i in order]
    momentum = old.momentum
    if momentum is None:
      momentum = outer.init(fragment.size, self.config.outer)
    value = merge.commit(fragment, old.value, momentum, deltas, factors, self.config.outer)
    view = self._encode_update(fragment, old.view, value)
    state = next(f for f in self.state.fragments if f.index == commit.fragment)
    committed = Committed(dataclasses.replace(state, round=None), value, view, momentum)
    self.store.save(committed)  # before anybody hears of it
    self.committed[commit.fragment] = committed
    if self.replication is not None:
      self.replication.committed(committed)
    seconds = time.monotonic() - started
    self.state, _ = syncer.syncer_on(
      self.state, Merged(time.monotonic(), seconds), self.config.sync
    )
    participants = {str(m): round(float(w), 6) for m, w in zip(commit.learners, weights)}
    self.last_commit[commit.fragment] = {"participants": participants, "merge_seconds": seconds}

  def _encode_update(self, fragment: Fragment, view: np.ndarray, value: np.ndarray) -> np.ndarray:
    """What learners will have: `value`, or with a lossy codec what its rounded update makes of it.

    Rounding errors do not add up: the next update is taken from what learners really have.
    """
    if self.config.sync.publish_codec == "f32":
      return value
    payload = codec.encode(value - view, self.config.sync.publish_codec)
    self.update[fragment.index] = (self.config.sync.publish_codec, payload)
    return view + codec.decode(payload, fragment.size, self.config.sync.publish_codec)

  def _send(self, to: int, message) -> None:
    send = functools.partial(self.endpoint.send, learner_address(to))
    if not isinstance(message, Publish):
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

  def _count_traffic(self, always: bool = False) -> None:
    now = time.monotonic()
    if always or now - self._traffic_at >= TRAFFIC_SECONDS:
      self._traffic_at = now
      self.recorder.event("traffic", **dataclasses.asdict(self.endpoint.counters))


def new_fragment(fragment: Fragment, value: np.ndarray) -> Committed:
  """Version 0 of a fragment: its initial value, before any round."""
  return Committed(FragmentState(fragment.index), value, value, None)
