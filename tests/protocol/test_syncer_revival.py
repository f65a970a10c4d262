"""Snapshots, revivals and lost values, message by message: exact histories, and what liars say."""

from __future__ import annotations

import dataclasses

import pytest

from ddiloco.config import SyncConfig
from ddiloco.protocol import events, learner, rules, syncer
from ddiloco.protocol.actions import (
  InstallValue,
  Read,
  ReadDone,
  Received,
  Resend,
  Send,
  Stage,
  Staged,
  StepDone,
  TakeSnapshot,
  Tick,
)
from ddiloco.protocol.messages import (
  MADE,
  NOTHING,
  FragmentState,
  Goodbye,
  Publish,
  Pull,
  Report,
  RequestValue,
  Welcome,
)
from ddiloco.protocol.values import replace
from tests import says
from tests.protocol.scripts import ALONE, SYNC, Script, join, push, report
from tests.protocol.storms import calm
from tests.says import hello, welcome

OFTEN = dataclasses.replace(ALONE, snapshot_steps=10)
FUTURE = 1 << 60


@pytest.fixture
def shard() -> Script:
  """The only shard, in its second life, of which nobody has said anything yet."""
  return Script(ALONE, incarnation=1)


# --- values that were lost ------------------------------------------------------------------------


def test_a_shard_that_lost_commits_takes_them_back_from_a_learner(shard):
  newer = says.report(0, 0, 9, 0.1, (3, 0), (2, 2), rounds=(7, -1))
  [sent] = shard.feed(newer)
  assert sent == Send(0, RequestValue(0, 1, 0, 0))
  assert shard.feed(newer) == [], "asked once, and again only after a while"
  assert shard.feed(newer, 1.5) == [sent]
  value = says.value(0, 0, 0, 3, 7, 90, {0: 7, 2: 5})
  assert shard.feed(value, content="it") == [InstallValue(0, "it")]
  f = shard.state.fragments[0]
  assert (f.version, f.last_round, f.merged_tokens, f.merged_rounds) == (3, 7, 90, {0: 7, 2: 5})
  assert shard.feed(value) == [], "a duplicate"
  sends = shard.feed(newer, 2.0)
  assert [a.message.fragment for a in sends] == [0, 1] and not shard.state.value_requests
  # Learner 2 lags: it is sent version 3, which says that its push of round 5 is in it.
  sends = shard.feed(says.report(2, 0, 9, 0.1, (1, 0), (1, 1), rounds=(4, -1)), 30.0)
  [publish] = [a.message for a in says.sends(sends, Publish)]
  assert (publish.version, publish.round, publish.merged_round(2)) == (3, 7, 5)


def test_one_fragment_s_value_leaves_the_request_for_another_one_s(shard):
  sends = shard.feed(says.report(0, 0, 9, 0.1, (3, 3), (2, 2), rounds=(7, 6)))
  assert [a.message.fragment for a in sends] == [0, 1]
  for p, made_by in ((0, 7), (1, 6)):
    value = says.value(0, 0, p, 3, made_by, 90, {0: made_by})
    assert InstallValue(p) in shard.feed(value, 0.1)


def test_what_comes_too_late_to_be_given_back_is_said_to_be_lost(shard):
  shard.feed(says.report(0, 0, 9, 0.1, (0, 0), (2, 0)))
  shard.feed(push(0, 1 << 24), norm=1.0)
  assert shard.state.fragments[0].version == 1
  late = says.report(2, 0, 9, 0.1, (3, 0), (1, 1), rounds=(7, -1))
  shard.state, actions = says.shard_on(shard.state, Received(late, 1.0))
  [lost] = [a for a in actions if isinstance(a, events.Lost)]
  assert lost.versions == {0: 3}
  [publish] = [a.message for a in says.sends(actions, Publish)]
  assert publish.version == 1 and publish.base_round == NOTHING, "whole: its base was another one"


