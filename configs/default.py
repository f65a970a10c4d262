"""ddiloco's own defaults, unchanged: Decoupled DiLoCo with rebase and an outer rate that falls.

Command:   ddiloco train --config=configs/default.py --workdir=runs/default --cpu
Hardware:  2 CPU cores; four islands of one fake CPU device.
Time:      158 s: 213,568 parameters, 4 M tokens, 977 steps of every island.
Algorithm: no learner waits, a quorum of one with an adaptive grace window, token weights, RDA; a
           learner rebases its unmerged work onto each new version, so that it is merged later.
           Outer Nesterov 0.5/0.8; over the last quarter of the tokens its rate falls to a 20th.
Numbers:   held-out loss 5.29 +- 0.18 untrained, 1.193 +- 0.009 at the end (virtual time, three
           seeds: scripts/expected_loss.py). The five algorithms' configs as they are, on equally
           many trained tokens: data-parallel 1.115 +- 0.004, default 1.193 +- 0.009, streaming
           1.224 +- 0.006, decoupled 1.237 +- 0.012, DiLoCo 1.242 +- 0.005. Tuned, each for itself:
           docs/results.md, "The algorithms".
"""

from ddiloco import config


def get_config():
  return config.default()
