"""The passes of a commit: NumPy says what is meant, compiled kernels do the same, bit by bit."""

import importlib.util
import time
import tracemalloc

import numba
import numpy as np
import pytest

from ddiloco.config import Config, OuterConfig, SyncConfig
from ddiloco.core import codec, outer, passes
from ddiloco.core.codec import CHUNK, Encoded
from ddiloco.core.passes import Sum, Vectors
from ddiloco.runtime import ValueThreads
from tests.core.test_outer_merge import fragment_of, randoms

NESTEROV = OuterConfig(learning_rate=0.7, momentum=0.9, nesterov=True)
PLAIN = OuterConfig(learning_rate=1.0, momentum=0.0)
CONFIGS = [NESTEROV, PLAIN, OuterConfig(0.5, 0.9, False)]
CUTS = ((5,), (CHUNK,), (65_535, 2, 65_537), (70_000, 1, 64, 64, 140_000), (131_072, 3))
LONG = (CHUNK - 1, 2, 300, 17 * CHUNK, 255, 100_001)  # more chunks than are sampled
SHORT = (CHUNK - 1, 2, 300, 3 * CHUNK, 255, 30_001)  # two segments, odd to every border


@pytest.fixture
def compiled(monkeypatch):
  """`compiled(True)`: from now on by kernels, whatever the size; `compiled(False)`: by NumPy.

  A segment has three chunks, so that a short fragment has two segments.
  """
  monkeypatch.setattr(passes, "SEGMENT", 3 * CHUNK)
  by_numpy = Sum._add_codes

  def choose(kernels):
    monkeypatch.setattr(passes, "COMPILED_FROM", 0 if kernels else 1 << 60)
    unwanted = lambda *arguments: pytest.fail("NumPy adds up what kernels should")
    monkeypatch.setattr(Sum, "_add_codes", unwanted if kernels else by_numpy)

  return choose


@pytest.fixture
def same_bits(compiled):
  """`same_bits(compute)`: what kernels compute, which is what NumPy computes, bit by bit."""

  def both(compute):
    found = []
    for kernels in (True, False):
      compiled(kernels)
      found.append(compute())
    for ours, theirs in zip(*found, strict=True):
      if ours is not None:
        np.testing.assert_array_equal(ours, theirs)
    return found[0]

  return both


def encoded(deltas, name):
  return [Encoded(name, codec.encode(delta, name)) for delta in deltas]


def all_of(stepped):
  new, update = stepped
  return [*new, None if update is None else np.asarray(update.payload)]


def one_push(fragment, delta):
  """The sum of this one, exactly."""
  return alone(fragment, *encoded([delta], "f32"))


def alone(fragment, push):
  """The sum of this push only."""
  return Sum(fragment, [push], np.ones((1, len(fragment.pieces)), np.float32))


def squares_of(fragment, push, share=map):
  return passes.squares(alone(fragment, push), share)


def sample_of(fragment, push):
  return passes.sample(alone(fragment, push))


def long_fragment(*compared):
  """Of `LONG`, with these pieces alone merged by direction."""
  return fragment_of(*LONG, average=[i for i in range(len(LONG)) if i not in compared])


def stepped_of(fragment, pushes, config, name, share=map, seed=1):
  """(squares of the pushes, squares of their sum, the fragment after a step on them)."""
  squares = np.stack([squares_of(fragment, p, share) for p in pushes])
  coefficients = outer.Coefficients(fragment, squares, np.arange(1, len(pushes) + 1) / 10)
  total = Sum(fragment, pushes, coefficients.units)
  found = passes.squares(total, share)
  value, drift, speed = randoms(3, fragment.size, seed)
  published = value + np.float32(0.01) * drift if name != "f32" else value
  old = Vectors(value, published, speed if config.momentum else None)
  total.stretch = coefficients.stretch(found)
  return squares, found, passes.step(total, old, config, name, share)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("sizes", CUTS)
