import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddiloco.core import codec, outer, passes
from ddiloco.core.codec import Encoded
from ddiloco.core.fragments import Fragment, Piece


def fragment_of(*sizes, average=()):
  """A fragment of flat pieces with these sizes; `average` holds the indices of averaged ones."""
  offsets = [sum(sizes[:i]) for i in range(len(sizes))]
  return Fragment(
    0,
    tuple(
      Piece(f"tensor{i}", None, 0, size, (size,), offset, i in average)
      for i, (size, offset) in enumerate(zip(sizes, offsets))
    ),
  )


def exact(delta):
  return Encoded("f32", codec.encode(delta, "f32"))


def squared_norms(fragment, delta):
  ones = np.ones((1, len(fragment.pieces)), np.float32)
  return passes.squares(passes.Sum(fragment, [exact(delta)], ones))


def coefficients_of(fragment, deltas, weights):
  squares = np.stack([squared_norms(fragment, d) for d in deltas]) if deltas else np.zeros((0, 2))
  return outer.Coefficients(fragment, squares, np.asarray(weights, np.float64))


def whole(total):
  """A sum as one vector."""
  out = np.empty(total.fragment.size, np.float32)
  for chunk in itertools.chain(*(s.chunks() for s in passes.segments(total.fragment))):
    here = out[chunk.start : chunk.stop]
    total.read(chunk, here, np.empty_like(here))
  return out


def merged(fragment, deltas, weights):
  coefficients = coefficients_of(fragment, deltas, weights)
  total = passes.Sum(fragment, [exact(d) for d in deltas], coefficients.units)
  out = whole(total)
  for piece, stretch in zip(fragment.pieces, coefficients.stretch(passes.squares(total))):
    out[piece.offset : piece.offset + piece.size] *= stretch
  return out


def randoms(num, size, seed=0):
  rng = np.random.default_rng(seed)
  return [rng.standard_normal(size).astype(np.float32) for _ in range(num)]


def naive_rda(deltas, weights):
  """The formula itself, in float64."""
  deltas = [d.astype(np.float64) for d in deltas]

  def phi(x):
    norm = np.linalg.norm(x)
    return x / norm if norm else x

  radius = sum(w * np.linalg.norm(d) for w, d in zip(weights, deltas))
  return radius * phi(sum(w * phi(d) for w, d in zip(weights, deltas)))


def test_token_weights_golden():
  # 100 * 100/10 = 1000; absent; 200 * 200/10 = 4000
  weights = outer.token_weights([10, 0, 10], [100, 0, 200])
  assert weights.dtype == np.float64 and weights.tolist() == [0.2, 0.0, 0.8]
  assert outer.token_weights([0, 0], [0, 0]).tolist() == [0, 0]
  assert outer.token_weights([], []).shape == (0,)
  assert outer.token_weights([5, 0], [10, 10]).tolist() == [1, 0]  # no steps: absent, no division


@given(st.lists(st.tuples(st.integers(0, 10**4), st.integers(0, 10**10)), min_size=1, max_size=16))
def test_token_weights_sum_to_one_and_absent_is_zero(counts):
  steps, tokens = zip(*counts)
  weights = outer.token_weights(steps, tokens)
  present = [s > 0 and t > 0 for s, t in counts]
  assert ((weights > 0) == present).all()
  assert weights.sum() == pytest.approx(1.0 if any(present) else 0.0, abs=1e-12)


def test_golden_two_learners_two_pieces():
  # Piece 0 (RDA, w = 1/2): (3, 4) with norm 5 and (10, 0) with norm 10. Radius 7.5; the directions
  # (.6, .8) and (1, 0) average to (.8, .4), norm sqrt(.8). Piece 1 (average): (2, 4) and (6, 0).
  fragment = fragment_of(2, 2, average=[1])
  deltas = [np.array([3, 4, 2, 4], np.float32), np.array([10, 0, 6, 0], np.float32)]
  assert [squared_norms(fragment, d).tolist() for d in deltas] == [[25, 20], [100, 36]]
  coefficients = coefficients_of(fragment, deltas, [0.5, 0.5])
  np.testing.assert_array_equal(coefficients.units, np.float32([[1, 0.5], [0.5, 0.5]]))  # x 10
  stretch = 7.5 / np.sqrt(0.8)
  found = coefficients.stretch(np.array([80.0, 0]))  # |10 (.8, .4)|^2
  np.testing.assert_allclose(found, [stretch / 10, 1], rtol=1e-7)
  expected = [stretch * 0.8, stretch * 0.4, 4, 2]
  np.testing.assert_allclose(merged(fragment, deltas, [0.5, 0.5]), expected, rtol=2e-7)


