"""Rounds by hand: who is asked, which pushes are merged, and what is refused with which reason."""

from __future__ import annotations

import dataclasses
import math

import pytest

from ddiloco.protocol import rounds, syncer
from ddiloco.protocol.actions import (
  Read,
  ReadDone,
  Received,
  Send,
  TakeSnapshot,
  Tick,
)
from ddiloco.protocol.events import Abandoned, Commit, Member
from ddiloco.protocol.messages import (
  EVALUATOR,
  INITIAL,
  NOTHING,
  FragmentState,
  Goodbye,
  Publish,
  Rejection,
)
from ddiloco.protocol.states import Round, ValueRequest
from ddiloco.protocol.values import replace
from tests import says
from tests.protocol.scripts import ALONE, SYNC, Script, asked, push, report
from tests.says import hello, welcome


def test_round_ids_carry_the_incarnation_and_count_up():
  shard = Script(ALONE, incarnation=5)
  shard.feed(hello(0, 0))
  sends = shard.feed(report(0, (0, 0), (2, 2)))
  assert [(a.message.fragment, a.message.round) for a in sends] == [
    (0, 83_886_080),
    (1, 83_886_081),
  ]
  late = Script(ALONE, incarnation=200_000_000)  # a process of the year 2026
  late.feed(hello(0, 0))
  sends = late.feed(report(0, (0, 0), (2, 2)))
  assert [a.message.round for a in sends] == [200_000_000 * 2**24 + n for n in (0, 1)]
  assert all(float(a.message.round) == a.message.round < 2**53 for a in sends), "JSON keeps it"


def test_the_evaluator_never_counts_for_a_quorum():
  shard = Script(ALONE)
  shard.feed(hello(-1, 0))
  assert shard.feed(report(-1, (0, 0), (50, 50))) == []
  assert not shard.state.under_way
  two = Script()
  for m in (-1, 0):
    assert two.feed(hello(m, 0)) == [Send(m, welcome(0, 0, 0, 0, (0, 1)))], "no initial values"


def test_an_update_is_for_those_alone_that_were_sent_the_version_before():
  shard = Script(ALONE)
  for m in range(3):
    shard.feed(hello(m, 0))
  shard.state = shard.state.with_member(1, sent=(-1, 0)).with_member(2, lost=True)
  shard.feed(report(0, (0, 0), (1, 0)), 0.1)
  sent = says.sends(shard.feed(push(0, 0), 0.1, norm=1.0))
  assert [(a.to, a.message.base_round) for a in sent] == [(0, INITIAL)]
  for m in (1, 2):
    [whole] = shard.feed(report(m, (0, 0), (0, 0)), 0.2)
    assert (whole.to, whole.message.version, whole.message.base_round) == (m, 1, NOTHING)


def test_a_member_whose_pushes_never_come_does_not_stop_the_fragment():
  """It is heard, so it is not lost; who has become able to push since the round began is asked."""
  shard = Script()
  for m in (0, 1, 3):
    shard.feed(hello(m, 0))
  for m in (0, 1, 3):
    ready = Received(report(m, (0, 0), (1, 1)), 0.1)
    shard.state, _ = says.take_in(shard.state, ready)
  shard.feed(Tick(0.1))
  shard.feed(push(0, 0), 0.2, norm=1.0)
  shard.feed(push(3, 0), 0.2, norm=float("nan"))
  shard.feed(hello(2, 0), 0.3)
  shard.feed(report(2, (0, 0), (1, 1)), 0.4)
  first, again = [], []
  for tenth in range(5, 40):
    for m in range(4):
      said = asked(shard.feed(report(m, (0, 0), (2, 1)), tenth / 10))
      (first if tenth <= 10 else again).append(said)
  assert not any(first), "the members that were asked have their time"
  assert set.union(*again) == {(0, 1), (0, 2)}, "and no learner is asked for a second push"
  commit, *_ = shard.feed(push(2, 0), 4.0, norm=1.0)
  assert commit.learners == (0, 2) and set(commit.rejected) == {3}


