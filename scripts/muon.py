"""Muon inside an island (`inner.custom = "muon:optimizer"`), for scripts/compare.py.

Hidden matrices take steps of orthogonalized momentum, as long as Adam's usually are, so that the
same learning rates suit; all other parameters take Adam's. Clipping and decay are as with AdamW.
"""

from __future__ import annotations

import optax
from optax.contrib import MuonDimensionNumbers, muon

from ddiloco.config import InnerConfig
from ddiloco.models.model import Params
from ddiloco.training.step import decayed

ADAMS_RMS = 0.2  # of an update's values, by experience (arXiv 2502.16982)
HIDDEN = {  # axes in, axes out; the first of each is its layer
  "attention/query": MuonDimensionNumbers(1, (2, 3)),
  "attention/key": MuonDimensionNumbers(1, (2, 3)),
  "attention/value": MuonDimensionNumbers(1, (2, 3)),
  "attention/output": MuonDimensionNumbers((1, 2), 3),
  "mlp/gate": MuonDimensionNumbers(1, 2),
  "mlp/up": MuonDimensionNumbers(1, 2),
  "mlp/down": MuonDimensionNumbers(1, 2),
}


def matrices(params: Params) -> dict[str, MuonDimensionNumbers | None]:
  """Which axes of a hidden matrix are its rows and columns; None: Adam's."""
  return {name: HIDDEN.get(name.removeprefix("layers/")) for name in params}


def optimizer(inner: InnerConfig) -> optax.GradientTransformation:
  """Its updates are those of learning rate 1."""
  return optax.chain(
    optax.clip_by_global_norm(inner.clip_norm) if inner.clip_norm else optax.identity(),
    muon(
      learning_rate=1.0,
      adam_b1=inner.b1,
      adam_b2=inner.b2,
      consistent_rms=ADAMS_RMS,
      muon_weight_dimension_numbers=matrices,
    ),
    optax.add_decayed_weights(-inner.weight_decay, mask=decayed),
  )
