"""`huggingface_tensors` gives the model of a config as a Llama or a Mixtral: the same logits.

The reference here is written from the definition of these models, with their names of tensors and
fields of config.json. transformers 5.24 computes the same from such a folder, within 1e-5.
"""

from typing import Any

import numpy as np
import pytest

from ddiloco.config import from_dict
from ddiloco.models import transformer
from tests.models.small import forward, fresh

Tensors = dict[str, np.ndarray]
UNTIED = {"tied_embedding": False}
MODELS = {
  "dense": {},
  "one kv head": UNTIED | {"num_kv_heads": 1, "rope_theta": 500.0, "norm_epsilon": 1e-2},
  "mixture": {"num_experts": 4, "experts_per_token": 2, "capacity_factor": 2.0},
  "one of three": {"num_experts": 3, "experts_per_token": 1, "capacity_factor": 3.0},
  "one expert": UNTIED | {"num_experts": 1, "experts_per_token": 1},
}


def norm(x: np.ndarray, scale: np.ndarray, epsilon: float) -> np.ndarray:
  return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon) * scale


def softmax(x: np.ndarray) -> np.ndarray:
  e = np.exp(x - x.max(axis=-1, keepdims=True))
  return e / e.sum(axis=-1, keepdims=True)


def gated(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
  y = x @ gate.T
  return (y / (1 + np.exp(-y)) * (x @ up.T)) @ down.T


def attention(x: np.ndarray, w: Tensors, c: dict[str, Any]) -> np.ndarray:
  t, q = len(x), c["head_dim"]
  heads = {p: (x @ w[f"self_attn.{p}_proj.weight"].T).reshape(t, -1, q) for p in "qkv"}
  angle = np.arange(t)[:, None] * c["rope_theta"] ** (-np.arange(0, q, 2) / q)
  cos, sin = (np.tile(f(angle), 2)[:, None] for f in (np.cos, np.sin))
  for p in "qk":
    half = np.concatenate([-heads[p][..., q // 2 :], heads[p][..., : q // 2]], axis=-1)
    heads[p] = heads[p] * cos + half * sin
  groups = c["num_attention_heads"] // c["num_key_value_heads"]
  keys, values = (np.repeat(heads[p], groups, axis=1) for p in "kv")
  scores = np.einsum("thq,shq->hts", heads["q"], keys) / np.sqrt(q)
  scores = np.where(np.tril(np.ones((t, t), bool)), scores, -np.inf)
  mixed = np.einsum("hts,shq->thq", softmax(scores), values).reshape(t, -1)
  return mixed @ w["self_attn.o_proj.weight"].T


def mixture(x: np.ndarray, w: Tensors, c: dict[str, Any]) -> np.ndarray:
  probability = softmax(x @ w["block_sparse_moe.gate.weight"].T)
  out = np.zeros_like(x)
  for t, row in enumerate(probability):
    best = np.argsort(-row)[: c["num_experts_per_tok"]]
    for e in best:
      parts = (w[f"block_sparse_moe.experts.{e}.{p}.weight"] for p in ("w1", "w3", "w2"))
      out[t] += row[e] / row[best].sum() * gated(x[t], *parts)
  return out


def logits(c: dict[str, Any], tensors: Tensors, tokens: np.ndarray) -> np.ndarray:
  """(T, V) of one sequence."""
  x = tensors["model.embed_tokens.weight"][tokens]
  for n in range(c["num_hidden_layers"]):
    here = f"model.layers.{n}."
    w = {k.removeprefix(here): v for k, v in tensors.items() if k.startswith(here)}
    x = x + attention(norm(x, w["input_layernorm.weight"], c["rms_norm_eps"]), w, c)
    inner = norm(x, w["post_attention_layernorm.weight"], c["rms_norm_eps"])
    if c["model_type"] == "mixtral":
      x = x + mixture(inner, w, c)
    else:
      x = x + gated(inner, *(w[f"mlp.{p}_proj.weight"] for p in ("gate", "up", "down")))
  return norm(x, tensors["model.norm.weight"], c["rms_norm_eps"]) @ tensors["lm_head.weight"].T


@pytest.mark.parametrize("more", MODELS.values(), ids=MODELS)
def test_the_logits_are_the_same(more):
  size = {"num_layers": 2, "model_dim": 16, "num_heads": 2, "num_kv_heads": 2, "head_dim": 6}
  model = from_dict({"model": {**size, "mlp_dim": 20, **more}}).model
  params = fresh(model)
  said = transformer.huggingface_config(model)
  tensors = transformer.huggingface_tensors(model, params)
  (gate, *_) = (
    t for name, t in tensors.items() if name.endswith(("gate_proj.weight", "w1.weight"))
  )
  assert gate.shape == (said["intermediate_size"], said["hidden_size"])
  assert tensors["lm_head.weight"].shape == (said["vocab_size"], said["hidden_size"])
  tokens = np.random.default_rng(0).integers(0, model.vocab_size, (2, 17))
  got, _ = forward(model, params, tokens)
  wide = {name: value.astype(np.float64) for name, value in tensors.items()}
  for row, want in zip(tokens, np.asarray(got), strict=True):
    np.testing.assert_allclose(logits(said, wide, row), want, rtol=1e-4, atol=2e-5)
