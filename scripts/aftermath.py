"""What a fault leaves behind: how many learners take part in a round when it has long been over.

    python scripts/aftermath.py [--steps=600] [--plans=0] [--quick]

The protocol's own decisions in virtual time (`ddiloco.simulation`): four islands, four shards,
H = P = 24, tau = 2, K = 1, and the assumptions of reproduce_heterogeneous.py; some rows again as
Streaming DiLoCo, in lock-step. After a sixth of the run each row's fault strikes, for 20 s; the
second half of the run is measured. With --plans there are so many rows more, each of 12 random
faults of all kinds in the first third of the run (`chaos.random_faults`). An island must have as
many pushes in a commit, and make as many steps, as in calm times; exit status 1 if a row has less
than nine tenths of one of them.

Last line: {ROW: {"pushes": of a commit, mean, "islands": that are there, "steps": of each in a
second, "sync_seconds": from a copy-out to the apply, mean, "period_seconds": between two rounds of
a fragment, mean}, ...}. Takes half a minute, and three seconds a plan; --quick a few seconds.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import statistics
from typing import Any

import common
from reproduce_heterogeneous import PERIOD, config_of, speeds_of

from ddiloco.chaos import random_faults
from ddiloco.protocol import events
from ddiloco.simulation.run import Account, VirtualRun

ISLANDS, SHARDS = 4, 4
LEARNERS = [f"learner-{m}" for m in range(ISLANDS)]
SYNCERS = [f"syncer-{s}" for s in range(SHARDS)]
LASTS, ENOUGH = 20.0, 0.9
RANDOM = 12  # faults of a random plan
LOCK_STEP = {"sync.min_quorum": ISLANDS, "sync.blocking": True, "sync.apply": "mix"}
AGAIN = [f"lock-step: {row}" for row in ("calm", "one learner killed", "everything killed")]
QUICK = ["calm", "all learners killed", "all shards stopped", "everything killed", "one came, left"]
# By row: the fault's action, whom it strikes, and what else the fault has.
ROWS: dict[str, tuple[str, list[str], dict[str, Any]]] = {
  "calm": ("kill", [], {}),
  "one learner killed": ("kill", LEARNERS[:1], {}),
  "all learners killed": ("kill", LEARNERS, {}),
  "one learner lost for good": ("kill", LEARNERS[:1], {"seconds": -1}),
  "one shard killed": ("kill", SYNCERS[:1], {}),
  "all shards killed": ("kill", SYNCERS, {}),
  "everything killed": ("kill", LEARNERS + SYNCERS, {}),
  "one learner stopped": ("stall", LEARNERS[:1], {}),
  "all learners stopped": ("stall", LEARNERS, {}),
  "one shard stopped": ("stall", SYNCERS[:1], {}),
  "all shards stopped": ("stall", SYNCERS, {}),
  "one learner cut off": ("cut", LEARNERS[:1], {}),
  "all learners cut off": ("cut", LEARNERS, {}),
  "all links at 0.2 Gbit/s": ("throttle", LEARNERS, {"bits_per_second": 2e8}),
  "one learner three times as slow": ("slow", LEARNERS[:1], {"factor": 3.0}),
  "one came, to stay": ("join", ["learner-4"], {"seconds": -1}),
  "one came, left": ("join", ["learner-4"], {"seconds": 60.0}),
  "three came, left": ("join", [f"learner-{m}" for m in (4, 5, 6)], {"seconds": 60.0}),
}


def plan_of(name: str, steps: int) -> tuple[dict[str, Any], ...]:
  """The faults of one row."""
  if name not in ROWS:  # "random plan 7"
    drawn = random_faults(int(name.split()[-1]), RANDOM, steps / 3, ISLANDS, SHARDS)
    return tuple(map(dataclasses.asdict, drawn))
  action, roles, more = ROWS[name]
  fault = {"action": action, "at_seconds": steps / 6, "seconds": LASTS, **more}
  return tuple({**fault, "role": role} for role in roles)


def measure(row: str, steps: int) -> dict[str, float]:
  """The numbers of one row."""
  mode, _, name = row.rpartition(": ")
  faults = plan_of(name, steps)
  fields = {"sync.num_shards": SHARDS, "chaos.faults": faults, **(LOCK_STEP if mode else {})}
  config = config_of(ISLANDS, steps, fields)
  pushes: list[int] = []
  account = Account()
  began: dict[int, dict[int, float]] = collections.defaultdict(dict)  # by fragment and round
  made: dict[str, list[float]] = collections.defaultdict(list)  # when, by learner

  def take(event: events.Event) -> None:
    if not steps / 2 < event.time < steps:
      return
    account.take(event)
    match event:
      case events.Step():
        made[event.role].append(event.time)
      case events.Commit():
        pushes.append(len(event.learners))
      case events.Round():
        began[event.fragment].setdefault(event.round, event.time)

  reason = VirtualRun(config, speeds_of(PERIOD, 0), take).finish()
  if reason != "finished":
    raise RuntimeError(f"{row}: the virtual run did not end: {reason}")
  gaps = [b - a for each in began.values() for a, b in itertools.pairwise(each.values())]
  return {
    "pushes": round(statistics.mean(pushes), 2),
    "islands": len(made),
    "steps": round(
      statistics.mean(len(each) / (each[-1] - steps / 2) for each in made.values()), 2
    ),
    "sync_seconds": round(statistics.mean(account.sync_seconds.items), 2),
    "period_seconds": round(statistics.mean(gaps), 1),
  }


def main() -> None:
  steps, plans = (600, "of an island in each run"), (0, "of random faults")
  args = common.options(__doc__, {"steps": 360}, steps=steps, plans=plans)
  drawn = [f"random plan {seed}" for seed in range(args.plans)]
  again = [*AGAIN, *(f"lock-step: {row}" for row in drawn)]
  names = [*(QUICK if args.quick else ROWS), *drawn, *again]
  rows = {row: measure(row, args.steps) for row in names}
  common.show(rows)
  print(json.dumps(rows))
  bad = []
  for row, found in rows.items():
    calm = rows[AGAIN[0] if row in again else "calm"]
    pushes = found["pushes"] / found["islands"] * calm["islands"] / calm["pushes"]
    if min(pushes, found["steps"] / calm["steps"]) < ENOUGH:
      bad.append(row)
  if bad:
    raise SystemExit(f"less than in calm times: {', '.join(bad)}")


if __name__ == "__main__":
  common.run_script(main)
