"""Mixture of experts against a per-token loop, its dense special case and loss goldens."""

from __future__ import annotations

import dataclasses

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import strategies as st

from ddiloco.models import layers
from ddiloco.models.model import PLAIN
from tests.models.small import DENSE, MIXTURE, filled, normal

WIDE = dataclasses.replace(MIXTURE, capacity_factor=2.0)  # E / k: nothing can be dropped
TIGHT = dataclasses.replace(MIXTURE, capacity_factor=0.6)


def hidden_state(batch: int, length: int) -> np.ndarray:
  return normal(0, batch, length, MIXTURE.model_dim)


def build(model) -> layers.MixtureOfExperts:
  return filled(lambda: layers.MixtureOfExperts(model, nnx.Rngs(0)))


@nnx.jit
def run(module: nnx.Module, x: jax.Array):
  return module(x, PLAIN)


balance_loss = jax.jit(layers.load_balance_loss)


def per_token_loop(mixture: layers.MixtureOfExperts, x: np.ndarray) -> tuple[np.ndarray, int]:
  """(expected output, choices dropped): f64 NumPy, one token at a time, slots in token order."""
  model = mixture.model
  router, gate, up, down = (
    np.asarray(w[...], np.float64) for w in (mixture.router, mixture.gate, mixture.up, mixture.down)
  )
  capacity = layers.slots_per_expert(model, x.shape[1])
  out, dropped = np.zeros(x.shape), 0
  for b, sequence in enumerate(x.astype(np.float64)):
    used = [0] * model.num_experts
    for t, token in enumerate(sequence):
      share = np.exp(token @ router)
      best = np.argsort(-share, kind="stable")[: model.experts_per_token]
      for e in best:
        used[e] += 1
        if used[e] > capacity:
          dropped += 1
          continue
        a = token @ gate[e]
        y = (a / (1 + np.exp(-a)) * (token @ up[e])) @ down[e]
        out[b, t] += share[e] / share[best].sum() * y
  return out, dropped


