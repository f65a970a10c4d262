"""What a learner decides: joining, answering pulls, applying published versions. PURE.

Read with `runtime/learner.py`, which performs the actions. A learner never waits for anybody once
it has joined, unless `sync.blocking` asks for lock-step. The evaluator is a learner that does not
train: it only ever receives.
"""

from __future__ import annotations

import functools
import math

from ddiloco.config import SyncConfig
from ddiloco.core import causality, donations, learner_messages
from ddiloco.core.learner_state import (
  FragmentClock,
  Incoming,
  LearnerState,
  Outstanding,
  ShardView,
  set_fragment,
)
from ddiloco.core.messages import Goodbye, Hello, Push, Report, flat
from ddiloco.core.protocol import (
  Apply,
  Cut,
  LearnerAction,
  LearnerEvent,
  Note,
  Received,
  Send,
  Staged,
  StepDone,
  Taken,
  Tick,
  due_after,
  smooth,
)
from ddiloco.core.values import replace

HELLO_SECONDS = 0.5  # between two hellos to a shard that has not answered, doubling ...
HELLO_SECONDS_MOST = 8.0  # ... up to this


def init(
  learner: int,
  incarnation: int,
  owners: tuple[int, ...],
  target_tokens: int,
  trains: bool = True,
  donor_seconds: float = 0.0,
) -> LearnerState:
  """A learner that has nothing yet. `owners[p]` is the shard of fragment p; () trains alone.

  In a run under way it waits at most `donor_seconds` for a peer's moments before its first step.
  """
  return LearnerState(
    learner=learner,
    incarnation=incarnation,
    shards=tuple(ShardView() for _ in range(max(owners, default=-1) + 1)),
    fragments=tuple(FragmentClock(shard) for shard in owners),
    target_tokens=target_tokens,
    trains=trains,
    donor_seconds=donor_seconds,
    seen={learner: causality.count(incarnation, 0)},
  )


def revive(
  saved: LearnerState, incarnation: int, owners: tuple[int, ...], target_tokens: int
) -> LearnerState:
  """A learner that goes on from what it recorded once: with its own unmerged progress and counters.

  It makes no step before every shard has said what is newer; shards may have changed their number.
  """

  def mine(f: FragmentClock, shard: int) -> FragmentClock:
    sent = f.outstanding
    if sent is not None:
      sent = replace(sent, push=replace(sent.push, incarnation=incarnation))
    incoming = tuple(replace(entry, ready=True) for entry in f.incoming)
    return replace(f, shard=shard, fresh=False, outstanding=sent, pull=None, incoming=incoming)

  new = init(saved.learner, incarnation, owners, target_tokens, saved.trains)
  return replace(
    saved,
    incarnation=incarnation,
    shards=new.shards,
    fragments=tuple(map(mine, saved.fragments, owners)),
    target_tokens=target_tokens,
    seen=causality.join(saved.seen, new.seen),
    cuts=0,
    donations=0,
    wants=(),
    leaving=False,
    done=False,
  )


def can_step(state: LearnerState, sync: SyncConfig) -> bool:
  """May the next inner step start? Always, once joined, unless the run is in lock-step."""
  if not state.joined or state.done or state.leaving or not state.trains or state.wants:
    return False
  return not (sync.blocking and state.fragments and waiting_for(state, sync))


def waiting_for(state: LearnerState, sync: SyncConfig) -> str:
  """Lock-step only: why the next step must not start yet, or ''."""
  for p, f in enumerate(state.fragments):
    if f.merged_tokens >= state.target_tokens:
      continue  # complete: nobody asks for it any more
    sent = f.outstanding or next((i.merged for i in f.incoming if i.merged), None)
    if sent is not None and state.step - sent.at_step >= sync.overlap_steps:
      return f"fragment {p}: its new version"
    if sent is None and not f.incoming and f.since >= due_after(p, f.version, sync):
      return f"fragment {p}: the pull"
  return ""


