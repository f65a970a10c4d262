"""Eight islands under a storm of kills: what share of their time reaches the global model?

Command:   python scripts/reproduce_goodput.py --workdir=runs/goodput --plot=docs/goodput.png
           (this run, then elastic and inelastic data-parallel under the same kills), or alone
           ddiloco train --config=configs/goodput.py --engine=processes --workdir=runs/storm --cpu
Hardware:  2 CPU cores that do nothing else, 6 GiB.
Time:      3 x 5 minutes, and 4 more to start and compile.
Algorithm: the defaults; a short sync period, so that a kill loses little work. A step lasts at
           least half a second, of which a core is busy for a few hundredths: islands behave as if
           each had a device of its own. The rate of kills was chosen so that data-parallel
           with checkpoints had about its goodput in the paper at 1.2 million chips (27 %).
Numbers:   docs/results.md, "Goodput under kills". The experiment measures time, not loss.
"""

from __future__ import annotations

import dataclasses
import math

import ml_collections

from ddiloco import config
from ddiloco.chaos import random_kills

PACE_SECONDS = 0.5
DOWN_SECONDS = 1.0  # until a killed island's process is started again


def get_config(
  seed: int = 0, minutes: float = 5.0, kills_per_minute: float = 12.0, learners: int = 8
) -> ml_collections.ConfigDict:
  """The run, to be frozen by `config.from_dict`."""
  c = config.default()
  c.seed = seed
  c.model.num_layers = 1
  c.model.model_dim = 32
  c.model.num_heads = 2
  c.model.num_kv_heads = 1
  c.model.mlp_dim = 64
  c.data.source = "synthetic"
  c.data.sequence_length = 32
  c.data.heldout_sequences = 16

  c.islands.num_learners = learners
  c.islands.batch_size = 4
  c.islands.min_step_seconds = PACE_SECONDS
  c.sync.num_fragments = 4
  c.sync.sync_period = 4
  c.sync.overlap_steps = 1
  c.sync.snapshot_steps = 10  # data-parallel's checkpoints have the same distance

  steps = math.ceil(60 * minutes / PACE_SECONDS)
  c.inner.warmup_steps = 10
  c.inner.decay_steps = steps
  c.run.total_tokens = steps * learners * 4 * 32
  c.run.evaluations = 0
  c.run.sample_tokens = 0
  kills = random_kills(
    f"goodput {seed}", kills_per_minute / 60.0, 60 * minutes, learners, DOWN_SECONDS
  )
  c.chaos.faults = tuple(dataclasses.asdict(kill) for kill in kills)
  return c
