"""Plays the parameters of a virtual run: which inner steps are in which copy of which fragment.

Follows only the actions, never the reducers' own counters, and fails at once when a step is merged
twice, vanishes, or is counted wrongly. A learner's own progress on a fragment is always one run of
consecutive steps (low, high], because whatever is merged or discarded is its beginning.
"""

from __future__ import annotations

import collections
import dataclasses

from ddiloco.config import SyncConfig
from ddiloco.core.messages import Push
from ddiloco.core.protocol import Accept, Apply, Commit


@dataclasses.dataclass(frozen=True)
class Progress:
  """The payload of a push: these steps of this incarnation, as a change of that version."""

  learner: tuple[int, int]  # number, incarnation
  low: int
  high: int
  base_version: int


class Ledger:
  def __init__(self, sync: SyncConfig):
    self.sync = sync
    # By fragment, by version: the last step of each incarnation of each learner that is in it.
    self.versions: list[list[dict]] = [[{}] for _ in range(sync.num_fragments)]
    self.low: collections.Counter = collections.Counter()  # (learner, fragment) -> step
    self.cuts: dict = {}  # (learner, fragment) -> Progress of the newest cut
    self.merged: collections.Counter = collections.Counter()  # steps
    self.discarded: collections.Counter = collections.Counter()
    self.accepted: dict = {}

  def cut(self, actor, push: Push) -> Progress:
    who = actor.number, actor.incarnation
    low, high = self.low[who, push.fragment], actor.state.step
    assert push.steps == high - low > 0, f"push says {push.steps} steps, holds ({low}, {high}]"
    assert push.tokens == push.steps * actor.world.tokens_per_step
    progress = Progress(who, low, high, push.base_version)
    self.cuts[who, push.fragment] = progress
    return progress

  def accept(self, accept: Accept, push: Push) -> None:
    key = accept.fragment, accept.round, accept.learner
    assert key not in self.accepted, f"accepted twice: {key}"
    self.accepted[key] = push.payload

  def commit(self, commit: Commit) -> None:
    versions = self.versions[commit.fragment]
    assert commit.version == len(versions), f"{commit}: the newest is {len(versions) - 1}"
    assert len(set(commit.learners)) == len(commit.learners) >= self.sync.min_quorum
    content = dict(versions[-1])
    for m in commit.learners:
      progress = self.accepted[commit.fragment, commit.round, m]
      assert progress.base_version == commit.version - 1, "delta of another base"
      assert progress.low >= content.get(progress.learner, 0), f"merged twice: {progress}"
      content[progress.learner] = progress.high
      self.merged[progress.learner, commit.fragment] += progress.high - progress.low
    versions.append(content)

  def apply(self, actor, apply: Apply) -> None:
    who, p = (actor.number, actor.incarnation), apply.fragment
    step = actor.state.step
    inside = self.versions[p][apply.version].get(who, 0)
    low = self.low[who, p]
    if apply.included:
      assert inside == self.cuts[who, p].high, "not my newest cut, but it says so"
      low = inside
    assert inside <= low, f"{who} keeps steps ({low}, {inside}] of fragment {p}: merged already"
    if apply.mode != "rebase":
      self.discarded[who, p] += step - low
      low = step
    self.low[who, p] = low
    self.check(actor, p)

  def check(self, actor, p: int) -> None:
    """Every step is merged, discarded or still local, and the reducer counts the same."""
    who, f = (actor.number, actor.incarnation), actor.state.fragments[p]
    size, step, low = actor.world.tokens_per_step, actor.state.step, self.low[who, p]
    assert f.tokens + f.acknowledged_tokens + f.discarded_tokens == actor.state.trained_tokens
    if not f.incoming:
      assert f.steps == step - low, f"{f.steps} unmerged steps counted, ({low}, {step}] there"
      assert f.discarded_tokens == self.discarded[who, p] * size
      acknowledged = f.acknowledged_tokens // size
      assert acknowledged <= self.merged[who, p]
      assert acknowledged + self.discarded[who, p] + step - low == step, "a step vanished"

  def lost_steps(self, actor, p: int) -> int:
    """Steps of this incarnation that the global fragment would lack if it ended now."""
    return actor.state.step - self.merged[(actor.number, actor.incarnation), p]
