"""A whole run in virtual time: the real roles, with stand-ins for islands, links, disks, vectors.

One heap of planned calls, one seed, no threads: a world replays exactly. Roles run their own loops
(`ddiloco/roles`). An `Actor` is a role's clock, connection and recorder; stand-ins, which know
sizes and costs, replace all objects that would touch vectors. Planned faults are decided by the
same code as in a real run (`chaos.py`), with the world's clock.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddiloco import chaos
from ddiloco.chaos import Faults, Killed
from ddiloco.checkpoint.buddy import Replication
from ddiloco.checkpoint.restore import begin_learner, new_learner, new_syncer
from ddiloco.checkpoint.saver import Saver
from ddiloco.config import Config, Fault, SyncConfig
from ddiloco.core.delta import Committed, Deltas, Merger, Store
from ddiloco.core.fragments import Fragment, Plan
from ddiloco.network.transport import Counters, Delivery, claimed_sender
from ddiloco.protocol import events, supervisor
from ddiloco.protocol.events import Event, Step, format_role, parse_role, stamped
from ddiloco.protocol.messages import BULK, FragmentState, Message
from ddiloco.protocol.values import replace
from ddiloco.roles.learner import Learner, Quarantined
from ddiloco.roles.syncer import Syncer
from ddiloco.runtime import Loop, Runtime
from ddiloco.simulation.bandwidth import F32_BYTES
from ddiloco.simulation.stand_ins import (
  Sized,
  SizedDeltas,
  SizedMerger,
  VirtualIsland,
  VirtualStorage,
  plan_of,
)
from ddiloco.simulation.virtual_time import HEADER_BYTES, Role, Task, VirtualTime, VirtualWorker


@dataclasses.dataclass(frozen=True)
class Pace:
  """How long work takes. Steps vary by up to `jitter` of their length."""

  step_seconds: tuple[float, ...]  # by learner
  jitter: float = 0.1
  copy_out_seconds: float = 0.004  # a copy from the devices to the host
  stage_seconds: float = 0.004  # a copy back to the devices; or writing a part of a snapshot
  merge_seconds: float = 0.004  # a commit; taking in a push takes a quarter of this
  late_seconds: float = 0.0  # a life's first step takes up to this longer
  # GB/s of f32 that a learner's host and a shard touch; what this takes comes on top.
  host_gbytes: float = math.inf
  merge_gbytes: float = math.inf


class Actor:
  """One incarnation of a role: its clock, its connection and its recorder, a few lines each.

  Attributes:
    life: the role itself, `roles.learner.Learner` or `roles.syncer.Syncer`.
    alive: the role was not killed; it may have ended by itself.
    asked_to_end: the role was told to end in good order.
  """

  life: Any = None

  def __init__(self, world: World, role: Role, incarnation: int, faults: Faults):
    self.world, self.number, self.incarnation, self.faults = world, role[1], incarnation, faults
    self.role, self.name = role, format_role(*role)
    self.alive, self.asked_to_end = True, False
    self.born_at = world.now
    self.counters = Counters()
    self._inbox: collections.deque[Delivery] = collections.deque()
    self._task: Task  # from `begin` on
    self._workers: list[VirtualWorker] = []

  @property
  def state(self) -> Any:
    """The state of its reducer."""
    return self.life.exchange.state if self.role[0] == "learner" else self.life.state

  def runtime(self) -> Runtime:
    """The runtime of its role."""
    world, saver = self.world, None
    if world.sync.snapshot_steps:
      saver = Saver(world.storage, self.name, self.incarnation, self, self.faults.disk, self)
    return Runtime(
      world.config,
      world.plan,
      self,
      self,
      saver,
      time=self,
      deltas=lambda sync: world.deltas(self),
      merger=lambda fragments, store, config, in_place: world.merger(self, fragments),
      initial=world.initial_values,
    )

  def begin(self, loop: Loop[None]) -> None:
    """Starts its role's loop."""
    ended = functools.partial(self.world.ended, self)
    self._task = Task(self.world, loop, lambda: self.receive(0.0), ended)

  def die(self) -> None:
    """Kills the role: nothing that it does afterwards is seen."""
    self.alive = False
    self._task.end()
    for worker in self._workers:
      worker.close()

  def drain(self) -> None:
    """Tells the role to end in good order."""
    self.asked_to_end = True
    self.wake()

  # --- a clock ------------------------------------------------------------------------------------

  def now(self) -> float:
    return self.world.clock()

  def sleep(self, seconds: float) -> None:
    self.world.spend(seconds)

  def worker(
    self,
    name: str,
    begin: Callable[[], None] = lambda: None,
    failed: Callable[[], None] = lambda: None,
  ) -> VirtualWorker:
    self._workers.append(VirtualWorker(self.world))
    return self._workers[-1]

  # --- a connection -------------------------------------------------------------------------------

  def send(self, to: str, message: Message) -> int:
    if self.world.spent:
      raise RuntimeError(f"{self.name} sends before its work is over: a None is missing in a loop")
    if not self.alive:
      return 0
    size = self.world.send(self, parse_role(to), message)
    self.counters.sent_bytes += size
    return size

  def deliver(self, message: Message, size: int) -> None:
    """Puts a message that has arrived into the inbox."""
    if not self._task.over:
      self.counters.received_bytes += size
      self._inbox.append(Delivery(claimed_sender(message), message, self.world.now))
      self._task.arrived()

  def receive(self, timeout_seconds: float) -> Delivery | None:
    return self._inbox.popleft() if self._inbox else None

  @property
  def waiting(self) -> int:
    return len(self._inbox)

  def unsent(self, peer: str) -> int:
    return self.world.unsent(self.role, parse_role(peer))

  def wake(self) -> None:
    self._task.wake()

  def close(self) -> None:
    self._inbox.clear()

  # --- a recorder ---------------------------------------------------------------------------------

  def record(self, event: Event) -> None:
    if not self.alive:
      return
    world = self.world
    event = stamped(event, world.clock(), self.name, self.incarnation)
    if world.spent:
      world.at(world.clock(), world.tell, self, event)
    else:
      world.tell(self, event)
    if isinstance(event, Step):
      world.reach(event.global_step)

  def flush(self) -> None:
    pass


