"""12 billion parameters over four regions: two islands of v5p and two of v6e, 64 chips each.

Command:   ddiloco compile --config=configs/regions_12b.py
           ddiloco plan --config=configs/regions_12b.py --gbps=5 --shard_gbps=25 --latency_ms=30 \\
             --step_seconds=1.7 --host_gbytes=50
           ddiloco launch gke --config=configs/regions_12b.py --dry_run ...   (docs/launch.md)
Hardware:  islands 0 and 1: v5p:4x4x4; 2 and 3: v6e:8x8; a region each. Twelve shards in one of the
           regions, of 34 GB each (`ddiloco plan`), on machines with 25 Gbit/s between them.
Time:      not run. A step takes 1.7 s at 40 % of the peak on both: a v6e has twice a v5p's FLOP/s,
           so its islands take twice the batch. 240e9 tokens are 153,000 steps, or three days.
Links:     5 Gbit/s an island each way, half of it used on average (`ddiloco plan`). At 30 ms one
           way a single TCP connection with Linux's usual buffers would carry a ninth of that.
Algorithm: the protocol of configs/dense.py:12b, with int4 pushes and int8 publishes of the update;
           in the paper int4 lost nothing on text (outer-gradient precision; on images one account
           has 34.4 instead of 36.6). 96 fragments, so that a sync is over after the three steps of
           overlap.
Numbers:   the loss is not known: the run takes 256 TPUs, three days and token files that we lack.
"""

import runpy
from pathlib import Path

DENSE = Path(__file__).with_name("dense.py")


def get_config():
  c = runpy.run_path(str(DENSE))["get_config"]("12b")
  c.islands.num_learners = 4
  fast = {"topology": "v6e:8x8", "batch_size": 256}
  c.islands.overrides = {"2": fast, "3": fast}
  c.sync.num_shards = 12
  c.sync.num_fragments = 96
  c.sync.overlap_steps = 3
  c.sync.push_codec = "int4"
  c.sync.publish_codec = "int8"
  c.network.streams = 9
  return c
