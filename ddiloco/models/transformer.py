"""The decoder-only transformer, and its functional interface: flat dicts of named arrays.

Everything outside this package sees parameters as `{"layers/attention/query": array, ...}`; a leaf
whose name begins with "layers/" has a leading axis of length L. To get a plain NNX module of them:

    from ddiloco.models import transformer
    params = {name: array, ...}                             # e.g. restored from a checkpoint
    module = transformer.from_params(config.model, params)
    logits_BxTxV, auxiliary_loss = module(tokens_BxT)

All layers are one stack for `jax.lax.scan`, so compile time does not grow with depth. Parameters
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
import numpy as np
from flax import nnx

from ddiloco.config import ModelConfig
from ddiloco.models import layers
from ddiloco.models.model import PLAIN, REMAT, Batch, Execution, NnxModel, Params

# A stack of at most so many layers is unrolled.
_UNROLLED_LAYERS = 4


class Layer(nnx.Module):
  """Pre-norm attention and (mixture of) gated MLP, each added to the residual stream."""

  def __init__(self, model: ModelConfig, keys: layers.Keys):
    self.attention_norm = layers.RMSNorm(model)
    self.attention = layers.Attention(model, keys)
    self.mlp_norm = layers.RMSNorm(model)
    if model.num_experts:
      self.moe = layers.MixtureOfExperts(model, keys)
    else:
      self.mlp = layers.GatedMlp(model, keys)

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
  """A causal language model; `self.layers` holds all L layers stacked."""

  def __init__(self, model: ModelConfig, *, rngs: nnx.Rngs):
    self.model = model
    d = model.model_dim
    table = (model.vocab_size, d)
    self.embedding = layers.drawn(rngs(), table, 1 / math.sqrt(d), ("vocab", "embed"))
    stack = nnx.vmap(
      lambda key: Layer(model, layers.key_stream(key)),
      transform_metadata={nnx.PARTITION_NAME: "layers"},
    )
    self.layers = stack(jax.random.split(rngs(), model.num_layers))
    self.final_norm = layers.RMSNorm(model)
    if model.image_size:
      self.patches = layers.Patches(model, rngs)
    if not model.tied_embedding:
      self.head = layers.drawn(rngs(), table, 1 / math.sqrt(d), ("vocab", "embed"))

  def __call__(
    self,
    tokens_BxT: jax.Array,
    execution: Execution = PLAIN,
    image_BxIxIxC: jax.Array | None = None,
  ) -> tuple[jax.Array, jax.Array]:
    """Logits of the next token at every position, and the raw auxiliary loss.

    Args:
      tokens_BxT: integer token ids.
      execution: how devices compute it; by default one device and the reference path. Its layout
        knows the logical axes "batch", "copies" (the batch axis of an array whose "embed" is cut),
        "time", "heads", "kv_heads", "mlp", "experts", "vocab", "embed", or None: not to be split.
      image_BxIxIxC: the images, used in rows that begin with one; None: all rows are text alone.

    Returns:
      logits (B, T, V) f32, and the load-balance loss averaged over layers (scalar f32, not yet
      multiplied by `model.load_balance_weight`; 0 for a dense model).
    """
    x_BxTxD, balance = self.states(tokens_BxT, execution, image_BxIxIxC)
    table_VxD = layers.used(self.logits_table, execution, self.model.compute_dtype)
    logits_BxTxV = project(x_BxTxD, table_VxD)
    return execution(logits_BxTxV, ("batch", "time", "vocab")), balance

  @property
  def logits_table(self) -> nnx.Param:
    """The matrix of the logits, (V, D)."""
    return self.embedding if self.model.tied_embedding else self.head

  def states(
    self,
    tokens_BxT: jax.Array,
    execution: Execution,
    image_BxIxIxC: jax.Array | None = None,
  ) -> tuple[jax.Array, jax.Array]:
    """(Final normed states (B, T, D), load-balance loss averaged over layers)."""
    model = self.model
    x_BxTxD = embed(self.embedding[...], tokens_BxT, model.compute_dtype, execution)
    if image_BxIxIxC is not None:
      patches_BxPxD = self.patches(image_BxIxIxC, execution, model.compute_dtype)
      x_BxTxD = layers.stand_before(x_BxTxD, patches_BxPxD, tokens_BxT)
      x_BxTxD = execution(x_BxTxD, ("batch", "time", None))
    rope = layers.rope_tables(tokens_BxT.shape[1], model.head_dim, model.rope_theta)
    graph, stacked = nnx.split(self.layers)

    def step(x_BxTxD: jax.Array, state: nnx.State) -> tuple[jax.Array, jax.Array]:
      return nnx.merge(graph, state)(x_BxTxD, rope, execution)

    policy = REMAT[execution.remat]
    if policy:
      # XLA merges nothing across a scan's iterations, so the guard against CSE is only a cost.
      step = jax.checkpoint(step, prevent_cse=False, policy=policy)
    # A loop costs tiny models a tenth of their step on CPU. Recomputation needs the loop: in
    # unrolled layers the compiler would find the same values twice and store them after all.
    unroll = model.num_layers <= _UNROLLED_LAYERS and not policy
    x_BxTxD, balance_L = jax.lax.scan(step, x_BxTxD, stacked, unroll=unroll)
    return self.final_norm(x_BxTxD), jnp.mean(balance_L)


def embed(
  table_VxD: jax.Array, tokens_BxT: jax.Array, dtype: str, execution: Execution = PLAIN
) -> jax.Array:
  """Rows of the table, scaled by D^(1/4).

  The table's stddev is 1/sqrt(D), so that the tied logits start near unit variance. Unscaled, its
  rows are small against what the residual branches add. Scaled by sqrt(D), to unit variance, the
  rows outweigh the branches, and every token starts out predicting itself. D^(1/4) was best in 200
  steps of a 115k model on bytes: loss 2.11, against 2.21 unscaled and 2.18 with sqrt(D).
  """
  # Each device looks up its own columns for the rows of all devices, and then columns are exchanged
  # for rows: the table, the largest of all weights, is never gathered. The rows are rounded after
  # the look-up, so that the gradients of a frequent token add up in f32.
  tokens_BxT = execution(tokens_BxT, ("copies", "time"))
  rows_BxTxD = execution(table_VxD[tokens_BxT].astype(dtype), ("copies", "time", "embed"))
  x_BxTxD = execution(rows_BxTxD, ("batch", "time", None))
  return x_BxTxD * jnp.asarray(table_VxD.shape[1] ** 0.25, dtype)


# --- Cross entropy: of whole logits, and of a large vocabulary without them


def cross_entropy(
  logits: jax.Array, targets: jax.Array, counted: jax.Array | None = None
) -> jax.Array:
  """Mean of -log softmax(logits)[target], in nats, computed in f32.

  Args:
    logits: (..., V).
    targets: (...), integers.
    counted: (...), where the mean is taken; None: everywhere. If no place counts, the mean is NaN.
  """
  logits = logits.astype(jnp.float32)
  log_norm = jax.nn.logsumexp(logits, axis=-1)
  # A target outside the vocabulary must give NaN, not some other token's loss: a negative index
  # would count from the end.
  index = jnp.where(targets < 0, logits.shape[-1], targets)[..., None]
  chosen = jnp.take_along_axis(logits, index, axis=-1, mode="fill")
  return jnp.mean(log_norm - chosen[..., 0], where=counted)


@jax.custom_vjp
def project(x_BxTxD: jax.Array, table_NxD: jax.Array) -> jax.Array:
  """Logits x @ table.T: (B, T, N), f32, of two arrays in the compute dtype.

  The gradient of the logits is rounded to the compute dtype too. In f32 it would make both products
  of the backward pass f32 products: on an H100 an eighth of a 100M model's step.
  """
  return jnp.einsum("BTD,ND->BTN", x_BxTxD, table_NxD, preferred_element_type=jnp.float32)


def _project_back(saved: tuple[jax.Array, jax.Array], gradient_BxTxN: jax.Array):
  x_BxTxD, table_NxD = saved
  gradient_BxTxN = gradient_BxTxN.astype(x_BxTxD.dtype)
  product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  of_x = product("BTN,ND->BTD", gradient_BxTxN, table_NxD)
  of_table = product("BTN,BTD->ND", gradient_BxTxN, x_BxTxD)
  return of_x.astype(x_BxTxD.dtype), of_table.astype(table_NxD.dtype)


project.defvjp(lambda x, table: (project(x, table), (x, table)), _project_back)


def cross_entropy_in_chunks(
  x_BxTxD: jax.Array,
  table_VxD: jax.Array,
  targets_BxT: jax.Array,
  execution: Execution,
  counted_BxT: jax.Array | None = None,
) -> jax.Array:
  """`cross_entropy` of the logits x @ table.T, of which only a part exists at any time.

  Chunk i of C has the rows of the table that are i modulo C, so that a device with some of the rows
  has equally many of each chunk. A running softmax keeps three numbers a token; the backward pass
  computes each chunk's logits again. Each chunk of the table is gathered by itself.

  Args:
    x_BxTxD: final states, in the compute dtype.
    table_VxD: the embedding, f32; `execution.loss_chunks` divides V.
    targets_BxT: token ids.
    execution: how devices compute it.
    counted_BxT: where the mean is taken; None: everywhere.
  """
  chunks, dtype = execution.loss_chunks, x_BxTxD.dtype
  v, d = table_VxD.shape
  table_NxCxD = execution(table_VxD.reshape(v // chunks, chunks, d), ("vocab", None, "embed"))
  table_CxNxD = execution(table_NxCxD.swapaxes(0, 1), (None, "vocab", "embed"))
  # Wide here and rounded in each chunk, so that the chunks' gradients add up in f32.
  wide_BxTxD = x_BxTxD.astype(jnp.float32)
  row_BxT, chunk_BxT = targets_BxT // chunks, targets_BxT % chunks
  row_N = jnp.arange(v // chunks, dtype=targets_BxT.dtype)

  def add(carry: tuple[jax.Array, ...], one: tuple[jax.Array, jax.Array]):
    highest_BxT, total_BxT, chosen_BxT = carry
    table_NxD, index = one
    weight_NxD = execution.gathered(table_NxD.astype(dtype), ("vocab", "embed"))
    logits_BxTxN = project(wide_BxTxD.astype(dtype), weight_NxD)
    logits_BxTxN = execution(logits_BxTxN, ("batch", "time", "vocab"))
    # The maximum that is subtracted before `exp` changes no result, so it needs no gradient.
    top_BxT = jax.lax.stop_gradient(jnp.maximum(highest_BxT, jnp.max(logits_BxTxN, axis=-1)))
    part_BxT = jnp.sum(jnp.exp(logits_BxTxN - top_BxT[..., None]), axis=-1)
    total_BxT = total_BxT * jnp.exp(highest_BxT - top_BxT) + part_BxT
    here_BxTxN = (row_BxT[..., None] == row_N[None, None]) & (chunk_BxT == index)[..., None]
    chosen_BxT = chosen_BxT + jnp.sum(jnp.where(here_BxTxN, logits_BxTxN, 0.0), axis=-1)
    return (top_BxT, total_BxT, chosen_BxT), None

  zero_BxT = jnp.zeros(targets_BxT.shape, jnp.float32)
  carry = (jnp.full_like(zero_BxT, -jnp.inf), zero_BxT, zero_BxT)
  indices_C = jnp.arange(chunks, dtype=targets_BxT.dtype)
  # XLA merges nothing across a loop's iterations, so the guard against CSE is only a cost.
  body = jax.checkpoint(add, prevent_cse=False)
  (highest_BxT, total_BxT, chosen_BxT), _ = jax.lax.scan(body, carry, (table_CxNxD, indices_C))
  # As in `cross_entropy`, a target outside the vocabulary must give NaN.
  known_BxT = (targets_BxT >= 0) & (targets_BxT < v)
  loss_BxT = highest_BxT + jnp.log(total_BxT) - chosen_BxT
  return jnp.mean(jnp.where(known_BxT, loss_BxT, jnp.nan), where=counted_BxT)


# --- The functional interface: a model's functions, by its config


class LanguageModel(NnxModel):
  """The transformer as a `Model`: batches are windows of T + 1 tokens, int32 [B, T + 1].

  With images, batches are {"tokens": such windows, "image": uint8 [B, I, I, C]}, as `models.layers`
  says; the image of a row of text alone is ignored.
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
    """What a learner minimises on windows of T + 1 tokens (inputs [:, :-1], targets [:, 1:]).

    With images the mean is over the batch's text, targets >= 0: a caption of few tokens weighs
    little, and micro-batches with more and less text weigh the same.

    Returns:
      total = cross entropy + model.load_balance_weight * load-balance loss, and
      {"loss": cross entropy in nats per token, "load_balance": the auxiliary loss, unweighted}.
      The load-balance loss looks at this learner's own batch only (Decoupled DiLoCo, MoE).
    """
    module, execution = self.module(params), execution or PLAIN
    tokens_BxT1, image_BxIxIxC = self._parts(batch)
    seen = tokens_BxT1[:, :-1], execution, image_BxIxIxC
    targets_BxT = tokens_BxT1[:, 1:]
    counted_BxT = None if image_BxIxIxC is None else targets_BxT >= 0
    if execution.loss_chunks == 1:
      logits_BxTxV, load_balance = module(*seen)
      loss = cross_entropy(logits_BxTxV, targets_BxT, counted_BxT)
    else:
      x_BxTxD, load_balance = module.states(*seen)
      table_VxD = module.logits_table[...]
      loss = cross_entropy_in_chunks(x_BxTxD, table_VxD, targets_BxT, execution, counted_BxT)
    total = loss + self._config.load_balance_weight * load_balance
    return total, {"loss": loss, "load_balance": load_balance}

  def evaluate(self, params: Params, batch: Batch) -> dict[str, jax.Array]:
    """{"loss": nats per token}; with images also "text_loss" of the rows without an image and
    "image_loss" of the rows with one."""
    tokens_BxT1, image_BxIxIxC = self._parts(batch)
    targets_BxT = tokens_BxT1[:, 1:]
    logits_BxTxV = self.logits(params, tokens_BxT1[:, :-1], image_BxIxIxC)
    if image_BxIxIxC is None:
      return {"loss": cross_entropy(logits_BxTxV, targets_BxT)}
    counted_BxT, seen_Bx1 = targets_BxT >= 0, layers.has_image(tokens_BxT1)
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
    """Logits of the next token at every position: (B, T, V) f32."""
    return self.module(params)(tokens_BxT, PLAIN, image_BxIxIxC)[0]

  def flops_per_token(self, sequence_length: int) -> float:
    """Training FLOPs (forward and backward) of one token, counting matrix products only.

    Two FLOPs a multiply-add; the backward pass costs twice the forward pass. Of attention's scores
    and their product with the values only the half that is not masked counts: 6 * parameters +
    6 * L * H * Q * T for a dense model without norms. (PaLM, arXiv 2204.02311, appendix B, counts
    both halves: 12.) Counted are the router, the k chosen experts and the logits. Not counted: the
    embedding look-up, norms, softmax, optimizer, recomputation under remat, and a mixture's empty
    slots. A patch of an image counts as a token, and its projection is added. Every row is taken to
    have an image, since every row's patches are multiplied.
    """
    model = self._config
    d, heads, kv_heads = model.model_dim, model.num_heads, model.num_kv_heads
    experts = model.experts_per_token if model.num_experts else 1
    attention = 2 * d * model.head_dim * (heads + kv_heads)  # queries and output; keys and values
    weights = attention + d * model.num_experts + experts * 3 * d * model.mlp_dim
    scores_and_values = heads * model.head_dim * sequence_length  # halves of two products
    multiply_adds: float = model.num_layers * (weights + scores_and_values) + d * model.vocab_size
    if model.image_size:
      projection = model.patch_size**2 * model.image_channels * d
      multiply_adds += projection * model.num_patches / sequence_length
    return 3.0 * 2.0 * multiply_adds