def reports(state: LearnerState) -> list[LearnerAction]:
  """What the runtime sends at the end of every step boundary, and as a sign of life."""
  sends: list[LearnerAction] = []
  owned: list[list[FragmentClock]] = [[] for _ in state.shards]
  for f in state.fragments:
    owned[f.shard].append(f)
  for shard, mine in enumerate(owned):
    report = Report(
      learner=state.learner,
      incarnation=state.incarnation,
      clock=state.clock,
      step_seconds=state.step_seconds,
      versions=tuple(f.version for f in mine),
      rounds=tuple(f.round for f in mine),
      since=tuple(_due_steps(state, f) for f in mine),
      leaving=state.leaving,
      snapshot=state.snapshot,
    )
    sends.append(Send(shard, report))
  return sends


def _due_steps(state: LearnerState, f: FragmentClock) -> int:
  """Who leaves makes no further step: whatever it has is due, and nothing else."""
  if not state.leaving:
    return f.since
  return max(f.since, 1) if f.steps else 0


def learner_on(
  state: LearnerState, event: LearnerEvent, sync: SyncConfig
) -> tuple[LearnerState, list[LearnerAction]]:
  """The learner's reducer. Call it between inner steps only: what it decides happens there."""
  if state.done:
    return state, []
  before = state.joined
  match event:
    case Tick(now):
      state, actions = _say_hello(state, now)
      state, asked = donations.ask(state, now)
      actions += asked
    case Taken(fragment):
      state, actions = donations.taken(state, fragment)
    case StepDone():
      state, actions = _count_step(state, event), []
    case Staged(fragment, version):
      state, actions = _mark_ready(state, fragment, version), []
    case Received(message):
      state, actions = learner_messages.on_message(state, message, sync)
  state, applied = _apply_ready(state, sync)
  joined = []
  if state.joined and not before:
    joined = [Note("joined", {"clock": state.clock})]
    state = donations.want(state, event.now)
  state, answered = _answer_pulls(state)
  state, finished = _finish(state)
  return state, [*actions, *applied, *joined, *answered, *finished]


def _say_hello(state: LearnerState, now: float) -> tuple[LearnerState, list[LearnerAction]]:
  lacking = _lacking(state)
  if not lacking:
    return state, []
  shards = list(state.shards)
  actions: list[LearnerAction] = []
  for number, view in enumerate(shards):
    if number in lacking and now >= view.next_hello_at:
      pause = min(HELLO_SECONDS * 2**view.hellos, HELLO_SECONDS_MOST)
      shards[number] = replace(view, hellos=view.hellos + 1, next_hello_at=now + pause)
      rounds = tuple(f.round for f in state.fragments if f.shard == number)
      actions.append(Send(number, Hello(state.learner, state.incarnation, rounds)))
  return replace(state, shards=tuple(shards)), actions


def next_wake(state: LearnerState) -> float:
  """When a `Tick` does something even if no message comes, seconds; inf: never."""
  lacking = _lacking(state)
  times = [state.shards[s].next_hello_at for s in lacking]
  if state.wants:
    times += [state.ask_at, state.wants_until]
  return min(times, default=math.inf)


def _lacking(state: LearnerState) -> set[int]:
  """Shards that have not welcomed it, or not sent all it needs."""
  lacking = {f.shard for f in state.fragments if not f.fresh}
  lacking.update(s for s, view in enumerate(state.shards) if view.incarnation < 0)
  return lacking


def _count_step(state: LearnerState, event: StepDone) -> LearnerState:
  def one_more(f: FragmentClock) -> FragmentClock:
    return replace(f, since=f.since + 1, steps=f.steps + 1, tokens=f.tokens + event.tokens)

  return replace(
    state,
    step=state.step + 1,
    clock=state.clock + 1,
    trained_tokens=state.trained_tokens + event.tokens,
    step_seconds=smooth(state.step_seconds, event.seconds),
    fragments=tuple(map(one_more, state.fragments)),
  )


def _mark_ready(state: LearnerState, fragment: int, version: int) -> LearnerState:
  """Staging keeps the order of publishes, so the oldest unready one is the one that is staged."""
  incoming = list(state.fragments[fragment].incoming)
  for i, entry in enumerate(incoming):
    if not entry.ready:
      if entry.publish.version != version:
        raise RuntimeError(f"staged version {version}, expected {entry.publish.version}")
      incoming[i] = replace(entry, ready=True)
      break
  return set_fragment(state, fragment, incoming=tuple(incoming))