def test_a_shard_without_its_newest_values_waits_for_those_it_knew():
  newest = {"version": 4, "merged_tokens": 40, "merged_rounds": {0: 3, 1: 3}, "last_round": 3}
  known = (FragmentState(0, **newest), FragmentState(1))
  for here, started in (((0,), False), ((0, 1), True)):
    state = syncer.init(0, 1, known, ALONE, 1 << 60, recovery_deadline=50.0)
    for m in here:
      ready = says.report(m, 0, 9, 0.1, (4, 0), (2, 2))
      state, _ = says.shard_on(state, Received(ready, 10.0))
    assert bool(state.under_way) == started
  state, _ = says.shard_on(syncer.init(0, 1, known, ALONE, 1 << 60, 50.0), Received(ready, 50.0))
  assert 0 in state.under_way, "time is up"


def test_a_new_shard_waits_for_all_planned_learners_and_no_longer():
  """At the start of a run nobody has anything; of a shard that lost all it had, somebody may."""
  new = syncer.init(
    0, 5, (FragmentState(0), FragmentState(1)), ALONE, 1 << 60, 50.0, planned_learners=2
  )
  ready = [says.report(m, 0, 9, 0.1, (0, 0), (2, 2)) for m in (0, 1, 2)]
  has = says.report(1, 0, 9, 0.1, (3, 0), (2, 2), rounds=(7, -1))
  for reports, started in (
    ((ready[0], ready[1]), True),
    ((ready[0], ready[2]), False),
    ((ready[0], has), False),  # it is asked for its value first
    ((hello(1, 1, (7, -1)), ready[0], ready[0]), False),  # and so is one that was restored
    ((hello(1, 1, (FUTURE, -1)), ready[0], ready[0]), False),  # no such round was made
  ):
    state = new
    for each in reports:
      state, _ = says.shard_on(state, Received(each, 10.0))
    assert bool(state.under_way) == started


def test_a_learner_that_was_here_and_left_is_awaited_no_more():
  """All others waited for the recovery deadline: work of a run that was stopped soon was lost."""
  fragments = FragmentState(0), FragmentState(1)
  state = syncer.init(0, 5, fragments, ALONE, 1 << 60, 50.0, planned_learners=2)
  for m in (0, 1):
    state, _ = says.shard_on(state, Received(says.report(m, 0, 0, 0.1, (0, 0), (0, 0)), 10.0))
  state, _ = says.shard_on(state, Received(Goodbye(0, 0), 11.0))
  assert not state.under_way, "none is due"
  ready = says.report(1, 0, 9, 0.1, (0, 0), (2, 2))
  state, _ = says.shard_on(state, Received(ready, 12.0))
  assert state.under_way.keys() == {0, 1}


# --- recording ------------------------------------------------------------------------------------


def records(script: Script, event) -> list[TakeSnapshot]:
  actions = script.feed_all(event)
  found = [a for a in actions if isinstance(a, TakeSnapshot)]
  assert not found or actions[0] in found or actions[-1] in found
  return found


def test_a_shard_captures_before_it_takes_in_who_has_captured_and_by_its_global_step():
  shard = Script(OFTEN)
  shard.feed(report(0, (0, 0), (1, 1), global_step=9))
  before = shard.state
  [first] = records(shard, replace(push(0, 0), snapshot=10))
  assert first.state.snapshot == 10 and syncer.joined(first.state) == [0]
  assert first.state.under_way[0].pushes == {} == before.under_way[0].pushes
  assert shard.state.fragments[0].version == 1
  assert not records(shard, report(0, (0, 0), (1, 1), global_step=19)), "captured once"
  assert not records(shard, report(0, (0, 0), (1, 1), global_step=25)), (
    "the one before is not saved yet"
  )
  shard.state, actions = says.shard_on(shard.state, Tick(0.0, saved=True))
  [begun] = [a for a in actions if isinstance(a, TakeSnapshot)]
  assert (begun.state.snapshot, begun.state.global_step) == (20, 25)
  assert not records(Script(ALONE), report(0, (0, 0), (1, 1), global_step=199))
  other = Script(OFTEN)
  other.state = replace(other.state, shard=1)
  assert not records(other, report(0, (0, 0), (1, 1), global_step=25)), "shard 0 begins them all"


def test_a_shard_whose_fragments_are_final_begins_no_snapshot():
  """It sends nothing more that has the number: no other role heard of it, and it was given up."""
  final, open_ = (FragmentState(p, 9, merged_tokens=m, last_round=7) for p, m in ((0, 60), (1, 59)))
  for last, begun in ((replace(final, index=1), False), (open_, True)):
    shard = Script(OFTEN)
    shard.state = syncer.init(0, 1, (final, last), OFTEN, 60, began_at=-1000.0)
    shard.feed(hello(0, 0))
    assert bool(records(shard, report(0, (9, 9), (1, 1), global_step=25))) == begun


