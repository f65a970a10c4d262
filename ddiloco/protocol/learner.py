"""What a learner decides: joining, answering pulls, applying published versions. PURE.

Read with `roles/learner.py`, which performs the actions. A learner never waits for another role
once it has joined, unless `sync.blocking` asks for lock-step. The evaluator is a learner that does
not train: it only ever receives.
"""

from __future__ import annotations

import math
from typing import cast

from ddiloco.config import SyncConfig
from ddiloco.protocol import actions, events, messages, moments, rules, states
from ddiloco.protocol.actions import LearnerAction, LearnerEvent, Send, Stage
from ddiloco.protocol.messages import INITIAL, NOTHING, Publish, Pull, Push, Rejection
from ddiloco.protocol.states import IncomingVersion, LearnerFragment, LearnerOutcome, LearnerState
from ddiloco.protocol.values import put, replace

STALE_PERIODS = 4  # after more own sync periods and more missed versions, my work is given up
MISSED: events.Mode = "halve"  # how rebase applies a version that lacks my push


def init(
  learner: int,
  incarnation: int,
  owners: tuple[int, ...],
  target_tokens: int,
  trains: bool = True,
  donor_seconds: float = 0.0,
) -> LearnerState:
  """A learner that has nothing yet. `owners[p]` is the shard of fragment p; () trains alone.

  In a run under way it waits before its first step for a peer's moments, at most `donor_seconds`
  for each fragment's.
  """
  return LearnerState(
    learner=learner,
    incarnation=incarnation,
    shards=(-1,) * (max(owners, default=-1) + 1),
    fragments=tuple(LearnerFragment(shard) for shard in owners),
    target_tokens=target_tokens,
    trains=trains,
    donor_seconds=donor_seconds,
    vector_clock={learner: rules.numbered(incarnation, 0)},
  )


def revive(saved: LearnerState, new: LearnerState) -> LearnerState:
  """A learner that goes on from its captured state: with its own unmerged progress and counters.

  It makes no step before every shard has said what is newer. Fragments may have other owners now.

  Args:
    saved: its captured state.
    new: the same learner's next incarnation, as `init` makes it.
  """

  def mine(f: LearnerFragment, shard: int) -> LearnerFragment:
    sent = f.outstanding
    if sent is not None:
      sent = replace(sent, push=replace(sent.push, incarnation=new.incarnation))
    incoming = tuple(replace(entry, ready=True) for entry in f.incoming)
    return replace(f, shard=shard, fresh=False, outstanding=sent, pull=None, incoming=incoming)

  return replace(
    new,
    fragments=tuple(mine(f, other.shard) for f, other in zip(saved.fragments, new.fragments)),
    step=saved.step,
    global_step=saved.global_step,
    trained_tokens=saved.trained_tokens,
    step_seconds=saved.step_seconds,
    snapshot=saved.snapshot,
    vector_clock=states.join_clocks(saved.vector_clock, new.vector_clock),
  )


# --- The reducer: a step, a version that lies ready, the answers to pulls


def learner_on(state: LearnerState, event: LearnerEvent, sync: SyncConfig) -> LearnerOutcome:
  """The learner's reducer. Call it between inner steps only: its actions happen there."""
  if state.done:
    return state, []
  before = state.joined
  match event:
    case actions.Tick(now):
      state, todo = moments.ask(state, now)
    case actions.Taken():
      state, todo = moments.taken(state, event)
    case actions.Unmade():
      state, todo = replace(state, whole=True), []
    case actions.StepDone():
      state, todo = _count_step(state, event), []
    case actions.Staged(fragment, now):
      state, todo = _mark_ready(state, fragment), []
      ready_for = max(0.0, state.stepped_at - now)
      state = replace(state, idle_seconds=state.waited_seconds + ready_for)
    case actions.Received(message, now):
      state, todo = on_message(state, message, sync)
      if any(isinstance(action, Stage) for action in todo):
        state = replace(state, waited_seconds=max(0.0, state.stepped_at - now))
  state, applied = _apply_ready(state, sync)
  joined = []
  if state.joined and not before:
    joined = [events.Joined(global_step=state.global_step)]
    state = moments.want(state, event.now)
  state, answered = _answer_pulls(state)
  state, finished = _finish(state)
  return state, [*todo, *applied, *joined, *answered, *finished]


