"""Faults on purpose: a plan is data (`config.chaos`). `strike` alone decides what is due.

Three ways to perform it. `Faults`, inside a role's thread: the role asks `check(clock)` between two
pieces of work; a kill there is abrupt for everybody else (the role's connection is cut first,
nothing is said or saved, and its state is gone). `Holds`, from outside: a supervisor asks whether a
process should stand still now, and sends the signals. What happens to a role's messages, disk and
outer gradients (`config.chaos.INSIDE`) is always performed by its own `Faults`; a supervisor that
lives elsewhere only tells it that a fault `begin`s.
"""

from __future__ import annotations

import errno
import math
import threading
import time
from collections.abc import Callable, Sequence

from ddiloco.config import Fault
from ddiloco.config.chaos import INSIDE
from ddiloco.resilience.weather import Weather

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
  how = {
    "slow": f"{fault.factor:g} times slower",
    "poison": f"times {fault.factor:g}",
    "delay": f"by {fault.delay_seconds:g} s",
    "throttle": f"to {fault.bits_per_second:g} bit/s",
    **{each: f"{fault.share:.0%} of them" for each in ("drop", "duplicate", "reorder", "corrupt")},
  }.get(fault.action)
  whom = f"with {', '.join(fault.peers)}" if fault.peers else ""
  return ", ".join(text for text in (f"at step {clock}", how, whom, lasts) if text)


def struck(fault: Fault, said: str) -> dict[str, str | float]:
  """The fields of the event of a fault that strikes; `said` is its `detail`."""
  seconds = fault.seconds
  return {"target": fault.role, "action": fault.action, "seconds": seconds, "detail": said}


class Killed(Exception):
  """The planned end of a role. `seconds` until it is restarted, -1: never."""

  def __init__(self, fault: Fault):
    super().__init__(f"killed by plan, back in {fault.seconds:g} s")
    self.seconds = fault.seconds


class Faults:
  """The faults of one role, over all its incarnations.

  Args:
    plan: the faults that its own thread strikes.
    start_time: what `clock` showed when the run started.
    report: called as report(fault, detail) when one of them strikes.
    role: whose they are.
    clock: seconds; in virtual time not the machine's.
  """

  def __init__(
    self,
    plan: Sequence[Fault],
    start_time: float,
    report: Callable[[Fault, str], None] = lambda fault, detail: None,
    role: str = "",
    clock: Callable[[], float] = time.monotonic,
  ):
    self._waiting = tuple(plan)
    self._clock = clock
    self._start_time = start_time
    self._report = report
    self._slow_until = 0.0
    self._slow_factor = 1.0
    self._disk_fails_until = 0.0
    self._poison_until = 0.0
    self._poison_factor = 1.0
    self.weather = Weather(role)
    self.cut: Callable[[], None] = lambda: None  # closes the role's connection; set by the engine
    self.stopped = threading.Event()  # ends a stall early; the engine puts its own here

  def plan(self, fault: Fault) -> None:
    """One more."""
    self._waiting = (*self._waiting, fault)

  def check(self, clock: int) -> None:
    """Strikes what is due at this step of the run's clock or this time.

    Raises:
      Killed: the role must end now, as if its process had been killed.
    """
    while self._waiting:
      waiting = self._waiting
      fault, left = strike(waiting, clock, self._clock() - self._start_time)
      if fault is None:
        return
      self._waiting = tuple(left) + self._waiting[len(waiting) :]  # some may have been added
      self._report(fault, detail(fault, clock))
      if fault.action == "kill":
        self.cut()
        raise Killed(fault)
      if fault.action == "stall":
        self.stopped.wait(fault.seconds)
      else:
        self.begin(fault, fault.seconds)

  def begin(self, fault: Fault, seconds: float) -> None:
    """From now on for `seconds`: slow, or one of `config.chaos.INSIDE`."""
    until = self._clock() + seconds
    if fault.action == "slow":
      self._slow_until, self._slow_factor = until, fault.factor
    elif fault.action == "disk":
      self._disk_fails_until = until
    elif fault.action == "poison":
      self._poison_until, self._poison_factor = until, fault.factor
    elif fault.action in INSIDE:
      self.weather.begin(fault, until)

  def drag(self, step_seconds: float) -> None:
    """Called after a piece of work (a step, a message): stretches it while the role is slow."""
    if self._clock() < self._slow_until:
      self.stopped.wait((self._slow_factor - 1) * step_seconds)

  def disk(self) -> None:
    """Called before something is written.

    Raises:
      OSError: the disk is full, by plan.
    """
    if self._clock() < self._disk_fails_until:
      raise OSError(errno.ENOSPC, "no space left on the device, by plan")

  @property
  def poison(self) -> float:
    """What the role's outer gradients are multiplied with now."""
    return self._poison_factor if self._clock() < self._poison_until else 1.0


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
