"""A script of the project as a user runs it: `python scripts/NAME ...`, or in this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import common
import pytest

# Unlike a test's own process most scripts make many steps: there LLVM's first level pays. Its other
# levels would take a minute to compile what then runs for seconds.
FIRST_LEVEL = "--xla_backend_optimization_level=1 --xla_llvm_disable_expensive_passes=true"
OPTIMIZED = {
  "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",
  "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {FIRST_LEVEL}",
}
SCRIPTS = Path(__file__).parent.parent.parent / "scripts"


def said(line: str, *arguments: str | Path, optimized: bool = True) -> str:
  """What `scripts/LINE ARGUMENTS` prints; it must end well, within the limit of its test.

  `optimized`: by LLVM; a script that makes few steps is through sooner without.
  """
  script, *words = line.split()
  command = [sys.executable, str(SCRIPTS / script), *words, *map(str, arguments)]
  env = os.environ | (OPTIMIZED if optimized else {})
  done = subprocess.run(command, capture_output=True, text=True, env=env)
  assert done.returncode == 0, f"status {done.returncode}:\n{done.stdout}{done.stderr}"
  return done.stdout


def status(module: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
  """The exit status of a script's module, which runs in this process."""
  monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *arguments])
  with pytest.raises(SystemExit) as ended:
    common.run_script(module.main)
  assert not isinstance(ended.value.code, str)
  return ended.value.code or 0


def last(printed: str) -> dict[str, Any]:
  """The JSON object in the last line of what a script has printed."""
  return json.loads(printed.splitlines()[-1])


def result(line: str, *arguments: str | Path, **how: Any) -> dict[str, Any]:
  """What `last` finds; `how`: see `said`."""
  return last(said(line, *arguments, **how))
