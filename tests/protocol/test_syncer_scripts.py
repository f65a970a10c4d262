"""Scripts derived by hand: exact histories, what is sent again, and broken or hostile peers."""

from __future__ import annotations

import dataclasses

import pytest

from ddiloco.protocol import learner, syncer
from ddiloco.protocol.actions import Received, Resend, Send, Stage, Staged, StepDone, Tick
from ddiloco.protocol.events import Abandoned, Apply, Commit, Member
from ddiloco.protocol.messages import (
  NOTHING,
  FragmentState,
  Goodbye,
  Publish,
  Push,
  Rejection,
  RequestValue,
)
from ddiloco.protocol.states import shard_key
from ddiloco.protocol.values import replace
from tests import says
from tests.protocol.scripts import ALONE, SYNC, Script, asked, initial, join, push, report, resent
from tests.says import hello, welcome


def test_golden_shard_two_learners_two_fragments():
  shard = Script()
  assert shard.feed(hello(0, 0)) == [Send(0, welcome(0, 0, 0, 0, (0, 1)))]
  # With the second learner there is a quorum, and the initial values go out to both.
  everything = [initial(m, p) for m in (0, 1) for p in (0, 1)]
  assert shard.feed(hello(1, 0)) == [Send(1, welcome(0, 0, 0, 0, (0, 1))), *everything]
  assert shard.feed(report(0, (0, 0), (1, 1)), 0.1) == []
  # Both have one step on fragment 0, which is due; fragment 1 needs two.
  pulls = [Send(m, says.pull(0, 0, 0, 0, 0, 0)) for m in (0, 1)]
  assert shard.feed(report(1, (0, 0), (1, 1)), 0.1) == pulls
  assert shard.feed(push(0, 0), 0.12, norm=1.0) == []
  # 10 + 20 tokens; each hears that its push of round 0 is inside.
  version_1 = says.publish(0, 0, 0, 0, 0, 1, 0, 1, 30, (0, 0, 1, 0), "")
  commit, *sent = shard.feed(push(1, 0), 0.13, norm=1.0)
  assert (commit.fragment, commit.round, commit.version, commit.base_round) == (0, 0, 1, -1)
  assert (commit.learners, commit.incarnations) == ((0, 1), (0, 0))
  assert (commit.steps, commit.tokens, commit.merged_tokens) == ((1, 1), (10, 20), 30)
  assert commit.progress == 30 / shard.state.target_tokens
  assert sent == [Send(0, version_1), Send(1, version_1)]
  assert shard.feed(report(0, (1, 0), (1, 2), global_step=2), 0.2) == []
  # Learner 1 has not applied version 1 yet, but fragment 1 is due with both: round 1.
  pulls = [Send(m, says.pull(0, 0, 0, 1, 1, 0)) for m in (0, 1)]
  assert shard.feed(report(1, (0, 0), (2, 2), global_step=2), 0.2) == pulls
  # Learner 0 leaves: one is not a quorum, nothing is merged from now on.
  assert shard.feed(push(1, 1, fragment=1), 0.22, norm=1.0) == []
  assert list(shard.state.under_way[1].pushes) == [1]
  [abandon] = shard.feed(Goodbye(0, 0), 0.23)
  assert (abandon.fragment, abandon.round) == (1, 1)
  assert shard.state.fragments[1].version == 0 and 1 not in shard.state.under_way
  assert shard.state.mark_dirty([1]).mark_dirty([0, 1]).dirty == (1, 0)