@pytest.mark.parametrize("blocking", [False, True])
def test_the_work_of_one_who_leaves_does_not_wait_until_a_quorum_is_due(blocking):
  sync = dataclasses.replace(SYNC, sync_period=24, min_quorum=2, blocking=blocking)
  shard = Script(sync)
  for m in range(4):
    shard.feed(hello(m, 0))
    assert not asked(shard.feed(report(m, (0, 0), (4, 4), global_step=4), 0.4))
  last = says.report(1, 0, 4, 0.1, (0, 0), (4, 4), leaving=True)
  found = asked(shard.feed(last, 0.5))
  assert found == (set() if blocking else {(p, m) for p in (0, 1) for m in range(4)})


@pytest.mark.parametrize("stays", [0, 1, None])
def test_a_quorum_is_smaller_only_where_all_leave_and_never_larger(stays):
  shard = Script(ALONE if stays is None else SYNC)
  fragments = tuple(FragmentState(p, 1, last_round=0) for p in (0, 1))
  shard.state = syncer.init(0, 0, fragments, shard.sync, 1 << 60)
  for m in (0, 1):
    shard.feed(hello(m, 0, (0, 0)))
  for m in {0, 1} - {stays}:
    shard.state = syncer.syncer_on(
      shard.state, Received(says.report(m, 0, 1, 0.1, (1, 1), (0, 1), leaving=True), 0.1)
    )[0]
  pulled = asked(shard.feed(Tick(0.2)))
  assert pulled == ({(1, 0), (1, 1)} if stays is None else set())
  assert [r.quorum for r in shard.state.under_way.values()] == ([1] if stays is None else [])


def test_a_push_that_is_kept_is_without_its_payload_and_one_that_cannot_be_decoded_is_rejected():
  shard = Script()
  for m in (0, 1):
    shard.feed(hello(m, 0))
    shard.feed(report(m, (0, 0), (1, 0)), 0.1)
  for m, fault in ((0, ""), (1, "codec 'f32': must be 'int8'")):
    read = ReadDone(replace(push(m, 0), payload=b"values"), 0.2, norm=1.0, fault=fault)
    shard.state, _ = says.take_in(shard.state, read)
  [current] = shard.state.under_way.values()
  assert [p.payload for p in current.pushes.values()] == [None]
  assert current.rejected == {1: "codec 'f32': must be 'int8'"}


def test_a_commit_keeps_in_mind_what_was_merged_before_though_its_learner_has_left():
  shard = Script(ALONE)
  shard.state = replace(shard.state, grown_together={1: 2})
  for m in (0, 1):
    shard.feed(hello(m, 0))
  shard.feed(report(0, (0, 0), (1, 0)), 0.125)
  first, *_ = shard.feed(push(0, 0), 0.375, norm=1.0)
  assert (first.quorum_seconds, first.grace_seconds) == (0.25, 0.0)
  assert first.reason == "all 1 asked have answered"
  shard.feed(says.report(1, 0, 2, 0.1, (1, 0), (2, 0), rounds=(0, -1)), 0.5)
  read = ReadDone(push(1, 1, base=1), 0.75, norm=1.0)
  shard.state, _ = says.take_in(shard.state, read)
  shard.state, _ = says.take_in(shard.state, Received(Goodbye(1, 0), 0.875))
  second, *_ = shard.feed(Tick(1.0))
  assert second.learners == (1,) and (second.quorum_seconds, second.grace_seconds) == (0.25, 0.25)
  assert shard.state.fragments[0].merged_rounds == {0: 0, 1: 1}
  assert shard.state.grown_together == {0: 0, 1: 2}, "each fragment counts for itself"


