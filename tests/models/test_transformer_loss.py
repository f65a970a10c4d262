"""The loss in chunks of the vocabulary against the loss of whole logits."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

from ddiloco.models.model import PLAIN, Execution
from ddiloco.models.transformer import cross_entropy, cross_entropy_in_chunks, language_model
from tests.models.small import DENSE, MIXTURE, fresh, mesh_of, normal, over, random_tokens

B, T, D, V = 4, 6, 16, 24


def problem():
  targets = np.random.default_rng(3).integers(0, V, (B, T)).astype("i4")
  return normal(0, B, T, D), normal(1, V, D), targets


def whole(x, table, targets):
  return cross_entropy(jnp.einsum("BTD,VD->BTV", x, table), targets)


of_whole = jax.jit(jax.value_and_grad(whole, argnums=(0, 1)))


@functools.partial(jax.jit, static_argnums=3)
def chunked(x, table, targets, execution):
  def loss(x, table):
    return cross_entropy_in_chunks(x, table, targets, execution)

  return jax.value_and_grad(loss, argnums=(0, 1))(x, table)


@pytest.mark.parametrize("chunks", [2, 3, 8, 24])
def test_value_and_gradients_are_those_of_whole_logits(chunks):
  x, table, targets = problem()
  value, gradients = of_whole(x, table, targets)
  found, found_gradients = chunked(x, table, targets, Execution(loss_chunks=chunks))
  np.testing.assert_allclose(found, value, rtol=1e-6)
  for one, other in zip(found_gradients, gradients):
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_large_logits_do_not_overflow():
  x, table, targets = problem()
  value, gradients = chunked(1e3 * x, 1e2 * table, targets, Execution(loss_chunks=8))
  np.testing.assert_allclose(value, of_whole(1e3 * x, 1e2 * table, targets)[0], rtol=1e-5)
  assert all(np.isfinite(g).all() for g in gradients)


@pytest.mark.parametrize("target", [-1, V])
def test_a_target_outside_the_vocabulary_shows(target):
  x, table, targets = problem()
  targets[1, 2] = target
  assert np.isnan(chunked(x, table, targets, Execution(loss_chunks=8))[0])


def test_over_a_mesh_it_is_the_same():
  x, table, targets = problem()
  expected = chunked(x, table, targets, Execution(loss_chunks=8))
  found = chunked(x, table, targets, over(mesh_of(2, 2, 2), loss_chunks=8))
  for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
  "model",
  [DENSE, dataclasses.replace(MIXTURE, tied_embedding=False)],
  ids=["dense", "untied-mixture"],
)
def test_the_models_loss_is_the_same_and_whole_logits_never_exist(model):
  """No array of the forward or the backward pass has B x T x V values or more."""
  model = dataclasses.replace(model, vocab_size=1024)
  params, tokens = fresh(model), random_tokens(model, batch=4, length=33)

  def loss(params, execution):
    return language_model(model).loss(params, tokens, execution)[0]

  step = jax.jit(jax.value_and_grad(loss), static_argnums=1)
  expected, gradients = step(params, PLAIN)
  execution = Execution(loss_chunks=8)
  value, found = step(params, execution)
  np.testing.assert_allclose(value, expected, rtol=1e-5)
  for name, gradient in gradients.items():
    np.testing.assert_allclose(found[name], gradient, rtol=1e-3, atol=1e-6, err_msg=name)
  logits = 4 * 32 * 1024
  assert largest(step.trace(params, PLAIN).jaxpr) >= logits
  assert largest(step.trace(params, execution).jaxpr) < logits


def largest(jaxpr) -> int:
  """Values of the largest array that a program makes, loops and calls included."""
  sizes = [1]
  for equation in jaxpr.eqns:
    sizes += [getattr(out.aval, "size", 1) for out in equation.outvars]
    sizes += [largest(inner) for inner in jax.extend.core.jaxprs_in_params(equation.params)]
  return max(sizes)
