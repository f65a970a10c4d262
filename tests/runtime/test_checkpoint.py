"""The result can be read by plain Orbax; what is missing or damaged is said in plain words."""

import shutil

import numpy as np
import orbax.checkpoint as ocp
import pytest

from ddiloco.config import ConfigError
from ddiloco.runtime import checkpoint


def params(seed: int = 0) -> dict[str, np.ndarray]:
  random = np.random.default_rng(seed)
  shapes = {"embedding": (7, 4), "layers/attention/query": (2, 4, 2, 2), "final_norm/scale": (4,)}
  return {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def assert_same(a, b) -> None:
  assert a.keys() == b.keys()
  for name in a:
    assert np.asarray(a[name]).dtype == np.float32
    np.testing.assert_array_equal(np.asarray(a[name]), b[name])


def test_saved_parameters_come_back_bitwise_also_to_plain_orbax(tmp_path):
  path = checkpoint.save_params(tmp_path / "result", params())
  assert_same(checkpoint.load_params(path), params())
  with ocp.StandardCheckpointer() as plain:
    assert_same(plain.restore(path), params())


def test_saving_again_replaces_the_old_result(tmp_path):
  checkpoint.save_params(tmp_path / "result", params(0))
  checkpoint.save_params(tmp_path / "result", params(1))
  assert_same(checkpoint.load_params(tmp_path / "result"), params(1))
  assert [path.name for path in tmp_path.iterdir()] == ["result"], "nothing half-written stays"


def test_a_relative_path_is_taken_from_here(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  checkpoint.save_params("result", params())
  assert_same(checkpoint.load_params(tmp_path / "result"), params())


def test_a_missing_result_is_said(tmp_path):
  with pytest.raises(ConfigError, match=r"does not exist.*Fix: finish a run"):
    checkpoint.load_params(tmp_path / "result")


def files(path):
  return sorted(p for p in path.rglob("*") if p.is_file())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax, giving up
def test_every_damage_is_found_or_harmless(tmp_path):
  """Each file in turn deleted, emptied and cut in half: an error, or the right values."""
  whole, path = checkpoint.save_params(tmp_path / "whole", params()), tmp_path / "result"
  refused = 0
  for name in files(whole):
    for damage in ("delete", "empty", "halve"):
      shutil.rmtree(path, ignore_errors=True)
      shutil.copytree(whole, path)
      victim = path / name.relative_to(whole)
      content = victim.read_bytes()
      victim.unlink()
      if damage != "delete":
        victim.write_bytes(content[: len(content) // 2 if damage == "halve" else 0])
      try:
        assert_same(checkpoint.load_params(path), params())
      except ConfigError as error:
        refused += 1
        assert str(path) in str(error) and "Fix: " in str(error), (victim, damage)
  assert refused >= 3, "nothing was noticed at all"


def test_a_folder_or_file_that_is_no_checkpoint_is_refused(tmp_path):
  (tmp_path / "empty").mkdir()
  (tmp_path / "file").write_text("hello")
  for name in ("empty", "file"):
    with pytest.raises(ConfigError, match="cannot be read"):
      checkpoint.load_params(tmp_path / name)
