"""Faults on purpose: a plan is data (`config.chaos`). `due` of the supervisor's policy says when a
fault strikes.

A fault is performed in one of two ways. Inside, by `Faults`: the role's thread calls
`check(global_step)` between two pieces of work; a kill there is abrupt for all other roles (the
role's connection is cut first, it sends and saves nothing, and its state is gone). From outside:
the supervisor's policy (`protocol/supervisor.py`) says when a process is killed, stands still and
goes on. What slows a role, and faults of its messages, disk and outer gradients (`INSIDE`), are
always performed by its own `Faults`; a supervisor in another process only tells it that a fault
`begin`s.
"""

from __future__ import annotations

import dataclasses
import errno
import heapq
import itertools
import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ddiloco.checks import build, require
from ddiloco.config import Fault
from ddiloco.config.schema import ACTIONS, TO_MESSAGES
from ddiloco.network.transport import Delivery
from ddiloco.protocol import events
from ddiloco.protocol.messages import Message
from ddiloco.protocol.supervisor import due, killed
from ddiloco.workdir import FAULTS, RequestFile, append_request

# --- Planned faults of one role's messages, as a computation: callers give the time and send
# The same for a thread, a process and a role in virtual time: its sends and receives ask for the
# message's `fates`, one for every copy that arrives.


class MessageFate(NamedTuple):
  """When one copy of a message arrives, and whether with flipped bits."""

  at: float  # seconds, on the clock of the `now` given to `fates`
  corrupt: bool = False


