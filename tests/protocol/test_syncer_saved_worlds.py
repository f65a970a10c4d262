"""Snapshots and what comes back from them, in hundreds of random worlds.

The ledger judges every value and every complete snapshot (`World.save`); here are the disasters.
"""

from __future__ import annotations

import dataclasses
import random

import pytest

from ddiloco.config import SyncConfig
from ddiloco.protocol import events
from ddiloco.protocol.events import Commit
from ddiloco.protocol.states import clock_violations, join_clocks
from tests.protocol import disasters
from tests.protocol.disasters import stormy
from tests.protocol.ledger import Ledger, Staged
from tests.protocol.storms import STORM_SECONDS, calm, heal, notes
from tests.protocol.virtual import Pace, Weather, World
from tests.worlds import check_all, struck


def test_clocks_by_hand():
  """The worlds judge their snapshots by these two functions."""
  assert join_clocks({0: 5, -2: 3}, {0: 4, 1: 7, -2: 9}) == {0: 5, 1: 7, -2: 9}
  cut = {0: {0: 5, -2: 3}, 1: {}, -2: {-2: 3, 0: 5, 9: 99}}
  assert clock_violations(cut) == []
  assert clock_violations({**cut, 0: {0: 4, -2: 4}}) == [(-2, 0), (0, -2)]
  assert clock_violations({**cut, 0: {0: 5, 1: 1}}) == [(0, 1)]


@pytest.mark.parametrize("block", range(4))
def test_disasters(block):
  """Nothing is merged twice on the way to any value, snapshots are cuts, and all recover."""
  counted = check_all(disasters.check, range(block * 40, block * 40 + 40))
  assert struck(counted, disasters.KINDS), counted
  assert counted["snapshots"] > 50 and counted["regained"] and counted["went_back"], counted


def test_runs_that_die_still_end_at_the_same_versions():
  """What is lost is done again: no more and no less is merged than was asked for."""
  for seed in range(12):
    world = stormy(seed, target_tokens=600, blocking=seed % 3 == 0)
    world.run(2.0)
    world.restore_all()
    world.run(STORM_SECONDS + 1.0)
    world.weather = Weather()
    while not (world.learners() and all(a.state.done for a in world.learners())):
      assert world.now < 240, f"{seed=}: still waiting to end {world.sync}"
      world.run(world.now + 0.5)
    for p, f in world.store.items():
      assert f.merged_tokens == 10 * len(world.ledger.contents[p, f.last_round]) >= 600
      ends = {a.state.fragments[p].round for a in world.learners()}
      assert ends == {f.last_round}, f"{seed=}: fragment {p} ends with {ends}, not {f}"


def test_a_learner_goes_on_from_an_old_part_while_others_train():
  """Its steps of then count once: those merged since are in what it receives, the rest it has."""
  kept = overwritten = 0
  for seed in range(20):
    rng = random.Random(f"old part {seed}")
    world = calm(seed=seed, jitter=0.4, snapshot_steps=3)
    world.run(rng.uniform(1.0, 3.0))
    snapshot = rng.choice(list(world.snapshots)[-2:])
    world.run(world.now + rng.uniform(0.0, 0.3))
    world.restore(("learner", 1), snapshot)
    world.run(world.now + 0.3)
    actor = world.actors["learner", 1]
    assert actor.state.joined, f"{seed=}: it waits for something"
    for p, copy in world.snapshots[snapshot]["learner", 1].parameters.copies.items():
      still = set(copy.mine).intersection(actor.parameters.copies[p].mine)
      kept, overwritten = kept + bool(still), overwritten + (set(copy.mine) > still)
    heal(world)
    assert not any(a.idle_seconds for a in world.learners())
    steps = [a.state.global_step for a in world.learners()]
    assert max(steps) - min(steps) < 12, "its global step is the run's"
  assert kept > 3 and overwritten > 3, (kept, overwritten)


def test_a_shard_that_restarts_takes_no_snapshot_with_what_came_after_it():
  """Somebody slow records late; meanwhile a shard merges what others made later, and dies."""
  complete = 0
  for seed in range(4):
    rng = random.Random(f"restarts {seed}")
    sync = SyncConfig(num_shards=2, num_fragments=4, sync_period=3, snapshot_steps=6)
    sync = dataclasses.replace(sync, overlap_steps=0, grace_safety=0.0)
    world = World(sync, Pace((0.05, 0.06, 0.9), 0.4), seed)
    for _ in range(12):
      shard = ("syncer", rng.randrange(2))
      world.at(rng.uniform(1.0, 8.0), world.kill, shard, 0.02)
    world.run(9.0)
    complete += len(world.snapshots)
  assert complete > 8, complete


