"""Every role writes what happens to it as JSON lines: WORKDIR/events/{role}.jsonl.

A line is one event of `protocol/events.py`. Whole lines are appended, so several incarnations of a
role may share a file; `read_events` skips (and counts) a line torn by a kill. The first event of an
incarnation says the log's format; a log of another format is refused.
"""

from __future__ import annotations

import bisect
import fnmatch
import heapq
import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from ddiloco.checks import Unanswered, refusal
from ddiloco.config import ConfigError
from ddiloco.observe.guards import Drain, Warnings, warn
from ddiloco.protocol import events
from ddiloco.protocol.events import Event

# --- Lines of log files of any length and content: read in blocks, no file stays open

PIECE_BYTES = 1 << 15  # of each log in memory at a time
SCAN_BYTES = 1 << 20
MOST_LINE_BYTES = 4 << 20  # of an event; a commit of 2,000 participants has 0.2 MB
DAMAGED = b"\0"  # replaces a line longer than MOST_LINE_BYTES; does not decode to an event


class LogPart(NamedTuple):
  """The bytes `start` to `end` of a log, which are whole lines, but for the last of a file."""

  path: Path
  start: int
  end: int


def lines_of(path: Path, start: int, end: int) -> Iterator[tuple[int, bytes]]:
  """The lines in the bytes `start` to `end`, without their ends, each with the place where the next
  one begins; the last may lack its end."""
  held, too_long, at = b"", False, start
  while piece := _read(path, start, min(end, start + PIECE_BYTES)):
    start += len(piece)
    *whole, held = (held + piece).split(b"\n")
    for line in whole:
      at += len(line) + 1
      yield at, DAMAGED if too_long else line
      too_long = False
    if too_long or len(held) > MOST_LINE_BYTES:
      at += len(held)
      held, too_long = b"", True
  if too_long or held:
    yield start, DAMAGED if too_long else held


def _lines_back(path: Path, start: int, end: int) -> Iterator[bytes]:
  """These lines, the last one first; of one longer than MOST_LINE_BYTES only a part."""
  rest = b""
  while end > start:
    first = max(start, end - SCAN_BYTES)
    rest, *whole = (_read(path, first, end) + rest).split(b"\n")
    yield from reversed(whole)
    rest = rest if len(rest) <= MOST_LINE_BYTES else b""
    end = first
  yield rest


def _read(path: Path, start: int, end: int) -> bytes:
  """The bytes that exist of this range; the file is opened for each call: there may be many."""
  try:
    with path.open("rb", buffering=0) as file:
      file.seek(start)
      return file.read(max(0, end - start)) or b""
  except FileNotFoundError:
    return b""  # gone since the folder was listed


# --- The format of a log: its kinds of events and their fields


def check_format(path: Path) -> None:
  """Refuses (ConfigError) a log that another version of ddiloco has begun: its first event says
  another format than `events.LOG_FORMAT`, or none. A torn first line is accepted."""
  try:
    size = path.stat().st_size if path.is_file() else 0
    _, first_line = next(lines_of(path, 0, size), (0, b""))
    first = events.decode(first_line)
  except OSError:
    return  # the reader of the log reports this
  if first is not None and first.format != events.LOG_FORMAT:
    said = f"format {first.format}" if first.format else "a format without a number"
    raise ConfigError(
      f"{path}: is an event log of {said}, this version of ddiloco has format"
      f" {events.LOG_FORMAT}. Fix: read it with the version that wrote it, or give a new --workdir."
    )


def to_line(event: Event, begins: bool = False) -> bytes:
  """One line of a log, with its newline; `begins`: the first of an incarnation says the format."""
  if begins:
    event = msgspec.structs.replace(event, format=events.LOG_FORMAT)
  return events.encode(event) + b"\n"


Listener = Callable[[Event], None]
E = TypeVar("E", bound=Event)

FLUSH_SECONDS = 1.0
APPENDED = 256  # events at most in one append: while a disk is full, each attempt encodes so many


