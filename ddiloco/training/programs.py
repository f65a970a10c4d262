"""What moves one fragment between whole leaves and its pieces: two compiled programs.

They serve the parameters and everything that lies like them, such as the optimizer's moments.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from ddiloco.core.fragments import Fragment, Piece

_COLLECTIVE = re.compile(r"all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute")


@dataclasses.dataclass(frozen=True)
class FragmentPrograms:
  """`cut(leaves) -> pieces` copies; `apply(leaves, staged, keep) -> leaves` writes in place.

  `leaves` are those that the fragment touches, in the order of `names`.
  """

  names: tuple[str, ...]
  cut: Callable[[list[jax.Array]], list[jax.Array]]
  apply: Callable[[list[jax.Array], list[jax.Array], np.float32], list[jax.Array]]
  waits: bool  # block after dispatch


def placed(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
  """The leaf's shape and dtype, lying there."""
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def compile_fragment(
  fragment: Fragment,
  params: Mapping[str, jax.ShapeDtypeStruct],
  piece_shardings: Sequence[NamedSharding],
  keep: jax.ShapeDtypeStruct,
) -> FragmentPrograms:
  """Compiles both programs of a fragment.

  Args:
    fragment: its pieces.
    params: name -> f32 leaf with its sharding.
    piece_shardings: one per piece.
    keep: the scalar f32, replicated over the same mesh.
  """
  pieces = fragment.pieces
  names = tuple(dict.fromkeys(piece.name for piece in pieces))
  slots = [names.index(piece.name) for piece in pieces]

  def cut(leaves: list[jax.Array]) -> list[jax.Array]:
    # An explicit copy, since the next step deletes the leaves and a piece may be a whole leaf. It
    # costs nothing: XLA makes one anyway (jax 0.10), but nothing promises that it always will.
    return [jnp.copy(_rows(piece, leaves[slot])) for piece, slot in zip(pieces, slots)]

  def apply(leaves: list[jax.Array], staged: list[jax.Array], keep: jax.Array):
    leaves = list(leaves)
    for piece, slot, value in zip(pieces, slots, staged):
      # `where`, since 0 * NaN is NaN and an overwrite must heal whatever was there.
      new = jnp.where(keep == 0, value, keep * _rows(piece, leaves[slot]) + value)
      leaves[slot] = _put_rows(piece, leaves[slot], new)
    return leaves

  leaves = [params[name] for name in names]
  staged = [
    jax.ShapeDtypeStruct(piece.shape, jnp.float32, sharding=sharding)
    for piece, sharding in zip(pieces, piece_shardings)
  ]
  cut = jax.jit(cut, out_shardings=list(piece_shardings)).lower(leaves).compile()
  apply = jax.jit(apply, out_shardings=[leaf.sharding for leaf in leaves], donate_argnums=0)
  apply = apply.lower(leaves, staged, keep).compile()
  # On the CPU, islands share a thread pool in which collectives could wait for each other's (see
  # `Island`), so those are waited for. Only rows of a tensor-cut embedding need any.
  cpu = keep.sharding.mesh.devices.flat[0].platform == "cpu"
  waits = cpu and any(_COLLECTIVE.search(p.as_text() or "") for p in (cut, apply))
  return FragmentPrograms(names, cut, apply, waits)


def _rows(piece: Piece, leaf: jax.Array) -> jax.Array:
  """The piece's part of its leaf."""
  if piece.layer is not None:
    leaf = jax.lax.index_in_dim(leaf, piece.layer, keepdims=False)
  return jax.lax.slice_in_dim(leaf, piece.start, piece.stop) if leaf.ndim else leaf


def _put_rows(piece: Piece, leaf: jax.Array, value: jax.Array) -> jax.Array:
  """The leaf with the piece's part replaced; in place where the leaf's buffer may be reused."""
  if value.shape == leaf.shape:
    return value
  start = [] if piece.layer is None else [piece.layer]
  value = value if piece.layer is None else value[None]
  start += [piece.start, *[0] * leaf.ndim][: leaf.ndim - len(start)]
  return jax.lax.dynamic_update_slice(leaf, value, start)
