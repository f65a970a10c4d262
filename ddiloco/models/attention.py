"""Causal attention by three paths that compute the same: the reference, a TPU and a GPU kernel.

Axes as in `models/layers.py`: B batch, T query positions, S key positions, H query heads, K kv
heads, G query heads per kv head, Q head dim.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_kernel,
  splash_attention_mask,
)
from jax.sharding import PartitionSpec

from ddiloco.models.execution import ATTENTION_OUTPUT, Execution

_LANES = 128  # of a TPU's registers: blocks of positions are multiples of it
_MOST_BLOCK = 512  # positions of a block; the default of 128 leaves a TPU's matrix unit idle


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
  kernel = functools.partial(_KERNELS[execution.attention], interpret=execution.interpret)
  if execution.layout is None:
    return kernel(query_BxHxTxQ, key_BxKxSxQ, value_BxKxSxQ)
  queries = execution.layout(("batch", "heads", None, None), query_BxHxTxQ.shape)
  keys = execution.layout(("batch", "kv_heads", None, None), key_BxKxSxQ.shape)
  if queries.spec != keys.spec:
    # The mesh cuts the query heads into more parts than there are kv heads: each gets its own copy.
    groups = query_BxHxTxQ.shape[1] // key_BxKxSxQ.shape[1]
    key_BxKxSxQ, value_BxKxSxQ = (jnp.repeat(x, groups, 1) for x in (key_BxKxSxQ, value_BxKxSxQ))
  # Mesh axes of one device count as cut: of those left out a shard_map sums gradients, for nothing.
  rows, *others = queries.spec
  rows = () if rows is None else (rows,) if isinstance(rows, str) else rows
  alone = [n for n, size in queries.mesh.shape.items() if size == 1 and n not in rows]
  cut = PartitionSpec((*rows, *alone), *others)
  # Nothing crosses devices inside, so there is no replication to check.
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
  # Scaling the queries, not the scores: T*Q products a head instead of T*T.
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
  """JAX's Pallas kernel for TPUs: no (T, T) array exists, and blocks in the future are skipped."""
  _, h, t, q = query_BxHxTxQ.shape
  padded, block = _blocks(t)
  # One kernel for all three gradients: fewer products, less memory and less to compile than two.
  sizes = splash_attention_kernel.BlockSizes(
    **dict.fromkeys(("block_q", "block_kv", "block_kv_compute"), block),
    **dict.fromkeys(("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute"), block),
    use_fused_bwd_kernel=True,
  )
  mask = splash_attention_mask.CausalMask((padded, padded))
  kernel = splash_attention_kernel.make_splash_mha_single_device(
    splash_attention_mask.MultiHeadMask([mask] * h),
    block_sizes=sizes,
    residual_checkpoint_name=ATTENTION_OUTPUT,
    interpret=interpret,
  )

  # Positions that pad the last block come after all others: no query sees them, none is read.
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
  interpret: bool = False,
) -> jax.Array:
  """cuDNN's kernel for GPUs, through JAX; interpreted it is XLA's form of the same call.

  It takes bf16 and a head dim that is a multiple of 8.
  """
  arrays = (x.swapaxes(1, 2) for x in (query_BxHxTxQ, key_BxKxSxQ, value_BxKxSxQ))
  mixed_BxTxHxQ = jax.nn.dot_product_attention(
    *arrays, is_causal=True, implementation="xla" if interpret else "cudnn"
  )
  return checkpoint_name(mixed_BxTxHxQ, ATTENTION_OUTPUT).swapaxes(1, 2)


_KERNELS = {"splash": splash_attention, "cudnn": fused_attention}
