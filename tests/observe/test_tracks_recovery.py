"""What became of faults, from events whose answer is known."""

from __future__ import annotations

import math
import pickle

import pytest

from ddiloco.observe.tracks import SETTLED_ROUNDS, Aftermath
from tests.made_events import changed
from tests.made_events import made as event


def fault(time, target, action="stall", seconds=2.0):
  return event(time, "engine", "fault", target=target, action=action, seconds=seconds)


def commit(time, shard, fragment, round_id, base, *learners):
  fields = {"fragment": fragment, "round": round_id, "base_round": base}
  taking = {str(m): 1.0 for m in learners}
  return event(time, f"syncer-{shard}", "commit", weights=taking, **fields)


def test_a_role_is_back_with_the_first_commit_after_its_fault_is_over():
  events = [
    fault(10.0, "learner-0"),
    commit(11.0, 0, 0, 1, -1, 0, 1),  # it still lasts
    commit(13.0, 0, 0, 2, 1, 1),  # without it
    commit(14.5, 0, 0, 3, 2, 0, 1),
    fault(15.0, "syncer-1"),
    commit(18.0, 0, 0, 4, 3, 0),
    commit(19.0, 1, 1, 1, -1, 0),
    fault(20.0, "learner-1", "kill", -1.0),
    fault(21.0, "learner-2", "join", 0.0),
    commit(21.5, 0, 0, 5, 4, 2),  # a join has not to be over before it counts
  ]
  first, second, third, joined = Aftermath().read(events).recoveries
  assert (first.seconds, second.seconds, joined.seconds) == (4.5, 4.0, 0.5)
  assert math.isnan(third.seconds) and third.action == "kill"


def test_the_longest_time_in_which_nobody_steps():
  steps = [(1.0, 1.0), (2.0, 1.0), (2.5, 1.0), (9.5, 0.5), (9.6, 4.0)]
  events = [event(end, "learner-0", "step", seconds=seconds) for end, seconds in steps]
  assert Aftermath().read(events[:-1]).longest_stall_seconds == 6.5
  # The last one says that it was on its way from 5.6 on.
  assert Aftermath().read(events).longest_stall_seconds == pytest.approx(3.1)
  assert Aftermath().longest_stall_seconds == 0.0


def test_a_clock_that_was_set_back_makes_no_stall():
  """Steps end at 1, 30, 10 and 31: nobody stepped from 10 to 29."""
  ends = (1.0, 30.0, 10.0, 31.0)
  steps = [event(end, f"learner-{end == 10.0:d}", "step", seconds=1.0) for end in ends]
  assert Aftermath().read(steps).longest_stall_seconds == 19.0


def test_a_long_step_of_one_island_is_no_stall_of_all():
  """Island 0 is in a step from 0 to 10 and from 12 to 22; island 1 is away from 2 to 18."""

  def step(time, m, seconds):
    return event(time, f"learner-{m}", "step", seconds=seconds, gap_seconds=seconds)

  steps = [step(1.0, 1, 1.0), step(2.0, 1, 1.0), step(10.0, 0, 10.0), step(19.0, 1, 1.0)]
  assert Aftermath().read([*steps, step(22.0, 0, 10.0)]).longest_stall_seconds == 2.0


def lost_rounds(events) -> list[tuple[int, int]]:
  return Aftermath().read(events).lost_rounds()


@pytest.mark.parametrize("kind", ["stage", "apply"])
def test_rounds_are_lost_unless_the_last_value_was_made_from_them(kind):
  events = [commit(1, 0, 0, 1, -1), commit(2, 0, 0, 2, 1), commit(3, 0, 1, 3, -1)]
  assert lost_rounds(events) == []
  gone = event(4, "syncer-0", "owns", fragment=0, round=1)
  assert lost_rounds([*events, gone]) == [], "no learner had it: all its work comes again"
  had = event(3, "learner-1", kind, fragment=0, round=2)
  assert lost_rounds([*events, had]) == []
  back = [*events, had, gone]
  assert lost_rounds(back) == [(0, 2)]
  assert lost_rounds([*back, commit(5, 0, 0, 9, 1)]) == [(0, 2)]
  assert lost_rounds([*back, event(5, "syncer-0", "regained", fragment=0, round=2)]) == []


def test_a_long_run_is_not_kept_and_what_it_lost_early_stays_lost():
  aftermath, count = Aftermath(), 10 * SETTLED_ROUNDS
  for n in range(count):
    base = 3 if n == 5 else n - 1  # the shard came back with round 3: round 4 is lost
    aftermath.take(commit(n, 0, 0, n, base, 0))
    aftermath.take(event(n, "learner-0", "step", seconds=1.0))
    aftermath.take(event(n, "learner-0", "apply", fragment=0, round=n))
  assert aftermath.lost_rounds() == [(0, 4)]
  assert len(pickle.dumps(aftermath)) < 40 * SETTLED_ROUNDS
  aftermath.take(event(count, "syncer-0", "owns", fragment=0, round=count - 3))
  assert aftermath.lost_rounds() == [(0, 4), (0, count - 2), (0, count - 1)]


def test_only_a_fault_of_its_own_explains_an_exit():
  poison = fault(0.5, "learner-1", "poison")
  planned = event(1, "engine", "exit", target="learner-0", reason="killed by plan, back in 2 s")
  bad = event(2, "engine", "exit", target="learner-1", reason="quarantined: norm 9 is over 10 x 1")
  other = event(3, "engine", "exit", target="learner-2", reason="exit status 1: crashed")
  crash = event(3, "learner-2", "crash", trace="...")

  def unplanned(*log):
    return Aftermath().read(log).unplanned()

  assert unplanned(poison, planned, bad) == []
  assert unplanned(planned, bad) == [bad]
  assert unplanned(other, crash) == [other, crash]
  elsewhere = changed(other, target="learner-1")
  assert unplanned(poison, elsewhere) == [elsewhere], "poison ends a learner by quarantine alone"
