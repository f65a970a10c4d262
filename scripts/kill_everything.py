"""Kills a whole run with SIGKILL at random moments and starts it again: is work lost or doubled?

`ddiloco train` of a tiny model; moments are uniform over the global step, a fifth of them while it
starts and compiles, some in the second after its last step. After each kill the checkpoints and
event logs must agree: the newest committed snapshot is undamaged and no older than before, the next
life begins with exactly this snapshot, its values are those of logged commits with as many merged
tokens, and the trace is proven, in which no step is merged twice. In the end the run must be
finished, with a held-out loss like that of undisturbed runs.

  python scripts/kill_everything.py [--kills=50] [--steps=1500] [--undisturbed=3] [--seed=0]
                                    [--engine=threads] [--workdir=DIR]

Every learner makes --steps steps, by default 30 for each kill; --undisturbed: how many runs without
kills. With --workdir, which must be new, all files stay there. Prints a line for each kill; exit
status 1 if a check fails. Last line: {"kills", "resumes", "snapshots",
"versions_back", "finished", "loss", "loss_undisturbed", "seconds", "problems"}.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import math
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import common

from ddiloco.checkpoint.signed_json import Damaged
from ddiloco.checkpoint.snapshots import Storage
from ddiloco.config import CheckpointConfig, Config
from ddiloco.observe.eventlog import EventLog, Follower, read_events
from ddiloco.protocol.events import Commit, Owns, Restored, Snapshot, Step
from ddiloco.roles import initial
from ddiloco.trace.check import check
from ddiloco.trace.text import read_trace
from ddiloco.workdir import CHECKPOINTS, COMPILED, OUTCOME, outcome

LEARNERS, FRAGMENTS = 2, 2
TOKENS = 8 * 32  # of a step: B = 8, T = 32
POLL_SECONDS = 0.02
COUNTED = ("kills", "resumes", "snapshots", "versions_back")
LIFE_SECONDS = 1200.0  # after which a life that has not ended is given up
FIRST_START_SECONDS = 20.0  # until the first step, while nothing is compiled


def config_of(seed: int, steps: int) -> Config:
  """A tiny run with snapshots every few tenths of a second."""
  return common.small(
    *(1, 16, 32, True),
    seed=seed,
    inner={"learning_rate": 1e-2, "warmup_steps": 5},
    islands={"num_learners": LEARNERS, "batch_size": 8, "min_step_seconds": POLL_SECONDS},
    sync={
      "num_shards": 2, "num_fragments": FRAGMENTS, "sync_period": 8, "liveness_seconds": 1.0,
      "snapshot_steps": 20,
    },
    outer={"learning_rate": 0.7, "momentum": 0.5},
    network={"drain_seconds": 2.0, "hello_seconds": 0.1},  # shorter waits at starts and ends
    run={
      "evaluations": 2, "sample_tokens": 0, "restart_seconds": 0.1,
      "total_tokens": LEARNERS * steps * TOKENS,
    },
  )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Moment:
  """When a life is killed: during its start, or after a global step."""

  global_step: int  # -1: in the start, at its first step at the latest
  wait: float  # before the kill: in a start a share of its usual time; after the last step seconds


def moments(seed: int, kills: int, steps: int) -> list[Moment]:
  """The moments of all kills, in order; the first of them during compilation."""
  source = random.Random(f"kills {seed}")
  steps_at = sorted(int(steps * min(1.0, source.uniform(0.0, 1.03))) for _ in range(kills))
  starts = [i == 0 or source.random() < 0.2 for i in range(kills)]
  shares = [source.random() for _ in starts]
  return [
    Moment(-1, share) if start else Moment(at, share if at == steps else 0.0)
    for at, start, share in zip(steps_at, starts, shares)
  ]


# --- processes ------------------------------------------------------------------------------------


def kill_all(process: subprocess.Popen, workdir: Path) -> None:
  """Kills the process and its descendants with SIGKILL."""
  there = [process.pid]
  while there:
    for pid in there:
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    process.wait()
    there = common.processes_of(workdir)


@dataclasses.dataclass
class Life:
  """The outcome of one start of the run."""

  events: EventLog
  status: int | None  # None: killed
  start_seconds: float | None  # until its first step


def live(workdir: Path, config: Config, engine: str, moment: Moment | None, start: float) -> Life:
  """Starts the run, and kills it at its moment; `start` is how long a start takes, in seconds."""
  follower, events = Follower(workdir), EventLog()
  follower.skip()  # the events of earlier lives
  began, stepped, newest, kill_at = time.monotonic(), None, -1, math.inf
  process = common.start(config, workdir, f"--engine={engine}")
  try:
    while process.poll() is None and (now := time.monotonic()) < kill_at:
      new = follower.poll()
      events += new
      newest = max(newest, *(e.global_step for e in new if isinstance(e, Step)), -1)
      if stepped is None and newest >= 0:
        stepped = now - began
      if (workdir / OUTCOME).exists():
        moment, kill_at = None, math.inf  # it is over, and not killed while it writes its report
      if moment is not None and moment.global_step < 0:
        kill_at = now if stepped is not None else began + moment.wait * start
      elif moment is not None and newest >= moment.global_step:
        kill_at = min(kill_at, now + moment.wait)
      if now - began > LIFE_SECONDS:
        raise RuntimeError(f"after {LIFE_SECONDS:g} s the run in {workdir} is not done")
      time.sleep(POLL_SECONDS)
    status = process.poll()
  finally:
    kill_all(process, workdir)
  events += follower.poll()
  return Life(events, status, stepped)


# --- the invariants -------------------------------------------------------------------------------

KEEP = CheckpointConfig().keep
Values = dict[int, tuple[int, int, int]]  # fragment -> version, round, round of the momentum


@dataclasses.dataclass(frozen=True)
class Newest:
  """The newest committed snapshot that is undamaged."""

  snapshot: int
  values: Values
  merged_tokens: dict[int, int]  # by fragment
  learners: dict[str, int]  # role -> the newest snapshot that has a part of it
  damaged: list[str]  # parts that are committed but damaged


def newest(storage: Storage) -> Newest:
  """The state with which a resume must begin; reads and checks every array."""
  found, damaged, learners = None, list[str](), dict[str, int]()
  for number, snapshot in enumerate(storage.committed()):
    roles, parts = storage.manifest(snapshot)["parts"], {}
    for role in roles:
      try:
        parts[role] = storage.load(snapshot, role)
      except Damaged as error:  # older snapshots keep only a role's newest part
        if number < KEEP:
          damaged.append(str(error))
    for role in parts:
      if role.startswith("learner"):
        learners.setdefault(role, snapshot)
    if len(parts) == len(roles):
      found = found or (snapshot, [p.state for r, p in parts.items() if r.startswith("syncer")])
  snapshot, states = found or (0, [])
  momentum = {int(p): r for state in states for p, r in state["momentum_rounds"].items()}
  fragments = {f["index"]: f for state in states for f in state["fragments"]}
  values = {p: (f["version"], f["last_round"], momentum[p]) for p, f in fragments.items()}
  tokens = {p: f["merged_tokens"] for p, f in fragments.items()}
  return Newest(snapshot, values, tokens, learners, damaged)


def begun_wrong(life: Life, before: Newest) -> list[str]:
  """The differences between a life's first values and those of the newest snapshot."""
  wrong, seen = list[str](), set[int | str]()
  for event in life.events:
    if isinstance(event, Owns) and (p := event.fragment) not in seen:
      seen.add(p)
      mine = event.version, event.round, event.momentum_round
      if mine != (should := before.values.get(p, (0, -1, -1))):
        wrong.append(f"fragment {p} begins with {mine}, the snapshot has {should}")
    if isinstance(event, Restored) and (role := event.role) not in seen:
      seen.add(role)
      if event.snapshot != (part := before.learners.get(role)):
        wrong.append(f"{role} begins with snapshot {event.snapshot}, its newest is {part}")
  return wrong


