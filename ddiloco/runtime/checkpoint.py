"""The result of a run as an Orbax checkpoint that needs nothing of ddiloco to be read."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp

from ddiloco.config import ConfigError


def save_params(path: str | os.PathLike, params: dict[str, np.ndarray]) -> Path:
  """Writes the flat tree name -> f32 array; atomic, replaces what was there."""
  path = Path(path).absolute()
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(path, params, force=True)
  return path


def load_params(path: str | os.PathLike) -> dict[str, np.ndarray]:
  """The tree that `save_params` wrote.

  Raises:
    ConfigError: nothing there, or not a complete checkpoint.
  """
  path = Path(path).absolute()
  if not path.exists():
    raise ConfigError(f"workdir result {path}: does not exist. Fix: finish a run in it first.")
  try:
    with ocp.StandardCheckpointer() as checkpointer:
      restored = checkpointer.restore(path)
  except Exception as error:
    raise ConfigError(
      f"checkpoint {path}: cannot be read ({type(error).__name__}: {error})."
      " Fix: run the training again, or point --workdir at another run."
    ) from error
  return {name: np.asarray(value) for name, value in restored.items()}
