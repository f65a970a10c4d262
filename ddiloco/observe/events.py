"""Every role writes what happens to it as JSON lines: WORKDIR/events/{role}.jsonl.

A line is one event: {"time": seconds since the run started, "role", "incarnation", "kind", ...}.
Writing is append-only and whole lines at a time, so several incarnations of a role may share a
file; what a kill tears is skipped (and counted) by `read_events`. JSON has no NaN: on disk a number
that is not finite is the string "nan", "inf" or "-inf", and `read_events` makes it a float again.

| role      | kinds                                                                    |
|-----------|--------------------------------------------------------------------------|
| learner-M | started, restored, compiled, joined, step, cut, resend, push, stage,     |
|           | apply, recorded, saved, unsaved, donated, inherited, no_donor, refused,  |
|           | ignored, stopped, crash, traffic                                         |
| syncer-S  | started, owns, member, round, commit, abandoned, recalled, recorded,     |
|           | saved, unsaved, snapshot, uncommitted, ignored, unreplicated,            |
|           | replicated, lost, crash, traffic                                         |
| evaluator | started, joined, stage, apply, evaluation, stopped, crash, traffic       |
| engine    | run_started, compiled, fault, exit, restart, run_finished                |
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ddiloco.observe.drain import Drain, warn

Event = dict[str, Any]
Listener = Callable[[Event], None]

FLUSH_SECONDS = 1.0
IMPORTANT = frozenset(  # on disk at once, since a kill often follows
  {"started", "restored", "joined", "stopped", "refused", "recalled", "crash", "member"}
  | {"snapshot", "unsaved", "fault", "exit", "restart", "run_started", "run_finished"}
)
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class Recorder:
  """Records the events of one incarnation of one role.

  `event` only queues (a few microseconds, never I/O); a background thread writes about once a
  second, at once after an important kind, and at `close`. A full disk or a denied path is one
  warning on stderr, the events are counted in `lost_events`, and the run goes on. Listeners get the
  same dict on the calling thread: they must be quick and must not change it; one that raises is
  warned about and dropped. Field values are plain Python or NumPy scalars, not changed afterwards.
  """

  def __init__(
    self,
    workdir: str | os.PathLike[str],
    role: str,
    incarnation: int,
    start_time: float,
    clock: Callable[[], float] = time.monotonic,
    listeners: Iterable[Listener] = (),
  ):
    """`start_time`: what `clock` showed when the run started, in seconds."""
    self.role = role
    self.incarnation = incarnation
    self.path = Path(workdir) / "events" / f"{role}.jsonl"
    self._start_time = start_time
    self._clock = clock
    self._listeners = tuple(listeners)
    self._file: int | None = None
    self._torn = False  # the last write stopped inside a line
    self._unwritten = 0
    self._warned = False
    self._drain = Drain(f"events of {role}", self._write, FLUSH_SECONDS)

  def event(self, kind: str, **fields: Any) -> None:
    """Queues one event. Never blocks, never raises."""
    event: Event = {
      "time": round(self._clock() - self._start_time, 6),
      "role": self.role,
      "incarnation": self.incarnation,
      "kind": kind,
      **fields,
    }
    self._drain.put(event)
    for listener in self._listeners:
      try:
        listener(event)
      except Exception as error:
        self._listeners = tuple(each for each in self._listeners if each is not listener)
        warn(f"{self.role}: a listener of its events failed and is dropped: {error!r}")
    if kind in IMPORTANT:
      self._drain.wake()

  def flush(self) -> None:
    """Waits until what happened so far is in the file: before others hear of what follows from it.

    A stuck disk is waited for a second at most: then a crash may leave a gap in the log.
    """
    self._drain.flush()

  @property
  def lost_events(self) -> int:
    """Events that will never be in the file: disk full, path denied, or recorded after `close`."""
    return self._unwritten + self._drain.lost

  def close(self) -> None:
    """Writes what is queued and closes the file. Events recorded later count as lost."""
    self._drain.close()
    if self._file is not None and not self._drain.running:
      os.close(self._file)
      self._file = None

  def __enter__(self) -> Recorder:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def _write(self, batch: list[Event]) -> None:
    """On the background thread: the whole batch in one append."""
    if not batch:
      return
    data = "".join([to_line(event) for event in batch]).encode()
    written = 0
    try:
      if self._file is None:
        self._file = self._open()
      if self._torn:  # on a line of its own, or it would spoil the next one
        data = b"\n" + data
      written = os.write(self._file, data)
      if written < len(data):
        raise OSError(f"only {written} of {len(data)} bytes were written (is the disk full?)")
      self._torn = False
    except OSError as error:
      self._torn = self._torn or written > 0
      self._unwritten += len(batch) - data[:written].lstrip(b"\n").count(b"\n")
      if not self._warned:
        warn(f"cannot write {self.path}: {error}. The run goes on without these events.")
      self._warned = True

  def _open(self) -> int:
    self.path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    size = os.fstat(file).st_size
    self._torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
    return file


class NullRecorder:
  """Records nothing; for tests and for code that runs without a workdir."""

  role = "null"
  incarnation = 0
  lost_events = 0

  def __enter__(self) -> NullRecorder:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def event(self, kind: str, **fields: Any) -> None:
    """Forgets the event."""

  def flush(self) -> None:
    """Nothing to write."""

  def close(self) -> None:
    """Nothing to close."""


class EventLog(list[Event]):
  """Events in order of time; `torn_lines` counts lines that could not be read."""

  def __init__(self, events: Iterable[Event] = (), torn_lines: int = 0):
    super().__init__(events)
    self.torn_lines = torn_lines


def read_events(workdir: str | os.PathLike[str]) -> EventLog:
  """All events of all roles under WORKDIR/events, sorted by time. No folder: no events."""
  events: list[Event] = []
  torn = 0
  for path in sorted((Path(workdir) / "events").glob("*.jsonl")):
    for line in path.read_bytes().split(b"\n"):
      if not line:
        continue
      event = parse_line(line)
      if event is None:
        torn += 1
      else:
        events.append(event)
  events.sort(key=lambda event: event["time"])  # stable: a role's own order survives equal times
  return EventLog(events, torn)


def parse_role(role: str) -> tuple[str, int]:
  """("learner", 2) of "learner-2" or "learner/2"; a role without a number gets -1."""
  kind, _, number = role.replace("/", "-").partition("-")
  return kind, int(number) if number.isdigit() else -1


def to_line(event: Event) -> str:
  """One line of a log, with its end."""
  try:
    return _encode(event) + "\n"
  except (TypeError, ValueError):  # not finite, or nothing JSON knows: the slow way
    return _encode(finite(event)) + "\n"


def _scalar(value: Any) -> Any:
  """What JSON does not know: NumPy scalars as numbers, anything else as text."""
  if isinstance(value, (set, frozenset)):
    return sorted(value, key=str)
  item = getattr(value, "item", None)
  if item is not None and getattr(value, "size", 1) == 1:
    return item()
  return str(value)


_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=_scalar).encode


def finite(value: Any) -> Any:
  """A copy that JSON can say: "nan", "inf" and "-inf" for numbers that are not finite."""
  if isinstance(value, dict):
    return {str(key): finite(each) for key, each in value.items()}
  if isinstance(value, (list, tuple)):
    return [finite(each) for each in value]
  if not isinstance(value, (str, int, float, type(None))):
    value = _scalar(value)
  if isinstance(value, float) and not math.isfinite(value):
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
  return value


def _restore(value: Any) -> Any:
  if isinstance(value, dict):
    return {key: _restore(each) for key, each in value.items()}
  if isinstance(value, list):
    return [_restore(each) for each in value]
  return _NOT_FINITE.get(value, value) if isinstance(value, str) else value


def parse_line(line: bytes) -> Event | None:
  """The event of one line of a log, without its end; None if it is not one, such as a torn one."""
  try:
    event = json.loads(line)
  except ValueError:
    return None
  if not isinstance(event, dict) or not isinstance(event.get("time"), (int, float)):
    return None
  if not isinstance(event.get("kind"), str) or not isinstance(event.get("role"), str):
    return None
  return _restore(event) if b'"nan"' in line or b'inf"' in line else event
