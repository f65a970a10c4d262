"""The parts of a layer: norm, rotary embedding, grouped-query attention and the gated MLP.

Axes in names: B batch, T query positions, S key positions, D model dim, H query heads, K kv heads,
G query heads per kv head (H = K * G), Q head dim, F mlp width.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx

from ddiloco.config import ModelConfig
from ddiloco.models.attention import attend
from ddiloco.models.execution import Axes, Execution

# Standard deviation of a unit normal that is cut off at two standard deviations.
_TRUNCATED_STDDEV = 0.87962566103423978


def parameter(value: jax.Array, axes: Axes) -> nnx.Param:
  """A parameter that carries its logical axis names as NNX sharding metadata.

  Eager sharding is off: the names are logical, and creating a variable must not need a mesh.
  Code that has a mesh maps them to its axes (`training/island.py`, or `nnx.get_partition_spec`).
  """
  return nnx.Param(value, out_sharding=axes, eager_sharding=False)


def used(weight: nnx.Param, execution: Execution, dtype: str | jnp.dtype) -> jax.Array:
  """The weight as a layer multiplies by it: rounded first, then whole along "embed".

  Of a stack of layers it has the axis names of all and the value of one.
  """
  value = weight[...].astype(dtype)
  return execution.gathered(value, weight.get_metadata("out_sharding")[-value.ndim :])


class KeyStream:
  """One new key a call, those of `nnx.Rngs(key)` called as often.

  It counts in Python: each call of NNX's own under a trace prints the program so far (flax 0.12),
  which was up to half of the time that a model takes to trace.
  """

  def __init__(self, key: jax.Array):
    self._key, self._count = key, 0

  def __call__(self) -> jax.Array:
    count = jnp.uint32(self._count)
    self._count += 1
    return jax.random.fold_in(self._key, count)


def truncated_normal(key: jax.Array, shape: tuple[int, ...], stddev: float) -> jax.Array:
  """f32 normal values cut off at two standard deviations, with `stddev` after the cut."""
  unit = jax.random.truncated_normal(key, -2.0, 2.0, shape, jnp.float32)
  return unit * (stddev / _TRUNCATED_STDDEV)


def residual_stddev(fan_in: int, num_layers: int) -> float:
  """For matrices that write into the residual stream: 2L of them add up to unit variance."""
  return 1.0 / math.sqrt(fan_in * 2 * num_layers)


class RMSNorm(nnx.Module):
  """x / rms(x) * scale over the last axis, computed in f32 (arXiv 1910.07467)."""

  def __init__(self, model: ModelConfig):
    self.epsilon = model.norm_epsilon
    self.scale = parameter(jnp.ones((model.model_dim,), jnp.float32), ("norm",))

  def __call__(self, x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    scale = self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,))
    return (wide * jax.lax.rsqrt(mean_square + self.epsilon) * scale).astype(x.dtype)


def rope_tables(num_positions: int, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
  """(sin, cos), each (T, Q/2), f32, of the rotary angles: position * theta^(-2i/Q) for pair i."""
  frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
  angle_TxQ = jnp.arange(num_positions, dtype=jnp.float32)[:, None] * frequency[None, :]
  return jnp.sin(angle_TxQ), jnp.cos(angle_TxQ)


def apply_rope(x_BxHxTxQ: jax.Array, sin_TxQ: jax.Array, cos_TxQ: jax.Array) -> jax.Array:
  """Turns the pairs (x[i], x[i + Q/2]) of every head by their position's angle (2104.09864)."""
  sin, cos = sin_TxQ[None, None], cos_TxQ[None, None]
  first, second = jnp.split(x_BxHxTxQ.astype(jnp.float32), 2, axis=-1)
  turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
  return turned.astype(x_BxHxTxQ.dtype)


class Attention(nnx.Module):
  """Causal attention; G = H/K query heads share one key and value head (arXiv 2305.13245)."""

  def __init__(self, model: ModelConfig, keys: KeyStream):
    d, h, k, q = model.model_dim, model.num_heads, model.num_kv_heads, model.head_dim
    inward = 1 / math.sqrt(d)
    kv_axes = ("embed", "kv_heads", "head_dim")
    self.query = parameter(
      truncated_normal(keys(), (d, h, q), inward), ("embed", "heads", "head_dim")
    )
    self.key = parameter(truncated_normal(keys(), (d, k, q), inward), kv_axes)
    self.value = parameter(truncated_normal(keys(), (d, k, q), inward), kv_axes)
    self.output = parameter(
      truncated_normal(keys(), (h, q, d), residual_stddev(h * q, model.num_layers)),
      ("heads", "head_dim", "embed"),
    )

  def __call__(
    self, x_BxTxD: jax.Array, rope: tuple[jax.Array, jax.Array], execution: Execution
  ) -> jax.Array:
    dtype = x_BxTxD.dtype

    def project(weight: nnx.Param, heads: str) -> jax.Array:
      # Heads before positions from the start: the score products then need no transposed copies.
      y = jnp.einsum("BTD,DHQ->BHTQ", x_BxTxD, used(weight, execution, dtype))
      return execution(y, ("batch", heads, "time", None))

    query_BxHxTxQ = apply_rope(project(self.query, "heads"), *rope)
    key_BxKxSxQ = apply_rope(project(self.key, "kv_heads"), *rope)
    value_BxKxSxQ = project(self.value, "kv_heads")
    mixed_BxHxTxQ = attend(query_BxHxTxQ, key_BxKxSxQ, value_BxKxSxQ, execution)
    mixed_BxHxTxQ = execution(mixed_BxHxTxQ, ("batch", "heads", "time", None))
    return jnp.einsum("BHTQ,HQD->BTD", mixed_BxHxTxQ, used(self.output, execution, dtype))


class GatedMlp(nnx.Module):
  """(silu(x gate) * (x up)) down, SwiGLU (arXiv 2002.05202)."""

  def __init__(self, model: ModelConfig, keys: KeyStream):
    d, f = model.model_dim, model.mlp_dim
    inward = 1 / math.sqrt(d)
    self.gate = parameter(truncated_normal(keys(), (d, f), inward), ("embed", "mlp"))
    self.up = parameter(truncated_normal(keys(), (d, f), inward), ("embed", "mlp"))
    self.down = parameter(
      truncated_normal(keys(), (f, d), residual_stddev(f, model.num_layers)), ("mlp", "embed")
    )

  def __call__(self, x_BxTxD: jax.Array, execution: Execution) -> jax.Array:
    dtype = x_BxTxD.dtype
    gate_BxTxF = jnp.einsum("BTD,DF->BTF", x_BxTxD, used(self.gate, execution, dtype))
    up_BxTxF = jnp.einsum("BTD,DF->BTF", x_BxTxD, used(self.up, execution, dtype))
    hidden_BxTxF = execution(jax.nn.silu(gate_BxTxF) * up_BxTxF, ("batch", "time", "mlp"))
    return jnp.einsum("BTF,FD->BTD", hidden_BxTxF, used(self.down, execution, dtype))
