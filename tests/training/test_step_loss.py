"""The loss against values worked out by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ddiloco.config import ModelConfig
from ddiloco.models.transformer import cross_entropy, from_params, language_model


def test_cross_entropy_is_stable_and_f32():
  logits = jnp.array([[[1e4, 0.0]]], jnp.bfloat16)
  loss = cross_entropy(logits, jnp.array([[1]]))
  assert loss.dtype == jnp.float32 and 9_900 < float(loss) < 10_100


@pytest.mark.parametrize("num_experts", [0, 4])
def test_next_token_loss_shifts_by_one_and_adds_the_balance_term(num_experts):
  model = ModelConfig(
    vocab_size=16,
    num_layers=2,
    model_dim=16,
    mlp_dim=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    num_experts=num_experts,
    load_balance_weight=0.5,
  )
  rng = np.random.default_rng(0)
  shapes = language_model(model).shapes()
  params = {n: rng.normal(0, 0.3, s.shape).astype(np.float32) for n, s in shapes.items()}
  tokens = rng.integers(0, 16, (2, 9), np.int32)
  total, metrics = jax.jit(language_model(model).loss)(params, tokens)
  logits, balance = jax.jit(lambda p, t: from_params(model, p)(t))(params, tokens[:, :8])
  log_p = np.asarray(jax.nn.log_softmax(logits))
  by_hand = -np.mean([log_p[b, t, tokens[b, t + 1]] for b in range(2) for t in range(8)])
  assert float(metrics["loss"]) == pytest.approx(float(by_hand), rel=1e-5)
  assert float(metrics["load_balance"]) == pytest.approx(float(balance))
  assert (float(balance) > 0.5) == bool(num_experts)
  assert float(total) == pytest.approx(float(by_hand) + 0.5 * float(balance), rel=1e-5)
