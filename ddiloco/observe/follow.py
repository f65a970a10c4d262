"""Follows the event logs of a run while other processes write them."""

from __future__ import annotations

import os
from pathlib import Path

from ddiloco.observe.events import Event, parse_line


class Follower:
  """Reads WORKDIR/events/*.jsonl as they grow: each whole line once, also of files that are new.

  A line is read when its end is there; what a kill has torn is counted in `torn_lines` as soon as
  somebody writes after it. A file that shrank was replaced, and is read from its start.
  """

  def __init__(self, workdir: str | os.PathLike[str]):
    self.torn_lines = 0
    self._folder = Path(workdir) / "events"
    self._read: dict[Path, int] = {}  # bytes, up to the end of a line

  def poll(self) -> list[Event]:
    """What was written since the last poll, in order of time (of one poll: roles flush late)."""
    events: list[Event] = []
    # shards before learners: whoever reads of a commit also reads of the pushes in it
    for path in sorted(self._folder.glob("*.jsonl"), reverse=True):
      for line in self._new_lines(path):
        event = parse_line(line)
        if event is None:
          self.torn_lines += 1
        else:
          events.append(event)
    events.sort(key=lambda event: event["time"])  # stable: a role's own order survives
    return events

  def _new_lines(self, path: Path) -> list[bytes]:
    start = self._read.get(path, 0)
    try:
      file = path.open("rb")
    except FileNotFoundError:
      return []  # gone since the folder was listed
    with file:
      if os.fstat(file.fileno()).st_size < start:
        start = 0
      file.seek(start)
      data = file.read()
    whole = data.rfind(b"\n") + 1
    self._read[path] = start + whole
    return [line for line in data[:whole].split(b"\n") if line]
