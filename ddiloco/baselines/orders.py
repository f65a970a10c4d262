"""What the supervisor and the islands' processes tell each other: a line of JSON each.

To an island, on its standard input: an `Order`, or END. Its end means: end, and everything of
yours. From an island, on its standard output: READY when it has imported what it needs, and the
number of the order whose process has ended.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

END, READY = "end", "ready"


@dataclasses.dataclass(frozen=True)
class Order:
  """Train in this world, until the next order. It ends the one before."""

  number: int  # counts the run's worlds
  rank: int
  size: int
  port: int
  started: float  # unix seconds; event times count from there
  state: str  # file to begin with
  step: int  # that it is after
  remember: bool  # keep every step for the next world, as an elastic island's memory does
  train: bool = True  # else only see that this world's program is there


class Lines:
  """Whole messages from pieces of a stream."""

  def __init__(self) -> None:
    self._rest = b""

  def take(self, data: bytes) -> list[Any]:
    """The messages that are complete with these bytes."""
    *lines, self._rest = (self._rest + data).split(b"\n")
    return [json.loads(line) for line in lines]


def line(message: Any) -> bytes:
  """A message as it travels."""
  return json.dumps(message).encode() + b"\n"


# --- Where data-parallel's state outlives a process: a file for each step that is kept
# WORKDIR/states/checkpoint is written every `sync.snapshot_steps`; WORKDIR/states/learner-M stands
# for the memory of an elastic island, which survives everything but the death of its own process.

CHECKPOINT = "checkpoint"
_DIGITS = 9


def folder(workdir: Path, name: str) -> Path:
  """Of the checkpoints, or of one island's memory ("learner-3")."""
  return workdir / "states" / name


def save(into: Path, step: int, arrays: Mapping[str, np.ndarray], durable: bool = False) -> None:
  """Keeps the state after `step` steps, whole or not at all, instead of the one before.

  `durable`: it is on the disk when this returns, as checkpoints are; a process's memory is not.
  """
  named: dict[str, Any] = dict(arrays)
  into.mkdir(parents=True, exist_ok=True)
  path = into / f"{step:0{_DIGITS}}.npz"
  mine = into / "new"
  with mine.open("wb") as file:
    np.savez(file, **named)
    if durable:
      file.flush()
      os.fsync(file.fileno())
  mine.replace(path)
  for old in into.glob("*.npz"):
    if old.name < path.name:
      old.unlink()


def load(path: Path) -> dict[str, np.ndarray]:
  """What `save` was given."""
  with np.load(path) as file:
    return {name: file[name] for name in file.files}


def newest(workdir: Path) -> tuple[int, Path]:
  """(step, file) of the newest state that any island has.

  Raises:
    FileNotFoundError: there is none.
  """
  found = list((workdir / "states").glob("*/*.npz"))
  if not found:
    raise FileNotFoundError(f"{workdir / 'states'}: holds no state to begin with")
  path = max(found, key=lambda path: path.name)
  return int(path.stem), path


def forget(into: Path) -> None:
  """Its owner is dead."""
  shutil.rmtree(into, ignore_errors=True)
