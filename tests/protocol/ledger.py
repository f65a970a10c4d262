"""Plays the parameters of a virtual run: which inner steps are in which copy of which fragment.

Follows what stand-ins for vectors are told, never the reducers' own counters, and fails at once
when a step is merged twice on the way to a value, vanishes, or is counted wrongly. A value is known
by the round that made it, and a step by its learner, incarnation and number: so rollbacks and
revivals need no rule of their own. Who is revived has the unmerged steps of the life that recorded
them.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping

from ddiloco.config import SyncConfig
from ddiloco.protocol import events
from ddiloco.protocol.events import Commit
from ddiloco.protocol.messages import INITIAL, NOTHING, FragmentState, Publish, Push
from ddiloco.protocol.values import Frozen, replace

Step = tuple[int, int, int]  # learner, incarnation, number
Steps = tuple[Step, ...]


class Delta(Frozen):
  """The payload of a push: these steps, as a change of the value that round `base` made."""

  steps: Steps
  base: int
  factor: float = 1.0  # what poisons it


class Staged(Frozen):
  """A value on its way into the parameters: what round made it, and what it is to them."""

  round: int
  mode: str
  included: bool


class Copy(Frozen):
  """One fragment in a learner's parameters: a value, and own steps that are not merged."""

  base: int = NOTHING  # round that made the value
  known: int = NOTHING  # and the newest one received; only in a part of a snapshot
  mine: Steps = ()
  cut: Delta | None = None  # the newest push, its steps the first of `mine`
  merged: frozenset[Step] = frozenset()
  discarded: frozenset[Step] = frozenset()


class Parameters(Frozen):
  """All that a learner has; its whole past is in `trained`, former lives included."""

  copies: Mapping[int, Copy]
  trained: Steps = ()