def test_a_shard_records_nothing_again_that_its_values_may_depend_on():
  values = (FragmentState(0, snapshot=30), FragmentState(1, snapshot=50))
  shard = Script(OFTEN)
  shard.state = syncer.init(0, 1, values, OFTEN, 1 << 60, began_at=-1000.0)
  old = replace(report(0, (0, 0), (1, 1), global_step=59), snapshot=50)
  assert not records(shard, old)
  [new] = records(shard, replace(old, global_step=60, snapshot=60))
  assert {f.snapshot for f in new.state.fragments} == {60}


def test_a_snapshot_waits_for_no_part_of_who_is_lost_or_has_not_joined():
  shard = Script(OFTEN)
  for m, versions in enumerate(((0, 0), (0, -1), (0, 0))):
    shard.feed(report(m, versions, (0, 0)))
  shard.state = shard.state.with_member(2, lost=True)
  [begun] = records(shard, report(0, (0, 0), (1, 1), global_step=15))
  assert syncer.joined(begun.state) == [0]


def test_a_shard_back_from_a_snapshot_without_a_commit_hears_who_knows_its_number():
  """It heard nobody who had been welcomed with that number: the run stood still for ever."""
  values = (FragmentState(0, snapshot=50), FragmentState(1, snapshot=50))
  shard = Script(OFTEN)
  shard.state = syncer.init(0, 1, values, OFTEN, 1 << 60, began_at=-1000.0)
  assert not records(shard, replace(report(0, (0, 0), (0, 0)), snapshot=50))
  assert 0 in shard.state.members
  shard.feed(replace(report(1, (0, 0), (0, 0)), snapshot=60))
  assert 1 not in shard.state.members, "this number is from the future"


def test_a_learner_records_before_it_takes_the_message_in():
  one = Script(role="learner")
  whole = join(one)
  before = one.state
  newer = replace(whole, version=1, round=0, snapshot=4)
  assert records(one, newer) == [TakeSnapshot(replace(before, snapshot=4))]
  assert one.state.fragments[0].newest_version == 1
  assert one.feed(newer) == []
  fresh = Script(role="learner")
  [take, stage] = fresh.feed(replace(whole, snapshot=4))
  assert isinstance(stage, Stage) and fresh.state.snapshot == 4
  assert not take.state.joined, "it has nothing to record"


# --- revived learners -----------------------------------------------------------------------------


def revived(*steps, sync: SyncConfig = SYNC) -> Script:
  """A learner that was recorded after these events, as incarnation 1."""
  one = Script(sync, role="learner")
  join(one)
  for event in steps:
    one.feed(event)
  one.state = learner.revive(one.state, learner.init(0, 1, (0, 0), 10_000))
  return one


STEP = StepDone(0.1, 10, 0.1)
MERGED = says.publish(0, 0, 1, 0, 7, 1, -1, 60, 30, (0, 7), "")


def test_a_revived_learner_waits_until_its_shard_has_said_what_is_newer():
  one = revived(STEP, says.pull(0, 0, 0, 1, 7, 1))
  moved = learner.revive(one.state, learner.init(0, 2, (1, 0), 10_000))
  assert [(f.shard, f.pull) for f in moved.fragments] == [(1, None), (0, None)]
  assert not one.state.joined and one.state.step == 1 and one.state.fragments[0].steps == 1
  assert one.state.step_seconds == 0.1, "a shard knows its pace before its next step"
  assert one.state.vector_clock[0] == rules.numbered(1, 0) > rules.numbered(0, 10**6), (
    "or no snapshot is consistent"
  )
  [report] = learner.reports(one.state, SYNC)
  assert report.message.joins and report.message.rounds == (-1, -1)
  one.feed(says.pull(0, 0, 1, 0, 3, 0))  # overtakes the welcome, which is lost
  [report] = learner.reports(one.state, SYNC)
  assert not one.state.joined and report.message.joins, "it goes on asking"
  one.feed(replace(welcome(0, 0, 1, 60, (0, 1)), rounds=(7, -1)))
  assert [f.fresh for f in one.state.fragments] == [False, True] and one.state.global_step == 60
  assert learner.reports(one.state, SYNC)[0].message.joins, "fragment 0 may get lost on its way"
  one.feed(MERGED)
  assert learner.can_step(one.state, SYNC)


