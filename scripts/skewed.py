"""Data that differ from island to island (`data.custom = "skewed:source"`), for scripts/compare.py.

Each of M islands reads one M-th of the standard library: files that are neighbours in the order of
their names, while islands otherwise read from all files. The held-out data are the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ddiloco.config import Config, DataConfig
from ddiloco.models.model import Batch
from ddiloco.training.data import Corpus, open_corpus


@dataclasses.dataclass(frozen=True)
class Skewed:
  """See `ddiloco.training.data.Source`."""

  corpus: Corpus

  def batches(self, config: Config, learner: int) -> Any:
    """Batches of the learner's part, as if it were the only learner."""
    count, windows = config.islands.num_learners, self.corpus.train
    first, end = (len(windows.blocks) * m // count for m in (learner, learner + 1))
    part = dataclasses.replace(
      windows, blocks=windows.blocks[first:end], length=(end - first - 1) * windows.per_block
    )
    alone = dataclasses.replace(config.islands, num_learners=1, overrides={})
    size = config.islands.island(learner).batch_size
    mine = dataclasses.replace(self.corpus, train=part)
    return mine.batches(dataclasses.replace(config, islands=alone), 0, size)

  def heldout_batches(self, batch_size: int) -> Sequence[Batch]:
    return self.corpus.heldout_batches(batch_size)


def source(data: DataConfig) -> Skewed:
  """The source with the text that the other fields of `data` name."""
  return Skewed(open_corpus(dataclasses.replace(data, custom="", options={})))
