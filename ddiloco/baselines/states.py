"""Where data-parallel's state outlives a process: a file for each step that is kept.

WORKDIR/states/checkpoint is written every `sync.snapshot_steps`; WORKDIR/states/learner-M stands
for the memory of an elastic island, which survives everything but the death of its own process.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

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
  """(step, file) of the newest state that anybody has.

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
