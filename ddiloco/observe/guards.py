"""Observing a run never ends it: lines may go unheard, duties fail, and a queue takes the I/O."""

from __future__ import annotations

import atexit
import concurrent.futures
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TextIO


def say(line: str, stream: TextIO | None = None) -> None:
  """One line on stdout, or `stream`. One that is closed, broken or full is no reason to end."""
  try:
    print(line, file=stream or sys.stdout, flush=True)
  except (OSError, ValueError, AttributeError):
    return


def warn(text: str) -> None:
  """One loud line on stderr, as `say` says it."""
  say(f"ddiloco: WARNING: {text}", sys.stderr)


class Guard:
  """Does the duties of a loop that must not end, turn after turn.

  What a duty raises is said once for each kind of failure, and the duty has its next turn as if
  nothing had happened: a disk that was full may have room then.

  Args:
    who: whose duties, for the warning.
  """

  def __init__(self, who: str):
    self.failures = 0
    self._who = who
    self._said: set[tuple[str, type[Exception]]] = set()

  def __call__(self, duty: Callable[..., Any], *arguments: Any, instead: Any = None) -> Any:
    """What `duty(*arguments)` returns; `instead` if it fails."""
    try:
      return duty(*arguments)
    except Exception as error:
      self.failures += 1
      name = getattr(duty, "__name__", str(duty)).strip("_")
      if (name, type(error)) not in self._said:
        self._said.add((name, type(error)))
        trace = traceback.format_exc()
        warn(f"{self._who}: {name} failed, which is said once; it goes on\n{trace}")
      return instead


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


# --- Waits for others: each has a limit, a name, and a line that says that it was exceeded

LOOK_SECONDS = 0.01


class Pollable(Protocol):
  """What is waited for of a process: a part of `subprocess.Popen`."""

  def poll(self) -> int | None: ...


def ended(thread: threading.Thread, seconds: float, what: str = "") -> bool:
  """Whether a thread has ended within so long; if not, that is said, and it is left behind.

  `what`: its name, if the thread's own says too little.
  """
  thread.join(seconds)
  if thread.is_alive():
    _too_long(what or thread.name, "has not ended", seconds)
  return not thread.is_alive()


def exited(process: Pollable, seconds: float, what: str) -> int | None:
  """The exit status of a process, None if it has not ended within so long, which is said."""
  until = time.monotonic() + seconds
  while (status := process.poll()) is None:
    if time.monotonic() >= until:
      _too_long(what, "has not ended", seconds)
      return None
    time.sleep(LOOK_SECONDS)
  return status


def result(future: concurrent.futures.Future, seconds: float, what: str) -> Any:
  """What a future gives.

  Raises:
    TimeoutError: nothing within so long, which is said; or whatever went wrong in it.
  """
  if not concurrent.futures.wait([future], seconds).done:
    _too_long(what, "is not done", seconds)
    raise TimeoutError(f"{what} is not done within {seconds:g} s")
  return future.result(0)


def _too_long(what: str, how: str, seconds: float) -> None:
  warn(f"{what} {how} within {seconds:g} s and is waited for no longer. The rest goes on.")
