"""Held-out measures of any parameters, and text that a model writes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ddiloco import custom
from ddiloco.checks import require
from ddiloco.config import Config, IslandConfig, ModelConfig
from ddiloco.models.model import Batch, frozen
from ddiloco.training.data import Source, check_token_ids
from ddiloco.training.devices import make_mesh, param_sharding
from ddiloco.training.tokens import Tokenizer

_MOST_BATCHES = 1 << 16


class HeldoutLoss:
  """The mean of a model's `evaluate` over fixed batches of one shape, on a mesh of its own.

  Parameters and batches are split over all devices as on an island (`devices.RULES`). They compute
  in f32, whatever dtype the islands compute in, so that the losses of all islands compare. Compiled
  once, at the first call.

  Raises:
    ConfigError: there are no batches, or batches of different shapes; or a held-out token is not in
      the vocabulary of a language model.
  """

  def __init__(
    self, model: ModelConfig, heldout_batches: Sequence[Batch], devices: Sequence[jax.Device]
  ):
    shapes = sorted({str(jax.tree.map(np.shape, batch)) for batch in heldout_batches})
    rule = "there must be at least one batch, and all must have the same shape"
    require(len(shapes) == 1, "heldout_batches()", shapes, rule, "give whole batches alone")
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *heldout_batches)
    if not model.custom:
      tokens = stacked["tokens"] if model.image_size else stacked.astype(np.uint32)
      check_token_ids(tokens, model.vocab_size, "the held-out split")
    mesh = make_mesh(devices, IslandConfig())
    evaluated = custom.load_model(dataclasses.replace(model, compute_dtype="float32"))
    axes = evaluated.logical_axes()
    self.shardings = {
      name: param_sharding(axes[name], leaf.shape, mesh)
      for name, leaf in evaluated.shapes().items()
    }

    def place(leaf: np.ndarray) -> jax.Array:
      names = (None, "batch", *[None] * (leaf.ndim - 2))
      return jax.device_put(leaf, param_sharding(names, leaf.shape, mesh))

    def measure(params: Mapping[str, jax.Array], batches: Batch) -> dict[str, jax.Array]:
      each = jax.lax.map(lambda batch: evaluated.evaluate(params, batch), batches)
      return jax.tree.map(jnp.mean, each)

    self._frozen = {
      name: jax.device_put(value, param_sharding(axes.get(name), value.shape, mesh))
      for name, value in frozen(evaluated).items()
    }
    self._batches, self._measure = jax.tree.map(place, stacked), jax.jit(measure)

  def measure(self, params: Mapping[str, np.ndarray | jax.Array]) -> dict[str, float]:
    """ "loss" (of a language model nats per token), and what else the model measures.

    Waits for the result without holding the GIL, so a learner in another thread goes on.

    Args:
      params: name -> array on the host, or on any devices with any sharding. Arrays are taken one
        by one, each when the previous array lies on the devices.
    """
    placed = {}
    for name, value in params.items():
      there = jax.device_put(value, self.shardings[name]).astype(jnp.float32)
      placed[name] = jax.block_until_ready(there)
    measured = self._measure(placed | self._frozen, self._batches)
    return {name: float(value) for name, value in measured.items()}

  def loss(self, params: Mapping[str, np.ndarray | jax.Array]) -> float:
    """The held-out loss alone."""
    return self.measure(params)["loss"]


def read_heldout(config: Config, source: Source, batch_size: int) -> list[Batch]:
  """All held-out batches; the user's own are refused if the model cannot be measured with them.

  Raises:
    ConfigError: says what fails; else every evaluation of the run would.
  """
  data = config.data
  if not data.custom:
    return list(source.heldout_batches(batch_size))
  model = custom.load_model(config.model)

  def read() -> list[Batch]:  # the source may fill its arrays again
    given = itertools.islice(source.heldout_batches(batch_size), _MOST_BATCHES + 1)
    return [jax.tree.map(np.array, batch) for batch in given]

  batches = custom.called(data, "heldout_batches()", read)
  rule = f"heldout_batches() gives more than {_MOST_BATCHES} batches, as one without an end would"
  fix = "end it, as a list does: every evaluation reads all of them"
  require(len(batches) <= _MOST_BATCHES, "data.custom", data.custom, rule, fix)
  for batch in batches[:1]:
    seen = {**model.shapes(), **custom.frozen_shapes(config.model)}
    taken = functools.partial(jax.eval_shape, model.evaluate, seen, batch)
    custom.called(data, "the model's evaluate() of what heldout_batches() gives", taken)
  return batches


# --- Text from a trained model: sampling in one compiled loop over a buffer of fixed length


def generate(
  model: ModelConfig,
  params: Mapping[str, np.ndarray | jax.Array],
  tokenizer: Tokenizer,
  prompt: str,
  num_tokens: int,
  temperature: float = 0.8,
  seed: int = 0,
  context_length: int = 128,
) -> str:
  """Continues `prompt` by `num_tokens` tokens of a model that makes text; without the prompt.

  The model always looks at the last `context_length` tokens (give the T it was trained with). Of a
  longer prompt the tail is used; an empty prompt is replaced by the tokenizer's end token.
  Temperature 0 takes the most probable token; the same seed gives the same text. Ids that the
  tokenizer does not have (a padded vocabulary) are never sampled. Compiled once for each
  (model, num_tokens, context_length), whatever the prompt, temperature and seed.

  Raises:
    ConfigError: num_tokens or temperature is negative, the seed takes more than 32 bits, the
      context is empty, or the prompt is no text or has tokens outside the model's vocabulary.
  """
  not_negative, fix = "must not be negative", "use 0 or more"
  require(num_tokens >= 0, "num_tokens", num_tokens, not_negative, fix)
  require(temperature >= 0, "temperature", temperature, not_negative, fix)
  require(context_length > 0, "context_length", context_length, "must be positive", "use 128")
  require(0 <= seed < 1 << 32, "seed", seed, "must lie between 0 and 2**32 - 1", "use 0")
  known = prompt.encode("utf-8", "replace").decode("utf-8")
  require(prompt == known, "prompt", prompt, "has bytes that are no UTF-8", f"use {known!r}")
  whole = [*tokenizer.encode(prompt)] or [tokenizer.end_token]
  ids = np.array(whole[-context_length:], np.int32)
  if not model.custom:  # which may have another vocabulary than the config says
    check_token_ids(ids, model.vocab_size, "the prompt")
  buffer = np.zeros(context_length + num_tokens, np.int32)
  buffer[: len(ids)] = ids
  lengths, key = (len(ids), tokenizer.vocab_size), jax.random.key(seed)
  writer: Any = custom.load_model(model)  # not every Model has logits
  params, how = {**params, **frozen(writer)}, (writer.logits, num_tokens)
  out = _continue(*how, params, buffer, *lengths, float(temperature), key)
  return tokenizer.decode(np.asarray(out)[len(ids) : len(ids) + num_tokens])


def makes_text(model: ModelConfig) -> bool:
  """Whether `generate` can do anything with this model."""
  return callable(getattr(custom.load_model(model), "logits", None))


def refuse_without_text(model: ModelConfig) -> None:
  """Raises ConfigError if the model makes no text."""
  rule = "this model makes no text, since it has no logits(params, tokens)"
  fix = "use `ddiloco evaluate`, or `ddiloco export` and a program of your own"
  require(makes_text(model), "model.custom", model.custom, rule, fix)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _continue(
  logits: Callable[..., jax.Array],
  num_tokens: int,
  params: Mapping[str, jax.Array],
  buffer: jax.Array,
  prompt_length: jax.Array,
  known_tokens: jax.Array,
  temperature: jax.Array,
  key: jax.Array,
) -> jax.Array:
  """Fills buffer[prompt_length : prompt_length + num_tokens] (buffer: context + num_tokens ids)."""
  context = buffer.shape[0] - num_tokens

  def step(i: jax.Array, buffer: jax.Array) -> jax.Array:
    length = prompt_length + i
    start = jnp.maximum(0, length - context)
    # Positions after the last token may hold zeros; a causal model does not see these.
    window_1xT = jax.lax.dynamic_slice(buffer, (start,), (context,))[None]
    logits_1xTxV = logits(params, window_1xT)
    known_V = jnp.arange(logits_1xTxV.shape[-1]) < known_tokens
    logits_V = jnp.where(known_V, logits_1xTxV[0, length - 1 - start], -jnp.inf)
    best = jnp.argmax(logits_V)
    # Less the best one's, so that a tiny temperature makes no two of them infinite; what is unknown
    # would be NaN over an infinite temperature.
    scaled_V = jnp.where(known_V, (logits_V - logits_V[best]) / temperature, -jnp.inf)
    sampled = jax.random.categorical(jax.random.fold_in(key, i), scaled_V)
    token = jnp.where(temperature > 0, sampled, best)
    return buffer.at[length].set(token.astype(buffer.dtype))

  return jax.lax.fori_loop(0, num_tokens, step, buffer)
