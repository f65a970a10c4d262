"""An image as the first tokens of a row: patches through one matrix, before the text.

Axes in names: B batch, I pixels a side, C channels, P patches, N values of a patch, D model dim.

A row has T positions, whatever is in it. In a row with an image the first P of them are its
patches, row by row, and the text has T - P; in a row of text alone the text has them all. A first
token below 0 says that the row has an image (`training.captions` makes such batches). Attention is
causal over all of it, so every fused kernel serves as it is, and every text token sees the whole
image.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx

from ddiloco.config import ModelConfig
from ddiloco.models.execution import Execution
from ddiloco.models.layers import parameter, truncated_normal, used

NO_TEXT = -1  # stands in a row where there is a patch, or nothing any more


class Patches(nnx.Module):
  """patch @ projection + the vector of the patch's place.

  Rotary angles tell how far back a patch lies, in one dimension and from every token another one;
  a learned vector for each place says where in the image it is, once for all.
  """

  def __init__(self, model: ModelConfig, rngs: nnx.Rngs):
    self.patch_size = model.patch_size
    n, d = model.patch_size**2 * model.image_channels, model.model_dim
    # As long as the rows of a text's embedding (`transformer.embed`).
    length = d**-0.25
    self.projection = parameter(
      truncated_normal(rngs(), (n, d), length / math.sqrt(n)), (None, "embed")
    )
    self.places = parameter(
      truncated_normal(rngs(), (model.num_patches, d), length), (None, "embed")
    )

  def __call__(self, image_BxIxIxC: jax.Array, execution: Execution, dtype: str) -> jax.Array:
    """(B, P, D) of images whose pixels are 0 to 255, uint8."""
    patch_BxPxN = cut(image_BxIxIxC, self.patch_size).astype(jnp.float32) / 127.5 - 1.0
    weight_NxD = used(self.projection, execution, dtype)
    x_BxPxD = jnp.einsum("BPN,ND->BPD", patch_BxPxN.astype(dtype), weight_NxD)
    return x_BxPxD + used(self.places, execution, dtype)[None]


def cut(image_BxIxIxC: jax.Array, patch_size: int) -> jax.Array:
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
