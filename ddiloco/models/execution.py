"""How the devices of one island compute a model: where arrays lie, which kernels, what is stored.

It changes how fast a step is and how much memory it takes, not what it computes. Islands of one
run may differ in it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_policies as policies
from jax.sharding import NamedSharding

Axes = tuple[str | None, ...]
Layout = Callable[[Axes, tuple[int, ...]], NamedSharding]

ATTENTION_OUTPUT = "attention"  # what remat calls the output of attention, and its softmax's norm

# What a layer keeps for its backward pass, from the least memory to the most; the rest is computed
# again. Of "full" it is the layer's input alone.
REMAT: dict[str, Callable[..., Any] | None] = {
  "full": policies.nothing_saveable,
  "attention": policies.save_only_these_names(ATTENTION_OUTPUT),
  "products": policies.save_from_both_policies(
    policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names(ATTENTION_OUTPUT)
  ),
  "none": None,
}


@dataclasses.dataclass(frozen=True)
class Execution:
  """Calling it pins where an activation lies: `execution(array, axes)` is that array.

  Attributes:
    layout: where an array with these logical axes and this shape lies; None on one device.
    attention: the path of `models.attention`: einsum, splash or cudnn.
    remat: what a layer keeps for its backward pass: a name in `REMAT`.
    loss_chunks: parts of the vocabulary whose logits exist at the same time; 1 is all of it.
    interpret: kernels are interpreted, for a platform that has none of its own (tests).
  """

  layout: Layout | None = None
  attention: str = "einsum"
  remat: str = "none"
  loss_chunks: int = 1
  interpret: bool = False

  def __call__(self, x: jax.Array, axes: Axes) -> jax.Array:
    if self.layout is None:
      return x
    return jax.lax.with_sharding_constraint(x, self.layout(axes, x.shape))

  def gathered(self, weight: jax.Array, axes: Axes) -> jax.Array:
    """The weight with its "embed" axis whole on every device; its gradient is cut again.

    Where a step says so of one layer's weights at a time, the compiler can neither gather several
    layers at once nor move activations instead of weights.
    """
    if self.layout is None:
      return weight
    whole = tuple(None if axis == "embed" else axis for axis in axes)
    there, here = self.layout(whole, weight.shape), self.layout(axes, weight.shape)
    return weight if there.spec == here.spec else _move(there, here, weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _move(there: NamedSharding, back: NamedSharding, x: jax.Array) -> jax.Array:
  """`x`, lying `there`; its gradient lies `back`: one collective sums and cuts it."""
  del back
  return jax.lax.with_sharding_constraint(x, there)


def _move_forward(there, back, x):
  return _move(there, back, x), None


def _move_backward(there, back, residuals, grad):
  del there, residuals
  return (jax.lax.with_sharding_constraint(grad, back),)


_move.defvjp(_move_forward, _move_backward)

PLAIN = Execution()  # one device, the reference path, everything stored
