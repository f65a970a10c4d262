"""An endpoint whose messages suffer what the role's planned faults do to them.

In calm weather it only passes on. Else outgoing copies that arrive later wait in a thread of its
own, incoming ones until the role receives again; a corrupt copy goes out with flipped bits, and one
that comes in is dropped as the malformed frame that it is.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from typing import Any

from ddiloco.chaos.faults import MessageFaults
from ddiloco.network.transport import Delivery
from ddiloco.protocol.messages import Message

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
          late = got._replace(
            at=max(got.at, fate.at)
          )  # in bad weather it arrives when it is let in
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
