"""The growing timeline says what the report's says, and stays small."""

import itertools
import random

import pytest

from ddiloco.config import SyncConfig
from ddiloco.dashboard.status import exposition, status
from ddiloco.observe.islands import MOST_SPANS, IslandState
from ddiloco.observe.live import plain_line
from ddiloco.observe.run_state import MOST_MARKS, RunState
from tests.made_events import changed


def feed(events):
  return RunState().read(events)


def spans(events, now=None):
  run = feed(events)
  now = run.time if now is None else now
  return run.spans(now, now)


def check_whole(of_role, end):
  """No gaps, no overlaps, up to the end."""
  for (_, a, _), (b, _, _) in itertools.pairwise(of_role):
    assert a == b
  assert of_role[-1][1] == end


def test_a_kill_is_one_mark_and_so_are_restart_and_first_merge(run_events):
  lanes = feed(run_events)
  assert [(mark.mark, mark.role) for mark in lanes.marks] == [
    ("kill", "learner-2"),
    ("restart", "learner-2"),
    ("merged", "learner-2"),
  ]
  assert lanes.marks[0].text == "island 2: planned kill (restart after 4 s)"


def test_a_shard_that_falls_silent_while_islands_train_is_stalled(make):
  """Of roles that no engine starts nobody else says it: it was running for ever, and rounds were
  "about to end"."""
  events = [make.run_started(num_learners=2, num_shards=2)]
  events += [make.event(0.5, f"syncer-{s}", "started", fragments=[s]) for s in range(2)]
  for n in range(1, 60):
    events += [make.step(float(n), m, n) for m in range(2)]
    alive = [0] if 20 < n < 45 else [0, 1]
    events += [make.event(n + 0.5, f"syncer-{s}", "traffic") for s in alive]

  def shown(until, now):
    run = feed([event for event in events if event.time < until])
    found = status(run, now, SyncConfig(num_shards=2))
    assert 'shard_state{shard="0",state="running"} 1' in exposition(found)
    line = plain_line(run, now)
    assert ("shard 1 stalled" in line) == (found["shards"][1]["state"] == "stalled")
    assert found["shards"][0]["state"] == "running"
    return found["shards"][1]["state"], found["timeline"]["lanes"][-1]["spans"][1:]

  assert shown(30.0, 30.0) == ("running", [[0.5, 30.0, "running"]])
  silent = [[0.5, 20.5, "running"], [20.5, 40.0, "stalled"]]
  assert shown(40.0, 40.0) == ("stalled", silent)
  said = status(feed(e for e in events if e.time < 40.0), 40.0, SyncConfig(num_shards=2))["waiting"]
  assert said.startswith("Shard 1 is stalled: its fragments have no rounds until it is back. ")
  silent[1][1] = 45.5
  assert shown(60.0, 60.0) == ("running", [*silent, [45.5, 60.0, "running"]])
  events += [make.event(60.0, f"learner-{m}", "stopped", reason="all is merged") for m in range(2)]
  assert shown(70.0, 100.0)[0] == "running", "shards end after the islands, and say nothing of it"


def test_a_kill_that_is_noticed_late_is_no_crash_but_the_next_exit_is(make):
  def about(time, kind, **more):
    return make.event(time, "engine", kind, target="learner-1", **more)

  events = [make.run_started(), about(5.0, "fault", action="kill"), about(9.0, "exit", reason="x")]
  events += [about(10.0, "restart"), about(11.0, "exit", reason="OSError: no")]
  lanes = feed(events)
  assert [mark.mark for mark in lanes.marks] == ["kill", "restart", "exit"]
  states = [state for _, _, state in lanes.spans(12.0, 12.0)["learner-1"]]
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
  lanes = feed(events)
  assert [(m.time, m.role, m.mark, m.text) for m in lanes.marks] == [
    (5.0, "learner-1", "exit", "island 1 is down: ValueError: no"),
    (6.0, "syncer-0", "fault", "shard 0: planned stall (for 3 s)"),
  ]


@pytest.mark.parametrize("kind", ["blocked_seconds", "data_seconds"])
def test_an_island_that_waits_for_a_shard_or_for_data_does_not_stand_still(make, kind):
  """In lock-step over a slow link its lane was stalled at each sync, while the account said that
  the island waited for shards."""
  time, steps = 3.0, []
  for n in range(1, 41):
    waited = 0.0 if n % 10 else 30.0
    time += 0.1 + waited
    steps.append(make.step(time, 0, n, seconds=0.1, gap_seconds=0.1 + waited, **{kind: waited}))
  events = [make.run_started(num_learners=1, num_shards=0)]
  events += [make.event(2.0, "learner-0", "joined"), *steps]
  now = round(time + 25.0, 2)
  assert spans(events, now)["learner-0"] == [[0.0, 2.0, "joining"], [2.0, now, "running"]]
  island = feed(events).islands[0]
  assert [island.state_at(time + more) for more in (25.0, 61.0)] == ["running", "stalled"]
  assert feed(events[:9]).islands[0].state_at(8.0) == "stalled", "of no wait is known yet"
  events += [make.step(time + 0.1 * n, 0, 40 + n, seconds=0.1) for n in range(1, 600)]
  assert feed(events).islands[0].state_at(events[-1].time + 5.0) == "stalled", "that was long ago"


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


