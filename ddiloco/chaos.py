"""Faults on purpose: a plan is data (`config.chaos`). The supervisor's `strike` says what is due.

Two ways to perform it. `Faults`, inside a role's thread: the role asks `check(global_step)` between
two pieces of work; a kill there is abrupt for all other roles (its own connection is cut first,
nothing is said or saved, and its state is gone). From outside: the supervisor's policy
(`protocol/supervisor.py`) says when a process is killed, stands still and goes on. What happens to
a role's messages, disk and outer gradients (`INSIDE`) is always performed by its own
`Faults`; a supervisor that lives elsewhere only tells it that a fault `begin`s.
"""

from __future__ import annotations

import dataclasses
import errno
import heapq
import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ddiloco.checks import build
from ddiloco.config import Fault
from ddiloco.config.schema import ACTIONS, INSIDE, TO_MESSAGES
from ddiloco.network.transport import Delivery
from ddiloco.protocol import events
from ddiloco.protocol.messages import Message
from ddiloco.protocol.supervisor import killed, strike
from ddiloco.workdir import FAULTS, RequestFile, append_request

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
    """A fault of `TO_MESSAGES` begins."""
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


# --- An endpoint whose messages suffer that
# In calm weather it only passes on. Else outgoing copies that arrive later wait in a thread of its
# own, incoming ones until the role receives again; a corrupt copy goes out with flipped bits, and
# one that comes in is dropped as the malformed frame that it is.

IDLE_SECONDS = 60.0  # between two looks when nothing has to wait
HEADER_BYTES = 64  # about; it is encoded by the endpoint


class FaultyEndpoint:
  """Around another endpoint; what it does not change is that one's own.

  Args:
    endpoint: the real one.
    weather: of the role; lasts over its incarnations.
  """

  def __init__(self, endpoint: Any, weather: MessageFaults):
    self.endpoint = endpoint
    self._weather = weather
    self._lock = threading.Lock()  # of both heaps
    self._order = itertools.count()
    self._going: list[tuple[float, int, str, Message, bool]] = []
    self._coming: list[tuple[float, int, Delivery]] = []
    self._turn = threading.Condition(self._lock)
    self._thread: threading.Thread | None = None  # once something has to wait
    self._closed = False

  def __getattr__(self, name: str) -> Any:
    return getattr(self.endpoint, name)

  def send(self, to: str, message: Message) -> int:
    if self._weather.calm and not self._going:
      return self.endpoint.send(to, message)
    bulk, size = _measure(message)
    with self._lock:
      for fate in self._weather.fates(time.monotonic(), to, False, bulk, size):
        heapq.heappush(self._going, (fate.at, next(self._order), to, message, fate.corrupt))
      if self._thread is None and not self._closed:
        self._thread = threading.Thread(target=self._post, name="weather", daemon=True)
        self._thread.start()
      self._turn.notify()
    return size

  def receive(self, timeout_seconds: float) -> Delivery | None:
    deadline = time.monotonic() + timeout_seconds
    while True:
      now = time.monotonic()
      with self._lock:
        if self._coming and self._coming[0][0] <= now:
          return heapq.heappop(self._coming)[2]
        next_at = self._coming[0][0] if self._coming else deadline
      got = self.endpoint.receive(min(deadline, next_at) - now)
      if got is None:
        if time.monotonic() < min(deadline, next_at) or not self._due(deadline):
          return None  # woken, or nothing came in time
        continue
      if self._weather.calm and not self._coming:
        return got
      self._take(got)

  def _due(self, deadline: float) -> bool:
    """Whether something that was held up is to be received before the deadline."""
    with self._lock:
      return bool(self._coming) and self._coming[0][0] <= deadline

  @property
  def waiting(self) -> int:
    return len(self._coming) + self.endpoint.waiting

  def _take(self, got: Delivery) -> None:
    bulk, size = _measure(got.message)
    with self._lock:
      for fate in self._weather.fates(time.monotonic(), got.sender, True, bulk, size):
        if fate.corrupt:
          self.endpoint.counters.malformed += 1
        else:
          late = got._replace(at=max(got.at, fate.at))  # it arrives when it is let in
          heapq.heappush(self._coming, (fate.at, next(self._order), late))

  def _post(self) -> None:
    """In a thread of its own: sends what is due."""
    while True:
      with self._lock:
        while not self._closed and (not self._going or self._going[0][0] > time.monotonic()):
          wait = self._going[0][0] - time.monotonic() if self._going else IDLE_SECONDS
          self._turn.wait(wait)
        if self._closed:
          return
        _, _, to, message, corrupt = heapq.heappop(self._going)
      self.endpoint.send(to, message, self._weather.spoil if corrupt else None)

  def close(self, *arguments: Any) -> None:
    with self._lock:
      self._closed = True
      self._turn.notify()
    self.endpoint.close(*arguments)


