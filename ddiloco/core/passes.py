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
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ddiloco.config import OuterConfig
from ddiloco.core import codec, outer
from ddiloco.core.codec import CHUNK, Encoded
from ddiloco.core.fragments import Fragment
from ddiloco.protocol.values import Frozen

COMPILED_FROM = 1 << 22  # values of a fragment; below, compiling takes longer than it saves
SEGMENT = 16 * CHUNK  # a million values: a thread's unit of work
SAMPLED = 1 << 16  # at most so many values of a fragment are compared for directions
_DOT_CHUNK = 1 << 13  # short enough that BLAS uses one thread, so bits do not depend on the cores
_DOT_TRUSTED = 1e-30  # below, f32 products may have underflowed: they are computed again in f64


class Chunk(Frozen):
  """Values [start, stop) of a fragment, and the runs of pieces within them."""

  start: int
  stop: int
  runs: np.ndarray  # i64 [runs, 3]: from, to (counted from `start`), index of the piece


class Segment(Frozen):
  """Consecutive chunks: a thread's unit of work."""

  chunks: tuple[Chunk, ...]

  @functools.cached_property
  def spans(self) -> np.ndarray:
    """i64 [chunks, 4], for the kernels: start, stop, and the range of the chunk's `runs`."""
    ends = np.cumsum([0, *(len(chunk.runs) for chunk in self.chunks)])
    places = zip(self.chunks, ends, ends[1:], strict=False)
    return np.array([(c.start, c.stop, first, end) for c, first, end in places], np.int64)

  @functools.cached_property
  def runs(self) -> np.ndarray:
    """i64 [runs, 3] of all chunks."""
    return np.concatenate([chunk.runs for chunk in self.chunks])


@functools.lru_cache(maxsize=256)
def segments(fragment: Fragment) -> list[Segment]:
  """The segments of a fragment, which cover all its values."""
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
  return [Segment(tuple(chunks[i : i + each])) for i in range(0, len(chunks), each)]


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


def compile_for(fragment: Fragment, config: OuterConfig) -> str:
  """Compiles the kernels for a fragment of this size, so that the first push need not wait for it.

  Returns why the compiled code cannot be kept for the next process; "" if it can.
  """
  if fragment.size >= COMPILED_FROM:
    size = 2 * codec.BLOCK
    one, speed = np.ones(size, np.float32), outer.init(size, config)
    segment = Segment((Chunk(0, size, np.array([[0, size, 0]], np.int64)),))
    reason: str = _kernels().compile_all(segment, Vectors(one, one, speed), config)
    return reason
  return ""


def _opened(fragment: Fragment, encoded: Encoded) -> Any:
  """A payload for the kernels; None: NumPy reads it."""
  if fragment.size >= COMPILED_FROM and encoded.codec in codec.LEVELS:
    return _kernels().Opened(encoded, fragment.size)
  return None


# --- One push: its norms


def squares(fragment: Fragment, push: Encoded, share: Share = map) -> np.ndarray:
  """|delta|^2 of each piece, f64 [pieces]; not finite exactly where a value is not.

  Raises:
    CodecError: a code that no encoder writes.
  """
  opened = _opened(fragment, push)

  def add(segment: Segment, sums: np.ndarray) -> None:
    if opened is not None and _kernels().squares(opened, segment, sums):
      return
    sums.fill(0)  # of a bad payload NumPy's error says what is wrong
    row = np.empty(CHUNK, np.float32)
    for chunk in segment.chunks:
      here = row[: chunk.stop - chunk.start]
      codec.decode_chunk(push, fragment.size, chunk.start, here)
      _add_squares(here, chunk.runs, sums)

  return _summed(fragment, add, share)


def _summed(
  fragment: Fragment, add: Callable[[Segment, np.ndarray], None], share: Share
) -> np.ndarray:
  """The sums that `add` makes, per piece, over all segments: f64 [pieces]."""

  def work(segment: Segment) -> np.ndarray:
    sums = np.zeros(len(fragment.pieces))
    add(segment, sums)
    return sums

  total = np.zeros(len(fragment.pieces))
  with np.errstate(all="ignore"):  # a sum that is not finite is a result, for the screening
    for sums in share(work, segments(fragment)):
      total += sums
  return total


