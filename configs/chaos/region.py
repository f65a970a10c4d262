"""A region with two islands and a shard: cut off, and later lost altogether for a while.

Command:   ddiloco train --config=configs/quickstart.py --config.chaos=configs/chaos/region.py \\
             --workdir=runs/region [--engine=processes]
Expect:    while it is cut off its islands train on and merge with the shard they still reach; its
           shard's fragments wait. Nobody outside blocks for a moment; what the islands did alone is
           merged when the region is back.
"""

from __future__ import annotations

import ml_collections

from ddiloco import config


def get_config() -> ml_collections.ConfigDict:
  """The chaos section of a run with at least 4 learners and 2 shards."""
  c = config.default().chaos
  c.regions.east = ("learner/2", "learner/3", "syncer/1")
  c.faults = (
    {"action": "cut", "role": "region/east", "at_seconds": 10.0, "seconds": 10.0},
    {"action": "kill", "role": "region/east", "at_seconds": 40.0, "seconds": 5.0},
  )
  return c
