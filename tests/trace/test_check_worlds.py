"""Random virtual runs as traces: storms, kills, restores of everybody; all invariants hold."""

from __future__ import annotations

import collections
import random

import pytest

from ddiloco.protocol import events
from ddiloco.protocol.actions import (
  Apply,
  CopyOut,
  InstallValue,
  Resend,
  Stage,
  TakeSnapshot,
)
from ddiloco.simulation.actors import Actor, Role
from ddiloco.trace import reader
from ddiloco.trace.check import check
from tests.made_events import nothing
from tests.protocol import test_syncer_worlds as test_protocol
from tests.protocol.virtual import World
from tests.trace.traces import typed


class Traced(World):
  """Records what the runtime would record."""

  def start(self, role: Role, *arguments, **named) -> None:
    if role in self.actors:
      return
    if not isinstance(self.history, _History):
      self.history = _History(self)
      self.logs: dict[str, list[dict]] = collections.defaultdict(list)
      self._steps: dict[Actor, int] = {}
      self._rounds: dict[tuple[Actor, int], int] = {}
    super().start(role, *arguments, **named)
    actor = self.actors[role]
    self.record(actor, "started")
    if role[0] == "syncer":
      for f in actor.state.fragments:
        self.own(actor, f)
      return
    part = arguments[0] if arguments else None
    self._steps[actor] = actor.state.step
    if part is not None:
      snapshot = next(n for n, parts in self.snapshots.items() if parts.get(role) is part)
      self.record(actor, "restored", snapshot=snapshot, of_incarnation=part.incarnation)
      for p, f in enumerate(actor.state.fragments):
        if f.outstanding:
          self._rounds[actor, p] = f.outstanding.push.round

  def own(self, actor: Actor, f) -> None:
    where = {"fragment": f.index, "version": f.version, "round": f.last_round}
    self.record(actor, "owns", **where, momentum_round=-1)

  def record(self, actor: Actor, kind: str, **fields) -> None:
    name = f"{actor.role[0]}-{actor.role[1]}"
    head = {"time": self.now, "role": name, "incarnation": actor.incarnation, "kind": kind}
    self.logs[name].append({**head, **nothing(kind), **fields})

  def on(self, actor: Actor, action: object) -> None:
    if actor.role[0] == "learner":
      self._catch_up(actor)
    match action:
      case CopyOut(push):
        p = push.fragment
        where = {"fragment": p, "round": push.round, "version": push.base_version}
        base = actor.state.fragments[p].round
        counts = {"steps": push.steps, "tokens": push.tokens}
        self.record(actor, "copy_out", **where, base_round=base, **counts)
        self._rounds[actor, p] = push.round
      case Resend(push) if push.round != self._rounds[actor, push.fragment]:
        old = self._rounds[actor, push.fragment]
        self.record(actor, "resend", fragment=push.fragment, round=push.round, old_round=old)
        self._rounds[actor, push.fragment] = push.round
      case Stage(publish, mode, included):
        where = {"fragment": publish.fragment, "version": publish.version}
        self.record(actor, "stage", **where, round=publish.round, mode=mode, included=included)
      case Apply(fragment, version, round_id, mode, included):
        where = {"fragment": fragment, "version": version, "round": round_id}
        self.record(actor, "apply", **where, mode=mode, included=included)
      case TakeSnapshot(snapshot):
        self.record(actor, "captured", snapshot=snapshot)
      case InstallValue(fragment):
        self.own(actor, next(f for f in actor.state.fragments if f.index == fragment))
      case events.Commit():
        fields = {name: getattr(action, name) for name in nothing("commit")}
        self.record(actor, "commit", **fields)

  def _catch_up(self, actor: Actor) -> None:
    """The steps since its last action; only their order counts."""
    for step in range(self._steps[actor] + 1, actor.state.step + 1):
      progress = {"global_step": step, "position": step}
      self.record(actor, "step", step=step, **progress, tokens=self.tokens_per_step)
    self._steps[actor] = actor.state.step


class _History(list):
  def __init__(self, world: Traced):
    super().__init__()
    self._world = world

  def append(self, entry) -> None:
    super().append(entry)
    self._world.on(*entry[1:])


@pytest.mark.parametrize("block", range(4))
def test_the_tapes_of_random_worlds_hold(block, monkeypatch):
  monkeypatch.setattr(test_protocol, "World", Traced)
  total = collections.Counter()
  for seed in range(block * 25, block * 25 + 25):
    snapshots = random.Random(seed).choice([0, 3, 8])
    world = test_protocol.random_world(seed, snapshot_steps=snapshots)
    world.run(test_protocol.STORM_SECONDS)
    if snapshots:
      world.restore_all()
      world.run(2 * test_protocol.STORM_SECONDS)
    checked = check(reader.read(typed(world.logs)))
    assert not checked.problems, f"world {seed}, {world.sync}:\n" + "\n".join(
      map(str, checked.problems[:5])
    )
    total.update(checked.counts)
  assert min(total[name] for name in ("merged", "snapshots", "applies")) > 20, total
  assert total["restores"] > 5, total
