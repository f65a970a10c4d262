"""One run on two kinds of device: each island is killed and comes back on the other kind.

Island 0 starts on this machine's accelerator and island 1 on its CPU, each as a process of its own
(`ddiloco learner`), with one shard. Once both are merged, island 0 is killed with SIGKILL and comes
back on the CPU, with its part of the newest snapshot; then island 1 on the accelerator. At the end
all roles are asked to leave, and the trace is checked: no work was lost or merged twice.

  python scripts/mixed_hardware.py [--workdir=runs/mixed_hardware] [--commits=40] [--cpu]

With --cpu, or without an accelerator, both islands run on CPUs, which tests this script. The last
line is JSON: of each life {"island", "device_kind", "steps", "step_ms", "restored_snapshot",
"tokens", "loss", "seconds_until_merged"}, and of the run {"kinds", "blocked_seconds", "trace",
"lives"}.
"""

from __future__ import annotations

import json
import math
import signal
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common

from ddiloco import workdir as workdirs
from ddiloco.checks import require
from ddiloco.config import Config
from ddiloco.engines.children import Forked, spawn_forked
from ddiloco.engines.role_spec import RoleSpec, free_urls
from ddiloco.observe.eventlog import EventLog, GrowingLog
from ddiloco.observe.report import write_report
from ddiloco.protocol.events import Commit, Restored, Snapshot, Started, Step
from ddiloco.trace import text

ISLANDS = 2
# On CPUs alone steps are short and far apart, which leaves cores to a process that starts.
ON_CPUS = {
  "islands.batch_size": 2, "islands.min_step_seconds": 0.05, "sync.sync_period": 8,
  "sync.snapshot_steps": 40,
}  # fmt: skip


class Roles:
  """The processes of one run with one shard, started by hand: islands may share a device."""

  def __init__(self, config: Config, workdir: Path, cpu: bool):
    self.workdir, self._cpu = workdir, cpu
    workdirs.join(workdir, config)
    (workdir / "logs").mkdir(exist_ok=True)
    self._processes: dict[str, Forked] = {}
    self._log = GrowingLog(workdir)
    self._spec = RoleSpec(workdir, workdirs.run_name(workdir), tuple(free_urls(1)))
    shard = self._spec.command("syncer", "--shard=0", f"--bind={self._spec.syncers[0]}")
    self._spawn("syncer-0", shard)

  def _spawn(self, name: str, command: list[str]) -> None:
    self._processes[name] = spawn_forked(command, self.workdir / "logs" / f"{name}.log")

  def start(self, island: int, accelerator: bool) -> None:
    cpu = ["--cpu"] if self._cpu or not accelerator else []
    command = self._spec.command("learner", f"--learner={island}", *cpu)
    self._spawn(f"learner-{island}", command)

  def end(self) -> None:
    """Ends the learners, which leave when their work is merged, then the shard."""
    for name in sorted(self._processes):  # learners first
      self.signal(name, signal.SIGTERM)

  def signal(self, name: str, number: signal.Signals) -> None:
    """Ends a role by this signal."""
    process = self._processes.pop(name)
    process.send_signal(number)
    self.wait(f"the end of {name}", lambda: process.poll() is not None)

  @property
  def log(self) -> EventLog:
    """All events so far."""
    return self._log.read()

  def wait_merged(self, island: int, lives: int, commits: int) -> None:
    """Waits until this life of an island, counted from 1, is in so many commits."""
    enough = lambda: len(common.merged(self.log, island, lives)) >= commits
    self.wait(f"island {island} in {commits} commits", enough)

  def wait(self, what: str, found: Callable[[], Any]) -> None:
    """Waits for `found()`; if a process ends meanwhile, kills all, and the script ends."""
    processes = self._processes.values()
    works = lambda: all(each.poll() is None for each in processes)
    try:
      common.wait_for(what, found, works, lambda: f"see {self.workdir / 'logs'}")
    except SystemExit:
      for each in processes:
        each.send_signal(signal.SIGKILL)
      raise


def make_config(cpu: bool) -> Config:
  return common.config_of(
    f"dense:{'100k' if cpu else '1m'}",
    {
      "islands.num_learners": ISLANDS, "islands.batch_size": 8, "sync.num_shards": 1,
      "islands.overrides": {"1": {"batch_size": 2}},  # small enough for a CPU's step
      "sync.min_quorum": 1, "sync.snapshot_steps": 50, "run.evaluations": 0,
      "run.total_tokens": 1 << 50, **(ON_CPUS if cpu else {}),
    },
  )  # fmt: skip


def swap(roles: Roles, commits: int) -> None:
  """The run: both islands, then each on the other's device."""
  roles.start(0, accelerator=True)
  roles.start(1, accelerator=False)
  roles.wait_merged(0, 1, commits)
  roles.wait_merged(1, 1, commits)
  for island, accelerator in ((0, False), (1, True)):
    role = f"learner-{island}"
    saved = lambda role=role: any(role in e.roles for e in roles.log.of(Snapshot))
    roles.wait(f"a part of {role}", saved)
    roles.signal(role, signal.SIGKILL)
    roles.start(island, accelerator)
    roles.wait_merged(island, 2, commits)
  roles.end()


def lives(roles: Roles) -> list[dict[str, Any]]:
  """The numbers of each life of each island."""
  log, found = roles.log, []
  for started in log.of(Started, "learner"):
    life = EventLog(e for e in log if e.incarnation == started.incarnation or isinstance(e, Commit))
    island = int(started.role.removeprefix("learner-"))
    own = life.of(Step, started.role)
    back = [e.snapshot for e in life.of(Restored, started.role)]
    first = min((e.time for e in common.merged(life, island)), default=math.nan)
    found.append(
      {
        "island": island,
        "device_kind": started.device_kind,
        "restored_snapshot": back[0] if back else None,
        "steps": len(own),
        "step_ms": round(1000 * statistics.median(e.gap_seconds for e in own), 2),
        "tokens": sum(e.tokens for e in own),
        "loss": round([e.loss for e in own if e.loss is not None][-1], 4),
        "seconds_until_merged": round(first - started.time, 2),
      }
    )
  return found


def main() -> None:
  workdir = Path("runs/mixed_hardware"), "must be new"
  commits = 40, "that each life takes part in"
  given = common.options(__doc__, workdir=workdir, commits=commits, cpu=False)
  there, fix = given.workdir.exists(), "delete it, or give another"
  require(not there, "--workdir", str(given.workdir), "exists", fix)
  roles = Roles(make_config(given.cpu), given.workdir, given.cpu)
  swap(roles, given.commits)
  found = lives(roles)
  proof = text.print_invariants(text.open_trace(given.workdir))
  print(f"Report: {write_report(given.workdir)}")
  blocked = round(sum(e.blocked_seconds for e in roles.log.of(Step)), 6)
  kinds = sorted({each["device_kind"] for each in found})
  print(json.dumps({"kinds": kinds, "blocked_seconds": blocked, "trace": proof, "lives": found}))
  sys.exit(0 if proof else 1)


if __name__ == "__main__":
  common.run_script(main)
