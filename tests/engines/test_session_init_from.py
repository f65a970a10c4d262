"""A run goes on from another one's result: exported, imported, and really what it starts from."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ddiloco import cli, environment
from ddiloco.checkpoint import weights
from ddiloco.config import Config, ConfigError
from ddiloco.engines import session
from tests.engines.real import tiny

pytestmark = pytest.mark.slow


def make_config(steps: int, learning_rate: float = 1e-2, init_from: object = "") -> Config:
  inner = {"learning_rate": learning_rate, "warmup_steps": 5}
  return tiny(steps, inner=inner, run={"evaluations": 1, "init_from": str(init_from)})


def outcome(workdir: Path) -> dict:
  return json.loads((workdir / "outcome.json").read_text())


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Path:
  workdir = tmp_path_factory.mktemp("first") / "run"
  assert session.train(make_config(60), workdir) == 0
  return workdir


def test_a_run_starts_from_what_another_has_exported(first, tmp_path, monkeypatch):
  """With next to no learning rate it also ends there: so its shards have started there."""
  monkeypatch.setattr(environment, "prepare", lambda **settings: None)
  file = tmp_path / "model.safetensors"
  assert cli.main(["export", f"--workdir={first}", f"--to={file}"]) == 0
  config = make_config(16, learning_rate=1e-9, init_from=file)
  assert session.train(config, tmp_path / "second") == 0
  old, new = outcome(first), outcome(tmp_path / "second")
  assert old["loss_merged"] < old["loss_untrained"] - 0.1
  assert new["loss_untrained"] == old["loss_merged"]
  assert new["loss_merged"] == pytest.approx(old["loss_merged"], abs=1e-5)
  began = session.load_result(first, config)
  for name, value in session.load_result(tmp_path / "second", config).items():
    np.testing.assert_allclose(value, began[name], rtol=1e-5, atol=1e-6)


def test_islands_without_shards_start_from_a_workdir(first, tmp_path):
  config = make_config(2, learning_rate=1e-9, init_from=first)
  config = dataclasses.replace(config, sync=dataclasses.replace(config.sync, num_shards=0))
  islands = tmp_path / "alone" / "islands"
  cut_off = islands / f".learner-1.{'4f3a' * 4}"  # an earlier save, by a kill
  cut_off.mkdir(parents=True)
  assert session.train(config, tmp_path / "alone") == 0
  assert sorted(path.name for path in islands.iterdir()) == ["learner-0", "learner-1"]
  new = outcome(tmp_path / "alone")
  assert new["loss_untrained"] == outcome(first)["loss_merged"]
  assert new["loss_merged"] == pytest.approx(new["loss_untrained"], abs=1e-5)


def test_what_does_not_fit_is_said_before_anything_is_made(first, tmp_path):
  config = make_config(2, init_from=first)
  deeper = dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=2))
  for bad in (deeper, make_config(2, init_from=tmp_path / "nowhere")):
    with pytest.raises(ConfigError, match=r"^run.init_from = "):
      session.train(bad, tmp_path / "second")
    with pytest.raises(ConfigError, match=r"^run.init_from = "):
      session.describe(bad)
  assert not (tmp_path / "second").exists()


def test_a_run_cannot_replace_what_it_is_to_start_from(first, tmp_path):
  (tmp_path / "link").symlink_to(first)
  for start in (first, first / "result", tmp_path / "link"):
    with pytest.raises(ConfigError, match=r"--overwrite would delete it"):
      session.train(make_config(2, init_from=start), first, overwrite=True)
  (first / "result").rename(first / f".result.{'4f3a' * 4}")  # by a kill
  with pytest.raises(ConfigError, match=r"--overwrite would delete it"):
    session.train(make_config(2, init_from=first), first, overwrite=True)
  weights.clear(first / "result")
  assert session.load_result(first, make_config(2)).keys()


def test_a_run_does_not_end_badly_because_its_start_is_gone(first, tmp_path, capsys):
  weights.save(tmp_path / "start", session.load_result(first, make_config(2)))
  config = make_config(2, init_from=tmp_path / "start")
  run = dataclasses.replace(config.run, init_from="/nowhere")
  gone = dataclasses.replace(config, run=run)
  params = session.load_result(first, config)
  workdir = tmp_path / "run"
  workdir.mkdir()
  session.conclude(gone, workdir, session.RunResult("finished", params, {}), lambda _: 1.0)
  assert "loss_untrained" not in outcome(workdir) and outcome(workdir)["loss_merged"] == 1.0
  assert "left out: run.init_from = '/nowhere': does not exist" in capsys.readouterr().out


@pytest.mark.parametrize("form", ["model.safetensors", "model"])
def test_a_dry_run_checks_it_and_leaves_accelerators_alone(first, tmp_path, form):
  path = weights.save(tmp_path / form, session.load_result(first, make_config(2)))
  (tmp_path / "config.json").write_text(make_config(2, init_from=path).to_json())
  code = (
    "import sys; from ddiloco import cli; status = cli.main(sys.argv[1:])\n"
    "import jax; assert jax.config.jax_platforms == 'cpu', 'Orbax could touch an accelerator'\n"
    "sys.exit(status)"
  )
  arguments = ["train", f"--config={tmp_path / 'config.json'}", f"--workdir={tmp_path / 'run'}"]
  run = [sys.executable, "-c", code, *arguments, "--dry_run"]
  bare = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
  done = subprocess.run(run, env=bare, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  assert f'"init_from": "{path}"' in done.stdout
