"""The directory that is a run's identity. Knows no JAX: it is asked before devices exist."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import shutil
import time
from pathlib import Path

from ddiloco.config import Config, ConfigError, from_dict

OUTCOME = "outcome.json"  # what the report knows beside the events
STARTED = "started"  # when the run began, unix seconds: the zero of all its event times
COMPILED = "compiled"  # programs, for learners that start again
OURS = (
  *("alone", COMPILED, "events", "logs", "tensorboard", "report", "result"),
  *(OUTCOME, STARTED, "config.json"),
)
# What each role of a run may have its own way; all the rest of the config must be the same.
FREE_SECTIONS = ("islands", "network", "run", "chaos")


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


def join(workdir: Path, config: Config) -> float:
  """Enters the workdir of a run that several processes share, on one machine or one file system.

  Whoever comes first leaves its config and the time; restarted roles find them again.

  Returns:
    When the run began, in unix seconds; event times count from there.

  Raises:
    ConfigError: the directory cannot be written, or holds a run with another config.
  """
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    _write_once(workdir / "config.json", config.to_json() + "\n")
    _write_once(workdir / STARTED, f"{time.time()}\n")
    started = float((workdir / STARTED).read_text())
  except (OSError, ValueError) as error:
    raise ConfigError(
      f"--workdir={workdir}: cannot be used ({error}). Fix: choose a directory you may write to,"
      " or an empty one."
    ) from error
  _refuse_another(workdir, config, saved_config(workdir))
  return started


def _write_once(path: Path, text: str) -> None:
  """Writes a new file, whole or not at all; one that is there stays as it is."""
  if path.exists():
    return
  mine = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
  mine.write_text(text)
  try:
    os.link(mine, path)
  except FileExistsError:
    return  # somebody was quicker: theirs counts
  finally:
    mine.unlink()


def _refuse_another(workdir: Path, mine: Config, saved: Config) -> None:
  """Every field outside `FREE_SECTIONS`, and the length of the run, must be as saved."""
  pairs = [("run.total_tokens", mine.run.total_tokens, saved.run.total_tokens)]
  for field in dataclasses.fields(Config):
    ours, theirs = getattr(mine, field.name), getattr(saved, field.name)
    if field.name in FREE_SECTIONS:
      continue
    if not dataclasses.is_dataclass(ours):
      pairs.append((field.name, ours, theirs))
      continue
    for inner in dataclasses.fields(ours):
      name = inner.name
      pairs.append((f"{field.name}.{name}", getattr(ours, name), getattr(theirs, name)))
  for name, ours, theirs in pairs:
    if ours != theirs:
      raise ConfigError(
        f"{name} = {ours!r}: the run in --workdir={workdir} has {theirs!r}. Fix: use the same"
        f" --config (--config={workdir / 'config.json'} is it), or another --workdir."
      )
