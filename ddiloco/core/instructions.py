"""Operations that numba lacks: memory by address, and many values at a time (`core/kernels.py`).

LLVM vectorizes a loop over arrays only where it can prove that it may, and numba counts references
to each view of an array. So the loops that take most of a commit's time are written in LLVM's own
terms: vectors, which LLVM splits into as many instructions as the CPU needs. The operations are
NumPy's, and none are fused. Their order is NumPy's, too, but for sums of whole numbers, which are
exact in any order: the bits are the same on every CPU. Addresses are not checked: callers must give
addresses inside their arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from ddiloco.core.codec import BLOCK
from ddiloco.core.passes import FINEST, GROUP

WIDE = 32  # bytes of each push that one call adds

_NEAREST = float(np.float32(3 << 22))  # to add it and subtract it rounds to nearest, ties to even
_F32, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_FLOATS, _INTS, _BYTES = (ir.VectorType(each, 16) for each in (_F32, _I32, ir.IntType(8)))
_FLOATS_8, _INTS_8 = (ir.VectorType(each, 8) for each in (_F32, _I32))
_PAIRS = ir.VectorType(_I32, GROUP // 2)
_WORDS = ir.VectorType(_I16, 16)
# Places that take two vectors' elements by turns: of words as CPUs do it, within 128 bits.
_QUARTERS = (0, 1, 2, 3, 8, 9, 10, 11)
_SIDE_BY_SIDE = [[at + k + vector for k in _QUARTERS for vector in (0, 16)] for at in (0, 4)]
_IN_TURN = [[at + k + vector for k in range(4) for vector in (0, 8)] for at in (0, 4)]


def _same(kind: Any, number: float) -> Any:
  return ir.Constant(kind, [number] * kind.count)


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

  def spread(self, number: Any, kind: Any = _FLOATS) -> Any:
    """A vector of copies of this number."""
    one = self.llvm.insert_element(ir.Constant(kind, ir.Undefined), number, _I32(0))
    return self.choose(one, one, [0] * kind.count)

  def choose(self, a: Any, b: Any, places: Sequence[int]) -> Any:
    """A vector of the elements at these places in `a` and, beyond its end, in `b`."""
    return self.llvm.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(places)), [*places]))

  def magnitudes(self, bits: Any) -> Any:
    """Of f32 values, as integers: these sort like them, and NaN sorts last."""
    return self.llvm.and_(bits, _same(bits.type, 0x7FFFFFFF))

  def largest(self, magnitudes: Any) -> Any:
    """The largest one, as f32."""
    name = f"llvm.vector.reduce.umax.v{magnitudes.type.count}i32"
    return self.llvm.bitcast(self.call(name, _I32, magnitudes), _F32)

  def products(self, a: Any, b: Any) -> Any:
    """Of two vectors of 16-bit numbers the products, each two neighbours added up."""
    wide = ir.VectorType(_I32, a.type.count)
    each = self.llvm.mul(self.llvm.sext(a, wide), self.llvm.sext(b, wide))
    even, odd = (self.choose(each, each, range(k, a.type.count, 2)) for k in (0, 1))
    return self.llvm.add(even, odd)

  def rounded(self, values: Any) -> Any:
    """These f32 values, rounded to whole numbers; ties to even."""
    nearest = _same(values.type, _NEAREST)
    return self.llvm.fsub(self.llvm.fadd(values, nearest), nearest)

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
_PAIR, _TRIPLE, _OF_EACH = (types.UniTuple(_ADDRESS, count) for count in (2, 3, GROUP))
_RATES = types.UniTuple(_NUMBER, 4)
_FACTORS = types.Tuple([types.int32] * (GROUP // 2 + 1) + [_NUMBER])


@_instruction(types.uint8, _ADDRESS)
def read_byte(w: _Writer, there: Any) -> Any:
  """The byte at this address, without an array and its reference count."""
  return w.load(there, ir.IntType(8))


@_instruction(_OF_EACH, _ADDRESS, _ADDRESS)
def moved(w: _Writer, column: Any, offset: Any) -> Any:
  """GROUP addresses, each moved on by so many bytes; `column` is the address of a column of an
  array [GROUP, 2] of them."""
  found = [w.load(column, _I64, 16 * k) for k in range(GROUP)]
  return tuple(w.llvm.add(each, offset) for each in found)


@_instruction(_OF_EACH, _ADDRESS)
def rows(w: _Writer, first: Any) -> Any:
  """The addresses of GROUP rows of WIDE bytes, of which this is the first one's."""
  return tuple(w.llvm.add(first, _I64(WIDE * k)) for k in range(GROUP))


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
    these = w.magnitudes(w.load(values, _INTS, offset))
    larger = w.llvm.icmp_unsigned(">", these, largest)
    largest = w.llvm.select(larger, these, largest)
  return w.largest(largest)


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


