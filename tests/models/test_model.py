"""Any NNX module as a `Model`: flat names, axes from its metadata, parameters alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ddiloco.models import transformer
from ddiloco.models.model import Model, NnxModel
from ddiloco.models.transformer import cross_entropy
from tests.models.small import DENSE


class Tower(nnx.Module):
  """A list of layers, whose paths have numbers in them, and one parameter with named axes."""

  def __init__(self, rngs: nnx.Rngs):
    self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs) for _ in range(11)])
    table = jax.random.normal(rngs(), (5, 3))
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
  module = Tower(nnx.Rngs(jax.random.key(3)))
  np.testing.assert_array_equal(model.module(params)(rows), module(rows))
  np.testing.assert_array_equal(params["layers/10/kernel"], module.layers[10].kernel[...])


def test_axes_are_the_modules_metadata_or_nothing():
  axes = Embedding().logical_axes()
  assert axes["table"] == ("vocab", "embed")
  assert axes["layers/3/kernel"] == (None, None) and axes["layers/3/bias"] == (None,)
  assert list(axes) == list(Embedding().shapes())


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


@pytest.mark.parametrize("layer", [nnx.BatchNorm, nnx.Dropout])
def test_what_is_no_parameter_is_refused(layer):
  arguments = {"rate": 0.5} if layer is nnx.Dropout else {"num_features": 3}
  with pytest.raises(ValueError, match=r"are no nnx.Param: a merged model has parameters alone"):
    NnxModel(lambda rngs: layer(**arguments, rngs=rngs)).shapes()


def test_cross_entropy_by_hand():
  logits = jnp.log(jnp.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]))
  expected = -(np.log(0.25) + np.log(0.8)) / 2
  assert float(cross_entropy(logits, jnp.array([1, 2]))) == pytest.approx(expected, rel=1e-6)
  assert np.isnan(cross_entropy(logits, jnp.array([1, 3])))
