"""Islands far apart: decoupled over links of 200 Mbit/s and 60 ms, data-parallel beside it.

Command:   scripts/wan.sh --config=configs/wan.py --mbit=200 --delay-ms=60 --workdir=runs/wan
           scripts/wan.sh --config=configs/wan.py:data_parallel --mbit=200 --delay-ms=60 \\
             --workdir=runs/wan_data_parallel
Hardware:  Linux with namespaces; 2 CPU cores, one for each island (shards and links share them).
Time:      1 min 45 s and 1 min 40 s, of which half a minute is start and end.
Algorithm: decoupled: the defaults. A fragment of an eighth of the model travels every third step,
           while all islands go on.
           data_parallel: after every step each island sends the delta of all parameters and waits
           for the average. Bytes and waits are those of synchronous data-parallel with its
           gradients summed on two hosts, and copied between these; an all-reduce would wait less
           (docs/results.md). The arithmetic differs too: each island has its own AdamW moments.
Numbers:   utilisation 99 % (no island waited a moment) against 19 % (1.3 s of waiting a step);
           0.6 MB against 14.9 MB a step and island; steps of 0.2 s in both. The comparison is of
           time: the runs are too short for their loss to mean much.
"""

from __future__ import annotations

import ml_collections

from ddiloco import config

STEPS = {"decoupled": 260, "data_parallel": 50}  # planned, of every island


def get_config(preset: str = "decoupled") -> ml_collections.ConfigDict:
  """The run of one preset, to be frozen by `config.from_dict`.

  Raises:
    ConfigError: there is no such preset.
  """
  steps = config.preset(STEPS, preset)
  c = config.default()
  c.model.num_layers = 4  # 1,820,352 parameters: 7.3 MB, a third of a second of the link
  c.model.model_dim = 192
  c.model.num_heads = 6
  c.model.num_kv_heads = 6
  c.model.head_dim = 32
  c.model.mlp_dim = 512

  c.islands.num_learners = 2
  c.islands.batch_size = 4
  c.run.total_tokens = steps * 2 * 4 * 128  # learners x batch x length
  c.run.evaluations = 4  # few: evaluations share the islands' cores
  if preset == "data_parallel":
    set_data_parallel(c)
  return c


def set_data_parallel(c: ml_collections.ConfigDict) -> None:
  """Lock-step: the whole model at every step, half of it by each shard."""
  c.sync.num_fragments = c.sync.num_shards
  c.sync.sync_period = 1
  c.sync.overlap_steps = 0
  c.sync.min_quorum = c.islands.get_oneway_ref("num_learners")  # all, however many
  c.sync.blocking = True
  c.sync.apply = "overwrite"
  c.sync.merge = "average"
  c.outer.learning_rate = 1.0
  c.outer.momentum = 0.0
  c.outer.decay_share = 0.0