def test_a_revived_learner_that_has_all_tokens_stays_until_its_shard_has_said_that_all_are_merged():
  """The shard may have lost what made them, and needs the learner's values."""
  one = revived()
  complete = tuple(replace(f, merged_tokens=10_000) for f in one.state.fragments)
  one.state = replace(one.state, fragments=complete)
  one.feed(Tick(0.0))
  assert not one.state.done
  one.feed(welcome(0, 0, 1, 60, (0, 1)))
  assert one.state.done


def test_a_revived_learner_compares_no_times_of_another_clock():
  """It came from a machine that is up for long: its new clock is far behind the one of its part."""
  one = revived(StepDone(1e6, 10, 0.1))
  one.feed(replace(welcome(0, 0, 1, 60, (0, 1)), rounds=(7, -1)))
  one.feed(MERGED)
  one.feed(Staged(0, 0.2))
  assert learner.reports(one.state, SYNC)[0].message.idle_seconds == 0.0


@pytest.mark.parametrize(
  "steps, merged, fate",
  [
    ((STEP,), (), (1, 0, 0)),  # nothing of mine was merged since: all goes on
    ((STEP,), (0, 7), (0, 0, 10)),  # a push that I do not remember: it had my step
    ((STEP, says.pull(0, 0, 0, 0, 7, 0), STEP), (0, 7), (1, 10, 0)),  # my push, and one step more
    ((STEP, says.pull(0, 0, 0, 0, 5, 0), STEP), (0, 7), (0, 0, 20)),  # a later push, with all
    ((STEP, says.pull(0, 0, 0, 0, 5, 0), STEP), (), (2, 0, 0)),  # my push was never merged
  ],
)
@pytest.mark.parametrize("welcomed", [False, True])
def test_what_became_of_the_steps_of_a_revived_learner(steps, merged, fate, welcomed):
  """A stale welcome, or a round that was open with a push of the dead, changes nothing."""
  one = revived(*steps)
  if welcomed:
    one.feed(welcome(0, 0, 1, 50, (0, 1)))
    assert one.state.joined
  one.feed(replace(MERGED, merged_rounds=says.by_learner(*merged)))
  [apply] = [a for a in one.feed(Staged(0, 0.2)) if isinstance(a, events.Apply)]
  f = one.state.fragments[0]
  assert (f.steps, f.acknowledged_tokens, f.discarded_tokens) == fate
  assert apply.mode == ("reset" if fate[2] else "rebase" if fate[1] else "halve")


def test_a_welcome_to_or_from_the_dead_makes_nothing_fresh():
  one = revived(STEP)
  one.feed(welcome(0, 1, 1, 50, ()))  # incarnation 1 of the shard owns nothing yet
  for stale in (welcome(0, 0, 1, 99, (0, 1)), welcome(0, 1, 0, 99, (0, 1))):
    assert one.feed(stale) == [] and not one.state.joined
  one.feed(welcome(0, 1, 1, 50, (1,)))
  assert [f.fresh for f in one.state.fragments] == [False, True]


def test_what_was_on_its_way_when_recorded_does_not_count_as_heard_from_the_shard():
  whole = says.publish(0, 0, 0, 0, 5, 1, -1, 50, 30, (), "")
  one = revived(STEP, whole)
  one.feed(Tick(0.0))
  f = one.state.fragments[0]
  assert f.round == 5 and not f.fresh and f.steps == 1


