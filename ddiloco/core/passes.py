"""The passes over all values of one fragment: measure a push, combine pushes, take the outer step.

A fragment of a large model has half a billion values, and pushes stay in the wire codec until a
commit reads them. So every pass goes chunk by chunk: the temporary values of a chunk stay in the
core's own cache. Segments, which are groups of chunks of fixed size, are the units of work for
threads, and their sums are added in order: any number of threads gives the same bits.

The work on a chunk is written twice. The NumPy code here is the reference. `core/kernels.py` has
compiled code, many times as fast, for fragments so large that compiling pays.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ddiloco.config import Config, OuterConfig
from ddiloco.core import codec, outer
from ddiloco.core.codec import BLOCK, CHUNK, Encoded
from ddiloco.core.fragments import Fragment

COMPILED_FROM = 1 << 22  # values of a fragment; below, compiling takes longer than it saves
SEGMENT = 16 * CHUNK  # a million values: a thread's unit of work
SAMPLED = 1 << 16  # at most so many values of a fragment are compared for directions
GROUP = 8  # pushes whose codes are added up as whole numbers
FINEST = 1 << 14  # their largest factor: sums of eight int8 codes are exact in f32
_DOT_CHUNK = 1 << 13  # short enough that BLAS uses one thread, so bits do not depend on the cores
_DOT_TRUSTED = 1e-30  # below, f32 products may have underflowed: they are computed again in f64


class Chunk(NamedTuple):
  """Values [start, stop) of a fragment, and the runs of pieces within them."""

  start: int
  stop: int
  runs: np.ndarray  # i64 [runs, 3]: from, to (counted from `start`), index of the piece


class Segment(NamedTuple):
  """Consecutive chunks: a thread's unit of work. As arrays, for the kernels."""

  spans: np.ndarray  # i64 [chunks, 4]: start, stop, and the chunk's range in `runs`
  runs: np.ndarray  # i64 [runs, 3], of the whole fragment

  def chunks(self) -> Iterator[Chunk]:
    """Its chunks."""
    for start, stop, first, end in self.spans.tolist():
      yield Chunk(start, stop, self.runs[first:end])


@functools.lru_cache(maxsize=256)
def segments(fragment: Fragment) -> list[Segment]:
  """The segments of a fragment, which cover all its values."""
  spans: list[list[int]] = []
  runs: list[tuple[int, int, int]] = []
  for index, piece in enumerate(fragment.pieces):
    at, end = piece.offset, piece.offset + piece.size
    while at < end:
      start = at - at % CHUNK
      if at == start:
        spans.append([start, start, len(runs), len(runs)])
      stop = min(end, start + CHUNK)
      runs.append((at - start, stop - start, index))
      spans[-1][1], spans[-1][3] = stop, len(runs)
      at = stop
  places, all_runs, each = np.array(spans, np.int64), np.array(runs, np.int64), SEGMENT // CHUNK
  return [Segment(places[i : i + each], all_runs) for i in range(0, len(spans), each)]


# `map`, or the `map` of a thread pool, which runs the work on its threads.
Share = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]


def over_chunks(size: int, work: Callable[[slice], None], share: Share = map) -> None:
  """Calls `work` with the place of every chunk of a vector; `share` distributes the segments."""

  def segment(start: int) -> None:
    for at in range(start, min(start + SEGMENT, size), CHUNK):
      work(slice(at, min(at + CHUNK, size)))

  list(share(segment, range(0, size, SEGMENT)))


@functools.cache
def _kernels() -> Any:
  from ddiloco.core import kernels  # costs half a second and 60 MB: for large fragments only

  return kernels


def compile_for(fragment: Fragment, config: Config) -> str:
  """Compiles the kernels for a fragment of this size and codec, so that the first push need not
  wait for it.

  Returns why the compiled code cannot be kept for the next process; "" if it can.
  """
  if not _by_kernels(fragment, config.sync.push_codec):
    return ""
  size = 2 * codec.BLOCK
  one, speed = np.ones(size, np.float32), outer.init(size, config.outer)
  segment = Segment(np.array([[0, size, 0, 1]]), np.array([[0, size, 0]]))
  reason: str = _kernels().compile_all(segment, Vectors(one, one, speed), config.outer)
  return reason


def _by_kernels(fragment: Fragment, name: str) -> bool:
  """Whether kernels read or write payloads in this codec: those of f32 and bf16 cost so much more
  on the network that faster arithmetic would save nothing."""
  return fragment.size >= COMPILED_FROM and name in codec.LEVELS


