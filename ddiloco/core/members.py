"""Who a shard counts as a member: hello, reports, silence, goodbye, and catching up. PURE."""

from __future__ import annotations

import dataclasses

from ddiloco.config import SyncConfig
from ddiloco.core.messages import EVALUATOR, Goodbye, Hello, Message, Refusal, Report, Welcome
from ddiloco.core.protocol import Note, Send, SyncerAction, backed_off, smooth
from ddiloco.core.syncer_state import (
  Member,
  SyncerState,
  forget_pending,
  ignored,
  member_note,
  publish_to,
  set_member,
)


def lost_at(member: Member, sync: SyncConfig) -> float:
  """When a learner that stays silent stops being available; adapts to its own step time."""
  return member.heard_at + max(sync.liveness_seconds, sync.liveness_steps * member.step_seconds)


def _new_member(state: SyncerState, incarnation: int, now: float) -> Member:
  none = tuple(-1 for _ in state.fragments)
  zero = tuple(0.0 for _ in state.fragments)
  return Member(incarnation, now, none, tuple(0 for _ in none), none, zero, zero)


def on_message(
  state: SyncerState, message: Message, now: float, sync: SyncConfig
) -> tuple[SyncerState, list[SyncerAction]]:
  if not isinstance(message, Hello | Report | Goodbye):
    return state, [ignored(message, "not for shards")]
  member = state.members.get(message.learner)
  if member and message.incarnation < member.incarnation:
    return state, [ignored(message, "an old incarnation of this learner")]
  match message:
    case Hello():
      return _on_hello(state, message, member, now, sync)
    case Report():
      return _on_report(state, message, member, now, sync)
  if member is None:
    return state, []
  state = forget_pending(set_member(state, message.learner, None), message.learner)
  return state, [member_note(message.learner, "left", "said goodbye")]


def _on_hello(
  state: SyncerState, hello: Hello, member: Member | None, now: float, sync: SyncConfig
) -> tuple[SyncerState, list[SyncerAction]]:
  actions: list[SyncerAction] = []
  new = member is None or hello.incarnation > member.incarnation
  if member is None or new:
    state = forget_pending(state, hello.learner)
    member = _new_member(state, hello.incarnation, now)
    actions.append(member_note(hello.learner, "joined", f"incarnation {hello.incarnation}"))
  owned = tuple(f.index for f in state.fragments)
  welcome = Welcome(state.shard, state.incarnation, hello.incarnation, state.clock, owned)
  actions.append(Send(hello.learner, welcome))
  state = set_member(state, hello.learner, dataclasses.replace(member, heard_at=now, lost=False))
  for learner in sorted(state.members):  # the newcomer, and at the start those it completes
    state, sent = _catch_up(state, learner, now, sync)
    actions += sent
  return state, actions


def _begun(state: SyncerState, sync: SyncConfig) -> bool:
  """Initial values go out once a quorum is here: until then nothing could be merged anyway.

  So in lock-step all learners start at step 0 together.
  """
  learners = sum(m != EVALUATOR for m in state.members)
  return (
    learners >= sync.min_quorum or state.clock > 0 or any(f.version > 0 for f in state.fragments)
  )


def _on_report(
  state: SyncerState, report: Report, member: Member | None, now: float, sync: SyncConfig
) -> tuple[SyncerState, list[SyncerAction]]:
  if len(report.versions) != len(state.fragments) or len(report.since) != len(state.fragments):
    return state, [ignored(report, f"counts {len(report.versions)} fragments, not mine")]
  if any(v > f.version for v, f in zip(report.versions, state.fragments)):
    reason = "has a version from the future: this shard lost commits"
    refusal = Refusal(
      state.shard, state.incarnation, report.incarnation, -1, -1, rejoin=True, reason=reason
    )
    had = {f.index: v for f, v in zip(state.fragments, report.versions) if v > f.version}
    lost = Note("lost", {"learner": report.learner, "versions": had, "reason": reason})
    return state, [lost, Send(report.learner, refusal)]
  actions: list[SyncerAction] = []
  if member is None or report.incarnation > member.incarnation:
    # This shard restarted, or the hello was lost: the report says all there is to know.
    state = forget_pending(state, report.learner)
    member = _new_member(state, report.incarnation, now)
    member = dataclasses.replace(member, versions=report.versions, sent=report.versions)
    actions.append(member_note(report.learner, "joined", "reported"))
  elif member.lost:
    actions.append(member_note(report.learner, "joined", "heard again"))
  delivered = [
    now - at
    for v, old, sent, at in zip(report.versions, member.versions, member.sent, member.waiting_since)
    if v > old and v == sent
  ]
  waiting_since = tuple(
    now if old < v < sent else at  # it comes on, if slowly: nothing is lost
    for v, old, sent, at in zip(report.versions, member.versions, member.sent, member.waiting_since)
  )
  delivery = smooth(member.delivery_seconds, max(delivered)) if delivered else None
  member = dataclasses.replace(
    member,
    heard_at=now,
    versions=report.versions,
    since=report.since,
    waiting_since=waiting_since,
    step_seconds=report.step_seconds,
    delivery_seconds=member.delivery_seconds if delivery is None else delivery,
    resends=0 if delivered else member.resends,
    leaving=report.leaving,
    lost=False,
  )
  state = set_member(state, report.learner, member)
  state = dataclasses.replace(state, clock=max(state.clock, report.clock))
  if member.quarantined:
    refusal = Refusal(
      state.shard, state.incarnation, report.incarnation, -1, -1, True, "quarantined"
    )
    return state, [*actions, Send(report.learner, refusal)]
  state, sent = _catch_up(state, report.learner, now, sync)
  return state, [*actions, *sent]


def _catch_up(
  state: SyncerState, learner: int, now: float, sync: SyncConfig
) -> tuple[SyncerState, list[SyncerAction]]:
  """Sends, whole, what a member should have by now and has not."""
  actions: list[SyncerAction] = []
  if state.members[learner].lost or not _begun(state, sync):
    return state, actions
  patience = max(sync.liveness_seconds, 3 * state.members[learner].delivery_seconds)
  for i, f in enumerate(state.fragments):
    member = state.members[learner]
    lags = member.versions[i] < f.version
    overdue = now - member.waiting_since[i] > backed_off(patience, member.resends)
    if lags and (member.sent[i] < f.version or overdue):
      again = member.sent[i] == f.version
      state, publish = publish_to(state, i, learner, now, update=False)
      member = dataclasses.replace(state.members[learner], resends=member.resends + again)
      state = set_member(state, learner, member)
      actions.append(publish)
  return state, actions


def lose_silent(
  state: SyncerState, now: float, sync: SyncConfig
) -> tuple[SyncerState, list[SyncerAction]]:
  actions: list[SyncerAction] = []
  for learner, member in list(state.members.items()):
    if not member.lost and now >= lost_at(member, sync):
      state = set_member(state, learner, dataclasses.replace(member, lost=True))
      state = forget_pending(state, learner)
      actions.append(member_note(learner, "lost", f"silent for {now - member.heard_at:.2f} s"))
  return state, actions
