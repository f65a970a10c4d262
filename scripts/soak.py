"""A soak: hundreds of random faults of all kinds on one run, and the recovery from each of them.

A real run of a tiny model on `--engine=threads` (islands as threads of one process, kills cut the
role off) or `--engine=processes` (kill -9, SIGSTOP). Afterwards the event logs are judged:

- `global_stalls`: times of over --stall_seconds without a step of any island;
- `lost_rounds`: commits that the final global model does not contain;
- `unplanned`: crashes, and exits that no fault explains;
- `blocked_seconds` of all islands;
- a table of the seconds from a fault's strike to the next commit with its role, by kind of fault.

  python scripts/soak.py [--faults=500] [--minutes=12] [--seed=0] [--engine=threads] [--workdir=DIR]

With --workdir a finished run is only judged again. Last line: {"faults", "struck", "kinds",
"global_stalls", "longest_stall_seconds", "lost_rounds", "unplanned", "blocked_seconds", "uptime",
"goodput", "recovered", "median_recovery_seconds", "worst_recovery_seconds", "finished"}; exit
status 1 if the run has not finished, or one of the first three above is not zero.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common

from ddiloco.chaos import random_faults
from ddiloco.config import Config
from ddiloco.observe.eventlog import EventLog, read_events
from ddiloco.observe.run_state import RunState
from ddiloco.observe.tracks import Aftermath, Recovery

LEARNERS, SHARDS = 4, 2
STEP_SECONDS = 0.05
CALM_SECONDS = 20.0  # at most, after the last fault, for the recovery from it
OUTLIVED = 20  # quarantines and crashes that a role may have


def make_config(faults: int, span_seconds: float, seed: int) -> Config:
  """A tiny model whose islands step every 50 ms."""
  steps = (span_seconds + min(CALM_SECONDS, span_seconds / 3)) / STEP_SECONDS
  tokens = round(0.9 * LEARNERS * steps) * 4 * 32  # islands are down for some time
  plan = random_faults(seed, faults, span_seconds, LEARNERS, SHARDS)
  run = {"evaluations": 4, "sample_tokens": 0, "restart_seconds": 0.2, "max_restarts": OUTLIVED}
  return common.small(
    *(1, 32, 32, True),
    islands={"num_learners": LEARNERS, "batch_size": 4, "min_step_seconds": STEP_SECONDS},
    sync={"num_shards": SHARDS, "num_fragments": 4, "sync_period": 8, "liveness_seconds": 1.0},
    run={**run, "total_tokens": tokens},
    chaos={"faults": [dataclasses.asdict(fault) for fault in plan]},
  )


def judge(
  events: EventLog, aftermath: Aftermath, planned: int, stall_seconds: float
) -> dict[str, Any]:
  """The numbers of the last line."""
  found, run = aftermath.numbers(), RunState().read(events)
  account = run.ledger.report()
  return {
    **found,
    "faults": planned,
    "struck": found["faults"],
    "kinds": dict(collections.Counter(each.action for each in aftermath.recoveries)),
    "global_stalls": int(found["longest_stall_seconds"] > stall_seconds),
    "blocked_seconds": run.blocked_seconds,
    "uptime": round(account.uptime, 5),
    "goodput": round(account.goodput_training, 4),
    "finished": run.finished or None,
  }


def table(found: Sequence[Recovery]) -> dict[str, dict[str, Any]]:
  """Recovery by kind of fault, in seconds."""
  rows = {}
  for action in sorted({each.action for each in found}):
    of = [each for each in found if each.action == action]
    back = [each.seconds for each in of if math.isfinite(each.seconds)]
    rows[action] = {
      "struck": len(of),
      "planned": common.middle([each.planned_seconds for each in of], 1),
      "back after": common.middle(back, 2),
      "worst": max(back, default=math.nan),
      "not back": len(of) - len(back),
    }
  return rows


def main() -> int:
  args = common.options(
    __doc__,
    faults=500,
    minutes=(12.0, "in which they strike"),
    seed=0,
    engine=common.ENGINE,
    stall_seconds=5.0,
    workdir=Path,
  )
  config = make_config(args.faults, 60 * args.minutes, args.seed)
  with common.folder() as folder:
    workdir = args.workdir or folder / "soak"
    if not common.done_before(config, workdir):
      print(f"{args.faults} faults in {args.minutes:g} minutes, seed {args.seed}", flush=True)
      common.start(config, workdir, "--overwrite", f"--engine={args.engine}").wait()
    events = read_events(workdir)  # also those of a run that failed: they say why
    aftermath = Aftermath().read(events)
    found = aftermath.recoveries
    result = judge(events, aftermath, args.faults, args.stall_seconds)
    for event in aftermath.unplanned():
      print(f"unplanned: {event}")
    for fragment, round_id in aftermath.lost_rounds():
      print(f"lost: round {round_id} of fragment {fragment}")
    if result["finished"] != "finished":
      print(common.last_words(workdir))
  common.show(table(found))
  print(json.dumps(result))
  bad = result["global_stalls"] or result["lost_rounds"] or result["unplanned"]
  return int(bool(bad) or result["finished"] != "finished")


if __name__ == "__main__":
  common.run_script(main)
