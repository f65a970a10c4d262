"""What a learner makes of a message: welcome, pull, recall, publish, refusal. PURE."""

from __future__ import annotations

import dataclasses

from ddiloco.config import SyncConfig
from ddiloco.core import causality, donations
from ddiloco.core.learner_state import (
  FragmentClock,
  Incoming,
  LearnerState,
  Outstanding,
  set_fragment,
)
from ddiloco.core.messages import (
  INITIAL,
  NOTHING,
  TO_LEARNER,
  Donate,
  Inherit,
  Message,
  Publish,
  Pull,
  Recall,
  Refusal,
  Value,
  Welcome,
  flat,
  pairs,
)
from ddiloco.core.protocol import Give, LearnerAction, Note, Record, Rejoin, Resend, Stage
from ddiloco.core.values import replace


def on_message(
  state: LearnerState, message: Message, sync: SyncConfig
) -> tuple[LearnerState, list[LearnerAction]]:
  if not isinstance(message, TO_LEARNER):
    return state, [Note("ignored", {"reason": f"{type(message).__name__} is not for learners"})]
  if message.shard >= len(state.shards):
    return state, [Note("ignored", {"reason": f"no shard {message.shard} in this run"})]
  known = state.shards[message.shard].incarnation
  if message.incarnation < known:
    return state, [Note("ignored", {"reason": f"shard {message.shard} is an old incarnation"})]
  if message.learner_incarnation != state.incarnation:
    return state, [Note("ignored", {"reason": "meant for another incarnation of this learner"})]
  if message.incarnation > known:
    state = _meet_shard(state, message.shard, message.incarnation)
  state, recorded = _record(state, message)
  match message:
    case Welcome():
      state, actions = _on_welcome(state, message, sync)
    case Pull():
      state, actions = _on_pull(state, message, sync)
    case Recall():
      state, actions = _on_recall(state, message)
    case Donate():
      state, actions = donations.on_donate(state, message)
    case Inherit():
      state, actions = donations.on_inherit(state, message)
    case Publish():
      state, actions = _on_publish(state, message, sync)
    case Refusal():
      state, actions = _on_refusal(state, message)
  return state, [*recorded, *actions]


def _record(state: LearnerState, message: Message) -> tuple[LearnerState, list[LearnerAction]]:
  """Whoever hears of a newer snapshot records what it is before it takes that message in.

  So nothing that came after the sender's record is in mine (Lai and Yang 1987): the marker rides on
  the messages. What is under way at the cut counts as lost; the protocol sends it again.
  """
  number = getattr(message, "snapshot", 0)
  if number <= state.snapshot:
    return state, []
  state = replace(state, snapshot=number)
  return state, [Record(number, state)] if state.joined and state.trains else []


def _meet_shard(state: LearnerState, shard: int, incarnation: int) -> LearnerState:
  """A new incarnation of a shard fences the old one: what that one asked for is void."""
  shards = list(state.shards)
  shards[shard] = replace(shards[shard], incarnation=incarnation)

  def forget(f: FragmentClock) -> FragmentClock:
    return replace(f, pull=None) if f.shard == shard else f

  fragments = tuple(map(forget, state.fragments))
  return replace(state, shards=tuple(shards), fragments=fragments)


def _on_welcome(
  state: LearnerState, welcome: Welcome, sync: SyncConfig
) -> tuple[LearnerState, list[LearnerAction]]:
  """What I have as new as my shard is fresh; the rest follows."""
  rounds = dict(zip(welcome.fragments, welcome.rounds))

  def compared(p: int, f: FragmentClock) -> FragmentClock:
    has = (
      f.known is not None and f.shard == welcome.shard and f.newest >= rounds.get(p, f.newest + 1)
    )
    return replace(f, fresh=f.fresh or has)

  fragments = tuple(compared(p, f) for p, f in enumerate(state.fragments))
  # In lock-step who has missed something hears the clock with that.
  clock = state.clock if sync.blocking else max(state.clock, welcome.clock)
  return replace(state, fragments=fragments, clock=clock), []


def _owned(state: LearnerState, message: Pull | Recall | Publish | Refusal) -> FragmentClock | None:
  if not 0 <= message.fragment < len(state.fragments):
    return None
  f = state.fragments[message.fragment]
  return f if f.shard == message.shard else None


