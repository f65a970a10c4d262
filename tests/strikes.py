"""Faults that wait for what they need, for tests of runs: an event instead of a guess at when."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from ddiloco.chaos import ask_for
from ddiloco.config import Fault
from ddiloco.observe.eventlog import GrowingLog
from ddiloco.protocol.events import Snapshot

LOOK_SECONDS = 0.1


@contextlib.contextmanager
def killed_once_saved(workdir: Path, role: str) -> Iterator[None]:
  """While a run goes on here: its role is killed when a snapshot is complete that has its part."""
  over = threading.Event()

  def strike() -> None:
    log = GrowingLog(workdir)
    while not over.wait(LOOK_SECONDS):
      if any(role in e.roles for e in log.read().of(Snapshot)):
        return ask_for(workdir, Fault("kill", role, at_seconds=0.0, seconds=0.2))

  thread = threading.Thread(target=strike, name="strike")
  thread.start()
  try:
    yield
  finally:
    over.set()
    thread.join()
