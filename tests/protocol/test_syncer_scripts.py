"""Short scripts derived by hand: exact histories, and what a broken or hostile peer can say."""

from __future__ import annotations

import dataclasses

import pytest

from ddiloco.config import SyncConfig
from ddiloco.protocol import learner, rounds, syncer
from ddiloco.protocol.actions import (
  CopyOut,
  Read,
  Received,
  Resend,
  Send,
  Stage,
  Staged,
  StepDone,
  Taken,
  TakeSnapshot,
  Tick,
)
from ddiloco.protocol.events import Abandoned, Apply, Commit, Event, Member
from ddiloco.protocol.messages import (
  EVALUATOR,
  INITIAL,
  MADE,
  NOTHING,
  FragmentState,
  Goodbye,
  Publish,
  Pull,
  Push,
  Rejection,
  Report,
  RequestValue,
)
from ddiloco.protocol.states import Round
from ddiloco.protocol.values import replace
from tests import says
from tests.says import hello, welcome

# Two fragments, one shard: fragment 0 is first due after 1 step, fragment 1 after 2, then every 2.
SYNC = SyncConfig(
  num_shards=1,
  num_fragments=2,
  sync_period=2,
  overlap_steps=1,
  min_quorum=2,
  grace_safety=0.0,
  liveness_seconds=1.0,
)
ALONE = dataclasses.replace(SYNC, min_quorum=1)


class Script:
  """Feeds a reducer one event after the other and keeps its state."""

  def __init__(self, sync: SyncConfig = SYNC, role: str = "shard", incarnation: int = 0):
    self.sync, self.shard = sync, role == "shard"
    if self.shard:
      both = (FragmentState(0), FragmentState(1))
      self.state = syncer.init(0, incarnation, both, sync, 1 << 60, began_at=-1000.0)
    else:
      self.state = learner.init(0, incarnation, (0, 0), target_tokens=10_000)

  def feed(self, event, now: float = 0.0, **measured) -> list:
    """Its actions, without most lines of the log."""
    return [
      says.plain(a)
      for a in self.feed_all(event, now, **measured)
      if isinstance(a, Apply | Abandoned | Commit) or not isinstance(a, Event)
    ]

  def feed_all(self, event, now: float = 0.0, **measured) -> list:
    if not isinstance(event, StepDone | Staged | Taken | Tick):
      event = Received(event, now, **measured)
    if self.shard:
      self.state, actions = says.shard_on(self.state, event)
    else:
      self.state, actions = learner.learner_on(self.state, event, self.sync)
    return actions


def report(
  m: int, versions, steps_since_sync, incarnation: int = 0, global_step: int = 1
) -> Report:
  return says.report(m, incarnation, global_step, 0.1, versions, steps_since_sync)


def push(m: int, round_id: int, base: int = 0, fragment: int = 0, incarnation: int = 0) -> Push:
  return says.push(m, incarnation, fragment, round_id, base, 1, 10 * (m + 1), 1, "")


def initial(to: int, fragment: int) -> Send:
  return Send(to, says.publish(0, 0, 0, fragment, -1, 0, -1, 0, 0, (), MADE))


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


def join(script: Script) -> Publish:
  """Brings a learner to version 0 of both fragments."""
  whole = says.publish(0, 0, 0, 0, -1, 0, -1, 40, 0, (), "")
  assert learner.reports(script.state, script.sync) == [Send(0, hello(0, 0))]
  assert script.feed(welcome(0, 0, 0, 40, (0, 1))) == []
  for p in (0, 1):
    publish = replace(whole, fragment=p)
    assert script.feed(publish) == [Stage(publish, "overwrite", False)]
    assert not learner.can_step(script.state, script.sync)
    assert script.feed(Staged(p, 0.0)) == [says.applied(p, 0, -1, "overwrite", False)]
  global_step = 0 if script.sync.blocking else 40  # in lock-step all begin together
  assert learner.can_step(script.state, script.sync) and script.state.global_step == global_step
  return whole


