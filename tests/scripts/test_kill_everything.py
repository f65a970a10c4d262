"""A few kills of everything: what the script with fifty of them promises."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nothing_is_lost_or_counted_twice_when_all_are_killed(tmp_path):
  arguments = ["--kills=3", "--steps=120", "--seed=2", "--undisturbed=1", "--engine=processes"]
  command = [sys.executable, str(ROOT / "scripts" / "kill_everything.py"), *arguments]
  clean = {k: v for k, v in os.environ.items() if k not in ("NPROC", "XLA_FLAGS")}
  done = subprocess.run(
    [*command, f"--workdir={tmp_path}"], capture_output=True, text=True, env=clean, timeout=880
  )
  assert done.returncode == 0, done.stdout + done.stderr
  result = json.loads(done.stdout.splitlines()[-1])
  assert result["finished"] and result["kills"] >= 2 and result["snapshots"] > 0
  assert result["versions_back"] == result["counted_twice"] == result["problems"] == 0
  (undisturbed,) = result["loss_undisturbed"]
  assert abs(result["loss"] - undisturbed) < 0.8 and max(result["loss"], undisturbed) < 5.5
