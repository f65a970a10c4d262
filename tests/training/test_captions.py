"""Pairs of image and caption: what they say is true, positions give rows, none is held out."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from importlib.util import find_spec

import jax
import numpy as np
import pytest

from ddiloco.api import experiment
from ddiloco.config import Config, ConfigError, from_dict
from ddiloco.models.layers import NO_TEXT
from ddiloco.roles import initial
from ddiloco.training import captions, data
from ddiloco.training.evaluate import HeldoutLoss
from ddiloco.training.tokens import BYTES

pytestmark = pytest.mark.skipif(not find_spec("sklearn"), reason="needs ddiloco[examples]")
PATCHES = 16


def config_of(**sections) -> Config:
  made = experiment("configs/text_image.py", "config")
  made.data.source = "synthetic"  # quicker to read than the standard library
  for section, values in sections.items():
    made[section].update(values)
  return from_dict(made)


CONFIG = config_of()


@pytest.fixture(scope="module")
def pairs() -> captions.Pairs:
  return data.open_data(CONFIG.data)


@pytest.fixture(scope="module")
def streams(pairs):
  return [data.Stream(pairs, CONFIG, learner) for learner in range(5)]


def texts(batch) -> list[str]:
  """The captions of a batch's images."""
  rows = [row[row >= 0] for row in batch["tokens"] if row[0] < 0]
  assert all(row[-1] == 0 for row in rows)  # the end token
  return [BYTES.decode(row[:-1]) for row in rows]


def test_a_batch_is_what_the_model_reads(streams):
  batch = streams[0].batch(7)
  image, tokens = batch["image"], batch["tokens"]
  assert image.shape == (8, 8, 8, 1) and image.dtype == np.uint8
  assert tokens.shape == (8, 81) and tokens.dtype == np.int32
  assert (tokens[:4, :PATCHES] == NO_TEXT).all() and (tokens[:4, PATCHES] >= 0).all()
  for row in tokens[:4]:  # once there is no more text, there is none any more
    assert (np.diff((row[PATCHES:] >= 0).astype(int)) <= 0).all()
  assert (tokens[4:] >= 0).all() and not image[4:].any() and image[:4].any((1, 2, 3)).all()


def test_a_caption_says_what_is_in_its_image(pairs):
  by_pixels = {image.tobytes(): n for n, image in enumerate(pairs.scans_NxYxX)}
  seen = set()
  stream = data.Stream(pairs, CONFIG, 2)
  for position in range(12):
    batch = stream.batch(position)
    for pixels, text in zip(batch["image"], texts(batch)):
      number = by_pixels[pixels[..., 0].tobytes()]
      assert text in {pairs.caption(number, phrase) for phrase in range(4)}
      assert captions.WORDS[pairs.labels_N[number]] in text
      assert not pairs.is_heldout_N[number]
      seen.add(number)
  assert len(seen) > 40  # of 48: an epoch has none twice


def test_what_is_measured_is_in_the_pixels():
  """Strokes of known thickness, lean and width."""
  upright = np.zeros((8, 8), np.uint8)
  upright[1:7, 3] = 255
  right, left = np.zeros_like(upright), np.zeros_like(upright)
  for y in range(1, 7):
    right[y, 6 - y], left[y, y] = 255, 255
  thick = np.zeros_like(upright)
  thick[1:7, 2:6] = 255
  found = captions._measured(np.stack([upright, right, left, thick]), np.ones(4, bool))
  assert found["lean"][1:3] == ["leaning right", "leaning left"]
  assert found["stroke"][3] == "thick" and found["width"][0] == "narrow"
  assert found["width"][1] == "wide"


def test_learners_share_no_image_in_an_epoch_and_all_are_read(pairs, streams):
  epoch = 1437 // 4 // 4  # batches, of four images each, of a quarter of those trained on
  by_pixels = {image.tobytes(): n for n, image in enumerate(pairs.scans_NxYxX)}
  read = [
    {by_pixels[i[..., 0].tobytes()] for p in range(epoch) for i in stream.batch(p)["image"][:4]}
    for stream in streams[:4]
  ]
  for m, mine in enumerate(read):
    assert len(mine) == 4 * epoch
    assert all(not mine & other for other in read[:m])
  again = [stream.batch(0)["image"] for stream in (streams[0], streams[4])]
  assert (again[0] != again[1]).any()  # one that joins reads another part first


def test_a_stream_goes_on_with_the_next_batch_from_any_position(streams):
  for position in (0, 3, 90, 91):  # 90 is in the second epoch
    with contextlib.closing(streams[1].iterate(position)) as batches:
      for each in range(position, position + 2):
        expected, found = streams[1].batch(each), next(batches)
        assert all((found[name] == expected[name]).all() for name in expected)


