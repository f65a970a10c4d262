"""Synchronous DiLoCo (arXiv 2311.08105): H local steps, then all wait, average, and go on.

Command:   ddiloco train --config=configs/diloco.py --workdir=runs/diloco --cpu
Hardware:  2 CPU cores; four islands of one fake CPU device.
Time:      139 s: 213,568 parameters, 4 M tokens, 977 steps of every island.
Algorithm: one fragment, a quorum of all learners, no step while the sync is under way.
Numbers:   held-out loss 5.29 +- 0.18 untrained, 1.242 +- 0.005 at the end (virtual time, three
           seeds: scripts/expected_loss.py). The other algorithms: configs/default.py;
           tuned: docs/results.md, "The algorithms".
"""

from ddiloco import config


def get_config():
  c = config.default()
  c.sync.num_shards = 1
  c.sync.num_fragments = 1
  c.sync.sync_period = 24
  c.sync.overlap_steps = 0
  c.sync.min_quorum = c.islands.get_oneway_ref("num_learners")  # all, however many
  c.sync.blocking = True
  c.sync.apply = "overwrite"
  c.sync.merge = "average"
  c.outer.learning_rate = 0.7
  c.outer.momentum = 0.9
  c.outer.decay_share = 0.0
  return c
