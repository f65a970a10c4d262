"""Any NNX module as a `Model`: flat names, axes from its metadata, parameters alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ddiloco.models import transformer
from ddiloco.models.model import Model, NnxModel, batch_key
from ddiloco.models.transformer import cross_entropy
from tests.models.small import DENSE, normal

call = nnx.jit(lambda module, x: module(x))


class Tower(nnx.Module):
  """A list of layers, whose paths have numbers in them, and one parameter with named axes."""

  def __init__(self, rngs: nnx.Rngs):
    inits = map(nnx.initializers.constant, range(1, 12))  # what is drawn takes long to compile
    self.layers = nnx.List(
      [nnx.Linear(3, 3, rngs=rngs, kernel_init=each, bias_init=each) for each in inits]
    )
    table = jax.random.uniform(rngs(), (5, 3))
    self.table = nnx.Param(table, out_sharding=("vocab", "embed"), eager_sharding=False)

  def __call__(self, rows_B: jax.Array) -> jax.Array:
    x = self.table[...][rows_B]
    for layer in self.layers:
      x = layer(x)
    return x


class Embedding(NnxModel):
  """A model in the sense of the protocol."""

  def __init__(self):
    super().__init__(Tower)

  def inputs(self, batch_size, sequence_length):
    return jax.ShapeDtypeStruct((batch_size,), jnp.int32)

  def loss(self, params, batch, execution=None):
    loss = jnp.mean(self.module(params)(batch) ** 2)
    return loss, {"loss": loss}

  def evaluate(self, params, batch):
    return self.loss(params, batch)[1]


def test_a_module_and_its_params_are_the_same_function():
  model, rows = Embedding(), np.array([0, 4, 2])
  params = model.init(jax.random.key(3))
  assert {n: (v.shape, v.dtype) for n, v in params.items()} == {
    n: (v.shape, v.dtype) for n, v in model.shapes().items()
  }
  module = nnx.jit(lambda key: Tower(nnx.Rngs(key)))(jax.random.key(3))
  np.testing.assert_array_equal(call(model.module(params), rows), call(module, rows))
  np.testing.assert_array_equal(params["layers/10/kernel"], module.layers[10].kernel[...])


def test_axes_are_the_modules_metadata_or_nothing():
  axes = Embedding().logical_axes()
  assert axes["table"] == ("vocab", "embed")
  assert axes["layers/3/kernel"] == (None, None) and axes["layers/3/bias"] == (None,)
  assert list(axes) == list(Embedding().shapes())


def test_axes_that_a_layers_init_is_given_need_no_mesh():
  """Flax asked for a mesh, which the model does not know, unless eager sharding was off."""
  init = nnx.with_partitioning(nnx.initializers.ones, ("embed", "mlp"))
  model = NnxModel(lambda rngs: nnx.Linear(2, 3, kernel_init=init, rngs=rngs))
  assert model.logical_axes() == {"bias": (None,), "kernel": ("embed", "mlp")}
  found = call(model.module(model.init(jax.random.key(0))), np.ones((1, 2), np.float32))
  np.testing.assert_array_equal(found, np.full((1, 3), 2))


def test_the_transformer_and_an_own_model_fit_the_protocol():
  assert isinstance(transformer.language_model(DENSE), Model)
  assert isinstance(Embedding(), Model) and not isinstance(NnxModel(Tower), Model)


def test_wrong_params_are_named():
  model = Embedding()
  params = model.init(jax.random.key(0))
  with pytest.raises(ValueError, match=r"table is missing.*tables is \(5, 3\), not known"):
    model.module({("tables" if n == "table" else n): v for n, v in params.items()})
  with pytest.raises(ValueError, match=r"table is \(4, 3\), not \(5, 3\)"):
    model.module({**params, "table": params["table"][:4]})


class Noisy(nnx.Module):
  """Dropout, statistics, and a recurrent layer, which has a key of random numbers too."""

  def __init__(self, rngs: nnx.Rngs):
    ones = nnx.initializers.ones  # an orthogonal matrix takes long to compile
    self.cell = nnx.RNN(nnx.LSTMCell(3, 4, rngs=rngs, recurrent_kernel_init=ones))
    self.norm = nnx.BatchNorm(4, momentum=0.5, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)

  def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
    return self.dropout(self.norm(self.cell(x_BxTxD)))


def test_what_a_step_would_change_beside_parameters_is_refused_until_it_is_said_to_stay():
  with pytest.raises(
    ValueError, match=r"\['norm/mean', 'norm/var'\].*are no nnx.Param.*Fix: .*trained"
  ):
    NnxModel(Noisy).shapes()
  model = NnxModel(Noisy, trained=nnx.Param)
  assert model.shapes().keys() == model.init(jax.random.key(0)).keys()
  assert model.frozen().keys() == {"norm/mean", "norm/var"}
  assert model.logical_axes().keys() == model.shapes().keys() | model.frozen().keys()


def test_dropout_draws_from_the_key_alone_and_without_a_key_not_at_all():
  model = NnxModel(Noisy, trained=nnx.Param)
  params, x = model.init(jax.random.key(0)), normal(1, 8, 5, 3)
  run = jax.jit(lambda key: model.module(params, key)(x))
  one, again, other = (np.asarray(run(jax.random.key(n))) for n in (1, 1, 2))
  np.testing.assert_array_equal(one, again)
  assert np.mean(one == 0) == pytest.approx(0.5, abs=0.15) and np.any((one == 0) != (other == 0))
  still = np.asarray(run(None))
  assert not np.any(still == 0)
  np.testing.assert_allclose(one[one != 0], 2 * still[one != 0], rtol=1e-6)


def test_a_layer_that_must_be_told_whether_it_drops_out_is_told():
  """With a key `nnx.MultiHeadAttention` asked for `deterministic`; without one it was given."""
  layer = lambda rngs: nnx.MultiHeadAttention(2, 4, dropout_rate=0.5, rngs=rngs)
  model, x = NnxModel(layer), normal(1, 1, 6, 4)
  params = model.init(jax.random.key(0))
  run = jax.jit(lambda key: model.module(params, key)(x, decode=False))
  still, one, other = (np.asarray(run(key)) for key in (None, jax.random.key(1), jax.random.key(2)))
  assert np.any(one != other) and np.any(one != still)


def test_streams_of_one_module_draw_different_numbers():
  twice = NnxModel(lambda rngs: nnx.List([nnx.Dropout(0.5, rngs=rngs) for _ in range(2)]))
  draw = jax.jit(lambda key: [layer(np.ones(64)) for layer in twice.module({}, key)])
  first, second = map(np.asarray, draw(jax.random.key(1)))
  assert np.any(first != second)


def test_statistics_stay_until_data_pass_through_the_result():
  model = NnxModel(Noisy, trained=nnx.Param)
  params, x = model.init(jax.random.key(0)), normal(1, 64, 5, 3)
  module = model.module(params)
  by_batch = call(module, x)
  for _ in range(30):
    call(module, x)
  module.eval()
  np.testing.assert_allclose(call(module, x), by_batch, atol=1e-4)
  assert not np.any(model.frozen()["norm/mean"]), "the model has none of it"


def test_frozen_values_may_be_given_or_missing():
  model = NnxModel(Noisy, trained=nnx.Param)
  params = model.init(jax.random.key(0))
  mean = np.arange(4, dtype=np.float32)
  module = model.module({**params, "norm/mean": mean, "norm/var": mean})
  np.testing.assert_array_equal(module.norm.mean[...], mean)
  np.testing.assert_array_equal(model.module(params).norm.mean[...], 0)
  with pytest.raises(ValueError, match=r"norm/means is .*, not known"):
    model.module({**params, "norm/means": mean})


class Buffered(nnx.Module):
  """With an array that is no variable, such as a table of angles."""

  def __init__(self, rngs: nnx.Rngs):
    self.linear = nnx.Linear(3, 3, rngs=rngs)
    self.angles = jnp.arange(3.0)[None]

  def __call__(self, x_BxD: jax.Array) -> jax.Array:
    return self.linear(x_BxD + self.angles)


def test_an_array_that_is_no_variable_is_frozen():
  """It was refused, and what the error proposed ended in an AttributeError."""
  with pytest.raises(ValueError, match=r"\['angles'\].*Fix: .*trained=nnx.Param"):
    NnxModel(Buffered).shapes()
  model = NnxModel(Buffered, trained=nnx.Param)
  assert model.logical_axes()["angles"] == (None, None) and list(model.frozen()) == ["angles"]
  params, x = model.init(jax.random.key(0)), np.ones((1, 3), np.float32)
  for given, angles in ({}, np.arange(3)), ({"angles": 0 * x}, 0):
    found = call(model.module({**params, **given}), x)
    np.testing.assert_allclose(found, (x + angles) @ np.asarray(params["linear/kernel"]), rtol=1e-6)


def test_a_batch_has_one_key_and_another_batch_another():
  def key(batch, made=batch_key):
    return tuple(np.asarray(jax.random.key_data(made(batch))))

  tokens, image = np.arange(12, dtype=np.int32).reshape(3, 4), np.ones((2, 2), np.float32)
  first = {"x": tokens, "y": image}
  others = [
    {"x": tokens[::-1], "y": image},
    {"x": tokens, "y": -image},
    {"x": tokens, "y": image == 1},
    {"x": tokens},
  ]
  assert key(first) == key({"x": tokens.copy(), "y": image.copy()})
  assert len({key(batch) for batch in [first, *others]}) == 5
  assert key(tokens) == key(tokens.astype(np.uint16)), "integers count by their values"
  assert key(first) == key(first, jax.jit(batch_key))


def test_cross_entropy_by_hand():
  logits, loss = np.log(np.float32([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]])), jax.jit(cross_entropy)
  expected = -(np.log(0.25) + np.log(0.8)) / 2
  assert float(loss(logits, np.array([1, 2]))) == pytest.approx(expected, rel=1e-6)
  for wrong in (3, -1, -100):  # Hugging Face's -100 for "not counted" too
    assert np.isnan(loss(logits, np.array([1, wrong])))
