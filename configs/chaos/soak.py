"""Sixty random faults of all kinds over two minutes, one after the other.

Command:   ddiloco train --config=configs/quickstart.py --config.chaos=configs/chaos/soak.py:7 \\
             --workdir=runs/soak_7 --cpu [--engine=processes]
           The preset is the seed. `scripts/soak.py` runs 500 faults and judges the outcome.
Expect:    no unplanned exit, no pause of all islands, no lost round. Faults that are planned for
           after the run's end do not strike.
"""

from __future__ import annotations

import dataclasses

import ml_collections

from ddiloco import config
from ddiloco.chaos import random_faults

NUM_LEARNERS, NUM_SHARDS, COUNT, SPAN_SECONDS = 4, 2, 60, 120.0


def get_config(seed: str = "0") -> ml_collections.ConfigDict:
  """The chaos section of a run with 4 learners and 2 shards."""
  c = config.default().chaos
  faults = random_faults(int(seed), COUNT, SPAN_SECONDS, NUM_LEARNERS, NUM_SHARDS)
  c.faults = tuple(dataclasses.asdict(fault) for fault in faults)
  return c
