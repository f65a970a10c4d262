"""A queue emptied by a background thread, so that whoever puts something in never waits for I/O."""

from __future__ import annotations

import atexit
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any


def warn(text: str) -> None:
  """One loud line on stderr. A closed stderr is no reason to end a run, so that is let pass."""
  try:
    print(f"ddiloco: WARNING: {text}", file=sys.stderr, flush=True)
  except (OSError, ValueError, AttributeError):
    return


class Drain:
  """Hands what was `put` to `consume`, in order and in batches, on its own daemon thread.

  `consume` is called about every `interval_seconds`, at once after `wake`, and a last time by
  `close`; the batch may be empty. What it raises is printed once and counted in `failures`:
  observing a run must never end it. More than `capacity` waiting items, or items after `close`, are
  dropped and counted in `lost` (a stuck disk must not fill the memory).
  """

  def __init__(
    self,
    name: str,
    consume: Callable[[list[Any]], None],
    interval_seconds: float = 1.0,
    capacity: int = 100_000,
  ):
    self.lost = 0
    self.failures = 0
    self._name = name
    self._consume = consume
    self._interval_seconds = interval_seconds
    self._capacity = capacity
    self._items: deque[Any] = deque()
    self._wake = threading.Event()
    self._closed = False
    self._turns = threading.Condition()
    self._begun = self._done = 0
    self._thread = threading.Thread(target=self._run, name=name, daemon=True)
    self._thread.start()
    atexit.register(self.close)

  def put(self, item: Any) -> None:
    """Queues an item: no lock, no I/O, any thread."""
    if self._closed or len(self._items) >= self._capacity:
      self.lost += 1
    else:
      self._items.append(item)

  @property
  def running(self) -> bool:
    """Whether the thread is still at work (after `close`: stuck in a write)."""
    return self._thread.is_alive()

  def wake(self) -> None:
    """Asks for the next batch to be consumed now."""
    self._wake.set()

  def flush(self, timeout_seconds: float = 1.0) -> bool:
    """Waits until what is queued now has been consumed; False if a stuck disk takes longer."""
    with self._turns:
      turn = self._begun + 1  # the next to begin takes all that is here
      self._wake.set()
      return self._turns.wait_for(
        lambda: self._done >= turn or not self._thread.is_alive(), timeout_seconds
      )

  def close(self, timeout_seconds: float = 5.0) -> None:
    """Consumes what is left and ends the thread; waits at most this long for a stuck disk."""
    if self._closed:
      return
    self._closed = True
    self._wake.set()
    self._thread.join(timeout_seconds)
    if self._thread.is_alive():
      warn(f"{self._name}: still writing after {timeout_seconds:g} s, not waiting any longer")
    atexit.unregister(self.close)

  def _run(self) -> None:
    last = False
    while not last:
      self._wake.wait(self._interval_seconds)
      last = self._closed  # read before the queue is emptied: nothing put earlier stays behind
      self._wake.clear()
      with self._turns:
        self._begun += 1
      batch = [self._items.popleft() for _ in range(len(self._items))]
      try:
        self._consume(batch)
      except Exception:
        self.lost += len(batch)
        self.failures += 1
        if self.failures == 1:
          warn(f"{self._name} failed; the run goes on\n{traceback.format_exc()}")
      with self._turns:
        self._done += 1
        self._turns.notify_all()
