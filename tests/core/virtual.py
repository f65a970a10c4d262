"""A whole run in virtual time: the real reducers, with islands, shards and network simulated.

One heap of things to come, one seed, no threads: a world replays exactly. Each role is driven as
the runtime drives it: a learner only between inner steps, a shard by every message and its alarm.
A ledger, where there is one, plays the parameters and checks what happens to every step.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import random
from collections.abc import Callable, Collection, Mapping

from ddiloco.config import SyncConfig
from ddiloco.core import causality
from ddiloco.core.fragments import owned_by
from ddiloco.core.messages import Message, Push
from ddiloco.core.protocol import (
  Commit,
)
from ddiloco.core.syncer_state import FragmentState
from tests.core.actors import Actor, Learner, Part, Role, Shard
from tests.core.ledger import Ledger


@dataclasses.dataclass(frozen=True)
class Weather:
  """What the network does to every message; a calm one delivers all, in order per pair."""

  delay_seconds: tuple[float, float] = (0.001, 0.004)
  drop: float = 0.0
  duplicate: float = 0.0
  reorder: bool = False
  lost_kinds: tuple[type, ...] = ()  # none of these arrives


@dataclasses.dataclass(frozen=True)
class Pace:
  """How long work takes. Steps vary by up to `jitter` of their length."""

  step_seconds: tuple[float, ...]  # by learner
  jitter: float = 0.1
  cut_seconds: float = 0.004
  stage_seconds: float = 0.004
  merge_seconds: float = 0.004


class World:
  """M learners and S shards. `actors` maps ("learner", m) and ("syncer", s) to who lives now."""

  def __init__(
    self,
    sync: SyncConfig,
    pace: Pace,
    seed: int = 0,
    weather: Weather = Weather(),
    target_tokens: int = 1 << 60,
    tokens_per_step: int = 10,
    ledger: Ledger | None = None,
  ):
    self.sync, self.pace, self.seed, self.weather = sync, pace, seed, weather
    self.target_tokens, self.tokens_per_step = target_tokens, tokens_per_step
    self.now = 0.0
    self.training = True  # False: nobody starts another step
    self.random = random.Random(f"network {seed}")
    self.ledger = ledger or Ledger(sync, tokens_per_step)
    self.store = {p: FragmentState(p) for p in range(sync.num_fragments)}
    self.parts: dict[tuple[int, Role], Part] = {}  # by snapshot and role
    self.cuts: dict[int, dict[Role, Part]] = {}  # the complete ones: what a manifest would list
    self.measure: Callable[[Push], Mapping] = lambda push: {"norm": 1.0}
    self.history: list[tuple[float, Actor, object]] = []  # every action that is not a send
    self.actors: dict[Role, Actor] = {}
    self.starts: dict[Role, int] = {}  # its newest incarnation
    self._newest = 0  # of all
    self._heap: list = []
    self._order = itertools.count()
    self._last_arrival: dict = {}
    for s in range(sync.num_shards):
      self.start(("syncer", s))
    for m in range(len(pace.step_seconds)):
      self.start(("learner", m))

  def at(self, time: float, call: Callable, *args) -> None:
    heapq.heappush(self._heap, (time, next(self._order), call, args))

  def run(self, until: float, stop: Callable[[], bool] = lambda: False) -> None:
    """Lets everything happen that happens before `until`, or before `stop()`."""
    while self._heap and self._heap[0][0] <= until and not stop():
      self.now, _, call, args = heapq.heappop(self._heap)
      call(*args)

  def start(self, role: Role, part: Part | None = None, settle_seconds: float = 0.0) -> None:
    """A new incarnation; what is in flight to or from the old one may still arrive.

    What it saved of snapshots that were never complete is of a future that it knows nothing of.
    """
    if role in self.actors:
      return
    self.parts = {k: v for k, v in self.parts.items() if k[1] != role or k[0] in self.cuts}
    self._newest += role in self.starts
    self.starts[role] = self._newest
    if role[0] == "learner":
      self.actors[role] = Learner(self, role, self._newest, part)
    else:
      self.actors[role] = Shard(self, role, self._newest, self.now + settle_seconds)

  def restore(self, role: Role, snapshot: int | None, settle_seconds: float = 0.0) -> None:
    """Starts a role with its part of a complete snapshot, or with nothing at all."""
    self.kill(role)
    if role[0] == "syncer":
      self._put_back(snapshot, owned_by(role[1], self.sync.num_shards, self.sync.num_fragments))
    self.start(role, self.cuts[snapshot].get(role) if snapshot else None, settle_seconds)

  def _put_back(self, snapshot: int | None, fragments: Collection[int]) -> None:
    saved = {p: FragmentState(p) for p in fragments}
    for role, part in self.cuts.get(snapshot or 0, {}).items():
      if role[0] == "syncer":
        saved |= {f.index: f for f in part.state.fragments if f.index in saved}
    for p, f in saved.items():
      self.store[p] = dataclasses.replace(f, round=None)
      self.ledger.hold(self.store[p])

  def restore_all(self, num_shards: int = 0, num_learners: int = 0) -> int | None:
    """Kills everybody, the network too; all start from the newest complete snapshot, if any."""
    for role in list(self.actors):
      self.kill(role)
    self._heap = [entry for entry in self._heap if entry[2] != self._deliver]
    heapq.heapify(self._heap)
    self.sync = dataclasses.replace(self.sync, num_shards=num_shards or self.sync.num_shards)
    snapshot = max(self.cuts, default=None)
    cut = self.cuts.get(snapshot or 0, {})
    self.parts = {k: v for k, v in self.parts.items() if k[0] in self.cuts}
    self._put_back(snapshot, range(self.sync.num_fragments))
    self._newest += 1
    for s in range(self.sync.num_shards):
      self.start(("syncer", s))
    for m in range(num_learners or len(self.pace.step_seconds)):
      self.start(("learner", m), cut.get(("learner", m)))
    return snapshot

  def save(self, snapshot: int, role: Role, part: Part) -> None:
    """Keeps a part, once; with the last one the snapshot is complete, and must be consistent."""
    self.parts.setdefault((snapshot, role), part)
    of_shards = [self.parts.get((snapshot, ("syncer", s))) for s in range(self.sync.num_shards)]
    if snapshot in self.cuts or None in of_shards:
      return
    here = {("learner", m): i for shard in of_shards for m, i in shard.learners}
    wanted = [r for r, i in here.items() if r in self.actors and self.actors[r].incarnation == i]
    wanted += [("syncer", s) for s in range(self.sync.num_shards)]
    if all((snapshot, r) in self.parts for r in wanted):
      self.cuts[snapshot] = {r: self.parts[snapshot, r] for r in wanted}
      self.check_cut(self.cuts[snapshot])

  def check_cut(self, cut: Mapping[Role, Part]) -> None:
    seen = {
      n if kind == "learner" else causality.shard_key(n): part.state.seen
      for (kind, n), part in cut.items()
    }
    assert not causality.violations(seen), f"no cut: {causality.violations(seen)} of {seen}"
    learners = {r[1]: (v.incarnation, v.parameters) for r, v in cut.items() if r[0] == "learner"}
    shards = [part for role, part in cut.items() if role[0] == "syncer"]
    fragments = {f.index: (v.incarnation, f) for v in shards for f in v.state.fragments}
    self.ledger.check_cut(learners, fragments)

  def kill(self, role: Role, for_seconds: float | None = None) -> None:
    if role in self.actors:
      self.actors.pop(role).alive = False
      if for_seconds is not None:
        self.at(self.now + for_seconds, self.start, role)

  def send(self, sender: Actor, to: Role, message: Message) -> None:
    w = self.weather
    if isinstance(message, w.lost_kinds) or (w.drop and self.random.random() < w.drop):
      return
    copies = 2 if w.duplicate and self.random.random() < w.duplicate else 1
    for _ in range(copies):
      arrival = self.now + self.random.uniform(*w.delay_seconds)
      if not w.reorder:
        pair = sender.role, to
        arrival = self._last_arrival[pair] = max(arrival, self._last_arrival.get(pair, 0.0))
      self.at(arrival, self._deliver, to, message)

  def _deliver(self, to: Role, message: Message) -> None:
    if to in self.actors:
      self.actors[to].receive(message)

  def learners(self) -> list[Learner]:
    return [a for a in self.actors.values() if isinstance(a, Learner)]

  def commits(self, fragment: int | None = None) -> list[tuple[float, Commit]]:
    of = [(t, a) for t, _, a in self.history if isinstance(a, Commit)]
    return [(t, c) for t, c in of if fragment in (None, c.fragment)]
