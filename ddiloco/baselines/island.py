"""One island of data-parallel as the supervisor sees it: its process, over all its lives."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from ddiloco import nursery
from ddiloco.baselines.orders import END, READY, Lines, Order, line
from ddiloco.config import Fault
from ddiloco.resilience import chaos


class IslandProcess:
  """`now` is `time.monotonic()` everywhere.

  Attributes:
    ready: it has imported what it needs and waits for orders.
    order: the number of the order that its child is at, -1: none.

  Args:
    number: of the learner.
    workdir: its output is appended to WORKDIR/logs/learner-NUMBER.log.
    faults: planned for it; kills only.
  """

  def __init__(self, number: int, workdir: Path, faults: Sequence[Fault]):
    self.number = number
    self.name = f"learner/{number}"
    self.lives = 0
    self.ready = False
    self.order = -1
    self.gone = False  # never comes back
    self._log = workdir / "logs" / f"learner-{number}.log"
    self._command = [
      *(sys.executable, "-m", "ddiloco.baselines.member"),
      *(f"--workdir={workdir}", f"--learner={number}"),
    ]
    self._faults = tuple(faults)
    self._process: nursery.Forked | None = None
    self._lines = Lines()
    self._start_at = 0.0

  @property
  def alive(self) -> bool:
    return self._process is not None

  def due_to_start(self, now: float) -> bool:
    """Whether it is down and its pause is over."""
    return not self.alive and not self.gone and now >= self._start_at

  def start(self) -> None:
    """A new life, in a process group of its own: a kill takes its child as well."""
    self._log.parent.mkdir(parents=True, exist_ok=True)
    self._process = nursery.spawn(self._command, self._log, answers=True)
    os.set_blocking(self._stream("stdout").fileno(), False)
    self.lives += 1

  def strike(self, clock: int, seconds: float) -> Fault | None:
    """The next planned kill if it is due; the caller performs it. One that is dead waits for it."""
    if not self.alive:
      return None
    fault, self._faults = chaos.strike(self._faults, clock, seconds)
    return fault

  def kill(self, back_at: float) -> None:
    """SIGKILL for the whole island; it may start again at `back_at`."""
    if self._process is None:
      return
    with contextlib.suppress(ProcessLookupError):  # it has ended by itself
      os.killpg(self._process.pid, signal.SIGKILL)
    self._process.kill()  # too young to have a group
    self.bury(back_at)

  def bury(self, back_at: float) -> int:
    """Its process has ended, or will in a moment; returns the exit status."""
    assert self._process is not None
    status = self._process.wait()
    self._stream("stdin").close()
    self._stream("stdout").close()
    self._process, self._lines = None, Lines()
    self.ready, self.order, self._start_at = False, -1, back_at
    return status

  def died(self) -> bool:
    """Whether its process has ended and nobody has been told yet."""
    return self._process is not None and self._process.poll() is not None

  def tell(self, order: Order | None) -> None:
    """A new order, None: only end the one before. One that dies at this moment hears nothing."""
    message = END if order is None else vars(order)
    try:
      os.write(self._stream("stdin").fileno(), line(message))
    except BrokenPipeError:
      return  # `died` will say so
    if order is not None:
      self.order = order.number

  def hear(self) -> bool:
    """Takes in what it has said; whether the child of its order has ended meanwhile."""
    try:
      data = b"" if self._process is None else os.read(self._stream("stdout").fileno(), 4096)
    except BlockingIOError:
      data = b""
    ended = False
    for message in self._lines.take(data):
      if message == READY:
        self.ready = True
      elif message == self.order:
        self.order, ended = -1, True
    return ended

  def last_words(self) -> str:
    """The end of its log, for errors."""
    return self._log.read_text(errors="replace")[-2000:] if self._log.exists() else ""

  def _stream(self, name: str) -> Connection:
    stream = getattr(self._process, name)
    assert stream is not None
    return stream
