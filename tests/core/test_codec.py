import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ddiloco.core import codec
from ddiloco.core.codec import BLOCK, CodecError

BLOCKWISE = {"int8": 127, "int4": 7}
SIZES = (0, 1, 2, 3, 255, 256, 257, 511, 512, 513, 256 * 256, 256 * 256 + 1, 256 * 600 + 77)

pytestmark = pytest.mark.filterwarnings("error")  # non-finite input must not warn


def scales_of(payload, size):
  return payload[: 4 * -(-size // BLOCK)].view(np.float32)


def reference(x, levels):
  """Block by block in float64, only the scale is f32."""
  out = np.zeros_like(x)
  for start in range(0, x.size, BLOCK):
    block = x[start : start + BLOCK]
    scale = np.float32(np.abs(block).max() / np.float32(levels))
    if scale:
      out[start : start + BLOCK] = np.rint(block / scale) * scale
  return out


def test_payload_bytes():
  expected = {  # size: f32, bf16, int8, int4
    0: (0, 0, 0, 0),
    1: (4, 2, 4 + 1, 4 + 1),
    255: (1020, 510, 4 + 255, 4 + 128),
    256: (1024, 512, 4 + 256, 4 + 128),
    257: (1028, 514, 8 + 257, 8 + 129),
    1000: (4000, 2000, 16 + 1000, 16 + 500),
  }
  for size, counts in expected.items():
    assert tuple(codec.payload_bytes(size, c) for c in codec.CODECS) == counts


@pytest.mark.parametrize("name", codec.CODECS)
@pytest.mark.parametrize("size", SIZES)
def test_sizes_and_error_bounds(name, size):
  x = np.random.default_rng(size).standard_normal(size).astype(np.float32)
  before = x.copy()
  payload = codec.encode(x, name)
  assert payload.dtype == np.uint8 and payload.shape == (codec.payload_bytes(size, name),)
  y = codec.decode(payload, size, name)
  assert y.dtype == np.float32 and y.shape == (size,)
  np.testing.assert_array_equal(x, before)
  if name == "f32":
    np.testing.assert_array_equal(y, x)
  elif name == "bf16":
    np.testing.assert_array_equal(y, x.astype(ml_dtypes.bfloat16).astype(np.float32))
    assert (np.abs(y - x) <= np.abs(x) / 256).all()
  else:
    np.testing.assert_array_equal(y, reference(x, BLOCKWISE[name]))
    per_value = np.repeat(scales_of(payload, size), BLOCK)[:size]
    assert (np.abs(y - x) <= per_value * (0.5 + 1e-5)).all()


def test_golden_int8_block():
  x = np.zeros(BLOCK, np.float32)
  x[:6] = [127, -127, 0.5, 1.5, -2.5, 63.6]  # scale 1; ties go to the even neighbour
  payload = codec.encode(x, "int8")
  assert bytes(payload[:4]) == b"\x00\x00\x80\x3f"  # 1.0, little-endian
  assert payload[4:10].view(np.int8).tolist() == [127, -127, 0, 2, -2, 64]
  assert not payload[10:].any()


def test_golden_int4_block():
  x = np.zeros(BLOCK, np.float32)
  x[:3] = [14, -14, 3]  # scale 2: codes 7, -7, rint(1.5) = 2
  x[128:131] = [-2, 5, 12.9]  # codes -1, rint(2.5) = 2, 6
  payload = codec.encode(x, "int4")
  assert payload.size == 4 + 128
  assert bytes(payload[:4]) == b"\x00\x00\x00\x40"  # 2.0
  # low nibble: first half + 8, high nibble: second half + 8
  assert payload[4:7].tolist() == [15 + 16 * 7, 1 + 16 * 10, 10 + 16 * 14]
  assert (payload[7:] == 0x88).all()
  decoded = codec.decode(payload, BLOCK, "int4")
  assert decoded[:3].tolist() == [14, -14, 4] and decoded[128:131].tolist() == [-2, 4, 12]


def test_golden_int4_odd_tail():
  payload = codec.encode(np.array([7, -3, 1], np.float32), "int4")
  # halves [7, -3] and [1, padding 0], scale 1
  assert bytes(payload[:4]) == b"\x00\x00\x80\x3f" and payload[4:].tolist() == [0x9F, 0x85]
  assert codec.decode(payload, 3, "int4").tolist() == [7, -3, 1]


def test_golden_int4_halves_are_those_of_every_65536_values():
  x = np.zeros(65_538, np.float32)
  x[[0, 32_768, 65_536, 65_537]] = 7, -7, 7, -3  # scales 1
  codes = codec.encode(x, "int4")[4 * 257 :]
  assert (codes[0], codes[-1]) == (15 + 16 * 1, 15 + 16 * 5) and (codes[1:-1] == 0x88).all()


def test_golden_bf16_rounds_to_nearest_even():
  bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0xBF807FFF], np.uint32)
  payload = codec.encode(bits.view(np.float32), "bf16")
  assert payload.view(np.uint16).tolist() == [0x3F80, 0x3F82, 0x3F81, 0xBF80]


