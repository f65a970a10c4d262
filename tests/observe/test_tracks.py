"""The growing timeline says what the report's says, and stays small."""

import itertools
import random

import pytest

from ddiloco.observe.run_state import RunState
from ddiloco.observe.tracks import MOST_MARKS, MOST_SPANS


def feed(events):
  run = RunState().read(events)
  return run.tracks, run


def spans(events, now=None):
  tracks, run = feed(events)
  now = run.time if now is None else now
  return tracks.spans(run.islands, now, now)


def check_whole(of_role, end):
  """No gaps, no overlaps, up to the end."""
  for (_, a, _), (b, _, _) in itertools.pairwise(of_role):
    assert a == b
  assert of_role[-1][1] == end


def test_a_kill_is_one_mark_and_so_are_restart_and_first_merge(run_events):
  lanes, _ = feed(run_events)
  assert [(mark["kind"], mark["role"]) for mark in lanes.marks] == [
    ("kill", "learner-2"),
    ("restart", "learner-2"),
    ("merged", "learner-2"),
  ]
  assert lanes.marks[0]["text"] == "island 2: kill: restart after 4 s"


def test_a_kill_that_is_noticed_late_is_no_crash_but_the_next_exit_is(make):
  def about(time, kind, **more):
    return make.event(time, "engine", kind, target="learner-1", **more)

  events = [make.run_started(), about(5.0, "fault", action="kill"), about(9.0, "exit", reason="x")]
  events += [about(10.0, "restart"), about(11.0, "exit", reason="OSError: no")]
  lanes, run = feed(events)
  assert [mark["kind"] for mark in lanes.marks] == ["kill", "restart", "exit"]
  states = [state for _, _, state in lanes.spans(run.islands, 12.0, 12.0)["learner-1"]]
  assert states == ["joining", "down", "joining", "down"], "a new life joins once it is started"


def test_the_last_step_before_a_kill_may_be_told_after_it(make):
  """Logs of several roles are read as they come, and a step may end at the moment of the kill."""
  events = [
    make.run_started(num_learners=1, num_shards=0),
    make.event(2.0, "learner-0", "joined", global_step=0),
    make.step(3.0, 0, 1),
    make.event(4.0, "engine", "fault", target="learner-0", action="kill"),
    make.event(4.1, "engine", "exit", target="learner-0", reason="killed"),
    make.step(4.0, 0, 2),
    make.event(9.0, "engine", "restart", target="learner-0"),
    make.event(9.5, "learner-0", "joined", 1, global_step=2),
  ]
  down = [[4.0, 9.0, "down"], [9.0, 9.5, "joining"], [9.5, 10.0, "running"]]
  assert spans(events, 10.0)["learner-0"] == [[0.0, 2.0, "joining"], [2.0, 4.0, "running"], *down]


def test_an_exit_nobody_planned_is_a_crash(make):
  events = [
    make.run_started(),
    make.event(5.0, "engine", "exit", target="learner-1", reason="ValueError: no"),
    make.event(6.0, "engine", "fault", target="syncer-0", action="stall", detail="for 3 s"),
  ]
  lanes, _ = feed(events)
  assert [(m["time"], m["role"], m["kind"], m["text"]) for m in lanes.marks] == [
    (5.0, "learner-1", "exit", "island 1: ValueError: no"),
    (6.0, "syncer-0", "fault", "shard 0: stall: for 3 s"),
  ]


def test_an_island_that_falls_silent_is_stalled_from_its_last_step_on(make):
  events = [make.run_started(num_learners=1, num_shards=0)]
  events += [
    make.event(1.0, "learner-0", "started"),
    make.event(2.0, "learner-0", "joined", global_step=0),
  ]
  events += [make.step(3.0 + 0.1 * i, 0, i + 1) for i in range(10)]
  assert spans(events, 5.0)["learner-0"][-1] == [2.0, 5.0, "running"], "two seconds are nothing"
  assert spans(events, 10.0)["learner-0"][-2:] == [[2.0, 3.9, "running"], [3.9, 10.0, "stalled"]]
  events += [make.step(9.0, 0, 11)]
  found = spans(events, 9.5)["learner-0"]
  assert found[-3:] == [[2.0, 3.9, "running"], [3.9, 9.0, "stalled"], [9.0, 9.5, "running"]]
  check_whole(found, 9.5)


@pytest.mark.parametrize("seed", range(3))
def test_thousands_of_faults_do_not_make_it_grow(make, seed):
  print("seed", seed)
  rng, time, events = random.Random(seed), 0.0, [make.run_started(num_learners=1, num_shards=0)]
  for life in range(2000):
    times = [time := time + rng.uniform(0.01, 5.0) for _ in range(4)]
    events += [
      make.event(times[0], "learner-0", "started", life),
      make.event(times[1], "learner-0", "joined", life, global_step=0),
      make.event(times[2], "engine", "fault", target="learner-0", action="kill"),
      make.event(times[3], "engine", "restart", target="learner-0"),
    ]
  lanes, run = feed(events)
  found = lanes.spans(run.islands, time, time)["learner-0"]
  assert MOST_SPANS / 2 < len(found) <= MOST_SPANS + 1
  check_whole(found, round(time, 2))
  assert len(lanes.marks) == MOST_MARKS and lanes.num_marks == 4000
