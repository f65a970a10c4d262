"""The directory that is a run's identity. Knows no JAX: it is asked before devices exist."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from ddiloco.config import Config, ConfigError, from_dict

OUTCOME = "outcome.json"  # what the report knows beside the events
OURS = ("alone", "events", "tensorboard", "report", "result", OUTCOME, "config.json")


def refuse_taken(workdir: Path, overwrite: bool) -> None:
  """Refuses a workdir that holds a run, unless told to replace it; changes nothing."""
  if (workdir / "config.json").exists() and not overwrite:
    raise ConfigError(
      f"--workdir={workdir}: already holds a run."
      " Fix: choose another directory, or add --overwrite to replace that run."
    )


def claim(workdir: Path, overwrite: bool) -> None:
  """Makes the workdir, without what an earlier run left there; foreign files stay."""
  refuse_taken(workdir, overwrite)
  try:
    if (workdir / "config.json").exists():
      for path in (workdir / name for name in OURS):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / "config.json").touch()
  except OSError as error:
    raise ConfigError(
      f"--workdir={workdir}: cannot be written ({error}). Fix: choose a directory you may write to."
    ) from error


def saved_config(workdir: Path) -> Config:
  """The config a run was started with.

  Raises:
    ConfigError: there is no run in `workdir`.
  """
  path = workdir / "config.json"
  try:
    return from_dict(json.loads(path.read_text()))
  except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
    raise ConfigError(
      f"--workdir={workdir}: holds no run ({error}). Fix: name the directory of a run."
    ) from error
