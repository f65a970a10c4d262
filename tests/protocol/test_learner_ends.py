"""How things end: the same versions everywhere, and who leaves takes no work along."""

from __future__ import annotations

import dataclasses

import pytest

from ddiloco.protocol import learner, syncer
from ddiloco.protocol.actions import Staged, StepDone, Tick
from ddiloco.protocol.events import Event
from ddiloco.protocol.messages import (
  EVALUATOR,
  FragmentState,
  Goodbye,
  Publish,
  Pull,
  Push,
  Rejection,
  Value,
)
from ddiloco.protocol.rules import backed_off
from ddiloco.protocol.values import replace
from tests import says
from tests.protocol import endings
from tests.protocol.scripts import ALONE, SYNC, Script, join, push, report
from tests.protocol.storms import STORM_SECONDS, calm, notes, random_world
from tests.protocol.virtual import Weather, World
from tests.says import hello
from tests.worlds import check_all, struck

STEP = StepDone(0.1, 10, 0.1)

STAGED = Staged(0, 0.2)


# --- the end of the run ---------------------------------------------------------------------------


@pytest.mark.parametrize("block", range(4))
def test_the_run_ends_at_the_same_versions_everywhere(block):
  """Storms, kills, slow and fast: who finished has of every fragment what its shard ends with."""
  counted = check_all(endings.check, range(block * 20, block * 20 + 20))
  assert struck(counted, endings.KINDS), counted


def test_a_short_run_whose_messages_are_late_ends_though_most_of_its_steps_are_lost():
  """Its only learner made over 16 times the steps that the run needs, and was asked no more."""
  assert endings.check(40506, endings.BEFORE)["ended"]


@pytest.mark.parametrize("seed", [2651, 2683, 4366, 8005, 9465])
def test_learners_out_of_phase_do_not_wait_for_each_other_in_lock_step(seed):
  """Some came back from kills with other counters, and were due for another fragment."""
  assert endings.check(seed, endings.BEFORE)["ended"]


def test_in_lock_step_all_come_back_where_the_global_step_was_higher():
  """Their steps since the last sync were not believed, and all waited for ever."""
  assert endings.check(60886)["ended"]


@pytest.mark.parametrize(
  "versions, steps, global_step, waits",
  [
    ((1, 1), (2, 1), 2, ""),
    ((1, 1), (2, 1), 3, "fragment 0: the pull"),
    ((1, 1), (1, 1), 4, "fragment 0: the pull"),  # it has come back, and the others wait for it
    ((2, 1), (1, 2), 3, ""),
    ((2, 1), (1, 2), 4, "fragment 1: the pull"),
    ((2, 1), (1, 2), 5, "fragment 1: the pull"),  # also where fragment 0 is due
    ((1, 3), (1, 1), 3, "fragment 0: the pull"),
    ((1, 1), (0, 0), 4, ""),  # without a step it could not answer: it makes one
    ((2, 1), (1, 0), 5, ""),
  ],
)
def test_in_lock_step_fragments_take_turns(versions, steps, global_step, waits):
  """Fragment 0 is due after odd global steps, fragment 1 after even ones, as versions say."""
  lock_step = dataclasses.replace(SYNC, blocking=True)
  one = Script(lock_step, role="learner")
  join(one)
  fragments = []
  for f, version, made in zip(one.state.fragments, versions, steps):
    newest = replace(f.base_header, version=version)
    fragments.append(
      replace(f, version=version, base_header=newest, steps_since_sync=made, steps=made)
    )
  one.state = replace(one.state, fragments=tuple(fragments), global_step=global_step)
  assert learner.waiting_for(one.state, lock_step) == waits


def test_in_lock_step_steps_overlap_with_the_exchange():
  lock_step = dataclasses.replace(SYNC, blocking=True, sync_period=4, overlap_steps=2)
  one, waits = Script(lock_step, role="learner"), []
  whole = join(one)
  version = replace(whole, version=1, round=7, merged_rounds={0: 7})  # not on the devices yet
  for event in (STEP, STEP, Pull(0, 0, 0, 0, 7, 0, 0), STEP, STEP, version):
    one.feed(event)
    waits.append(learner.waiting_for(one.state, lock_step))
  assert waits == ["", "fragment 0: the pull", "", "", *["fragment 0: its new version"] * 2]


