"""What a learner knows and what a shard knows: their states, and small questions to them. PURE."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from ddiloco.config import SyncConfig
from ddiloco.protocol import events, rules
from ddiloco.protocol.actions import LearnerAction, Send, SyncerAction
from ddiloco.protocol.messages import (
  EVALUATOR,
  INITIAL,
  MADE,
  NOTHING,
  TO_SHARD,
  Message,
  Publish,
  Pull,
  Push,
  Report,
  flat,
)
from ddiloco.protocol.rules import Beliefs
from ddiloco.protocol.values import put, replace

MOST_FAREWELLS = 3  # rounds a fragment that a leaving learner may start

# --- what each role has heard of each other -------------------------------------------------------
# Pushes and publishes, the messages that move the model, carry a count of the sender's own: pushes
# of a learner, commits of a shard. A role keeps the greatest count it has heard from each sender. A
# set of captured states is a consistent snapshot if no role has heard more of another than that one
# had done when its state was captured (Mattern 1989). A sender counts for itself only, so a learner
# that lies can spoil its own part and no other.

VectorClock = Mapping[int, int]  # who -> count; a learner is its number, a shard see `shard_key`


def shard_key(shard: int) -> int:
  """The key of a shard; learners have their numbers, the evaluator is -1."""
  return -2 - shard


def join_clocks(vector_clock: VectorClock, other: VectorClock) -> VectorClock:
  """The vector clock after hearing of `other`: the greater count of each."""
  news = {who: count for who, count in other.items() if count > vector_clock.get(who, 0)}
  return {**vector_clock, **news} if news else vector_clock


def clock_violations(snapshot: Mapping[int, VectorClock]) -> list[tuple[int, int]]:
  """(who, whom): `who` had heard of an act of `whom` from after `whom`'s capture.

  `snapshot` has what each participant had heard, by key. Empty: the snapshot is consistent.
  """
  return [
    (who, whom)
    for who, vector_clock in sorted(snapshot.items())
    for whom, known in sorted(vector_clock.items())
    if whom in snapshot and whom != who and known > snapshot[whom].get(whom, 0)
  ]


# --- a learner ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Outstanding:
  """My push that no publish has answered yet; at most one per fragment."""

  push: Push  # without payload
  at_step: int  # my own step count when it was copied out


@dataclasses.dataclass(frozen=True)
class IncomingVersion:
  """A published version on its way onto the devices."""

  publish: Publish  # without payload
  mode: events.Mode
  merged: Outstanding | None  # my push that this version contains
  ready: bool = False


@dataclasses.dataclass(frozen=True)
class LearnerFragment:
  """One fragment, as this learner has it."""

  shard: int
  version: int = -1  # in the parameters
  round: int = NOTHING  # that made it: its identity, since version numbers may come twice
  received: int = -1  # newest version accepted; >= version
  steps_since_sync: int = 0  # from the copy-out if the sync had my push, else from receipt
  steps: int = 0  # in my parameters and not merged yet
  tokens: int = 0
  merged_tokens: int = 0  # of the whole run, as the shard says
  acknowledged_tokens: int = 0  # mine, merged
  discarded_tokens: int = 0  # mine, lost to an overwrite
  base_header: Publish | None = None  # what came with the newest version accepted, without payload
  fresh: bool = False  # its shard has sent me what it had, or had nothing newer than I
  outstanding: Outstanding | None = None
  pull: Pull | None = None  # asked and not answered yet
  incoming: tuple[IncomingVersion, ...] = ()

  @property
  def newest(self) -> int:
    """The round that made the newest version accepted."""
    return self.base_header.round if self.base_header else NOTHING


@dataclasses.dataclass(frozen=True)
class ShardView:
  incarnation: int = -1  # newest heard of; -1: not welcomed yet
  hellos: int = 0
  next_hello_at: float = 0.0


@dataclasses.dataclass(frozen=True)
class LearnerState:
  learner: int
  incarnation: int
  shards: tuple[ShardView, ...]
  fragments: tuple[LearnerFragment, ...]
  target_tokens: int  # merged from all learners; without shards: trained by me
  trains: bool = True
  step: int = 0  # mine, in this incarnation
  global_step: int = 0  # of the most advanced learner
  trained_tokens: int = 0
  step_seconds: float = 0.0
  stepped_at: float = 0.0  # when the newest step was over
  waited_seconds: float = 0.0  # that the newest publish waited for the end of a step
  idle_seconds: float = 0.0  # that, and what it waited once it was staged
  snapshot: int = 0  # the newest heard of; my state is captured for it
  vector_clock: VectorClock = dataclasses.field(default_factory=dict)
  pushes_made: int = 0  # in this incarnation
  donor_seconds: float = 0.0  # that it waits for a peer's moments, when it joins
  wants: tuple[int, ...] = ()  # fragments whose moments it still waits for
  wants_until: float = 0.0
  ask_at: float = 0.0
  joined_global_step: int = 0  # the run's, when it joined
  donations: int = 0  # made, in this incarnation
  whole: bool = False  # it needs initial values sent, since it cannot make them
  leaving: bool = False  # makes no more steps, and goes when nothing is left to merge
  done: bool = False

  @property
  def joined(self) -> bool:
    return all(f.fresh and f.version >= 0 for f in self.fragments)

  @property
  def merged_tokens(self) -> int:
    """Of the whole run: what every fragment has merged at least."""
    return min((f.merged_tokens for f in self.fragments), default=0)


LearnerOutcome = tuple[LearnerState, list[LearnerAction]]  # what its reducer returns


def schedule_step(state: LearnerState, tokens_per_step: int) -> int:
  """Where the run is in its schedule of learning rates: the step that has seen as many tokens.

  What is merged, and my own steps on top of it, as if all others kept pace with me: the mean of the
  fragments, rounded down. `tokens_per_step` is that of all planned learners together. In lock-step
  it is the global step. Where learners are down, slow, or more than planned, it is not: a schedule
  by the global step would be over too early, or never.
  """
  if not state.fragments:
    return state.step
  tokens = sum(f.merged_tokens + f.steps * tokens_per_step for f in state.fragments)
  return tokens // (len(state.fragments) * tokens_per_step)


# --- a shard --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Member:
  """What this shard knows of one learner. Tuples run over the shard's own fragments."""

  incarnation: int
  heard_at: float
  versions: tuple[int, ...]  # as reported
  steps_since_sync: tuple[int, ...]
  sent: tuple[int, ...]  # newest version sent, -1: none
  sent_at: tuple[float, ...]  # the oldest that has not shown up in a report
  waiting_since: tuple[float, ...]  # for that, or for what was sent before it
  norms: tuple[float, ...]  # smoothed norm per step of accepted pushes, 0: none yet
  step_seconds: float = 0.0
  delivery_seconds: float = 0.0  # smoothed, without any sign of a publish until a report has it
  sync_seconds: float = 0.0  # smoothed, from a commit's decision until its version lies ready here
  resends: int = 0  # in a row without progress
  resent_at: float = -math.inf  # the newest of these
  rejections: int = 0  # in a row
  leaving: bool = False
  farewells: int = 0  # pushes merged since it said that it leaves, over all fragments
  lost: bool = False
  quarantined: bool = False
  whole: bool = False  # it cannot make initial values


