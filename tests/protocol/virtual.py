"""The virtual world of `ddiloco.simulation` in random weather, with a ledger that judges it.

Where a run has vectors, this world has ghosts: payloads say which inner steps are in them, and the
ledger checks what happens to each. The history keeps every event, and a snapshot must be a
consistent snapshot.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import random
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ddiloco.config import (
  CheckpointConfig,
  Config,
  DataConfig,
  IslandsConfig,
  NetworkConfig,
  RunConfig,
  SyncConfig,
)
from ddiloco.core.delta import Committed
from ddiloco.core.fragments import owned_by
from ddiloco.protocol import events
from ddiloco.protocol.actions import ReadDone
from ddiloco.protocol.events import Commit, Event, parse_role
from ddiloco.protocol.messages import NOTHING, FragmentState, Message, Publish, Push, Value
from ddiloco.protocol.states import LearnerPart, SyncerPart, clock_violations
from ddiloco.protocol.values import from_json, replace
from ddiloco.simulation import world
from ddiloco.simulation.stand_ins import SavedPart, Sized, SizedDeltas, SizedMerger, VirtualIsland
from ddiloco.simulation.world import Actor, Pace, Role
from tests.protocol.ledger import Ledger, Parameters, Staged

__all__ = ["STEP_TOKENS", "Ghosts", "Pace", "Weather", "World"]

STEP_TOKENS = 10
FOR_EVER = 1e9  # seconds
LATE_SECONDS = 0.1  # on its way; a message that takes longer has met bad weather


@dataclasses.dataclass(frozen=True)
class Weather:
  """What the network does to every message; a calm one delivers all, in order per pair."""

  delay_seconds: tuple[float, float] = (0.001, 0.004)
  drop: float = 0.0
  duplicate: float = 0.0
  reorder: bool = False
  lost_kinds: tuple[type, ...] = ()  # none of these arrives


# --- Ghosts of vectors ----------------------------------------------------------------------------


class GhostIsland(VirtualIsland):
  """Its parameters are the ledger's."""

  def __init__(self, ghosts: Ghosts, actor: Actor):
    super().__init__(ghosts, actor.number, f"{ghosts.seed} {actor.role} {actor.incarnation}")
    self._ledger, self._actor = ghosts.ledger, actor

  def reset(self) -> None:
    super().reset()
    self._actor.parameters = self._ledger.new()

  def copy_out(self, fragment: int, moments: bool = False) -> Any:
    if moments:
      return super().copy_out(fragment, moments)
    return self._ledger.copy_out(self._actor, fragment)

  def apply(self, fragment: int, staged: Sized, keep: float, moments: bool = False) -> None:
    if not moments:
      self._ledger.apply(self._actor, fragment, staged.content)
      self._actor.changed.add(fragment)

  def capture(self) -> Mapping[str, Sized]:
    return {**super().capture(), "params/values": Sized(4, self._actor.parameters)}

  def restore(self, arrays: Mapping[str, Sized]) -> None:
    super().restore(arrays)
    self._actor.parameters = arrays["params/values"].content


class GhostDeltas(SizedDeltas):
  """Its bases are the rounds that made them."""

  def __init__(self, ghosts: Ghosts):
    super().__init__(ghosts)
    self._ledger = ghosts.ledger

  def push(self, fragment: int, local: Any, factor: float) -> Any:
    poisoned = replace(local, factor=factor)
    self.sent[fragment] = replace(super().push(fragment, local, factor), content=poisoned)
    return self.sent[fragment]

  def receive(self, publish: Publish, size: int, mode: str, included: bool) -> Any:
    p = publish.fragment
    known = self.base[p].content if p in self.base else NOTHING
    self._ledger.stage(known, publish)
    found = super().receive(publish, size, mode, included)
    self.base[p] = replace(found, content=publish.round)
    return replace(found, content=Staged(publish.round, mode, included))


class GhostMerger(SizedMerger):
  """Its values are what the ledger says of their rounds."""

  def __init__(self, ghosts: Ghosts, fragments: Mapping[int, Any]):
    super().__init__(ghosts, fragments, ghosts.kept)
    self._ghosts, self._ledger = ghosts, ghosts.ledger

  def measure(self, push: Push) -> Mapping[str, Any]:
    return self._ghosts.measure(push)

  def take_back(self, value: Value, now: float) -> ReadDone:
    found = super().take_back(value, now)
    return replace(found, fault=found.fault or self._ghosts.value_fault(value))

  def take_in(self, push: Push, now: float) -> ReadDone:
    self._ledger.take_in(push)
    return super().take_in(push, now)

  def commit(self, what: Commit, state: FragmentState) -> Any:
    self._ledger.commit(what)
    self._ghosts.merging.add((what.fragment, what.round))
    return super().commit(what, state)

  def install(self, value: Sized, state: FragmentState) -> None:
    self._ledger.adopt(state, value.content)
    super().install(value, state)

  def with_payload(self, publish: Publish) -> Publish:
    assert publish.round == self.committed[publish.fragment].state.last_round, "it has no other"
    return super().with_payload(publish)