def test_golden_learner_two_fragments():
  one = Script(role="learner")
  whole = join(one)
  assert one.feed(says.pull(0, 0, 0, 0, 0, 0)) == []  # not a single step to push yet
  sent = says.push(0, 0, 0, 0, 0, 1, 10, 41, "")
  assert one.feed(StepDone(0.1, 10, 0.1)) == [CopyOut(sent)]
  assert one.feed(says.pull(0, 0, 0, 0, 0, 0)) == [Resend(sent)]
  one.feed(StepDone(0.2, 10, 0.1))
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
  assert one.feed(version_1) == [Stage(version_1, "rebase", True)]
  assert one.feed(says.pull(0, 0, 0, 0, 2, 1)) == []  # waits for version 1 to be applied
  assert one.feed(Staged(0, 0.2)) == [
    says.applied(0, 1, 0, "rebase", True),
    CopyOut(says.push(0, 0, 0, 2, 1, 1, 10, 44, "")),
  ]
  f = one.state.fragments[0]
  assert (f.steps, f.tokens, f.steps_since_sync, f.acknowledged_tokens, f.merged_tokens) == (
    1,
    10,
    1,
    10,
    30,
  )
  # Round 2 went on without me, version 3 came whole: both unmerged steps stay, at half length.
  one.feed(StepDone(0.3, 10, 0.1))
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
  [stage] = one.feed(Rejection(0, 0, 0, 0, 0, False, "not finite"))
  assert stage == Stage(base, "reset", False) and stage.publish.payload is None
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
  applied, copy_out = one.feed(Staged(0, 0.2))
  assert isinstance(applied, Apply) and copy_out.push.base_version == 1
  assert one.feed(says.pull(0, 0, 0, 0, 2, 0)) == [], "of a round that is over"


def test_a_pull_of_an_abandoned_round_does_not_replace_a_newer_push(one):
  """Else round 5 merges my push, I believe it did not, and push the same steps again."""
  one.feed(StepDone(0.1, 10, 0.1))
  assert [type(a) for a in one.feed(says.pull(0, 0, 0, 0, 5, 0))] == [CopyOut]
  assert one.feed(says.pull(0, 0, 0, 0, 3, 0)) == []
  assert one.state.fragments[0].outstanding.push.round == 5
  later = Script(role="learner")
  join(later)
  for round_id in (5, 3):
    assert later.feed(says.pull(0, 0, 0, 1, round_id, 0)) == []
  [action] = later.feed(StepDone(0.1, 10, 0.1))
  assert action.push.round == 5


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
    assert shard.feed(zombie, norm=1.0) == []
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


def resent(sends) -> list[int]:
  return [a.message.fragment for a in sends if isinstance(a.message, Publish)]


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


def test_who_is_lost_is_asked_for_nothing():
  shard = Script(ALONE)
  for m in (0, 1):
    shard.feed(hello(m, 0))
    shard.feed(report(m, (0, 0), (0, 1)), 0.1)
  shard.feed(Tick(99.0))
  assert asked(shard.feed(report(0, (0, 0), (1, 1)), 99.1)) == {(0, 0)}


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
  logged = [a for a in shard.feed_all(heard, 1000.1) if isinstance(a, Member)]
  assert [(a.state, a.reason) for a in logged] == [("joined", "heard again")]


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
  assert shard.feed(message, norm=1.0) == [] and shard.state == before


