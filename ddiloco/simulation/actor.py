"""One incarnation of a role in virtual time: all that it is given to live with, made of a world."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ddiloco.chaos.faults import Faults
from ddiloco.network.transport import Counters, Delivery, claimed_sender
from ddiloco.protocol.events import Event, Step, format_role, parse_role, stamped
from ddiloco.protocol.messages import Message
from ddiloco.runtime import Loop, Runtime
from ddiloco.simulation.virtual_time import Task, VirtualWorker

if TYPE_CHECKING:
  from ddiloco.simulation.world import World

Role = tuple[str, int]  # ("learner", m) or ("syncer", s)


class Actor:
  """A role's clock, its connection and its recorder at once: each is a few lines here.

  Attributes:
    life: the role itself, `roles.learner.Learner` or `roles.syncer.Syncer`.
    alive: it was not killed; it may have ended by itself (`over`).
    told: to end, and not at once.
  """

  life: Any = None

  def __init__(self, world: World, role: Role, incarnation: int, faults: Faults):
    self.world, self.number, self.incarnation, self.faults = world, role[1], incarnation, faults
    self.role, self.name = role, format_role(*role)
    self.alive, self.asked_to_end = True, False
    self.born_at = world.now
    self.counters = Counters()
    self._inbox: collections.deque[Delivery] = collections.deque()
    self._task: Task | None = None
    self._workers: list[VirtualWorker] = []

  @property
  def state(self) -> Any:
    """Of its reducer."""
    return self.life.exchange.state if self.role[0] == "learner" else self.life.state

  @property
  def over(self) -> bool:
    """It has ended."""
    return self._task is not None and self._task.over

  def runtime(self, saver: Any = None) -> Runtime:
    """What its role is given."""
    return Runtime(
      self,
      self,
      saver,
      time=self,
      deltas=lambda sync: self.world.deltas(self),
      merger=lambda fragments, store, config: self.world.merger(self, fragments),
      initial=self.world.initial_values,
    )

  def begin(self, loop: Loop[None], ended: Callable[[Exception | None], None]) -> None:
    """Lets its role's loop run."""
    self._task = Task(self.world, loop, lambda: self.receive(0.0), ended)

  def die(self) -> None:
    """Abruptly: nothing that its role does about that is seen."""
    self.alive = False
    if self._task is not None:
      self._task.end()
    for worker in self._workers:
      worker.close()

  def drain(self) -> None:
    """Tells it to end."""
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
    """A message has arrived."""
    if not self.over:
      self.counters.received_bytes += size
      self._inbox.append(Delivery(claimed_sender(message), message, self.world.now))
      if self._task is not None:
        self._task.arrived()

  def receive(self, timeout_seconds: float) -> Delivery | None:
    return self._inbox.popleft() if self._inbox else None

  @property
  def waiting(self) -> int:
    return len(self._inbox)

  def unsent(self, peer: str) -> int:
    return self.world.unsent(self.role, parse_role(peer))

  def wake(self) -> None:
    if self._task is not None:
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