class MessageFaults:
  """The active message faults of one role. Any thread may begin faults or ask for fates.

  Args:
    role: the one that sends or receives these messages.
    seed: of random numbers; the same seed and the same messages have the same fates.
  """

  def __init__(self, role: str, seed: int = 0):
    self._random = random.Random(f"weather {seed} {role}")
    self._lock = threading.Lock()
    self._faults: tuple[tuple[Fault, float], ...] = ()  # (fault, until)
    self._free_at: dict[tuple, float] = {}  # when a throttled link has carried all messages so far
    self._last_at: dict[tuple, float] = {}  # newest arrival by link and kind, to keep the order

  @property
  def calm(self) -> bool:
    """Whether no fault is active, and no delayed message is still on its way."""
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
      incoming: whether the message comes from the peer; else it goes there.
      bulk: whether it has a payload; control does not queue behind such messages.
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

  Bits that are left when the last throttle ends are carried at once.
  """
  while bits > 0 and (active := [each for each in throttles if each[1] > at]):
    rate, end = min(active)[0], min(until for _, until in active)
    if at + bits / rate <= end:
      return at + bits / rate
    bits -= rate * (end - at)
    at = end
  return at


def _concerns(fault: Fault, peer: str) -> bool:
  """Whether the fault is on the link with this peer; one that names no peers is on all links."""
  named = [p for p in fault.peers if not p.startswith("!")]
  return peer in named or (not named and f"!{peer}" not in fault.peers)


# --- An endpoint that applies these faults
# Without faults it only passes messages on. Delayed outgoing copies wait in a thread of its own,
# incoming ones until the role receives again. A corrupt outgoing copy is sent with flipped bits; a
# corrupt incoming one is dropped and counted as malformed.

IDLE_SECONDS = 60.0  # between two wake-ups of the thread when no copy waits
HEADER_BYTES = 64  # about; the endpoint encodes the real one


class FaultyEndpoint:
  """A wrapper of another endpoint, which has all attributes that are not changed here.

  Args:
    endpoint: the real one.
    faults: the role's message faults; they last over its incarnations.
  """

  def __init__(self, endpoint: Any, faults: MessageFaults):
    self.endpoint = endpoint
    self._faults = faults
    self._order = itertools.count()
    self._going: list[tuple[float, int, str, Message, bool]] = []  # a heap
    self._coming: list[tuple[float, int, Delivery]] = []  # a heap; of the role's own thread
    self._turn = threading.Condition()  # of `_going`
    self._thread: threading.Thread | None = None  # started when the first copy has to wait
    self._closed = False

  def __getattr__(self, name: str) -> Any:
    return getattr(self.endpoint, name)

  def send(self, to: str, message: Message) -> int:
    if self._faults.calm and not self._going:
      return self.endpoint.send(to, message)
    bulk, size = _measure(message)
    with self._turn:
      for fate in self._faults.fates(time.monotonic(), to, False, bulk, size):
        heapq.heappush(self._going, (fate.at, next(self._order), to, message, fate.corrupt))
      if self._thread is None and not self._closed:
        self._thread = threading.Thread(target=self._post, name="message-faults", daemon=True)
        self._thread.start()
      self._turn.notify()
    return size

  def receive(self, timeout_seconds: float) -> Delivery | None:
    deadline, coming = time.monotonic() + timeout_seconds, self._coming
    while not coming or coming[0][0] > time.monotonic():
      until = min(deadline, coming[0][0]) if coming else deadline
      got = self.endpoint.receive(until - time.monotonic())
      if got is None and (until == deadline or time.monotonic() < until):
        return None  # no message came in time, or woken
      if got is not None:
        bulk, size = _measure(got.message)
        for fate in self._faults.fates(got.at, got.sender, True, bulk, size):
          if fate.corrupt:
            self.endpoint.counters.malformed += 1
          else:  # it arrives with the delay
            heapq.heappush(coming, (fate.at, next(self._order), got._replace(at=fate.at)))
    return heapq.heappop(coming)[2]

  @property
  def waiting(self) -> int:
    return len(self._coming) + self.endpoint.waiting

  def _post(self) -> None:
    """Sends the copies that are due, in a thread of its own."""
    while True:
      with self._turn:
        while not self._closed and (not self._going or self._going[0][0] > time.monotonic()):
          wait = self._going[0][0] - time.monotonic() if self._going else IDLE_SECONDS
          self._turn.wait(wait)
        if self._closed:
          return
        _, _, to, message, corrupt = self._going[0]
        self.endpoint.send(to, message, self._faults.spoil if corrupt else None)
        heapq.heappop(self._going)  # only now: else a later message could overtake this one

  def close(self, *arguments: Any) -> None:
    with self._turn:
      self._closed = True
      self._turn.notify()
    self.endpoint.close(*arguments)


def _measure(message: Message) -> tuple[bool, int]:
  """(whether a message has a payload, about its size in bytes)."""
  payload = getattr(message, "payload", None)
  return payload is not None, HEADER_BYTES + (0 if payload is None else memoryview(payload).nbytes)


# --- The faults of one role, performed in its own thread


def still_planned(plan: Sequence[Fault], global_step: int) -> list[Fault]:
  """The faults left for a run that goes on at `global_step`: those of earlier steps have struck."""
  return [fault for fault in plan if fault.at_step < 0 or fault.at_step > global_step]


def detail(fault: Fault, global_step: int) -> str:
  """The text about a fault in the event log."""
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
  """The links of a role that a fault concerns, in words; "": all."""
  others = [peer.removeprefix("!") for peer in peers]
  named = [peer for peer in peers if not peer.startswith("!")]
  return f"with {'' if named else 'all but '}{', '.join(named or others)}" if peers else ""


def struck(fault: Fault, global_step: int) -> events.Fault:
  """The log event of a fault that strikes."""
  said = detail(fault, global_step)
  return events.Fault(target=fault.role, action=fault.action, seconds=fault.seconds, detail=said)


class Killed(Exception):
  """The planned end of a role."""

  def __init__(self, fault: Fault):
    super().__init__(killed(fault))
    self.fault = fault


class Faults:
  """The faults of one role, over all its incarnations.

  Args:
    plan: the faults that the role's own thread performs.
    start_time: of the run, on `clock`.
    report: takes the event of each that strikes.
    role: the name of the role.
    clock: seconds; in virtual time not the machine's.
  """

  def __init__(
    self,
    plan: Sequence[Fault],
    start_time: float,
    report: Callable[[events.Fault], None] = lambda event: None,
    role: str = "",
    clock: Callable[[], float] = time.monotonic,
  ):
    self._waiting = list(plan)  # the engine's thread adds, the role's own removes
    self._clock = clock
    self._start_time = start_time
    self._report = report
    self._lasting: dict[str, tuple[float, float]] = {}  # action -> (until, its factor)
    self.messages = MessageFaults(role)
    self.cut: Callable[[], None] = lambda: None  # closes the role's connection; set by the engine
    self.stopped = threading.Event()  # ends a stall early; the engine sets it

  def plan(self, fault: Fault) -> None:
    """Adds a fault."""
    self._waiting.append(fault)

  def check(self, global_step: int) -> None:
    """Performs the faults that are due at this global step or this time.

    Raises:
      Killed: the role must end now, as if its process had been killed.
    """
    while True:
      seconds = self._clock() - self._start_time
      fault = next((f for f in self._waiting if due(f, global_step, seconds)), None)
      if fault is None:
        return
      self._waiting.remove(fault)
      self._report(struck(fault, global_step))
      if fault.action == "kill":
        self.cut()
        raise Killed(fault)
      if fault.action == "stall":
        self.stopped.wait(fault.seconds)
      else:
        self.begin(fault, fault.seconds)

  def begin(self, fault: Fault, seconds: float) -> None:
    """Begins a fault of `INSIDE` that lasts `seconds`."""
    until = self._clock() + seconds
    if fault.action in TO_MESSAGES:
      self.messages.begin(fault, until)
    else:
      self._lasting[fault.action] = until, fault.factor

  def _factor(self, action: str) -> float | None:
    """The factor of a fault that lasts; None: there is none, or it is over."""
    until, factor = self._lasting.get(action, (-math.inf, 1.0))
    return factor if self._clock() < until else None

  def drag(self, step_seconds: float) -> None:
    """Called after a piece of work (a step, a message): waits while the role is slow."""
    if (factor := self._factor("slow")) is not None:
      self.stopped.wait((factor - 1) * step_seconds)

  def disk(self) -> None:
    """Called before a write to disk.

    Raises:
      OSError: the disk is full, by plan.
    """
    if self._factor("disk") is not None:
      raise OSError(errno.ENOSPC, "no space left on the device, by plan")

  @property
  def poison(self) -> float:
    """The present factor of the role's outer gradients."""
    factor = self._factor("poison")
    return 1.0 if factor is None else factor


