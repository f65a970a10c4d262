"""Islands and shards killed one after the other, and once a learner and a shard together.

Command:   ddiloco train --config=configs/quickstart.py --config.chaos=configs/chaos/kills.py \\
             --workdir=runs/kills --config.run.total_tokens=4000000 --cpu [--engine=processes]
Expect:    every role back and merged again within seconds of its restart (the report's timeline),
           blocked_seconds 0, and the loss of an undisturbed run.
"""

from __future__ import annotations

import ml_collections

from ddiloco import config


def get_config() -> ml_collections.ConfigDict:
  """The chaos section of a run with at least 4 learners and 2 shards."""
  c = config.default().chaos
  c.faults = (
    {"action": "kill", "role": "learner-1", "at_seconds": 10.0, "seconds": 2.0},
    {"action": "kill", "role": "syncer-0", "at_seconds": 20.0, "seconds": 2.0},
    {"action": "kill", "role": "learner-2", "at_seconds": 30.0, "seconds": 2.0},
    {"action": "kill", "role": "learner-3", "at_seconds": 40.0, "seconds": 5.0},
    {"action": "kill", "role": "syncer-1", "at_seconds": 40.0, "seconds": 2.0},
  )
  return c