def test_a_step_is_the_outer_optimizers_on_the_plain_sum(sizes, config):
  fragment = fragment_of(*sizes, average=[1])
  deltas = randoms(3, fragment.size)
  deltas[1][: sizes[0]] = 0  # a piece that one learner did not move
  pushes = encoded(deltas, "f32")
  value, speed = randoms(2, fragment.size, seed=1)
  momentum = speed if config.momentum else None
  before = [v.copy() for v in (value, speed, *deltas)]
  squares = np.stack([squares_of(fragment, p) for p in pushes])
  coefficients = outer.Coefficients(fragment, squares, np.array([0.5, 0.2, 0.3]))
  total = Sum(fragment, pushes, coefficients.units)
  stretch = total.stretch = coefficients.stretch(passes.squares(total))
  new, update = passes.step(total, Vectors(value, value, momentum), config, "f32")

  spans = [slice(p.offset, p.offset + p.size) for p in fragment.pieces]
  units = coefficients.units
  parts = [[d[s] * units[m, i] for m, d in enumerate(deltas)] for i, s in enumerate(spans)]
  summed = np.concatenate([sum(each) * c for each, c in zip(parts, stretch)])
  expected = outer.update(value, momentum, summed, config)
  np.testing.assert_array_equal(new.value, expected)
  assert new.published_value is new.value and update is None
  followed = outer.followed(momentum, value, expected, config)
  np.testing.assert_array_equal(new.momentum, followed)
  for was, now in zip(before, (value, speed, *deltas)):
    np.testing.assert_array_equal(was, now)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", ["f32", "bf16", "int8", "int4"])
def test_kernels_and_threads_change_no_bit(name, config, compiled):
  fragment = fragment_of(*SHORT, average=[3])
  push_codec = "int4" if name == "int4" else "int8"
  deltas = randoms(6, fragment.size)
  deltas[1][: 2 * CHUNK] = 0  # scales of 0
  pushes = encoded(deltas, push_codec)
  compiled(False)
  squares, found, _ = stepped_of(fragment, pushes, config, name)
  compiled(True)
  assert alone(fragment, pushes[0]).compiled is not None
  kernel_squares, kernel_found, mine = stepped_of(fragment, pushes, config, name)
  np.testing.assert_allclose(kernel_squares, squares, rtol=1e-6)
  np.testing.assert_allclose(kernel_found, found, rtol=1e-6)
  with ValueThreads(3) as threads:
    *sums, threaded = stepped_of(fragment, pushes, config, name, threads.share)
  for ours, theirs in zip(all_of(mine), all_of(threaded)):
    np.testing.assert_array_equal(ours, theirs)
  np.testing.assert_array_equal(sums[1], kernel_found)
  # With the same norms NumPy and kernels agree in every bit.
  units = outer.Coefficients(fragment, squares, np.arange(1, 7) / 10).units
  value, published, speed = randoms(3, fragment.size, seed=2)
  published = value if name == "f32" else value + np.float32(0.001) * published
  old = Vectors(value, published, speed if config.momentum else None)
  found = {}
  for kernels in (True, False):
    compiled(kernels)
    one = passes.squares(Sum(fragment, pushes[:1], units[:1]))
    np.testing.assert_allclose(one, squares[0] * units[0] ** 2, rtol=1e-5)
    total = Sum(fragment, pushes, units)
    total.stretch = np.float32([0.7, 1.1, 0.0, 1.0, 2.0, 3.0])
    found[kernels] = all_of(passes.step(total, old, config, name))
    kept = Vectors(*(None if v is None else v.copy() for v in old))
    if name == "f32":
      kept = kept._replace(published_value=kept.value)
    found[kernels, "in place"] = all_of(passes.step(total, kept, config, name, in_place=True))
    assert found[kernels, "in place"][0] is kept.value
  for each in found.values():
    for ours, theirs in zip(found[True], each, strict=True):
      if ours is not None:
        np.testing.assert_array_equal(ours, theirs)


