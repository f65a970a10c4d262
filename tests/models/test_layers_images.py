"""An image before the text: where it stands, who sees it, what counts, and all of it on a mesh."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest
from flax import nnx

from ddiloco.config import ConfigError, from_dict
from ddiloco.models import layers
from ddiloco.models.model import PLAIN, Execution
from ddiloco.models.transformer import cross_entropy, language_model
from tests.models.small import (
  DENSE,
  forward,
  fresh,
  layout,
  mesh_of,
  num_params,
  over,
  random_tokens,
)

SEEING = dataclasses.replace(DENSE, image_size=6, patch_size=2, image_channels=3)
P, T = SEEING.num_patches, 17
LENGTHS = (T + 1 - P, 3, 0, 0)  # tokens of text after each row's image; 0: no image


def batch() -> dict[str, np.ndarray]:
  """Two rows with an image, of which one has a short caption, and two of text alone."""
  random = np.random.default_rng(3)
  tokens = random.integers(0, SEEING.vocab_size, (4, T + 1)).astype("i4")
  for row, length in enumerate(LENGTHS):
    if length:
      tokens[row, :P], tokens[row, P + length :] = layers.NO_TEXT, layers.NO_TEXT
  pixels = random.integers(0, 256, (4, 6, 6, 3)).astype("u1")
  return {"image": pixels, "tokens": tokens}


@functools.partial(jax.jit, static_argnums=3)
def logits(params, tokens, image, execution=PLAIN):
  return language_model(SEEING).module(params)(tokens, execution, image)[0]


@functools.partial(jax.jit, static_argnums=2)
def loss_and_gradient(params, batch, execution=PLAIN):
  def loss(params):
    return language_model(SEEING).loss(params, batch, execution)[0]

  return jax.value_and_grad(loss)(params)


def test_patches_are_cut_row_by_row():
  image = np.arange(2 * 4 * 4 * 3).reshape(2, 4, 4, 3)
  found = np.asarray(jax.jit(layers.cut_patches, static_argnums=1)(image, 2))
  assert found.shape == (2, 4, 12)
  for row, (y, x) in enumerate([(0, 0), (0, 2), (2, 0), (2, 2)]):
    np.testing.assert_array_equal(found[1, row], image[1, y : y + 2, x : x + 2].reshape(-1))


def test_all_text_sees_the_image_and_no_other_row_does():
  params, rows = fresh(SEEING), batch()
  tokens, image = rows["tokens"][:, :-1], rows["image"]
  before = np.asarray(logits(params, tokens, image))
  changed = image.copy()
  changed[0, -1, -1] ^= 128  # the last patch of the first row
  after = np.asarray(logits(params, tokens, changed))
  moved = np.abs(after - before).max(axis=2)
  assert (moved[0, P - 1 :] > 1e-3).all() and moved[0, : P - 1].max() < 1e-5
  assert moved[1:].max() < 1e-5
  changed = image.copy()
  changed[2:] ^= 255  # of rows that are text alone nothing is looked at
  np.testing.assert_array_equal(logits(params, tokens, changed), before)


def test_text_alone_is_what_it_is_without_images():
  params, tokens = fresh(SEEING), random_tokens(SEEING, length=T)
  text_params = {n: v for n, v in params.items() if not n.startswith("patches/")}
  expected = forward(DENSE, text_params, tokens)[0]
  blank = batch()["image"]
  np.testing.assert_allclose(logits(params, tokens, blank), expected, rtol=1e-5, atol=1e-5)
  np.testing.assert_array_equal(forward(SEEING, params, tokens)[0], expected)  # as `generate` does


def test_places_of_an_image_differ():
  """The same patches in another order are another image."""
  params, rows = fresh(SEEING), batch()
  turned = rows["image"][:, ::-1]
  one, other = (logits(params, rows["tokens"][:, :-1], i) for i in (rows["image"], turned))
  assert np.abs(np.asarray(one) - other)[0, P:].max() > 1e-2


@pytest.mark.parametrize("chunks", [1, 4])
def test_only_text_counts(chunks):
  params, rows = fresh(SEEING), batch()
  execution = Execution(loss_chunks=chunks)
  value, gradient = loss_and_gradient(params, rows, execution)
  wide = np.asarray(logits(params, rows["tokens"][:, :-1], rows["image"]), np.float64)
  log_p = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
  targets = rows["tokens"][:, 1:]
  places = [(b, t) for b in range(4) for t in range(T) if targets[b, t] >= 0]
  assert len(places) == sum(length or T for length in LENGTHS)
  by_hand = -np.mean([log_p[b, t, targets[b, t]] for b, t in places])
  assert float(value) == pytest.approx(float(by_hand), rel=1e-5)
  for name, each in gradient.items():
    assert np.isfinite(each).all() and np.abs(each).max() > 0, name
  # What stands where there is no text is nothing to the loss.
  other = dict(rows, tokens=np.where(rows["tokens"] < 0, np.int32(-7), rows["tokens"]))
  np.testing.assert_array_equal(loss_and_gradient(params, other, execution)[0], value)


def test_a_target_outside_the_vocabulary_still_shows():
  counted, loss = np.array([[True, False]]), jax.jit(cross_entropy)
  zeros = np.zeros((1, 2, 4), np.float32)
  assert np.isnan(loss(zeros, np.int32([[4, -1]]), counted))
  assert float(loss(zeros, np.int32([[3, -1]]), counted)) > 1


def test_a_text_may_begin_with_token_0():
  np.testing.assert_array_equal(layers.has_image(np.int32([[0, -1], [-1, 0]])), [[False], [True]])


def test_held_out_rows_are_told_apart():
  params, rows = fresh(SEEING), batch()
  evaluate = jax.jit(language_model(SEEING).evaluate)
  measured = jax.device_get(evaluate(params, rows))
  seen, alone = ({n: v[at] for n, v in rows.items()} for at in (slice(0, 2), slice(2, 4)))
  for name, part in (("image_loss", seen), ("text_loss", alone)):
    expected = float(evaluate(params, part)["loss"])
    assert float(measured[name]) == pytest.approx(expected, rel=1e-5)
  text, captions = 2 * T, sum(LENGTHS)
  mean = text * measured["text_loss"] + captions * measured["image_loss"]
  assert float(measured["loss"]) == pytest.approx(float(mean) / (text + captions), rel=1e-5)


def test_over_a_mesh_it_is_the_same():
  mesh, params, rows = mesh_of(2, 2, 2), fresh(SEEING), batch()
  expected, wanted = loss_and_gradient(params, rows, Execution(loss_chunks=4))
  axes = language_model(SEEING).logical_axes()
  assert axes["patches/projection"] == (None, "embed") == axes["patches/places"]
  placed = {n: jax.device_put(v, layout(mesh, v.shape, axes[n])) for n, v in params.items()}
  value, gradient = loss_and_gradient(placed, rows, over(mesh, loss_chunks=4))
  np.testing.assert_allclose(value, expected, rtol=1e-5)
  for name, each in gradient.items():
    np.testing.assert_allclose(each, wanted[name], rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("attention", ["splash", "cudnn"])
def test_fused_attention_serves_as_it_is(attention, interpreted_kernels):
  params, rows = fresh(SEEING), batch()
  arguments = params, rows["tokens"][:, :-1], rows["image"]
  found = logits(*arguments, Execution(attention=attention))
  np.testing.assert_allclose(found, logits(*arguments), rtol=1e-3, atol=1e-4)


def test_counts_by_hand():
  more = 12 * 16 + P * 16  # the projection of 2 x 2 x 3 values, and the places
  assert num_params(SEEING) == num_params(DENSE) + more
  assert num_params(SEEING) == sum(v.size for v in fresh(SEEING).values())
  extra = language_model(SEEING).flops_per_token(T) - language_model(DENSE).flops_per_token(T)
  assert extra == pytest.approx(6 * 12 * 16 * P / T)


def test_a_patch_starts_as_long_as_a_token():
  model = dataclasses.replace(SEEING, model_dim=64)
  names = "embedding", "patches/places", "patches/projection"
  drawn = jax.jit(lambda key: [language_model(model).init(key)[n] for n in names])
  token, place, projection = drawn(jax.random.key(0))
  length = np.std(np.asarray(token) * 64**0.25)
  assert np.std(place) == pytest.approx(length, rel=0.1)
  assert np.std(projection) * len(projection) ** 0.5 == pytest.approx(length, rel=0.1)


def test_black_and_white_are_as_far_from_gray():
  patches = layers.Patches(SEEING, nnx.Rngs(0))
  images = (np.full((1, 6, 6, 3), pixel, np.uint8) for pixel in (0, 255))
  black, white = (patches(image, PLAIN, "float32") for image in images)
  np.testing.assert_allclose((black + white)[0], 2 * patches.places[...], atol=1e-6)


OWN = {"custom": "any.module:source", "sequence_length": 36}


@pytest.mark.parametrize(
  ("sections", "said"),
  [
    ({"model": {"image_size": 7}, "data": OWN}, "model.image_size = 7: must be whole patches"),
    ({"model": {"image_size": 8}}, "model.image_size = 8: needs images and captions"),
    (
      {"model": {"image_size": 12}, "data": OWN},
      "data.sequence_length = 36: must leave text some room: an image takes the first 36",
    ),
  ],
)
def test_what_cannot_be_is_refused(sections, said):
  with pytest.raises(ConfigError) as error:
    from_dict(sections)
  assert str(error.value).startswith(said) and "Fix: " in str(error.value)