def test_in_lock_step_a_push_of_an_abandoned_round_is_due():
  """Asked before it was due, it waits for the version: no further step would make it due."""
  lock_step = dataclasses.replace(SYNC, blocking=True)
  one = Script(lock_step, role="learner")
  join(one)
  one.feed(STEP)
  one.feed(Pull(0, 0, 0, 1, 7, 0, 0))
  said = {
    sync.blocking: [a.message.steps_since_sync for a in learner.reports(one.state, sync)]
    for sync in (SYNC, lock_step)
  }
  assert said == {False: [(1, 1)], True: [(1, 2)]}


def test_a_pull_waits_for_the_base_to_which_a_rejected_push_goes_back():
  """Before that the parameters still have the rejected work."""
  one = Script(role="learner")
  join(one)
  one.feed(STEP)
  asks = [Pull(0, 0, 0, 0, made, 0, 0) for made in (7, 8)]
  assert [type(a.message) for a in one.feed(asks[0])] == [Push]
  one.feed(Rejection(0, 0, 0, fragment=0, round=7, rejoin=False, reason="too long"))
  assert one.feed(asks[1]) == [] == one.feed(STEP), "the base is being staged"
  [applied] = one.feed(STAGED)
  assert applied.mode == "reset" and one.state.fragments[0].steps == 0
  [again] = one.feed(STEP)
  assert isinstance(again.message, Push) and again.message.steps == 1


def test_a_fragment_that_is_complete_is_never_pulled_again():
  shard = Script(ALONE)
  done = FragmentState(0, 3, merged_tokens=50, last_round=2)
  shard.state = syncer.init(0, 1, (done, FragmentState(1)), ALONE, 50)
  sends = shard.feed(report(0, (3, 0), (9, 9)), 1.0)
  pulled = [a.message.fragment for a in says.sends(sends, Pull)]
  assert pulled == [1]


def test_lock_step_does_not_wait_for_the_pull_of_a_complete_fragment():
  lock_step = dataclasses.replace(SYNC, blocking=True)
  one = Script(lock_step, role="learner")
  join(one)
  assert not learner.waiting_for(one.state, lock_step)
  one.feed(STEP)
  assert learner.waiting_for(one.state, lock_step) == "fragment 0: the pull"
  complete = replace(one.state.fragments[0], merged_tokens=10_000)
  one.state = replace(one.state, fragments=(complete, one.state.fragments[1]))
  assert not learner.waiting_for(one.state, lock_step)


def test_a_shard_is_finished_when_the_model_is_saved_and_everybody_has_left():
  """Of a run whose evaluator failed at each of its starts nobody ever got the final model."""
  shard = Script(ALONE)
  shard.state = syncer.init(0, 0, (FragmentState(0), FragmentState(1)), ALONE, 10)
  shard.feed(hello(0, 0))
  for p in (0, 1):
    steps_since_sync = tuple(int(p == q) * 2 for q in (0, 1))
    versions = tuple(int(q < p) for q in (0, 1))
    [pull] = [
      a.message for a in says.sends(shard.feed(report(0, versions, steps_since_sync)), Pull)
    ]
    assert not syncer.finished(shard.state, 0.0, 30.0)
    shard.feed(push(0, pull.round, fragment=p), norm=1.0)
  assert [f.merged_tokens for f in shard.state.fragments] == [10, 10]
  assert not syncer.finished(shard.state, 1e6, 30.0), "an evaluator may come for the model"
  shard.feed(hello(EVALUATOR, 0))
  assert not syncer.finished(shard.state, 1e6, 30.0), "it may come back for the model"
  shard.feed(Goodbye(EVALUATOR, 0))
  assert not syncer.finished(shard.state, 0.0, 30.0), "learner 0 has not got it yet"
  assert syncer.finished(shard.state, 31.0, 30.0), "silent for too long"
  shard.feed(report(0, (1, 1), (0, 0)), 20.0)
  assert not syncer.finished(shard.state, 49.0, 30.0) and syncer.finished(shard.state, 51.0, 30.0)
  shard.feed(Goodbye(0, 0))
  assert syncer.finished(shard.state, 0.0, 30.0)
  back = replace(shard.state, recovery_deadline=9.0)
  assert not syncer.finished(back, 8.0, 30.0), "its members may begin slowly"
  assert syncer.finished(back, 9.0, 30.0)
  older = back.with_fragment(1, merged_tokens=5)
  assert not syncer.finished(older, 9.0, 30.0), "an evaluator that was ended said goodbye too soon"


