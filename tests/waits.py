"""Waits of tests for what no event tells them."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE_SECONDS = 90.0  # for what must come, also on a busy machine


def wait_for(
  what: Callable[[], Any],
  name: object = "",
  process: subprocess.Popen | None = None,
  log: Path | None = None,
  patience_seconds: float = PATIENCE_SECONDS,
) -> Any:
  """The first true value of `what()`; fails when the process ends or patience does.

  Of a `name` that is a function its result is shown. The clock is one that no test replaces.
  """
  deadline, pause_seconds = time.perf_counter() + patience_seconds, 0.001
  while not (value := what()):
    said = log.read_text() if log else ""
    assert process is None or process.poll() is None, f"it ended before {name}:\n{said}"
    late = time.perf_counter() > deadline
    assert not late, f"waited in vain for {name() if callable(name) else name}:\n{said}"
    time.sleep(pause_seconds)
    pause_seconds = min(2 * pause_seconds, 0.05)
  return value
