"""The Python on the page about own models runs: each model is planned and trained, and goes on."""

import re
import runpy
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

import ddiloco
from ddiloco.trace.replay import replay_run
from ddiloco.trace.text import open_trace

call = nnx.jit(lambda module, tokens: module(tokens))
PAGE = Path(__file__).parent.parent.parent / "docs" / "own_models.md"


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
  blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
  path = tmp_path_factory.mktemp("page") / "mine.py"
  path.write_text("\n".join(blocks))
  return path


def config_of(file: Path, model: str, **options):
  config = ddiloco.default()
  config.model.custom, config.model.options = f"{file}:{model}", options
  config.inner.custom, config.inner.learning_rate = f"{file}:inner", 3e-3
  config.data.update(source="synthetic", sequence_length=16, heldout_sequences=8)
  config.islands.update(num_learners=2, batch_size=4)
  config.sync.update(num_fragments=2, sync_period=4, snapshot_steps=0)
  config.run.update(total_tokens=2 * 40 * 4 * 16, evaluations=1)
  return config


@pytest.mark.parametrize("model", ["recurrent", "tuned", "linen"])
def test_models_are_planned(file, model):
  assert ddiloco.plan(config_of(file, model), gbps=1.0, step_seconds=0.1)["bytes_per_step"] > 0


def test_a_result_goes_into_plain_modules(file):
  page = runpy.run_path(str(file))
  tokens = np.arange(8).reshape(2, 4)
  model = page["Recurrent"]()
  params = {n: np.asarray(v) for n, v in model.init(nnx.Rngs(3)()).items()}
  plain = page["into_nnx"](page["Net"](nnx.Rngs(0)), params)
  plain.set_attributes(deterministic=True)
  np.testing.assert_array_equal(call(plain, tokens), call(model.module(params), tokens))
  linen = page["Linen"]()
  params = linen.init(nnx.Rngs(3)())
  there = jax.jit(linen.net.apply)(page["into_linen"](params), tokens)
  np.testing.assert_array_equal(there, jax.jit(linen.logits)(params, tokens))


@pytest.mark.slow
def test_a_merge_of_ones_own_is_tried_in_virtual_time(file):
  page, config = runpy.run_path(str(file)), config_of(file, "recurrent")
  losses = page["compared"](config)
  assert losses.keys() == {"median", "config's"} and len(set(losses.values())) == 2
  problem = page["Text"](page["from_dict"](config))
  assert max(losses.values()) < problem.loss(problem.initial)


@pytest.mark.slow
def test_a_sweep_gives_tables_and_curves(file, tmp_path):
  page, config = runpy.run_path(str(file)), config_of(file, "recurrent")
  config.run.total_tokens //= 4
  runs = page["sweep"](config, tmp_path, range(2))
  rows = page["table"](runs)
  assert [row["run"] for row in rows] == ["seed-0", "seed-1"]
  assert rows[0]["loss_merged"] != rows[1]["loss_merged"]
  tokens, losses = zip(*page["curve"](runs[0]))
  assert list(tokens) == sorted(tokens) and tokens[-1] > 0 and np.isfinite(losses).all()


@pytest.mark.slow
def test_adapters_train_on_a_base_from_a_file_and_statistics_follow_the_result(file, tmp_path):
  page = runpy.run_path(str(file))
  base = {name: np.asarray(value) for name, value in page["Tuned"]("").frozen().items()}
  save_file(base, tmp_path / "base.safetensors")
  config = config_of(file, "tuned", base=str(tmp_path / "base.safetensors"))
  run = ddiloco.train(config, tmp_path / "tuned", cpu=True)
  assert run.summary()["reason"] == "finished"
  assert run.params().keys() == {"hidden/lora/lora_a", "hidden/lora/lora_b"}
  assert run.evaluate()["loss"] < run.summary()["loss_untrained"]
  run = ddiloco.train(config_of(file, "recurrent"), tmp_path / "recurrent", cpu=True)
  counts, difference = replay_run(run.workdir, open_trace(run.workdir))
  assert counts["identical"] and counts["losses_compared"] >= 80, difference  # dropout too
  batches = [np.random.default_rng(n).integers(0, 256, (4, 17)) for n in range(3)]
  module = page["with_statistics"](run, batches)
  assert np.all(module.norm.mean[...] != 0) and np.all(module.norm.var[...] < 1)
  one, two = call(module, batches[0][:, :-1]), call(module, batches[0][:1, :-1])
  np.testing.assert_allclose(one[:1], two, rtol=1e-4, atol=1e-5)  # no row depends on others
