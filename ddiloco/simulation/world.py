"""A whole run in virtual time: the real reducers, with islands, shards and network simulated.

One heap of things to come, one seed, no threads: a world replays exactly. Each role is driven as
the runtime drives it: a learner only between inner steps, a shard by every message and its alarm.
What strikes a role on purpose is decided by the same code as in a real run (`chaos/faults.py`,
`chaos/faults.py`). An observer is told everything, and may play the parameters.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ddiloco.config import SyncConfig
from ddiloco.core.fragments import owned_by
from ddiloco.protocol import syncer
from ddiloco.protocol.messages import BULK, Message, Push, Value
from ddiloco.protocol.syncer_state import FragmentState, SyncerState
from ddiloco.protocol.values import replace
from ddiloco.simulation.actors import Actor, Learner, Role, Shard, VirtualPart
from ddiloco.simulation.disturbances import Disturbances
from ddiloco.simulation.observers import Observer

STEP_TOKENS = 10


@dataclasses.dataclass(frozen=True)
class Pace:
  """How long work takes. Steps vary by up to `jitter` of their length."""

  step_seconds: tuple[float, ...]  # by learner
  jitter: float = 0.1
  cut_seconds: float = 0.004
  stage_seconds: float = 0.004
  merge_seconds: float = 0.004
  tokens: tuple[int, ...] = ()  # of a step, by learner; empty: 10 each

  def step_tokens(self, learner: int) -> int:
    return self.tokens[learner] if self.tokens else STEP_TOKENS


class World:
  """M learners and S shards. `actors` maps ("learner", m) and ("syncer", s) to who lives now.

  Args:
    sync: the protocol's settings.
    pace: how long everything takes; learners beyond `num_learners` may join later.
    seed: of all chance.
    target_tokens: merged into every fragment; then it is complete.
    observer: is told everything.
    num_learners: who is there from the start; None: all that `pace` names.
  """

  def __init__(
    self,
    sync: SyncConfig,
    pace: Pace,
    seed: int = 0,
    target_tokens: int = 1 << 60,
    observer: Observer | None = None,
    num_learners: int | None = None,
  ):
    self.sync, self.pace, self.seed = sync, pace, seed
    self.target_tokens = target_tokens
    self.now = 0.0
    self.global_step = 0  # the run's, as far as any learner has come
    self.training = True  # False: nobody starts another step
    self.observer = observer or Observer()
    self.store = {p: FragmentState(p) for p in range(sync.num_fragments)}
    self.parts: dict[tuple[int, Role], VirtualPart] = {}  # by snapshot and role
    self.snapshots: dict[
      int, dict[Role, VirtualPart]
    ] = {}  # the complete ones: what a manifest would list
    self.measure: Callable[[Push], Mapping] = lambda push: {"norm": 1.0}
    self.value_fault: Callable[[Value], str] = lambda value: ""
    self.actors: dict[Role, Actor] = {}
    self.starts: dict[Role, int] = {}  # its newest incarnation
    self.working: set[Role] = set()  # learners that live and are not done
    self.disturbances = Disturbances(self)
    self._awaited: dict[int, list[tuple[Role, int]]] = {}  # by snapshot, whose parts: role, life
    self._newest = 0  # of all
    self._heap: list = []
    self._order = itertools.count()
    count = len(pace.step_seconds) if num_learners is None else num_learners
    for s in range(sync.num_shards):
      self.start(("syncer", s))
    for m in range(count):
      self.start(("learner", m))

  def at(self, time: float, call: Callable, *args) -> None:
    heapq.heappush(self._heap, (time, next(self._order), call, args))

  def run(self, until: float, stop: Callable[[], bool] = lambda: False) -> None:
    """Lets everything happen that happens before `until`, when it is then, or before `stop()`."""
    while not stop():
      if not self._heap or self._heap[0][0] > until:
        if math.isfinite(until):
          self.now = max(self.now, until)
        return
      self.now, _, call, args = heapq.heappop(self._heap)
      call(*args)

  # --- lives --------------------------------------------------------------------------------------

  def start(
    self, role: Role, part: VirtualPart | None = None, recovery_seconds: float = 0.0
  ) -> None:
    """A new incarnation; what is in flight to or from the old one may still arrive.

    What it saved of snapshots that were never complete is of a future that it knows nothing of.
    """
    if role in self.actors:
      return
    if role in self.starts:
      self.parts = {k: v for k, v in self.parts.items() if k[1] != role or k[0] in self.snapshots}
      self._awaited.clear()
      self._newest += 1
    self.starts[role] = self._newest
    if role[0] == "learner":
      self.working.add(role)
      Learner(self, role, self._newest, part).begin()
    else:
      Shard(self, role, self._newest, self.now + recovery_seconds).begin()

  def restore(self, role: Role, snapshot: int | None, recovery_seconds: float = 0.0) -> None:
    """Starts a role with its part of a complete snapshot, or with nothing at all."""
    self.kill(role)
    if role[0] == "syncer":
      self._put_back(snapshot, owned_by(role[1], self.sync.num_shards, self.sync.num_fragments))
    self.start(role, self.snapshots[snapshot].get(role) if snapshot else None, recovery_seconds)

  def _put_back(self, snapshot: int | None, fragments: Collection[int]) -> None:
    saved = {p: FragmentState(p) for p in fragments}
    for role, part in self.snapshots.get(snapshot or 0, {}).items():
      if role[0] == "syncer":
        saved |= {f.index: f for f in part.state.fragments if f.index in saved}
    for p, f in saved.items():
      self.store[p] = replace(f, round=None)
      self.observer.holds(self.store[p])

  def restore_all(self, num_shards: int = 0, num_learners: int = 0) -> int | None:
    """Kills everybody, the network too; all start from the newest complete snapshot, if any."""
    for role in list(self.actors):
      self.kill(role)
    self._heap = [entry for entry in self._heap if entry[2] != self._deliver]
    heapq.heapify(self._heap)
    self.sync = replace(self.sync, num_shards=num_shards or self.sync.num_shards)
    snapshot = max(self.snapshots, default=None)
    snapshot_states = self.snapshots.get(snapshot or 0, {})
    self.parts = {k: v for k, v in self.parts.items() if k[0] in self.snapshots}
    self._awaited.clear()
    self._put_back(snapshot, range(self.sync.num_fragments))
    self._newest += 1
    for s in range(self.sync.num_shards):
      self.start(("syncer", s))
    for m in range(num_learners or len(self.pace.step_seconds)):
      self.start(("learner", m), snapshot_states.get(("learner", m)))
    return snapshot

  def kill(self, role: Role, for_seconds: float | None = None) -> None:
    if role in self.actors:
      self.actors.pop(role).alive = False
      self.working.discard(role)
      if for_seconds is not None:
        self.at(self.now + for_seconds, self.start, role)

  def rejoin(self, actor: Actor, reason: str) -> None:
    """A shard found this learner's state bad: it starts afresh."""
    self.disturbances.quarantine(actor, reason)

  def own_part(self, role: Role) -> VirtualPart | None:
    """A killed learner finds this of its own, in the newest complete snapshot that has it."""
    return next(
      (
        snapshot_states[role]
        for _, snapshot_states in sorted(self.snapshots.items(), reverse=True)
        if role in snapshot_states
      ),
      None,
    )

  # --- snapshots ----------------------------------------------------------------------------------

  def save(self, snapshot: int, role: Role, part: VirtualPart) -> None:
    """Keeps a part, once; with the last one the snapshot is complete."""
    self.parts.setdefault((snapshot, role), part)
    if snapshot in self.snapshots:
      return
    awaited = self._awaited.get(snapshot)
    if awaited is None:
      awaited = self._await(snapshot)
    if awaited is None:
      return
    while awaited:  # who has died since is not waited for
      r, incarnation = awaited[-1]
      if (snapshot, r) not in self.parts and self._lives(r, incarnation):
        return
      awaited.pop()
    shards, learners = self._there(snapshot)
    wanted = [*(r for r, i in learners.items() if self._lives(r, i)), *shards]
    if all((snapshot, r) in self.parts for r in wanted):
      self.snapshots[snapshot] = {r: self.parts[snapshot, r] for r in wanted}
      self.observer.complete(snapshot, self.snapshots[snapshot])

  def forget(self, keep: int) -> None:
    """Drops all snapshots but the newest complete ones."""
    self.snapshots = dict(sorted(self.snapshots.items())[-keep:])
    oldest = min(self.snapshots, default=0)
    self.parts = {k: v for k, v in self.parts.items() if k[0] >= oldest}
    self._awaited = {n: left for n, left in self._awaited.items() if n >= oldest}

  def _lives(self, role: Role, incarnation: int) -> bool:
    return role in self.actors and self.actors[role].incarnation == incarnation

  def _there(self, snapshot: int) -> tuple[list[Role], dict[Role, int]]:
    """The shards, and who was there of learners by what they have recorded."""
    shards: list[Role] = [("syncer", s) for s in range(self.sync.num_shards)]
    parts = [self.parts[snapshot, role] for role in shards if (snapshot, role) in self.parts]
    return shards, {("learner", m): i for part in parts for m, i in part.learners}

  def _await(self, snapshot: int) -> list[tuple[Role, int]] | None:
    """Whose parts are not here yet: known once every shard has said who was there."""
    shards, learners = self._there(snapshot)
    if any((snapshot, role) not in self.parts for role in shards):
      return None
    self._awaited[snapshot] = list(learners.items())
    return self._awaited[snapshot]

  # --- messages -----------------------------------------------------------------------------------

  def send(self, sender: Actor, to: Role, message: Message) -> None:
    """Through the sender's weather, the network, and the receiver's weather."""
    if self.disturbances.calm:
      return self._travel(sender.role, to, message)
    size = self.size(message) if isinstance(message, BULK) else 0
    for fate in self.disturbances.fates(sender.role, to, False, size):
      if fate.at > self.now:
        self.at(fate.at, self._travel, sender.role, to, message)
      else:
        self._travel(sender.role, to, message)

  def _travel(self, sender: Role, to: Role, message: Message) -> None:
    for arrival in self.arrivals(sender, to, message):
      if self.disturbances.calm:
        self.at(arrival, self._deliver, to, message)
      else:
        self.at(arrival, self._enter, sender, to, message)

  def _enter(self, sender: Role, to: Role, message: Message) -> None:
    size = self.size(message) if isinstance(message, BULK) else 0
    for fate in self.disturbances.fates(to, sender, True, size):
      if fate.at > self.now:
        self.at(fate.at, self._deliver, to, message)
      else:
        self._deliver(to, message)

  def _deliver(self, to: Role, message: Message) -> None:
    if to in self.actors:
      self.actors[to].receive(message)

  def measured(self, message: Message) -> Mapping[str, Any]:
    """What a shard finds out about a message's payload; see `Received`."""
    if isinstance(message, Value):
      return {"fault": self.value_fault(message)}
    return self.measure(message) if isinstance(message, Push) else {}

  def size(self, message: Message) -> int:
    """Bytes of the payload of a message that has one."""
    return 0

  def arrivals(self, sender: Role, to: Role, message: Message) -> Sequence[float]:
    """When the copies of a message that is sent now arrive."""
    return (self.now,)

  def merge_seconds(self, fragment: int, pushes: int) -> float:
    """How long a commit of so many pushes keeps a shard busy."""
    return self.pace.merge_seconds

  def new_shard(
    self, shard: int, incarnation: int, newest: tuple[FragmentState, ...], recovery_deadline: float
  ) -> SyncerState:
    """The first state of a shard's incarnation."""
    who, learners = (shard, incarnation, newest), range(len(self.pace.step_seconds))
    most = max(self.pace.step_tokens(m) for m in learners)
    return syncer.init(*who, self.target_tokens, recovery_deadline, step_tokens=most)

  def learners(self) -> list[Learner]:
    return [a for a in self.actors.values() if isinstance(a, Learner)]
