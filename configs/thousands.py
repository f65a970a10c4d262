"""Thousands of islands in virtual time: two generations of chips, stragglers, failures, links.

Command:   ddiloco simulate protocol --config=configs/thousands.py --parameters=100000000 \\
             --gbps=5 --latency_ms=30 --shard_gbps=10000 --merge_gbytes=400000
           Not for training. `configs/thousands.py:300` does the same with 300 islands.
Hardware:  one core, 1 GiB.
Time:      2 to 6 minutes of CPU for 2000 islands, 10 s for 200.
Setting:   2000 islands, a third of them half as fast as the others, one in a hundred eight times
           slower. Two shards of a hundred thousand cores each, with links to match, so that the
           shards do not limit the run.
Failures:  kills by a Poisson process, one per island in five minutes; a killed island is away for
           ten seconds; a region of twenty islands loses its links for ten seconds; of three others
           one has slow links, one loses messages, and one stands still; a shard dies.
Numbers:   docs/results.md, "Thousands of islands". Nothing is trained, so there is no loss.
"""

from __future__ import annotations

import dataclasses

import ml_collections

from ddiloco import config
from ddiloco.chaos import random_kills

STEPS = 60  # of an island of the fast kind: a second each
MEAN_SECONDS_BETWEEN_KILLS = 300.0  # of one island
DOWN_SECONDS = 10.0


def get_config(learners: str = "2000") -> ml_collections.ConfigDict:
  """The run, to be frozen by `config.from_dict`."""
  count = int(learners)
  c = config.default()
  c.islands.num_learners = count
  c.islands.batch_size = 4
  c.islands.min_step_seconds = 1.0
  c.islands.overrides = {
    str(m): {"min_step_seconds": 8.0 if m % 100 == 50 else 2.0}
    for m in range(count)
    if m % 3 == 0 or m % 100 == 50
  }
  c.sync.sync_period = 8
  c.sync.snapshot_steps = 20
  c.run.total_tokens = STEPS * count * 4 * 128 * 2 // 3  # a third of islands is slow, some are down
  east = range(count // 2, count // 2 + count // 100)
  c.chaos.regions = {"east": tuple(f"learner-{m}" for m in east)}
  kills = random_kills("thousands", count / MEAN_SECONDS_BETWEEN_KILLS, STEPS, count, DOWN_SECONDS)
  c.chaos.faults = (
    *(dataclasses.asdict(kill) for kill in kills),
    {"action": "cut", "role": "region-east", "at_seconds": 20.0, "seconds": 10.0},
    {"action": "throttle", "role": "learner-7", "at_seconds": 10.0, "bits_per_second": 1e8},
    {"action": "drop", "role": "learner-8", "at_seconds": 10.0, "seconds": 20.0, "share": 0.2},
    {"action": "stall", "role": "learner-9", "at_seconds": 15.0, "seconds": 10.0},
    {"action": "kill", "role": "syncer-1", "at_seconds": 30.0, "seconds": 2.0},
  )
  return c
