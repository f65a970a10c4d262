"""Text from a trained model: sampling in one compiled loop over a buffer of fixed length."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from ddiloco.config import ConfigError, ModelConfig
from ddiloco.models import transformer
from ddiloco.training.tokenizers import Tokenizer


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
  """Continues `prompt` by `num_tokens` tokens; returns the continuation only.

  The model always looks at the last `context_length` tokens (give the T it was trained with); a
  longer prompt keeps its tail, an empty one starts from the tokenizer's end token, as documents do.
  Temperature 0 takes the most probable token; the same seed gives the same text. Ids that the
  tokenizer does not have (a padded vocabulary) are never sampled. Compiled once for each
  (model, num_tokens, context_length), whatever the prompt, temperature and seed.

  Raises:
    ConfigError: num_tokens or temperature is negative, the context is empty, or the prompt has
      tokens outside the model's vocabulary.
  """
  _check("num_tokens", num_tokens, num_tokens >= 0, "must not be negative", "use 0 or more")
  _check("temperature", temperature, temperature >= 0, "must not be negative", "use 0 to 1")
  _check("context_length", context_length, context_length > 0, "must be positive", "use 128")
  if not num_tokens:
    return ""
  ids = tokenizer.encode(prompt).astype(np.int32)
  if not len(ids):
    ids = np.array([tokenizer.end_token], np.int32)
  ids = ids[-context_length:]
  highest = int(ids.max())
  _check(
    "model.vocab_size",
    model.vocab_size,
    highest < model.vocab_size,
    f"must exceed every token of the prompt, and there is a {highest}",
    "use the tokenizer that this model was trained with",
  )
  buffer = np.zeros(context_length + num_tokens, np.int32)
  buffer[: len(ids)] = ids
  out = _continue(
    model,
    num_tokens,
    params,
    buffer,
    np.int32(len(ids)),
    np.int32(tokenizer.vocab_size),
    np.float32(temperature),
    jax.random.key(seed),
  )
  return tokenizer.decode(np.asarray(out)[len(ids) : len(ids) + num_tokens])


def _check(field: str, value: float, ok: bool, rule: str, fix: str) -> None:
  if not ok:
    raise ConfigError(f"{field} = {value!r}: {rule}. Fix: {fix}.")


@functools.partial(jax.jit, static_argnums=(0, 1))
def _continue(
  model: ModelConfig,
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
  known_V = jnp.arange(model.vocab_size) < known_tokens

  def step(i: jax.Array, buffer: jax.Array) -> jax.Array:
    length = prompt_length + i
    start = jnp.maximum(0, length - context)
    # Right of the last token there may be zeros; a causal model does not see them from there.
    window_1xT = jax.lax.dynamic_slice(buffer, (start,), (context,))[None]
    logits_1xTxV, _ = transformer.apply(model, params, window_1xT)
    logits_V = jnp.where(known_V, logits_1xTxV[0, length - 1 - start], -jnp.inf)
    divisor = jnp.where(temperature > 0, temperature, 1.0)
    sampled = jax.random.categorical(jax.random.fold_in(key, i), logits_V / divisor)
    token = jnp.where(temperature > 0, sampled, jnp.argmax(logits_V))
    return buffer.at[length].set(token.astype(buffer.dtype))

  return jax.lax.fori_loop(0, num_tokens, step, buffer)
