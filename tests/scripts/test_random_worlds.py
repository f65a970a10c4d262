"""All families of random worlds by one command, and one world again by its seed."""

from __future__ import annotations

import concurrent.futures
import json

from tests.scripts import commands

FAMILIES = {"faults", "storms", "disasters", "endings", "liar", "supervisor", "algorithm"}


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


def test_a_world_that_fails_is_named_and_the_others_still_judged(script, monkeypatch, capsys):
  def check(seed):
    if seed == 5:
      raise AssertionError("no commits")
    return {"kill": 1}

  worlds, threads = script("random_worlds"), concurrent.futures.ThreadPoolExecutor
  monkeypatch.setitem(worlds.FAMILIES, "storms", check)
  monkeypatch.setattr(concurrent.futures, "ProcessPoolExecutor", threads)
  arguments = "--family=storms", "--first=3", "--seeds=4", "--processes=1"
  assert commands.status(worlds, monkeypatch, *arguments) == 1
  named, last = capsys.readouterr().out.splitlines()
  assert named == "storms: world 5: AssertionError('no commits')"
  family = json.loads(last)["families"]["storms"]
  assert (family["worlds"], family["failed"], family["kill"]) == (4, 1, 3)
