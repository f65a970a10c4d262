"""What a syncer shard knows: its members, its fragments, the rounds under way. PURE."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

from ddiloco.config import SyncConfig
from ddiloco.protocol import beliefs, events
from ddiloco.protocol.actions import Send, due_after
from ddiloco.protocol.beliefs import Beliefs
from ddiloco.protocol.causality import shard_key
from ddiloco.protocol.messages import (
  EVALUATOR,
  INITIAL,
  MADE,
  NOTHING,
  TO_SHARD,
  Message,
  Publish,
  Push,
  Report,
  flat,
)
from ddiloco.protocol.values import put, replace

MOST_FAREWELLS = 3  # rounds a fragment that a leaving learner may start


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
  # What it has heard of whom (`protocol/causality.py`).
  vector_clock: Mapping[int, int] = dataclasses.field(default_factory=dict)
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
  enough = member.steps_since_sync[i] >= due_after(f.index, f.version, sync)
  return enough or brings_last_work(member)


def recovery_over(state: SyncerState, now: float) -> bool:
  """Whether no learner with a newer value is awaited: all that it knew are here, or time is up.

  A learner with newer values is not a member before it has been asked for them
  (`protocol/members.py`).
  """
  if now >= state.recovery_deadline:
    return True
  known = {m for f in state.fragments for m in f.participants}
  awaited = known or set(range(state.planned_learners))
  return bool(awaited) and awaited <= state.members.keys()


def believe_global_step(
  state: SyncerState, report: Report, now: float, sync: SyncConfig
) -> SyncerState:
  """The global step, after a learner has said how far it is (`beliefs.raised_global_step`)."""
  if report.learner == EVALUATOR:
    return state
  known = beliefs.noted_pace(state.beliefs, report.learner, report.step_seconds)
  most = beliefs.WASTE * state.target_tokens / state.step_tokens if state.step_tokens else math.inf
  here = _num_here(state, report.learner) if recovery_over(state, now) else 0
  known, global_step = beliefs.raised_global_step(
    known, state.global_step, report.learner, report.global_step, now, most, sync, here
  )
  return replace(state, beliefs=known, global_step=global_step)


def _num_here(state: SyncerState, reports: int) -> int:
  """How many learners are not lost, the one that reports among them.

  With three paces known only that there are some matters, so that a report takes no look at all.
  """
  if len(state.beliefs.paces) > 2:
    return len(state.members)
  lost = (m for m, member in state.members.items() if m == EVALUATOR or member.lost)
  return len((state.members.keys() | {reports}).difference(lost))


def set_member(state: SyncerState, learner: int, member: Member | None) -> SyncerState:
  members = dict(state.members)
  if member is not None:
    members[learner] = member
  else:
    members.pop(learner, None)
  return replace(state, members=members)


def set_fragment(state: SyncerState, i: int, f: FragmentState) -> SyncerState:
  return replace(state, fragments=put(state.fragments, i, f))


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
    f = replace(f, round=replace(f.round, pending=without(f.round.pending, learner)))
    state = mark_dirty(set_fragment(state, i, f), [i])
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
    codec="",  # the runtime's business, like the payload; `MADE`: the value may be left out
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
  if not update or member.versions[i] >= member.sent[i]:  # else an older one is awaited longer
    sent_at, waiting_since = put(member.sent_at, i, now), put(member.waiting_since, i, now)
    member = replace(member, sent_at=sent_at, waiting_since=waiting_since)
  member = replace(member, sent=put(member.sent, i, f.version))
  state = set_member(state, learner, member)
  return state, Send(learner, publish)


def member_event(learner: int, status: str, reason: str) -> events.Member:
  return events.Member(learner=learner, state=status, reason=reason)


def ignored(message: Message, reason: str) -> events.Ignored:
  learner = message.learner if isinstance(message, TO_SHARD) else None
  return events.Ignored(message=type(message).__name__, learner=learner, reason=reason)
