"""The tutorial's runs: a quarter of a minute each, small enough to read every log line.

Command:   ddiloco train --config=configs/tutorial.py --workdir=runs/four --cpu
Hardware:  2 CPU cores, 2 GiB; every island is one fake CPU device.
Time:      about 20 s, compiling included.
Numbers:   held-out loss 5.43 +- 0.07 untrained, 2.18 +- 0.03 merged (scripts/expected_loss.py,
           three seeds): enough to see that it learns.
Data:      the source text of this Python's standard library, as bytes.
"""

from ddiloco import config


def get_config():
  c = config.default()
  c.model.num_layers = 1
  c.model.model_dim = 32
  c.model.num_heads = 2
  c.model.num_kv_heads = 1
  c.model.mlp_dim = 96

  c.islands.batch_size = 4
  c.islands.min_step_seconds = 0.02  # equal on all machines: planned faults strike at like steps
  c.data.sequence_length = 64

  c.sync.num_fragments = 3
  c.sync.sync_period = 8
  c.sync.snapshot_steps = 50

  c.run.total_tokens = 4 * 400 * 4 * 64  # learners x steps x batch x length
  return c
