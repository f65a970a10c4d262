"""Moments for those that join: who is asked, who gets them, and that nobody waits for ever."""

from __future__ import annotations

import math

import pytest

from ddiloco.protocol import learner
from ddiloco.protocol.actions import (
  ApplyMoments,
  Send,
  Staged,
  StepDone,
  TakeMoments,
  Taken,
  Tick,
)
from ddiloco.protocol.events import Ignored, NoDonor
from ddiloco.protocol.messages import (
  EVALUATOR,
  ForwardMoments,
  Moments,
  ProvideMoments,
  Rejection,
  RequestMoments,
)
from ddiloco.protocol.moments import ask, on_provide_moments, on_request_moments
from ddiloco.protocol.states import MOST_IN_WINDOW, WINDOW_PERIODS
from ddiloco.protocol.values import replace
from tests import says
from tests.protocol.scripts import ALONE, Script, report


def shard_with(*learners: int) -> Script:
  shard = Script(ALONE)
  for m in learners:
    shard.feed(says.hello(m, 0))
    shard.feed(report(m, (0, 0), (0, 0)))
  return shard


def donor_of(actions) -> list[tuple[int, int]]:
  """(donor, fragment) of every donation asked for."""
  return [(a.to, a.message.fragment) for a in says.sends(actions, ProvideMoments)]


def moments(m: int, fragment: int) -> Moments:
  return Moments(m, 0, fragment, 1, 7, payload=b"given")


def test_one_donation_at_a_time_goes_to_all_who_wait():
  shard = shard_with(0, 1, 2, 3)
  assert donor_of(shard.feed(RequestMoments(2, 0, (0, 1)))) == [(0, 0)]
  assert donor_of(shard.feed(RequestMoments(3, 0, (0, 1)))) == [], "one is under way"
  actions = shard.feed(moments(0, 0))
  inherits = [(a.to, a.message) for a in says.sends(actions, ForwardMoments)]
  assert [to for to, _ in inherits] == [2, 3]
  assert all((m.fragment, m.donor, m.count) == (0, 0, 7) for _, m in inherits)
  assert all(m.payload == b"given" for _, m in inherits)
  # The next fragment is asked of the other one that trains: donors take turns.
  assert donor_of(actions) == [(1, 1)]
  actions = shard.feed(moments(1, 1))
  assert [a.to for a in actions] == [2, 3] and shard.state.donation is None
  assert shard.feed(moments(1, 1)) == [], "nobody waits any more"


def test_who_is_new_is_not_the_only_donor_until_it_was_asked_as_often_as_the_others():
  """After months these have given hundreds of times. And its moments are the least grown."""
  shard, donors = shard_with(0, 1), list[int]()

  def join_again(m: int, times: int) -> None:
    for _ in range(times):
      shard.state = replace(shard.state, moments_asked={})  # as much later
      actions = shard.feed(RequestMoments(m, 0, (0, 1)))
      while found := donor_of(actions):
        donors.extend(donor for donor, _ in found)
        actions = shard.feed(moments(*found[0]))

  shard.feed(says.hello(9, 0))
  join_again(9, times=10)
  assert donors == [0, 1] * 10
  shard.feed(says.hello(2, 0))
  shard.feed(report(2, (0, 0), (0, 0)))
  join_again(9, times=3)
  assert donors[20:] == [2, 0, 1, 2, 0, 1]


def test_moments_that_are_queued_for_a_joiner_are_not_asked_for_again():
  """On a slow link they take longer than the joiner waits before it repeats its request."""
  shard = shard_with(0, 1, 2)
  shard.feed(RequestMoments(2, 0, (0, 1)))
  assert donor_of(shard.feed(moments(0, 0))) == [(1, 1)]
  shard.feed(moments(1, 1))
  assert donor_of(shard.feed(RequestMoments(2, 0, (0, 1)), 0.2, unsent=True)) == []
  assert donor_of(shard.feed(RequestMoments(2, 0, (1,)), 0.4)) == [(0, 1)], "it got lost"


def test_a_new_life_gets_no_moments_before_it_asks():
  shard = shard_with(0, 1, 2)
  assert donor_of(shard.feed(RequestMoments(2, 0, (0,)))) == [(0, 0)]
  shard.feed(says.hello(2, 1))
  assert not says.sends(shard.feed(moments(0, 0)), ForwardMoments)


