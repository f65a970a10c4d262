"""Operations that numba lacks: memory by address, and 16 values at a time (for `core/kernels.py`).

LLVM vectorizes a loop over arrays only where it can prove that it may, and numba counts references
to each view of an array. So the loops that take most of a commit's time are written in LLVM's own
terms: vectors of 16 values, which LLVM splits into as many instructions as the CPU needs. The
operations are NumPy's, in the same order, and none are fused: the bits are the same on every CPU.
Addresses are not checked: callers must give addresses inside their arrays.

One function needs a special CPU: AVX-512 looks up 16 values in a table of 16 at once
(`look_up_16`). Four bits have only 16 values, so an int4 code costs a look-up instead of a
conversion and two multiplications. `multiply_16` does the same on any CPU, also for int8.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, config, types
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic

from ddiloco.core.codec import BLOCK

_CONFIG: Any = config  # Any: its attributes are set at import
_FEATURES = _CONFIG.CPU_FEATURES if _CONFIG.CPU_FEATURES is not None else get_host_cpu_features()
LOOKS_UP = "+avx512f" in _FEATURES.split(",")  # whether numba's target CPU has AVX-512
TOGETHER = 4  # pushes that one call adds
ROW = 32  # f32 values of a table's row: 16 products, the scale, the unit, and padding

_NEAREST = float(np.float32(3 << 22))  # to add it and subtract it rounds to nearest, ties to even
_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_FLOATS, _INTS, _BYTES = (ir.VectorType(each, 16) for each in (_F32, _I32, ir.IntType(8)))


def _same(kind: Any, number: float) -> Any:
  return ir.Constant(kind, [number] * 16)


class _Writer:
  """Writes instructions: LLVM's builder, with the few operations that are used here."""

  def __init__(self, builder: Any):
    self.llvm = builder

  def load(self, address: Any, kind: Any, offset: int = 0) -> Any:
    return self.llvm.load(self._at(address, kind, offset), align=1)

  def store(self, value: Any, address: Any, offset: int = 0) -> None:
    self.llvm.store(value, self._at(address, value.type, offset), align=1)

  def _at(self, address: Any, kind: Any, offset: int) -> Any:
    return self.llvm.inttoptr(self.llvm.add(address, _I64(offset)), kind.as_pointer())

  def spread(self, number: Any) -> Any:
    """A vector of 16 copies of this f32."""
    one = self.llvm.insert_element(ir.Constant(_FLOATS, ir.Undefined), number, _I32(0))
    return self.llvm.shuffle_vector(one, one, _same(_INTS, 0))

  def each(self, of: Any, count: int) -> list[Any]:
    """The members of a tuple."""
    return [self.llvm.extract_value(of, k) for k in range(count)]

  def call(self, name: str, result: Any, *arguments: Any) -> Any:
    """One of LLVM's own functions."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    function = cgutils.get_or_insert_function(self.llvm.module, kind, name)
    return self.llvm.call(function, arguments)


def _instruction(result: Any, *kinds: Any) -> Callable[[Callable[..., Any]], Any]:
  """A numba intrinsic of a function: each call of it becomes the code that the function writes.

  The function gets a writer and the arguments, of these kinds, and returns a result of this kind;
  None: no result.
  """

  def decorated(write: Callable[..., Any]) -> Any:
    @functools.wraps(write)  # numba takes the names of arguments from `write`
    def typed(typing: Any, *arguments: Any) -> Any:
      return result(*kinds), generate

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
      made = write(_Writer(builder), *arguments)
      if isinstance(made, tuple):
        return context.make_tuple(builder, signature.return_type, made)
      return context.get_dummy_value() if made is None else made

    return intrinsic(typed)

  return decorated


_ADDRESS, _NUMBER, _FLAG = types.intp, types.float32, types.boolean
_PAIR, _TRIPLE, _OF_EACH = (types.UniTuple(_ADDRESS, count) for count in (2, 3, TOGETHER))
_RATES = types.UniTuple(_NUMBER, 4)


@_instruction(types.uint8, _ADDRESS)
def read_byte(w: _Writer, there: Any) -> Any:
  """The byte at this address, without an array and its reference count."""
  return w.load(there, ir.IntType(8))


@_instruction(types.void, _ADDRESS)
def set_zero(w: _Writer, values: Any) -> None:
  """Sets the block of f32 at this address to 0."""
  for offset in range(0, 4 * BLOCK, 64):
    w.store(_same(_FLOATS, 0.0), values, offset)


@_instruction(_NUMBER, _ADDRESS)
def peak(w: _Writer, values: Any) -> Any:
  """The largest magnitude of the block of f32 at this address; NaN if it has a NaN."""
  largest = _same(_INTS, 0)
  for offset in range(0, 4 * BLOCK, 64):
    # Bits of non-negative floats sort like integers, and NaN sorts last.
    bits = w.llvm.and_(w.load(values, _INTS, offset), _same(_INTS, 0x7FFFFFFF))
    larger = w.llvm.icmp_unsigned(">", bits, largest)
    largest = w.llvm.select(larger, bits, largest)
  return w.llvm.bitcast(w.call("llvm.vector.reduce.umax.v16i32", _I32, largest), _F32)


@_instruction(types.UniTuple(types.int32, 2), _ADDRESS, _FLAG)
def squares_of_block(w: _Writer, codes: Any, int4: Any) -> Any:
  """Of the BLOCK bytes at this address the sum of squares of the low codes, and that of the high
  codes (0 for int8)."""
  sums = [_same(_INTS, 0), _same(_INTS, 0)]
  for offset in range(0, BLOCK, 16):
    packed = w.load(codes, _BYTES, offset)
    byte, eight = w.llvm.zext(packed, _INTS), _same(_INTS, 8)
    low = w.llvm.sub(w.llvm.and_(byte, _same(_INTS, 15)), eight)
    high = w.llvm.sub(w.llvm.lshr(byte, _same(_INTS, 4)), eight)
    low = w.llvm.select(int4, low, w.llvm.sext(packed, _INTS))
    high = w.llvm.select(int4, high, _same(_INTS, 0))
    sums = [w.llvm.add(each, w.llvm.mul(code, code)) for each, code in zip(sums, (low, high))]
  return tuple(w.call("llvm.vector.reduce.add.v16i32", _I32, each) for each in sums)


@_instruction(types.void, _ADDRESS, _ADDRESS, _OF_EACH)
def set_tables(w: _Writer, tables: Any, units: Any, scales: Any) -> None:
  """Writes f32 [TOGETHER, ROW] at `tables`: for each push, the values of its codes in one block and
  piece.

  A row has (nibble - 8) * scale * unit of each nibble, then scale and unit. All arguments are
  addresses: `units` of units side by side, `scales` of each push's scale.
  """
  for k, there in enumerate(w.each(scales, TOGETHER)):
    unit, scale, row = w.load(units, _F32, 4 * k), w.load(there, _F32), 4 * ROW * k
    # Where a unit is 0 the scale may be NaN: use 0. Adding 0 changes no bit of a sum begun at 0.
    counts = w.llvm.fcmp_unordered("!=", unit, _F32(0.0))
    scale = w.llvm.select(counts, scale, _F32(0.0))
    codes = ir.Constant(_FLOATS, [float(nibble - 8) for nibble in range(16)])
    products = w.llvm.fmul(w.llvm.fmul(codes, w.spread(scale)), w.spread(unit))
    w.store(products, tables, row)
    w.store(scale, tables, row + 64)
    w.store(unit, tables, row + 68)


@_instruction(types.void, _ADDRESS, _ADDRESS, _ADDRESS, _OF_EACH)
def look_up_16(w: _Writer, low: Any, high: Any, tables: Any, codes: Any) -> None:
  """Decodes 16 bytes of int4 of each push, and adds them to 16 values at `low` and 16 at `high`.

  All arguments are addresses. Tables of low codes come first, then those of high codes.
  """
  if not LOOKS_UP:  # compiled, but never called
    return
  sums = [w.load(place, _FLOATS) for place in (low, high)]
  for k, there in enumerate(w.each(codes, TOGETHER)):
    index = w.llvm.zext(w.load(there, _BYTES), _INTS)
    for part in range(2):  # the instruction uses the lowest four bits of an index
      table = w.load(tables, _FLOATS, 4 * ROW * (TOGETHER * part + k))
      value = w.call("llvm.x86.avx512.permvar.sf.512", _FLOATS, table, index)
      sums[part] = w.llvm.fadd(sums[part], value)
      index = w.llvm.lshr(index, _same(_INTS, 4))
  for place, value in zip((low, high), sums, strict=True):
    w.store(value, place)


@_instruction(types.void, _ADDRESS, _ADDRESS, _ADDRESS, _OF_EACH, _FLAG)
def multiply_16(w: _Writer, low: Any, high: Any, tables: Any, codes: Any, int4: Any) -> None:
  """Like `look_up_16`, on any CPU, and also for int8, which has low codes only."""

  def add(place: Any, part: int) -> None:
    value = w.load(place, _FLOATS)
    for k, there in enumerate(w.each(codes, TOGETHER)):
      packed, row = w.load(there, _BYTES), 4 * ROW * (TOGETHER * part + k)
      shifted = w.llvm.lshr(w.llvm.zext(packed, _INTS), _same(_INTS, 4 * part))
      code = w.llvm.sub(w.llvm.and_(shifted, _same(_INTS, 15)), _same(_INTS, 8))
      if not part:
        code = w.llvm.select(int4, code, w.llvm.sext(packed, _INTS))
      product = w.llvm.sitofp(code, _FLOATS)
      for factor in (row + 64, row + 68):
        product = w.llvm.fmul(product, w.spread(w.load(tables, _F32, factor)))
      value = w.llvm.fadd(value, product)
    w.store(value, place)

  add(low, 0)
  with w.llvm.if_then(int4):
    add(high, 1)


@_instruction(types.void, _ADDRESS, _NUMBER, _TRIPLE, _ADDRESS, _RATES, types.int64)
def move_16(
  w: _Writer, delta: Any, stretch: Any, old: Any, new: Any, rates: Any, kind: Any
) -> None:
  """The outer step of 16 values. Their delta becomes new value - published value.

  Args:
    delta: address of 16 values of the pushes' sum.
    stretch: factor of the sum.
    old: addresses of value, published value, momentum.
    new: address of the new value.
    rates: learning rate, momentum, and the two factors of `outer.followed`.
    kind: of momentum; 0: none, 1: plain, 2: Nesterov's.
  """
  rate, mu = (w.spread(number) for number in w.each(rates, 2))
  value, published, momentum = (w.load(there, _FLOATS) for there in w.each(old, 3))
  merged = w.llvm.fmul(w.load(delta, _FLOATS), w.spread(stretch))
  plain = w.llvm.fadd(w.llvm.fmul(momentum, mu), merged)
  nesterov = w.llvm.fadd(w.llvm.fmul(plain, mu), merged)
  none, one = (w.llvm.icmp_signed("==", kind, _I64(k)) for k in (0, 1))
  step = w.llvm.select(none, merged, w.llvm.select(one, plain, nesterov))
  moved = w.llvm.fsub(value, w.llvm.fmul(step, rate))
  w.store(moved, new)
  w.store(w.llvm.fsub(moved, published), delta)


@_instruction(types.void, _ADDRESS, _NUMBER, _NUMBER, _PAIR, _TRIPLE, _RATES, types.int64)
def publish_16(
  w: _Writer, lacking: Any, divisor: Any, scale: Any, old: Any, new: Any, rates: Any, kind: Any
) -> None:
  """The codes of 16 values of an update, and the new published value and momentum.

  Args:
    lacking: address of 16 values of new value - published value.
    divisor: of these values: `scale`, or infinity if the scale is not above 0.
    scale: of the values' block.
    old: addresses of published value and momentum.
    new: addresses of the codes, and of new published value and momentum.
    rates: as in `move_16`; the momentum follows as in `outer.followed`.
    kind: of momentum; 0: none.
  """
  kept, gained = (w.spread(number) for number in w.each(rates, 4)[2:])
  published, momentum = (w.load(there, _FLOATS) for there in w.each(old, 2))
  to_codes, to_published, to_momentum = w.each(new, 3)
  nearest = _same(_FLOATS, _NEAREST)
  quotient = w.llvm.fdiv(w.load(lacking, _FLOATS), w.spread(divisor))
  code = w.llvm.fsub(w.llvm.fadd(quotient, nearest), nearest)
  w.store(w.llvm.trunc(w.llvm.fptosi(code, _INTS), _BYTES), to_codes)
  after = w.llvm.fadd(published, w.llvm.fmul(code, w.spread(scale)))
  w.store(after, to_published)
  with w.llvm.if_then(w.llvm.icmp_signed("!=", kind, _I64(0))):
    gain = w.llvm.fmul(w.llvm.fsub(published, after), gained)
    w.store(w.llvm.fadd(w.llvm.fmul(momentum, kept), gain), to_momentum)
