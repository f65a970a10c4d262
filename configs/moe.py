"""Mixtures of experts, named by their ACTIVE parameters: those that one token uses.

Command:   ddiloco train --config=configs/moe.py:tiny --workdir=runs/moe-tiny --cpu
           with token files of your own:
           ddiloco train --config=configs/moe.py:2.8b --workdir=runs/moe-2.8b \
             --config.data.path='data/*.bin' --config.data.tokenizer=sentencepiece:tokenizer.model
Hardware:  tiny: a laptop. 2.8b, 3.8b: a TPU slice an island.
Time:      tiny: 14 minutes of a core in virtual time, beside other work. The others have not been
           trained to their end: they take slices of TPUs.
Data:      tiny: this Python's standard library, as bytes. 2.8b, 3.8b: token files.
Numbers:   tiny: held-out loss 5.29 +- 0.16 untrained, 1.185 +- 0.004 at the end (virtual time,
           three seeds: scripts/expected_loss.py), where the default's dense model of as many active
           parameters has 1.195 +- 0.004. The others: not measured. "Decoupled DiLoCo" reports
           text/vision scores of 68.4/54.9 and 68.4/55.1 for mixtures with 2.8B and 3.8B active
           parameters. Their expert counts are not known to us; 16 experts, 2 a token, are our
           choice.

Load balance is computed inside each learner; learners never exchange router statistics.
"""

from __future__ import annotations

from typing import NamedTuple

import ml_collections

from ddiloco import config


class Preset(NamedTuple):
  """One line of the table."""

  vocab: int  # V; 256 is bytes
  layers: int  # L
  dim: int  # D
  heads: int  # H
  kv_heads: int  # K
  head_dim: int
  mlp: int  # F, of one expert
  experts: int  # E
  batch: int  # sequences a step and island
  learning_rate: float
  tokens: float  # of the whole run


# fmt: off
PRESETS = {
  #              V       L   D     H   K  head F     E   B    lr    tokens   active parameters (all)
  "tiny": Preset(256,    4,  64,   4,  2, 16,  96,   4,  8,   8e-3, 4e6),   # 214,592 (362,048)
  "2.8b": Preset(131072, 28, 2560, 20, 4, 128, 4608, 16, 128, 4e-4, 72e9),  # 2,759,047,680 (16.6e9)
  "3.8b": Preset(131072, 28, 3072, 24, 8, 128, 5120, 16, 128, 3e-4, 72e9),  # 3,751,259,136 (22.2e9)
}
# fmt: on


def get_config(preset: str = "tiny") -> ml_collections.ConfigDict:
  """The run of one preset, to be frozen by `config.from_dict`.

  Raises:
    ConfigError: there is no such preset.
  """
  if preset not in PRESETS:
    raise config.ConfigError(
      f"preset = {preset!r}: configs/moe.py has {', '.join(PRESETS)}."
      " Fix: for example --config=configs/moe.py:tiny."
    )
  row = PRESETS[preset]
  c = config.default()
  c.model.vocab_size = row.vocab
  c.model.num_layers = row.layers
  c.model.model_dim = row.dim
  c.model.num_heads = row.heads
  c.model.num_kv_heads = row.kv_heads
  c.model.head_dim = row.head_dim
  c.model.mlp_dim = row.mlp
  c.model.num_experts = row.experts
  c.model.experts_per_token = 2
  c.islands.batch_size = row.batch
  c.inner.learning_rate = row.learning_rate
  c.run.total_tokens = int(row.tokens)
  c.sync.num_fragments = 24
  if row.vocab > 256:
    set_large(c)
  return c


def set_large(c: ml_collections.ConfigDict) -> None:
  """Settings of every model that needs accelerators, token files and a wide-area network."""
  c.model.compute_dtype = "bfloat16"
  c.model.capacity_factor = 1.25  # empty slots cost FLOPs too; long sequences need few spare ones

  c.data.source = "tokens"
  c.data.path = "data/*.bin"
  c.data.token_dtype = "uint32" if c.model.vocab_size > 65_536 else "uint16"
  c.data.tokenizer = "sentencepiece:data/tokenizer.model"
  c.data.sequence_length = 2048
  c.data.heldout_share = 0.001

  c.inner.warmup_steps = 1000

  c.islands.num_learners = 8
  c.islands.devices = 0  # an even share: a whole slice where devices have slices
  c.islands.topology = "v5p:4x4x4"  # 3.8b fits (docs/accelerators.md); 2.8b was not compiled
  c.islands.tensor = 4  # splits the experts: gathering all of a layer's would take 1.5 GB
  c.islands.fsdp = -1
  c.islands.remat = "full"
  c.islands.loss_chunks = 8  # parts of the vocabulary; all logits would be the largest array

  c.sync.num_shards = 8
  c.sync.max_rows = 8192  # of the embedding a piece, so that it spreads over fragments
  c.sync.sync_period = 24
  c.sync.overlap_steps = 2
  c.sync.push_codec = "bf16"