def _count_step(state: LearnerState, event: actions.StepDone) -> LearnerState:
  def one_more(f: LearnerFragment) -> LearnerFragment:
    return replace(
      f, steps_since_sync=f.steps_since_sync + 1, steps=f.steps + 1, tokens=f.tokens + event.tokens
    )

  return replace(
    state,
    step=state.step + 1,
    global_step=state.global_step + 1,
    trained_tokens=state.trained_tokens + event.tokens,
    step_seconds=rules.smooth(state.step_seconds, event.seconds or state.step_seconds),
    stepped_at=event.now,
    idle_seconds=0.0,
    fragments=tuple(map(one_more, state.fragments)),
  )


def _mark_ready(state: LearnerState, fragment: int) -> LearnerState:
  """Staging keeps the order of publishes: the oldest entry that is not ready has been staged."""
  incoming = state.fragments[fragment].incoming
  i = next(i for i, entry in enumerate(incoming) if not entry.ready)
  ready = put(incoming, i, replace(incoming[i], ready=True))
  return state.with_fragment(fragment, incoming=ready)


def _apply_ready(state: LearnerState, sync: SyncConfig) -> LearnerOutcome:
  todo: list[LearnerAction] = []
  for p in range(len(state.fragments)):
    while (entry := next(iter(state.fragments[p].incoming), None)) and entry.ready:
      early = entry.merged and state.step - entry.merged.at_step < sync.overlap_steps
      if sync.blocking and early and not state.leaving:  # a leaving learner makes no such step
        break
      state = state.with_fragment(p, **_after_apply(state.fragments[p], entry, state.step))
      applied = events.Apply(
        fragment=p,
        version=entry.publish.version,
        round=entry.publish.round,
        mode=entry.mode,
        included=entry.merged is not None,
      )
      todo.append(applied)
  return state, todo


def _after_apply(f: LearnerFragment, entry: IncomingVersion, step: int) -> dict:
  """The fragment's counters after one version was applied: every token has one fate."""
  mine = entry.merged.push.tokens if entry.merged else 0
  steps_since_sync = step - entry.merged.at_step if entry.merged else 0
  steps = f.steps - (entry.merged.push.steps if entry.merged else 0)
  tokens, discarded = f.tokens - mine, 0
  if entry.mode not in events.KEEPS_WORK:
    steps, tokens, discarded = 0, 0, tokens
  return {
    "version": entry.publish.version,
    "round": entry.publish.round,
    "merged_tokens": entry.publish.merged_tokens,
    "steps_since_sync": steps_since_sync,
    "steps": steps,
    "tokens": tokens,
    "acknowledged_tokens": f.acknowledged_tokens + mine,
    "discarded_tokens": f.discarded_tokens + discarded,
    "incoming": f.incoming[1:],
  }


def _answer_pulls(state: LearnerState) -> LearnerOutcome:
  todo: list[LearnerAction] = []
  for p, f in enumerate(state.fragments):
    if f.pull and f.pull.base_version == f.version and f.steps > 0 and not f.incoming:
      count = state.vector_clock[state.learner] + 1
      state = state.heard(state.learner, count)
      push = Push(
        *state.me,
        fragment=p,
        round=f.pull.round,
        base_version=f.version,
        steps=f.steps,
        tokens=f.tokens,
        snapshot=state.snapshot,
        count=count,
        codec="",  # the role fills it in, with the payload
      )
      sent = states.Outstanding(push, state.step)
      state = state.with_fragment(p, pull=None, outstanding=sent)
      todo.append(Send(f.shard, push))
  return state, todo


def _finish(state: LearnerState) -> LearnerOutcome:
  if state.leaving and not any(_holds_up(state, f) for f in state.fragments):
    return leave(state, "left, and everything it had is merged")
  reached = state.merged_tokens if state.fragments else state.trained_tokens
  if not (state.joined and state.trains) or reached < state.target_tokens:
    return state, []  # the evaluator stays until it has saved the model
  return leave(state, f"{reached} tokens are merged" if state.fragments else "trained its share")


