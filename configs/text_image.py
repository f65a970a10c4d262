"""Text and images: rows with an image and its caption beside rows of text alone, in every batch.

Command:   ddiloco train --config=configs/text_image.py --workdir=runs/text_image --cpu
           python scripts/caption_digits.py --workdir=runs/text_image
Hardware:  tiny: 2 CPU cores; every island is one fake CPU device. 2b: a slice v5p:2x2x2 an island.
Time:      tiny: 6 to 9 min beside other work, comparison included (7 min of CPU). 2b: not run;
           `ddiloco compile --config=configs/text_image.py:2b` says what it takes
           (docs/accelerators.md).
Numbers:   tiny: held-out loss 5.65 +- 0.05 untrained, 1.06 +- 0.02 an island alone, 0.888 +- 0.004
           merged (virtual time, three seeds: scripts/expected_loss.py). One real run: 1.04 best
           island alone, 0.90 merged: 1.47 a token of text alone, 0.059 of a caption. The merged
           model names 94 % of held-out digits, 10 % with the images shuffled (docs/results.md).
           2b: not measured.
Data:      scikit-learn's scans of handwritten digits (pip install 'ddiloco[examples]'), captions
           made from their labels and pixels (ddiloco/training/captions.py), and as text alone this
           Python's standard library. 2b: token files as for configs/dense.py:2b; enlarged scans
           take the place of image-text pairs of your own, for which you write a function that
           returns a `ddiloco.Source`.

An image's patches are the first tokens of its row, and the loss counts text alone
(ddiloco/models/layers.py). Half of the rows have an image. Held-out loss is reported for all rows,
for rows with an image ("image_loss") and for rows of text alone ("text_loss"). Island 2 is killed
on the way.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import ml_collections

from ddiloco import config

DENSE = Path(__file__).with_name("dense.py")


def get_config(preset: str = "tiny") -> ml_collections.ConfigDict:
  """The run of one preset, to be frozen by `config.from_dict`.

  Raises:
    ConfigError: there is no such preset.
  """
  return config.preset(PRESETS, preset)()


def tiny() -> ml_collections.ConfigDict:
  """Sixteen patches of 2 x 2 pixels, then bytes: 165,568 parameters."""
  c = config.default()
  c.model.num_layers = 3
  set_images(c, image_size=8, patch_size=2, image_channels=1)
  c.data.sequence_length = 80  # 16 patches, and the longest caption
  c.data.heldout_sequences = 256
  c.inner.learning_rate = 3e-3  # with 8e-3 the model learns to use the images much later
  c.sync.num_fragments, c.sync.sync_period = 6, 12
  c.run.total_tokens = 4 * 1000 * 8 * 80  # learners x steps x batch x length
  c.run.compare_alone = True
  c.chaos.faults = ({"action": "kill", "role": "learner-2", "at_step": 400, "seconds": 5.0},)
  return c


def two_billion() -> ml_collections.ConfigDict:
  """configs/dense.py:2b, and 256 patches of 14 x 14 pixels in colour."""
  c = runpy.run_path(str(DENSE))["get_config"]("2b")
  set_images(c, image_size=224, patch_size=14, image_channels=3)
  return c


def set_images(c: ml_collections.ConfigDict, **shape: int) -> None:
  """Images of this shape, for the model and for the data that it is given."""
  c.model.update(shape)
  c.data.custom = "ddiloco.training.captions:digits"
  c.data.options = {**shape, "image_share": 0.5}


PRESETS = {"tiny": tiny, "2b": two_billion}
