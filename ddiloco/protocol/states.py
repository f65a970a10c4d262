"""The states of a learner and of a shard, and their parts of a snapshot. PURE.

Times are seconds on the role's own clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Self

from ddiloco.config import SyncConfig
from ddiloco.protocol import events, messages, rules
from ddiloco.protocol.actions import LearnerAction, Send, SyncerAction
from ddiloco.protocol.messages import EVALUATOR, INITIAL, MADE, NOTHING, FragmentState, Publish
from ddiloco.protocol.rules import Beliefs
from ddiloco.protocol.values import Frozen, less, put, readable, replace, to_json

# How often for each fragment, in a window of so many sync periods and over all its incarnations, a
# learner may cause work on all others' links: rounds when it leaves, and moments when it joins.
MOST_IN_WINDOW, WINDOW_PERIODS = 3, 8

# --- what each role has heard of each other -------------------------------------------------------
# Pushes and publishes, the messages that move the model, carry their sender's count: of its pushes
# (a learner) or its commits (a shard). A role keeps the greatest count it has heard from each
# sender. A set of captured states is a consistent snapshot if no role has heard a greater count of
# a sender than the sender's captured state has (Mattern 1989). A sender counts only its own
# messages, so a learner that lies can spoil its own part and no other.

VectorClock = Mapping[int, int]  # sender -> count; keys: a learner's number, a shard's `shard_key`


def shard_key(shard: int) -> int:
  """The key of a shard; learners have their numbers, the evaluator is -1."""
  return -2 - shard


def join_clocks(vector_clock: VectorClock, other: VectorClock) -> VectorClock:
  """The vector clock after hearing of `other`: the greater count of each."""
  news = {who: count for who, count in other.items() if count > vector_clock.get(who, 0)}
  return {**vector_clock, **news} if news else vector_clock


def clock_violations(snapshot: Mapping[int, VectorClock]) -> list[tuple[int, int]]:
  """(who, whom): `who` had heard of an act of `whom` from after `whom`'s capture.

  `snapshot` has each participant's vector clock, by key. Empty: the snapshot is consistent.
  """
  return [
    (who, whom)
    for who, vector_clock in sorted(snapshot.items())
    for whom, known in sorted(vector_clock.items())
    if whom in snapshot and known > snapshot[whom].get(whom, 0)
  ]


class _State:
  """What the states of a learner and of a shard have in common."""

  __slots__ = ()
  fragments: Any
  vector_clock: Any

  def with_fragment(self, i: int, **changes: Any) -> Self:
    """The state with these fields of one fragment changed."""
    state: Any = self
    return replace(state, fragments=put(self.fragments, i, replace(self.fragments[i], **changes)))

  def heard(self, who: int, count: int) -> Self:
    """The state after hearing of a sender's count."""
    state: Any = self
    return replace(state, vector_clock=join_clocks(self.vector_clock, {who: count}))


# --- a learner ------------------------------------------------------------------------------------


class Outstanding(Frozen):
  """My push that no publish has answered yet; at most one per fragment."""

  push: messages.Push  # without payload
  at_step: int  # my own step count when the push was copied out


class IncomingVersion(Frozen):
  """A published version on its way onto the devices."""

  publish: Publish  # without payload
  mode: events.Mode
  merged: Outstanding | None  # my push that this version contains
  ready: bool = False


class LearnerFragment(Frozen):
  """One fragment, as this learner has it."""

  shard: int
  version: int = -1  # in the parameters
  round: int = NOTHING  # that made this version: its identity, since version numbers may come twice
  steps_since_sync: int = 0  # from the copy-out if the sync had my push, else from the apply
  steps: int = 0  # in my parameters and not merged yet
  tokens: int = 0  # of these steps
  merged_tokens: int = 0  # of the whole run, as the shard says
  acknowledged_tokens: int = 0  # mine, merged
  discarded_tokens: int = 0  # mine, lost to an overwrite
  base_header: Publish | None = None  # publish of the newest version accepted, without payload
  fresh: bool = False  # its shard has sent me its value, or had none newer than mine
  outstanding: Outstanding | None = None
  pull: messages.Pull | None = None  # asked and not answered yet
  incoming: tuple[IncomingVersion, ...] = ()

  @property
  def here(self) -> bool:
    """Whether it is in the parameters, and its shard had no newer one."""
    return self.fresh and self.version >= 0

  @property
  def newest_version(self) -> int:
    """The newest version accepted."""
    return self.base_header.version if self.base_header else -1

  @property
  def newest_round(self) -> int:
    """The round that made the newest version accepted."""
    return self.base_header.round if self.base_header else NOTHING


