"""What a shard believes of a member: each bound by itself; `liar.py` has them all at once."""

from __future__ import annotations

import dataclasses
import math

import pytest

from ddiloco.config import SyncConfig
from ddiloco.protocol import events, learner, messages, rules, syncer
from ddiloco.protocol.actions import InstallValue, ReadDone, Received, Tick
from ddiloco.protocol.events import Commit, Event
from ddiloco.protocol.messages import (
  NOTHING,
  ForwardMoments,
  FragmentState,
  Goodbye,
  Moments,
  ProvideMoments,
  Pull,
  RequestMoments,
  RequestValue,
)
from ddiloco.protocol.rules import Beliefs
from ddiloco.protocol.values import replace
from tests import says
from tests.protocol.scripts import ALONE, Script, push, report

SYNC = SyncConfig(num_shards=1, num_fragments=2, sync_period=10, overlap_steps=2, min_quorum=2)
HUGE = 1 << 39


def shard(num_learners: int = 4, **init) -> syncer.SyncerState:
  """One that has learners with steps of 1 s, all of which have made a step."""
  fragments = (FragmentState(0), FragmentState(1))
  state = syncer.init(0, 0, fragments, SYNC, 1 << 60, **{"step_tokens": 10, **init})
  for m in range(num_learners):
    state = told(state, says.hello(m, 0), 0.0)
    state = told(state, says.report(m, 0, 1, 1.0, (0, 0), (1, 1)), 1.0)
  return state


def told(state, message, now: float, **measured):
  return says.shard_on(state, says.event_of(message, now, **measured))[0]


def actions_of(state, message, now: float, **measured) -> list:
  return says.shard_on(state, says.event_of(message, now, **measured))[1]


# --- the global step ------------------------------------------------------------------------------


def test_a_shard_that_does_not_know_its_members_believes_no_single_learner():
  known, steps = Beliefs(reach_at=0.0, reach=1000.0), [100]
  for m, claim in ((0, 150), (0, 160), (1, 140), (2, 155)):
    how = 9.0, math.inf, SYNC, 0
    known, step = rules.raised_global_step(known, steps[-1], m, claim, *how)
    steps.append(step)
  assert steps == [100, 100, 100, 140, 155]


def test_one_learner_does_not_move_the_global_step_beyond_what_others_could():
  state = shard()
  for now in range(2, 102):
    state = told(state, says.report(3, 0, HUGE, 1e-9, (0, 0), (1, 1)), float(now))
  slack = rules.step_tolerance(SYNC)
  assert 100 < state.global_step <= slack + 100 * rules.LEAD


def ordinary(state, seconds: int) -> syncer.SyncerState:
  """Learners 0 to 2 make a step a second for so long, and report each minute."""
  for now in range(60, seconds + 1, 60):
    for m in range(3):
      state = told(state, says.report(m, 0, now, 1.0, (0, 0), (1, 1)), float(now))
  return state


def test_no_claim_after_long_has_what_one_learner_could_have_reached_by_then():
  """After months it could claim all tokens that were left, in one push."""
  state, seconds = ordinary(shard(), 7200), 7200.0
  state = told(state, says.report(3, 0, HUGE, 1.0, (0, 0), (1, 1)), seconds)
  assert 0 < state.global_step - seconds <= rules.LEAD * rules.KEPT_SECONDS < 2 * seconds


def test_an_island_twice_as_fast_that_was_cut_off_for_hours_is_believed_at_once():
  state = ordinary(shard(), 7200)
  state = told(state, says.report(3, 0, 14_400, 0.5, (0, 0), (1, 1)), 7200.0)
  assert state.global_step == 14_400


def test_what_two_say_is_believed_at_once():
  """As after a restart: however long the shard was away."""
  state = told(shard(), says.report(0, 0, 5_000, 1.0, (0, 0), (1, 1)), 2.0)
  assert state.global_step < 50
  state = told(state, says.report(1, 0, 4_990, 1.0, (0, 0), (1, 1)), 2.0)
  assert state.global_step == 4_990
  goes_on = told(state, says.report(0, 0, 5_001, 1.0, (0, 0), (1, 1)), 3.0)
  assert goes_on.global_step == 5_001, "from there on one alone is believed at its pace"


