"""Four islands train one language model on a CPU; one of them is killed on the way and comes back.

Command:   bash scripts/quickstart.sh
           (ddiloco train --config=configs/quickstart.py --workdir=runs/quickstart --cpu
           --overwrite)
Hardware:  2 CPU cores, 2 GiB; every island is one fake CPU device.
Time:      89 s on 2 cores, comparison included; with installation about two minutes.
Numbers:   held-out loss 5.30 untrained, 1.66 best island alone, 1.400 merged. In virtual time,
           three seeds (scripts/expected_loss.py): 1.689 +- 0.008 an island alone, 1.400 +- 0.008
           merged. Data-parallel with as many tokens and the best of four rates has 1.383 +- 0.007
           with AdamW, and merged is 1.3 +- 1.1 % behind it; with Muon 1.324 +- 0.009, and merged is
           5.8 +- 0.7 % behind. In runs of four times as many tokens the gap is nearly closed
           (docs/results.md, "The algorithms").
Data:      the source text of this Python's standard library, as bytes.
"""

from ddiloco import config


def get_config():
  c = config.default()
  c.model.num_layers = 2
  c.islands.batch_size = 4
  c.sync.num_fragments = 6
  c.sync.sync_period = 6

  # Muon and frequent syncs pay most in a short run. Pushes of syncs that are close together point
  # the same way, so less outer momentum is best.
  c.inner.optimizer = "muon"
  c.inner.learning_rate = 20e-3
  c.outer.learning_rate = 0.3
  c.outer.momentum = 0.7

  c.run.total_tokens = 4 * 600 * 4 * 128  # learners x steps x batch x length
  c.run.compare_alone = True
  c.chaos.faults = ({"action": "kill", "role": "learner-2", "at_step": 250, "seconds": 5.0},)
  return c