def test_golden_learner_two_fragments():
  one = Script(role="learner")
  whole = join(one)
  assert one.feed(says.pull(0, 0, 0, 0, 0, 0)) == []  # not a single step to push yet
  sent = says.push(0, 0, 0, 0, 0, 1, 10, "")
  assert one.feed(StepDone(0.1, 10, 0.1)) == [Send(0, sent)]
  assert one.feed(says.pull(0, 0, 0, 0, 0, 0)) == [Resend(sent)]
  one.feed(StepDone(0.2, 10, 0.0))
  assert one.state.step_seconds == 0.1, "a step that was only dispatched says nothing"
  # Version 1 contains step 1: step 2 goes back on top and is still to be merged.
  version_1 = replace(
    whole,
    round=0,
    version=1,
    base_round=-1,
    global_step=44,
    merged_tokens=30,
    merged_rounds={0: 0},
  )
  assert one.feed(replace(version_1, count=5)) == [Stage(version_1, "rebase", True)]
  assert one.state.vector_clock[shard_key(0)] == 5
  assert one.feed(says.pull(0, 0, 0, 0, 2, 1)) == []  # waits for version 1 to be applied
  assert one.feed(Staged(0, 0.2)) == [
    says.applied(0, 1, 0, "rebase", True),
    Send(0, says.push(0, 0, 0, 2, 1, 1, 10, "")),
  ]
  f = one.state.fragments[0]
  assert (f.steps, f.tokens, f.steps_since_sync, f.acknowledged_tokens, f.merged_tokens) == (
    1,
    10,
    1,
    10,
    30,
  )
  one.feed(StepDone(0.3, 10, 0.1))
  # Round 2 was abandoned: the next one is answered with all steps until now, not with that push.
  newest = says.push(0, 0, 0, 3, 1, 2, 20, "")
  assert one.feed(says.pull(0, 0, 0, 0, 3, 1)) == [Send(0, newest)]
  # Round 3 went on without me, version 3 came whole: both unmerged steps stay, at half length.
  version_3 = replace(version_1, round=4, version=3, base_round=NOTHING)
  assert one.feed(version_3) == [Stage(version_3, "halve", False)]
  assert one.feed(Staged(0, 0.3)) == [says.applied(0, 3, 4, "halve", False)]
  f = one.state.fragments[0]
  assert (f.version, f.steps, f.tokens, f.steps_since_sync, f.discarded_tokens) == (3, 2, 20, 0, 0)
  assert one.state.fragments[1].steps == 3 and one.state.fragments[1].version == 0


def test_a_rejected_push_goes_back_to_the_base():
  one = Script(role="learner")
  base = join(one)
  one.feed(StepDone(0.1, 10, 0.1))
  one.feed(says.pull(0, 0, 0, 0, 0, 0))
  logged, stage = one.feed_all(Rejection(0, 0, 0, 0, 0, False, "not finite"))
  assert says.plain(stage) == Stage(base, "reset", False) and stage.publish.payload is None
  assert (logged.round, logged.rejoin, logged.reason) == (0, False, "not finite")
  assert one.feed(Staged(0, 0.1)) == [says.applied(0, 0, -1, "reset", False)]
  f = one.state.fragments[0]
  assert (f.steps, f.tokens, f.discarded_tokens) == (0, 0, 10)
  assert one.feed(Rejection(0, 0, 0, 0, 0, False, "not finite")) == [], "a duplicate"
  one.feed(StepDone(0.2, 10, 0.1))
  one.feed(says.pull(0, 0, 0, 0, 4, 0))
  assert one.feed(Rejection(0, 0, 0, 0, 3, False, "not finite")) == [], "an older push"
  [rejected] = one.feed_all(Rejection(0, 0, 0, -1, -1, True, "quarantined"))
  assert rejected.rejoin and rejected.reason == "quarantined"


def test_a_pull_waits_for_the_version_that_it_is_of():
  one = Script(role="learner")
  base = join(one)
  one.feed(StepDone(0.1, 10, 0.1))
  assert one.feed(says.pull(0, 0, 0, 0, 1, 1)) == []
  one.feed(replace(base, version=1, round=0))
  applied, answer = one.feed(Staged(0, 0.2))
  assert isinstance(applied, Apply) and answer.message.base_version == 1
  assert one.feed(says.pull(0, 0, 0, 0, 2, 0)) == [], "of a round that is over"


