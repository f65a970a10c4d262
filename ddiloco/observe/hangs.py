"""Notices that a role's loop stands still, and says once where all threads of its process are.

The role only leaves the time behind, each time its loop comes round (`HangWatch.beat`). Who looks
after the role looks at that now and then. Nothing is ended: the step may still go on.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
import traceback
from collections.abc import Callable

from ddiloco.observe.eventlog import Records
from ddiloco.observe.guards import say
from ddiloco.protocol import events

HANG_STEPS = 20.0  # a loop that takes so many usual steps, and run.hang_seconds, hangs
PAUSED_SECONDS = 5.0  # between two looks; after more the process itself stood still, and no role
LATE_SECONDS = 2.0  # a short limit makes that shorter, but so late may a look be always
MOST_CHARACTERS = 40_000  # of stacks; a process may have thousands of threads


@dataclasses.dataclass
class _Watched:
  thread: int  # its identity
  at: float  # when its loop came round
  told: bool = False


class HangWatch:
  """The roles of one process.

  Args:
    least_seconds: no loop hangs before; 0: none ever does.
    usual: seconds of a usual step of a role, 0 before it is known.
    record: what takes the events; asked for each time, since roles have several lives.
    clock: seconds.
  """

  def __init__(
    self,
    least_seconds: float,
    usual: Callable[[str], float],
    record: Callable[[], Records],
    clock: Callable[[], float] = time.monotonic,
  ):
    self._least_seconds = least_seconds
    self._usual = usual
    self._record = record
    self._clock = clock
    self._paused_seconds = max(LATE_SECONDS, min(PAUSED_SECONDS, least_seconds))
    self._watched: dict[str, _Watched] = {}
    self._looked_at = clock()

  def beat(self, role: str) -> None:
    """The role's loop has come round, on the thread that says so. It is watched from now on."""
    watched = self._watched.get(role)
    if watched is None:
      self._watched[role] = _Watched(threading.get_ident(), self._clock())
    else:
      watched.at = self._clock()

  def end(self, role: str) -> None:
    """It is not watched any more."""
    self._watched.pop(role, None)

  def look(self) -> None:
    """Says what hangs: once, until the loop has come round."""
    now = self._clock()
    paused = now - self._looked_at > self._paused_seconds
    self._looked_at = now
    for role, watched in list(self._watched.items()):
      if paused:  # SIGSTOP, or a laptop that slept: what the role did not do then says nothing
        watched.at = max(watched.at, now)
      silent, usual = now - watched.at, self._usual(role)
      if not self._least_seconds or silent <= max(self._least_seconds, HANG_STEPS * usual):
        watched.told = False
      elif not watched.told:
        watched.told = True
        self._tell(role, watched, silent, usual)

  def _tell(self, role: str, watched: _Watched, silent: float, usual: float) -> None:
    found = stacks(watched.thread)
    self._record().record(
      events.Hung(
        target=role,
        seconds=round(silent, 3),
        usual_seconds=round(usual, 6),
        stacks=found,
      )
    )
    say(f"ddiloco: {role} has not come round for {silent:.0f} s. Its threads:\n{found}", sys.stderr)


def stacks(first: int = 0) -> str:
  """Where every thread of this process is, in Python; that of thread `first` comes first.

  Threads with the same stack are named together.
  """
  names = {thread.ident: thread.name for thread in threading.enumerate()}
  alike: dict[str, list[str]] = {}
  frames = sys._current_frames()
  for ident in sorted(frames, key=lambda ident: ident != first):
    text = "".join(traceback.format_stack(frames[ident]))
    alike.setdefault(text, []).append(names.get(ident, f"thread {ident}"))
  text = "\n".join(f"{', '.join(who)}:\n{stack}" for stack, who in alike.items())
  if len(text) > MOST_CHARACTERS:
    text = f"{text[:MOST_CHARACTERS]}\n... and {len(text) - MOST_CHARACTERS:,} characters more"
  return text
