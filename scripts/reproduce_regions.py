"""12 billion parameters over four regions: do slow links hold up the islands, or the rounds?

    python scripts/reproduce_regions.py [--steps=240] [--merge_gbytes=N] [--quick]

The protocol's own decisions in virtual time (`ddiloco.simulation`): four islands, H = P = 24,
tau = 2, int4 pushes and publishes, twelve shards with links of 25 Gbit/s, 30 ms between any two
places, every step up to 5 % longer by chance. Two rows: 2 Gbit/s an island with steps of 6 s, and
5 Gbit/s with steps of 2.4 s. An island joins in the middle. The speed of a shard's merge is
measured first, on this machine (`ddiloco plan --measure`), or given. A learner's host processes 100
GB/s of f32 beside its step, with half of its 208 cores; with 4 GB/s (one core) it cannot keep up
with a fragment every 2.4 s. Each figure is printed beside the planner's for the same run.

Data-parallel on the same links: a ring all-reduce of bf16 gradients, every step, overlapped with
the backward pass (`utilisation.py`); how many times as long a step takes. Published:
more than 20 times as long ("Decoupled DiLoCo", 12B over four US regions at 2 to 5 Gbit/s).

Participation is that of the four islands that are there from the start.

Last line: {"2 Gbit/s": {"utilisation", "participation", "join_seconds", ...}, "5 Gbit/s": {...},
"merge_gbytes"}. Takes a minute.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

import common
from utilisation import Method, Workload, utilisation

from ddiloco import config as config_lib
from ddiloco.config import Config
from ddiloco.engines import virtual
from ddiloco.protocol import events
from ddiloco.simulation import planner
from ddiloco.simulation.run import Account, Speeds, VirtualRun

PARAMETERS, ISLANDS, PERIOD, TAU, SHARDS = 12_000_000_000, 4, 24, 2, 12
NEWCOMER = f"learner-{ISLANDS}"
LATENCY_SECONDS, SHARD_GBPS, JITTER = 0.03, 25.0, 0.05
HOST_GBYTES = 100.0  # half of a TPU host's 208 cores are faster than that
ROWS = {"2 Gbit/s": (2.0, 6.0), "5 Gbit/s": (5.0, 2.4)}
WAITING = ("blocked", "stalled")
WANTED = {"utilisation": 99.0, "participation": 95.0, "data_parallel": 20.0}


def make_config(steps: int, joins_at: float) -> Config:
  """The config of a run; a fifth island joins after `joins_at` seconds."""
  c = config_lib.default()
  c.islands.num_learners, c.islands.batch_size, c.data.sequence_length = ISLANDS, 1, 1024
  c.sync.update(num_shards=SHARDS, num_fragments=PERIOD, sync_period=PERIOD, overlap_steps=TAU)
  c.sync.update(push_codec="int4", publish_codec="int4", min_quorum=1, grace_safety=0.9)
  c.sync.snapshot_steps = 0
  c.outer.update(learning_rate=0.4, momentum=0.9)
  c.run.total_tokens = steps * ISLANDS * 1024
  c.run.evaluations = 0  # an evaluator would get every version too
  c.chaos.faults = ({"action": "join", "role": NEWCOMER, "at_seconds": joins_at, "seconds": -1},)
  return config_lib.from_dict(c)


class Watch:
  """The run's account, and the times when the newcomer starts and is first merged."""

  def __init__(self) -> None:
    self.account = Account()
    self.came: float | None = None
    self.merged: float | None = None

  def take(self, event: events.Event) -> None:
    self.account.take(event)
    if event.role == NEWCOMER and isinstance(event, events.Started) and self.came is None:
      self.came = event.time
    if isinstance(event, events.Commit) and ISLANDS in event.learners and self.merged is None:
      self.merged = event.time


