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
from ddiloco.models.model import PLAIN, Execution
from ddiloco.models.transformer import language_model
from tests.models.small import (
  DENSE,
  MIXTURE,
  forward,
  fresh,
  gradient,
  init_params,
  layout,
  loss,
  mesh_of,
  over,
  random_tokens,
)

# Slots that run out are where a mixture could look ahead.
TIGHT = dataclasses.replace(MIXTURE, capacity_factor=0.7)
UNTIED = dataclasses.replace(DENSE, tied_embedding=False)
BOTH = pytest.mark.parametrize("model", [DENSE, MIXTURE], ids=["dense", "mixture"])


@pytest.mark.parametrize("model", [DENSE, MIXTURE, TIGHT], ids=["dense", "mixture", "tight"])
def test_causal(model):
  params, tokens = fresh(model), random_tokens(model)
  before, _ = forward(model, params, tokens)
  for position in (0, 3, 7):
    changed = np.array(tokens)
    changed[:, position] = (changed[:, position] + 1) % model.vocab_size
    after, _ = forward(model, params, changed)
    before, after = np.asarray(before), np.asarray(after)
    np.testing.assert_allclose(after[:, :position], before[:, :position], atol=1e-5)
    assert np.abs(after[:, position] - before[:, position]).max() > 1e-2


@BOTH
def test_sequences_of_a_batch_do_not_mix(model):
  params, tokens = fresh(model), random_tokens(model)
  changed = np.array(tokens)
  changed[2] = random_tokens(model, seed=9)[2]
  before, after = (np.asarray(forward(model, params, t)[0]) for t in (tokens, changed))
  np.testing.assert_allclose(after[[0, 1, 3]], before[[0, 1, 3]], atol=1e-5)
  assert np.abs(after[2] - before[2]).max() > 1e-2


@pytest.mark.parametrize(
  "model",
  [dataclasses.replace(DENSE, num_layers=2), DENSE, MIXTURE],
  ids=["unrolled", "loop", "mixture"],
)
def test_scan_equals_layers_by_hand(model):
  params, tokens = fresh(model), random_tokens(model)
  logits, balance = forward(model, params, tokens)

  module = transformer.from_params(model, params)
  x = params["embedding"][tokens] * model.model_dim**0.25
  graph, stacked = nnx.split(module.layers)

  @jax.jit
  def run(one, x):
    rope = layers.rope_tables(8, model.head_dim, model.rope_theta)
    return nnx.merge(graph, one)(x, rope, PLAIN)

  balances = []
  for index in range(model.num_layers):
    x, one = run(jax.tree.map(lambda leaf, i=index: leaf[i], stacked), x)
    balances.append(float(one))
  expected = nnx.jit(lambda norm, x: norm(x))(module.final_norm, x) @ params["embedding"].T
  np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
  np.testing.assert_allclose(balance, np.mean(balances), rtol=1e-5)
  assert (balance > 0) == bool(model.num_experts)


