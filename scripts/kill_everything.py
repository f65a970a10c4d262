"""Kills a whole run with SIGKILL at random moments and starts it again: is work lost or doubled?

`ddiloco train` of a tiny model; moments are uniform over the global step, a fifth of them while it
starts and compiles, some in the second after its last step. After each kill the checkpoints and
event logs must agree: the newest committed snapshot is undamaged and no older than before, the next
life begins with exactly this snapshot, and in the rounds that lead to its values no push is counted
twice and the tokens add up. In the end the run must be finished, with a held-out loss like that of
undisturbed runs.

  python scripts/kill_everything.py [--kills=50] [--seed=0] [--engine=threads] [--workdir=DIR]

With --workdir all files stay there, and a script that was cut off goes on where it was. Prints a
line for each kill; exit status 1 if a check fails. Last line: {"kills", "resumes", "snapshots",
"versions_back", "counted_twice", "finished", "loss", "loss_undisturbed", "seconds", ...}.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common

from ddiloco.checkpoint.signed_json import Damaged
from ddiloco.checkpoint.snapshots import Storage
from ddiloco.config import CheckpointConfig, Config, from_dict
from ddiloco.observe.eventlog import EventLog, Follower, read_events
from ddiloco.protocol.events import Commit, Owns, Restored, Snapshot, Step
from ddiloco.roles import initial
from ddiloco.trace.check import check
from ddiloco.trace.text import read_trace
from ddiloco.workdir import CHECKPOINTS, COMPILED, OUTCOME

LEARNERS, FRAGMENTS = 2, 2
TOKENS = 8 * 32  # of a step: B = 8, T = 32
POLL_SECONDS = 0.02
LIFE_SECONDS = 240.0  # after which a life that has not ended is given up
FIRST_START_SECONDS = 20.0  # until the first step, while nothing is compiled


def config_of(seed: int, steps: int) -> Config:
  """A tiny run with snapshots every few tenths of a second."""
  return from_dict(
    {
      "seed": seed,
      "model": common.small_model(1, 16, kv_heads=1, mlp=2),
      "data": {"source": "synthetic", "sequence_length": 32, "heldout_sequences": 16},
      "inner": {"learning_rate": 1e-2, "warmup_steps": 5},
      "islands": {
        "num_learners": LEARNERS, "batch_size": 8, "min_step_seconds": POLL_SECONDS
      },
      "sync": {
        "num_shards": 2, "num_fragments": FRAGMENTS, "sync_period": 8, "liveness_seconds": 1.0,
        "snapshot_steps": 20,
      },
      "outer": {"learning_rate": 0.7, "momentum": 0.5},
      "network": {"drain_seconds": 2.0, "hello_seconds": 0.1},  # shorter waits at starts and ends
      "run": {
        "evaluations": 2, "sample_tokens": 0, "restart_seconds": 0.1,
        "total_tokens": LEARNERS * steps * TOKENS,
      },
    }
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
  while True:
    there = [process.pid, *common.processes_of(workdir)]
    for pid in there:
      try:
        os.kill(pid, signal.SIGKILL)
      except ProcessLookupError:
        continue
    process.wait()
    if not common.processes_of(workdir):
      return
    time.sleep(POLL_SECONDS)


@dataclasses.dataclass
class Life:
  """The outcome of one start of the run."""

  events: EventLog
  status: int | None  # None: killed
  start_seconds: float | None  # until its first step


def live(workdir: Path, config: Config, engine: str, moment: Moment | None, start: float) -> Life:
  """Starts the run, and kills it at its moment; `start` is how long a start takes, in seconds."""
  follower, events = Follower(workdir), EventLog()
  follower.poll()  # skips the events of earlier lives
  began, stepped, reached = time.monotonic(), None, None
  process = common.start(config, workdir, f"--engine={engine}")
  try:
    while process.poll() is None:
      now = time.monotonic()
      new = follower.poll()
      events += new
      steps_seen = [e.global_step for e in new if isinstance(e, Step)]
      if (workdir / OUTCOME).exists():
        moment = None  # the run is over, and is not killed while it writes its report
      if steps_seen and stepped is None:
        stepped = now - began
      newest = max(steps_seen, default=-1)
      if moment is not None and 0 <= moment.global_step <= newest:
        reached = reached or now
      if moment is not None:
        late = stepped is not None or now >= began + moment.wait * start
        if (late and moment.global_step < 0) or (
          reached is not None and now >= reached + moment.wait
        ):
          break
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


class Chains:
  """The rounds that lead to a value."""

  def __init__(self, events: EventLog):
    self.commits = {(e.fragment, e.round): e for e in events.of(Commit)}

  def counted_twice(self, fragment: int, round_id: int) -> int:
    """How often pushes are in the value of this round again."""
    pushes: collections.Counter = collections.Counter()
    for commit in self.rounds(fragment, round_id):
      whose = zip(commit.learners, commit.incarnations)
      pushes.update((learner, life, commit.round) for learner, life in whose)
    return sum(count - 1 for count in pushes.values())

  def wrong_tokens(self, fragment: int, round_id: int, merged_tokens: int) -> list[str]:
    """A message if the tokens of all rounds do not add up to those of the value."""
    rounds = self.rounds(fragment, round_id)
    summed = sum(commit.tokens for commit in rounds)
    if summed != merged_tokens:
      return [f"fragment {fragment}: {merged_tokens} tokens merged, its rounds make it {summed}"]
    return []

  def rounds(self, fragment: int, round_id: int) -> list[Commit]:
    """The rounds, newest first; ends where the log has no commit."""
    found = []
    while (commit := self.commits.get((fragment, round_id))) is not None:
      found.append(commit)
      round_id = commit.base_round
    return found

  def last(self, fragment: int) -> Commit | None:
    rounds = [r for p, r in self.commits if p == fragment]
    return self.commits[fragment, max(rounds)] if rounds else None


# --- the whole test -------------------------------------------------------------------------------


class Record:
  """The script's own state, on disk after every kill."""

  def __init__(self, path: Path, seed: int):
    self.path = path
    self.data: dict[str, Any] = {
      "seed": seed, "lives": 0, "kills": 0, "resumes": 0, "snapshots": 0, "versions_back": 0,
      "counted_twice": 0, "problems": [], "seconds": 0.0, "start_seconds": FIRST_START_SECONDS,
      "values": {},
    }  # fmt: skip
    if path.exists():
      self.data = json.loads(path.read_text())

  def add(self, **changes: Any) -> None:
    self.data.update(changes)
    mine = self.path.with_suffix(".new")
    mine.write_text(json.dumps(self.data))
    mine.replace(self.path)