def test_a_joiner_that_waits_no_more_is_sent_no_more():
  """A donor would copy out the rest of the model, over others' links, for nothing."""
  shard = shard_with(0, 1, 2)
  assert donor_of(shard.feed(RequestMoments(2, 0, (0, 1)))) == [(0, 0)]
  shard.feed(RequestMoments(2, 0, ()), 0.2, unsent=True)
  assert shard.feed(moments(0, 0), 0.3) == [] and shard.state.donation is None


def test_a_joiner_that_is_lost_is_sent_no_more():
  shard = shard_with(0, 1, 2)
  shard.feed(RequestMoments(2, 0, (0, 1)))
  for m in (0, 1):
    shard.feed(report(m, (0, 0), (0, 0)), 50.0)
  assert shard.state.members[2].lost
  assert shard.feed(moments(0, 0), 50.1) == []


def test_a_donor_that_does_not_answer_is_replaced():
  shard = shard_with(0, 1, 2, 3)
  assert donor_of(shard.feed(RequestMoments(2, 0, (0,)), 0.0)) == [(0, 0)]
  assert donor_of(shard.feed(RequestMoments(2, 0, (0,)), 0.5)) == []
  assert donor_of(shard.feed(RequestMoments(3, 0, (1,)), 0.5)) == []
  for m in (0, 1, 2, 3):
    shard.feed(report(m, (0, 0), (0, 0)), 1.0)
  assert donor_of(shard.feed(RequestMoments(2, 0, (0,)), 1.5)) == [(1, 0)]
  assert shard.state.moments_asked == {2: (1, 2)}, "none was asked for learner 3"
  assert shard.feed(moments(0, 0)) == [], "too late: the other one is at it"
  assert [a.to for a in says.sends(shard.feed(moments(1, 0)), ForwardMoments)] == [2]


@pytest.mark.parametrize(
  "step, delivery, patience", [(0.01, 0.0, 1.0), (1.0, 0.0, 10.0), (0.01, 7.0, 21.0)]
)
def test_a_donor_has_time_for_its_step_and_its_link(step, delivery, patience):
  shard = shard_with(0, 1)
  shard.state = shard.state.with_member(0, step_seconds=step, delivery_seconds=delivery)
  shard.feed(RequestMoments(1, 0, (0,)), 0.5)
  assert shard.state.donation.until == 0.5 + patience


def with_values() -> Script:
  """A learner that has the newest values of both fragments, and waits for their moments."""
  one = Script(role="learner")
  one.state = replace(one.state, donor_seconds=5.0)
  for p in (0, 1):
    one.feed(replace(NEWEST, fragment=p))
    one.feed(Staged(p, 10.0))
  return one


def test_moments_of_several_fragments_may_be_on_their_way_at_once():
  one = with_values()
  both = [ForwardMoments(0, 0, 0, p, 3, 0, 1, 7) for p in (0, 1)]
  assert [one.feed(each) for each in both] == [[TakeMoments(each)] for each in both]
  for p in (1, 0):
    assert one.feed(Taken(p, 11.0, "staged")) == [ApplyMoments("staged")]
  assert learner.can_step(one.state, one.sync)


def test_when_the_only_donor_has_left_the_rest_is_given_up_at_once():
  one = with_values()
  one.feed(ForwardMoments(0, 0, 0, 0, 3, 0, 1, 7))
  one.feed(Rejection(0, 0, 0, -1, -1, False, "no donor is here"))
  assert one.feed(Taken(0, 11.0, "staged")) == [ApplyMoments("staged")]
  assert NoDonor(fragments=(1,)) in one.feed_all(Tick(11.1))


@pytest.mark.parametrize("then", ["waits", "waits no more", "begins a new life"])
def test_one_that_asks_again_and_again_does_not_use_up_the_links_of_others(then):
  """What it took back while a donor sent it did not count: donors sent without end."""
  shard, life, given = shard_with(0, 1, 2), 0, 0
  for _ in range(50):
    others = shard.state.counted(shard.state.moments_asked, 3)
    shard.state = replace(shard.state, moments_asked=others)
    shard.feed(RequestMoments(2, life, (0, 1)))
    if then == "waits no more":
      shard.feed(RequestMoments(2, life, ()))
    elif then == "begins a new life":
      life += 1
      shard.feed(says.hello(2, life))
    while (donation := shard.state.donation) is not None:
      shard.feed(moments(donation.donor, donation.fragment))
      given += 1
  assert given == MOST_IN_WINDOW * 2
  assert "lately" in refused(shard, 2) and not shard.state.asking
  later = shard.state.global_step + WINDOW_PERIODS * ALONE.sync_period
  shard.state = replace(shard.state, global_step=later)
  assert donor_of(shard.feed(RequestMoments(2, life, (0,)))), "much later it may have died again"