@functools.cache
def language_model(model: ModelConfig) -> LanguageModel:
  """The `Model` of this config, traced once."""
  return LanguageModel(model)


def from_params(model: ModelConfig, params: Params) -> Transformer:
  """The NNX module that holds these parameters.

  Raises:
    ValueError: a name is missing or unknown, or a shape is not the model's.
  """
  return language_model(model).module(params)


# --- The same model in Hugging Face's classes: Llama, with experts Mixtral

_THEIRS = {  # n: the layer, e: the expert
  "embedding": "model.embed_tokens",
  "layers/attention_norm/scale": "model.layers.{n}.input_layernorm",
  "layers/attention/query": "model.layers.{n}.self_attn.q_proj",
  "layers/attention/key": "model.layers.{n}.self_attn.k_proj",
  "layers/attention/value": "model.layers.{n}.self_attn.v_proj",
  "layers/attention/output": "model.layers.{n}.self_attn.o_proj",
  "layers/mlp_norm/scale": "model.layers.{n}.post_attention_layernorm",
  "layers/mlp/gate": "model.layers.{n}.mlp.gate_proj",
  "layers/mlp/up": "model.layers.{n}.mlp.up_proj",
  "layers/mlp/down": "model.layers.{n}.mlp.down_proj",
  "layers/moe/router": "model.layers.{n}.block_sparse_moe.gate",
  "layers/moe/gate": "model.layers.{n}.block_sparse_moe.experts.{e}.w1",
  "layers/moe/down": "model.layers.{n}.block_sparse_moe.experts.{e}.w2",
  "layers/moe/up": "model.layers.{n}.block_sparse_moe.experts.{e}.w3",
  "final_norm/scale": "model.norm",
  "head": "lm_head",
}


