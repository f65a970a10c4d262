"""Roles that do what the supervisor tells them, and come, go and die at random.

Every one of its actions is checked; in the end every role is up, has left or was given up.
"""

from __future__ import annotations

import collections
import math
import random

from ddiloco.config import Fault, RunConfig
from ddiloco.protocol import supervisor
from ddiloco.protocol.supervisor import (
  DOWN,
  GONE,
  LEFT,
  LONGEST_PAUSE_SECONDS,
  UP,
  Dismiss,
  Exited,
  Hold,
  Left,
  Lost,
  Requested,
  Start,
  Strike,
  Supervisor,
  Terminate,
  Tick,
  Working,
  next_wake,
  supervise,
)
from tests.worlds import swarm

RUN = RunConfig(restart_seconds=1.0, max_restarts=5)
LEARNER, SHARD = "learner-3", "syncer-0"
PLANNED = ("kill", "stall", "slow", "drop", "join")
KINDS = (*PLANNED, "death", "leave", "for_good")  # a role dies, leaves, is killed for ever
STEPS = 120  # of a world


def for_good(name: str, now: float) -> Exited:
  """The end of a life that was killed by plan, after which there is no other."""
  return Exited(name, now, kill=Fault("kill", LEARNER, at_step=0, seconds=-1))


class Play:
  """One state, what it was told, and what it said."""

  def __init__(self, *roles: str, run: RunConfig = RUN, **more):
    self.state: Supervisor = Supervisor(run, dict.fromkeys(roles, supervisor.Role()), **more)

  def __call__(self, event: supervisor.Event) -> list:
    self.state, actions = supervise(self.state, event)
    return actions

  def phase(self, name: str = LEARNER) -> str:
    return self.state.roles[name].phase


class World:
  """Roles of one run, and its supervisor.

  Attributes:
    struck: how often each kind of fault has done something.
  """

  def __init__(self, seed: int):
    self.random = rng = random.Random(f"supervised {seed}")
    self.kinds = swarm(seed, KINDS)
    self.struck: collections.Counter[str] = collections.Counter()
    self.names = [SHARD, *(f"learner-{m}" for m in range(rng.randint(1, 4)))]
    self.run = RunConfig(
      restart_seconds=rng.choice([0.0, 0.1, 3.0]), max_restarts=rng.randint(0, 4)
    )
    planned = [fault for _ in range(rng.randint(0, 8)) for fault in self._faults()]
    quorum = rng.randint(0, len(self.names) - 1)
    self.play = Play(*self.names, run=self.run, planned=planned, quorum=quorum)
    self.now, self.global_step = 0.0, 0
    self.up: set[str] = set()
    self.held: set[str] = set()
    self.dying: set[str] = set()  # a planned kill was performed
    self.starts: collections.Counter[str] = collections.Counter()

  def _faults(self) -> list[Fault]:
    """One that can be planned, if this world has any such kind."""
    rng, kinds = self.random, [kind for kind in PLANNED if kind in self.kinds]
    if not kinds:
      return []
    action = rng.choice(kinds)
    role = f"learner-{rng.randint(5, 7)}" if action == "join" else rng.choice(self.names)
    seconds = rng.choice([0.0, 1.0, 20.0, *([-1.0] if action in ("kill", "join") else [])])
    return [Fault(action, role, at_step=rng.randint(0, 40), seconds=seconds)]

  def tell(self, event: supervisor.Event) -> None:
    """The supervisor hears of it; what it says is checked and done."""
    hopeless = self.play.state.hopeless
    for action in self.play(event):
      self.check(action, event)
    assert hopeless in ("", self.play.state.hopeless), "the first reason stays"
    assert self.up == {n for n, r in self.play.state.roles.items() if r.phase == UP}
    up = {n: r for n, r in self.play.state.roles.items() if r.phase == UP}
    assert self.held == {n for n, r in up.items() if r.held_until > -math.inf}

  def check(self, action: supervisor.Action, event: supervisor.Event) -> None:
    """Whether the action can be done to these roles; then it is."""
    match action:
      case Start(name, life, _):
        assert name not in self.up, "started twice"
        assert life == self.starts[name]
        self.starts[name] += 1
        self.up.add(name)
        self.held.discard(name)
      case Strike(fault) if fault.action == "join":
        self.struck["join"] += 1
      case Strike(fault):
        assert fault.role in self.up and fault.role not in self.dying
        self.dying |= {fault.role} if fault.action == "kill" else set()
        self.struck[fault.action] += 1
      case Hold(name, held):
        assert name in self.up and (name in self.held) != held
        (self.held.add if held else self.held.discard)(name)
      case Terminate(name):
        assert name in self.up
        self.held.discard(name)
      case Lost(name, _):
        assert name == event.role

  def end(self, name: str, kind: str = "") -> None:
    """A role that is up ends; by itself, or by a fault of this kind."""
    self.up.discard(name)
    self.held.discard(name)
    self.dying.discard(name)
    self.struck[kind] += bool(kind)
    left = kind in ("leave", "dismissed")
    exited = for_good(name, self.now) if kind == "for_good" else Exited(name, self.now, "x")
    self.tell(Left(name) if left else exited)

  def step(self) -> None:
    """Some time passes, and something may happen to one role."""
    rng = self.random
    self.now += rng.choice([0.0, 0.01, 0.5, 5.0])
    self.global_step += rng.randint(0, 2)
    what, name = rng.random(), rng.choice(sorted(self.play.state.roles))
    if name in self.dying and what < 0.5:
      self.end(name)
    elif name in self.up and what < 0.1:
      kind = rng.choice(["death"] * 6 + ["leave", "for_good"])
      if kind in self.kinds and not (kind == "leave" and name in self.dying):
        self.end(name, kind)
    elif what < 0.2:
      self.tell(Working(name, self.now))
    elif what < 0.25:
      for fault in self._faults():
        self.tell(Requested(fault))
    self.tell(Tick(self.now, self.global_step, self.now))


def check(seed: int) -> collections.Counter[str]:
  """Runs a world, judges, and counts what happened."""
  world = World(seed)
  for _ in range(STEPS):
    world.step()
    down = [r for r in world.play.state.roles.values() if r.phase == DOWN]
    longest = max(20.0, LONGEST_PAUSE_SECONDS, world.run.restart_seconds)
    assert all(world.now < role.start_at <= world.now + longest for role in down)
  world.now += 100.0
  world.tell(Tick(world.now, world.global_step, world.now))
  for name, role in world.play.state.roles.items():
    assert role.phase in (UP, LEFT, GONE), f"{name} was never started again"
  world.tell(Dismiss(""))
  for name in sorted(world.up):
    world.end(name, "dismissed")
  assert all(role.ended for role in world.play.state.roles.values())
  assert next_wake(world.play.state) == float("inf")
  starts = world.starts.total()
  return world.struck + collections.Counter(starts=starts, hopeless=bool(world.play.state.hopeless))
