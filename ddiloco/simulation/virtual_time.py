"""Virtual time: a heap of things to come, and the loops of roles that wait in it.

A loop (`ddiloco/runtime.py`) runs at one instant until it waits. What its work costs is spent
meanwhile: its own clock is ahead of the heap's, and the loop goes on when the heap has caught up.
So a role that works hears nothing, and no other role hears of its work before it is done.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable
from typing import Any

from ddiloco.runtime import Job, Loop

MOST_TURNS = 1000  # of a loop at one instant without any news: it would never end


class VirtualTime:
  """What comes when. Things to come at the same time happen in the order of their planning."""

  def __init__(self) -> None:
    self.now = 0.0  # seconds
    self.spent = 0.0  # by the loop that runs, since it was resumed
    self._heap: list[tuple[float, int, Callable, tuple]] = []
    self._order = itertools.count()

  def clock(self) -> float:
    """Seconds, as the loop that runs sees them."""
    return self.now + self.spent

  def spend(self, seconds: float) -> None:
    """The loop that runs works for so long."""
    self.spent += seconds

  def at(self, time: float, call: Callable, *args: Any) -> None:
    """Plans a call."""
    heapq.heappush(self._heap, (time, next(self._order), call, args))

  def run(self, until: float, stop: Callable[[], bool] = lambda: False) -> None:
    """Lets everything happen that happens before `until`, when it is then, or before `stop()`."""
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
    time: its.
    loop: what runs.
    receive: takes the next message for it, None if there is none.
    ended: called when the loop has ended, with the exception that ended it, or None; raises what is
      not its business.
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
    self._until: float | None = None  # what it waits for; None: for its work to be over
    self._waits = self._woken = False
    self._planned = 0  # the newest call of `_go_on`: others are of the past
    self._turns = 0
    self._plan(time.clock())

  def wake(self) -> None:
    """Asks it to look around."""
    self._woken = True
    self.arrived()

  def arrived(self) -> None:
    """A message has come for it."""
    if self._waits:
      self._waits = False
      self._plan(self._time.now)

  def end(self) -> None:
    """It was killed."""
    if not self.over:
      self.over = True
      if not self._loop.gi_running:  # else it ends itself
        self._loop.close()

  def _plan(self, at: float) -> None:
    self._planned += 1
    self._time.at(at, self._go_on, self._planned)

  def _go_on(self, planned: int) -> None:
    if planned != self._planned or self.over:
      return
    time, news = self._time, None
    if self._until is not None:
      alarm, self._waits = self._waits, False
      news = self._receive()
      if news is None and not (alarm or self._woken) and self._until > time.now:
        return self._wait(self._until)
      self._woken = False
    try:
      while True:
        until = self._loop.send(news)
        news = None
        if self.over:  # it has led to its own end
          return self._loop.close()
        if time.spent:
          self._turns, self._until = 0, until
          return self._plan(time.clock())
        if until is None:
          continue
        news = self._receive()
        if news is None and not self._woken and until > time.now:
          return self._wait(until)
        self._woken = False
        self._turns = 0 if news is not None else self._turns + 1
        if self._turns > MOST_TURNS:
          raise RuntimeError(f"a loop turns without end at {time.now} s: it waits for {until}")
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

  failure = None  # what a job raises ends the whole run
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
    """Ends it at once; what is half done does not count."""
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