def one_life(
  record: Record,
  run: Path,
  config: Config,
  storage: Storage,
  engine: str,
  moment: Moment | None,
) -> Life:
  """Starts the run, kills it at its moment, and checks the invariants."""
  data, before, began = record.data, newest(storage), time.monotonic()
  life = live(run, config, engine, moment, data["start_seconds"])
  after, chains = newest(storage), Chains(read_events(run))
  wrong = begun_wrong(life, before)
  wrong += [f"committed, and not whole: {text}" for text in after.damaged]
  wrong += [str(problem) for problem in check(read_trace(run)).problems]
  twice = 0
  for p, (_, round_id, _) in after.values.items():
    wrong += chains.wrong_tokens(p, round_id, after.merged_tokens[p])
    twice += chains.counted_twice(p, round_id)
  versions = {str(p): value[0] for p, value in after.values.items()}
  back = sum(versions.get(p, 0) < version for p, version in data["values"].items())
  record.add(
    lives=data["lives"] + 1,
    kills=data["kills"] + (life.status is None),
    resumes=data["resumes"] + any(e.version for e in life.events.of(Owns)),
    snapshots=data["snapshots"] + len(life.events.of(Snapshot)),
    versions_back=data["versions_back"] + back,
    counted_twice=max(data["counted_twice"], twice),
    problems=[*data["problems"], *(w for w in wrong if w not in data["problems"])],
    seconds=round(data["seconds"] + time.monotonic() - began, 1),
    start_seconds=life.start_seconds or data["start_seconds"],
    values=versions,
  )
  global_step = max((e.global_step for e in life.events.of(Step)), default=None)
  when = "its start" if global_step is None else f"global step {global_step}"
  print(
    f"life {data['lives']}: {'killed' if life.status is None else f'exit {life.status}'} at"
    f" {when}; snapshot {after.snapshot}, versions"
    f" {list(versions.values())}{''.join(f'; WRONG: {w}' for w in wrong[:3])}",
    flush=True,
  )
  return life


