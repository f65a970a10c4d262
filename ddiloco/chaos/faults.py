"""Faults on purpose: a plan is data (`config.chaos`). The supervisor's `strike` says what is due.

Two ways to perform it. `Faults`, inside a role's thread: the role asks `check(global_step)` between
two pieces of work; a kill there is abrupt for all other roles (its own connection is cut first,
nothing is said or saved, and its state is gone). From outside: the supervisor's policy
(`protocol/supervisor.py`) says when a process is killed, stands still and goes on. What happens to
a role's messages, disk and outer gradients (`config.chaos.INSIDE`) is always performed by its own
`Faults`; a supervisor that lives elsewhere only tells it that a fault `begin`s.
"""

from __future__ import annotations

import dataclasses
import errno
import random
import threading
import time
from collections.abc import Callable, Sequence

from ddiloco.config import Fault
from ddiloco.config.chaos import INSIDE, TO_MESSAGES
from ddiloco.protocol import events
from ddiloco.protocol.supervisor import killed, strike

# --- What planned faults do to the messages of one role: time and chance are given, nothing is sent
# The same for a thread, a process and a role in virtual time: its sends and receives ask for the
# message's `fates`, one for every copy that arrives.


@dataclasses.dataclass(frozen=True)
class MessageFate:
  """One copy of a message arrives then, perhaps with flipped bits."""

  at: float  # seconds, of the clock that `fates` was given
  corrupt: bool = False


class MessageFaults:
  """The message faults of one role that are going on. Any thread may begin them or ask for fates.

  Args:
    role: whose messages these are.
    seed: of chance; the same seed and the same messages have the same fates.
  """

  def __init__(self, role: str, seed: int = 0):
    self._random = random.Random(f"weather {seed} {role}")
    self._lock = threading.Lock()
    self._faults: tuple[tuple[Fault, float], ...] = ()  # (fault, until)
    self._free_at: dict[tuple, float] = {}  # when a throttled link has carried what it was given
    self._last_at: dict[tuple, float] = {}  # newest arrival, by link and kind: they keep an order

  @property
  def calm(self) -> bool:
    """Nothing is going on, and nothing that was held up is still on its way."""
    return not self._faults and not self._last_at

  def begin(self, fault: Fault, until: float) -> None:
    """A fault of `config.chaos.TO_MESSAGES` begins."""
    with self._lock:
      self._faults = (*self._faults, (fault, until))

  def fates(
    self, now: float, peer: str, incoming: bool, bulk: bool, size: int
  ) -> Sequence[MessageFate]:
    """When the copies of a message arrive; none: it is lost.

    Args:
      now: seconds.
      peer: the role at the other end.
      incoming: it comes from there, else it goes there.
      bulk: it has a payload; control does not queue behind it.
      size: bytes.
    """
    if self.calm:
      return (MessageFate(now),)
    with self._lock:
      return self._fates(now, (peer, incoming, bulk), size)

  def _fates(self, now: float, way: tuple[str, bool, bool], size: int) -> Sequence[MessageFate]:
    if any(until <= now for _, until in self._faults):
      self._faults = tuple(each for each in self._faults if each[1] > now)
    self._last_at = {way: at for way, at in self._last_at.items() if at > now}
    faults = [each for each in self._faults if _concerns(each[0], way[0])]
    on = [fault for fault, _ in faults]
    if any(f.action == "cut" for f in on) or self._happens(on, "drop"):
      return ()
    at = now + sum(f.delay_seconds for f in on if f.action == "delay")
    throttles = [(f.bits_per_second, until) for f, until in faults if f.action == "throttle"]
    if throttles:
      at = self._free_at[way] = _carried(max(at, self._free_at.get(way, at)), 8 * size, throttles)
    at = max(at, self._last_at.get(way, at))
    if at > now:
      self._last_at[way] = at
    overtaken = max((f.delay_seconds for f in on if f.action == "reorder"), default=0.0)
    copies = 2 if self._happens(on, "duplicate") else 1
    fates = []
    for _ in range(copies):
      late = self._random.uniform(0, overtaken) if self._happens(on, "reorder") else 0.0
      fates.append(MessageFate(at + late, self._happens(on, "corrupt")))
    return fates

  def _happens(self, on: Sequence[Fault], action: str) -> bool:
    return any(f.action == action and self._random.random() < f.share for f in on)

  def spoil(self, header: bytes) -> bytes:
    """The header with a few bits flipped."""
    spoiled = bytearray(header)
    for _ in range(self._random.randint(1, 8)):
      spoiled[self._random.randrange(len(spoiled))] ^= 1 << self._random.randrange(8)
    return bytes(spoiled)


