"""Text and images under faults: an island is killed and comes back, and everything replays."""

import json
import subprocess
import sys
from importlib.util import find_spec

import jax
import numpy as np
import pytest

import ddiloco
from ddiloco.api import experiment
from ddiloco.checkpoint.restore import open_storage
from ddiloco.observe.eventlog import read_events
from ddiloco.roles import initial
from ddiloco.trace.replay import replay_run
from ddiloco.trace.text import open_trace
from ddiloco.training.island import Island
from tests.strikes import killed_once_saved

pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(not find_spec("sklearn"), reason="needs ddiloco[examples]"),
]
STEPS = 110


def small(steps: int = STEPS, **sections):
  """The config, shorter and with a smaller model."""
  config = experiment("configs/text_image.py", "config")
  config.model.update(num_layers=1, model_dim=32, mlp_dim=48, num_heads=2, num_kv_heads=1)
  config.data.source, config.data.heldout_sequences = "synthetic", 64
  config.islands.batch_size = 4
  config.run.update(evaluations=2, compare_alone=False, sample_tokens=16)
  config.sync.update(snapshot_steps=20, num_fragments=2)
  config.islands.min_step_seconds = 0.05  # so that a snapshot is complete long before the end
  config.chaos.faults = ()
  for section, values in sections.items():
    config[section].update(values)
  each = config.islands.batch_size * config.data.sequence_length
  config.run.total_tokens = config.islands.num_learners * steps * each
  return config


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> ddiloco.Run:
  jax.devices()  # eight, before `train` makes fewer for all later tests of this process
  workdir = tmp_path_factory.mktemp("images") / "run"
  with killed_once_saved(workdir, "learner-2", hold_at=STEPS // 2):
    return ddiloco.train(small(), workdir, cpu=True)


def test_it_learns_and_the_killed_island_comes_back_with_what_it_had(run):
  summary = run.summary()
  assert summary["reason"] == "finished" and summary["faults"] == summary["restarts"] == 1
  assert summary["loss_merged"] < 0.8 * summary["loss_untrained"]
  assert summary["blocked_seconds"] == 0
  restored = [e for e in read_events(run.workdir) if e.kind == "restored"]
  assert [e.role for e in restored] == ["learner-2"]
  told = [e for e in read_events(run.workdir) if e.kind == "step" and e.role == "learner-2"]
  lives = [[e.global_step for e in told if e.incarnation == life] for life in (0, 1)]
  assert max(lives[1]) > max(lives[0])


def test_rows_of_text_and_of_images_are_told_apart_wherever_a_loss_is(run):
  wanted = {"text_loss", "image_loss"}
  measured = run.evaluate()
  assert measured.keys() == {"loss", "bits_per_token", *wanted}
  assert measured["loss"] == pytest.approx(run.summary()["loss_merged"], rel=1e-6)
  events = [e for e in read_events(run.workdir) if e.kind == "evaluation"]
  assert len(events) >= 2 and all(e.measures.keys() == wanted for e in events)
  assert events[0].measures["image_loss"] > 2 * events[-1].measures["image_loss"]
  last = run.summary()["heldout_measures_last"]
  assert last == {name: pytest.approx(measured[name], abs=1e-4) for name in wanted}
  assert run.status()["heldout_measures"].keys() == wanted
  page = (run.workdir / "report" / "index.html").read_text()
  assert "held-out image loss, merged model" in page


def test_snapshots_have_the_moments_of_the_patches(run):
  config, plan = run.config, initial.make_plan(run.config)
  island = Island(config, 2, jax.devices()[:1], plan)
  part = open_storage(config, plan, run.workdir, "").find("learner-2", island.place)
  for name in ("patches/projection", "patches/places"):
    kept = [np.asarray(v) for path, v in part.arrays.items() if path.endswith(name)]
    assert len(kept) == 3 and all(each.any() for each in kept)  # the parameter, and two moments


def test_a_replay_is_the_same_bit_by_bit(run):
  counts, difference = replay_run(run.workdir, open_trace(run.workdir))
  assert counts["identical"], difference
  assert counts["digests_compared"] and counts["losses_compared"] >= STEPS


def test_it_still_writes_text(run):
  assert run.generate("def ", 8).startswith("def ") and run.summary()["sample"]


def test_islands_as_processes_where_one_is_killed(tmp_path):
  """It takes its moments from the other one, as no snapshot is made."""
  config = small(
    120,
    islands={"num_learners": 2},
    sync={"snapshot_steps": 0, "min_quorum": 2},  # so it is not over before both are back
    checkpoint={"rejoin": "peer"},
    chaos={"faults": ({"action": "kill", "role": "learner-1", "at_step": 20, "seconds": 0.2},)},
  )
  run = ddiloco.train(config, tmp_path / "run", engine="processes", cpu=True)
  summary = run.summary()
  assert summary["reason"] == "finished" and summary["restarts"] == 1
  told = [e for e in read_events(run.workdir) if e.role == "learner-1"]
  _, second = [e.incarnation for e in told if e.kind == "started"]
  assert second in [e.incarnation for e in told if e.kind == "inherited"]


def test_the_script_says_what_is_looked_at(run):
  command = [sys.executable, "scripts/caption_digits.py", f"--workdir={run.workdir}"]
  done = subprocess.run(
    [*command, "--images=10"],
    stdout=subprocess.PIPE,
    text=True,
    check=True,
  )
  found = json.loads(done.stdout.splitlines()[-1])
  assert found["images"] == 10 and found["text_loss"] > 0
  for said in (found["accuracy"], found["image_loss"]):
    assert said.keys() == {"own", "shuffled", "blank"}
  assert all(0 <= share <= 1 for share in found["accuracy"].values())
