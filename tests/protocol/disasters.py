"""Storms in which roles come back with parts of snapshots, and shards lose their copies.

The ledger judges every value and every complete snapshot.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Collection

from tests.protocol import storms
from tests.protocol.storms import STORM_SECONDS, heal, notes, plan_meetings, random_world
from tests.protocol.virtual import World
from tests.worlds import swarm

BEFORE = ("revive", "lose_shard", "all_die", *storms.KINDS)
KINDS = (*storms.MEETINGS, *BEFORE)


def stormy(seed: int, disasters: int = 3, **fixed) -> World:
  """A storm with frequent snapshots; roles come back with a part, old or new, or with none."""
  rng, kinds = random.Random(f"disasters {seed}"), swarm(seed, BEFORE)
  world = random_world(seed, **{"snapshot_steps": rng.randint(1, 8), **fixed})
  struck = [kind for kind in ("revive", "lose_shard") if kind in kinds]
  for _ in range(disasters if struck else 0):
    world.at(rng.uniform(0.3, STORM_SECONDS), _strike, world, rng, rng.choice(struck))
  return world


def _strike(world: World, rng: random.Random, kind: str) -> None:
  """Some role dies now and comes back; a shard has lost its copies as well."""
  name = "learner" if kind == "revive" else "syncer"
  roles = [role for role in sorted(world.actors) if role[0] == name]
  if not roles:
    return
  role = rng.choice(roles)
  world.struck[kind] += 1
  world.kill(role)

  def back() -> None:
    if role not in world.actors and (name == "learner" or role[1] < world.sync.num_shards):
      snapshot = rng.choice([None, *world.snapshots, *list(world.snapshots)[-1:] * 3])
      world.restore(role, snapshot, recovery_seconds=rng.choice([0.0, 1.0]))

  world.at(world.now + rng.uniform(0.0, 0.8), back)


def check(seed: int, known: Collection[str] = KINDS) -> collections.Counter[str]:
  """Runs disasters of these kinds and what comes after them, judges, and counts what happened.

  Where all die, they go on from the newest complete snapshot, with other numbers of shards and
  learners each time.
  """
  world, rng, kinds = stormy(seed), random.Random(f"all die {seed}"), swarm(seed, known)
  plan_meetings(world, seed, kinds)
  went_back = 0
  for _ in range(rng.randint(1, 3) if "all_die" in kinds else 0):
    world.run(world.now + rng.uniform(0.2, 2.0))
    learners = rng.randint(world.sync.min_quorum, len(world.pace.step_seconds))
    went_back += bool(world.restore_all(rng.randint(1, world.sync.num_fragments), learners))
    world.struck["all_die"] += 1
  heal(world)
  return world.struck + collections.Counter(
    commits=len(world.commits()),
    snapshots=len(world.snapshots),
    regained=len(notes(world, "regained")),
    went_back=went_back,
  )
