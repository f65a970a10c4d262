"""Compute that comes and goes: two islands join for a while, a third stays to the end.

Command:   ddiloco train --config=configs/quickstart.py --config.chaos=configs/chaos/scavenge.py \\
             --workdir=runs/scavenge --cpu [--engine=processes]
Expect:    learners 4, 5 and 6 in the report's timeline; the run ends sooner than without them.
"""

from __future__ import annotations

import ml_collections

from ddiloco import config


def get_config() -> ml_collections.ConfigDict:
  """The chaos section of a run that begins with 4 learners."""
  c = config.default().chaos
  c.faults = (
    {"action": "join", "role": "learner-4", "at_seconds": 5.0, "seconds": 20.0},
    {"action": "join", "role": "learner-5", "at_seconds": 10.0, "seconds": 20.0},
    {"action": "join", "role": "learner-6", "at_seconds": 15.0, "seconds": -1},
  )
  return c
