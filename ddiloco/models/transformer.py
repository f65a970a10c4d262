"""The decoder-only transformer, and its functional face: flat dicts of named arrays.

Everything outside this room sees parameters as `{"layers/attention/query": array, ...}`; a leaf
whose name begins with "layers/" has a leading axis of length L. To use them as a plain NNX module:

    from ddiloco.models import transformer
    params = {name: array, ...}                             # e.g. restored from a checkpoint
    module = transformer.from_params(config.model, params)
    logits_BxTxV, auxiliary_loss = module(tokens_BxT)

Layers are one stack that `jax.lax.scan` walks, so compile time does not grow with depth. Parameters
are f32; each layer casts its own slice to the compute dtype. Norms, scores, router and logits are
f32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ddiloco.config import ModelConfig
from ddiloco.models.layers import (
  Attention,
  Axes,
  Constrain,
  GatedMlp,
  RMSNorm,
  parameter,
  rope_tables,
  truncated_normal,
  unconstrained,
)
from ddiloco.models.moe import MixtureOfExperts

__all__ = ["Layer", "Transformer", "apply", "from_params", "init", "logical_axes", "shapes"]


# So shallow a stack is unrolled.
_UNROLLED_LAYERS = 4


class Layer(nnx.Module):
  """Pre-norm attention and (mixture of) gated MLP, each added to the residual stream."""

  def __init__(self, model: ModelConfig, rngs: nnx.Rngs):
    self.attention_norm = RMSNorm(model)
    self.attention = Attention(model, rngs)
    self.mlp_norm = RMSNorm(model)
    if model.num_experts:
      self.moe = MixtureOfExperts(model, rngs)
    else:
      self.mlp = GatedMlp(model, rngs)

  def __call__(
    self, x_BxTxD: jax.Array, rope: tuple[jax.Array, jax.Array], constrain: Constrain
  ) -> tuple[jax.Array, jax.Array]:
    """(x after this layer (B, T, D), this layer's load-balance loss; 0 if dense)."""
    stream = ("batch", "time", None)
    x_BxTxD = x_BxTxD + self.attention(self.attention_norm(x_BxTxD), rope, constrain)
    x_BxTxD = constrain(x_BxTxD, stream)
    inner = self.mlp_norm(x_BxTxD)
    if hasattr(self, "moe"):
      change, balance = self.moe(inner, constrain)
    else:
      change, balance = self.mlp(inner, constrain), jnp.zeros((), jnp.float32)
    return constrain(x_BxTxD + change, stream), balance


class Transformer(nnx.Module):
  """A causal language model with a tied embedding; `self.layers` holds all L layers stacked."""

  def __init__(self, model: ModelConfig, *, rngs: nnx.Rngs):
    self.model = model
    d = model.model_dim
    self.embedding = parameter(
      truncated_normal(rngs(), (model.vocab_size, d), 1 / math.sqrt(d)), ("vocab", "embed")
    )
    stack = nnx.vmap(
      lambda key: Layer(model, nnx.Rngs(key)), transform_metadata={nnx.PARTITION_NAME: "layers"}
    )
    self.layers = stack(jax.random.split(rngs(), model.num_layers))
    self.final_norm = RMSNorm(model)

  def __call__(
    self, tokens_BxT: jax.Array, constrain: Constrain | None = None
  ) -> tuple[jax.Array, jax.Array]:
    """(logits (B, T, V) f32, load-balance loss averaged over layers, unweighted; 0 if dense)."""
    constrain = constrain or unconstrained
    model = self.model
    table_VxD = self.embedding[...].astype(model.compute_dtype)
    x_BxTxD = constrain(embed(table_VxD, tokens_BxT), ("batch", "time", None))
    rope = rope_tables(tokens_BxT.shape[1], model.head_dim, model.rope_theta)
    graph, stacked = nnx.split(self.layers)

    def step(x_BxTxD: jax.Array, state: nnx.State) -> tuple[jax.Array, jax.Array]:
      return nnx.merge(graph, state)(x_BxTxD, rope, constrain)

    if model.remat:
      # Inside a scan nothing can be merged across iterations, so the guard against it only costs.
      step = jax.checkpoint(step, prevent_cse=False)
    # A loop costs tiny models a tenth of their step on CPU. Recomputation needs the loop: unrolled,
    # the compiler would find the same values twice and store them after all.
    unroll = model.num_layers <= _UNROLLED_LAYERS and not model.remat
    x_BxTxD, balance_L = jax.lax.scan(step, x_BxTxD, stacked, unroll=unroll)
    logits_BxTxV = jnp.einsum(
      "BTD,VD->BTV", self.final_norm(x_BxTxD), table_VxD, preferred_element_type=jnp.float32
    )
    return constrain(logits_BxTxV, ("batch", "time", "vocab")), jnp.mean(balance_L)


def embed(table_VxD: jax.Array, tokens_BxT: jax.Array) -> jax.Array:
  """Rows of the table, scaled by D^(1/4).

  The table's stddev is 1/sqrt(D), so that the tied logits start near unit variance. Its rows
  must then be scaled up, or the residual branches drown them; by sqrt(D), to unit variance, they
  drown the branches instead and every token starts out predicting itself. Half way was best in 200
  steps of a 115k model on bytes: loss 2.11, against 2.21 unscaled and 2.18 with sqrt(D).
  """
  return table_VxD[tokens_BxT] * jnp.asarray(table_VxD.shape[1] ** 0.25, table_VxD.dtype)


@functools.cache
def _abstract(model: ModelConfig) -> tuple[nnx.GraphDef, dict[str, nnx.Variable]]:
  """The module's structure and its variables by flat name, with shapes instead of values."""
  module = nnx.eval_shape(lambda: Transformer(model, rngs=nnx.Rngs(0)))
  graph, state = nnx.split(module)
  return graph, {"/".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}


def logical_axes(model: ModelConfig) -> dict[str, Axes]:
  """Logical axis names of every parameter, one a dimension; stacked leaves begin with "layers"."""
  return {name: tuple(v.out_sharding) for name, v in _abstract(model)[1].items()}


def shapes(model: ModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
  """Shape and dtype (f32) of every parameter, without making any."""
  return {name: jax.ShapeDtypeStruct(v.shape, v.dtype) for name, v in _abstract(model)[1].items()}


def init(model: ModelConfig, key: jax.Array) -> dict[str, jax.Array]:
  """Fresh parameters, a pure function of `key`; under jit, XLA drops the leaves nobody asks for."""
  state = nnx.state(Transformer(model, rngs=nnx.Rngs(key)))
  return {"/".join(map(str, path)): variable[...] for path, variable in nnx.to_flat_state(state)}


def from_params(model: ModelConfig, params: Mapping[str, jax.Array]) -> Transformer:
  """The NNX module that holds these parameters.

  Raises:
    ValueError: a name is missing or unknown, or a shape is not the model's.
  """
  graph, abstract = _abstract(model)
  missing = sorted(abstract.keys() - params.keys())
  unknown = sorted(params.keys() - abstract.keys())
  if missing or unknown:
    raise ValueError(
      f"params: missing {missing}, unknown {unknown}: the names must be exactly those of"
      " transformer.shapes(model). Fix: use the model config these parameters were trained with."
    )
  for name, variable in abstract.items():
    if tuple(params[name].shape) != tuple(variable.shape):
      raise ValueError(
        f"params[{name!r}] has shape {tuple(params[name].shape)}, the model needs"
        f" {tuple(variable.shape)}. Fix: use the model config these parameters were trained with."
      )
  flat: dict[Any, Any] = {
    tuple(name.split("/")): v.replace(params[name]) for name, v in abstract.items()
  }
  return nnx.merge(graph, nnx.from_flat_state(flat))


def apply(
  model: ModelConfig,
  params: Mapping[str, jax.Array],
  tokens_BxT: jax.Array,
  constrain: Constrain | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Logits of the next token at every position, and the raw auxiliary loss.

  Args:
    model: what the parameters belong to.
    params: flat names to arrays, as from `init`.
    tokens_BxT: integer token ids.
    constrain: `constrain(array, axes)` may pin an activation's sharding by logical axis names:
      "batch", "time", "heads", "kv_heads", "mlp", "experts", "vocab", or None for an axis that
      nobody should split.

  Returns:
    logits (B, T, V) f32, and the load-balance loss averaged over layers (scalar f32, not yet
    multiplied by `model.load_balance_weight`; 0 for a dense model).
  """
  return from_params(model, params)(tokens_BxT, constrain)