def test_a_round_that_begins_forgets_the_claims_and_paces_of_those_that_are_gone():
  shard = Script(ALONE)
  for m, seconds, step in ((0, 2.0, 3), (1, 4.0, 5), (2, 1.0, 9), (EVALUATOR, 0.5, 1)):
    shard.feed(hello(m, 0))
    said = replace(report(m, (0, 0), (0, 0), global_step=step), step_seconds=seconds)
    shard.feed(said, 0.1)
  shard.feed(Goodbye(2, 0), 0.2)
  shard.feed(replace(report(0, (0, 0), (1, 0), global_step=3), step_seconds=2.0), 0.3)
  beliefs = shard.state.beliefs
  assert beliefs.paces == ((2.0, 0), (4.0, 1)) and beliefs.usual_step_seconds == 2.0
  assert {m for _, m in beliefs.claims} <= {0, 1}


@pytest.mark.parametrize(
  "version, other, begins",
  [
    (1, {"leaving": True}, True),
    (1, {"lost": True}, True),
    (1, {"quarantined": True}, True),
    (1, {}, False),  # it may push again
    (1, {"leaving": True, "versions": (0, 0)}, False),  # it may have steps after its last push
    (0, {"leaving": True}, False),  # of a run that has hardly begun, or that a liar alone begins
  ],
)
def test_the_last_work_of_all_that_leave_needs_no_others(version, other, begins):
  shard = Script()
  fragments = tuple(FragmentState(p, version, last_round=version - 1) for p in (0, 1))
  shard.state = syncer.init(0, 0, fragments, SYNC, 1 << 60)
  for m in (EVALUATOR, 0, 1):
    shard.feed(hello(m, 0))
    shard.feed(report(m, (version,) * 2, (0, 0)), 0.1)
  shard.state = shard.state.with_member(1, **other)
  found = asked(shard.feed(says.report(0, 0, 1, 0.1, (version,) * 2, (0, 1), leaving=True), 0.2))
  assert found == ({(1, 0)} if begins else set())
  for p, m in found:
    [current] = shard.state.under_way.values()
    commit, *_ = shard.feed(push(m, current.id, version, p), 0.3, norm=1.0)
    assert commit.learners == (0,)


def test_of_all_that_leave_those_with_steps_are_the_quorum():
  fragments = tuple(FragmentState(p, 1, last_round=0) for p in (0, 1))
  shard = Script(dataclasses.replace(SYNC, min_quorum=3))
  shard.state = syncer.init(0, 0, fragments, shard.sync, 1 << 60)
  for m in range(3):
    shard.feed(hello(m, 0))
    last = says.report(m, 0, 1, 0.1, (1, 1), (0, int(m > 0)), leaving=True)
    shard.state, _ = says.take_in(shard.state, Received(last, 0.2))
  assert asked(shard.feed(Tick(0.3))) == {(1, 1), (1, 2)} and shard.state.under_way[1].quorum == 2


def test_who_leaves_and_who_is_due_are_a_quorum_together():
  shard = Script(dataclasses.replace(SYNC, sync_period=24, min_quorum=3))
  for m in range(3):
    shard.feed(hello(m, 0))
    shard.feed(report(m, (0, 0), (4, 4), global_step=24), 0.4)
  shard.feed(report(0, (0, 0), (24, 4), global_step=24), 0.5)
  last = says.report(1, 0, 24, 0.1, (0, 0), (4, 4), leaving=True)
  assert {(0, m) for m in range(3)} <= asked(shard.feed(last, 0.5))


@pytest.mark.parametrize("steps, tokens, base", [(0, 10, 0), (1, 0, 0), (1, 10, 5)])
def test_empty_pushes_and_foreign_bases_are_refused_with_a_reason(steps, tokens, base, shard):
  shard.feed(report(0, (0, 0), (1, 1)))
  bad = replace(push(0, 0, base=base), steps=steps, tokens=tokens)
  sent = [a.message for a in says.sends(shard.feed(bad, norm=1.0))]
  [rejection] = [m for m in sent if isinstance(m, Rejection)]
  assert rejection.reason and shard.state.fragments[0].version == 0
  assert rejection.reason.startswith("based on version 5" if base else f"holds {steps} steps")


