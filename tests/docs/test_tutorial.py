"""Every command of the tutorial runs, in its order, and leaves what the text says."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts.commands import OPTIMIZED

ROOT = Path(__file__).parent.parent.parent
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text()
SECONDS = 300  # of one command, on a busy machine


def commands() -> list[list[str]]:
  """Those in blocks of bash; blocks of text need a person, or an installation."""
  blocks = re.findall(r"^```bash\n(.*?)^```", TUTORIAL, re.MULTILINE | re.DOTALL)
  lines = "".join(blocks).replace("\\\n", " ").splitlines()
  return [shlex.split(line, comments=True) for line in lines]


def test_every_page_it_points_to_is_there():
  pages = re.findall(r"\]\(([^)#]+)\)", TUTORIAL)
  assert pages
  for page in pages:
    assert (ROOT / "docs" / page).exists(), page


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_command_runs(tmp_path):
  said = {}
  for program, *arguments in commands():
    assert program == "ddiloco"
    arguments = [re.sub(r"\bruns/", f"{tmp_path}/runs/", a) for a in arguments]
    done = subprocess.run(
      [sys.executable, "-m", "ddiloco", *arguments],
      cwd=ROOT,
      env=os.environ | OPTIMIZED,
      capture_output=True,
      text=True,
      timeout=SECONDS,
    )
    assert done.returncode == 0, f"{arguments}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    said[arguments[0]] = done.stdout
  assert json.loads(said["replay"].splitlines()[-1])["identical"]
  results = {
    name: json.loads((tmp_path / "runs" / name / "report" / "summary.json").read_text())
    for name in ("one", "four", "kill", "region")
  }
  for name, summary in results.items():
    assert summary["loss_merged"] < 0.6 * summary["loss_untrained"], name
  assert (tmp_path / "runs" / "four.safetensors").exists()
  kill = (tmp_path / "runs" / "kill" / "events" / "engine.jsonl").read_text()
  assert '"kind":"fault"' in kill and '"kind":"restart"' in kill
  region = (tmp_path / "runs" / "region" / "events" / "engine.jsonl").read_text()
  for action in ("cut", "kill"):
    assert region.count(f'"action":"{action}"') == 3, "of two islands and a shard"