@pytest.mark.parametrize("model, drops", [(WIDE, False), (TIGHT, True)], ids=["wide", "tight"])
def test_equals_a_loop_over_tokens(model, drops):
  mixture, x = build(model), hidden_state(3, 17)
  expected, dropped = per_token_loop(mixture, x)
  assert (dropped > 0) == drops
  actual, _ = run(mixture, x)
  np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_one_expert_is_the_dense_mlp():
  model = dataclasses.replace(DENSE, num_experts=1, experts_per_token=1, capacity_factor=1.0)
  mixture, dense = build(model), filled(lambda: layers.GatedMlp(DENSE, nnx.Rngs(1)), seed=1)
  for name in ("gate", "up", "down"):
    getattr(mixture, name)[...] = getattr(dense, name)[...][None]
  x = hidden_state(2, 9)
  actual, balance = run(mixture, x)
  np.testing.assert_allclose(actual, run(dense, x), rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(balance, 1.0, rtol=1e-6)


def dense_over_all_experts(model, weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
  """Every expert on every token, weighted by its gate: plain autodiff can be trusted here."""
  probability = jax.nn.softmax(x @ weights["router"], axis=-1)
  gate, expert = layers.route(probability, model.experts_per_token)
  share = jnp.sum(jax.nn.one_hot(expert, model.num_experts) * gate[..., None], axis=2)
  a = jnp.einsum("BTD,EDF->BTEF", x, weights["gate"])
  hidden = jax.nn.silu(a) * jnp.einsum("BTD,EDF->BTEF", x, weights["up"])
  return jnp.einsum("BTEF,EFD,BTE->BTD", hidden, weights["down"], share)


def test_gradients_equal_those_of_the_dense_form():
  mixture, x = build(WIDE), hidden_state(2, 11)
  graph, state = nnx.split(mixture)
  weights = {n: getattr(mixture, n)[...] for n in ("router", "gate", "up", "down")}

  def ours(weights, x):
    for name, value in weights.items():
      state[name] = state[name].replace(value)
    return jnp.sum(jnp.sin(nnx.merge(graph, state)(x, PLAIN)[0]))

  def theirs(weights, x):
    return jnp.sum(jnp.sin(dense_over_all_experts(WIDE, weights, x)))

  actual, expected = (jax.jit(jax.grad(f, argnums=(0, 1)))(weights, x) for f in (ours, theirs))
  for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
    assert np.abs(e).max() > 1e-3
    np.testing.assert_allclose(a, e, rtol=1e-3, atol=1e-5)


assign = jax.jit(layers.assign_slots, static_argnums=(1, 2))


@hypothesis.settings(max_examples=40, derandomize=True)
@hypothesis.given(
  st.lists(st.integers(0, 2), min_size=24, max_size=24), st.sampled_from([1, 3, 12])
)
def test_slots_and_choices_are_inverse(experts, capacity):
  num_experts, n = 3, 12
  expert = np.array(experts, np.int32).reshape(2, n)
  slot, choice = map(np.asarray, assign(expert, num_experts, capacity))
  m = num_experts * capacity
  for b in range(2):
    kept = [i for i in range(n) if slot[b, i] < m]
    assert kept
    assert all(int(choice[b, slot[b, i]]) == i for i in kept)
    assert all(int(slot[b, i]) // capacity == int(expert[b, i]) for i in kept)
    assert sum(int(c) < n for c in choice[b]) == len(kept)
    for e in range(num_experts):  # the first ones are served
      own = [i for i in range(n) if int(expert[b, i]) == e]
      assert [i for i in own if i in kept] == own[:capacity]


def test_move_rows_gradient_is_that_of_a_gather():
  x = hidden_state(2, 3)
  source = np.int32([[5, 0, 6, 3], [1, 6, 2, 4]])  # of 3 * 2 copies; 6 is out of range
  target = np.int32([[1, 4, 4, 3, 4, 0], [4, 0, 2, 4, 3, 4]])

  def moved(x):
    return layers.move_rows(2, x, source, target)

  def plain(x):
    padded = jnp.concatenate([x, jnp.zeros_like(x[:, :1])], axis=1)
    return jnp.take_along_axis(padded, (source // 2)[..., None], axis=1)

  def with_gradient(move):
    return jax.jit(lambda x: (move(x), jax.grad(lambda x: jnp.sum(jnp.sin(move(x))))(x)))(x)

  (ours, our_gradient), (theirs, their_gradient) = with_gradient(moved), with_gradient(plain)
  np.testing.assert_array_equal(ours, theirs)
  np.testing.assert_allclose(our_gradient, their_gradient, rtol=1e-6)


def test_slots_per_expert_golden():
  def slots(factor, length):
    return layers.slots_per_expert(dataclasses.replace(MIXTURE, capacity_factor=factor), length)

  assert slots(1.0, 100) == 50  # k/E = 1/2
  assert slots(1.25, 100) == 63
  assert slots(8.0, 100) == 100  # a token chooses an expert once


def test_route_picks_the_largest_and_renormalises():
  gate, expert = jax.jit(layers.route, static_argnums=1)(np.float32([[[0.1, 0.5, 0.1, 0.3]]]), 2)
  np.testing.assert_array_equal(expert, [[[1, 3]]])
  np.testing.assert_allclose(gate, [[[0.625, 0.375]]], rtol=1e-6)


def test_load_balance_golden():
  uniform = np.full((1, 4, 4), 0.25, np.float32)
  in_turn = np.arange(4).reshape(1, 4, 1)
  np.testing.assert_allclose(balance_loss(uniform, in_turn), 1.0)
  pairs = np.array([[[0, 1], [2, 3], [0, 1], [2, 3]]])
  np.testing.assert_allclose(balance_loss(uniform, pairs), 1.0)
  collapsed = np.tile(np.float32([0, 1, 0, 0]), (2, 3, 1))
  np.testing.assert_allclose(balance_loss(collapsed, np.ones((2, 3, 1), int)), 4.0)
  # Fractions (3/4, 1/4), mean probabilities (0.7, 0.3): 2 * (0.525 + 0.075).
  probability = np.float32([[[0.9, 0.1], [0.8, 0.2]], [[0.7, 0.3], [0.4, 0.6]]])
  expert = np.array([[[0], [0]], [[0], [1]]])
  np.testing.assert_allclose(balance_loss(probability, expert), 1.2, rtol=1e-6)


def test_descending_the_load_balance_loss_spreads_the_tokens():
  scores = normal(0, 1, 64, 4) + np.float32([3, 0, 0, 0])

  def balance(bias_E):
    probability = jax.nn.softmax(scores + bias_E[None, None], axis=-1)
    return layers.load_balance_loss(probability, layers.route(probability, 1)[1])

  bias, losses = np.zeros(4, np.float32), []
  value_and_slope = jax.jit(jax.value_and_grad(balance))
  for _ in range(60):
    loss, slope = value_and_slope(bias)
    bias = bias - 0.5 * np.asarray(slope)
    losses.append(float(loss))
  assert losses[0] > 2.0 and losses[-1] < 1.2