def test_one_liar_does_not_stretch_the_grace_window():
  eager = dataclasses.replace(ALONE, grace_safety=0.5)
  shard = Script(eager)
  for m in (0, 1):
    shard.feed(hello(m, 0))
  shard.feed(report(0, (0, 0), (0, 1)), 0.0)
  liar = says.report(1, 0, 1, 1e9, (0, 0), (0, 2))  # claims steps of thirty years
  assert [a.to for a in shard.feed(liar, 0.0)] == [0, 1]
  shard.feed(push(0, 0, fragment=1), 0.01, norm=1.0)
  assert shard.state.fragments[1].version == 0, "grace"
  shard.feed(Tick(0.2))
  assert shard.state.fragments[1].version == 1


def test_a_learner_that_is_new_and_alone_is_measured_by_what_is_usual_here():
  shard = Script(ALONE)
  for m in (0, 1):
    shard.feed(hello(m, 0))
  shard.feed(report(0, (0, 0), (2, 0)), 0.1)
  assert any(isinstance(a, Commit) for a in shard.feed(push(0, 0), 0.1, norm=1.0))
  shard.feed(report(1, (1, 0), (2, 0)), 0.2)
  sent = shard.feed(push(1, 1, base=1), 0.2, norm=1e6)
  refusals = [a.message.reason for a in says.sends(sent) if hasattr(a.message, "reason")]
  assert refusals == ["norm 1e+06 is over sync.max_norm_ratio (10) x 2"]
  assert shard.state.fragments[0].version == 1


def test_while_the_learning_rate_warms_up_a_learner_alone_may_push_more_each_time():
  """Its updates are the sums of the rates of their steps; with a hundred times that it is refused.

  Found with 100M parameters: an island that a kill had left alone lost 25 steps of work.
  """
  shard = Script(dataclasses.replace(ALONE, sync_period=24, num_fragments=24))  # two of them here
  shard.feed(hello(0, 0))

  def pushed(version: int, first: int, last: int, factor: float = 1.0) -> int:
    """The version after the push of these steps; step s has a learning rate of s."""
    steps, now = last - first + 1, 10.0 * last
    shard.feed(report(0, (version, 0), (steps, 0), global_step=last), now)
    asked = shard.state.under_way[0].id
    told = replace(push(0, asked, base=version), steps=steps)
    shard.feed(told, now, norm=factor * sum(range(first, last + 1)))
    return shard.state.fragments[0].version

  assert pushed(0, 1, 3) == 1
  assert pushed(1, 4, 52) == 2
  assert pushed(2, 53, 77, factor=100.0) == 2
  assert pushed(2, 53, 78) == 3


@pytest.mark.parametrize("factor, merged", [(9.0, True), (11.0, False)])
@pytest.mark.parametrize("own", [1.0, 0.0])
def test_a_learner_that_was_away_is_measured_by_what_is_usual_when_it_is_back(own, factor, merged):
  """Not by the growth of the global step since it was here: then the run was a thousandth as far.

  With its own past alone it would be refused for ever if the warm-up went on meanwhile.
  """
  shard = Script(ALONE)
  f = FragmentState(0, 2, merged_global_steps={0: 3000, 1: 3}, last_round=1, global_step=3000)
  shard.state = syncer.init(0, 0, (f, FragmentState(1)), ALONE, 1 << 60, began_at=-1e6)
  for m, norm in ((0, 30.0), (1, own), (2, 30.0)):
    shard.feed(hello(m, 0))
    shard.state = shard.state.with_member(m, norms=(norm, 0.0))
    shard.feed(report(m, (2, 0), (2 * int(m == 1), 0), global_step=3009))
  shard.feed(report(1, (2, 0), (2, 0), global_step=3009))
  asked = shard.state.under_way[0].id
  shard.feed(push(1, asked, base=2), norm=factor * 30.0 * ALONE.sync_period)
  assert shard.state.fragments[0].version == 2 + merged


