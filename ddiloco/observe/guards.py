"""Observing a run never ends it: printing and duties may fail, and a queue's thread does the I/O.

Waits have limits, and loops that hang are noticed.
"""

from __future__ import annotations

import atexit
import dataclasses
import math
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

from ddiloco.protocol import events

if TYPE_CHECKING:
  from ddiloco.observe.eventlog import Records


def say(line: str, stream: TextIO | None = None) -> None:
  """Prints one line on stdout, or `stream`; ignores a stream that is closed, broken or full."""
  try:
    print(line, file=stream, flush=True)
  except (OSError, ValueError, AttributeError):
    return


def warn(text: str) -> None:
  """Prints one WARNING line on stderr; never raises."""
  say(f"ddiloco: WARNING: {text}", sys.stderr)


class Warnings:
  """Warns of each thing once."""

  def __init__(self) -> None:
    self._said: dict[Any, object] = {}

  def __call__(self, about: Any, text: str) -> None:
    mine = object()
    if self._said.setdefault(about, mine) is mine:  # of threads that warn of it at once only one
      warn(text)

  def over(self, about: Any) -> None:
    """That is over: if it comes again, it is warned of again."""
    self._said.pop(about, None)


class Guard:
  """Calls the duties of a loop that must not end.

  An exception of a duty is warned about once for each kind of exception, and the duty is called
  again in its next turn: a disk that was full may have room then.

  Args:
    who: the loop's name, for the warning.
  """

  def __init__(self, who: str):
    self._who, self._warn = who, Warnings()

  def __call__(self, duty: Callable[..., Any], *arguments: Any, instead: Any = None) -> Any:
    """What `duty(*arguments)` returns; `instead` if it fails."""
    try:
      return duty(*arguments)
    except Exception as error:
      name = getattr(duty, "__name__", str(duty)).strip("_")
      text = f"{self._who}: {name} failed, which is said once; it goes on"
      self._warn((name, type(error)), f"{text}\n{traceback.format_exc()}")
      return instead


AFTER_CLOSE_SECONDS = 600.0  # that the thread of a `Drain` goes on trying


class Drain:
  """Hands what was `put` to `consume`, in order and in batches, on its own daemon thread.

  `consume` is called about every `interval_seconds`, at once after `wake`, and a last time by
  `close`; the batch may be empty. What it returns comes again, before newer items. Its exceptions
  are counted in `failures`, the first is printed: observing a run must never end it. More than
  `capacity` waiting items are dropped, and counted in `dropped` (a stuck or full disk must not fill
  the memory); so are items after `close`, without a count.
  """

  def __init__(
    self,
    name: str,
    consume: Callable[[list[Any]], list[Any] | None],
    interval_seconds: float = 1.0,
    capacity: int = 100_000,
  ):
    self.failures = self.dropped = 0
    self._left: list[Any] = []  # what `consume` returned
    self._name = name
    self._consume = consume
    self._interval_seconds = interval_seconds
    self._capacity = capacity
    self._items: deque[Any] = deque()
    self._wake = threading.Event()
    self._closed = self._consuming = False
    self._flushed: deque[threading.Event] = deque()  # set after the turn that takes them
    self._thread = threading.Thread(target=self._run, name=name, daemon=True)
    self._thread.start()
    atexit.register(self.close)

  def put(self, item: Any) -> None:
    """Queues an item: no lock, no I/O, any thread."""
    if self._closed:
      return
    if len(self._items) + len(self._left) < self._capacity:
      self._items.append(item)
    else:
      self.dropped += 1

  @property
  def left(self) -> int:
    """The number of items that `consume` has returned."""
    return len(self._left)

  @property
  def running(self) -> bool:
    """Whether the thread is still at work (after `close`: stuck in a write)."""
    return self._thread.is_alive()

  def wake(self) -> None:
    """Asks for the next batch to be consumed now."""
    self._wake.set()

  def flush(self, timeout_seconds: float = 1.0) -> bool:
    """Waits until `consume` has had what is queued now; False if a stuck disk takes longer."""
    done = threading.Event()
    self._flushed.append(done)
    self._wake.set()
    return not self.running or done.wait(timeout_seconds) or not self.running

  def close(self, timeout_seconds: float = 5.0) -> None:
    """Consumes what is left and ends the thread; waits at most this long for a full or stuck disk.
    The thread goes on trying for a while, and a process that ends in good order waits once more."""
    self._closed = True
    self._wake.set()
    self._thread.join(timeout_seconds)
    if not self.running:
      atexit.unregister(self.close)
    elif self._consuming:  # else there is no room, which `consume` has said
      _too_long(self._name, timeout_seconds)

  def _run(self) -> None:
    last, until = False, math.inf
    while not last or (self._left and time.monotonic() < until):
      self._wake.wait(self._interval_seconds)
      if self._closed and not last:  # read before the queue is emptied: no item put before is left
        last, until = True, time.monotonic() + AFTER_CLOSE_SECONDS
      self._wake.clear()
      flushed = [self._flushed.popleft() for _ in range(len(self._flushed))]
      self._left += [self._items.popleft() for _ in range(len(self._items))]  # all put before those
      self._try()
      for done in flushed:
        done.set()

  def _try(self) -> None:
    self._consuming = True
    try:
      self._left = self._consume(self._left) or []
    except Exception:
      self._left = []
      self.failures += 1
      if self.failures == 1:
        warn(f"{self._name} failed; the run goes on\n{traceback.format_exc()}")
    self._consuming = False