def test_lock_step_answers_a_new_pull_with_the_same_push_and_keeps_its_own_global_step():
  lock_step = dataclasses.replace(SYNC, blocking=True, overlap_steps=1)
  one = revived(STEP, says.pull(0, 0, 0, 0, 5, 0), sync=lock_step)
  made = one.state.fragments[0].outstanding.push
  assert (made.incarnation, made.round, one.state.global_step) == (1, 5, 1)
  later = replace(MERGED, merged_rounds={0: 5})
  early, also = (Script(lock_step, role="learner") for _ in range(2))
  early.state = also.state = one.state
  assert early.feed(says.pull(0, 1, 1, 0, 1 << 24, 1)) == [], "of a version that is not here yet"
  [again] = one.feed(says.pull(0, 1, 1, 0, 1 << 24, 0))
  assert again == Resend(says.plain(replace(made, round=1 << 24)))
  sent = one.state.fragments[0].outstanding
  assert (sent.at_step, sent.push.round) == (1, 1 << 24)
  # Or its push was merged before all died: the version comes late, but at the step it is due.
  also.feed(replace(welcome(0, 0, 1, 60, (0, 1)), rounds=(7, -1)))
  also.feed(later)
  assert also.feed(Staged(0, 0.2)) == [] and learner.can_step(also.state, lock_step)
  assert also.state.global_step == 1
  also.feed(replace(later, version=2, round=9))
  assert also.feed(Staged(0, 0.3)) == [], "it waits for the one before"
  [apply, newer, *_] = also.feed(STEP)
  assert apply == says.applied(0, 1, 7, "rebase", True)
  assert newer == says.applied(0, 2, 9, "halve", False)


# --- version numbers that come twice --------------------------------------------------------------


def test_an_update_to_another_value_of_the_same_version_is_not_taken():
  one = Script(role="learner")
  whole = join(one)
  lost = replace(whole, version=1, round=3)
  one.feed(lost)
  update = replace(whole, incarnation=1, version=2, round=9, base_round=7)
  for base_round, taken in ((5, False), (3, True)):
    actions = one.feed(replace(update, base_round=base_round))
    assert bool(actions) == taken
  other = replace(update, version=1, round=12, base_round=NOTHING)
  assert one.feed(other), "newer is what a later round made, whatever its version"
  assert one.feed(replace(other, version=9, round=11)) == []


def test_who_has_another_value_of_the_same_version_is_not_asked(shard):
  shard.state = syncer.init(
    0, 1, (FragmentState(0, 3, last_round=9), FragmentState(1)), ALONE, 1 << 60
  )
  sends = shard.feed(says.report(0, 0, 9, 0.1, (3, 0), (2, 0), rounds=(7, -1)))
  assert [(type(a.message), a.message.version) for a in sends] == [(Publish, 3)]


def test_once_a_value_is_given_back_those_alone_are_asked_that_say_they_have_it(shard):
  """Versions may be as before: the push of a change of another value would be merged."""
  shard.state = syncer.init(
    0, 1, (FragmentState(0, 2, last_round=5), FragmentState(1)), ALONE, 1 << 60
  )
  shard.feed(says.report(1, 0, 9, 0.1, (2, 0), (1, 0), rounds=(5, -1)))
  newer = says.report(0, 0, 9, 0.1, (2, 0), (2, 0), rounds=(7, -1))
  shard.feed(newer, 0.1)
  assert InstallValue(0) in shard.feed(says.value(0, 0, 0, 2, 7, 90, {0: 7}), 0.2)
  assert [a.to for a in says.sends(shard.feed(newer, 0.3), Pull)] == [0]


# --- liars ----------------------------------------------------------------------------------------

VALUE = says.value(0, 0, 0, 3, 7, 90, {0: 7, 2: 5})


@pytest.mark.parametrize(
  "lie",
  [
    {"round": FUTURE},
    {"round": 1 << 24},  # of this very life, which has made no round yet
    {"round": -1},
    {"fragment": 1},  # nobody asked
    {"fragment": 7},
    {"merged_rounds": {0: 8}},
    {"merged_rounds": {0: 7, 2: FUTURE}},
    {"snapshot": FUTURE},
  ],
  ids=str,
)
def test_a_value_that_cannot_be_is_not_adopted(lie, shard):
  shard.feed(says.report(0, 0, 9, 0.1, (3, 0), (2, 2), rounds=(7, -1)))
  before = shard.state
  about = replace(VALUE.publish, **{name: of for name, of in lie.items() if name != "snapshot"})
  lied = replace(VALUE, publish=about, snapshot=lie.get("snapshot", 0))
  assert shard.feed(lied) == [] and shard.state == before
  assert InstallValue(0) in shard.feed(replace(VALUE, count=7))
  assert shard.state.vector_clock[0] == 7, "what its learner had done by then"