@pytest.mark.parametrize(
  "message",
  [
    hello(0, 0),
    report(0, (0, 0), (1, 1)),
    push(0, 0),
    says.pull(9, 0, 0, 0, 0, 0),
    says.pull(0, 0, 0, 7, 0, 0),
    says.pull(0, 0, 0, -1, 0, 0),
    says.publish(0, 0, 0, 7, 0, 1, -1, 0, 0, (), ""),
    says.publish(0, 0, 0, 0, 0, 5, 4, 0, 0, (), ""),  # an update to a version I lack
    says.publish(0, 0, 0, 0, -1, 0, -1, 0, 0, (), ""),  # a version I have
    Rejection(0, 0, 0, 0, 3, False, "of no push of mine"),
    Rejection(0, 0, 0, 7, 3, False, "of no fragment of mine"),
    RequestValue(0, 0, 0, 7),
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


def test_a_pull_of_a_shard_s_former_life_is_not_answered():
  pull, restarted = says.pull(0, 0, 0, 0, 5, 0), welcome(0, 1, 0, 40, (0, 1))
  for messages in ([pull], [pull, restarted]):
    one = Script(role="learner")
    join(one)
    for message in messages:
      assert one.feed(message) == [], "it has no step yet"
    answers = [a for a in one.feed(StepDone(0.1, 10, 0.1)) if isinstance(a, CopyOut)]
    assert len(answers) == (messages == [pull])


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
  sent = [a for a in shard.feed(push(0, 0), 0.1, norm=1.0) if isinstance(a, Send)]
  assert [(a.to, a.message.base_round) for a in sent] == [(0, INITIAL)]
  for m in (1, 2):
    [whole] = shard.feed(report(m, (0, 0), (0, 0)), 0.2)
    assert (whole.to, whole.message.version, whole.message.base_round) == (m, 1, NOTHING)


def asked(actions) -> set[tuple[int, int]]:
  """(fragment, learner) of every pull."""
  sends = [(a.to, a.message) for a in actions if isinstance(a, Send)]
  return {(message.fragment, to) for to, message in sends if isinstance(message, Pull)}


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
  sent = [a.message for a in shard.feed(bad, norm=1.0) if isinstance(a, Send)]
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
  refusals = [
    a.message.reason for a in sent if isinstance(a, Send) and hasattr(a.message, "reason")
  ]
  assert refusals == ["norm 1e+06 is over 10 x 2"] and shard.state.fragments[0].version == 1


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


@pytest.mark.parametrize("norm, merged", [(5.0, True), (100.0, False)])
def test_the_pushes_of_learners_that_left_long_ago_excuse_no_long_one(norm, merged):
  """In a run of months these are most: theirs were long, at the learning rate of its beginning."""
  shard = Script(ALONE)
  f = FragmentState(
    0, 2, merged_global_steps={0: 3000, 1: 300, 2: 300}, last_round=1, global_step=3000
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
  shard = Script(ALONE)
  shard.feed(hello(0, 0))
  shard.feed(report(0, (0, 0), (1, 1)))
  before = shard.state.vector_clock[shard.state.key]
  sent = [a.message for a in shard.feed_all(push(0, 0), norm=1.0) if isinstance(a, Send)]
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
  assert [a.message.round for a in shard.feed(told, 0.1) if isinstance(a, Send)] == [newest + 1]


def test_in_lock_step_a_snapshot_begins_once_a_quorum_is_back():
  """Without the learners that a round needs, the run could not go on from it."""
  sync = dataclasses.replace(SYNC, blocking=True, snapshot_steps=1)

  def taken(actions) -> list[tuple[int, ...]]:
    return [action.learners for action in actions if isinstance(action, TakeSnapshot)]

  shard = Script(sync)
  for m in (EVALUATOR, 0, 1):
    shard.feed(hello(m, 0))
  shard.feed(report(EVALUATOR, (0, 0), (0, 0)), 0.1)
  assert not taken(shard.feed(report(0, (0, 0), (1, 1), global_step=3), 0.1))
  assert taken(shard.feed(report(1, (0, 0), (1, 1), global_step=3), 0.1)) == [(0, 1)]


@pytest.mark.parametrize("said", [None, Goodbye(0, 0), hello(0, 1)])
def test_a_round_waits_for_a_push_that_is_being_read_also_if_its_learner_is_gone(said):
  shard = Script(ALONE)
  for m in (0, 1):
    shard.feed(hello(m, 0))
    shard.feed(report(m, (0, 0), (0, 1)), 0.1)
  pulls = [Send(m, says.pull(0, 0, 0, 1, 0, 0)) for m in (0, 1)]
  assert shard.feed(report(0, (0, 0), (0, 2)), 0.2) == pulls
  slow = push(0, 0, fragment=1)
  assert shard.feed(slow, 0.3, read=False) == [Read(slow, 0.3)]
  assert shard.feed(slow, 0.4, read=False) == [], "a duplicate"
  assert shard.feed(push(1, 0, fragment=1), 0.5, norm=1.0) == [], "it waits"
  assert shard.feed(Tick(9.0, heard_until=0.5)) == [], "past its deadline"
  if said is not None:
    assert not any(isinstance(action, Commit) for action in shard.feed(said, 9.1))
  shard.state, actions = syncer.syncer_on(shard.state, Received(slow, 0.3, norm=1.0))
  assert actions == [] and set(shard.state.under_way[1].pushes) == {0, 1}
  commit, *_ = shard.feed(Tick(9.2))
  assert commit.learners == (0, 1)


def test_a_bad_push_of_one_that_is_gone_is_rejected_like_any_other():
  shard = Script()
  for m in (0, 1):
    shard.feed(hello(m, 0))
    shard.feed(report(m, (0, 0), (1, 0)), 0.1)
  for m in (0, 1):
    shard.feed(push(m, 0), 0.2, read=False)
  shard.feed(Goodbye(0, 0), 0.3)
  for m in (0, 1):
    bad = Received(push(m, 0), 0.2, norm=float("inf"))
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
  said = [a.message for a in told if isinstance(a, Send)]
  rejoins = [message.rejoin for message in said if isinstance(message, Rejection)]
  assert rejoins == [False] * (ALONE.quarantine_after - 1) + [True]
  assert [a.state for a in told if isinstance(a, Member)] == ["quarantined"]
  assert shard.state.members[0].quarantined and not shard.state.under_way


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
  sent = [a.message for a in shard.feed(hello(0, 0)) if isinstance(a, Send)]
  assert any(isinstance(m, Publish) for m in sent) == (version > 0)