@pytest.mark.slow
def test_remat_changes_memory_not_values():
  model = DENSE
  params, tokens = fresh(model), random_tokens(model)
  _, plain = gradient(model, params, tokens)

  def stored_for_backward(remat) -> int:
    def value(p):
      return loss(model, p, tokens, Execution(remat=remat))[0]

    residuals = jax.eval_shape(lambda p: jax.vjp(value, p)[1], params)
    return sum(leaf.size for leaf in jax.tree.leaves(residuals))

  stored = [stored_for_backward(remat) for remat in ("full", "attention", "products", "none")]
  assert stored == sorted(set(stored)) and stored[0] < 0.6 * stored[-1]
  for remat in ("full", "attention", "products"):
    _, again = gradient(model, params, tokens, Execution(remat=remat))
    for name in plain:
      np.testing.assert_allclose(again[name], plain[name], rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("model", [DENSE, MIXTURE, UNTIED], ids=["dense", "mixture", "untied"])
def test_every_parameter_gets_a_gradient(model):
  _, grads = gradient(model, fresh(model), random_tokens(model))
  for name, grad in grads.items():
    rows = np.asarray(grad).reshape(grad.shape[0] if name.startswith("layers/") else 1, -1)
    assert np.isfinite(grad).all() and (np.abs(rows).max(axis=1) > 0).all(), name


@BOTH
def test_bf16_is_close_to_f32(model):
  params, tokens = fresh(model), random_tokens(model)
  exact, _ = forward(model, params, tokens)
  half = dataclasses.replace(model, compute_dtype="bfloat16")
  rounded, balance = forward(half, params, tokens)
  assert rounded.dtype == balance.dtype == jnp.float32
  error = np.abs(np.asarray(rounded) - np.asarray(exact))
  # A few choices of near-equal experts flip in a mixture; the typical error stays small.
  assert 0 < np.median(error) < 0.03
  if not model.num_experts:
    assert error.max() < 0.15


@BOTH
def test_init_is_a_pure_function_of_the_key(model):
  key = jax.random.key
  one, again, other = (init_params(model, key(seed)) for seed in (3, 3, 4))
  for name in one:
    np.testing.assert_array_equal(one[name], again[name])
    if name.endswith("scale"):
      continue
    assert not np.array_equal(one[name], other[name]), name
    if name.startswith("layers/"):  # layers differ from each other
      layer = np.asarray(one[name])
      assert not np.array_equal(layer[0], layer[1]), name


def test_init_scales():
  params = init_params(DENSE, jax.random.key(0))
  mixture = init_params(MIXTURE, jax.random.key(0))
  params |= {name: each for name, each in mixture.items() if name.startswith("layers/moe/")}
  params["head"] = jax.jit(lambda key: language_model(UNTIED).init(key)["head"])(jax.random.key(0))
  residual = 2 * 5  # branches
  expected = {
    "embedding": 16**-0.5,
    "head": 16**-0.5,
    "layers/attention/query": 16**-0.5,
    "layers/attention/key": 16**-0.5,
    "layers/attention/value": 16**-0.5,
    "layers/attention/output": (4 * 8 * residual) ** -0.5,  # fan-in H * Q
    "layers/mlp/gate": 16**-0.5,
    "layers/mlp/up": 16**-0.5,
    "layers/mlp/down": (24 * residual) ** -0.5,
    "layers/moe/router": 16**-0.5,
    "layers/moe/gate": 16**-0.5,
    "layers/moe/up": 16**-0.5,
    "layers/moe/down": (24 * residual) ** -0.5,
  }
  for name, stddev in expected.items():
    assert abs(np.asarray(params[name]).std() / stddev - 1) < 0.08, name
  assert (params["final_norm/scale"] == 1).all()


@BOTH
def test_shapes_and_axes_describe_the_real_parameters(model):
  params, shapes, axes = (
    fresh(model),
    language_model(model).shapes(),
    language_model(model).logical_axes(),
  )
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
  assert language_model(DENSE).logical_axes() == {
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
  assert language_model(UNTIED).logical_axes()["head"] == ("vocab", "embed")
  mixture = language_model(MIXTURE).logical_axes()
  assert mixture["layers/moe/router"] == ("layers", "embed", None)
  assert mixture["layers/moe/gate"] == ("layers", "experts", "embed", "mlp")
  assert mixture["layers/moe/down"] == ("layers", "experts", "mlp", "embed")


def test_from_params_is_the_module_and_round_trips():
  params, tokens = fresh(MIXTURE), random_tokens(MIXTURE)
  module = transformer.from_params(MIXTURE, params)
  assert isinstance(module, transformer.Transformer)
  actual, expected = nnx.jit(lambda m, t: m(t))(module, tokens), forward(MIXTURE, params, tokens)
  np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(actual[1], expected[1], rtol=1e-5)
  flat = {"/".join(path): v.get_value() for path, v in nnx.to_flat_state(nnx.state(module))}
  assert flat.keys() == params.keys()
  assert all(np.array_equal(flat[name], params[name]) for name in params)


def test_from_params_names_what_is_wrong():
  params = fresh(DENSE)
  with pytest.raises(
    ValueError,
    match=r"layers/mlp/down is \(5, 24, 16\), not known.*layers/moe/down is missing, not \(",
  ):
    transformer.from_params(MIXTURE, params)
  with pytest.raises(
    ValueError, match=r"embedding is \(31, 16\), not \(32, 16\) \(1 in all\)\. Fix"
  ):
    transformer.from_params(DENSE, {**params, "embedding": params["embedding"][:-1]})


def test_the_layout_is_asked_for_every_kind_of_array_with_one_name_per_axis():
  seen = set()
  mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

  def record(axes, shape):
    assert len(shape) == len(axes)
    seen.add(axes)
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

  for model in (DENSE, MIXTURE):

    def apply(p, t, m=model):
      return transformer.from_params(m, p)(t, Execution(layout=record))

    jax.eval_shape(apply, language_model(model).shapes(), random_tokens(model))
  weights = {axes for model in (DENSE, MIXTURE) for axes in used_axes(model)}
  gathered = {tuple(None if axis == "embed" else axis for axis in axes) for axes in weights}
  assert seen - weights - gathered == {
    ("copies", "time"),
    ("copies", "time", "embed"),
    ("batch", "time", None),
    ("batch", "heads", "time", None),
    ("batch", "kv_heads", "time", None),
    ("batch", "time", "mlp"),
    ("batch", "experts", None, None),
    ("batch", "experts", None, "mlp"),
    ("batch", "time", "vocab"),
  }


def used_axes(model: ModelConfig):
  """Of every weight that is multiplied by, without the stack's axis."""
  for axes in language_model(model).logical_axes().values():
    if "norm" not in axes:
      yield tuple(axis for axis in axes if axis != "layers")


def sharded(model: ModelConfig, shape: tuple[int, int, int]):
  """(parameters, tokens, execution) laid out over a mesh of eight devices."""
  mesh, axes, tokens = mesh_of(*shape), language_model(model).logical_axes(), random_tokens(model)
  params = {
    name: jax.device_put(value, layout(mesh, value.shape, axes[name]))
    for name, value in fresh(model).items()
  }
  query = params["layers/attention/query"]
  assert query.addressable_shards[0].data.size * shape[1] * shape[2] == query.size
  rows = layout(mesh, tokens.shape, ("batch", None))
  return params, jax.device_put(tokens, rows), over(mesh)


@pytest.mark.parametrize(
  "model, shape",
  [(DENSE, (1, 2, 4)), (MIXTURE, (2, 2, 2)), (UNTIED, (1, 2, 4))],
  ids=["dense-1x2x4", "mixture-2x2x2", "untied-1x2x4"],
)
def test_sharded_gradients_equal_single_device(model, shape):
  """With four tensor shards the two kv heads stay whole."""
  (value, logits), grads = gradient(model, fresh(model), random_tokens(model))
  (value_s, logits_s), grads_s = gradient(model, *sharded(model, shape))
  np.testing.assert_allclose(value_s, value, rtol=1e-5)
  np.testing.assert_allclose(logits_s, logits, rtol=1e-4, atol=1e-4)
  assert logits_s.addressable_shards[0].data.size * 8 == logits.size  # split indeed
  for name in grads:
    np.testing.assert_allclose(grads_s[name], grads[name], rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
  "model, shape", [(DENSE, (2, 2, 2)), (TIGHT, (1, 4, 2))], ids=["dense-2x2x2", "tight-1x4x2"]
)
def test_sharded_logits_equal_single_device(model, shape):
  logits, balance = forward(model, fresh(model), random_tokens(model))
  logits_s, balance_s = forward(model, *sharded(model, shape))
  np.testing.assert_allclose(logits_s, logits, rtol=1e-4, atol=1e-4)
  np.testing.assert_allclose(balance_s, balance, rtol=1e-5)
  assert logits_s.addressable_shards[0].data.size * 8 == logits.size


def test_init_of_some_leaves_can_be_born_sharded_and_needs_no_mesh():
  assert jax.sharding.get_abstract_mesh().empty
  mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"))
  model, plain = language_model(DENSE), init_params(DENSE, jax.random.key(0))
  # All matrices are drawn in the same way: one of the stack, and one beside it.
  wanted = {
    name: layout(mesh, plain[name].shape, model.logical_axes()[name])
    for name in ("embedding", "layers/attention/key", "final_norm/scale")
  }
  some = jax.jit(lambda key: {n: model.init(key)[n] for n in wanted}, out_shardings=wanted)
  for name, born in some(jax.random.key(0)).items():
    np.testing.assert_allclose(born, plain[name], rtol=1e-6, atol=1e-7, err_msg=name)
