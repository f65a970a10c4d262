"""The way back of a learner, phase by phase: every second from its death to its merge is in one."""

from __future__ import annotations

import pytest

from ddiloco.observe.report import summarise
from ddiloco.observe.run_state import RunState
from ddiloco.observe.tracks import MOST_REJOINS, Rejoins
from tests.made_events import made

PHASES = [
  "detect",
  "pause",
  "away",
  "process",
  "devices",
  "compile",
  "restore",
  "receive",
  "first_step",
  "merge",
]


STARTED_AGAIN = [
  made(10.0, "engine", "exit", target="learner-1", reason="killed"),
  made(20.0, "engine", "restart", target="learner-1"),
]


def read(events, most=MOST_REJOINS):
  run = RunState()
  run.rejoins = Rejoins(run.islands, most)
  return run.read(sorted(events, key=lambda each: each.time)).rejoins


def alive(m=1, incarnation=0, time=1.0):
  """A learner of before."""
  role = f"learner-{m}"
  yield made(time, role, "started", incarnation)
  yield made(time + 1, role, "joined", incarnation)
  yield made(time + 2, role, "step", incarnation, step=1)


def back(m=1, incarnation=1, at=20.0, process=True, merge=True):
  """Its way back from a restart at `at`."""
  role = f"learner-{m}"
  if process:
    yield made(at + 0.5, role, "launched", incarnation)
    yield made(at + 4.0, role, "compiled", incarnation, target=role, seconds=1.5)
  yield made(at + 4.25, role, "started", incarnation)
  yield made(at + 6.0, role, "joined", incarnation)
  yield made(at + 7.0, role, "step", incarnation, step=4)
  yield made(at + 7.5, role, "step", incarnation, step=5)
  if merge:
    yield made(at + 8.0, "syncer-0", "commit", weights={0: 0.5, m: 0.5})


def test_a_planned_kill_of_a_process():
  engine = [
    made(10.0, "engine", "fault", target="learner-1", action="kill"),
    made(10.2, "engine", "exit", target="learner-1", reason="killed"),
    made(20.0, "engine", "restart", target="learner-1"),
    made(12.0, "syncer-0", "commit", weights={0: 1.0, 1: 1.0}),  # of a push of before
  ]
  (found,) = read([*alive(), *engine, *back()]).as_json()
  assert found == {
    "learner": 1,
    "time": 10.0,
    "seconds": 18.0,
    "phases": {
      "detect": 0.2,
      "pause": 9.8,
      "process": 0.5,
      "devices": 2.0,
      "compile": 1.5,
      "restore": 0.25,
      "receive": 1.75,
      "first_step": 1.0,
      "merge": 1.0,
    },
  }
  assert sum(found["phases"].values()) == pytest.approx(found["seconds"])
  assert list(found["phases"]) == [phase for phase in PHASES if phase in found["phases"]]


def test_a_thread_has_no_process_and_nothing_to_compile():
  (found,) = read([*alive(), *STARTED_AGAIN, *back(process=False)]).as_json()
  assert list(found["phases"]) == ["detect", "pause", "restore", "receive", "first_step", "merge"]
  assert found["time"] == 3.0 and found["phases"]["detect"] == 7.0, "since its last word"
  assert summarise([*alive(), *STARTED_AGAIN])["kills"] == [], "a crash is none of the plan"
  assert sum(found["phases"].values()) == pytest.approx(found["seconds"]) == 25.0


def test_where_no_engine_starts_it_again_it_was_away():
  (found,) = read([*alive(), *back()]).as_json()
  assert found["time"] == 3.0 and found["phases"]["away"] == 17.5
  assert not {"detect", "pause", "process"} & found["phases"].keys()
  assert sum(found["phases"].values()) == pytest.approx(found["seconds"])


def test_a_quarantined_learner_of_a_process_starts_afresh_in_it():
  (found,) = read([*alive(), *back(process=False)]).as_json()
  assert list(found["phases"]) == ["away", "receive", "first_step", "merge"]


