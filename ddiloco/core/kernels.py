"""The passes of `core/passes.py` over one segment, compiled by numba for int8 and int4: the same
operations, in the same order wherever they round, so the same bits; only sums of squares are
rounded differently.

The loops over pieces, blocks and pushes are here; `core/instructions.py` has the operations on many
values. Eight int4 pushes are added up at 0.75 ns a value and core, where NumPy takes 18 and XLA on
the CPU 5 (`docs/design.md`, "What a commit computes with"). Nothing here holds the GIL, and one
call works on a whole segment: threads that take the GIL between chunks would wait for each other.
Compiled code is kept beside this file, or in the user's cache folder, for the next process.

`scales` and `codes` are a payload's two parts (`core/codec.py`); `start` is where a chunk begins;
`spans` and `runs` are a segment's (`passes.Segment`). A chunk's int4 codes are pairs: byte i has
the code of value i in its low half, and that of value half + i in its high half. In int8 all codes
count as low ones, and `half` is the size of the chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
from numba.core.caching import FunctionCache, NullCache

from ddiloco.config import OuterConfig
from ddiloco.core import codec, instructions, outer, passes
from ddiloco.core.codec import BLOCK, CHUNK, Encoded
from ddiloco.core.instructions import WIDE
from ddiloco.core.passes import GROUP, Chunk, Segment, Vectors

_TINY = np.finfo(np.float32).tiny
_MAX = np.finfo(np.float32).max
_LARGE = np.float32(_MAX / 256)  # with smaller scales every code is a finite value
_NONE = np.empty(0, np.float32)
_INT4_LEVELS = codec.LEVELS["int4"]

_KERNELS: list[Any] = []  # all functions compiled here


def _compiled(function: Any, **options: Any) -> Any:
  options |= {"nogil": True, "error_model": "numpy"}  # no check for a division by 0
  try:
    kernel = numba.njit(cache=True, **options)(function)
    # numba compiles anew when this file has changed. What these files define is compiled in, too.
    one_of_each = codec.parts, passes.step, instructions._instruction
    files = kernel._cache, *map(FunctionCache, one_of_each)
    kernel._cache._cache_file._source_stamp = [each._cache_file._source_stamp for each in files]
  except RuntimeError:  # no folder for the compiled code: every process compiles again
    kernel = numba.njit(**options)(function)
  _KERNELS.append(kernel)
  return kernel


class Pushes:
  """Some pushes in the same codec to be added up; see `passes.Sum`.

  Args:
    size: of each, in values.
    pushes: M of them.
    units: f32 [pieces] of each.
  """

  def __init__(self, size: int, pushes: Sequence[Encoded], units: Sequence[np.ndarray]):
    # Kept since the kernels have only their addresses; scales are copied if they are unaligned.
    self._parts = [
      (np.require(scales, requirements="A"), codes)
      for scales, codes in (codec.parts(push, size) for push in pushes)
    ]
    # Writable and read-only arrays are two types to numba, each compiled for itself: fix one.
    for scales, codes in self._parts:
      scales.flags.writeable = codes.flags.writeable = False
    rows = -(-len(pushes) // GROUP) * GROUP
    padded = np.zeros((len(units[0]), rows), np.float32)  # by piece; 0 beyond the last push
    padded[:, : len(pushes)] = np.transpose(units)
    each = [self._parts[min(m, len(pushes) - 1)] for m in range(rows)]
    addresses = np.array([[part.ctypes.data for part in parts] for parts in each], np.int64)
    self.arguments = addresses, padded, pushes[0].codec == "int4"
    self._is_push = len(pushes) == 1 and bool((units[0] == 1).all())

  def read(self, chunk: Chunk, total: np.ndarray) -> None:
    """Writes a chunk of the pushes' sum into `total` [chunk]."""
    _add(*self.arguments, chunk.start, chunk.runs, total)

  def squares(self, segment: Segment, sums: np.ndarray) -> None:
    """Adds each piece's sum of squares of the pushes' sum to `sums`, which are 0."""
    place = segment.spans, segment.runs, sums
    if not (self._is_push and _squares(*self._parts[0], self.arguments[2], *place)):
      sums.fill(0)
      _sum_squares(*self.arguments, *place)


