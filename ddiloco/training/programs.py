"""Between whole leaves and a fragment's pieces: compiled programs, and the names of a state."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from ddiloco.core.fragments import Piece
from ddiloco.models.model import Batch
from ddiloco.training.devices import param_sharding, piece_sharding

# --- What moves one piece between its leaf and a piece of its own: two compiled programs
# Pieces that differ in their layer or first row only have the same two, so that there are as many
# programs as the model has kinds of tensors, whatever the number of layers and fragments. They
# serve the parameters and everything that lies like them, such as the optimizer's moments.

_COLLECTIVE = re.compile(r"all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute")


@dataclasses.dataclass(frozen=True)
class PieceKind:
  """What the programs of a piece are made for.

  Attributes:
    leaf: f32, with its sharding.
    piece: f32, with its sharding.
    layered: the piece is of one layer of the leaf.
    start: the piece's first row in the leaf; None if every call says it.
  """

  leaf: jax.ShapeDtypeStruct
  piece: jax.ShapeDtypeStruct
  layered: bool
  start: int | None

  @classmethod
  def of(cls, piece: Piece, leaf: jax.ShapeDtypeStruct) -> PieceKind:
    """Of a piece of this leaf, a shape with its sharding."""
    assert isinstance(leaf.sharding, NamedSharding)
    layered = piece.layer is not None
    spec, shape = list(leaf.sharding.spec)[layered:], leaf.shape[layered:]
    whole = piece.shape[:1] == shape[:1]
    # Where devices share the rows, the compiler must know which of them a piece has.
    fixed = not whole and bool(spec) and spec[0] is not None
    sharding = piece_sharding(leaf.sharding, piece.layer, piece.stop - piece.start, whole)
    shaped = jax.ShapeDtypeStruct(piece.shape, jnp.float32, sharding=sharding)
    return cls(leaf, shaped, layered, piece.start if fixed else None)


@dataclasses.dataclass(frozen=True)
class PiecePrograms:
  """`copy_out(leaf, at) -> piece` copies; `apply(leaf, staged, keep, at) -> leaf` is in place.

  `at` is i32 [2]: the piece's layer and first row.
  """

  copy_out: Callable[[jax.Array, np.ndarray], jax.Array]
  apply: Callable[[jax.Array, jax.Array, np.float32, np.ndarray], jax.Array]
  waits: bool  # block after dispatch


def at(piece: Piece) -> np.ndarray:
  """Where a piece is in its leaf, as the programs are told."""
  return np.array([piece.layer or 0, piece.start], np.int32)


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
class LoweredPiece:
  """`PiecePrograms` before they are compiled."""

  copy_out: jax.stages.Lowered
  apply: jax.stages.Lowered

  def compile(self, platform: str) -> PiecePrograms:
    """Compiles both, for devices of this platform."""
    copy_out, apply = self.copy_out.compile(), self.apply.compile()
    # On the CPU, islands share a thread pool in which collectives could wait for each other's (see
    # `Island`), so those are waited for. Only rows of a tensor-cut embedding need any.
    waits = platform == "cpu" and any(
      _COLLECTIVE.search(p.as_text() or "") for p in (copy_out, apply)
    )
    return PiecePrograms(copy_out, apply, waits)


def lower_piece(kind: PieceKind, replicated: NamedSharding) -> LoweredPiece:
  """Lowers both programs of a kind; `replicated` is the layout of numbers that every device has."""
  shape = kind.leaf.shape
  size = (1, *kind.piece.shape) if kind.layered else kind.piece.shape

  def start(at: jax.Array) -> list[Any]:
    """The piece's first value in the leaf, by axis."""
    found: list[Any] = [at[0]] if kind.layered else []
    if len(found) < len(shape):
      whole = size[len(found)] == shape[len(found)]
      found.append(0 if whole else at[1] if kind.start is None else kind.start)
    return found + [0] * (len(shape) - len(found))

  def part(leaf: jax.Array, at: jax.Array) -> jax.Array:
    if size != shape:
      leaf = jax.lax.dynamic_slice(leaf, start(at), size)
    return leaf.reshape(kind.piece.shape)

  def copy_out(leaf: jax.Array, at: jax.Array) -> jax.Array:
    # An explicit copy, since the next step deletes the leaves and a piece may be a whole leaf. It
    # costs nothing: XLA makes one anyway (jax 0.10), but nothing promises that it always will.
    return jnp.copy(part(leaf, at))

  def apply(leaf: jax.Array, staged: jax.Array, keep: jax.Array, at: jax.Array) -> jax.Array:
    # `where`, since 0 * NaN is NaN and an overwrite must heal whatever was there.
    new = jnp.where(keep == 0, staged, keep * part(leaf, at) + staged).reshape(size)
    return new if size == shape else jax.lax.dynamic_update_slice(leaf, new, start(at))

  keep = jax.ShapeDtypeStruct((), jnp.float32, sharding=replicated)
  where = jax.ShapeDtypeStruct((2,), jnp.int32, sharding=replicated)
  out = jax.jit(copy_out, out_shardings=kind.piece.sharding)
  into = jax.jit(apply, out_shardings=kind.leaf.sharding, donate_argnums=0)
  return LoweredPiece(out.lower(kind.leaf, where), into.lower(kind.leaf, kind.piece, keep, where))


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
