"""In bf16 the sums and choices that rounding would spoil are still made in f32."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ddiloco.models import layers
from ddiloco.models.model import PLAIN, Execution
from ddiloco.models.transformer import cross_entropy_in_chunks, embed
from tests.models.small import MIXTURE, filled

BF16 = jnp.bfloat16


def test_gradients_of_a_frequent_token_add_up_exactly():
  tokens = np.zeros((1, 1001), np.int32)

  def total(table_VxD):
    return jnp.sum(embed(table_VxD, tokens, "bfloat16"), dtype=jnp.float32)

  gradient = jax.jit(jax.grad(total))(np.ones((3, 16), np.float32))
  np.testing.assert_array_equal(gradient, [[2 * 1001] * 16, [0] * 16, [0] * 16])  # 2 = D^(1/4)


def test_gradients_of_the_loss_s_chunks_add_up_exactly():
  """Two large ones cancel: in bf16 nothing of the small ones would be left."""
  table = np.float32([[1024], [1], [-1024], [1]])

  def loss(x):
    return cross_entropy_in_chunks(x, table, np.int32([[3]]), Execution(loss_chunks=4))

  # All four are equally probable: the mean of the table less the target's row.
  assert np.asarray(jax.jit(jax.grad(loss))(np.zeros((1, 1, 1), BF16))) == 0.5 - 1.0


def test_a_token_goes_to_the_better_expert_however_close_the_other_one_is():
  model = dataclasses.replace(MIXTURE, num_experts=2, experts_per_token=1, capacity_factor=2.0)
  mixture = filled(lambda: layers.MixtureOfExperts(model, nnx.Rngs(0)))
  mixture.router[...] = np.float32([[1.0, 1.001], *15 * [[0, 0]]])
  mixture.down[...][0] = 0.0  # of the first expert nothing comes
  run = nnx.jit(lambda mixture, x: mixture(x, PLAIN)[0])
  mixed = np.asarray(run(mixture, np.ones((1, 3, 16), BF16)))
  assert mixed.dtype == BF16 and (mixed != 0).all()


def test_attention_tells_scores_apart_that_bf16_does_not():
  queries = np.array(2 * [[16.0, 1.0, 0.0, 0.0]], BF16)
  keys = np.array([[32.0, 0.0, 0.0, 0.0], [32.0, 1.0, 0.0, 0.0]], BF16)
  values = np.array([[0.0] * 4, [1.0] * 4], BF16)
  arrays = (array[None, None] for array in (queries, keys, values))
  mixed = np.asarray(jax.jit(layers.einsum_attention)(*arrays))[0, 0]
  assert mixed.dtype == BF16  # scores of 256 and 256.5
  share = 1 / (1 + np.exp(-0.5))
  np.testing.assert_allclose(mixed.astype(np.float32), [[0.0] * 4, [share] * 4], atol=2e-3)
