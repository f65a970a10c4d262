"""Pairs of image and caption from real images that a package ships, beside rows of text alone.

    c.data.custom = "ddiloco.training.captions:digits"
    c.data.options = {
      "image_size": 8, "patch_size": 2, "image_channels": 1,  # as of the model
      "image_share": 0.5,  # of the rows of every batch
    }

The images are scikit-learn's 1797 scans of handwritten digits, 8 x 8 (larger sizes are the same
pixels enlarged). A caption says the digit and three properties that are measured in the pixels, in
one of several phrasings. Rows of text alone come from the corpus that the other fields of `data`
name.

A batch is what `models.layers` reads: {"image": uint8 [B, I, I, C], "tokens": int32 [B, T + 1]}.
Rows with an image come first; their tokens are NO_TEXT in the place of every patch, then the
caption, the end token, and NO_TEXT again. Every fifth image is held out and never trained on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ddiloco.checks import build, require
from ddiloco.config import Config, DataConfig
from ddiloco.models.layers import NO_TEXT
from ddiloco.training.data import by_position, check_token_ids, open_corpus, reading_order

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# The words for the three measured properties: each word names a third, or half, of all images.
STROKES, LEANS = ("thin", "even", "thick"), ("leaning left", "upright", "leaning right")
WIDTHS = ("narrow", "wide")
PHRASES = (
  "a handwritten {digit}, {width}, {lean}, in {stroke} strokes.",
  "the digit {digit}: {width} and {lean}, with {stroke} strokes.",
  "{stroke} strokes make a {width} {digit}, {lean}.",
  "this {digit} is {width}, {lean} and drawn in {stroke} strokes.",
)
_SCAN = 8  # pixels a side, values 0 to 16
_HELD_OUT = 5  # every fifth image
_SHAPE = ("image_size", "patch_size", "image_channels")


@dataclasses.dataclass(frozen=True)
class PairOptions:
  """What `data.options` must have; images are a multiple of a scan's size."""

  image_size: int
  patch_size: int
  image_channels: int
  image_share: float


