"""What is trained, on what and how: model, data, inner and outer optimizer."""

from __future__ import annotations

import dataclasses
import math

from ddiloco.checked import not_negative, one_of, positive, require, share


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A decoder-only transformer; `configs/dense.py` and `configs/moe.py` hold presets to 12B."""

  vocab_size: int = 256  # at least the tokenizer's; bytes need 256
  num_layers: int = 4
  model_dim: int = 64  # D
  num_heads: int = 4  # H, query heads
  num_kv_heads: int = 2  # K, shared by groups of H/K query heads
  head_dim: int = 16
  mlp_dim: int = 192  # F, hidden width of the gated MLP (of each expert in a mixture)
  num_experts: int = 0  # E; 0 is dense
  experts_per_token: int = 2  # top-k of the router
  capacity_factor: float = 2.0  # slots of an expert per sequence over its even share
  load_balance_weight: float = 0.01  # of the auxiliary loss, computed inside one learner only
  rope_theta: float = 10_000.0
  norm_epsilon: float = 1e-6
  compute_dtype: str = "float32"  # of activations and matmuls; parameters stay f32
  remat: bool = False  # recompute each layer in the backward pass instead of storing it

  def __post_init__(self):
    positive("model", self, "vocab_size", "num_layers", "model_dim", "num_heads", "num_kv_heads")
    positive("model", self, "head_dim", "mlp_dim", "rope_theta", "norm_epsilon")
    positive("model", self, "capacity_factor")
    not_negative("model", self, "num_experts", "load_balance_weight")
    one_of("model", self, "compute_dtype", "float32", "bfloat16")
    require(
      self.num_heads % self.num_kv_heads == 0,
      "model.num_kv_heads",
      self.num_kv_heads,
      f"must divide model.num_heads ({self.num_heads})",
      f"use {math.gcd(self.num_heads, self.num_kv_heads)}",
    )
    require(
      self.head_dim % 2 == 0,
      "model.head_dim",
      self.head_dim,
      "must be even (rotary embedding turns pairs)",
      f"use {self.head_dim + 1}",
    )
    require(
      not self.num_experts or 1 <= self.experts_per_token <= self.num_experts,
      "model.experts_per_token",
      self.experts_per_token,
      f"must lie between 1 and model.num_experts ({self.num_experts})",
      "lower it, or set model.num_experts = 0 for a dense model",
    )


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Where tokens come from. Every learner reads its own disjoint stream."""

  source: str = (
    "stdlib"  # stdlib: this Python's own library; text: files by glob; tokens; synthetic
  )
  path: str = ""  # glob for text, file or glob for tokens (.bin)
  token_dtype: str = "uint16"  # of .bin files: uint16 or uint32
  tokenizer: str = "bytes"  # bytes, sentencepiece:FILE.model or huggingface:FILE.json
  sequence_length: int = 128  # T, tokens a sequence predicts
  heldout_share: float = 0.05  # of the text, fixed, never trained on
  heldout_sequences: int = 64  # used for one evaluation

  def __post_init__(self):
    one_of("data", self, "source", "stdlib", "text", "tokens", "synthetic")
    one_of("data", self, "token_dtype", "uint16", "uint32")
    positive("data", self, "sequence_length", "heldout_sequences")
    require(
      0 < self.heldout_share < 1,
      "data.heldout_share",
      self.heldout_share,
      "must lie between 0 and 1, so that something is held out and something trained on",
      "use 0.05",
    )
    require(
      bool(self.path) == (self.source in ("text", "tokens")),
      "data.path",
      self.path,
      f"is needed for sources text and tokens and unused for others (source is {self.source!r})",
      "set data.path to a glob, or data.source to 'text' or 'tokens'",
    )
    kind, _, file = self.tokenizer.partition(":")
    require(
      self.tokenizer == "bytes" or (kind in ("sentencepiece", "huggingface") and bool(file)),
      "data.tokenizer",
      self.tokenizer,
      "must be bytes, sentencepiece:FILE or huggingface:FILE",
      "use 'bytes', which needs no file",
    )


@dataclasses.dataclass(frozen=True)
class InnerConfig:
  """AdamW on one island. The learning rate follows what the run has merged, not own steps."""

  learning_rate: float = 8e-3  # islands want a higher one than data-parallel (docs/design.md)
  warmup_steps: int = 50
  decay_steps: int = 0  # cosine to the end; 0: derived from run.total_tokens and all islands
  final_share: float = 0.1  # of learning_rate, at the end of the decay
  b1: float = 0.9
  b2: float = 0.95
  epsilon: float = 1e-8
  weight_decay: float = 0.1  # on matrices only, not on norms
  clip_norm: float = 1.0  # global gradient norm; 0 turns clipping off
  accumulation_steps: int = 1  # micro-batches a step

  def __post_init__(self):
    positive("inner", self, "learning_rate", "epsilon", "accumulation_steps")
    not_negative("inner", self, "warmup_steps", "decay_steps", "weight_decay", "clip_norm")
    share("inner", self, "b1", "b2")
    require(
      0 <= self.final_share <= 1,
      "inner.final_share",
      self.final_share,
      "must lie in [0, 1]",
      "use 0.1",
    )


@dataclasses.dataclass(frozen=True)
class OuterConfig:
  """Outer SGD on the merged outer gradient; momentum 0 is plain SGD."""

  learning_rate: float = 1.0
  momentum: float = 0.0
  nesterov: bool = True

  def __post_init__(self):
    positive("outer", self, "learning_rate")
    share("outer", self, "momentum")
