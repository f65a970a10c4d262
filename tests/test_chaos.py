"""Planned faults strike when they are due, each exactly once, whatever becomes of the role."""

import dataclasses
import threading
import time

import pytest

from ddiloco.chaos import Faults, Killed, detail, still_planned
from ddiloco.config import Fault


def kill(**when) -> Fault:
  return Fault("kill", "learner-0", **when)


def strikes(faults: Faults, global_step: int) -> float | None:
  """Seconds until the restart if this check kills, else None."""
  try:
    faults.check(global_step)
  except Killed as killed:
    return killed.fault.seconds
  return None


def test_a_kill_by_step_strikes_once_at_the_first_step_that_reaches_it():
  log = []
  plan = [kill(at_step=5, seconds=3.0)]
  note = lambda event: log.append((event.action, event.detail))
  faults = Faults(plan, time.monotonic(), note)
  cuts = []
  faults.cut = lambda: cuts.append(len(log))
  assert [strikes(faults, global_step) for global_step in (0, 4)] == [None, None]
  assert strikes(faults, 7) == 3.0  # steps 5 and 6 were slept through
  assert cuts == [1], "the connection is cut before the role unwinds, after the fault is logged"
  assert [strikes(faults, global_step) for global_step in (0, 5, 7, 100)] == [None] * 4
  assert log == [("kill", "at step 7, for 3 s")]


def test_a_kill_by_time_strikes_once_whatever_the_step():
  early = Faults([kill(at_seconds=1000.0)], time.monotonic())
  assert strikes(early, 10**9) is None
  late = Faults([kill(at_seconds=1000.0, seconds=-1)], time.monotonic() - 1000.5)
  assert strikes(late, 0) == -1
  assert strikes(late, 0) is None


def test_two_kills_that_are_due_together_take_two_incarnations():
  plan = [kill(at_step=5, seconds=1.0), kill(at_step=6, seconds=2.0), kill(at_step=50, seconds=4.0)]
  faults = Faults(plan, time.monotonic())
  assert [strikes(faults, global_step) for global_step in (10, 11, 12, 50, 51)] == [
    1.0,
    2.0,
    None,
    4.0,
    None,
  ]


def test_a_fault_that_is_asked_for_while_another_strikes_is_not_lost():
  """The engine's thread may run at any moment: here while the role's looks at its plan."""
  asked = kill(at_step=5, seconds=4.0)

  class Interrupted(Fault):
    def __eq__(self, other: object) -> bool:
      if other is not asked and asked not in planned:
        planned.append(asked)
        faults.plan(asked)
      return self is other

    __hash__ = Fault.__hash__

  planned: list[Fault] = []
  later = Interrupted("stall", "learner-0", at_step=50, seconds=0.0)
  faults = Faults([later, kill(at_step=5, seconds=3.0)], time.monotonic())
  assert [strikes(faults, global_step) for global_step in (5, 6, 7)] == [3.0, 4.0, None]


def test_a_fault_before_the_kill_of_the_same_step_strikes_too():
  log = []
  plan = [Fault("slow", "learner-0", at_step=5), kill(at_step=5)]
  faults = Faults(plan, time.monotonic(), lambda event: log.append(event.action))
  assert strikes(faults, 5) == 5.0
  assert log == ["slow", "kill"]


def test_a_stall_lasts_its_time_and_not_twice():
  faults = Faults([Fault("stall", "learner-0", at_step=0, seconds=0.2)], time.monotonic())
  before = time.monotonic()
  faults.check(0)
  assert time.monotonic() - before >= 0.2
  faults.stopped.wait = lambda seconds: pytest.fail("stalled twice")  # type: ignore[method-assign]
  faults.check(0)


def test_the_end_of_the_run_ends_a_stall_and_a_drag():
  plan = [Fault("stall", "syncer-0", at_step=0, seconds=3600.0)]
  plan += [Fault("slow", "syncer-0", at_step=0, seconds=3600.0, factor=1e6)]
  struck = threading.Event()
  faults = Faults(plan, time.monotonic(), lambda event: struck.set())
  role = threading.Thread(target=lambda: (faults.check(0), faults.drag(1.0)), daemon=True)
  role.start()
  assert struck.wait(10)
  assert role.is_alive()
  faults.stopped.set()
  role.join(10)
  assert not role.is_alive()


def test_slow_stretches_every_step_by_its_factor_until_it_ends():
  faults = Faults([Fault("slow", "learner-0", at_step=3, seconds=60.0, factor=2.5)], 0.0)
  waits = []
  faults.stopped.wait = waits.append  # type: ignore[method-assign, assignment]
  faults.check(2)
  faults.drag(2.0)
  assert waits == []
  faults.check(3)
  faults.drag(2.0)
  faults.drag(4.0)
  assert waits == pytest.approx([3.0, 6.0])
  faults._lasting["slow"] = time.monotonic(), 2.5  # its minute is over
  faults.drag(2.0)
  assert len(waits) == 2


def test_the_detail_says_for_how_long():
  assert detail(kill(at_step=5, seconds=-1), 7) == "at step 7, for good"
  east = ("!learner-2", "!syncer-1")
  assert detail(kill(at_step=5, peers=east), 5) == "at step 5, for 5 s", "no matter of links"
  cut = Fault("cut", "learner-2", at_step=5, peers=east)
  assert detail(cut, 5) == "at step 5, with all but learner-2, syncer-1, for 5 s"
  assert "with syncer-0, for" in detail(dataclasses.replace(cut, peers=("syncer-0",)), 5)


def test_a_run_that_goes_on_is_not_struck_again_by_what_has_struck():
  before, after, timed = kill(at_step=100), kill(at_step=101), kill(at_seconds=3.0)
  assert still_planned([before, after, timed], 100) == [after, timed]
  assert still_planned([before, kill(at_step=0)], -1) == [before, kill(at_step=0)]
