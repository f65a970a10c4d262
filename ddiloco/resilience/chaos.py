"""Faults on purpose: a plan is data (`config.chaos.faults`). `strike` alone decides what is due.

Two ways to perform it. `Faults`, inside a role's thread: the role asks `check(clock)` between two
pieces of work; a kill there is abrupt for everybody else (the role's connection is cut first,
nothing is said or saved, and its state is gone). `Holds`, from outside: a supervisor asks whether a
process should stand still now, and sends the signals.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence

from ddiloco.config import Fault

DUTY_SECONDS = 0.1  # one turn of a slowed process: it runs for a part of it and stands for the rest


def strike(
  plan: tuple[Fault, ...], clock: int, seconds: float
) -> tuple[Fault | None, tuple[Fault, ...]]:
  """(the first fault of the plan that is due, the plan without it). PURE.

  Args:
    plan: what has not struck yet.
    clock: the run's, in steps.
    seconds: since training began.
  """
  for i, fault in enumerate(plan):
    due = clock >= fault.at_step if fault.at_step >= 0 else seconds >= fault.at_seconds
    if due:
      return fault, plan[:i] + plan[i + 1 :]
  return None, plan


def still_planned(plan: Sequence[Fault], clock: int) -> list[Fault]:
  """The faults of a run that goes on at `clock`: those of steps before it have struck already."""
  return [fault for fault in plan if fault.at_step < 0 or fault.at_step > clock]


def detail(fault: Fault, clock: int) -> str:
  """What the event log says about a fault that strikes."""
  lasts = "for good" if fault.seconds < 0 else f"for {fault.seconds:g} s"
  return f"at step {clock}, {lasts}"


class Killed(Exception):
  """The planned end of a role. `seconds` until it is restarted, -1: never."""

  def __init__(self, fault: Fault):
    super().__init__(f"killed by plan, back in {fault.seconds:g} s")
    self.seconds = fault.seconds


class Faults:
  """The planned faults of one role, over all its incarnations.

  Args:
    plan: the faults of this role.
    start_time: `time.monotonic()` when the run started.
    report: called as report(action, detail) when a fault strikes.
  """

  def __init__(
    self,
    plan: Sequence[Fault],
    start_time: float,
    report: Callable[[str, str], None] = lambda action, detail: None,
  ):
    self._waiting = tuple(plan)
    self._start_time = start_time
    self._report = report
    self._slow_until = 0.0
    self._slow_factor = 1.0
    self.cut: Callable[[], None] = lambda: None  # closes the role's connection; set by the engine
    self.stopped = threading.Event()  # ends a stall early; the engine puts its own here

  def check(self, clock: int) -> None:
    """Strikes what is due at this step of the run's clock or this time.

    Raises:
      Killed: the role must end now, as if its process had been killed.
    """
    while True:
      fault, self._waiting = strike(self._waiting, clock, time.monotonic() - self._start_time)
      if fault is None:
        return
      self._report(fault.action, detail(fault, clock))
      if fault.action == "kill":
        self.cut()
        raise Killed(fault)
      if fault.action == "stall":
        self.stopped.wait(fault.seconds)
      else:
        self._slow_until = time.monotonic() + fault.seconds
        self._slow_factor = fault.factor

  def drag(self, step_seconds: float) -> None:
    """Called after a piece of work (a step, a message): stretches it while the role is slow."""
    if time.monotonic() < self._slow_until:
      self.stopped.wait((self._slow_factor - 1) * step_seconds)


class Holds:
  """The stalls and slow times of one process. `now` is any one clock's, in seconds. PURE."""

  def __init__(self) -> None:
    self._stalled_until = -math.inf
    self._slow_since = self._slow_until = -math.inf
    self._slow_factor = 1.0

  def add(self, fault: Fault, now: float) -> None:
    """A stall or a slowness begins."""
    if fault.action == "stall":
      self._stalled_until = max(self._stalled_until, now + fault.seconds)
    else:
      self._slow_since, self._slow_until = now, now + fault.seconds
      self._slow_factor = fault.factor

  def active(self, now: float) -> bool:
    """Whether anything is going on, so that `held` may change soon."""
    return now < max(self._stalled_until, self._slow_until)

  def held(self, now: float) -> bool:
    """Whether the process should stand still: stalled, or in the idle part of a duty cycle."""
    if now < self._stalled_until:
      return True
    if now >= self._slow_until:
      return False
    return (now - self._slow_since) % DUTY_SECONDS >= DUTY_SECONDS / self._slow_factor
