"""All families of random worlds by one command, and one world again by its seed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.scripts import commands

SCRIPT = commands.SCRIPTS / "random_worlds.py"
FAMILIES = {"faults", "storms", "disasters", "endings", "liar", "supervisor", "algorithm"}


@pytest.mark.timeout(600)
def test_every_family_runs_and_says_what_struck():
  found = commands.result("random_worlds.py --seeds=4 --first=7")
  assert found["families"].keys() == FAMILIES
  assert (found["worlds"], found["failed"]) == (4 * len(FAMILIES), 0)
  for name, family in found["families"].items():
    assert (family["worlds"], family["failed"]) == (4, 0)
    assert len(family) > 5, f"{name} does not say what happened"
  again = commands.result("random_worlds.py --seeds=4 --first=7 --family=storms --processes=1")
  assert _happened(again) == _happened(found), "other processes, the same worlds"


def _happened(found: dict) -> dict:
  return {k: v for k, v in found["families"]["storms"].items() if k != "seconds"}


def test_a_world_that_fails_is_named_and_the_others_still_judged():
  code = f"""
import collections, runpy, sys
from tests.protocol import storms
def check(seed):
  assert seed != 5, "no commits"
  return collections.Counter(kill=1)
storms.check = check
sys.path.insert(0, {str(SCRIPT.parent)!r})
sys.argv = ["random_worlds.py", "--family=storms", "--first=3", "--seeds=4", "--processes=1"]
import concurrent.futures
concurrent.futures.ProcessPoolExecutor = concurrent.futures.ThreadPoolExecutor
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""
  done = subprocess.run(
    [sys.executable, "-c", code],
    capture_output=True, text=True, timeout=100, cwd=commands.SCRIPTS.parent,
  )  # fmt: skip
  assert done.returncode == 1, done.stderr
  named, last = done.stdout.splitlines()
  assert named == "storms: world 5: AssertionError('no commits')"
  family = json.loads(last)["families"]["storms"]
  assert (family["worlds"], family["failed"], family["kill"]) == (4, 1, 3)