class Stepper:
  """Takes one outer step of a fragment on the sum of these pushes; see `passes.step`."""

  def __init__(
    self,
    pushes: Pushes,
    old: Vectors,
    new: Vectors,
    stretch: np.ndarray,
    config: OuterConfig,
    update: Encoded,
  ):
    rates = np.array([config.learning_rate, config.momentum, *outer.factors(config)], np.float32)
    kind = 0 if old.momentum is None else 2 if config.nesterov else 1
    arrays = tuple(_NONE if each is None else each for each in (*old, *new))
    wire = *codec.parts(update, old.value.size), np.float32(codec.LEVELS[update.codec])
    self._pushes, self._step = pushes, (stretch, arrays, rates, kind, wire)

  def step(self, segment: Segment) -> None:
    """Steps a segment."""
    _step_segment(self._pushes.arguments, segment.spans, segment.runs, *self._step)


def compile_all(segment: Segment, vectors: Vectors, config: OuterConfig) -> str:
  """Compiles all kernels, or loads them from the cache, by a run on this chunk of one piece.

  A broken cache must not end a shard: if it cannot be written or read, nothing is cached. Returns
  the reason; "" if the cache works.
  """
  try:
    _call_all(segment, vectors, config)
  except Exception as error:  # for example a full disk, or a cached file damaged by a power cut
    for kernel in _KERNELS:
      kernel._cache = NullCache()
    _call_all(segment, vectors, config)
    return f"{type(error).__name__}: {error}"
  return ""


def _call_all(segment: Segment, vectors: Vectors, config: OuterConfig) -> None:
  one, value, (chunk,) = np.ones(1, np.float32), vectors.value, segment.chunks()
  push = Encoded("int8", codec.encode(value, "int8"))
  pushes = Pushes(value.size, [push, push], [one, one])
  pushes.read(chunk, value)
  for each in (pushes, Pushes(value.size, [push], [one])):
    each.squares(segment, np.zeros(1))
  Stepper(pushes, vectors, vectors, one, config, push).step(segment)


# --- Pushes, added up