def _holds_up(state: LearnerState, f: LearnerFragment) -> bool:
  """Whether a leaving learner waits for this fragment; not for a complete one."""
  return f.tokens > 0 and f.merged_tokens < state.target_tokens


# --- How it handles a message: welcome, pull, request for a value, publish, rejection


def on_message(state: LearnerState, message: messages.Message, sync: SyncConfig) -> LearnerOutcome:
  """Takes a shard's message in, unless it is outdated or meant for another role."""
  if (
    not isinstance(message, messages.ToLearner)
    or message.shard >= len(state.shards)
    or message.incarnation < state.shards[message.shard]
    or message.learner_incarnation != state.incarnation
  ):
    reason = "not for this incarnation of the learner, or from an old one of its shard"
    return state, [events.Ignored(message=type(message).__name__, reason=reason)]
  if message.incarnation > state.shards[message.shard]:
    # A new incarnation of a shard fences the old one, whose pulls are void.
    state = replace(
      state,
      shards=put(state.shards, message.shard, message.incarnation),
      fragments=tuple(
        replace(f, pull=None) if f.shard == message.shard else f for f in state.fragments
      ),
    )
  state, captured = _capture(state, message)
  p, todo = getattr(message, "fragment", -1), list[LearnerAction]()
  owned = 0 <= p < len(state.fragments) and state.fragments[p].shard == message.shard
  match message:
    case messages.Welcome():
      state, todo = _on_welcome(state, message, sync)
    case messages.ForwardMoments():
      state, todo = moments.on_forward_moments(state, message)
    case Pull() if owned:
      state, todo = _on_pull(state, message, sync)
    case messages.RequestValue() if owned:
      state, todo = _on_request_value(state, message)
    case messages.ProvideMoments() if owned:
      state, todo = moments.on_provide_moments(state, message)
    case Publish() if owned:
      state, todo = _on_publish(state, message, sync)
    case Rejection(round=-1, rejoin=False):
      state = replace(state, wants_until=-math.inf)  # of its request for moments: no donor is there
    case Rejection():
      state, todo = _on_rejection(state, message, state.fragments[p] if owned else None)
  return state, [*captured, *todo]


def _capture(state: LearnerState, message: messages.ToLearner) -> LearnerOutcome:
  """A role that hears of a newer snapshot captures its state before it takes that message in.

  So nothing that a sender merged or trained after its capture is in mine: the messages of rounds
  carry the snapshot's number as a marker (Lai and Yang 1987). Messages under way at the capture
  count as lost; the protocol sends them again.
  """
  number = getattr(message, "snapshot", 0)
  if number <= state.snapshot:
    return state, []
  state = replace(state, snapshot=number)
  return state, [actions.TakeSnapshot(state)] if state.trains else []


def _on_welcome(state: LearnerState, welcome: messages.Welcome, sync: SyncConfig) -> LearnerOutcome:
  """A fragment is fresh if I have the shard's newest value or a newer one; the others follow."""
  rounds = dict(zip(welcome.fragments, welcome.rounds))  # of this shard's own fragments
  fragments = tuple(
    replace(f, fresh=f.fresh or f.newest_round >= rounds.get(p, math.inf))
    for p, f in enumerate(state.fragments)
  )
  # In lock-step a learner that missed a version gets the global step with that version.
  global_step = state.global_step if sync.blocking else max(state.global_step, welcome.global_step)
  return replace(state, fragments=fragments, global_step=global_step), []


def _on_pull(state: LearnerState, pull: Pull, sync: SyncConfig) -> LearnerOutcome:
  f = state.fragments[pull.fragment]
  sent = f.outstanding
  newest = max(f.pull.round if f.pull else -1, sent.push.round if sent else -1)
  if pull.round < newest:
    return state, []  # round ids only grow: this round was abandoned, a newer one has begun
  if sent and sent.push.round == pull.round:
    return state, [actions.Resend(sent.push)]
  if sent and sync.blocking and sent.push.base_version == pull.base_version:
    # A restarted shard asks again. In lock-step the step of a push is fixed: the same push answers.
    again = replace(sent, push=replace(sent.push, round=pull.round))
    said = events.Resend(fragment=pull.fragment, round=pull.round, old_round=sent.push.round)
    state = state.with_fragment(pull.fragment, outstanding=again)
    return state, [said, actions.Resend(again.push)]
  return state.with_fragment(pull.fragment, pull=pull), []