def _measure(message: Message) -> tuple[bool, int]:
  """(whether it has a payload, about its size in bytes)."""
  payload = getattr(message, "payload", None)
  return payload is not None, HEADER_BYTES + (0 if payload is None else memoryview(payload).nbytes)


# --- The faults of one role, performed in its own thread


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
    """From now on for `seconds`: slow, or one of `INSIDE`."""
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


# --- Plans drawn by chance: the same seed is the same plan

KINDS = tuple(action for action in ACTIONS if action != "join")  # that are drawn
SHARD_KINDS = tuple(action for action in KINDS if action != "poison")


def random_faults(
  seed: int,
  count: int,
  span_seconds: float,
  num_learners: int,
  num_shards: int,
  kinds: Sequence[str] = KINDS,
) -> tuple[Fault, ...]:
  """`count` faults of all kinds, in order of time, spread evenly by chance over the run.

  One in five strikes a shard, the others learners; one in ten strikes a second role a moment later.

  Args:
    seed: of chance.
    count: how many.
    span_seconds: of the run, since training began.
    num_learners: learners that may be struck ...
    num_shards: ... of each kind.
    kinds: actions to choose from, each as often as the others.
  """
  rng = random.Random(f"faults {seed}")
  order = [kinds[i % len(kinds)] for i in range(count)]
  rng.shuffle(order)
  times = sorted(rng.uniform(0, span_seconds) for _ in range(count))
  faults: list[Fault] = []
  for action, at in zip(order, times):
    if faults and rng.random() < 0.1:  # together with the one before
      at = faults[-1].at_seconds + rng.uniform(0, 0.2)
    on_shard = num_shards and action in SHARD_KINDS and rng.random() < 0.2
    role = f"syncer-{rng.randrange(num_shards)}" if on_shard else None
    faults.append(_drawn(rng, action, role or f"learner-{rng.randrange(num_learners)}", at))
  return tuple(sorted(faults, key=lambda fault: fault.at_seconds))


def random_kills(
  seed: str, per_second: float, span_seconds: float, num_learners: int, down_seconds: float
) -> tuple[Fault, ...]:
  """Kills by one Poisson process over all islands, each as likely as any other; by time.

  Args:
    seed: of chance.
    per_second: of all islands together, in the mean.
    span_seconds: of the run, since training began.
    num_learners: learners that may be struck.
    down_seconds: until a killed one is started again.
  """
  rng, now, faults = random.Random(seed), 0.0, []
  while (now := now + rng.expovariate(per_second)) < span_seconds:
    role = f"learner-{rng.randrange(num_learners)}"
    faults.append(Fault("kill", role, at_seconds=round(now, 3), seconds=down_seconds))
  return tuple(faults)


def _drawn(rng: random.Random, action: str, role: str, at_seconds: float) -> Fault:
  fault = Fault(
    action, role, at_seconds=round(at_seconds, 3), seconds=round(rng.uniform(0.5, 3), 2)
  )
  changes: dict[str, float] = {}
  if action in ("drop", "duplicate", "reorder", "corrupt"):
    changes["share"] = round(rng.uniform(0.1, 0.9), 2)
  if action in ("delay", "reorder"):
    changes["delay_seconds"] = round(rng.uniform(0.01, 0.5), 3)
  if action == "throttle":
    changes["bits_per_second"] = float(rng.choice((1e5, 1e6, 1e7)))
  if action == "slow":
    changes["factor"] = round(rng.uniform(1.5, 4), 2)
  if action == "poison":
    changes["factor"] = float(rng.choice((0.0, 100.0, 1e6, 1e30)))
  return dataclasses.replace(fault, **changes)


# --- Faults that are asked for while a run goes on: lines of WORKDIR/faults.jsonl
# Write access to that file is enough to ask: the dashboard does, a person, and a supervisor without
# another way into a role's process. The supervisor performs what is done to roles and logs all; a
# role performs what happens inside it.


def ask_for(workdir: Path, fault: Fault) -> None:
  """Asks for a fault now, whatever it says about when.

  Raises:
    OSError: the line cannot be written.
  """
  fields = {**dataclasses.asdict(fault), "at_step": -1, "at_seconds": 0.0}
  append_request(workdir / FAULTS, fields)


class FaultRequests(RequestFile[Fault]):
  """Reads what is asked for, from the beginning of the file or only what comes later."""

  def __init__(self, workdir: Path, news_only: bool = False):
    super().__init__(
      workdir / FAULTS,
      lambda fields: build(Fault, {"at_seconds": 0.0, **fields}, FAULTS),
      "fault",
      news_only,
    )