def test_pushes_that_slow_islands_made_early_in_the_warm_up_do_not_have_fast_ones_rejected():
  """With the shorter of two middle pasts they did, also in runs without any fault."""
  shard = Script(ALONE)
  merged = dict.fromkeys(range(4), 51)
  f = FragmentState(0, 2, merged_global_steps=merged, last_round=1, global_step=51)
  shard.state = syncer.init(0, 0, (f, FragmentState(1)), ALONE, 1 << 60, began_at=-1e6)
  for m, past in enumerate((0.06, 0.06, 0.32, 0.32)):
    shard.feed(hello(m, 0))
    shard.state = shard.state.with_member(m, norms=(past, 0.0))
  for m in range(4):
    shard.feed(report(m, (2, 0), (0, 0), global_step=75))
  shard.feed(report(2, (2, 0), (9, 0), global_step=75))
  shard.feed(push(2, shard.state.under_way[0].id, base=2), norm=1.0 * ALONE.sync_period)
  assert shard.state.fragments[0].version == 3


@pytest.mark.parametrize(
  "last, norm, merged", [(3000, 5, True), (3000, 100, False), (300, 100, True)]
)
def test_the_pushes_of_learners_that_left_long_ago_excuse_no_long_one(last, norm, merged):
  """In a run of months these are most: theirs were long, at the learning rate of its beginning."""
  shard = Script(ALONE)
  f = FragmentState(
    0, 2, merged_global_steps={0: last, 1: 300, 2: 300}, last_round=1, global_step=3000
  )
  shard.state = syncer.init(0, 0, (f, FragmentState(1)), ALONE, 1 << 60, began_at=-1e6)
  for m, past in ((0, 1.0), (1, 1000.0), (2, 1000.0)):
    shard.feed(hello(m, 0))
    shard.state = shard.state.with_member(m, norms=(past, 0.0), lost=m > 0)
  shard.feed(report(0, (2, 0), (2, 0), global_step=3009))
  asked = shard.state.under_way[0].id
  shard.feed(push(0, asked, base=2), norm=norm * ALONE.sync_period)
  assert shard.state.fragments[0].version == 2 + merged


def test_a_shard_counts_its_commits_for_consistent_snapshots():
  shard = Script(ALONE, incarnation=1)
  shard.feed(hello(0, 0))
  shard.feed(report(0, (0, 0), (1, 1)))
  before = shard.state.vector_clock[shard.state.key]
  assert before == 1 << 24, "more than in any life before"
  pushed = replace(push(0, 1 << 24), count=7)
  sent = [a.message for a in says.sends(shard.feed_all(pushed, norm=1.0))]
  assert shard.state.vector_clock[0] == 7, "and keeps in mind which pushes are in them"
  counts = [message.count for message in sent if isinstance(message, Publish)]
  assert counts == [before + 1] == [shard.state.vector_clock[shard.state.key]]


def test_a_life_begins_greater_rounds_than_the_one_before_however_many_that_began():
  """Lives of threads are numbered one by one, and a small model may begin a hundred rounds a
  second. Learners take no version of a smaller round."""
  newest = (1 << 24) + 5  # of life 0
  found = (FragmentState(0, 9, last_round=newest), FragmentState(1, 3, last_round=7))
  shard = Script(ALONE)
  shard.state = syncer.init(0, 1, found, ALONE, 1 << 60, began_at=-1e6)
  shard.feed(hello(0, 0))
  told = replace(report(0, (9, 3), (2, 0)), rounds=(newest, 7))
  assert [a.message.round for a in says.sends(shard.feed(told, 0.1))] == [newest + 1]


def test_in_lock_step_a_snapshot_begins_once_a_quorum_is_back():
  """Without the learners that a round needs, the run could not go on from it."""
  sync = dataclasses.replace(SYNC, blocking=True, snapshot_steps=1)

  def taken(actions) -> list[list[int]]:
    return [syncer.joined(each.state) for each in actions if isinstance(each, TakeSnapshot)]

  shard = Script(sync)
  for m in (EVALUATOR, 0, 1):
    shard.feed(hello(m, 0))
  shard.feed(report(EVALUATOR, (0, 0), (0, 0)), 0.1)
  assert not taken(shard.feed(report(0, (0, 0), (1, 1), global_step=3), 0.1))
  assert taken(shard.feed(report(1, (0, 0), (1, 1), global_step=3), 0.1)) == [[0, 1]]