class LearnerState(_State, Frozen):
  """A learner, between two events."""

  learner: int
  incarnation: int
  shards: tuple[int, ...]  # the newest incarnation heard of; -1: none yet
  fragments: tuple[LearnerFragment, ...]
  target_tokens: int  # merged from all learners; without shards: trained by me
  trains: bool = True
  step: int = 0  # inner steps of this incarnation and of those it goes on from
  global_step: int = 0  # of the most advanced learner
  trained_tokens: int = 0
  step_seconds: float = 0.0
  stepped_at: float = 0.0  # when the newest step was over
  waited_seconds: float = 0.0  # how long the newest publish waited for the end of a step
  idle_seconds: float = 0.0  # `waited_seconds`, and its second wait, after it was staged
  snapshot: int = 0  # the newest heard of; my state is captured for it
  vector_clock: VectorClock = {}
  donor_seconds: float = 0.0  # how long it waits for a fragment's moments of a peer when it joins
  wants: tuple[int, ...] = ()  # fragments whose moments it still waits for
  staging: tuple[int, ...] = ()  # of these, fragments whose moments are here and being staged
  wants_until: float = 0.0
  ask_at: float = 0.0
  donations: int = 0  # made, in this incarnation
  whole: bool = False  # it cannot make the initial values: shards must send them
  leaving: bool = False  # makes no more steps, and goes when nothing is left to merge
  done: bool = False

  @property
  def me(self) -> tuple[int, int]:
    """The first fields of a message to a shard (`messages.ToShard`)."""
    return self.learner, self.incarnation

  @property
  def joined(self) -> bool:
    """Whether every fragment is here."""
    return all(f.here for f in self.fragments)

  @property
  def merged_tokens(self) -> int:
    """Of the whole run: every fragment has merged at least so many."""
    return min((f.merged_tokens for f in self.fragments), default=0)


LearnerOutcome = tuple[LearnerState, list[LearnerAction]]  # what its reducer returns


def schedule_step(state: LearnerState, tokens_per_step: int) -> int:
  """Where the run is in its schedule of learning rates, as a step.

  It counts the tokens of a fragment that are merged, and my own steps since, as if all other
  learners kept pace with me: the mean over the fragments, in steps, rounded down. `tokens_per_step`
  is that of all planned learners together. In lock-step the result is the global step. It is not
  where learners are down, slow, or more than planned: a schedule by the global step would end too
  early there, or never.
  """
  if not state.fragments:
    return state.step
  tokens = sum(f.merged_tokens + f.steps * tokens_per_step for f in state.fragments)
  return tokens // (len(state.fragments) * tokens_per_step)


# --- a shard --------------------------------------------------------------------------------------


class Member(Frozen):
  """What this shard knows of a learner, or of the evaluator. Tuples run over its own fragments."""

  incarnation: int
  heard_at: float
  versions: tuple[int, ...]  # as reported
  steps_since_sync: tuple[int, ...]
  sent: tuple[int, ...]  # newest version sent, -1: none
  sent_at: tuple[float, ...]  # when the oldest version was sent that no report has confirmed
  norms: tuple[float, ...]  # smoothed norm per step of accepted pushes, 0: none yet
  step_seconds: float = 0.0
  delivery_seconds: float = 0.0  # smoothed, from `sent_at` until a report has the version
  sync_seconds: float = 0.0  # smoothed, from the decision to commit until its version is ready here
  resends: int = 0  # in a row without progress
  resent_at: float = -math.inf  # the newest of these resends
  rejections: int = 0  # in a row
  leaving: bool = False
  lost: bool = False
  quarantined: bool = False
  whole: bool = False  # it cannot make the initial values


