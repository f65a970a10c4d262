"""The outer optimizer: SGD on the merged outer gradient, with Nesterov or plain momentum, in f32.

    delta = global - local, merged over the learners
    m     <- momentum * m + delta
    step  =  learning_rate * (delta + momentum * m)     nesterov
          or learning_rate * m                          plain momentum
    value <- value - step

DiLoCo (2311.08105) uses Nesterov 0.7/0.9, Streaming DiLoCo (2501.18512) 0.4/0.9. Without momentum
the step is learning_rate * delta and no state exists at all.
"""

from __future__ import annotations

import numpy as np

from ddiloco.config import OuterConfig


def init(size: int, config: OuterConfig) -> np.ndarray | None:
  """The momentum of a fragment of `size` values: zeros [size] f32, or None where none is used."""
  return np.zeros(size, np.float32) if config.momentum else None


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
    momentum: [size] f32 from `init`, changed in place; None without momentum.
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
  else:
    np.multiply(momentum, config.momentum, out=momentum)
    np.add(momentum, delta, out=momentum)
    if config.nesterov:
      np.multiply(momentum, config.momentum, out=step)
      np.add(step, delta, out=step)
      np.multiply(step, config.learning_rate, out=step)
    else:
      np.multiply(momentum, config.learning_rate, out=step)
  return np.subtract(value, step, out=out)
