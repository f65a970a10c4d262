"""Real processes for the tests of engines and roles: a tiny model, quick to compile."""

from __future__ import annotations

import functools
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddiloco.config import Config, from_dict
from ddiloco.observe.eventlog import Event, GrowingLog

PATIENCE_SECONDS = 90.0
TOKENS = 2 * 16  # of a step: B = 2, T = 16


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


def start_unheard(*arguments: str | Path) -> subprocess.Popen[bytes]:
  """As `start`, with a pipe for all that it says; whoever closes it breaks it."""
  command = [sys.executable, "-m", "ddiloco", *map(str, arguments)]
  pipe, both = subprocess.PIPE, subprocess.STDOUT
  return subprocess.Popen(command, stdout=pipe, stderr=both)


def wait_for(
  what: Callable[[], Any],
  name: str,
  process: subprocess.Popen | None = None,
  log: Path | None = None,
  patience_seconds: float = PATIENCE_SECONDS,
) -> Any:
  """The first true value of `what()`; fails when the process ends or patience does."""
  deadline = time.monotonic() + patience_seconds
  while not (value := what()):
    said = log.read_text() if log else ""
    assert process is None or process.poll() is None, f"it ended before {name}:\n{said}"
    assert time.monotonic() < deadline, f"waited in vain for {name}:\n{said}"
    time.sleep(0.05)
  return value


def events_of(workdir: Path, kind: str, role: str = "") -> list[Event]:
  """Those of a run that is never begun anew in this workdir; what was read is not read again."""
  found = _log_of(workdir).read()
  return [e for e in found if e.kind == kind and e.role.startswith(role)]


@functools.lru_cache(maxsize=2)
def _log_of(workdir: Path) -> GrowingLog:
  return GrowingLog(workdir)