@pytest.mark.parametrize("name", BLOCKWISE)
def test_zero_blocks_have_scale_zero(name):
  x = np.zeros(3 * BLOCK, np.float32)
  x[BLOCK] = 1
  x[-1] = -0.0
  payload = codec.encode(x, name)
  scales = scales_of(payload, x.size)
  assert scales[0] == scales[2] == 0 < scales[1]
  np.testing.assert_array_equal(codec.decode(payload, x.size, name), reference(x, BLOCKWISE[name]))


@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 300, 1000])
def test_non_finite_input_stays_detectable(name, bad, at):
  x = np.random.default_rng(0).standard_normal(1001).astype(np.float32)
  x[at] = bad
  y = codec.decode(codec.encode(x, name), x.size, name)
  assert not np.isfinite(y[at])
  healthy = np.arange(x.size) // BLOCK != at // BLOCK
  x[at] = 0
  without = codec.decode(codec.encode(x, name), x.size, name)
  np.testing.assert_array_equal(y[healthy], without[healthy])


@pytest.mark.parametrize("name", BLOCKWISE)
def test_what_a_block_becomes_depends_on_no_other(name):
  x = np.random.default_rng(4).standard_normal((70, BLOCK)).astype(np.float32)
  x[1:6] *= np.float32([[1e-38], [1e-43], [0], [1e37], [np.nan]])
  together = codec.decode(codec.encode(x.ravel(), name), x.size, name).reshape(x.shape)
  apart = [codec.decode(codec.encode(block, name), BLOCK, name) for block in x]
  np.testing.assert_array_equal(together, apart)


@pytest.mark.parametrize("name", BLOCKWISE)
@pytest.mark.parametrize("peak", [1e-45, 4e-45, 1.4e-44, 1e-40, 1.2e-38, 1e-30, 1e30, 3e38, "max"])
def test_extremes_round_trip(name, peak):
  peak = np.finfo(np.float32).max if peak == "max" else np.float32(peak)
  levels = BLOCKWISE[name]
  x = (np.random.default_rng(1).uniform(-1, 1, 700) * np.float64(peak)).astype(np.float32)
  x[::BLOCK] = peak
  x[1::BLOCK] = -peak
  payload = codec.encode(x, name)
  y = codec.decode(payload, x.size, name)
  scale = np.repeat(scales_of(payload, x.size), BLOCK)[: x.size].astype(np.float64)
  assert np.isfinite(y).all() and (scale > 0).all()
  assert (scale <= (1 + 1e-6) * float(peak) / levels + 1.5e-45).all()
  error = np.abs(y.astype(np.float64) - x.astype(np.float64))
  assert (error <= 0.5 * scale + 1e-6 * levels * scale).all()


floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=150)
@given(st.lists(floats, min_size=1, max_size=600), st.sampled_from(sorted(BLOCKWISE)))
@example([3.4028234663852886e38, -3.4028234663852886e38], "int4")
@example([1.401298464324817e-45] * 300, "int8")
def test_error_is_at_most_half_a_scale(numbers, name):
  x = np.array(numbers, np.float32)
  payload = codec.encode(x, name)
  y = codec.decode(payload, x.size, name)
  scale = np.repeat(scales_of(payload, x.size), BLOCK)[: x.size].astype(np.float64)
  error = np.abs(y.astype(np.float64) - x.astype(np.float64))
  assert (error <= scale * (0.5 + 2e-6 * BLOCKWISE[name])).all()
  np.testing.assert_array_equal(codec.decode(payload.copy(), x.size, name), y)


