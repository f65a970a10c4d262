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
from ddiloco.config import Fault
from ddiloco.protocol import events, supervisor
from ddiloco.protocol.events import format_role, parse_role
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
  from ddiloco.simulation.world import Actor, World

Role = tuple[str, int]  # ("learner", m) or ("syncer", s)
HEADER_BYTES = 64  # of any message, about


class Pause:
  """Stands for an event that threads wait for: the time passes."""

  def __init__(self, world: World):
    self._world = world

  def wait(self, seconds: float) -> None:
    self._world.spend(seconds)


class Disturbances:
  """The fault plan of a world, and the roles that come, go and come back by it.

  `protocol/supervisor.py` decides about roles.

  Args:
    world: whose.
    faults: what strikes.
  """

  def __init__(self, world: World, faults: Sequence[Fault]):
    self._world = world
    self._faults: dict[Role, Faults] = {}
    by_role = dict[str, list[Fault]]()
    for fault in faults:
      if fault.action != "join":
        by_role.setdefault(fault.role, []).append(fault)
    for name, of in by_role.items():
      role = parse_role(name)
      planned = self._faults[role] = Faults(of, 0.0, self._struck, name, clock=world.clock)
      planned.stopped = Pause(world)
      for fault in of:
        if fault.at_seconds >= 0:
          world.at(fault.at_seconds, self._wake, role)
    joins = [fault for fault in faults if fault.action == "join"]
    self._by_step = any(fault.at_step >= 0 for fault in joins)
    for fault in joins:
      if fault.at_seconds >= 0:
        world.at(fault.at_seconds, self._tick)
    self.calm = not by_role
    config = world.config
    self._supervisor = supervisor.init(config.run, (), joins, config.sync.min_quorum)

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
    fates = faults.weather.fates(now, format_role(*peer), incoming, size > HEADER_BYTES, size)
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
    self._world.tell(None, faults.struck(fault, said))

  # --- roles that come and go ---------------------------------------------------------------------

  def lose(self, actor: Actor, killed: Killed) -> None:
    """A role has died as planned."""
    self._exit(actor, Exited(actor.name, self._world.now, kill=killed.fault))

  def quarantine(self, actor: Actor, reason: str) -> None:
    """It starts afresh after a pause that doubles, but not for ever."""
    name, now = actor.name, self._world.now
    self._exit(actor, Exited(name, now, f"quarantined: {reason}", afresh=True))

  def _exit(self, actor: Actor, exited: Exited) -> None:
    self._world.kill(actor.role)
    self._feed(Working(exited.role, actor.born_at))
    self._feed(exited)

  def know(self, role: Role) -> None:
    """The world has started it by itself."""
    name = format_role(*role)
    if name not in self._supervisor.roles:
      self._supervisor = supervisor.add_running(self._supervisor, name)

  def _tick(self) -> None:
    self._feed(Tick(self._world.now, self._world.step, self._world.now))

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
        role = parse_role(name)
        if life:
          world.tell(None, events.Restart(target=name))
        nothing = afresh or not life or role[0] == "syncer"
        world.start(role, None if nothing else world.storage.newest_of(name))
      case Lost(name, reason):
        world.tell(None, events.Exit(target=name, reason=reason))
      case Joined(fault):
        self._struck(fault, faults.detail(fault, world.step))
      case Terminate(name):
        if (actor := world.actors.get(parse_role(name))) is not None:
          actor.drain()  # it leaves without losing anything, or when its patience is over
