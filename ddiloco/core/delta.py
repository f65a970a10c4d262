"""Both ends of a delta's way: the learner that makes it, and the shard that merges it.

delta = base - local: the published value that the learner received last, minus its local value.
`Deltas` has a learner's vectors: its pushes, and the changes that a new version brings. `Merger`
has a shard's vectors: it takes pushes, makes a fragment's new value (`commit`), and encodes the
update for the learners.

A push stays in the wire codec until the commit that merges it; its norms are computed when it
arrives. Sums run over learners in ascending order, so that a commit is bitwise reproducible
whatever order pushes arrived in, and on any number of threads. Replay runs the same code in the
same order, and so gets the same bits.

All vectors are flat f32 [size] of one fragment. A learner's vectors are never written again, so
that a snapshot may keep them without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np

from ddiloco.config import Config, SyncConfig
from ddiloco.core import codec, outer, passes
from ddiloco.core.codec import Encoded
from ddiloco.core.fragments import Fragment
from ddiloco.core.passes import Share, Vectors
from ddiloco.protocol import rules
from ddiloco.protocol.actions import ReadDone
from ddiloco.protocol.events import Commit
from ddiloco.protocol.messages import INITIAL, MADE, NOTHING, FragmentState, Publish, Push, Value
from ddiloco.protocol.values import Frozen, replace

# --- A learner's end

_GROUPS = ("base", "sent", "residual", "rounding")  # a learner's vectors, as a snapshot names them


class Deltas:
  """A learner's vectors, by fragment: its base, and its own pushes."""

  def __init__(self, sync: SyncConfig):
    self.share: Share = map  # runs the chunks, on some threads
    self._sync = sync
    self.base: dict[int, np.ndarray] = {}  # the published value received last
    self.sent: dict[int, np.ndarray] = {}  # the payload of my outstanding push
    self.residual: dict[int, np.ndarray] = {}  # lost to rounding; only with error_feedback
    self.rounding: dict[int, np.ndarray] = {}  # the residual if the outstanding push is merged

  def push(self, fragment: int, local: np.ndarray, factor: float) -> np.ndarray:
    """The payload of a push: base - local in the wire codec; keeps it until a version answers.

    `factor` other than 1: the fault plan poisons the push.
    """
    name, base, size = self._sync.push_codec, self.base[fragment], local.size
    encoded = codec.empty(size, name)
    residual = self.residual.get(fragment)
    rounding = np.empty(size, np.float32) if self._sync.error_feedback else None

    def chunk(here: slice) -> None:
      delta = base[here] - local[here]
      if factor != 1.0:
        with np.errstate(over="ignore", invalid="ignore"):
          delta *= np.float32(factor)
      if residual is not None:
        delta += residual[here]
      decoded = np.empty_like(delta)
      codec.encode_chunk(delta, encoded, size, here.start, decoded)
      if rounding is not None:
        codec.decode_chunk(encoded, size, here.start, decoded)
        np.subtract(delta, decoded, out=rounding[here])

    passes.over_chunks(size, chunk, self.share)
    self.sent[fragment] = encoded.payload
    if rounding is not None:
      self.rounding[fragment] = rounding
    return encoded.payload

  def made(self, publish: Publish, value: np.ndarray) -> Publish | None:
    """A published initial value with `value`, made here, as its payload; None if bits differ."""
    if bytes(publish.payload) != codec.digest(value):
      return None
    return replace(publish, codec="f32", payload=codec.encode(value, "f32"))

  def receive(self, publish: Publish, size: int, mode: str, included: bool) -> np.ndarray:
    """The vector that `apply` adds for a published version of `size` values; see `stage`.

    A publish without a payload means that my push was rejected: its fragment goes back to the base.

    Raises:
      CodecError: the payload does not fit its codec and size.
    """
    p = publish.fragment
    if publish.payload is None:
      return self.stage(p, self.base[p], mode, included)
    payload = np.frombuffer(publish.payload, np.uint8)
    if publish.base_round == NOTHING:
      return self.stage(p, codec.decode(payload, size, publish.codec), mode, included)
    encoded = codec.checked(payload, size, publish.codec)
    base, value = self.base[p], np.empty(size, np.float32)

    def chunk(here: slice) -> None:
      codec.decode_chunk(encoded, size, here.start, value[here])
      np.add(base[here], value[here], out=value[here])

    passes.over_chunks(size, chunk, self.share)
    return self.stage(p, value, mode, included)

  def stage(self, fragment: int, value: np.ndarray, mode: str, included: bool) -> np.ndarray:
    """The vector that `apply` adds for a version g': overwrite g', mix (1-a) g', rebase g' - ref,
    halve g' - ref / 2; reset g', without the residual.

    `ref` is the part of my parameters that is already in g': the base, minus my push if it is
    merged in g', as the shard decoded it. The rest of the local value, rounding errors included,
    stays, or half of it. From now on the base is g'.
    """
    base = self.base.get(fragment)
    sent, rounding = self.sent.pop(fragment, None), self.rounding.pop(fragment, None)
    if included and rounding is not None:
      self.residual[fragment] = rounding
    self.base[fragment] = value
    if mode == "reset":
      self.residual.pop(fragment, None)
    if not self.keep(mode):
      return value
    if mode == "mix":
      return np.float32(1 - self._sync.mix_alpha) * value
    assert base is not None, "what keeps work has a base"
    merged = None
    if included:
      assert sent is not None, "what is included was sent"
      merged = codec.checked(sent, value.size, self._sync.push_codec)
    shift, keep = np.empty_like(value), np.float32(self.keep(mode))

    def chunk(here: slice) -> None:
      known, out = base[here], shift[here]
      if merged is not None:
        codec.decode_chunk(merged, value.size, here.start, out)
        known = known - out
      np.subtract(value[here], known if keep == 1 else keep * known, out=out)

    passes.over_chunks(value.size, chunk, self.share)
    return shift

  def keep(self, mode: str) -> float:
    """Share of the local value that `apply` keeps."""
    return {"mix": self._sync.mix_alpha, "rebase": 1.0, "halve": 0.5}.get(mode, 0.0)

  def take_moments(self, payload: np.ndarray, size: int) -> np.ndarray:
    """Moments [size] out of a payload that a peer has sent.

    Raises:
      CodecError: the moments are another inner optimizer's, damaged, or not finite.
    """
    return codec.finite(payload, size)

  # --- for a snapshot -----------------------------------------------------------------------------

  def arrays(self) -> dict[str, np.ndarray]:
    """All vectors, by name: "base/3"."""
    groups = {name: getattr(self, name) for name in _GROUPS}
    return {f"{name}/{p}": v for name, each in groups.items() for p, v in each.items()}

  def restore(self, arrays: dict[str, np.ndarray]) -> None:
    """Takes back the vectors that `arrays` gave; ignores other names."""
    for name, value in arrays.items():
      group, _, fragment = name.partition("/")
      if group in _GROUPS:
        getattr(self, group)[int(fragment)] = value


