"""Runs as a user starts them, for the scripts beside this file: configs, commands, what is left."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddiloco import environment
from ddiloco import workdir as workdirs
from ddiloco.config import Config, from_dict
from ddiloco.observe.eventlog import EventLog, read_events
from ddiloco.protocol.events import RunFinished

ROOT = Path(__file__).resolve().parent.parent
SAID_CHARACTERS = 4000  # of the log of a run that failed
PROGRAM = (sys.executable, "-m", "ddiloco", "train")


def config_of(name: str, fields: Mapping[str, Any], *preset: str) -> Config:
  """configs/NAME.py with some fields changed, as {"sync.num_fragments": 6}."""
  values = runpy.run_path(str(ROOT / "configs" / f"{name}.py"))["get_config"](*preset)
  values.update_from_flattened_dict(dict(fields))
  return from_dict(values)


def log_of(workdir: Path) -> Path:
  """Where the output of all starts of a run is."""
  return workdir.with_name(f"{workdir.name}.log")


def start(config: Config, workdir: Path, *flags: str, cpu: bool = True) -> subprocess.Popen[bytes]:
  """`ddiloco train`, begun now; its config and output are beside `workdir`.

  `cpu`: on fake CPU devices.
  """
  workdir.parent.mkdir(parents=True, exist_ok=True)
  file = workdir.with_name(f"{workdir.name}.json")
  file.write_text(config.to_json())
  command = [*PROGRAM, f"--config={file}", f"--workdir={workdir}", *flags]
  command += ["--cpu"] if cpu else []
  with log_of(workdir).open("ab") as log:
    return subprocess.Popen(command, stdout=log, stderr=log, env=environment.bare())


def train(config: Config, workdir: Path, *flags: str) -> EventLog:
  """The events of a run that has ended well: an earlier one of the same config, or a new one."""
  outcome = workdir / workdirs.OUTCOME
  if not (outcome.exists() and workdirs.saved_config(workdir) == config):
    print(f"--- {workdir.name}: output in {log_of(workdir)}", flush=True)
    status = start(config, workdir, "--overwrite", *flags).wait()
    if status:
      said = log_of(workdir).read_text(errors="replace")[-SAID_CHARACTERS:]
      sys.exit(f"{workdir.name} failed with status {status}:\n{said}")
  return read_events(workdir)


def done_before(config: Config, workdir: Path) -> bool:
  """Whether a run of this config has ended in `workdir`, however it did; another one ends us."""
  if not read_events(workdir).of(RunFinished):
    return False
  if workdirs.saved_config(workdir) != config:
    sys.exit(f"{workdir}: holds another run. Fix: choose another --workdir.")
  print(f"{workdir.name}: done before, in {workdir}", flush=True)
  return True
