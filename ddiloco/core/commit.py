"""A shard's vectors, and one commit: pushes in, a fragment's new value out, as replay does it too.

A push stays in the wire codec until the commit that merges it; its norms are taken when it arrives.
Sums run over learners in ascending order, so that a commit is bitwise reproducible whatever order
pushes arrived in, and on any number of threads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from ddiloco.config import Config
from ddiloco.core import codec, merge, outer, passes
from ddiloco.core.codec import Encoded
from ddiloco.core.fragments import Fragment
from ddiloco.core.passes import Share, Vectors
from ddiloco.protocol import rules
from ddiloco.protocol.actions import Accept, Commit, InstallValue, Received
from ddiloco.protocol.messages import INITIAL, MADE, Publish, Push, Value
from ddiloco.protocol.states import FragmentState
from ddiloco.protocol.values import replace

# --- Committed fragments, and where they live, so that they outlive the shard's incarnation


@dataclasses.dataclass(frozen=True)
class Committed:
  """One fragment after its newest commit. Vectors are flat f32 [size].

  They are not written again, unless the store does not outlive its shard and nothing else reads
  them (`Merger.commit`).
  """

  state: FragmentState  # version, merged tokens, who took part; no round under way
  value: np.ndarray  # the global value
  published_value: np.ndarray  # what learners were sent: `value`, or what a lossy codec made of it
  momentum: np.ndarray | None  # of the outer optimizer, None without
  momentum_round: int = -1  # that made the momentum; an older one if only the value was given back

  @property
  def exact(self) -> bool:
    """Whether the value is the optimizer's own, and not what learners were sent of it."""
    return self.value is not self.published_value or not self.state.version


class FragmentStore(Protocol):
  """Keeps the newest commit of every fragment; replaced as a whole, never half."""

  outlives: bool  # the shard: what it has must be whole also if a commit fails half-way

  def load(self, fragment: int) -> Committed | None: ...

  def save(self, committed: Committed) -> None: ...


class MemoryStore:
  """Lives as long as the process: enough for roles that are threads of it."""

  def __init__(self, outlives: bool = True) -> None:
    self.outlives = outlives
    self._fragments: dict[int, Committed] = {}  # one operation on a dict is never half done

  def load(self, fragment: int) -> Committed | None:
    return self._fragments.get(fragment)

  def save(self, committed: Committed) -> None:
    self._fragments[committed.state.index] = committed


def new_fragment(fragment: Fragment, value: np.ndarray) -> Committed:
  """Version 0 of a fragment: its initial value, before any round."""
  return Committed(FragmentState(fragment.index), value, value, None)


MADE_FROM = 1 << 22  # values of an initial fragment that are made sooner than sent
FEWEST_COMPARED = 4096  # values; cosines of random directions are below 0.02 then


@dataclasses.dataclass(frozen=True)
class Measured:
  """Of one push."""

  squares: np.ndarray  # f64 [pieces], `passes.squares`
  sample: np.ndarray  # f32, `passes.sample`: what its direction is compared by

  @property
  def norm(self) -> float:
    """Of the whole push."""
    return math.sqrt(float(self.squares.sum()))


class ReceivedPushes:
  """The outer gradients of one round so far, as they came."""

  def __init__(self, fragment: Fragment, round: int):
    self.round = round
    self.pushes: dict[int, tuple[Encoded, Measured]] = {}  # by learner
    self._samples: dict[int, np.ndarray] = {}  # also of those that may not be accepted
    self._fragment = fragment
    self._compared = merge.compared_pieces(fragment)

  def measure(self, push: Encoded, share: Share = map) -> Measured:
    """What the round, the screening and the merge need to know of one more push.

    Raises:
      CodecError: it holds a code that no encoder writes.
    """
    squares = passes.squares(self._fragment, push, share)
    return Measured(squares, passes.sample(self._fragment, push, self._compared))

  def add(self, learner: int, push: Encoded, measured: Measured) -> None:
    """One more push, and what `measure` says of it."""
    self.pushes[learner] = push, measured

  def products(self, learner: int, measured: Measured) -> dict[int, float]:
    """Inner products of its sample with those that were measured before, and with itself.

    None where there are so few values that directions are chance.
    """
    mine = self._samples.setdefault(learner, measured.sample)
    if mine.size < FEWEST_COMPARED:
      return {}
    return {m: passes.dot(each, mine) for m, each in self._samples.items()}


