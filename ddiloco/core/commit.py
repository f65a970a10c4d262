"""A shard's vectors, and one commit: pushes in, a fragment's new value out, as replay does it too.

What needs one push only (norms, dot products) is done when the push arrives; only `commit` is in a
round's latency. Sums run over learners in ascending order, so that a commit is bitwise reproducible
whatever order pushes arrived in.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from ddiloco.config import Config
from ddiloco.core import codec, merge, outer
from ddiloco.core.fragments import Fragment
from ddiloco.protocol import beliefs
from ddiloco.protocol.actions import Accept, Commit, InstallValue, Received
from ddiloco.protocol.messages import Publish, Push, Value
from ddiloco.protocol.syncer_state import FragmentState
from ddiloco.protocol.values import replace

# --- Committed fragments, and where they live, so that they outlive the shard's incarnation


@dataclasses.dataclass(frozen=True)
class Committed:
  """One fragment after its newest commit. Vectors are flat f32 [size] and never written again."""

  state: FragmentState  # version, merged tokens, who took part; no round under way
  value: np.ndarray  # the global value
  published_value: np.ndarray  # what learners were sent: `value`, or what a lossy codec made of it
  momentum: np.ndarray | None  # of the outer optimizer, None without
  momentum_round: int = -1  # that made the momentum; an older one if only the value was given back


class FragmentStore(Protocol):
  """Keeps the newest commit of every fragment; replaced as a whole, never half."""

  def load(self, fragment: int) -> Committed | None: ...

  def save(self, committed: Committed) -> None: ...


class MemoryStore:
  """Lives as long as the process: enough for roles that are threads of it."""

  def __init__(self) -> None:
    self._fragments: dict[int, Committed] = {}  # one operation on a dict is never half done

  def load(self, fragment: int) -> Committed | None:
    return self._fragments.get(fragment)

  def save(self, committed: Committed) -> None:
    self._fragments[committed.state.index] = committed


def new_fragment(fragment: Fragment, value: np.ndarray) -> Committed:
  """Version 0 of a fragment: its initial value, before any round."""
  return Committed(FragmentState(fragment.index), value, value, None)


Update = tuple[str, np.ndarray]  # codec, payload: from the published value before to the new one


FEWEST_COMPARED = 4096  # values; cosines of random directions are below 0.02 then


@dataclasses.dataclass(frozen=True)
class Measured:
  """Of one push, beside those that arrived before it in its round."""

  squares: np.ndarray  # f64 [pieces], `merge.squared_norms`
  row: np.ndarray  # f64 [pieces, M], `merge.products`

  @property
  def norm(self) -> float:
    """Of the whole push."""
    return math.sqrt(float(self.squares.sum()))


class ReceivedPushes:
  """The outer gradients of one round so far, in order of arrival."""

  def __init__(self, fragment: Fragment, round: int):
    self.round = round
    self.learners: list[int] = []
    self.deltas: list[np.ndarray] = []
    self.gram = merge.empty_gram(fragment)  # f64 [pieces, M, M]
    self._fragment = fragment

  def measure(self, delta: np.ndarray) -> Measured:
    """What the round, the screening and the merge need to know of one more push [size] f32."""
    squares = merge.squared_norms(self._fragment, delta)
    return Measured(squares, merge.products(self._fragment, self.deltas, delta))

  def add(self, learner: int, delta: np.ndarray, measured: Measured) -> None:
    """One more push, and what `measure` says of it."""
    self.gram = merge.extend_gram(self.gram, measured.row, measured.squares)
    self.learners.append(learner)
    self.deltas.append(delta)

  def products(self, learner: int, measured: Measured) -> dict[int, float]:
    """Inner products with the other learners' pushes and with itself, over all compared pieces.

    None where there are so few values that directions are chance.
    """
    compared = merge.compared_pieces(self._fragment)
    if sum(self._fragment.pieces[i].size for i in compared) < FEWEST_COMPARED:
      return {}
    row = measured.row[compared].sum(axis=0)
    found = {m: float(product) for m, product in zip(self.learners, row)}
    return {**found, learner: float(measured.squares[compared].sum())}


def commit(
  fragment: Fragment, old: Committed, arrivals: ReceivedPushes, what: Commit, config: Config
) -> tuple[Committed, Update | None, np.ndarray]:
  """The fragment after the outer step on the merged pushes of `what.learners`.

  Returns:
    (the new value; its state lacks the counters, which are the protocol's; the update as learners
    get it, None if they get values whole; the learners' weights [M]).
  """
  order = [arrivals.learners.index(m) for m in what.learners]
  weights = learner_weights(what, config)
  factors = merge.coefficients(fragment, merge.select_gram(arrivals.gram, order), weights)
  deltas = [arrivals.deltas[i] for i in order]
  momentum = outer.init(fragment.size, config.outer)
  if momentum is not None and old.momentum is not None:
    momentum[:] = old.momentum  # updated in place below, and the old one may be on its way to disk
  value = merge.commit(fragment, old.value, momentum, deltas, factors, config.outer)
  name = config.sync.publish_codec
  published, update = _published(fragment, old.published_value, value, name)
  state = FragmentState(fragment.index, what.version, last_round=what.round)
  return Committed(state, value, published, momentum, what.round), update, weights


def learner_weights(what: Commit, config: Config) -> np.ndarray:
  """Weights [M] f64 of the learners of a commit, bounded whatever they claim.

  Stale work weighs less than its steps and tokens say (`beliefs.worth_steps`), and no learner has
  more than its share (`merge.bounded_shares`).
  """
  steps = [beliefs.worth_steps(s, config.sync) for s in what.steps]
  tokens = [t if s == c else t * c / s for t, s, c in zip(what.tokens, what.steps, steps)]
  step_tokens = [config.tokens_per_step(m) for m in what.learners]
  return merge.bounded_shares(merge.token_weights(steps, tokens), step_tokens)


def _published(
  fragment: Fragment, published: np.ndarray, value: np.ndarray, name: str
) -> tuple[np.ndarray, Update | None]:
  """What learners will have: `value`, or with a lossy codec what its rounded update makes of it.

  Rounding errors do not add up: the next update is taken from what learners really have.
  """
  if name == "f32":
    return value, None
  payload = codec.encode(value - published, name)
  return published + codec.decode(payload, fragment.size, name), (name, payload)


# --- All that a shard has of vectors: what is committed, what has arrived, what goes out


class Merger:
  """The vectors of one shard. Nothing here decides, stores or sends.

  Args:
    fragments: the shard's, by index.
    store: holds their newest commits.
    config: the run's.

  Attributes:
    committed: by fragment, the newest commit.
  """

  def __init__(self, fragments: Mapping[int, Fragment], store: FragmentStore, config: Config):
    self.committed: dict[int, Committed] = {p: _loaded(store, p) for p in fragments}
    self._fragments, self._config = fragments, config
    self._arrivals: dict[int, ReceivedPushes] = {}  # of the round under way
    self._update: dict[int, Update] = {}  # the newest, encoded

  def take_in(self, push: Push, now: float) -> Received:
    """Decodes a push and measures it, so that the reducer can judge it."""
    fragment = self._fragments.get(push.fragment)
    if fragment is None or push.payload is None:
      return Received(push, now, fault="no payload, or not a fragment of this shard")
    try:
      delta = codec.decode(push.payload, fragment.size, push.codec)
    except codec.CodecError as error:
      return Received(push, now, fault=str(error))
    arrivals = self._arrivals_of(push.fragment, push.round)
    measured = arrivals.measure(delta)
    products, content = arrivals.products(push.learner, measured), (delta, measured)
    return Received(push, now, norm=measured.norm, products=products, content=content)

  def take_back(self, value: Value, now: float) -> Received:
    """Decodes a value that the shard has lost and a learner gives back."""
    fragment = self._fragments.get(value.fragment)
    try:
      flat = codec.decode(value.payload, -1 if fragment is None else fragment.size, "f32")
    except codec.CodecError as error:
      return Received(value, now, fault=str(error))
    if not np.isfinite(flat).all():
      return Received(value, now, fault="not finite")
    return Received(value, now, content=flat)

  def accept(self, accept: Accept) -> None:
    """Keeps a push that was taken in until its round ends."""
    arrivals = self._arrivals_of(accept.fragment, accept.round)
    self._arrivals[accept.fragment] = arrivals
    arrivals.add(accept.learner, *accept.content)

  def _arrivals_of(self, fragment: int, round: int) -> ReceivedPushes:
    """What has arrived in this round so far; nothing yet if it has just begun."""
    arrivals = self._arrivals.get(fragment)
    if arrivals is None or arrivals.round != round:
      return ReceivedPushes(self._fragments[fragment], round)
    return arrivals

  def abandon(self, fragment: int) -> None:
    """Forgets what has arrived in a round that ends without a commit."""
    self._arrivals.pop(fragment, None)

  def commit(self, what: Commit, state: FragmentState) -> np.ndarray:
    """Merges; from now on the fragment is what it makes, with this state. Returns the weights."""
    p = what.fragment
    new, update, weights = commit(
      self._fragments[p], self.committed[p], self._arrivals.pop(p), what, self._config
    )
    self.committed[p] = dataclasses.replace(new, state=state)
    if update is not None:
      self._update[p] = update
    return weights

  def install(self, what: InstallValue, state: FragmentState) -> None:
    """Takes a value that a learner gave back; the momentum stays that of an older round."""
    p, value = what.fragment, what.content
    self._update.pop(p, None)
    old = self.committed[p]
    self.committed[p] = dataclasses.replace(old, state=state, value=value, published_value=value)

  def with_payload(self, publish: Publish) -> Publish:
    """As an update to the version before if that is asked for, and known; else the whole value."""
    update = self._update.get(publish.fragment)
    if publish.base_version >= 0 and update is not None:
      return replace(publish, codec=update[0], payload=update[1])
    payload = codec.encode(self.committed[publish.fragment].published_value, "f32")
    return replace(publish, base_version=-1, codec="f32", payload=payload)

  def arrays(self) -> dict[str, np.ndarray]:
    """All that is committed, by name: "3/value". Vectors are never written again: no copies."""
    found: dict[str, np.ndarray] = {}
    for p, c in self.committed.items():
      found[f"{p}/value"] = c.value
      if c.published_value is not c.value:
        found[f"{p}/published_value"] = c.published_value
      if c.momentum is not None:
        found[f"{p}/momentum"] = c.momentum
    return found


def _loaded(store: FragmentStore, fragment: int) -> Committed:
  found = store.load(fragment)
  if found is None:
    raise ValueError(f"fragment {fragment}: not in the store. Fix: save its first value there.")
  return found
