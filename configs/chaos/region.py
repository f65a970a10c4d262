"""A region with two islands and a shard: cut off, and later lost altogether for a while.

Command:   ddiloco train --config=configs/quickstart.py --workdir=runs/lost_region \\
             --config.chaos=configs/chaos/region.py:0.2 --cpu [--engine=processes]
           `:1`, the default, cuts at 10 s and kills at 40 s: for runs of over a minute.
Expect:    while the region is cut off, its islands train on and merge with shard 1, which is in the
           region. Islands outside miss the rounds of shard 1, but none of them blocks. What the
           region's islands trained alone is merged when the region is back.
"""

from __future__ import annotations

import ml_collections

from ddiloco import config


def get_config(scale: str = "1") -> ml_collections.ConfigDict:
  """The chaos section of a run with at least 4 learners and 2 shards; all times times `scale`."""
  of = float(scale)
  c = config.default().chaos
  c.regions.east = ("learner-2", "learner-3", "syncer-1")
  c.faults = (
    {"action": "cut", "role": "region-east", "at_seconds": 10.0 * of, "seconds": 10.0 * of},
    {"action": "kill", "role": "region-east", "at_seconds": 40.0 * of, "seconds": 5.0 * of},
  )
  return c