def test_a_codec_whose_values_are_only_converted_needs_a_name_and_a_type(same_bits, monkeypatch):
  monkeypatch.setattr(codec, "CODECS", (*codec.CODECS, "f16"))
  monkeypatch.setitem(codec._TYPES, "f16", np.dtype(np.float16))
  fragment = fragment_of(*SHORT, average=[3])
  pushes = encoded(randoms(2, fragment.size), "f16")
  assert pushes[0].payload.nbytes == codec.payload_bytes(fragment.size, "f16") == 2 * fragment.size
  same_bits(lambda: all_of(stepped_of(fragment, pushes, NESTEROV, "f16")[-1]))


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("extreme", [0.0, 1e-45, 1e-39, 1e30, 3.4028235e38, np.inf, np.nan])
def test_kernels_encode_extremes_as_numpy_does(name, extreme, same_bits):
  fragment = fragment_of(3 * 256 + 7)
  signs = np.sign(randoms(1, fragment.size)[0])
  zero = np.zeros(fragment.size, np.float32)
  update = (signs * np.linspace(0.01, 1, fragment.size) * extreme).astype(np.float32)
  push, old = Encoded("int8", codec.encode(zero, "int8")), Vectors(update, zero, None)
  found = same_bits(lambda: all_of(passes.step(alone(fragment, push), old, PLAIN, name)))
  assert found[3].tobytes() == codec.encode(update, name).tobytes()


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_what_no_encoder_writes_is_a_number_to_kernels_too(name, same_bits, compiled):
  """Codes -128 and -8, negative scales, and a padding code that is not 0."""
  fragment = fragment_of(CHUNK + 301)
  good, other = encoded(randoms(2, fragment.size), name)
  scales = 4 * -(-fragment.size // 256)
  bad = good.payload.copy()
  bad[scales - 1] |= 0x80
  bad[scales::5] = 0x80
  bad[scales + 1 :: 5] = 0x07
  bad[-1] = 0x17
  old = Vectors(*randoms(3, fragment.size))
  pushes, units = [Encoded(name, bad), other], np.full((2, 1), 0.3, np.float32)
  same_bits(lambda: all_of(passes.step(Sum(fragment, pushes, units), old, NESTEROV, name)))
  compiled(False)
  squares = squares_of(fragment, pushes[0])
  compiled(True)
  np.testing.assert_allclose(squares_of(fragment, pushes[0]), squares, rtol=1e-6)
  payload = good.payload.copy()
  payload[:4] = np.frombuffer(np.float32(np.nan).tobytes(), np.uint8)
  assert np.isnan(squares_of(fragment, Encoded(name, payload))).all()


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf, 3e38, -3e38])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_one_scale_that_makes_a_value_infinite_shows_in_the_squares(name, scale, compiled):
  """Screening asks no more than whether they are finite: a block of zeros may stay one."""
  fragment = fragment_of(CHUNK + 301, 300, 99)
  (good,) = encoded(randoms(1, fragment.size), name)
  for block in (0, 100, 255, 256, 258):
    for codes in (good.payload, np.full_like(good.payload, 0x88 if name == "int4" else 0)):
      payload = codes.copy()
      payload[4 * block : 4 * block + 4] = np.frombuffer(np.float32(scale).tobytes(), np.uint8)
      values = codec.decode(payload, fragment.size, name)
      finite = [np.isfinite(values[p.offset : p.offset + p.size]).all() for p in fragment.pieces]
      assert all(finite) == (np.isfinite(scale) and codes is not good.payload)
      for kernels in (True, False):
        compiled(kernels)
        squares = squares_of(fragment, Encoded(name, payload))
        assert np.isfinite(squares).tolist() == finite


def test_a_fragment_has_its_runs_once():
  segments = passes.segments(fragment_of(*LONG, 40 * CHUNK))
  assert len({id(segment.runs) for segment in segments}) == 1
  assert [len(segment.spans) for segment in segments] == [16] * 3 + [12]


@pytest.mark.parametrize("size", [0, 1, CHUNK, CHUNK + 1, passes.SEGMENT, passes.SEGMENT + 70_000])
def test_a_vector_is_cut_into_chunks_which_segments_share(size):
  chunks, shared = [], []

  def share(work, starts):
    shared.extend(starts)
    return map(work, shared)

  passes.over_chunks(size, chunks.append, share)
  assert chunks == [slice(at, min(at + CHUNK, size)) for at in range(0, size, CHUNK)]
  assert shared == [*range(0, size, passes.SEGMENT)]


def test_what_is_not_worth_it_is_not_compiled(monkeypatch):
  monkeypatch.setattr(passes, "_kernels", lambda: pytest.fail("it compiles"))
  monkeypatch.setattr(passes, "COMPILED_FROM", 100)
  for size, name in ((99, "int4"), (100, "bf16")):
    assert passes.compile_for(fragment_of(size), Config(sync=SyncConfig(push_codec=name))) == ""
  assert passes._by_kernels(fragment_of(100), "int4")


def test_a_payload_at_an_odd_address_is_read_alike(compiled):
  fragment = fragment_of(CHUNK + 17)
  (push,) = encoded(randoms(1, fragment.size), "int4")
  shifted = np.empty(push.payload.size + 1, np.uint8)
  shifted[1:] = push.payload
  compiled(True)
  assert squares_of(fragment, push) == squares_of(fragment, Encoded("int4", shifted[1:]))


