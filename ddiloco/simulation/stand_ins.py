"""Stand-ins of virtual time for objects that touch vectors: sizes and costs, but no values.

Every stand-in has the methods of the object that it stands for, and spends the time that they would
take. Tests put ghosts of values into the payloads, and so follow every inner step
(`tests/protocol/ledger.py`).
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from ddiloco.checkpoint.buddy import Copies, Replication
from ddiloco.core import codec
from ddiloco.core.codec import Encoded
from ddiloco.core.delta import Committed, Deltas, Merged, Merger, Store, learner_weights
from ddiloco.core.fragments import Fragment, Piece, Plan
from ddiloco.protocol.actions import ReadDone
from ddiloco.protocol.events import Commit
from ddiloco.protocol.messages import NOTHING, FragmentState, Publish, Push, Replica, Value
from ddiloco.protocol.values import Frozen, replace
from ddiloco.simulation import bandwidth
from ddiloco.simulation.bandwidth import F32_BYTES

if TYPE_CHECKING:
  from ddiloco.simulation.world import World

DIGEST_BYTES = 32
MADE_VECTORS = 2  # that an initial value touches: written, and read for its digest


class Sized(Frozen, weakref=True):
  """Stands for a vector, or a payload, of `nbytes` bytes."""

  nbytes: int
  content: Any = None  # anything that a test puts in

  def view(self, dtype: Any) -> Sized:
    """Its bytes."""
    return replace(self)


def plan_of(sizes: Sequence[int]) -> Plan:
  """The plan of a model with fragments of these sizes, of one piece each."""
  pieces = (Piece("values", None, 0, n, (n,), 0, average=False) for n in sizes)
  return Plan(tuple(Fragment(p, (piece,)) for p, piece in enumerate(pieces)))


class VirtualIsland:
  """Stands for `training.island.Island`: its steps take virtual time."""

  num_moments, busy = 2, False

  def __init__(self, world: World, learner: int, seed: str):
    self._world, self._learner = world, learner
    self._random = random.Random(seed)
    late_seconds = world.pace.late_seconds
    self._late_seconds = late_seconds * self._random.random() if late_seconds else 0.0
    self._updates = 0

  def describe(self) -> Mapping[str, Any]:
    island = self._world.config.islands.island(self._learner)
    # Not known with 0: the fewest that the mesh has.
    devices = island.devices or abs(island.data * island.fsdp * island.tensor)
    mesh = list(island.mesh_shape(devices))
    return {"devices": devices, "mesh": mesh, "batch_size": island.batch_size}

  def compile(self) -> float:
    return 0.0

  def reset(self) -> None:
    self._updates = 0

  def place(self, name: str, value: Any) -> Any:
    return value

  def step(self, batch: Any, schedule_step: int, rate_scale: float) -> Mapping[str, float]:
    pace = self._world.pace
    jitter = 1 + pace.jitter * self._random.random()
    late_seconds, self._late_seconds = self._late_seconds, 0.0
    self._world.spend(pace.step_seconds[self._learner] * jitter + late_seconds)
    self._updates += 1
    return {}

  def copy_out(self, fragment: int, moments: bool = False) -> Any:
    size = self.num_moments * F32_BYTES * self._world.plan.fragments[fragment].size
    return Sized(size) if moments else None

  def to_host(self, pieces: Any, fragment: int) -> Any:
    self._world.spend(self._world.pace.copy_out_seconds)
    return pieces

  def stage(self, fragment: int, flat: Sized, moments: bool = False) -> Sized:
    self._world.spend(self._world.pace.stage_seconds)
    return flat

  def apply(self, fragment: int, staged: Sized, keep: float, moments: bool = False) -> None:
    pass

  def capture(self) -> Mapping[str, Sized]:
    values = sum(self._world.plan.sizes)
    moments = Sized(self.num_moments * F32_BYTES * values, self._updates)
    return {"params/values": Sized(F32_BYTES * values), "inner/moments": moments}

  def restore(self, arrays: Mapping[str, Sized]) -> None:
    self._updates = arrays["inner/moments"].content

  def count(self) -> int:
    return self._updates

  def set_count(self, count: int) -> None:
    self._updates = count


class SizedDeltas(Deltas):
  """Stands for `core.delta.Deltas`."""

  def __init__(self, world: World):
    super().__init__(world.sync)
    self._world = world

  def push(self, fragment: int, local: Any, factor: float) -> Any:
    world = self._world
    world.touch(fragment, bandwidth.PUSH_VECTORS, world.pace.host_gbytes)
    size = world.plan.fragments[fragment].size
    self.sent[fragment] = Sized(codec.payload_bytes(size, world.sync.push_codec), factor)
    return self.sent[fragment]

  def made(self, publish: Publish, value: Any) -> Publish:
    self._world.touch(publish.fragment, MADE_VECTORS, self._world.pace.host_gbytes)
    return replace(publish, codec="f32", payload=value)

  def receive(self, publish: Publish, size: int, mode: str, included: bool) -> Any:
    p = publish.fragment
    self._world.touch(p, bandwidth.STAGE_VECTORS, self._world.pace.host_gbytes)
    self.sent.pop(p, None)
    self.base[p] = self._world.value(p)
    return self.base[p]

  def take_moments(self, payload: Any, size: int) -> Any:
    return payload


class SizedMerger(Merger):
  """Stands for `core.delta.Merger`: a push's norm is its steps times the factor of poison."""

  def __init__(self, world: World, fragments: Mapping[int, Fragment], store: Store):
    super().__init__(fragments, store, world.config)
    self._world = world

  def prepare(self, fragment: int) -> str:
    if self._is_made(fragment):
      self._initial[fragment] = cast(Any, Sized(DIGEST_BYTES))
    return ""

  def take_in(self, push: Push, now: float) -> ReadDone:
    pace = self._world.pace
    self._world.spend(pace.merge_seconds / 4)
    self._world.touch(push.fragment, 1, pace.merge_gbytes)
    return ReadDone(push, now, **self.measure(push))

  def measure(self, push: Push) -> Mapping[str, Any]:
    """What the merger measures of a push; see `ReadDone`."""
    return {"norm": push.steps * push.payload.content}

  def take_back(self, value: Value, now: float) -> ReadDone:
    return ReadDone(value, now, content=value.payload)

  def commit(self, what: Commit, state: FragmentState) -> Merged:
    p, pace, sync = what.fragment, self._world.pace, self._world.sync
    vectors = bandwidth.commit_vectors(sync, self.config.outer.momentum > 0, len(what.learners))
    self._world.spend(pace.merge_seconds)
    self._world.touch(p, vectors, pace.merge_gbytes)
    self._set(state, what.round)
    name = sync.publish_codec
    if name != "f32":
      size = self._fragments[p].size
      self._update[p] = Encoded(name, cast(Any, Sized(codec.payload_bytes(size, name))))
    return Merged(learner_weights(what, self.config))

  def install(self, value: Any, state: FragmentState) -> None:
    self._update.pop(state.index, None)
    self._set(state, self.committed[state.index].momentum_round)

  def _set(self, state: FragmentState, momentum_round: int) -> None:
    value: Any = self._world.value(state.index)
    self.committed[state.index] = Committed(state, value, value, None, momentum_round)


