"""Sampling against a plain Python loop, and its edges."""

from __future__ import annotations

import dataclasses
import types

import jax
import numpy as np
import pytest

from ddiloco import custom
from ddiloco.config import ConfigError, ModelConfig
from ddiloco.models.transformer import Transformer, language_model
from ddiloco.training import evaluate as generate_lib
from ddiloco.training.tokens import BYTES

MODEL = ModelConfig(
  vocab_size=260,  # padded: four ids that no byte has
  num_layers=2,
  model_dim=16,
  num_heads=2,
  num_kv_heads=1,
  head_dim=8,
  mlp_dim=16,
)
CONTEXT = 8


class Numbers:
  """Letters a to z are tokens 1 to 26, so that generated ids can be read off the text."""

  vocab_size = 27
  end_token = 0

  def encode(self, text):
    return np.array([ord(c) - 96 for c in text], np.uint8)

  def decode(self, ids):
    return "".join(chr(96 + int(i)) for i in ids)


@pytest.fixture(scope="module")
def params():
  rng = np.random.default_rng(3)  # plain numbers: compiling the initialiser takes seconds
  shapes = language_model(MODEL).shapes()
  return {n: rng.normal(0, 0.5, s.shape).astype(np.float32) for n, s in shapes.items()}


def generate(params, prompt, num_tokens=12, temperature=0.0, seed=0, **fields):
  fields = {"tokenizer": Numbers(), "context_length": CONTEXT, **fields}
  return generate_lib.generate(
    MODEL,
    params,
    prompt=prompt,
    num_tokens=num_tokens,
    temperature=temperature,
    seed=seed,
    **fields,
  )


@jax.jit
def logits_of(params, tokens):
  return language_model(MODEL).logits(params, tokens)


def greedy_by_hand(params, ids, num_tokens, known=27):
  ids = [int(i) for i in ids]
  out = []
  for _ in range(num_tokens):
    window = ids[-CONTEXT:]
    # One shape for speed; what is right of the last token must not matter, so it is not zeros.
    padded = np.array([window + [9] * (CONTEXT - len(window))], np.int32)
    logits = np.asarray(logits_of(params, padded))
    out.append(int(np.argmax(logits[0, len(window) - 1, :known])))
    ids.append(out[-1])
  return Numbers().decode(out)


@pytest.mark.parametrize("prompt", ["a", "hello", "abcdefgh", "aratherlongprompt"])
def test_greedy_equals_a_plain_loop(params, prompt):
  """Shorter than, as long as and longer than the context; the window slides past its end."""
  assert generate(params, prompt) == greedy_by_hand(params, Numbers().encode(prompt), 12)


def test_a_long_prompt_counts_by_its_tail(params):
  assert generate(params, "xyzxyzabcdefgh") == generate(params, "abcdefgh")
  assert generate(params, "abcdefgh") != generate(params, "habcdefg")


def test_an_empty_prompt_starts_from_the_end_token(params):
  assert generate(params, "") == greedy_by_hand(params, [0], 12)


def test_sampling_follows_the_seed_and_the_temperature(params):
  one = generate(params, "abc", 40, temperature=1.0, seed=1)
  assert one == generate(params, "abc", 40, temperature=1.0, seed=1)
  assert one != generate(params, "abc", 40, temperature=1.0, seed=2)
  loud = {**params, "embedding": 8 * params["embedding"]}  # divided by a tiny number: infinite
  for small in (1e-6, 1.2e-38, 1e-300):
    assert generate(loud, "abc", temperature=small, seed=5) == generate(loud, "abc")


def test_sampling_has_the_models_distribution(params):
  """First tokens over 400 seeds against the softmax over the known ids, in total variation."""
  logits = logits_of(params, np.array([[1, 2, 3]]))
  expected = np.asarray(jax.nn.softmax(logits[0, -1, :27] / 2))
  texts = [generate(params, "abc", 1, temperature=2.0, seed=seed) for seed in range(400)]
  observed = np.bincount([ord(t) - 96 for t in texts], minlength=27) / len(texts)
  assert np.abs(observed - expected).sum() / 2 < 0.15
  assert expected.max() < 0.9, "or the test says nothing"


def test_an_own_model_s_vocabulary_is_that_of_its_logits(monkeypatch):
  """With another one than the config's, 256 unless it is set, the text of a run was left out."""
  writer = types.SimpleNamespace(logits=lambda params, tokens: params["rows"][tokens])
  monkeypatch.setattr(custom, "load_model", lambda config: writer)
  after = {"rows": np.roll(np.eye(500, dtype=np.float32), 1, axis=1)}  # the next id
  numbers = dataclasses.replace(
    BYTES,
    vocab_size=400,
    to_ids=lambda text: [*map(int, text.split())],
    to_text=lambda ids: " ".join(map(str, ids)),
  )
  model = dataclasses.replace(MODEL, custom="own.py:model", vocab_size=256)
  how = {"num_tokens": 3, "temperature": 0.0, "context_length": CONTEXT}
  assert generate_lib.generate(model, after, numbers, "300", **how) == "301 302 303"


@pytest.mark.parametrize("temperature", [100.0, np.inf])
def test_never_samples_what_the_tokenizer_does_not_have(params, temperature):
  text = generate(params, "abc", 200, temperature=temperature)
  assert len(text) == 200 and max(text) <= "z"  # 233 of the model's 260 ids lie beyond
  assert len(set(text)) > 10


def test_compiles_once_whatever_the_prompt_temperature_and_seed(params, monkeypatch):
  traces = []
  states = Transformer.states
  monkeypatch.setattr(Transformer, "states", lambda *a: traces.append(1) or states(*a))
  for prompt, temperature, seed in (("a", 0.0, 0), ("abcdefghijkl", 1.0, 1), ("", 0.5, 2)):
    generate(params, prompt, 17, temperature=temperature, seed=seed)
  assert len(traces) == 1


def test_bytes_and_device_parameters(params):
  text = generate(jax.device_put(params), "def ", 30, tokenizer=BYTES)
  assert isinstance(text, str) and text == generate(params, "def ", 30, tokenizer=BYTES)
  assert generate(params, "abc", 0) == ""


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("num_tokens", -1),
    ("temperature", -0.5),
    ("context_length", 0),
    ("seed", -1),
    ("seed", 1 << 32),
  ],
)
def test_refuses_bad_numbers(params, field, value):
  with pytest.raises(ConfigError, match=f"{field} = {value}.*Fix"):
    generate(params, "a", **{field: value})


def test_refuses_a_prompt_that_is_no_text(params):
  """As a shell gives it: a byte that is no UTF-8."""
  with pytest.raises(ConfigError, match=r"^prompt = 'a.udcff': has bytes that are no UTF-8. Fix: "):
    generate(params, "a\udcff", tokenizer=BYTES)


def test_refuses_a_prompt_the_model_has_no_tokens_for(params):
  class Large(Numbers):
    def encode(self, text):
      return np.array([300], np.uint16)

  with pytest.raises(ConfigError, match=r"model.vocab_size = 260.*a 300"):
    generate(params, "a", tokenizer=Large())
