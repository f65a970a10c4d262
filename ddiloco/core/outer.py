"""The outer optimization of one fragment: the merge of the learners' deltas, then one SGD step.

delta = base - local. `token_weights` and `bounded_shares` give each learner's weight w_i. The merge
is Radial-Directional Averaging ("Decoupled DiLoCo"), per piece, with phi(x) = x / |x| and
phi(0) = 0:

    RDA = (sum_i w_i |d_i|) * phi(sum_i w_i phi(d_i))

A shard computes |d_i| when a push arrives. A commit then needs two passes over the values, whatever
the number of learners (`core/passes.py`):

    s      = sum_i u_i d_i,    u_i = w_i / |d_i|             and |s| on the way
    merged = c s,              c = (sum_i w_i |d_i|) / |s|

Averaged pieces have u_i = w_i and c = 1. The step, with Nesterov or plain momentum, in f32:

    m     <- momentum * m + merged
    step  =  learning_rate * (merged + momentum * m)     nesterov
          or learning_rate * m                           plain momentum
    value <- value - step

DiLoCo (2311.08105) uses Nesterov 0.7/0.9, Streaming DiLoCo (2501.18512) 0.4/0.9. Without momentum
the step is learning_rate * merged and the optimizer has no state.

Over the last `decay_share` of the run's tokens the learning rate falls in a straight line to
`final_share` of itself (`at`). With momentum 0.8 what pushes have in common, round after round,
moves the value five times as far as without. The rest of a push is noise in the newest value; only
smaller steps remove it.

The momentum that is kept is computed from the published step, by the same formula solved for m:

    m = (published_step / learning_rate + momentum * m) / (1 + momentum)     nesterov
     or published_step / learning_rate                                       plain momentum

So a role that receives the learners' updates can compute the momentum too, bit by bit: a buddy
shard needs no copy of it. A lossy codec's rounding error of one step is in the momentum. The next
step removes it, since the next update makes up for the error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ddiloco.config import OuterConfig

if TYPE_CHECKING:
  from ddiloco.core.fragments import Fragment

_VANISHING = 1e-6  # of |sum w phi|^2 / (sum w)^2: below, the directions cancel to rounding noise
_NEGLIGIBLE = 1e-30  # of the longest norm: shorter ones count as zero, or u could overflow


def token_weights(steps: Sequence[float], tokens: Sequence[float]) -> np.ndarray:
  """Weights [M] f64 of the learners: c_tokens * (c_tokens / c_steps), normalised to sum 1.

  Quantity times quality ("Decoupled DiLoCo"). `steps` and `tokens` [M] are those in each push. A
  learner without tokens or steps has weight 0, even if all weights are 0.

  >>> token_weights(steps=[4, 4, 2], tokens=[40, 40, 20]).tolist()  # the third made half the steps
  [0.4, 0.4, 0.2]
  """
  steps_M, tokens_M = np.asarray(steps, np.float64), np.asarray(tokens, np.float64)
  weights_M = tokens_M * tokens_M / np.where(steps_M > 0, steps_M, np.inf)
  total = weights_M.sum()
  return weights_M / total if total else weights_M


def bounded_shares(weights: np.ndarray, step_tokens: Sequence[int]) -> np.ndarray:
  """Weights [M], each at most one half, or the share that the learner's island earns if larger.

  A learner itself reports how many steps and tokens it has. Whatever it reports, all others
  together weigh at least as much, unless its island makes larger steps. Then its share is at most
  the one it would have if each island made one step: `token_weights` of `step_tokens` [M], the
  tokens of a step on each island.

  >>> bounded_shares(np.array([0.98, 0.01, 0.01]), step_tokens=[10, 10, 10]).round(3).tolist()
  [0.5, 0.25, 0.25]
  """
  most = int(np.argmax(weights))
  earned = token_weights([1] * len(weights), step_tokens)[most]
  share, rest = max(0.5, earned), np.delete(weights, most).sum()
  if weights[most] <= share or not rest:
    return weights
  bounded = weights * ((1 - share) / rest)
  bounded[most] = share
  return bounded


class Coefficients:
  """The coefficients u and c of the module's formula, from norms and weights of M pushes.

  Args:
    fragment: its pieces say whether they are averaged.
    squares: f64 [M, pieces], |d|^2, finite.
    weights: f64 [M], as from `token_weights`.

  Attributes:
    units: f32 [M, pieces], u of the module's formula times the longest |d| of the piece, so that
      s is about as long as that d. 0 for weight 0, and for a d that is 1e-30 times shorter than the
      longest: its phi counts as phi(0) = 0.
  """

  def __init__(self, fragment: Fragment, squares: np.ndarray, weights: np.ndarray):
    self._average = np.array([piece.average for piece in fragment.pieces])
    norms = np.sqrt(squares)
    longest = norms.max(axis=0, initial=0.0)
    moving = norms > _NEGLIGIBLE * longest
    units = np.where(moving, weights[:, None] * (longest / np.where(moving, norms, 1.0)), 0.0)
    self._alone = np.where(moving.sum(axis=0) == 1, (units * norms).sum(axis=0), -1.0)
    self._radius = weights @ norms
    self._least = _VANISHING * (weights @ moving * longest) ** 2
    self.units = np.where(self._average, weights[:, None], units).astype(np.float32)

  def stretch(self, squares: np.ndarray) -> np.ndarray:
    """c for every piece, f32 [pieces]; `squares` f64 [pieces] are |s|^2.

    Where the weighted directions cancel (|s|^2 is below 1e-6 of (sum w)^2, as for two opposite
    learners) the direction is rounding noise and c is 0. Where only one learner has moved a piece c
    is exactly 1: |s| is known without a rounding error.
    """
    long = np.where(self._alone >= 0, self._alone, np.sqrt(squares))
    directed = long**2 > self._least
    stretch = np.where(directed, self._radius / np.where(directed, long, 1.0), 0.0)
    return np.where(self._average, 1.0, stretch).astype(np.float32)


# --- The step


def init(size: int, config: OuterConfig) -> np.ndarray | None:
  """The first momentum of a fragment of `size` values: zeros [size] f32; None: it has none."""
  return np.zeros(size, np.float32) if config.momentum else None


def at(config: OuterConfig, progress: float) -> OuterConfig:
  """`config` with the learning rate of the step that brings a fragment to this share of the tokens,
  from which it falls no further.

  >>> config = OuterConfig(learning_rate=0.4, decay_share=0.5, final_share=0.5)
  >>> [round(at(config, progress).learning_rate, 3) for progress in (0, 0.5, 0.75, 1, 1.1)]
  [0.4, 0.4, 0.3, 0.2, 0.2]
  """
  left = max(0.0, 1 - progress)
  if left >= config.decay_share:
    return config
  share = config.final_share + (1 - config.final_share) * left / config.decay_share
  return dataclasses.replace(config, learning_rate=config.learning_rate * share, final_share=1.0)


def update(
  value: np.ndarray,
  momentum: np.ndarray | None,
  delta: np.ndarray,
  config: OuterConfig,
  out: np.ndarray | None = None,
  scratch: np.ndarray | None = None,
) -> np.ndarray:
  """One outer step; every operation is elementwise, so parts of a vector may be updated one by one.

  Args:
    value: [size] f32, the global value; not changed.
    momentum: [size] f32, as of the step before; not changed (see `followed`). None: no momentum.
    delta: [size] f32, the merged outer gradient; not changed unless it is also `out`.
    config: learning rate, momentum, nesterov.
    out: [size] f32 for the result; may be `delta`. None: a new buffer.
    scratch: [size] f32 that holds the step. None: a new buffer.

  Returns:
    The new value [size] f32, in `out`.

  >>> config = OuterConfig(learning_rate=0.5, momentum=0.0)
  >>> update(np.float32([1, 2]), init(2, config), np.float32([2, -2]), config).tolist()
  [0.0, 3.0]
  """
  if momentum is None:
    step = np.multiply(delta, config.learning_rate, out=scratch)
    return np.subtract(value, step, out=out)
  step = np.multiply(momentum, config.momentum, out=scratch)
  np.add(step, delta, out=step)
  if config.nesterov:
    np.multiply(step, config.momentum, out=step)
    np.add(step, delta, out=step)
  np.multiply(step, config.learning_rate, out=step)
  return np.subtract(value, step, out=out)


def followed(
  momentum: np.ndarray | None,
  before: np.ndarray,
  after: np.ndarray,
  config: OuterConfig,
  out: np.ndarray | None = None,
  scratch: np.ndarray | None = None,
) -> np.ndarray | None:
  """The momentum after a step that learners saw as `before` -> `after`; None without momentum.

  Elementwise, like `update`.

  Args:
    momentum: [size] f32, as of the step before; not changed.
    before: [size] f32, the published value that the step began from.
    after: [size] f32, the published value that it led to.
    config: learning rate, momentum, nesterov.
    out: [size] f32 for the result. None: a new buffer.
    scratch: [size] f32, written over. None: a new buffer.
  """
  if momentum is None:
    return None
  old, new = factors(config)
  step = np.subtract(before, after, out=scratch)
  np.multiply(step, new, out=step)
  kept = np.multiply(momentum, old, out=out)
  return np.add(kept, step, out=kept)


def factors(config: OuterConfig) -> tuple[float, float]:
  """The factors of the old momentum and of the published step in the new momentum.

  >>> factors(OuterConfig(learning_rate=0.5, momentum=0.0))
  (0.0, 2.0)
  """
  if not config.nesterov:
    return 0.0, 1 / config.learning_rate
  whole = 1 + config.momentum
  return config.momentum / whole, 1 / (config.learning_rate * whole)