@dataclasses.dataclass(frozen=True)
class Round:
  """One sync of one fragment, from pull to commit."""

  id: int
  started_at: float
  pending: tuple[int, ...]  # asked, and neither answered nor gone since
  step_seconds: float  # median of those that were asked
  sync_seconds: float  # the same, of those of whom it is known
  global_step: int  # when it began
  pulled_at: float
  deadline: float  # again, even if nothing comes for it until then
  pulls: int = 1
  pushes: Mapping[int, Push] = dataclasses.field(default_factory=dict)  # accepted, without payload
  norms: Mapping[int, float] = dataclasses.field(default_factory=dict)
  products: Mapping[tuple[int, int], float] = dataclasses.field(
    default_factory=dict
  )  # of two accepted pushes, the smaller learner first; where directions count
  refused: Mapping[int, str] = dataclasses.field(default_factory=dict)
  quorum_at: float | None = None
  reason: str = ""


@dataclasses.dataclass(frozen=True)
class FragmentState:
  """One owned fragment. `version` to `snapshot` outlive the shard's incarnation."""

  index: int
  version: int = 0
  merged_tokens: int = 0
  merged_rounds: Mapping[int, int] = dataclasses.field(
    default_factory=dict
  )  # learner -> last round
  merged_global_steps: Mapping[int, int] = dataclasses.field(
    default_factory=dict
  )  # learner -> the global step when that round began
  last_round: int = -1
  global_step: int = 0  # when the last round began
  participants: tuple[int, ...] = ()
  snapshot: int = 0  # the newest captured before: this value may depend on what came after it
  round: Round | None = None


