"""The passes of `core/passes.py` over one chunk, compiled by numba: the same operations in the same
order, so the same bits; only sums of squares are rounded otherwise.

Eight int4 pushes are decoded and added at 1.2 to 2 ns a value and core, where NumPy takes 18 and
XLA on the CPU 5 (`docs/design.md`, "What a commit computes with"). Nothing here holds the GIL.
Compiled code is kept beside this file, or in the user's cache folder, for the next process.

`scales` and `codes` are a payload's two parts (`core/codec.py`); `start` is where the chunk begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np

from ddiloco.config import OuterConfig
from ddiloco.core import codec, outer
from ddiloco.core.codec import BLOCK, Encoded

_TINY = np.finfo(np.float32).tiny
_MAX = np.finfo(np.float32).max
_ROUND = np.float32(3 << 22)  # added and subtracted: the nearest integer, ties to even


def _compiled(function: Any) -> Any:
  try:
    return numba.njit(nogil=True, cache=True)(function)
  except RuntimeError:  # no folder to keep it in: compiled again by every process
    return numba.njit(nogil=True)(function)


class Opened:
  """A payload of `size` values in int8 or int4, as the kernels read it."""

  def __init__(self, encoded: Encoded, size: int):
    scale_bytes = 4 * -(-size // BLOCK)
    scales = encoded.payload[:scale_bytes].view(np.float32)
    self.scales = np.require(scales, requirements="A")  # a copy if it came unaligned
    self.codes = encoded.payload[scale_bytes:]
    self.int4 = encoded.codec == "int4"


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
    self._pushes, self._units, self._int4 = pushes, units, pushes[0].int4

  def read(self, chunk: Any, total: np.ndarray) -> None:
    """Writes a chunk of their sum into `total` [chunk]."""
    first, size = chunk.start // (1 + self._int4), -(-total.size // (1 + self._int4))
    block, blocks = chunk.start // BLOCK, -(-total.size // BLOCK)
    codes = np.empty((len(self._pushes), size), np.uint8)
    scales = np.empty((len(self._pushes), blocks), np.float32)
    for m, push in enumerate(self._pushes):
      codes[m] = push.codes[first : first + size]
      scales[m] = push.scales[block : block + blocks]
    _sum(scales, codes, self._int4, chunk.runs, self._units, total)


_NONE = np.empty(0, np.float32)


def stepper(
  old: Any, new: Any, stretch: np.ndarray, config: OuterConfig, update: Encoded | None
) -> Callable[[Any, np.ndarray], None]:
  """Takes one outer step of a fragment, chunk by chunk; see `passes.step`.

  What it returns is given a chunk, and rows f32 [3, chunk]: the sum of the pushes, and scratch.
  """
  rates = np.array([config.learning_rate, config.momentum, *outer.factors(config)], np.float32)
  kind = 0 if old.momentum is None else 2 if config.nesterov else 1
  arrays = tuple(_NONE if each is None else each for each in (*old, *new))
  wire = _NONE, _NONE.view(np.uint8), False, np.float32(0)
  if update is not None:
    opened = Opened(update, old.value.size)
    wire = opened.scales, opened.codes, opened.int4, np.float32(codec.LEVELS[update.codec])

  def step(chunk: Any, rows: np.ndarray) -> None:
    _step((chunk.start, chunk.stop), chunk.runs, stretch, rows, arrays, rates, kind, wire)

  return step


def compile_all(chunk: Any, vectors: Any, config: OuterConfig) -> None:
  """Compiles everything, or loads what was compiled, by working on this chunk of one piece."""
  one, value = np.ones(1, np.float32), vectors.value
  encoded = Encoded("int8", codec.encode(value, "int8"))
  push = Opened(encoded, value.size)
  squares(push, chunk, np.zeros(1))
  Pushes([push, push], np.ones((2, 1), np.float32)).read(chunk, value)
  stepper(vectors, vectors, one, config, encoded)(chunk, np.ones((3, value.size), np.float32))


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
def _sum(scales, codes, int4, runs, units, total):
  """Two pushes at a time, block by block: what they add to stays in the first cache."""
  half = (total.size + 1) // 2 if int4 else total.size
  mask, middle = np.int32(15), np.int32(8)
  moving = np.empty(units.shape[0], np.int64)
  for r in range(runs.shape[0]):
    at, end, piece = runs[r]
    count = 0
    for m in range(units.shape[0]):
      if units[m, piece] != 0:
        moving[count] = m
        count += 1
    while at < end:
      to, block = _run(at, end, half), at // BLOCK
      out = total[at:to]
      out[:] = np.float32(0)
      shift = np.int32(4) if int4 and at >= half else np.int32(0)
      first = at - half if shift else at
      for k in range(0, count, 2):
        m = moving[k]
        n = moving[k + 1] if k + 1 < count else m
        a, b = codes[m, first : first + to - at], codes[n, first : first + to - at]
        x, y, u, v = scales[m, block], scales[n, block], units[m, piece], units[n, piece]
        if m == n:
          if int4:
            for i in range(out.size):
              out[i] += np.float32((np.int32(a[i]) >> shift & mask) - middle) * x * u
          else:
            for i in range(out.size):
              out[i] += np.float32(np.int8(a[i])) * x * u
        elif int4:
          for i in range(out.size):
            one = np.float32((np.int32(a[i]) >> shift & mask) - middle) * x * u
            two = np.float32((np.int32(b[i]) >> shift & mask) - middle) * y * v
            out[i] = (out[i] + one) + two
        else:
          for i in range(out.size):
            one = np.float32(np.int8(a[i])) * x * u
            out[i] = (out[i] + one) + np.float32(np.int8(b[i])) * y * v
      at = to


@_compiled
def _step(span, runs, stretch, rows, arrays, rates, kind, wire):
  start, stop = span
  value, published, momentum, new_value, new_published, new_momentum = arrays
  scales, codes, int4, levels = wire
  size = stop - start
  # What is read is in scratch: loops over vectors that may be the same one are not vectorised.
  delta, before, speeds = rows[0], rows[1], rows[2]
  old, after = value[start:stop], delta
  before[:] = published[start:stop]
  if kind:
    speeds[:] = momentum[start:stop]
  rate, mu = rates[0], rates[1]
  for r in range(runs.shape[0]):
    a, b, piece = runs[r]
    long, mine, was = stretch[piece], delta[a:b], old[a:b]
    if kind == 0:
      for i in range(mine.size):
        mine[i] = was[i] - mine[i] * long * rate
    else:
      speed = speeds[a:b]
      if kind == 1:
        for i in range(mine.size):
          mine[i] = was[i] - (speed[i] * mu + mine[i] * long) * rate
      else:
        for i in range(mine.size):
          merged = mine[i] * long
          mine[i] = was[i] - ((speed[i] * mu + merged) * mu + merged) * rate
  if levels:
    if int4:
      half = (size + 1) // 2
      codes = codes[start // 2 : start // 2 + half]
    else:
      codes = codes[start:stop]
    scales = scales[start // BLOCK : (stop + BLOCK - 1) // BLOCK]
    after = new_published[start:stop]
    _publish(delta, before, after, scales, codes, int4, levels)
  new_value[start:stop] = delta
  if kind:
    new = new_momentum[start:stop]
    for i in range(size):
      new[i] = speeds[i] * rates[2] + (before[i] - after[i]) * rates[3]


@_compiled
def _publish(value, published, new_published, scales, codes, int4, levels):
  """The update in the wire codec, and what it makes of the published value."""
  size = value.size
  half = codes.size if int4 else size
  difference, quantised = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.int32)
  bits = difference.view(np.int32)
  highest = np.nextafter(np.float32(_MAX / levels), np.float32(0))
  if int4 and size % 2:
    codes[half - 1] = np.uint8(8 << 4)
  for block in range(scales.size):
    start = block * BLOCK
    stop = min(size, start + BLOCK)
    here, there, new = value[start:stop], published[start:stop], new_published[start:stop]
    peak = np.int32(0)
    for i in range(here.size):
      difference[i] = here[i] - there[i]
      peak = max(peak, bits[i] & np.int32(0x7FFFFFFF))
    scale = _scale(peak, levels, highest)
    scales[block] = scale
    divisor = scale if scale > 0 else np.float32(np.inf)
    if not scale > 0:
      for i in range(here.size):  # by infinity: 0; where something is not finite: no code
        difference[i] = np.float32(0)
    for i in range(here.size):
      code = (difference[i] / divisor + _ROUND) - _ROUND
      quantised[i] = np.int32(code)
      new[i] = there[i] + code * scale
    if not int4:
      part = codes[start:stop]
      for i in range(part.size):
        part[i] = np.uint8(quantised[i] & np.int32(255))
      continue
    middle = min(max(start, half), stop)
    low = codes[start:middle]
    for i in range(low.size):
      low[i] = np.uint8(quantised[i] + np.int32(8))
    if size % 2 and start < half <= stop:
      codes[half - 1] |= np.uint8(8 << 4)
    if middle < stop:
      high, skip = codes[middle - half : stop - half], middle - start
      for i in range(high.size):
        high[i] |= np.uint8((quantised[skip + i] + np.int32(8)) << np.int32(4))


@_compiled
def _scale(peak_bits, levels, highest):
  """As `codec._quantise` has it, at the edges of f32 too."""
  peak = np.array([peak_bits], np.int32).view(np.float32)[0]
  if not np.isfinite(peak):
    return np.float32(np.nan)
  scale = peak / levels
  if scale < _TINY and scale * levels < peak:
    scale = np.nextafter(scale, np.float32(np.inf))
  return min(scale, highest)