@pytest.mark.parametrize("num", [1, 2, 3, 8, 16])
def test_equal_norms_keep_their_norm(num):
  fragment = fragment_of(500, 100_000)
  deltas = randoms(num, fragment.size, seed=num)
  for delta, piece in itertools.product(deltas, fragment.pieces):
    part = delta[piece.offset : piece.offset + piece.size]
    part *= 3 / np.linalg.norm(part.astype(np.float64))
  result = merged(fragment, deltas, np.arange(1, num + 1) / np.arange(1, num + 1).sum())
  np.testing.assert_allclose(squared_norms(fragment, result), 9, rtol=1e-5)
  if num > 1:
    plain = np.mean(deltas, axis=0)
    assert (squared_norms(fragment, plain) < 0.75 * 9).all()  # what RDA is there to avoid


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1), st.floats(1e-12, 1e12))
def test_one_learner_gets_its_own_delta_bitwise(seed, size):
  fragment = fragment_of(64, 1, 700, average=[1])
  (delta,) = randoms(1, fragment.size, seed)
  delta *= np.float32(size)
  np.testing.assert_array_equal(merged(fragment, [delta], [1.0]), delta)


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1), st.floats(1e-6, 1e6))
def test_what_one_of_several_learners_has_moved_keeps_its_direction_bitwise(seed, size):
  fragment = fragment_of(64, 700)
  first, second = (np.float32(size) * delta for delta in randoms(2, fragment.size, seed))
  first[:64] = second[64:] = 0
  result = merged(fragment, [first, second], [0.3, 0.7])
  np.testing.assert_array_equal(result, np.float32(0.3) * first + np.float32(0.7) * second)


@settings(max_examples=50)
@given(st.integers(1, 6), st.integers(0, 2**32 - 1), st.permutations(range(6)))
def test_order_of_learners_does_not_matter(num, seed, permutation):
  fragment = fragment_of(10, 300, 9, average=[0])
  deltas = randoms(num, fragment.size, seed)
  weights = np.random.default_rng(seed).dirichlet(np.ones(num))
  arrival = [learner for learner in permutation if learner < num]
  straight = merged(fragment, deltas, weights)
  # Sums run in the order that is given: equal up to rounding in any, and a shard sorts.
  unsorted = merged(fragment, [deltas[i] for i in arrival], weights[arrival])
  np.testing.assert_allclose(unsorted, straight, rtol=1e-4, atol=1e-5)


@settings(max_examples=50)
@given(st.integers(1, 8), st.integers(0, 2**32 - 1), st.floats(1e-15, 1e15))
def test_agrees_with_the_naive_formula(num, seed, size):
  fragment = fragment_of(33, 5000, 7, average=[2])
  deltas = [d * np.float32(size) for d in randoms(num, fragment.size, seed)]
  weights = np.random.default_rng(seed).dirichlet(np.ones(num))
  result = merged(fragment, deltas, weights)
  for piece in fragment.pieces:
    span = slice(piece.offset, piece.offset + piece.size)
    parts = [d[span] for d in deltas]
    plain = sum(w * d.astype(np.float64) for w, d in zip(weights, parts))
    expected = plain if piece.average else naive_rda(parts, weights)
    np.testing.assert_allclose(result[span], expected, rtol=1e-4, atol=1e-5 * size)


def test_zero_inputs():
  fragment = fragment_of(3, 3, average=[1])
  zero, one = np.zeros(6, np.float32), np.array([3, 0, 4, 2, 2, 2], np.float32)
  assert not merged(fragment, [zero, zero], [0.5, 0.5]).any()
  assert not merged(fragment, [], []).any()
  assert not merged(fragment, [one, one], [0, 0]).any()
  # phi(0) = 0: the direction is the other's, the radius the weighted mean 2.5 of 0 and 5.
  result = merged(fragment, [zero, one], [0.5, 0.5])
  np.testing.assert_allclose(result, [1.5, 0, 2, 1, 1, 1], rtol=1e-6)


