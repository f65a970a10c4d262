"""Virtual time: a heap of planned calls, the loops of roles that wait in it, and their links.

A loop (`ddiloco/runtime.py`) runs at one instant until it waits. The cost of its work is added to
its own clock, which is then ahead of the heap's; the loop goes on when the heap has caught up. So a
role receives nothing while it works, and no other role hears of its work before the work is done.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ddiloco.checks import not_negative
from ddiloco.runtime import Job, Loop
from ddiloco.simulation import bandwidth

Role = tuple[str, int]  # ("learner", m) or ("syncer", s)
HEADER_BYTES = 64  # of any message, about
MOST_TURNS = 1000  # of a loop at one instant without a message: more would never end


class VirtualTime:
  """A clock, and a heap of planned calls. Calls for the same time happen in order of planning."""

  def __init__(self) -> None:
    self.now = 0.0  # seconds
    self.spent = 0.0  # by the loop that runs, since it was resumed
    self._heap: list[tuple[float, int, Callable, tuple]] = []
    self._order = itertools.count()

  def clock(self) -> float:
    """The time in seconds, as the running loop sees it."""
    return self.now + self.spent

  def spend(self, seconds: float) -> None:
    """Lets the running loop work for so long."""
    self.spent += seconds

  def at(self, time: float, call: Callable, *args: Any) -> None:
    """Plans a call."""
    heapq.heappush(self._heap, (time, next(self._order), call, args))

  def run(self, until: float, stop: Callable[[], bool] = lambda: False) -> None:
    """Makes the planned calls up to the time `until`, or until `stop()` is true."""
    while not stop():
      if not self._heap or self._heap[0][0] > until:
        if math.isfinite(until):
          self.now = max(self.now, until)
        return
      self.now, _, call, args = heapq.heappop(self._heap)
      call(*args)


class Task:
  """A loop in virtual time.

  Args:
    time: the clock.
    loop: what runs.
    receive: takes the next message for the loop, None if there is none.
    ended: called when the loop has ended, with the exception that ended it, or None; raises an
      exception that it does not handle.
  """

  def __init__(
    self,
    time: VirtualTime,
    loop: Loop[None],
    receive: Callable[[], Any],
    ended: Callable[[Exception | None], None],
  ):
    self.over = False
    self._time, self._loop, self._receive, self._ended = time, loop, receive, ended
    self._until: float | None = None  # the time it waits for; None: it waits for its work to end
    self._waits = self._woken = False
    self._planned = 0  # number of the newest planned `_go_on`: older ones do nothing
    self._turns = 0
    self._plan(time.clock())

  def wake(self) -> None:
    """Lets the loop go on, even without a message."""
    self._woken = True
    self.arrived()

  def arrived(self) -> None:
    """To be called when a message has come for the loop."""
    if self._waits:
      self._waits = False
      self._plan(self._time.now)

  def end(self) -> None:
    """Ends the loop: its role was killed."""
    if not self.over:
      self.over = True
      if not self._loop.gi_running:  # else `_go_on` closes it
        self._loop.close()

  def _plan(self, at: float) -> None:
    self._planned += 1
    self._time.at(at, self._go_on, self._planned)

  def _go_on(self, planned: int) -> None:
    if planned != self._planned or self.over:
      return
    time, until, self._waits = self._time, self._until, False
    try:
      while True:
        news = None
        if until is not None:
          news = self._receive()
          if news is None and not self._woken and until > time.now:
            return self._wait(until)
          self._woken = False
          self._turns = 0 if news is not None else self._turns + 1
          if self._turns > MOST_TURNS:
            raise RuntimeError(f"a loop turns without end at {time.now} s: it waits for {until}")
        until = self._loop.send(news)
        if self.over:  # the loop itself has led to a call of `end`
          return self._loop.close()
        if time.spent:
          self._turns, self._until = 0, until
          return self._plan(time.clock())
    except StopIteration:
      self._end(None)
    except Exception as error:
      self._end(error)
    finally:
      time.spent = 0.0

  def _end(self, error: Exception | None) -> None:
    self.over = True
    if self._time.spent:
      self._time.at(self._time.clock(), self._ended, error)
    else:
      self._ended(error)

  def _wait(self, until: float) -> None:
    self._until, self._waits, self._turns = until, True, 0
    if until < math.inf:
      self._plan(until)
    else:
      self._planned += 1


class VirtualWorker:
  """Does jobs in virtual time, one after the other, beside its role's loop."""

  failure = None  # an exception of a job ends the whole run
  ending = False

  def __init__(self, time: VirtualTime):
    self._jobs: deque[Job] = deque()
    self._idle = False
    self._task = Task(time, self._work(), lambda: None, _raise)

  def put(self, job: Job) -> None:
    self._jobs.append(job)
    if self._idle:
      self._idle = False
      self._task.wake()

  def close(self, patience_seconds: float = 0.0, most_seconds: float = 0.0) -> None:
    """Ends the worker at once; a half-done job does not count."""
    self._jobs.clear()
    self._task.end()

  def _work(self) -> Loop[None]:
    while True:
      while self._jobs:
        yield from self._jobs.popleft()
      self._idle = True
      yield math.inf