def _apply_ready(state: LearnerState, sync: SyncConfig) -> tuple[LearnerState, list[LearnerAction]]:
  actions: list[LearnerAction] = []
  for p in range(len(state.fragments)):
    while (entry := next(iter(state.fragments[p].incoming), None)) and entry.ready:
      early = entry.merged and state.step - entry.merged.at_step < sync.overlap_steps
      if sync.blocking and early and not state.leaving:  # who leaves never gets to that step
        break
      f = _received(state.fragments[p], entry, state.step)
      state = set_fragment(state, p, **f)
      new, included = entry.publish, entry.merged is not None
      actions.append(Apply(p, new.version, new.round, entry.mode, included))
  return state, actions


def _received(f: FragmentClock, entry: Incoming, step: int) -> dict:
  """The fragment's counters after one version was applied: every token has one fate."""
  mine = entry.merged.push.tokens if entry.merged else 0
  since = step - entry.merged.at_step if entry.merged else 0
  steps = f.steps - (entry.merged.push.steps if entry.merged else 0)
  tokens, discarded = f.tokens - mine, 0
  if entry.mode != "rebase":
    steps, tokens, discarded = 0, 0, tokens
  return {
    "version": entry.publish.version,
    "round": entry.publish.round,
    "merged_tokens": entry.publish.merged_tokens,
    "since": since,
    "steps": steps,
    "tokens": tokens,
    "acknowledged_tokens": f.acknowledged_tokens + mine,
    "discarded_tokens": f.discarded_tokens + discarded,
    "incoming": f.incoming[1:],
  }


def _answer_pulls(state: LearnerState) -> tuple[LearnerState, list[LearnerAction]]:
  actions: list[LearnerAction] = []
  for p, f in enumerate(state.fragments):
    if f.pull is None or f.incoming:
      continue
    if f.pull.base_version < f.version:
      state = set_fragment(state, p, pull=None)
    elif f.pull.base_version == f.version and f.steps > 0:
      mine = causality.count(state.incarnation, state.cuts + 1)
      seen = causality.join(state.seen, {state.learner: mine})
      state = replace(state, seen=seen, cuts=state.cuts + 1)
      push = Push(
        learner=state.learner,
        incarnation=state.incarnation,
        fragment=p,
        round=f.pull.round,
        base_version=f.version,
        steps=f.steps,
        tokens=f.tokens,
        clock=state.clock,
        snapshot=state.snapshot,
        seen=flat(causality.told(seen, state.snapshot)),
        codec="",  # the runtime's business, like the payload
      )
      state = set_fragment(state, p, pull=None, outstanding=Outstanding(push, state.step))
      actions.append(Cut(push))
  return state, actions


def _finish(state: LearnerState) -> tuple[LearnerState, list[LearnerAction]]:
  if state.leaving and not any(_holds_up(state, f) for f in state.fragments):
    return leave(state, "left, and everything it had is merged")
  reached = state.merged_tokens if state.fragments else state.trained_tokens
  if not state.joined or reached < state.target_tokens:
    return state, []
  return leave(state, f"{reached} tokens are merged" if state.fragments else "trained its share")


def _holds_up(state: LearnerState, f: FragmentClock) -> bool:
  """Whether a leaving learner still waits for this fragment; not if it is complete or lacking."""
  unfinished = f.version >= 0 and f.merged_tokens < state.target_tokens
  return unfinished and bool(f.tokens or f.outstanding or f.incoming)


def drain(state: LearnerState) -> LearnerState:
  """Make no more steps, and leave as soon as everything trained is merged."""
  return replace(state, leaving=True)


def unmerged_tokens(state: LearnerState) -> int:
  """Trained in this incarnation and lost if it ended now: of the fragment that lacks most."""
  return max((f.tokens for f in state.fragments if _holds_up(state, f)), default=0)


def leave(state: LearnerState, reason: str) -> tuple[LearnerState, list[LearnerAction]]:
  """Say goodbye to every shard and stop."""
  goodbye = functools.partial(Goodbye, state.learner, state.incarnation)
  sends = [Send(shard, goodbye()) for shard in range(len(state.shards))]
  return replace(state, done=True), [
    *sends,
    Note("stopped", {"reason": reason, "unmerged_tokens": unmerged_tokens(state)}),
  ]
