"""Why the syncer waits, in its own words, and what each island has."""

import pytest

from ddiloco.config import Config, SyncConfig
from ddiloco.dashboard.status import status
from ddiloco.observe.run_state import RunState
from tests.observe.conftest import fold

SYNC = SyncConfig(min_quorum=2, sync_period=12)


@pytest.fixture
def begun(make):
  """Four islands run, fragment 3 was asked for at 10.0."""
  events = [make.run_started()]
  events += [make.step(9.0, m, 5) for m in range(4)]
  return [*events, round_(make, 10.0, [0, 1, 2])]


def round_(make, time, asked, quorum=2):
  what = {"fragment": 3, "round": 7, "version": 0}
  return make.event(time, "syncer-1", "round", **what, asked=asked, quorum=quorum)


def push(make, time, learner):
  return make.event(time, f"learner-{learner}", "push", fragment=3, round=7, version=0)


def says(events, now, sync=SYNC):
  run = fold(events)
  if not run.num_shards:
    return status(run, now, sync)["waiting"]
  return run.rounds.waiting(run.islands, now, sync)


def test_the_words_are_those_of_the_decision(make, begun):
  assert says(begun, 10.5) == (
    "Collecting fragment 3 for 0.5 s; quorum: 0 of 2 have answered, waiting for 0, 1, 2."
  )
  begun += [push(make, 10.6, 1)]
  assert "quorum: 1 of 2 have answered, waiting for 0, 2." in says(begun, 10.7)
  begun += [make.changed(push(make, 10.7, 0), round=6), make.commit(10.7, 1, fragment=3, round=6)]
  assert "quorum: 1 of 2 have answered, waiting for 0, 2." in says(begun, 10.7), "of a round before"
  begun += [push(make, 10.8, 0), push(make, 10.9, 2)]
  assert (
    says(begun, 11.0) == "Collecting fragment 3 for 1.0 s; about to end, all 3 asked have answered."
  )


@pytest.mark.parametrize("kind, action", [("exit", ""), ("fault", "kill")])
def test_a_dead_shard_collects_nothing(make, begun, kind, action):
  gone = {"target": "syncer-1"} | ({"action": action} if action else {"reason": "killed"})
  events = [*begun, make.event(11.0, "engine", kind, **gone)]

  def page(now):
    return status(fold(events), now, SYNC)["waiting"]

  assert page(12.0).startswith(
    "Shard 1 is down: its fragments have no rounds until it is back. The first round begins"
  )
  both = [*events, make.event(12.0, "engine", kind, **gone | {"target": "syncer-0"})]
  assert status(fold(both), 12.5, SYNC)["waiting"] == (
    "Shards 0, 1 are down: their fragments have no rounds until they are back."
  )
  events.append(make.event(13.0, "syncer-1", "started", 1, fragments=[1, 3]))
  assert page(14.0).startswith("The first round begins")


def test_a_shard_that_began_anew_has_no_rounds_of_its_life_before(make, begun):
  for again in (make.event(13.0, "syncer-1", "started", 1), make.run_started()):
    assert says(begun, 12.0).startswith("Collecting fragment 3 for 2.0 s")
    assert not says([*begun, again], 14.0).startswith("Collecting")


def test_a_round_that_asks_more_islands_keeps_the_pushes_that_came(make, begun):
  begun += [push(make, 10.6, 1), round_(make, 12.0, [0, 1, 2, 3])]
  assert says(begun, 12.5) == (
    "Collecting fragment 3 for 2.5 s; quorum: 1 of 2 have answered, waiting for 0, 2, 3."
  )


def test_a_push_that_is_sent_again_for_a_round_is_an_answer(make, begun):
  """In lock-step a restarted shard asks anew for what its learners have pushed already."""
  again = {"fragment": 3, "round": 7, "old_round": 4}
  begun += [make.event(10.6, "learner-1", "resend", **again)]
  assert says(begun, 10.7).endswith("quorum: 1 of 2 have answered, waiting for 0, 2.")


def test_where_all_leave_the_quorum_is_that_of_the_round(make, begun):
  """One of two that leave has nothing left: the shard waits for the other alone."""
  begun[-1] = round_(make, 10.0, [0], quorum=1)
  assert says(begun, 10.5).endswith("quorum: 0 of 1 have answered, waiting for 0.")
  begun += [push(make, 10.6, 0)]
  assert says(begun, 10.7).endswith("about to end, all 1 asked have answered.")


