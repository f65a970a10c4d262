"""How the process of a run hears that it should end, also while a compiler is at work."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

POLL_SECONDS = 0.2  # short, so that signals are heard


class Heard:
  """The signals that have come in, also those Python has not been able to tell its main thread yet.

  Use it in the main thread; ask it in any.
  """

  def __init__(self) -> None:
    self._read, self._write = os.pipe()
    os.set_blocking(self._read, False)
    os.set_blocking(self._write, False)
    self._before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)

  def take(self) -> set[int]:
    """The numbers of those that have come since the last call."""
    try:
      return set(os.read(self._read, 4096))
    except BlockingIOError:
      return set()

  def close(self) -> None:
    """Hears no more; in the main thread."""
    signal.set_wakeup_fd(self._before)
    os.close(self._write)
    os.close(self._read)


@contextlib.contextmanager
def terminates(asked: threading.Event) -> Iterator[None]:
  """While it lasts SIGTERM and the first Ctrl-C set `asked`, in the main thread alone.

  A second Ctrl-C raises KeyboardInterrupt there. Other threads cannot hear signals.
  """
  if threading.current_thread() is not threading.main_thread():
    yield
    return
  interrupted = False

  def hear(number: int, _frame: object) -> None:
    nonlocal interrupted
    if number == signal.SIGINT and interrupted:
      raise KeyboardInterrupt
    interrupted = interrupted or number == signal.SIGINT
    asked.set()

  before = {number: signal.signal(number, hear) for number in (signal.SIGTERM, signal.SIGINT)}
  try:
    yield
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


def beside(work: Callable[[], Any], asked: threading.Event) -> Any:
  """What `work()` returns, which has a thread of its own: this one goes on hearing signals.

  Python hears none while its main thread compiles, and nothing can interrupt a compiler. The thread
  is left behind then and ends with the process.

  Raises:
    KeyboardInterrupt: Ctrl-C, or `asked` was set meanwhile.
  """
  done: list[Any] = []
  failed: list[BaseException] = []

  def run() -> None:
    try:
      done.append(work())
    except BaseException as error:  # raised where it is waited for
      failed.append(error)

  thread = threading.Thread(target=run, name="prepares", daemon=True)
  thread.start()
  while thread.is_alive():
    if asked.is_set():
      raise KeyboardInterrupt
    thread.join(POLL_SECONDS)
  if failed:
    raise failed[0]
  return done[0]