class SizedCopies(Copies):
  """Stands for `checkpoint.buddy.Copies`."""

  def _keep(self, message: Replica) -> bool:
    return True


class SizedReplication(Replication):
  """Stands for `checkpoint.buddy.Replication`; a whole value goes without its momentum."""

  def _send(self, fragment: int, change: Encoded | None = None) -> None:
    if change is None or fragment not in self._sent:
      self._sent[fragment] = NOTHING
      change = Encoded("f32", self._newest[fragment].published_value)
    super()._send(fragment, change)


@dataclasses.dataclass(frozen=True)
class SavedPart:
  """A role's part of a snapshot; see `checkpoint.snapshots.Part`."""

  snapshot: int
  incarnation: int
  state: Mapping[str, Any]
  arrays: Mapping[str, Sized]


class VirtualStorage:
  """Stands for `checkpoint.snapshots.Storage`: snapshots are in memory, and writing takes time."""

  def __init__(self, world: World):
    self.parts: dict[int, dict[str, SavedPart]] = {}  # by snapshot and role, "learner-3"
    self.committed: dict[int, frozenset[str]] = {}  # by snapshot, roles with a part in it
    self._declined: dict[int, set[str]] = {}  # by snapshot, roles that will save no part
    self._world = world

  def find(
    self, role: str, place: Callable[[str, Any], Any], use: Callable[[SavedPart], Any]
  ) -> Any | None:
    """What `use` makes of its part of the newest committed snapshot that has one."""
    snapshot = self.newest_of(role)
    return None if snapshot is None else use(self.parts[snapshot][role])

  def newest_of(self, role: str) -> int | None:
    """The newest committed snapshot that has a part of this role."""
    return max((n for n, roles in self.committed.items() if role in roles), default=None)

  def only(self, snapshot: int | None) -> VirtualStorage:
    """A storage as if only this snapshot had ever been committed; None: no snapshot."""
    one = VirtualStorage(self._world)
    if snapshot is not None:
      one.parts, one.committed = self.parts, {snapshot: self.committed[snapshot]}
    return one

  def save(
    self,
    snapshot: int,
    role: str,
    incarnation: int,
    state: Mapping[str, Any],
    arrays: Mapping[str, Sized],
  ) -> Mapping[str, Any]:
    world, part = self._world, SavedPart(snapshot, incarnation, state, arrays)
    world.spend(world.pace.stage_seconds)
    world.at(world.clock(), self._is_there, role, part)
    return {"arrays": {}}

  def _is_there(self, role: str, part: SavedPart) -> None:
    if self._world.lives(role, part.incarnation):
      self.declined(part.snapshot).discard(role)
      self.parts.setdefault(part.snapshot, {})[role] = part

  def is_committed(self, snapshot: int) -> bool:
    return snapshot in self.committed

  def is_past(self, snapshot: int) -> bool:
    return max(self.committed, default=-1) >= snapshot

  def decline(self, snapshot: int, role: str, reason: str) -> None:
    self._declined.setdefault(snapshot, set()).add(role)

  def declined(self, snapshot: int) -> set[str]:
    return self._declined.get(snapshot, set())

  def growth(self, snapshot: int, roles: Collection[str]) -> Mapping[str, int]:
    """Role -> 1 if its part is there, else 0: a part appears as a whole."""
    return {role: int(role in self.parts.get(snapshot, {})) for role in roles}

  def metas(self, snapshot: int) -> Mapping[str, Mapping[str, Any]]:
    return {role: {"state": p.state} for role, p in self.parts.get(snapshot, {}).items()}

  def commit(self, snapshot: int, roles: Collection[str]) -> None:
    self.committed[snapshot] = frozenset(roles)

  def prune(self, keep: int, over: int, since: int) -> None:
    self.committed = dict(sorted(self.committed.items())[-keep:])
    self.parts = {n: parts for n, parts in self.parts.items() if n > over or n in self.committed}
    self._declined = {n: roles for n, roles in self._declined.items() if n > over}

  def forget(self, role: str | None = None) -> None:
    """Drops this role's parts (None: all roles') of snapshots that were never committed."""
    for who in self._declined.values():
      who -= {role} if role is not None else set(who)
    for snapshot, parts in self.parts.items():
      if snapshot not in self.committed:
        for each in [role] if role is not None else list(parts):
          parts.pop(each, None)