class Records(Protocol):
  """Takes a role's events: a `Recorder`, or a substitute for one."""

  def record(self, event: Event) -> None:
    """Takes an event; does not wait."""

  def flush(self) -> None:
    """Waits until all earlier events are in the log, for a second at most."""


class Recorder:
  """Records the events of one incarnation of one role.

  `record` only queues (a few microseconds, never I/O); a background thread writes about once a
  second, at once after an important kind, and at `close`. If the disk is full or the path denied,
  one warning goes to stderr, and the run goes on: events wait in memory until they can be written.
  Those beyond the capacity of a `Drain` are lost, and the log says how many (`Dropped`, by the role
  itself). Listeners get the same event on the calling thread: they must be quick; a listener that
  raises is dropped with a warning. An event's values are plain Python or NumPy scalars, not changed
  afterwards.

  Raises:
    ConfigError: the role's log in this workdir is of another format.
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
    self._begins = True  # the next event says the format
    # Where whole lines end, and where a part of a line may end that a full disk has cut off.
    self._whole = self._most = 0
    self._lost, self._failure = 0, "the disk hung"  # lost events that the log tells of, and why
    self._warn = Warnings()
    check_format(self.path)
    self._drain = Drain(f"events of {role}", self._write, FLUSH_SECONDS)

  def record(self, event: Event) -> None:
    """Queues one event, with time, role and incarnation filled in. Never blocks, never raises."""
    time = self._clock() - self._start_time
    event = events.stamped(event, time, self.role, self.incarnation)
    self._drain.put(event)
    for listener in self._listeners:
      try:
        listener(event)
      except Exception as error:
        self._listeners = tuple(each for each in self._listeners if each is not listener)
        warn(f"{self.role}: a listener of its events failed and is dropped: {error!r}")
    if type(event) in events.IMPORTANT:
      self._drain.wake()

  def flush(self) -> None:
    """Waits until all events so far are in the file, so that the log is ahead of what is sent.

    If the disk is stuck, the wait ends after a second: a crash may then leave a gap in the log.
    """
    if self._drain.flush():
      return self._warn.over("slow")
    text = f"{self.path}: is written too slowly to wait for. A crash may leave a gap in it."
    self._warn("slow", text)

  def close(self) -> None:
    """Writes what is queued, if need be later, while this process lives. Events recorded later are
    lost."""
    self._drain.close()
    if left := self._drain.left:
      said = f"{left} events could not be written yet; they are lost if this process ends."
      self._warn("left", f"{self.path}: {said}")

  def __enter__(self) -> Recorder:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def _write(self, batch: list[Event]) -> list[Event]:
    """On the background thread; returns the events that cannot be written now."""
    if not batch:
      return []
    try:
      while batch:
        del batch[: self._append(batch[:APPENDED])]
      if lost := self._drain.dropped - self._lost:
        said = events.Dropped(peer=self.role, count=lost, reason=self._failure)
        now = self._clock() - self._start_time
        self._append([events.stamped(said, now, self.role, self.incarnation)])
        self._lost += lost
      self._warn.over("unwritten")
    except OSError as error:
      self._begins = True  # it may be another file that is there next time
      self._failure = str(error)
      text = f"cannot write {self.path}: {error}. The run goes on, and tries again."
      self._warn("unwritten", text)
    return batch

  def _append(self, batch: list[Event]) -> int:
    """Appends events; returns how many are written, at least one. A full disk tears no line.

    The file is opened each time: a handle may become stale, and its file may be deleted.
    """
    self.path.parent.mkdir(parents=True, exist_ok=True)
    with self.path.open("a+b", buffering=0) as file:
      if not (size := file.tell()):  # a new file
        self._begins = True
        if self._most:  # it has been written
          gone = "was deleted while its run goes on, perhaps with all of the workdir"
          self._warn("gone", f"{self.path}: {gone}. What it had is lost; a new log begins.")
      elif self._whole < size <= self._most:
        size = file.truncate(self._whole)
      lines = self._lines(batch)
      # Ends a line that a kill has torn, or it would spoil the first new one.
      torn = int(size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n")
      written = os.write(file.fileno(), b"\n" * torn + b"".join(lines))
      self._whole, self._most = size, size + written  # over NFS `close` may fail
    ends = [*itertools.accumulate(map(len, lines), initial=torn)]
    if not (done := max(0, bisect.bisect(ends, written) - 1)):
      raise OSError(f"only {written} of {ends[-1]} bytes were written (is the disk full?)")
    self._whole += ends[done]
    self._begins = self._begins and not any(lines[:done])
    return done

  def _lines(self, batch: list[Event]) -> list[bytes]:
    """Encodes each event on its own: if one fails, to b"", the others are still written."""
    lines: list[bytes] = []
    for event in batch:
      try:
        lines.append(to_line(event, self._begins and not any(lines)))
      except Exception as error:
        lines.append(b"")
        text = f"an event {event.kind!r} cannot be put into words: {error!r}. It is lost."
        self._warn("odd", f"{self.path}: {text}")
    return lines


class EventLog(list[Event]):
  """Events in order of time; `torn_lines` counts lines that could not be read."""

  def __init__(self, events: Iterable[Event] = (), torn_lines: int = 0):
    super().__init__(events)
    self.torn_lines = torn_lines

  def of(self, kind: type[E], role: str = "") -> list[E]:
    """The events of a kind, from roles whose names begin with `role`."""
    return [e for e in self if isinstance(e, kind) and e.role.startswith(role)]


class EventStream:
  """The events that all roles have written under WORKDIR/events by now, in order of time.

  They are read as they are iterated over, in memory that is bounded by the number of roles, not by
  the length of the run. Events of a role stay in order: if its clock is set back, they count as of
  the newest time before. No folder: no events.

  Attributes:
    torn_lines: unreadable lines so far.

  Raises:
    ConfigError: a log is of another format.
  """

  def __init__(self, workdir: str | os.PathLike[str]):
    self.torn_lines = 0
    self._logs = logs_in(workdir)

  def __iter__(self) -> Iterator[Event]:
    return self._merged(LogPart(path, 0, path.stat().st_size) for path in self._logs)

  def _merged(self, parts: Iterable[LogPart]) -> Iterator[Event]:
    timed = [self._timed(i, part) for i, part in enumerate(parts)]
    return (event for _, _, event in heapq.merge(*timed))

  def _timed(self, i: int, part: LogPart) -> Iterator[tuple[float, int, Event]]:
    at, newest = part.start, -math.inf
    try:
      for after, line in lines_of(*part):
        at = after
        event = events.decode(line)
        if event is None:
          self.torn_lines += bool(line)
          continue
        newest = max(newest, event.time)
        yield newest, i, event
    except OSError as error:
      self._failed(part._replace(start=at), error)

  def _failed(self, part: LogPart, error: OSError) -> None:
    """What cannot be read of a part; if it returns, the others go on."""
    raise error


def logs_in(workdir: str | os.PathLike[str]) -> list[Path]:
  """The logs under WORKDIR/events, each of this version's format.

  Raises:
    ConfigError: one is of another format, or the folder cannot be listed.
  """
  paths = [path for path in _all_logs(workdir) if path.is_file()]
  for path in paths:
    check_format(path)
  return paths


def _all_logs(workdir: str | os.PathLike[str], roles: str = "*") -> list[Path]:
  """The logs of all roles whose names match, in order; `glob` would find none in a folder that
  cannot be listed.

  Raises:
    Unanswered: the folder is there and cannot be listed.
  """
  folder = Path(workdir) / "events"
  try:
    names = sorted(fnmatch.filter(os.listdir(folder), f"{roles}.jsonl"))
  except (FileNotFoundError, NotADirectoryError):
    return []
  except OSError as error:
    rule, fix = f"its events cannot be listed ({error})", f"make {folder} readable"
    raise refusal("--workdir", str(workdir), rule, fix, Unanswered) from error
  return [folder / name for name in names]


def read_events(workdir: str | os.PathLike[str]) -> EventLog:
  """All events of a run at once, for runs that fit into memory (1 to 2 kB an event)."""
  stream = EventStream(workdir)
  events = list(stream)
  return EventLog(events, stream.torn_lines)


# --- The newest event of a kind, searched from the end of a log


def newest_event(workdir: str | os.PathLike[str], kind: type[E], roles: str = "*") -> E | None:
  """The newest event of this kind of all roles whose name matches; None if there is none.

  Raises:
    OSError: logs are there and cannot be read.
    ConfigError: a log is of another format.
  """
  found = [_newest(path, kind) for path in _all_logs(workdir, roles)]
  return max((e for e in found if e is not None), key=lambda e: e.time, default=None)


def _newest(path: Path, kind: type[E]) -> E | None:
  check_format(path)
  tag = kind.__struct_config__.tag
  wanted = f'"kind":"{tag}"'.encode()  # as `encode` writes it; inside a string \" would be escaped
  for line in _lines_back(path, 0, path.stat().st_size):
    if wanted in line and isinstance(event := events.decode(line), kind):
      return event
  return None


# --- Follows the event logs of a run while other processes write them


class Follower(EventStream):
  """Reads the logs as they grow: each whole line once, including those of new files.

  Each time it is iterated over it has the events since the last time; roles flush late, so later
  ones may be earlier. Those that are not taken from it do not come again.

  A line is read when its end is there; a line torn by a kill is counted in `torn_lines` as soon as
  more is written after it. A file that shrank was replaced, and is read from its start. A file that
  cannot be read now does not hold up the others: reading resumes later, where it stopped.

  Attributes:
    unread: the logs that could not be read the last time, and why.
  """

  def __init__(self, workdir: str | os.PathLike[str]):
    super().__init__(workdir)
    self._workdir = workdir
    # By file: bytes given out, up to the end of a line; its size then.
    self._read: dict[Path, tuple[int, int]] = {}
    self._late: list[LogPart] = []  # parts that could not be read yet
    self.unread: dict[Path, OSError] = {}
    self._warn = Warnings()

  def __iter__(self) -> Iterator[Event]:
    return self._merged(self._new())

  def poll(self) -> list[Event]:
    """All of them at once."""
    return list(self)

  def skip(self) -> None:
    """Skips all that is written by now, without reading it."""
    self._new()

  def _failed(self, part: LogPart, error: OSError) -> None:
    if part.end > part.start:
      self._late.append(part)
    self.unread[part.path] = error
    text = f"{part.path}: cannot be read now ({error}). It is tried again, the other logs are read."
    self._warn(part.path, text)

  def _new(self) -> list[LogPart]:
    """The parts with new lines, and those that could not be read before."""
    logs = _all_logs(self._workdir)
    found, self._late, self.unread = self._late, [], {}
    waiting = {part.path for part in found}  # newer lines of these files wait for the older ones
    # Sizes of shards' logs before those of learners: no commit is read without its pushes. That of
    # an engine whose start is known before all: it tells of an end after what has ended.
    known = {path for path in self._read if path.stem == "engine"}
    order = sorted({*logs} - waiting, key=lambda path: (path in known, path), reverse=True)
    for path in order:
      start, seen = self._read.get(path, (0, 0))
      try:
        size = path.stat().st_size
        if size < start:
          start, seen = self._read[path] = 0, 0  # also if it cannot be read now
        end = size - len(next(_lines_back(path, seen, size)))
        self._warn.over(path)
      except FileNotFoundError:
        continue  # gone since the folder was listed
      except OSError as error:
        self._failed(LogPart(path, start, start), error)
        continue
      if end > seen:
        found.append(LogPart(path, start, end))
        start = end
      self._read[path] = start, size
    return sorted(found)


class GrowingLog:
  """The log of a run under way, in memory, for callers that read all of it again and again."""

  def __init__(self, workdir: str | os.PathLike[str]):
    self._follower, self._events = Follower(workdir), EventLog()

  def read(self) -> EventLog:
    """All events that are written by now."""
    self._events += self._follower.poll()
    self._events.sort(key=lambda e: e.time)
    self._events.torn_lines = self._follower.torn_lines
    return self._events
