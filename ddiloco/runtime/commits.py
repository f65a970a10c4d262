"""One commit: pushes in, a fragment's new value out. The shards' arithmetic, which replay shares.

What needs one push only (norms, dot products) is done when the push arrives; only `commit` is in a
round's latency. Sums run over learners in ascending order, so that a commit is bitwise reproducible
whatever order pushes arrived in.
"""

from __future__ import annotations

import numpy as np

from ddiloco.config import Config
from ddiloco.core import codec, merge, outer
from ddiloco.core.fragments import Fragment
from ddiloco.core.protocol import Commit
from ddiloco.core.syncer_state import FragmentState
from ddiloco.runtime.store import Committed

Update = tuple[str, np.ndarray]  # codec, payload: from the view before to the new one


class Arrivals:
  """The outer gradients of one round so far, in order of arrival."""

  def __init__(self, fragment: Fragment, round: int):
    self.round = round
    self.learners: list[int] = []
    self.deltas: list[np.ndarray] = []
    self.gram = merge.empty_gram(fragment)  # f64 [pieces, M, M]
    self._fragment = fragment

  def add(self, learner: int, delta: np.ndarray, squares: np.ndarray) -> None:
    """One more push [size] f32 and its `merge.squared_norms`."""
    self.gram = merge.extend_gram(self._fragment, self.gram, self.deltas, delta, squares)
    self.learners.append(learner)
    self.deltas.append(delta)


def commit(
  fragment: Fragment, old: Committed, arrivals: Arrivals, what: Commit, config: Config
) -> tuple[Committed, Update | None, np.ndarray]:
  """The fragment after the outer step on the merged pushes of `what.learners`.

  Returns:
    (the new value; its state lacks the counters, which are the protocol's; the update as learners
    get it, None if they get values whole; the learners' weights [M]).
  """
  order = [arrivals.learners.index(m) for m in what.learners]
  weights = merge.token_weights(what.steps, what.tokens)
  factors = merge.coefficients(fragment, merge.select_gram(arrivals.gram, order), weights)
  deltas = [arrivals.deltas[i] for i in order]
  momentum = outer.init(fragment.size, config.outer)
  if momentum is not None and old.momentum is not None:
    momentum[:] = old.momentum  # updated in place below, and the old one may be on its way to disk
  value = merge.commit(fragment, old.value, momentum, deltas, factors, config.outer)
  view, update = _published(fragment, old.view, value, config.sync.publish_codec)
  state = FragmentState(fragment.index, what.version, last_round=what.round)
  return Committed(state, value, view, momentum, what.round), update, weights


def _published(
  fragment: Fragment, view: np.ndarray, value: np.ndarray, name: str
) -> tuple[np.ndarray, Update | None]:
  """What learners will have: `value`, or with a lossy codec what its rounded update makes of it.

  Rounding errors do not add up: the next update is taken from what learners really have.
  """
  if name == "f32":
    return value, None
  payload = codec.encode(value - view, name)
  return view + codec.decode(payload, fragment.size, name), (name, payload)
