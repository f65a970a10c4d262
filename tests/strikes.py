"""Faults that wait for what they need, for tests of runs: an event instead of a guess at when."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
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
