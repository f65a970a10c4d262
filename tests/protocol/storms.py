"""Random settings and speeds in bad weather, in which roles die and come back.

After the storm rounds go on and all end on the newest versions; the ledger judges every step.
"""

from __future__ import annotations

import collections
import math
import random
from collections.abc import Collection, Mapping

from ddiloco.config import SyncConfig
from ddiloco.protocol.events import Event
from ddiloco.protocol.messages import Pull, Push
from ddiloco.simulation.world import Role
from tests.protocol.virtual import Pace, Weather, World
from tests.worlds import swarm

STORM_SECONDS = 3.0
KINDS = ("late", "drop", "duplicate", "reorder", "kill_learner", "kill_shard")
MEETINGS = ("dies_again", "both_die", "bad_push")  # faults that meet others


def random_world(seed: int, target_tokens: int = 1 << 60, **fixed) -> World:
  """Any mix of settings, speeds and kinds of faults; roles die and come back during the storm."""
  rng, kinds = random.Random(seed), swarm(seed, KINDS)
  num_learners = rng.randint(1, 4)
  num_fragments = rng.randint(1, 4)
  period = rng.randint(2, 6)
  settings = {
    "num_shards": rng.randint(1, min(2, num_fragments)),
    "num_fragments": num_fragments,
    "sync_period": period,
    "overlap_steps": rng.randint(0, period - 1),
    "min_quorum": rng.randint(1, num_learners),
    "apply": rng.choice(["rebase", "rebase", "overwrite", "mix"]),
    "grace_safety": rng.choice([0.0, 0.5, 0.9]),
    "liveness_seconds": 0.5,
    "publish_codec": random.Random(f"codec {seed}").choice(["f32", "int8"]),
  }
  sync = SyncConfig(**{**settings, **fixed})
  storm = Weather(
    delay_seconds=(0.001, rng.choice([0.2, 0.6]) if "late" in kinds else 0.01),
    drop=rng.choice([0.1, 0.3]) if "drop" in kinds else 0.0,
    duplicate=0.3 if "duplicate" in kinds else 0.0,
    reorder="reorder" in kinds,
  )
  steps = tuple(rng.uniform(0.06, 0.2) for _ in range(num_learners))
  pace = Pace(steps, 0.3, *(rng.choice([0.002, 0.05, 0.2]) for _ in range(3)))
  world = World(sync, pace, seed, storm, target_tokens)
  _plan_kills(world, rng, "kill_learner" in kinds, "kill_shard" in kinds)
  return world


def _plan_kills(world: World, rng: random.Random, learners: bool, shards: bool) -> None:
  victims: list[tuple[str, Role]] = []
  if learners:
    victims += [("kill_learner", ("learner", m)) for m in range(len(world.pace.step_seconds))]
  if shards:
    victims += [("kill_shard", ("syncer", s)) for s in range(world.sync.num_shards)]
  for _ in range(rng.randint(1, 4) if victims else 0):
    kind, role = rng.choice(victims)
    world.at(rng.uniform(0.2, STORM_SECONDS), world.strike, kind, role, rng.uniform(0.0, 0.8))


def plan_meetings(world: World, seed: int, kinds: Collection[str]) -> None:
  """A role dies again as soon as it is back; a learner and a shard die a message apart; a push is
  found to be bad, and what its learner is told may be lost."""
  rng = random.Random(f"meetings {seed}")
  learners, shards = len(world.pace.step_seconds), world.sync.num_shards
  for _ in range(3):
    at, soon = rng.uniform(0.2, STORM_SECONDS), rng.choice([0.0, 0.001, 0.004, 0.05])
    roles = [("learner", rng.randrange(learners)), ("syncer", rng.randrange(shards))]
    rng.shuffle(roles)
    if "dies_again" in kinds:
      for i in range(3):
        world.at(at + i * (0.1 + soon), world.strike, "dies_again", roles[0], 0.1)
    if "both_die" in kinds:
      for i, role in enumerate(roles):
        world.at(at + i * soon, world.strike, "both_die", role, rng.uniform(0.0, 0.1))

  def measure(push: Push) -> Mapping[str, float]:
    bad = world.now < STORM_SECONDS and rng.random() < 0.2
    world.struck["bad_push"] += bad
    return {"norm": math.inf if bad else 1.0}

  if "bad_push" in kinds:
    world.measure = measure


def heal(world: World, within_seconds: float = 25.0) -> None:
  """After the storm: everybody lives, rounds commit, and all end on the newest versions."""
  over = max(STORM_SECONDS, world.now)
  world.at(over, setattr, world, "weather", Weather())
  world.run(over + 1.0)
  before, start = len(world.commits()), world.now
  wanted = set(range(world.sync.num_fragments))

  def commits_go_on() -> bool:
    return wanted <= {c.fragment for _, c in world.commits()[before:]}

  while not (commits_go_on() and all(a.state.joined for a in world.learners())):
    assert world.now < start + within_seconds, "rounds do not commit any more"
    world.run(world.now + 0.5)
  if world.sync.blocking:
    return  # between two steps of a lock-step run nothing is applied
  assert not any(a.idle_seconds for a in world.learners()), "one waited"
  world.weather, start = Weather(lost_kinds=(Pull,)), world.now  # no round goes on for ever
  while any(
    f.version != store[p].version
    for store in (world.store,)
    for a in world.learners()
    for p, f in enumerate(a.state.fragments)
  ):
    assert world.now < start + within_seconds, "somebody stays behind the newest versions"
    world.run(world.now + 0.5)
  for actor in world.learners():
    for p in range(world.sync.num_fragments):
      world.ledger.check(actor, p)


def check(seed: int) -> collections.Counter[str]:
  """Runs a storm and what comes after it, judges, and counts what happened."""
  world = random_world(seed)
  heal(world)
  return world.struck + collections.Counter(commits=len(world.commits()))


def notes(world: World, kind: str) -> list[tuple[float, Event]]:
  """The events of a kind, and when."""
  return [(t, event) for t, _, event in world.history if event.kind == kind]


def calm(num_learners: int = 3, seed: int = 0, jitter: float = 0.1, **settings) -> World:
  """Good weather and equal speeds."""
  fixed = {"num_shards": 2, "num_fragments": 3, "sync_period": 6, "liveness_seconds": 0.5}
  pace = Pace((0.1,) * num_learners, jitter)
  return World(SyncConfig(**{**fixed, **settings}), pace, seed)
