"""The baseline: one island without a syncer. An island trains synchronously, data-parallel inside.

Command:   ddiloco train --config=configs/data_parallel.py --workdir=runs/data_parallel --cpu
Hardware:  2 CPU cores; the island has 4 fake CPU devices and the batch of all four islands.
Time:      120 s: 213,568 parameters, 4 M tokens, 977 steps.
Algorithm: AdamW on the gradient averaged over all devices at every step.
Numbers:   held-out loss 5.29 +- 0.18 untrained, 1.115 +- 0.004 at the end (virtual time, three
           seeds: scripts/expected_loss.py). The other algorithms: configs/default.py;
           tuned: docs/results.md, "The algorithms".
"""

from ddiloco import config


def get_config():
  c = config.default()
  c.sync.num_shards = 0
  c.islands.num_learners = 1
  c.islands.devices = 4
  c.islands.data = -1
  c.islands.fsdp = 1
  c.islands.batch_size = 32
  return c