# --- Random plans: the same seed gives the same plan

KINDS = tuple(action for action in ACTIONS if action != "join")  # that may be drawn
SHARD_KINDS = tuple(action for action in KINDS if action != "poison")


def random_faults(
  seed: int,
  count: int,
  span_seconds: float,
  num_learners: int,
  num_shards: int,
  kinds: Sequence[str] = KINDS,
) -> tuple[Fault, ...]:
  """`count` faults of all kinds, in order of time, uniformly random over the run.

  One in five strikes a shard, the others learners; one in ten follows the one before within 0.2 s.

  Args:
    seed: of random numbers.
    count: how many.
    span_seconds: of the run, since training began.
    num_learners: learners that may be struck.
    num_shards: shards that may be struck.
    kinds: actions to choose from, each as often as the others.
  """
  rng = random.Random(f"faults {seed}")
  order = [kinds[i % len(kinds)] for i in range(count)]
  rng.shuffle(order)
  times = sorted(rng.uniform(0, span_seconds) for _ in range(count))
  faults: list[Fault] = []
  for action, at in zip(order, times):
    if faults and rng.random() < 0.1:  # soon after the one before
      at = faults[-1].at_seconds + rng.uniform(0, 0.2)
    on_shard = num_shards and action in SHARD_KINDS and rng.random() < 0.2
    role = f"syncer-{rng.randrange(num_shards)}" if on_shard else None
    faults.append(_drawn(rng, action, role or f"learner-{rng.randrange(num_learners)}", at))
  return tuple(sorted(faults, key=lambda fault: fault.at_seconds))


def random_kills(
  seed: str, per_second: float, span_seconds: float, num_learners: int, down_seconds: float
) -> tuple[Fault, ...]:
  """Kills by one Poisson process over all islands, each equally likely; in order of time.

  Args:
    seed: of random numbers.
    per_second: mean rate of all islands together.
    span_seconds: of the run, since training began.
    num_learners: learners that may be struck.
    down_seconds: until a killed learner is started again.
  """
  rng, now, faults = random.Random(seed), 0.0, []
  while (now := now + rng.expovariate(per_second)) < span_seconds:
    role = f"learner-{rng.randrange(num_learners)}"
    faults.append(Fault("kill", role, at_seconds=round(now, 3), seconds=down_seconds))
  return tuple(faults)


def _drawn(rng: random.Random, action: str, role: str, at_seconds: float) -> Fault:
  seconds, changes = round(rng.uniform(0.5, 3), 2), dict[str, float]()
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
  return Fault(action, role, at_seconds=round(at_seconds, 3), seconds=seconds, **changes)


# --- Faults that are asked for while a run goes on: lines of WORKDIR/faults.jsonl
# Write access to that file is enough to ask. The dashboard asks so, a person may, and so does a
# supervisor that has no other channel to a role's process. The supervisor performs faults from
# outside, and logs all; a role performs those inside it.


def ask_for(workdir: Path, fault: Fault) -> None:
  """Asks for a fault now, whatever time it names.

  Raises:
    OSError: the line cannot be written.
  """
  fields = {**dataclasses.asdict(fault), "at_step": -1, "at_seconds": 0.0}
  append_request(workdir / FAULTS, fields)


def fault_requests(workdir: Path, news_only: bool = False) -> RequestFile[Fault]:
  """The faults that are asked for, from the beginning of the file or only new ones."""

  def parse(fields: dict[str, Any]) -> Fault:
    fault = build(Fault, {"at_seconds": 0.0, **fields}, FAULTS)
    one, fix = not fault.role.startswith("region-"), "ask for a fault of each of its roles"
    require(one, "role", fault.role, "must be one role", fix)
    return fault

  return RequestFile(workdir / FAULTS, parse, "fault", news_only)
