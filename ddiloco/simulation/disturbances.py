"""Planned faults in virtual time: what a supervisor and a role's own thread do with them.

`resilience.chaos.Faults` decides and remembers, with the world's clock in place of the machine's;
where it would let a thread wait, virtual time passes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddiloco.config import Fault
from ddiloco.resilience import chaos
from ddiloco.resilience.chaos import Faults
from ddiloco.resilience.weather import Fate

if TYPE_CHECKING:
  from ddiloco.simulation.actors import Actor, Role
  from ddiloco.simulation.world import World

HEADER_BYTES = 64


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

  `restart_seconds` and `max_restarts` are those of roles that are told to start afresh.
  """

  def __init__(self, world: World):
    self.restart_seconds, self.max_restarts = 0.0, 1 << 30
    self.drain_seconds = math.inf
    self.calm = True
    self.returning = 0  # roles that are down and will be back
    self.gone: set[Role] = set()  # for good
    self._world = world
    self._faults: dict[Role, Faults] = {}
    self._joins: tuple[Fault, ...] = ()
    self._by_step = False  # whether some join at a step
    self._leaves_at: dict[Role, float] = {}
    self._crashes: dict[Role, int] = {}

  def plan(self, faults: Sequence[Fault]) -> None:
    """What strikes from now on, those of regions already given to their roles."""
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
    self._joins = tuple(fault for fault in faults if fault.action == "join")
    self._by_step = any(fault.at_step >= 0 for fault in self._joins)
    for fault in self._joins:
      if fault.at_seconds >= 0:
        world.at(fault.at_seconds, self._welcome)
    self.calm = not by_role

  def of(self, role: Role) -> Faults | None:
    return self._faults.get(role)

  def fates(self, role: Role, peer: Role, incoming: bool, size: int) -> Sequence[Fate]:
    """What a role's weather lets through: copies that arrive, sound, and when."""
    now, faults = self._world.now, self._faults.get(role)
    if faults is None or faults.weather.calm:
      return (Fate(now),)
    fates = faults.weather.fates(now, name_of(peer), incoming, size > 0, HEADER_BYTES + size)
    return [fate for fate in fates if not fate.corrupt]  # a checksum refuses those

  def advance(self) -> None:
    """The run's clock is here now."""
    if self._by_step:
      self._welcome()

  def _wake(self, role: Role) -> None:
    actor = self._world.actors.get(role)
    if actor is not None:
      actor.wake()

  def _struck(self, fault: Fault, said: str) -> None:
    self._world.observer.supervisor("fault", **chaos.struck(fault, said))

  def lose(self, actor: Actor, reason: str, pause: float, afresh: bool = False) -> None:
    """A role has died, and is back after `pause` seconds (negative: never)."""
    world = self._world
    world.kill(actor.role)
    world.observer.supervisor("exit", target=name_of(actor.role), reason=reason)
    if pause < 0:
      self.gone.add(actor.role)
    else:
      self.returning += 1
      world.at(world.now + pause, self._restart, actor.role, afresh)

  def quarantine(self, actor: Actor, reason: str) -> None:
    """It starts afresh after a pause that doubles, but not for ever."""
    crashes = self._crashes[actor.role] = self._crashes.get(actor.role, 0) + 1
    again = crashes <= self.max_restarts
    pause = self.restart_seconds * 2 ** (crashes - 1) if again else -1.0
    self.lose(actor, f"quarantined: {reason}", pause, afresh=True)

  def _restart(self, role: Role, afresh: bool) -> None:
    world = self._world
    self.returning -= 1
    world.observer.supervisor("restart", target=name_of(role))
    world.start(role, None if afresh or role[0] == "syncer" else world.own_part(role))
    self._leave_if_late(role)

  def _welcome(self) -> None:
    """The learners that join now."""
    world = self._world
    while True:
      fault, self._joins = chaos.strike(self._joins, world.clock, world.now)
      if fault is None:
        return
      role = role_of(fault.role)
      self._struck(fault, chaos.detail(fault, world.clock))
      if fault.seconds >= 0:
        self._leaves_at[role] = world.now + fault.seconds
        world.at(world.now + fault.seconds, self._leave_if_late, role)
      if role not in world.starts:
        world.start(role)

  def _leave_if_late(self, role: Role) -> None:
    """It was told to end: it leaves without losing anything, or when its patience is over."""
    world = self._world
    actor = world.actors.get(role)
    if actor is not None and world.now >= self._leaves_at.get(role, math.inf):
      actor.drain()
      if self.drain_seconds < math.inf:
        world.at(world.now + self.drain_seconds, actor.leave, "the run was stopped")


def name_of(role: Role) -> str:
  """ "learner/2" of ("learner", 2)."""
  return f"{role[0]}/{role[1]}"


def role_of(name: str) -> Role:
  """("learner", 2) of "learner/2"."""
  kind, _, number = name.partition("/")
  return kind, int(number)
