"""ddiloco's own defaults, unchanged: Decoupled DiLoCo with rebase and an outer rate that falls.

Command:   ddiloco train --config=configs/default.py --workdir=runs/default --cpu
Hardware:  2 CPU cores; four islands of one fake CPU device.
Time:      about a minute with 115k parameters and 600 steps; not timed at full size.
Algorithm: no learner waits, a quorum of one with an adaptive grace window, token weights, RDA; a
           new version is put under what the global model has not seen, so that no work is lost.
           Outer Nesterov 0.5/0.8; over the last quarter of the tokens its rate falls to a 20th.
Numbers:   docs/results.md, table "The algorithms".
"""

from ddiloco import config


def get_config():
  return config.default()
