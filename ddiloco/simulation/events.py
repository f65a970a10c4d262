"""A virtual run's events: the kinds and fields that a real run's roles record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ddiloco.core.learner_state import schedule_step
from ddiloco.core.messages import Push
from ddiloco.core.protocol import Adopt, Apply, Commit, Cut, Note, Record, Resend, Stage, StepDone
from ddiloco.core.syncer_state import FragmentState
from ddiloco.simulation.actors import Actor, Learner, Part, Role, Shard
from ddiloco.simulation.observer import Observer

Event = dict[str, Any]


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

  def say(self, role: Role | str, incarnation: int, kind: str, /, **fields: Any) -> None:
    """One event."""
    name = role if isinstance(role, str) else f"{role[0]}-{role[1]}"
    head = {"time": round(self._now(), 6), "role": name, "incarnation": incarnation, "kind": kind}
    self._emit({**head, **fields})

  def supervisor(self, kind: str, **fields: Any) -> None:
    self.say("engine", 0, kind, **fields)

  def born(self, actor: Actor, part: Part | None) -> None:
    self._incarnations[actor.role] = actor.incarnation
    if isinstance(actor, Shard):
      self._of(actor, "started", fragments=[f.index for f in actor.state.fragments])
      for f in actor.state.fragments:
        self._own(actor, f)
      return
    if part is not None:
      snapshot = part.state.snapshot
      self._of(actor, "restored", snapshot=snapshot, of_incarnation=part.incarnation, seconds=0.0)
      for p, f in enumerate(actor.state.fragments):
        if f.outstanding:
          self._rounds[actor, p] = f.outstanding.push.round
    self._of(actor, "started", **self._describe(actor.number))

  def stepped(self, actor: Learner, done: StepDone, gap_seconds: float, blocked: float) -> None:
    self._of(
      actor,
      "step",
      step=actor.state.step + 1,
      clock=actor.state.clock + 1,
      position=actor.state.clock,
      tokens=done.tokens,
      seconds=done.seconds,
      gap_seconds=gap_seconds,
      blocked_seconds=blocked,
      schedule_step=schedule_step(actor.state, self._planned_tokens),
    )

  def on(self, actor: Actor, action: Any, event: Any) -> Any:
    match action:
      case Cut():
        return self._cut(actor, action)
      case Resend(push):
        old = self._rounds[actor, push.fragment]
        if push.round != old:
          self._of(actor, "resend", fragment=push.fragment, round=push.round, old_round=old)
          self._rounds[actor, push.fragment] = push.round
      case Stage(publish, mode, included):
        where = {"fragment": publish.fragment, "version": publish.version, "round": publish.round}
        self._of(actor, "stage", **where, mode=mode, included=included)
      case Apply(fragment, version, round_id, mode, included):
        where = {"fragment": fragment, "version": version, "round": round_id}
        self._of(actor, "apply", **where, mode=mode, included=included)
      case Record(snapshot):
        self._of(actor, "recorded", snapshot=snapshot, seconds=0.0)
      case Adopt(fragment):
        self._own(actor, next(f for f in actor.state.fragments if f.index == fragment))
      case Commit():
        seconds = actor.merging_seconds
        self._merged = {"participants": _weights(action), "merge_seconds": seconds}
      case Note("commit", fields):
        self._of(actor, "commit", **fields, **self._merged)
      case Note("joined", fields):
        self._of(actor, "joined", seconds=self._now() - actor.born_at, **fields)
      case Note(kind, fields):
        self._of(actor, kind, **fields)
    return None

  def pushed(self, actor: Learner, push: Push) -> None:
    self._of(
      actor,
      "push",
      fragment=push.fragment,
      round=push.round,
      version=push.base_version,
      steps=push.steps,
      tokens=push.tokens,
      bytes=actor.world.size(push),
    )

  def saved(self, snapshot: int, role: Role, seconds: float, reason: str) -> None:
    if reason:
      self.say(role, self._incarnations[role], "unsaved", snapshot=snapshot, reason=reason)
    else:
      self.say(role, self._incarnations[role], "saved", snapshot=snapshot, seconds=seconds, bytes=0)

  def complete(self, snapshot: int, cut: Mapping[Role, Part]) -> None:
    first, roles = ("syncer", 0), sorted(f"{kind}-{n}" for kind, n in cut)
    self.say(
      first, self._incarnations[first], "snapshot", snapshot=snapshot, roles=roles, seconds=0.0
    )

  def _of(self, actor: Actor, kind: str, /, **fields: Any) -> None:
    self.say(actor.role, actor.incarnation, kind, **fields)

  def _own(self, actor: Actor, f: FragmentState) -> None:
    where = {"fragment": f.index, "version": f.version, "round": f.last_round}
    self._of(actor, "owns", **where, momentum_round=f.last_round)

  def _cut(self, actor: Actor, cut: Cut) -> float:
    push, factor = cut.push, 1.0 if actor.faults is None else actor.faults.poison
    self._rounds[actor, push.fragment] = push.round
    self._of(
      actor,
      "cut",
      fragment=push.fragment,
      round=push.round,
      version=push.base_version,
      base_round=actor.state.fragments[push.fragment].round,
      steps=push.steps,
      tokens=push.tokens,
      **({} if factor == 1.0 else {"factor": factor}),
    )
    return factor


def _weights(commit: Commit) -> dict[str, float]:
  """Of every participant: tokens x tokens a step, normalised."""
  raw = [tokens * tokens / steps for steps, tokens in zip(commit.steps, commit.tokens)]
  total = sum(raw)
  return {str(m): round(w / total, 6) for m, w in zip(commit.learners, raw)}
