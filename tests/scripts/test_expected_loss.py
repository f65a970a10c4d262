"""What lab pages say of loss: the runs that they speak of, and a short one."""

from __future__ import annotations

import json

import pytest

from tests.scripts import commands

TUTORIAL = commands.SCRIPTS.parent / "configs" / "tutorial.py"
CHANGED = """
  c.islands.batch_size, c.outer.learning_rate, c.outer.momentum = 1, 0.7, 0.5
  c.run.total_tokens = 4 * 120 * 64
  return c
"""


@pytest.fixture
def expected_loss(script):
  return script("expected_loss")


def test_its_runs_are_those_of_the_config_at_equal_tokens(expected_loss):
  for name in expected_loss.CONFIGS.split(";"):
    config = expected_loss.config_of(name, 2)
    assert config.seed == 2
    whole = expected_loss.together(config, 0.5)
    assert whole.islands.num_learners == 1 and not whole.sync.num_shards and not whole.chaos.faults
    tokens = [each.planned_steps() * each.planned_tokens_per_step for each in (config, whole)]
    assert tokens[0] == tokens[1] >= config.run.total_tokens
    assert whole.inner.learning_rate == config.inner.learning_rate / 2


def test_a_kind_that_is_none_is_refused(expected_loss, monkeypatch, capsys):
  monkeypatch.setattr("sys.argv", ["expected_loss.py", "--kinds=merged;best"])
  with pytest.raises(SystemExit):
    expected_loss.main()
  said = capsys.readouterr().err
  assert "--kinds: best is none of untrained; alone; together; adamw; merged; bf16" in said


@pytest.mark.slow
def test_the_loss_of_every_kind_and_once_only(tmp_path, here):
  """The tutorial's config with a twelfth of its tokens, and an outer step that is quicker."""
  kinds, path = "untrained;alone;together;merged;int4", tmp_path / "short"
  path.with_suffix(".py").write_text(TUTORIAL.read_text().replace("  return c\n", CHANGED))
  line = f"expected_loss.py --configs={path} --seeds=1 --rates=1 --workdir={tmp_path}"
  line += f" --kinds={kinds}"
  found = commands.last(here(line))[str(path)]
  losses = {kind: found[kind][0] for kind in ("untrained", "alone", "together", "merged")}
  assert losses["untrained"] > losses["alone"] > losses["merged"] > losses["together"], losses
  assert 0 < abs(found["int4"][0] / losses["merged"] - 1) < 0.05, "rounded, which costs little"
  runs = [json.loads(each) for each in (tmp_path / "runs.jsonl").read_text().splitlines()]
  assert [each["kind"] for each in runs] == kinds.split(";")
  assert commands.last(here(line))[str(path)] == found
  assert len((tmp_path / "runs.jsonl").read_text().splitlines()) == 5