def read(fragment, pushes, units):
  """The pushes' sum as one vector; `units` [M] or [M, pieces]."""
  units = np.broadcast_to(np.float32(units).T, (len(fragment.pieces), len(pushes))).T
  total, scratch = np.full((2, fragment.size + 100), np.float32(7))
  for segment in passes.segments(fragment):
    for chunk in segment.chunks():
      here = slice(chunk.start, chunk.stop)
      Sum(fragment, pushes, units).read(chunk, total[here], scratch[here])
  assert (total[fragment.size :] == 7).all()  # kernels write by address
  return total[: fragment.size]


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("count", [1, 3, passes.GROUP, 2 * passes.GROUP + 1])
def test_codes_add_up_to_the_weighted_sum(name, count, same_bits):
  fragment = fragment_of(*SHORT)
  pushes = encoded(randoms(count, fragment.size), name)
  units = np.linspace(0.01, 1, count)
  values = [codec.decode(push.payload, fragment.size, name).astype(np.float64) for push in pushes]
  exact = sum(unit * value for unit, value in zip(np.float32(units), values))
  ours = same_bits(lambda: [read(fragment, pushes, units)])[0]
  blocks = np.arange(fragment.size) // codec.BLOCK
  steps = np.array([codec.parts(push, fragment.size)[0][blocks] for push in pushes])
  largest = (steps * units[:, None]).max(axis=0)  # what rounding to codes changes, twice
  few = min(count, passes.GROUP)
  bound = 1.01 * few * codec.LEVELS[name] * 2.0**-15 if count > 1 else 0
  assert (np.abs(ours - exact) <= bound * largest + 1e-6 * np.abs(exact)).all()


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_codes_add_up_to_the_same_bits_in_any_order(name, same_bits):
  fragment = fragment_of(*SHORT)
  pushes = encoded(randoms(passes.GROUP, fragment.size), name)
  units, order = np.linspace(0.01, 1, passes.GROUP), np.arange(passes.GROUP)
  ours = same_bits(lambda: [read(fragment, pushes, units)])[0]
  for seed in range(3):
    np.random.default_rng(seed).shuffle(order)
    other = same_bits(lambda: [read(fragment, [pushes[m] for m in order], units[order])])[0]
    np.testing.assert_array_equal(ours, other)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_push_alone_is_what_it_decodes_to(name, same_bits):
  """Also with scales that f32 holds only roughly, or below 0, and with any code as padding."""
  fragment = fragment_of(CHUNK + 301)
  (push,) = encoded(randoms(1, fragment.size), name)
  payload = push.payload.copy()
  scales, _ = codec.parts(Encoded(name, payload), fragment.size)
  scales[:6] = 1e-45, 1e-40, -1e-39, -2.5, 0, 1e36
  payload[-1] ^= 0x70
  ours = same_bits(lambda: [read(fragment, [Encoded(name, payload)], [1])])[0]
  np.testing.assert_array_equal(ours, codec.decode(payload, fragment.size, name))


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("unit", [np.nan, np.inf, 3e38, 1e-38, 1e-45, -1.0])
def test_units_at_the_edges_of_f32_are_numbers_to_kernels_too(name, unit, same_bits):
  fragment = fragment_of(CHUNK + 301, 77, 256)
  deltas = randoms(3, fragment.size)
  for delta in deltas:
    delta[:700] = 0
  pushes, units = encoded(deltas, name), np.full((3, 3), 0.3, np.float32)
  units[1, 1], units[:, 2], units[2, 0] = unit, [unit, -unit, 0], unit
  with np.errstate(all="raise"):  # a sum that is not finite is no error of the shard's
    (total,) = same_bits(lambda: [read(fragment, pushes, units)])
  assert np.isfinite(total).all() == (abs(unit) <= 1)


@pytest.mark.parametrize("name", codec.CODECS)
def test_what_counts_as_zero_may_be_anything(name, same_bits):
  fragment = fragment_of(300, CHUNK, 5)
  deltas = randoms(5, fragment.size)
  deltas[2][:300] = deltas[4][-5:] = np.nan
  pushes, units = encoded(deltas, name), np.ones((5, 3), np.float32)
  units[2, :2] = units[4, 1:] = units[0, 0] = units[3] = 0  # a block with a NaN is all NaN
  assert np.isfinite(same_bits(lambda: [read(fragment, pushes, units)])).all()


