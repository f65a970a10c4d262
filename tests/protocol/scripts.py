"""A script: one reducer, to which a test says one thing after the other."""

from __future__ import annotations

import dataclasses

from ddiloco.config import SyncConfig
from ddiloco.protocol import learner, syncer
from ddiloco.protocol.actions import (
  Received,
  Send,
  Stage,
  Staged,
  StepDone,
  Taken,
  Tick,
)
from ddiloco.protocol.events import Abandoned, Apply, Commit, Event
from ddiloco.protocol.messages import (
  MADE,
  FragmentState,
  Publish,
  Pull,
  Push,
  Report,
)
from ddiloco.protocol.values import replace
from tests import says
from tests.says import hello, welcome

# Two fragments, one shard: fragment 0 is first due after 1 step, fragment 1 after 2, then every 2.
SYNC = SyncConfig(
  num_shards=1,
  num_fragments=2,
  sync_period=2,
  overlap_steps=1,
  min_quorum=2,
  grace_safety=0.0,
  liveness_seconds=1.0,
)
ALONE = dataclasses.replace(SYNC, min_quorum=1)


class Script:
  """Feeds a reducer one event after the other and keeps its state."""

  def __init__(self, sync: SyncConfig = SYNC, role: str = "shard", incarnation: int = 0):
    self.sync, self.shard = sync, role == "shard"
    if self.shard:
      both = (FragmentState(0), FragmentState(1))
      self.state = syncer.init(0, incarnation, both, sync, 1 << 60, began_at=-1000.0)
    else:
      self.state = learner.init(0, incarnation, (0, 0), target_tokens=10_000)

  def feed(self, event, now: float = 0.0, **measured) -> list:
    """Its actions, without most lines of the log."""
    return [
      says.plain(a)
      for a in self.feed_all(event, now, **measured)
      if isinstance(a, Apply | Abandoned | Commit) or not isinstance(a, Event)
    ]

  def feed_all(self, event, now: float = 0.0, **measured) -> list:
    if not isinstance(event, StepDone | Staged | Taken | Tick | Received):
      kind = says.event_of if self.shard else Received
      event = kind(event, now, **measured)
    if self.shard:
      self.state, actions = says.shard_on(self.state, event)
    else:
      self.state, actions = learner.learner_on(self.state, event, self.sync)
    return actions


def report(
  m: int, versions, steps_since_sync, incarnation: int = 0, global_step: int = 1
) -> Report:
  return says.report(m, incarnation, global_step, 0.1, versions, steps_since_sync)


def push(m: int, round_id: int, base: int = 0, fragment: int = 0, incarnation: int = 0) -> Push:
  return says.push(m, incarnation, fragment, round_id, base, 1, 10 * (m + 1), "")


def initial(to: int, fragment: int) -> Send:
  return Send(to, says.publish(0, 0, 0, fragment, -1, 0, -1, 0, 0, (), MADE))


def join(script: Script) -> Publish:
  """Brings a learner to version 0 of both fragments."""
  whole = says.publish(0, 0, 0, 0, -1, 0, -1, 40, 0, (), "")
  assert learner.reports(script.state, script.sync) == [Send(0, hello(0, 0))]
  assert script.feed(welcome(0, 0, 0, 40, (0, 1))) == []
  for p in (0, 1):
    publish = replace(whole, fragment=p)
    assert script.feed(publish) == [Stage(publish, "overwrite", False)]
    assert not learner.can_step(script.state, script.sync)
    assert script.feed(Staged(p, 0.0)) == [says.applied(p, 0, -1, "overwrite", False)]
  global_step = 0 if script.sync.blocking else 40  # in lock-step all begin together
  assert learner.can_step(script.state, script.sync) and script.state.global_step == global_step
  return whole


def resent(sends) -> list[int]:
  return [a.message.fragment for a in says.sends(sends, Publish)]


def asked(actions) -> set[tuple[int, int]]:
  """(fragment, learner) of every pull."""
  return {(a.message.fragment, a.to) for a in says.sends(actions, Pull)}
