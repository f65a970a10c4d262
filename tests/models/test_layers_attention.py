"""Every path of attention against the reference, forward and gradient; kernels are interpreted."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddiloco.models import layers
from ddiloco.models.model import PLAIN, REMAT, Execution
from ddiloco.training.devices import param_sharding
from tests.models.small import mesh_of, normal

KERNELS = pytest.mark.parametrize("path", ["splash", "cudnn"])


@pytest.fixture(autouse=True)
def kernels_without_a_chip(interpreted_kernels):
  """On a platform that cannot run them."""


def inputs(b=2, h=4, k=2, t=128, q=16):
  return normal(0, b, h, t, q), normal(1, b, k, t, q), normal(2, b, k, t, q)


@functools.partial(jax.jit, static_argnums=3)
def outcome(query, key, value, execution):
  """(Output, the gradients of a function in which every element counts differently)."""

  def total(*arrays):
    mixed = layers.attend(*arrays, execution)
    return jnp.sum(jnp.sin(mixed)), mixed

  gradients, mixed = jax.grad(total, argnums=(0, 1, 2), has_aux=True)(query, key, value)
  return mixed, *gradients


@KERNELS
@pytest.mark.parametrize(
  "shape",
  [
    {},  # grouped, and just a block
    {"k": 4, "t": 100, "q": 64},  # as many kv heads as query heads, and less than a block
    {"b": 1, "h": 2, "k": 1, "t": 640},  # all share one; blocks of 384: two, and filled up
  ],
  ids=str,
)
def test_kernels_are_the_reference(path, shape):
  arrays = inputs(**shape)
  expected = outcome(*arrays, PLAIN)
  found = outcome(*arrays, Execution(attention=path))
  for name, one, other in zip(("output", "query", "key", "value"), found, expected):
    np.testing.assert_allclose(one, other, rtol=1e-3, atol=2e-4, err_msg=name)


@pytest.mark.parametrize(
  ("positions", "filled", "block"),
  [(1, 128, 128), (128, 128, 128), (129, 256, 256), (512, 512, 512), (640, 768, 384)]
  + [(2048, 2048, 512), (2100, 2560, 512)],
)
def test_blocks_are_equal_and_as_few_as_there_must_be(positions, filled, block):
  assert layers._blocks(positions) == (filled, block)


@KERNELS
@pytest.mark.parametrize("mesh_shape", [(2, 2, 2), (1, 2, 4), (1, 1, 2)])
def test_kernels_see_their_own_rows_and_heads(path, mesh_shape):
  """Also where the mesh cuts the query heads into more parts than there are kv heads."""
  mesh = mesh_of(*mesh_shape)
  arrays = inputs(b=4, q=8)
  expected = outcome(*arrays, PLAIN)
  execution = Execution(layout=functools.partial(param_sharding, mesh=mesh), attention=path)
  found = outcome(*arrays, execution)
  for one, other in zip(found, expected):
    np.testing.assert_allclose(one, other, rtol=1e-3, atol=2e-4)
  whole = found[0].size
  assert found[0].addressable_shards[0].data.size * mesh.size == whole
  program = str(outcome.trace(*arrays, execution).jaxpr)
  assert "shard_map" in program  # which the compiler does not cut by itself


@pytest.mark.parametrize("path", ["einsum", "splash", "cudnn"])
def test_the_output_is_what_remat_keeps_by_name(path):
  """With it the kernel does not run again in the backward pass."""
  arrays = inputs(b=1, h=2, k=1, t=128, q=8)
  kept = {}
  for remat in ("full", "attention"):
    execution = Execution(attention=path, remat=remat)

    def total(*arrays, execution=execution, remat=remat):
      mixed = jax.checkpoint(lambda *a: jnp.sin(layers.attend(*a, execution)), policy=REMAT[remat])(
        *arrays
      )
      return jnp.sum(mixed)

    residuals = jax.eval_shape(lambda *a, total=total: jax.vjp(total, *a)[1], *arrays)
    kept[remat] = sum(leaf.size for leaf in jax.tree.leaves(residuals))
  assert kept["attention"] >= kept["full"] + arrays[0].size
