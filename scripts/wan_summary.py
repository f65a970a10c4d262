"""The results of runs over long links, beside the planner's and the simulator's figures.

  python scripts/wan_summary.py --workdir=DIR [--workdir=DIR ...] --mbit=200 --delay_ms=60

`scripts/wan.sh` calls it at its end. Every workdir holds a run of the same config over the same
links; its event logs are read. The planner (`ddiloco plan`) and a run in virtual time (`ddiloco
simulate protocol`) get the same config, links and mean step. The same function measures real and
virtual runs, from when all learners have begun to step until the first learner's last step:

  round_seconds: from the beginning of a round at the shard to its commit.
  delivery_seconds: from the commit until a learner takes the version, at the end of a step.
  sync_seconds: from a learner's copy-out to its apply of the version.
  mbit: Mbit/s of a learner, sent and received.
  participation: share of the learners whose pushes a commit has.
  first_version_seconds: to the first commit, from one usual step time before the end of the run's
    first step: virtual learners are spread in time by longer first steps.

Last line, JSON: `planned`, `virtual`, `real` (a list) with these, `error_percent`: of the planner
and the virtual run against the mean of the real ones. Besides, of the last real run, by learner:
`utilisation`: the share of inner steps in the time between the end of its first step and the end of
its last. `blocked_seconds`: of that time, how long the protocol made it wait. `bytes`: sent and
received, all connections together. `step_seconds`: median. For that run: `loss` on held-out data
(null if no evaluator saw the end), `mbit`, `delay_ms` one way.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common

from ddiloco import workdir as workdirs
from ddiloco.checks import require
from ddiloco.config import Config
from ddiloco.observe.eventlog import E, Event, read_events
from ddiloco.observe.history import TrafficTotals
from ddiloco.protocol import events
from ddiloco.protocol.events import parse_role
from ddiloco.protocol.rules import due_after
from ddiloco.roles import initial
from ddiloco.simulation import planner
from ddiloco.simulation.run import Speeds, VirtualRun

JITTER = 0.02  # of virtual steps
SEEDS = 5  # virtual runs; their mean is reported
COMPARED = (
  *("round_seconds", "delivery_seconds", "sync_seconds", "mbit", "participation"),
  "first_version_seconds",
)


def utilisation(steps: list[events.Step]) -> float | None:
  """A learner's utilisation from its step events in order of time; None if there are too few."""
  if len(steps) < 2 or steps[-1].time <= steps[0].time:
    return None
  inside = sum(step.seconds for step in steps[1:])  # the time begins at the end of the first step
  return round(inside / (steps[-1].time - steps[0].time), 4)


def summarise(workdir: Path) -> dict[str, Any]:
  """The numbers of a run's steps and bytes, by learner."""
  log, traffic = read_events(workdir), TrafficTotals()
  for event in log.of(events.Traffic):
    traffic.add(event)
  steps = {str(parse_role(role)[1]): each for role, each in _by_role(log, events.Step).items()}
  steps = dict(sorted(steps.items(), key=lambda item: int(item[0])))
  fix = "name that of a run whose learners have stepped"
  require(bool(steps), "--workdir", str(workdir), "has no steps of a learner", fix)
  return {
    "utilisation": {m: utilisation(each) for m, each in steps.items()},
    "blocked_seconds": {
      m: round(sum(step.blocked_seconds for step in each[1:]), 3) for m, each in steps.items()
    },
    "bytes": {m: sum(traffic.by_role[f"learner-{m}"]) for m in steps},
    "steps": {m: len(each) for m, each in steps.items()},
    "step_seconds": {
      m: round(statistics.median(step.seconds for step in each), 4) for m, each in steps.items()
    },
    "loss": workdirs.outcome(workdir).get("loss_merged"),
  }


def measure(run: Sequence[Event], learners: int) -> dict[str, float]:
  """The numbers of `COMPARED`, and `step_seconds` from step to step, of a run's events.

  Raises:
    SystemExit: the run has too few rounds.
  """
  steps = _by_role(run, events.Step)
  first = {role: each[0].time - each[0].seconds for role, each in steps.items()}
  begin, end = max(first.values()), min(each[-1].time for each in steps.values())
  begun = {_key(e): e.time for e in run if isinstance(e, events.Round) and e.time >= begin}
  commits = {_key(e): e for e in run if isinstance(e, events.Commit)}
  whole = {key for key in begun if key in commits}
  copied = {(e.role, *_key(e)): e.time for e in run if isinstance(e, events.CopyOut)}
  applied = [e for e in run if isinstance(e, events.Apply) and _key(e) in whole and e.time <= end]
  taken = [e for e in run if isinstance(e, events.Stage) and _key(e) in whole and e.time <= end]
  merged = [e for e in applied if e.included]
  whole &= {_key(e) for e in applied}
  if len(whole) < 2 or not merged:
    raise SystemExit(f"{len(whole)} whole rounds are too few to measure: let it run for longer")
  counts = _by_role([e for e in run if begin <= e.time <= end], events.Traffic)
  step = statistics.mean(
    (each[-1].time - each[0].time) / (len(each) - 1) for each in steps.values()
  )
  begun_at = min(each[0].time for each in steps.values()) - step
  return {
    "step_seconds": step,
    "round_seconds": statistics.mean(commits[r].time - begun[r] for r in whole),
    "delivery_seconds": statistics.mean(e.time - commits[_key(e)].time for e in taken),
    "sync_seconds": statistics.mean(e.time - copied[e.role, *_key(e)] for e in merged),
    "mbit": statistics.mean(_mbit(each) for each in counts.values() if len(each) > 1),
    "participation": statistics.mean(len(commits[r].learners) for r in whole) / learners,
    "first_version_seconds": min(e.time for e in commits.values()) - begun_at,
    "rounds": len(whole),
  }


