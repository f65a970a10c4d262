"""Wire codecs: a flat float32 vector to bytes and back.

Layout of a payload, little-endian, for `size` values in ceil(size / 256) blocks of BLOCK = 256:

  f32   size x 4 bytes, the vector itself (no copy either way)
  bf16  size x 2 bytes, rounded to the nearest, ties to even
  int8  one f32 scale per block, then one signed byte per value, -127..127
  int4  one f32 scale per block, then two values a byte: of every 65,536 values (or of the rest at
        the end) the first half in the low nibbles, the second half in the high ones, each as
        code + 8 with codes -7..7; with an odd size the last high nibble has code 0

Blockwise: scale = max|x| / levels (127 or 7), code = rint(x / scale), value = code * scale. So the
error is at most scale / 2, and decoding, one f32 multiplication, gives the same bits on every
machine. A block of zeros has scale 0. A block with a NaN or infinity has scale NaN and decodes to
NaN, so that the receiver's screening finds it. "Decoupled DiLoCo" trains as well with int4 as with
bf16; "Streaming DiLoCo" (2501.18512) introduced 4-bit outer gradients.
"""

from __future__ import annotations

import hashlib
import sys
from typing import NamedTuple

import ml_dtypes
import numpy as np

from ddiloco.config.schema import CODECS

BLOCK = 256  # values that share a scale
CHUNK = 256 * BLOCK  # 64k values at a time: a chunk's scratch buffers stay in the core's own cache
LEVELS = {"int8": 127, "int4": 7}  # the codecs with scales, which `core/kernels.py` reads too
_TYPES = {
  "f32": np.dtype(np.float32),
  "bf16": np.dtype(ml_dtypes.bfloat16),
  "int8": np.dtype(np.int8),
  "int4": np.dtype(np.uint8),
}
_SMALLEST_NORMAL = np.finfo(np.float32).tiny
_LARGEST = float(np.finfo(np.float32).max)

if sys.byteorder != "little":
  raise ImportError("ddiloco.core.codec: payloads are little-endian, this machine is not")


class CodecError(ValueError):
  """A payload does not fit its codec and size. The text names both and the rule."""


