"""Cross entropy: of whole logits, and of a large vocabulary without them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from ddiloco.models.execution import Execution


def cross_entropy(
  logits: jax.Array, targets: jax.Array, counted: jax.Array | None = None
) -> jax.Array:
  """Mean of -log softmax(logits)[target], in nats, computed in f32.

  Args:
    logits: (..., V).
    targets: (...), integers.
    counted: (...), where the mean is taken; None: everywhere. With none at all it is NaN.
  """
  logits = logits.astype(jnp.float32)
  log_norm = jax.nn.logsumexp(logits, axis=-1)
  # A target outside the vocabulary must show up as NaN, not as some other token's loss.
  chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1, mode="fill")
  return _mean(log_norm - chosen[..., 0], counted)


@jax.custom_vjp
def project(x_BxTxD: jax.Array, table_NxD: jax.Array) -> jax.Array:
  """Logits x @ table.T: (B, T, N), f32, of two arrays in the compute dtype.

  Their gradient is rounded to that dtype too. Left wide, it would make both products of the
  backward pass f32 products: on an H100 an eighth of a 100M model's step.
  """
  return jnp.einsum("BTD,ND->BTN", x_BxTxD, table_NxD, preferred_element_type=jnp.float32)


def _project(x_BxTxD: jax.Array, table_NxD: jax.Array):
  return project(x_BxTxD, table_NxD), (x_BxTxD, table_NxD)


def _project_back(saved: tuple[jax.Array, jax.Array], gradient_BxTxN: jax.Array):
  x_BxTxD, table_NxD = saved
  gradient_BxTxN = gradient_BxTxN.astype(x_BxTxD.dtype)
  product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  of_x = product("BTN,ND->BTD", gradient_BxTxN, table_NxD)
  of_table = product("BTN,BTD->ND", gradient_BxTxN, x_BxTxD)
  return of_x.astype(x_BxTxD.dtype), of_table.astype(table_NxD.dtype)


project.defvjp(_project, _project_back)


def _mean(loss: jax.Array, counted: jax.Array | None) -> jax.Array:
  if counted is None:
    return jnp.mean(loss)
  return jnp.sum(jnp.where(counted, loss, 0.0)) / jnp.sum(counted)


def cross_entropy_in_chunks(
  x_BxTxD: jax.Array,
  table_VxD: jax.Array,
  targets_BxT: jax.Array,
  execution: Execution,
  counted_BxT: jax.Array | None = None,
) -> jax.Array:
  """`cross_entropy` of the logits x @ table.T, of which only a part exists at any time.

  Chunk i of C has the rows of the table that are i modulo C, so that a device with some rows has as
  many of each chunk. Of a chunk's logits a running softmax keeps three numbers a token; the
  backward pass computes them again. Each chunk of the table is gathered by itself.

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
    # What is subtracted before `exp` changes no result, so it needs no gradient.
    top_BxT = jax.lax.stop_gradient(jnp.maximum(highest_BxT, jnp.max(logits_BxTxN, axis=-1)))
    part_BxT = jnp.sum(jnp.exp(logits_BxTxN - top_BxT[..., None]), axis=-1)
    total_BxT = total_BxT * jnp.exp(highest_BxT - top_BxT) + part_BxT
    here_BxTxN = (row_BxT[..., None] == row_N[None, None]) & (chunk_BxT == index)[..., None]
    chosen_BxT = chosen_BxT + jnp.sum(jnp.where(here_BxTxN, logits_BxTxN, 0.0), axis=-1)
    return (top_BxT, total_BxT, chosen_BxT), None

  zero_BxT = jnp.zeros(targets_BxT.shape, jnp.float32)
  carry = (jnp.full_like(zero_BxT, -jnp.inf), zero_BxT, zero_BxT)
  indices_C = jnp.arange(chunks, dtype=targets_BxT.dtype)
  # Nothing can be merged across a loop's iterations, so the guard against it only costs.
  body = jax.checkpoint(add, prevent_cse=False)
  (highest_BxT, total_BxT, chosen_BxT), _ = jax.lax.scan(body, carry, (table_CxNxD, indices_C))
  # As in `cross_entropy`, a target outside the vocabulary must show up.
  known_BxT = (targets_BxT >= 0) & (targets_BxT < v)
  loss_BxT = highest_BxT + jnp.log(total_BxT) - chosen_BxT
  return _mean(jnp.where(known_BxT, loss_BxT, jnp.nan), counted_BxT)