class World(VirtualTime):
  """M learners and S shards. `actors` maps ("learner", m) and ("syncer", s) to its live actor.

  Args:
    config: the run's.
    pace: how long everything takes; learners beyond `islands.num_learners` may join later.
    seed: of all random numbers.
    plan: how the model is partitioned; None: every fragment has one value.
  """

  def __init__(self, config: Config, pace: Pace, seed: int = 0, plan: Plan | None = None):
    super().__init__()
    self.config, self.pace, self.seed = config, pace, seed
    self.plan = plan or plan_of((1,) * config.sync.num_fragments)
    self.step = 0  # the global step, as far as any learner has come
    self.storage = VirtualStorage(self)
    self.kept = self.new_store()  # commits outlive their shards
    for p in range(config.sync.num_fragments):
      self.put(FragmentState(p))
    self.actors: dict[Role, Actor] = {}
    self.starts: dict[Role, int] = {}  # role -> its newest incarnation
    self.working: set[Role] = set()  # learners that live and are not done
    self._newest = 0  # of all incarnations
    self._calm = Faults((), 0.0, clock=self.clock)
    self.planned_faults = PlannedFaults(self, config.chaos.of_roles())
    for s in range(config.sync.num_shards):
      self.start(("syncer", s))
    for m in range(config.islands.num_learners):
      self.start(("learner", m))

  @property
  def sync(self) -> SyncConfig:
    """The protocol's settings."""
    return self.config.sync

  @property
  def store(self) -> Mapping[int, FragmentState]:
    """Every fragment as of its newest commit."""
    return {p: committed.state for p, committed in self.kept.items()}

  def put(self, state: FragmentState) -> None:
    """Stores a fragment's state, with which its shard begins from now on."""
    value = self.value(state.index)
    self.kept[state.index] = Committed(state, value, value, None, state.last_round)

  def initial_values(self) -> Mapping[int, Sized]:
    """Fragment -> initial value, which learners make themselves."""
    return {p: self.value(p) for p in range(self.sync.num_fragments)}

  # --- what subclasses may replace ----------------------------------------------------------------

  def new_store(self) -> Store:
    """Where shards keep what they have committed."""
    return {}

  def tell(self, actor: Actor | None, event: Event) -> None:
    """Takes an event of a role or, if `actor` is None, of the engine."""

  def island(self, actor: Actor) -> VirtualIsland:
    """The island that a learner trains on."""
    return VirtualIsland(self, actor.number, f"{self.seed} {actor.role} {actor.incarnation}")

  def deltas(self, actor: Actor) -> Deltas:
    """The deltas of a learner."""
    return SizedDeltas(self)

  def merger(self, actor: Actor, fragments: Mapping[int, Fragment]) -> Merger:
    """The merger of a shard."""
    return SizedMerger(self, fragments, self.kept)

  def replication(self, actor: Actor) -> Replication | None:
    """The replication of a shard's commits to its buddy; None: there is none."""
    return None

  def travel(self, sender: Role, to: Role, message: Message, size: int) -> None:
    """Carries a message of `size` bytes through the network."""
    self.at(self.now, self.enter, sender, to, message, size)

  def unsent(self, sender: Role, to: Role) -> int:
    """Bytes of payloads that are still on their way between these two."""
    return 0

  # --- for its roles and stand-ins ----------------------------------------------------------------

  def value(self, fragment: int) -> Sized:
    """Stands for a fragment's value, in f32."""
    return Sized(F32_BYTES * self.plan.fragments[fragment].size)

  def touch(self, fragment: int, vectors: int, gbytes: float) -> None:
    """Spends the time of touching so many f32 vectors of a fragment, at so many GB/s."""
    self.spend(vectors * F32_BYTES * self.plan.fragments[fragment].size / (gbytes * 1e9))

  def say(self, event: Event) -> None:
    """Tells of an event of the engine."""
    # An end comes after what it ends. Logs are merged by time, in which they have microseconds.
    later = 1e-6 if isinstance(event, events.Exit | events.RunFinished) else 0.0
    self.tell(None, stamped(event, self.now + later, "engine", 0))

  # --- lives --------------------------------------------------------------------------------------

  def start(self, role: Role, snapshot: int | None = None, recovery_seconds: float = 0.0) -> None:
    """Starts a new incarnation; messages in flight to or from the old one may still arrive.

    `snapshot`: a learner begins with its part of this snapshot, if it has one; None: with nothing.
    """
    if role in self.actors:
      return
    self._newest += role in self.starts
    self.starts[role] = self._newest
    faults = self.planned_faults.faults.get(role, self._calm)
    actor = self.actors[role] = Actor(self, role, self._newest, faults)
    before, self.spent = self.spent, 0.0  # the cost of beginning is not the running loop's
    if role[0] == "learner":
      self.working.add(role)
      self._start_learner(actor, snapshot)
    else:
      self._start_shard(actor, self.now + recovery_seconds)
    self.spent = before
    self.planned_faults.know(role)

  def _start_learner(self, actor: Actor, snapshot: int | None) -> None:
    config, plan, faults = self.config, self.plan, actor.faults
    new, island = new_learner(config, plan, actor.number, actor.incarnation), self.island(actor)
    storage = self.storage.only(snapshot)
    beginning = begin_learner(new, config, island, storage, actor, actor.now)
    endless = lambda position: (None for _ in itertools.count())
    actor.life = Learner(beginning, island, endless, actor.runtime())
    drain_seconds = config.network.drain_seconds
    actor.begin(actor.life.live(faults, lambda: actor.asked_to_end, drain_seconds))

  def _start_shard(self, actor: Actor, recovery_deadline: float) -> None:
    config, number, incarnation = self.config, actor.number, actor.incarnation
    state = new_syncer(config, number, incarnation, self.kept, recovery_deadline, began_at=0.0)
    replication = self.replication(actor)
    actor.life = Syncer(state, self.kept, actor.runtime(), replication)
    if replication is not None:
      replication.begin(c for c in actor.life.committed.values() if c.state.version)
    actor.begin(actor.life.live(actor.faults, lambda: actor.asked_to_end))

  def ended(self, actor: Actor, error: Exception | None) -> None:
    """A role's loop has ended, by itself or with this error."""
    self.working.discard(actor.role)
    match error:
      case None:
        self.planned_faults.left(actor)
      case Killed():
        self.planned_faults.end(actor, kill=error.fault)
      case Quarantined():
        self.planned_faults.end(actor, f"quarantined: {error}", afresh=True)
      case Exception():
        raise error

  def lives(self, name: str, incarnation: int) -> bool:
    """Whether this incarnation of "learner-3" lives."""
    actor = self.actors.get(parse_role(name))
    return actor is not None and actor.incarnation == incarnation

  def kill(self, role: Role, for_seconds: float | None = None) -> None:
    """Kills a role, with all that it has; it starts again after so long, or never."""
    if role in self.actors:
      self.actors.pop(role).die()
      self.working.discard(role)
      if for_seconds is not None:
        self.at(self.now + for_seconds, self.start, role)

  def learners(self) -> list[Actor]:
    """The learners that live."""
    return [actor for role, actor in self.actors.items() if role[0] == "learner"]

  def reach(self, step: int) -> None:
    """Takes a global step that a learner has reached."""
    if step > self.step:
      self.step = step
      self.planned_faults.advance()

  # --- messages -----------------------------------------------------------------------------------

  def send(self, sender: Actor, to: Role, message: Message) -> int:
    """Sends a message through the sender's faults, the network and the receiver's faults; returns
    its bytes."""
    payload = message.payload if isinstance(message, BULK) else None
    size = HEADER_BYTES + (0 if payload is None else payload.nbytes)
    self._strike(sender.role, to, False, size, self.travel, (sender.role, to, message, size))
    return size

  def enter(self, sender: Role, to: Role, message: Message, size: int) -> None:
    """Takes a message that has arrived at its receiver's place."""
    self._strike(to, sender, True, size, self._deliver, (to, message, size))

  def _strike(
    self, role: Role, peer: Role, incoming: bool, size: int, then: Callable, arguments: tuple
  ) -> None:
    """Calls `then` for every copy of a message that a role's faults let through, at its time."""
    faults = self.planned_faults.faults.get(role, self._calm).messages
    if faults.calm:
      return then(*arguments)
    for fate in faults.fates(self.now, format_role(*peer), incoming, size > HEADER_BYTES, size):
      if fate.corrupt:
        continue  # a checksum refuses it
      if fate.at > self.now:
        self.at(fate.at, then, *arguments)
      else:
        then(*arguments)

  def _deliver(self, to: Role, message: Message, size: int) -> None:
    if to in self.actors:
      self.actors[to].deliver(message, size)


