"""What a run starts from: random values by its seed, or exactly the weights it was given."""

import dataclasses
import os

import jax
import numpy as np
import pytest

from ddiloco.checkpoint import weights
from ddiloco.config import Config, ConfigError, from_dict
from ddiloco.core import fragments
from ddiloco.models import layers
from ddiloco.models.transformer import language_model
from ddiloco.roles import initial

MODEL = {"num_layers": 2, "model_dim": 8, "num_heads": 1, "num_kv_heads": 1, "head_dim": 4,
         "mlp_dim": 8}  # fmt: skip
CONFIG = from_dict({"model": MODEL, "seed": 3})


def starting_from(path, config: Config = CONFIG) -> Config:
  return dataclasses.replace(config, run=dataclasses.replace(config.run, init_from=str(path)))


@pytest.fixture(scope="module")
def params() -> dict[str, np.ndarray]:
  other = dataclasses.replace(CONFIG, seed=4)
  return initial.initial_params(other)


def same(a, b) -> bool:
  assert list(a) == list(b)
  return all(a[name].dtype == b[name].dtype == np.float32 for name in a) and all(
    a[name].tobytes() == b[name].tobytes() for name in a
  )


def test_random_values_follow_the_seed(params):
  assert same(initial.initial_params(CONFIG), initial.initial_params(CONFIG))
  assert not same(initial.initial_params(CONFIG), params)
  assert initial.shapes(CONFIG.model) == {n: tuple(v.shape) for n, v in params.items()}


def test_what_draws_many_values_is_optimized(monkeypatch):
  drawn, program = [], initial._program
  monkeypatch.setattr(initial, "_program", lambda *what: drawn.append(what) or program(*what))
  monkeypatch.setattr(initial, "OPTIMIZED_FROM", 1000)
  monkeypatch.setattr(initial, "GROUP_BYTES", 4000)
  made = initial.initial_params(CONFIG)
  sizes = [sum(made[name].size for name in group) for _, group, _ in drawn]
  assert [optimized for *_, optimized in drawn] == [size >= 1000 for size in sizes]
  assert min(sizes) < 1000 <= max(sizes)


def test_a_model_is_traced_once_for_its_shapes_and_its_values(monkeypatch):
  calls, drawn = [], layers.drawn
  monkeypatch.setattr(layers, "drawn", lambda *what: calls.append(what) or drawn(*what))
  config = from_dict({"model": {**MODEL, "mlp_dim": 12}})
  initial.shapes(config.model)
  traced = len(calls)
  initial.initial_params(config)
  assert traced and len(calls) == traced


def test_values_are_drawn_on_the_cpu_whatever_device_is_the_default():
  """Another device may compute other bits, which no other role would have."""
  initial._program.cache_clear()
  with jax.default_device(jax.devices()[1]):
    program = initial._program(language_model(CONFIG.model).init, ("embedding",), False)
    (drawn,) = program(np.uint32(CONFIG.seed))
  assert drawn.devices() == {jax.local_devices(backend="cpu")[0]}


def test_what_draws_values_takes_little_memory_beside_them():
  """Random bits of all layers took three times as much: 33 GB, for a stack of 11 GB, in each role
  of 12 billion parameters; a shard of them has 24 GB."""
  size = {"num_layers": 16, "model_dim": 128, "mlp_dim": 2048}
  init = language_model(from_dict({"model": size}).model).init
  needed = initial._program(init, ("layers/mlp/gate",), True).memory_analysis()
  assert needed.temp_size_in_bytes < needed.output_size_in_bytes / 2


@pytest.mark.parametrize("form", ["model.safetensors", "checkpoint", "run/result"])
def test_given_weights_are_what_a_run_starts_from_bitwise(tmp_path, params, form):
  weights.save(tmp_path / form, params)
  path = tmp_path / form
  if form.startswith("run"):
    path = path.parent
    (path / "config.json").write_text(CONFIG.to_json())
  config = starting_from(path)
  assert initial.checked_start(config) == config
  assert same(initial.initial_params(config), params)
  again = tmp_path / "again.safetensors"
  weights.save(again, initial.initial_params(config))
  assert same(initial.initial_params(starting_from(again)), params)


def test_a_relative_path_becomes_absolute_for_other_processes(tmp_path, params, monkeypatch):
  weights.save(tmp_path / "model.safetensors", params)
  monkeypatch.chdir(tmp_path)
  config = initial.checked_start(starting_from("model.safetensors"))
  assert config == starting_from(tmp_path / "model.safetensors")
  assert initial.checked_start(CONFIG) is CONFIG


def test_snapshots_stay_where_they_are_whoever_looks_for_them(tmp_path, monkeypatch):
  """The run went on from another directory, and looked for its snapshots there. In `--flag=~/...`
  no shell reads the "~": a folder of this name was made."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("HOME", "/home/me")
  for path, there in (("a/b", f"{tmp_path}/a/b"), ("~/a", "/home/me/a"), ("gs://a/b", "gs://a/b")):
    config = initial.absolute_start(from_dict({"checkpoint": {"path": path}}))
    assert config.checkpoint.path == there


def test_bad_weights_are_refused_before_the_run(tmp_path, params):
  path = tmp_path / "model.safetensors"
  with pytest.raises(ConfigError, match=r"^run.init_from = .*does not exist"):
    initial.checked_start(starting_from(path))
  weights.save(path, params)
  deeper = from_dict({"model": MODEL | {"num_layers": 3}})
  with pytest.raises(ConfigError, match=r"is of another model: layers/.*, not "):
    initial.checked_start(starting_from(path, deeper))
  os.truncate(path, path.stat().st_size - 1)
  with pytest.raises(ConfigError, match="cannot be read"):
    initial.checked_start(starting_from(path))


def test_values_are_checked_when_they_are_loaded(tmp_path, params):
  scale = params["final_norm/scale"].copy()
  scale[1] = np.nan
  diverged = params | {"final_norm/scale": scale}
  config = starting_from(weights.save(tmp_path / "model.safetensors", diverged))
  initial.checked_start(config)
  with pytest.raises(ConfigError, match=r"final_norm/scale has 1 values that are not finite"):
    initial.initial_params(config)


def test_names_are_the_models(params):
  assert list(params) == list(language_model(CONFIG.model).shapes())
  assert {"embedding", "final_norm/scale", "layers/attention/query"} <= params.keys()


@pytest.mark.parametrize("form", ["", "model.safetensors", "checkpoint"])
def test_a_role_makes_the_initial_values_that_it_needs(tmp_path, params, form, monkeypatch):
  config = CONFIG
  if form:
    weights.save(tmp_path / form, params)
    config = starting_from(tmp_path / form)
  monkeypatch.setattr(initial, "GROUP_BYTES", 2000)  # several programs
  plan, whole = initial.make_plan(config), initial.initial_params(config)
  found = initial.initial_values(config, plan, (1, 2))
  assert found.keys() == {1, 2}
  for p, value in found.items():
    assert value.tobytes() == fragments.gather(plan.fragments[p], whole).tobytes()