@pytest.mark.parametrize("config", CONFIGS)
def test_what_is_compiled_ahead_is_all_that_commits_need(config, compiled, monkeypatch):
  """Also for payloads that cannot be written, which are of another type to numba."""
  spec = importlib.util.find_spec("ddiloco.core.kernels")
  kernels = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(kernels)  # none of these has run yet
  monkeypatch.setattr(passes, "_kernels", lambda: kernels)
  compiled(True)
  fragment = fragment_of(CHUNK + 17)
  sync = SyncConfig(push_codec="int4")
  assert passes.compile_for(fragment, Config(sync=sync, outer=config)) == ""
  ahead = [len(kernel.signatures) for kernel in kernels._KERNELS]
  assert any(ahead)
  for name, count, writable in (("int8", 1, True), ("int4", 5, True), ("int4", 5, False)):
    pushes = encoded(randoms(count, fragment.size), name)
    for push in pushes[::2]:
      push.payload.flags.writeable = writable
    stepped_of(fragment, pushes, config, name)
    passes.sample(alone(fragment, pushes[0]))
  assert [len(kernel.signatures) for kernel in kernels._KERNELS] == ahead


def test_the_sample_is_of_the_same_places_and_not_long():
  small = fragment_of(10, 5000, 7, average=[1])
  (push,) = encoded(randoms(1, small.size), "f32")
  values = codec.decode(push.payload, small.size, "f32")
  whole = sample_of(small, push)
  np.testing.assert_array_equal(whole, np.r_[values[:10], values[5010:]])
  averaged = fragment_of(10, 5000, 7, average=[0, 1, 2])
  np.testing.assert_array_equal(sample_of(averaged, push), values)
  large = long_fragment(0, 3, 5)
  pushes = encoded(randoms(2, large.size), "int4")
  samples = [sample_of(large, p) for p in pushes]
  assert samples[0].size == samples[1].size <= passes.SAMPLED
  chunks = [chunk for chunk, _ in passes._sampled(large)]
  assert len(chunks) == 16 and large.size - chunks[-1].stop < CHUNK, (
    "so many are read, of all parts"
  )
  assert samples[0].size > passes.SAMPLED // 2
  (places,) = encoded([np.arange(large.size, dtype=np.float32)], "f32")
  ours = sample_of(long_fragment(3), places)
  assert ours.min() >= CHUNK + 301 and ours.max() < 18 * CHUNK + 301


def test_a_chunk_is_read_with_all_its_runs_when_some_are_sampled(compiled, monkeypatch):
  """Kernels look for the run of every value: without those of the others they read elsewhere."""
  compiled(True)
  fragment, read = long_fragment(1, 3, 4), Sum.read

  def checked(total, chunk, *rows):
    assert chunk.runs[0, 0] == 0 and chunk.runs[-1, 1] == chunk.stop - chunk.start
    assert (chunk.runs[1:, 0] == chunk.runs[:-1, 1]).all()
    read(total, chunk, *rows)

  monkeypatch.setattr(Sum, "read", checked)
  (push,) = encoded(randoms(1, fragment.size), "int4")
  assert sample_of(fragment, push).size


@pytest.mark.parametrize("kernels", [True, False])
def test_the_merged_sample_is_of_the_same_places(compiled, kernels):
  compiled(kernels)
  fragment = long_fragment(0, 3, 5)
  pushes = encoded(randoms(3, fragment.size), "int4")
  total = Sum(fragment, pushes, np.full((3, len(LONG)), 0.5, np.float32))
  stretch = total.stretch = np.arange(len(LONG), dtype=np.float32)
  found = passes.sample(total)
  longer = np.concatenate([np.full(n, c, np.float32) for n, c in zip(LONG, stretch)])
  whole = read(fragment, pushes, [0.5] * 3)
  places = Encoded("f32", codec.encode(np.arange(fragment.size, dtype=np.float32), "f32"))
  at = sample_of(fragment, places).astype(int)  # exact below 2**24
  np.testing.assert_array_equal(found, (longer * whole)[at])


