"""What is asked of a run while it goes on: lines of JSON in a file of its workdir.

Write access to the file is enough to ask. The process that can do what is asked for reads it now
and then.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from ddiloco.config import ConfigError
from ddiloco.observe.guards import warn

T = TypeVar("T")
# A file may hold anything: brackets in brackets, numbers without an end.
_NO_REQUEST = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)


def append_request(path: Path, fields: Mapping[str, Any]) -> None:
  """Asks now.

  Raises:
    OSError: the line cannot be written.
  """
  line = json.dumps({"time": time.time(), **fields}) + "\n"  # unix seconds
  file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
  try:
    os.write(file, line.encode())  # in one piece, even if others write
  finally:
    os.close(file)


class RequestFile(Generic[T]):
  """Reads what is asked for.

  Args:
    path: of the file.
    parse: makes a request of a line's fields, without its time.
    what: it asks for, in a word, for warnings.
    news_only: not what is there already.
  """

  def __init__(
    self,
    path: Path,
    parse: Callable[[dict[str, Any]], T],
    what: str,
    news_only: bool = False,
  ):
    self._path, self._parse, self._what = path, parse, what
    self._at = path.stat().st_size if news_only and path.exists() else 0

  def poll(self) -> Iterator[tuple[float, T]]:
    """(when it was asked for in unix seconds, the request) of every line since the last time."""
    try:
      with self._path.open("rb") as file:
        file.seek(self._at)
        *lines, _ = file.read().split(b"\n")  # the last is still being written, or empty
    except FileNotFoundError:
      return
    for line in lines:
      self._at += len(line) + 1
      try:
        fields = json.loads(line)
        when = float(fields.pop("time"))
        yield when, self._parse(fields)
      except (ConfigError, *_NO_REQUEST) as error:
        warn(f"{self._path}: a line asks for no {self._what} ({error}). It is ignored.")
