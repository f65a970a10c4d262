"""Between whole leaves and a fragment's pieces: two compiled programs, and the names of a state."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from ddiloco.core.fragments import Fragment, Piece
from ddiloco.models.model import Batch
from ddiloco.training.devices import param_sharding

# --- What moves one fragment between whole leaves and its pieces: two compiled programs
# They serve the parameters and everything that lies like them, such as the optimizer's moments.

_COLLECTIVE = re.compile(r"all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute")


@dataclasses.dataclass(frozen=True)
class FragmentPrograms:
  """`copy_out(leaves) -> pieces` copies; `apply(leaves, staged, keep) -> leaves` writes in place.

  `leaves` are those that the fragment touches, in the order of `names`.
  """

  names: tuple[str, ...]
  copy_out: Callable[[list[jax.Array]], list[jax.Array]]
  apply: Callable[[list[jax.Array], list[jax.Array], np.float32], list[jax.Array]]
  waits: bool  # block after dispatch


def placed(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
  """The leaf's shape and dtype, lying there."""
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def placed_inputs(inputs: Batch, mesh: Mesh) -> Batch:
  """A batch's arrays, split over the mesh by their first axis."""

  def place(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    axes = ("batch", *[None] * (len(leaf.shape) - 1))
    return placed(leaf, param_sharding(axes, leaf.shape, mesh))

  return jax.tree.map(place, inputs)


def refuse_misfit(batch: Batch, inputs: Batch, taker: str) -> None:
  """Refuses a batch that has other arrays than `inputs`, or arrays of other shapes or types.

  Raises:
    ValueError: says what the batch has, and what `taker` takes.
  """
  found, taken = ([_kind(leaf) for leaf in jax.tree.leaves(each)] for each in (batch, inputs))
  if found != taken or jax.tree.structure(batch) != jax.tree.structure(inputs):
    has, takes = (jax.tree.map(lambda x: "{} {}".format(*_kind(x)), t) for t in (batch, inputs))
    raise ValueError(f"the batch has {has}, {taker} takes {takes}")


def _kind(leaf: Any) -> tuple[str, tuple[int, ...]]:
  return str(getattr(leaf, "dtype", type(leaf).__name__)), np.shape(leaf)


@dataclasses.dataclass(frozen=True)
class LoweredFragment:
  """`FragmentPrograms` before they are compiled."""

  names: tuple[str, ...]
  copy_out: jax.stages.Lowered
  apply: jax.stages.Lowered

  def compile(self, platform: str) -> FragmentPrograms:
    """Compiles both, for devices of this platform."""
    copy_out, apply = self.copy_out.compile(), self.apply.compile()
    # On the CPU, islands share a thread pool in which collectives could wait for each other's (see
    # `Island`), so those are waited for. Only rows of a tensor-cut embedding need any.
    waits = platform == "cpu" and any(
      _COLLECTIVE.search(p.as_text() or "") for p in (copy_out, apply)
    )
    return FragmentPrograms(self.names, copy_out, apply, waits)


def lower_fragment(
  fragment: Fragment,
  params: Mapping[str, jax.ShapeDtypeStruct],
  piece_shardings: Sequence[NamedSharding],
  keep: jax.ShapeDtypeStruct,
) -> LoweredFragment:
  """Lowers both programs of a fragment.

  Args:
    fragment: its pieces.
    params: name -> f32 leaf with its sharding.
    piece_shardings: one per piece.
    keep: the scalar f32, replicated over the same mesh.
  """
  pieces = fragment.pieces
  names = tuple(dict.fromkeys(piece.name for piece in pieces))
  slots = [names.index(piece.name) for piece in pieces]

  def copy_out(leaves: list[jax.Array]) -> list[jax.Array]:
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
  copy_out = jax.jit(copy_out, out_shardings=list(piece_shardings))
  apply = jax.jit(apply, out_shardings=[leaf.sharding for leaf in leaves], donate_argnums=0)
  return LoweredFragment(names, copy_out.lower(leaves), apply.lower(leaves, staged, keep))


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


# --- The names of an island's state: everything it must remember, as one flat dict of arrays
# "params/<name>" are the parameters, "inner/<path>" the leaves of the inner optimizer's state, of
# which nothing else is assumed: Adam's are "inner/1/mu/<name>", "inner/1/nu/<name>" and
# "inner/1/count".

PARAMS = "params/"


class StateLayout:
  """Which arrays the state consists of, and where each of them lies.

  Attributes:
    leaves: name -> shape, dtype and sharding, in a fixed order.
    moments: prefixes of the optimizer's subtrees that are shaped like the parameters, in order:
      prefix + parameter name is a name of the state.
    counts: names of the optimizer's integer scalars: how many updates it has seen.
  """

  def __init__(
    self,
    transform: optax.GradientTransformation,
    params: Mapping[str, jax.ShapeDtypeStruct],
    replicated: NamedSharding,
  ):
    """`params` have shardings; what of the optimizer lies like none of them is `replicated`."""
    opt_state = jax.eval_shape(transform.init, dict(params))
    trees = {"params": dict(params), "inner": opt_state}
    found, self._structure = jax.tree_util.tree_flatten_with_path(trees)
    self.leaves: dict[str, jax.ShapeDtypeStruct] = {}
    for path, leaf in found:
      name = jax.tree_util.keystr(path, simple=True, separator="/")
      like = params.get(getattr(path[-1], "key", ""), leaf)
      alike = like.sharding is not None and like.shape == leaf.shape
      self.leaves[name] = placed(leaf, like.sharding if alike else replicated)
    if len(self.leaves) != len(found):
      raise ValueError(f"two leaves of the optimizer's state have one name: {sorted(self.leaves)}")
    inner = {name: leaf for name, leaf in self.leaves.items() if name.startswith("inner/")}
    first = "/" + next(iter(params))
    prefixes = [name.removesuffix(first) + "/" for name in inner if name.endswith(first)]
    self.moments = tuple(
      prefix
      for prefix in prefixes
      if all(self.leaves.get(prefix + name) == leaf for name, leaf in params.items())
    )
    self.counts = tuple(
      name
      for name, leaf in inner.items()
      if not leaf.shape and jnp.issubdtype(leaf.dtype, jnp.integer)
    )

  @property
  def shardings(self) -> dict[str, NamedSharding]:
    """Where each array lies."""
    return {name: leaf.sharding for name, leaf in self.leaves.items()}

  def flat(self, params: Any, opt_state: Any) -> dict[str, jax.Array]:
    """The two trees as one flat dict."""
    trees = {"params": params, "inner": opt_state}
    return dict(zip(self.leaves, jax.tree.leaves(trees)))

  def trees(self, state: Mapping[str, jax.Array]) -> tuple[dict[str, jax.Array], Any]:
    """(parameters, optimizer state): `flat`'s inverse."""
    trees = jax.tree.unflatten(self._structure, [state[name] for name in self.leaves])
    return trees["params"], trees["inner"]

  def check(self, arrays: Mapping[str, jax.Array | np.ndarray]) -> None:
    """Refuses arrays that are not exactly this state's.

    Raises:
      ValueError: names, shapes or dtypes differ; it says which.
    """
    odd = sorted(arrays.keys() ^ self.leaves.keys())
    if odd:
      raise ValueError(
        f"state: names that only one side has: {odd[:8]} ({len(odd)} in all). Fix: restore into"
        " the model and optimizer that were saved."
      )
    for name, leaf in self.leaves.items():
      array = arrays[name]
      if (array.shape, array.dtype) != (leaf.shape, leaf.dtype):
        raise ValueError(
          f"state: {name} has shape {array.shape} and dtype {array.dtype}, this island's is"
          f" {leaf.shape} and {leaf.dtype}. Fix: restore into the model and optimizer that were"
          " saved."
        )