def test_a_pull_of_an_abandoned_round_does_not_replace_a_newer_push(one):
  """Else round 5 merges my push, I believe it did not, and push the same steps again."""
  one.feed(StepDone(0.1, 10, 0.1))
  assert [type(a.message) for a in one.feed(says.pull(0, 0, 0, 0, 5, 0))] == [Push]
  assert one.feed(says.pull(0, 0, 0, 0, 3, 0)) == []
  assert one.state.fragments[0].outstanding.push.round == 5
  later = Script(role="learner")
  join(later)
  for round_id in (5, 3):
    assert later.feed(says.pull(0, 0, 0, 1, round_id, 0)) == []
  [action] = later.feed(StepDone(0.1, 10, 0.1))
  assert action.message.round == 5


@pytest.mark.parametrize(
  "message",
  [
    says.pull(0, 0, 0, 0, 0, 0),
    welcome(0, 0, 0, 999, (0, 1)),
    says.publish(0, 0, 0, 0, 7, 1, -1, 999, 0, (0, 7), ""),
    Rejection(0, 0, 0, -1, -1, True, "quarantined"),
  ],
  ids=lambda message: type(message).__name__,
)
def test_what_was_meant_for_a_dead_incarnation_is_ignored(message):
  one = Script(role="learner", incarnation=1)
  before = one.state
  assert one.feed(message) == [] and one.state == before
  assert one.feed(replace(message, learner_incarnation=1)) or one.state != before


def test_a_zombie_shard_is_fenced(one):
  one.feed(StepDone(0.1, 10, 0.1))
  one.feed(says.pull(0, 1, 0, 1, 1 << 32, 1))  # incarnation 1 of the shard speaks
  before = one.state
  for zombie in (
    says.pull(0, 0, 0, 0, 9, 0),
    says.publish(0, 0, 0, 0, 9, 1, -1, 999, 0, (0, 9), ""),
    Rejection(0, 0, 0, 0, 9, False, "old"),
    welcome(0, 0, 0, 999, (0, 1)),
  ):
    assert one.feed(zombie) == [] and one.state == before


def test_a_zombie_learner_is_fenced():
  shard = Script(ALONE)
  shard.feed(hello(0, 1))
  before = shard.state
  for zombie in (
    hello(0, 0),
    report(0, (0, 0), (9, 9)),
    push(0, 0),
    Goodbye(0, 0),
  ):
    assert shard.feed(zombie) == []
  assert shard.state == before
  [pull, _] = shard.feed(report(0, (0, 0), (2, 2), incarnation=1))
  assert pull.message.learner_incarnation == 1
  # Its predecessor's push for this very round does not count either.
  assert shard.feed(push(0, pull.message.round), norm=1.0) == []
  assert isinstance(shard.feed(push(0, pull.message.round, incarnation=1), norm=1.0)[0], Commit)


def test_a_lost_publish_comes_again_however_often_others_commit():
  """The wait runs from the first publish that did not arrive, not from the newest one."""
  shard, resent = Script(ALONE), []
  for m in (0, 1):
    shard.feed(hello(m, 0))
    shard.feed(report(m, (0, 0), (0, 0)), 0.0)
  for k in range(20):  # learner 0 commits every 0.2 s; learner 1 hears nothing of it
    now = 0.2 * (k + 1)
    shard.feed(report(0, (k, 0), (2, 0)), now)
    shard.feed(push(0, k, base=k), now, norm=1.0)
    sends = shard.feed(report(1, (0, 0), (0, 0)), now)
    resent += [a.message for a in sends if a.to == 1 and isinstance(a.message, Publish)]
  assert resent and resent[0].base_round == NOTHING and resent[0].version <= 7


def test_what_waits_for_a_slow_link_is_not_sent_again():
  """Two fragments leave together; that one arrives says how long the other may take."""
  shard, once = Script(ALONE), 0.9 * ALONE.liveness_seconds
  assert resent(shard.feed(hello(0, 0))[-2:]) == [0, 1]
  assert resent(shard.feed(report(0, (0, -1), (0, 0)), once)) == []
  patience = 3 * once  # what the first one took, three times, from when nothing waits here any more
  assert resent(shard.feed(report(0, (0, -1), (0, 0)), 1.5 * patience, unsent=True)) == []
  assert resent(shard.feed(report(0, (0, -1), (0, 0)), 2.49 * patience)) == []
  late = 2.51 * patience
  assert resent(shard.feed(report(0, (0, -1), (0, 0)), late)) == [1]
  assert resent(shard.feed(report(0, (0, -1), (0, 0)), late + 1.99 * patience)) == []
  assert resent(shard.feed(report(0, (0, -1), (0, 0)), late + 2.01 * patience)) == [1]