def refused(shard: Script, m: int) -> str:
  """Why a learner's request for moments is not listened to; it changes nothing."""
  state, actions = on_request_moments(shard.state, RequestMoments(m, 0, (0,)), 0.0)
  (why,) = actions
  assert isinstance(why, Ignored) and state.donation is None
  return why.reason


def test_where_learners_come_back_without_a_peers_moments_none_are_passed_on():
  shard = shard_with(0, 1, 2)
  assert refused(shard, EVALUATOR)
  shard.state = replace(shard.state, passes_moments=False)
  assert "checkpoint.rejoin" in refused(shard, 2)


def told_to_go_on(actions) -> list[int]:
  """Learners whose request for moments is rejected."""
  rejected = says.sends(actions, Rejection)
  assert all(not a.message.rejoin and a.message.round == -1 for a in rejected)
  return [a.to for a in rejected]


def test_a_learner_that_is_alone_waits_for_no_donor():
  """It stood still for donor_seconds, ten of them, at each of its lives."""
  shard, joiner = shard_with(0), Script(role="learner")
  joiner.state = replace(joiner.state, donor_seconds=math.inf)
  joiner.feed(says.welcome(0, 0, 0, 40, (0, 1)))
  for p in (0, 1):
    joiner.feed(replace(NEWEST, fragment=p))
    joiner.feed(Staged(p, 10.0))
  [asked] = joiner.feed(Tick(10.0))
  [answer] = shard.feed(asked.message)
  assert told_to_go_on([answer]) == [0] and not shard.state.asking
  assert joiner.feed_all(answer.message) == [] and not learner.can_step(joiner.state, joiner.sync)
  gives_up = [NoDonor(fragments=(0, 1)), Send(0, RequestMoments(0, 0, ()))]
  assert joiner.feed_all(Tick(10.1)) == gives_up
  assert learner.can_step(joiner.state, joiner.sync)


def test_learners_that_all_join_at_once_wait_for_no_donor():
  """As when the whole run begins again."""
  shard = shard_with(0, 1)
  assert donor_of(shard.feed(RequestMoments(0, 0, (0, 1)), 0.1)) == [(1, 0)], "it may train"
  assert told_to_go_on(shard.feed(RequestMoments(1, 0, (0, 1)), 0.1)) == [0, 1], "it does not"
  assert shard.state.donation is None and not shard.state.asking


def test_a_shard_that_is_back_says_that_there_is_no_donor_once_all_had_time_to_come():
  shard = shard_with(0)
  shard.state = replace(shard.state, recovery_deadline=9.0, planned_learners=2)
  assert told_to_go_on(shard.feed(RequestMoments(0, 0, (0,)), 8.9)) == []
  assert told_to_go_on(shard.feed(RequestMoments(0, 0, (0,)), 9.0)) == [0]


def test_who_joins_leaves_was_rejected_or_is_lost_is_no_donor():
  shard = shard_with(0, 1, 2, 4, 6)
  shard.state = shard.state.with_member(4, lost=True).with_member(6, quarantined=True)
  for m in (5, 8):
    shard.feed(says.hello(m, 0))
  shard.feed(report(5, (0, -1), (1, 0)))
  shard.feed(says.report(8, 0, 1, 0.0, (0, 0), (0, 0)))  # its moments are zeros still
  shard.feed(says.report(0, 0, 1, 0.1, (0, 0), (0, 0), leaving=True))
  bad = replace(shard.state.members[1], rejections=1)
  shard.state = replace(shard.state, members={**shard.state.members, 1: bad})
  assert donor_of(shard.feed(RequestMoments(2, 0, (0,)))) == []
  assert donor_of(shard.feed(RequestMoments(7, 0, (0,)))) == [], "an unknown one is not listened to"
  shard.feed(says.hello(3, 0))
  shard.feed(report(3, (0, 0), (0, 0)))
  assert donor_of(shard.feed(RequestMoments(2, 0, (0,)))) == [(3, 0)]


NEWEST = says.publish(0, 0, 0, 0, -1, 0, -1, 40, 0, (), "")  # of global step 40


