"""Runs that end after a storm: learners that finish have the same versions, and enough is merged.

A learner may be told to leave during the storm, or all may die.
"""

from __future__ import annotations

import collections
import dataclasses
import random
from collections.abc import Collection

from tests.protocol import storms
from tests.protocol.storms import STORM_SECONDS, plan_meetings, random_world
from tests.protocol.virtual import Weather, World
from tests.worlds import swarm

MOST_SECONDS = 240.0
BEFORE = ("leave", "all_die", *storms.KINDS)
KINDS = ("all_leave", *storms.MEETINGS, *BEFORE)


def until_all_are_done(world: World) -> None:
  """Raises AssertionError if they never are."""
  while not (world.learners() and all(a.state.done for a in world.learners())):
    assert world.now < MOST_SECONDS, "still waiting to end"
    world.run(world.now + 0.5)


def check(seed: int, known: Collection[str] = KINDS) -> collections.Counter[str]:
  """Runs a world with these kinds of faults to its end, judges, and counts what happened.

  One in two runs in lock-step, and there none leaves: a quorum of all would be missed.
  """
  rng, kinds = random.Random(f"ending {seed}"), swarm(seed, known)
  target, blocking = rng.randint(300, 600), rng.random() < 0.5
  snapshot_steps = rng.randint(1, 8) if "all_die" in kinds else 0
  world = random_world(seed, target, blocking=blocking, snapshot_steps=snapshot_steps)
  if "all_die" in kinds:
    world.at(rng.uniform(0.5, STORM_SECONDS), _all_die, world)
  others = len(world.pace.step_seconds) - 1
  if "leave" in kinds and not blocking and world.sync.min_quorum <= others:
    world.at(rng.uniform(0.5, STORM_SECONDS), _leave, world, ("learner", rng.randint(0, others)))
  if "all_leave" in kinds and not blocking:
    world.at(rng.uniform(0.5, STORM_SECONDS), _all_leave, world)
  plan_meetings(world, seed, kinds)
  world.run(STORM_SECONDS + 1.0)  # all that were killed are back
  world.weather = Weather()
  until_all_are_done(world)
  ended = {p: f.version for p, f in world.store.items()}
  world.run(world.now + 5.0)
  assert {p: f.version for p, f in world.store.items()} == ended, "the end was not the end"
  for actor in world.learners():
    versions = {p: f.version for p, f in enumerate(actor.state.fragments)}
    assert versions == ended or actor.asked_to_end, f"{actor.role} ends at {versions}, not {ended}"
    assert blocking or actor.idle_seconds == 0, f"{actor.role} waited"
  _check_tokens(world, target)
  return world.struck + collections.Counter(commits=len(world.commits()), ended=1)


def _all_die(world: World) -> None:
  world.struck["all_die"] += 1
  world.restore_all()


def _leave(world: World, role: tuple[str, int]) -> None:
  if role in world.actors:
    world.struck["leave"] += 1
    world.actors[role].drain()


def _all_leave(world: World) -> None:
  """All learners are told to leave, and as many others join."""
  world.struck["all_leave"] += 1
  for actor in world.learners():
    actor.drain()
  count = len(world.pace.step_seconds)
  world.pace = dataclasses.replace(world.pace, step_seconds=world.pace.step_seconds * 2)
  for m in range(count, 2 * count):
    world.start(("learner", m))


def _check_tokens(world: World, target: int) -> None:
  """As many are merged as were asked for, and no round more was made than they took."""
  for p, f in world.store.items():
    assert f.merged_tokens == 10 * len(world.ledger.contents[p, f.last_round]) >= target
    last = next(c for _, c in reversed(world.commits(p)) if c.round == f.last_round)
    assert f.merged_tokens - sum(last.tokens) < target, "one round more than needed"