def _key(event: Any) -> tuple[int, int]:
  return event.fragment, event.round  # two shards may use the same round id


def _by_role(run: Sequence[Event], kind: type[E]) -> dict[str, list[E]]:
  """The learners' events of this kind, by role."""
  found: dict[str, list[E]] = defaultdict(list)
  for event in run:
    if isinstance(event, kind) and event.role.startswith("learner-"):
      found[event.role].append(event)
  return found


def _mbit(counts: list[events.Traffic]) -> float:
  first, last = counts[0], counts[-1]
  moved = last.sent_bytes + last.received_bytes - first.sent_bytes - first.received_bytes
  return 8e-6 * moved / (last.time - first.time)


def plan(config: Config, sizes: tuple[int, ...], step: float, links: dict) -> dict[str, float]:
  """The planner's numbers."""
  setting = planner.Setting.of(config, sizes, step_seconds=step, **links)
  made = planner.make(setting)
  moved = made.exchanged.push_bytes + made.exchanged.publish_bytes
  due = min(due_after(p, 0, config.sync) for p in range(config.sync.num_fragments))
  return {
    "round_seconds": made.round_seconds,
    "delivery_seconds": made.delivery_seconds,
    "sync_seconds": made.applied_steps * step,
    "mbit": 8e-6 * moved / (made.period_steps * step / made.utilisation),
    "participation": made.participation,
    "first_version_seconds": due * step + links["latency_seconds"] + made.round_seconds,
  }


def play(config: Config, sizes: tuple[int, ...], step: float, links: dict) -> dict[str, float]:
  """The numbers of the virtual runs, on average."""
  islands = dataclasses.replace(config.islands, min_step_seconds=0.0)
  config, each = dataclasses.replace(config, islands=islands), []
  for seed in range(SEEDS):
    found: list[Event] = []
    speeds = Speeds(
      sizes,
      step_seconds=step / (1 + JITTER / 2),
      jitter=JITTER,
      gbps=(links["gbps"],),
      latency_seconds=(links["latency_seconds"],),
      shard_gbps=links["shard_gbps"],
      late_seconds=step,  # spreads the ends of islands' steps in time
      seed=seed,
    )
    VirtualRun(config, speeds, found.append).finish()
    each.append(measure(found, config.islands.num_learners))
  return {name: statistics.mean(run[name] for run in each) for name in each[0]}


def compare(folders: Sequence[Path], mbit: float, delay_ms: float) -> dict[str, Any]:
  """Planned, virtual and real."""
  config = workdirs.saved_config(folders[0])
  sizes, gbps = initial.make_plan(config).sizes, mbit / 1e3
  links = {"gbps": gbps, "shard_gbps": gbps, "latency_seconds": delay_ms / 1e3}
  learners = config.islands.num_learners
  real = [measure(sorted(read_events(w), key=lambda e: e.time), learners) for w in folders]
  step = statistics.mean(run["step_seconds"] for run in real)
  planned, virtual = plan(config, sizes, step, links), play(config, sizes, step, links)
  mean = {name: statistics.mean(run[name] for run in real) for name in COMPARED}
  errors = {
    who: {name: round(100 * (said[name] / mean[name] - 1), 1) for name in COMPARED if mean[name]}
    for who, said in (("planned", planned), ("virtual", virtual))
  }
  print(f"\nsteps of {step:.3g} s; {' + '.join(str(r['rounds']) for r in real)} rounds")
  told = {"planned": planned, "virtual": virtual, "real, mean": mean}
  told |= {f"{who}, off by %": each for who, each in errors.items()}
  common.show({n: {who: each.get(n, math.nan) for who, each in told.items()} for n in COMPARED}, 3)
  rounded = [{k: round(v, 4) for k, v in each.items()} for each in (planned, virtual, *real)]
  return {
    "planned": rounded[0],
    "virtual": rounded[1],
    "real": rounded[2:],
    "error_percent": errors,
  }


def main() -> None:
  workdir = {"type": Path, "required": True, "action": "append"}
  number = {"type": float, "required": True}
  args = common.options(__doc__, workdir=workdir, mbit=number, delay_ms=number)
  result = summarise(args.workdir[-1])
  common.show({name: by for name, by in result.items() if name != "loss"}, digits=4)  # by island
  if (args.workdir[0] / "config.json").exists():
    result |= compare(args.workdir, args.mbit, args.delay_ms)
  print(json.dumps({**result, "mbit": args.mbit, "delay_ms": args.delay_ms}))


if __name__ == "__main__":
  common.run_script(main)