def test_a_slow_donor_is_asked_once():
  """The joiner dropped moments from a global step before its own, and asked again, for ever."""
  shard, joiner, asked = shard_with(0, 1), Script(role="learner"), []
  joiner.state = replace(joiner.state, learner=1, donor_seconds=50.0)
  slow = learner.init(0, 0, (0, 0), 1 << 60)
  has = (replace(f, base_header=NEWEST, version=0, fresh=True) for f in slow.fragments)
  slow = replace(slow, fragments=tuple(has), global_step=39)
  for p in (0, 1):
    joiner.feed(replace(NEWEST, fragment=p))
    joiner.feed(Staged(p, 0.0))
  for now in range(1, 9):
    for request in joiner.feed(Tick(float(now))):
      todo = donor_of(shard.feed(request.message))
      while todo:
        asked += todo
        [(_, p)] = todo
        _, [gift] = on_provide_moments(slow, ProvideMoments(0, 0, 0, p))
        actions = shard.feed(replace(gift.message, payload=b"given"))
        for forward in says.sends(actions, ForwardMoments):
          joiner.feed(forward.message)
          joiner.feed(Taken(p, float(now), "staged"))
        todo = donor_of(actions)
  assert asked == [(0, 0), (0, 1)] and not joiner.state.wants


def test_a_joiner_waits_for_moments_until_it_has_them_or_its_time_is_over():
  """Those of a large model come one after the other for minutes: after ten seconds in all the rest
  was given up, as if there were no donor."""
  one = Script(role="learner")
  one.state = replace(one.state, donor_seconds=5.0)
  one.feed(Tick(0.0))
  one.feed(says.welcome(0, 0, 0, 40, (0, 1)))
  for p in (0, 1):
    one.feed(replace(NEWEST, fragment=p))
    one.feed(Staged(p, 10.0))
  assert one.state.joined and not learner.can_step(one.state, one.sync)
  [asked] = one.feed(Tick(10.0))
  assert asked == Send(0, RequestMoments(0, 0, (0, 1)))
  assert one.feed(Tick(10.1)) == []
  new = ForwardMoments(0, 0, 0, 0, 3, 0, 1, 7)
  assert one.feed(new) == [TakeMoments(new)]
  assert one.feed(new) == [], "a duplicate is not staged as well"
  assert one.feed(Tick(11.1)) == [Send(0, RequestMoments(0, 0, (1,)))], "fragment 0 is being staged"
  assert one.feed(Taken(0, 11.2)) == [], "it could not be read"
  assert one.feed(Tick(12.2)) == [Send(0, RequestMoments(0, 0, (0, 1)))]
  assert one.feed(new) == [TakeMoments(new)]
  assert one.feed(Taken(0, 12.3, "staged")) == [ApplyMoments("staged")]
  assert one.feed(new) == [], "it has them"
  assert one.feed(Tick(13.3)) == [Send(0, RequestMoments(0, 0, (1,)))]
  one.feed(Tick(17.2))
  assert one.feed(Tick(17.3)) == [Send(0, RequestMoments(0, 0, ()))]
  assert not one.state.wants and learner.can_step(one.state, one.sync), "goes on without the rest"
  assert one.feed(Taken(1, 17.4)) == []


def test_at_the_start_of_a_run_nobody_waits():
  one = Script(role="learner")
  one.state = replace(one.state, donor_seconds=math.inf)
  for p in (0, 1):
    one.feed(says.publish(0, 0, 0, p, -1, 0, -1, 0, 0, (), ""))
    one.feed(Staged(p, 0.0))
  assert learner.can_step(one.state, one.sync)


def test_a_donor_gives_at_a_step_boundary_and_one_that_waits_itself_does_not(one):
  new = Script(role="learner")
  assert new.feed(ProvideMoments(0, 0, 0, 1)) == [], "it has not joined"
  one.feed(StepDone(0.1, 10, 0.1))
  [give] = one.feed(ProvideMoments(0, 0, 0, 1))
  assert give == Send(0, Moments(0, 0, 1, 1, 0))
  [give] = one.feed(ProvideMoments(0, 0, 0, 1))
  assert give.message.donation == 2
  assert one.feed(ProvideMoments(0, 0, 0, 9)) == []
  for waits in ({"wants": (0,)}, {"wants": (), "leaving": True}):
    one.state = replace(one.state, **waits)
    assert one.feed(ProvideMoments(0, 0, 0, 1)) == []


def test_each_shard_is_asked_for_its_own_fragments():
  one = replace(learner.init(0, 0, (0, 1, 0), 9), wants=(0, 1, 2), wants_until=9.0)
  _, asked = ask(one, 1.0)
  assert asked == [Send(0, RequestMoments(0, 0, (0, 2))), Send(1, RequestMoments(0, 0, (1,)))]
