"""The one loss: next-token cross-entropy in nats, plus the router's load-balance term."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from ddiloco.config import ModelConfig
from ddiloco.models import transformer

Constrain = Callable[[jax.Array, tuple[str | None, ...]], jax.Array]


def cross_entropy(logits_BxTxV: jax.Array, targets_BxT: jax.Array) -> jax.Array:
  """Mean over all positions of -log softmax(logits)[target], in nats, computed in f32."""
  logits_BxTxV = logits_BxTxV.astype(jnp.float32)
  log_norm_BxT = jax.nn.logsumexp(logits_BxTxV, axis=-1)
  # A target outside the vocabulary must show up as NaN, not as some other token's loss.
  chosen_BxTx1 = jnp.take_along_axis(logits_BxTxV, targets_BxT[..., None], axis=-1, mode="fill")
  return jnp.mean(log_norm_BxT - chosen_BxTx1[..., 0])


def next_token_loss(
  model: ModelConfig,
  params: Mapping[str, jax.Array],
  tokens_BxT1: jax.Array,
  constrain: Constrain | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """What a learner minimises on windows of T + 1 tokens (inputs [:, :-1], targets [:, 1:]).

  Returns:
    total = cross entropy + model.load_balance_weight * load-balance loss, and
    {"loss": cross entropy in nats per token, "load_balance": the auxiliary loss, unweighted}.
    The load-balance loss looks at this learner's own batch only (Decoupled DiLoCo, MoE).
  """
  logits_BxTxV, load_balance = transformer.apply(
    model, params, tokens_BxT1[:, :-1], constrain=constrain
  )
  loss = cross_entropy(logits_BxTxV, tokens_BxT1[:, 1:])
  total = loss + model.load_balance_weight * load_balance
  return total, {"loss": loss, "load_balance": load_balance}
