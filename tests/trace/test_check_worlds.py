"""Random virtual runs as traces: storms, kills, restores of everybody; all invariants hold."""

from __future__ import annotations

import collections
import random

import pytest

from ddiloco.protocol.events import Event
from ddiloco.trace.check import check
from ddiloco.trace.operations import read_logs
from tests.protocol import storms


@pytest.mark.parametrize("block", range(4))
def test_the_tapes_of_random_worlds_hold(block):
  total = collections.Counter()
  for seed in range(block * 25, block * 25 + 25):
    snapshots = random.Random(seed).choice([0, 3, 8])
    world = storms.random_world(seed, snapshot_steps=snapshots)
    world.run(storms.STORM_SECONDS)
    if snapshots:
      world.restore_all()
      world.run(2 * storms.STORM_SECONDS)
    logs: dict[str, list[Event]] = collections.defaultdict(list)
    for _, actor, event in world.history:
      logs[actor.name].append(event)
    checked = check(read_logs(logs))
    assert not checked.problems, f"world {seed}, {world.sync}: {checked.problems[:5]}"
    total.update(checked.counts)
  assert min(total[name] for name in ("merged", "captured", "apply")) > 20, total
  assert total["restored"] > 5, total
