"""Faults that wait for what they need, for tests of runs: an event instead of a guess at when."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import _base
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

from ddiloco.chaos import ask_for
from ddiloco.config import Fault
from ddiloco.observe.eventlog import GrowingLog
from ddiloco.protocol import events
from ddiloco.protocol.events import Snapshot
from ddiloco.training.island import Island

LOOK_SECONDS = 0.1
SLOW_STEP_SECONDS = 0.5


@contextlib.contextmanager
def killed_once_saved(workdir: Path, role: str, hold_at: int) -> Iterator[None]:
  """While a run of threads goes on here: its role is killed when a snapshot has its part.

  From this step of the schedule on islands make slow steps until then: no run is over before it.
  (They must not stand still: at a step's end they say that their part is saved.)
  """
  over, killed, step = threading.Event(), threading.Event(), Island.step

  def strike() -> None:
    log, asked = GrowingLog(workdir), False
    while not (over.wait(LOOK_SECONDS) or killed.is_set()):
      found = log.read()
      if not asked and any(role in e.roles for e in found.of(Snapshot)):
        ask_for(workdir, Fault("kill", role, at_seconds=0.0, seconds=0.2))
        asked = True
      if any(e.target == role for e in found.of(events.Fault)):
        killed.set()

  def held(island, batch, schedule_step, *rest):
    if schedule_step >= hold_at:
      killed.wait(SLOW_STEP_SECONDS)
    return step(island, batch, schedule_step, *rest)

  thread = threading.Thread(target=strike, name="strike")
  thread.start()
  try:
    with mock.patch.object(Island, "step", held):
      yield
  finally:
    over.set()
    thread.join()


LIBRARY = threading.__file__, queue.__file__, _base.__file__


class Interrupt:
  """A KeyboardInterrupt in this code, or in what that calls of Python's own waits: in each `with`
  block at the next place, until a block has none there (`missed`).

  So may Ctrl-C come, between any two lines. The start of a thread is left out, which is quick.
  """

  def __init__(self, code: CodeType):
    self._code, self._at, self._places, self.missed = code, 0, 0, False
    self._frames: list[FrameType] = []

  def __enter__(self) -> None:
    self._at, self._places, self._frames = self._at + 1, 0, []
    sys.settrace(self._trace)

  def __exit__(self, *_: object) -> None:
    sys.settrace(None)
    self.missed = self._places < self._at

  def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
    code = frame.f_code
    waits = code.co_filename in LIBRARY and code is not threading.Thread.start.__code__
    if code is not self._code and not (waits and frame.f_back in self._frames):
      return None
    self._frames.append(frame)
    self._places += 1
    if self._places == self._at:
      raise KeyboardInterrupt
    return self._trace