def saved_wrong(saved: Newest, log: EventLog) -> list[str]:
  """The damages of a snapshot, and its differences from the commits of its values."""
  tokens = {(e.fragment, e.round, e.version): e.merged_tokens for e in log.of(Commit)}
  wrong = [f"committed, and not whole: {text}" for text in saved.damaged]
  for p, (version, round_id, _) in saved.values.items():
    said, mine = tokens.get((p, round_id, version), 0), saved.merged_tokens[p]
    if said != mine:
      wrong.append(f"fragment {p} is saved with {mine} merged tokens, its commit says {said}")
  return wrong


# --- the whole test -------------------------------------------------------------------------------


class Ordeal:
  """The run, and the script's own numbers."""

  def __init__(self, folder: Path, config: Config, engine: str):
    self.run, self.config, self._folder, self._engine = folder / "run", config, folder, engine
    common.make_folder(self.run, new=True)
    self._storage = Storage(self.run / CHECKPOINTS, initial.make_plan(config).plan_id, print)
    self._start_seconds, self._versions = FIRST_START_SECONDS, dict[int, int]()
    self.counted = collections.Counter[str]()
    self.problems: dict[str, None] = {}  # each once, in order

  def live(self, moment: Moment | None) -> int | None:
    """One life: starts the run, kills it at its moment, checks the invariants; its exit status."""
    before = newest(self._storage)
    life = live(self.run, self.config, self._engine, moment, self._start_seconds)
    after = newest(self._storage)
    wrong = begun_wrong(life, before) + saved_wrong(after, read_events(self.run))
    wrong += check(read_trace(self.run)).problems
    versions = {p: value[0] for p, value in after.values.items()}
    self.counted["kills"] += life.status is None
    self.counted["resumes"] += any(e.version for e in life.events.of(Owns))
    self.counted["snapshots"] += len(life.events.of(Snapshot))
    back = sum(versions.get(p, 0) < old for p, old in self._versions.items())
    self.counted["versions_back"] += back
    self.problems |= dict.fromkeys(wrong)
    self._start_seconds, self._versions = life.start_seconds or self._start_seconds, versions
    steps = [e.global_step for e in life.events.of(Step)]
    print(
      f"{'killed' if life.status is None else f'exit {life.status}'} after"
      f" {f'global step {max(steps)}' if steps else 'no step'}; snapshot {after.snapshot},"
      f" versions {list(versions.values())}{''.join(f'; WRONG: {w}' for w in wrong[:3])}",
      flush=True,
    )
    return life.status

  def undisturbed(self, seed: int) -> float:
    """The loss of the same run without kills; uses the programs that are compiled already."""
    workdir = self._folder / f"undisturbed-{seed}"
    if (self.run / COMPILED).exists():  # not there if the user has set a cache folder
      shutil.copytree(self.run / COMPILED, workdir / COMPILED)
    config = dataclasses.replace(self.config, seed=seed)
    if status := live(workdir, config, self._engine, None, 0.0).status:
      raise RuntimeError(f"{workdir}: exit status {status}")
    loss = outcome(workdir)["loss_merged"]
    print(f"undisturbed, seed {seed}: loss {loss:.4f}", flush=True)
    return loss


