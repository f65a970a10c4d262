"""mypy finds nothing to object to in the packages that mypy.ini names, and in the scripts."""

import subprocess
import sys
from pathlib import Path


def test_types_hold():
  root = Path(__file__).parent.parent
  done = subprocess.run([sys.executable, "-m", "mypy"], capture_output=True, text=True, cwd=root)
  assert done.returncode == 0, f"{done.stdout}{done.stderr}"
