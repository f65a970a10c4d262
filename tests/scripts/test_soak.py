"""A short soak on both engines: what the script with five hundred faults promises."""

import pytest

from tests.scripts import commands


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_whatever_happens_nobody_stalls_and_nothing_is_lost(engine, tmp_path):
  found = commands.result(
    f"soak.py --seed=1 --stall_seconds=10 --engine={engine} --faults=24 --minutes=0.4",
    f"--workdir={tmp_path / 'soak'}",
  )
  # A fault that is planned for a role that is down waits for its return, perhaps in vain.
  assert 20 <= found["struck"] <= 24 and len(found["kinds"]) >= 10
  assert found["recovered"] >= found["struck"] - 2 and found["blocked_seconds"] == 0