# --- Waits: each has a limit, a name, and a line that says that the limit was exceeded

LOOK_SECONDS = 0.01
JOIN_SECONDS = 0.2


def ended(thread: threading.Thread, seconds: float) -> bool:
  """Whether a thread has ended within so long; if not, says so and leaves it running.

  It looks again and again: Python hears Ctrl-C between two waits only, if the kernel gives the
  signal to another thread than the main one.
  """
  until = time.monotonic() + seconds
  while thread.is_alive() and (left := until - time.monotonic()) > 0:
    thread.join(min(left, JOIN_SECONDS))
  if thread.is_alive():
    _too_long(thread.name, seconds)
  return not thread.is_alive()


def exited(poll: Callable[[], int | None], seconds: float, what: str) -> int | None:
  """The exit status of a process, from its `poll`; if it has not ended within so long, says so and
  returns None."""
  until = time.monotonic() + seconds
  while (status := poll()) is None:
    if time.monotonic() >= until:
      _too_long(what, seconds)
      return None
    time.sleep(LOOK_SECONDS)
  return status


def _too_long(what: str, seconds: float) -> None:
  warn(f"{what} has not ended within {seconds:g} s and is waited for no longer. The rest goes on.")


# --- Notices that a role's loop hangs, and prints once where all threads of its process are
# In each turn of its loop the role only notes the time (`HangWatch.beat`). Another thread checks
# that time now and then (`HangWatch.look`). What follows from a hang, its caller decides.

HANG_STEPS = 20.0  # a loop hangs if a turn takes longer than this, and than run.hang_seconds
FIRST_STEP_SECONDS = 60.0  # a learner's usual step until it is known: first ones load programs
PAUSED_SECONDS = 5.0  # between two looks; after more, the whole process was paused, not a role
LATE_SECONDS = 2.0  # the least for that limit, which a short run.hang_seconds lowers
MOST_CHARACTERS = 40_000  # of stacks; a process may have thousands of threads


@dataclasses.dataclass
class _Watched:
  thread: int  # its identity
  at: float  # when its loop's last turn began
  usual_seconds: float | None = 0.0
  told: bool = False


class HangWatch:
  """Watches the loops of the roles of one process.

  Args:
    least_seconds: a shorter turn of a loop is no hang; 0: nothing is reported.
    record: returns the recorder of the events; called each time, since roles have several lives.
    clock: seconds.
    seen: what is seen of the thread that a loop is on; None: the stacks of this process.
  """

  def __init__(
    self,
    least_seconds: float,
    record: Callable[[], Records],
    clock: Callable[[], float] = time.monotonic,
    seen: Callable[[int], str] | None = None,
  ):
    self._least_seconds = least_seconds
    self._record = record
    self._clock = clock
    self._seen = seen or stacks
    self._paused_seconds = max(LATE_SECONDS, min(PAUSED_SECONDS, least_seconds))
    self._watched: dict[str, _Watched] = {}
    self._looked_at = clock()

  def beat(self, role: str, usual_seconds: float | None) -> None:
    """A turn of the role's loop begins, on the calling thread. The role is watched from now on.

    `usual_seconds`: of one step, None before it is known; 0 of a role without steps.
    """
    now = self._clock()
    watched = self._watched.setdefault(role, _Watched(threading.get_ident(), now))
    watched.at, watched.usual_seconds = now, usual_seconds

  def end(self, role: str) -> None:
    """The role is not watched any more."""
    self._watched.pop(role, None)

  def look(self) -> dict[str, float]:
    """Reports loops that hang, each once until its next turn; returns how long each is silent."""
    now, hanging = self._clock(), dict[str, float]()
    paused = now - self._looked_at > self._paused_seconds
    self._looked_at = now
    for role, watched in list(self._watched.items()):
      if paused:  # SIGSTOP, or a laptop that slept: the role's silence is no hang
        watched.at = now
      usual = FIRST_STEP_SECONDS if watched.usual_seconds is None else watched.usual_seconds
      silent = now - watched.at
      if not self._least_seconds or silent <= max(self._least_seconds, HANG_STEPS * usual):
        watched.told = False
        continue
      hanging[role] = silent
      if not watched.told:
        watched.told = True
        self._tell(role, watched, silent)
    return hanging

  def _tell(self, role: str, watched: _Watched, silent: float) -> None:
    found, usual = self._seen(watched.thread), round(watched.usual_seconds or 0.0, 6)
    hung = events.Hung(target=role, seconds=round(silent, 3), usual_seconds=usual, stacks=found)
    self._record().record(hung)
    say(f"ddiloco: {role} has not come round for {silent:.0f} s. Its threads:\n{found}", sys.stderr)


def stacks(first: int = 0) -> str:
  """The Python stack of every thread of this process, that of thread `first` first.

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
