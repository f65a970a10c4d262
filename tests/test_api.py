"""`import ddiloco`: cheap to import, everything it declares is there, wrong things are named."""

import ast
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import pytest

import ddiloco
from ddiloco import api
from ddiloco.config import from_dict
from ddiloco.observe.eventlog import GrowingLog
from ddiloco.protocol.events import Commit


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
  assert repr(ddiloco.Run(tmp_path)) == f"<ddiloco.Run {tmp_path}>"


def test_a_config_is_found_below_one_s_home(tmp_path, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path))
  (tmp_path / "mine.py").write_text("from ddiloco.config import default as get_config\n")
  assert from_dict(ddiloco.load("~/mine.py")) == from_dict({})
  (tmp_path / "config.json").write_text(from_dict({}).to_json())
  assert from_dict(ddiloco.load("~")) == ddiloco.Run("~").config


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


def test_an_editor_finds_every_name_where_it_lives():
  """It follows no `__getattr__`: without these imports it completes nothing."""
  body = ast.parse(Path(ddiloco.__file__).read_text()).body
  (block,) = (node for node in body if isinstance(node, ast.If))
  found = {each.name: node.module for node in block.body for each in node.names}
  assert found == ddiloco._HOMES


def test_too_few_devices_are_named_before_the_run(tmp_path):
  jax.devices()  # something else in this process has used JAX
  config = ddiloco.default()
  config.islands.update(num_learners=100, devices=2)
  with pytest.raises(ddiloco.ConfigError, match=r"more than \d+ devices.*use a new process"):
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
  with pytest.raises(ddiloco.ConfigError, match="learner = 0: is for runs without shards"):
    run.params(learner=0)
  (tmp_path / "outcome.json").write_text(json.dumps({"reason": "finished"}))
  assert run.summary()["reason"] == "finished"
  assert repr(run) == f"<ddiloco.Run {tmp_path} reason='finished'>"


def test_a_simulated_run_leaves_its_events(tmp_path):
  config = ddiloco.load("configs/quickstart.py")
  config.run.total_tokens //= 50
  found = ddiloco.simulate(config, step_seconds=0.1, workdir=tmp_path / "run")
  assert found["reason"] == "finished"
  run = api.Run(tmp_path / "run")
  assert run.summary()["commits"] == len(run.events("commit")) == found["commits"]
  steps = run.events("step")
  assert [s["time"] for s in steps] == sorted(s["time"] for s in steps)
  assert sum(s["tokens"] for s in steps if s["role"] == "learner-0") > 0
  with pytest.raises(ddiloco.ConfigError, match=r"^kind = 'steps': must be one of .*'step'"):
    run.events("steps")


def test_a_run_stays_where_it_is_when_its_program_goes_elsewhere(tmp_path, monkeypatch):
  """It had no events there, and nothing said so."""
  config = ddiloco.load("configs/quickstart.py")
  config.run.total_tokens //= 200
  monkeypatch.chdir(tmp_path)
  ddiloco.simulate(config, step_seconds=0.1, workdir="run")
  run = ddiloco.Run("run")
  monkeypatch.chdir("/")
  assert run.workdir == tmp_path / "run" and run.events("commit")


def test_a_workdir_in_a_bucket_is_refused(tmp_path, monkeypatch):
  """It was a folder "gs:" here, and ended with its machine."""
  monkeypatch.chdir(tmp_path)
  where, config = "gs://bucket/run", from_dict({"run": {"total_tokens": 1}})
  monkeypatch.setattr("ddiloco.engines.session.train", lambda *_, **__: Path(where).mkdir())
  for call in (
    lambda: ddiloco.train(config, where, cpu=True),
    lambda: ddiloco.simulate(config, workdir=where),
    lambda: ddiloco.Run(where),
  ):
    with pytest.raises(ddiloco.ConfigError, match=r"^workdir = 'gs://.*must be a folder of a file"):
      call()
  assert not [*tmp_path.iterdir()]


def small(steps: int, **islands):
  config = ddiloco.default()
  config.model.update(num_layers=1, model_dim=16, num_heads=2, num_kv_heads=1, head_dim=8)
  config.data.update(source="synthetic", sequence_length=16, heldout_sequences=16)
  config.islands.update(batch_size=2, **islands)
  config.sync.update(num_fragments=2, sync_period=8)
  tokens = config.islands.num_learners * steps * 2 * 16
  config.run.update(total_tokens=tokens, evaluations=2, sample_tokens=0)
  return config


IN_ONE_DEVICE = """
import sys, jax, numpy as np
assert len(jax.devices()) == 1
import ddiloco
from tests.test_api import small
run = ddiloco.train(small(20, num_learners=3), sys.argv[1], cpu=True)
assert run.summary()["reason"] == "finished", run
batch = np.zeros(run.model.inputs(2, 16).shape, np.int32)
print(run.evaluate()["loss"], jax.jit(run.model.evaluate)(run.params(), batch)["loss"])
"""


