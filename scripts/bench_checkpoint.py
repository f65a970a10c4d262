"""What snapshots cost a learner's steps, how fast parts are saved and restored, rejoin times.

Four measurements, all on this machine's CPU, each in a run of its own; repeat them at quiet and at
busy moments, and compare ratios rather than seconds.

1. Steps. One island and one shard in one process, in turn: a block of steps in which the run takes
   a snapshot, and one in which it takes none. A step lasts from the end of the one before, so that
   pauses count. Blocks have --block steps, so that in the blocks with snapshots they are twice as
   frequent as in a default run (`sync.snapshot_steps` is 200), and learner and shard both save from
   this process. The step is kept to one core, so that saving has a core of its own,
   as on a real host, where the devices step. `step_ratio` is the median step of a block with a
   snapshot against that of its neighbour without; `mean_step_ratio` compares all time in the blocks
   in the same way. Only a few steps have a save beside them: `saving_step_ratio` is of just these,
   and `worst_step_ratio` of the step with the capture, which a CPU island copies in its own thread.
2. Bytes. A part of --mib MiB is saved (checksums, Orbax, on the disk), restored and checked again,
   and as many bytes are copied from file to file; the three take turns.
3. Rejoin. In `ddiloco train --engine=processes` a learner is killed; its event log has the seconds
   that it took to import, to compile (from the run's cache), to restore its part, and to join.
4. Resume. That run is ended and begun again: from the command to the first merged push.

  python scripts/bench_checkpoint.py [--pairs=12] [--block=100] [--mib=256] [--quick]

Last line: {"save_gbps", "restore_gbps", "copy_gbps", "step_ratio", "mean_step_ratio",
"saving_step_ratio", "worst_step_ratio", "step_ms", "save_seconds", "rejoin": {"restart_seconds",
"compile_seconds", "restore_seconds", "fragments_seconds"}, "resume_seconds"}.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import common
import in_process
import jax
import numpy as np

from ddiloco.checkpoint.saver import Saver
from ddiloco.checkpoint.snapshots import Storage
from ddiloco.config import Config
from ddiloco.engines.virtual import seconds_of
from ddiloco.network.transport import Hub, learner_address, syncer_address
from ddiloco.observe.eventlog import E, Event, EventLog
from ddiloco.observe.guards import warn
from ddiloco.protocol import events
from ddiloco.protocol.actions import SyncerEvent
from ddiloco.protocol.events import Commit, Compiled, Joined, Restart, Restored, Snapshot
from ddiloco.protocol.values import replace
from ddiloco.roles import initial
from ddiloco.runtime import Loop
from ddiloco.training.island import Island
from ddiloco.workdir import start_time


def make_config(layers: int, width: int, learners: int, **sections: Any) -> Config:
  sync = {"num_fragments": 4, "sync_period": 24, **sections.pop("sync", {})}
  islands = {"num_learners": learners, "batch_size": 2, **sections.pop("islands", {})}
  run = {"total_tokens": 1 << 40, "evaluations": 0, "restart_seconds": 0.0}
  return common.small(layers, width, 64, islands=islands, sync=sync, run=run, **sections)


# --- 1. steps -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Step:
  """One inner step of the learner; it begins when the step before ends."""

  ends: float
  seconds: float
  captures: bool  # a snapshot's copies were taken in it


class Log(in_process.Silent):
  """The times of steps and of the saves beside them, from the learner's or the shard's events."""

  def __init__(self):
    self.steps: list[Step] = []
    self.saves: list[tuple[float, float]] = []  # (begun, ended)
    self.save_seconds: list[float] = []  # of the writing alone
    self.under_way: dict[int, float] = {}  # snapshot -> begun
    self._captured = False

  def record(self, event: Event) -> None:
    now = time.monotonic()
    match event:
      case events.Step():
        self.steps.append(Step(now, event.gap_seconds, self._captured))
        self._captured = False
      case events.Captured():
        self.under_way[event.snapshot], self._captured = now, True
      case events.Saved() | events.Unsaved():
        self.saves.append((self.under_way.pop(event.snapshot), now))
        self.save_seconds += [event.seconds] if isinstance(event, events.Saved) else []
    if isinstance(event, events.Unsaved | events.Uncommitted):
      print(f"  {event}")


class Blocks:
  """Batches for the learner; lets the shard begin one snapshot in every odd block of steps.

  The first two blocks warm up. A block begins only after all saves have ended; since this wait is
  in the time of its first step, that step does not count.
  """

  def __init__(self, config: Config, block: int, pairs: int, logs: Sequence[Log]):
    self._tokens = itertools.cycle(in_process.batches(config))
    self._block, self._pairs, self._logs = block, pairs, logs
    self.taken = False  # whether the shard takes snapshots now
    self.stop = threading.Event()

  def __call__(self, position: int) -> Iterator[np.ndarray]:
    for count in itertools.count():
      number, begins = divmod(count, self._block)
      if not begins:
        while any(log.under_way for log in self._logs):
          time.sleep(0.02)
        self.taken = number % 2 == 1  # one is due: the last one began 2 * block steps ago
        if number % 2 == 0 and number > 2:
          print(f"pair {number // 2 - 1} of {self._pairs}", flush=True)
        if number >= 2 * (self._pairs + 1):
          self.stop.set()
      elif begins == self._block // 2:
        self.taken = False  # one snapshot a block
      yield next(self._tokens)


def measure_steps(config: Config, folder: Path, block: int, pairs: int) -> tuple[Log, Log]:
  """The logs of the learner and of the shard."""
  plan = initial.make_plan(config)
  hub, storage = Hub(), Storage(folder, plan.plan_id, warn)
  island = Island(config, 0, jax.devices()[:1], plan)
  island.compile()
  island.reset()
  logs = {role: Log() for role in ("learner-0", "syncer-0")}
  savers = {role: Saver(storage, role, 0, log) for role, log in logs.items()}
  shard = in_process.Shard(
    config,
    plan,
    hub.connect(syncer_address(0)),
    recorder=logs["syncer-0"],
    saver=savers["syncer-0"],
  )
  blocks = Blocks(config, block, pairs, list(logs.values()))
  without = dataclasses.replace(config.sync, snapshot_steps=0)
  handle = shard.role.handle

  def handle_in_turn(event: SyncerEvent) -> Loop[None]:  # in the shard's own thread
    sync = config.sync if blocks.taken else without
    shard.role.state = replace(shard.role.state, sync=sync)
    return handle(event)

  vars(shard.role)["handle"] = handle_in_turn
  in_process.train(
    config,
    plan,
    hub.connect(learner_address(0)),
    island,
    blocks,
    blocks.stop.is_set,
    recorder=logs["learner-0"],
    saver=savers["learner-0"],
  )
  shard.end()
  for saver in savers.values():
    saver.close(10)
  return logs["learner-0"], logs["syncer-0"]


def compare_steps(learner: Log, shard: Log, block: int, pairs: int) -> dict[str, Any]:
  """The ratios, from pairs of neighbouring blocks: without, with."""
  saves = learner.saves + shard.saves
  names = ("step_ratio", "mean_step_ratio", "saving_step_ratio", "worst_step_ratio")
  ratios: dict[str, list[float]] = {name: [] for name in names}
  usual = []
  for pair in range(1, pairs + 1):
    start = 2 * pair * block
    calm, busy = learner.steps[start:][1:block], learner.steps[start + block :][1:block]
    usual.append(statistics.median(s.seconds for s in calm))
    every = [s.seconds for s in busy]
    found = (
      [statistics.median(every) / usual[-1]],
      [statistics.mean(every) / statistics.mean(s.seconds for s in calm)],
      [s.seconds / usual[-1] for s in busy if beside(s, saves)],
      [s.seconds / usual[-1] for s in busy if s.captures],
    )
    for name, each in zip(names, found):
      ratios[name] += each
    said = ", ".join(f"{common.middle(each, 3)} ({len(each)})" for each in found)
    print(f"pair {pair:2d}: {1e3 * usual[-1]:7.1f} ms without; with x {said}")
  return {
    **{name: common.middle(each) for name, each in ratios.items()},
    "step_ms": common.middle([1e3 * each for each in usual], 2),
    "save_seconds": common.middle(learner.save_seconds, 3),
  }


def beside(step: Step, saves: list[tuple[float, float]]) -> bool:
  return any(begun < step.ends and written > step.ends - step.seconds for begun, written in saves)


# --- 2. bytes -------------------------------------------------------------------------------------


def measure_bytes(folder: Path, mib: int, times: int) -> dict[str, Any]:
  """GB/s of saving and restoring a part, and of a plain copy that is on the disk when it ends."""
  random, count = np.random.default_rng(0), 32
  arrays = {
    f"params/{i}": random.standard_normal((mib << 20) // 4 // count, np.float32)
    for i in range(count)
  }
  size = sum(array.nbytes for array in arrays.values())
  storage, plain = Storage(folder / "checkpoints", "bench", warn), folder / "plain"
  with plain.open("wb") as file:
    for array in arrays.values():
      array.tofile(file)
  seconds: dict[str, list[float]] = {"save": [], "restore": [], "copy": []}
  work: dict[str, Callable[[], object]] = {
    "save": lambda: storage.save(0, "learner-0", 0, {}, dict(arrays)),
    "restore": lambda: storage.load(0, "learner-0"),
    "copy": lambda: subprocess.run(
      ["dd", f"if={plain}", f"of={folder}/copy", "bs=1M", "conv=fsync", "status=none"], check=True
    ),
  }
  for _ in range(times + 1):  # the first warms up
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    for name, do in work.items():
      seconds[name].append(seconds_of(do))
  return {
    f"{name}_gbps": common.middle([size / s / 1e9 for s in each[1:]])
    for name, each in seconds.items()
  }


# --- 3. rejoin and 4. resume ----------------------------------------------------------------------


def measure_rejoin(folder: Path, quick: bool) -> dict[str, Any]:
  """Seconds of a killed learner's way back, and of a whole run's."""
  sync = {"num_shards": 1 if quick else 2, "snapshot_steps": 4 if quick else 200}
  # A pace leaves cores to a process that starts again.
  islands = {"min_step_seconds": 0.2 if quick else 0.0}
  config = make_config(2, 64, 2, sync=sync, islands=islands, checkpoint={"patience_seconds": 5.0})
  killed = "learner-1"

  def saved(log: EventLog, after: float = 0.0) -> bool:
    return any(e.time > after and killed in e.roles for e in log.of(Snapshot))

  def after_restart(log: EventLog, kind: type[E]) -> list[E]:
    restart = min((e.time for e in log.of(Restart)), default=math.inf)
    return [e for e in log.of(kind, killed) if e.time > restart]

  with common.Run(config, folder / "run") as run:
    run.wait_for("a snapshot", saved)
    run.kill("--learner=1")
    joined = run.wait_for("the killed learner", lambda log: after_restart(log, Joined))[0]
    run.wait_for("one more snapshot", lambda log: saved(log, joined.time))
    compiled, restored = after_restart(run.log, Compiled)[0], after_restart(run.log, Restored)[0]
    restart = run.log.of(Restart)[0].time
  with common.Run(config, folder / "run") as again:
    began = again.began - start_time(again.workdir)
    later = lambda log: [e.time for e in log.of(Commit) if e.time > began]
    merged = again.wait_for("a merged push", later)[0]
  rejoin = {
    "restart_seconds": round(compiled.time - compiled.seconds - restart, 3),
    "compile_seconds": compiled.seconds,
    "restore_seconds": restored.seconds,
    "fragments_seconds": joined.seconds,
  }
  return {"rejoin": rejoin, "resume_seconds": round(merged - began, 2)}


def main() -> None:
  quick = {"pairs": 1, "block": 16, "mib": 8}
  args = common.options(__doc__, quick, pairs=12, block=100, mib=256)
  in_process.prepare()
  layers, width = (1, 64) if args.quick else (6, 256)
  sync = {"num_shards": 1, "snapshot_steps": 2 * args.block}
  # The learner captures once a round has told it to, which must be in the block: tiny steps of a
  # quick run would be over before a shard on a busy machine had a turn.
  islands = {"min_step_seconds": 0.05 if args.quick else 0.0}
  config = make_config(layers, width, 1, sync=sync, islands=islands)
  with common.folder() as folder:
    result = measure_bytes(folder, args.mib, times=1 if args.quick else 5)
    learner, shard = measure_steps(config, folder / "steps", args.block, args.pairs)
    result |= compare_steps(learner, shard, args.block, args.pairs)
    result |= measure_rejoin(folder, args.quick)
  print(json.dumps(result))


if __name__ == "__main__":
  common.run_script(main)