def play(gbps: float, step_seconds: float, steps: int, merge_gbytes: float) -> dict[str, Any]:
  """One row: the numbers of the run, and the planner's."""
  config, watch = make_config(steps, steps / 2 * step_seconds), Watch()
  setting = Speeds(
    sizes=planner.equal_sizes(PARAMETERS, PERIOD),
    step_seconds=step_seconds,
    jitter=JITTER,
    gbps=(gbps,),
    latency_seconds=(LATENCY_SECONDS,),
    shard_gbps=SHARD_GBPS,
    merge_gbytes=merge_gbytes,
    host_gbytes=HOST_GBYTES,
  )
  reason = VirtualRun(config, setting, watch.take).finish()
  if reason != "finished" or watch.merged is None or watch.came is None:
    raise RuntimeError(f"the virtual run ended otherwise: {reason}, merged at {watch.merged}")
  found, learners = watch.account.summary(), watch.account.ledger.report().learners
  began = 1.0 - found["causes"].get("start_up", 0.0) - found["causes"].get("rejoin", 0.0)
  waited = sum(found["causes"].get(cause, 0.0) for cause in WAITING)
  plan = planner.make(
    planner.Setting.of(
      config,
      setting.sizes,
      step_seconds=step_seconds * (1 + JITTER / 2),
      gbps=gbps,
      latency_seconds=LATENCY_SECONDS,
      shard_gbps=SHARD_GBPS,
      merge_gbytes=merge_gbytes,
      host_gbytes=HOST_GBYTES,
    )
  )
  return {
    "utilisation": 100 * (1 - waited / began),
    "planned_utilisation": 100 * plan.utilisation,
    "participation": 100 * statistics.mean(learners[m].participation for m in range(ISLANDS)),
    "sync_seconds": found["seconds_per_sync"]["mean"],
    "planned_sync_seconds": plan.applied_steps * step_seconds * (1 + JITTER / 2),
    "planned_participation": 100 * plan.participation,
    "hidden": plan.overlap_steps <= TAU,
    "join_seconds": watch.merged - watch.came,
    "planned_join_seconds": plan.join_seconds,
    "planned_link_load": 100 * plan.link_load,
    "data_parallel": data_parallel(gbps, step_seconds),
    "had_no_part_because": found["had_no_part_because"],
    "causes": found["causes"],
    "commits": found["commits"],
  }


def data_parallel(gbps: float, step_seconds: float) -> float:
  """How many times as long its step takes."""
  work = Workload(PARAMETERS, step_seconds, ISLANDS, latency_seconds=LATENCY_SECONDS)
  return 1 / utilisation(work, Method("data-parallel"), gbps)


def main() -> None:
  parser = common.parser(__doc__, "96 steps")
  parser.add_argument("--steps", type=int, default=240, help="that the token budget takes (240)")
  parser.add_argument("--merge_gbytes", type=float, help="of a shard; default: measured here")
  args = parser.parse_args()
  if args.steps < 3 * PERIOD or (args.merge_gbytes is not None and args.merge_gbytes <= 0):
    parser.error(f"--steps must be at least {3 * PERIOD}, --merge_gbytes positive")
  steps, rate = 96 if args.quick else args.steps, args.merge_gbytes
  if rate is None:
    rate = virtual.merge_gbytes(make_config(steps, 0.0))
  print(
    f"{PARAMETERS / 1e9:g}B parameters, {ISLANDS} islands; a shard merges {rate:.1f} GB/s of f32"
  )
  rows = {name: play(*row, steps, rate) for name, row in ROWS.items()}
  for name, found in rows.items():
    print(f"\n{name}, a step in {ROWS[name][1]:g} s")
    for text, value in {
      "compute utilisation": f"{found['utilisation']:.2f} %   wanted: at least 99;"
      f" planned {found['planned_utilisation']:.2f}",
      "participation": f"{found['participation']:.1f} %   wanted: at least 95;"
      f" planned {found['planned_participation']:.1f}",
      "a sync": f"{found['sync_seconds']:.1f} s   planned {found['planned_sync_seconds']:.1f};"
      f" tau hides {TAU * ROWS[name][1]:.1f}",
      "until a newcomer is merged": f"{found['join_seconds']:.0f} s   of that the model on its way:"
      f" {found['planned_join_seconds']:.0f}",
      "links": f"{found['planned_link_load']:.0f} % busy",
      "a step of data-parallel": f"{found['data_parallel']:.1f} times as long   published: over 20",
    }.items():
      print(f"  {text:<28}{value}")
  print(json.dumps({**rows, "merge_gbytes": round(rate, 2), "steps": steps}))


if __name__ == "__main__":
  common.run_script(main)