def test_a_learner_that_is_not_believed_and_without_which_no_round_begins_is_named(make, begun):
  """Until the shard begins a round, or its life ends."""
  why = {"learner": 2, "state": "ahead", "reason": "it says that it is at step 900"}
  open_ = [*begun, make.event(10.2, "syncer-0", "member", **why)]
  assert says(open_, 10.5).startswith("Collecting fragment 3"), "the other shard has a round"
  between = [*begun, make.commit(11.0, 1, fragment=3, round=7)]
  between += [make.event(12.0, f"syncer-{s}", "member", **why) for s in (0, 1)]
  said = "No round begins. Why: island 2: it says that it is at step 900."
  assert says(between, 12.5) == said
  run = fold(between)
  assert run.islands[2].state == "running" and run.islands[2].missed_reason == why["reason"]
  texts = [note.text for note in run.log_events]
  assert texts.count(f"the syncer counts island 2 as ahead: {why['reason']}") == 1
  restarted = [*between, make.event(13.0, "syncer-0", "started", 1)]
  assert says(restarted, 13.5) == said, "the other shard still says so"
  restarted.append(round_(make, 14.0, [0, 1, 2]))
  assert says(restarted, 14.5).startswith("Collecting fragment 3 for 0.5 s")
  restarted.append(make.commit(15.0, 1, fragment=3, round=7))
  assert says(restarted, 15.5).startswith("No round is open")


def test_grace_is_waited_for_as_long_as_the_last_round_had(make, begun):
  before = make.commit(8.0, 1, fragment=3, round=3, grace_seconds=0.4)
  events = [*begun[:-1], before, begun[-1], push(make, 10.1, 0), push(make, 10.2, 1)]
  assert says(events, 10.3).endswith("grace: 0.300 s left for 2.")


def test_nobody_waits_for_who_is_known_to_be_dead(make, begun):
  left = make.event(10.1, "learner-2", "stopped", reason="drained")
  assert says([*begun, left], 10.2).endswith("waiting for 0, 1.")
  begun += [make.event(10.1, "engine", "exit", target="learner-2", reason="killed")]
  assert says(begun, 10.2).endswith("waiting for 0, 1.")
  begun += [make.event(10.1, "engine", "exit", target="learner-1", reason="killed")]
  assert "about to end, only " in says(begun, 10.2)


def test_without_the_settings_it_is_not_known(begun):
  assert "config cannot be read" in status(fold(begun), 10.5)["waiting"]


def test_before_the_first_round_and_between_two(make, begun):
  assert says([make.run_started(num_shards=0)], 1.0).startswith("There is no syncer")
  by_hand = RunState(Config()).read([make.step(1.0, 0, 1)])  # no shard has written yet
  assert status(by_hand, 1.0, SYNC)["waiting"].startswith("The first round begins")
  assert "0 of the 2 it needs" in says([make.run_started()], 1.0)
  assert "4 of the 2 it needs" in says(begun[:-1], 9.0)
  committed = make.commit(11.0, 1, fragment=3, round=7)
  assert says([*begun, committed], 12.5) == (
    "No round is open: a fragment falls due about 12 steps after its last sync; the last round"
    " ended 1.5 s ago."
  )


def test_versions_by_island_and_fragment_and_a_new_life_has_none(make):
  def apply(learner, fragment, version, kind="apply"):
    return make.event(2.0, f"learner-{learner}", kind, fragment=fragment, version=version, round=1)

  events = [make.commit(1.0, fragment=0, version=4), make.commit(1.0, fragment=1, version=3)]
  events += [apply(0, 0, 4), apply(0, 1, 2), apply(1, 0, 3)]
  run = fold(events)
  assert run.versions == {0: 4, 1: 3}
  assert [run.islands[m].versions for m in range(2)] == [{0: 4, 1: 2}, {0: 3}]
  run = fold([*events, make.event(3.0, "learner-0", "started", 1), apply(0, 1, 3, "copy_out")])
  assert [run.islands[m].versions for m in range(2)] == [{1: 3}, {0: 3}]


def test_rounds_of_two_shards_may_have_the_same_number(make, begun):
  other = {"fragment": 2, "round": 7, "version": 0}
  begun += [make.event(10.1, "syncer-0", "round", **other, asked=[0, 1], quorum=2)]
  assert says(begun, 10.5).startswith("Collecting fragment 3 and 1 more for 0.5 s; quorum: 0 of 2")
  begun += [make.event(10.2, f"learner-{m}", "push", **other) for m in range(2)]
  assert says(begun, 10.5).startswith("Collecting fragment 3 and 1 more for 0.5 s; quorum: 0 of 2")
  begun += [make.commit(10.6, 0, fragment=2, round=7)]
  assert says(begun, 11.0).startswith("Collecting fragment 3 for 1.0 s; quorum: 0 of 2")
