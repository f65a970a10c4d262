"""What a syncer shard decides: membership, snapshots, and which versions its members lack. PURE.

Read with `roles/syncer.py`, which performs the actions. A shard owns some fragments outright: a
round lives and ends inside it (`protocol/rounds.py`), and shards agree on nothing with each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ddiloco.config import SyncConfig
from ddiloco.protocol import actions, events, messages, moments, rounds, rules, states
from ddiloco.protocol.actions import ReadDone, Received, Send, SyncerAction
from ddiloco.protocol.messages import EVALUATOR, INITIAL, FragmentState, Rejection, Report, Value
from ddiloco.protocol.states import Member, SyncerOutcome, SyncerState, ignored
from ddiloco.protocol.values import put, replace

FIRST_STEP_SECONDS = 60.0  # that a learner may be silent before any learner has made a step


def init(
  shard: int,
  incarnation: int,
  fragments: tuple[FragmentState, ...],
  sync: SyncConfig,
  target_tokens: int,
  recovery_deadline: float = -math.inf,
  first_round: int = 0,
  began_at: float = 0.0,
  **more: Any,
) -> SyncerState:
  """A shard that owns these fragments: new ones, or the newest commits of an earlier incarnation.

  Before `recovery_deadline` it starts no round until all learners it knew are back: they may have
  newer values. A shard that knew none waits for the planned learners 0, 1, ..., as at the start of
  a run. Its state is not captured for snapshots that its values may already depend on.

  Args:
    shard: its number.
    incarnation: of the shard.
    fragments: what it owns, as of their newest commits.
    sync: the protocol's settings.
    target_tokens: to merge into every fragment.
    recovery_deadline: when it stops waiting for learners that may have newer values.
    first_round: smaller rounds are of an earlier run, whose values are not taken here.
    began_at: when the run began, seconds on this shard's clock: bounds the global step.
    more: of the run, fields of the state: `planned_learners`, `step_tokens`, `fewest_tokens`,
      `passes_moments`.
  """
  snapshot = max((f.snapshot for f in fragments), default=0)
  # On a host that has joined the run lately its start is not known, but the run is at least as old
  # as the values that were found.
  found = [f.last_round for f in fragments if f.last_round != INITIAL]
  return SyncerState(
    shard=shard,
    incarnation=incarnation,
    fragments=tuple(replace(f, snapshot=snapshot) for f in fragments),
    sync=sync,
    target_tokens=target_tokens,
    first_round=min([first_round, *found]),
    beliefs=rules.Beliefs(reach_at=began_at),
    global_step=max((f.global_step for f in fragments), default=0),
    # A former life may have begun so many rounds that their numbers are greater than this life's.
    rounds=max(0, max(found, default=-1) + 1 - rules.numbered(incarnation, 0)),
    snapshot=snapshot,
    vector_clock={states.shard_key(shard): rules.numbered(incarnation, 0)},
    known_rounds={f.index: f.last_round for f in fragments},
    recovery_deadline=recovery_deadline,
    **more,
  )


def finished(state: SyncerState, now: float, silence_seconds: float) -> bool:
  """Whether the run needs this shard no more: an evaluator has saved the final model, and all
  members have left or are silent.

  No other role has the whole model, so an evaluator is waited for without a limit. After a restart
  the members have until the recovery deadline to be here again.
  """
  here = any(now - member.heard_at < silence_seconds for member in state.members.values())
  return state.model_saved and complete(state) and not here and now >= state.recovery_deadline


def complete(state: SyncerState) -> bool:
  """Whether all of its fragments have merged the run's tokens."""
  return all(state.complete(f) for f in state.fragments)