@pytest.mark.slow
def test_islands_of_one_device_train_where_jax_was_used_before(tmp_path):
  """As in a notebook: its first cells may have used JAX."""
  code = [sys.executable, "-c", IN_ONE_DEVICE, str(tmp_path / "run")]
  variables = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
  done = subprocess.run(code, env=variables, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  assert all(0 < float(loss) < 10 for loss in done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
  "end, said",
  [
    ({"reason": "failed", "why": "left: learner-0"}, "failed: left: learner-0. Fix: the same call"),
    (None, "failed: its end is not saved, as its output says. Fix: the same call"),
  ],
)
def test_a_run_that_fails_is_no_run_that_was_interrupted(tmp_path, monkeypatch, end, said):
  """It raised KeyboardInterrupt where its quorum had left; and nothing where it was not saved."""

  def ends(config, workdir, *_, asked) -> None:
    workdir.mkdir()
    (workdir / "config.json").write_text(config.to_json())
    if end is not None:
      (workdir / "outcome.json").write_text(json.dumps(end))

  monkeypatch.setattr("ddiloco.engines.session.train", ends)
  with pytest.raises(ddiloco.RunFailed, match=said):
    ddiloco.train(small(20, num_learners=2), tmp_path / "run", cpu=True)


def test_the_devices_of_a_run_are_not_those_of_the_next(tmp_path, monkeypatch):
  """After a run on the CPU the processes of the next one trained there too, beside free GPUs."""
  monkeypatch.delenv("JAX_PLATFORMS")
  seen = []

  def ends(config, workdir, *_, asked) -> None:
    seen.append(os.environ.get("JAX_PLATFORMS"))
    workdir.mkdir()
    (workdir / "config.json").write_text(config.to_json())
    (workdir / "outcome.json").write_text('{"reason": "finished"}')

  monkeypatch.setattr("ddiloco.engines.session.train", ends)
  ddiloco.train(small(20, num_learners=2), tmp_path / "0", cpu=True)
  ddiloco.train(small(20, num_learners=2), tmp_path / "1", engine="processes")
  assert seen == ["cpu", None] and "JAX_PLATFORMS" not in os.environ


REFUSED = """
import sys
from ddiloco import ConfigError, default, train

for engine in ("processes", "threads"):
  try:
    train(default(), sys.argv[1], engine=engine)
  except ConfigError as error:
    print(engine, "finished" in str(error))
import jax

print(jax.config.jax_platforms)
"""


def test_a_refused_run_leaves_the_accelerators_to_the_next_one(tmp_path):
  """After one of processes, whose supervisor takes the CPU, threads trained there too."""
  (tmp_path / "config.json").write_text(from_dict({}).to_json())
  (tmp_path / "outcome.json").write_text('{"reason": "finished"}')
  variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
  del variables["JAX_PLATFORMS"]
  code = [sys.executable, "-c", REFUSED, str(tmp_path)]
  done = subprocess.run(code, env=variables, capture_output=True, text=True)
  assert done.stdout.splitlines() == ["processes True", "threads True", "None"], done.stderr


@pytest.mark.parametrize("said", ["finished", "not saved"])
def test_a_signal_while_the_end_is_saved_or_reported_ends_a_sweep(tmp_path, monkeypatch, said):
  """The run was whole, and the next one began; where the disk was full it was a KeyError."""

  def ends(config, workdir, *_, asked) -> None:
    workdir.mkdir()
    if said == "finished":
      (workdir / "outcome.json").write_text('{"reason": "finished"}')
    asked.set()

  monkeypatch.setattr("ddiloco.engines.session.train", ends)
  with pytest.raises(KeyboardInterrupt, match=f"run is {said}"):
    ddiloco.train(small(20, num_learners=2), tmp_path / "run", cpu=True)


@pytest.mark.slow
def test_a_run_that_loses_its_quorum_for_good_says_who_is_left(tmp_path):
  jax.devices()
  config, run = small(10**5, num_learners=2), tmp_path / "run"
  config.sync.min_quorum = 2
  config.chaos.faults = ({"action": "kill", "role": "learner-1", "at_step": 20, "seconds": -1},)
  why = r"its quorum is 2 \(sync.min_quorum\), the learners that are left: learner-0"
  with pytest.raises(ddiloco.RunFailed, match=rf"^the run in .*/run has failed: {why}\. Fix: "):
    ddiloco.train(config, run, cpu=True)
  assert ddiloco.Run(run).summary()["reason"] == "failed" and ddiloco.Run(run).params()


@pytest.mark.slow
def test_an_interrupt_ends_a_sweep_and_the_run_can_go_on(tmp_path):
  """It would begin the next run, which nobody wants who has interrupted the program."""
  jax.devices()
  over, first = threading.Event(), tmp_path / "0"

  def interrupt() -> None:
    log = GrowingLog(first)
    while not over.wait(0.05):
      if log.read().of(Commit):
        return os.kill(os.getpid(), signal.SIGINT)

  thread = threading.Thread(target=interrupt)
  thread.start()
  try:
    with pytest.raises(KeyboardInterrupt, match=r"^the run in .*/0 is stopped$"):
      for n in range(2):
        ddiloco.train(small(10**5, num_learners=2), tmp_path / str(n), cpu=True)
  finally:
    over.set()
    thread.join()
  run = ddiloco.Run(first)
  assert not (tmp_path / "1").exists() and run.summary()["reason"] == "stopped"
  assert run.params() and "reason='stopped' loss_merged=" in repr(run)
