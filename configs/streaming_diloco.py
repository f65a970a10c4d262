"""Streaming DiLoCo (arXiv 2501.18512): fragments in turn, sent while training goes on, then mixed.

Command:   ddiloco train --config=configs/streaming_diloco.py --workdir=runs/streaming --cpu
Hardware:  2 CPU cores; four islands of one fake CPU device.
Time:      about a minute with 115k parameters and 600 steps; not timed at full size.
Algorithm: strided layers as fragments, a sync may take tau steps and then all learners wait for it;
           4-bit outer gradients.
Numbers:   docs/results.md, table "The algorithms".
"""

from ddiloco import config


def get_config():
  c = config.default()
  c.sync.num_shards = 1
  c.sync.num_fragments = 4
  c.sync.fragmentation = "strided"
  c.sync.sync_period = 24
  c.sync.overlap_steps = 2
  c.sync.min_quorum = c.islands.num_learners
  c.sync.blocking = True
  c.sync.apply = "mix"
  c.sync.mix_alpha = 0.5
  c.sync.merge = "average"
  c.sync.push_codec = "int4"
  c.outer.learning_rate = 0.4
  c.outer.momentum = 0.9
  c.outer.decay_share = 0.0
  return c
