"""Norm, rotary embedding, attention and gated MLP against goldens, properties and plain NumPy."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ddiloco.models import layers
from ddiloco.models.layers import einsum_attention
from ddiloco.models.model import PLAIN
from tests.models.small import DENSE, filled, normal

attention = jax.jit(einsum_attention)
draw = jax.jit(lambda *a: layers.drawn(*a, (None, None))[...], static_argnums=(1, 2))
call = nnx.jit(lambda module, x: module(x))
rope = jax.jit(lambda x, theta: layers.apply_rope(x, *layers.rope_tables(*x.shape[-2:], theta)))


def test_a_large_array_is_drawn_in_parts(monkeypatch):
  monkeypatch.setattr(layers, "MOST_DRAWN", 1000)
  value = np.asarray(draw(jax.random.key(0), (58, 50), 0.5))  # three parts would not be equal
  assert value.shape == (58, 50) and value.std() == pytest.approx(0.5, rel=0.05)
  assert len({*value.ravel().tolist()}) > 2800, "no part is like another"


def test_layers_that_are_drawn_one_by_one_are_those_that_are_drawn_together():
  def together(key):
    unit = jax.random.truncated_normal(key, -2.0, 2.0, (6, 5), jnp.float32)
    return unit * (0.5 / layers._TRUNCATED_STDDEV)

  keys = jax.random.split(jax.random.key(3), 4)
  apart = jax.jit(jax.vmap(lambda key: draw(key, (6, 5), 0.5)))(keys)
  np.testing.assert_array_equal(apart, jax.jit(jax.vmap(together))(keys))


def test_rms_norm_golden():
  norm = layers.RMSNorm(dataclasses.replace(DENSE, model_dim=4))
  norm.epsilon = 0.0
  norm.scale[...] = np.arange(4, dtype=np.float32)
  x = np.float32([[3, 3, -3, 3], [1, 1, 1, 5]])  # rms 3 and sqrt(7)
  expected = [[0, 1, -2, 3], [0, 1 / 7**0.5, 2 / 7**0.5, 15 / 7**0.5]]
  np.testing.assert_allclose(call(norm, x), expected, rtol=1e-6)


def test_rms_norm_epsilon_guards_zeros_and_is_inside_the_root():
  norm = layers.RMSNorm(DENSE)
  norm.epsilon = 3.0
  zeros, ones = np.zeros((2, 16), np.float32), np.ones((2, 16), np.float32)
  np.testing.assert_array_equal(call(norm, zeros), zeros)
  np.testing.assert_allclose(call(norm, ones), ones / 2, rtol=1e-6)


def test_rms_norm_is_computed_in_f32_for_bf16():
  norm = layers.RMSNorm(DENSE)
  x = normal(0, 4, 16).astype(jnp.bfloat16)
  wide, narrow = np.asarray(call(norm, x.astype(np.float32))), call(norm, x)
  assert narrow.dtype == jnp.bfloat16
  np.testing.assert_array_equal(narrow, wide.astype(jnp.bfloat16))


def test_rope_golden():
  """Q = 2, theta irrelevant: position t turns (1, 0) by t radians."""
  turned = rope(np.tile(np.float32([1.0, 0.0]), (1, 1, 3, 1)), 10_000.0)[0, 0]
  np.testing.assert_allclose(turned, [[np.cos(t), np.sin(t)] for t in range(3)], atol=1e-6)


def test_rope_frequencies_golden():
  sin, _ = jax.jit(layers.rope_tables, static_argnums=(0, 1, 2))(2, 4, 100.0)
  np.testing.assert_allclose(sin[1], [np.sin(1.0), np.sin(0.1)], rtol=1e-6)


def test_rope_products_depend_on_distance_only():
  q, k = normal(0, 8), normal(1, 8)

  def everywhere(v):
    return np.asarray(rope(np.tile(v, (1, 1, 40, 1)), 50.0))[0, 0]

  product_TxS = everywhere(q) @ everywhere(k).T
  for distance in (-7, 0, 3, 20):
    diagonal = np.diagonal(product_TxS, distance)
    np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-5)
  assert np.ptp(product_TxS[0]) > 0.1  # it does depend on distance


def test_rope_keeps_lengths():
  x = normal(0, 2, 3, 10, 8)
  turned = rope(x, 1e4)
  np.testing.assert_allclose(np.linalg.norm(turned, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-5)


def test_attention_against_plain_numpy():
  b, h, k, t, d = 2, 4, 2, 5, 3
  query, key, value = normal(0, b, h, t, d), normal(1, b, k, t, d), normal(2, b, k, t, d)
  mixed = np.asarray(attention(query, key, value))
  for i in range(b):
    for head in range(h):
      for position in range(t):
        seen = key[i, head // 2, : position + 1].astype(np.float64)
        score = seen @ query[i, head, position] / np.sqrt(d)
        share = np.exp(score - score.max())
        share /= share.sum()
        expected = share @ value[i, head // 2, : position + 1]
        np.testing.assert_allclose(mixed[i, head, position], expected, rtol=1e-4, atol=1e-5)


def test_grouped_query_attention_equals_repeated_kv_heads():
  query, key, value = normal(0, 2, 6, 7, 4), normal(1, 2, 2, 7, 4), normal(2, 2, 2, 7, 4)
  grouped = attention(query, key, value)
  repeated = attention(query, *(np.repeat(x, 3, axis=1) for x in (key, value)))
  np.testing.assert_allclose(grouped, repeated, rtol=1e-6, atol=1e-6)


def test_attention_scores_do_not_overflow():
  query = np.full((1, 1, 3, 2), 1e4, np.float32)
  mixed = attention(query, query, normal(0, 1, 1, 3, 2))
  assert np.isfinite(mixed).all()


def test_gated_mlp_against_plain_numpy():
  mlp = filled(lambda: layers.GatedMlp(DENSE, nnx.Rngs(3)))
  x = normal(0, 2, 5, DENSE.model_dim)
  gate, up, down = (np.asarray(w[...], np.float64) for w in (mlp.gate, mlp.up, mlp.down))
  wide = np.asarray(x, np.float64)
  hidden = (wide @ gate) / (1 + np.exp(-(wide @ gate))) * (wide @ up)
  found = nnx.jit(lambda mlp, x: mlp(x, PLAIN))(mlp, x)
  np.testing.assert_allclose(found, hidden @ down, rtol=1e-4, atol=1e-5)


def test_keys_are_those_of_nnx():
  ours, theirs = layers.key_stream(jax.random.key(7)), nnx.Rngs(jax.random.key(7))
  for _ in range(3):
    np.testing.assert_array_equal(jax.random.key_data(ours()), jax.random.key_data(theirs()))


@pytest.mark.parametrize("stddev", [0.5, 0.01])
def test_truncated_normal_has_its_stddev_and_bounds(stddev):
  x = np.asarray(draw(jax.random.key(0), (200, 200), stddev))
  assert abs(np.std(x) / stddev - 1) < 0.02
  assert 2.0 * stddev < np.abs(x).max() < 2.3 * stddev
