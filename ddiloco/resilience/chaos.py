"""Faults on purpose: a plan is data (`config.chaos.faults`), performed inside a role's thread.

A role asks `check(clock)` between two pieces of work. A kill there is abrupt for everybody else:
the role's connection is cut first, nothing is said or saved, and its state is gone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from ddiloco.config import Fault


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
    self._waiting = list(plan)
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
    for fault in [f for f in self._waiting if self._due(f, clock)]:
      self._waiting.remove(fault)
      detail = f"at step {clock}, for {fault.seconds:g} s"
      self._report(fault.action, detail)
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

  def _due(self, fault: Fault, clock: int) -> bool:
    if fault.at_step >= 0:
      return clock >= fault.at_step
    return time.monotonic() - self._start_time >= fault.at_seconds
