"""What the exchange costs an island of two hosts, and what the loss of a host costs other islands.

Two parts. First one island of two processes with two fake devices each: blocks of steps with a
syncer attached and without, in turn, as in `bench_overhead.py`; `ratio` is the median over
neighbouring pairs of blocks. The syncer is a process too, and gets only the CPU time that the hosts
leave, while on real islands it has a machine of its own. `rounds_per_step` shows whether it keeps
up: one fragment is due in every step. Every host notes each of its calls with the step that
follows; `same_step` says that the notes of both hosts are equal. Then, unless --quick, two such
islands run with the processes engine, and a host of one is killed with SIGKILL in the middle.

  python scripts/bench_hosts.py [--pairs=60] [--block=8] [--quick]

Last line: {"ratio", "rounds_per_step", "same_step", "calls", "step_ms", "bare_ms",
"other_island_blocked_seconds", "other_island_steps_meanwhile", "seconds_until_merged_again", ...}.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import bench_overhead
import common
import in_process

from ddiloco import environment
from ddiloco.config import Config
from ddiloco.engines.role_spec import free_urls
from ddiloco.network import host_links
from ddiloco.network.transport import learner_address, syncer_address
from ddiloco.protocol.events import Crash, Snapshot, Step
from ddiloco.training import hosts
from ddiloco.training.island import Island

HOSTS, DEVICES, PATIENCE_SECONDS = 2, 4, 180.0
# Of a step where a host is killed: leaves cores to a process that starts again.
PACE_SECONDS = 0.1
NOTED = ("step", "copy_out", "apply", "capture", "reset")  # calls that all hosts make together


def one_island(quick: bool) -> Config:
  """An island of two processes."""
  config = bench_overhead.make_config(quick)
  islands = dataclasses.replace(
    config.islands, devices=DEVICES, hosts=HOSTS, data=2, fsdp=2, batch_size=8
  )
  return dataclasses.replace(config, islands=islands)


# --- One island of two processes: each of them runs this file


def noted(island: Any) -> list[tuple[int, str, Any]]:
  """Notes every call from now on: (steps made before it, call, fragment)."""
  notes: list[tuple[int, str, Any]] = []
  made = [0]

  def note(name: str) -> None:
    call = getattr(island, name)

    def noting(*arguments, **more):
      notes.append((made[0], name, arguments[0] if name in ("copy_out", "apply") else None))
      made[0] += name == "step"
      return call(*arguments, **more)

    setattr(island, name, noting)

  for name in NOTED:
    note(name)
  return notes


def as_host(bench: bench_overhead.Bench, host: int, url: str, syncer: str, folder: Path) -> None:
  """Host 0 measures, the other follows; both write their notes to `folder`."""
  in_process.prepare(DEVICES // HOSTS)
  agreed = host_links.IslandIdentity("bench", "", 0, HOSTS)
  links: Any
  if host:
    links, coordinator = host_links.join(url, agreed, host, None, PATIENCE_SECONDS)
  else:
    meeting = host_links.Meeting(url, agreed, None, PATIENCE_SECONDS)
    links, coordinator = meeting.wait(PATIENCE_SECONDS), meeting.coordinator
  environment.join_hosts(coordinator, HOSTS, host, PATIENCE_SECONDS, PATIENCE_SECONDS)
  import jax

  island = Island(bench.config, 0, jax.devices(), bench.plan)
  island.compile()
  notes = noted(island)
  if host:
    read = lambda position: itertools.cycle(in_process.batches(bench.config))

    def failed(error: Exception) -> None:
      traceback.print_exception(error)
      os._exit(1)

    hosts.follow(island, links, read, host_links.HostProgress(), failed)
  else:
    leading = hosts.LeadingIsland(island, bench.plan, links, host_links.HostProgress())
    found = measured(bench, leading, syncer)
    leading.end(asked=False)
    (folder / "measured.json").write_text(json.dumps(found))
  (folder / f"notes-{host}.json").write_text(json.dumps(notes))
  jax.distributed.shutdown()
  environment.end_now(environment.FINISHED)


def measured(bench: bench_overhead.Bench, island: Any, syncer: str) -> dict[str, Any]:
  """The measurement, on host 0: a learner."""
  endpoint = bench.endpoint(learner_address(0))
  endpoint.dial(syncer_address(0), syncer)
  island.reset()
  step = lambda batch: island.step(batch, 0)
  found = bench.measure(endpoint, island, bench.interleaved(step))
  endpoint.close()
  result = bench_overhead.compared(found, bench.pairs, bench.block)
  return {**result, "attached_steps": len(found.gaps)}


def as_shard(bench: bench_overhead.Bench, url: str) -> None:
  """The syncer, until standard input ends; prints how many rounds it has committed."""
  in_process.prepare()
  endpoint = bench.endpoint(syncer_address(0), bind=url)
  for thread in os.listdir("/proc/self/task"):  # later threads inherit the policy
    os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))
  shard = in_process.Shard(bench.config, bench.plan, endpoint)
  sys.stdin.read()
  print(shard.end())
  endpoint.close()


def two_processes(quick: bool, pairs: int, block: int, folder: Path) -> dict[str, Any]:
  url, syncer = free_urls(2)
  log = folder / "hosts.log"
  with log.open("wb") as file:

    def start(name: str, **streams: Any) -> subprocess.Popen[bytes]:
      command = [*common.TIED, sys.executable, __file__, f"--pairs={pairs}", f"--block={block}"]
      command += [*(["--quick"] if quick else []), "--process", name, url, syncer, str(folder)]
      return subprocess.Popen(command, stderr=file, **streams)

    shard = start("shard", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    both = [start(str(host), stdout=file) for host in range(HOSTS)]
    statuses = [each.wait() for each in both]
    committed, _ = shard.communicate()
    statuses.append(shard.returncode)
  if any(statuses):
    sys.exit(f"the hosts and the shard ended with {statuses}:\n{log.read_text()[-4000:]}")
  first, second = (json.loads((folder / f"notes-{h}.json").read_text()) for h in range(HOSTS))
  found = json.loads((folder / "measured.json").read_text())
  rounds_per_step = int(committed) / found.pop("attached_steps")
  same = {"same_step": first == second, "calls": len(first)}
  return {**found, "rounds_per_step": round(rounds_per_step, 3), **same}


# --- Two islands, and a host that is killed


def two_islands() -> Config:
  return common.config_of(
    "quickstart",
    {
      "islands.num_learners": 2, "islands.devices": DEVICES, "islands.hosts": HOSTS,
      "islands.data": 2, "islands.fsdp": 2, "islands.batch_size": 8, "model.num_layers": 1,
      "sync.min_quorum": 1, "sync.snapshot_steps": 20, "run.total_tokens": 1 << 50,
      "chaos.faults": (), "run.evaluations": 0, "run.compare_alone": False,
      "islands.min_step_seconds": PACE_SECONDS,
    },
  )  # fmt: skip


def killed_host(folder: Path) -> dict[str, Any]:
  with common.Run(two_islands(), folder / "run") as run:
    run.wait_for("a snapshot and a merge", lambda log: log.of(Snapshot) and common.merged(log, 1))
    run.kill("--learner=1", "--host=1")
    again = run.wait_for("its next life", lambda log: common.merged(log, 1, lives=2))[0].time
    down = run.wait_for("its end", lambda log: log.of(Crash, "learner-1"))[0].time
    steps = run.log.of(Step, "learner-0")
  meanwhile = [e for e in steps if down <= e.time <= again]
  return {
    "other_island_blocked_seconds": round(sum(e.blocked_seconds for e in meanwhile), 6),
    "other_island_steps_meanwhile": len(meanwhile),
    "seconds_until_merged_again": round(again - down, 2),
  }


def main() -> None:
  of_process = {"nargs": 4, "help": argparse.SUPPRESS}  # of a process that this script starts
  given = common.options(__doc__, {"pairs": 2}, pairs=60, block=8, process=of_process)
  if given.process:
    name, url, syncer, folder = given.process
    bench = bench_overhead.Bench(one_island(given.quick), given.pairs, given.block)
    if name == "shard":
      return as_shard(bench, syncer)
    try:
      return as_host(bench, int(name), url, syncer, Path(folder))
    except Exception:  # else JAX would wait for the other host at this process's end
      traceback.print_exc()
      os._exit(1)
  with common.folder() as folder:
    found = two_processes(given.quick, given.pairs, given.block, folder)
    if not given.quick:
      found |= killed_host(folder)
  print(json.dumps(found))


if __name__ == "__main__":
  common.run_script(main)
