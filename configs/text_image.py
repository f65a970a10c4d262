"""Text and images: captions of real scans and text alone, in the same batches.

Command:   ddiloco train --config=configs/text_image.py --workdir=runs/text_image --cpu
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
  mlp: int  # F
  image: int  # pixels a side
  patch: int  # pixels a side of one
  channels: int
  length: int  # T, positions of a row, patches included
  batch: int  # rows a step and island
  learning_rate: float
  tokens: float  # positions of the whole run


# fmt: off
PRESETS = {
  #               V       L   D     H   K  head F     I    patch C  T     B   lr    tokens  parameters
  "tiny": Preset(256,     3,  64,   4,  2, 16,  192,  8,   2,    1, 80,   8,  8e-3, 4 * 1500 * 8 * 80),
  "2b":   Preset(131_072, 24, 2560, 20, 4, 128, 6912, 224, 14,   3, 2048, 64, 4e-4, 26e9),
}
# fmt: on
TOPOLOGIES = {"2b": "v5p:2x2x2"}


def get_config(preset: str = "tiny") -> ml_collections.ConfigDict:
  if preset not in PRESETS:
    raise config.ConfigError(
      f"preset = {preset!r}: configs/text_image.py has {', '.join(PRESETS)}."
      " Fix: for example --config=configs/text_image.py:tiny."
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
  c.model.image_size = row.image
  c.model.patch_size = row.patch
  c.model.image_channels = row.channels
  c.data.custom = "ddiloco.training.captions:digits"
  shape = {name: c.model[name] for name in ("image_size", "patch_size", "image_channels")}
  c.data.options = {**shape, "image_share": 0.5}
  c.data.sequence_length = row.length
  c.data.heldout_sequences = 256
  c.islands.batch_size = row.batch
  c.inner.learning_rate = row.learning_rate
  c.run.total_tokens = int(row.tokens)
  c.islands.topology = TOPOLOGIES.get(preset, "")
  return c