def test_of_what_is_overdue_one_is_sent_again_at_a_time():
  shard, patience = Script(ALONE), 1.01 * ALONE.liveness_seconds
  shard.feed(hello(0, 0))
  for k, again in enumerate([[0], [], [1], []]):
    assert resent(shard.feed(report(0, (-1, -1), (0, 0)), (k + 1) * patience)) == again


def test_what_many_wait_for_takes_everybody_s_time():
  """The fifth of five on one link hears nothing until the others are served."""
  shard, once = Script(ALONE), 0.9 * ALONE.liveness_seconds
  for m in range(5):
    shard.feed(hello(m, 0))
  for m in range(4):
    shard.feed(report(m, (0, 0), (0, 0)), (m + 1) * once)
    assert resent(shard.feed(report(4, (-1, -1), (0, 0)), (m + 1) * once)) == []


def test_a_restarted_shard_does_not_mistake_its_age_for_a_slow_network():
  shard = Script(ALONE, incarnation=1)
  shard.feed(report(0, (0, 0), (0, 0)), 5000.0)
  assert shard.state.members[0].delivery_seconds == 0.0


def test_the_alarm_rings_in_time_and_never_too_early():
  for k in range(2000):
    shard = Script(ALONE)
    shard.feed(hello(0, 0), 0.1 * k + 0.037)
    shard.feed(Tick(syncer.next_wake(shard.state)))
    assert shard.state.members[0].lost


def test_each_learner_is_lost_when_its_own_time_is_over():
  shard, lost = Script(ALONE), []
  for m in range(3):
    shard.feed(hello(m, 0), 10.0 * m)
  while (now := syncer.next_wake(shard.state)) < 1e9:
    lost += [(now, a.learner) for a in shard.feed_all(Tick(now)) if isinstance(a, Member)]
  assert lost == [(60.0, 0), (70.0, 1), (80.0, 2)]
  patient = Script(dataclasses.replace(ALONE, liveness_seconds=500.0))
  patient.feed(report(0, (0, 0), (1, 1)))
  assert syncer.next_wake(patient.state) == 500.0


@pytest.mark.parametrize("learner, life", [(1, 0), (0, 1), (0, -1)])
def test_only_a_report_makes_a_learner_or_a_new_life_of_it_known(learner, life):
  """What it says before, or an earlier life says, is not heard."""
  shard = Script(ALONE)
  shard.feed(hello(0, 5))
  before = shard.state
  for message in (Goodbye(learner, 5 + life), push(learner, 0, incarnation=5 + life)):
    [ignored] = shard.feed_all(Received(message, 0.1))
    assert "incarnation" in ignored.reason and shard.state == before


def test_a_learner_in_its_first_step_is_lost_by_the_pace_of_the_others():
  """How long its own steps take is not known yet."""
  shard = Script()
  shard.feed(hello(0, 0))
  patience = [syncer.lost_at(shard.state, shard.state.members[0])]
  for m, seconds in ((1, 2.0), (0, 5.0)):
    shard.feed(replace(report(m, (0, 0), (1, 1)), step_seconds=seconds))
    patience.append(syncer.lost_at(shard.state, shard.state.members[0]))
  assert patience == [60.0, 20.0, 50.0], "ten steps"


def test_who_is_lost_is_asked_for_nothing():
  shard = Script(ALONE)
  for m in (0, 1):
    shard.feed(hello(m, 0))
    shard.feed(report(m, (0, 0), (0, 1)), 0.1)
  shard.feed(Tick(99.0))
  assert asked(shard.feed(report(0, (0, 0), (1, 1)), 99.1)) == {(0, 0)}