def test_a_value_is_not_lost_with_the_learner_that_is_asked_for_it_first(shard):
  """Another one that has it is asked next, and no round begins before that one could answer."""
  newest = [says.report(m, 0, 9, 0.1, (3, 0), (2, 2), rounds=(7, -1)) for m in (0, 1)]
  due = report(2, (0, 0), (2, 0))
  [request] = shard.feed(newest[0])
  assert (request.to, shard.feed(newest[1], 0.1)) == (0, [])
  shard.feed(due, 0.2)
  assert not says.sends(shard.feed(due, 1.1), Pull), "0 has died"
  [request] = shard.feed(newest[1], 1.3)
  assert request == Send(1, RequestValue(0, 1, 0, 0))
  shard.feed(due, 2.1)
  assert 0 not in shard.state.under_way, "it waits for the one that was asked last"
  assert InstallValue(0) in shard.feed(replace(VALUE, learner=1), 3.0)


def test_a_value_that_is_on_its_way_when_it_is_asked_for_again_is_waited_for(shard):
  """A second request did not count, and ended the wait for the first."""
  newest, due = says.report(0, 0, 9, 0.1, (3, 0), (2, 2), rounds=(7, -1)), report(1, (0, 0), (2, 0))
  asked = [shard.feed(newest, now) for now in (0.0, 0.5, 1.0)]
  assert [len(each) for each in asked] == [1, 0, 1], "again after `liveness_seconds`"
  shard.feed(due, 1.9)
  assert 0 not in shard.state.under_way
  assert InstallValue(0) in shard.feed(VALUE, 1.95)


def test_a_value_that_never_comes_is_waited_for_once(shard):
  newest, due = says.report(0, 0, 9, 0.1, (3, 0), (2, 2), rounds=(7, -1)), report(1, (0, 0), (2, 0))
  for now in (0.0, 1.0, 2.0):
    shard.feed(newest, now)
    shard.feed(due, now)
    assert (0 in shard.state.under_way) == (now == 2.0)


def test_a_value_that_does_not_come_is_asked_for_less_and_less_often():
  """It may be on its way over a slow link, which a second one would fill."""
  shard = Script(ALONE, incarnation=1)
  newest = says.report(0, 0, 9, 0.1, (3, 0), (2, 2), rounds=(7, -1))
  asked = [half / 2 for half in range(40) if shard.feed(newest, half / 2)]
  assert asked == [0.0, 1.0, 3.0, 7.0, 15.0]


def test_a_fragment_that_was_given_back_is_due_as_before_and_of_about_this_step():
  sync = dataclasses.replace(ALONE, sync_period=10)
  shard = Script(sync, incarnation=1)
  shard.state = replace(shard.state, snapshot=40)
  newest = says.report(0, 0, 50, 0.1, (3, 0), (10, 0), rounds=(7, -1))
  shard.feed(newest)
  assert InstallValue(0) in shard.feed(VALUE, 0.1)
  assert shard.state.fragments[0].snapshot == 40, "the value may depend on what came after that one"
  shard.feed(newest, 0.2)
  assert 0 in shard.state.under_way
  again = syncer.init(0, 2, shard.state.fragments, sync, 1 << 60)
  assert 0 < 50 - again.global_step <= 10, "also for its next life"


def test_a_value_is_read_once_in_each_of_its_learners_lives():
  shard, values = Script(ALONE, incarnation=1), []
  for life, now in ((0, 0.0), (1, 9.0)):
    value = replace(VALUE, incarnation=life)
    welcomed, request = shard.feed(hello(0, life, (7, -1)), now)
    assert isinstance(welcomed.message, Welcome) and request == Send(0, RequestValue(0, 1, life, 0))
    assert shard.feed(Received(value, now)) == [Read(value, now)]
    assert shard.feed(Received(value, now)) == [], "a duplicate"
    values.append(value)
  first, second = (shard.feed(value, 9.1, content="it") for value in values)
  assert InstallValue(0, "it") in first and second == [], "both lives had the same value"