def huggingface_names(model: ModelConfig) -> dict[str, list[str]]:
  """Their names of each parameter, in the order of its leading axes: layers, and then experts."""
  names = {}
  for name in language_model(model).shapes():
    theirs = _THEIRS[name] + ".weight"
    layer = range(model.num_layers if "{n}" in theirs else 1)
    expert = range(model.num_experts if "{e}" in theirs else 1)
    names[name] = [theirs.format(n=n, e=e) for n in layer for e in expert]
  return names


def huggingface_config(model: ModelConfig) -> dict[str, Any]:
  """What their config.json says of the model. A tied model is not tied there, see below."""
  mixture = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": model.num_experts,
    "num_experts_per_tok": model.experts_per_token,
  }
  dense = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
  return {
    **(mixture if model.num_experts else dense),
    "vocab_size": model.vocab_size,
    "hidden_size": model.model_dim,
    "intermediate_size": model.mlp_dim,
    "num_hidden_layers": model.num_layers,
    "num_attention_heads": model.num_heads,
    "num_key_value_heads": model.num_kv_heads,
    "head_dim": model.head_dim,
    "rope_theta": model.rope_theta,
    "rms_norm_eps": model.norm_epsilon,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
  }


def huggingface_tensors(
  model: ModelConfig, params: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
  """The parameters by their names, matrices as [out, in]; all logits are the same up to rounding.

  The factor by which `embed` scales its rows goes into their embedding, so the logits need a matrix
  apart from it. Mixtral has no slots: a mixture gives the same logits where no choice is dropped
  (`capacity_factor` >= E / k).
  """
  d, tensors = model.model_dim, {"lm_head.weight": params["embedding"]}  # of a tied model
  for name, theirs in huggingface_names(model).items():
    value, count, last = params[name], len(theirs), name.rpartition("/")[2]
    if last in ("output", "down"):
      stack = value.reshape(count, -1, d).swapaxes(1, 2)
    elif last == "scale":
      stack = value.reshape(count, d)
    elif last in ("embedding", "head"):
      stack = value[None]
    else:
      stack = value.reshape(count, d, -1).swapaxes(1, 2)
    tensors |= zip(theirs, stack, strict=True)
  tensors["model.embed_tokens.weight"] = params["embedding"] * np.float32(d**0.25)
  return tensors