# --- A shard's end: committed fragments


class Committed(Frozen):
  """One fragment after its newest commit. Vectors are flat f32 [size].

  They are never written again, except in place, where nothing else reads them (`Merger.commit`).
  """

  state: FragmentState  # version, merged tokens, ...; no round under way
  value: np.ndarray  # the global value
  published_value: np.ndarray  # the value that learners have: `value`, or with a codec's rounding
  momentum: np.ndarray | None  # of the outer optimizer, None without
  momentum_round: int = -1  # that made the momentum; older if a learner gave back only the value

  def exact(self, publish_codec: str) -> bool:
    """Whether the value is the outer optimizer's own; False: the learners', with this codec's
    rounding, which a buddy or a learner gave back."""
    given_back = self.value is self.published_value and self.state.version > 0
    return publish_codec == "f32" or not given_back


# By fragment, its newest commit, which is replaced as a whole: an item of a dict is never half set.
Store = MutableMapping[int, Committed]


def new_fragment(fragment: Fragment, value: np.ndarray) -> Committed:
  """Version 0 of a fragment: its initial value, before any round."""
  return Committed(FragmentState(fragment.index), value, value, None)


MADE_FROM = 1 << 22  # from so many values on, making a fragment's initial value beats sending it
FEWEST_COMPARED = 4096  # values; from so many on, cosines of random directions are below 0.02


class Measured(Frozen):
  """A push in the wire codec, and its measurements."""

  push: Encoded
  squares: np.ndarray  # f64 [pieces], of the values of each piece
  sample: np.ndarray  # f32, `passes.sample`: the values by which directions are compared

  @property
  def norm(self) -> float:
    """The norm of the whole push."""
    return math.sqrt(float(self.squares.sum()))


def measure(fragment: Fragment, push: Encoded, share: Share = map) -> Measured:
  """The measurements of one more push, for the round, the screening and the merge."""
  alone = passes.Sum(fragment, [push], np.ones((1, len(fragment.pieces)), np.float32))
  return Measured(push, passes.squares(alone, share), passes.sample(alone))


