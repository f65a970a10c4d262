"""What a syncer shard decides: membership, due fragments, rounds, commits. PURE.

Read with `runtime/syncer.py`, which performs the actions. A shard owns some fragments outright: a
round lives and ends inside it (`core/rounds.py`), and shards agree on nothing with each other.
"""

from __future__ import annotations

import dataclasses

from ddiloco.config import SyncConfig
from ddiloco.core import members, rounds
from ddiloco.core.messages import Push
from ddiloco.core.protocol import Merged, Received, SyncerAction, SyncerEvent, Tick, smooth
from ddiloco.core.syncer_state import FragmentState, SyncerState, complete


def init(
  shard: int, incarnation: int, fragments: tuple[FragmentState, ...], target_tokens: int
) -> SyncerState:
  """A shard that owns these fragments: new ones, or the newest committed ones of its past."""
  return SyncerState(shard, incarnation, fragments, target_tokens)


def finished(state: SyncerState, now: float, silence_seconds: float) -> bool:
  """Whether nobody needs this shard any more: all is merged, all have left or are long silent."""
  return all(complete(state, f) for f in state.fragments) and not any(
    now - m.heard_at < silence_seconds for m in state.members.values()
  )


def syncer_on(
  state: SyncerState, event: SyncerEvent, sync: SyncConfig
) -> tuple[SyncerState, list[SyncerAction]]:
  """The shard's reducer."""
  actions: list[SyncerAction] = []
  match event:
    case Merged(_, seconds):
      return dataclasses.replace(state, sync_seconds=smooth(state.sync_seconds, seconds)), []
    case Received(message=Push() as push):
      state, actions = rounds.on_push(state, push, event)
    case Received(message, now):
      state, actions = members.on_message(state, message, now, sync)
    case Tick():
      pass
  state, lost = members.lose_silent(state, event.now, sync)
  state, moved = rounds.advance_rounds(state, event.now, sync)
  state, started = rounds.start_rounds(state, event.now, sync)
  return state, [*actions, *lost, *moved, *started]


def next_wake(state: SyncerState, sync: SyncConfig) -> float | None:
  """When a `Tick` is needed even if no message comes."""
  times = [members.lost_at(m, sync) for m in state.members.values() if not m.lost]
  for f in state.fragments:
    if f.round and f.round.quorum_at is not None:
      times.append(f.round.quorum_at + rounds.grace_seconds(state, f.round, sync))
    if f.round:
      times.append(f.round.pulled_at + rounds.pull_patience(state, f.round, sync))
  return min(times, default=None)