@settings(max_examples=300)
@given(st.data(), st.sampled_from(codec.CODECS), st.integers(0, 600), st.integers(0, 2**32 - 1))
def test_random_bytes_give_a_vector_or_a_codec_error(data, name, size, seed):
  right = codec.payload_bytes(size, name)
  length = data.draw(st.sampled_from([right, right, right, right + 1, max(0, right - 1)]))
  payload = np.random.default_rng(seed).integers(0, 256, length).astype(np.uint8)
  try:
    y = codec.decode(payload, size, name)
  except CodecError:
    return
  assert length == right and y.dtype == np.float32 and y.shape == (size,)


def test_structural_errors():
  x = np.ones(300, np.float32)
  with pytest.raises(CodecError, match=r"'int2'.*f32, bf16, int8, int4"):
    codec.encode(x, "int2")
  with pytest.raises(CodecError, match="flat float32"):
    codec.encode(x.astype(np.float64), "int8")
  with pytest.raises(CodecError, match="flat float32"):
    codec.encode(x.reshape(2, 150), "f32")
  for name in codec.CODECS:
    payload = codec.encode(x, name)
    for wrong in (payload[:-1], np.append(payload, payload[:1]), payload.view(np.int8)):
      with pytest.raises(CodecError, match=f"{name} payload of 300 values.*uint8"):
        codec.decode(wrong, 300, name)


def test_codes_of_a_byte_may_have_other_levels(monkeypatch):
  """A codec with scales, and a byte a value, is no more than its name, type and levels."""
  monkeypatch.setattr(codec, "CODECS", (*codec.CODECS, "int6"))
  monkeypatch.setitem(codec._TYPES, "int6", np.dtype(np.int8))
  monkeypatch.setitem(codec.LEVELS, "int6", 31)
  for size in SIZES[1:]:
    x = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    found = codec.decode(codec.encode(x, "int6"), size, "int6")
    np.testing.assert_allclose(found, reference(x, 31), rtol=1e-6)


@pytest.mark.parametrize(("name", "lowest"), [("int8", -128), ("int4", -8)])
def test_what_no_encoder_writes_is_a_number_too(name, lowest):
  """Whoever may send f32 may send any number: to refuse some of them here would protect nobody."""
  payload = codec.encode(np.ones(301, np.float32), name)
  payload[:8].view(np.float32)[1] = -1
  payload[8] = 0x80 if name == "int8" else 0xF0  # in the first block; in int4 of value 0
  payload[-1] ^= 0x10  # in int4 the padding
  values = codec.decode(payload, 301, name)
  assert values[0] == np.float32(lowest) * payload[:4].view(np.float32)[0]
  assert (values[1:150] == 1).all() and (values[256:300] < 0).all()


@pytest.mark.parametrize("name", codec.CODECS)
def test_unaligned_and_strided_buffers(name):
  x = np.random.default_rng(3).standard_normal(700).astype(np.float32)
  payload = codec.encode(x, name)
  held = np.empty(payload.size + 1, np.uint8)[1:]  # as out of a network frame
  held[:] = payload
  np.testing.assert_array_equal(codec.decode(held, 700, name), codec.decode(payload, 700, name))
  np.testing.assert_array_equal(codec.encode(np.repeat(x, 2)[::2], name), payload)


def test_f32_is_a_view_both_ways_and_takes_no_memory():
  x = np.zeros(1 << 20, np.float32)
  tracemalloc.start()
  payload = codec.encode(x, "f32")
  values = codec.decode(payload, x.size, "f32")
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  assert np.shares_memory(payload, x) and np.shares_memory(values, x) and peak < 1 << 16


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_another_role_has_made_must_be_finite_in_every_value(bad):
  x = np.float32([1, 2, 3])
  assert codec.finite(codec.encode(x, "f32"), 3).tolist() == [1, 2, 3]
  x[1] = bad
  with pytest.raises(CodecError, match="not finite"):
    codec.finite(codec.encode(x, "f32"), 3)