class Merged(Frozen):
  """The merge of a commit's pushes, as numbers for the log.

  Attributes:
    weights: f64 [M], the learners'.
    length: of the merged outer gradient, over the mean of the pushes'; None if these are zero.
    sample: f32, of the merged outer gradient, at the places of `Measured.sample`.
    rho: cosine of the merged outer gradient with the fragment's previous one; None without one.
  """

  weights: np.ndarray
  length: float | None = None
  sample: np.ndarray = np.empty(0, np.float32)
  rho: float | None = None

  def after(self, before: Merged | None) -> Merged:
    """This merge with `rho`, its cosine with the merge of the commit before."""
    if before is None or self.sample.size < FEWEST_COMPARED:
      return self
    norms = [math.sqrt(passes.dot(each, each)) for each in (self.sample, before.sample)]
    if not all(norms):
      return self
    cosine = passes.dot(self.sample, before.sample) / math.prod(norms)
    return replace(self, rho=cosine)


def commit(
  fragment: Fragment,
  old: Committed,
  pushes: Mapping[int, Measured],
  what: Commit,
  config: Config,
  share: Share = map,
  in_place: bool = False,
) -> tuple[Vectors, Encoded | None, Merged]:
  """The fragment after the outer step on the merged pushes of `what.learners`.

  With `in_place` the new vectors overwrite the old ones; if the commit fails, both are invalid.

  Returns:
    (the new vectors; the update as learners get it, None if they get values whole; the merge in
    numbers).
  """
  chosen = [pushes[m] for m in what.learners]
  weights = learner_weights(what, config)
  total, norm = combine(fragment, chosen, weights, share)
  optimizer = outer.at(config.outer, what.progress)
  momentum = outer.init(fragment.size, optimizer) if old.momentum is None else old.momentum
  before, name = Vectors(old.value, old.published_value, momentum), config.sync.publish_codec
  sample = passes.sample(total)
  new, update = passes.step(total, before, optimizer, name, share, in_place)
  norms = [push.norm for push in chosen]
  length = norm * len(norms) / sum(norms) if any(norms) else None
  return new, update, Merged(weights, length, sample)


def combine(
  fragment: Fragment, pushes: Sequence[Measured], weights: np.ndarray, share: Share = map
) -> tuple[passes.Sum, float]:
  """The merge rule: the merged outer gradient of these pushes, whose `weights` are f64 [M].

  A rule that is no weighted sum gives a `passes.Sum` that reads chunks in its own way.

  Returns:
    (a sum of the pushes, with the factor `stretch` of each piece; the norm of both together).
  """
  squares = np.stack([push.squares for push in pushes])
  coefficients = outer.Coefficients(fragment, squares, weights)
  total = passes.Sum(fragment, [push.push for push in pushes], coefficients.units)
  summed = passes.squares(total, share)
  total.stretch = coefficients.stretch(summed)
  return total, math.sqrt(float(total.stretch**2 @ summed))


def learner_weights(what: Commit, config: Config) -> np.ndarray:
  """Weights [M] f64 of the learners of a commit, with bounds that no claim exceeds.

  Stale work weighs less than its steps and tokens claim (`rules.worth_steps`), and a learner's
  share is bounded (`outer.bounded_shares`).
  """
  steps = [rules.worth_steps(s, config.sync) for s in what.steps]
  tokens = [t * c / s for t, s, c in zip(what.tokens, what.steps, steps)]
  return outer.bounded_shares(outer.token_weights(steps, tokens), what.step_tokens)


# --- All vectors of a shard: committed values, pushes that have arrived, updates to send


