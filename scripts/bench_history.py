"""What it costs to read the event logs of a long run: events per second, and peak memory.

  python scripts/bench_history.py [--events=10000000] [--readers=report,dashboard,resume]
                                  [--workdir=DIR] [--quick]

Writes the logs of a run in virtual time: eight islands, two shards, 24 fragments, a step every six
seconds, a kill every two hours, a snapshot every 200 steps. Reads them as `ddiloco report`, as the
dashboard, as a resumed run, and as `ddiloco trace` (only with `--readers=trace`: it keeps every
operation). Ten million events take about 25 minutes. With --workdir the logs stay in DIR, which
must be new.

Each reader is a process of its own. Prints a line of JSON for each: events, bytes, seconds,
events_per_second, and peak_mb, the most memory that the process ever had, of which
start_mb were there before it read anything.
"""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import common
import msgspec

from ddiloco.chaos import random_kills
from ddiloco.config import Config
from ddiloco.dashboard.server import RunFollower
from ddiloco.engines.virtual import Logs
from ddiloco.observe.eventlog import Follower
from ddiloco.observe.report import write_report
from ddiloco.protocol.events import Event, Step
from ddiloco.simulation.run import Speeds, VirtualRun
from ddiloco.trace.check import check
from ddiloco.trace.text import read_trace

ISLANDS, FRAGMENTS = 8, 24
STEP_SECONDS, KILL_SECONDS, DOWN_SECONDS = 6.0, 7200.0, 60.0
SAID = 1_000_000  # events between two lines of progress
EVENT_SECONDS = 0.1  # about, of virtual time
READERS = ("report", "dashboard", "resume", "trace")


def config_of(count: int) -> Config:
  """A run that does not end by itself, with kills during its first `count` events."""
  span_seconds = count * EVENT_SECONDS
  faults = random_kills("0", 1 / KILL_SECONDS, span_seconds, ISLANDS, DOWN_SECONDS)
  return common.config_of(
    "default",
    {
      "islands.num_learners": ISLANDS, "sync.num_shards": 2, "sync.num_fragments": FRAGMENTS,
      "sync.sync_period": FRAGMENTS, "sync.snapshot_steps": 200, "run.total_tokens": 1 << 50,
      "chaos.faults": tuple(dataclasses.asdict(fault) for fault in faults),
    },
  )  # fmt: skip


def write(workdir: Path, count: int) -> int:
  """Writes the logs of so many events, all with a loss; returns their bytes."""
  config = config_of(count)
  common.make_folder(workdir, new=True)
  (workdir / "config.json").write_text(config.to_json())
  (workdir / "started").write_text("0")
  logs, written = Logs(workdir), 0

  def take(event: Event) -> None:
    nonlocal written
    written += 1
    if written % SAID == 0:
      print(f"{written:,} of {count:,} events are written", file=sys.stderr, flush=True)
    if isinstance(event, Step):  # virtual steps have none
      event = msgspec.structs.replace(event, loss=1.5 + 9.0 / math.sqrt(event.global_step))
    logs.take(event)

  speeds = Speeds((1_000_000,) * FRAGMENTS, step_seconds=STEP_SECONDS)
  VirtualRun(config, speeds, take).run(math.inf, lambda: written >= count)
  logs.close()
  return sum(path.stat().st_size for path in (workdir / "events").iterdir())


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
    assert checked.counts["commit"], "the trace is empty"
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
  """The results of one reader, in a process of its own."""
  start, began = megabytes(), time.monotonic()
  read(reader, workdir)
  seconds = time.monotonic() - began
  memory = {"peak_mb": megabytes(), "start_mb": start}
  result = {"reader": reader, "events": events, "seconds": round(seconds, 3), **memory}
  return result | {"events_per_second": round(events / seconds)}


def main() -> None:
  options = common.options(
    __doc__,
    {"events": 10_000},
    events=10_000_000,
    readers={"type": common.names_of(READERS), "default": "report,dashboard,resume"},
    workdir=Path,
  )
  context = multiprocessing.get_context("spawn")
  with common.folder() as folder:
    workdir = options.workdir or folder / "run"
    written = write(workdir, options.events)
    for reader in options.readers:
      with ProcessPoolExecutor(1, context) as pool:  # says it if the reader's process is killed
        found = pool.submit(measured, reader, workdir, options.events).result()
      print(json.dumps(found | {"bytes": written}), flush=True)


if __name__ == "__main__":
  common.run_script(main)
