"""The comparison of algorithms: its rows, their tuning, what it sees of a run, and a short one."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from ddiloco.config import OuterConfig
from ddiloco.core import outer
from ddiloco.core.delta import Committed
from ddiloco.protocol.messages import FragmentState
from ddiloco.protocol.values import replace
from tests.scripts import commands


def test_every_row_is_a_config_of_equal_tokens(script):
  compared = script("compared")
  for name, row in compared.METHODS.items():
    for size in {"33k", *row.sizes}:
      run = compared.Run(size, row, compared.Point(), 2)
      config, tokens = run.config(), compared.SIZES[size].tokens
      made = config.planned_steps() * config.planned_tokens_per_step
      assert made == (tokens // row.learners if row.how == "alone" else tokens), name
      joins = [name for name, (begin, _) in row.presence.items() if begin]
      assert len(config.chaos.faults) == row.faults.get("count", 0) + len(joins)
      assert config.seed == 2 and (not row.of or row.of in compared.METHODS), name


def test_skewed_data_are_parts_that_no_two_islands_share(script):
  compared, skewed = script("compared"), script("skewed")
  config = compared.Run("33k", compared.METHODS["skewed data"], compared.Point(), 0).config()
  source = skewed.source(config.data)
  np.testing.assert_array_equal(source.heldout_batches(64)[0], source.corpus.heldout_batches(64)[0])
  # Every token's value is its place.
  places = np.arange(len(source.corpus.parts[0]))
  train = dataclasses.replace(source.corpus.train, parts=(places,))
  numbered = skewed.Skewed(dataclasses.replace(source.corpus, train=train))
  model = dataclasses.replace(config.model, vocab_size=len(places))
  config = dataclasses.replace(config, model=model)
  starts = []
  for learner in range(4):
    batches = numbered.batches(config, learner)
    starts.append([start for position in range(12) for start in batches[position][:, 0]])
  lowest, highest = [min(s) for s in starts], [max(s) for s in starts]
  assert all(highest[m] < lowest[m + 1] for m in range(3)), "one after the other"


@pytest.mark.slow
def test_a_run_under_faults_makes_every_step_once_and_is_the_same_again(script):
  compared, training = script("compared"), script("virtual_training")
  row = compared.METHODS["12 kills, back with own moments"]
  fields, faults = {**row.fields, "run.restart_seconds": 0.5}, {**row.faults, "count": 4}
  row = dataclasses.replace(row, fields=fields, faults=faults)
  run = compared.Run("quick", row, compared.Point(), 0)
  config = run.config()
  assert {fault.action for fault in config.chaos.faults} == {"kill"}
  worlds = [compared.Observed(training.Text(config), run) for _ in range(2)]
  losses = [world.train() for world in worlds]
  assert losses[0] == losses[1]
  for world in worlds:
    assert world.made == world.quotas
    assert max(world.starts.values()) == 4, "each kill is followed by a new incarnation"
    assert 0 < world.merged() < 1, "what the killed islands had not pushed is lost"


@pytest.mark.slow
def test_islands_that_come_and_go_share_the_steps_and_none_is_lost(script):
  compared, training = script("compared"), script("virtual_training")
  row = compared.METHODS["islands come and go"]
  run = compared.Run("quick", row, compared.Point(batch=8), 0)
  world = compared.Observed(training.Text(run.config()), run)
  world.train()
  planned = run.config().planned_steps()
  assert world.made == world.quotas == 2 * [planned] + 8 * [planned // 4]
  for actor in world.learners():
    for fragment in actor.state.fragments:
      assert fragment.acknowledged_tokens == actor.state.trained_tokens
  assert world.merged() == 1


@pytest.mark.slow
def test_ideas_that_say_nothing_change_nothing(script, monkeypatch):
  compared = script("compared")
  row = compared.METHODS["H = 6"]  # as many commits in six steps as the default has in fifty
  monkeypatch.setattr(compared, "QUICK", dataclasses.replace(compared.QUICK, tokens=6 * 1024))

  def loss(**ideas):
    tried = dataclasses.replace(row, ideas=ideas)
    return compared.train(compared.Run("quick", tried, compared.Point(), 0))["loss"]

  plain = loss()
  assert loss(restart=1e6, warm_up=1e-9, forget=0.0, mean_of=1) == plain
  told = [loss(**{name: number}) for name, number in SOMETHING.items()]
  assert len({plain, *told}) == 1 + len(SOMETHING), told


SOMETHING = {"restart": 2, "warm_up": 0.5, "steady_step": 0.9, "forget": 1.0, "mean_of": 3}


def test_the_outer_rate_follows_what_updates_have_in_common(script):
  ideas = script("ideas")
  assert ideas.gain(0.0, 0.5) == 1 and ideas.gain(0.5, 0.0) == 1.5 and ideas.gain(0.5, 1.0) == 2
  merger = object.__new__(ideas.TriedMerger)
  merger.ideas, merger.seen = {"steady_step": 0.5}, []
  config = OuterConfig(learning_rate=0.4, momentum=0.8)
  assert merger._outer(config, 0.1) == config, "nothing is seen yet"
  merger.seen = [script("outer_gradients").Seen(0, 4, 24.0, None, None, rho) for rho in (0.9, None)]
  slower = merger._outer(config, 0.1).learning_rate
  assert slower == pytest.approx(0.4 * ideas.gain(0.8, 0.5) / ideas.gain(0.8, 0.9))


def test_every_method_is_tuned_with_the_same_number_of_runs(script):
  compared = script("compared")
  made = []

  def runs(run, row):
    """Best at 16e-3, small batches, and an outer rate of 1.4."""
    made.append(run)
    point = run.point
    return {"loss": abs(point.rate - 16e-3) + point.batch / 100 - point.factor, "seed": run.seed}

  comparison = compared.Comparison("33k", runs, seeds=2)
  for row in ("data-parallel", "default, M = 4"):
    made.clear()
    best = comparison.point(row)
    assert best == compared.Point(16e-3, 8, 1.4)
    assert len({compared.known_by(run.told()) for run in made}) == 7
  assert comparison.point("average") == comparison.point("default, M = 4")
  larger = compared.Comparison("115k", runs, seeds=2, smaller=comparison)
  made.clear()
  assert larger.point("default, M = 4") == best
  assert len(made) == 4 and {run.point.batch for run in made} == {8}
  assert comparison.relative([{"seed": 1, "loss": 2.0}], to="data-parallel")


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, True), (0.9, True), (0.5, False)])
def test_the_merged_gradient_is_what_the_outer_step_was_made_of(script, momentum, nesterov):
  gradients, chance = script("outer_gradients"), np.random.default_rng(0)
  value, before, delta = (chance.normal(size=64).astype(np.float32) for _ in range(3))
  config = OuterConfig(learning_rate=0.7, momentum=momentum, nesterov=nesterov)
  moving = before if momentum else None
  old = Committed(FragmentState(0), value, value, moving)
  new = replace(old, value=outer.update(value, moving, delta, config))
  np.testing.assert_allclose(gradients.merged_gradient(old, new, config), delta, atol=1e-5)


def test_what_is_seen_of_a_run_in_parts(script):
  gradients = script("outer_gradients")
  east, north = np.float32([1, 0]), np.float32([0, 2])
  assert gradients.mean_cosine([east, north, east]) == pytest.approx(1 / 3, abs=1e-4)
  assert gradients.mean_cosine([east]) is None and gradients.cosine(east, 0 * north) is None
  seen = [gradients.Seen(0, 2, 24.0, i / 20, 1.0, None if i < 5 else 0.5) for i in range(20)]
  assert gradients.summary(seen) == {
    **{"cosine": 0.475, "length": 1.0, "rho": 0.5},
    **{"pushes": 2, "steps": 24.0},
  }
  course = gradients.course(seen)
  assert course["cosine"][0] == 0.025 and course["rho"][:3] == [None, None, 0.5]


@pytest.mark.slow
def test_a_short_comparison(tmp_path, here):
  """One island that exchanges with a shard, at outer learning rate 1, is data-parallel."""
  line = f"compare.py --quick --workdir={tmp_path}"
  relative = commands.last(here(line))["relative"]["quick"]
  assert relative["data-parallel"] == relative["exchange alone, M = 1"] == 0
  assert 0 < relative["default, M = 4"] < 30
  runs = (tmp_path / "runs.jsonl").read_text().splitlines()
  assert len(runs) == 4 and all(json.loads(run)["loss"] > 0 for run in runs)
  again = here(line, "--table", f"--picture={tmp_path / 'c.png'}")
  assert "| default, M = 4 |" in again and "Machine:" in again
  assert (tmp_path / "c.png").stat().st_size > 10_000
  assert commands.last(here(line))["relative"]["quick"] == relative
  assert len((tmp_path / "runs.jsonl").read_text().splitlines()) == 4, "nothing is run again"