def _on_pull(
  state: LearnerState, pull: Pull, sync: SyncConfig
) -> tuple[LearnerState, list[LearnerAction]]:
  f = _owned(state, pull)
  if f is None or pull.base_version < f.received or not state.trains:
    return state, []  # of a round that is over
  outstanding = f.outstanding
  sent = outstanding.push if outstanding else None
  newest = max(f.pull.round if f.pull else -1, sent.round if sent else -1)
  if pull.round < newest:
    return state, []  # rounds only go up: this one was abandoned, and my push for a newer counts
  if sent and sent.round == pull.round:
    return state, [Resend(sent)]
  if outstanding and sent and sync.blocking and sent.base_version == pull.base_version:
    # A restarted shard asks anew. In lock-step the step of a cut is fixed: it is the same push.
    again = replace(outstanding, push=replace(sent, round=pull.round))
    return set_fragment(state, pull.fragment, outstanding=again), [Resend(again.push)]
  return set_fragment(state, pull.fragment, pull=pull), []


def _on_recall(state: LearnerState, recall: Recall) -> tuple[LearnerState, list[LearnerAction]]:
  f = _owned(state, recall)
  if f is None or f.known is None:
    return state, []
  value = Value(
    learner=state.learner,
    incarnation=state.incarnation,
    fragment=recall.fragment,
    version=f.known.version,
    round=f.known.round,
    merged_tokens=f.known.merged_tokens,
    participants=f.known.participants,
    merged_rounds=f.known.merged_rounds,
    snapshot=state.snapshot,
    seen=flat(causality.told(state.seen, state.snapshot)),
  )
  return state, [Give(value)]


def _on_publish(
  state: LearnerState, publish: Publish, sync: SyncConfig
) -> tuple[LearnerState, list[LearnerAction]]:
  f = _owned(state, publish)
  if f is None:
    return state, []
  usable = publish.base_round in (NOTHING, f.newest)
  if publish.round <= f.newest or not usable:
    return state, []  # a duplicate, or an update to a version I do not have: it comes again whole
  merged = publish.merged_round(state.learner)
  included = f.outstanding is not None and merged == f.outstanding.push.round
  mode = "overwrite" if f.known is None or not state.trains else sync.apply
  if f.known is not None and not included and merged > f.known.merged_round(state.learner):
    # A push has been merged that I do not remember: I am back with what I had recorded once, or a
    # shard is back with a value that it had lost. My progress is in the new version already.
    mode = "overwrite"
  # In lock-step everybody keeps count for itself, from 0 if nothing was missed.
  counts = sync.blocking and (state.joined or included or publish.round == INITIAL)
  clock = state.clock if counts else max(state.clock, publish.clock)
  seen = causality.join(state.seen, dict(pairs(publish.seen)))
  state = replace(state, clock=clock, seen=seen)
  header = replace(publish, payload=None)
  state = set_fragment(state, publish.fragment, known=header, fresh=True)
  return _stage(state, publish, mode, f.outstanding if included else None)


def _stage(
  state: LearnerState, publish: Publish, mode: str, merged: Outstanding | None
) -> tuple[LearnerState, list[LearnerAction]]:
  header = replace(publish, payload=None)
  incoming = (*state.fragments[publish.fragment].incoming, Incoming(header, mode, merged))
  state = set_fragment(
    state, publish.fragment, received=publish.version, outstanding=None, incoming=incoming
  )
  return state, [Stage(publish, mode, included=merged is not None)]


def _on_refusal(state: LearnerState, refusal: Refusal) -> tuple[LearnerState, list[LearnerAction]]:
  """My push was rejected: go back to the base, as an update of nothing to the version I have."""
  note = Note("refused", dataclasses.asdict(refusal))
  if refusal.rejoin:
    return state, [note, Rejoin(refusal.reason)]
  f = _owned(state, refusal)
  if f is None or f.outstanding is None or f.outstanding.push.round != refusal.round:
    return state, [note]
  back = Publish(
    shard=refusal.shard,
    incarnation=refusal.incarnation,
    learner_incarnation=state.incarnation,
    fragment=refusal.fragment,
    round=f.newest,
    version=f.received,
    base_version=f.received,
    base_round=f.newest,
    clock=state.clock,
    merged_tokens=f.merged_tokens,
    participants=(),
    merged_rounds=(),
    snapshot=0,
    seen=(),
    codec="",
  )
  state, actions = _stage(state, back, "overwrite", None)
  return state, [note, *actions]