class Round(Frozen):
  """One sync of one fragment, from pull to commit."""

  id: int
  quorum: int  # of learners that must have pushed
  started_at: float
  pending: tuple[int, ...]  # asked, and neither answered nor gone since
  step_seconds: float  # median of the learners that were asked
  sync_seconds: float  # the same, of those whose `sync_seconds` is known
  global_step: int  # when the round began
  pulled_at: float
  deadline: float  # when to look at the round again even if no message comes for it
  pulls: int = 1
  measuring: tuple[int, ...] = ()  # answered, and their pushes are being measured
  pushes: Mapping[int, messages.Push] = {}  # accepted, without payload
  norms: Mapping[int, float] = {}
  # Inner products of two accepted pushes, the smaller learner first; where directions count.
  products: Mapping[tuple[int, int], float] = {}
  rejected: Mapping[int, str] = {}
  quorum_at: float = math.inf  # when so many have pushed; inf: they have not


class ValueRequest(Frozen):
  """A request to a learner that has a newer value than this shard."""

  asked_at: float
  times: int
  round: int  # that made the value, as the learner says
  reading: int = -1  # the learner's incarnation whose value is here, and being decoded
  first_at: float = -math.inf  # when it was asked first


class MomentTransfer(Frozen):
  """A request to a learner for its moments of a fragment, for learners that join."""

  fragment: int
  donor: int
  until: float  # then another donor is asked


# By learner: the global step when its present window began, and how often in that window.
WindowCounts = Mapping[int, tuple[int, int]]