# --- Planned faults in virtual time: what a supervisor and a role's own thread do with them
# `chaos.Faults` decides and remembers, with the world's clock in place of the machine's. Where it
# would let a thread wait, virtual time passes.


class PlannedFaults:
  """The fault plan of a world, and the roles that join, end and restart by it.

  `protocol/supervisor.py` decides about roles.

  Args:
    world: the world whose roles are struck.
    faults: planned faults.
  """

  def __init__(self, world: World, faults: Sequence[Fault]):
    self._world = world
    self.faults: dict[Role, Faults] = {}  # of the roles that are struck
    by_role, joins = collections.defaultdict[Role, list[Fault]](list), list[Fault]()
    for fault in faults:
      role = parse_role(fault.role)
      (joins if fault.action == "join" else by_role[role]).append(fault)
      if fault.at_seconds >= 0:
        world.at(fault.at_seconds, self._due, role)
    for role, of in by_role.items():
      planned = Faults(of, 0.0, world.say, format_role(*role), clock=world.clock)
      planned.stopped = types.SimpleNamespace(wait=world.spend)  # an event waits in virtual time
      self.faults[role] = planned
    self._by_step = any(fault.at_step >= 0 for fault in joins)
    config = world.config
    self._supervisor = supervisor.Supervisor(config.run, {}, tuple(joins), config.sync.min_quorum)

  @property
  def hopeless(self) -> bool:
    """The run can never reach its end any more."""
    return bool(self._supervisor.hopeless)

  def down(self, kind: str = "") -> int:
    """How many roles of a kind are down, and will be started again."""
    roles = supervisor.members(self._supervisor, kind).values()
    return sum(role.phase == supervisor.DOWN for role in roles)

  def advance(self) -> None:
    """To be called when the global step has grown."""
    if self._by_step and self._supervisor.planned:
      self._tick()

  def _due(self, role: Role) -> None:
    """The time of a fault has come: the role performs its own, the supervisor the joins."""
    if role in self._world.actors:
      self._world.actors[role].wake()
    self._tick()

  # --- roles that come and go ---------------------------------------------------------------------

  def end(self, actor: Actor, *reason: str, **how: Any) -> None:
    """Tells the supervisor that a role has ended; the arguments are those of its `Exited`."""
    self._world.kill(actor.role)
    self._feed(supervisor.Working(actor.name, actor.born_at))
    self._feed(supervisor.Exited(actor.name, self._world.now, *reason, **how))

  def left(self, actor: Actor) -> None:
    """Tells the supervisor that a role has ended in good order."""
    self._feed(supervisor.Left(actor.name))

  def know(self, role: Role) -> None:
    """Tells the supervisor of a role that the world has started by itself."""
    name = format_role(*role)
    roles, running = self._supervisor.roles, supervisor.Role(phase=supervisor.UP, lives=1)
    roles = {**roles, name: roles.get(name, running)}
    self._supervisor = replace(self._supervisor, roles=roles)

  def _tick(self) -> None:
    self._feed(supervisor.Tick(self._world.now, self._world.step, self._world.now))

  def _feed(self, event: supervisor.Event) -> None:
    """Tells the supervisor, performs its actions, and plans a tick for when something is due."""
    world, before = self._world, supervisor.next_wake(self._supervisor)
    self._supervisor, actions = supervisor.supervise(self._supervisor, event)
    for action in actions:
      self._perform(action)
    wake_at = supervisor.next_wake(self._supervisor)
    if wake_at < math.inf and wake_at != before:
      world.at(max(world.now, wake_at), self._tick)

  def _perform(self, action: supervisor.Action) -> None:
    world = self._world
    match action:
      case supervisor.Start(name, life, afresh):
        role = parse_role(name)
        if life:
          world.say(events.Restart(target=name))
        nothing = afresh or not life or role[0] == "syncer"
        world.kill(role)  # what is left of a life that has ended in good order
        world.start(role, None if nothing else world.storage.newest_of(name))
      case supervisor.Lost(name, reason):
        world.say(events.Exit(target=name, reason=reason))
      case supervisor.Strike(fault):  # a join
        world.say(chaos.struck(fault, world.step))
      case supervisor.Terminate(name):
        if (actor := world.actors.get(parse_role(name))) is not None:
          actor.drain()  # it leaves without losing anything, or when its patience is over
