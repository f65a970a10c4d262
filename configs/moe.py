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
           parameters has 1.193 +- 0.009. The others: not measured. "Decoupled DiLoCo" reports
           text/vision scores of 68.4/54.9 and 68.4/55.1 for mixtures with 2.8B and 3.8B active
           parameters. Their expert counts are not known to us; 16 experts, 2 a token, are our
           choice.

Load balance is computed inside each learner; learners never exchange router statistics.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import ml_collections

from ddiloco import config

DENSE = runpy.run_path(str(Path(__file__).with_name("dense.py")))

# Columns as in that file; F is of one expert.
# fmt: off
PRESETS = {
  #        V       L   D     H   K  head F     B    lr    tokens   active parameters (all)
  "tiny": (256,    4,  64,   4,  2, 16,  96,   8,   8e-3, 4e6),   # 214,592 (362,048)
  "2.8b": (131072, 28, 2560, 20, 4, 128, 4608, 128, 4e-4, 72e9),  # 2,759,047,680 (16.6e9)
  "3.8b": (131072, 28, 3072, 24, 8, 128, 5120, 128, 3e-4, 72e9),  # 3,751,259,136 (22.2e9)
}
# fmt: on
EXPERTS = {"tiny": 4, "2.8b": 16, "3.8b": 16}


def get_config(preset: str = "tiny") -> ml_collections.ConfigDict:
  """The run of one preset, to be frozen by `config.from_dict`.

  Raises:
    ConfigError: there is no such preset.
  """
  c = DENSE["sized"](config.preset(PRESETS, preset))
  c.model.num_experts = EXPERTS[preset]
  c.model.experts_per_token = 2
  c.sync.num_fragments = 24
  if preset != "tiny":
    c.model.capacity_factor = 1.25  # empty slots cost FLOPs too; long sequences need few spare ones
    c.islands.topology = "v5p:4x4x4"  # 3.8b fits (docs/accelerators.md); 2.8b was not compiled
    c.islands.tensor = 4  # splits the experts: gathering all of a layer's would take 1.5 GB
  return c
