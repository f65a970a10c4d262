"""What a syncer shard knows: its members, its fragments, the rounds under way. PURE."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from ddiloco.core.messages import NOTHING, TO_SHARD, Message, Publish, Push, flat
from ddiloco.core.protocol import Note, Send


@dataclasses.dataclass(frozen=True)
class Member:
  """What this shard knows of one learner. Tuples run over the shard's own fragments."""

  incarnation: int
  heard_at: float
  versions: tuple[int, ...]  # as reported
  since: tuple[int, ...]
  sent: tuple[int, ...]  # newest version sent, -1: none
  waiting_since: tuple[float, ...]  # for what was sent to show up in a report
  norms: tuple[float, ...]  # smoothed norm per step of accepted pushes, 0: none yet
  step_seconds: float = 0.0
  delivery_seconds: float = 0.0  # smoothed, from sending a publish to the report that has it
  resends: int = 0  # in a row without progress
  rejections: int = 0  # in a row
  leaving: bool = False
  lost: bool = False
  quarantined: bool = False


@dataclasses.dataclass(frozen=True)
class Round:
  """One sync of one fragment, from pull to commit."""

  id: int
  started_at: float
  asked: tuple[int, ...]
  pulled_at: float
  pulls: int = 1
  pushes: Mapping[int, Push] = dataclasses.field(default_factory=dict)  # accepted, without payload
  norms: Mapping[int, float] = dataclasses.field(default_factory=dict)
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
  last_round: int = -1
  participants: tuple[int, ...] = ()
  snapshot: int = 0  # the newest recorded before: this value may depend on what came after it
  round: Round | None = None


@dataclasses.dataclass(frozen=True)
class Recalling:
  """A value asked of a learner that has a newer one than this shard."""

  asked_at: float
  times: int


@dataclasses.dataclass(frozen=True)
class Donation:
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
  members: Mapping[int, Member] = dataclasses.field(default_factory=dict)
  clock: int = 0
  rounds: int = 0  # started in this incarnation
  snapshot: int = 0  # the newest heard of or begun; my state is recorded for it
  saving: bool = False  # that snapshot is not committed or given up yet; shard 0 waits for it
  seen: Mapping[int, int] = dataclasses.field(default_factory=dict)  # vector clock
  commits: int = 0  # in this incarnation
  began: Mapping[int, int] = dataclasses.field(default_factory=dict)  # fragment -> round, at first
  settle_at: float = -math.inf  # no round before: learners may have newer values than this shard
  asking: Mapping[int, tuple[int, ...]] = dataclasses.field(
    default_factory=dict
  )  # learner -> fragments whose moments it waits for
  donation: Donation | None = None  # under way; one at a time
  given: Mapping[int, int] = dataclasses.field(default_factory=dict)  # donor -> donations
  recalls: Mapping[int, Recalling] = dataclasses.field(default_factory=dict)  # by fragment
  quorum_seconds: float = 0.0  # smoothed, from pull to quorum
  sync_seconds: float = 0.0  # smoothed, merge to publish


def complete(state: SyncerState, f: FragmentState) -> bool:
  """Whether the fragment has merged all the tokens of the run: its version is the final one."""
  return f.merged_tokens >= state.target_tokens


def set_member(state: SyncerState, learner: int, member: Member | None) -> SyncerState:
  members = {m: v for m, v in state.members.items() if m != learner}
  if member is not None:
    members[learner] = member
  return dataclasses.replace(state, members=members)


def set_fragment(state: SyncerState, i: int, f: FragmentState) -> SyncerState:
  fragments = (*state.fragments[:i], f, *state.fragments[i + 1 :])
  return dataclasses.replace(state, fragments=fragments)


def forget_pending(state: SyncerState, learner: int) -> SyncerState:
  """Nobody waits for this learner any more; a push it already sent still counts."""

  def without(f: FragmentState) -> FragmentState:
    if f.round is None or learner in f.round.pushes or learner not in f.round.asked:
      return f
    asked = tuple(m for m in f.round.asked if m != learner)
    return dataclasses.replace(f, round=dataclasses.replace(f.round, asked=asked))

  return dataclasses.replace(state, fragments=tuple(map(without, state.fragments)))


def publish_to(
  state: SyncerState, i: int, learner: int, now: float, base_round: int = NOTHING
) -> tuple[SyncerState, Send]:
  """The newest version for one learner: whole, or as the update to what `base_round` made.

  What is sent always says whose pushes it contains, so that a learner that missed publishes in
  between still knows what of its work is merged; and a shard that lost all gets it back from there.
  """
  f, member = state.fragments[i], state.members[learner]
  update = base_round != NOTHING
  publish = Publish(
    shard=state.shard,
    incarnation=state.incarnation,
    learner_incarnation=member.incarnation,
    fragment=f.index,
    round=f.last_round,
    version=f.version,
    base_version=f.version - 1 if update else -1,
    base_round=base_round,
    clock=state.clock,
    merged_tokens=f.merged_tokens,
    participants=f.participants,
    merged_rounds=flat(f.merged_rounds),
    snapshot=state.snapshot,
    seen=flat(state.seen),
    codec="",  # the runtime's business, like the payload
  )
  sent = (*member.sent[:i], f.version, *member.sent[i + 1 :])
  waiting_since = member.waiting_since
  if not update or member.versions[i] >= member.sent[i]:  # else an older one is awaited longer
    waiting_since = (*waiting_since[:i], now, *waiting_since[i + 1 :])
  member = dataclasses.replace(member, sent=sent, waiting_since=waiting_since)
  state = set_member(state, learner, member)
  return state, Send(learner, publish)


def member_note(learner: int, status: str, reason: str) -> Note:
  return Note("member", {"learner": learner, "state": status, "reason": reason})


def ignored(message: Message, reason: str) -> Note:
  learner = message.learner if isinstance(message, TO_SHARD) else None
  fields = {"message": type(message).__name__, "learner": learner, "reason": reason}
  return Note("ignored", fields)