class GhostStore(dict):
  """Shows the ledger what shards have."""

  def __init__(self, ledger: Ledger):
    super().__init__()
    self._ledger = ledger

  def __setitem__(self, fragment: int, committed: Committed) -> None:
    self._ledger.hold(committed.state)
    super().__setitem__(fragment, committed)


class Ghosts(world.World):
  """A world whose vectors are ghosts, judged by a ledger. To be the first base of a class.

  Attributes:
    ledger: the judge; set before the world is made.
    measure: what shards find out about a push.
    value_fault: what speaks against a value that a learner gives back.
    cuts: complete snapshots, by number and role.
  """

  ledger: Ledger

  def __init__(self, *arguments, **named):
    self.measure: Callable[[Push], Mapping] = lambda push: {"norm": 1.0}
    self.value_fault: Callable[[Value], str] = lambda value: ""
    self.snapshots: dict[int, dict[Role, Part]] = {}
    self.history: list[tuple[float, Actor, Event]] = []
    self.misjudged: Exception | None = None  # the first snapshot that is none
    self.merging: set[tuple[int, int]] = set()  # fragments and rounds of all merges begun
    self._commits: list[tuple[float, Commit]] = []
    super().__init__(*arguments, **named)

  def run(self, *arguments, **named) -> None:
    """As of any virtual time; a snapshot that is no cut ends it."""
    super().run(*arguments, **named)
    if self.misjudged is not None:
      raise self.misjudged

  def new_store(self) -> GhostStore:
    return GhostStore(self.ledger)

  def island(self, actor: Actor) -> VirtualIsland:
    actor.step_times, actor.idle_seconds, actor.changed = [], 0.0, set()
    return GhostIsland(self, actor)

  def deltas(self, actor: Actor) -> SizedDeltas:
    return GhostDeltas(self)

  def merger(self, actor: Actor, fragments: Mapping[int, Any]) -> SizedMerger:
    return GhostMerger(self, fragments)

  def tell(self, actor: Actor | None, event: Event) -> None:
    super().tell(actor, event)
    if actor is None:
      return
    self.history.append((self.now, actor, event))
    match event:
      case events.Step():
        for p in sorted(actor.changed):
          self.ledger.check(actor, p)
        actor.changed.clear()
        self.ledger.step(actor)
        actor.step_times.append(self.now)
        actor.idle_seconds += event.blocked_seconds
      case events.CopyOut():
        self.ledger.check_push(actor, event)
      case events.Round():
        here = [v for m, v in actor.state.members.items() if m >= 0 and not v.lost]
        if all(member.leaving or member.quarantined for member in here):
          self.ledger.drains.add((event.fragment, event.round))
      case events.Commit():
        self._commits.append((self.now, event))
      case events.Snapshot():
        try:
          self._complete(event)
        except Exception as error:  # the role that records it goes on whatever comes of it
          self.misjudged = self.misjudged or error

  def _complete(self, event: events.Snapshot) -> None:
    """It must be a consistent snapshot."""
    parts = self.storage.parts[event.snapshot]
    found = self.snapshots[event.snapshot] = {
      parse_role(name): _part(parts[name]) for name in event.roles
    }
    seen = {part.state.key: part.state.vector_clock for part in found.values()}
    assert not clock_violations(seen), f"no cut: {clock_violations(seen)} of {seen}"
    learners = {r[1]: (v.incarnation, v.parameters) for r, v in found.items() if r[0] == "learner"}
    shards = [part for role, part in found.items() if role[0] == "syncer"]
    fragments = {f.index: (v.incarnation, f) for v in shards for f in v.state.fragments}
    self.ledger.check_cut(learners, fragments)

  def restore(self, role: Role, snapshot: int | None, recovery_seconds: float = 0.0) -> None:
    """Starts a role with its part of a complete snapshot, or with nothing at all."""
    self.kill(role)
    if role[0] == "syncer":
      self._put_back(snapshot, owned_by(role[1], self.sync.num_shards, self.sync.num_fragments))
    self.start(role, snapshot, recovery_seconds)

  def restore_all(self, num_shards: int = 0, num_learners: int = 0) -> int | None:
    """Kills everybody, the network too; all start from the newest complete snapshot, if any."""
    for role in list(self.actors):
      self.kill(role)
    under_way = (self.travel, self.enter, self._deliver)
    self._heap = [entry for entry in self._heap if entry[2] not in under_way]
    heapq.heapify(self._heap)
    sync = dataclasses.replace(self.sync, num_shards=num_shards or self.sync.num_shards)
    self.config = dataclasses.replace(self.config, sync=sync)
    snapshot = max(self.storage.committed, default=None)
    self.storage.forget()
    self._put_back(snapshot, range(sync.num_fragments))
    self._newest += 1
    for s in range(sync.num_shards):
      self.start(("syncer", s))
    for m in range(num_learners or len(self.pace.step_seconds)):
      self.start(("learner", m), snapshot)
    return snapshot

  def _put_back(self, snapshot: int | None, fragments: Collection[int]) -> None:
    found = {p: FragmentState(p) for p in fragments}
    for role in self.storage.committed[snapshot] if snapshot else ():
      if role.startswith("syncer-"):
        part = from_json(SyncerPart, self.storage.parts[snapshot][role].state)
        found |= {f.index: f for f in part.fragments if f.index in found}
    for state in found.values():
      self.put(state)

  def commits(self, fragment: int | None = None) -> list[tuple[float, Commit]]:
    return [(t, c) for t, c in self._commits if fragment in (None, c.fragment)]