def _carried(at: float, bits: float, throttles: Sequence[tuple[float, float]]) -> float:
  """When a link that is free `at` has carried so many bits; `throttles` are (bits/s, until).

  What a throttle has not let through when it ends is through at once.
  """
  while bits > 0 and (active := [each for each in throttles if each[1] > at]):
    rate, end = min(active)[0], min(until for _, until in active)
    if at + bits / rate <= end:
      return at + bits / rate
    bits -= rate * (end - at)
    at = end
  return at


def _concerns(fault: Fault, peer: str) -> bool:
  if not fault.peers:
    return True
  named = [p for p in fault.peers if not p.startswith("!")]
  return peer in named or (not named and f"!{peer}" not in fault.peers)


def still_planned(plan: Sequence[Fault], global_step: int) -> list[Fault]:
  """Those of a run that goes on at `global_step`: what was planned for steps before has struck."""
  return [fault for fault in plan if fault.at_step < 0 or fault.at_step > global_step]


def detail(fault: Fault, global_step: int) -> str:
  """What the event log says about a fault that strikes."""
  lasts = "for good" if fault.seconds < 0 else f"for {fault.seconds:g} s"
  how = {
    "slow": f"{fault.factor:g} times slower",
    "poison": f"times {fault.factor:g}",
    "delay": f"by {fault.delay_seconds:g} s",
    "throttle": f"to {fault.bits_per_second:g} bit/s",
    **{each: f"{fault.share:.0%} of them" for each in ("drop", "duplicate", "reorder", "corrupt")},
  }.get(fault.action)
  whom = _links(fault.peers) if fault.action in TO_MESSAGES else ""
  return ", ".join(text for text in (f"at step {global_step}", how, whom, lasts) if text)


def _links(peers: Sequence[str]) -> str:
  """Which links of a role, in words; "" for all of them."""
  others = [peer.removeprefix("!") for peer in peers]
  named = [peer for peer in peers if not peer.startswith("!")]
  return f"with {'' if named else 'all but '}{', '.join(named or others)}" if peers else ""


def struck(fault: Fault, said: str) -> events.Fault:
  """The event of a fault that strikes; `said` is its `detail`."""
  return events.Fault(target=fault.role, action=fault.action, seconds=fault.seconds, detail=said)


class Killed(Exception):
  """The planned end of a role. `seconds` until it is restarted, -1: never."""

  def __init__(self, fault: Fault):
    super().__init__(killed(fault))
    self.fault = fault
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
    self.weather = MessageFaults(role)
    self.cut: Callable[[], None] = lambda: None  # closes the role's connection; set by the engine
    self.stopped = threading.Event()  # ends a stall early; the engine puts its own here

  def plan(self, fault: Fault) -> None:
    """One more."""
    self._waiting = (*self._waiting, fault)

  def check(self, global_step: int) -> None:
    """Strikes what is due at this global step or this time.

    Raises:
      Killed: the role must end now, as if its process had been killed.
    """
    while self._waiting:
      waiting = self._waiting
      fault, left = strike(waiting, global_step, self._clock() - self._start_time)
      if fault is None:
        return
      self._waiting = tuple(left) + self._waiting[len(waiting) :]  # some may have been added
      self._report(fault, detail(fault, global_step))
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