@pytest.mark.parametrize("known", [False, True])
def test_a_restarted_shard_hears_an_evaluator_that_leaves_before_it_has_reported(known):
  """The shard waited for ever for an evaluator that had saved the model, and was gone."""
  shard = Script(ALONE)
  fragments = tuple(FragmentState(p, 3, merged_tokens=10) for p in (0, 1))
  shard.state = syncer.init(0, 1, fragments, ALONE, 10)
  if known:  # by its former incarnation
    shard.feed(hello(EVALUATOR, 0))
  shard.feed(Goodbye(EVALUATOR, 1))
  assert shard.state.model_saved and not shard.state.members
  assert syncer.finished(shard.state, 0.0, 30.0)


# --- leaving --------------------------------------------------------------------------------------


def drained(world: World, role: tuple[str, int], within_seconds: float) -> None:
  """Waits until it has left, and checks that the model has every step it ever made."""
  actor, told_at = world.actors[role], world.now
  while not actor.state.done:
    assert world.now < told_at + within_seconds, f"has not left: {actor.state}"
    world.run(world.now + 0.1)
  assert learner.unmerged_tokens(actor.state) == 0
  for p, f in enumerate(actor.state.fragments):
    if world.store[p].merged_tokens >= world.config.run.total_tokens:
      continue
    discarded = actor.parameters.copies[p].discarded
    lost = world.ledger.lost_steps(actor, p)
    assert lost == len(discarded), f"fragment {p}: a step was taken along"
    assert f.tokens == 0 and (lost == 0 or world.sync.apply != "rebase")


@pytest.mark.parametrize("apply", ["rebase", "overwrite", "mix"])
@pytest.mark.parametrize("seconds", [0.05, 0.5, 2.0, 2.3, 2.6, 3.1])
def test_who_leaves_takes_no_work_along(apply, seconds):
  for seed in range(6):
    world = calm(seed=seed, jitter=0.3, apply=apply)
    world.run(seconds + seed / 40)
    steps = world.actors["learner", 1].state.step
    world.actors["learner", 1].drain()
    drained(world, ("learner", 1), 1.0)
    assert world.actors["learner", 1].state.step <= steps + 1, "no step after the one under way"
    before = len(world.commits())
    world.run(world.now + 2.0)
    assert len(world.commits()) > before, "the others go on"
    assert not any(a.idle_seconds for a in world.learners()), "one waited"


@pytest.mark.parametrize("overlap", [0, 2])
def test_who_leaves_a_lock_step_run_takes_no_work_along(overlap):
  for seed in range(12):
    world = calm(seed=seed, jitter=0.3, blocking=True, overlap_steps=overlap, min_quorum=2)
    world.run(1.5 + seed / 10)
    world.actors["learner", 1].drain()
    drained(world, ("learner", 1), 3.0)
    assert world.actors["learner", 1].state.done


def test_who_leaves_still_needs_a_quorum():
  world = calm(min_quorum=3)
  world.run(2.0)
  world.actors["learner", 1].drain()
  drained(world, ("learner", 1), 2.0)  # as the others become due, and before they are too few
  assert world.actors["learner", 1].state.done


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("min_quorum, lost", [(2, ()), (4, ()), (3, (0, 1))])
def test_where_all_leave_nobody_takes_work_along(min_quorum, lost, blocking):
  """The last steps of who left last found no quorum: they were lost when its time was over."""
  for seed in range(12):
    world = calm(4, seed=seed, jitter=0.3, min_quorum=min_quorum, blocking=blocking)
    world.run(1.5 + seed / 10)
    for m in lost:
      world.kill(("learner", m))
    leaving = [actor.role for actor in world.learners()]
    for role in leaving:
      world.actors[role].drain()
    for role in leaving:
      drained(world, role, 4.0)
      assert world.actors[role].state.done, f"{seed=}: {role}"


