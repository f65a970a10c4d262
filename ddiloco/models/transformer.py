"""The decoder-only transformer, and its functional face: flat dicts of named arrays.

Everything outside this package sees parameters as `{"layers/attention/query": array, ...}`; a leaf
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

import jax
import jax.numpy as jnp
from flax import nnx

from ddiloco.config import ModelConfig
from ddiloco.models.execution import PLAIN, REMAT, Axes, Execution
from ddiloco.models.images import Patches, has_image, stand_before
from ddiloco.models.layers import (
  Attention,
  GatedMlp,
  KeyStream,
  RMSNorm,
  parameter,
  rope_tables,
  truncated_normal,
  used,
)
from ddiloco.models.loss import cross_entropy, cross_entropy_in_chunks, project
from ddiloco.models.model import Batch, NnxModel, Params
from ddiloco.models.moe import MixtureOfExperts

__all__ = [
  "LanguageModel",
  "Layer",
  "Transformer",
  "apply",
  "from_params",
  "init",
  "language_model",
  "logical_axes",
  "next_token_loss",
  "shapes",
]


# So shallow a stack is unrolled.
_UNROLLED_LAYERS = 4


class Layer(nnx.Module):
  """Pre-norm attention and (mixture of) gated MLP, each added to the residual stream."""

  def __init__(self, model: ModelConfig, keys: KeyStream):
    self.attention_norm = RMSNorm(model)
    self.attention = Attention(model, keys)
    self.mlp_norm = RMSNorm(model)
    if model.num_experts:
      self.moe = MixtureOfExperts(model, keys)
    else:
      self.mlp = GatedMlp(model, keys)

  def __call__(
    self, x_BxTxD: jax.Array, rope: tuple[jax.Array, jax.Array], execution: Execution
  ) -> tuple[jax.Array, jax.Array]:
    """(x after this layer (B, T, D), this layer's load-balance loss; 0 if dense)."""
    stream = ("batch", "time", None)
    x_BxTxD = x_BxTxD + self.attention(self.attention_norm(x_BxTxD), rope, execution)
    x_BxTxD = execution(x_BxTxD, stream)
    inner = self.mlp_norm(x_BxTxD)
    if hasattr(self, "moe"):
      change, balance = self.moe(inner, execution)
    else:
      change, balance = self.mlp(inner, execution), jnp.zeros((), jnp.float32)
    return execution(x_BxTxD + change, stream), balance


class Transformer(nnx.Module):
  """A causal language model with a tied embedding; `self.layers` holds all L layers stacked."""

  def __init__(self, model: ModelConfig, *, rngs: nnx.Rngs):
    self.model = model
    d = model.model_dim
    self.embedding = parameter(
      truncated_normal(rngs(), (model.vocab_size, d), 1 / math.sqrt(d)), ("vocab", "embed")
    )
    stack = nnx.vmap(
      lambda key: Layer(model, KeyStream(key)), transform_metadata={nnx.PARTITION_NAME: "layers"}
    )
    self.layers = stack(jax.random.split(rngs(), model.num_layers))
    self.final_norm = RMSNorm(model)
    if model.image_size:
      self.patches = Patches(model, rngs)

  def __call__(
    self,
    tokens_BxT: jax.Array,
    execution: Execution | None = None,
    image_BxIxIxC: jax.Array | None = None,
  ) -> tuple[jax.Array, jax.Array]:
    """(logits (B, T, V) f32, load-balance loss averaged over layers, unweighted; 0 if dense)."""
    execution = execution or PLAIN
    x_BxTxD, balance = self.states(tokens_BxT, execution, image_BxIxIxC)
    table_VxD = used(self.embedding, execution, self.model.compute_dtype)
    logits_BxTxV = project(x_BxTxD, table_VxD)
    return execution(logits_BxTxV, ("batch", "time", "vocab")), balance

  def loss(
    self,
    tokens_BxT: jax.Array,
    targets_BxT: jax.Array,
    execution: Execution,
    image_BxIxIxC: jax.Array | None = None,
  ) -> tuple[jax.Array, jax.Array]:
    """(Cross entropy in nats per token, load-balance loss), in `execution.loss_chunks` parts.

    With images only targets that are text count: those that are not below 0.
    """
    counted_BxT = None if image_BxIxIxC is None else targets_BxT >= 0
    if execution.loss_chunks == 1:
      logits_BxTxV, balance = self(tokens_BxT, execution, image_BxIxIxC)
      return cross_entropy(logits_BxTxV, targets_BxT, counted_BxT), balance
    x_BxTxD, balance = self.states(tokens_BxT, execution, image_BxIxIxC)
    table_VxD = self.embedding[...]
    loss = cross_entropy_in_chunks(x_BxTxD, table_VxD, targets_BxT, execution, counted_BxT)
    return loss, balance

  def states(
    self,
    tokens_BxT: jax.Array,
    execution: Execution,
    image_BxIxIxC: jax.Array | None = None,
  ) -> tuple[jax.Array, jax.Array]:
    """(What the logits are made of (B, T, D), normed; load-balance loss averaged over layers)."""
    model = self.model
    x_BxTxD = embed(self.embedding[...], tokens_BxT, model.compute_dtype, execution)
    if image_BxIxIxC is not None:
      patches_BxPxD = self.patches(image_BxIxIxC, execution, model.compute_dtype)
      x_BxTxD = stand_before(x_BxTxD, patches_BxPxD, tokens_BxT)
      x_BxTxD = execution(x_BxTxD, ("batch", "time", None))
    rope = rope_tables(tokens_BxT.shape[1], model.head_dim, model.rope_theta)
    graph, stacked = nnx.split(self.layers)

    def step(x_BxTxD: jax.Array, state: nnx.State) -> tuple[jax.Array, jax.Array]:
      return nnx.merge(graph, state)(x_BxTxD, rope, execution)

    policy = REMAT[execution.remat]
    if policy:
      # Inside a scan nothing can be merged across iterations, so the guard against it only costs.
      step = jax.checkpoint(step, prevent_cse=False, policy=policy)
    # A loop costs tiny models a tenth of their step on CPU. Recomputation needs the loop: unrolled,
    # the compiler would find the same values twice and store them after all.
    unroll = model.num_layers <= _UNROLLED_LAYERS and not policy
    x_BxTxD, balance_L = jax.lax.scan(step, x_BxTxD, stacked, unroll=unroll)
    return self.final_norm(x_BxTxD), jnp.mean(balance_L)


def embed(
  table_VxD: jax.Array, tokens_BxT: jax.Array, dtype: str, execution: Execution = PLAIN
) -> jax.Array:
  """Rows of the table, scaled by D^(1/4).

  The table's stddev is 1/sqrt(D), so that the tied logits start near unit variance. Its rows
  must then be scaled up, or the residual branches drown them; by sqrt(D), to unit variance, they
  drown the branches instead and every token starts out predicting itself. Half way was best in 200
  steps of a 115k model on bytes: loss 2.11, against 2.21 unscaled and 2.18 with sqrt(D).
  """
  # Each device looks its own columns up for the rows of all, and then rows are exchanged for
  # columns: the table, the largest of all weights, is never gathered. Rows are rounded one by one
  # so that the gradients of a frequent token add up in f32.
  tokens_BxT = execution(tokens_BxT, ("copies", "time"))
  rows_BxTxD = execution(table_VxD[tokens_BxT].astype(dtype), ("copies", "time", "embed"))
  x_BxTxD = execution(rows_BxTxD, ("batch", "time", None))
  return x_BxTxD * jnp.asarray(table_VxD.shape[1] ** 0.25, dtype)


# --- The functional face: a model's own functions, by its config


def next_token_loss(
  model: ModelConfig,
  params: Params,
  tokens_BxT1: jax.Array,
  execution: Execution | None = None,
  image_BxIxIxC: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """What a learner minimises on windows of T + 1 tokens (inputs [:, :-1], targets [:, 1:]).

  With images the mean is over the batch's text: a caption of few tokens weighs little, and
  micro-batches with more and less text weigh the same.

  Returns:
    total = cross entropy + model.load_balance_weight * load-balance loss, and
    {"loss": cross entropy in nats per token, "load_balance": the auxiliary loss, unweighted}.
    The load-balance loss looks at this learner's own batch only (Decoupled DiLoCo, MoE).
  """
  loss, load_balance = from_params(model, params).loss(
    tokens_BxT1[:, :-1], tokens_BxT1[:, 1:], execution or PLAIN, image_BxIxIxC
  )
  total = loss + model.load_balance_weight * load_balance
  return total, {"loss": loss, "load_balance": load_balance}


class LanguageModel(NnxModel):
  """The transformer as a `Model`: batches are windows of T + 1 tokens, int32 [B, T + 1].

  With images they are {"tokens": such windows, "image": uint8 [B, I, I, C]}, as `models.images`
  says; a row of text alone has an image that is not looked at.
  """

  def __init__(self, config: ModelConfig):
    super().__init__(lambda rngs: Transformer(config, rngs=rngs))
    self._config = config

  def inputs(self, batch_size: int, sequence_length: int) -> Batch:
    tokens = jax.ShapeDtypeStruct((batch_size, sequence_length + 1), jnp.int32)
    if not self._config.image_size:
      return tokens
    shape = (batch_size, *2 * (self._config.image_size,), self._config.image_channels)
    return {"tokens": tokens, "image": jax.ShapeDtypeStruct(shape, jnp.uint8)}

  def loss(
    self, params: Params, batch: Batch, execution: Execution | None = None
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    tokens_BxT1, image_BxIxIxC = self._parts(batch)
    return next_token_loss(self._config, params, tokens_BxT1, execution, image_BxIxIxC)

  def evaluate(self, params: Params, batch: Batch) -> dict[str, jax.Array]:
    """{"loss": nats per token}; with images also of the rows without and with one alone."""
    tokens_BxT1, image_BxIxIxC = self._parts(batch)
    targets_BxT = tokens_BxT1[:, 1:]
    logits_BxTxV = self.logits(params, tokens_BxT1[:, :-1], image_BxIxIxC)
    if image_BxIxIxC is None:
      return {"loss": cross_entropy(logits_BxTxV, targets_BxT)}
    counted_BxT, seen_Bx1 = targets_BxT >= 0, has_image(tokens_BxT1)
    return {
      "loss": cross_entropy(logits_BxTxV, targets_BxT, counted_BxT),
      "text_loss": cross_entropy(logits_BxTxV, targets_BxT, counted_BxT & ~seen_Bx1),
      "image_loss": cross_entropy(logits_BxTxV, targets_BxT, counted_BxT & seen_Bx1),
    }

  def _parts(self, batch: Batch) -> tuple[jax.Array, jax.Array | None]:
    return (batch["tokens"], batch["image"]) if self._config.image_size else (batch, None)

  def logits(
    self, params: Params, tokens_BxT: jax.Array, image_BxIxIxC: jax.Array | None = None
  ) -> jax.Array:
    """Of the next token at every position: (B, T, V) f32."""
    return apply(self._config, params, tokens_BxT, None, image_BxIxIxC)[0]


@functools.cache
def language_model(model: ModelConfig) -> LanguageModel:
  """The `Model` of this config, traced once."""
  return LanguageModel(model)


def logical_axes(model: ModelConfig) -> dict[str, Axes]:
  """Logical axis names of every parameter, one a dimension; stacked leaves begin with "layers"."""
  return language_model(model).logical_axes()


def shapes(model: ModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
  """Shape and dtype (f32) of every parameter, without making any."""
  return language_model(model).shapes()


def init(model: ModelConfig, key: jax.Array) -> dict[str, jax.Array]:
  """Fresh parameters, a pure function of `key`; under jit, XLA drops the unused leaves."""
  return language_model(model).init(key)


def from_params(model: ModelConfig, params: Params) -> Transformer:
  """The NNX module that holds these parameters.

  Raises:
    ValueError: a name is missing or unknown, or a shape is not the model's.
  """
  return language_model(model).module(params)


def apply(
  model: ModelConfig,
  params: Params,
  tokens_BxT: jax.Array,
  execution: Execution | None = None,
  image_BxIxIxC: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Logits of the next token at every position, and the raw auxiliary loss.

  Args:
    model: what the parameters belong to.
    params: flat names to arrays, as from `init`.
    tokens_BxT: integer token ids.
    execution: how devices compute it; by default one device and the reference path. Its layout
      knows the logical axes "batch", "copies" (a batch that "embed" is cut instead of), "time",
      "heads", "kv_heads", "mlp", "experts", "vocab", "embed", or None: not to be split.
    image_BxIxIxC: of the rows that begin with one; None: all rows are text alone.

  Returns:
    logits (B, T, V) f32, and the load-balance loss averaged over layers (scalar f32, not yet
    multiplied by `model.load_balance_weight`; 0 for a dense model).
  """
  return from_params(model, params)(tokens_BxT, execution, image_BxIxIxC)
