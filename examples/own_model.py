"""Your own model, data and optimizer: a small vision model across four islands that share no image.

Command:   python examples/own_model.py [FOLDER]   (or, as any other run:
           ddiloco train --config=examples/own_model.py --workdir=runs/digits --cpu)
Hardware:  2 CPU cores; every island is one fake CPU device.
Time:      about a minute.
Data:      scikit-learn's handwritten digits: 1797 images of 8 x 8; pip install 'ddiloco[examples]'.

ddiloco needs only three functions, `model`, `data` and `inner`; the config names them. Island 2 is
killed on the way and comes back. Then every island trains alone, for as many steps.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import ddiloco

try:
  from sklearn.datasets import load_digits
except ImportError as error:
  raise SystemExit(f"{error}. Fix: pip install 'ddiloco[examples]'.") from error

ISLANDS, STEPS, BATCH = 4, 500, 16
CLASSES = 10

# --- The model: any Flax NNX module, with its loss and its evaluation


class Classifier(nnx.Module):
  """Two convolutions and a hidden layer."""

  def __init__(self, width: int, rngs: nnx.Rngs):
    self.first = nnx.Conv(1, width, (3, 3), rngs=rngs)
    self.second = nnx.Conv(width, 2 * width, (3, 3), strides=2, rngs=rngs)
    self.norm = nnx.LayerNorm(4 * 4 * 2 * width, rngs=rngs)
    self.hidden = nnx.Linear(4 * 4 * 2 * width, 64, rngs=rngs)
    self.output = nnx.Linear(64, CLASSES, rngs=rngs)

  def __call__(self, images_BxHxW: jax.Array) -> jax.Array:
    x = nnx.relu(self.first(images_BxHxW[..., None]))
    x = nnx.relu(self.second(x))
    x = self.norm(x.reshape(len(x), -1))
    return self.output(nnx.relu(self.hidden(x)))


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class Digits(ddiloco.NnxModel):
  """The model as islands use it: a `ddiloco.Model`; `NnxModel` has the other methods."""

  def __init__(self, width: int):
    super().__init__(lambda rngs: Classifier(width, rngs))

  def inputs(self, batch_size: int, sequence_length: int):
    image = jax.ShapeDtypeStruct((batch_size, 8, 8), jnp.float32)
    return {"image": image, "label": jax.ShapeDtypeStruct((batch_size,), jnp.int32)}

  def loss(self, params, batch, execution=None):
    loss = cross_entropy(self.module(params)(batch["image"]), batch["label"])
    return loss, {"loss": loss}

  def evaluate(self, params, batch):
    logits = self.module(params)(batch["image"])
    right = jnp.argmax(logits, axis=-1) == batch["label"]
    loss = cross_entropy(logits, batch["label"])
    return {"loss": loss, "accuracy": jnp.mean(right.astype(jnp.float32))}


# --- The data: batches by their position, and held-out batches


class Batches:
  """One island's own images, in a new order every epoch; `batches[position]` is a batch."""

  def __init__(self, images: np.ndarray, labels: np.ndarray, batch_size: int, seed: int):
    self.images, self.labels = images, labels
    self.batch_size, self.seed = batch_size, seed

  def __getitem__(self, position: int) -> dict[str, np.ndarray]:
    epoch, place = divmod(position, len(self.images) // self.batch_size)
    order = np.random.default_rng([self.seed, epoch]).permutation(len(self.images))
    mine = order[place * self.batch_size :][: self.batch_size]
    return {"image": self.images[mine], "label": self.labels[mine]}


class Images:
  """All digits. Every fifth is held out; of the others learner m of M has every M-th."""

  def __init__(self):
    digits = load_digits()
    self.images = (digits.images / 16).astype(np.float32)
    self.labels = digits.target.astype(np.int32)
    self.held_out = np.arange(len(self.labels)) % 5 == 0

  def batches(self, config: ddiloco.Config, learner: int) -> Batches:
    learners, island = config.islands.num_learners, config.islands.island(learner)
    # A learner numbered M or more joins late: it reads another learner's images in another order.
    mine = np.flatnonzero(~self.held_out)[learner % learners :: learners]
    seed = 1000 * config.seed + learner
    return Batches(self.images[mine], self.labels[mine], island.batch_size, seed)

  def heldout_batches(self, batch_size: int) -> list[dict[str, np.ndarray]]:
    images, labels = self.images[self.held_out], self.labels[self.held_out]
    starts = range(0, len(labels) - batch_size + 1, batch_size)
    whole = [slice(start, start + batch_size) for start in starts]
    return [{"image": images[rows], "label": labels[rows]} for rows in whole]


# --- The functions that the config names: each gets its config section, in every process of the run


def model(config):
  return Digits(config.options["width"])


def data(config):
  return Images()


def inner(config):
  """Updates of learning rate 1; the schedule of `inner.learning_rate` multiplies them."""
  return optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0, momentum=0.9, nesterov=True))


def get_config():
  c = ddiloco.default()
  c.model.custom, c.model.options = f"{__file__}:model", {"width": 16}
  c.data.custom, c.data.sequence_length = f"{__file__}:data", 1  # an image counts as one token
  c.inner.custom, c.inner.learning_rate, c.inner.warmup_steps = f"{__file__}:inner", 0.05, 20

  c.islands.num_learners, c.islands.batch_size = ISLANDS, BATCH
  c.islands.min_step_seconds = 0.02  # so that the run is long enough for a kill and a return
  c.sync.num_fragments, c.sync.sync_period = 4, 8
  c.sync.snapshot_steps = 100
  c.run.total_tokens = ISLANDS * STEPS * BATCH
  c.chaos.faults = ({"action": "kill", "role": "learner-2", "at_step": 200, "seconds": 1.0},)
  return c


# --- The comparison


def alone(config, steps: int):
  """The same islands for `steps` steps each, without any sync."""
  config.sync.num_shards = 0
  config.run.total_tokens = steps * ISLANDS * config.islands.batch_size
  config.chaos.faults = ()
  return config


def measure(params: dict[str, np.ndarray], width: int) -> dict[str, float]:
  """Loss and accuracy on all held-out images."""
  images = Images()
  (batch,) = images.heldout_batches(int(images.held_out.sum()))
  return {name: float(value) for name, value in Digits(width).evaluate(params, batch).items()}


def main(folder: Path, config=None) -> dict[str, dict[str, float]]:
  """Trains the islands together, then alone; prints the table of results and returns it."""
  config = config or get_config()
  together = ddiloco.train(config, folder / "together", cpu=True, overwrite=True)
  summary = together.summary()
  steps = max(summary["learner_steps"].values())
  apart = ddiloco.train(alone(config, steps), folder / "alone", cpu=True, overwrite=True)

  width = config.model.options.width
  table = {"all four islands, merged": measure(together.params(), width)}
  for m in range(ISLANDS):
    table[f"island {m} alone, {steps} steps"] = measure(apart.params(learner=m), width)
  print(f"\n{summary['faults']} fault, {summary['restarts']} return. On held-out images:")
  for name, row in table.items():
    print(f"  {name:<28} accuracy {row['accuracy']:.1%}   loss {row['loss']:.4f}")
  return table


if __name__ == "__main__":
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("folder", nargs="?", type=Path, default="runs/own_model")
  main(Path(parser.parse_args().folder))
