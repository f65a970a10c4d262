"""Disks are lost: what learners or buddies have comes back, or the run is refused by name.

Real processes and signals around toy islands; checkpoints are in a folder that all roles share.
"""

from __future__ import annotations

import shutil
import signal

import pytest

from ddiloco.trace.check import check
from ddiloco.trace.text import read_trace
from tests.engines.toy_world import World
from tests.roles import toy
from tests.waits import wait_for

pytestmark = pytest.mark.slow
LEARNERS = 2
SHARDS = ["syncer-0", "syncer-1"]
KILL = signal.SIGKILL


@pytest.fixture
def world(tmp_path):
  config = toy.config(
    LEARNERS,
    600,
    num_shards=2,
    num_fragments=4,
    sync_period=12,
    liveness_seconds=1.0,
    min_quorum=LEARNERS,
    snapshot_steps=60,
  )
  with World(tmp_path, config) as world:
    world.begin()
    world.wait_for("snapshot", "syncer-0")
    world.wait_for("snapshot", "syncer-0", after=next(world.find("snapshot")).time)
    yield world


def lose_disk(tmp_path) -> None:
  """At once, since those that live may be writing to it."""
  (tmp_path / "checkpoints").rename(tmp_path / "lost")
  shutil.rmtree(tmp_path / "lost", ignore_errors=True)


def test_total_loss_of_one_shards_disk_and_its_copies_loses_nothing(world, tmp_path):
  """Both shards die, so that each one's copies go with the other, and no checkpoint is left.

  The learners live: all values come back from them, and the run ends with status 0.
  """
  at = world.send(KILL, *SHARDS)
  lose_disk(tmp_path)
  for name in SHARDS:
    world.wait_for("regained", name, at)
  world.wait(
    "all fragments",
    lambda: {e.fragment for e in world.find("regained", after=at)} == {*range(4)},
  )
  assert set(world.wait_end().values()) == {0}
  for name in SHARDS:
    said = world.roles[name].said()
    assert "has nothing of fragments" in said and "up to number" in said
  assert not any(world.find("lost")), "nobody had more than came back"
  assert not check(read_trace(tmp_path)).problems


def test_one_shard_alone_loses_its_disk_and_has_all_from_its_buddy(world, tmp_path):
  at = world.send(KILL, "syncer-1")
  lose_disk(tmp_path)
  world.wait_for("started", "syncer-1", at)
  world.wait_for("commit", "syncer-1", at)
  assert "has from its buddy: fragments" in world.roles["syncer-1"].said()
  assert set(world.wait_end().values()) == {0}


def test_a_fresh_empty_shard_is_never_the_source_of_truth_and_a_copy_of_checkpoints_is(
  world, tmp_path
):
  """All die and the checkpoints are gone: a named refusal, and nothing begins anew.

  Who kept a copy of them goes on after it.
  """
  world.may_fail |= set(SHARDS)
  everybody = [*SHARDS, *(f"learner-{m}" for m in range(LEARNERS))]
  at = world.send(KILL, *everybody)
  for name in everybody:
    wait_for(lambda name=name: world.roles[name].process.poll() is not None, name)
  shutil.copytree(tmp_path / "checkpoints", tmp_path / "copy")
  lose_disk(tmp_path)
  world.wait("the refusal", lambda: any(world.roles[name].status == 1 for name in SHARDS))
  (refused, *_) = [name for name in SHARDS if world.roles[name].status == 1]
  said = world.roles[refused].said()
  assert "anew in the middle of the run" in said and "up to number" in said
  assert str(tmp_path / "checkpoints") in said and "Fix: bring the checkpoints back" in said
  lives = {e.time for e in world.find("started", after=at)}
  assert lives and not any(world.find("commit", after=min(lives)))
  assert not any(world.find("snapshot", after=min(lives)))

  shutil.copytree(tmp_path / "copy", tmp_path / "checkpoints", dirs_exist_ok=True)
  for name in everybody:
    if world.roles[name].status is None:
      world.send(KILL, name)
  world.wait("their ends", lambda: all(r.process.poll() is not None for r in world.roles.values()))
  for name in SHARDS:
    if world.roles[name].status == 1:
      world.start(name, f"--bind={world.urls[int(name[-1])]}")
  restarted = world.wait_for("started", "syncer-0", at)
  world.wait(
    "both from a snapshot",
    lambda: all("has from snapshot" in world.roles[name].said() for name in SHARDS),
  )
  world.wait_for("commit", "syncer-0", restarted.time)
