"""The roles of a virtual run: each drives its reducer as the runtime does."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ddiloco.core import learner, syncer
from ddiloco.core.fragments import owned_by, shard_of
from ddiloco.core.messages import Message, Publish, Push
from ddiloco.core.protocol import (
  Accept,
  Adopt,
  Apply,
  Commit,
  Cut,
  Give,
  Merged,
  Received,
  Record,
  Rejoin,
  Resend,
  Saved,
  Send,
  Stage,
  Staged,
  StepDone,
  Tick,
)
from ddiloco.core.syncer_state import FragmentState
from tests.core.ledger import Parameters

if TYPE_CHECKING:
  from tests.core.virtual import World

Role = tuple[str, int]  # ("learner", m) or ("syncer", s)
TICK_SECONDS = 0.05  # of a learner that cannot step
HEARTBEAT_SECONDS = 0.5


@dataclasses.dataclass(frozen=True)
class Part:
  """What a role has saved of itself for a snapshot."""

  incarnation: int
  state: Any  # of its reducer
  parameters: Parameters | None = None  # a learner's
  outbox: Mapping[int, Push] = dataclasses.field(default_factory=dict)  # its newest pushes
  learners: tuple[tuple[int, int], ...] = ()  # a shard's: number and incarnation of who is here


class Actor:
  def __init__(self, world: World, role: Role, incarnation: int):
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

  def __init__(self, world: World, role: Role, incarnation: int, part: Part | None):
    super().__init__(world, role, incarnation)
    sync = world.sync
    owners = tuple(shard_of(p, sync.num_shards) for p in range(sync.num_fragments))
    self._outbox: dict[int, Push] = {}
    if part is None:
      self.state = learner.init(self.number, incarnation, owners, world.target_tokens)
      self.parameters = world.ledger.new()
    else:
      self.state = learner.revive(part.state, incarnation, owners, world.target_tokens)
      self.parameters = part.parameters
      for p, push in part.outbox.items():
        self._outbox[p] = dataclasses.replace(push, incarnation=incarnation)
    self.random = random.Random(f"{world.seed} {role} {incarnation}")
    self.stepping = False
    self.step_times: list[float] = []
    self.idle_seconds = 0.0  # after its first step
    self._idle_since = self._reported_at = self._staged_at = world.now
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
    for action in actions:
      if isinstance(action, Apply):
        self.world.ledger.check(self, action.fragment)

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
        kept = self._outbox[push.fragment]
        self._outbox[push.fragment] = dataclasses.replace(kept, round=push.round)
        self._push(push)
      case Stage(publish):
        world.ledger.stage(self, publish)
        self._staged_at = max(self._staged_at, world.now) + world.pace.stage_seconds
        staged = Staged(publish.fragment, publish.version, self._staged_at)
        self.later(self._staged_at - world.now, self.receive, staged)
      case Apply():
        world.ledger.apply(self, action)
      case Give(value):
        given = dataclasses.replace(value, payload=world.ledger.give(self, value))
        shard = self.state.fragments[value.fragment].shard
        self.later(world.pace.cut_seconds, world.send, self, ("syncer", shard), given)
      case Record(snapshot, state):
        part = Part(self.incarnation, state, self.parameters, dict(self._outbox))
        self.later(world.pace.stage_seconds, world.save, snapshot, self.role, part)
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
      if self.step_times:
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
    self.world.ledger.step(self)
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

  def __init__(self, world: World, role: Role, incarnation: int, settle_at: float):
    super().__init__(world, role, incarnation)
    owned = owned_by(self.number, world.sync.num_shards, world.sync.num_fragments)
    newest = tuple(world.store[p] for p in owned)
    self.state = syncer.init(self.number, incarnation, newest, world.target_tokens, settle_at)
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
          if isinstance(message, Publish):
            assert message.round == world.ledger.held[message.fragment], "it has no other"
          self.later(self._busy_until - world.now, world.send, self, ("learner", to), message)
          continue
        case Accept():
          world.ledger.accept(action, event.message)
        case Record(snapshot, state, here):
          learners = tuple((m, state.members[m].incarnation) for m in here)
          part = Part(self.incarnation, state, learners=learners)
          self.later(world.pace.stage_seconds, world.save, snapshot, self.role, part)
          self.later(2 * world.pace.stage_seconds, self._saved)
        case Adopt():
          world.ledger.adopt(action, event.message.payload, self._keep(action.fragment))
        case Commit():
          world.ledger.commit(action, self._keep(action.fragment))
          self._busy_until += world.pace.merge_seconds
          merged = Merged(self._busy_until, world.pace.merge_seconds)
          self.state, _ = syncer.syncer_on(self.state, merged, world.sync)
      self.note(action)
    self._set_alarm()

  def _saved(self) -> None:
    self._handle(Saved(self.world.now))

  def _keep(self, fragment: int) -> FragmentState:
    f = next(f for f in self.state.fragments if f.index == fragment)
    self.world.store[fragment] = dataclasses.replace(f, round=None)
    return f

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