def syncer_on(state: SyncerState, event: actions.SyncerEvent) -> SyncerOutcome:
  """The shard's reducer. Messages only change the state; a `Tick` after them decides on rounds."""
  match event:
    case Received():
      return _take_in(state, event)
    case ReadDone(message):
      if isinstance(message, messages.Push):
        return rounds.keep_push(state, message, event)
      return _install(state, message, event)
    case actions.Resumed(now):
      return replace(state, awake_since=now), []
  state, lost = lose_silent(state, min(event.now, event.heard_until))
  state, moved = rounds.advance_rounds(state, event.now)
  state, started = rounds.start_rounds(state, event.now)
  begun: list[SyncerAction] = []
  # In lock-step a run cannot go on from a snapshot that lacks the learners of a quorum.
  enough = not state.sync.blocking or len(joined(state)) >= state.quorum
  state = replace(state, saving=state.saving and not event.saved)
  # Once my fragments are final nothing that I send would carry the number to the learners.
  if state.shard == 0 and not state.saving and enough and not complete(state):
    every = max(1, state.sync.snapshot_steps)
    state, begun = _capture(state, state.global_step // every * every)
  return state, [*lost, *moved, *started, *begun]


def _take_in(state: SyncerState, event: Received) -> SyncerOutcome:
  message, now = event.message, event.now
  if not isinstance(message, messages.ToShard):
    return state, [ignored(message, "not for shards")]
  if fault := _message_fault(state, message):
    return state, [ignored(message, fault)]
  number = getattr(message, "snapshot", 0)
  if isinstance(message, Report):
    state = state.believe_global_step(message, now)
  # After a number from the future no other would ever begin. Snapshots begin by the global step,
  # which different roles see a little differently. My own number counts: it may be that of a
  # snapshot from which I am back, made before the first commit.
  if number > max(state.snapshot, state.global_step + 2 * state.sync.sync_period):
    return state, [ignored(message, "names a snapshot that the run has not reached")]
  state, captured = _capture(state, number)
  todo: list[SyncerAction] = []
  match message:
    case messages.Push():
      state, todo = rounds.on_push(state, message, now)
    case Report():
      state, todo = _on_report(state, message, event)
    case Value():
      state, todo = _on_value(state, message, now)
    case messages.RequestMoments():
      state, todo = moments.on_request_moments(state, message, now, event.unsent)
    case messages.Moments():
      state, todo = moments.on_moments(state, message, now)
    case messages.Goodbye():
      others = {m: each for m, each in state.members.items() if m != message.learner}
      saved = state.model_saved or message.learner == EVALUATOR  # which leaves no sooner
      state = replace(state.forget(message.learner), members=others, model_saved=saved)
      todo = [events.Member(learner=message.learner, state="left", reason="said goodbye")]
  return state, [*captured, *todo]


def _capture(state: SyncerState, snapshot: int) -> SyncerOutcome:
  """A new snapshot: begun here by the global step, or heard of from a role that has captured.

  Its number is the global step at which it is due. So numbers also grow when a run goes on with
  another `snapshot_steps`.

  From now on this shard's pulls and publishes carry the number, and a role that hears it captures
  its state as well. Only shard 0 begins snapshots, each after the previous one is done. If each
  role skipped snapshots that come while it is busy, each would skip different ones, and no snapshot
  would ever be complete.
  """
  every = state.sync.snapshot_steps
  if snapshot <= state.snapshot or not every or snapshot % every:  # no other number is ever begun
    return state, []
  fragments = tuple(replace(f, snapshot=snapshot) for f in state.fragments)
  state = replace(state, snapshot=snapshot, fragments=fragments)
  return replace(state, saving=True), [actions.TakeSnapshot(state)]


def joined(state: SyncerState) -> list[int]:
  """The learners that have the whole model: a snapshot's are those whose parts are expected."""
  return [
    m
    for m, member in sorted(state.members.items())
    if m != EVALUATOR and not member.lost and min(member.versions, default=-1) >= 0
  ]


def next_wake(state: SyncerState) -> float:
  """When the state needs a `Tick` even if no message comes; inf: never.

  A round may reach its deadline then, or wait for a member that is lost to silence. All else that
  waits for a time is less urgent: the role ticks several times a second anyway.
  """
  deadlines = (r.deadline for r in state.under_way.values() if not r.measuring)
  return min([state.silent_at, *deadlines])


# --- members: reports, silence, and versions they lack --------------------------------------------


def lost_at(state: SyncerState, member: Member) -> float:
  """When a learner that stays silent counts as lost; adapts to the learner's step time, which is
  known after its first step. Until then the usual one counts, and a minute if none is known."""
  step_seconds = member.step_seconds or rules.usual_pace(state.beliefs)
  patience = state.sync.liveness_steps * step_seconds or FIRST_STEP_SECONDS
  return member.heard_at + max(state.sync.liveness_seconds, patience)


def _message_fault(state: SyncerState, message: messages.ToShard) -> str:
  """Why a message is ignored, or ""."""
  member = state.members.get(message.learner)
  if member is not None and message.incarnation < member.incarnation:
    return "an old incarnation of this learner"
  if not isinstance(message, Report):
    known = member is not None and message.incarnation == member.incarnation
    saved = isinstance(message, messages.Goodbye) and message.learner == EVALUATOR
    heard = known or saved or isinstance(message, Value)  # these two also by a restarted shard
    return "" if heard else "an unknown learner or incarnation"
  counts = (len(message.versions), len(message.rounds), len(message.steps_since_sync))
  if counts != (len(state.fragments),) * 3:
    return f"counts {counts[0]} fragments, not mine"
  newer = [r for r, f in zip(message.rounds, state.fragments) if r > f.last_round]
  if any(not state.first_round <= r < state.first_own_round for r in newer):
    return "has a value of a round that never was"
  return ""


def _run_began(state: SyncerState) -> bool:
  """Whether a quorum has been here: only then do initial values go out.

  Before that no round could commit anyway; and in lock-step all learners start at step 0 together.
  """
  if state.global_step > 0 or any(f.version > 0 for f in state.fragments):
    return True
  return len(state.members) - (EVALUATOR in state.members) >= state.quorum


def _on_report(state: SyncerState, report: Report, event: Received) -> SyncerOutcome:
  now, me, todo = event.now, report.learner, list[SyncerAction]()
  if report.joins:
    todo.append(Send(me, _welcome(state, report.incarnation)))
  mine = zip(report.rounds, state.fragments)
  if newer := {f.index: r for r, f in mine if state.is_newer(f, r)}:
    state, asked = _request_values(state, report, newer, now)
    return state, [*todo, *asked]
  state, lost = _note_lost(state, report)
  todo += lost
  said, member = _compared(state, report.rounds, report.versions), state.members.get(me)
  if member is None or report.incarnation > member.incarnation:
    # Of an earlier incarnation only the norms of its pushes stay known.
    state, steps, never = state.forget(me), (0,) * len(said), (0.0,) * len(said)
    norms, life = member.norms if member else never, report.incarnation
    member = Member(life, now, said, steps, sent=said, sent_at=never, norms=norms)
    reason = f"incarnation {report.incarnation}"
    todo.append(events.Member(learner=me, state="joined", reason=reason))
  elif member.lost:  # resends of what it lacks need not wait
    member = replace(member, lost=False, resends=0, resent_at=-math.inf)
    todo.append(events.Member(learner=me, state="joined", reason="heard again"))
  # No life loses a version: such a report is an old one, whose steps no longer count. Else one that
  # said so again and again would be measured anew each time that it has the version back, and all
  # others would wait for hours until what they lack is sent again.
  versions = tuple(map(max, said, member.versions))
  if report.whole and not member.whole:  # initial values that it should make count as not sent
    member = replace(member, whole=True, sent=versions)
  begun = _run_began(state)
  state, member = _note_arrived(state, member, versions, now, report.idle_seconds)
  member = replace(
    member,
    heard_at=max(now, member.heard_at),
    versions=versions,
    steps_since_sync=tuple(
      rules.believed_steps_since(s, state.global_step, f.global_step, state.sync) * (v == known)
      for s, f, v, known in zip(report.steps_since_sync, state.fragments, said, versions)
    ),
    step_seconds=rules.believed_step_seconds(state.beliefs, report.step_seconds),
    leaving=report.leaving,
  )
  silent_at = min(state.silent_at, lost_at(state, member))
  state = replace(state, members={**state.members, me: member}, silent_at=silent_at)
  if member.quarantined:
    rejection = Rejection(*state.to(report.incarnation), -1, -1, True, "quarantined")
    return state, [*todo, Send(me, rejection)]
  state = state.mark_dirty(
    i
    for i, f in enumerate(state.fragments)
    if i not in state.under_way and state.could_push(me, i) and state.is_due(me, i)
  )
  # Versions go to the learner that reports; if it completes the first quorum, to all that waited.
  for learner in (me,) if begun else sorted(state.members):
    state, sent = _catch_up(state, learner, event, event.unsent and learner == me)
    todo += sent
  return state, todo


def _welcome(state: SyncerState, incarnation: int) -> messages.Welcome:
  return messages.Welcome(
    *state.to(incarnation),
    global_step=state.global_step,
    fragments=tuple(f.index for f in state.fragments),
    rounds=tuple(f.last_round for f in state.fragments),
    snapshot=state.snapshot,
  )


def _note_arrived(
  state: SyncerState, member: Member, versions: tuple[int, ...], now: float, idle_seconds: float
) -> tuple[SyncerState, Member]:
  """How long the versions that a new report confirms took until this report, and how long from the
  decision to commit until they lay ready at this learner.

  A learner takes up publishes, and applies staged versions, at the ends of its steps. Its report
  says how long the version waited for these ends (`idle_seconds`), which is subtracted. The second
  time is measured only on versions that follow the learner's previous one and were sent once, and
  on none that was on its way while this shard stood still.
  """
  was = zip(versions, member.versions, member.sent, member.sent_at)
  came = [(v, old, at) for v, old, sent, at in was if old < v == sent]
  if not came:
    return state, member
  for v, old, at in came:
    if 0 <= old == v - 1 and not member.resends and at >= state.awake_since:
      seconds = max(0.0, now - at - idle_seconds)
      member = replace(member, sync_seconds=rules.smooth(member.sync_seconds, seconds))
  took = now - min(at for _, _, at in came)
  # A single member that confirms late must not make all others wait longer for a resend.
  believed = min(took, 2 * state.delivery_seconds + state.sync.liveness_seconds)
  state = replace(state, delivery_seconds=rules.smooth(state.delivery_seconds, believed))
  delivery_seconds = rules.smooth(member.delivery_seconds, took)
  return state, replace(member, delivery_seconds=delivery_seconds, resends=0, resent_at=-math.inf)


def _compared(
  state: SyncerState, rounds: tuple[int, ...], versions: tuple[int, ...]
) -> tuple[int, ...]:
  """A member's versions in this shard's numbers: one with another round's value counts as old."""
  return tuple(
    f.version if r == f.last_round else min(v, f.version - 1)
    for r, v, f in zip(rounds, versions, state.fragments)
  )


def _request_values(
  state: SyncerState, said: Report, rounds: Mapping[int, int], now: float
) -> SyncerOutcome:
  """This shard has lost what these rounds made (it and its copies died together), and this learner
  has it. Of several learners with a value of the same round one is asked at a time; learners with
  values of different rounds are all asked."""
  todo: list[SyncerAction] = []
  requests = dict(state.value_requests)
  for p, r in rounds.items():
    new = states.ValueRequest(-math.inf, 0, r, first_at=now)
    before = requests.get((p, said.learner), new)
    patience = rules.backed_off(state.sync.liveness_seconds, before.times - 1)
    asked = any(
      q == p and each.round == r and now < each.asked_at + state.sync.liveness_seconds
      for (q, _), each in requests.items()
    )
    if asked or now < before.asked_at + patience:
      continue
    requests[p, said.learner] = replace(before, asked_at=now, times=before.times + 1, round=r)
    request = messages.RequestValue(*state.to(said.incarnation), p)
    todo.append(Send(said.learner, request))
  return replace(state, value_requests=requests), todo


def _on_value(state: SyncerState, value: Value, now: float) -> SyncerOutcome:
  key = value.publish.fragment, value.learner
  request = state.value_requests.get(key)
  if request is None or request.reading == value.incarnation:
    return state, [ignored(value, "a duplicate" if request else "it was not asked for")]
  requests = {**state.value_requests, key: replace(request, reading=value.incarnation)}
  return replace(state, value_requests=requests), [actions.Read(value, now)]


def _install(state: SyncerState, value: Value, event: ReadDone) -> SyncerOutcome:
  """Takes a value that was read as the fragment's, if it is newer than the one that is here."""
  given, requests = value.publish, state.value_requests
  i, key = state.position(given.fragment), (given.fragment, value.learner)
  if i is None or key not in requests:
    return state, [ignored(value, "it is no longer asked for")]
  requests = {**requests, key: replace(requests[key], reading=-1)}
  state, f = replace(state, value_requests=requests), state.fragments[i]
  if event.fault:
    return state, [ignored(value, event.fault), *_give_up(state, value, event.fault)]
  if max(given.merged_rounds.values(), default=-1) > given.round:
    return state, [ignored(value, "cannot have merged what it says")]
  requests = {k: r for k, r in requests.items() if k[0] != f.index or r.round > given.round}
  if not state.is_newer(f, given.round):
    return state, [ignored(value, "not newer than what is here, or never made")]
  todo = list[SyncerAction]()
  if i in state.under_way:  # its pushes are changes of the value before
    void = replace(state.under_way[i], pushes={}, norms={})
    state, todo = rounds.end_round(state, i, void, "a newer value was given back", event.now)
  f = FragmentState(
    f.index,
    version=given.version,
    merged_tokens=given.merged_tokens,
    merged_rounds=given.merged_rounds,
    last_round=given.round,
    global_step=max(0, state.global_step - state.sync.sync_period),
    snapshot=state.snapshot,
  )
  known = {**state.known_rounds, f.index: f.last_round}
  state = replace(
    state.heard(value.learner, value.count),
    fragments=put(state.fragments, i, f),
    value_requests=requests,
    known_rounds=known,
  )
  for learner, m in state.members.items():  # until a report says that a member has this value
    state = state.with_member(learner, versions=put(m.versions, i, -1), sent=put(m.sent, i, -1))
  return state, [
    *todo,
    actions.InstallValue(f.index, event.content),
    events.Regained(
      fragment=f.index,
      version=f.version,
      round=f.last_round,
      learner=value.learner,
      merged_tokens=f.merged_tokens,
    ),
  ]


def _give_up(state: SyncerState, value: Value, fault: str) -> list[SyncerAction]:
  """A learner whose value is refused again and again starts afresh: it takes no older value, so it
  would never be a member again. If that befell all learners, the run would stand still."""
  fragment = value.publish.fragment
  if state.value_requests[fragment, value.learner].times < state.sync.quarantine_after:
    return []
  reason = f"the value of fragment {fragment} that it gives back is refused: {fault}"
  rejection = Rejection(*state.to(value.incarnation), -1, -1, True, reason)
  logged = events.Member(learner=value.learner, state="quarantined", reason=reason)
  return [Send(value.learner, rejection), logged]


def _note_lost(state: SyncerState, report: Report) -> SyncerOutcome:
  """Logs, once a fragment, that a learner has a value of an earlier incarnation of this shard that
  is too late to be given back."""
  had = {
    f.index: v
    for f, r, v in zip(state.fragments, report.rounds, report.versions)
    if max(state.known_rounds.get(f.index, -1), state.first_round - 1)
    < r
    < min(state.first_own_round, f.last_round)
  }
  if not had:
    return state, []
  known = {**state.known_rounds, **dict.fromkeys(had, state.first_own_round)}
  state = replace(state, known_rounds=known)
  reason = "has a version that this shard lost, and went on without"
  return state, [events.Lost(learner=report.learner, versions=had, reason=reason)]


def _catch_up(state: SyncerState, learner: int, event: Received, unsent: bool) -> SyncerOutcome:
  """Sends, whole, the versions that a member should have by now and lacks.

  A publish that is still queued here, or waits for the buddy, is not lost, however slow the link
  is: patience begins when it has left, or earlier if a publish before it was lost.
  """
  todo: list[SyncerAction] = []
  now = event.now
  if event.held:
    state = replace(state, held_at={**state.held_at, **dict.fromkeys(event.held, now)})
  if state.members[learner].lost or not _run_began(state):
    return state, todo
  if unsent:
    state = state.with_member(learner, resent_at=now)
  member = state.members[learner]
  lacks = [i for i, f in enumerate(state.fragments) if member.versions[i] < f.version]
  since = member.sent_at
  patience = max(
    state.sync.liveness_seconds, 3 * state.delivery_seconds, 3 * member.delivery_seconds
  )
  for i in sorted(lacks, key=lambda i: since[i]):
    f, member = state.fragments[i], state.members[learner]
    # Resend one at a time. The next resend is after a report of it, or after twice the patience: on
    # a slow link a resend costs as much as the publish that it replaces.
    held_at = state.held_at.get(f.index, 0.0) if member.versions[i] == f.version - 1 else 0.0
    waited = now - max(since[i], member.resent_at, held_at)
    overdue = waited > rules.backed_off(patience, member.resends, math.inf)
    again = member.sent[i] == f.version
    if not again or overdue:
      state, publish = state.publish_to(i, learner, now)
      if again:
        state = state.with_member(learner, resends=member.resends + 1, resent_at=now)
      todo.append(publish)
  return state, todo


def lose_silent(state: SyncerState, now: float) -> SyncerOutcome:
  """Marks silent members as lost. Skips the loop until the first one can be: members are many."""
  todo: list[SyncerAction] = []
  if now < state.silent_at:
    return state, todo
  for learner, member in list(state.members.items()):
    if not member.lost and now >= lost_at(state, member):
      state = state.with_member(learner, lost=True).forget(learner)
      reason = f"silent for {now - member.heard_at:.2f} s"
      todo.append(events.Member(learner=learner, state="lost", reason=reason))
  there = [lost_at(state, member) for member in state.members.values() if not member.lost]
  return replace(state, silent_at=min(there, default=math.inf)), todo
