"""The partition of the model into fragments: which tensors travel together in one round.

A fragment is a list of pieces; a piece is a whole tensor, one layer of a stacked tensor, or some
rows of a very large embedding. On the host a fragment's value is one flat float32 vector.
"Decoupled DiLoCo" uses balanced tensor fragmentation; the other policies are for comparison.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ddiloco.config import ConfigError, SyncConfig
from ddiloco.protocol.values import Frozen, replace, to_json


class TensorSpec(Frozen):
  """One leaf of the parameters. A stacked leaf has a leading axis L, one row per layer."""

  name: str
  shape: tuple[int, ...]
  stacked: bool
  embedding: bool


class Piece(Frozen, dict=True):
  """Rows [start:stop) of a leaf (of `leaf[layer]` if stacked), at `offset` in the flat vector."""

  name: str
  layer: int | None
  start: int
  stop: int
  shape: tuple[int, ...]  # of the rows; () for a scalar, which counts as one row
  offset: int
  average: bool  # merged by weighted average, else by RDA

  @functools.cached_property
  def size(self) -> int:
    """Values in this piece."""
    return math.prod(self.shape)


class Fragment(Frozen, dict=True):
  """Pieces in model order, their offsets contiguous from 0."""

  index: int
  pieces: tuple[Piece, ...]

  @functools.cached_property
  def size(self) -> int:
    """Values in this fragment."""
    return sum(piece.size for piece in self.pieces)


class Plan(Frozen, dict=True):
  """All fragments. Learners and shards compare `plan_id` before they exchange anything."""

  fragments: tuple[Fragment, ...]

  @functools.cached_property
  def plan_id(self) -> str:
    """16 hex digits of the sha256 over every field of every piece."""
    content = json.dumps(to_json(self), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(content.encode()).hexdigest()[:16]

  @property
  def sizes(self) -> tuple[int, ...]:
    """Values in each fragment."""
    return tuple(fragment.size for fragment in self.fragments)

  def parts_by_name(self, indices: Iterable[int]) -> Mapping[str, list[tuple[Fragment, Piece]]]:
    """By tensor, its pieces in these fragments, each with a fragment of that piece alone."""
    found = collections.defaultdict[str, list[tuple[Fragment, Piece]]](list)
    for p in indices:
      for piece in self.fragments[p].pieces:
        alone = Fragment(p, (replace(piece, offset=0),))
        found[piece.name].append((alone, piece))
    return found


def make_plan(specs: Sequence[TensorSpec], sync: SyncConfig) -> Plan:
  """Deals every element of the model to exactly one of `sync.num_fragments` fragments.

  Model order is the order of `specs`, with all stacked leaves standing at the place of the first
  one, layer by layer. Tensors without elements need no sync and are left out.

  Policies (`sync.fragmentation`):
    balanced: whole tensors, largest first, each into the smallest fragment so far; the peak is at
      most 4/3 of the optimum (Graham 1969).
    layer: contiguous groups of layers, sizes differing by at most one; embeddings go with the
      first group, other tensors with the last.
    tensor: whole tensors in model order, dealt round-robin.
    strided: layer i to fragment i mod P; the other tensors balanced on top.

  Raises:
    ConfigError: a fragment would be empty.
  """
  pieces = _pieces(specs, sync)
  owners = _owners(pieces, {spec.name for spec in specs if spec.embedding}, sync)
  dealt: list[list[Piece]] = [[] for _ in range(sync.num_fragments)]
  ends = [0] * sync.num_fragments
  for piece, owner in zip(pieces, owners):
    dealt[owner].append(replace(piece, offset=ends[owner]))
    ends[owner] += piece.size
  return Plan(tuple(Fragment(index, tuple(mine)) for index, mine in enumerate(dealt)))


def _pieces(specs: Sequence[TensorSpec], sync: SyncConfig) -> list[Piece]:
  """All pieces, which are placed as a whole, in model order; offsets are still 0."""
  first_stacked = next((i for i, spec in enumerate(specs) if spec.stacked), 0)
  found: list[tuple[tuple[int, ...], list[Piece]]] = []
  for position, spec in enumerate(specs):
    shape = tuple(int(n) for n in spec.shape)
    for layer in range(shape[0]) if spec.stacked else (None,):
      place = (position,) if layer is None else (first_stacked, layer, position)
      found.append((place, _rows(spec, shape if layer is None else shape[1:], layer, sync)))
  found.sort(key=lambda entry: entry[0])
  return [piece for _, pieces in found for piece in pieces if piece.size]


def _rows(
  spec: TensorSpec, shape: tuple[int, ...], layer: int | None, sync: SyncConfig
) -> list[Piece]:
  rows, rest = (shape[0], shape[1:]) if shape else (1, ())
  average = sync.merge == "average" or (spec.embedding and sync.average_embeddings)
  splits = -(-rows // sync.max_rows) if spec.embedding and sync.max_rows and rows else 1
  bounds = [i * rows // splits for i in range(splits + 1)]
  return [
    Piece(spec.name, layer, start, stop, (stop - start, *rest) if shape else (), 0, average)
    for start, stop in itertools.pairwise(bounds)
  ]


def _owners(pieces: list[Piece], embeddings: set[str], sync: SyncConfig) -> list[int]:
  """The fragment of each piece, by `sync.fragmentation`."""
  policy, count = sync.fragmentation, sync.num_fragments
  layers = 1 + max((piece.layer for piece in pieces if piece.layer is not None), default=-1)
  if policy in ("layer", "strided"):
    _enough(layers, "layers of the model", sync)
  else:
    _enough(len(pieces), "tensors of the model (a stacked one counts once per layer)", sync)
  if policy == "tensor":
    return [index % count for index in range(len(pieces))]
  if policy == "layer":
    ends = [0 if piece.name in embeddings else count - 1 for piece in pieces]
    return [end if p.layer is None else p.layer * count // layers for p, end in zip(pieces, ends)]
  return _balanced(pieces, count, by_layer=policy == "strided")


def _enough(count: int, what: str, sync: SyncConfig) -> None:
  if count < sync.num_fragments:
    fix = f"use at most {count}" if count else "sync.fragmentation = 'balanced' needs no layers"
    raise ConfigError(
      f"sync.num_fragments = {sync.num_fragments}: must not exceed the {count} {what},"
      f" or a fragment would be empty (sync.fragmentation is {sync.fragmentation!r}). Fix: {fix}."
    )


def _balanced(pieces: list[Piece], count: int, by_layer: bool) -> list[int]:
  """Pieces go to the smallest load, the largest first; ties go to the earlier piece and fragment.

  With `by_layer` the layers' pieces are dealt round-robin before that.
  """
  owners, loads = [0] * len(pieces), [0] * count
  dealt = [by_layer and piece.layer is not None for piece in pieces]
  order = sorted(range(len(pieces)), key=lambda i: (not dealt[i], -pieces[i].size, i))
  for i in order:
    layer = pieces[i].layer
    owners[i] = layer % count if dealt[i] and layer is not None else loads.index(min(loads))
    loads[owners[i]] += pieces[i].size
  return owners


def _view(piece: Piece, params: Mapping[str, np.ndarray]) -> np.ndarray:
  leaf = params[piece.name]
  if piece.layer is not None:
    leaf = leaf[piece.layer, ...]  # with the dots the result is a view even if it is a scalar
  return leaf[piece.start : piece.stop] if leaf.ndim else leaf


def gather(
  fragment: Fragment, params: Mapping[str, np.ndarray], out: np.ndarray | None = None
) -> np.ndarray:
  """The fragment's values out of `params` (name -> leaf), as a flat float32 vector [size]: in
  `out`, or in a new one."""
  flat = np.empty(fragment.size, np.float32) if out is None else out
  for piece, view in zip(fragment.pieces, split_flat(fragment, flat)):
    view[...] = _view(piece, params)
  return flat


def scatter(fragment: Fragment, flat: np.ndarray, params: Mapping[str, np.ndarray]) -> None:
  """Writes the fragment's flat vector [size] into the leaves of `params`, in place."""
  for piece, view in zip(fragment.pieces, split_flat(fragment, flat)):
    _view(piece, params)[...] = view


def split_flat(fragment: Fragment, flat: np.ndarray) -> list[np.ndarray]:
  """Views of the fragment's flat vector [size], one per piece, with the pieces' shapes.

  Raises:
    ValueError: the vector has another size than the fragment.
  """
  if flat.shape != (fragment.size,):
    raise ValueError(
      f"fragment {fragment.index}: the vector has shape {flat.shape}, but the plan says"
      f" ({fragment.size},). Fix: use the vector of this fragment and plan."
    )
  return [flat[p.offset : p.offset + p.size].reshape(p.shape) for p in fragment.pieces]


def shard_of(fragment_index: int, num_shards: int) -> int:
  """The one syncer shard that owns this fragment."""
  return fragment_index % num_shards


def owned_by(shard: int, num_shards: int, num_fragments: int) -> tuple[int, ...]:
  """The indices of the fragments that this shard owns; the inverse of `shard_of`."""
  return tuple(range(shard, num_fragments, num_shards))