def _raise(error: Exception | None) -> None:
  if error is not None:
    raise error


# --- Links: when a message arrives
#
# Every island has one link, full duplex. Shard s stands beside island s mod M and shares its link,
# or stands at a place of its own; traffic within one place crosses no link. Fragments between two
# roles go one after the other, as over a connection. Connections share their links as TCP
# connections do in the long run: none could have more unless another with less gave some up
# (max-min fairness). The last byte arrives a latency after it has left. Control messages have
# connections of their own and never queue behind fragments; they take the latency only.


UNLIMITED = 1e30  # bytes a second


@dataclasses.dataclass(frozen=True)
class LinkRate:
  """The rate of one place's link, in each direction."""

  gbps: float = 0.0  # Gbit/s; 0: no limit
  latency_seconds: float = 0.001  # one way; between two islands the longer of theirs

  def __post_init__(self):
    not_negative("links", self, "gbps", "latency_seconds")

  @functools.cached_property
  def bytes_per_second(self) -> float:
    """Bytes of payloads a second."""
    return bandwidth.payload_bytes_per_second(self.gbps) if self.gbps else UNLIMITED


End = tuple[Role, bool]  # one direction of a link: its place, and whether transfers come in there


@dataclasses.dataclass(eq=False)
class Transfer:
  """A fragment on its way."""

  left_bytes: float  # at `since`
  latency_seconds: float
  arrived: Callable[[], None]
  pair: tuple[Role, Role]  # from, to
  ends: tuple[End, End]
  rate: float = 0.0  # bytes a second, at present
  since: float = 0.0
  planned: int = 0  # number of its newest planned end: older ones do nothing