def test_an_island_that_was_there_long_before_the_others_is_asked_when_their_pace_is_known():
  """Its work was refused: the shard did not believe how far it had come while it waited."""
  fragments = (FragmentState(0), FragmentState(1))
  alone = SyncConfig(num_shards=1, num_fragments=2, sync_period=10, overlap_steps=2, min_quorum=1)
  state = syncer.init(0, 0, fragments, alone, 1 << 60, 60.0, planned_learners=3)
  asked, now = [], 0.0

  def tell(message) -> None:
    nonlocal state
    state, actions = says.shard_on(state, Received(message, now))
    for pull in [a.message for a in says.sends(actions, Pull)]:
      asked.append((actions[0].to, pull.fragment))

  for step in range(300):
    now = 0.02 * step
    if step == 0:
      tell(says.hello(0, 0))
    if step in (200, 205):
      tell(says.hello(step // 5 - 39, 0))
    tell(says.report(0, 0, step, 0.02, (0, 0), (step, step)))
    for m in (1, 2):
      if m in state.members and step > 205 + m:
        mine = step - 205 - m
        tell(says.report(m, 0, step - 205, 0.02, (0, 0), (mine, mine)))
    if asked:
      break
  current = state.under_way[0]
  assert current is not None and 0 in current.pending and state.global_step == step
  sent = says.push(0, 0, 0, current.id, 0, step, 10 * step, "")
  state = says.take_in(state, ReadDone(sent, now, norm=1.0))[0]
  assert not state.under_way[0].rejected and 0 in state.under_way[0].pushes


@pytest.mark.parametrize("said", [1e-9, 1e300])
def test_no_pace_that_a_third_one_makes_up_holds_up_the_faster_of_two(said):
  """Nor does it let the global step run away."""
  state = syncer.init(0, 0, (FragmentState(0), FragmentState(1)), SYNC, 1 << 60)
  for m in range(3):
    state = told(state, says.hello(m, 0), 0.0)
  for step in range(1, 400):
    now = 0.5 * step
    state = told(state, says.report(2, 0, HUGE if said < 1 else 0, said, (0, 0), (1, 1)), now)
    state = told(state, says.report(0, 0, step, 0.5, (0, 0), (1, 1)), now)
    state = told(state, says.report(1, 0, step // 3, 1.5, (0, 0), (1, 1)), now)
    assert step <= state.global_step <= rules.step_tolerance(SYNC) + rules.LEAD * step


def test_one_that_outlives_all_others_is_believed():
  """The others were lost before they made a step."""
  state = syncer.init(0, 0, (FragmentState(0), FragmentState(1)), SYNC, 1 << 60)
  for m in range(3):
    state = told(state, says.hello(m, 0), 0.0)
  for step in range(1, 400):
    now = 0.5 * step
    state = told(state, says.report(0, 0, step, 0.5, (0, 0), (1, 1)), now)
    state = says.take_in(state, Tick(now, heard_until=now))[0]
  assert state.members[1].lost and state.global_step == step


def test_a_learner_that_is_alone_makes_the_global_step_by_itself():
  state = syncer.init(0, 0, (FragmentState(0), FragmentState(1)), SYNC, 1 << 60)
  for step in range(1, 200):
    state = told(state, says.report(7, 0, step, 0.5, (0, 0), (1, 1)), 0.5 * step)
    assert state.global_step == step


def test_a_learner_that_is_alone_is_believed_where_it_is_not_known_when_the_run_began():
  """A shard that is started anew on another host knows the global step of its values only."""
  values = (FragmentState(0, global_step=9_000), FragmentState(1, global_step=8_990))
  state = syncer.init(0, 1, values, SYNC, 1 << 60, began_at=0.0)
  for step in range(9_001, 9_200):
    state = told(state, says.report(7, 0, step, 0.5, (0, 0), (1, 1)), 0.5 * (step - 9_000))
    assert state.global_step == step


def test_a_member_that_never_says_how_fast_it_is_does_not_hold_up_a_fast_one():
  """The fast one is believed as far as the slow one's speed allows, and not a step further."""
  paces = ((0.1, 0), (0.3, 1))

  def reached(claim: int, learner: int = 0, paces: rules.Ranking = paces) -> int:
    known = Beliefs(reach_at=0.0, paces=paces)
    return rules.raised_global_step(known, 0, learner, claim, 30.0, math.inf, SYNC, 3)[1]

  assert reached(300) == 300
  most = rules.step_tolerance(SYNC) / 2 + 30 * rules.LEAD / 0.3
  assert reached(HUGE) == int(most)
  assert reached(HUGE, 0, ((1e-9, 0), (0.3, 1))) == int(most), "whatever it says of itself"
  assert reached(HUGE, 2) == int(most), "the silent one itself"
  assert reached(300, 0, ((0.1, 0),)) < 30, "no other has said anything yet"
  two = Beliefs(reach_at=0.0, paces=((0.1, 0),))
  assert rules.raised_global_step(two, 0, 0, 300, 30.0, math.inf, SYNC, 2)[1] == 300


def test_a_run_makes_no_more_steps_than_its_tokens_need_many_times_over():
  state = replace(shard(1, step_tokens=200, fewest_tokens=10), target_tokens=100_000)
  state = told(state, says.report(0, 0, HUGE, 1e-9, (0, 0), (1, 1)), 1e9)
  assert state.global_step == 160_000 + rules.step_tolerance(SYNC)
  for m, claim in ((0, 500_000), (1, 500_000), (1, 600_000)):
    state = told(state, says.report(m, 0, claim, 1.0, (0, 0), (1, 1)), 1e9)
  assert state.global_step == 500_000, "two say it, and one alone does not turn it back"


def test_a_short_run_outlives_an_outage_in_which_many_times_its_steps_are_made():
  """The shard asked its only learner no more, and said nothing."""
  state = replace(shard(1, step_tokens=10, fewest_tokens=10), target_tokens=240)
  one = replace(state, sync=dataclasses.replace(SYNC, min_quorum=1))
  state = told(one, says.report(0, 0, 5_000, 0.001, (0, 0), (5_000, 5_000)), 6.0)
  assert state.global_step == 5_000 and state.under_way[0].pending == (0,)
  most = rules.SHORT_RUN_STEPS + rules.step_tolerance(SYNC)
  state = told(one, says.report(0, 0, HUGE, 0.001, (0, 0), (1, 1)), 1e6)
  assert state.global_step == most, "but it is bounded"


def ahead(state, message, now: float) -> tuple[syncer.SyncerState, list[str]]:
  """The state, and why a learner is said to be ahead."""
  state, actions = says.shard_on(state, Received(message, now))
  said = [a for a in actions if isinstance(a, events.Member) and a.state == "ahead"]
  assert all(each.learner == 2 for each in said)
  return state, [each.reason for each in said]


def test_it_is_said_once_that_no_round_begins_without_a_learner_that_is_not_believed():
  """The run stood still in silence: a round's log line would say it, and there was no round."""
  state = shard(3)
  state, reasons = replace(state, sync=dataclasses.replace(SYNC, min_quorum=3)), []
  for now in range(2, 30):
    for m, pace in ((0, 1.0), (1, 1.0), (2, 0.02)):
      step = round(now / pace)
      message = says.report(m, 0, step, pace, (0, 0), (step, step))
      state, said = ahead(state, message, float(now))
      reasons += [(each, state.global_step) for each in said]
  ((reason, believed),) = reasons
  assert not state.under_way and 5 * rules.LEAD / 2 < believed < 5 * rules.LEAD
  assert f"is at step 200, one learner alone is believed up to step {believed}, 16" in reason
  assert "(rules.LEAD)" in reason and "sync.min_quorum = 3" in reason
  # It begins afresh, at the step of the others.
  for message in (says.hello(2, 1), says.report(2, 1, 30, 0.02, (0, 0), (10, 10))):
    state, said = ahead(state, message, 30.0)
    assert not said
  assert state.under_way[0].pending == (0, 1, 2) and not state.said_ahead
  state, said = ahead(state, says.report(2, 1, 9_000, 0.02, (0, 0), (100, 100)), 31.0)
  assert not said and set(state.under_way) == {0, 1}, "rounds are under way"


@pytest.mark.parametrize("then", [Goodbye(2, 0), says.hello(2, 1)], ids=["left", "has no version"])
def test_nothing_is_said_of_one_that_is_ahead_and_could_not_push_anyway(then):
  state = replace(shard(3), sync=dataclasses.replace(SYNC, min_quorum=3))
  state, _ = ahead(state, says.report(2, 0, 9_000, 0.02, (0, 0), (1, 1)), 2.0)
  state, _ = ahead(state, then, 2.1)
  if state.members.get(2):
    late = says.report(2, 1, 9_000, 0.02, (-1, -1), (10, 10), rounds=(NOTHING, NOTHING))
    state, _ = ahead(state, late, 2.2)
  for m in (0, 1):
    state, said = ahead(state, says.report(m, 0, 12, 1.0, (0, 0), (10, 10)), 12.0)
    assert not said and rules.too_far_ahead(state.beliefs, state.global_step, SYNC) == 2


def test_a_run_that_lost_most_of_its_steps_says_so_and_what_helps():
  state = replace(shard(0, step_tokens=10, fewest_tokens=10), target_tokens=240)
  state = replace(state, sync=dataclasses.replace(SYNC, min_quorum=1))
  state, _ = ahead(state, says.hello(2, 0), 0.0)
  message = says.report(2, 0, HUGE, 0.001, (0, 0), (10, 10))
  _, (reason,) = ahead(state, message, 1e6)
  assert "(rules.WASTE)" in reason and reason.endswith("Fix: raise run.total_tokens")


def test_a_restarted_shard_knows_the_clock_of_its_newest_commit():
  values = (FragmentState(0, global_step=700), FragmentState(1, global_step=640))
  state = syncer.init(0, 3, values, SYNC, 1 << 60, recovery_deadline=9.0, planned_learners=3)
  state = told(told(state, says.hello(0, 0), 0.0), says.hello(1, 0), 0.0)
  alone = says.report(0, 0, 900, 1.0, (0, 0), (1, 1))
  assert state.global_step == state.believe_global_step(alone, 8.9).global_step == 700
  state = told(state, says.hello(messages.EVALUATOR, 0), 0.0)
  assert state.believe_global_step(alone, 9.0).global_step > 700
  assert state.believe_global_step(replace(alone, learner=messages.EVALUATOR), 9.0) == state


# --- a learner's own numbers ----------------------------------------------------------------------


def test_steps_of_a_million_years_do_not_keep_a_silent_learner():
  state = told(shard(), says.report(0, 0, 1, 1e300, (0, 0), (1, 1)), 2.0)
  assert state.members[0].step_seconds <= rules.LONGEST_STEP_SECONDS
  silent = 2.0 + SYNC.liveness_steps * rules.LONGEST_STEP_SECONDS + 1.0
  assert says.shard_on(state, Tick(silent))[0].members[0].lost


@pytest.mark.parametrize("usual, most", [(0.0, 600.0), (1.0, 60.0), (10.0, 160.0)])
def test_a_step_time_is_believed_up_to_a_multiple_of_the_usual_one(usual, most):
  known = Beliefs(reach_at=0.0, usual_step_seconds=usual)
  assert [rules.believed_step_seconds(known, claim) for claim in (50.0, 1e300)] == [50.0, most]


def test_a_fragment_is_not_due_more_often_than_the_run_makes_steps():
  """A learner that always says it has made its steps would have everybody push at every step."""
  state = Script(ALONE).state
  for m in (0, 1):
    state, _ = says.shard_on(state, Received(report(m, (0, 0), (1, 1)), 0.1))
  rounds = 0
  for k in range(300):
    now = 0.2 + 0.001 * k
    lie = says.report(0, 0, 1, 0.1, (state.fragments[0].version, 0), (1 << 50, 0))
    lie = replace(lie, rounds=tuple(f.last_round for f in state.fragments))
    state, actions = says.shard_on(state, Received(lie, now))
    for pull in [a.message for a in says.sends(actions, Pull)]:
      rounds += 1
      answer = push(0, pull.round, base=pull.base_version, fragment=pull.fragment)
      state, _ = says.shard_on(state, ReadDone(answer, now, norm=1.0))
  assert rounds <= 3, rounds
  assert rules.believed_steps_since(10**6, 120, 100, SYNC) == 20 + SYNC.overlap_steps + 2
  lock_step = dataclasses.replace(SYNC, blocking=True)
  assert rules.believed_steps_since(10, 120, 119, lock_step) == 10


def test_a_learner_that_leaves_again_and_again_is_not_waited_for():
  state, commits = Script(ALONE).state, 0
  for k in range(100):
    f = state.fragments[0]
    last = says.report(0, 0, k + 1, 0.1, (f.version, 0), (1, 0), leaving=True)
    last = replace(last, rounds=(f.last_round, -1))
    state, actions = says.shard_on(state, Received(last, 0.1 * k))
    for pull in [a.message for a in says.sends(actions, Pull)]:
      answer = push(0, pull.round, base=pull.base_version)
      state, made = says.shard_on(state, ReadDone(answer, 0.1 * k, norm=1.0))
      commits += any(isinstance(a, Commit) for a in made)
  assert commits < 60, "then it is due like the others"


class Rounds:
  """Rounds of one fragment, to which three learners push updates of given lengths."""

  def __init__(self, min_quorum: int):
    sync = SyncConfig(
      num_shards=1, num_fragments=1, sync_period=4, overlap_steps=2, min_quorum=min_quorum
    )
    self.state = syncer.init(0, 1, (FragmentState(0),), sync, 1 << 60)
    self.made: list = []

  def tell(self, event) -> None:
    self.state, actions = says.take_in(self.state, event)
    self.made.extend(actions)

  def end(self, now: float, life: int, *norms: float) -> events.Commit | events.Abandoned:
    """The end of one more round, in which learner m pushes an update of length `norms[m]`."""
    self.made.clear()
    f = self.state.fragments[0]
    for m in range(3):
      most = (6,)  # so late a fragment is due, whenever its last round began
      report = says.report(m, life, int(now), 1.0, (f.version,), most, rounds=(f.last_round,))
      self.tell(Received(report, now))
    self.tell(Tick(now))
    current = self.state.under_way[0]
    for m in range(3):
      sent = says.push(m, life, 0, current.id, f.version, 4, 40, "")
      self.tell(ReadDone(sent, now, norm=norms[m]))
    self.tell(Tick(now))
    [end] = [a for a in self.made if isinstance(a, events.Commit | events.Abandoned)]
    return end


def test_one_whose_updates_are_far_too_short_does_not_take_the_run_over():
  """Nor do two others whose updates are far too long, once they have started afresh."""
  rounds = Rounds(min_quorum=3)
  for step in range(1, 41, 4):
    assert rounds.end(float(step), 0, 1.0, 1.0, 0.05).rejected == {}
  ended = rounds.end(41.0, 1, 1.0, 1e9, 1e9)
  assert ended.rejected.keys() == {1, 2}, "their former lives had a past"


def test_one_whose_updates_grow_from_round_to_round_is_rejected_in_the_end():
  """Each is less than ten times its past, as the updates of an island that diverges may be."""
  rounds, length = Rounds(min_quorum=2), 1.0
  for step in range(401, 441, 4):
    if rounds.end(float(step), 0, 1.0, 1.0, length).rejected:
      break
    length *= 2.5
  assert 10 < length < 50


def test_one_whose_updates_are_always_longer_is_measured_by_what_is_usual():
  """By its own past it could be merged at a hundred times the length of the others' updates."""
  rounds = Rounds(min_quorum=2)
  for step in range(401, 421, 4):
    assert not rounds.end(float(step), 0, 1.0, 5.0, 1.0).rejected
  assert not rounds.end(421.0, 0, 1.0, 9.0, 1.0).rejected
  assert rounds.end(425.0, 0, 1.0, 30.0, 1.0).rejected.keys() == {1}


def test_a_growth_that_all_share_is_believed_once_it_has_lasted():
  """Two poisoned islands of four, while the other two started afresh, had ended a run."""
  rounds, good, long = Rounds(min_quorum=1), (1.0, 2.0, 3.0), (90.0, 95.0, 99.0)
  for step in range(401, 421, 4):
    assert not rounds.end(float(step), 0, *good).rejected
  for times in (1, 2, 3):
    assert rounds.end(421.0 + times, 0, *long).rejected.keys() == {0, 1, 2}
  assert not rounds.end(425.0, 0, *good).rejected, "it was not"
  for times in (1, 2, 3):
    ended = rounds.end(425.0 + times, 0, *long)
    assert isinstance(ended, events.Abandoned) and ended.rejected.keys() == {0, 1, 2}
  assert not any(member.quarantined for member in rounds.state.members.values())
  ended = rounds.end(429.0, 0, *long)
  assert isinstance(ended, events.Commit) and not ended.rejected
  assert not rounds.end(433.0, 0, *long).rejected, "it is usual now"


def test_beside_a_growth_that_all_share_a_push_that_is_not_finite_counts():
  rounds = Rounds(min_quorum=1)
  for step in range(401, 421, 4):
    assert not rounds.end(float(step), 0, 1.0, 1.0, 1.0).rejected
  for times in (1, 2, 3):
    rounds.end(421.0 + times, 0, 90.0, 90.0, math.inf)
  assert [m for m, member in rounds.state.members.items() if member.quarantined] == [2]


@pytest.mark.parametrize(
  "turns, quorum", [("stays", 2), ("comes back", 2), ("is new", 2), ("never pushes", 1)]
)
def test_one_that_leaves_again_and_again_does_not_have_the_others_push_at_every_step(turns, quorum):
  settings = {"sync_period": 24, "min_quorum": quorum, "grace_safety": 0.0}
  sync = SyncConfig(num_shards=1, num_fragments=1, overlap_steps=2, **settings)
  state, commits, life = syncer.init(0, 1, (FragmentState(0),), sync, 1 << 60), 0, 0
  since = 0

  def tell(message, **measured) -> list:
    nonlocal state
    state, actions = says.shard_on(state, says.event_of(message, float(step), **measured))
    return actions

  for step in range(1, 241):
    since += 1
    leaves = turns != "comes back" or step % 2 == 0
    f = state.fragments[0]
    if turns == "is new":
      tell(Goodbye(1, life))
      life += 1
    first = says.report(0, 0, step, 1.0, (f.version,), (since,), rounds=(f.last_round,))
    mine = says.report(1, life, step, 1.0, (f.version,), (since,), leaves, rounds=(f.last_round,))
    for asked in says.sends([*tell(first), *tell(mine)], Pull):
      m, pull = asked.to, asked.message
      if m and turns == "never pushes":
        continue
      sent = says.push(m, life * m, 0, pull.round, pull.base_version, since, since, "")
      if any(isinstance(a, Commit) for a in tell(sent, norm=1.0)):
        commits, since = commits + 1, 0
  assert 10 <= commits <= 10 + 2 * 3, "one a period, and three more in eight periods"


@pytest.mark.parametrize(
  "steps, tokens, fault",
  [
    (4, 40, ""),
    (4, 41, "claims 41 tokens in 4 steps, at most 10 a step are possible"),
    (0, 10, "holds 0 steps and 10 tokens"),
    (10**15, 10**15, "claims 1000000000000000 steps since its last merge, at most 29 are possible"),
    (29, 290, ""),
  ],
)
def test_a_push_holds_what_its_learner_can_have_made(steps, tokens, fault):
  """At global step 1, with 2 x 10 + 8 steps of slack."""
  state = shard()
  for m in range(2):
    state = told(state, says.report(m, 0, 1, 1.0, (0, 0), (9, 9)), 1.1)
  current = state.under_way[0]
  sent = says.push(0, 0, 0, current.id, 0, steps, tokens, "")
  state = says.take_in(state, ReadDone(sent, 1.2, norm=1.0))[0]
  assert state.under_way[0].rejected == ({0: fault} if fault else {})


def test_what_was_merged_once_is_not_claimed_again():
  """The steps since the round of its last merge are what bounds the next push."""
  state = shard()
  merged = replace(state.fragments[0], merged_global_steps={0: 1}, global_step=1)
  state = replace(state, fragments=(merged, state.fragments[1]), global_step=500)
  for m in range(2):
    state = told(state, says.report(m, 0, 500, 1.0, (0, 0), (500, 500)), 500.0)
  current = state.under_way[0]
  for m, most in ((0, 499 + 28), (1, 500 + 28)):
    lie = says.push(m, 0, 0, current.id, 0, most + 1, most + 1, "")
    assert says.take_in(state, ReadDone(lie, 500.1, norm=1.0))[0].under_way[0].rejected


def test_what_was_merged_once_is_not_claimed_again_after_rounds_without_its_learner():
  state = shard()
  merged = replace(state.fragments[0], merged_global_steps={0: 499}, global_step=1)
  state = replace(state, fragments=(merged, state.fragments[1]), global_step=500)
  state, note = round_of(told(state, Goodbye(0, 0), 500.0), 501, {m: {m: 1.0} for m in (1, 2, 3)})
  assert note.learners == (1, 2, 3) and state.fragments[0].merged_global_steps[0] == 499


def test_steps_that_the_run_has_not_made_are_believed_once():
  """The slack counted in each round anew: with one liar of four a run ended in two thirds."""
  state = shard()
  for now, claimed in ((10, 38), (20, 38)):
    f = state.fragments[0]
    for since in (1, 10):  # all can be asked before a quorum is due
      for m in range(4):
        ready = says.report(m, 0, now, 1.0, (f.version, 0), (since, 0), rounds=(f.last_round, -1))
        state = told(state, ready, float(now))
    current = state.under_way[0]
    for m in range(4):
      steps = claimed if m == 1 else 9
      sent = says.push(m, 0, 0, current.id, f.version, steps, steps, "")
      state = told(state, sent, float(now), norm=1.0)
  assert state.fragments[0].version == 2
  assert state.fragments[0].merged_tokens == (38 + 3 * 9) + 3 * 9
  # Steps that a slow learner has not made cannot be made up for.
  assert state.fragments[0].merged_global_steps == {0: 20, 1: 38, 2: 20, 3: 20}


@pytest.mark.parametrize("steps, worth", [(1, 1), (30, 30), (60, 15), (3_000, 0.3)])
def test_stale_work_weighs_less_the_staler_it_is(steps, worth):
  assert rules.worth_steps(steps, SYNC) == pytest.approx(worth)


# --- values that come back ------------------------------------------------------------------------


def test_a_fresh_empty_member_never_becomes_the_source_of_truth():
  """Neither by having nothing, nor by saying that it has something it cannot prove."""
  values = tuple(FragmentState(p, 5, 50, {0: 4}, {0: 4}, 4, 4) for p in range(2))
  state = syncer.init(0, 9, values, ALONE, 1 << 60)
  before = state.fragments
  for rounds, versions in (
    ((NOTHING, NOTHING), (-1, -1)),
    ((-1, -1), (0, 0)),
    ((7, 7), (99, 99)),  # newer, it says
  ):
    fresh = says.report(3, 1, 9, 0.1, versions, (0, 0), rounds=rounds)
    state, actions = says.shard_on(state, Received(fresh, 1.0))
    for request in [a.message for a in says.sends(actions, RequestValue)]:
      empty = says.value(3, 1, request.fragment, 99, 7, 10**9, {3: 7}, "00")
      fault = "is no value of this shard: its seal does not fit"
      state, answered = says.shard_on(state, ReadDone(empty, 1.1, fault=fault))
      assert not any(isinstance(a, InstallValue) for a in answered)
      assert [a.reason for a in answered if isinstance(a, Event)] == [fault]
  assert state.fragments == before


def test_a_new_run_takes_no_value_of_an_old_one():
  first = 1_000 << 24
  state = syncer.init(0, 2_000, (FragmentState(0),), ALONE, 1 << 60, first_round=first)
  for made, asked in ((first - 1, False), (first, True), ((2_000 << 24) - 1, True)):
    old = says.report(0, 0, 9, 0.1, (3,), (2,), rounds=(made,))
    _, actions = says.shard_on(state, Received(old, 1.0))
    assert bool(says.sends(actions, RequestValue)) == asked
  state, _ = says.shard_on(state, Received(old, 1.0))
  given = says.value(0, 0, 0, 3, first - 1, 90, {0: first - 1})
  assert says.shard_on(state, ReadDone(given, 1.1))[0].fragments[0].version == 0


def test_a_shard_on_a_new_host_takes_newer_values_of_the_run_whose_snapshot_it_has():
  """Its empty workdir says that the run began today; a former life made the rounds days ago."""
  made = 500 << 24
  values = (FragmentState(0, version=6, last_round=made + 6, merged_rounds={0: made + 6}),)
  state = syncer.init(0, 2_000, values, ALONE, 1 << 60, first_round=1_000 << 24)
  newer = says.report(0, 0, 9, 0.1, (9,), (2,), rounds=(made + 9,))
  state, actions = says.shard_on(state, Received(newer, 1.0))
  assert [a.message for a in says.sends(actions)] == [RequestValue(0, 2_000, 0, 0)]
  value = says.value(0, 0, 0, 9, made + 9, 90, {0: made + 9})
  state, actions = says.shard_on(state, ReadDone(value, 1.1))
  assert state.fragments[0].version == 9
  state, _ = says.shard_on(state, Received(newer, 1.2))
  assert 0 in state.members and 0 in state.under_way, "and the run goes on"


def test_a_learner_whose_value_is_refused_again_and_again_starts_afresh():
  """The shard's key was replaced, and its copies were lost: no learner has a value that fits."""
  value = FragmentState(0, version=6, last_round=6, merged_rounds={0: 6})
  state, now, refused = syncer.init(0, 2_000, (value,), ALONE, 1 << 60), 0.0, 0
  newer = says.report(0, 0, 9, 0.1, (9,), (2,), rounds=(9,))
  given = says.value(0, 0, 0, 9, 9, 90, {0: 9}, "00")
  while now < 60.0:
    now += 0.5
    state, actions = says.shard_on(state, Received(newer, now))
    if says.sends(actions, RequestValue):
      refused += 1
      state, actions = says.shard_on(state, ReadDone(given, now, fault="its seal is wrong"))
      if sent := [a.message for a in says.sends(actions)]:
        break
  assert refused == ALONE.quarantine_after and sent[0].rejoin and "seal" in sent[0].reason
  state, _ = says.shard_on(state, Received(says.hello(0, 1), now))
  fresh = says.report(0, 1, 10, 0.1, (6,), (2,), rounds=(6,))
  state, _ = says.shard_on(state, Received(fresh, now + 0.1))
  assert state.under_way[0].pending == (0,), "and the run goes on"


def test_a_learner_that_never_gives_what_it_says_it_has_keeps_no_other_from_giving():
  shard = Script(ALONE, incarnation=1)
  [asked] = shard.feed(says.report(0, 0, 9, 0.1, (9, 0), (2, 2), rounds=(99, -1)))
  [also] = shard.feed(says.report(1, 0, 9, 0.1, (3, 0), (2, 2), rounds=(7, -1)), 0.01)
  assert (asked.to, also.to) == (0, 1)
  true = says.value(1, 0, 0, 3, 7, 90, {1: 7})
  assert InstallValue(0) in shard.feed(true, 0.1)


def test_a_false_alarm_of_lost_work_is_said_once():
  shard = Script(ALONE, incarnation=1)
  f = replace(shard.state.fragments[0], version=1, last_round=(1 << 24) + 1)
  shard.state = replace(shard.state, fragments=(f, shard.state.fragments[1]))
  said = 0
  for made in range(5, 50):
    claim = says.report(0, 0, 9, 0.1, (9, 0), (2, 2), rounds=(made, -1))
    shard.state, actions = says.shard_on(shard.state, Received(claim, 1.0))
    said += sum(isinstance(a, events.Lost) for a in actions)
  assert said == 1


# --- moments --------------------------------------------------------------------------------------


def asked_donor(state) -> tuple[syncer.SyncerState, int]:
  state, actions = says.shard_on(state, Received(RequestMoments(3, 0, (0,)), 2.0))
  [donate] = says.sends(actions, ProvideMoments)
  return state, donate.to


def test_the_donor_of_moments_dies_in_the_middle():
  """Another one is asked at once, and what the dead one had sent changes nothing."""
  state, donor = asked_donor(shard())
  state, later = told(state, Goodbye(donor, 0), 2.1), 3.0
  state, actions = says.shard_on(state, Received(RequestMoments(3, 0, (0,)), later))
  [donate] = says.sends(actions, ProvideMoments)
  assert donate.to != donor
  late = actions_of(state, Moments(donor, 0, 0, 1, 2, b""), later)
  assert not says.sends(late, ForwardMoments)
  given = actions_of(state, Moments(donate.to, 0, 0, 1, 2, b""), later + 0.1)
  assert [a.to for a in says.sends(given, ForwardMoments)] == [3]


def test_moments_of_more_steps_than_the_run_has_made_are_not_handed_on():
  state, donor = asked_donor(shard())
  most = state.global_step + rules.step_tolerance(SYNC)
  for count, given in ((most, True), (most + 1, False), (1 << 40, False)):
    actions = actions_of(state, Moments(donor, 0, 0, 1, count, b""), 2.1)
    assert bool(says.sends(actions, ForwardMoments)) == given
  assert "claims 1099511627776 optimizer steps" in actions[0].reason


def test_asked_for_twice_is_asked_for_once():
  state = told(shard(), RequestMoments(3, 0, (0, 0, 0, 1, 1, 77)), 2.0)
  assert state.asking[3] == (0, 1)


# --- updates against all others -------------------------------------------------------------------


def round_of(state, global_step: int, products: dict[int, dict[int, float]]) -> tuple:
  """One round of fragment 0 in which all push; returns the state and the commit's note."""
  now = float(global_step)
  for m in products:
    f = state.fragments[0]
    said = says.report(m, state.members[m].incarnation, global_step, 1.0, (f.version, 0), (99, 0))
    said = replace(said, rounds=(f.last_round, -1))
    state = says.take_in(state, Received(said, now))[0]
  state = says.take_in(state, Tick(now))[0]
  current = state.under_way[0]
  for m, each in products.items():
    sent = says.push(m, state.members[m].incarnation, 0, current.id, f.version, 9, 90, "")
    event = ReadDone(sent, now + 0.1, norm=1.0, products=each)
    state = says.take_in(state, event)[0]
  state, actions = says.take_in(state, Tick(now + 0.2))
  [note] = [a for a in actions if isinstance(a, events.Commit)]
  return state, note


def agree(flipped: int | None, cosine: float = 0.3, order=range(4)) -> dict[int, dict[int, float]]:
  """Inner products as they arrive in this order, of unit updates; one has its sign flipped."""
  found: dict[int, dict[int, float]] = {}
  for m in order:
    found[m] = {**{k: -cosine if flipped in (m, k) else cosine for k in found}, m: 1.0}
  return found


def test_an_update_that_opposes_all_others_is_said_and_when_repeated_rejected():
  state, notes = shard(), []
  for k in range(4):
    state, note = round_of(state, 20 * (k + 1), agree(flipped=2))
    notes.append(note)
  assert [set(n.opposing) for n in notes] == [{2}] * 4
  assert [n.agreement for n in notes] == [0.0, 0.0, 0.3, 0.3], "of those that are merged"
  assert [set(n.rejected) for n in notes] == [set(), set(), {2}, {2}]
  reason = notes[2].rejected[2]
  assert reason == "opposes all others (cosine -0.30), 3 times in a row"
  state, note = round_of(state, 200, agree(flipped=None))
  assert not note.opposing and not note.rejected and not state.opposed, "it agrees again"


def test_it_does_not_matter_in_which_order_updates_arrive():
  _, note = round_of(shard(), 20, agree(flipped=2, order=(3, 1, 0, 2)))
  assert set(note.opposing) == {2} and note.agreement == 0.0


def test_to_start_afresh_does_not_make_an_opponent_forgotten():
  state = shard()
  for k in range(2):
    state, note = round_of(state, 20 * (k + 1), agree(flipped=2))
  assert not note.rejected
  state = told(state, says.hello(2, 1, (state.fragments[0].last_round, -1)), 50.0)
  _, note = round_of(state, 80, agree(flipped=2))
  assert set(note.rejected) == {2}


def test_a_round_without_an_opponent_does_not_make_it_forgotten():
  state = shard()
  for k in range(3):
    state, note = round_of(state, 20 * (k + 1), agree(flipped=2, order=(0, 1, 3, 2)[: 4 - k % 2]))
    assert set(note.opposing) == (set() if k == 1 else {2})
  _, note = round_of(state, 80, agree(flipped=2))
  assert set(note.rejected) == {2}


def test_updates_that_agree_on_nothing_oppose_none():
  for cosine in (0.0, 0.02):
    _, note = round_of(shard(), 20, agree(flipped=2, cosine=cosine))
    assert not note.opposing


# --- patience -------------------------------------------------------------------------------------


def test_one_who_says_late_that_it_has_a_version_keeps_no_other_waiting():
  """Its hour is no measure of how long publishes take, however often it says that it has it now."""
  state = shard()
  state = replace(state, delivery_seconds=0.5)
  late = replace(state.members[0], versions=(-1, -1), sent=(0, 0), sent_at=(2.0, 2.0))
  state = replace(state, members={**state.members, 0: late})
  for versions in [(0, 0), (-1, -1)] * 50:
    state = told(state, says.report(0, 0, 2, 1.0, versions, (1, 1)), 3_600.0)
  assert 0.9 < state.delivery_seconds < 1.1
  assert state.members[0].versions == state.members[0].steps_since_sync == (0, 0)


@pytest.mark.parametrize("wait, learned", [(0.1, 0.2), (1.2, 0.4)])
def test_a_wait_for_what_was_lost_is_no_measure_of_the_link(wait, learned):
  state = replace(shard(), quorum_seconds=0.2)
  for m in range(2):
    state = told(state, says.report(m, 0, 1, 1.0, (0, 0), (9, 9)), 1.1)
  round_id, again = state.under_way[0].id, state.under_way[0].deadline
  state = says.take_in(state, Tick(again))[0]
  assert state.under_way[0].pulls == 2
  for m in range(2):
    sent = says.push(m, 0, 0, round_id, 0, 9, 90, "")
    state = says.take_in(state, ReadDone(sent, again + wait, norm=1.0))[0]
  assert state.quorum_seconds == pytest.approx(learned)


def test_a_pull_is_not_repeated_before_a_slow_link_can_have_answered_it():
  state = replace(shard(), quorum_seconds=2.0)
  for m in range(2):
    state = told(state, says.report(m, 0, 1, 1.0, (0, 0), (9, 9)), 1.1)
  late = [says.take_in(state, Tick(now))[0].under_way[0].pulls for now in (7.0, 7.2)]
  assert late == [1, 2]


@pytest.mark.parametrize("said", [1e-9, 0.0, 50.0, 1e300])
def test_a_pull_is_not_repeated_before_it_can_be_answered_whatever_one_member_says(said):
  """Answers leave at the ends of steps, here of 6 s; a second pull would double the push."""
  state = shard(0)
  for m, seconds in enumerate((6.0, 6.0, 6.0, said)):
    state = told(state, says.hello(m, 0), 0.0)
    state = told(state, says.report(m, 0, 1, seconds, (0, 0), (9, 9)), 1.0)
  round = state.under_way[0]
  assert round is not None and round.pulled_at == 1.0
  repeated = [
    now / 10
    for now in range(10, 400)
    if (state := says.take_in(state, Tick(now / 10))[0]).under_way[0].pulls == 2
  ]
  assert 18.0 <= repeated[0] - 1.0 <= 18.0 + SYNC.liveness_seconds


def test_learners_count_for_themselves_only():
  """A count is the sender's own: no message has a place for another's."""
  assert not any("vector_clock" in kind.__struct_fields__ for kind in messages.KINDS)
  one = learner.init(0, 0, (0,), 1_000)
  whole = says.publish(0, 0, 0, 0, -1, 0, -1, 0, 0, (), "")
  state, _ = learner.learner_on(one, Received(replace(whole, count=7), 0.0), SYNC)
  assert set(state.vector_clock) == {0, -2}


def test_ranks_of_claims_and_paces_are_short():
  known = Beliefs(reach_at=0.0)
  for m in range(100):
    known = rules.noted_pace(known, m, 1.0 + m)
    known, _ = rules.raised_global_step(known, 0, m, 10 + m, 1.0, math.inf, SYNC, 100)
  assert len(known.claims) == 2 and len(known.paces) == 3
  here = rules.refreshed(known, [(0, 0.0), (98, 2.0), (5, 9.0), (6, 4.0), (7, 3.0)], 4.0)
  assert here.claims == ((-108, 98),) and here.usual_step_seconds == 4.0
  assert rules.usual_pace(Beliefs(reach_at=0.0, paces=((1.0, 0), (9.0, 1)))) == 1.0
  assert here.paces == ((2.0, 98), (3.0, 7), (4.0, 6)), "one that has made no step has no pace"
