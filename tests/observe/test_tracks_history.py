"""Spans, kills and survivors' pauses, from logs made by hand."""

from __future__ import annotations

import itertools
import math

import pytest

from ddiloco.dashboard.status import status
from ddiloco.observe.history import MOST_ROUNDS, Clocks
from ddiloco.observe.report import key_numbers, summarise
from ddiloco.observe.run_state import RunState


def role_spans(events):
  """By role, [start, end, state]."""
  run = RunState().read(events)
  return dict(sorted(run.spans(run.time, run.time).items()))


def followed(events):
  return RunState().read(events)


def kills(events):
  return [each for each in followed(events).rejoins.found if each.planned]


def _steps(make, learner, times, gap=0.1, first=1):
  """Step events at these times; the gap is from the time before, else `gap`."""
  result, previous = [], None
  for number, time in enumerate(times, first):
    passed = gap if previous is None else time - previous
    result.append(make.step(time, learner, number, gap_seconds=passed))
    previous = time
  return result


def _sorted(*groups):
  return sorted((e for group in groups for e in group), key=lambda event: event.time)


def _kill(make, time, learner, joined=None, merged=None, seconds=5.0):
  fault = {"target": f"learner-{learner}", "action": "kill", "seconds": seconds}
  events = [make.step(0.5, learner, 1), make.event(time, "engine", "fault", **fault)]
  if joined:
    events.append(make.event(joined - 1, "engine", "restart", target=f"learner-{learner}"))
    role = f"learner-{learner}"
    events.append(make.event(joined - 0.5, role, "started", 1, devices=1, mesh=[1], batch_size=1))
    events.append(make.event(joined, role, "joined", 1, global_step=5, seconds=0.5))
    events.append(make.step(joined + 0.1, learner, 2, incarnation=1, gap_seconds=1.0))
  if merged:
    events.append(make.commit(merged, weights={learner: 1.0}))
  return events


def test_spans_of_the_synthetic_run(run_events):
  spans = role_spans(run_events)
  assert list(spans) == ["learner-0", "learner-1", "learner-2", "learner-3", "syncer-0", "syncer-1"]
  killed = [(state, start, end) for start, end, state in spans["learner-2"]]
  assert killed == [
    ("joining", 0.0, 3.3),
    ("running", 3.3, 20.0),
    ("down", 20.0, 24.0),
    ("joining", 24.0, 27.0),
    ("running", 27.0, 60.0),
  ]
  assert [state for _, _, state in spans["syncer-0"]] == ["joining", "running"]
  assert spans["syncer-0"][-1][1] == pytest.approx(run_events[-1].time)


def test_spans_touch_and_never_overlap(run_events):
  for spans in role_spans(run_events).values():
    assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
    assert all(end > start for start, end, _ in spans)


def test_no_events_no_spans():
  assert role_spans([]) == {}
  assert kills([]) == []


def test_a_kill_for_good_is_watched_thirty_seconds(make):
  pauses = [1, 2, 3, 4, 10, 11, 12, 90, 91]
  events = _sorted(_steps(make, 0, pauses), _kill(make, 5.0, 2, seconds=-1.0))
  (kill,) = kills(events)
  assert math.isnan(kill.seconds("receive")) and math.isnan(kill.seconds())
  assert _ratio(events) == pytest.approx(23.0), "silent from 12 to 35"


def test_only_planned_kills_of_learners_count(make):
  events = [
    make.step(0.5, 0, 1),
    make.event(1.0, "engine", "fault", target="syncer-0", action="kill"),
    make.event(2.0, "engine", "fault", target="learner-0", action="stall"),
    make.event(3.0, "engine", "exit", target="learner-0", reason="crash"),
  ]
  assert kills(events) == []


def test_median_gap_leaves_out_the_compile(make):
  gaps = ((1, 9.0), (2, 1.0), (3, 2.0), (4, 3.0))
  steps = [make.step(float(k), 0, k, gap_seconds=g) for k, g in gaps]
  assert followed(steps).islands[0].usual_gap == 2.0
  assert math.isnan(followed(steps[:1]).islands[0].usual_gap)


def _ratio(events):
  run = followed(events)
  kill = next(each for each in run.rejoins.found if each.planned)
  return run.rejoins.gap_ratio(kill, events[-1].time)


def test_the_longest_pause_in_the_window_over_the_own_median(make):
  slow = [1, 2, 3, 4, 10, 11, 12, 13]  # a pause of 6 s, median gap 1 s
  fast = [k / 2 for k in range(1, 30)]
  kill = _kill(make, 5.0, 2, joined=8.0, merged=11.5)
  events = _sorted(_steps(make, 0, slow), _steps(make, 1, fast), kill)
  assert _ratio(events) == pytest.approx(6.0)


def test_pauses_outside_the_window_do_not_count(make):
  times = [1, 2, 8, 9, 10, 11, 12, 13, 14, 22, 23]  # pauses of 6 s before and 8 s after
  kill = _kill(make, 9.5, 2, joined=11.0, merged=12.5)
  assert _ratio(_sorted(_steps(make, 0, times), kill)) == pytest.approx(1.0)


def test_a_survivor_that_never_steps_again_counts_to_the_end_of_the_window(make):
  kill = _kill(make, 5.0, 2, joined=8.0, merged=15.0)
  events = _sorted(_steps(make, 0, [1, 2, 3, 4, 5]), kill)
  assert _ratio(events) == pytest.approx(10.0)
  until_now = [event for event in events if event.time <= 8.0]
  assert _ratio(until_now) == pytest.approx(3.0), "while it goes on"
  stopped = [make.event(5.5, "learner-0", "stopped", reason="done")]
  assert _ratio(_sorted(events, stopped)) == pytest.approx(0.5)  # silent until it left