@pytest.mark.parametrize("batch_size", [1, 7, 16, 64])
def test_held_out_rows_are_of_both_kinds_and_never_trained_on(pairs, batch_size):
  batches = pairs.heldout_batches(batch_size)
  assert len({batch["tokens"].shape for batch in batches}) == 1
  assert len(batches[0]["tokens"]) == max(2, batch_size)
  trained = {pairs.scans_NxYxX[n].tobytes() for n in np.flatnonzero(~pairs.is_heldout_N)}
  images = [i[..., 0].tobytes() for b in batches for i in b["image"][b["tokens"][:, 0] < 0]]
  assert len(set(images)) == len(images) >= 100 and not trained & set(images)
  rows = [tuple(row) for b in batches for row in b["tokens"] if row[0] >= 0]
  assert len(set(rows)) == len(rows) >= 100


def test_text_alone_is_the_corpus_own(pairs):
  """Of the same windows as without images: those that are trained on, and others held out."""
  corpus = data.open_corpus(dataclasses.replace(CONFIG.data, custom="", options={}))
  windows = {tuple(corpus.train.read([k])[0]) for k in range(len(corpus.train))}
  batch = data.Stream(pairs, CONFIG, 3).batch(11)
  assert all(tuple(row) in windows for row in batch["tokens"][4:])
  heldout = {tuple(corpus.heldout.read([k])[0]) for k in range(len(corpus.heldout))}
  assert all(tuple(row) in heldout for row in pairs.heldout_batches(16)[2]["tokens"][8:])


def test_larger_images_are_the_same_enlarged(pairs):
  data_config = dataclasses.replace(
    CONFIG.data,
    sequence_length=96,
    options={"image_size": 24, "patch_size": 6, "image_channels": 3, "image_share": 0.5},
  )
  large = captions.digits(data_config).pixels([5])
  assert large.shape == (1, 24, 24, 3)
  assert (large[0, 1::3, 1::3, 2] == pairs.pixels([5])[0, ..., 0]).all()


def test_the_evaluator_takes_them(pairs):
  measured = HeldoutLoss(CONFIG.model, pairs.heldout_batches(16), jax.devices()[1:2])
  zero = {name: np.zeros(shape, np.float32) for name, shape in initial.shapes(CONFIG.model).items()}
  found = measured.measure(zero)
  assert found.keys() == {"loss", "text_loss", "image_loss"}
  assert all(value == pytest.approx(np.log(256), rel=1e-5) for value in found.values())


OPTIONS = {"image_size": 8, "patch_size": 2, "image_channels": 1, "image_share": 0.5}


@pytest.mark.parametrize(
  ("changed", "said"),
  [
    ({"data": {"options": {**OPTIONS, "patch_size": 4}}}, "data.options.patch_size = 4: must be"),
    ({"data": {"options": {**OPTIONS, "image_share": 0.05}}}, "data.options.image_share = 0.05"),
    (
      {"data": {"options": {"image_size": 8}}},
      "data.options = {'image_size': 8}: must have patch_size, image_channels",
    ),
    ({"data": {"options": {**OPTIONS, "image_size": 12}}}, "data.options.image_size = 12: must"),
    (
      {"data": {"options": {**OPTIONS, "patch_size": 0}}},
      "data.options.patch_size = 0: must be model.patch_size (2)",
    ),
    ({"data": {"sequence_length": 60}}, "data.sequence_length = 60: 16 patches and the"),
    (
      {"islands": {"num_learners": 1500, "batch_size": 2}},
      "islands.batch_size = 2: 1500 learners that read 1 rows a batch need 1500 an epoch, and the"
      " data have 1437 to train on",
    ),
  ],
)
def test_what_does_not_fit_is_refused(changed, said):
  made = experiment("configs/text_image.py", "config")
  made.data.source = "synthetic"
  for section, values in changed.items():
    for name, value in values.items():
      made[section][name] = value
  config = from_dict(made)
  with pytest.raises(ConfigError) as error:
    stream = data.Stream(data.open_data(config.data), config, 0)
    [stream.batch(position) for position in range(4)]
  assert str(error.value).startswith(said) and "Fix: " in str(error.value)


def test_captions_that_are_too_long_are_refused_before_one_is_read():
  """The longest are rare: a learner came to one in the middle of a run, and crashed for good."""
  short, enough = (config_of(data={"sequence_length": length}) for length in (78, 79))
  with pytest.raises(ConfigError, match=r"^data.sequence_length = 78: 16 patches .* least 79\.$"):
    data.open_data(short.data).batches(short, 0)
  data.open_data(enough.data).batches(enough, 0)


def test_too_many_held_out_images_are_refused():
  config = config_of(data={"heldout_sequences": 1000})
  with pytest.raises(ConfigError, match=r"^data.heldout_sequences = 1000: asks for 496 held-out"):
    data.open_data(config.data).heldout_batches(16)


def test_without_scikit_learn_it_says_what_to_install(monkeypatch):
  monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
  with pytest.raises(ConfigError, match=r"sklearn.*Fix: pip install 'ddiloco\[examples\]'"):
    data.open_data(CONFIG.data)