@pytest.mark.parametrize("kind", ["round", "commit", "abandoned"])
def test_a_planned_stall_of_a_shard_ends_with_its_next_word_of_a_round(make, kind):
  """It was said to stand still until the end of the run."""
  begun = make.event(1.0, "syncer-0", "started", fragments=[0])
  stall = make.event(5.0, "engine", "fault", target="syncer-0", action="stall", seconds=3.0)
  late, next_one = (make.event(time, "syncer-0", kind, fragment=0) for time in (4.9, 8.1))
  still = [[0.0, 1.0, "joining"], [1.0, 5.0, "running"], [5.0, 8.1, "stalled"]]
  found = spans([make.run_started(num_shards=1), begun, stall, late, next_one], 9.0)["syncer-0"]
  assert found == [*still, [8.1, 9.0, "running"]]


def test_of_many_spans_none_takes_over_the_time_in_which_an_island_had_left():
  """It would have been drawn as running meanwhile."""
  island, time = IslandState(), 0.0
  for _ in range(MOST_SPANS):
    for state, seconds in (("joining", 0.5), ("running", 3.0), ("lost", 2.0), ("left", 90.0)):
      island.turn(time, state)
      time += seconds
  drawn = sum(end - start for start, end, _ in island.spans(time, time))
  assert drawn == 5.5 * MOST_SPANS and island.num_absorbed == 2 * MOST_SPANS


def test_where_clocks_differ_no_span_hides_an_earlier_one(make):
  """The learner's clock is five seconds behind that of the engine which starts it again."""
  engine = [make.event(10.0, "engine", "exit", target="learner-0", reason="killed")]
  engine += [make.event(11.0, "engine", "restart", target="learner-0")]
  begun = [make.run_started(num_learners=1), make.step(9.0, 0, 1)]
  back = [make.event(7.0, "learner-0", kind, 1) for kind in ("started", "joined")]
  found = spans([*begun, *engine, *back, make.step(15.0, 0, 2, incarnation=1)])["learner-0"]
  assert [state for *_, state in found] == ["joining", "running", "down", "running"]
  check_whole(found, 15.0)
  found = spans([*begun, *engine, *back], 2000.0)["learner-0"]
  assert found[-1] == [11.0, 2000.0, "stalled"]


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
  lanes = feed(events)
  found = lanes.spans(time, time)["learner-0"]
  assert MOST_SPANS / 2 < len(found) <= MOST_SPANS + 1
  check_whole(found, round(time, 2))
  assert len(lanes.marks) == MOST_MARKS and lanes.mark_counts.total() == 4000


def went_on(make, *ended, learners=2, shards=2):
  """Two islands and two shards until 10.0; `ended`; the run goes on at 100.0."""

  def begin(time, learners, shards):
    sizes = {"num_learners": learners, "num_shards": shards, "num_fragments": 2}
    yield changed(make.run_started(**sizes), time=time)
    for m in range(learners):
      yield make.event(time + 1.0, f"learner-{m}", "started", int(time))
      yield make.event(time + 2.0, f"learner-{m}", "joined", int(time), global_step=0)
      yield make.step(time + 10.0, m, 1, incarnation=int(time), gap_seconds=8.0, seconds=8.0)
    for s in range(shards):
      yield make.event(time + 1.0, f"syncer-{s}", "started", int(time), fragments=[s])

  events = [*begin(0.0, 2, 2), *ended, *begin(100.0, learners, shards)]
  return RunState().read(sorted(events, key=lambda e: e.time))


def states(run):
  return run.spans(110.0, 110.0)


def test_a_run_that_was_killed_whole_was_down_until_it_went_on(make):
  run = went_on(make)
  for role, joined in (("learner-0", 2.0), ("syncer-1", 1.0)):
    assert states(run)[role] == [
      [0.0, joined, "joining"],
      [joined, 10.0, "running"],
      [10.0, 100.0, "down"],
      [100.0, 100.0 + joined, "joining"],
      [100.0 + joined, 110.0, "running"],
    ]


def test_after_a_run_that_was_over_nobody_was_there_until_it_went_on(make):
  over = make.event(10.5, "engine", "run_finished", reason="stopped")
  run = went_on(make, make.event(10.2, "learner-0", "stopped", reason="drained"), over)
  for role in ("learner-0", "learner-1", "syncer-0"):
    assert [state for *_, state in states(run)[role]] == ["joining", "running"] * 2
    assert states(run)[role][2][0] == 100.0


def test_an_island_that_had_left_a_run_before_it_was_killed_was_not_down(make):
  run = went_on(make, make.event(10.2, "learner-0", "stopped", reason="drained"))
  assert [state for *_, state in states(run)["learner-0"]] == ["joining", "running"] * 2
  assert [state for *_, state in states(run)["learner-1"]][2] == "down"


def test_roles_without_which_a_killed_run_goes_on_are_gone(make):
  run = went_on(make, learners=1, shards=1)
  for role, at in (("learner-1", 10.0), ("syncer-1", 10.0)):
    assert states(run)[role][-1][1:] == [at, "running"]
  assert run.islands[1].state == "left"
  found = run.ledger.report()
  assert found.learners[1].chip_seconds == 10.0, "nor has it chips"
  assert "Shard 1" not in status(run, 110.0)["waiting"]


def test_a_crash_is_marked_though_a_kill_was_followed_by_no_restart_but_a_new_start(make):
  kill = make.event(9.0, "engine", "fault", target="learner-1", action="kill")
  run = went_on(make, kill)
  run.read([make.event(111.0, "engine", "exit", target="learner-1", reason="OSError: no")])
  assert [mark.mark for mark in run.marks] == ["kill", "exit"]