def _add_squares(values: np.ndarray, runs: np.ndarray, sums: np.ndarray) -> None:
  for start, stop, piece in runs.tolist():
    sums[piece] += dot(values[start:stop], values[start:stop])


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
def _sampled(
  fragment: Fragment, compared: tuple[int, ...]
) -> list[tuple[Chunk, list[tuple[int, int, int]]]]:
  """All values of a small fragment; of a large one an equal number from each of 16 chunks."""
  found = []
  for segment in segments(fragment):
    for chunk in segment.chunks:
      runs = [tuple(run) for run in chunk.runs.tolist() if run[2] in compared]
      if runs:
        found.append((chunk, runs))
  if sum(stop - start for _, runs in found for start, stop, _ in runs) <= SAMPLED:
    return found
  spread = [found[i * len(found) // 16] for i in range(16)] if len(found) > 16 else found
  return [(chunk, _first(runs, SAMPLED // len(spread))) for chunk, runs in spread]


def _first(runs: list[tuple[int, int, int]], count: int) -> list[tuple[int, int, int]]:
  kept = []
  for start, stop, piece in runs:
    stop = min(stop, start + count)
    kept.append((start, stop, piece))
    count -= stop - start
    if not count:
      break
  return kept


# --- A commit: the length of the pushes' sum, then the outer step on it


class Sum:
  """sum_m units[m, piece] * push_m, chunk by chunk; of a large fragment never as a whole vector.

  Sums run in the order of `pushes`: sort them by learner for results that do not depend on the
  order of arrival. A push adds nothing where its unit is 0, whatever its scale.

  Args:
    fragment: the pieces' fragment.
    pushes: M of them, whose codes were checked by `squares`.
    units: f32 [M, pieces].
  """

  def __init__(self, fragment: Fragment, pushes: Sequence[Encoded], units: np.ndarray):
    self.fragment = fragment
    self._terms = [(push, mine) for push, mine in zip(pushes, units) if mine.any()]
    opened = [_opened(fragment, push) for push, _ in self._terms]
    together = len({push.codec for push, _ in self._terms}) == 1 and opened[0] is not None
    self.compiled: Any = _kernels().Pushes(opened, units[units.any(axis=1)]) if together else None
    self._keeps = fragment.size < COMPILED_FROM  # for these, adding again would take longer
    self._kept: dict[int, np.ndarray] = {}  # sums by the chunk's start

  def read(self, chunk: Chunk, total: np.ndarray, scratch: np.ndarray) -> None:
    """Writes a chunk of the sum into `total` [chunk] f32; `scratch`, as long, is written over."""
    if self.compiled is not None:
      self.compiled.read(chunk, total)
      return
    if (kept := self._kept.get(chunk.start)) is not None:
      total[:] = kept
      return
    total.fill(0)
    runs = chunk.runs.tolist()
    with np.errstate(all="ignore"):  # a sum that is not finite is a result
      for push, mine in self._terms:
        codec.decode_chunk(push, self.fragment.size, chunk.start, scratch)
        for start, stop, piece in runs:
          if mine[piece]:
            product = scratch[start:stop]
            product *= mine[piece]
            total[start:stop] += product
    if self._keeps:
      self._kept[chunk.start] = total.copy()


def sum_squares(total: Sum, share: Share = map) -> np.ndarray:
  """|sum|^2 of each piece, f64 [pieces]."""

  def add(segment: Segment, sums: np.ndarray) -> None:
    rows = np.empty((2, CHUNK), np.float32)
    for chunk in segment.chunks:
      here, scratch = rows[:, : chunk.stop - chunk.start]
      total.read(chunk, here, scratch)
      _add_squares(here, chunk.runs, sums)

  compiled = total.compiled
  return _summed(total.fragment, add if compiled is None else compiled.add_squares, share)


def sample(total: Sum, stretch: np.ndarray, compared: Sequence[int]) -> np.ndarray:
  """`stretch * total` at [at most SAMPLED] places in the pieces `compared`, f32; `stretch` is f32
  [pieces]. The places depend on the fragment only."""
  values = [np.empty(0, np.float32)]
  for chunk, runs in _sampled(total.fragment, tuple(compared)):
    row, scratch = np.empty((2, chunk.stop - chunk.start), np.float32)
    total.read(chunk, row, scratch)
    values += [row[start:stop] * stretch[piece] for start, stop, piece in runs]
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
  stretch: np.ndarray,
  old: Vectors,
  config: OuterConfig,
  name: str,
  share: Share = map,
  new: Vectors | None = None,
) -> tuple[Vectors, Encoded | None]:
  """The outer step on `stretch * total`, and its update in the wire codec, in one pass.

  Rounding errors do not add up: an update starts at the value that learners really have.

  Args:
    total: of the pushes.
    stretch: f32 [pieces].
    old: as of the step before.
    config: of the outer optimizer.
    name: the codec of updates; "f32": learners get the new value itself.
    share: runs the segments, on some threads.
    new: the vectors to write to, which may be the old ones. None: fresh ones.

  Returns:
    (the new vectors, the update from the published value before; None: values go out whole).
  """
  fragment, size, lossy = total.fragment, total.fragment.size, name != "f32"
  if new is None:
    value, momentum = np.empty(size, np.float32), old.momentum
    speed = None if momentum is None else np.empty(size, np.float32)
    new = Vectors(value, np.empty(size, np.float32) if lossy else value, speed)
  update = codec.empty(size, name) if lossy else None
  stepper = None
  if size >= COMPILED_FROM and name in ("f32", *codec.LEVELS):
    stepper = _kernels().Stepper(old, new, stretch, config, update)

  def work(segment: Segment) -> None:
    if stepper is not None and total.compiled is not None:
      stepper.segment(segment, total.compiled)
      return
    rows = np.empty((3, CHUNK), np.float32)
    for chunk in segment.chunks:
      here = rows[:, : chunk.stop - chunk.start]
      total.read(chunk, here[0], here[1])
      if stepper is not None:
        stepper.chunk(chunk, here[0])
      else:
        _step(chunk, here, old, new, stretch, config, update)

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
  fragment: Fragment,
  published_value: np.ndarray,
  momentum: np.ndarray | None,
  change: Encoded,
  config: OuterConfig,
) -> None:
  """Repeats, on a copy, the step whose result learners get as `change`.

  The copy has the shard's bits: an update is added; a change in f32 is the new value itself.

  Args:
    fragment: the vectors' fragment.
    published_value: [size] f32, before; becomes the new one.
    momentum: [size] f32, before; becomes the new one. None without.
    change: in the wire codec.
    config: of the outer optimizer.

  Raises:
    CodecError: a code that no encoder writes; the vectors are invalid then.
  """
  rows = np.empty((3, CHUNK), np.float32)

  def chunk(here: slice) -> None:
    before, after, scratch = rows[:, : here.stop - here.start]
    codec.decode_chunk(change, fragment.size, here.start, after)
    before[:] = published_value[here]
    if change.codec != "f32":
      np.add(before, after, out=after)
    published_value[here] = after
    if momentum is not None:
      outer.followed(momentum[here], before, after, config, momentum[here], scratch)

  over_chunks(fragment.size, chunk)
