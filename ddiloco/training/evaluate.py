"""Held-out loss of parameters, wherever they came from: the syncer, an island or a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ddiloco.config import ModelConfig
from ddiloco.models import transformer
from ddiloco.training.data import check_token_ids
from ddiloco.training.loss import cross_entropy


class Evaluator:
  """Mean cross-entropy over fixed batches [B, T + 1] of one shape, on one device.

  Computes in f32 whatever the islands train in, so that losses of all islands compare. Compiled
  once, at the first call.

  Raises:
    ValueError: no batches, or batches of different shapes.
    DataError: a held-out token is not in the model's vocabulary.
  """

  def __init__(self, model: ModelConfig, heldout_batches: Sequence[np.ndarray], device: jax.Device):
    shapes = {np.shape(batch) for batch in heldout_batches}
    if len(shapes) != 1:
      raise ValueError(
        f"heldout_batches have shapes {sorted(shapes)}: there must be at least one batch and all"
        " must have the same shape. Fix: use data.heldout_batches()."
      )
    tokens_NxBxT1 = np.stack(heldout_batches).astype(np.int32)
    check_token_ids(tokens_NxBxT1, model.vocab_size, "the held-out split")
    self._device = device
    self._tokens_NxBxT1 = jax.device_put(tokens_NxBxT1, device)
    model = dataclasses.replace(model, compute_dtype="float32")

    def mean_loss(params: Mapping[str, jax.Array], tokens_NxBxT1: jax.Array) -> jax.Array:
      def batch_loss(tokens_BxT1: jax.Array) -> jax.Array:
        logits_BxTxV, _ = transformer.apply(model, params, tokens_BxT1[:, :-1])
        return cross_entropy(logits_BxTxV, tokens_BxT1[:, 1:])

      return jnp.mean(jax.lax.map(batch_loss, tokens_NxBxT1))

    self._mean_loss = jax.jit(mean_loss)

  @property
  def num_tokens(self) -> int:
    """Tokens predicted in one evaluation."""
    batches, size, width = self._tokens_NxBxT1.shape
    return batches * size * (width - 1)

  def loss(self, params: Mapping[str, np.ndarray | jax.Array]) -> float:
    """Nats per token of `params` (flat dict; host arrays, or on any devices and sharding).

    Waits for the result without holding the GIL, so a learner in another thread goes on.
    """
    placed = {
      name: jax.device_put(value, self._device).astype(jnp.float32)
      for name, value in params.items()
    }
    return float(self._mean_loss(placed, self._tokens_NxBxT1))