def test_a_round_ends_when_one_that_it_needs_is_lost():
  shard = Script()
  for m in (0, 1):
    shard.feed(hello(m, 0))
    shard.feed(report(m, (0, 0), (1, 0)), 0.1)
  shard.feed(push(0, 0), 0.2, norm=1.0)
  [ended] = shard.feed(report(0, (0, 0), (1, 0)), 99.0)
  assert isinstance(ended, Abandoned) and "only 1 of 2 needed are left" in ended.reason


def test_who_was_not_heard_while_the_shard_took_others_in_is_not_lost():
  shard = Script(ALONE)
  shard.feed(hello(0, 0), 0.0)
  late = shard.state.silent_at
  shard.feed(Tick(late + 5.0, heard_until=late - 0.01))
  assert not shard.state.members[0].lost
  shard.feed(Tick(late + 6.0, heard_until=late + 6.0))
  assert shard.state.members[0].lost


@pytest.mark.parametrize(
  "heard", [hello(0, 0), report(0, (-1, -1), (0, 0))], ids=["hello", "report"]
)
def test_a_learner_that_was_lost_is_logged_as_joined_when_it_is_heard_again(heard, shard):
  """One that was stopped while it joined says hello before it reports."""
  [lost] = shard.feed_all(Tick(1000.0))
  assert (lost.state, lost.reason) == ("lost", "silent for 1000.00 s")
  shard.state = shard.state.with_member(0, resends=5, resent_at=999.0)
  logged = [a for a in shard.feed_all(heard, 1000.1) if isinstance(a, Member)]
  assert [(a.state, a.reason) for a in logged] == [("joined", "heard again")]
  assert shard.state.members[0].resends < 2, "what it lacks comes again soon"


def test_a_restarted_shard_still_says_what_it_has_merged(shard):
  shard.feed(report(0, (0, 0), (1, 1)))
  shard.feed(push(0, 0), norm=1.0)
  stored = shard.state.fragments
  shard.state = syncer.init(0, 1, stored, ALONE, 1 << 60)
  [publish] = shard.feed(report(0, (0, 0), (1, 1)), 1.0)
  assert (publish.message.version, publish.message.merged_round(0)) == (1, 0)
  assert publish.message.base_round == NOTHING, "whole: nobody knows what it has"
  sends = shard.feed(report(0, (0, 0), (2, 2)), 1.1)
  assert [a.message.round for a in sends] == [1 << 24], "round ids of the dead are not used again"


FOREIGN = [
  welcome(0, 0, 0, 0, (0, 1)),
  says.pull(0, 0, 0, 0, 0, 0),
  says.publish(0, 0, 0, 0, 0, 1, 0, 0, 0, (), ""),
  Rejection(0, 0, 0, 0, 0, True, ""),
  report(0, (0,), (1,)),
  report(0, (0, 0, 0), (1, 1, 1)),
  push(0, 0, fragment=7),
  push(0, 0, fragment=-1),
  push(5, 0),
  push(-1, 0),
  Goodbye(9, 0),
]


@pytest.mark.parametrize("message", FOREIGN, ids=lambda m: type(m).__name__)
def test_nonsense_changes_nothing_at_a_shard(message, shard):
  before = shard.state
  assert shard.feed(message) == [] and shard.state == before


@pytest.mark.parametrize(
  "message",
  [
    hello(0, 0),
    report(0, (0, 0), (1, 1)),
    push(0, 0),
    says.pull(9, 0, 0, 0, 0, 0),
    says.pull(0, 0, 0, 2, 0, 0),
    says.pull(0, 0, 0, -1, 0, 0),
    says.publish(0, 0, 0, 2, 0, 1, -1, 0, 0, (), ""),
    says.publish(0, 0, 0, 0, 0, 5, 4, 0, 0, (), ""),  # an update to a version I lack
    says.publish(0, 0, 0, 0, -1, 0, -1, 0, 0, (), ""),  # a version I have
    Rejection(0, 0, 0, 0, 3, False, "of no push of mine"),
    Rejection(0, 0, 0, 7, 3, False, "of no fragment of mine"),
    RequestValue(0, 0, 0, 2),
    welcome(0, 0, 0, 30, (0, 1)),  # of an earlier global step
  ],
  ids=lambda m: type(m).__name__,
)
def test_nonsense_changes_nothing_at_a_learner(message, one):
  before = one.state
  assert one.feed(message) == [] and one.state == before