def test_who_leaves_in_a_storm_leaves_when_it_is_over():
  for seed in range(60):
    world = random_world(seed, min_quorum=1)
    role = ("learner", seed % len(world.pace.step_seconds))
    world.run(1.0)
    if (actor := world.actors.get(role)) is None:
      continue
    actor.drain()
    world.run(STORM_SECONDS)
    world.weather = Weather()
    while actor.alive and not actor.state.done:
      assert world.now < STORM_SECONDS + 25.0, f"{seed=}: has not left"
      world.run(world.now + 0.5)


def test_nobody_there_to_merge_it_is_said():
  world = calm(num_shards=1)
  world.run(2.0)
  world.kill(("syncer", 0))
  actor = world.actors["learner", 0]
  step = actor.state.step + 1  # the one under way
  actor.drain()
  world.run(4.0)
  assert not actor.state.done and actor.state.step == step
  left = max(f.tokens for f in actor.state.fragments)
  assert learner.unmerged_tokens(actor.state) == left > 0
  _, actions = learner.leave(actor.state, "enough")
  [stopped] = [a for a in actions if isinstance(a, Event)]
  assert (stopped.reason, stopped.unmerged_tokens) == ("enough", left)


def test_who_has_not_joined_or_trains_alone_leaves_at_once():
  for owners in ((0, 0), ()):
    state = learner.drain(learner.init(0, 0, owners, 10_000))
    state, actions = learner.learner_on(state, Tick(0.0), SYNC)
    assert state.done and [a.kind for a in actions if isinstance(a, Event)] == ["stopped"]
    assert len(says.sends(actions, Goodbye)) == (1 if owners else 0)
    assert learner.learner_on(state, STEP, SYNC) == (state, []), "it says so once"


def test_the_rest_of_a_complete_fragment_holds_up_nobody():
  one = Script(role="learner")
  whole = join(one)
  one.feed(STEP)
  one.state = learner.drain(one.state)
  assert not one.state.done and learner.unmerged_tokens(one.state) == 10
  for p in (0, 1):
    final = replace(whole, fragment=p, version=1, round=0, merged_tokens=10_000)
    [stage] = one.feed(final)
    assert isinstance(stage.publish, Publish)
    one.feed(replace(STAGED, fragment=p))
  assert one.state.done and learner.unmerged_tokens(one.state) == 0
  assert one.state.fragments[0].tokens == 10


def test_a_leaving_learner_reports_what_it_has_not_since_when():
  """After a version that went on without it, `since` is 0 and its steps are still to be merged."""
  one = Script(role="learner")
  whole = join(one)
  one.feed(STEP)
  one.feed(STEP)
  one.feed(replace(whole, version=1, round=0))
  one.feed(STAGED)
  assert [a.message.steps_since_sync for a in learner.reports(one.state, SYNC)] == [(0, 2)]
  one.state = learner.drain(one.state)
  assert [a.message.steps_since_sync for a in learner.reports(one.state, SYNC)] == [(1, 2)]
  assert all(a.message.leaving for a in learner.reports(one.state, SYNC))
  one.state = one.state.with_fragment(1, steps=0, tokens=0)
  [report] = learner.reports(one.state, SYNC)
  assert report.message.steps_since_sync == (1, 0), "it has nothing of fragment 1 to merge"


# --- bounds ---------------------------------------------------------------------------------------


def test_patience_doubles_but_not_for_ever():
  assert [backed_off(2.0, n) for n in range(6)] == [2, 4, 8, 16, 30, 30]
  assert backed_off(45.0, 9) == 45 and backed_off(0.5, 10**6) <= 30


def test_a_shard_that_has_lost_commits_says_so_if_nobody_gives_them_back():
  world = calm()
  world.run(3.0)
  had = world.store[0].version
  assert had > 0
  world.weather = Weather(lost_kinds=(Value,))
  world.kill(("learner", 0))
  world.restore(("syncer", 0), None)
  world.start(("learner", 0))  # it alone goes on from what there is
  world.run(4.5, stop=lambda: bool(notes(world, "lost")))
  assert had - 1 <= notes(world, "lost")[0][1].versions[0] <= had