def test_a_death_on_the_way_back_begins_another():
  engine = [
    made(10.0, "engine", "exit", target="learner-1", reason="killed"),
    made(11.0, "engine", "restart", target="learner-1"),
    made(12.0, "learner-1", "started", 1),
    made(14.0, "engine", "exit", target="learner-1", reason="killed again"),
    made(20.0, "engine", "restart", target="learner-1"),
  ]
  first, second = read([*alive(), *engine, *back(incarnation=2)]).as_json()
  assert first["seconds"] is None and list(first["phases"]) == ["detect", "pause", "restore"]
  assert second["time"] == 12.0 and second["phases"]["detect"] == 2.0
  assert sum(second["phases"].values()) == pytest.approx(second["seconds"])


def test_whoever_begins_does_not_rejoin():
  starts = [made(0.0, "engine", "run_started"), *alive(0), *alive(1)]
  failed = [made(0.5, "engine", "exit", target="learner-2", reason="cannot be started")]
  assert read([*starts, *failed, made(4.0, "syncer-0", "commit", weights={1: 1.0})]).found == (
    read([]).found
  )


@pytest.mark.parametrize("engine", [True, False])
def test_one_that_left_in_good_order_and_joins_later_has_not_died(engine):
  """Its hours elsewhere were the usual time "from death to merge"."""
  left = [made(5.0, "learner-1", "stopped"), made(5.1, "learner-1", "traffic")]
  exit_ = made(5.2, "engine", "exit", target="learner-1", reason="exit status 3")
  joins = [exit_, made(3600.0, "engine", "restart", target="learner-1")] if engine else []
  assert read([*alive(), *left, *joins, *back(at=3600.0)]).as_json() == []
  killed = made(3620.0, "engine", "exit", target="learner-1", reason="killed")
  again = [killed, made(3630.0, "engine", "restart", target="learner-1")]
  log = [*alive(), *left, *joins, *back(at=3600.0), *again, *back(incarnation=2, at=3630.0)]
  (found,) = read(log).as_json()
  assert found["time"] == 3607.5 and found["seconds"] == 30.5


def test_a_run_that_goes_on_is_nobodys_rejoin():
  assert read([*alive(), made(15.0, "engine", "run_started"), *back(process=False)]).as_json() == []


def test_last_words_of_an_earlier_life_are_not_heard():
  late = [made(25.0, "learner-1", "joined", 0), made(24.5, "learner-1", "step", 0, step=9)]
  (found,) = read([*alive(), *STARTED_AGAIN, *late, *back()]).as_json()
  assert found["phases"]["receive"] == 1.75 and found["phases"]["first_step"] == 1.0
  kill = made(10.0, "engine", "fault", target="learner-1", action="kill")
  told_late = [made(9.5, "learner-1", "joined"), made(10.0, "learner-1", "step", step=9)]
  engine = [made(10.2, "engine", "exit", target="learner-1", reason="killed"), STARTED_AGAIN[1]]
  run = RunState().read([*alive(), kill, *told_late, *engine, *back()])
  (found,) = run.rejoins.as_json()
  assert list(found["phases"])[:2] == ["detect", "pause"] and found["phases"]["receive"] == 1.75


def test_clocks_that_differ_give_no_negative_seconds():
  late = [*alive(), *STARTED_AGAIN, *back(at=15.0)]  # its clock is five seconds behind
  (found,) = read(late).as_json()
  assert min(found["phases"].values()) >= 0.0


def test_of_many_the_newest_are_kept():
  events = list(alive())
  for n in range(5):
    engine = [made(100.0 * n + 10, "engine", "exit", target="learner-1", reason="killed")]
    engine += [made(100.0 * n + 20, "engine", "restart", target="learner-1")]
    events += [*engine, *back(incarnation=n + 1, at=100.0 * n + 20)]
  found = read(events, most=2)
  assert [each.ends["merge"] for each in found.found] == [328.0, 428.0] and found.left_out == 3
  assert len(found.as_json(1)) == 1
