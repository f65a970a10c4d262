"""Mixture of experts: a top-k router, every expert a gated MLP, balance kept inside one learner.

Axes in names: B batch (sequences), T positions, D model dim, E experts, k choices of each token,
N = T * k choices of a sequence in token order, C slots of an expert, M = E * C slots, F mlp width.

Why slots. The obvious dropless way, `jax.lax.ragged_dot` over tokens sorted by expert, is cheap
only where XLA has a kernel for it: without one jax 0.10 makes it a masked dense product that pays
for all E experts, and sorting a whole batch moves tokens across the data axis of the mesh. A
one-hot dispatch einsum (GShard) partitions well, but costs about T/F of the experts' own FLOPs.
So each expert gets C slots *per sequence*: choices take slots in token order and are moved by plain
gathers, the experts are one batched matmul over (B, E, C). Shapes are static, the batch axis is
never mixed, FLOPs are capacity_factor * k experts a token whatever E is, and since earlier tokens
come first, no token is ever displaced by a later one: the model stays causal. Choices beyond C are
dropped (their share of the layer is zero, the residual carries the token on); with
capacity_factor >= E / k there are as many slots as tokens and nothing can be dropped.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx

from ddiloco.config import ModelConfig
from ddiloco.models.execution import Execution
from ddiloco.models.layers import KeyStream, parameter, residual_stddev, truncated_normal, used


def slots_per_expert(model: ModelConfig, sequence_length: int) -> int:
  """C: slots of one expert for one sequence; at most T, as a token chooses an expert only once."""
  even_share = model.experts_per_token * sequence_length / model.num_experts
  return min(sequence_length, math.ceil(model.capacity_factor * even_share))


def route(probability_BxTxE: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
  """The k most probable experts of each token: (gates summing to 1, expert ids), both (B, T, k)."""
  gate_BxTxk, expert_BxTxk = jax.lax.top_k(probability_BxTxE, k)
  return gate_BxTxk / jnp.sum(gate_BxTxk, axis=-1, keepdims=True), expert_BxTxk


def load_balance_loss(probability_BxTxE: jax.Array, expert_BxTxk: jax.Array) -> jax.Array:
  """E * sum_e fraction_e * mean_probability_e, over this learner's batch alone (arXiv 2101.03961).

  fraction_e is the share of all B*T*k choices that went to expert e (dropped ones count). Uniform
  routing gives 1; everything on one expert (k = 1) gives E. Only the probabilities have gradients.
  """
  num_experts = probability_BxTxE.shape[-1]
  chosen = jax.nn.one_hot(expert_BxTxk, num_experts, dtype=jnp.float32)
  fraction_E = jnp.mean(chosen, axis=(0, 1, 2))
  mean_probability_E = jnp.mean(probability_BxTxE, axis=(0, 1))
  return num_experts * jnp.sum(fraction_E * mean_probability_E)


def assign_slots(
  expert_BxN: jax.Array, num_experts: int, capacity: int
) -> tuple[jax.Array, jax.Array]:
  """First come, first served: (slot_BxN of every choice, choice_BxM of every slot).

  Slot e * C + i is the i-th of expert e. A dropped choice has slot M, an empty slot has choice N:
  both are out of range and read as zeros.
  """
  b, n = expert_BxN.shape
  m = num_experts * capacity
  chosen_BxNxE = jax.nn.one_hot(expert_BxN, num_experts, dtype=jnp.int32)
  rank_BxN = jnp.sum(jnp.cumsum(chosen_BxNxE, axis=1) * chosen_BxNxE, axis=-1) - 1
  slot_BxN = jnp.where(rank_BxN < capacity, expert_BxN * capacity + rank_BxN, m)
  empty_BxM = jnp.full((b, m), n, jnp.int32)
  choice_N = jnp.arange(n, dtype=jnp.int32)
  fill = jax.vmap(lambda empty, slot: empty.at[slot].set(choice_N, mode="drop"))
  return slot_BxN, fill(empty_BxM, slot_BxN)


def _take_rows(x_BxNxD: jax.Array, row_BxM: jax.Array) -> jax.Array:
  return jax.vmap(lambda x, row: x.at[row].get(mode="fill", fill_value=0))(x_BxNxD, row_BxM)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def move_rows(
  copies: int, x_BxRxD: jax.Array, source_BxM: jax.Array, target_BxN: jax.Array
) -> jax.Array:
  """out[:, m] = x[:, source[:, m] // copies], zeros where source is out of range (N = R * copies).

  `target` is the inverse of `source`: where each of the N copies went. Knowing it, the gradient is
  a gather too; without it autodiff would scatter-add rows, which is slow on every backend.
  """
  del target_BxN
  return _take_rows(x_BxRxD, source_BxM // copies)


def _move_rows_forward(copies, x_BxRxD, source_BxM, target_BxN):
  return move_rows(copies, x_BxRxD, source_BxM, target_BxN), target_BxN


def _move_rows_backward(copies, target_BxN, grad_BxMxD):
  grad_BxNxD = _take_rows(grad_BxMxD, target_BxN)
  b, n, d = grad_BxNxD.shape
  return jnp.sum(grad_BxNxD.reshape(b, n // copies, copies, d), axis=2), None, None


move_rows.defvjp(_move_rows_forward, _move_rows_backward)


class MixtureOfExperts(nnx.Module):
  """Returns (the gated sum of each token's experts (B, T, D), load-balance loss, a scalar)."""

  def __init__(self, model: ModelConfig, keys: KeyStream):
    d, e, f = model.model_dim, model.num_experts, model.mlp_dim
    self.model = model
    inward = 1 / math.sqrt(d)
    expert_axes = ("experts", "embed", "mlp")
    # The router is tiny: its expert axis has no name, so that no rule splits it.
    self.router = parameter(truncated_normal(keys(), (d, e), inward), ("embed", None))
    self.gate = parameter(truncated_normal(keys(), (e, d, f), inward), expert_axes)
    self.up = parameter(truncated_normal(keys(), (e, d, f), inward), expert_axes)
    self.down = parameter(
      truncated_normal(keys(), (e, f, d), residual_stddev(f, model.num_layers)),
      ("experts", "mlp", "embed"),
    )

  def __call__(self, x_BxTxD: jax.Array, execution: Execution) -> tuple[jax.Array, jax.Array]:
    b, t, d = x_BxTxD.shape
    e, k = self.model.num_experts, self.model.experts_per_token
    c = slots_per_expert(self.model, t)
    # Routing is f32 throughout: a bf16 softmax flips choices between near-equal experts.
    score_BxTxE = jnp.einsum(
      "BTD,DE->BTE", x_BxTxD.astype(jnp.float32), used(self.router, execution, jnp.float32)
    )
    probability_BxTxE = jax.nn.softmax(score_BxTxE, axis=-1)
    gate_BxTxk, expert_BxTxk = route(probability_BxTxE, k)
    slot_BxN, choice_BxM = assign_slots(expert_BxTxk.reshape(b, t * k), e, c)

    slots_BxMxD = move_rows(k, x_BxTxD, choice_BxM, slot_BxN)
    out_BxExCxD = self._experts(slots_BxMxD.reshape(b, e, c, d), execution)
    out_BxNxD = move_rows(1, out_BxExCxD.reshape(b, e * c, d), slot_BxN, choice_BxM)
    out_BxTxkxD = out_BxNxD.reshape(b, t, k, d)
    mixed_BxTxD = jnp.einsum("BTkD,BTk->BTD", out_BxTxkxD, gate_BxTxk.astype(x_BxTxD.dtype))
    return mixed_BxTxD, load_balance_loss(probability_BxTxE, expert_BxTxk)

  def _experts(self, slots_BxExCxD: jax.Array, execution: Execution) -> jax.Array:
    dtype = slots_BxExCxD.dtype
    slots_BxExCxD = execution(slots_BxExCxD, ("batch", "experts", None, None))
    gate_BxExCxF = jnp.einsum("BECD,EDF->BECF", slots_BxExCxD, used(self.gate, execution, dtype))
    up_BxExCxF = jnp.einsum("BECD,EDF->BECF", slots_BxExCxD, used(self.up, execution, dtype))
    hidden_BxExCxF = jax.nn.silu(gate_BxExCxF) * up_BxExCxF
    hidden_BxExCxF = execution(hidden_BxExCxF, ("batch", "experts", None, "mlp"))
    out_BxExCxD = jnp.einsum("BECF,EFD->BECD", hidden_BxExCxF, used(self.down, execution, dtype))
    return execution(out_BxExCxD, ("batch", "experts", None, None))