@pytest.mark.parametrize("said", [None, Goodbye(0, 0), hello(0, 1)])
def test_a_round_waits_for_a_push_that_is_being_read_also_if_its_learner_is_gone(said):
  shard = Script(ALONE)
  for m in (0, 1):
    shard.feed(hello(m, 0))
    shard.feed(report(m, (0, 0), (0, 1)), 0.1)
  pulls = [Send(m, says.pull(0, 0, 0, 1, 0, 0)) for m in (0, 1)]
  assert shard.feed(report(0, (0, 0), (0, 2)), 0.2) == pulls
  slow = push(0, 0, fragment=1)
  [said] = shard.feed_all(Received(push(0, 7, fragment=1), 0.3))
  assert said.reason == "late: its round is over"
  assert shard.feed(Received(slow, 0.3)) == [Read(slow, 0.3)]
  assert [said.reason for said in shard.feed_all(Received(slow, 0.4))] == ["a duplicate"]
  assert shard.feed(push(1, 0, fragment=1), 0.5, norm=1.0) == [], "it waits"
  assert shard.feed(Tick(9.0, heard_until=0.5)) == [], "past its deadline"
  if said is not None:
    assert not any(isinstance(action, Commit) for action in shard.feed(said, 9.1))
  shard.state, actions = syncer.syncer_on(shard.state, ReadDone(slow, 0.3, norm=1.0))
  assert actions == [] and set(shard.state.under_way[1].pushes) == {0, 1}
  commit, *_ = shard.feed(Tick(9.2))
  assert commit.learners == (0, 1)


def test_a_bad_push_of_one_that_is_gone_is_rejected_like_any_other():
  shard = Script()
  for m in (0, 1):
    shard.feed(hello(m, 0))
    shard.feed(report(m, (0, 0), (1, 0)), 0.1)
  for m in (0, 1):
    shard.feed(Received(push(m, 0), 0.2))
  shard.feed(Goodbye(0, 0), 0.3)
  for m in (0, 1):
    bad = ReadDone(push(m, 0), 0.2, norm=float("inf"))
    shard.state, _ = syncer.syncer_on(shard.state, bad)
  ended, *told = shard.feed(Tick(0.4))
  assert isinstance(ended, Abandoned) and set(ended.rejected) == {0, 1}
  assert [a.to for a in told] == [1]


def test_one_whose_pushes_are_bad_again_and_again_is_told_to_start_afresh():
  shard, told = Script(ALONE), []
  shard.feed(hello(0, 0))
  for k in range(ALONE.quarantine_after):
    shard.feed(report(0, (0, 0), (1, 0)), 0.1 * k)
    bad = push(0, shard.state.under_way[0].id)
    told += shard.feed_all(bad, 0.1 * k, norm=float("nan"))
  said = [a.message for a in says.sends(told)]
  rejoins = [message.rejoin for message in said if isinstance(message, Rejection)]
  assert rejoins == [False] * (ALONE.quarantine_after - 1) + [True]
  assert [a.state for a in told if isinstance(a, Member)] == ["quarantined"]
  assert shard.state.members[0].quarantined and not shard.state.under_way


def test_a_good_push_makes_the_bad_ones_before_it_forgotten(shard):
  for k, norm in enumerate((math.nan, math.nan, 1.0, math.nan, math.nan)):
    f = shard.state.fragments[0]
    shard.feed(replace(report(0, (f.version, 0), (2, 0)), rounds=(f.last_round, -1)), 0.1 * k)
    shard.feed(push(0, shard.state.under_way[0].id, base=f.version), 0.1 * k, norm=norm)
  assert shard.state.members[0].rejections == 2 and not shard.state.members[0].quarantined


def test_of_the_steps_of_a_push_three_periods_count_for_its_learners_past(shard):
  shard.feed(report(0, (0, 0), (2, 0)))
  shard.feed(replace(push(0, 0), steps=10), norm=12.0)
  assert shard.state.members[0].norms[0] == 12.0 / (3 * ALONE.sync_period)


