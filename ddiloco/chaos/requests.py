"""Faults that are asked for while a run goes on: lines of WORKDIR/faults.jsonl.

Write access to that file is enough to ask: the dashboard does, a person, and a supervisor without
another way into a role's process. The supervisor performs what is done to roles and logs all; a
role performs what happens inside it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from ddiloco.checks import build
from ddiloco.config import ConfigError, Fault
from ddiloco.observe.guards import warn
from ddiloco.workdir import FAULTS


def ask_for(workdir: Path, fault: Fault) -> None:
  """Asks for a fault now, whatever it says about when.

  Raises:
    OSError: the line cannot be written.
  """
  fields = {**dataclasses.asdict(fault), "at_step": -1, "at_seconds": 0.0}
  line = json.dumps({"time": time.time(), **fields}) + "\n"  # unix seconds
  file = os.open(workdir / FAULTS, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
  try:
    os.write(file, line.encode())  # in one piece, even if others write
  finally:
    os.close(file)


# A file may hold anything: brackets in brackets, numbers without an end.
_NO_FAULT = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)


class FaultRequests:
  """Reads what is asked for, from the beginning of the file or only what comes later."""

  def __init__(self, workdir: Path, news_only: bool = False):
    self._path = workdir / FAULTS
    self._at = self._path.stat().st_size if news_only and self._path.exists() else 0

  def poll(self) -> Iterator[tuple[float, Fault]]:
    """(when it was asked for in unix seconds, the fault) of every line since the last time."""
    try:
      with self._path.open("rb") as file:
        file.seek(self._at)
        lines = file.read().splitlines(keepends=True)
    except FileNotFoundError:
      return
    for line in lines:
      if not line.endswith(b"\n"):
        return  # still being written
      self._at += len(line)
      try:
        fields = json.loads(line)
        when = float(fields.pop("time"))
        yield when, build(Fault, {"at_seconds": 0.0, **fields}, "faults.jsonl")
      except (ConfigError, *_NO_FAULT) as error:
        warn(f"{self._path}: a line asks for no fault ({error}). It is ignored.")