@pytest.mark.parametrize("action", ["kill", "stall", "slow"])
def test_an_island_with_a_fault_of_its_own_is_no_witness(make, action):
  kill = _kill(make, 5.0, 2, joined=8.0, merged=11.0)
  events = _sorted(
    _steps(make, 0, [1, 2, 3, 4, 10, 11]),
    _steps(make, 1, range(1, 13)),
    [make.event(6.0, "engine", "fault", target="learner-0", action=action)],
    kill,
  )
  assert _ratio(events) == pytest.approx(1.0)
  struck = next(event for event in events if event.time == 6.0 and event.role == "engine")
  events[events.index(struck)] = make.changed(struck, target="syncer-0")
  assert _ratio(events) == pytest.approx(6.0), "a shard's fault is none of the island of its number"


def test_an_island_that_left_and_came_back_is_a_witness_again(make):
  """As all islands of a run that was stopped and goes on."""
  left = [make.event(1.5, "learner-0", "stopped", reason="drained")]
  back = [make.event(1.7, "learner-0", "started", 1), make.event(1.8, "learner-0", "joined", 1)]
  kill = _kill(make, 5.0, 2, joined=8.0, merged=11.0)
  first, *later = _steps(make, 0, [1, 2, 3, 4, 10, 11], first=2)
  later = [make.changed(step, incarnation=1) for step in later]
  events = _sorted([first], later, left, back, kill)
  assert _ratio(events) == pytest.approx(6.0)


def test_an_island_that_left_in_the_window_was_silent_until_it_left_also_when_it_is_back(make):
  left = [make.event(5.5, "learner-0", "stopped", reason="drained")]
  back = [make.event(6.0, "engine", "exit", target="learner-0", reason="")]
  back += [make.event(100.0, "learner-0", "started", 1)]
  steps = _steps(make, 0, [1, 2, 3, 4, 5])
  assert _ratio(_sorted(steps, left, back, _kill(make, 5.0, 2))) == pytest.approx(0.5)


def test_a_second_death_on_the_way_back_ends_the_window_of_the_first(make):
  kill = [make.event(5.0, "engine", "fault", target="learner-2", action="kill", seconds=1.0)]
  again = _kill(make, 7.0, 2, joined=9.0, merged=10.0)
  events = _sorted(_steps(make, 0, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 20]), kill, again)
  assert _ratio(events) == pytest.approx(1.0), "what came after its merge is not of that kill"


def test_an_island_that_was_down_at_the_kill_is_no_witness(make):
  exited = make.event(3.5, "engine", "exit", target="learner-0", reason="crash")
  events = _sorted(
    _steps(make, 0, [1, 2, 3]), [exited], _kill(make, 5.0, 2, joined=8.0, merged=11.0)
  )
  assert math.isnan(_ratio(events))


def rounds(make, count, ahead=0.0, role="learner-0"):
  """Copy-outs, commits 0.4 s later, and their stages after 0.5 s; all sorted by their times."""
  found = []
  for n in range(count):
    of = {"fragment": n % 2, "round": n}
    found.append(make.event(n + ahead, role, "copy_out", **of))
    found.append(make.commit(n + 0.4, **of))
    found.append(make.event(n + 0.9 + ahead, role, "stage", **of, included=True))
  return sorted(found, key=lambda event: event.time)


@pytest.mark.parametrize("ahead", [0.0, 0.3, -0.4, -0.55, 2.0, -2.0, 60.0, -60.0])
def test_clocks_are_as_far_apart_as_the_log_proves(make, ahead):
  clocks = Clocks()
  for event in rounds(make, 200, ahead):
    clocks.add(event)
  proven = {2.0: 1.6, -2.0: 1.5, 60.0: 59.6, -60.0: 59.5}.get(ahead)
  first, then = ("island 0", "shard 0") if ahead > 0 else ("shard 0", "island 0")
  said = f"the clock of {first} is at least {proven} s ahead of that of {then}"
  assert clocks.text() == (said if proven else "")


@pytest.mark.parametrize("life, included", [(1, True), (0, False)])
def test_what_an_earlier_life_copied_out_proves_nothing(make, life, included):
  """A learner that was restored counts an older push as its newest; nor does a push that came too
  late for the version."""
  clocks = Clocks()
  clocks.add(make.commit(1.0, fragment=0, round=3))
  clocks.add(make.event(5.0, "learner-0", "copy_out", fragment=0, round=4))
  of = {"fragment": 0, "round": 3, "included": included}
  clocks.add(make.event(7.0, "learner-0", "stage", life, **of))
  assert clocks.text() == ""


def test_clocks_need_little_memory_however_long_a_run_is(make):
  clocks = Clocks()
  for event in rounds(make, 3 * MOST_ROUNDS):
    clocks.add(event)
  assert len(clocks._rounds) == MOST_ROUNDS and len(clocks._copied) == 2


def test_report_and_page_name_clocks_that_are_apart(make):
  events = [make.run_started(num_learners=1), *rounds(make, 20, 3.0)]
  said = "the clock of island 0 is at least 2.6 s ahead of that of shard 0"
  assert dict(key_numbers(summarise(events)))["clocks that differ"] == said
  run = RunState().read(events)
  assert status(run, run.time)["clocks"] == said
