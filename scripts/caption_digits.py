"""Does the model of a text-and-image run use its images: which digit does it name?

    python scripts/caption_digits.py --workdir=runs/text_image [--images=1000]

For every held-out image the model gets the beginning of a caption, "a handwritten", and each of the
ten digits is scored as its next word; the most probable one is the model's answer. Then the same
with each image exchanged for that of another row at random, and with a blank image: right answers
are then guesses. "image_loss" is of the held-out captions, in nats per token.

Last line: {"images": n, "accuracy": {"own": share, "shuffled": share, "blank": share},
"image_loss": {...the same...}, "text_loss": of rows of text alone, "wrong_by_digit": {...}}.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np

from ddiloco import environment
from ddiloco.api import Run
from ddiloco.config import Config, ConfigError, ModelConfig
from ddiloco.models import transformer
from ddiloco.training import captions, data

BEGINNING = "a handwritten {},"
ROWS = 128  # at a time


@functools.partial(jax.jit, static_argnums=0)
def log_probability(model: ModelConfig, params: Any, tokens: jax.Array, image: jax.Array):
  """The log probability of each row's text: [rows]."""
  logits = transformer.language_model(model).logits(params, tokens[:, :-1], image)
  log_p = jax.nn.log_softmax(logits)
  targets = tokens[:, 1:]
  chosen = jnp.take_along_axis(log_p, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
  return jnp.sum(jnp.where(targets >= 0, chosen, 0.0), axis=1)


def scores(model: ModelConfig, params: Any, tokens: np.ndarray, image: np.ndarray) -> np.ndarray:
  """`log_probability` of any number of rows, in parts of one shape."""
  found = []
  for start in range(0, len(tokens), ROWS):
    parts = [each[start : start + ROWS] for each in (tokens, image)]
    short = ROWS - len(parts[0])
    parts = [np.concatenate([each, np.repeat(each[:1], short, axis=0)]) for each in parts]
    found.append(np.asarray(log_probability(model, params, *parts))[: ROWS - short])
  return np.concatenate(found)


def measure(config: Config, params: Mapping[str, np.ndarray], most: int) -> dict[str, Any]:
  """All numbers of the last line."""
  pairs = data.open_data(config.data)
  if not isinstance(pairs, captions.Pairs):
    raise ConfigError("--workdir: its run has no captions. Fix: name one of configs/text_image.py.")
  placed = {name: jnp.asarray(value) for name, value in params.items()}
  held_out = np.flatnonzero(pairs.is_heldout_N)[:most]
  pixels, labels = pairs.pixels(held_out), pairs.labels_N[held_out]
  seen = {
    "own": pixels,
    "shuffled": pixels[np.random.default_rng(0).permutation(len(pixels))],
    "blank": np.zeros_like(pixels),
  }
  asked = np.stack([pairs.caption_row(BEGINNING.format(word)) for word in captions.WORDS])
  # A caption that ends here was never trained on: only the word and its comma are scored.
  asked[np.arange(10), (asked >= 0).cumsum(1).argmax(1)] = captions.NO_TEXT
  said = np.stack([pairs.caption_row(pairs.caption(i, i)) for i in held_out])
  accuracy, loss = {}, {}
  for name, image in seen.items():
    every = scores(
      config.model, placed, np.tile(asked, (len(image), 1)), np.repeat(image, 10, axis=0)
    )
    answers = every.reshape(len(image), 10).argmax(1)
    accuracy[name] = round(float(np.mean(answers == labels)), 4)
    total = scores(config.model, placed, said, image).sum()
    loss[name] = round(-float(total) / int(np.sum(said >= 0)), 4)
    if name == "own":
      wrong = Counter(captions.WORDS[label] for label in labels[answers != labels])
  text = [batch["tokens"][batch["tokens"][:, 0] >= 0] for batch in pairs.heldout_batches(16)]
  rows = np.concatenate(text)
  blank = np.zeros((len(rows), *pixels.shape[1:]), np.uint8)
  total = scores(config.model, placed, rows, blank).sum()
  return {
    "images": len(held_out),
    "accuracy": accuracy,
    "image_loss": loss,
    "text_loss": round(float(-total / rows[:, 1:].size), 4),
    "wrong_by_digit": dict(sorted(wrong.items())),
  }


def main() -> None:
  workdir = {"type": Path, "required": True}
  options = common.options(__doc__, workdir=workdir, images=(1000, "held-out ones at most"))
  environment.prepare(num_cpu_devices=1, cpu_only=True)
  run = Run(options.workdir)
  print(json.dumps(measure(run.config, run.params(), options.images)))


if __name__ == "__main__":
  common.run_script(main)
