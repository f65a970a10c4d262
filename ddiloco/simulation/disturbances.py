"""Planned faults in virtual time: what a supervisor and a role's own thread do with them.

`chaos.faults.Faults` decides and remembers, with the world's clock in place of the machine's;
where it would let a thread wait, virtual time passes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddiloco.chaos import faults
from ddiloco.chaos.faults import Faults, Killed, MessageFate
from ddiloco.config import Fault, RunConfig
from ddiloco.protocol import events, supervisor
from ddiloco.protocol.supervisor import (
  Exited,
  Joined,
  Lost,
  Start,
  Terminate,
  Tick,
  Working,
  members,
  next_wake,
  supervise,
)

if TYPE_CHECKING:
  from ddiloco.simulation.actors import Actor, Role
  from ddiloco.simulation.world import World

HEADER_BYTES = 64  # of any message, about


class Pause:
  """Stands for an event that threads wait for: notes how long."""

  def __init__(self) -> None:
    self._seconds = 0.0

  def wait(self, seconds: float) -> None:
    self._seconds += seconds

  def take(self) -> float:
    """Seconds waited since the last call."""
    seconds, self._seconds = self._seconds, 0.0
    return seconds


class Disturbances:
  """The fault plan of a world, and the roles that come, go and come back by it.

  `protocol/supervisor.py` decides about roles. Until `plan` says otherwise, those that are told to
  start afresh do so at once and for ever.
  """

  def __init__(self, world: World):
    self.drain_seconds = math.inf
    self.calm = True
    self._world = world
    self._faults: dict[Role, Faults] = {}
    self._by_step = False  # whether some join at a step
    self._supervisor = supervisor.init(RunConfig(restart_seconds=0.0, max_restarts=1 << 30), ())

  def plan(
    self, faults: Sequence[Fault], run: RunConfig | None = None, min_quorum: int = 0
  ) -> None:
    """What strikes from now on, those of regions already given to their roles.

    `run` says how often and how soon roles that die are started again.
    """
    world, by_role = self._world, dict[str, list[Fault]]()
    for fault in faults:
      if fault.action != "join":
        by_role.setdefault(fault.role, []).append(fault)
    for name, of in by_role.items():
      role = role_of(name)
      planned = Faults(of, 0.0, self._struck, name, clock=lambda: world.now)
      planned.stopped = Pause()
      self._faults[role] = planned
      if role in world.actors:
        world.actors[role].faults = planned
      for fault in of:
        if fault.at_seconds >= 0:
          world.at(fault.at_seconds, self._wake, role)
    joins = [fault for fault in faults if fault.action == "join"]
    self._by_step = any(fault.at_step >= 0 for fault in joins)
    for fault in joins:
      if fault.at_seconds >= 0:
        world.at(fault.at_seconds, self._tick)
    self.calm = not by_role
    state = supervisor.init(run or self._supervisor.run, (), joins, min_quorum)
    self._supervisor = state
    for role in world.starts:
      self._know(role)

  @property
  def hopeless(self) -> bool:
    """The run can never reach its end any more."""
    return bool(self._supervisor.hopeless)

  def all_are(self, kind: str, *phases: str) -> bool:
    """Whether all roles of a kind are in one of these phases of the supervisor's."""
    return all(role.phase in phases for role in members(self._supervisor, kind).values())

  def of(self, role: Role) -> Faults | None:
    return self._faults.get(role)

  def fates(self, role: Role, peer: Role, incoming: bool, size: int) -> Sequence[MessageFate]:
    """What a role's weather lets through: copies that arrive, sound, and when."""
    now, faults = self._world.now, self._faults.get(role)
    if faults is None or faults.weather.calm:
      return (MessageFate(now),)
    fates = faults.weather.fates(now, name_of(peer), incoming, size > 0, HEADER_BYTES + size)
    return [fate for fate in fates if not fate.corrupt]  # a checksum refuses those

  def advance(self) -> None:
    """The global step is here now."""
    if self._by_step and self._supervisor.joins:
      self._tick()

  def _wake(self, role: Role) -> None:
    actor = self._world.actors.get(role)
    if actor is not None:
      actor.wake()

  def _struck(self, fault: Fault, said: str) -> None:
    self._world.observer.supervisor(faults.struck(fault, said))

  # --- roles that come and go ---------------------------------------------------------------------

  def lose(self, actor: Actor, killed: Killed) -> None:
    """A role has died as planned."""
    self._exit(actor, Exited(name_of(actor.role), self._world.now, kill=killed.fault))

  def quarantine(self, actor: Actor, reason: str) -> None:
    """It starts afresh after a pause that doubles, but not for ever."""
    name, now = name_of(actor.role), self._world.now
    self._exit(actor, Exited(name, now, f"quarantined: {reason}", afresh=True))

  def _exit(self, actor: Actor, exited: Exited) -> None:
    self._know(actor.role)
    self._world.kill(actor.role)
    self._feed(Working(exited.role, actor.born_at))
    self._feed(exited)

  def _know(self, role: Role) -> None:
    """The world has started it by itself."""
    name = name_of(role)
    if name not in self._supervisor.roles:
      self._supervisor = supervisor.add_running(self._supervisor, name)

  def _tick(self) -> None:
    self._feed(Tick(self._world.now, self._world.global_step, self._world.now))

  def _feed(self, event: supervisor.Event) -> None:
    """Tells the supervisor, performs what it says, and lets it know when something is due."""
    world, before = self._world, next_wake(self._supervisor)
    self._supervisor, actions = supervise(self._supervisor, event)
    for action in actions:
      self._perform(action)
    wake_at = next_wake(self._supervisor)
    if wake_at < math.inf and wake_at != before:
      world.at(max(world.now, wake_at), self._tick)

  def _perform(self, action: supervisor.Action) -> None:
    world = self._world
    match action:
      case Start(name, life, afresh):
        role = role_of(name)
        if life:
          world.observer.supervisor(events.Restart(target=name))
        part = None if afresh or not life or role[0] == "syncer" else world.own_part(role)
        world.start(role, part)
      case Lost(name, reason):
        world.observer.supervisor(events.Exit(target=name, reason=reason))
      case Joined(fault):
        self._struck(fault, faults.detail(fault, world.global_step))
      case Terminate(name):
        self._drain(role_of(name))

  def _drain(self, role: Role) -> None:
    """It was told to end: it leaves without losing anything, or when its patience is over."""
    world, actor = self._world, self._world.actors.get(role)
    if actor is not None:
      actor.drain()
      if self.drain_seconds < math.inf:
        world.at(world.now + self.drain_seconds, actor.leave, "the run was stopped")


def name_of(role: Role) -> str:
  """ "learner-2" of ("learner", 2)."""
  return f"{role[0]}-{role[1]}"


def role_of(name: str) -> Role:
  """("learner", 2) of "learner-2"."""
  kind, _, number = name.partition("-")
  return kind, int(number)
