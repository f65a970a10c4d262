"""Streaming DiLoCo (arXiv 2501.18512): fragments in turn, sent while training goes on, then mixed.

Command:   ddiloco train --config=configs/streaming_diloco.py --workdir=runs/streaming --cpu
Hardware:  2 CPU cores; four islands of one fake CPU device.
Time:      161 s: 213,568 parameters, 4 M tokens, 977 steps of every island.
Algorithm: strided layers as fragments; a sync may take tau steps, after which all learners wait for
           the new version; 4-bit outer gradients.
Numbers:   held-out loss 5.29 +- 0.18 untrained, 1.224 +- 0.006 at the end (virtual time, three
           seeds: scripts/expected_loss.py). The other algorithms: configs/default.py;
           tuned: docs/results.md, "The algorithms".
"""

from ddiloco import config


def get_config():
  c = config.default()
  c.sync.num_shards = 1
  c.sync.num_fragments = 4
  c.sync.fragmentation = "strided"
  c.sync.sync_period = 24
  c.sync.overlap_steps = 2
  c.sync.min_quorum = c.islands.get_oneway_ref("num_learners")  # all, however many
  c.sync.blocking = True
  c.sync.apply = "mix"
  c.sync.mix_alpha = 0.5
  c.sync.merge = "average"
  c.sync.push_codec = "int4"
  c.outer.learning_rate = 0.4
  c.outer.momentum = 0.9
  c.outer.decay_share = 0.0
  return c
