"""Real processes for the tests of engines and roles: a tiny model, quick to compile."""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ddiloco.config import Config, from_dict
from ddiloco.engines.engine import RunResult
from ddiloco.engines.processes import ProcessesEngine
from ddiloco.observe.eventlog import Event, GrowingLog
from ddiloco.training import data
from tests.waits import wait_for

TOKENS = 2 * 16  # of a step: B = 2, T = 16
PROCESSES = ("train", "--engine=processes", "--cpu")


def tiny(steps: int, learners: int = 2, min_step_seconds: float = 0.0, **sections: Any) -> Config:
  """Steps of a few milliseconds; `steps` are those of every learner if all live.

  With a pace, steps that last leave the cores to processes that start meanwhile.
  """
  sync = {"num_shards": 2, "num_fragments": 2, "sync_period": 8, "liveness_seconds": 1.0}
  run = {"evaluations": 2, "sample_tokens": 0, "restart_seconds": 0.1}
  return from_dict(
    {
      "model": {
        "num_layers": 1, "model_dim": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8,
        "mlp_dim": 32,
      },
      "data": {"source": "synthetic", "sequence_length": 16, "heldout_sequences": 16},
      "inner": {"learning_rate": 1e-2, "warmup_steps": 5},
      "islands": {"num_learners": learners, "batch_size": 2, "min_step_seconds": min_step_seconds},
      "sync": sync | sections.pop("sync", {}),
      "run": run | {"total_tokens": learners * steps * TOKENS} | sections.pop("run", {}),
      **sections,
    }
  )  # fmt: skip


def start(*arguments: str | Path, log: Path, module: str = "ddiloco") -> subprocess.Popen[bytes]:
  """`ddiloco ARGUMENTS` as a user types it, its output in `log`."""
  command = [sys.executable, "-m", module, *map(str, arguments)]
  with log.open("ab") as file:
    return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)


class RealRun:
  """A command with a config, in a folder of its own; its process ends with the block."""

  def __init__(self, folder: Path, config: Config, *arguments: str, module: str = "ddiloco"):
    self.workdir, self.log, file = folder / "run", folder / "log", folder / "config.json"
    file.write_text(config.to_json())
    where = f"--config={file}", f"--workdir={self.workdir}"
    self.process = start(*arguments, *where, log=self.log, module=module)

  def __enter__(self) -> RealRun:
    return self

  def __exit__(self, *_: object) -> None:
    self.process.kill()
    self.process.wait()

  def wait_for(self, what: Callable[[], Any], name: str) -> Any:
    return wait_for(what, name, self.process, self.log)

  def ends(self, number: int = 0) -> int:
    """Its exit status, after this signal, within the limit of its test."""
    if number:
      self.process.send_signal(number)
    return self.process.wait()

  def said(self) -> str:
    return self.log.read_text()

  def events(self, kind: str, role: str = "") -> list[Event]:
    return events_of(self.workdir, kind, role)

  def outcome(self) -> dict[str, Any]:
    return json.loads((self.workdir / "outcome.json").read_text())


@contextlib.contextmanager
def run_here(config: Config, workdir: Path) -> Iterator[Future[RunResult]]:
  """A run of real processes with this one as their supervisor; it is asked to end with the block.

  It measures nothing. That spares what a command of its own imports, and compiles to measure.
  """
  corpus = data.open_corpus(config.data)
  engine = ProcessesEngine(config, workdir, corpus, lambda params: {"loss": 0.0})
  with ThreadPoolExecutor() as beside:
    try:
      yield beside.submit(engine.run)
    finally:
      engine.leave.set()


def events_of(workdir: Path, kind: str, role: str = "") -> list[Event]:
  """Those of a run that is never begun anew in this workdir; what was read is not read again."""
  found = _log_of(workdir).read()
  return [e for e in found if e.kind == kind and e.role.startswith(role)]


@functools.lru_cache(maxsize=2)
def _log_of(workdir: Path) -> GrowingLog:
  return GrowingLog(workdir)