@pytest.mark.parametrize("order", [(7, 8), (8, 7)])
def test_of_two_values_that_are_being_read_the_newer_one_counts(order):
  """The other one is no longer asked for where it comes last."""
  shard = Script(ALONE, incarnation=1)
  for made in (7, 8):
    value = replace(VALUE, learner=made, publish=replace(VALUE.publish, round=made))
    shard.feed(hello(made, 0, (made, -1)))
    assert shard.feed(Received(value, 0.1)) == [Read(value, 0.1)]
  for made in order:
    value = replace(VALUE, learner=made, publish=replace(VALUE.publish, round=made))
    shard.state, said = syncer.syncer_on(shard.state, ReadDone(value, 0.2))
    assert (InstallValue(0) in said) == (made == 8 or order == (7, 8))
  assert shard.state.fragments[0].last_round == 8 and not shard.state.value_requests


def test_a_value_is_not_adopted_in_place_of_what_was_made_since(shard):
  shard.feed(says.report(0, 0, 9, 0.1, (3, 0), (2, 2), rounds=(7, -1)))
  shard.feed(report(1, (0, 0), (2, 0)))
  assert 0 not in shard.state.under_way, "it waits a while for the value it has asked for"
  shard.feed(report(1, (0, 0), (2, 0)), 1.9)
  [pull] = shard.feed(Tick(2.0))
  assert pull.message.round == 1 << 24
  shard.feed(push(1, 1 << 24), 2.1, norm=1.0)
  assert shard.state.fragments[0].last_round == 1 << 24
  assert shard.feed(VALUE) == [] and shard.state.fragments[0].version == 1


def test_a_value_goes_out_at_once_though_another_one_of_its_version_was_sent_before():
  """It does not wait as if it was on its way."""
  shard = Script(ALONE, incarnation=1)
  before = FragmentState(0, version=3, last_round=5), FragmentState(1)
  shard.state = syncer.init(0, 1, before, ALONE, 1 << 60)
  shard.feed(hello(1, 0))
  told = says.report(1, 0, 1, 0.1, (3, 0), (0, 0), rounds=(5, -1))
  shard.feed(told, 0.1)
  shard.feed(hello(0, 0, (7, -1)), 0.2)
  assert InstallValue(0) in shard.feed(VALUE, 0.3)
  [publish] = [a.message for a in says.sends(shard.feed(told, 0.4), Publish)]
  assert (publish.fragment, publish.round, publish.version) == (0, 7, 3)


def test_an_older_value_than_that_of_a_restarted_shard_is_no_loss():
  shard = Script(ALONE)
  before = FragmentState(0, version=3, last_round=5), FragmentState(1)
  shard.state = syncer.init(0, 1, before, ALONE, 1 << 60)
  said = shard.feed_all(says.report(1, 0, 1, 0.1, (2, 0), (0, 0), rounds=(3, -1)))
  assert not any(isinstance(each, events.Lost) for each in said)
  [publish] = [a.message for a in says.sends(said)]
  assert (publish.fragment, publish.version) == (0, 3)


def test_a_value_ends_the_round_under_way():
  """Its pushes are changes of the value before, and the shard no longer has them."""
  shard = Script(SYNC, incarnation=1)
  shard.feed(says.report(0, 0, 9, 0.1, (3, 0), (2, 2), rounds=(7, -1)))
  for m in (1, 2):
    shard.feed(report(m, (0, 0), (2, 0)), 1.9)
  asked = shard.feed(Tick(2.0))
  assert [(a.to, a.message.round) for a in asked] == [(1, 1 << 24), (2, 1 << 24)]
  shard.feed(push(1, 1 << 24), 2.1, norm=1.0)
  last = push(2, 1 << 24)
  assert shard.feed(Received(last, 2.1)) == [Read(last, 2.1)]
  abandoned, installed = shard.feed(VALUE, 2.2)
  assert isinstance(abandoned, events.Abandoned) and installed == InstallValue(0)
  shard.state, [late] = syncer.syncer_on(shard.state, ReadDone(last, 2.1, norm=1.0))
  assert late.reason == "late: its round is over" and shard.feed(Tick(9.0)) == []
  assert shard.feed(last, 9.1, norm=1.0) == [], "it comes once more"
  assert shard.state.fragments[0].version == 3 and not shard.state.under_way