class Links:
  """All links of a run.

  Args:
    time: the clock.
    islands: the link of every learner, those that join later included.
    num_planned: learners that are there from the start: shards stand beside these.
    shards: the link of each shard that stands apart; None: shards stand beside islands.
  """

  def __init__(
    self,
    time: VirtualTime,
    islands: Sequence[LinkRate],
    num_planned: int,
    shards: LinkRate | None = None,
  ):
    self._time, self._islands, self._planned, self._shards = time, islands, num_planned, shards
    self._waiting: dict[tuple[Role, Role], collections.deque[Transfer]] = {}  # the first one moves
    self._moving: dict[End, dict[Transfer, None]] = collections.defaultdict(dict)
    self._tight: set[End] = set()  # ends that may be full
    self._changed: dict[End, None] = {}  # transfers have begun or ended there; `_share` is planned

  def place(self, role: Role) -> Role:
    """Where a role stands: the island's learner, or the shard itself if it stands apart."""
    if role[0] == "learner" or self._shards is not None:
      return role
    return "learner", role[1] % self._planned

  def carry(self, sender: Role, to: Role, size: int, arrived: Callable[[], None]) -> None:
    """Calls `arrived` when a message of so many bytes that is sent now has arrived."""
    now, here, there = self._time.now, self.place(sender), self.place(to)
    if here == there:
      return self._time.at(now, arrived)
    islands = [place for place in (here, there) if place[0] == "learner"] or [there]
    latency = max(self._link(place).latency_seconds for place in islands)
    if size <= HEADER_BYTES:
      return self._time.at(now + latency, arrived)
    pair, ends = (sender, to), ((here, False), (there, True))
    transfer = Transfer(size - HEADER_BYTES, latency, arrived, pair, ends)
    queue = self._waiting.setdefault(pair, collections.deque())
    queue.append(transfer)
    if len(queue) == 1:
      self._begin(transfer)

  def unsent(self, sender: Role, to: Role) -> int:
    """Bytes of payloads that wait at the sender or are moving."""
    return math.ceil(sum(map(self._left, self._waiting.get((sender, to), ()))))

  def _left(self, transfer: Transfer) -> float:
    """Bytes that have not moved yet."""
    return max(0.0, transfer.left_bytes - transfer.rate * (self._time.now - transfer.since))

  def _link(self, place: Role) -> LinkRate:
    if place[0] == "learner":
      return self._islands[place[1]]
    assert self._shards is not None
    return self._shards

  def _begin(self, transfer: Transfer) -> None:
    for end in transfer.ends:
      self._moving[end][transfer] = None
    self._change(transfer)

  def _over(self, transfer: Transfer, planned: int) -> None:
    if planned != transfer.planned:
      return
    self._time.at(self._time.now + transfer.latency_seconds, transfer.arrived)
    for end in transfer.ends:
      del self._moving[end][transfer]
    self._change(transfer)
    queue = self._waiting[transfer.pair]
    queue.popleft()
    if queue:
      self._begin(queue[0])
    else:
      del self._waiting[transfer.pair]

  def _change(self, transfer: Transfer) -> None:
    if not self._changed:
      self._time.at(self._time.now, self._share)  # after all transfers that begin or end now
    self._changed |= dict.fromkeys(transfer.ends)

  def _share(self) -> None:
    """Gives every transfer its rate from now on."""
    now = self._time.now
    for transfer, rate in self._rates(self._coupled()).items():
      if rate != transfer.rate:
        transfer.left_bytes = self._left(transfer)
        transfer.since, transfer.rate = now, rate
        transfer.planned += 1
        over_at = now + transfer.left_bytes / rate
        self._time.at(over_at, self._over, transfer, transfer.planned)

  def _coupled(self) -> dict[End, dict[Transfer, None]]:
    """The ends whose shares change with those where transfers have begun or ended, and all their
    transfers.

    An end with room for all that the other ends of its transfers can carry is never full: it holds
    no transfer back, and couples none.
    """
    found, todo = {}, list[End]()
    for end in self._changed:
      others = {other for each in self._moving[end] for other in each.ends if other != end}
      if end in self._tight:
        todo.append(end)
        self._tight.remove(end)
      if others and math.fsum(map(self._capacity, others)) >= self._capacity(end):
        todo.append(end)
        self._tight.add(end)
    self._changed = {}
    while todo:
      if (end := todo.pop()) not in found:
        found[end] = dict(self._moving[end])
        todo += [other for each in found[end] for other in each.ends if other in self._tight]
    return found

  def _capacity(self, end: End) -> float:
    return self._link(end[0]).bytes_per_second

  def _rates(self, over: dict[End, dict[Transfer, None]]) -> dict[Transfer, float]:
    """The transfers of the narrowest end share it evenly; then the same for the others."""
    left = {end: self._capacity(end) for end in over}
    narrow = [(left[end] / len(each), end) for end, each in over.items() if each]
    heapq.heapify(narrow)
    rates: dict[Transfer, float] = {}
    while narrow:
      rate, narrowest = heapq.heappop(narrow)
      if not over[narrowest]:
        continue
      if rate < (share := left[narrowest] / len(over[narrowest])):  # others have left it more since
        heapq.heappush(narrow, (share, narrowest))
        continue
      for each in list(over[narrowest]):
        rates[each] = rate
        for end in each.ends:
          if end in over:
            left[end] = max(0.0, left[end] - rate)
            del over[end][each]
    return rates
