"""What every engine returns."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What a run leaves: the global model, what became of every learner, and why it ended."""

  reason: str  # finished, stopped or failed
  params: dict[str, np.ndarray]  # the global model; without shards that of the first learner left
  island_params: dict[int, dict[str, np.ndarray]]  # of the learners left; only without shards
  steps: dict[int, int]  # inner steps of every learner over all incarnations
  lost: str = ""  # work that is gone although the run went on