def test_momentum_is_what_published_steps_say():
  """The shard keeps the momentum of its formula; whoever sees only published values has it too."""
  fragment = fragment_of(1000)
  exact_momentum = np.zeros(1000)
  value = published = randoms(1, 1000)[0]
  momentum = theirs = np.zeros(1000, np.float32)
  for seed in range(20):
    (delta,) = randoms(1, 1000, seed + 10)
    delta += 1
    exact_momentum = 0.9 * exact_momentum + delta
    old = Vectors(value, published, momentum)
    new, update = passes.step(one_push(fragment, delta), old, NESTEROV, "int8")
    received = published + codec.decode(update.payload, 1000, "int8")
    theirs = outer.followed(theirs, published, received, NESTEROV)
    value, published, momentum = new.value, new.published_value, new.momentum
    np.testing.assert_array_equal(received, published)
    np.testing.assert_array_equal(theirs, momentum)
  assert np.abs(momentum - exact_momentum).max() < 0.02 * np.abs(exact_momentum).max()


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", codec.CODECS)
def test_a_copy_follows_a_step_bit_by_bit(name, config):
  """Also over several chunks, the last of which is odd to every border."""
  fragment = fragment_of(CHUNK + 300, CHUNK - 1)
  value, published, speed, delta = randoms(4, fragment.size)
  published = value if name == "f32" else published
  old = Vectors(value, published, speed if config.momentum else None)
  new, update = passes.step(one_push(fragment, delta), old, config, name)
  change = update or Encoded("f32", codec.encode(new.published_value, "f32"))
  copied, momentum = published.copy(), None if old.momentum is None else speed.copy()
  passes.follow(copied, momentum, change, config)
  np.testing.assert_array_equal(copied, new.published_value)
  np.testing.assert_array_equal(momentum, new.momentum)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_step_allocates_the_new_vectors_if_any_and_chunks(in_place):
  fragment = fragment_of(1_000_000, 64, 500_000)
  pushes = encoded(randoms(4, fragment.size), "int4")
  stepped_of(fragment, pushes, NESTEROV, "int4")
  old = Vectors(*np.zeros((3, fragment.size), np.float32))
  tracemalloc.start()
  total = Sum(fragment, pushes, np.ones((4, 3), np.float32))
  passes.squares(total)
  passes.step(total, old, NESTEROV, "int4", in_place=in_place)
  peak = tracemalloc.get_traced_memory()[1]
  tracemalloc.stop()
  vectors = 3 * old.value.nbytes * (not in_place) + codec.payload_bytes(fragment.size, "int4")
  assert vectors <= peak <= vectors + 6 * 4 * CHUNK


def test_many_tiny_pieces_cost_little():
  """Thirty pieces cost about three times as much as one of as many values, in this thread."""
  seconds: dict[int, list[float]] = {30: [], 1: []}
  many, one = fragment_of(*[64] * 20, *[1872] * 10), fragment_of(20_000)
  pushes = encoded(randoms(4, one.size), "f32")
  for fragment in [many, one] * 50:
    start = time.thread_time()
    stepped_of(fragment, pushes, NESTEROV, "f32")
    seconds[len(fragment.pieces)].append(time.thread_time() - start)
  print({pieces: f"best {min(found) * 1e6:.0f} microseconds" for pieces, found in seconds.items()})
  assert min(seconds[30]) < 8 * min(seconds[1])


@pytest.mark.parametrize("error", [OSError("no space left"), EOFError("ran out of input")])
def test_kernels_that_cannot_be_kept_on_disk_are_compiled_anew(monkeypatch, error):
  from ddiloco.core import kernels

  calls = []

  def call_all(*arguments):
    calls.append(arguments)
    if len(calls) == 1:
      raise error

  monkeypatch.setattr(kernels, "_call_all", call_all)
  for kernel in kernels._KERNELS:
    monkeypatch.setattr(kernel, "_cache", kernel._cache)  # as it was, afterwards
  assert str(error) in kernels.compile_all("chunk", "vectors", "config")
  assert calls == 2 * [("chunk", "vectors", "config")]
  assert {type(kernel._cache).__name__ for kernel in kernels._KERNELS} == {"NullCache"}


def test_kernels_are_compiled_anew_when_what_is_compiled_into_them_has_changed(
  monkeypatch, tmp_path
):
  """A shard of a new version went on with the old one's instructions."""
  from ddiloco.core import instructions, kernels

  monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
  monkeypatch.setattr(kernels, "_KERNELS", [])

  def hits():
    kernel = kernels._compiled(kernels._copy.py_func)
    kernel(*np.zeros((2, 3), np.uint8))
    return sum(kernel.stats.cache_hits.values())

  assert [hits(), hits()] == [0, 1]
  for module, function in ((codec, "parts"), (passes, "step"), (instructions, "_instruction")):
    monkeypatch.setattr(module, function, hits)  # of another file
    assert hits() == 0