def _on_request_value(state: LearnerState, request: messages.RequestValue) -> LearnerOutcome:
  header = state.fragments[request.fragment].base_header
  assert header is not None, "it has said that it has a newer value"
  count = state.vector_clock[state.learner]
  value = messages.Value(*state.me, header, state.snapshot, count)
  return state, [Send(request.shard, value)]


def _on_publish(state: LearnerState, publish: Publish, sync: SyncConfig) -> LearnerOutcome:
  f = state.fragments[publish.fragment]
  usable = publish.base_round in (NOTHING, f.newest_round)
  if publish.round <= f.newest_round or not usable:
    return state, []  # a duplicate, or an update to a version I do not have: it comes again whole
  sent = f.outstanding
  included = sent is not None and sent.push.round == publish.merged_round(state.learner)
  mode = _mode(state, f, publish, included, sync)
  # In lock-step a learner counts the global step itself, from 0, until a version lacks its push:
  # the others are as far as the shard says, and have had that round. They would wait for the next
  # one, which bounds what the shard is told by a member that lies.
  reached = publish.global_step
  if sync.blocking:
    began = rules.due_at(publish.fragment, publish.version - 1, sync)
    most = began + sync.sync_period + sync.overlap_steps
    reached = 0 if included or publish.round == INITIAL else min(max(reached, began), most)
  state = replace(state, global_step=max(state.global_step, reached))
  state = state.heard(states.shard_key(publish.shard), publish.count)
  state = state.with_fragment(publish.fragment, fresh=True)
  return _stage(state, publish, mode, sent if included else None)


def _mode(
  state: LearnerState, f: LearnerFragment, publish: Publish, included: bool, sync: SyncConfig
) -> events.Mode:
  """How to apply a new version, which has my outstanding push if `included`."""
  if f.base_header is None or not state.trains:
    return "overwrite"
  if not included:
    # A push of mine has been merged that I do not remember: I was restored from a snapshot, or a
    # shard got back a value that it had lost. My progress is in the new version already, and so is
    # what rounding had lost before that push.
    if publish.merged_round(state.learner) > f.base_header.merged_round(state.learner):
      return "reset"
    # The others made the same progress meanwhile: to add mine to theirs would count it twice.
    if min(publish.version - f.newest_version, f.steps / sync.sync_period) > STALE_PERIODS:
      return "overwrite"
    if sync.apply == "rebase":
      return MISSED
  return cast(events.Mode, sync.apply)  # the config checks the value


def _stage(
  state: LearnerState, publish: Publish, mode: events.Mode, merged: states.Outstanding | None
) -> LearnerOutcome:
  header = replace(publish, payload=None)
  incoming = (*state.fragments[publish.fragment].incoming, IncomingVersion(header, mode, merged))
  changes = {"base_header": header, "outstanding": None, "incoming": incoming}
  state = state.with_fragment(publish.fragment, **changes)
  return state, [Stage(publish, mode, included=merged is not None)]


def _on_rejection(
  state: LearnerState, rejection: Rejection, f: LearnerFragment | None
) -> LearnerOutcome:
  """My push was rejected: go back to the base, which is staged again, without its payload."""
  logged = events.Rejected(
    shard=rejection.shard,
    shard_incarnation=rejection.incarnation,
    fragment=rejection.fragment,
    round=rejection.round,
    rejoin=rejection.rejoin,
    reason=rejection.reason,
  )
  if f is None or f.outstanding is None or f.outstanding.push.round != rejection.round:
    return state, [logged]
  assert f.base_header is not None, "a push has a base"
  state, todo = _stage(state, f.base_header, "reset", None)
  return state, [logged, *todo]


# --- For the role: whether the next step may begin, what to report, how to leave


def can_step(state: LearnerState, sync: SyncConfig) -> bool:
  """May the next inner step start? Always, once joined, unless the run is in lock-step."""
  ready = state.joined and not state.leaving and not state.wants
  return ready and not (sync.blocking and waiting_for(state, sync))