class Merger:
  """The vectors of one shard. Nothing here decides, stores or sends.

  Args:
    fragments: the shard's, by index.
    store: holds their newest commits.
    config: the run's.
    in_place: commits may overwrite vectors that were not lent: if one fails, the shard ends, and
      the store with it.

  Attributes:
    committed: by fragment, the newest commit.
    arrivals: by fragment, the round under way, and its pushes by learner: also those not accepted
      later.
    config: the run's.
    share: runs the passes, on some threads.
  """

  def __init__(
    self, fragments: Mapping[int, Fragment], store: Store, config: Config, in_place: bool = False
  ):
    self.committed: dict[int, Committed] = {p: store[p] for p in fragments}
    self._fragments, self.config = fragments, config
    self.arrivals: dict[int, tuple[int, dict[int, Measured]]] = {}
    self._update: dict[int, Encoded | None] = {}  # by fragment, of the newest commit
    self._merged: dict[int, Merged] = {}  # by fragment, of the newest commit
    self._initial: dict[int, np.ndarray] = {}  # digests of initial values that receivers make
    self._in_place = in_place
    self._lent: set[int] = set()  # fragments whose vectors other code may still read
    self.share: Share = map

  def prepare(self, fragment: int) -> str:
    """Compiles the kernels for this fragment if it is large; see `passes.compile_for`."""
    reason = passes.compile_for(self._fragments[fragment], self.config)
    if self._is_made(fragment):
      digest = codec.digest(self.committed[fragment].value)
      self._initial[fragment] = np.frombuffer(digest, np.uint8)
    return reason

  def _is_made(self, fragment: int) -> bool:
    """Whether this fragment has its initial value, and receivers make it instead of getting it."""
    untrained = self.committed[fragment].state.last_round == INITIAL
    return untrained and self._fragments[fragment].size >= MADE_FROM

  def change(self, fragment: int) -> Encoded:
    """The payload of the newest version for learners: the update; the whole value if none."""
    update = self._update.get(fragment)
    return self._whole(fragment) if update is None else update

  def _whole(self, fragment: int) -> Encoded:
    return Encoded("f32", self._lend(fragment).published_value.view(np.uint8))

  def take_in(self, push: Push, now: float) -> ReadDone:
    """Measures a push of a round under way here, so that the reducer can judge it, and keeps it
    until that round's commit, or until the first push of a later round."""
    fragment, arrivals = self._fragments[push.fragment], self.arrivals.get(push.fragment)
    if arrivals is None or arrivals[0] != push.round:
      arrivals = self.arrivals[push.fragment] = push.round, {}
    _, pushes = arrivals
    if push.codec != (own := self.config.sync.push_codec):  # it would cost more to merge
      return ReadDone(push, now, fault=f"codec {push.codec!r}: must be {own!r}, as in the config")
    try:
      encoded = codec.checked(push.payload, fragment.size, own)
    except codec.CodecError as error:
      return ReadDone(push, now, fault=str(error))
    mine = pushes[push.learner] = measure(fragment, encoded, self.share)
    compared = pushes if mine.sample.size >= FEWEST_COMPARED else {}  # of few it is chance
    products = {m: passes.dot(each.sample, mine.sample) for m, each in compared.items()}
    return ReadDone(push, now, norm=mine.norm, products=products)

  def take_back(self, value: Value, now: float) -> ReadDone:
    """Decodes a value that this shard has lost and that a learner gives back."""
    try:
      flat = codec.finite(value.payload, self._fragments[value.publish.fragment].size)
    except codec.CodecError as error:
      return ReadDone(value, now, fault=str(error))
    return ReadDone(value, now, content=flat.copy())  # `flat` is in the message's memory

  def commit(self, what: Commit, state: FragmentState) -> Merged:
    """Merges the round's pushes; the fragment's newest commit is the result, with this state.

    If only this shard has the vectors, it overwrites them: a commit would need as much fresh memory
    as the fragment has, and touching that memory takes longer than the arithmetic.
    """
    p = what.fragment
    in_place = self._in_place and p not in self._lent
    self._lent.discard(p)  # lent vectors are replaced, not overwritten
    self._update.pop(p, None)
    (_, pushes), fragment = self.arrivals.pop(p), self._fragments[p]
    old, config = self.committed[p], self.config
    new, update, merged = commit(fragment, old, pushes, what, config, self.share, in_place)
    self.committed[p] = Committed(state, *new, what.round)
    self._update[p] = update
    self._merged[p] = merged.after(self._merged.get(p))
    return self._merged[p]

  def install(self, value: Any, state: FragmentState) -> None:
    """Takes a value that a learner gave back, and forgets the pushes of the round under way; the
    momentum stays as it is, of an older round."""
    p = state.index
    self.arrivals.pop(p, None)
    self._update.pop(p, None)
    old = self.committed[p]
    self.committed[p] = replace(old, state=state, value=value, published_value=value)

  def with_payload(self, publish: Publish) -> Publish:
    """The publish with its payload: the update, if asked for and known; else the whole value.

    For an initial value that its receiver makes (`MADE`) the payload is the digest.
    """
    if publish.codec == MADE and publish.fragment in self._initial:
      return replace(publish, payload=self._initial[publish.fragment])
    update = self._update.get(publish.fragment)
    if publish.base_round != NOTHING and update is not None:
      return replace(publish, codec=update.codec, payload=update.payload)
    whole = self._whole(publish.fragment)
    return replace(publish, base_round=NOTHING, codec=whole.codec, payload=whole.payload)

  def arrays(self) -> dict[str, np.ndarray]:
    """All committed vectors, by name: "3/value". No copies: see `_lend`. In the order of the next
    commits: what is written before its next commit is not kept beside the new vectors."""
    found: dict[str, np.ndarray] = {}
    for p in sorted(self.committed, key=lambda p: self.committed[p].state.global_step):
      c = self._lend(p)
      found[f"{p}/value"] = c.value
      if c.published_value is not c.value:
        found[f"{p}/published_value"] = c.published_value
      if c.momentum is not None:
        found[f"{p}/momentum"] = c.momentum
    return found

  def _lend(self, fragment: int) -> Committed:
    """The newest commit, which other code may read at any time: the next one uses other memory."""
    self._lent.add(fragment)
    return self.committed[fragment]