def payload_bytes(size: int, codec: str) -> int:
  """Exact length of the payload of `size` values.

  Raises:
    CodecError: unknown codec.
  """
  if codec not in CODECS:
    raise CodecError(f"codec {codec!r}: must be one of {', '.join(CODECS)}")
  scales = 4 * -(-size // BLOCK) if codec in LEVELS else 0
  return scales + (-(-size // 2) if codec == "int4" else size * _TYPES[codec].itemsize)


def digest(x: np.ndarray) -> bytes:
  """SHA-256 of the vector `x`: 32 bytes that tell whether another vector has the same bits."""
  return hashlib.sha256(np.ascontiguousarray(x).view(np.uint8).data).digest()


class Encoded(NamedTuple):
  """A flat f32 vector on the wire."""

  codec: str
  payload: np.ndarray  # uint8 [payload_bytes(size, codec)]


def parts(encoded: Encoded, size: int) -> tuple[np.ndarray, np.ndarray]:
  """(scales f32 [blocks], codes as bytes) of a payload of `size` values, as views; f32 and bf16
  have no scales."""
  scale_bytes = 4 * -(-size // BLOCK) if encoded.codec in LEVELS else 0
  return encoded.payload[:scale_bytes].view(np.float32), encoded.payload[scale_bytes:]


def _part(encoded: Encoded, size: int, start: int) -> tuple[np.ndarray, np.ndarray]:
  """(scales, codes) of one chunk in a payload of `size` values, as views.

  Codes are f32, bf16 or int8 values, or bytes of two int4 codes.
  """
  scales, codes = parts(encoded, size)
  stop, per_byte = start + CHUNK, 2 if encoded.codec == "int4" else 1
  codes = codes.view(_TYPES[encoded.codec])[start // per_byte : stop // per_byte]
  return scales[start // BLOCK : stop // BLOCK], codes


def empty(size: int, codec: str) -> Encoded:
  """A payload of `size` values, to be filled in by `encode_chunk`."""
  return Encoded(codec, np.empty(payload_bytes(size, codec), np.uint8))


def encode(x: np.ndarray, codec: str) -> np.ndarray:
  """Packs the float32 vector `x` [size] into a uint8 payload [payload_bytes(size, codec)].

  Raises:
    CodecError: unknown codec, or `x` is not a flat float32 vector.
  """
  if x.dtype != np.float32 or x.ndim != 1:
    raise CodecError(f"encode: x is {x.dtype}{list(x.shape)}, must be a flat float32 vector")
  if codec == "f32":
    return np.ascontiguousarray(x).view(np.uint8)
  encoded = empty(x.size, codec)
  scratch = np.empty(CHUNK, np.float32)
  for start in range(0, x.size, CHUNK):
    values = x[start : start + CHUNK]
    encode_chunk(values, encoded, x.size, start, scratch[: values.size])
  return encoded.payload


def encode_chunk(
  values: np.ndarray, out: Encoded, size: int, start: int, scratch: np.ndarray
) -> None:
  """Writes a chunk of `size` values: up to CHUNK from `start` on, a multiple of CHUNK.

  `scratch`: f32 of the same shape as `values`, written over.
  """
  scales, codes = _part(out, size, start)
  with np.errstate(all="ignore"):  # non-finite values are data here, the receiver judges them
    if out.codec not in LEVELS:
      np.copyto(codes, values, casting="unsafe")
      return
    _quantise(values, LEVELS[out.codec], scales, scratch)
    if out.codec == "int4":
      _pack(scratch, codes)
    else:
      np.copyto(codes, scratch, casting="unsafe")


def decode(payload: np.ndarray, size: int, codec: str) -> np.ndarray:
  """Unpacks a uint8 payload into a float32 vector [size]; non-finite values pass through, and codes
  that no encoder writes (-128, or -8 in int4) are numbers like the others.

  >>> payload = encode(np.float32([7, -3, 0.4]), "int4")  # a scale of 4 bytes, half a byte a value
  >>> payload.nbytes, decode(payload, 3, "int4").tolist()
  (6, [7.0, -3.0, 0.0])

  Raises:
    CodecError: unknown codec, or wrong length.
  """
  encoded = checked(payload, size, codec)
  if codec == "f32":
    return encoded.payload.view(np.float32)
  x = np.empty(size, np.float32)
  for start in range(0, size, CHUNK):
    decode_chunk(encoded, size, start, x[start : start + CHUNK])
  return x


def finite(payload: np.ndarray, size: int) -> np.ndarray:
  """The f32 vector [size] of a payload that another role has made, in the payload's memory.

  Raises:
    CodecError: wrong length, or a value is not finite.
  """
  flat = decode(payload, size, "f32")
  if not np.isfinite(flat).all():
    raise CodecError("not finite")
  return flat


def checked(payload: np.ndarray, size: int, codec: str) -> Encoded:
  """A payload of the right length for `size` values, contiguous; any content is a vector.

  Raises:
    CodecError: unknown codec, or wrong length.
  """
  nbytes = payload_bytes(size, codec)
  if payload.dtype != np.uint8 or payload.shape != (nbytes,):
    raise CodecError(
      f"{codec} payload of {size} values is {payload.dtype}{list(payload.shape)}, "
      f"must be uint8[{nbytes}]"
    )
  return Encoded(codec, np.ascontiguousarray(payload))


def decode_chunk(encoded: Encoded, size: int, start: int, out: np.ndarray) -> None:
  """Reads a chunk of `size` values into `out` f32, as long as the chunk; see `encode_chunk`."""
  with np.errstate(all="ignore"):
    read_codes(encoded, size, start, out)
    if encoded.codec in LEVELS:
      scales, _ = _part(encoded, size, start)
      _blockwise(np.multiply, out, scales, out)


def read_codes(encoded: Encoded, size: int, start: int, out: np.ndarray) -> None:
  """Like `decode_chunk`, but for the scales: codes of int8 and int4 as f32 values."""
  _, codes = _part(encoded, size, start)
  if encoded.codec == "int4":
    _unpack(codes, out)
  else:
    np.copyto(out, codes)


def _blockwise(
  operation: np.ufunc, values: np.ndarray, scales: np.ndarray, out: np.ndarray
) -> None:
  """out = operation(values, the scale of their block), for flat values."""
  whole = values.size // BLOCK
  tall, rest = slice(0, whole * BLOCK), slice(whole * BLOCK, None)
  operation(values[tall].reshape(-1, BLOCK), scales[:whole, None], out=out[tall].reshape(-1, BLOCK))
  if whole < scales.size:
    operation(values[rest], scales[whole], out=out[rest])


def _peaks(magnitudes: np.ndarray, blocks: int) -> np.ndarray:
  """The largest value of every block [blocks] of flat non-negative values; NaN if it has a NaN."""
  # Bits of non-negative floats sort like integers, whose maximum is twice as fast; NaN sorts last.
  bits, whole = magnitudes.view(np.int32), magnitudes.size // BLOCK
  peaks = np.empty(blocks, np.int32)
  np.max(bits[: whole * BLOCK].reshape(-1, BLOCK), axis=1, out=peaks[:whole])
  if whole < blocks:
    peaks[whole] = np.max(bits[whole * BLOCK :])
  return peaks.view(np.float32)


def _quantise(values: np.ndarray, levels: int, scales: np.ndarray, out: np.ndarray) -> None:
  """Fills `scales` [blocks], and `out` with rint(values / scale): integers in -levels..levels."""
  np.abs(values, out=out)
  peaks = _peaks(out, scales.size)
  _scale(peaks, levels, scales)
  divisors = np.where(scales > 0, scales, np.float32(np.inf))  # dividing by it gives code 0
  _blockwise(np.divide, values, divisors, out)
  np.rint(out, out=out)
  if not np.isfinite(peaks).all():
    out[np.isnan(out)] = 0


def _scale(peaks: np.ndarray, levels: int, scales: np.ndarray) -> None:
  """Fills `scales`; at the edges of float32, too, no code may be out of range, and no value."""
  np.divide(peaks, np.float32(levels), out=scales)
  # Subnormal scales round coarsely: round them up, or the largest code would exceed `levels`.
  up = (scales < _SMALLEST_NORMAL) & (scales * np.float32(levels) < peaks)
  scales[up] = np.nextafter(scales[up], np.float32(np.inf))
  # Near the largest float, levels * scale must stay finite; one step below the quotient is enough.
  highest = np.nextafter(np.float32(_LARGEST / levels), np.float32(0))
  np.minimum(scales, highest, out=scales)
  scales[~np.isfinite(peaks)] = np.nan


def _pack(quantised: np.ndarray, codes: np.ndarray) -> None:
  """codes = (first half + 8) + 16 * (second half + 8), in f32, which is exact for such numbers."""
  low, high = quantised[: codes.size], quantised[codes.size :]
  np.multiply(high, np.float32(16), out=high)
  both = low[: high.size]
  np.add(both, high, out=both)
  np.add(low, np.float32(8 + 16 * 8), out=low)
  np.copyto(codes, low, casting="unsafe")


def _unpack(codes: np.ndarray, values: np.ndarray) -> None:
  low, high = codes & 15, codes >> 4
  for nibbles, target in ((low, values[: codes.size]), (high, values[codes.size :])):
    signed = nibbles.view(np.int8)
    np.subtract(signed, np.int8(8), out=signed)
    np.copyto(target, signed[: target.size])