def waiting_for(state: LearnerState, sync: SyncConfig) -> str:
  """Lock-step only: why the next step must not start yet, or ''.

  Fragments take turns, in the order in which they are due, which their newest versions say. A
  learner waits for the fragment whose turn it is, and for a later fragment only while its own
  pushes for all earlier ones are on their way. So learners that are out of step after kills and
  losses wait for the same fragment and never for each other: a learner that is due for a later
  fragment goes on until it is due for the earlier one as well.
  """
  due_at = [rules.due_at(p, f.newest_version, sync) for p, f in enumerate(state.fragments)]
  turns = sorted(range(len(due_at)), key=due_at.__getitem__)
  for p, f in enumerate(state.fragments):
    merged = next((i.merged for i in f.incoming if i.merged), None)
    if merged and state.step - merged.at_step >= sync.overlap_steps:
      return f"fragment {p}: its new version"  # the version is here, and being staged
  for p in turns:
    f = state.fragments[p]
    if f.merged_tokens >= state.target_tokens:
      continue  # complete: it is not pulled any more
    if f.outstanding is None:
      due = not f.incoming and _due_in_lock_step(state, p, f, sync)
      return f"fragment {p}: the pull" if due else ""
    if state.step - f.outstanding.at_step >= sync.overlap_steps:
      return f"fragment {p}: its new version"
  return ""


def reports(state: LearnerState, sync: SyncConfig) -> list[LearnerAction]:
  """The reports that the role sends at the end of every step boundary, and as a sign of life."""
  sends: list[LearnerAction] = []
  for shard in range(len(state.shards)):
    mine = [(p, f) for p, f in enumerate(state.fragments) if f.shard == shard]
    report = messages.Report(
      *state.me,
      global_step=state.global_step,
      step_seconds=state.step_seconds,
      versions=tuple(f.version for _, f in mine),
      rounds=tuple(f.round for _, f in mine),
      steps_since_sync=tuple(_due_steps(state, p, f, sync) for p, f in mine),
      leaving=state.leaving,
      snapshot=state.snapshot,
      idle_seconds=state.idle_seconds,
      joins=not all(f.fresh for _, f in mine),
      whole=state.whole,
    )
    sends.append(Send(shard, report))
  return sends


def _due_steps(state: LearnerState, p: int, f: LearnerFragment, sync: SyncConfig) -> int:
  """Steps since the last sync, as reported, so that the fragment is due when it should be.

  A leaving learner makes no further step: every fragment with unmerged steps is due, no other is.
  In lock-step the learner alone knows whether a fragment is due. One with an outstanding push is:
  the learner waits for the version, and if the round was abandoned, no further step would make the
  fragment due.
  """
  if state.leaving:
    return max(f.steps_since_sync, 1) if f.steps else 0
  if sync.blocking:
    enough = rules.due_after(p, f.version, sync)
    due = f.outstanding or _due_in_lock_step(state, p, f, sync)
    return enough if due else min(f.steps_since_sync, enough - 1)
  return f.steps_since_sync


def _due_in_lock_step(state: LearnerState, p: int, f: LearnerFragment, sync: SyncConfig) -> bool:
  """A learner without an unmerged step on the fragment could not answer the pull."""
  return f.steps > 0 and state.global_step >= rules.due_at(p, f.version, sync)


def drain(state: LearnerState) -> LearnerState:
  """Make no more steps, and leave as soon as everything trained is merged."""
  return replace(state, leaving=True)


def unmerged_tokens(state: LearnerState) -> int:
  """Trained, and lost if the learner ended now: of the fragment with the most such tokens."""
  return max((f.tokens for f in state.fragments if _holds_up(state, f)), default=0)


def leave(state: LearnerState, reason: str) -> LearnerOutcome:
  """Say goodbye to every shard and stop."""
  goodbye = messages.Goodbye(*state.me)
  sends = [Send(shard, goodbye) for shard in range(len(state.shards))]
  stopped = events.Stopped(reason=reason, unmerged_tokens=unmerged_tokens(state))
  return replace(state, done=True), [*sends, stopped]