def commit(
  fragment: Fragment,
  old: Committed,
  arrivals: ReceivedPushes,
  what: Commit,
  config: Config,
  share: Share = map,
  in_place: bool = False,
) -> tuple[Committed, Encoded | None, np.ndarray]:
  """The fragment after the outer step on the merged pushes of `what.learners`.

  In place, its vectors are written over the old ones; if it fails, neither means anything.

  Returns:
    (the new value; its state lacks the counters, which are the protocol's; the update as learners
    get it, None if they get values whole; the learners' weights [M]).
  """
  chosen = [arrivals.pushes[m] for m in what.learners]
  weights = learner_weights(what, config)
  squares = np.stack([measured.squares for _, measured in chosen])
  directions = merge.Directions(fragment, squares, weights)
  total = passes.Sum(fragment, [push for push, _ in chosen], directions.units)
  stretch = directions.stretch(passes.sum_squares(total, share))
  optimizer = outer.at(config.outer, what.progress)
  momentum = outer.init(fragment.size, optimizer) if old.momentum is None else old.momentum
  before, name = Vectors(old.value, old.published_value, momentum), config.sync.publish_codec
  after = None
  if in_place and _writable(before):
    apart = name != "f32" and old.value is old.published_value
    after = before._replace(value=np.empty_like(old.value)) if apart else before
  new, update = passes.step(total, stretch, before, optimizer, name, share, after)
  state = FragmentState(fragment.index, what.version, last_round=what.round)
  committed = Committed(state, new.value, new.published_value, new.momentum, what.round)
  return committed, update, weights


def _writable(vectors: Vectors) -> bool:
  """Not so where they came out of a file or a message."""
  return all(each is None or each.flags.writeable for each in vectors)


def learner_weights(what: Commit, config: Config) -> np.ndarray:
  """Weights [M] f64 of the learners of a commit, bounded whatever they claim.

  Stale work weighs less than its steps and tokens say (`rules.worth_steps`), and no learner has
  more than its share (`merge.bounded_shares`).
  """
  steps = [rules.worth_steps(s, config.sync) for s in what.steps]
  tokens = [t if s == c else t * c / s for t, s, c in zip(what.tokens, what.steps, steps)]
  step_tokens = what.step_tokens or [config.tokens_per_step(m) for m in what.learners]
  return merge.bounded_shares(merge.token_weights(steps, tokens), step_tokens)


# --- All that a shard has of vectors: what is committed, what has arrived, what goes out


