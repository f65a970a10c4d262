"""A run as its workdir tells it, read by a thread of its own."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddiloco.config import Config, ConfigError
from ddiloco.engines.workdir import OUTCOME, STARTED, saved_config
from ddiloco.observe.drain import warn
from ddiloco.observe.events import Event
from ddiloco.observe.follow import Follower
from ddiloco.observe.status import Board
from ddiloco.runtime.health import Health

POLL_SECONDS = 1.0
FRESH_SECONDS = 0.5  # a status is made anew when somebody asks and it is older than that
BATCH_EVENTS = 500  # entered at once; whoever asks meanwhile waits for no more


class FollowedRun:
  """Follows WORKDIR/events from `start` to `close`.

  A run that replaces the one in the workdir is noticed and followed from its start.
  """

  def __init__(self, workdir: Path):
    self.workdir = workdir
    self.health = Health()
    self._lock = threading.Lock()
    self._ended = threading.Event()
    self._thread = threading.Thread(target=self._follow, name="dashboard", daemon=True)
    self._status: tuple[float, dict[str, Any]] | None = None  # when it was made
    self._begin(None)

  def start(self) -> None:
    """Reads from now on."""
    self._thread.start()

  def close(self) -> None:
    """Reads no more."""
    self._ended.set()
    self._thread.join(timeout=5)

  def status(self) -> dict[str, Any]:
    """How the run stands now, at most half a second old; nobody may change it."""
    with self._lock:
      now = time.monotonic()
      if self._status is None or now - self._status[0] >= FRESH_SECONDS:
        self._status = now, self._make()
      return self._status[1]

  def has(self, role: str) -> bool:
    """Whether the run has this role, "learner/2" or "syncer/0"."""
    kind, _, number = role.partition("/")
    with self._lock:
      members = {"learner": self._board.view.islands, "syncer": self._board.view.shards}
      return number.isdecimal() and int(number) in members.get(kind, {})

  def _make(self) -> dict[str, Any]:
    board, started = self._board, self._started
    now = board.view.time if started is None else time.time() - started
    status = board.status(now, self._reason) | {"odd_events": self._odd}
    if not self._caught_up and board.num_events:
      text = f"The log is being read: {board.num_events:,} events so far."
      status |= {"phase": "empty", "text": text}
    return status | {"name": status["name"] or self.workdir.absolute().name}

  def _begin(self, started: float | None) -> None:
    config = _config(self.workdir)
    with self._lock:
      self._started, self._config_known = started, config is not None
      self._follower, self._board = Follower(self.workdir), Board(config)
      self._odd, self._caught_up, self._reason = 0, False, ""
      self._status = None

  def _follow(self) -> None:
    while not self._ended.is_set():
      self.health.beat()
      try:
        self._look()
      except OSError as error:  # a file system that is away for a while
        self.health.not_ready(str(error))
      self._ended.wait(POLL_SECONDS)

  def _look(self) -> None:
    started = _started(self.workdir)
    if started != self._started or not (self._config_known or self._board.num_events):
      self._begin(started)
    events = self._follower.poll()
    for i in range(0, len(events), BATCH_EVENTS):
      with self._lock:
        self._enter(events[i : i + BATCH_EVENTS])
      self.health.beat()
      if self._ended.wait(0.001):  # lets those in who ask
        return
    reason = _reason(self.workdir)
    with self._lock:
      self._caught_up, self._reason = True, reason

  def _enter(self, events: Sequence[Event]) -> None:
    for event in events:
      try:
        self._board.add(event)
      except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        if not self._odd:  # of another version, or damaged: shown as a number on the page
          warn(f"dashboard: an event {event['kind']!r} cannot be read and is left out: {error!r}")
        self._odd += 1


def _config(workdir: Path) -> Config | None:
  try:
    return saved_config(workdir)
  except ConfigError:
    return None  # not there yet, or of another version: the events still tell the most


def _started(workdir: Path) -> float | None:
  try:
    return float((workdir / STARTED).read_text())
  except (FileNotFoundError, NotADirectoryError, ValueError):
    return None


def _reason(workdir: Path) -> str:
  """Why the run ended, as whoever left its result says; "" before that."""
  try:
    return str(json.loads((workdir / OUTCOME).read_text()).get("reason", ""))
  except (FileNotFoundError, NotADirectoryError, ValueError, AttributeError):
    return ""  # a file that is being written is read again soon
