"""The whole model: causality, equivalences, names and axes, determinism, and sharding."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ddiloco.config import ModelConfig
from ddiloco.models import layers, transformer
from tests.models.small import DENSE, MIXTURE, fresh, layout, loss, random_tokens

# Slots that run out are where a mixture could look ahead.
TIGHT = dataclasses.replace(MIXTURE, capacity_factor=0.7)
BOTH = pytest.mark.parametrize("model", [DENSE, MIXTURE], ids=["dense", "mixture"])


@pytest.mark.parametrize("model", [DENSE, MIXTURE, TIGHT], ids=["dense", "mixture", "tight"])
def test_causal(model):
  params, tokens = fresh(model), random_tokens(model, 2, 12)
  forward = jax.jit(lambda t: transformer.apply(model, params, t)[0])
  before = forward(tokens)
  for position in (0, 5, 11):
    changed = tokens.at[:, position].set((tokens[:, position] + 1) % model.vocab_size)
    after = forward(changed)
    np.testing.assert_allclose(after[:, :position], before[:, :position], atol=1e-5)
    assert float(jnp.max(jnp.abs(after[:, position] - before[:, position]))) > 1e-2


@BOTH
def test_sequences_of_a_batch_do_not_mix(model):
  params, tokens = fresh(model), random_tokens(model, 3, 8)
  together, _ = transformer.apply(model, params, tokens)
  alone, _ = transformer.apply(model, params, tokens[1:2])
  np.testing.assert_allclose(together[1:2], alone, atol=1e-5)


@pytest.mark.parametrize("num_layers", [3, 6], ids=["unrolled", "loop"])
@pytest.mark.parametrize("num_experts", [0, 4])
def test_scan_equals_layers_by_hand(num_layers, num_experts):
  model = dataclasses.replace(DENSE, num_layers=num_layers, num_experts=num_experts)
  params, tokens = fresh(model), random_tokens(model, 2, 9)
  logits, balance = transformer.apply(model, params, tokens)

  module = transformer.from_params(model, params)
  x = params["embedding"][tokens] * model.model_dim**0.25
  rope, balances = layers.rope_tables(9, model.head_dim, model.rope_theta), []
  graph, stacked = nnx.split(module.layers)
  for index in range(num_layers):
    layer = nnx.merge(graph, jax.tree.map(lambda leaf, i=index: leaf[i], stacked))
    x, one = layer(x, rope, layers.unconstrained)
    balances.append(float(one))
  expected = module.final_norm(x) @ params["embedding"].T
  np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
  np.testing.assert_allclose(balance, np.mean(balances), rtol=1e-5)
  assert (balance > 0) == bool(num_experts)


@BOTH
def test_remat_changes_memory_not_values(model):
  params, tokens = fresh(model), random_tokens(model, 2, 8)
  remat = dataclasses.replace(model, remat=True)
  plain = jax.jit(jax.grad(lambda p: loss(model, p, tokens)))(params)
  again = jax.jit(jax.grad(lambda p: loss(remat, p, tokens)))(params)
  text = str(jax.make_jaxpr(jax.grad(lambda p: loss(remat, p, tokens)))(params))
  assert "remat" in text or "checkpoint" in text
  for name in plain:
    np.testing.assert_allclose(again[name], plain[name], rtol=1e-4, atol=1e-6, err_msg=name)


@BOTH
def test_every_parameter_gets_a_gradient(model):
  params, tokens = fresh(model), random_tokens(model, 4, 16)
  for name, grad in jax.jit(jax.grad(lambda p: loss(model, p, tokens)))(params).items():
    rows = grad.reshape(grad.shape[0], -1) if name.startswith("layers/") else grad.reshape(1, -1)
    assert np.isfinite(grad).all() and (np.abs(rows).max(axis=1) > 0).all(), name


@BOTH
def test_bf16_is_close_to_f32(model):
  params, tokens = fresh(model), random_tokens(model, 2, 16)
  exact, _ = transformer.apply(model, params, tokens)
  half = dataclasses.replace(model, compute_dtype="bfloat16")
  rounded, balance = transformer.apply(half, params, tokens)
  assert rounded.dtype == balance.dtype == jnp.float32
  error = jnp.abs(rounded - exact)
  # A few choices of near-equal experts flip in a mixture; the typical error stays small.
  assert 0 < float(jnp.median(error)) < 0.03
  if not model.num_experts:
    assert float(jnp.max(error)) < 0.15


@BOTH
def test_init_is_a_pure_function_of_the_key(model):
  one, again = fresh(model, seed=3), fresh(model, seed=3)
  other = fresh(model, seed=4)
  eager = transformer.init(model, jax.random.key(3))
  for name in one:
    np.testing.assert_array_equal(one[name], again[name])
    assert not np.array_equal(one[name], other[name]), name
    if not name.endswith("scale"):
      np.testing.assert_allclose(eager[name], one[name], rtol=1e-5, atol=1e-7)
      if name.startswith("layers/"):  # layers differ from each other
        assert not np.array_equal(one[name][0], one[name][1]), name


def test_init_of_some_leaves_under_jit_equals_the_same_of_all():
  some = jax.jit(lambda key: transformer.init(DENSE, key)["layers/mlp/up"])(jax.random.key(0))
  np.testing.assert_array_equal(some, fresh(DENSE)["layers/mlp/up"])


def test_init_scales():
  model = dataclasses.replace(DENSE, model_dim=64, mlp_dim=128, num_layers=8, vocab_size=256)
  params = transformer.init(model, jax.random.key(0))
  expected = {
    "embedding": 64**-0.5,
    "layers/attention/query": 64**-0.5,
    "layers/attention/output": (4 * 8 * 2 * 8) ** -0.5,
    "layers/mlp/gate": 64**-0.5,
    "layers/mlp/down": (128 * 2 * 8) ** -0.5,
  }
  for name, stddev in expected.items():
    assert abs(float(jnp.std(params[name])) / stddev - 1) < 0.05, name
  assert (params["final_norm/scale"] == 1).all()


@pytest.mark.parametrize("model", [DENSE, MIXTURE, ModelConfig()], ids=["dense", "moe", "default"])
def test_shapes_and_axes_describe_the_real_parameters(model):
  params, shapes, axes = fresh(model), transformer.shapes(model), transformer.logical_axes(model)
  assert list(params) == list(shapes) == list(axes)
  assert {name.split("/")[0] for name in params} == {"embedding", "layers", "final_norm"}
  for name, value in params.items():
    assert (value.shape, value.dtype) == (shapes[name].shape, shapes[name].dtype)
    assert value.dtype == jnp.float32
    assert len(axes[name]) == value.ndim
    assert ("layers" in axes[name]) == name.startswith("layers/")
    if name.startswith("layers/"):
      assert axes[name][0] == "layers" and value.shape[0] == model.num_layers


def test_axes_golden():
  assert transformer.logical_axes(DENSE) == {
    "embedding": ("vocab", "embed"),
    "final_norm/scale": ("norm",),
    "layers/attention/key": ("layers", "embed", "kv_heads", "head_dim"),
    "layers/attention/output": ("layers", "heads", "head_dim", "embed"),
    "layers/attention/query": ("layers", "embed", "heads", "head_dim"),
    "layers/attention/value": ("layers", "embed", "kv_heads", "head_dim"),
    "layers/attention_norm/scale": ("layers", "norm"),
    "layers/mlp/down": ("layers", "mlp", "embed"),
    "layers/mlp/gate": ("layers", "embed", "mlp"),
    "layers/mlp/up": ("layers", "embed", "mlp"),
    "layers/mlp_norm/scale": ("layers", "norm"),
  }
  mixture = transformer.logical_axes(MIXTURE)
  assert mixture["layers/moe/router"] == ("layers", "embed", None)
  assert mixture["layers/moe/gate"] == ("layers", "experts", "embed", "mlp")
  assert mixture["layers/moe/down"] == ("layers", "experts", "mlp", "embed")


def test_from_params_is_the_module_and_round_trips():
  params, tokens = fresh(MIXTURE), random_tokens(MIXTURE, 2, 6)
  module = transformer.from_params(MIXTURE, params)
  assert isinstance(module, transformer.Transformer)
  for actual, expected in zip(
    module(tokens), transformer.apply(MIXTURE, params, tokens), strict=True
  ):
    np.testing.assert_array_equal(actual, expected)
  flat = {"/".join(path): v[...] for path, v in nnx.to_flat_state(nnx.state(module))}
  assert all(flat[name] is params[name] for name in params) and len(flat) == len(params)


def test_from_params_names_what_is_wrong():
  params = fresh(DENSE)
  with pytest.raises(ValueError, match=r"missing \['layers/moe/down'.*unknown \['layers/mlp/down'"):
    transformer.from_params(MIXTURE, params)
  with pytest.raises(ValueError, match=r"'embedding'.*\(31, 16\).*\(32, 16\)"):
    transformer.from_params(DENSE, {**params, "embedding": params["embedding"][:-1]})


def test_constrain_sees_every_kind_of_activation_with_one_name_per_axis():
  seen = set()

  def constrain(x, axes):
    assert x.ndim == len(axes)
    seen.add(axes)
    return x

  for model in (DENSE, MIXTURE):
    transformer.apply(model, fresh(model), random_tokens(model, 2, 4), constrain)
  assert seen == {
    ("batch", "time", None),
    ("batch", "heads", "time", None),
    ("batch", "kv_heads", "time", None),
    ("batch", "time", "mlp"),
    ("batch", "experts", None, None),
    ("batch", "experts", None, "mlp"),
    ("batch", "time", "vocab"),
  }


@pytest.mark.parametrize("model", [DENSE, MIXTURE, TIGHT], ids=["dense", "mixture", "tight"])
@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 2, 4)], ids=["2x2x2", "1x2x4"])
def test_sharded_equals_single_device(model, shape):
  """With four tensor shards two kv heads stay whole."""
  mesh = jax.make_mesh(
    shape, ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3
  )
  params, tokens = fresh(model), random_tokens(model, 4, 8)
  axes = transformer.logical_axes(model)
  placed = {n: jax.device_put(v, layout(mesh, v.shape, axes[n])) for n, v in params.items()}
  assert not placed["layers/attention/query"].sharding.is_fully_replicated
  spread = jax.device_put(tokens, layout(mesh, tokens.shape, ("batch", None)))

  def constrain(x, names):
    return jax.lax.with_sharding_constraint(x, layout(mesh, x.shape, names))

  single = jax.jit(jax.value_and_grad(lambda p, t: loss(model, p, t)))
  sharded = jax.jit(jax.value_and_grad(lambda p, t: loss(model, p, t, constrain)))
  (value, grads), (value_s, grads_s) = single(params, tokens), sharded(placed, spread)
  np.testing.assert_allclose(value_s, value, rtol=1e-5)
  for name in grads:
    np.testing.assert_allclose(grads_s[name], grads[name], rtol=1e-3, atol=1e-5, err_msg=name)
  logits = jax.jit(lambda p, t: transformer.apply(model, p, t, constrain)[0])(placed, spread)
  np.testing.assert_allclose(
    logits, transformer.apply(model, params, tokens)[0], rtol=1e-4, atol=1e-4
  )


@BOTH
def test_init_can_be_born_sharded_and_needs_no_mesh(model):
  assert jax.sharding.get_abstract_mesh().empty
  mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"))
  axes, shapes = transformer.logical_axes(model), transformer.shapes(model)
  wanted = {n: layout(mesh, s.shape, axes[n]) for n, s in shapes.items()}
  born = jax.jit(lambda key: transformer.init(model, key), out_shardings=wanted)(jax.random.key(0))
  plain = jax.jit(lambda key: transformer.init(model, key))(jax.random.key(0))
  for name in plain:
    np.testing.assert_allclose(born[name], plain[name], rtol=1e-6, atol=1e-7, err_msg=name)


def test_a_small_model_learns_to_copy():
  """Twenty-five plain gradient steps on one repeated batch: the loss falls to less than half."""
  tokens = random_tokens(MIXTURE, 4, 8)
  params = fresh(MIXTURE)
  step = jax.jit(jax.value_and_grad(lambda p: loss(MIXTURE, p, tokens)))
  first, _ = step(params)
  for _ in range(25):
    last, grads = step(params)
    params = jax.tree.map(lambda p, g: p - 0.3 * g, params, grads)
  assert float(last) < 0.5 * float(first)
