"""The roles of a virtual run: each drives its reducer as the runtime does."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from ddiloco.chaos.faults import Faults, Killed
from ddiloco.core.fragments import owned_by, shard_of
from ddiloco.protocol import learner, syncer
from ddiloco.protocol.actions import (
  Commit,
  CopyOut,
  InstallValue,
  Merged,
  Received,
  Rejoin,
  Resend,
  Saved,
  Send,
  SendValue,
  Stage,
  Staged,
  StepDone,
  TakeSnapshot,
  Tick,
)
from ddiloco.protocol.messages import Message, Publish, Push
from ddiloco.protocol.syncer_state import FragmentState
from ddiloco.protocol.values import replace

if TYPE_CHECKING:
  from ddiloco.simulation.disturbances import Pause
  from ddiloco.simulation.world import World

Role = tuple[str, int]  # ("learner", m) or ("syncer", s)
HEARTBEAT_SECONDS = 0.5  # of a learner that cannot step


@dataclasses.dataclass(frozen=True)
class VirtualPart:
  """What a role has saved of itself for a snapshot."""

  incarnation: int
  state: Any  # of its reducer
  parameters: Any = None  # a learner's, if an observer plays them
  outbox: Mapping[int, Push] = dataclasses.field(default_factory=dict)  # its newest pushes
  learners: tuple[tuple[int, int], ...] = ()  # a shard's: number and incarnation of who is here


class Actor:
  """One incarnation of a role. `faults`: what strikes it, over all its incarnations."""

  state: Any
  parameters: Any = None

  def __init__(self, world: World, role: Role, incarnation: int):
    self.world, self.role, self.number, self.incarnation = world, role, role[1], incarnation
    self.alive = True
    self.born_at = world.now
    self.faults: Faults | None = world.disturbances.of(role)
    self.inbox: collections.deque = collections.deque()
    self._held_until = 0.0

  def receive(self, message: Any) -> None:
    raise NotImplementedError

  def wake(self) -> None:
    """A planned fault is due: strikes it, unless the role is busy and will look for itself."""
    raise NotImplementedError

  def drain(self) -> None:
    """Told to end: a shard does not."""

  def leave(self, reason: str) -> None:
    """Told to end at once."""

  def later(self, seconds: float, call: Callable, *args) -> None:
    """Calls unless this incarnation has died by then."""
    self.world.at(self.world.now + seconds, self._if_alive, call, args)

  def _if_alive(self, call: Callable, args: tuple) -> None:
    if self.alive:
      call(*args)

  def free(self, then: Callable[[], None]) -> bool:
    """Strikes what is due. False: this life is over, or stands still until it calls `then`."""
    if self.faults is None:
      return True
    if self.world.now >= self._held_until:
      try:
        self.faults.check(self.state.global_step)
      except Killed as killed:
        self.world.disturbances.lose(self, killed)
        return False
      self._held_until = self.world.now + self._pause().take()
    if self.world.now >= self._held_until:
      return True
    self.later(self._held_until - self.world.now, then)
    return False

  def dragged(self, seconds: float) -> float:
    """How long work of so many seconds takes now."""
    if self.faults is None:
      return seconds
    self.faults.drag(seconds)
    return seconds + self._pause().take()

  def _pause(self) -> Pause:
    assert self.faults is not None
    return cast("Pause", self.faults.stopped)

  def save(self, snapshot: int, part: VirtualPart) -> None:
    """Its part of a snapshot is on disk after a while, unless that is full."""
    world, reason = self.world, ""
    try:
      if self.faults is not None:
        self.faults.disk()
      self.later(world.pace.stage_seconds, world.save, snapshot, self.role, part)
    except OSError as error:
      reason = str(error)
    world.observer.saved(snapshot, self.role, world.pace.stage_seconds, reason)


class Learner(Actor):
  """Drives `learner_on` as roles/learner.py does: between steps, never during one."""

  def __init__(self, world: World, role: Role, incarnation: int, part: VirtualPart | None):
    super().__init__(world, role, incarnation)
    sync = world.sync
    owners = tuple(shard_of(p, sync.num_shards) for p in range(sync.num_fragments))
    self._outbox: dict[int, Push] = {}
    if part is None:
      self.state = learner.init(self.number, incarnation, owners, world.target_tokens)
    else:
      self.state = learner.revive(part.state, incarnation, owners, world.target_tokens)
      for p, push in part.outbox.items():
        self._outbox[p] = replace(push, incarnation=incarnation)
    self._part = part
    self.random = random.Random(f"{world.seed} {role} {incarnation}")
    self.stepping = False  # or standing still: it looks at nothing
    self.step_times: list[float] = []
    self.idle_seconds = 0.0  # after its first step
    self._idle_since = self._reported_at = self._staged_at = world.now
    self._blocked_seconds = 0.0  # before the step under way
    self._alarm_at = math.inf

  def begin(self) -> None:
    self.world.actors[self.role] = self
    self.world.observer.born(self, self._part)
    self._part = None
    self._go_on()

  def receive(self, message: object) -> None:
    self.inbox.append(message)
    if not self.stepping:
      self._look()

  def _look(self) -> None:
    """Takes in what has arrived, and goes on."""
    self._read()
    self._go_on()
    if self.alive and not self.stepping and not self.state.done:
      self._report()

  def wake(self) -> None:
    if not self.stepping:
      self._go_on()

  def _awake(self) -> None:
    """It stood still."""
    self.stepping = False
    self._idle_since = self.world.now
    self._look()

  def drain(self) -> None:
    """Told to end: finishes its step, then leaves as soon as everything is merged."""
    self.state = learner.drain(self.state)
    if not self.stepping:
      self._report()
      self._go_on()

  def leave(self, reason: str) -> None:
    if self.alive and not self.state.done:
      self.state, actions = learner.leave(self.state, reason)
      self._perform_all(actions, None)

  def _read(self) -> None:
    inbox, self.inbox = self.inbox, collections.deque()
    for item in inbox:
      staged = isinstance(item, Staged)
      self._feed(item if staged else Received(item, self.world.now))

  def _feed(self, event) -> None:
    if not self.alive:
      return
    self.state, actions = learner.learner_on(self.state, event, self.world.sync)
    self._perform_all(actions, event)

  def _perform_all(self, actions: list, event: Any) -> None:
    for action in actions:
      self._perform(action, event)
    if actions:
      self.world.observer.performed(self, actions)
    if self.state.done:
      self.world.working.discard(self.role)

  def _perform(self, action, event: Any) -> None:
    world = self.world
    if isinstance(action, Send):
      return world.send(self, ("syncer", action.to), action.message)
    payload = world.observer.on(self, action, event)
    match action:
      case CopyOut(push):
        self._outbox[push.fragment] = replace(push, payload=payload)
        self.later(world.pace.cut_seconds, self._push_first, push)
      case Resend(push):
        kept = self._outbox[push.fragment]
        self._outbox[push.fragment] = replace(kept, round=push.round)
        self._push(push)
      case Stage(publish):
        self._staged_at = max(self._staged_at, world.now) + world.pace.stage_seconds
        staged = Staged(publish.fragment, publish.version, self._staged_at)
        self.later(self._staged_at - world.now, self.receive, staged)
      case SendValue(value):
        given = replace(value, payload=payload)
        shard = self.state.fragments[value.fragment].shard
        self.later(world.pace.cut_seconds, world.send, self, ("syncer", shard), given)
      case TakeSnapshot(snapshot, state):
        part = VirtualPart(self.incarnation, state, self.parameters, dict(self._outbox))
        self.save(snapshot, part)
      case Rejoin(reason):
        world.rejoin(self, reason)

  def _push_first(self, push: Push) -> None:
    self.world.observer.pushed(self, push)
    self._push(push)

  def _push(self, push: Push) -> None:
    kept = self._outbox[push.fragment]
    if kept.round == push.round:  # else a newer cut replaced it
      shard = self.state.fragments[push.fragment].shard
      self.world.send(self, ("syncer", shard), kept)

  def _go_on(self) -> None:
    if not self.alive or self.stepping or self.state.done:
      return
    if not self.free(self._awake):
      self.stepping = True
    elif self.world.training and learner.can_step(self.state, self.world.sync):
      if self.step_times:
        self._blocked_seconds = self.world.now - self._idle_since
        self.idle_seconds += self._blocked_seconds
      pace = self.world.pace
      seconds = pace.step_seconds[self.number] * (1 + pace.jitter * self.random.random())
      seconds = self.dragged(seconds)
      self.stepping = True
      self.later(seconds, self._step_done, seconds)
    else:
      self._set_alarm()

  def _step_done(self, seconds: float) -> None:
    world = self.world
    self.stepping = False
    gap = world.now - self.step_times[-1] if self.step_times else seconds
    self.step_times.append(world.now)
    done = StepDone(world.now, world.pace.step_tokens(self.number), seconds)
    world.observer.stepped(self, done, gap, self._blocked_seconds)
    self._feed(done)
    self._read()
    if self.alive and self.state.global_step > world.global_step:
      world.global_step = self.state.global_step
      world.disturbances.advance()
    if self.alive and not self.state.done:
      self._report()
      self._idle_since = world.now
      self._go_on()

  def _report(self) -> None:
    self._reported_at = self.world.now
    for action in learner.reports(self.state):
      self.world.send(self, ("syncer", action.to), action.message)

  def _set_alarm(self) -> None:
    """For when it has something to say though nothing comes."""
    wake_at = min(learner.next_wake(self.state), self._reported_at + HEARTBEAT_SECONDS)
    if wake_at < self._alarm_at:
      self._alarm_at = wake_at
      self.later(max(0.0, wake_at - self.world.now), self._alarm, wake_at)

  def _alarm(self, wake_at: float) -> None:
    if wake_at != self._alarm_at:
      return  # an earlier one was set after this
    self._alarm_at = math.inf
    if self.stepping:
      return
    self._feed(Tick(self.world.now))
    if self.world.now >= self._reported_at + HEARTBEAT_SECONDS and not self.state.done:
      self._report()
    self._go_on()


class Shard(Actor):
  """Drives `syncer_on` as roles/syncer.py does; a commit keeps it busy for a while."""

  def __init__(self, world: World, role: Role, incarnation: int, recovery_deadline: float):
    super().__init__(world, role, incarnation)
    owned = owned_by(self.number, world.sync.num_shards, world.sync.num_fragments)
    newest = tuple(world.store[p] for p in owned)
    self.state = world.new_shard(self.number, incarnation, newest, recovery_deadline)
    self._busy_until = self._alarm_at = self._rang_at = world.now
    self._rings = 0
    self.merging_seconds = 0.0  # of the newest commit

  def begin(self) -> None:
    self.world.actors[self.role] = self
    self.world.observer.born(self, None)

  def receive(self, message: Message) -> None:
    self.inbox.append((self.world.now, message))
    if len(self.inbox) == 1:
      self.later(max(0.0, self._busy_until - self.world.now), self._work)

  def wake(self) -> None:
    if not self.inbox:
      self.free(self.wake)

  def _work(self) -> None:
    if not self.free(self._work):
      return
    arrived, self.inbox = self.inbox, collections.deque()
    for at, message in arrived:
      self._handle(Received(message, at, **self.world.measured(message)))
    self._handle(Tick(self.world.now))
    self._set_alarm()

  def _handle(self, event) -> None:
    world = self.world
    self.state, actions = syncer.syncer_on(self.state, event, world.sync)
    self._busy_until = max(self._busy_until, world.now)
    for action in actions:
      if isinstance(action, Send):
        self._send(action)
        continue
      if isinstance(action, InstallValue | Commit):
        world.store[action.fragment] = replace(self.fragment(action.fragment), round=None)
      if isinstance(action, Commit):
        merging = world.merge_seconds(action.fragment, len(action.learners))
        self.merging_seconds = self.dragged(merging)
      world.observer.on(self, action, event)
      match action:
        case TakeSnapshot(snapshot, state, here):
          learners = tuple((m, state.members[m].incarnation) for m in here)
          self.save(snapshot, VirtualPart(self.incarnation, state, learners=learners))
          self.later(2 * world.pace.stage_seconds, self._saved)
        case Commit():
          self._busy_until += self.merging_seconds
          merged = Merged(self._busy_until, self.merging_seconds)
          self.state, _ = syncer.syncer_on(self.state, merged, world.sync)

  def _send(self, send: Send) -> None:
    """A commit's versions leave when they are merged."""
    world = self.world
    if isinstance(send.message, Publish):
      world.observer.published(self, send.message)
    to = ("learner", send.to)
    self.later(self._busy_until - world.now, world.send, self, to, send.message)

  def fragment(self, index: int) -> FragmentState:
    """One of its own."""
    return next(f for f in self.state.fragments if f.index == index)

  def _saved(self) -> None:
    self._handle(Saved(self.world.now))
    self._handle(Tick(self.world.now))
    self._set_alarm()

  def _set_alarm(self) -> None:
    wake_at = syncer.next_wake(self.state, self.world.sync)
    if wake_at is not None and not self.world.now < self._alarm_at <= wake_at:
      self._alarm_at = max(wake_at, self._busy_until)
      self.later(self._alarm_at - self.world.now, self._alarm, wake_at)

  def _alarm(self, wake_at: float) -> None:
    if not self.free(functools.partial(self._alarm, wake_at)):
      return
    due_at = syncer.next_wake(self.state, self.world.sync)
    if due_at is not None and due_at <= self.world.now:
      self._handle(Tick(self.world.now))
      self._set_alarm()
      self._rings = self._rings + 1 if self._rang_at == self.world.now else 0
      self._rang_at = self.world.now
      assert self._rings < 5, "the alarm rings again and again at the same time: a busy loop"
    else:
      self._set_alarm()
