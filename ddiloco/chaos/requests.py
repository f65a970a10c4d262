"""Faults that are asked for while a run goes on: lines of WORKDIR/faults.jsonl.

Write access to that file is enough to ask: the dashboard does, a person, and a supervisor without
another way into a role's process. The supervisor performs what is done to roles and logs all; a
role performs what happens inside it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from ddiloco.checks import build
from ddiloco.config import Fault
from ddiloco.observe.request_file import RequestFile, append_request
from ddiloco.workdir import FAULTS


def ask_for(workdir: Path, fault: Fault) -> None:
  """Asks for a fault now, whatever it says about when.

  Raises:
    OSError: the line cannot be written.
  """
  fields = {**dataclasses.asdict(fault), "at_step": -1, "at_seconds": 0.0}
  append_request(workdir / FAULTS, fields)


class FaultRequests(RequestFile[Fault]):
  """Reads what is asked for, from the beginning of the file or only what comes later."""

  def __init__(self, workdir: Path, news_only: bool = False):
    super().__init__(workdir / FAULTS, _fault, "fault", news_only)


def _fault(fields: dict[str, Any]) -> Fault:
  return build(Fault, {"at_seconds": 0.0, **fields}, "faults.jsonl")
