"""The evaluator: the right number, one compilation, any kind of parameters."""

from __future__ import annotations

import dataclasses
import math
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddiloco.config import ConfigError, ModelConfig
from ddiloco.models.transformer import Transformer, language_model
from ddiloco.training.evaluate import HeldoutLoss

MODEL = ModelConfig(
  vocab_size=32,
  num_layers=2,
  model_dim=16,
  num_heads=2,
  num_kv_heads=1,
  head_dim=8,
  mlp_dim=16,
)
BATCHES = [np.random.default_rng(n).integers(0, 32, (2, 9), np.int32) for n in range(3)]


@pytest.fixture(scope="module")
def params():
  rng = np.random.default_rng(0)  # plain numbers: compiling the initialiser takes seconds
  shapes = language_model(MODEL).shapes()
  return {n: jnp.asarray(rng.normal(0, 0.3, s.shape), jnp.float32) for n, s in shapes.items()}


@pytest.fixture(scope="module")
def evaluator():
  return HeldoutLoss(MODEL, BATCHES, jax.devices()[1:2])


def test_is_the_mean_of_the_training_loss(evaluator, params):
  loss = jax.jit(lambda batch: language_model(MODEL).loss(params, batch)[1]["loss"])
  expected = np.mean([float(loss(batch)) for batch in BATCHES])
  assert evaluator.loss(params) == pytest.approx(float(expected), rel=1e-5)


def test_a_model_that_knows_nothing_costs_log_vocabulary(evaluator, params):
  nothing = {name: np.zeros(value.shape, np.float32) for name, value in params.items()}
  assert evaluator.loss(nothing) == pytest.approx(math.log(32), rel=1e-6)


def test_takes_host_device_and_sharded_arrays_and_compiles_once(evaluator, params, monkeypatch):
  traces = []
  states = Transformer.states
  monkeypatch.setattr(Transformer, "states", lambda *a: traces.append(1) or states(*a))
  evaluator = HeldoutLoss(MODEL, BATCHES, jax.devices()[1:2])
  mesh = jax.make_mesh((2,), ("fsdp",), devices=jax.devices()[2:4])
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
  sharded = dict(params, embedding=jax.device_put(params["embedding"], sharding))
  host = {name: np.asarray(value) for name, value in params.items()}
  losses = [evaluator.loss(p) for p in (params, host, sharded)]
  assert losses[0] == losses[1] == losses[2]
  assert len(traces) == 1


def test_computes_in_f32_whatever_the_island_trains_in(evaluator, params):
  coarse = dataclasses.replace(MODEL, compute_dtype="bfloat16")
  assert HeldoutLoss(coarse, BATCHES, jax.devices()[0:1]).loss(params) == pytest.approx(
    evaluator.loss(params), rel=1e-6
  )
  rounded = {name: value.astype(jnp.bfloat16) for name, value in params.items()}
  assert evaluator.loss(rounded) == pytest.approx(evaluator.loss(params), rel=0.02)


def test_on_a_mesh_parameters_are_cut_and_the_loss_is_that_of_one_device(params, monkeypatch):
  batches = [np.random.default_rng(n).integers(0, 32, (8, 9), np.int32) for n in range(2)]
  eight, taken = HeldoutLoss(MODEL, batches, jax.devices()), []
  measure = eight._measure
  monkeypatch.setattr(eight, "_measure", lambda *a: taken.append(a) or measure(*a))
  host = {name: np.asarray(value) for name, value in params.items()}
  assert eight.loss(host) == pytest.approx(
    HeldoutLoss(MODEL, batches, jax.devices()[1:2]).loss(host), rel=1e-5
  )
  ((placed, tokens),) = taken
  biggest = placed["embedding"]
  assert len(biggest.sharding.device_set) == 8
  assert biggest.addressable_shards[0].data.nbytes * 8 == biggest.nbytes
  assert tokens.addressable_shards[0].data.shape == (2, 1, 9)
  cut = sum(each.addressable_shards[0].data.nbytes for each in placed.values())
  assert cut < 0.2 * sum(each.nbytes for each in host.values())


def test_asks_for_one_parameter_after_the_other(params):
  """So that a whole second model is never on the host."""
  alive, most = [], []

  class OneByOne(dict):
    def items(self):
      for name in self:
        leaf = np.array(params[name])
        alive.append(weakref.ref(leaf))
        yield name, leaf
        del leaf
        most.append(sum(ref() is not None for ref in alive))

  measured = HeldoutLoss(MODEL, BATCHES, jax.devices()).loss(OneByOne(params))
  assert math.isfinite(measured)
  # JAX lets go of what it has copied a little later.
  assert max(most) <= len(params) // 2, "not a second model"


@pytest.mark.parametrize("batches", [[], [BATCHES[0], BATCHES[0][:1]]])
def test_refuses_no_batches_and_ragged_ones(batches):
  with pytest.raises(ValueError, match="same shape"):
    HeldoutLoss(MODEL, batches, jax.devices()[0:1])


def test_refuses_tokens_outside_the_vocabulary():
  with pytest.raises(ConfigError, match=r"model.vocab_size = 32.*a 40 in the held-out split"):
    HeldoutLoss(MODEL, [np.full((1, 9), 40)], jax.devices()[0:1])
  with pytest.raises(ConfigError, match=r"model.vocab_size = 32.*a 4294967289 in the held-out"):
    HeldoutLoss(MODEL, [np.full((1, 9), -7, np.int32)], jax.devices()[0:1])
