"""scripts/mixed_hardware.py, with two CPUs for an accelerator and a CPU."""

from __future__ import annotations

import pytest

from tests.scripts.commands import result

pytestmark = pytest.mark.slow


def test_each_island_comes_back_elsewhere_and_the_trace_holds(tmp_path):
  workdir = f"--workdir={tmp_path / 'run'}"
  found = result("mixed_hardware.py --cpu --commits=4", workdir, optimized=False)
  assert found["trace"] and found["kinds"] == ["cpu"] and found["blocked_seconds"] == 0
  lives = found["lives"]
  assert sorted(life["island"] for life in lives) == [0, 0, 1, 1]
  back = [life for life in lives if life["restored_snapshot"] is not None]
  assert [life["island"] for life in back] == [0, 1] and all(life["steps"] for life in lives)
  page = (tmp_path / "run" / "report" / "index.html").read_text()
  assert page.count("<td>cpu</td>") == 2
