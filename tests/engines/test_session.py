"""Whole runs of real islands: `session.train` from an empty folder to a report."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from ddiloco.config import Config, ConfigError, from_dict
from ddiloco.engines import session
from ddiloco.models import transformer
from ddiloco.observe.eventlog import Event, read_events
from ddiloco.observe.report import PICTURES
from ddiloco.workdir import held, saved_config
from tests.engines.real import tiny

pytestmark = pytest.mark.slow


def make_config(learners: int, steps: int, islands=None, run=None, **sections) -> Config:
  islands = {"num_learners": learners, "batch_size": 2, **(islands or {})}
  run = {"sample_tokens": 8, "prompt": "ab", **(run or {})}
  return tiny(steps, learners, islands=islands, run=run, **sections)


def train(config: Config, workdir: Path) -> tuple[dict, list[Event]]:
  assert session.train(config, workdir) == 0
  return json.loads((workdir / "report" / "summary.json").read_text()), read_events(workdir)


@pytest.fixture(scope="module")
def chaos(tmp_path_factory):
  faults = [
    # These two are over when the kills strike, so that there are survivors nothing else happens to.
    {"action": "stall", "role": "learner-2", "at_step": 10, "seconds": 0.1},
    {"action": "slow", "role": "learner-0", "at_step": 10, "seconds": 0.1, "factor": 2.0},
    {"action": "kill", "role": "learner-1", "at_step": 60, "seconds": 0.3},
    {"action": "kill", "role": "syncer-0", "at_step": 65, "seconds": 0.2},
  ]
  workdir = tmp_path_factory.mktemp("run") / "chaos"
  # Steps take a while, so that no island is at its kill before the others have begun.
  config = make_config(
    3, 150, chaos={"faults": faults}, run={"compare_alone": True},
    islands={"min_step_seconds": 0.01},
  )  # fmt: skip
  return workdir, config, *train(config, workdir)


def test_the_chaotic_run_finishes_and_everybody_came_back(chaos):
  _, _, summary, events = chaos
  assert summary["reason"] == summary["finished"] == "finished"
  struck = [(e.target, e.action) for e in events if e.kind == "fault"]
  assert sorted(struck) == [
    ("learner-0", "slow"), ("learner-1", "kill"), ("learner-2", "stall"), ("syncer-0", "kill"),
  ]  # fmt: skip
  assert {e.target for e in events if e.kind == "restart"} == {"learner-1", "syncer-0"}
  rejoined = next(
    e for e in events
    if (e.kind, e.role, e.incarnation) == ("joined", "learner-1", 1)
  )  # fmt: skip
  after = [e for e in events if e.kind == "commit" and e.time > rejoined.time]
  assert any(1 in e.weights for e in after)
  newest = {}
  for e in events:
    if e.kind == "commit":
      assert e.version == newest.get(e.fragment, 0) + 1
      newest[e.fragment] = e.version
  down, back = struck_at(events, "learner-1"), rejoined.time
  for m in (0, 2):
    steps = [e for e in events if e.kind == "step" and e.role == f"learner-{m}"]
    assert sum(down < e.time < back for e in steps) > 5, "survivors go on while it is down"
    assert sum(e.blocked_seconds for e in steps) == 0


def struck_at(events: list[Event], target: str) -> float:
  return next(e.time for e in events if e.kind == "fault" and e.target == target)


def test_summary_and_report_hold_what_is_promised(chaos):
  workdir, _, summary, _ = chaos
  assert summary["loss_merged"] < summary["loss_untrained"]
  assert np.isfinite(summary["loss_best_island_alone"])
  assert summary["seconds"] > 0 and summary["survivor_max_gap_ratio"] >= 1
  assert summary["blocked_seconds"] == 0
  assert summary["sample"].startswith("ab")
  assert set(summary["learner_steps"]) == {"0", "1", "2"}
  for name in (*PICTURES, "index.html"):
    assert (workdir / "report" / name).stat().st_size > 1000
  assert from_dict(json.loads((workdir / "config.json").read_text())) == chaos[1]
  assert list((workdir / "tensorboard").rglob("*tfevents*"))


def test_the_result_is_a_plain_orbax_checkpoint_of_the_model(chaos):
  workdir, config, summary, _ = chaos
  params = ocp.StandardCheckpointer().restore((workdir / "result").absolute())
  module = transformer.from_params(config.model, params)
  logits_BxTxV, _ = module(np.zeros((1, 4), np.int32))
  assert logits_BxTxV.shape == (1, 4, 256) and np.isfinite(logits_BxTxV).all()
  said = session.measure(workdir, saved_config(workdir))
  assert said["loss"] == pytest.approx(summary["loss_merged"], rel=1e-5)


def test_generate_writes_the_same_for_the_same_seed(chaos):
  workdir, config, *_ = chaos
  texts = [session.sample(workdir, config, "ab", 6, 0.9, seed) for seed in (1, 1)]
  assert texts[0] == texts[1] and texts[0].startswith("ab")


def test_the_report_can_be_drawn_again(chaos):
  workdir, _, summary, _ = chaos
  (workdir / "report" / "summary.json").unlink()
  session.report(workdir)
  again = json.loads((workdir / "report" / "summary.json").read_text())
  assert again == summary


def test_data_parallel_is_a_run_without_syncer(tmp_path):
  config = make_config(
    1, 60, sync={"num_shards": 0}, islands={"devices": 4, "data": -1, "fsdp": 1, "batch_size": 4}
  )
  config = dataclasses.replace(
    config, run=dataclasses.replace(config.run, total_tokens=60 * config.tokens_per_step(0))
  )
  summary, events = train(config, tmp_path)
  assert summary["loss_merged"] < summary["loss_untrained"] - 0.05
  assert summary["learner_steps"] == {"0": 60} and summary["commits"] == 0
  (started,) = (e for e in events if e.kind == "started")
  assert (started.devices, started.mesh) == (4, (4, 1, 1))
  assert session.load_result(tmp_path, config)["embedding"].shape == (256, 16)


def test_islands_of_one_run_may_differ(tmp_path):
  overrides = {
    "1": {"devices": 2, "fsdp": 2, "batch_size": 4},
    "2": {"devices": 4, "data": 2, "fsdp": 1, "tensor": 2},
  }
  # One pace for all: here they share two cores, and who is much slower than others is never merged.
  islands = {"overrides": overrides, "min_step_seconds": 0.2}
  config = make_config(3, 60, islands=islands, run={"sample_tokens": 0})
  summary, events = train(config, tmp_path)
  started = {e.role: e for e in events if e.kind == "started" and e.mesh}
  assert [started[f"learner-{m}"].mesh for m in range(3)] == [(1, 1, 1), (1, 2, 1), (2, 1, 2)]
  assert [started[f"learner-{m}"].batch_size for m in range(3)] == [2, 4, 2]
  joint = [e.weights for e in events if e.kind == "commit" and len(e.weights) > 1]
  assert {m for each in joint for m in each} == {0, 1, 2}
  assert summary["loss_merged"] < summary["loss_untrained"]


def test_the_evaluator_has_devices_of_its_own(tmp_path):
  config = make_config(2, 30, run={"sample_tokens": 0, "evaluator_devices": 4})
  taken = []

  class Heldout(session.HeldoutLoss):
    def __init__(self, model, batches, devices):
      super().__init__(model, batches, devices)
      taken.extend(devices)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(session, "HeldoutLoss", Heldout)
    summary, events = train(config, tmp_path)
  assert taken == jax.devices()[-4:]
  assert summary["loss_merged"] < summary["loss_untrained"]
  assert any(e.kind == "evaluation" for e in events)
  greedy = make_config(2, 30, run={"evaluator_devices": 8})  # islands on the CPU share one
  with pytest.raises(ConfigError, match=r"islands\.devices"):
    train(greedy, tmp_path / "greedy")
  with pytest.raises(ConfigError, match=r"run\.evaluator_devices = 9: JAX has 8 devices"):
    train(make_config(2, 30, run={"evaluator_devices": 9}), tmp_path / "more")


def test_a_workdir_that_is_trained_in_is_refused_before_data_are_opened(tmp_path, monkeypatch):
  monkeypatch.setattr(session.data, "open_data", None)
  with held(tmp_path), pytest.raises(ConfigError, match="another process trains in it"):
    session.train(make_config(2, 30), tmp_path)


def test_devices_for_these_tests():
  assert len(jax.devices()) >= 8, "tests/conftest.py makes eight fake ones"
