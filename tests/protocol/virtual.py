"""The virtual world of `ddiloco.simulation` in random weather, with a ledger that judges it.

The ledger plays the parameters and checks what happens to every step; the history keeps every
action, and a snapshot must be consistent.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Any

from ddiloco.config import SyncConfig
from ddiloco.protocol import causality
from ddiloco.protocol.actions import (
  Accept,
  Apply,
  Commit,
  CopyOut,
  InstallValue,
  SendValue,
  Stage,
  StepDone,
)
from ddiloco.protocol.messages import Message
from ddiloco.protocol.syncer_state import FragmentState
from ddiloco.simulation import world
from ddiloco.simulation.actors import Actor, Learner, Role, VirtualPart
from ddiloco.simulation.observers import Observer
from ddiloco.simulation.world import STEP_TOKENS, Pace
from tests.protocol.ledger import Ledger

__all__ = ["Checks", "Pace", "Weather", "World"]


@dataclasses.dataclass(frozen=True)
class Weather:
  """What the network does to every message; a calm one delivers all, in order per pair."""

  delay_seconds: tuple[float, float] = (0.001, 0.004)
  drop: float = 0.0
  duplicate: float = 0.0
  reorder: bool = False
  lost_kinds: tuple[type, ...] = ()  # none of these arrives


class Checks(Observer):
  """Shows the ledger every action."""

  def __init__(self, ledger: Ledger):
    self.ledger = ledger

  def born(self, actor: Actor, part: VirtualPart | None) -> None:
    if isinstance(actor, Learner):
      actor.parameters = self.ledger.new() if part is None else part.parameters

  def stepped(self, actor: Learner, done: StepDone, gap_seconds: float, blocked: float) -> None:
    self.ledger.step(actor)

  def on(self, actor: Actor, action: Any, event: Any) -> Any:
    match action:
      case CopyOut(push):
        return self.ledger.copy_out(actor, push)
      case SendValue(value):
        return self.ledger.give(actor, value)
      case Stage(publish):
        self.ledger.stage(actor, publish)
      case Apply():
        self.ledger.apply(actor, action)
      case Accept():
        self.ledger.accept(action, event.message)
      case InstallValue(fragment):
        self.ledger.adopt(action, event.message.payload, actor.fragment(fragment))
      case Commit(fragment):
        self.ledger.commit(action, actor.fragment(fragment))
    return None

  def performed(self, actor: Actor, actions: Sequence[Any]) -> None:
    for action in actions:
      if isinstance(action, Apply):
        self.ledger.check(actor, action.fragment)

  def published(self, actor: Actor, message: Any) -> None:
    assert message.round == self.ledger.held[message.fragment], "it has no other"

  def complete(self, snapshot: int, states: Mapping[Role, VirtualPart]) -> None:
    clocks = {
      n if kind == "learner" else causality.shard_key(n): part.state.vector_clock
      for (kind, n), part in states.items()
    }
    assert not causality.violations(clocks), (
      f"inconsistent: {causality.violations(clocks)} of {clocks}"
    )
    learners = {r[1]: (v.incarnation, v.parameters) for r, v in states.items() if r[0] == "learner"}
    shards = [part for role, part in states.items() if role[0] == "syncer"]
    fragments = {f.index: (v.incarnation, f) for v in shards for f in v.state.fragments}
    self.ledger.check_cut(learners, fragments)

  def holds(self, state: FragmentState) -> None:
    self.ledger.hold(state)


class _Recorded(Checks):
  """Also keeps the world's history."""

  world: World

  def on(self, actor: Actor, action: Any, event: Any) -> Any:
    payload = super().on(actor, action, event)
    self.world.history.append((self.world.now, actor, action))
    return payload


class World(world.World):
  """A world whose `weather` may change at any time."""

  def __init__(
    self,
    sync: SyncConfig,
    pace: Pace,
    seed: int = 0,
    weather: Weather = Weather(),
    target_tokens: int = 1 << 60,
    ledger: Ledger | None = None,
  ):
    self.weather = weather
    self.tokens_per_step = STEP_TOKENS
    self.random = random.Random(f"network {seed}")
    self.ledger = ledger or Ledger(sync, STEP_TOKENS)
    self.history: list[tuple[float, Actor, object]] = []  # every action that is not a send
    self._last_arrival: dict = {}
    observer = _Recorded(self.ledger)
    observer.world = self
    super().__init__(sync, pace, seed, target_tokens, observer)

  def arrivals(self, sender: Role, to: Role, message: Message) -> Sequence[float]:
    w = self.weather
    if isinstance(message, w.lost_kinds) or (w.drop and self.random.random() < w.drop):
      return ()
    copies = 2 if w.duplicate and self.random.random() < w.duplicate else 1
    found = []
    for _ in range(copies):
      arrival = self.now + self.random.uniform(*w.delay_seconds)
      if not w.reorder:
        pair = sender, to
        arrival = self._last_arrival[pair] = max(arrival, self._last_arrival.get(pair, 0.0))
      found.append(arrival)
    return found

  def commits(self, fragment: int | None = None) -> list[tuple[float, Commit]]:
    of = [(t, a) for t, _, a in self.history if isinstance(a, Commit)]
    return [(t, c) for t, c in of if fragment in (None, c.fragment)]
