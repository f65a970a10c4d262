"""`import ddiloco`: cheap to import, everything it declares is there, wrong things are named."""

import json
import subprocess
import sys

import jax
import pytest

import ddiloco
from ddiloco import api
from ddiloco.config import from_dict


def test_importing_it_imports_nothing_heavy():
  code = "import sys, ddiloco; print(sorted({m.split('.')[0] for m in sys.modules}))"
  found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  assert not {"'jax'", "'numpy'", "'flax'", "'ml_collections'"} & set(
    found.stdout[1:-2].split(", ")
  )


def test_everything_it_declares_is_there_and_documented():
  assert set(ddiloco.__all__) == {*ddiloco._HOMES, "__version__"} <= set(dir(ddiloco))
  for name in ddiloco._HOMES:
    assert getattr(ddiloco, name).__doc__, name
  with pytest.raises(AttributeError, match="no attribute 'trian'"):
    ddiloco.trian  # noqa: B018


def test_a_config_is_the_same_from_wherever_it_is_loaded(tmp_path):
  config = ddiloco.load("configs/quickstart.py")
  config.islands.overrides["1"] = {"batch_size": 8}
  checked = from_dict(config)
  (tmp_path / "config.json").write_text(checked.to_json())
  for source in (tmp_path, str(tmp_path), tmp_path / "config.json"):
    again = ddiloco.load(source)
    assert from_dict(again) == checked
    again.sync.min_quorum = 2  # and may be changed
    assert from_dict(again).sync.min_quorum == 2
  assert ddiloco.Run(tmp_path).config == checked


def test_what_is_not_there_is_named(tmp_path):
  with pytest.raises(ddiloco.ConfigError, match=r"--config=.*holds no run's config"):
    ddiloco.load(tmp_path)
  with pytest.raises(ddiloco.ConfigError, match="holds no run"):
    ddiloco.Run(tmp_path)
  with pytest.raises(ddiloco.ConfigError, match=r"--config = 'nowhere.py': FileNotFoundError"):
    ddiloco.load("nowhere.py")
  config = ddiloco.default()
  config.sync.sync_period = 0
  with pytest.raises(ddiloco.ConfigError, match=r"^sync.sync_period = 0: must be greater than 0"):
    ddiloco.plan(config, gbps=1.0, step_seconds=1.0)


def test_too_few_devices_are_named_before_the_run(tmp_path):
  jax.devices()  # something else in this process has used JAX
  config = ddiloco.default()
  config.islands.num_learners = 100
  with pytest.raises(ddiloco.ConfigError, match=r"JAX has made its \d+ devices in this process"):
    ddiloco.train(config, tmp_path / "run", cpu=True)
  assert not (tmp_path / "run").exists()


def test_a_run_under_way_can_be_asked(tmp_path):
  (tmp_path / "events").mkdir()
  (tmp_path / "config.json").write_text(from_dict({}).to_json())
  run = ddiloco.Run(tmp_path)
  assert run.status()["phase"] == "empty"
  for torn in ("", "nan\n", "0\n"):
    (tmp_path / "started").write_text(torn)
    assert run.status()["phase"] == "empty" and run.summary()["commits"] == 0
  with pytest.raises(ddiloco.ConfigError):
    run.params()
  (tmp_path / "outcome.json").write_text(json.dumps({"reason": "finished"}))
  assert run.summary()["reason"] == "finished"


def test_a_simulated_run_leaves_its_events(tmp_path):
  config = ddiloco.load("configs/quickstart.py")
  config.run.total_tokens //= 50
  found = ddiloco.simulate(config, step_seconds=0.1, workdir=tmp_path / "run")
  assert found["reason"] == "finished"
  assert api.Run(tmp_path / "run").summary()["commits"] == found["commits"]
