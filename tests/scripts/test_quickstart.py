"""scripts/quickstart.sh, with programs in its environment that only say what they are asked."""

import os
import subprocess
from pathlib import Path

from tests.scripts.commands import SCRIPTS


def started(venv: Path, *arguments: str) -> str:
  (venv / "bin").mkdir(parents=True)
  for name in ("python", "ddiloco"):
    (venv / "bin" / name).write_text('#!/bin/sh\necho "$(basename "$0") $*"\n')
    (venv / "bin" / name).chmod(0o755)
  command, env = ["bash", str(SCRIPTS / "quickstart.sh"), *arguments], {"VENV": str(venv)}
  done = subprocess.run(command, capture_output=True, text=True, env=os.environ | env)
  assert done.returncode == 0, done.stderr
  return done.stdout


def test_its_arguments_are_those_of_the_run_and_no_extra_to_install(tmp_path: Path):
  """A sourced script has the arguments of the one that sources it."""
  said = started(tmp_path / "an environment", "--config.data.path=a/*.txt").splitlines()
  (installs,) = (line for line in said if "pip install" in line)
  assert installs.endswith(" -e .")
  assert said[-1].startswith("ddiloco train --config=configs/quickstart.py ")
  assert said[-1].endswith(" --config.data.path=a/*.txt")
