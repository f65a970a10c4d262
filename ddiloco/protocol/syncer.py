"""What a syncer shard decides: membership, due fragments, rounds, commits. PURE.

Read with `roles/syncer.py`, which performs the actions. A shard owns some fragments outright: a
round lives and ends inside it (`protocol/rounds.py`), and shards agree on nothing with each other.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from ddiloco.config import SyncConfig
from ddiloco.protocol import causality, members, moments, rounds
from ddiloco.protocol.actions import (
  Received,
  Resumed,
  Saved,
  SyncerAction,
  SyncerEvent,
  TakeSnapshot,
)
from ddiloco.protocol.beliefs import Beliefs
from ddiloco.protocol.messages import EVALUATOR, Moments, Push, Report, RequestMoments
from ddiloco.protocol.syncer_state import (
  FragmentState,
  Member,
  SyncerState,
  believe_global_step,
  complete,
  ignored,
)
from ddiloco.protocol.values import replace


def init(
  shard: int,
  incarnation: int,
  fragments: tuple[FragmentState, ...],
  target_tokens: int,
  recovery_deadline: float = -math.inf,
  planned_learners: int = 0,
  step_tokens: int = 0,
  first_round: int = 0,
  began_at: float = 0.0,
) -> SyncerState:
  """A shard that owns these fragments: new ones, or the newest committed ones of its past.

  Before `recovery_deadline` it starts no round unless all learners it knew are back: they may have
  newer values. A shard that knew none waits for the planned learners 0, 1, ...: at the start of a
  run all are new. Its state is not captured for snapshots that its values may already depend on.

  Args:
    shard: its number.
    incarnation: of the shard.
    fragments: what it owns, as of their newest commits.
    target_tokens: to merge into every fragment.
    recovery_deadline: when it stops waiting for those that may have newer values.
    planned_learners: of the run.
    step_tokens: of the largest step of any learner; 0: not known, so tokens have no bound.
    first_round: rounds before are of an earlier run, whose values are not taken here.
    began_at: when the run began, seconds on this shard's clock: its steps had as long as that.
  """
  snapshot = max((f.snapshot for f in fragments), default=0)
  return SyncerState(
    shard=shard,
    incarnation=incarnation,
    fragments=tuple(replace(f, snapshot=snapshot) for f in fragments),
    target_tokens=target_tokens,
    step_tokens=step_tokens,
    first_round=first_round,
    beliefs=Beliefs(reach_at=began_at),
    global_step=max((f.global_step for f in fragments), default=0),
    snapshot=snapshot,
    vector_clock={causality.shard_key(shard): causality.count(incarnation, 0)},
    began={f.index: f.last_round for f in fragments},
    recovery_deadline=recovery_deadline,
    planned_learners=planned_learners,
  )


def finished(state: SyncerState, now: float, silence_seconds: float) -> bool:
  """Whether this shard is needed no more: all is merged, all have left or are long silent."""
  return all(complete(state, f) for f in state.fragments) and not any(
    now - m.heard_at < silence_seconds for m in state.members.values()
  )


def syncer_on(
  state: SyncerState, event: SyncerEvent, sync: SyncConfig
) -> tuple[SyncerState, list[SyncerAction]]:
  """The shard's reducer. Messages are taken in one by one; a `Tick` after them decides."""
  match event:
    case Received():
      return _take_in(state, event, sync)
    case Resumed(now):
      return replace(state, awake_since=now), []
    case Saved():
      return replace(state, saving=False), []
  state, lost = members.lose_silent(state, min(event.now, event.heard_until), sync)
  state, moved = rounds.advance_rounds(state, event.now, sync, event.measuring)
  state, started = rounds.start_rounds(state, event.now, sync)
  begun: list[SyncerAction] = []
  if state.shard == 0 and not state.saving and _enough_here(state, sync):
    state, begun = _capture(state, state.global_step // max(1, sync.snapshot_steps), sync)
  return state, [*lost, *moved, *started, *begun]


def _take_in(
  state: SyncerState, event: Received, sync: SyncConfig
) -> tuple[SyncerState, list[SyncerAction]]:
  message = event.message
  if fault := members.fault_of(state, message):
    return state, [ignored(message, fault)]
  number = getattr(message, "snapshot", 0)
  if isinstance(message, Report):
    state = believe_global_step(state, message, event.now, sync)
  if _from_the_future(state, number, sync):
    return state, [ignored(message, "names a snapshot that the run has not reached")]
  state, captured = _capture(state, number, sync)
  actions: list[SyncerAction]
  match message:
    case Push():
      state, actions = rounds.on_push(state, message, event, sync)
    case RequestMoments() | Moments() if message.learner not in state.members:
      actions = [ignored(message, "an unknown learner")]
    case RequestMoments():
      state, actions = moments.on_ask(state, message, event.now, sync)
    case Moments():
      state, actions = moments.on_moments(state, message, event.now, sync)
    case _:
      state, actions = members.on_message(state, event, sync)
  return state, [*captured, *actions]


def _from_the_future(state: SyncerState, snapshot: int, sync: SyncConfig) -> bool:
  """Whether this snapshot cannot have begun; believed, it would be the last one.

  Snapshots begin by the global step, of which no two of us see exactly alike.
  """
  return snapshot * sync.snapshot_steps > state.global_step + 2 * sync.sync_period


def _capture(
  state: SyncerState, snapshot: int, sync: SyncConfig
) -> tuple[SyncerState, list[SyncerAction]]:
  """A new snapshot: begun here by the global step, or heard of from a role that has captured.

  From now on every message of this shard says so, and a role that hears it captures its state as
  well. Only shard 0 begins one, after the one before is done: if each role skipped those that come
  while it is busy, each would skip different ones, and no snapshot would ever be complete.
  """
  if snapshot <= state.snapshot or not sync.snapshot_steps:
    return state, []
  fragments = tuple(replace(f, snapshot=snapshot) for f in state.fragments)
  state = replace(state, snapshot=snapshot, fragments=fragments)
  return replace(state, saving=True), [TakeSnapshot(snapshot, state, _here(state))]


def _enough_here(state: SyncerState, sync: SyncConfig) -> bool:
  """In lock-step the run cannot go on from a snapshot without the learners that a round needs."""
  return not sync.blocking or len(_here(state)) >= sync.min_quorum


def _here(state: SyncerState) -> tuple[int, ...]:
  return tuple(m for m, v in sorted(state.members.items()) if _has_all(m, v))


def _has_all(learner: int, member: Member) -> bool:
  return learner != EVALUATOR and not member.lost and min(member.versions, default=-1) >= 0


def next_wake(
  state: SyncerState, sync: SyncConfig, measuring: Collection[int] = ()
) -> float | None:
  """When a `Tick` is needed even if no message comes, nor what is being measured."""
  current = (f.round for f in state.fragments if f.round is not None)
  times = [r.deadline for r in current if r.id not in measuring]
  if state.dirty:
    times.append(rounds.may_start_at(state, sync))
  wake_at = min([state.silent_at, *times])
  return wake_at if math.isfinite(wake_at) else None