class Ledger:
  def __init__(self, sync: SyncConfig, tokens_per_step: int = 10):
    self.sync, self.tokens_per_step = sync, tokens_per_step
    fragments = range(sync.num_fragments)
    # By fragment and round: what is in the value, which value it was made from, its version.
    self.contents: dict[tuple[int, int], frozenset[Step]] = {}
    self.bases: dict[tuple[int, int], int] = {}
    self.versions: dict[tuple[int, int], int] = {}
    for p in fragments:
      self.contents[p, INITIAL], self.bases[p, INITIAL] = frozenset(), NOTHING
      self.versions[p, INITIAL] = 0
    self.held = dict.fromkeys(fragments, INITIAL)  # round of the value that its shard has
    self.taken_in: dict[tuple[int, int, int], Delta] = {}
    self.drains: set[tuple[int, int]] = set()  # rounds begun where all that the shard hears leave
    self.forfeited: collections.Counter = collections.Counter()  # by cause: overwritten, not merged

  def new(self) -> Parameters:
    return Parameters({p: Copy() for p in range(self.sync.num_fragments)})

  # --- learners -----------------------------------------------------------------------------------

  def step(self, actor) -> None:
    """One more inner step is in every fragment."""
    old = actor.parameters
    step = (actor.number, actor.incarnation, len(old.trained))
    copies = {p: replace(c, mine=(*c.mine, step)) for p, c in old.copies.items()}
    actor.parameters = Parameters(copies, (*old.trained, step))

  def copy_out(self, actor, p: int) -> Delta:
    """What a push has of the fragment as it is now."""
    copy = actor.parameters.copies[p]
    delta = Delta(copy.mine, copy.base)
    self._change(actor, p, cut=delta)
    return delta

  def check_push(self, actor, said: events.CopyOut) -> None:
    """What is said of a push that was just cut."""
    copy = actor.parameters.copies[said.fragment]
    assert said.steps == len(copy.mine) > 0, f"push says {said.steps} steps, holds {copy.mine}"
    assert said.tokens == said.steps * self.tokens_per_step
    assert said.base_round == copy.base
    assert said.version == self.versions[said.fragment, copy.base]

  def stage(self, known: int, publish: Publish) -> None:
    """A learner that has the value of round `known` takes up another one."""
    key = publish.fragment, publish.round
    assert self.versions[key] == publish.version
    if publish.payload is None:
      assert publish.round == known, "it goes back to another base"
    elif publish.base_round != NOTHING:
      assert self.bases[key] == known, "an update to a value it does not have"

  def apply(self, actor, p: int, staged: Staged) -> None:
    copy, content = actor.parameters.copies[p], self.contents[p, staged.round]
    mine, merged = copy.mine, copy.merged
    if staged.included:
      taken = copy.cut.steps
      assert content.issuperset(taken), "my newest cut is not in it, but it says so"
      assert mine[: len(taken)] == taken
      mine, merged = mine[len(taken) :], merged.union(taken)
    discarded = copy.discarded
    if staged.mode not in events.KEEPS_WORK:
      lost = [] if staged.mode == "mix" else [s for s in mine if s not in content]
      self.forfeited["refused" if staged.round == copy.base else "overwritten"] += len(lost)
      mine, discarded = (), discarded.union(mine)
    twice = content.intersection(mine)
    assert not twice, f"keeps steps of fragment {p} that are merged already: {sorted(twice)}"
    fate = {"mine": mine, "merged": merged, "discarded": discarded}
    self._change(actor, p, base=staged.round, cut=None, **fate)

  def _change(self, actor, p: int, **changes) -> None:
    copies = dict(actor.parameters.copies)
    copies[p] = replace(copies[p], **changes)
    actor.parameters = replace(actor.parameters, copies=copies)

  def check(self, actor, p: int) -> None:
    """Every step is merged, discarded or still local, and the reducer counts the same."""
    f, c, size = actor.state.fragments[p], actor.parameters.copies[p], self.tokens_per_step
    trained = actor.parameters.trained
    assert len(c.mine) + len(c.merged) + len(c.discarded) == len(trained), "a step vanished"
    assert c.merged.union(c.discarded, c.mine) == set(trained)
    assert actor.state.trained_tokens == len(trained) * size
    assert (f.round, f.steps, f.tokens) == (c.base, len(c.mine), len(c.mine) * size)
    assert f.discarded_tokens == len(c.discarded) * size
    assert f.acknowledged_tokens == len(c.merged) * size

  def lost_steps(self, actor, p: int) -> int:
    """Steps of all its lives, as far as it knows, that the fragment's newest value lacks."""
    return len(set(actor.parameters.trained) - self.contents[p, self.held[p]])

  # --- shards -------------------------------------------------------------------------------------

  def take_in(self, push: Push) -> None:
    key = push.fragment, push.round, push.learner
    assert key not in self.taken_in, f"taken in twice: {key}"
    self.taken_in[key] = push.payload.content

  def commit(self, commit: Commit) -> None:
    """These are merged; `hold` says when it counts."""
    p, base = commit.fragment, self.held[commit.fragment]
    assert len(set(commit.learners)) == len(commit.learners) > 0
    assert len(commit.learners) >= self.sync.min_quorum or (p, commit.round) in self.drains
    assert (p, commit.round) not in self.contents and commit.round > base, "rounds only grow"
    self.merge(commit, zip(commit.learners, commit.steps, commit.tokens, strict=True))

  def merge(self, commit: Commit, work: Iterable[tuple[int, int, int]]) -> None:
    """Of this commit count the pushes of these learners, with so many steps and tokens."""
    p, base = commit.fragment, self.held[commit.fragment]
    content = set(self.contents[p, base])
    for m, steps, tokens in work:
      delta = self.taken_in[p, commit.round, m]
      assert delta.base == base, "delta of another base"
      assert (steps, tokens) == (len(delta.steps), len(delta.steps) * self.tokens_per_step)
      assert content.isdisjoint(delta.steps), f"merged twice: {delta}"
      content.update(delta.steps)
    self.contents[p, commit.round], self.bases[p, commit.round] = frozenset(content), base
    self.versions[p, commit.round] = self.versions[p, base] + 1
    assert commit.version == self.versions[p, commit.round], "versions go up one by one"

  def adopt(self, state: FragmentState, given: int) -> None:
    assert state.last_round == given > self.held[state.index]

  def hold(self, state: FragmentState) -> None:
    """From now on this is what its shard has, and what it says of it must be true."""
    key = state.index, state.last_round
    assert state.version == self.versions[key]
    assert state.merged_tokens == len(self.contents[key]) * self.tokens_per_step
    self.held[state.index] = state.last_round

  # --- cuts ---------------------------------------------------------------------------------------

  def stems_from(self, p: int, round_id: int, ancestor: int) -> bool:
    while round_id > ancestor:
      round_id = self.bases[p, round_id]
    return round_id == ancestor

  def check_cut(self, learners: Mapping[int, tuple], fragments: Mapping[int, tuple]) -> None:
    """Nobody knows of anything that another did only after recording its state.

    `learners` has incarnation and parameters, `fragments` the owner's incarnation and the value.
    """
    for p, (born, state) in fragments.items():
      content = self.contents[p, state.last_round]
      for m, (incarnation, parameters) in learners.items():
        copy = parameters.copies[p]
        lost = copy.known < born << 24  # by an earlier life of the shard: it is regained, or lost
        known = self.stems_from(p, state.last_round, copy.known)
        assert known or lost, f"learner {m} has fragment {p} of {copy.known}, not {state}"
        pushed = (
          set(parameters.trained).difference(copy.mine).union(copy.cut.steps if copy.cut else ())
        )
        early = {s for s in content if s[:2] == (m, incarnation)} - pushed
        assert not early, f"fragment {p} has steps {sorted(early)}, which learner {m} never pushed"