class Merger:
  """The vectors of one shard. Nothing here decides, stores or sends.

  Args:
    fragments: the shard's, by index.
    store: holds their newest commits.
    config: the run's.

  Attributes:
    committed: by fragment, the newest commit.
    share: on which threads its passes run.
  """

  def __init__(self, fragments: Mapping[int, Fragment], store: FragmentStore, config: Config):
    self.committed: dict[int, Committed] = {p: _loaded(store, p) for p in fragments}
    self._fragments, self._config = fragments, config
    self._arrivals: dict[int, ReceivedPushes] = {}  # of the round under way
    self._update: dict[int, Encoded] = {}  # the newest
    self._initial: dict[int, np.ndarray] = {}  # digests of the initial values that are made
    self._in_place = not store.outlives
    self._lent: set[int] = set()  # fragments whose vectors others may read
    self.share: Share = map

  def prepare(self, fragment: int) -> str:
    """Compiles what this fragment is worked on with, if it is large; see `passes.compile_for`."""
    reason = passes.compile_for(self._fragments[fragment], self._config.outer)
    committed = self.committed[fragment]
    if committed.state.last_round == INITIAL and self._is_made(fragment):
      self._initial[fragment] = np.frombuffer(codec.digest(committed.value), np.uint8)
    return reason

  def _is_made(self, fragment: int) -> bool:
    """Whether its initial value is worth making instead of sending."""
    return self._fragments[fragment].size >= MADE_FROM

  def change(self, fragment: int) -> Encoded:
    """What learners get of its newest version: the update, or the value if that goes out whole."""
    update = self._update.get(fragment)
    return self._whole(fragment) if update is None else update

  def _whole(self, fragment: int) -> Encoded:
    return Encoded("f32", codec.encode(self._lend(fragment).published_value, "f32"))

  def take_in(self, push: Push, now: float) -> Received:
    """Measures a push, so that the reducer can judge it."""
    fragment = self._fragments.get(push.fragment)
    if fragment is None or push.payload is None:
      return Received(push, now, fault="no payload, or not a fragment of this shard")
    arrivals = self._arrivals_of(push.fragment, push.round)
    self._arrivals[push.fragment] = arrivals
    try:
      encoded = codec.checked(push.payload, fragment.size, push.codec)
      measured = arrivals.measure(encoded, self.share)
    except codec.CodecError as error:
      return Received(push, now, fault=str(error))
    products, content = arrivals.products(push.learner, measured), (encoded, measured)
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
    return Received(value, now, content=flat.copy())  # the message has the memory it came in

  def accept(self, accept: Accept) -> None:
    """Keeps a push that was taken in until its round ends."""
    self._arrivals_of(accept.fragment, accept.round).add(accept.learner, *accept.content)

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
    """Merges; from now on the fragment is what it makes, with this state. Returns the weights.

    A shard that alone has the vectors writes over them: fresh memory for a commit is as much as the
    fragment, and touching it takes longer than the arithmetic.
    """
    p = what.fragment
    in_place = self._in_place and p not in self._lent
    self._lent.discard(p)  # what was lent is not what will be here
    self._update.pop(p, None)
    arrivals, fragment = self._arrivals.pop(p), self._fragments[p]
    old, config = self.committed[p], self._config
    new, update, weights = commit(fragment, old, arrivals, what, config, self.share, in_place)
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
    """As an update to the version before if that is asked for, and known; else the whole value.

    Of an initial value that its receiver makes, the digest: `MADE`.
    """
    if publish.codec == MADE and publish.fragment in self._initial:
      return replace(publish, payload=self._initial[publish.fragment])
    update = self._update.get(publish.fragment)
    if publish.base_version >= 0 and update is not None:
      return replace(publish, codec=update.codec, payload=update.payload)
    whole = self._whole(publish.fragment)
    return replace(publish, base_version=-1, codec=whole.codec, payload=whole.payload)

  def arrays(self) -> dict[str, np.ndarray]:
    """All that is committed, by name: "3/value". No copies: see `_lend`."""
    found: dict[str, np.ndarray] = {}
    for p in self.committed:
      c = self._lend(p)
      found[f"{p}/value"] = c.value
      if c.published_value is not c.value:
        found[f"{p}/published_value"] = c.published_value
      if c.momentum is not None:
        found[f"{p}/momentum"] = c.momentum
    return found

  def _lend(self, fragment: int) -> Committed:
    """The newest commit, for others to read as long as they like: the next one goes elsewhere."""
    self._lent.add(fragment)
    return self.committed[fragment]


def _loaded(store: FragmentStore, fragment: int) -> Committed:
  found = store.load(fragment)
  if found is None:
    raise ValueError(f"fragment {fragment}: not in the store. Fix: save its first value there.")
  return found