@dataclasses.dataclass(frozen=True)
class ValueRequest:
  """A value asked of a learner that has a newer one than this shard."""

  asked_at: float
  times: int
  round: int  # that made the value, as the learner says


@dataclasses.dataclass(frozen=True)
class MomentTransfer:
  """Moments of a fragment asked of a learner, for those that join."""

  fragment: int
  donor: int
  until: float  # then another one is asked


@dataclasses.dataclass(frozen=True)
class SyncerState:
  shard: int
  incarnation: int
  fragments: tuple[FragmentState, ...]
  target_tokens: int  # to merge into every fragment; then it is complete
  step_tokens: int = 0  # of the largest step of any learner; 0: not known
  first_round: int = 0  # rounds before are not of this run
  members: Mapping[int, Member] = dataclasses.field(default_factory=dict)
  global_step: int = 0
  beliefs: Beliefs = Beliefs(reach_at=0.0)
  rounds: int = 0  # started in this incarnation
  snapshot: int = 0  # the newest heard of or begun; my state is captured for it
  saving: bool = False  # that snapshot is not committed or given up yet; shard 0 waits for it
  vector_clock: VectorClock = dataclasses.field(default_factory=dict)
  commits: int = 0  # in this incarnation
  began: Mapping[int, int] = dataclasses.field(default_factory=dict)  # fragment -> round, at first
  # No round begins before: learners may have newer values than this shard.
  recovery_deadline: float = -math.inf
  planned_learners: int = 0  # awaited until then by a shard that knew no learner
  silent_at: float = math.inf  # no member is lost to silence before
  dirty: tuple[int, ...] = ()  # whose round may start or end now: positions of fragments
  asking: Mapping[int, tuple[int, ...]] = dataclasses.field(
    default_factory=dict
  )  # learner -> fragments whose moments it waits for
  donation: MomentTransfer | None = None  # under way; one at a time
  passes_moments: bool = True  # learners of this run may ask for a peer's
  # learner -> (the global step when its present stretch began, fragments it was given in it)
  passed_on: Mapping[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
  given: Mapping[int, int] = dataclasses.field(default_factory=dict)  # donor -> donations
  recalls: Mapping[tuple[int, int], ValueRequest] = dataclasses.field(
    default_factory=dict
  )  # by fragment and learner
  opposed: Mapping[int, int] = dataclasses.field(
    default_factory=dict
  )  # learner -> its updates in a row that opposed all others; outlives its incarnations
  delivery_seconds: float = 0.0  # smoothed over all members: from sending to the report of it
  quorum_seconds: float = 0.0  # smoothed, from pull to quorum
  awake_since: float = -math.inf  # this shard's process did not stand still since


SyncerOutcome = tuple[SyncerState, list[SyncerAction]]  # what its reducer returns


def complete(state: SyncerState, f: FragmentState) -> bool:
  """Whether the fragment has merged all the tokens of the run: its version is the final one."""
  return f.merged_tokens >= state.target_tokens


def could_push(learner: int, member: Member, i: int, f: FragmentState) -> bool:
  """Whether a member could push this fragment now: alive, on the newest, at least a step on it."""
  return (
    learner != EVALUATOR
    and not (member.lost or member.quarantined)
    and member.versions[i] == f.version
    and member.steps_since_sync[i] >= 1
  )


def brings_last_work(member: Member) -> bool:
  """Whether it makes no more steps, and what it has is to be merged now.

  That takes one round a fragment, or two; one that always has more is not waited for.
  """
  return member.leaving and member.farewells < MOST_FAREWELLS * len(member.steps_since_sync)


def is_due(member: Member, i: int, f: FragmentState, sync: SyncConfig) -> bool:
  """Whether it has made as many steps on it as a sync takes, or makes no more."""
  enough = member.steps_since_sync[i] >= rules.due_after(f.index, f.version, sync)
  return enough or brings_last_work(member)


def recovery_over(state: SyncerState, now: float) -> bool:
  """Whether no learner with a newer value is awaited: all that it knew are here, or time is up.

  A learner with newer values is no member before it was asked for them (`protocol/syncer.py`).
  """
  if now >= state.recovery_deadline:
    return True
  known = {m for f in state.fragments for m in f.participants}
  awaited = known or set(range(state.planned_learners))
  return bool(awaited) and awaited <= state.members.keys()


def believe_global_step(
  state: SyncerState, report: Report, now: float, sync: SyncConfig
) -> SyncerState:
  """The global step, after a learner has said how far it is (`rules.raised_global_step`)."""
  if report.learner == EVALUATOR:
    return state
  known = rules.noted_pace(state.beliefs, report.learner, report.step_seconds)
  most = rules.WASTE * state.target_tokens / state.step_tokens if state.step_tokens else math.inf
  here = _num_here(state, report.learner) if recovery_over(state, now) else 0
  known, global_step = rules.raised_global_step(
    known, state.global_step, report.learner, report.global_step, now, most, sync, here
  )
  return replace(state, beliefs=known, global_step=global_step)


def _num_here(state: SyncerState, reports: int) -> int:
  """How many learners are not lost, the one that reports among them.

  With three paces known only that there are some matters, so that a report takes no look at all.
  """
  if len(state.beliefs.paces) > 2:
    return len(state.members)
  here = {m for m, member in state.members.items() if m != EVALUATOR and not member.lost}
  return len(here | {reports})  # it is heard: what it was taken for until now does not count


def set_member(state: SyncerState, learner: int, **changes: Any) -> SyncerState:
  """The state with these fields of one member changed."""
  member = replace(state.members[learner], **changes)
  return replace(state, members={**state.members, learner: member})


State = TypeVar("State", LearnerState, SyncerState)


def set_fragment(state: State, i: int, **changes: Any) -> State:
  """The state with these fields of one fragment changed."""
  fragments = put(state.fragments, i, replace(state.fragments[i], **changes))
  return replace(state, fragments=fragments)


def mark_dirty(state: SyncerState, positions: Iterable[int]) -> SyncerState:
  """Something has happened to these fragments: the end of this event looks at their rounds."""
  new = set(positions).difference(state.dirty)
  return replace(state, dirty=(*state.dirty, *sorted(new))) if new else state


def without(pending: tuple[int, ...], learner: int) -> tuple[int, ...]:
  """Those that are left to wait for: called at every push, so without a look at each."""
  at = pending.index(learner)
  return (*pending[:at], *pending[at + 1 :])


def forget_pending(state: SyncerState, learner: int) -> SyncerState:
  """No round waits for this learner any more; a push it already sent still counts."""
  for i, f in enumerate(state.fragments):
    if f.round is None or learner not in f.round.pending:
      continue
    current = replace(f.round, pending=without(f.round.pending, learner))
    state = mark_dirty(set_fragment(state, i, round=current), [i])
  return state


def newest(state: SyncerState, i: int) -> Publish:
  """The newest version of a fragment as all members get it; `publish_to` addresses it.

  What is sent always says whose pushes it contains, so that a learner that missed publishes in
  between still knows what of its work is merged; and a shard that lost all gets it back from there.
  """
  f = state.fragments[i]
  return Publish(
    shard=state.shard,
    incarnation=state.incarnation,
    learner_incarnation=-1,
    fragment=f.index,
    round=f.last_round,
    version=f.version,
    base_version=-1,
    base_round=NOTHING,
    global_step=state.global_step,
    merged_tokens=f.merged_tokens,
    participants=f.participants,
    merged_rounds=flat(f.merged_rounds),
    snapshot=state.snapshot,
    count=state.vector_clock[shard_key(state.shard)],
    seal="",
    codec="",  # the role's business, like the payload; `MADE`: the value may be left out
  )


def publish_to(
  state: SyncerState,
  i: int,
  learner: int,
  now: float,
  publish: Publish,
  base_round: int = NOTHING,
) -> tuple[SyncerState, Send]:
  """`newest` for one learner: whole, or as the update to what `base_round` made."""
  f, member = state.fragments[i], state.members[learner]
  update = base_round != NOTHING
  publish = replace(
    publish,
    learner_incarnation=member.incarnation,
    base_version=f.version - 1 if update else -1,
    base_round=base_round,
    codec=MADE if f.last_round == INITIAL and not member.whole else "",
  )
  sent_at, waiting_since = member.sent_at, member.waiting_since
  if not update or member.versions[i] >= member.sent[i]:  # else an older one is awaited longer
    sent_at, waiting_since = put(sent_at, i, now), put(waiting_since, i, now)
  sent = put(member.sent, i, f.version)
  state = set_member(state, learner, sent=sent, sent_at=sent_at, waiting_since=waiting_since)
  return state, Send(learner, publish)


def member_event(learner: int, status: str, reason: str) -> events.Member:
  return events.Member(learner=learner, state=status, reason=reason)


def ignored(message: Message, reason: str) -> events.Ignored:
  learner = message.learner if isinstance(message, TO_SHARD) else None
  return events.Ignored(message=type(message).__name__, learner=learner, reason=reason)
