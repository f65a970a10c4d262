"""The example of one's own model: it learns, survives a kill, is saved and replayed like any."""

import runpy
import sys

import jax
import numpy as np
import pytest

import ddiloco
from ddiloco.api import experiment
from ddiloco.checkpoint.restore import open_storage
from ddiloco.config import ConfigError, from_dict
from ddiloco.engines import session
from ddiloco.observe.eventlog import read_events
from ddiloco.roles import initial
from ddiloco.trace.replay import replay_run
from ddiloco.trace.text import open_trace
from ddiloco.training.island import Island
from tests.strikes import killed_once_saved

pytestmark = pytest.mark.slow
FILE = "examples/own_model.py"
STEPS = 120


def small(steps: int = STEPS, **sections):
  """The example's config, shorter and with a narrower model."""
  config = experiment(FILE, "config")
  config.model.options.width = 4
  config.run.total_tokens = config.islands.num_learners * steps * config.islands.batch_size
  config.sync.snapshot_steps, config.run.evaluations = 20, 2
  config.chaos.faults = ()
  config.islands.min_step_seconds = 0.05  # so that a snapshot is complete long before the end
  for section, values in sections.items():
    config[section].update(values)
  return config


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> ddiloco.Run:
  jax.devices()  # eight, before `train` makes fewer for all later tests of this process
  workdir = tmp_path_factory.mktemp("digits") / "run"
  with killed_once_saved(workdir, "learner-2", hold_at=STEPS // 2):
    return ddiloco.train(small(), workdir, cpu=True)


def test_it_learns_and_the_killed_island_comes_back(run):
  summary = run.summary()
  assert summary["reason"] == "finished" and summary["faults"] == summary["restarts"] == 1
  assert summary["loss_merged"] < 0.5 * summary["loss_untrained"]
  assert "sample" not in summary  # it makes no text
  measured = run.evaluate()
  assert measured.keys() == {"loss", "accuracy"} and measured["accuracy"] > 0.7
  assert measured["loss"] == pytest.approx(summary["loss_merged"], rel=1e-6)
  assert run.status()["phase"] == "over"
  assert {name: v.shape for name, v in run.params().items()} == initial.shapes(run.config.model)


def test_an_island_comes_back_with_its_part_of_a_snapshot(run):
  restored = [e for e in read_events(run.workdir) if e.kind == "restored"]
  assert [e.role for e in restored] == ["learner-2"]


def test_snapshots_have_the_inner_state(run):
  config, plan = run.config, initial.make_plan(run.config)
  island = Island(config, 2, jax.devices()[:1], plan)
  assert island.num_moments == 1  # of SGD with momentum
  part = open_storage(config, plan, run.workdir, "").find("learner-2", island.place)
  assert island.layout.leaves.keys() <= part.arrays.keys()
  trace = [np.asarray(v) for n, v in part.arrays.items() if n.startswith("inner/")]
  assert len(trace) == len(run.params()) and all(each.any() for each in trace)


def test_a_replay_is_the_same_bit_by_bit(run):
  counts, difference = replay_run(run.workdir, open_trace(run.workdir))
  assert counts["identical"], difference
  assert counts["digests_compared"] and counts["losses_compared"] >= STEPS


def test_text_is_refused_by_name(run):
  with pytest.raises(ConfigError, match=r"^model.custom = .*this model makes no text"):
    run.generate("def ")


def test_it_is_planned_like_any(run):
  assert "parameters\n" in session.describe(run.config)
  assert ddiloco.plan(run.config, gbps=1.0, step_seconds=0.1)["hidden"]


def test_islands_as_processes(tmp_path):
  config = small(40, islands={"num_learners": 2})
  run = ddiloco.train(config, tmp_path / "run", engine="processes", cpu=True)
  assert run.summary()["reason"] == "finished" and run.evaluate()["accuracy"] > 0.3


def test_the_comparison_says_what_each_is_worth(tmp_path, monkeypatch, capsys):
  example = runpy.run_path(FILE)
  table = example["main"](tmp_path, small(20))
  assert len(table) == 5 and all(0 <= row["accuracy"] <= 1 for row in table.values())
  assert "all four islands, merged" in capsys.readouterr().out


def test_without_its_images_it_says_what_to_install(monkeypatch):
  monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
  fix = r"sklearn.*\. Fix: pip install 'ddiloco\[examples\]'\.$"
  with pytest.raises(SystemExit, match=fix):
    runpy.run_path(FILE, run_name="__main__")
  with pytest.raises(ConfigError, match=rf"line \d+: .*{fix}"):
    experiment(FILE, "config")


def test_other_options_are_another_run(run):
  other = small(model={"options": {"width": 5}})
  with pytest.raises(ConfigError, match=r"^model.options = "):
    ddiloco.train(other, run.workdir, cpu=True)
  assert initial.make_plan(from_dict(other)) != initial.make_plan(run.config)
