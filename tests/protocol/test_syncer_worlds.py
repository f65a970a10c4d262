"""The two reducers in hundreds of random worlds: storms, kills, lock-step, bad updates."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from ddiloco.config import SyncConfig
from ddiloco.protocol import events, learner
from ddiloco.protocol.messages import ToLearner, ToShard
from ddiloco.protocol.states import SyncerState
from tests.protocol import storms
from tests.protocol.storms import STORM_SECONDS, calm, heal, notes, random_world
from tests.protocol.virtual import Pace, Weather, World
from tests.worlds import check_all, struck


@pytest.mark.parametrize("block", range(10))
def test_storms(block):
  """Nothing merged twice, nothing vanishes, versions only go up, all recover (see `Ledger`)."""
  counted = check_all(storms.check, range(block * 40, block * 40 + 40))
  assert struck(counted, storms.KINDS), counted


KINDS = [*ToShard.__subclasses__(), *ToLearner.__subclasses__()]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("min_quorum", [1, 3])
def test_recovers_from_losing_every_message_of_a_kind(kind, min_quorum):
  for seed, start in enumerate((0.0, 1.0)):  # before joining, and on the way
    world = calm(seed=seed, min_quorum=min_quorum)
    world.at(start, setattr, world, "weather", Weather(lost_kinds=(kind,)))
    world.at(1.5, world.kill, ("learner", 2), 0.3)
    heal(world)
    assert all(a.state.joined for a in world.learners())


def test_survivors_do_not_notice_a_kill():
  for seed in range(15):
    worlds = [calm(seed=seed, jitter=0.3, min_quorum=2) for _ in range(2)]
    worlds[1].at(1.0 + seed / 10, worlds[1].kill, ("learner", 1))
    worlds[1].at(2.0, worlds[1].kill, ("syncer", seed % 2), 0.7)
    for world in worlds:
      world.run(5.0)
    for m in (0, 2):
      times = [world.actors["learner", m].step_times for world in worlds]
      assert times[0] == times[1] and len(times[0]) > 35, f"{seed=} learner {m}"
    assert max(t for t, _ in worlds[1].commits()) > 4.0


def test_a_slow_learner_slows_nobody():
  sync = SyncConfig(num_shards=1, num_fragments=2, sync_period=12)
  both = World(sync, Pace((0.1, 0.1, 0.35)))
  without = World(sync, Pace((0.1, 0.1)))
  for world in (both, without):
    world.run(10.0)
  for m in (0, 1):
    with_it, alone = (w.actors["learner", m].step_times for w in (both, without))
    offset = with_it[0] - alone[0]  # of joining
    assert with_it[:85] == pytest.approx([t + offset for t in alone[:85]], abs=1e-9)
  # A round waits for it at most one step of the others, the grace window.
  assert len(both.commits()) >= 0.8 * len(without.commits())
  assert any(2 in c.learners for _, c in both.commits()), "yet it takes part"


def test_one_rule_says_how_many_are_a_quorum(monkeypatch):
  """Another rule in place of `sync.min_quorum` counts where rounds start and where they commit."""
  monkeypatch.setattr(SyncerState, "quorum", 3)
  world = calm(min_quorum=1, grace_safety=0.0, jitter=0.5)
  world.run(5.0)
  merged = [len(commit.learners) for _, commit in world.commits()]
  assert len(merged) > 10 and set(merged) == {3}


def test_grace_waits_at_most_one_step():
  waited = []
  for seed in range(40):
    world = random_world(seed, blocking=False, min_quorum=1, grace_safety=0.9)
    world.weather = Weather()
    world.run(3.0)
    longest = max(world.pace.step_seconds) * (1 + world.pace.jitter)
    graces = [fields.grace_seconds for _, fields in notes(world, "commit")]
    slack = world.pace.merge_seconds * world.sync.num_fragments  # a shard that merges is not awake
    assert max(graces, default=0) <= longest + slack + 1e-9, f"{seed=}"
    waited += graces
  assert max(waited) > 0.05, "the window is really used"


def test_rounds_are_staggered_and_one_at_a_time():
  world = calm(num_shards=2, num_fragments=8, sync_period=24, jitter=0.01)
  world.run(9.0)
  first = {}
  for time, fields in notes(world, "round"):
    first.setdefault(fields.fragment, time)
  starts = sorted(first.values())
  assert list(first) == list(range(8))
  # One is due every H / P = 3 steps of 0.1 s.
  assert all(0.25 < b - a < 0.35 for a, b in itertools.pairwise(starts)), starts
  for seed in range(30):
    world = random_world(seed)
    world.run(STORM_SECONDS)
    open_rounds: dict[tuple, int] = {}
    for _, actor, action in world.history:
      if isinstance(action, events.Round):
        key = actor, action.fragment
        known = open_rounds.get(key, action.round)  # the same again: it asks more learners
        assert known == action.round, f"{seed=}: two rounds of {key} in flight"
        open_rounds[key] = action.round
      elif isinstance(action, events.Commit | events.Abandoned):
        assert open_rounds.pop((actor, action.fragment)) == action.round


@pytest.mark.parametrize("num_fragments, overlap", [(1, 0), (4, 2)], ids=["diloco", "streaming"])
@pytest.mark.parametrize("delay", [(0.001, 0.001), (0.001, 0.3)])
def test_lock_step_schedule(num_fragments, overlap, delay):
  """Fragment p is copied at step ceil(H (p+1) / P), then every H, and applied tau steps later."""
  sync = SyncConfig(
    num_shards=1,
    num_fragments=num_fragments,
    sync_period=8,
    overlap_steps=overlap,
    min_quorum=3,
    blocking=True,
  )
  world = World(sync, Pace((0.1, 0.12, 0.2), 0.3), weather=Weather(delay))
  steps = {("learner", m): {events.CopyOut: {}, events.Apply: {}} for m in range(3)}

  def watch():  # the newest action of the history happened at the actor's present step
    for _, actor, action in world.history[watch.seen :]:
      if isinstance(action, events.CopyOut | events.Apply) and (
        action.version or action.kind == "copy_out"
      ):
        steps[actor.role][type(action)].setdefault(action.fragment, []).append(actor.state.step)
    watch.seen = len(world.history)
    return min(a.state.step for a in world.learners()) >= 43

  watch.seen = 0
  world.run(60.0, stop=watch)
  assert world.now < 60.0, "deadlock"
  first = {1: [8], 4: [2, 4, 6, 8]}[num_fragments]
  for made in steps.values():
    for p in range(num_fragments):
      cuts = [first[p] + 8 * k for k in range(5)]
      assert made[events.CopyOut][p][: len(cuts)] == cuts
      applied = [s + overlap for s in cuts if s + overlap < 43]
      assert made[events.Apply][p][: len(applied)] == applied
  assert all(c.learners == (0, 1, 2) for _, c in world.commits())


def test_lock_step_survives_a_rejoin():
  for seed in range(10):
    world = calm(seed=seed, min_quorum=3, blocking=True, overlap_steps=seed % 3)
    world.at(0.5 + seed / 5, world.kill, ("learner", seed % 3), 0.4)
    world.run(2.5)
    heal(world)
    assert all(a.state.joined for a in world.learners())


@pytest.mark.parametrize("seed", [*range(12), 114])
def test_a_quorum_goes_on_in_lock_step_without_those_that_died_for_good(seed):
  """In world 114 the one that is left was behind, and counted steps that were not believed."""
  rng, world = random.Random(f"gone {seed}"), random_world(seed, blocking=True)
  learners = len(world.pace.step_seconds)
  for m in rng.sample(range(learners), learners - world.sync.min_quorum):
    world.at(rng.uniform(0.3, 3.5), world.kill, ("learner", m))
  heal(world)
  assert all(a.state.joined for a in world.learners())


@pytest.mark.parametrize(
  "measured, reason",
  [
    ({"norm": math.nan}, "not finite (nan)"),
    ({"norm": math.inf}, "not finite (inf)"),
    ({"norm": 1e6}, "norm 1e+06 is over sync.max_norm_ratio (10) x 1"),
    ({"fault": "payload of 3 bytes, expected 4"}, "payload of 3 bytes, expected 4"),
  ],
  ids=["nan", "inf", "exploding", "malformed"],
)
@pytest.mark.parametrize("apply", ["rebase", "overwrite"])
def test_bad_updates_are_rejected_and_their_learner_rejoins(measured, reason, apply):
  world = calm(quarantine_after=3, apply=apply)
  good = {"norm": 1.0}
  world.measure = lambda push: measured if (push.learner, push.incarnation) == (1, 0) else good
  heal(world)
  assert world.starts["learner", 1] == 1, "told to rejoin once"
  assert any(fields.rejoin for _, fields in notes(world, "rejected"))
  rejected = [fields for _, fields in notes(world, "rejected")]
  assert len(rejected) >= 3 and rejected[0].reason == reason
  assert any(1 in c.learners for _, c in world.commits()), "takes part again"
  pushed = {s[:2] for delta in world.ledger.taken_in.values() for s in delta.steps}
  merged = {s[:2] for content in world.ledger.contents.values() for s in content}
  assert merged == pushed - {(1, 0)} and (1, 1) in merged


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("stormy", [False, True])
def test_a_learner_that_drains_loses_nothing(stormy, blocking):
  """Under rebase all of its steps are in the global model when it says goodbye."""
  left, unmerged_when_told = 0, 0
  for seed in range(40):
    world = random_world(seed, apply="rebase", min_quorum=1, blocking=blocking)
    world.measure = lambda push: {"norm": float(push.steps)}  # none is out of proportion
    if not stormy:
      world.weather = Weather()
    world.at(STORM_SECONDS, setattr, world, "weather", Weather())
    told_at = random.Random(f"told {seed}").uniform(0.5, STORM_SECONDS + 2.0)
    world.run(told_at)
    if ("learner", 0) not in world.actors:
      continue  # killed just now
    actor = world.actors["learner", 0]
    fragments = range(world.sync.num_fragments)
    before = max(world.ledger.lost_steps(actor, p) for p in fragments)
    step = actor.state.step
    actor.drain()
    world.run(told_at + 30, stop=lambda a=actor: a.state.done or not a.alive)
    if not actor.alive:
      continue  # killed before it could leave
    assert actor.state.done, f"{seed=}: it does not leave, {actor.state}"
    assert actor.state.step <= step + 1, f"{seed=}: no further step than the one it was in"
    lost = [world.ledger.lost_steps(actor, p) for p in fragments]
    assert lost == [0] * len(fragments), f"{seed=}: of {actor.state.step} steps {lost} are lost"
    assert learner.unmerged_tokens(actor.state) == 0
    left, unmerged_when_told = left + (actor.state.step > 0), unmerged_when_told + (before > 0)
    if len(world.pace.step_seconds) > 1 and not world.sync.blocking:
      count = len(world.commits())
      world.run(max(world.now, STORM_SECONDS) + 4.0)
      assert len(world.commits()) > count, f"{seed=}: the others go on"
  assert left > 20 and unmerged_when_told > 20


def test_a_world_replays_exactly():
  def history(seed):
    world = random_world(seed)
    world.run(4.0)
    return [(t, a.role, a.incarnation, action) for t, a, action in world.history]

  assert history(7) == history(7) and history(7) != history(8)
