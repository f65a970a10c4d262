"""Every preset validates and has the size its name and its comment say."""

from __future__ import annotations

import importlib.util
import pathlib
import re

import jax
import numpy as np
import pytest

from ddiloco import config
from ddiloco.models.transformer import language_model
from tests.models.small import active_params, forward, init_params, num_params, random_tokens

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


def load(name: str):
  spec = importlib.util.spec_from_file_location(f"configs_{name}", CONFIGS / f"{name}.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


DENSE, MOE = load("dense"), load("moe")
ALL = [(DENSE, p) for p in DENSE.PRESETS] + [(MOE, p) for p in MOE.PRESETS]


def named_size(preset: str) -> float:
  return float(preset[:-1]) * {"k": 1e3, "m": 1e6, "b": 1e9}[preset[-1]]


def commented(module, preset: str) -> str:
  text = pathlib.Path(module.__file__).read_text()
  return re.search(rf'^ *"{re.escape(preset)}": .*# (.+)$', text, re.MULTILINE)[1]


def test_the_tables_reach_from_100k_to_12b():
  assert list(DENSE.PRESETS) == ["100k", "1m", "10m", "100m", "500m", "1b", "2b", "5b", "9b", "12b"]
  assert list(MOE.PRESETS) == ["tiny", "2.8b", "3.8b"]


@pytest.mark.parametrize("preset", DENSE.PRESETS)
def test_dense_size(preset):
  model = config.from_dict(DENSE.get_config(preset)).model
  count = num_params(model)
  assert abs(count / named_size(preset) - 1) < 0.1
  assert commented(DENSE, preset) == f"{count:,}"


@pytest.mark.parametrize("preset", MOE.PRESETS)
def test_mixture_size(preset):
  model = config.from_dict(MOE.get_config(preset)).model
  active, count = active_params(model), num_params(model)
  total = f"{count:,}" if count < 1e9 else f"{count / 1e9:.1f}e9"
  assert commented(MOE, preset) == f"{active:,} ({total})"
  if preset != "tiny":
    assert abs(active / named_size(preset) - 1) < 0.1


@pytest.mark.parametrize("module, preset", ALL, ids=lambda x: x if isinstance(x, str) else "")
def test_settings_fit_the_size(module, preset):
  c = config.from_dict(module.get_config(preset))
  shapes = language_model(c.model).shapes()
  tensors = sum(s.shape[0] if n.startswith("layers/") else 1 for n, s in shapes.items())
  assert c.sync.num_fragments <= tensors
  if c.model.vocab_size == 256:
    assert c.data.tokenizer == "bytes" and c.data.source == "stdlib"
    return
  assert 32_000 <= c.model.vocab_size <= 262_144
  assert c.model.vocab_size <= np.iinfo(c.data.token_dtype).max + 1
  assert c.model.compute_dtype == "bfloat16" and c.islands.remat == "full"
  assert (c.data.sequence_length, c.sync.num_fragments, c.sync.sync_period) == (2048, 24, 24)


def test_a_preset_starts_near_the_uniform_guess():
  """No token starts out predicting itself: ln 256 = 5.55, plus half the logits' unit variance."""
  model = config.from_dict(DENSE.get_config("100k")).model
  tokens = random_tokens(model, 4, 64)
  logits, _ = forward(model, init_params(model, jax.random.key(0)), tokens)
  log_p = np.asarray(jax.nn.log_softmax(logits[:, :-1]))
  value = -np.mean(np.take_along_axis(log_p, np.asarray(tokens)[:, 1:, None], -1))
  itself = -np.mean(np.take_along_axis(log_p, np.asarray(tokens)[:, :-1, None], -1))
  assert 5.4 < value < 6.5
  assert itself > 1.0


@pytest.mark.parametrize("module", [DENSE, MOE], ids=["dense", "moe"])
def test_unknown_preset_lists_those_there_are(module):
  with pytest.raises(config.ConfigError, match="'7b'") as error:
    module.get_config("7b")
  assert all(preset in str(error.value) for preset in module.PRESETS)
  assert "Fix: " in str(error.value)


@pytest.mark.parametrize("module", [DENSE, MOE], ids=["dense", "moe"])
def test_the_default_preset_is_one(module):
  assert isinstance(config.from_dict(module.get_config()), config.Config)