@pytest.mark.parametrize("again", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("nothing", [False, True], ids=["old", "nothing"])
def test_a_lost_shard_gets_its_values_back(again, nothing):
  """It and its copies are gone: learners give back what they have, and train on meanwhile."""
  for seed in range(5):
    world = calm(seed=seed, jitter=0.4, snapshot_steps=4)
    for _ in range(1 + again):
      world.run(world.now + 2.0 + seed / 20)
      old = None if nothing else list(world.snapshots)[-3]
      world.kill(("syncer", 0))
      world.run(world.now + 0.3)  # what it has sent arrives
      had = {p: f.version for p, f in world.store.items()}
      world.restore(("syncer", 0), old, recovery_seconds=1.0)
      assert any(f.version < had[p] for p, f in world.store.items())
      world.run(world.now + 0.5)
      assert all(f.version >= had[p] for p, f in world.store.items()), f"{seed=}: lost"
    assert notes(world, "regained") and not notes(world, "lost")
    heal(world)
    assert not any(a.idle_seconds for a in world.learners())


def test_who_comes_too_late_with_a_value_is_told_so():
  """A round was made without it: the run goes on from that one, and ends with it."""
  for seed in range(5):
    world = calm(seed=seed, snapshot_steps=4, jitter=0.4)
    world.run(2.0 + seed / 20)
    snapshot = max(world.snapshots)
    for m in range(3):
      world.kill(("learner", m))
    world.restore(("syncer", 0), None)
    for m in (0, 2):
      world.start(("learner", m))
    world.run(world.now + 1.5)
    world.restore(("learner", 1), snapshot)
    assert not notes(world, "lost")
    world.run(world.now + 1.0)
    assert {f.learner for _, f in notes(world, "lost")} == {1}, f"{seed=}"
    assert not notes(world, "regained")
    heal(world)


def test_snapshots_go_on_whatever_happened():
  """Numbers only grow, and after the storm every one of them is complete again."""
  for seed in range(12):
    world = stormy(seed)
    heal(world)
    world.weather = Weather()
    world.run(world.now + 3.0)
    before = max(world.snapshots, default=0)
    periods = 3 + 8 // world.sync.snapshot_steps
    world.run(world.now + periods * world.sync.snapshot_steps * max(world.pace.step_seconds) * 1.3)
    assert max(world.snapshots, default=0) > before, f"{seed=}: no more snapshots, {world.sync}"
    numbers: dict = {}
    for _, actor, action in world.history:
      if isinstance(action, events.Captured):
        assert action.snapshot > numbers.get(actor, -1), f"{seed=}"
        numbers[actor] = action.snapshot


# --- lock-step ------------------------------------------------------------------------------------


class Trace(Ledger):
  """Also remembers what a run that repeats another one must repeat: steps, copy-outs, versions."""

  def __init__(self, sync: SyncConfig):
    super().__init__(sync)
    self.trace: dict[tuple, object] = {}

  def write(self, what: object, *key) -> None:
    assert self.trace.setdefault(key, what) == what, f"{key}: {self.trace[key]}, now {what}"

  def step(self, actor) -> None:
    super().step(actor)
    self.write(actor.state.global_step, "global_step", actor.number, len(actor.parameters.trained))

  def check_push(self, actor, said: events.CopyOut) -> None:
    key = actor.number, said.fragment, said.version
    self.write((actor.state.step, said.steps, actor.state.global_step), "copy_out", *key)
    super().check_push(actor, said)

  def apply(self, actor, p: int, staged: Staged) -> None:
    key = actor.number, p, self.versions[p, staged.round]
    self.write((actor.state.step, staged.mode, staged.included), "apply", *key)
    super().apply(actor, p, staged)

  def commit(self, commit: Commit) -> None:
    super().commit(commit)
    merged = len(self.contents[commit.fragment, commit.round])
    key = commit.fragment, commit.version
    self.write((commit.learners, commit.steps, merged), "commit", *key)


BAD = Weather((0.001, 0.1), drop=0.04, duplicate=0.1, reorder=True)


def lock_step(seed: int, weather: Weather) -> World:
  rng = random.Random(f"lock-step {seed}")
  learners, fragments = rng.randint(1, 4), rng.randint(1, 5)
  settings = {
    "num_shards": rng.randint(1, min(3, fragments)),
    "num_fragments": fragments,
    "sync_period": rng.randint(2, 7),
    "snapshot_steps": rng.randint(1, 9),
    "liveness_seconds": 3.0,  # who is merely late is waited for
    "grace_safety": 0.0,
  }
  settings |= {"overlap_steps": rng.randint(0, settings["sync_period"] - 1)}
  sync = SyncConfig(**settings, min_quorum=learners, blocking=True)
  pace = Pace(tuple(rng.uniform(0.05, 0.15) for _ in range(learners)), 0.4)
  return World(sync, pace, seed, weather, ledger=Trace(sync))


def until_step(world: World, steps: int) -> None:
  start = world.now

  def there() -> bool:
    return all(a.state.step >= steps for a in world.learners())

  world.run(start + 400.0, stop=there)
  assert there(), f"stuck: {[a.state.step for a in world.learners()]}"


@pytest.mark.parametrize("block", range(3))
def test_a_lock_step_run_that_was_killed_repeats_what_it_lost(block):
  """All die, at any moment, again and again: every step, copy-out and version is as without."""
  went_back = 0
  for seed in range(block * 6, block * 6 + 6):
    undisturbed, world = lock_step(seed, Weather()), lock_step(seed, BAD if seed % 2 else Weather())
    until_step(undisturbed, 40)
    rng = random.Random(f"kills {seed}")
    try:
      for _ in range(3):
        world.run(world.now + rng.uniform(0.2, 2.0))
        world.restore_all()
        went_back += bool(world.snapshots)
      until_step(world, 40)
    except Exception as error:
      raise AssertionError(f"{seed=}: {error!r}\n{world.sync}") from error
    expected, found = undisturbed.ledger.trace, world.ledger.trace
    both = expected.keys() & found.keys()
    assert {k: found[k] for k in both} == {k: expected[k] for k in both}, f"{seed=}"
    assert len(both) >= 0.8 * len(expected)
  assert went_back > 5


@pytest.mark.parametrize("seed", [1905, 2902])
def test_the_only_learner_is_believed_again_when_it_is_heard_after_a_silence(seed):
  """All had died, it is ahead of what its shard knows, and was taken for lost meanwhile."""
  assert disasters.check(seed, disasters.BEFORE)["commits"]
