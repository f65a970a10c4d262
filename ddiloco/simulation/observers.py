"""A virtual run's events: the kinds and fields that a real run's roles record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ddiloco.protocol import events
from ddiloco.protocol.actions import (
  Apply,
  Commit,
  CopyOut,
  InstallValue,
  Resend,
  Stage,
  StepDone,
  TakeSnapshot,
)
from ddiloco.protocol.events import Event, stamped
from ddiloco.protocol.learner_state import schedule_step
from ddiloco.protocol.messages import Push
from ddiloco.protocol.syncer_state import FragmentState
from ddiloco.simulation.actors import Actor, Learner, Role, Shard, VirtualPart

# --- What a virtual run tells of itself, and where others may play a part in it

if TYPE_CHECKING:
  from ddiloco.simulation.actors import Actor, Learner, Role, VirtualPart


class Observer:
  """Knows nothing and does nothing; override what you care about.

  A virtual run has no parameters. An observer may play them: keep what belongs to a learner in
  `actor.parameters`, which snapshots take along, and give payloads to cuts and given values.
  """

  def born(self, actor: Actor, part: VirtualPart | None) -> None:
    """An incarnation begins, with its part of a snapshot or with nothing."""

  def stepped(self, actor: Learner, done: StepDone, gap_seconds: float, blocked: float) -> None:
    """An inner step has ended; the reducer is told next. Seconds since the one before it ended, and
    of these, spent waiting for a shard."""

  def on(self, actor: Actor, action: Any, event: Any) -> Any:
    """It performs this action now (all but sends). Returns the payload of a `Cut` or `Give`."""

  def performed(self, actor: Actor, actions: Sequence[Any]) -> None:
    """All that one event has led to is done."""

  def pushed(self, actor: Learner, push: Push) -> None:
    """What was cut is encoded, and goes out for the first time."""

  def published(self, actor: Actor, message: Any) -> None:
    """A shard sends a version."""

  def saved(self, snapshot: int, role: Role, seconds: float, reason: str) -> None:
    """A part of a snapshot is written; not if there is a reason."""

  def complete(self, snapshot: int, states: Mapping[Role, VirtualPart]) -> None:
    """All parts of a snapshot are there."""

  def holds(self, state: FragmentState) -> None:
    """A shard begins with this value of a snapshot."""

  def supervisor(self, event: Event) -> None:
    """What an engine would note: fault, exit, restart."""


class Events(Observer):
  """Turns what happens into events.

  Outer gradients have no values here: a push carries the factor that a fault multiplies it with.

  Args:
    emit: takes each of them, in order of time.
    now: the world's time, seconds.
    planned_tokens: of a step of all planned learners together, for the learning rate's schedule.
    describe: what a learner says of itself when it starts: devices, batch size, planned steps.
  """

  def __init__(
    self,
    emit: Callable[[Event], None],
    now: Callable[[], float],
    planned_tokens: int,
    describe: Callable[[int], Mapping[str, Any]],
  ):
    self._emit, self._now, self._describe = emit, now, describe
    self._planned_tokens = planned_tokens
    self._rounds: dict[tuple[Actor, int], int] = {}  # of the push that is out, by fragment
    self._incarnations: dict[Role, int] = {}
    self._merged: dict[str, Any] = {}  # of the commit under way

  def say(self, role: Role | str, incarnation: int, event: Event) -> None:
    """One event."""
    name = role if isinstance(role, str) else f"{role[0]}-{role[1]}"
    self._emit(stamped(event, self._now(), name, incarnation))

  def supervisor(self, event: Event) -> None:
    self.say("engine", 0, event)

  def born(self, actor: Actor, part: VirtualPart | None) -> None:
    self._incarnations[actor.role] = actor.incarnation
    if isinstance(actor, Shard):
      self._of(actor, events.Started(fragments=tuple(f.index for f in actor.state.fragments)))
      for f in actor.state.fragments:
        self._own(actor, f)
      return
    if part is not None:
      snapshot = part.state.snapshot
      self._of(
        actor, events.Restored(snapshot=snapshot, of_incarnation=part.incarnation, seconds=0.0)
      )
      for p, f in enumerate(actor.state.fragments):
        if f.outstanding:
          self._rounds[actor, p] = f.outstanding.push.round
    self._of(actor, events.Started(**self._describe(actor.number)))

  def stepped(self, actor: Learner, done: StepDone, gap_seconds: float, blocked: float) -> None:
    self._of(
      actor,
      events.Step(
        step=actor.state.step + 1,
        global_step=actor.state.global_step + 1,
        position=actor.state.global_step,
        tokens=done.tokens,
        seconds=done.seconds,
        gap_seconds=gap_seconds,
        blocked_seconds=blocked,
        schedule_step=schedule_step(actor.state, self._planned_tokens),
      ),
    )

  def on(self, actor: Actor, action: Any, event: Any) -> Any:
    match action:
      case CopyOut():
        return self._copy_out(actor, action)
      case Resend(push):
        old = self._rounds[actor, push.fragment]
        if push.round != old:
          self._of(actor, events.Resend(fragment=push.fragment, round=push.round, old_round=old))
          self._rounds[actor, push.fragment] = push.round
      case Stage(publish, mode, included):
        where = {"fragment": publish.fragment, "version": publish.version, "round": publish.round}
        self._of(actor, events.Stage(**where, mode=mode, included=included))
      case Apply(fragment, version, round_id, mode, included):
        where = {"fragment": fragment, "version": version, "round": round_id}
        self._of(actor, events.Apply(**where, mode=mode, included=included))
      case TakeSnapshot(snapshot):
        self._of(actor, events.Captured(snapshot=snapshot, seconds=0.0))
      case InstallValue(fragment):
        self._own(actor, next(f for f in actor.state.fragments if f.index == fragment))
      case Commit():
        seconds = actor.merging_seconds
        self._merged = {"participants": _weights(action), "merge_seconds": seconds}
      case events.Commit():
        self._of(actor, msgspec.structs.replace(action, **self._merged))
      case events.Joined():
        self._of(actor, msgspec.structs.replace(action, seconds=self._now() - actor.born_at))
      case Event():
        self._of(actor, action)
    return None

  def pushed(self, actor: Learner, push: Push) -> None:
    self._of(
      actor,
      events.Push(
        fragment=push.fragment,
        round=push.round,
        version=push.base_version,
        steps=push.steps,
        tokens=push.tokens,
        bytes=actor.world.size(push),
      ),
    )

  def saved(self, snapshot: int, role: Role, seconds: float, reason: str) -> None:
    if reason:
      self.say(role, self._incarnations[role], events.Unsaved(snapshot=snapshot, reason=reason))
    else:
      self.say(
        role, self._incarnations[role], events.Saved(snapshot=snapshot, seconds=seconds, arrays={})
      )

  def complete(self, snapshot: int, states: Mapping[Role, VirtualPart]) -> None:
    first, roles = ("syncer", 0), tuple(sorted(f"{kind}-{n}" for kind, n in states))
    self.say(
      first, self._incarnations[first], events.Snapshot(snapshot=snapshot, roles=roles, seconds=0.0)
    )

  def _of(self, actor: Actor, event: Event) -> None:
    self.say(actor.role, actor.incarnation, event)

  def _own(self, actor: Actor, f: FragmentState) -> None:
    where = {"fragment": f.index, "version": f.version, "round": f.last_round}
    self._of(actor, events.Owns(**where, momentum_round=f.last_round))

  def _copy_out(self, actor: Actor, cut: CopyOut) -> float:
    push, factor = cut.push, 1.0 if actor.faults is None else actor.faults.poison
    self._rounds[actor, push.fragment] = push.round
    self._of(
      actor,
      events.CopyOut(
        fragment=push.fragment,
        round=push.round,
        version=push.base_version,
        base_round=actor.state.fragments[push.fragment].round,
        steps=push.steps,
        tokens=push.tokens,
        factor=factor,
      ),
    )
    return factor


def _weights(commit: Commit) -> dict[int, float]:
  """Of every participant: tokens x tokens a step, normalised."""
  raw = [tokens * tokens / steps for steps, tokens in zip(commit.steps, commit.tokens)]
  total = sum(raw)
  return {m: round(w / total, 6) for m, w in zip(commit.learners, raw)}
