"""A few kills of everything: what the script with fifty of them promises."""

import pytest

from tests.scripts import commands


@pytest.mark.slow
def test_nothing_is_lost_or_counted_twice_when_all_are_killed(tmp_path):
  found = commands.result(
    "kill_everything.py --kills=2 --steps=80 --seed=8 --undisturbed=1 --engine=processes",
    f"--workdir={tmp_path}",
    optimized=False,
  )
  assert found["finished"] and found["kills"] == 2 and found["snapshots"] > 0
  assert found["versions_back"] == found["problems"] == 0
  (undisturbed,) = found["loss_undisturbed"]
  assert abs(found["loss"] - undisturbed) < 0.8 and max(found["loss"], undisturbed) < 5.5
