"""The parts of a transformer: norm, rotary embedding, attention, MLPs, an image's patches.

Axes in names: B batch, T query positions, S key positions, D model dim, H query heads, K kv heads,
G query heads per kv head (H = K * G), Q head dim, F mlp width. Of a mixture of experts: E experts,
k choices of each token, N = T * k choices of a sequence in token order, C slots of an expert,
M = E * C slots. Of an image: I pixels a side, C channels, P patches, N values in a patch.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from ddiloco.config import ModelConfig
from ddiloco.models.model import ATTENTION_OUTPUT, Axes, Execution

Keys = Callable[[], jax.Array]  # a new key a call

# Standard deviation of a unit normal that is cut off at two standard deviations.
_TRUNCATED_STDDEV = 0.87962566103423978
MOST_DRAWN = 1 << 27  # values that are drawn at once: with their random bits they take 2 GB
_LANES = 128  # of a TPU's registers: blocks of positions are multiples of it
_MOST_BLOCK = 512  # positions of a block; the default of 128 leaves a TPU's matrix unit idle


def parameter(value: jax.Array, axes: Axes) -> nnx.Param:
  """A parameter that carries its logical axis names as NNX sharding metadata.

  Eager sharding is off: the names are logical, and creating a variable must not need a mesh.
  Code that has a mesh maps them to its axes (`training.devices.param_sharding`).
  """
  return nnx.Param(value, out_sharding=axes, eager_sharding=False)


def used(weight: nnx.Param, execution: Execution, dtype: str | jnp.dtype) -> jax.Array:
  """The weight as a layer multiplies by it: rounded first, then gathered along "embed".

  In a stack of layers, `weight` has the axis names of the stack and the value of one layer.
  """
  value = weight[...].astype(dtype)
  return execution.gathered(value, weight.get_metadata("out_sharding")[-value.ndim :])


def key_stream(key: jax.Array) -> Keys:
  """A new key a call: the same keys that calls of `nnx.Rngs(key)` give.

  The count is a Python integer. Under a trace each call of `nnx.Rngs` prints the program so far
  (flax 0.12), which took up to half of the time of tracing a model.
  """
  counts = itertools.count()
  return lambda: jax.random.fold_in(key, jnp.uint32(next(counts)))


def drawn(key: jax.Array, shape: tuple[int, ...], stddev: float, axes: Axes) -> nnx.Param:
  """A `parameter` of f32 normal values cut off at two standard deviations; `stddev`: after that.

  On the CPU random bits take three times the memory of the values. So layers are drawn one by one,
  also where they are mapped, and a larger array than any layer has in parts of its rows. All are
  drawn as vectors, whose values are the same: so arrays of one size share one program.
  """
  rows, size = shape[0], math.prod(shape)
  parts = next(n for n in range(1, rows + 1) if rows % n == 0 and size <= n * MOST_DRAWN)

  def draw(key: jax.Array) -> jax.Array:
    unit = jax.random.truncated_normal(key, -2.0, 2.0, (size // parts,), jnp.float32)
    return unit * (stddev / _TRUNCATED_STDDEV)

  def draw_all(key: jax.Array) -> jax.Array:
    return draw(key) if parts == 1 else jax.lax.map(draw, jax.random.split(key, parts))

  return parameter(jax.custom_batching.sequential_vmap(draw_all)(key).reshape(shape), axes)


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


def gated(
  mlp: nnx.Module, x: jax.Array, execution: Execution, axes: Axes, inward: str, outward: str
) -> jax.Array:
  """(silu(x gate) * (x up)) down; `axes` and the two products say what else the arrays have."""
  gate = jnp.einsum(inward, x, used(mlp.gate, execution, x.dtype))
  up = jnp.einsum(inward, x, used(mlp.up, execution, x.dtype))
  hidden = execution(jax.nn.silu(gate) * up, axes)
  return jnp.einsum(outward, hidden, used(mlp.down, execution, x.dtype))


class GatedMlp(nnx.Module):
  """(silu(x gate) * (x up)) down, SwiGLU (arXiv 2002.05202)."""

  def __init__(self, model: ModelConfig, keys: Keys):
    d, f = model.model_dim, model.mlp_dim
    inward = 1 / math.sqrt(d)
    self.gate = drawn(keys(), (d, f), inward, ("embed", "mlp"))
    self.up = drawn(keys(), (d, f), inward, ("embed", "mlp"))
    self.down = drawn(keys(), (f, d), residual_stddev(f, model.num_layers), ("mlp", "embed"))

  def __call__(self, x_BxTxD: jax.Array, execution: Execution) -> jax.Array:
    axes = ("batch", "time", "mlp")
    return gated(self, x_BxTxD, execution, axes, "BTD,DF->BTF", "BTF,FD->BTD")


# --- Causal attention, by three paths that compute the same: the reference, a TPU and a GPU kernel


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

  def __init__(self, model: ModelConfig, keys: Keys):
    d, h, k, q = model.model_dim, model.num_heads, model.num_kv_heads, model.head_dim
    inward = 1 / math.sqrt(d)
    kv_axes = ("embed", "kv_heads", "head_dim")
    self.query = drawn(keys(), (d, h, q), inward, ("embed", "heads", "head_dim"))
    self.key = drawn(keys(), (d, k, q), inward, kv_axes)
    self.value = drawn(keys(), (d, k, q), inward, kv_axes)
    self.output = drawn(
      keys(), (h, q, d), residual_stddev(h * q, model.num_layers), ("heads", "head_dim", "embed")
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


def attend(
  query_BxHxTxQ: jax.Array,
  key_BxKxSxQ: jax.Array,
  value_BxKxSxQ: jax.Array,
  execution: Execution,
) -> jax.Array:
  """Scaled dot-product attention of every position to itself and earlier ones: (B, H, T, Q).

  Query head h reads kv head h // G. The path is `execution.attention`; kernels see the rows and
  heads of one device, whatever the mesh.
  """
  if execution.attention == "einsum":
    mixed = einsum_attention(query_BxHxTxQ, key_BxKxSxQ, value_BxKxSxQ)
    return checkpoint_name(mixed, ATTENTION_OUTPUT) if execution.remat != "none" else mixed
  kernel = _KERNELS[execution.attention]
  if execution.layout is None:
    return kernel(query_BxHxTxQ, key_BxKxSxQ, value_BxKxSxQ)
  queries = execution.layout(("batch", "heads", None, None), query_BxHxTxQ.shape)
  keys = execution.layout(("batch", "kv_heads", None, None), key_BxKxSxQ.shape)
  if queries.spec != keys.spec:
    # The mesh cuts the query heads into more parts than there are kv heads: each gets its own copy.
    groups = query_BxHxTxQ.shape[1] // key_BxKxSxQ.shape[1]
    key_BxKxSxQ, value_BxKxSxQ = (jnp.repeat(x, groups, 1) for x in (key_BxKxSxQ, value_BxKxSxQ))
  # Mesh axes of size 1 are named too: over an axis without a name, shard_map sums the gradients.
  rows, *others = queries.spec
  rows = () if rows is None else (rows,) if isinstance(rows, str) else rows
  alone = [n for n, size in queries.mesh.shape.items() if size == 1 and n not in rows]
  cut = PartitionSpec((*rows, *alone), *others)
  # No collective runs inside, so there is no replication to check.
  local = jax.shard_map(
    kernel, mesh=queries.mesh, in_specs=(cut, cut, cut), out_specs=cut, check_vma=False
  )
  return local(query_BxHxTxQ, key_BxKxSxQ, value_BxKxSxQ)


def einsum_attention(
  query_BxHxTxQ: jax.Array, key_BxKxSxQ: jax.Array, value_BxKxSxQ: jax.Array
) -> jax.Array:
  """The reference: all scores at once. Scores and softmax are f32."""
  b, h, t, q = query_BxHxTxQ.shape
  k = key_BxKxSxQ.shape[1]
  # The queries are scaled, not the scores: T*Q products a head instead of T*T.
  scaled_BxKxGxTxQ = (query_BxHxTxQ * (q**-0.5)).reshape(b, k, h // k, t, q)
  scores_BxKxGxTxS = jnp.einsum(
    "BKGTQ,BKSQ->BKGTS", scaled_BxKxGxTxQ, key_BxKxSxQ, preferred_element_type=jnp.float32
  )
  visible_TxS = jnp.tril(jnp.ones((t, t), bool))[None, None, None]
  scores_BxKxGxTxS = jnp.where(visible_TxS, scores_BxKxGxTxS, jnp.finfo(jnp.float32).min)
  share_BxKxGxTxS = jax.nn.softmax(scores_BxKxGxTxS, axis=-1).astype(query_BxHxTxQ.dtype)
  mixed_BxKxGxTxQ = jnp.einsum("BKGTS,BKSQ->BKGTQ", share_BxKxGxTxS, value_BxKxSxQ)
  return mixed_BxKxGxTxQ.reshape(b, h, t, q)


def splash_attention(
  query_BxHxTxQ: jax.Array,
  key_BxKxSxQ: jax.Array,
  value_BxKxSxQ: jax.Array,
  interpret: bool = False,
) -> jax.Array:
  """JAX's Pallas kernel for TPUs: no (T, T) array exists, and blocks in the future are skipped.

  Tests `interpret` it, on a platform that cannot run it.
  """
  from jax.experimental.pallas.ops.tpu import splash_attention as splash  # slow, for TPUs alone

  _, h, t, q = query_BxHxTxQ.shape
  padded, block = _blocks(t)
  # One kernel for all three gradients: fewer products, less memory and less to compile than two do.
  sizes = splash.BlockSizes(
    **dict.fromkeys(("block_q", "block_kv", "block_kv_compute"), block),
    **dict.fromkeys(("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute"), block),
    use_fused_bwd_kernel=True,
  )
  mask = splash.CausalMask((padded, padded))
  kernel = splash.make_splash_mha_single_device(
    splash.MultiHeadMask([mask] * h),
    block_sizes=sizes,
    residual_checkpoint_name=ATTENTION_OUTPUT,
    interpret=interpret,
  )

  # Positions that pad the last block come after all others: no query sees them, and their outputs
  # are cut off.
  def fill(x: jax.Array) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, 0), (0, padded - t), (0, 0))) if padded > t else x

  scaled = query_BxHxTxQ * jnp.asarray(q**-0.5, query_BxHxTxQ.dtype)
  return jax.vmap(kernel)(fill(scaled), fill(key_BxKxSxQ), fill(value_BxKxSxQ))[:, :, :t]


def _blocks(positions: int) -> tuple[int, int]:
  """(Positions filled up to whole blocks, positions of a block)."""
  lanes = math.ceil(positions / _LANES)
  most = _MOST_BLOCK // _LANES
  # As few blocks as there must be, all of them equal.
  count = math.ceil(lanes / most)
  block = math.ceil(lanes / count)
  return count * block * _LANES, block * _LANES


def fused_attention(
  query_BxHxTxQ: jax.Array,
  key_BxKxSxQ: jax.Array,
  value_BxKxSxQ: jax.Array,
  implementation: str = "cudnn",
) -> jax.Array:
  """cuDNN's kernel for GPUs, through JAX; it takes bf16 and a head dim that is a multiple of 8.

  Tests take XLA's `implementation` of the same call.
  """
  arrays = (x.swapaxes(1, 2) for x in (query_BxHxTxQ, key_BxKxSxQ, value_BxKxSxQ))
  mixed_BxTxHxQ = jax.nn.dot_product_attention(
    *arrays, is_causal=True, implementation=implementation
  )
  return checkpoint_name(mixed_BxTxHxQ, ATTENTION_OUTPUT).swapaxes(1, 2)


_KERNELS = {"splash": splash_attention, "cudnn": fused_attention}


# --- Mixture of experts: a top-k router, every expert a gated MLP, balance within one learner
#
# Why slots. The obvious dropless way, `jax.lax.ragged_dot` over tokens sorted by expert, is cheap
# only where XLA has a kernel for it. Without a kernel, jax 0.10 makes it a masked dense product
# that pays for all E experts. Sorting a whole batch also moves tokens across the data axis of the
# mesh. A one-hot dispatch einsum (GShard) partitions well, but costs about T/F of the experts' own
# FLOPs. So each expert gets C slots *per sequence*: choices take slots in token order and are moved
# by plain gathers, and the experts are one batched matmul over (B, E, C). Shapes are static, the
# batch axis is never mixed, and FLOPs are capacity_factor * k experts a token whatever E is.
# Earlier tokens take slots first, so no token is displaced by a later one: the model stays causal.
# Choices beyond C are dropped: their share of the layer is zero, and the token passes by the
# residual alone. With capacity_factor >= E / k an expert has a slot for every token, so no choice
# is dropped.


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

  Slot e * C + i is the i-th slot of expert e. A dropped choice has slot M, an empty slot has
  choice N: both are out of range and read as zeros.
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

  `target` is the inverse of `source`: where each of the N copies went. With `target` the gradient
  is a gather too; without it autodiff would scatter-add rows, which is slow on every backend.
  """
  del target_BxN
  return _take_rows(x_BxRxD, source_BxM // copies)


def _move_rows_backward(copies, target_BxN, grad_BxMxD):
  grad_BxNxD = _take_rows(grad_BxMxD, target_BxN)
  b, n, d = grad_BxNxD.shape
  return jnp.sum(grad_BxNxD.reshape(b, n // copies, copies, d), axis=2), None, None


move_rows.defvjp(
  lambda copies, x, source, target: (move_rows(copies, x, source, target), target),
  _move_rows_backward,
)


class MixtureOfExperts(nnx.Module):
  """Returns (the gated sum of each token's experts (B, T, D), load-balance loss, a scalar)."""

  def __init__(self, model: ModelConfig, keys: Keys):
    d, e, f = model.model_dim, model.num_experts, model.mlp_dim
    self.model = model
    inward = 1 / math.sqrt(d)
    expert_axes = ("experts", "embed", "mlp")
    # The router is tiny: its expert axis has no name, so that no rule splits it.
    self.router = drawn(keys(), (d, e), inward, ("embed", None))
    self.gate = drawn(keys(), (e, d, f), inward, expert_axes)
    self.up = drawn(keys(), (e, d, f), inward, expert_axes)
    self.down = drawn(
      keys(), (e, f, d), residual_stddev(f, model.num_layers), ("experts", "mlp", "embed")
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

    slots_BxExCxD = move_rows(k, x_BxTxD, choice_BxM, slot_BxN).reshape(b, e, c, d)
    slots_BxExCxD = execution(slots_BxExCxD, ("batch", "experts", None, None))
    axes = ("batch", "experts", None, "mlp")
    out_BxExCxD = gated(self, slots_BxExCxD, execution, axes, "BECD,EDF->BECF", "BECF,EFD->BECD")
    out_BxExCxD = execution(out_BxExCxD, ("batch", "experts", None, None))
    out_BxNxD = move_rows(1, out_BxExCxD.reshape(b, e * c, d), slot_BxN, choice_BxM)
    out_BxTxkxD = out_BxNxD.reshape(b, t, k, d)
    mixed_BxTxD = jnp.einsum("BTkD,BTk->BTD", out_BxTxkxD, gate_BxTxk.astype(x_BxTxD.dtype))
    return mixed_BxTxD, load_balance_loss(probability_BxTxE, expert_BxTxk)


# --- An image as the first tokens of a row: patches through one matrix, before the text
#
# Every row has T positions. In a row with an image the first P positions are its patches, row by
# row, and the text has the other T - P; in a row of text alone the text has all T. A first token
# below 0 says that the row has an image (`training.captions` makes such batches). Attention is
# causal over patches and text, so the fused kernels need no change, and every text token sees the
# whole image.

NO_TEXT = -1  # the token at a position with a patch, and at positions after the end of the text


class Patches(nnx.Module):
  """patch @ projection + the vector of the patch's place.

  Rotary angles give only the distance between a token and a patch, in one dimension. A learned
  vector for each place says where in the image the patch is.
  """

  def __init__(self, model: ModelConfig, rngs: nnx.Rngs):
    self.patch_size = model.patch_size
    n, d = model.patch_size**2 * model.image_channels, model.model_dim
    # The standard deviation of a text's embedded rows (`transformer.embed`).
    length = d**-0.25
    self.projection = drawn(rngs(), (n, d), length / math.sqrt(n), (None, "embed"))
    self.places = drawn(rngs(), (model.num_patches, d), length, (None, "embed"))

  def __call__(self, image_BxIxIxC: jax.Array, execution: Execution, dtype: str) -> jax.Array:
    """(B, P, D) of images whose pixels are 0 to 255, uint8."""
    patch_BxPxN = cut_patches(image_BxIxIxC, self.patch_size).astype(jnp.float32) / 127.5 - 1.0
    weight_NxD = used(self.projection, execution, dtype)
    x_BxPxD = jnp.einsum("BPN,ND->BPD", patch_BxPxN.astype(dtype), weight_NxD)
    return x_BxPxD + used(self.places, execution, dtype)[None]


def cut_patches(image_BxIxIxC: jax.Array, patch_size: int) -> jax.Array:
  """The patches, row by row, (B, P, N): a reshape."""
  b, i, _, c = image_BxIxIxC.shape
  side = i // patch_size
  split = image_BxIxIxC.reshape(b, side, patch_size, side, patch_size, c)
  return split.swapaxes(2, 3).reshape(b, side * side, patch_size * patch_size * c)


def has_image(tokens_BxT: jax.Array) -> jax.Array:
  """(B, 1) bool: whether the row begins with an image."""
  return tokens_BxT[:, :1] < 0


def stand_before(x_BxTxD: jax.Array, patches_BxPxD: jax.Array, tokens_BxT: jax.Array) -> jax.Array:
  """`x`, with the patches in the first positions of the rows that have an image."""
  p = patches_BxPxD.shape[1]
  first_BxPxD = jnp.where(has_image(tokens_BxT)[..., None], patches_BxPxD, x_BxTxD[:, :p])
  return jnp.concatenate([first_BxPxD, x_BxTxD[:, p:]], axis=1)