def test_a_shard_speaks_of_its_own_fragments_only():
  one = Script(role="learner")
  one.state = learner.init(0, 0, (0, 1), target_tokens=10_000)
  before = one.state.fragments
  for message in (says.pull(1, 0, 0, 0, 0, 0), says.publish(1, 0, 0, 0, -1, 0, -1, 0, 0, (), "")):
    assert one.feed(message) == [] and one.state.fragments == before
    assert one.feed(replace(message, fragment=1)) or one.state.fragments != before
    one.state = replace(one.state, fragments=before)
  one.feed(says.pull(1, 0, 0, 1, 0, 0))
  one.feed(welcome(0, 1, 0, 0, (0,)))
  assert one.state.fragments[1].pull, "shard 0 has restarted, and shard 1 has not"


def test_a_pull_of_a_shard_s_former_life_is_not_answered():
  pull, restarted = says.pull(0, 0, 0, 0, 5, 0), welcome(0, 1, 0, 40, (0, 1))
  for messages in ([pull], [pull, restarted]):
    one = Script(role="learner")
    join(one)
    for message in messages:
      assert one.feed(message) == [], "it has no step yet"
    answers = one.feed(StepDone(0.1, 10, 0.1))
    assert [type(a.message) for a in answers] == [Push] * (messages == [pull])


def test_a_version_that_waits_for_the_buddy_is_not_lost_and_hides_no_other_one_that_is():
  """Some fragment of a busy shard waits at nearly every report."""
  shard = Script(ALONE)
  first = FragmentState(0, 1, last_round=0), FragmentState(1, 1, last_round=0)
  shard.state = syncer.init(0, 0, first, ALONE, 1 << 60, began_at=-1000.0)
  assert resent(shard.feed(report(0, (0, 0), (0, 0)), 0.0)) == [0, 1]
  patience, sends = ALONE.liveness_seconds, {}
  for k in range(1, 60):
    now = 0.1 * k * patience
    sends[now] = resent(shard.feed(report(0, (0, 0), (0, 0)), now, held={0}))
  assert [each for each in sends.values() if each] == [[1]] * 2, "the second after twice as long"
  shard.state = shard.state.with_member(0, resends=0, resent_at=-1.0)
  sent = [
    resent(shard.feed(report(0, (0, 0), (0, 0)), 6.0 * patience + after))
    for after in (0.0, 0.89 * patience, 0.91 * patience)
  ]
  assert sent == [[1], [], []], "patience with the other one begins when it has left"


def test_a_version_that_waits_for_the_buddy_does_not_hide_the_lost_one_before_it():
  shard = Script(ALONE)
  first = FragmentState(0, 2, last_round=1), FragmentState(1)
  shard.state = syncer.init(0, 0, first, ALONE, 1 << 60, began_at=-1000.0)
  assert resent(shard.feed(report(0, (0, 0), (0, 0)), 0.0)) == [0]
  overdue = resent(shard.feed(report(0, (0, 0), (0, 0)), 99.0, held={0}))
  assert overdue == [0], "what waits is the version after the lost one"


def test_a_member_that_confirms_late_does_not_make_the_others_wait_for_a_resend():
  shard = Script(dataclasses.replace(SYNC, liveness_seconds=10.0))
  for m in (0, 1):
    shard.feed(hello(m, 0))
  sent = {"sent_at": (0.0, 1.0)}  # the longest wait counts
  shard.state = shard.state.with_member(0, **sent, delivery_seconds=1.0)
  shard.feed(report(0, (0, 0), (0, 0)), 2.0)
  assert shard.state.members[0].delivery_seconds == 1.0 + 0.2 * (2.0 - 1.0)
  usual = shard.state.delivery_seconds
  shard.feed(report(1, (0, 0), (0, 0)), 500.0)
  assert usual == 2.0 and shard.state.members[1].delivery_seconds == 500.0
  assert usual < shard.state.delivery_seconds <= 2 * usual + 10.0