class Pairs:
  """A `training.data.Source` of rows with an image and rows of text alone.

  Raises:
    ConfigError: an option is missing or of another type.
    ImportError: scikit-learn, which ships the images, is not installed.
  """

  def __init__(self, data: DataConfig):
    try:
      from sklearn.datasets import load_digits
    except ImportError as error:
      raise ImportError(f"{error}. Fix: pip install 'ddiloco[examples]'") from error
    self._options: PairOptions = build(PairOptions, data.options, "data.options")
    self._corpus = open_corpus(dataclasses.replace(data, custom="", options={}))
    self._data, found = data, load_digits()
    self.scans_NxYxX = np.round(found.images * (255 / 16)).astype(np.uint8)
    self.labels_N = found.target
    self.is_heldout_N = np.arange(len(self.labels_N)) % _HELD_OUT == 0
    self._words = _measured(self.scans_NxYxX, ~self.is_heldout_N)

  def batches(self, config: Config, learner: int) -> Any:
    """See `Source`: in an epoch, learners below M share neither images nor text."""
    for name in _SHAPE:
      wanted, given = getattr(config.model, name), getattr(self._options, name)
      rule = f"must be model.{name} ({wanted}), whose patches take a caption's first positions"
      require(wanted == given, f"data.options.{name}", given, rule, "set both")
    numbers = range(len(self.labels_N))
    every = {self.caption(i, phrase) for i in numbers for phrase in range(len(PHRASES))}
    # The longest is refused now, not in the middle of the run.
    self.caption_row(max(every, key=lambda caption: len(self._corpus.tokenizer.encode(caption))))
    batch_size = config.islands.island(learner).batch_size
    num_images = self._num_images(batch_size)
    # Text first: its checks refuse an invalid corpus.
    text = self._corpus.batches(config, learner, batch_size - num_images)
    trained_on = np.flatnonzero(~self.is_heldout_N)
    order = reading_order(len(trained_on), config, learner, num_images)

    def read(position: int) -> dict[str, np.ndarray]:
      places = range(position * num_images, (position + 1) * num_images)
      images = trained_on[[*map(order, places)]]
      batch = self.rows(images, places, text[position])
      where = f"the captions (batch {position})"
      check_token_ids(batch["tokens"], config.model.vocab_size, where)
      return batch

    return by_position(read)

  def heldout_batches(self, batch_size: int) -> list[dict[str, np.ndarray]]:
    """`data.heldout_sequences` rows, rounded to batches of at least two rows, one of each kind."""
    rows, heldout = self._data.heldout_sequences, np.flatnonzero(self.is_heldout_N)
    size = max(2, min(batch_size, rows))
    num_images, count = self._num_images(size), max(1, rows // size)
    rule = f"asks for {count * num_images} held-out images, and there are {len(heldout)}"
    enough = count * num_images <= len(heldout)
    require(enough, "data.heldout_sequences", rows, rule, "lower it")
    images = heldout[np.arange(count * num_images) * len(heldout) // (count * num_images)]
    places = np.arange(count * (size - num_images))
    windows = places * len(self._corpus.heldout) // len(places)
    parts = zip(np.split(images, count), np.split(windows, count))
    # An image's number chooses its phrasing, so that all phrasings are held out alike.
    return [self.rows(mine, mine, self._corpus.heldout.read(text)) for mine, text in parts]

  def caption(self, image: int, phrase: int) -> str:
    """The caption of an image, in one of the phrasings."""
    words = {name: each[image] for name, each in self._words.items()}
    return PHRASES[phrase % len(PHRASES)].format(digit=WORDS[self.labels_N[image]], **words)

  def rows(
    self, images: Sequence[int] | np.ndarray, phrases: Any, text_NxT1: np.ndarray
  ) -> dict[str, np.ndarray]:
    """A batch: these images, each with its caption in its phrase, and rows of text alone."""
    tokens = [self.caption_row(self.caption(i, p)) for i, p in zip(images, phrases)]
    blank = np.zeros((len(text_NxT1), *self.pixels(images[:1]).shape[1:]), np.uint8)
    return {
      "image": np.concatenate([self.pixels(images), blank]),
      "tokens": np.concatenate([np.stack(tokens), text_NxT1.astype(np.int32)]),
    }

  def pixels(self, images: Sequence[int] | np.ndarray) -> np.ndarray:
    """uint8 [N, I, I, C]: the scans, each pixel enlarged to a square."""
    scale = self._options.image_size // _SCAN
    large = self.scans_NxYxX[np.asarray(images, int)].repeat(scale, 1).repeat(scale, 2)
    return large[..., None].repeat(self._options.image_channels, 3)

  def caption_row(self, caption: str) -> np.ndarray:
    """int32 [T + 1]: no text where the image is, the caption, its end, and no text again."""
    length = self._data.sequence_length
    row_T1 = np.full(length + 1, NO_TEXT, np.int32)
    first = (self._options.image_size // self._options.patch_size) ** 2
    tokenizer = self._corpus.tokenizer
    ids = [*tokenizer.encode(caption), tokenizer.end_token]
    end = first + len(ids)
    rule = f"{first} patches and the {len(ids)} tokens of a caption ({caption!r}) do not fit"
    require(end <= length + 1, "data.sequence_length", length, rule, f"use at least {end - 1}")
    row_T1[first:end] = ids
    return row_T1

  def _num_images(self, batch_size: int) -> int:
    """How many rows of a batch have an image."""
    share = self._options.image_share
    found = round(share * batch_size)
    rule = f"must leave a batch of {batch_size} rows with an image and rows of text alone"
    require(0 < found < batch_size, "data.options.image_share", share, rule, "use 0.5")
    return found


digits = Pairs  # the function that `data.custom` names


def _measured(scans_NxYxX: np.ndarray, trained_on_N: np.ndarray) -> dict[str, list[str]]:
  """Property -> each image's word; the training images alone set the limits between words."""
  ink_NxYxX = scans_NxYxX / 255.0
  total_N = ink_NxYxX.sum((1, 2))
  place = np.arange(_SCAN, dtype=float)
  ink_NxX, ink_NxY = ink_NxYxX.sum(1) / total_N[:, None], ink_NxYxX.sum(2) / total_N[:, None]
  x_NxX = place - (ink_NxX @ place)[:, None]  # from the centre of the ink
  y_NxY = (ink_NxY @ place)[:, None] - place  # upwards
  together_N = np.einsum("nyx,ny,nx->n", ink_NxYxX, y_NxY, x_NxX) / total_N
  lean_N = together_N / (ink_NxY * y_NxY**2).sum(1)  # columns to the right a row upwards
  width_N = np.sqrt((ink_NxX * x_NxX**2).sum(1))

  def said(values_N: np.ndarray, words: tuple[str, ...]) -> list[str]:
    shares = np.arange(1, len(words)) / len(words)
    kinds_N = np.searchsorted(np.quantile(values_N[trained_on_N], shares), values_N)
    return [words[kind] for kind in kinds_N]

  return {
    "stroke": said(total_N, STROKES),
    "lean": said(lean_N, LEANS),
    "width": said(width_N, WIDTHS),
  }
