"""The passes of `core/passes.py` over one chunk, compiled by numba: the same operations in the same
order, so the same bits; only sums of squares are rounded otherwise.

Eight int4 pushes are decoded and added at 0.6 ns a value and core, where NumPy takes 18 and XLA on
the CPU 5 (`docs/design.md`, "What a commit computes with"). Nothing here holds the GIL. Compiled
code is kept beside this file, or in the user's cache folder, for the next process.

Loops are written so that they become vector instructions. One that reads and writes the same memory
under two names does not, and nothing says so (commits are in place, so old values go to scratch
first), nor does an assignment to a slice. A loop that reads all it needs from memory waits once.

`scales` and `codes` are a payload's two parts (`core/codec.py`); `start` is where the chunk begins.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np
from numba.core.caching import NullCache

from ddiloco.config import OuterConfig
from ddiloco.core import codec, outer
from ddiloco.core.codec import BLOCK, Encoded

TOGETHER = 4  # pushes that one loop adds; `_add` and `_unpack` are written out for four
TILE = 8 * BLOCK  # values: what one loop leaves for the next stays in the first cache
_TINY = np.finfo(np.float32).tiny
_MAX = np.finfo(np.float32).max
_ROUND = np.float32(3 << 22)  # added and subtracted: the nearest integer, ties to even


_KERNELS: list[Any] = []  # all that is compiled here


def _compiled(function: Any, **options: Any) -> Any:
  options |= {"nogil": True, "error_model": "numpy"}  # a division by 0 is not looked for
  try:
    kernel = numba.njit(cache=True, **options)(function)
  except RuntimeError:  # no folder to keep it in: compiled again by every process
    kernel = numba.njit(**options)(function)
  _KERNELS.append(kernel)
  return kernel


class Opened:
  """A payload of `size` values in int8 or int4, as the kernels read it, or write it."""

  def __init__(self, encoded: Encoded, size: int, written: bool = False):
    scale_bytes = 4 * -(-size // BLOCK)
    scales = encoded.payload[:scale_bytes].view(np.float32)
    self.scales = np.require(scales, requirements="A")  # a copy if it came unaligned
    self.codes = encoded.payload[scale_bytes:]
    self.int4 = encoded.codec == "int4"
    # To numba, arrays that may be written and others are two types: each would be compiled anew.
    self.scales.flags.writeable = self.codes.flags.writeable = written


def squares(push: Opened, chunk: Any, sums: np.ndarray) -> bool:
  """Adds each piece's sum of squares to `sums`; False, and nothing added, if a code is odd."""
  odd = _squares(push.scales, push.codes, push.int4, chunk.start, chunk.stop, chunk.runs, sums)
  return not odd


class Pushes:
  """Some pushes in the same codec, int8 or int4, to be added up; see `passes.Sum`.

  Args:
    pushes: M of them.
    units: f32 [M, pieces].
  """

  def __init__(self, pushes: Sequence[Opened], units: np.ndarray):
    self._int4, self._groups = pushes[0].int4, []
    for m in range(0, len(pushes), TOGETHER):
      group = [pushes[min(m + k, len(pushes) - 1)] for k in range(TOGETHER)]
      mine = np.zeros((TOGETHER, units.shape[1]), np.float32)  # 0 beyond the last one
      mine[: len(pushes) - m] = units[m : m + TOGETHER]
      self._groups.append((tuple(p.scales for p in group), tuple(p.codes for p in group), mine))

  def read(self, chunk: Any, total: np.ndarray) -> None:
    """Writes a chunk of their sum into `total` [chunk]."""
    for number, group in enumerate(self._groups):
      _add(*group, self._int4, number == 0, chunk.start, chunk.runs, total)


_NONE = np.empty(0, np.float32)


def stepper(
  old: Any, new: Any, stretch: np.ndarray, config: OuterConfig, update: Encoded | None
) -> Callable[[Any, np.ndarray], None]:
  """Takes one outer step of a fragment, chunk by chunk; see `passes.step`.

  What it returns is given a chunk, and the sum of the pushes there, f32 [chunk], which it spoils.
  """
  rates = np.array([config.learning_rate, config.momentum, *outer.factors(config)], np.float32)
  kind = 0 if old.momentum is None else 2 if config.nesterov else 1
  arrays = tuple(_NONE if each is None else each for each in (*old, *new))
  wire = _NONE, _NONE.view(np.uint8), False, np.float32(0)
  if update is not None:
    opened = Opened(update, old.value.size, written=True)
    wire = opened.scales, opened.codes, opened.int4, np.float32(codec.LEVELS[update.codec])

  def step(chunk: Any, total: np.ndarray) -> None:
    _step(chunk.start, chunk.runs, stretch, total, arrays, rates, kind, wire)

  return step


