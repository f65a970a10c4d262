"""Waits of tests for what no event tells them."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PATIENCE_SECONDS = 300.0  # for what must come: thirty times a role's start on a quiet machine
TICK_SECONDS = 0.02


class AwakeClock:
  """A clock that stands still while nothing of this process runs, and is late on a busy machine.

  In place of a module's `time`: a limit on silence is then one on the silence of threads that could
  have spoken, whatever else the machine does.
  """

  def __init__(self) -> None:
    self._now = 0.0

  @classmethod
  @contextlib.contextmanager
  def running(cls) -> Iterator[AwakeClock]:
    clock, over = cls(), threading.Event()
    thread = threading.Thread(target=clock._tick, args=(over,), name="clock")
    thread.start()
    try:
      yield clock
    finally:
      over.set()
      thread.join()

  def _tick(self, over: threading.Event) -> None:
    while not over.wait(TICK_SECONDS):
      self._now += TICK_SECONDS

  def monotonic(self) -> float:
    return self._now

  def sleep(self, seconds: float) -> None:
    until = self._now + seconds
    while self._now < until:
      time.sleep(TICK_SECONDS)


def wait_for(
  what: Callable[[], Any],
  name: object = "",
  process: subprocess.Popen | None = None,
  log: Path | None = None,
  patience_seconds: float = PATIENCE_SECONDS,
) -> Any:
  """The first true value of `what()`; fails when the process ends or patience does.

  Of a `name` that is a function its result is shown. The clock is one that no test replaces.
  """
  deadline, pause_seconds = time.perf_counter() + patience_seconds, 0.001
  while not (value := what()):
    said = log.read_text() if log else ""
    assert process is None or process.poll() is None, f"it ended before {name}:\n{said}"
    late = time.perf_counter() > deadline
    assert not late, f"waited in vain for {name() if callable(name) else name}:\n{said}"
    time.sleep(pause_seconds)
    pause_seconds = min(2 * pause_seconds, 0.05)
  return value


OURS = tuple(f"{Path(__file__).parent.parent / room}/" for room in ("ddiloco", "scripts", "tests"))
LAST_SECONDS = 20.0  # for threads that are ending


@contextlib.contextmanager
def ended_threads(seconds: float = LAST_SECONDS) -> Iterator[None]:
  """Fails if a thread that begins in the block stands in code of this project after it; those that
  are ending have so long."""
  before = {*threading.enumerate()}
  yield
  new = [each for each in threading.enumerate() if each not in before]
  left = [each for each in new if _stack(each)]
  until = time.perf_counter() + seconds
  for thread in left:
    thread.join(max(0.0, until - time.perf_counter()))
  stacks = [f"{each.name}:\n{_stack(each)}" for each in left if each.is_alive()]
  assert not stacks, "threads are left:\n" + "\n".join(stacks)


def _stack(thread: threading.Thread) -> str:
  """Where a thread stands; "" where it has ended, or is in no code of this project."""
  frame = sys._current_frames().get(thread.ident or 0)
  stack = traceback.extract_stack(frame) if frame else []
  ours = any(each.filename.startswith(OURS) for each in stack)
  return "".join(traceback.format_list(stack)) if ours else ""
