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
from collections.abc import Callable, Mapping

from ddiloco.config import SyncConfig
from ddiloco.core import learner, syncer
from ddiloco.core.fragments import owned_by, shard_of
from ddiloco.core.messages import Message, Push
from ddiloco.core.protocol import (
  Accept,
  Apply,
  Commit,
  Cut,
  Merged,
  Received,
  Rejoin,
  Resend,
  Send,
  Stage,
  Staged,
  StepDone,
  Tick,
)
from ddiloco.core.syncer_state import FragmentState
from tests.core.ledger import Ledger

TICK_SECONDS = 0.05  # of a learner that cannot step
HEARTBEAT_SECONDS = 0.5


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
    self.ledger = ledger or Ledger(sync)
    self.store = {p: FragmentState(p) for p in range(sync.num_fragments)}
    self.measure: Callable[[Push], Mapping] = lambda push: {"norm": 1.0}
    self.history: list[tuple[float, Actor, object]] = []  # every action that is not a send
    self.actors: dict[tuple[str, int], Actor] = {}
    self.starts: dict[tuple[str, int], int] = {}
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

  def start(self, role: tuple[str, int]) -> None:
    """A new incarnation; what is in flight to or from the old one may still arrive."""
    incarnation = self.starts[role] = self.starts.get(role, -1) + 1
    kind = Learner if role[0] == "learner" else Shard
    self.actors[role] = kind(self, role, incarnation)

  def kill(self, role: tuple[str, int], for_seconds: float | None = None) -> None:
    if role in self.actors:
      self.actors.pop(role).alive = False
      if for_seconds is not None:
        self.at(self.now + for_seconds, self.start, role)

  def send(self, sender: Actor, to: tuple[str, int], message: Message) -> None:
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

  def _deliver(self, to: tuple[str, int], message: Message) -> None:
    if to in self.actors:
      self.actors[to].receive(message)

  def learners(self) -> list[Learner]:
    return [a for a in self.actors.values() if isinstance(a, Learner)]

  def commits(self, fragment: int | None = None) -> list[tuple[float, Commit]]:
    of = [(t, a) for t, _, a in self.history if isinstance(a, Commit)]
    return [(t, c) for t, c in of if fragment in (None, c.fragment)]


class Actor:
  def __init__(self, world: World, role: tuple[str, int], incarnation: int):
    self.world, self.role, self.number, self.incarnation = world, role, role[1], incarnation
    self.alive = True
    self.inbox: list = []

  def later(self, seconds: float, call: Callable, *args) -> None:
    """Calls unless this incarnation has died by then."""
    self.world.at(self.world.now + seconds, self._if_alive, call, args)

  def _if_alive(self, call: Callable, args: tuple) -> None:
    if self.alive:
      call(*args)

  def note(self, action: object) -> None:
    self.world.history.append((self.world.now, self, action))