def compile_all(chunk: Any, vectors: Any, config: OuterConfig) -> str:
  """Compiles everything, or loads what was compiled, by working on this chunk of one piece.

  What is kept must not end a shard: where it cannot be written or read, nothing is kept. Returns
  why that is so; "" if all is well.
  """
  try:
    _call_all(chunk, vectors, config)
  except Exception as error:  # of a full disk, or of a file that a power cut has torn
    for kernel in _KERNELS:
      kernel._cache = NullCache()
    _call_all(chunk, vectors, config)
    return f"{type(error).__name__}: {error}"
  return ""


def _call_all(chunk: Any, vectors: Any, config: OuterConfig) -> None:
  one, value = np.ones(1, np.float32), vectors.value
  encoded = Encoded("int8", codec.encode(value, "int8"))
  push = Opened(encoded, value.size)
  squares(push, chunk, np.zeros(1))
  Pushes([push], one[:, None]).read(chunk, value)
  add_squares(value, chunk.runs, np.zeros(1))
  stepper(vectors, vectors, one, config, encoded)(chunk, np.ones_like(value))


@_compiled
def _run(at: int, end: int, half: int) -> int:
  """Where the values from `at` on that share a scale, and a half of the bytes, end."""
  stop = min(end, (at // BLOCK + 1) * BLOCK)
  return min(stop, half) if at < half else stop


@_compiled
def _squares(scales, codes, int4, start, stop, runs, sums):
  size = stop - start
  if int4:
    half = (size + 1) // 2
    codes = codes[start // 2 : start // 2 + half]
  else:
    half = size
    codes = codes[start:stop]
  scales = scales[start // BLOCK : (stop + BLOCK - 1) // BLOCK]
  for i in range(scales.size):
    if scales[i] < 0:
      return True
  least = np.uint8(255)
  if int4:
    for i in range(codes.size):
      least = min(least, min(codes[i] & np.uint8(15), codes[i] >> np.uint8(4)))
    if least == 0 or (size % 2 and codes[half - 1] >> np.uint8(4) != 8):
      return True
  else:
    for i in range(codes.size):
      least = min(least, codes[i] ^ np.uint8(128))
    if least == 0:
      return True
  for r in range(runs.shape[0]):
    at, end, piece = runs[r]
    while at < end:
      to = _run(at, end, half)
      whole = np.int32(0)
      if not int4:
        part = codes[at:to]
        for i in range(part.size):
          code = np.int32(np.int8(part[i]))
          whole += code * code
      elif at < half:
        part = codes[at:to]
        for i in range(part.size):
          code = np.int32(part[i] & np.uint8(15)) - np.int32(8)
          whole += code * code
      else:
        part = codes[at - half : to - half]
        for i in range(part.size):
          code = np.int32(part[i] >> np.uint8(4)) - np.int32(8)
          whole += code * code
      scale = np.float64(scales[at // BLOCK])
      sums[piece] += scale * scale * whole
      at = to
  return False


@_compiled
def _add(scales, payloads, units, int4, fresh, start, runs, total):
  """Adds a chunk of four pushes to `total`, or to 0 if that is fresh, tile by tile of the codes."""
  size, parts = total.size, 2 if int4 else 1
  half, first = (size + parts - 1) // parts, start // parts
  codes, (a, b, c, d) = np.empty((8, TILE), np.int8), payloads
  for low in range(0, half, TILE):
    high = min(half, low + TILE)
    here = slice(first + low, first + high)
    _unpack(a[here], b[here], c[here], d[here], int4, codes)
    for part in range(parts):
      at, end = part * half + low, min(part * half + high, size)
      skipped, run = at, 0
      while at < end:
        while runs[run, 1] <= at:
          run += 1
        block, piece = at // BLOCK, runs[run, 2]
        to = min(end, runs[run, 1], (block + 1) * BLOCK)
        block += start // BLOCK
        t, u, v, w = units[0, piece], units[1, piece], units[2, piece], units[3, piece]
        # Where a unit is 0 the scale may be NaN; adding 0 changes no bit of a sum begun with 0.
        e = scales[0][block] if t != 0 else np.float32(0)
        f = scales[1][block] if u != 0 else np.float32(0)
        g = scales[2][block] if v != 0 else np.float32(0)
        h = scales[3][block] if w != 0 else np.float32(0)
        out, row, i, j = total[at:to], 4 * part, at - skipped, to - skipped
        o, p, q, r = codes[row, i:j], codes[row + 1, i:j], codes[row + 2, i:j], codes[row + 3, i:j]
        if fresh:
          for i in range(out.size):
            out[i] = np.float32(0)
        for i in range(out.size):
          one, two = np.float32(o[i]) * e * t, np.float32(p[i]) * f * u
          three, four = np.float32(q[i]) * g * v, np.float32(r[i]) * h * w
          out[i] = (((out[i] + one) + two) + three) + four
        at = to


@_compiled
def _unpack(a, b, c, d, int4, codes):
  """The codes of four pushes as int8; of int4 the low ones in four rows, the high ones below."""
  mask, shift, middle = np.uint8(15), np.uint8(4), np.int8(8)
  if int4:
    for i in range(a.size):
      codes[0, i], codes[4, i] = np.int8(a[i] & mask) - middle, np.int8(a[i] >> shift) - middle
      codes[1, i], codes[5, i] = np.int8(b[i] & mask) - middle, np.int8(b[i] >> shift) - middle
      codes[2, i], codes[6, i] = np.int8(c[i] & mask) - middle, np.int8(c[i] >> shift) - middle
      codes[3, i], codes[7, i] = np.int8(d[i] & mask) - middle, np.int8(d[i] >> shift) - middle
  else:
    for i in range(a.size):
      codes[0, i], codes[1, i] = np.int8(a[i]), np.int8(b[i])
      codes[2, i], codes[3, i] = np.int8(c[i]), np.int8(d[i])


@functools.partial(_compiled, fastmath={"reassoc", "contract"})
def add_squares(values, runs, sums):
  """Adds each piece's sum of squares of a chunk of values to `sums`, in any order."""
  for r in range(runs.shape[0]):
    at, end, piece = runs[r]
    part, total = values[at:end], 0.0
    for i in range(part.size):
      total += np.float64(part[i]) * np.float64(part[i])
    sums[piece] += total


@_compiled
def _step(start, runs, stretch, delta, arrays, rates, kind, wire):
  value, published, momentum, new_value, new_published, new_momentum = arrays
  scales, payload, int4, levels = wire
  size, run = delta.size, 0
  codes, rows = np.empty(size, np.int8), np.empty((3, TILE), np.float32)
  for tile in range(0, size, TILE):
    stop, n = min(size, tile + TILE), min(size - tile, TILE)
    moved, before, speed = rows[0, :n], rows[1, :n], rows[2, :n]
    at = tile
    while at < stop:
      while runs[run, 1] <= at:
        run += 1
      to = min(stop, runs[run, 1])
      there, here = slice(start + at, start + to), slice(at - tile, to - tile)
      old, new = (
        (value[there], published[there], momentum[there]),
        (moved[here], before[here], speed[here]),
      )
      _move(delta[at:to], stretch[runs[run, 2]], old, new, rates, kind)
      at = to
    there = slice(start + tile, start + stop)
    _copy(moved, new_value[there])
    after = moved
    if levels:
      after = new_published[there]
      _publish(moved, before, after, scales[(start + tile) // BLOCK :], codes[tile:stop], levels)
    if kind:
      for i in range(speed.size):
        speed[i] = speed[i] * rates[2] + (before[i] - after[i]) * rates[3]
      _copy(speed, new_momentum[there])
  if levels:
    _pack(codes, int4, start, payload)


@_compiled
def _copy(source, target):
  for i in range(target.size):
    target[i] = source[i]


@_compiled
def _move(delta, long, old, new, rates, kind):
  """The new value, as `outer.update` has it, and copies of what is written over later."""
  value, published, momentum = old
  moved, before, speed = new
  rate, mu = rates[0], rates[1]
  if kind == 0:
    for i in range(delta.size):
      before[i] = published[i]
      moved[i] = value[i] - delta[i] * long * rate
  elif kind == 1:
    for i in range(delta.size):
      before[i], speed[i] = published[i], momentum[i]
      moved[i] = value[i] - (momentum[i] * mu + delta[i] * long) * rate
  else:
    for i in range(delta.size):
      before[i], speed[i] = published[i], momentum[i]
      merged = delta[i] * long
      moved[i] = value[i] - ((momentum[i] * mu + merged) * mu + merged) * rate


@_compiled
def _publish(value, published, new_published, scales, codes, levels):
  """The update's scales and codes, and what it makes of the published value; spoils `value`."""
  bits, scale_bits = value.view(np.int32), scales.view(np.int32)
  highest = np.nextafter(np.float32(_MAX / levels), np.float32(0))
  for start in range(0, value.size, BLOCK):
    here = slice(start, min(value.size, start + BLOCK))
    difference, magnitudes = value[here], bits[here]
    there, new, part = published[here], new_published[here], codes[here]
    for i in range(difference.size):
      difference[i] -= there[i]
    peak = np.int32(0)
    for i in range(magnitudes.size):
      peak = max(peak, magnitudes[i] & np.int32(0x7FFFFFFF))
    block = start // BLOCK
    scale_bits[block] = peak
    scale = scales[block] = _scale(scales[block], levels, highest)
    divisor = scale if scale > 0 else np.float32(np.inf)
    if not scale > 0:
      difference[:] = np.float32(0)  # by infinity: 0; where something is not finite: no code
    for i in range(difference.size):
      code = (difference[i] / divisor + _ROUND) - _ROUND
      part[i] = np.int8(np.int32(code))
      new[i] = there[i] + code * scale


@_compiled
def _scale(peak, levels, highest):
  """As `codec._quantise` has it, at the edges of f32 too."""
  if not np.isfinite(peak):
    return np.float32(np.nan)
  scale = peak / levels
  if scale < _TINY and scale * levels < peak:
    scale = np.nextafter(scale, np.float32(np.inf))
  return min(scale, highest)


@_compiled
def _pack(codes, int4, start, payload):
  """The codes of a chunk, as they go out."""
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
