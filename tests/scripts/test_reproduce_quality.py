"""Loss with and without faults at equal merged tokens, shortened."""

import pytest

from tests.scripts import commands


@pytest.mark.slow
def test_faults_of_all_kinds_hardly_change_the_loss(tmp_path, here):
  arguments = (f"--workdir={tmp_path / 'runs'}", f"--picture={tmp_path / 'quality.png'}")
  found = commands.result("reproduce_quality.py --quick", *arguments)
  (calm,), (chaotic,) = found["loss"]["undisturbed"], found["loss"]["faults"]
  assert found["difference"] == pytest.approx(chaotic / calm - 1, abs=1e-3)
  assert abs(found["difference"]) < 0.25 and calm < 4.5, found
  assert 0 < found["struck"] == sum(found["kinds"].values())
  assert (tmp_path / "quality.png").stat().st_size > 10_000
  virtual = commands.last(here("reproduce_quality.py --quick --virtual", arguments[0]))
  assert virtual["difference"] == pytest.approx(
    virtual["mean"]["faults"] / virtual["mean"]["undisturbed"] - 1, abs=1e-3
  )
  assert max(virtual["loss"]["undisturbed"] + virtual["loss"]["faults"]) < 4.5, virtual
  again = here("reproduce_quality.py --quick", *arguments)
  assert f"loss {calm:.4f}, " in again, "a finished run is not made again"