class SyncerState(_State, Frozen):
  """A shard, with small queries and changes of it."""

  shard: int
  incarnation: int
  fragments: tuple[FragmentState, ...]
  sync: SyncConfig
  target_tokens: int  # a fragment that has merged so many is complete
  step_tokens: int = 0  # of the largest step of any learner; 0: not known
  fewest_tokens: int = 0  # of the smallest
  first_round: int = 0  # smaller rounds are not of this run
  members: Mapping[int, Member] = {}
  model_saved: bool = False  # the final one, by an evaluator, which has left
  global_step: int = 0
  beliefs: Beliefs = Beliefs(reach_at=0.0)
  rounds: int = 0  # started in this incarnation
  under_way: Mapping[int, Round] = {}  # by position of the fragment
  snapshot: int = 0  # the newest heard of or begun; my state is captured for it
  saving: bool = False  # this snapshot is not committed or given up yet; shard 0 waits for that
  vector_clock: VectorClock = {}
  # fragment -> rounds up to this one are part of its value here, or their loss is logged
  known_rounds: Mapping[int, int] = {}
  # Until then no round begins before all awaited learners are here: they may have newer values.
  recovery_deadline: float = -math.inf
  planned_learners: int = 0  # awaited until then by a shard that knew no learner
  silent_at: float = math.inf  # no member is lost to silence before this time
  dirty: tuple[int, ...] = ()  # positions of fragments whose round may start or end now
  # Logged since the newest round began: a quorum needs a learner that is too far ahead.
  said_ahead: bool = False
  # learner -> fragments whose moments it waits for
  asking: Mapping[int, tuple[int, ...]] = {}
  held_at: Mapping[int, float] = {}  # fragment -> when a publish last waited for the buddy
  donation: MomentTransfer | None = None  # under way; one at a time
  passes_moments: bool = True  # learners of this run may ask for a peer's moments
  moments_asked: WindowCounts = {}  # how often donors were asked for a fragment's, by joiner
  donors_asked: Mapping[int, int] = {}  # donor -> the number, of all requests, of its newest
  farewells: WindowCounts = {}  # rounds that began while their learners were leaving
  value_requests: Mapping[tuple[int, int], ValueRequest] = {}  # by fragment and learner
  # learner -> its pushes in a row that opposed all others; outlives the learner's incarnations
  opposed: Mapping[int, int] = {}
  # position of a fragment -> its rounds in a row whose pushes all grew out of proportion
  grown_together: Mapping[int, int] = {}
  delivery_seconds: float = 0.0  # smoothed over all members: from sending a version to its report
  quorum_seconds: float = 0.0  # smoothed, from pull to quorum
  awake_since: float = -math.inf  # this shard's process has not stood still since then

  @property
  def key(self) -> int:
    """This shard's key in vector clocks."""
    return shard_key(self.shard)

  @property
  def first_own_round(self) -> int:
    """Round ids of this incarnation are at least this number; those of earlier ones are smaller."""
    return rules.numbered(self.incarnation, 0)

  def is_newer(self, f: FragmentState, round_id: int) -> bool:
    """Whether an earlier incarnation made the value of this round after the fragment's value."""
    return max(f.last_round, self.first_round - 1) < round_id < self.first_own_round

  @property
  def quorum(self) -> int:
    """K: how many learners must be due for a round to start, and have pushed for a commit; fewer
    where all leave (`protocol/rounds.py`)."""
    return self.sync.min_quorum

  def to(self, incarnation: int) -> tuple[int, int, int]:
    """The first fields of a message to this incarnation of a learner (`messages.ToLearner`)."""
    return self.shard, self.incarnation, incarnation

  def position(self, fragment: int) -> int | None:
    """Where a fragment stands in `fragments`; None: this shard does not own it."""
    return next((i for i, f in enumerate(self.fragments) if f.index == fragment), None)

  def complete(self, f: FragmentState) -> bool:
    """Whether the fragment has merged all the tokens of the run: its version is the final one."""
    return f.merged_tokens >= self.target_tokens

  # --- what a member may do

  def could_push(self, learner: int, i: int) -> bool:
    """Whether a member is available: alive, on the newest version, with a step since its sync."""
    member = self.members[learner]
    return (
      learner != EVALUATOR
      and not (member.lost or member.quarantined)
      and member.versions[i] == self.fragments[i].version
      and member.steps_since_sync[i] >= 1
    )

  def in_window(self, counts: WindowCounts, learner: int) -> tuple[int, int]:
    """When the learner's present window began, and its count in it."""
    began, count = counts.get(learner, (self.global_step, 0))
    over = self.global_step - began >= WINDOW_PERIODS * self.sync.sync_period
    return (self.global_step, 0) if over else (began, count)

  def counted(self, counts: WindowCounts, learner: int) -> WindowCounts:
    """`counts` after the learner has caused such work once more."""
    began, count = self.in_window(counts, learner)
    return {**counts, learner: (began, count + 1)}

  def brings_last_work(self, learner: int) -> bool:
    """Whether the member makes no more steps, so that its unmerged work must be merged now.

    That takes one or two rounds a fragment; after `MOST_IN_WINDOW` no shard waits for it.
    """
    most = MOST_IN_WINDOW * len(self.fragments)
    return self.members[learner].leaving and self.in_window(self.farewells, learner)[1] < most

  def is_due(self, learner: int, i: int) -> bool:
    """Whether the member has made the steps that a sync takes on this fragment, or makes none."""
    f, member = self.fragments[i], self.members[learner]
    # In lock-step versions say when a learner is due (`rules.due_at`), and the learner tells.
    began = None if self.sync.blocking else f.global_step
    enough = member.steps_since_sync[i] >= rules.due_after(f.index, f.version, self.sync, began)
    return enough or self.brings_last_work(learner)

  # --- the run as a whole

  def recovery_over(self, now: float) -> bool:
    """Whether the shard awaits no learner that may have a newer value.

    This holds once all learners that it knew are members, or when the time is up. A learner with
    newer values becomes a member only when they are here (`protocol/syncer.py`).
    """
    if now >= self.recovery_deadline:
      return True
    known = {m for f in self.fragments for m in f.participants}
    awaited = known or set(range(self.planned_learners))
    return awaited <= self.members.keys()

  def believe_global_step(self, report: messages.Report, now: float) -> SyncerState:
    """The global step, after a learner has said how far it is (`rules.raised_global_step`)."""
    if report.learner == EVALUATOR:
      return self
    known = rules.noted_pace(self.beliefs, report.learner, report.step_seconds)
    if report.snapshot > self.snapshot:
      known = rules.noted_snapshot(known, report.learner, report.snapshot)
    here, over = len(self.members), self.recovery_over(now)
    # Once three paces are known, only zero or not matters to the rule: no count is needed.
    if over and len(self.beliefs.paces) < 3:
      others = {m for m, member in self.members.items() if m != EVALUATOR and not member.lost}
      here = len(others | {report.learner})  # it reports, so it is here even if it counted as lost
    claim = self.global_step, report.learner, report.global_step, now, self.most_steps
    known, global_step = rules.raised_global_step(known, *claim, self.sync, here if over else 0)
    # A snapshot begins by the global step of shard 0. In lock-step no learner passes that on.
    global_step = max(global_step, rules.confirmed(known.snapshots))
    return replace(self, beliefs=known, global_step=global_step)

  @property
  def most_steps(self) -> float:
    """The greatest global step to which one learner alone can raise it."""
    fewest = self.fewest_tokens  # the island with the smallest steps may be the only one left
    most = rules.WASTE * self.target_tokens / fewest if fewest else math.inf
    # However short the run, every fragment is synced once.
    return max(most, rules.SHORT_RUN_STEPS) + rules.step_tolerance(self.sync)

  # --- changes

  def with_member(self, learner: int, **changes: Any) -> SyncerState:
    """The state with these fields of one member changed."""
    member = replace(self.members[learner], **changes)
    return replace(self, members={**self.members, learner: member})

  def with_round(self, i: int, current: Round | None) -> SyncerState:
    """The state with this round of a fragment under way, or with none."""
    others = {j: each for j, each in self.under_way.items() if j != i}
    return replace(self, under_way=others if current is None else {**others, i: current})

  def mark_dirty(self, positions: Iterable[int]) -> SyncerState:
    """Something has happened to these fragments: the next `Tick` looks at their rounds."""
    new = set(positions).difference(self.dirty)
    return replace(self, dirty=(*self.dirty, *sorted(new))) if new else self

  def forget(self, learner: int) -> SyncerState:
    """The learner is gone, or has a new incarnation: no round waits for it, though a push that it
    sent still counts, and it waits for no moments."""
    state = replace(self, asking={m: ps for m, ps in self.asking.items() if m != learner})
    for i, current in self.under_way.items():
      if learner in current.pending:
        current = replace(current, pending=less(current.pending, learner))
        state = state.with_round(i, current).mark_dirty([i])
    return state

  def publish_to(
    self, i: int, learner: int, now: float, base_round: int = NOTHING
  ) -> tuple[SyncerState, Send]:
    """A fragment's newest version for a learner: whole, or as the update to the value that
    `base_round` made.

    Every publish says whose pushes its version contains. So a learner that missed some publishes
    still knows which of its work is merged, and a shard that lost all its state gets that back too.
    """
    f, member = self.fragments[i], self.members[learner]
    publish = Publish(
      *self.to(member.incarnation),
      fragment=f.index,
      round=f.last_round,
      version=f.version,
      base_round=base_round,
      global_step=self.global_step,
      merged_tokens=f.merged_tokens,
      merged_rounds=f.merged_rounds,
      snapshot=self.snapshot,
      count=self.vector_clock[self.key],
      seal="",
      # The role fills it in, with the payload; `MADE`: it may leave the value out.
      codec=MADE if f.last_round == INITIAL and not member.whole else "",
    )
    sent_at = member.sent_at
    # Of an update that follows another one on its way, the time of the older one stays.
    if base_round == NOTHING or member.versions[i] >= member.sent[i]:
      sent_at = put(sent_at, i, now)
    state = self.with_member(learner, sent=put(member.sent, i, f.version), sent_at=sent_at)
    return state, Send(learner, publish)