class Sum:
  """sum_m units[m, piece] * push_m, chunk by chunk, never as a whole vector.

  Sums run in the order of `pushes`: sort them by learner for results that do not depend on the
  order of arrival. A push adds nothing where its unit is 0, whatever its scale.

  In int8 and int4 a push's codes count with the factor scale * unit. In each block of a piece the
  factors of `GROUP` pushes are rounded to multiples of 2^-14 of the largest one: an error a
  hundred times smaller than that of the codes themselves, or less. So codes and factors are whole
  numbers, and the sum of their products is exact in any order: a CPU adds up many at once.

  Args:
    fragment: the pieces' fragment.
    pushes: M of them, in one codec.
    units: f32 [M, pieces].

  Attributes:
    stretch: f32 [pieces], the factor by which `sample` and `step` take each piece of the sum; 1
      unless the merge rule says otherwise.
  """

  def __init__(self, fragment: Fragment, pushes: Sequence[Encoded], units: np.ndarray):
    self.fragment, self.stretch = fragment, np.ones(len(fragment.pieces), np.float32)
    self._terms = list(zip(pushes, units))
    self.compiled: Any = None
    if pushes and _by_kernels(fragment, pushes[0].codec):
      self.compiled = _kernels().Pushes(fragment.size, pushes, units)

  def read(self, chunk: Chunk, total: np.ndarray, scratch: np.ndarray) -> None:
    """Writes a chunk of the sum into `total` [chunk] f32; `scratch`, as long, is written over."""
    if self.compiled is not None:
      self.compiled.read(chunk, total)
      return
    total.fill(0)
    with np.errstate(all="ignore"):  # a sum that is not finite is a result
      if self._terms and self._terms[0][0].codec in codec.LEVELS:
        for at in range(0, len(self._terms), GROUP):
          self._add_codes(self._terms[at : at + GROUP], chunk, total, scratch)
        return
      for push, mine in self._terms:
        codec.decode_chunk(push, self.fragment.size, chunk.start, scratch)
        for start, stop, piece in chunk.runs.tolist():
          if mine[piece]:
            product = scratch[start:stop]
            product *= mine[piece]
            total[start:stop] += product

  def _add_codes(
    self, terms: Sequence[Any], chunk: Chunk, total: np.ndarray, scratch: np.ndarray
  ) -> None:
    """Adds a chunk of at most `GROUP` terms, (push, units), to `total`."""
    size, (starts, _, pieces) = self.fragment.size, chunk.runs.T
    # The parts of a chunk that lie in one block and one piece.
    begins = np.union1d(np.arange(0, total.size, BLOCK), starts)
    lengths, blocks = np.diff(begins, append=total.size), (chunk.start + begins) // BLOCK
    pieces = pieces[np.searchsorted(starts, begins, side="right") - 1]
    scales = np.stack([codec.parts(push, size)[0][blocks] for push, _ in terms])
    units = np.stack([mine[pieces] for _, mine in terms])
    factors = np.where(units != 0, scales * units, np.float32(0))
    largest = np.abs(factors).max(axis=0)
    whole = np.rint(factors / largest * np.float32(FINEST))
    whole[np.isnan(whole)] = 0  # 0 / 0; or the largest is not finite, nor then is the sum
    added = np.zeros_like(total)
    for (push, _), mine in zip(terms, whole):
      codec.read_codes(push, size, chunk.start, scratch)
      scratch *= np.repeat(mine, lengths)
      added += scratch
    added *= np.float32(1 / FINEST)
    added *= np.repeat(largest, lengths)
    total += added


def squares(total: Sum, share: Share = map) -> np.ndarray:
  """|sum|^2 of each piece, f64 [pieces]; not finite exactly where a value is not."""

  def work(segment: Segment) -> np.ndarray:
    sums = np.zeros(len(total.fragment.pieces))
    if total.compiled is not None:
      total.compiled.squares(segment, sums)
      return sums
    rows = np.empty((2, CHUNK), np.float32)
    for chunk in segment.chunks():
      here, scratch = rows[:, : chunk.stop - chunk.start]
      total.read(chunk, here, scratch)
      for start, stop, piece in chunk.runs.tolist():
        sums[piece] += dot(here[start:stop], here[start:stop])
    return sums

  return sum(share(work, segments(total.fragment)), np.zeros(len(total.fragment.pieces)))


def dot(a: np.ndarray, b: np.ndarray) -> float:
  """<a, b> of two flat f32 vectors; not finite exactly where a value is not."""
  total = 0.0
  with np.errstate(all="ignore"):
    for start in range(0, a.size, _DOT_CHUNK):
      total += float(np.dot(a[start : start + _DOT_CHUNK], b[start : start + _DOT_CHUNK]))
    if _DOT_TRUSTED < abs(total) < math.inf:
      return total
    total = 0.0  # an over- or underflow in f32, or truly zero, NaN or infinite: f64 decides
    for start in range(0, a.size, _DOT_CHUNK):
      part = slice(start, start + _DOT_CHUNK)
      total += float(np.dot(a[part].astype(np.float64), b[part].astype(np.float64)))
  return total