def loss_of(workdir: Path) -> float:
  return json.loads((workdir / OUTCOME).read_text())["loss_merged"]


def undisturbed(folder: Path, run: Path, seed: int, steps: int, engine: str) -> float:
  """The loss of the same run without kills; uses the programs that are compiled already."""
  workdir = folder / f"undisturbed-{seed}"
  if not (workdir / OUTCOME).exists():
    shutil.rmtree(workdir, ignore_errors=True)
    if (run / COMPILED).exists():  # not there if the user has set a cache folder
      shutil.copytree(run / COMPILED, workdir / COMPILED)
    life = live(workdir, config_of(seed, steps), engine, None, 0.0)
    if life.status:
      raise RuntimeError(f"{workdir}: exit status {life.status}")
  print(f"undisturbed, seed {seed}: loss {loss_of(workdir):.4f}", flush=True)
  return loss_of(workdir)


def final(record: Record, run: Path, status: int | None) -> None:
  """Checks the values that the run ends with."""
  chains, wrong, twice = Chains(read_events(run)), [], 0
  for p in range(FRAGMENTS):
    last = chains.last(p)
    if last is None:
      wrong.append(f"fragment {p} was never committed")
      continue
    wrong += chains.wrong_tokens(p, last.round, last.merged_tokens)
    twice += chains.counted_twice(p, last.round)
  finished = status == 0 and json.loads((run / OUTCOME).read_text())["reason"] == "finished"
  problems = [*record.data["problems"], *wrong]
  twice = max(record.data["counted_twice"], twice)
  record.add(finished=finished, counted_twice=twice, problems=problems)


def main() -> int:
  parser = common.parser(__doc__, quick="")
  parser.add_argument("--kills", type=int, default=50)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--steps", type=int, default=0, help="of every learner; 0: 30 for each kill")
  parser.add_argument("--undisturbed", type=int, default=3, help="runs to compare the loss with")
  parser.add_argument("--engine", choices=["threads", "processes"], default="threads")
  parser.add_argument("--workdir", type=Path, default=None)
  options = parser.parse_args()
  with tempfile.TemporaryDirectory() as temporary:
    return whole(options, (options.workdir or Path(temporary)).absolute())


def whole(options: argparse.Namespace, folder: Path) -> int:
  steps = options.steps or 30 * max(10, options.kills)
  config, run = config_of(options.seed, steps), folder / "run"
  run.mkdir(parents=True, exist_ok=True)
  record = Record(folder / "kills.json", options.seed)
  print(f"seed {options.seed}: {options.kills} kills over {steps} steps in {folder}", flush=True)
  storage = Storage(run / CHECKPOINTS, initial.make_plan(config).plan_id, print)
  life = None
  for moment in moments(options.seed, options.kills, steps)[record.data["kills"] :]:
    life = one_life(record, run, config, storage, options.engine, moment)
    if life.status is not None:  # the run ended before the last moments
      break
  if life is None or life.status is None:
    life = one_life(record, run, config, storage, options.engine, None)
  final(record, run, life.status)
  names = ("kills", "resumes", "snapshots", "versions_back", "counted_twice", "finished")
  result = {name: record.data[name] for name in names}
  result["loss"] = loss_of(run) if result["finished"] else None
  seeds = range(options.seed, options.seed + options.undisturbed)
  result["loss_undisturbed"] = [
    undisturbed(folder, run, seed, steps, options.engine) for seed in seeds
  ]
  result |= {"seconds": record.data["seconds"], "problems": len(record.data["problems"])}
  for problem in record.data["problems"]:
    print(f"WRONG: {problem}")
  print(json.dumps(result))
  bad = ("versions_back", "counted_twice", "problems")
  return 0 if result["finished"] and not any(result[name] for name in bad) else 1


if __name__ == "__main__":
  sys.exit(main())