def test_a_report_of_a_round_that_never_was_is_ignored(shard):
  shard.feed(hello(0, 0))
  before = shard.state
  for never in ((FUTURE, -1), (-1, 1 << 24)):
    lie = says.report(0, 0, 9, 0.1, (3, 3), (2, 2), rounds=never)
    assert shard.feed(lie) == [] and shard.state == before
  assert shard.feed(report(0, (0, 0), (2, 2))), "its honest reports count again"


@pytest.mark.parametrize("number, believed", [(FUTURE, False), (30, False), (20, True)])
def test_a_snapshot_that_cannot_have_begun_is_ignored(number, believed):
  """At global step 16, with a snapshot every 10 steps: 20 may be begun by who is a little ahead."""
  shard = Script(OFTEN)
  shard.feed(report(0, (0, 0), (1, 1), global_step=16))
  shard.feed(Tick(0.0))
  before = shard.state
  for message in (report(0, (0, 0), (2, 2), global_step=16), push(0, 0), VALUE):
    said = replace(message, snapshot=number)
    assert believed or shard.feed(said) == []
    assert believed or replace(shard.state, beliefs=before.beliefs) == before
  shard.feed(replace(report(0, (0, 0), (2, 2), global_step=16), snapshot=number))
  assert shard.state.snapshot == (20 if believed else 10)


def test_a_number_that_no_snapshot_has_begins_none():
  """Or a liar could make all roles save their states at every step."""
  shard = Script(OFTEN)
  shard.feed(report(0, (0, 0), (1, 1), global_step=16))
  assert not records(shard, replace(report(0, (0, 0), (2, 2)), snapshot=17))
  assert shard.state.snapshot == 10


def test_a_run_that_goes_on_with_rarer_snapshots_hears_its_learners_and_saves_again():
  """Numbers counted periods of `snapshot_steps`: until as many of the longer ones were over, all
  that learners said was ignored, as of a snapshot to come. They trained on, and none was merged."""
  before = dataclasses.replace(OFTEN, snapshot_steps=5)
  shard = Script(before)
  [begun] = records(shard, report(0, (0, 0), (1, 1), global_step=45))
  values = tuple(replace(f, global_step=45) for f in begun.state.fragments)
  shard, number = Script(OFTEN), begun.state.snapshot
  shard.state = syncer.init(0, 1, values, OFTEN, 1 << 60, began_at=-1000.0)
  said = replace(report(0, (0, 0), (2, 2), global_step=46), snapshot=number)
  assert not any(isinstance(a, events.Ignored) for a in shard.feed(said))
  [next_one] = records(shard, replace(said, global_step=50))
  assert next_one.state.snapshot > number


def test_who_takes_no_snapshots_hears_of_none():
  shard = Script(dataclasses.replace(ALONE, snapshot_steps=0))
  assert not records(shard, replace(report(0, (0, 0), (1, 1)), snapshot=FUTURE))
  assert shard.state.snapshot == 0


def test_snapshots_go_on_beside_a_liar():
  world, deliver = calm(snapshot_steps=5), None
  deliver = world._deliver

  def lie(to, message, size):
    if isinstance(message, Report) and message.learner == 1 and world.now > 1.0:
      message = replace(message, snapshot=FUTURE)
    deliver(to, message, size)

  world._deliver = lie
  world.run(6.0)
  assert max(world.snapshots) >= 50
  assert all(a.state.snapshot < 75 for a in world.actors.values())
  assert ("learner", 1) not in world.snapshots[max(world.snapshots)], "nobody counts on it"


# --- initial values -------------------------------------------------------------------------------


def codecs(actions) -> list[str]:
  return [a.message.codec for a in says.sends(actions, Publish)]


def test_initial_values_are_left_out_unless_a_learner_says_that_it_cannot_make_them():
  shard = Script(ALONE)
  assert codecs(shard.feed(hello(0, 0))) == [MADE, MADE]
  unable = replace(hello(0, 0), whole=True)
  assert codecs(shard.feed(unable, 0.1)) == ["", ""], "at once: it waits for them"
  assert codecs(shard.feed(unable, 0.2)) == [], "they are on their way"
  assert codecs(shard.feed(hello(0, 1), 0.3)) == [MADE, MADE], "another life, another machine"