@functools.lru_cache(maxsize=256)
def _sampled(fragment: Fragment) -> list[tuple[Chunk, list[list[int]]]]:
  """At most 16 chunks, evenly spread, each with those of its runs whose directions are compared:
  of the pieces that are merged by RDA; if none is, of all."""
  directed = [index for index, piece in enumerate(fragment.pieces) if not piece.average]
  compared = directed or range(len(fragment.pieces))
  chunks = [chunk for segment in segments(fragment) for chunk in segment.chunks()]
  found = [(c, c.runs[np.isin(c.runs[:, 2], compared)].tolist()) for c in chunks]
  found = [(chunk, runs) for chunk, runs in found if runs]
  count = min(16, len(found))
  return [found[i * len(found) // count] for i in range(count)]


def sample(total: Sum) -> np.ndarray:
  """`stretch * sum` at [at most SAMPLED] places, f32. The places depend on the fragment only: an
  equal number in each of some chunks, in the pieces whose directions are compared."""
  chunks, values = _sampled(total.fragment), [np.empty(0, np.float32)]
  for chunk, runs in chunks:
    row, scratch = np.empty((2, chunk.stop - chunk.start), np.float32)
    total.read(chunk, row, scratch)
    most = SAMPLED // len(chunks)
    parts = [row[start:stop][:most] * total.stretch[piece] for start, stop, piece in runs]
    values.append(np.concatenate(parts)[:most])
  return np.concatenate(values)


class Vectors(NamedTuple):
  """The vectors before or after an outer step; each f32 [size]."""

  value: np.ndarray
  published_value: np.ndarray  # the value that learners have; `value` itself where sent whole
  momentum: np.ndarray | None  # None without

  def part(self, start: int, stop: int) -> Vectors:
    """Views of these values."""
    views: Any = (None if each is None else each[start:stop] for each in self)
    return Vectors(*views)


def step(
  total: Sum,
  old: Vectors,
  config: OuterConfig,
  name: str,
  share: Share = map,
  in_place: bool = False,
) -> tuple[Vectors, Encoded | None]:
  """The outer step on `stretch * sum`, and its update in the wire codec, in one pass.

  Rounding errors do not add up: an update starts at the value that learners really have.

  Args:
    total: of the pushes.
    old: as of the step before.
    config: of the outer optimizer.
    name: the codec of updates; "f32": learners get the new value itself.
    share: runs the segments, on some threads.
    in_place: the new vectors overwrite the old ones.

  Returns:
    (the new vectors, the update from the published value before; None: values go out whole).
  """
  fragment, size, lossy = total.fragment, total.fragment.size, name != "f32"

  def target(each: np.ndarray) -> np.ndarray:
    return each if in_place else np.empty(size, np.float32)

  value = published_value = target(old.published_value)
  if lossy:  # where it begins on a value that learners have, one vector becomes two
    value = np.empty_like(value) if old.value is old.published_value else target(old.value)
  new = Vectors(value, published_value, None if old.momentum is None else target(old.momentum))
  update = codec.empty(size, name) if lossy else None
  stepper = None
  if total.compiled is not None and name in codec.LEVELS:
    stepper = _kernels().Stepper(total.compiled, old, new, total.stretch, config, update)

  def work(segment: Segment) -> None:
    if stepper is not None:
      stepper.step(segment)
      return
    rows = np.empty((3, CHUNK), np.float32)
    for chunk in segment.chunks():
      here = rows[:, : chunk.stop - chunk.start]
      total.read(chunk, here[0], here[1])
      _step(chunk, here, old, new, total.stretch, config, update)

  list(share(work, segments(fragment)))
  return new, update


def _step(
  chunk: Chunk,
  rows: np.ndarray,
  old: Vectors,
  new: Vectors,
  stretch: np.ndarray,
  config: OuterConfig,
  update: Encoded | None,
) -> None:
  """One chunk of `step`; `rows` f32 [3, chunk]: the sum, and scratch."""
  delta, before, scratch = rows
  was, now = old.part(chunk.start, chunk.stop), new.part(chunk.start, chunk.stop)
  for start, stop, piece in chunk.runs.tolist():
    np.multiply(delta[start:stop], stretch[piece], out=delta[start:stop])
  before[:] = was.published_value  # a copy, since the new vectors may be the old ones
  outer.update(was.value, was.momentum, delta, config, delta, scratch)
  now.value[:] = delta
  if update is not None:
    size = old.value.size
    np.subtract(delta, before, out=delta)
    codec.encode_chunk(delta, update, size, chunk.start, scratch)
    codec.decode_chunk(update, size, chunk.start, delta)
    np.add(before, delta, out=now.published_value)
  outer.followed(was.momentum, before, now.published_value, config, now.momentum, scratch)


# --- A buddy's copy: how the receiver of a commit's update follows it


def follow(
  published_value: np.ndarray,
  momentum: np.ndarray | None,
  change: Encoded,
  config: OuterConfig,
) -> None:
  """Repeats, on a copy, the step whose result learners get as `change`.

  The copy has the shard's bits: an update is added; a change in f32 is the new value itself.

  Args:
    published_value: [size] f32, before; becomes the new one.
    momentum: [size] f32, before; becomes the new one. None without.
    change: in the wire codec.
    config: of the outer optimizer.
  """
  size, rows = published_value.size, np.empty((3, CHUNK), np.float32)

  def chunk(here: slice) -> None:
    before, after, scratch = rows[:, : here.stop - here.start]
    codec.decode_chunk(change, size, here.start, after)
    before[:] = published_value[here]
    if change.codec != "f32":
      np.add(before, after, out=after)
    published_value[here] = after
    if momentum is not None:
      outer.followed(momentum[here], before, after, config, momentum[here], scratch)

  over_chunks(size, chunk)
