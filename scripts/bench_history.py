"""What it costs to read the event logs of a long run: events per second, and peak memory.

  python scripts/bench_history.py                        # ten million events: about 25 minutes
  python scripts/bench_history.py --events=200000 --readers=trace

Writes the logs of a run of eight islands, two shards and 24 fragments, with a step every six
seconds, a kill every two hours and a snapshot every 200 steps. Reads them as `ddiloco report`, as
the dashboard, as a resumed run, and as `ddiloco trace` (only if asked for: it keeps every
operation). Each reader is a process of its own. Prints a line of JSON for each: events, bytes,
seconds, events_per_second, and peak_mb, the most memory that the process ever had, of which
start_mb were there before it read anything.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common

from ddiloco.config import Config
from ddiloco.dashboard.server import RunFollower
from ddiloco.observe.eventlog import Follower, to_line
from ddiloco.observe.report import write_report
from ddiloco.protocol.events import KINDS, Event
from ddiloco.trace.check import check
from ddiloco.trace.text import read_trace

ISLANDS, SHARDS, FRAGMENTS, TOKENS = 8, 2, 24, 262_144
STEP_SECONDS = 6.0
KILL_STEPS, DOWN_STEPS, SNAPSHOT_STEPS = 1200, 10, 200
READERS = ("report", "dashboard", "resume", "trace")


def made_up(seed: int = 0) -> Iterator[Event]:
  """The events of an endless run, in order of time."""
  chance, made, lives = random.Random(seed), [0] * ISLANDS, [1] * ISLANDS
  versions, rounds, merged = [0] * FRAGMENTS, [-1] * FRAGMENTS, [0] * FRAGMENTS
  since = [[0] * FRAGMENTS for _ in range(ISLANDS)]
  yield from _all_begin()
  global_step, away, gone = 0, {}, -1
  while True:
    global_step += 1
    now = 3.0 + global_step * STEP_SECONDS
    if global_step % KILL_STEPS == 0:
      gone = chance.randrange(ISLANDS)
      away[gone] = global_step + DOWN_STEPS
      yield _event(now, "engine", "fault", target=f"learner-{gone}", action="kill", seconds=0.0)
      yield _event(now, "engine", "exit", target=f"learner-{gone}", reason="killed by plan")
    for m in [m for m, until in away.items() if until == global_step]:
      del away[m]
      lives[m], made[m] = lives[m] + 1, max(0, made[m] - global_step % SNAPSHOT_STEPS)
      since[m] = [min(each, made[m]) for each in since[m]]
      yield _event(now - 2.0, "engine", "restart", target=f"learner-{m}")
      yield from _begins(now - 1.0, m, lives[m], global_step)
    here = [m for m in range(ISLANDS) if m not in away]
    yield from _steps(now, here, made, lives, global_step, chance)
    p = global_step % FRAGMENTS
    base, round_id = rounds[p], global_step
    shard = f"syncer-{p % SHARDS}"
    opened: dict[str, Any] = {"fragment": p, "round": round_id, "version": versions[p]}
    yield _event(now + 0.1, shard, "round", **opened, asked=here)
    for m in here:
      steps = made[m] - since[m][p]
      done = {**opened, "steps": steps, "tokens": steps * TOKENS}
      yield from _pushes(now + 0.2 + m / 1000, m, lives[m], base, **done)
    yield _commit(now + 1.0, p, round_id, base, versions[p] + 1, merged, made, since, here)
    versions[p], rounds[p] = versions[p] + 1, round_id
    for m in here:
      since[m][p] = made[m]
      taken = {**opened, "version": versions[p], "mode": "rebase", "included": True}
      yield from _takes(now + 2.0 + m / 1000, m, lives[m], **taken)
    yield from _now_and_then(now + 3.0, global_step, here, lives, merged)


def _event(time_: float, role: str, kind: str, incarnation: int = 0, **fields: Any) -> Event:
  return KINDS[kind](time=time_, role=role, incarnation=incarnation, **fields)


def _all_begin() -> Iterator[Event]:
  """Roles start, shards have their fragments, and islands get them."""
  sizes: dict[str, Any] = {"num_learners": ISLANDS, "num_shards": SHARDS}
  sizes |= {"num_fragments": FRAGMENTS, "total_tokens": 10**13}
  yield _event(0.0, "engine", "run_started", name="made up", **sizes)
  for s in range(SHARDS):
    yield _event(1.0, f"syncer-{s}", "started", fragments=list(range(s, FRAGMENTS, SHARDS)))
    for p in range(s, FRAGMENTS, SHARDS):
      owned: dict[str, Any] = {"fragment": p, "version": 0, "round": -1, "momentum_round": -1}
      yield _event(1.0, f"syncer-{s}", "owns", **owned)
  for m in range(ISLANDS):
    yield from _begins(2.0, m, 1, 0)
    for p in range(FRAGMENTS):
      first: dict[str, Any] = {"fragment": p, "version": 0, "round": -1}
      yield from _takes(3.0, m, 0, mode="overwrite", included=False, **first)


def _pushes(now: float, m: int, life: int, base: int, **pushed: Any) -> Iterator[Event]:
  yield _event(now, f"learner-{m}", "copy_out", life, **pushed, base_round=base)
  yield _event(now, f"learner-{m}", "push", life, **pushed, bytes=10**9)


def _takes(now: float, m: int, life: int, **taken: Any) -> Iterator[Event]:
  yield _event(now, f"learner-{m}", "stage", life, **taken)
  yield _event(now, f"learner-{m}", "apply", life, **taken)


def _begins(now: float, m: int, life: int, global_step: int) -> Iterator[Event]:
  fields = {"devices": 64, "mesh": [1, 64, 1], "batch_size": 128, "learners": ISLANDS}
  yield _event(now, f"learner-{m}", "started", life, **fields, planned_steps=10**6)
  yield _event(now + 0.5, f"learner-{m}", "joined", life, global_step=global_step, seconds=0.5)


def _steps(now, here, made, lives, global_step, chance) -> Iterator[Event]:
  for m in here:
    made[m] += 1
    loss = 1.5 + 9.0 / math.sqrt(global_step) + chance.gauss(0, 0.03)
    seconds = STEP_SECONDS + chance.uniform(-0.1, 0)
    fields = {
      "step": made[m],
      "global_step": global_step,
      "position": global_step,
      "loss": round(loss, 6),
    }
    fields |= {"grad_norm": 0.123456, "learning_rate": 3.1e-4, "tokens": TOKENS}
    fields |= {"seconds": round(seconds, 6), "gap_seconds": STEP_SECONDS, "blocked_seconds": 0.0}
    yield _event(now + m / 1000, f"learner-{m}", "step", lives[m], **fields)


def _commit(now, p, round_id, base, version, merged, made, since, here) -> Event:
  steps = sum(made[m] - since[m][p] for m in here)
  merged[p] += steps * TOKENS
  missing = {m: "lost" for m in range(ISLANDS) if m not in here}
  fields = {"fragment": p, "round": round_id, "base_round": base, "version": version}
  fields |= {"learners": here, "incarnations": [0] * len(here), "steps": steps}
  fields |= {"participants": {m: 1 / len(here) for m in here}, "missing": missing}
  fields |= {"rejected": {}, "tokens": steps * TOKENS, "merged_tokens": merged[p]}
  fields |= {"reason": f"all {len(here)} asked have answered", "quorum_seconds": 0.6}
  timed: dict[str, Any] = {"grace_seconds": 0.1, "merge_seconds": 0.2}
  return _event(now, f"syncer-{p % SHARDS}", "commit", **fields, **timed)


def _now_and_then(now, global_step, here, lives, merged) -> Iterator[Event]:
  roles = [(f"learner-{m}", lives[m]) for m in here] + [(f"syncer-{s}", 0) for s in range(SHARDS)]
  for role, life in roles if global_step % 2 == 0 else ():
    sent = {"sent_bytes": global_step * 10**9, "received_bytes": global_step * 10**9}
    yield _event(now, role, "traffic", life, **sent)
  for role, life in roles if global_step % SNAPSHOT_STEPS == 0 else ():
    snapshot = global_step // SNAPSHOT_STEPS
    yield _event(now, role, "captured", life, snapshot=snapshot, seconds=0.05)
    arrays = {f"layer{i}/kernel": 3_000_000_000 + i for i in range(40)}
    yield _event(now, role, "saved", life, snapshot=snapshot, arrays=arrays)
  if global_step % SNAPSHOT_STEPS == 0:
    names = [role for role, _ in roles]
    yield _event(now, "syncer-0", "snapshot", snapshot=snapshot, roles=names, seconds=20.0)
  if global_step % 50 == 0:
    tokens, loss = sum(merged) // FRAGMENTS, 1.5 + 9.0 / math.sqrt(global_step)
    yield _event(
      now, "evaluator", "evaluation", merged_tokens=tokens, global_step=global_step, loss=loss
    )


def write(workdir: Path, count: int) -> int:
  """Writes the logs of so many events; returns their bytes."""
  (workdir / "events").mkdir(parents=True)
  (workdir / "config.json").write_text(Config().to_json())
  (workdir / "started").write_text("0")
  files, written = {}, 0
  for _, event in zip(range(count), made_up()):
    role = event.role
    if role not in files:
      files[role] = (workdir / "events" / f"{role}.jsonl").open("wb")
    written += files[role].write(to_line(event, begins=not files[role].tell()))
  for file in files.values():
    file.close()
  return written


def read(reader: str, workdir: Path) -> None:
  """Reads the logs once, as `reader` does."""
  if reader == "report":
    write_report(workdir)
  elif reader == "resume":
    follower = Follower(workdir)
    follower.skip()
    assert not follower.poll()
  elif reader == "trace":
    checked = check(read_trace(workdir))
    assert checked.counts["commits"], "the trace is empty"
  else:
    run = RunFollower(workdir)
    run.start()
    while run.status()["phase"] == "empty":
      time.sleep(0.5)
    assert run.status()["commits"] and not run.status()["odd_events"]
    run.close()


def megabytes() -> float:
  """The most memory that this process has had so far."""
  return round(common.memory_bytes("VmHWM") / 2**20, 1)


def measured(reader: str, workdir: Path, events: int) -> dict[str, Any]:
  """The results of one reader in a process of its own."""
  command = [sys.executable, __file__, f"--child={reader}", f"--workdir={workdir}"]
  done = subprocess.run(command, check=True, capture_output=True, text=True)
  result = {"reader": reader, "events": events, **json.loads(done.stdout.splitlines()[-1])}
  return result | {"events_per_second": round(events / max(1e-9, result["seconds"]))}


def main() -> None:
  parser = common.parser(__doc__, "20,000 events")
  parser.add_argument("--events", type=int, default=10_000_000)
  parser.add_argument("--readers", default="report,dashboard,resume")
  parser.add_argument("--workdir", type=Path, help="for the logs (default: a temporary one)")
  parser.add_argument("--child", choices=READERS, help=argparse.SUPPRESS)
  options = parser.parse_args()
  if options.child:
    start, began = megabytes(), time.monotonic()
    read(options.child, options.workdir)
    seconds = round(time.monotonic() - began, 3)
    print(json.dumps({"seconds": seconds, "peak_mb": megabytes(), "start_mb": start}))
    return
  events = 20_000 if options.quick else options.events
  with tempfile.TemporaryDirectory() as folder:
    workdir = options.workdir or Path(folder) / "run"
    written = write(workdir, events)
    for reader in options.readers.split(","):
      print(json.dumps(measured(reader, workdir, events) | {"bytes": written}), flush=True)


if __name__ == "__main__":
  main()