@dataclasses.dataclass(frozen=True)
class Part:
  """A role's part of a complete snapshot."""

  incarnation: int
  state: LearnerPart | SyncerPart
  parameters: Parameters | None  # a learner's


def _part(saved: SavedPart) -> Part:
  if "params/values" not in saved.arrays:
    return Part(saved.incarnation, from_json(SyncerPart, saved.state), None)
  parameters = saved.arrays["params/values"].content
  known = {p: saved.arrays[f"base/{p}"].content for p in parameters.copies}
  copies = {p: replace(c, known=known[p]) for p, c in parameters.copies.items()}
  parameters = replace(parameters, copies=copies)
  return Part(saved.incarnation, from_json(LearnerPart, saved.state), parameters)


# --- Random weather -------------------------------------------------------------------------------


class World(Ghosts):
  """A world whose `weather` may change at any time.

  `patience_seconds`: how long a snapshot waits for a part of a learner that lives.

  Attributes:
    struck: how often each kind of fault has done something.
  """

  def __init__(
    self,
    sync: SyncConfig,
    pace: Pace,
    seed: int = 0,
    weather: Weather = Weather(),
    target_tokens: int = 1 << 60,
    ledger: Ledger | None = None,
    num_learners: int | None = None,
    patience_seconds: float = 2.0,
  ):
    self.weather = weather
    self.tokens_per_step = STEP_TOKENS
    self.random = random.Random(f"network {seed}")
    self.struck: collections.Counter[str] = collections.Counter()
    self.ledger = ledger or Ledger(sync, STEP_TOKENS)
    self._last_arrival: dict = {}
    config = Config(
      islands=IslandsConfig(num_learners=num_learners or len(pace.step_seconds), batch_size=1),
      data=DataConfig(sequence_length=STEP_TOKENS),
      sync=sync,
      network=NetworkConfig(drain_seconds=FOR_EVER),
      checkpoint=CheckpointConfig(keep=1 << 20, patience_seconds=patience_seconds),
      run=RunConfig(total_tokens=target_tokens, restart_seconds=0.0, max_restarts=1 << 30),
    )
    super().__init__(config, pace, seed)

  def strike(self, kind: str, role: Role, for_seconds: float) -> None:
    """A role dies if it lives, and starts again after so long."""
    self.struck[kind] += role in self.actors
    self.kill(role, for_seconds)

  def travel(self, sender: Role, to: Role, message: Message, size: int) -> None:
    w = self.weather
    if isinstance(message, w.lost_kinds) or (w.drop and self.random.random() < w.drop):
      self.struck["drop"] += 1
      return
    copies = 2 if w.duplicate and self.random.random() < w.duplicate else 1
    self.struck["duplicate"] += copies - 1
    for _ in range(copies):
      self.at(self._arrival((sender, to)), self.enter, sender, to, message, size)

  def _arrival(self, pair: tuple[Role, Role]) -> float:
    """When a message between these two arrives."""
    delay, newest = (
      self.random.uniform(*self.weather.delay_seconds),
      self._last_arrival.get(pair, 0),
    )
    self.struck["late"] += delay > LATE_SECONDS
    arrival = self.now + delay
    if self.weather.reorder:
      self.struck["reorder"] += arrival < newest
    else:
      arrival = max(arrival, newest)
    self._last_arrival[pair] = max(arrival, newest)
    return arrival
