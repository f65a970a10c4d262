"""A replay of the run in a workdir, and its verdict."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from ddiloco.core.tape import Tape
from ddiloco.engines.homes import Homes
from ddiloco.engines.replay import Replay
from ddiloco.engines.workdir import saved_config
from ddiloco.runtime import weights


def replay_run(
  workdir: Path,
  tape: Tape,
  progress: Callable[[int, int], None] = lambda done, of: None,
  homes: Callable[..., Any] | None = None,
) -> tuple[dict[str, Any], str]:
  """Replays a run and compares it with all that it left behind.

  Args:
    workdir: of the run.
    tape: its tape, without problems.
    progress: told now and then how many operations are done, of all.
    homes: islands and data (see `Replay`); None: new ones on the devices of this process.

  Returns:
    (counts and "identical": whether nothing was different, and anything compared; the first
    difference, or "").

  Raises:
    ConfigError: the result cannot be read, or there are too few devices.
  """
  started = time.monotonic()
  config = saved_config(workdir)
  replay = Replay(config, tape, homes or Homes(config, tape, jax.devices()))
  replay.run(progress)
  if (workdir / "result").exists():
    replay.compare_result(weights.load(workdir / "result", "result"))
  compared, different = replay.findings.compared, replay.findings.different
  counts = {name: replay.counts.get(name, 0) for name in ("steps", "commits")}
  return {
    "identical": sum(different.values()) == 0 < sum(compared.values()),
    **counts,
    "learners": replay.counts["learners"],
    "incarnations": replay.counts["incarnations"],
    **{f"{name}_compared": compared[name] for name in compared},
    **{f"{name}_different": different[name] for name in different},
    "seconds": round(time.monotonic() - started, 1),
  }, replay.findings.first
