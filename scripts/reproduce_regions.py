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
"merge_gbytes", "steps"}. Takes a minute.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

import common
from reproduce_heterogeneous import config_of
from utilisation import Method, Workload, utilisation

from ddiloco.engines import virtual
from ddiloco.observe.eventlog import EventLog
from ddiloco.protocol.events import Commit, Started
from ddiloco.simulation import planner
from ddiloco.simulation.run import Account, Speeds, VirtualRun

PARAMETERS, ISLANDS, PERIOD, TAU, SHARDS = 12_000_000_000, 4, 24, 2, 12
NEWCOMER = f"learner-{ISLANDS}"
LATENCY_SECONDS, JITTER = 0.03, 0.05
ROWS = {"2 Gbit/s": (2.0, 6.0), "5 Gbit/s": (5.0, 2.4)}
WAITING = ("blocked", "stalled")
FIELDS = {
  "sync.num_shards": SHARDS, "sync.push_codec": "int4", "sync.publish_codec": "int4",
  "outer.learning_rate": 0.4, "outer.momentum": 0.9,
  "run.evaluations": 0,  # an evaluator would get every version too
}  # fmt: skip


def play(gbps: float, step_seconds: float, steps: int, merge_gbytes: float) -> dict[str, Any]:
  """One row: the numbers of the run, and the planner's. A fifth island joins in the middle."""
  joins = {"action": "join", "role": NEWCOMER, "at_seconds": steps / 2 * step_seconds}
  config = config_of(ISLANDS, steps, FIELDS | {"chaos.faults": ({**joins, "seconds": -1},)})
  sizes = planner.equal_sizes(PARAMETERS, PERIOD)
  # Half of a TPU host's 208 cores process more than 100 GB/s.
  rates: dict[str, Any] = {"shard_gbps": 25.0, "merge_gbytes": merge_gbytes, "host_gbytes": 100.0}
  links: dict[str, Any] = {"gbps": (gbps,), "latency_seconds": (LATENCY_SECONDS,)}
  log, account = EventLog(), Account()
  setting = Speeds(sizes, step_seconds=step_seconds, jitter=JITTER, **links, **rates)
  reason = VirtualRun(config, setting, log.append).finish()
  merged = [e.time for e in log.of(Commit) if ISLANDS in e.learners]
  if reason != "finished" or not merged:
    raise RuntimeError(f"the virtual run ended otherwise: {reason}, merged at {merged}")
  for event in log:
    account.take(event)
  found, shares = account.summary(), [account.run.participation(m) or 0.0 for m in range(ISLANDS)]
  began = 1.0 - found["causes"].get("start_up", 0.0) - found["causes"].get("rejoin", 0.0)
  waited = sum(found["causes"].get(cause, 0.0) for cause in WAITING)
  mean_step = step_seconds * (1 + JITTER / 2)
  plan = planner.make(
    planner.Setting.of(
      config, sizes, step_seconds=mean_step, gbps=gbps, latency_seconds=LATENCY_SECONDS, **rates
    )
  )
  return {
    "utilisation": 100 * (1 - waited / began),
    "planned_utilisation": 100 * plan.utilisation,
    "participation": 100 * statistics.mean(shares),
    "sync_seconds": found["seconds_per_sync"]["mean"],
    "planned_sync_seconds": plan.applied_steps * mean_step,
    "planned_participation": 100 * plan.participation,
    "hidden": plan.overlap_steps <= TAU,
    "join_seconds": merged[0] - log.of(Started, NEWCOMER)[0].time,
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
  args = common.options(
    __doc__,
    {"steps": 96},
    steps=(240, "that the token budget takes"),
    merge_gbytes=(float, "of a shard; default: measured here"),
  )
  rate = args.merge_gbytes or virtual.merge_gbytes(config_of(ISLANDS, args.steps, FIELDS))
  print(f"{PARAMETERS / 1e9:g}B parameters, {ISLANDS} islands; a shard merges {rate:.1f} GB/s")
  rows = {name: play(*row, args.steps, rate) for name, row in ROWS.items()}
  for row, found in rows.items():
    print(
      f"\n{row}, a step in {ROWS[row][1]:g} s; of data-parallel in {found['data_parallel']:.1f}"
      " times that"
    )
    names = ("utilisation", "participation", "sync_seconds", "join_seconds")
    common.show({n: {"found": found[n], "planned": found[f"planned_{n}"]} for n in names})
  print(json.dumps({**rows, "merge_gbytes": round(rate, 2), "steps": args.steps}))


if __name__ == "__main__":
  common.run_script(main)
