"""Islands that differ, in one run: devices, mesh axes and batch; one of them is slow as well.

Command:   ddiloco train --config=configs/mixed_islands.py --workdir=runs/mixed --cpu
Hardware:  2 CPU cores; 1 + 2 + 4 fake CPU devices.
Algorithm: the defaults: islands with more tokens weigh more, a slow one never holds up the
           others.
Time:      36 s: 115,008 parameters, 1 M merged tokens; in one run 579, 403 and 338 steps of the
           three islands.
Numbers:   held-out loss 5.16 +- 0.18 untrained, 1.670 +- 0.007 at the end (three real runs, seeds 0
           to 2).
"""

from ddiloco import config


def get_config():
  c = config.default()
  c.model.num_layers = 2
  c.islands.num_learners = 3
  c.islands.batch_size = 4
  c.islands.overrides = {
    "1": {"devices": 2, "fsdp": 2, "batch_size": 8},
    "2": {"devices": 4, "fsdp": 2, "tensor": 2, "batch_size": 8},
  }
  c.run.total_tokens = 1_000_000
  c.chaos.faults = (
    {"action": "slow", "role": "learner-0", "at_step": 20, "seconds": 3600.0, "factor": 1.5},
  )
  return c