SyncerOutcome = tuple[SyncerState, list[SyncerAction]]  # what its reducer returns


def ignored(message: messages.Message, reason: str) -> events.Ignored:
  """The line of a shard's log about a message that changes nothing."""
  learner = message.learner if isinstance(message, messages.ToShard) else None
  return events.Ignored(message=type(message).__name__, learner=learner, reason=reason)


# --- what a snapshot stores of them ---------------------------------------------------------------


@readable
class LearnerPart(Frozen):
  """What a learner's part of a snapshot has beside its arrays."""

  key: int  # the learner's key in vector clocks
  vector_clock: Mapping[int, int]
  global_step: int
  position: int  # of its data
  learner: LearnerState


def learner_part(state: LearnerState, position: int) -> dict[str, Any]:
  """A learner's state as its part stores it; `position` of its data."""
  return to_json(LearnerPart(state.learner, state.vector_clock, state.global_step, position, state))


@readable
class SyncerPart(Frozen):
  """What a shard's part of a snapshot has beside its arrays."""

  key: int  # the shard's key in vector clocks
  vector_clock: Mapping[int, int]
  global_step: int
  step_tokens: int  # of the largest step of any learner, also before the run last went on
  fragments: tuple[FragmentState, ...]
  momentum_rounds: Mapping[int, int]  # fragment -> the round that made its momentum


def syncer_part(state: SyncerState, momentum_rounds: Mapping[int, int]) -> dict[str, Any]:
  """A shard's state as its part stores it."""
  clock, mine, steps = state.vector_clock, state.fragments, (state.global_step, state.step_tokens)
  return to_json(SyncerPart(state.key, clock, *steps, mine, momentum_rounds))