class Learner(Actor):
  """Drives `learner_on` as runtime/learner.py does: between steps, never during one."""

  def __init__(self, world: World, role: tuple[str, int], incarnation: int):
    super().__init__(world, role, incarnation)
    sync = world.sync
    owners = tuple(shard_of(p, sync.num_shards) for p in range(sync.num_fragments))
    self.state = learner.init(self.number, incarnation, owners, world.target_tokens)
    self.random = random.Random(f"{world.seed} {role} {incarnation}")
    self.stepping = False
    self.step_times: list[float] = []
    self.idle_seconds = 0.0  # after its first step
    self._idle_since = self._reported_at = self._staged_at = world.now
    self._outbox: dict[int, Push] = {}
    self._ticking = False
    self._go_on()

  def receive(self, message: object) -> None:
    self.inbox.append(message)
    if not self.stepping:
      self._read()
      self._go_on()
      if self.alive and not self.stepping and not self.state.done:
        self._report()

  def drain(self) -> None:
    """Told to end: finishes its step, then leaves as soon as everything is merged."""
    self.state = learner.drain(self.state)
    if not self.stepping:
      self._report()
      self._go_on()

  def _read(self) -> None:
    inbox, self.inbox = self.inbox, []
    for item in inbox:
      staged = isinstance(item, Staged)
      self._feed(item if staged else Received(item, self.world.now))

  def _feed(self, event) -> None:
    if not self.alive:
      return
    self.state, actions = learner.learner_on(self.state, event, self.world.sync)
    for action in actions:
      self._perform(action)

  def _perform(self, action) -> None:
    world = self.world
    match action:
      case Send(shard, message):
        return world.send(self, ("syncer", shard), message)
      case Cut(push):
        payload = world.ledger.cut(self, push)
        self._outbox[push.fragment] = dataclasses.replace(push, payload=payload)
        self.later(world.pace.cut_seconds, self._push, push)
      case Resend(push):
        self._push(push)
      case Stage(publish):
        self._staged_at = max(self._staged_at, world.now) + world.pace.stage_seconds
        staged = Staged(publish.fragment, publish.version, self._staged_at)
        self.later(self._staged_at - world.now, self.receive, staged)
      case Apply():
        world.ledger.apply(self, action)
      case Rejoin():
        world.kill(self.role, for_seconds=0.0)
    self.note(action)

  def _push(self, push: Push) -> None:
    kept = self._outbox[push.fragment]
    if kept.round == push.round:  # else a newer cut replaced it
      shard = self.state.fragments[push.fragment].shard
      self.world.send(self, ("syncer", shard), kept)

  def _go_on(self) -> None:
    if not self.alive or self.stepping or self.state.done:
      return
    if self.world.training and learner.can_step(self.state, self.world.sync):
      if self.state.step:
        self.idle_seconds += self.world.now - self._idle_since
      pace = self.world.pace
      seconds = pace.step_seconds[self.number] * (1 + pace.jitter * self.random.random())
      self.stepping = True
      self.later(seconds, self._step_done, seconds)
    elif not self._ticking:
      self._ticking = True
      self.later(TICK_SECONDS, self._tick)

  def _step_done(self, seconds: float) -> None:
    self.stepping = False
    self.step_times.append(self.world.now)
    self._feed(StepDone(self.world.now, self.world.tokens_per_step, seconds))
    self._read()
    if self.alive and not self.state.done:
      self._report()
      self._idle_since = self.world.now
      self._go_on()

  def _report(self) -> None:
    self._reported_at = self.world.now
    for action in learner.reports(self.state):
      self._perform(action)

  def _tick(self) -> None:
    self._ticking = False
    if self.stepping:
      return
    self._feed(Tick(self.world.now))
    if self.world.now - self._reported_at >= HEARTBEAT_SECONDS and not self.state.done:
      self._report()
    self._go_on()


class Shard(Actor):
  """Drives `syncer_on` as runtime/syncer.py does; a commit keeps it busy for a while."""

  def __init__(self, world: World, role: tuple[str, int], incarnation: int):
    super().__init__(world, role, incarnation)
    owned = owned_by(self.number, world.sync.num_shards, world.sync.num_fragments)
    self.state = syncer.init(
      self.number, incarnation, tuple(world.store[p] for p in owned), world.target_tokens
    )
    self._busy_until = self._alarm_at = self._rang_at = world.now
    self._rings = 0

  def receive(self, message: Message) -> None:
    self.inbox.append(message)
    if len(self.inbox) == 1:
      self.later(max(0.0, self._busy_until - self.world.now), self._work)

  def _work(self) -> None:
    message = self.inbox.pop(0)
    measured = self.world.measure(message) if isinstance(message, Push) else {}
    self._handle(Received(message, self.world.now, **measured))
    if self.inbox:
      self.later(max(0.0, self._busy_until - self.world.now), self._work)

  def _handle(self, event) -> None:
    world = self.world
    self.state, actions = syncer.syncer_on(self.state, event, world.sync)
    self._busy_until = world.now
    for action in actions:
      match action:
        case Send(to, message):
          self.later(self._busy_until - world.now, world.send, self, ("learner", to), message)
          continue
        case Accept():
          world.ledger.accept(action, event.message)
        case Commit():
          f = next(f for f in self.state.fragments if f.index == action.fragment)
          world.store[f.index] = dataclasses.replace(f, round=None)
          world.ledger.commit(action)
          self._busy_until += world.pace.merge_seconds
          merged = Merged(self._busy_until, world.pace.merge_seconds)
          self.state, _ = syncer.syncer_on(self.state, merged, world.sync)
      self.note(action)
    self._set_alarm()

  def _set_alarm(self) -> None:
    wake_at = syncer.next_wake(self.state, self.world.sync)
    if wake_at is not None and not self.world.now < self._alarm_at <= wake_at:
      self._alarm_at = max(wake_at, self._busy_until)
      self.later(self._alarm_at - self.world.now, self._alarm, wake_at)

  def _alarm(self, wake_at: float) -> None:
    due_at = syncer.next_wake(self.state, self.world.sync)
    if due_at is not None and due_at <= self.world.now:
      self._handle(Tick(self.world.now))
      self._rings = self._rings + 1 if self._rang_at == self.world.now else 0
      self._rang_at = self.world.now
      assert self._rings < 5, "the alarm rings again and again at the same time: a busy loop"
    else:
      self._set_alarm()
