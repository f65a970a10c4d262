"""The passes over all values of one fragment: measure a push, combine pushes, take the outer step.

A fragment of a large model has half a billion values, and pushes stay as they came, in the wire
codec, until a commit reads them. So every pass goes chunk by chunk: what it does to the values of
a chunk stays in the core's own cache. Chunks are shared out, to threads if there are any, in
segments of fixed size, and sums are added in their order: any number of threads gives the same
bits.

What is done to a chunk is written twice. Here it is NumPy, which says what is meant. In
`core/kernels.py` it is compiled, three times as fast, for fragments where that pays for compiling.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from ddiloco.config import OuterConfig
from ddiloco.core import codec, outer
from ddiloco.core.codec import CHUNK, Encoded
from ddiloco.core.fragments import Fragment

COMPILED_FROM = 1 << 22  # values of a fragment; below, compiling takes longer than it saves
SEGMENT = 16 * CHUNK  # a million values: what a thread takes at a time
SAMPLED = 1 << 16  # values at most whose directions are compared
_DOT_CHUNK = 1 << 13  # short enough that BLAS uses one thread, so bits do not depend on the cores
_DOT_TRUSTED = 1e-30  # below, f32 products may have underflowed; they are taken again in f64


@dataclasses.dataclass(frozen=True)
class Chunk:
  """Values [start, stop) of a fragment, and the runs of its pieces in there."""

  start: int
  stop: int
  runs: np.ndarray  # i64 [runs, 3]: from, to (counted from `start`), index of the piece


@functools.lru_cache(maxsize=256)
def segments(fragment: Fragment) -> list[list[Chunk]]:
  """The chunks of a fragment, in segments."""
  chunks: list[Chunk] = []
  runs: list[tuple[int, int, int]] = []
  for index, piece in enumerate(fragment.pieces):
    at, end = piece.offset, piece.offset + piece.size
    while at < end:
      start = at - at % CHUNK
      stop = min(end, start + CHUNK)
      runs.append((at - start, stop - start, index))
      at = stop
      if at == start + CHUNK or at == fragment.size:
        chunks.append(Chunk(start, at, np.array(runs, np.int64)))
        runs = []
  each = SEGMENT // CHUNK
  return [chunks[i : i + each] for i in range(0, len(chunks), each)]


class Share(Protocol):
  """Like `map`; the `map` of a pool of threads shares the work out to them."""

  def __call__(self, work: Callable[[Any], Any], each: Iterable[Any], /) -> Iterable[Any]: ...


@functools.cache
def _kernels() -> Any:
  from ddiloco.core import kernels  # half a second, and 60 MB: for large fragments only

  return kernels


def compile_for(fragment: Fragment, config: OuterConfig) -> None:
  """Compiles what a fragment of this size is worked on with; else the first push waits for it."""
  if fragment.size >= COMPILED_FROM:
    size = 2 * codec.BLOCK
    one, speed = np.ones(size, np.float32), outer.init(size, config)
    chunk = Chunk(0, size, np.array([[0, size, 0]], np.int64))
    _kernels().compile_all(chunk, Vectors(one, one, one, one, speed, speed), config)


def _opened(fragment: Fragment, encoded: Encoded) -> Any:
  """A payload for the kernels; None where NumPy reads it."""
  if fragment.size >= COMPILED_FROM and encoded.codec in codec.LEVELS:
    return _kernels().Opened(encoded, fragment.size)
  return None


# --- One push: its norms, and a sample of it for directions


def squares(fragment: Fragment, push: Encoded, share: Share = map) -> np.ndarray:
  """|delta|^2 of each piece, f64 [pieces]; not finite exactly where a value is not.

  Raises:
    CodecError: a code that no encoder writes.
  """
  opened = _opened(fragment, push)

  def work(segment: list[Chunk]) -> np.ndarray:
    sums = np.zeros(len(fragment.pieces))
    scratch = np.empty(CHUNK, np.float32)
    for chunk in segment:
      if opened is not None and _kernels().squares(opened, chunk, sums):
        continue
      values = scratch[: chunk.stop - chunk.start]
      codec.decode_chunk(codec.part(push, fragment.size, chunk.start), push.codec, values)
      for start, stop, piece in chunk.runs.tolist():
        sums[piece] += dot(values[start:stop], values[start:stop])
    return sums

  with np.errstate(all="ignore"):  # what is not finite is a result here, for the screening
    return _added(list(share(work, segments(fragment))))


def _added(sums: Sequence[np.ndarray]) -> np.ndarray:
  """In their order."""
  total = np.zeros_like(sums[0])
  for each in sums:
    total += each
  return total


def dot(a: np.ndarray, b: np.ndarray) -> float:
  """<a, b> of two flat f32 vectors; not finite exactly where a value is not."""
  total = 0.0
  with np.errstate(all="ignore"):
    for start in range(0, a.size, _DOT_CHUNK):
      total += float(np.dot(a[start : start + _DOT_CHUNK], b[start : start + _DOT_CHUNK]))
    if _DOT_TRUSTED < abs(total) < math.inf:
      return total
    total = 0.0  # an over- or underflow in f32, or truly zero, NaN or infinite: f64 tells
    for start in range(0, a.size, _DOT_CHUNK):
      part = slice(start, start + _DOT_CHUNK)
      total += float(np.dot(a[part].astype(np.float64), b[part].astype(np.float64)))
  return total


def sample(fragment: Fragment, push: Encoded, compared: Sequence[int]) -> np.ndarray:
  """Values [at most SAMPLED] f32 of the pieces `compared`, at the same places for every push."""
  values = []
  for chunk, runs in _sampled(fragment, tuple(compared)):
    decoded = np.empty(chunk.stop - chunk.start, np.float32)
    codec.decode_chunk(codec.part(push, fragment.size, chunk.start), push.codec, decoded)
    values += [decoded[start:stop] for start, stop in runs]
  return np.concatenate(values) if values else np.empty(0, np.float32)


@functools.lru_cache(maxsize=256)
def _sampled(
  fragment: Fragment, compared: tuple[int, ...]
) -> list[tuple[Chunk, list[tuple[int, int]]]]:
  """All values of a small fragment; of a large one as many from each of 16 chunks, far apart."""
  found = []
  for segment in segments(fragment):
    for chunk in segment:
      runs = [(start, stop) for start, stop, piece in chunk.runs.tolist() if piece in compared]
      if runs:
        found.append((chunk, runs))
  if sum(stop - start for _, runs in found for start, stop in runs) <= SAMPLED:
    return found
  spread = [found[i * len(found) // 16] for i in range(16)] if len(found) > 16 else found
  return [(chunk, _first(runs, SAMPLED // len(spread))) for chunk, runs in spread]


def _first(runs: list[tuple[int, int]], count: int) -> list[tuple[int, int]]:
  kept = []
  for start, stop in runs:
    stop = min(stop, start + count)
    kept.append((start, stop))
    count -= stop - start
    if not count:
      break
  return kept


# --- A commit: the pushes' sum, then the outer step on it


def combine(
  fragment: Fragment,
  pushes: Sequence[Encoded],
  units: np.ndarray,
  out: np.ndarray,
  share: Share = map,
) -> np.ndarray:
  """out = sum_m units[m, piece] * push_m; returns its squares, f64 [pieces].

  Sums run in the order of `pushes`, so sort them by learner for results that do not depend on who
  came first. A push is not read where its unit is 0.

  Args:
    fragment: whose pieces.
    pushes: M of them, whose codes were checked by `squares`.
    units: f32 [M, pieces].
    out: f32 [size].
    share: on which threads.
  """
  terms = [(push, _opened(fragment, push), mine) for push, mine in zip(pushes, units) if mine.any()]

  def work(segment: list[Chunk]) -> np.ndarray:
    sums = np.zeros(len(fragment.pieces))
    scratch = np.empty(CHUNK, np.float32)
    for chunk in segment:
      total = out[chunk.start : chunk.stop]
      total.fill(0)
      for push, opened, mine in terms:
        if opened is not None:
          _kernels().add(opened, chunk, mine, out)
        else:
          there = codec.part(push, fragment.size, chunk.start)
          _add(there, push.codec, chunk.runs, mine, total, scratch)
      for start, stop, piece in chunk.runs.tolist():
        sums[piece] += dot(total[start:stop], total[start:stop])
    return sums

  return _added(list(share(work, segments(fragment))))


def _add(
  there: codec.ChunkPayload,
  name: str,
  runs: np.ndarray,
  units: np.ndarray,
  total: np.ndarray,
  scratch: np.ndarray,
) -> None:
  values = scratch[: total.size]
  codec.decode_chunk(there, name, values)
  for start, stop, piece in runs.tolist():
    if not units[piece]:
      continue
    product = values[start:stop]
    np.multiply(product, units[piece], out=product)
    np.add(total[start:stop], product, out=total[start:stop])


@dataclasses.dataclass(frozen=True)
class Stepped:
  """A fragment after an outer step: fresh vectors f32 [size]."""

  value: np.ndarray
  published_value: np.ndarray  # `value` itself, or what a lossy codec makes of it
  momentum: np.ndarray | None
  update: Encoded | None  # from the published value before to this one; None: values go out whole


def step(
  fragment: Fragment,
  combined: np.ndarray,
  stretch: np.ndarray,
  value: np.ndarray,
  published_value: np.ndarray,
  momentum: np.ndarray | None,
  config: OuterConfig,
  name: str,
  share: Share = map,
) -> Stepped:
  """The outer step on `stretch * combined`, and its update in the wire codec, in one pass.

  Rounding errors do not add up: an update is taken from what learners really have.

  Args:
    fragment: whose pieces.
    combined: [size] f32, from `combine`; becomes the new value.
    stretch: f32 [pieces].
    value: [size] f32, the global value; not changed, like the next two.
    published_value: [size] f32, what learners have of it.
    momentum: [size] f32, as of the step before; None without.
    config: of the outer optimizer.
    name: the codec of updates; "f32": learners get the new value itself.
    share: on which threads.
  """
  size, lossy = fragment.size, name != "f32"
  published = np.empty_like(combined) if lossy else combined
  speed = None if momentum is None else np.empty_like(momentum)
  update = Encoded(name, np.empty(codec.payload_bytes(size, name), np.uint8)) if lossy else None
  vectors = Vectors(combined, value, published_value, published, momentum, speed)
  compiled = size >= COMPILED_FROM and name != "bf16"
  step_chunk = _kernels().stepper(vectors, stretch, config, update) if compiled else None

  def work(segment: list[Chunk]) -> None:
    for chunk in segment:
      if step_chunk is not None:
        step_chunk(chunk)
      else:
        _step(chunk, vectors, stretch, config, update)

  list(share(work, segments(fragment)))
  return Stepped(combined, published, speed, update)


class Vectors(NamedTuple):
  """What a step reads and writes, each f32 [size]."""

  delta: np.ndarray  # the sum of the pushes; becomes the new value
  value: np.ndarray
  published: np.ndarray
  new_published: np.ndarray
  momentum: np.ndarray | None
  new_momentum: np.ndarray | None

  def part(self, start: int, stop: int) -> Vectors:
    """Views of these values."""
    views: Any = (None if each is None else each[start:stop] for each in self)
    return Vectors(*views)


def _step(
  chunk: Chunk,
  vectors: Vectors,
  stretch: np.ndarray,
  config: OuterConfig,
  update: Encoded | None,
) -> None:
  """One chunk of `step`."""
  here = vectors.part(chunk.start, chunk.stop)
  delta, scratch = here.delta, np.empty_like(here.delta)
  for start, stop, piece in chunk.runs.tolist():
    np.multiply(delta[start:stop], stretch[piece], out=delta[start:stop])
  outer.update(here.value, here.momentum, delta, config, delta, scratch)
  if update is not None:
    there, change = codec.part(update, vectors.value.size, chunk.start), delta - here.published
    codec.encode_chunk(change, update.codec, there, scratch)
    codec.decode_chunk(there, update.codec, change)
    np.add(here.published, change, out=here.new_published)
  before_and_after = here.published, here.new_published
  outer.followed(here.momentum, *before_and_after, config, here.new_momentum, scratch)


# --- A copy: what whoever receives a commit's change makes of it


def follow(
  fragment: Fragment,
  published_value: np.ndarray,
  momentum: np.ndarray | None,
  change: Encoded,
  config: OuterConfig,
) -> tuple[np.ndarray, np.ndarray | None]:
  """(published value, momentum) after a step of which this is what learners get.

  Bit by bit what the shard has: an update is added; what is f32 is the new value itself.

  Args:
    fragment: whose pieces.
    published_value: [size] f32, before; not changed, like the momentum.
    momentum: [size] f32, before; None without.
    change: in the wire codec.
    config: of the outer optimizer.

  Raises:
    CodecError: a code that no encoder writes.
  """
  new = np.empty(fragment.size, np.float32)
  speed = new if momentum is None else np.empty_like(new)
  scratch = np.empty(CHUNK, np.float32)
  for start in range(0, fragment.size, CHUNK):
    here = slice(start, min(start + CHUNK, fragment.size))
    before, after = published_value[here], new[here]
    codec.decode_chunk(codec.part(change, fragment.size, start), change.codec, after)
    if change.codec != "f32":
      np.add(before, after, out=after)
    old = None if momentum is None else momentum[here]
    outer.followed(old, before, after, config, speed[here], scratch[: after.size])
  return new, None if momentum is None else speed
