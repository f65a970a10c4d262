"""One member with a valid key floods a shard with control: the others' run goes on beside it."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddiloco.config import NetworkConfig
from ddiloco.core import fragments
from ddiloco.network.keys import make_keys
from tests.engines.toy_world import World
from tests.roles import toy

pytestmark = pytest.mark.slow

LEARNERS, FRAGMENTS, STEPS = 2, 2, 600
FLOOD_STEPS = 200  # of each of the others: 3 s and more
MOST_BYTES = 4 << 20  # that the shard may grow by meanwhile


@pytest.fixture
def world(tmp_path):
  config = toy.config(
    LEARNERS, STEPS, num_shards=1, num_fragments=FRAGMENTS, liveness_seconds=5.0, max_norm_ratio=1e9
  )
  network = {"hello_seconds": 0.2, "patience_seconds": 0.5, "drain_seconds": 10.0}
  network["silence_seconds"] = 10.0  # for which a shard keeps the end for who was lost: the flood
  config = dataclasses.replace(config, network=NetworkConfig(**network))
  keys = tmp_path / "keys"
  make_keys(keys, learners=LEARNERS + 1, shards=1)
  with World(tmp_path / "run", config, keys) as world:
    yield world


def resident_bytes(pid: int) -> int:
  fields = Path(f"/proc/{pid}/statm").read_text().split()
  return int(fields[1]) * 4096


def test_a_flood_of_control_from_a_listed_key_stops_nobody_and_fills_no_memory(world):
  world.begin()
  world.wait("commits by both", lambda: len(list(world.find("commit"))) >= 4)
  shard = world.roles["syncer-0"].process
  plan_id = fragments.make_plan(toy.SPECS, world.config.sync).plan_id
  flood = subprocess.Popen(
    [sys.executable, "-m", "tests.network.flood", world.urls[0], str(world.keys), "run", plan_id]
    + [str(LEARNERS), str(FRAGMENTS)],
    **{"stdout": subprocess.PIPE, "text": True},
  )
  try:
    sent = [int(flood.stdout.readline())]
    before, began = resident_bytes(shard.pid), time.time() - world._began
    most = before

    def flooded() -> bool:
      nonlocal most
      sent.append(int(flood.stdout.readline()))
      most = max(most, resident_bytes(shard.pid))
      made = [sum(1 for _ in world.find("step", f"learner-{m}", began)) for m in range(LEARNERS)]
      return min(made) > FLOOD_STEPS and sent[-1] > 10_000

    world.wait("steps of the others, and a flood", flooded)
    assert flood.poll() is None
    over = time.time() - world._began
  finally:
    flood.kill()
    flood.communicate()
  world.wait("commits after it", lambda: len(list(world.find("commit", after=over))) >= 4)
  during = [e for e in world.find("commit", after=began) if e.time < over]
  shares = [sum(m in e.learners for e in during) for m in range(LEARNERS)]
  print(f"{sent[-1]} messages, {len(during)} commits {shares}, {most - before} bytes more")
  assert min(shares) >= 3, "commits with each of the others, while it lasted"
  assert most - before < MOST_BYTES
  assert world.wait_end() == dict.fromkeys(world.roles, 0)
  for m in range(LEARNERS):
    assert not any(world.find("member", "syncer-0", learner=m, state="lost")), "it was heard"