@_instruction(_FACTORS, _ADDRESS, _OF_EACH, _FLAG)
def factors(w: _Writer, units: Any, scales: Any, int4: Any) -> Any:
  """What adding up codes takes in one block of a piece (see `passes.Sum`).

  These are the pushes' factors (two of 16 bits in an i32), what a sum of products begins with (i32;
  an int4 code is stored as code + 8), and the largest factor (f32).

  Args:
    units: address of the pushes' units, side by side.
    scales: addresses of their scales.
    int4: whether the codes are.
  """
  unit, scale = w.load(units, _FLOATS_8), ir.Constant(_FLOATS_8, ir.Undefined)
  for k, there in enumerate(w.each(scales, GROUP)):
    scale = w.llvm.insert_element(scale, w.load(there, _F32), _I32(k))
  zero = _same(_FLOATS_8, 0.0)
  counts = w.llvm.fcmp_unordered("!=", unit, zero)  # where a unit is 0 the scale may be NaN
  factors = w.llvm.select(counts, w.llvm.fmul(scale, unit), zero)
  top = w.largest(w.magnitudes(w.llvm.bitcast(factors, _INTS_8)))
  shares = w.llvm.fdiv(factors, w.spread(top, _FLOATS_8))
  shares = w.rounded(w.llvm.fmul(shares, _same(_FLOATS_8, FINEST)))
  known = w.llvm.fcmp_ordered("ord", shares, shares)  # not 0 / 0, nor a share of inf or NaN
  whole = w.llvm.fptosi(w.llvm.select(known, shares, zero), _INTS_8)
  surplus = w.llvm.mul(w.call("llvm.vector.reduce.add.v8i32", _I32, whole), _I32(8))
  begin = w.llvm.select(int4, w.llvm.neg(surplus), _I32(0))
  pairs = w.llvm.bitcast(w.llvm.trunc(whole, ir.VectorType(_I16, GROUP)), _PAIRS)
  each = [w.llvm.extract_element(pairs, _I32(k)) for k in range(GROUP // 2)]
  return *each, begin, top


# Takes the codes at even places, and those at odd ones, out of pairs of bytes.
_Take = Callable[[Any], tuple[Any, Any]]


def _add(
  w: _Writer, values: Any, factors: Any, codes: Any, take: _Take, powers: Sequence[int]
) -> None:
  """Adds the codes in WIDE bytes of each push, times the push's factor, to as many values.

  Most CPUs multiply pairs of 16-bit numbers and add each two products in one instruction: so the
  codes of two pushes are brought side by side.

  Args:
    values: address.
    factors: of `factors`.
    codes: addresses of the pushes' bytes.
    take: see `_Take`.
    powers: of two, by which the codes that `take` returns are multiplied.
  """
  *pairs, begin, top = w.each(factors, GROUP // 2 + 2)
  begins = [w.spread(w.llvm.shl(begin, _I32(power)), _INTS_8) for power in powers]
  sums, there = [begins, begins], w.each(codes, GROUP)
  for k in range(0, GROUP, 2):
    both = w.llvm.bitcast(w.spread(pairs[k // 2], _INTS_8), _WORDS)
    pushes = [w.load(there[m], _WORDS) for m in (k, k + 1)]
    for half, places in enumerate(_SIDE_BY_SIDE):
      words = w.choose(pushes[0], pushes[1], places)
      products = [w.products(part, both) for part in take(words)]
      sums[half] = [w.llvm.add(*each) for each in zip(sums[half], products, strict=True)]
  for half, totals in enumerate(sums):
    parts = []
    for total, power in zip(totals, powers, strict=True):
      whole = w.llvm.sitofp(total, _FLOATS_8)  # exact: at most 2**24 times its power of two
      share = w.llvm.fmul(whole, _same(_FLOATS_8, 0.5**power / FINEST))
      parts.append(w.llvm.fmul(share, w.spread(top, _FLOATS_8)))
    for place, places in zip((32 * half, 64 + 32 * half), _IN_TURN, strict=True):
      before = w.load(values, _FLOATS_8, place)
      w.store(w.llvm.fadd(before, w.choose(parts[0], parts[1], places)), values, place)


@_instruction(types.void, _ADDRESS, _FACTORS, _OF_EACH)
def add_low(w: _Writer, values: Any, factors: Any, codes: Any) -> None:
  """`_add` for the int4 codes in low halves of bytes."""
  masks = _same(_WORDS, 0x000F), _same(_WORDS, 0x0F00)
  _add(w, values, factors, codes, lambda pairs: tuple(w.llvm.and_(pairs, m) for m in masks), (0, 8))


@_instruction(types.void, _ADDRESS, _FACTORS, _OF_EACH)
def add_high(w: _Writer, values: Any, factors: Any, codes: Any) -> None:
  """`_add` for the int4 codes in high halves of bytes."""
  mask, twelve = _same(_WORDS, 0x00F0), _same(_WORDS, 12)
  take = lambda pairs: (w.llvm.and_(pairs, mask), w.llvm.lshr(pairs, twelve))
  _add(w, values, factors, codes, take, (4, 0))


@_instruction(types.void, _ADDRESS, _FACTORS, _OF_EACH)
def add_int8(w: _Writer, values: Any, factors: Any, codes: Any) -> None:
  """`_add` for int8 codes."""
  eight = _same(_WORDS, 8)
  take = lambda pairs: (w.llvm.ashr(w.llvm.shl(pairs, eight), eight), w.llvm.ashr(pairs, eight))
  _add(w, values, factors, codes, take, (0, 0))


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
  quotient = w.llvm.fdiv(w.load(lacking, _FLOATS), w.spread(divisor))
  code = w.rounded(quotient)
  w.store(w.llvm.trunc(w.llvm.fptosi(code, _INTS), _BYTES), to_codes)
  after = w.llvm.fadd(published, w.llvm.fmul(code, w.spread(scale)))
  w.store(after, to_published)
  with w.llvm.if_then(w.llvm.icmp_signed("!=", kind, _I64(0))):
    gain = w.llvm.fmul(w.llvm.fsub(published, after), gained)
    w.store(w.llvm.fadd(w.llvm.fmul(momentum, kept), gain), to_momentum)