@_compiled
def _alike(at, half, size, runs, run):
  """The end of the bytes from `at` on whose low codes share block and piece, and high codes too.

  `run` [2]: indices of the runs of low and high codes, advanced here; int8 has no high codes.
  """
  to = half
  for part in range(2):
    place = at + part * half
    if place < size:
      while runs[run[part], 1] <= place:
        run[part] += 1
      to = min(to, min(runs[run[part], 1], (place // BLOCK + 1) * BLOCK) - part * half)
  return to


@_compiled
def _squares(scales, codes, int4, spans, runs, sums):
  """Adds each piece's sum of squares of one push, from sums of its codes' squares, in a fourth of
  the time that adding up takes; False, and `sums` invalid, if a value may not be finite."""
  nothing, few = np.uint8(0x88 if int4 else 0), np.empty(BLOCK, np.uint8)
  for c in range(spans.shape[0]):
    start, stop, first, last = spans[c]
    size, mine, at, run = stop - start, runs[first:last], 0, np.zeros(2, np.int64)
    half, byte = ((size + 1) // 2, start // 2) if int4 else (size, start)
    for scale in scales[start // BLOCK : (stop + BLOCK - 1) // BLOCK]:
      if not abs(scale) < _LARGE:
        return False
    while at < half:
      to = _alike(at, half, size, mine, run)
      here = codes.ctypes.data + byte + at
      if to - at < BLOCK:  # filled up with codes 0
        few[:] = nothing
        _copy(codes[byte + at : byte + to], few)
        here = few.ctypes.data
      for part, squared in enumerate(instructions.squares_of_block(here, int4)):
        place = part * half + at
        if place < size:
          scale = np.float64(scales[(start + place) // BLOCK])
          sums[mine[run[part], 2]] += scale * scale * squared
      at = to
  return True


@_compiled
def _add(addresses, units, int4, start, runs, total):
  """A chunk of the sum of all pushes, some pushes at a time.

  `addresses` [M, 2]: of each push's scales and codes; `units` f32 [pieces, M].
  """
  few = np.zeros((GROUP, WIDE), np.uint8), np.empty((2, WIDE), np.float32)
  total[:] = np.float32(0)
  for group in range(0, addresses.shape[0], GROUP):
    here, mine = addresses[group : group + GROUP], units[:, group : group + GROUP]
    _add_group(here, mine, int4, start, runs, total, few)


@_compiled
def _add_group(addresses, units, int4, start, runs, total, few):
  """Adds a chunk of some pushes to their sum. Bytes that are `_alike` share their factors."""
  at, size, run, (copies, values) = 0, total.size, np.zeros(2, np.int64), few
  half, byte = ((size + 1) // 2, start // 2) if int4 else (size, start)
  while at < half:
    to, parts = _alike(at, half, size, runs, run), 2 if half + at < size else 1
    low = high = _factors(addresses, units, int4, start + at, runs[run[0], 2])
    if parts > 1:
      high = _factors(addresses, units, int4, start + half + at, runs[run[1], 2])
    while at < to:
      count, place, apart = min(WIDE, to - at), np.intp(total.ctypes.data) + 4 * at, 4 * half
      codes = instructions.moved(addresses.ctypes.data + 8, byte + at)
      if count < WIDE:  # add up copies
        for k in range(GROUP):
          for i in range(count):
            copies[k, i] = instructions.read_byte(codes[k] + i)
        values[:], codes = np.float32(0), instructions.rows(copies.ctypes.data)
        place, apart = np.intp(values.ctypes.data), 4 * WIDE
      if int4:
        instructions.add_low(place, low, codes)
        instructions.add_high(place + apart, high, codes)
      else:
        instructions.add_int8(place, low, codes)
      if count < WIDE:
        for part in range(parts):
          for i in range(count):
            total[part * half + at + i] += values[part, i]
      at += count


@_compiled
def _factors(addresses, units, int4, place, piece):
  scales = instructions.moved(addresses.ctypes.data, 4 * (place // BLOCK))
  return instructions.factors(units.ctypes.data + piece * units.strides[0], scales, int4)


@functools.partial(_compiled, fastmath={"reassoc", "contract"})
def add_squares(values, runs, sums):
  """Adds each piece's sum of squares of a chunk of values to `sums`, in any order."""
  for r in range(runs.shape[0]):
    at, end, piece = runs[r]
    part, total = values[at:end], np.float64(0)
    for i in range(part.size):
      total += np.float64(part[i]) * np.float64(part[i])
    sums[piece] += total


@_compiled
def _sum_squares(addresses, units, int4, spans, runs, sums):
  total = np.empty(CHUNK, np.float32)
  for c in range(spans.shape[0]):
    start, stop, first, last = spans[c]
    here, mine = total[: stop - start], runs[first:last]
    _add(addresses, units, int4, start, mine, here)
    add_squares(here, mine, sums)


# --- The outer step on the pushes' sum


@_compiled
def _step_segment(pushes, spans, runs, stretch, arrays, rates, kind, wire):
  addresses, units, int4 = pushes
  total = np.empty(CHUNK, np.float32)
  for c in range(spans.shape[0]):
    start, stop, first, last = spans[c]
    here, mine = total[: stop - start], runs[first:last]
    _add(addresses, units, int4, start, mine, here)
    _step(start, mine, stretch, here, arrays, rates, kind, wire)


@_compiled
def _step(start, runs, stretch, delta, arrays, rates, kind, wire):
  """The outer step of one chunk, block by block; overwrites the delta, which is the pushes' sum."""
  value, published, momentum, new_value, new_published, new_momentum = arrays
  scales, payload, levels = wire
  if kind == 0:  # no momentum: any vector may be read in its place, and none is written
    momentum = new_momentum = value
  at, run, size, block = 0, 0, delta.size, start // BLOCK
  codes, rows = np.empty(size + BLOCK, np.int8), np.empty((4, BLOCK), np.float32)
  old = value.ctypes.data, published.ctypes.data, momentum.ctypes.data
  new = new_value.ctypes.data, new_published.ctypes.data, new_momentum.ctypes.data
  while at < size:
    while runs[run, 1] <= at:
      run += 1
    stop, there, to = at + BLOCK, 4 * (start + at), codes.ctypes.data + at
    if stop <= runs[run, 1]:
      here, long = delta.ctypes.data + 4 * at, stretch[runs[run, 2]]
      before = old[0] + there, old[1] + there, old[2] + there
      after = new[0] + there, new[1] + there, new[2] + there
      scales[block] = _step_block(here, long, before, after, rates, kind, levels, to)
    else:  # a block of several pieces, or the last one: step a copy, filled up with zeros
      stop = min(size, stop)
      n, here = stop - at, slice(start + at, start + stop)
      rows[:] = np.float32(0)
      _stretched(delta[at:stop], at, runs[run:], stretch, rows[0])
      for row, source in ((1, value), (2, published), (3, momentum)):
        _copy(source[here], rows[row, :n])
      beside, one = (rows[1].ctypes.data, rows[2].ctypes.data, rows[3].ctypes.data), np.float32(1)
      scales[block] = _step_block(rows.ctypes.data, one, beside, beside, rates, kind, levels, to)
      _copy(rows[1, :n], new_value[here])
      _copy(rows[2, :n], new_published[here])
      if kind:
        _copy(rows[3, :n], new_momentum[here])
    at, block = stop, block + 1
  _pack(codes[:size], levels == _INT4_LEVELS, start, payload)


@_compiled
def _stretched(delta, at, runs, stretch, out):
  """out = a part of a chunk, from `at` on, times each piece's stretch."""
  run = 0
  for i in range(delta.size):
    while runs[run, 1] <= at + i:
      run += 1
    out[i] = delta[i] * stretch[runs[run, 2]]


@_compiled
def _step_block(delta, long, old, new, rates, kind, levels, codes):
  """The outer step of one block, like `outer.update` and `codec._quantise`; overwrites the delta.

  Returns the block's scale. `delta` and `codes` are addresses. `old` and `new` are addresses of
  value, published value and momentum, and may be the same.
  """
  numbers = rates[0], rates[1], rates[2], rates[3]
  for i in range(0, 4 * BLOCK, 64):
    before = old[0] + i, old[1] + i, old[2] + i
    instructions.move_16(delta + i, long, before, new[0] + i, numbers, kind)
  scale = _scale(instructions.peak(delta), levels)
  divisor = scale
  if not scale > 0:  # a block of zeros, or one with a NaN or infinity: all codes are 0
    divisor = np.float32(np.inf)
    instructions.set_zero(delta)
  for i in range(0, 4 * BLOCK, 64):
    known, told = (old[1] + i, old[2] + i), (codes + i // 4, new[1] + i, new[2] + i)
    instructions.publish_16(delta + i, divisor, scale, known, told, numbers, kind)
  return scale


@_compiled
def _copy(source, target):
  for i in range(source.size):
    target[i] = source[i]


@_compiled
def _scale(peak, levels):
  """The scale of a block, as in `codec._scale`, also at the edges of f32."""
  if not np.isfinite(peak):
    return np.float32(np.nan)
  scale = peak / levels
  if scale < _TINY and scale * levels < peak:
    scale = np.nextafter(scale, np.float32(np.inf))
  return min(scale, np.nextafter(np.float32(_MAX / levels), np.float32(0)))


@_compiled
def _pack(codes, int4, start, payload):
  """Writes the codes of a chunk into the payload."""
  size = codes.size
  if not int4:
    _copy(codes.view(np.uint8), payload[start : start + size])
    return
  half = (size + 1) // 2
  packed, low, high = payload[start // 2 : start // 2 + half], codes[:half], codes[half:]
  for i in range(high.size):
    packed[i] = np.uint8(136 + low[i] + 16 * high[i])
  if size % 2:
    packed[half - 1] = np.uint8(136 + low[half - 1])