def test_no_round_begins_of_a_fragment_that_has_all_tokens(shard):
  shard.state = replace(shard.state, target_tokens=0)
  assert shard.feed(report(0, (0, 0), (2, 2))) == []


def test_a_fragment_waits_for_the_newest_request_for_a_newer_value_of_it():
  state = syncer.init(0, 1, (FragmentState(0), FragmentState(1)), ALONE, 1 << 60)
  state = replace(state, delivery_seconds=10.0)
  assert rounds._value_due_at(state, state.fragments[0]) == -math.inf
  asked_at = {(0, 0): (1.0, 5), (0, 1): (2.0, 5), (0, 2): (50.0, 1 << 24), (1, 0): (90.0, 5)}
  requests = {k: ValueRequest(0.0, 1, made, first_at=at) for k, (at, made) in asked_at.items()}
  state = replace(state, value_requests=requests)
  assert rounds._value_due_at(state, state.fragments[0]) == 2.0 + 30.0
  state = replace(state, delivery_seconds=0.0)
  assert rounds._value_due_at(state, state.fragments[0]) == 2.0 + 2 * ALONE.liveness_seconds


def test_the_past_of_one_learner_alone_rejects_nobody():
  """It may be a bad one's: far too short, and merged alone before the others came."""
  shard = Script(dataclasses.replace(SYNC, min_quorum=3))
  for m in (0, 1, 2):
    shard.feed(hello(m, 0))
  members = dict(shard.state.members)
  members[2] = replace(members[2], norms=(1e-6, 0.0))
  shard.state = replace(shard.state, members=members)
  for m in (0, 1, 2):
    shard.feed(report(m, (0, 0), (1, 1)), 0.1)
  actions = [a for m in (0, 1, 2) for a in shard.feed(push(m, 0), 0.2, norm=(1.0, 1.0, 1e-6)[m])]
  assert [a.learners for a in actions if isinstance(a, Commit)] == [(0, 1, 2)]


def test_a_commit_says_of_each_other_learner_why_it_has_no_part():
  shard = Script(ALONE)
  for m in (*range(7), EVALUATOR):
    shard.feed(hello(m, 0))
    shard.feed(report(m, (0, 0), (0, 0)))
  state = shard.state.with_member(1, lost=True).with_member(2, quarantined=True)
  state = state.with_member(4, versions=(-1, 0))
  asked = {"pending": (3,), "pushes": {0: push(0, 0)}, "rejected": {6: "odd"}}
  current = Round(
    0, 1, 0.0, step_seconds=0.1, sync_seconds=0, global_step=1, pulled_at=0, deadline=9, **asked
  )
  assert rounds._missing(state, 0, current) == {
    1: "lost",
    2: "quarantined",
    3: "did not answer within the grace window",
    4: "had not received version 0 yet",
    5: "had made no step since its last sync when the round began",
  }


def test_a_quarantined_learner_hears_so_at_each_report_and_is_asked_for_nothing(shard):
  shard.feed(report(0, (0, 0), (0, 0)))
  shard.state = shard.state.with_member(0, quarantined=True)
  told = Send(0, Rejection(0, 0, 0, -1, -1, True, "quarantined"))
  for now in (0.1, 0.2):
    assert shard.feed(report(0, (0, 0), (2, 2)), now) == [told]


@pytest.mark.parametrize("version", [0, 1])
def test_values_of_a_run_under_way_wait_for_no_quorum(version):
  """Their global step may be 0: a value that was given back counts from a period before."""
  shard, of = Script(), FragmentState(0, version=version, last_round=version - 1)
  shard.state = syncer.init(0, 1, (of, FragmentState(1)), shard.sync, 1 << 60, began_at=-1000.0)
  sent = [a.message for a in says.sends(shard.feed(hello(0, 0)))]
  assert any(isinstance(m, Publish) for m in sent) == (version > 0)