def test_a_push_that_is_too_short_for_a_direction_counts_as_zero():
  """Its unit would not fit into f32 where another push is of the longest that are merged. Another
  piece of it, of which all pushes are that short, has a direction."""
  for norm, unit in ((1e-17, 0.0), (1e-14, 0.5e29)):
    squares = np.array([[1e30, 1e-36], [norm**2, 4e-36]])
    units = outer.Coefficients(fragment_of(2, 3), squares, np.array([0.5, 0.5])).units
    assert units.T.tolist() == [[0.5, pytest.approx(unit)], pytest.approx([1.0, 0.5])]


def test_weight_zero_is_never_read():
  fragment = fragment_of(2, 2, average=[1])
  one = np.array([3, 4, 1, 2], np.float32)
  units = coefficients_of(fragment, [one, one], [1.0, 0.0]).units
  poison = np.full(4, np.nan, np.float32)
  total = passes.Sum(fragment, [exact(one), exact(poison)], units)
  np.testing.assert_array_equal(whole(total), one)


def test_orthogonal_inputs():
  fragment = fragment_of(2)
  deltas = [np.array([2, 0], np.float32), np.array([0, 2], np.float32)]
  np.testing.assert_allclose(
    merged(fragment, deltas, [0.5, 0.5]), [np.sqrt(2), np.sqrt(2)], rtol=1e-6
  )


def test_opposite_inputs_cancel():
  fragment = fragment_of(1000)
  (delta,) = randoms(1, 1000)
  for other in (-delta, np.float32(-3) * delta, -delta * (1 + np.float32(1e-6))):
    assert not merged(fragment, [delta, other], [0.5, 0.5]).any()
  # A sum of directions under a thousandth as long as they are is noise, one above it is none.
  (across,) = randoms(1, 1000, seed=5)
  for angle, is_noise in ((1.6e-3, True), (2.4e-3, False)):
    other = -delta - np.float32(angle) * across
    assert merged(fragment, [delta, other], [0.5, 0.5]).any() != is_noise
  # Three directions at 120 degrees cancel as well, up to rounding.
  angles = np.array([0, 2, 4]) * np.pi / 3
  star = [np.array([np.cos(a), np.sin(a)], np.float32) for a in angles]
  assert not merged(fragment_of(2), star, np.ones(3) / 3).any()
  # With unequal weights the stronger wins, at the mean radius.
  result = merged(fragment, [delta, -delta], [0.75, 0.25])
  np.testing.assert_allclose(result, delta, rtol=1e-5)


@pytest.mark.filterwarnings("error")
def test_norms_are_finite_exactly_where_the_values_are():
  fragment = fragment_of(3, 20_000, 4)
  delta = np.ones(fragment.size, np.float32)
  for extreme in (3e38, 1e-30, 1e-44):
    delta[:] = extreme
    exact = [p.size * float(delta[0]) ** 2 for p in fragment.pieces]
    np.testing.assert_allclose(squared_norms(fragment, delta), exact, rtol=1e-5)
  for bad in (np.nan, np.inf, -np.inf):
    delta[:] = 1
    delta[10_000] = bad
    squares = squared_norms(fragment, delta)
    assert np.isfinite(squares).tolist() == [True, False, True]


def test_no_learner_weighs_more_than_all_others_together():
  weights = outer.token_weights([10**12, 24, 24, 24], [10**15, 240, 240, 240])
  assert weights[0] > 0.99
  bounded = outer.bounded_shares(weights, [10, 10, 10, 10])
  assert bounded[0] == 0.5 and bounded.sum() == pytest.approx(1.0)
  assert bounded[1] == bounded[2] == bounded[3]
  fair = outer.token_weights([24] * 4, [240] * 4)
  assert outer.bounded_shares(fair, [10] * 4).tobytes() == fair.tobytes(), "not a bit is changed"


def test_an_island_of_larger_steps_has_the_share_it_earns():
  """Four times the tokens a step: sixteen times the weight of each other (quantity x quality)."""
  weights = outer.token_weights([24, 24, 24], [96, 24, 24])
  assert weights[0] == pytest.approx(16 / 18)
  assert (outer.bounded_shares(weights, [4, 1, 1]) == weights).all()
  assert outer.bounded_shares(weights, [1, 1, 1])[0] == 0.5


def test_a_learner_that_is_alone_has_it_all():
  assert outer.bounded_shares(outer.token_weights([5], [50]), [10]).tolist() == [1.0]
  assert outer.bounded_shares(np.array([1.0, 0.0]), [10, 10]).tolist() == [1.0, 0.0]
