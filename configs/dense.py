"""Dense models from 100 thousand to 12 billion parameters.

Command:   ddiloco train --config=configs/dense.py:1m --workdir=runs/dense-1m --cpu
           from 100m on, with token files of your own:
           ddiloco train --config=configs/dense.py:2b --workdir=runs/dense-2b \
             --config.data.path='data/*.bin' --config.data.tokenizer=sentencepiece:tokenizer.model
Hardware:  100k, 1m: a laptop. 10m: one accelerator an island. From 100m: an island is a slice as
           in TOPOLOGIES; `ddiloco compile --config=configs/dense.py:12b` says what it takes there.
Time:      100k: some two minutes of a core in virtual time. The others have not been trained to
           their end: 1m takes hours of two cores, 10m an accelerator, the rest slices of TPUs.
Data:      100k, 1m, 10m: this Python's standard library, as bytes. From 100m: token files
           (scripts/make_tokens.py makes them from text).
Numbers:   100k: held-out loss 5.18 +- 0.12 untrained, 1.274 +- 0.008 at the end (virtual time,
           three seeds: scripts/expected_loss.py). 100m: 240 steps on two cores, docs/results.md,
           "A hundred million parameters". The others: not measured. "Decoupled DiLoCo"
           reports dense 2B, 5B and 9B models on 26B, 72B and 141B tokens on par with data-parallel;
           those token counts are used here. Smaller ones: docs/results.md, "The algorithms".

Learning rates and batches are common practice for the size. From 100m on the protocol has the
paper's settings: 8 learners, 24 fragments, each synced every 24 steps, 2 syncs in flight.
"""

from __future__ import annotations

import ml_collections

from ddiloco import config

# The table's columns: V (256 is bytes), L, D, H, K, head dim, F, sequences a step and island, the
# learning rate, and the tokens of the whole run.
FIELDS = (
  *("model.vocab_size", "model.num_layers", "model.model_dim", "model.num_heads"),
  *("model.num_kv_heads", "model.head_dim", "model.mlp_dim", "islands.batch_size"),
  *("inner.learning_rate", "run.total_tokens"),
)

# fmt: off
PRESETS = {
  #         V       L   D     H   K  head F      B    lr    tokens    parameters
  "100k": (256,     2,  64,   4,  2, 16,  160,   8,   8e-3, 4e6),    # 102,720
  "1m":   (256,     5,  128,  8,  4, 16,  384,   8,   6e-3, 20e6),   # 1,017,216
  "10m":  (256,     12, 256,  8,  4, 32,  768,   16,  3e-3, 200e6),  # 9,509,120
  "100m": (32_768,  12, 768,  12, 4, 64,  2048,  32,  1e-3, 2e9),   # 100,682,496
  "500m": (32_768,  26, 1280, 10, 2, 128, 3584,  32,  6e-4, 10e9),   # 502,073,600
  "1b":   (32_768,  20, 2048, 16, 4, 128, 6144,  64,  4e-4, 20e9),   # 1,031,882,752
  "2b":   (131_072, 24, 2560, 20, 4, 128, 6912,  64,  4e-4, 26e9),   # 1,987,176,960
  "5b":   (262_144, 36, 3072, 24, 8, 128, 9984,  128, 3e-4, 72e9),   # 5,023,951,872
  "9b":   (262_144, 36, 4096, 32, 8, 128, 14336, 128, 2e-4, 141e9),  # 8,925,777,920
  "12b":  (262_144, 38, 5120, 40, 8, 128, 14336, 128, 2e-4, 240e9),  # 12,100,961,280
}
# fmt: on
# An island of each: what it fits, as `ddiloco compile` says (docs/accelerators.md).
TOPOLOGIES = {
  "100m": "v5e:2x2",
  "500m": "v5e:2x4",
  "1b": "v5e:4x4",
  "2b": "v5p:2x2x2",
  "5b": "v5p:2x4x4",
  "9b": "v5p:4x4x4",
  "12b": "v5p:4x4x4",
}


def get_config(preset: str = "1m") -> ml_collections.ConfigDict:
  """The run of one preset, to be frozen by `config.from_dict`.

  Raises:
    ConfigError: there is no such preset.
  """
  c = sized(config.preset(PRESETS, preset))
  c.islands.topology = TOPOLOGIES.get(preset, "")
  if preset in ("1m", "10m"):  # 100k has 20 tensors: of 24 fragments many would be empty
    c.sync.num_fragments = 24
  return c


def sized(row: tuple[float, ...]) -> ml_collections.ConfigDict:
  """The run of one line of the table."""
  c = config.default()
  c.update_from_flattened_dict(dict(zip(FIELDS, (*row[:-1], int(row[-1])))))
  if c.model.vocab_size > 256:
    set_large(c)
  return c


def set_large(c: ml_collections.ConfigDict) -> None:
  """Settings of every model that needs accelerators, token files and a wide-area network."""
  c.model.compute_dtype = "bfloat16"

  c.data.source = "tokens"
  c.data.path = "data/*.bin"
  c.data.token_dtype = "uint32" if c.model.vocab_size > 65_536 else "uint16"
  c.data.tokenizer = "sentencepiece:data/tokenizer.model"
  c.data.sequence_length = 2048
  c.data.heldout_share = 0.001

  c.inner.warmup_steps = 1000

  c.islands.num_learners = 8
  c.islands.devices = 0  # an even share: a whole slice where devices have slices
  c.islands.remat = "full"
  c.islands.loss_chunks = 8  # parts of the vocabulary; all logits would be the largest array

  c.sync.num_shards = 8
  c.sync.num_fragments = 24
  c.sync.max_rows = 8192  # of the embedding a piece; all of it is larger than several fragments
  c.sync.sync_period = 24
  c.sync.overlap_steps = 2
  c.sync.push_codec = "bf16"

  c.run.sample_tokens = 0  # each is a forward pass on one device (`ddiloco generate` makes some)
