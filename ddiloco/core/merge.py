"""Merges the learners' outer gradients of one fragment (delta = global - local).

Radial-Directional Averaging, "Decoupled DiLoCo", per piece, with phi(x) = x / |x| and phi(0) = 0:

    RDA = (sum_i w_i |d_i|) * phi(sum_i w_i phi(d_i))

It is a plain linear combination sum_m c_m d_m with

    c_m = (sum_i w_i |d_i|) / |sum_i w_i phi(d_i)| * w_m / |d_m|
    |sum_i w_i phi(d_i)|^2 = u' G u,   u_i = w_i / |d_i|,   G_ij = <d_i, d_j>

so everything that needs only norms and dot products (the Gram matrix G) is done when a push
arrives, and the round waits only for `commit`: one pass over the pushes that also takes the outer
step. Averaged pieces have c_m = w_m.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from ddiloco.config import OuterConfig
from ddiloco.core import outer as outer_optimizer
from ddiloco.core.fragments import Fragment

_CHUNK = 1 << 15  # values; what one chunk touches stays in the core's own cache between operations
_DOT_CHUNK = 1 << 13  # short enough that BLAS uses one thread, so bits do not depend on the cores
_DOT_TRUSTED = 1e-30  # below, f32 products may have underflowed; they are taken again in f64
_VANISHING = 1e-6  # of |sum w phi|^2 / (sum w)^2: below, the directions cancel to rounding noise
_NEGLIGIBLE = 1e-30  # of the longest norm: shorter counts as zero, or a coefficient could overflow


def token_weights(steps: Sequence[float], tokens: Sequence[float]) -> np.ndarray:
  """Weights [M] f64 of the learners: c_tokens * (c_tokens / c_steps), normalised to sum 1.

  Quantity times quality ("Decoupled DiLoCo"). `steps` and `tokens` [M] count since the learner last
  received the fragment. A learner without tokens or steps is absent, weight 0; if all are: all 0.

  >>> token_weights(steps=[4, 4, 2], tokens=[40, 40, 20]).tolist()  # the third made half the steps
  [0.4, 0.4, 0.2]
  """
  steps_M, tokens_M = np.asarray(steps, np.float64), np.asarray(tokens, np.float64)
  present = (steps_M > 0) & (tokens_M > 0)
  weights_M = np.where(present, tokens_M * tokens_M / np.where(present, steps_M, 1), 0.0)
  total = weights_M.sum()
  return weights_M / total if total else weights_M


def bounded_shares(weights: np.ndarray, step_tokens: Sequence[int]) -> np.ndarray:
  """Weights [M] of which none has more than half, or than its island earns if that is more.

  One learner says itself how many steps and tokens it has. Whatever it says, all others together
  weigh as much, unless its island makes larger steps: then its share is at most what one step of
  each would give it: `token_weights` of `step_tokens` [M], the tokens of a step on each island.

  >>> bounded_shares(np.array([0.98, 0.01, 0.01]), step_tokens=[10, 10, 10]).round(3).tolist()
  [0.5, 0.25, 0.25]
  """
  if len(weights) < 2:
    return weights
  most = int(weights.argmax())
  earned = token_weights([1] * len(weights), step_tokens)[most]
  share, rest = max(0.5, float(earned)), np.delete(weights, most).sum()
  if weights[most] <= share or not rest:
    return weights
  bounded = weights * ((1 - share) / rest)
  bounded[most] = share
  return bounded


def squared_norms(fragment: Fragment, delta: np.ndarray) -> np.ndarray:
  """|delta|^2 of each piece, f64 [pieces]; not finite exactly where a value is not."""
  return dots(fragment, delta, delta)


def dots(fragment: Fragment, a: np.ndarray, b: np.ndarray) -> np.ndarray:
  """<a, b> of each piece, f64 [pieces], of two flat f32 vectors [size]."""
  spans = [slice(p.offset, p.offset + p.size) for p in fragment.pieces]
  with np.errstate(all="ignore"):  # what is not finite is a result here, for the screening
    return np.array([_dot(a[span], b[span]) for span in spans])


def _dot(a: np.ndarray, b: np.ndarray) -> float:
  total = 0.0
  for start in range(0, a.size, _DOT_CHUNK):
    total += float(np.dot(a[start : start + _DOT_CHUNK], b[start : start + _DOT_CHUNK]))
  if _DOT_TRUSTED < abs(total) < math.inf:
    return total
  total = 0.0  # an over- or underflow in f32, or truly zero, NaN or infinite: f64 tells
  for start in range(0, a.size, _DOT_CHUNK):
    part = slice(start, start + _DOT_CHUNK)
    total += float(np.dot(a[part].astype(np.float64), b[part].astype(np.float64)))
  return total


def empty_gram(fragment: Fragment) -> np.ndarray:
  """The Gram matrices before any push: f64 [pieces, 0, 0]."""
  return np.zeros((len(fragment.pieces), 0, 0))


def products(fragment: Fragment, deltas: Sequence[np.ndarray], delta: np.ndarray) -> np.ndarray:
  """<d, delta> of each piece and each of the M `deltas`, f64 [pieces, M].

  0 in averaged pieces, which need no products, unless all are: then they only tell whose update
  points against the others'.
  """
  compared = compared_pieces(fragment)
  found = np.zeros((len(fragment.pieces), len(deltas)))
  with np.errstate(all="ignore"):
    for index in compared:
      piece = fragment.pieces[index]
      span = slice(piece.offset, piece.offset + piece.size)
      found[index] = [_dot(other[span], delta[span]) for other in deltas]
  return found


def compared_pieces(fragment: Fragment) -> list[int]:
  """Indices of the pieces of which directions are compared: those under RDA, else all."""
  directed = [index for index, piece in enumerate(fragment.pieces) if not piece.average]
  return directed or list(range(len(fragment.pieces)))


def extend_gram(gram: np.ndarray, row: np.ndarray, squares: np.ndarray) -> np.ndarray:
  """The Gram matrices with one more push, which comes last: f64 [pieces, M + 1, M + 1].

  Args:
    gram: f64 [pieces, M, M]; not changed.
    row: `products` of the new push with those of `gram`, [pieces, M].
    squares: its `squared_norms` [pieces].
  """
  count = row.shape[1]
  wider = np.zeros((len(squares), count + 1, count + 1))
  wider[:, :count, :count] = gram
  wider[:, count, :count] = wider[:, :count, count] = row
  wider[:, count, count] = squares
  return wider


def select_gram(gram: np.ndarray, order: Sequence[int]) -> np.ndarray:
  """The Gram matrices of the pushes `order` (indices into the old order), f64 [pieces, m, m]."""
  chosen = np.asarray(order, np.intp)
  return gram[:, chosen[:, None], chosen]


def coefficients(fragment: Fragment, gram: np.ndarray, weights: np.ndarray) -> np.ndarray:
  """c of the module's formula, f64 [M, pieces]; merged = sum_m c[m, piece] * delta_m.

  Where the weighted directions cancel (their sum's square is below 1e-6 of (sum w)^2, as for two
  opposite learners) the direction is rounding noise and c is 0. A piece 1e-30 times shorter than
  the longest of the learners counts as phi(0) = 0.

  Args:
    fragment: whose pieces, which know whether they are averaged.
    gram: f64 [pieces, M, M] of finite numbers, in the order of the learners.
    weights: f64 [M], as from `token_weights`.
  """
  norms_PxM = np.sqrt(np.maximum(np.diagonal(gram, axis1=1, axis2=2), 0.0))
  longest_P = norms_PxM.max(axis=1, initial=0.0)
  moving_PxM = (norms_PxM > _NEGLIGIBLE * longest_P[:, None]) & (weights > 0)
  units_PxM = np.where(moving_PxM, weights / np.where(moving_PxM, norms_PxM, 1.0), 0.0)
  radius_P = norms_PxM @ weights
  squared_P = np.einsum("pi,pij,pj->p", units_PxM, gram, units_PxM)
  directed_P = squared_P > _VANISHING * (moving_PxM @ weights) ** 2
  stretch_P = np.where(directed_P, radius_P / np.sqrt(np.where(directed_P, squared_P, 1.0)), 0.0)
  average_P = np.array([piece.average for piece in fragment.pieces])
  return np.where(average_P, weights[:, None], (stretch_P[:, None] * units_PxM).T)


def merged(
  fragment: Fragment, deltas: Sequence[np.ndarray], coefficients: np.ndarray
) -> np.ndarray:
  """sum_m coefficients[m, piece] * deltas[m], a new f32 vector [size]: `commit` without a step."""
  out = np.empty(fragment.size, np.float32)
  scratch = np.empty(min(_CHUNK, fragment.size), np.float32)
  terms = _terms(deltas, coefficients)
  for _, _, parts in _chunks(fragment):
    _merge_chunk(out, scratch, parts, terms)
  return out


def commit(
  fragment: Fragment,
  value: np.ndarray,
  momentum: np.ndarray | None,
  deltas: Sequence[np.ndarray],
  coefficients: np.ndarray,
  outer: OuterConfig,
) -> np.ndarray:
  """Merges and takes the outer step in one pass; bitwise equal to `outer.update` of `merged`.

  Sums run in the order of `deltas`, so sort them by learner for results that do not depend on who
  came first. A delta with coefficient 0 is not read. Extra memory: the new value and one chunk of
  128 KiB.

  Args:
    fragment: whose pieces.
    value: [size] f32, the global value; not changed.
    momentum: [size] f32 from `outer.init`, changed in place; None without momentum.
    deltas: M vectors [size] f32; not changed.
    coefficients: f64 [M, pieces], from `coefficients`; applied in f32.
    outer: learning rate, momentum, nesterov.

  Returns:
    The new global value [size] f32, a fresh buffer.
  """
  new = np.empty(fragment.size, np.float32)
  scratch = np.empty(min(_CHUNK, fragment.size), np.float32)
  terms = _terms(deltas, coefficients)
  for start, stop, parts in _chunks(fragment):
    _merge_chunk(new, scratch, parts, terms)
    here, delta = slice(start, stop), new[start:stop]
    speed = None if momentum is None else momentum[here]
    outer_optimizer.update(value[here], speed, delta, outer, delta, scratch[: stop - start])
  return new


def _terms(deltas: Sequence[np.ndarray], coefficients: np.ndarray) -> list[list]:
  """For each piece the (delta, coefficient in f32) pairs that count, in the order of `deltas`."""
  columns = coefficients.astype(np.float32).T.tolist()
  return [[(d, c) for d, c in zip(deltas, column) if c] for column in columns]


def _chunks(fragment: Fragment) -> Iterator[tuple[int, int, list[tuple[int, int, int]]]]:
  """Yields chunks of the vector: start, stop, [(start, stop, index) of the pieces inside]."""
  start, parts = 0, []
  for index, piece in enumerate(fragment.pieces):
    at, end = piece.offset, piece.offset + piece.size
    while at < end:
      stop = min(end, start + _CHUNK)
      parts.append((at, stop, index))
      at = stop
      if at == start + _CHUNK:
        yield start, at, parts
        start, parts = at, []
  if parts:
    yield start, fragment.size, parts


def _merge_chunk(
  out: np.ndarray, scratch: np.ndarray, parts: list[tuple[int, int, int]], terms: list[list]
) -> None:
  for start, stop, index in parts:
    total, product = out[start:stop], scratch[: stop - start]
    if not terms[index]:
      total[...] = 0
      continue
    delta, factor = terms[index][0]
    np.multiply(delta[start:stop], factor, out=total)
    for delta, factor in terms[index][1:]:
      np.multiply(delta[start:stop], factor, out=product)
      np.add(total, product, out=total)
