"""The outer optimizer: SGD on the merged outer gradient, with Nesterov or plain momentum, in f32.

    delta = global - local, merged over the learners
    m     <- momentum * m + delta
    step  =  learning_rate * (delta + momentum * m)     nesterov
          or learning_rate * m                          plain momentum
    value <- value - step

DiLoCo (2311.08105) uses Nesterov 0.7/0.9, Streaming DiLoCo (2501.18512) 0.4/0.9. Without momentum
the step is learning_rate * delta and no state exists at all.

Over the last `decay_share` of the run's tokens the learning rate falls in a straight line to
`final_share` of itself (`at`). With momentum 0.8 steps go five times as far as pushes say that
point one way. The others are noise in the newest value, which only smaller steps take out.

The momentum that is kept is the one that the published step tells, the same formula solved for m:

    m = (published_step / learning_rate + momentum * m) / (1 + momentum)     nesterov
     or published_step / learning_rate                                       plain momentum

So a role that receives what learners receive has the momentum too, bit by bit: a buddy shard needs
no copy of it. A lossy codec's rounding of one step is in it, and goes out of it with the next one,
since what a step lacks is in the step after it.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ddiloco.config import OuterConfig


def init(size: int, config: OuterConfig) -> np.ndarray | None:
  """The momentum of a fragment of `size` values: zeros [size] f32, or None where none is used."""
  return np.zeros(size, np.float32) if config.momentum else None


def at(config: OuterConfig, progress: float) -> OuterConfig:
  """With the learning rate of the step after which a fragment has this share of the run's tokens.

  >>> config = OuterConfig(learning_rate=0.4, decay_share=0.5, final_share=0.5)
  >>> [round(at(config, progress).learning_rate, 3) for progress in (0, 0.5, 0.75, 1, 1.1)]
  [0.4, 0.4, 0.3, 0.2, 0.2]
  """
  left = max(0.0, 1 - progress)
  if left >= config.decay_share:
    return config
  share = config.final_share + (1 - config.final_share) * left / config.decay_share
  return dataclasses.replace(config, learning_rate=config.learning_rate * share)


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
    momentum: [size] f32, as of the step before; not changed (see `followed`). None: without.
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
  step = np.empty_like(value) if scratch is None else scratch
  if momentum is None:
    np.multiply(delta, config.learning_rate, out=step)
    return np.subtract(value, step, out=out)
  np.multiply(momentum, config.momentum, out=step)
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
    scratch: [size] f32 without meaning. None: a new buffer.
  """
  if momentum is None:
    return None
  old, new = factors(config)
  out = np.empty_like(momentum) if out is None else out
  step = np.subtract(before, after, out=scratch)
  np.multiply(step, new, out=step)
  np.multiply(momentum, old, out=out)
  return np.add(out, step, out=out)


def factors(config: OuterConfig) -> tuple[float, float]:
  """What the new momentum has of the old one, and of the published step.

  >>> factors(OuterConfig(learning_rate=0.5, momentum=0.0))
  (0.0, 2.0)
  """
  if not config.nesterov:
    return 0.0, 1 / config.learning_rate
  whole = 1 + config.momentum
  return config.momentum / whole, 1 / (config.learning_rate * whole)