def main() -> int:
  options = common.options(
    __doc__,
    kills=50,
    steps=int,
    undisturbed={"type": int, "default": 3},
    seed=0,
    engine=common.ENGINE,
    workdir=Path,
  )
  with common.folder(options.workdir) as folder:
    return whole(options, folder)


def whole(options: argparse.Namespace, folder: Path) -> int:
  steps = options.steps or 30 * max(10, options.kills)
  ordeal = Ordeal(folder, config_of(options.seed, steps), options.engine)
  problems, status, began = ordeal.problems, None, time.monotonic()
  print(f"seed {options.seed}: {options.kills} kills over {steps} steps in {folder}", flush=True)
  for moment in [*moments(options.seed, options.kills, steps), None]:
    status = ordeal.live(moment)
    if status is not None:  # the run ended, perhaps before the last moments
      break
  never = set(range(FRAGMENTS)) - {e.fragment for e in read_events(ordeal.run).of(Commit)}
  problems |= dict.fromkeys(f"fragment {p} was never committed" for p in sorted(never))
  seconds = round(time.monotonic() - began, 1)
  ended = outcome(ordeal.run)
  finished = status == 0 and ended["reason"] == "finished"
  seeds = range(options.seed, options.seed + options.undisturbed)
  result = {
    **{name: ordeal.counted[name] for name in COUNTED},
    "finished": finished,
    "loss": ended["loss_merged"] if finished else None,
    "loss_undisturbed": [ordeal.undisturbed(seed) for seed in seeds],
    "seconds": seconds,
    "problems": len(problems),
  }
  for problem in problems:
    print(f"WRONG: {problem}")
  print(json.dumps(result))
  return int(not finished or ordeal.counted["versions_back"] > 0 or bool(problems))


if __name__ == "__main__":
  common.run_script(main)
