"""Chaotic runs, each replayed from its trace: is the replay equal to the run, bit by bit?

Every run has a seed of its own, which chooses its faults (kills of learners and shards, stalls,
slowness), how versions are applied, codecs, quorum, outer optimizer, snapshots and the state with
which a learner comes back; some runs are stopped and resumed. Tiny models in threads, one island
with two devices. Islands are compiled once for all runs, and once more for all replays.

  python scripts/replay_chaos.py [--runs=20] [--seed=0] [--workdir=DIR]

With --workdir the runs stay there, for `ddiloco trace` and `ddiloco replay`. Prints a line a run;
exit status 1 if a replay is not identical. Last line: {"runs", "identical", "kills", "rejoins",
"restores", "steps", "commits", "digests_compared"}.
"""

from __future__ import annotations

import collections
import json
import random
from pathlib import Path
from typing import Any

import common

from ddiloco import environment

LEARNERS, SHARDS, DEVICES = 3, 2, 4
if __name__ == "__main__":
  environment.prepare(num_cpu_devices=DEVICES + 1, cpu_only=True)

import jax

from ddiloco.config import Config
from ddiloco.engines.engine import save_result
from ddiloco.engines.threads import ThreadsEngine
from ddiloco.observe.eventlog import read_events
from ddiloco.protocol.events import Event, Fault, Joined
from ddiloco.roles import initial
from ddiloco.trace.replay import replay_run
from ddiloco.trace.text import open_trace
from ddiloco.training import data, devices
from ddiloco.training.island import Island

FACTOR = 6.0  # of slow steps
STEPS = 150  # of every learner if all live
TOKENS = 2 * 16  # of a step: B = 2, T = 16


def faults_of(source: random.Random, snapshots: bool) -> list[dict[str, Any]]:
  """At least one kill of a learner, and random other faults.

  With snapshots, steps are slow, so that some snapshots are complete before the first kill.
  """
  learners = [f"learner-{m}" for m in range(LEARNERS)]
  roles = [*learners, *(f"syncer-{s}" for s in range(SHARDS))]
  kinds = ["kill", *source.choices(["kill", "stall", "slow"], [3, 1, 1], k=source.randint(2, 5))]
  found = []
  for i, action in enumerate(kinds):
    fault = {
      "action": action,
      "role": source.choice(learners if i == 0 else roles),
      "at_step": source.randint(STEPS // 2 if snapshots else 5, STEPS - 20),
      "seconds": round(source.uniform(0.02, 0.3), 3),
    }
    found.append(fault | ({"factor": 3.0} if action == "slow" else {}))
  slow = {"action": "slow", "at_step": 1, "seconds": 60.0, "factor": FACTOR}
  return [{**slow, "role": role} for role in learners] * snapshots + found


def config_of(seed: int) -> Config:
  """The chaotic run of this seed."""
  source = random.Random(f"chaos {seed}")
  apply = source.choice(["rebase", "rebase", "overwrite", "mix"])
  snapshot_steps = source.choice([0, 25, 40])
  sync = {
    "num_shards": SHARDS,
    "num_fragments": 2,
    "sync_period": source.choice([4, 8, 12]),
    "min_quorum": source.choice([1, 1, 2]),
    "apply": apply,
    "push_codec": source.choice(["f32", "bf16", "int8", "int4"]),
    "publish_codec": source.choice(["f32", "f32", "bf16"]),
    "error_feedback": apply != "rebase" and source.random() < 0.5,
    "liveness_seconds": 1.0,
    "snapshot_steps": snapshot_steps,
  }
  outer = {"learning_rate": 0.7, "momentum": source.choice([0.0, 0.9])}
  return common.small(
    *(1, 16, 16, True),
    seed=seed,
    inner={"learning_rate": 1e-2, "warmup_steps": 5},
    islands={
      "num_learners": LEARNERS,
      "batch_size": 2,
      "overrides": {"1": {"devices": 2, "fsdp": 2}},
    },
    sync=sync,
    outer=outer,
    checkpoint={"rejoin": source.choice(["own", "own", "peer", "fresh"])},
    run={"total_tokens": LEARNERS * STEPS * TOKENS, "evaluations": 2, "restart_seconds": 0.05},
    chaos={"faults": faults_of(source, snapshot_steps > 0)},
  )


class Bench:
  """Makes runs, with programs that are compiled once."""

  def __init__(self) -> None:
    config = config_of(0)
    self.corpus = data.open_corpus(config.data)
    counts = [config.islands.island(m).devices for m in range(config.islands.num_learners)]
    groups = devices.partition(jax.devices(), counts)
    plan, shared = initial.make_plan(config), dict[Any, Any]()
    self._islands = {m: Island(config, m, group, plan, shared) for m, group in enumerate(groups)}

  def run(self, config: Config, workdir: Path, stop_at: int | None = None) -> None:
    """Makes one run as `ddiloco train` does; `stop_at`: stops it at that step and resumes it."""
    common.make_folder(workdir, new=True)
    (workdir / "config.json").write_text(config.to_json())
    if stop_at is not None:
      engine = self._engine(config, workdir)

      def listen(event: Event) -> None:
        if getattr(event, "global_step", 0) >= stop_at:
          engine.stop.set()

      engine.run([listen])
    outcome = self._engine(config, workdir).run()
    if outcome.reason != "finished":
      raise RuntimeError(f"{workdir}: the run {outcome.reason}")
    save_result(config, workdir, outcome.params, outcome.merged_tokens)

  def _engine(self, config: Config, workdir: Path) -> ThreadsEngine:
    return ThreadsEngine(config, workdir, self.corpus, lambda params: {"loss": 0.0}, self._islands)


def main() -> int:
  options = common.options(__doc__, runs=20, seed=(0, "of the first run"), workdir=Path)
  bench, total = Bench(), collections.Counter[str]()
  with common.folder(options.workdir) as folder:
    for seed in range(options.seed, options.seed + options.runs):
      workdir = folder / f"run-{seed}"
      config = config_of(seed)
      stop_at = STEPS * 2 // 3 if config.sync.snapshot_steps and seed % 2 else None
      bench.run(config, workdir, stop_at)
      summary, difference = replay_run(workdir, open_trace(workdir))
      count = counted(workdir, summary)
      total.update(count)
      sync, faults = config.sync, config.chaos.faults
      kinds = ", ".join(f"{f.action} {f.role}" for f in faults if f.factor != FACTOR)
      verdict = "identical" if summary["identical"] else f"DIFFERENT: {difference}"
      how = f"{sync.apply}, {sync.push_codec}, rejoin {config.checkpoint.rejoin}; {kinds}"
      print(
        f"seed {seed}: {verdict}; {dict(count)}; {how}{', resumed' * bool(stop_at)}", flush=True
      )
  print(json.dumps({"runs": options.runs, **total}))
  return 0 if total["identical"] == options.runs else 1


def counted(workdir: Path, summary: dict[str, Any]) -> dict[str, int]:
  """The numbers of one run that the last line adds up."""
  events = read_events(workdir)
  kinds = collections.Counter(e.action if isinstance(e, Fault) else e.kind for e in events)
  rejoins = sum(e.incarnation > 0 for e in events.of(Joined))
  return {
    "identical": int(summary["identical"]),
    "kills": kinds["kill"],
    "rejoins": rejoins,
    "restores": kinds["restored"],
    **{name: summary[name] for name in ("steps", "commits", "digests_compared")},
  }


if __name__ == "__main__":
  common.run_script(main)
