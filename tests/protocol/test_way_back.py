"""What a shard measures of the way back of a new version, and the grace window that it leaves."""

from __future__ import annotations

import pytest

from ddiloco.config import SyncConfig
from ddiloco.protocol import learner, syncer
from ddiloco.protocol.actions import Received, Resumed, Staged, StepDone, Tick
from ddiloco.protocol.messages import FragmentState
from ddiloco.protocol.states import SyncerState
from ddiloco.protocol.values import replace
from tests import says

# Three learners of one fragment that make a step a second: the round commits with two, or later.
SYNC = SyncConfig(
  apply="overwrite",
  num_shards=1,
  num_fragments=1,
  sync_period=4,
  overlap_steps=2,
  min_quorum=2,
  grace_safety=0.5,
  liveness_seconds=100.0,
)


class Shard:
  """All learners make their steps together; learner 2 never pushes in time."""

  def __init__(self):
    self.state: SyncerState = syncer.init(
      0, 0, (FragmentState(0),), SYNC, 1 << 60, began_at=-1000.0
    )
    for m in range(3):
      self.feed(says.hello(m, 0), 0.0)
    self.step = 0

  def feed(self, message, now: float, **found) -> None:
    self.state, _ = says.shard_on(self.state, says.event_of(message, now, **found))

  def report(self, learner: int, version: int, steps: int, now: float, **more) -> None:
    self.step = max(self.step, int(now) + 1)
    self.feed(says.report(learner, 0, self.step, 1.0, (version,), (steps,), **more), now)

  def begin(self, now: float) -> None:
    """All are due, whenever the last round began, and then asked: the shard decides once it has
    heard all."""
    self.step = int(now) + 1
    for m in range(3):
      report = says.report(m, 0, self.step, 1.0, (self.fragment.version,), (6,))
      self.state, _ = says.take_in(self.state, Received(report, now))
    self.state, _ = says.take_in(self.state, Tick(now))
    assert self.state.under_way[0].pending == (0, 1, 2)

  def push(self, learner: int, now: float) -> None:
    current, version = self.state.under_way[0], self.fragment.version
    push = says.push(learner, 0, 0, current.id, version, 4, 40, "")
    self.feed(push, now, norm=1.0)

  def sync(self, now: float) -> None:
    """A round in which all push at once, and commit."""
    self.begin(now)
    for m in range(3):
      self.push(m, now)
    assert not self.state.under_way

  def grace(self, now: float) -> float:
    """Of the next round, in which two push at once."""
    self.begin(now)
    for m in (0, 1):
      self.push(m, now)
    current = self.state.under_way.get(0)
    return current.deadline - current.quorum_at if current is not None else 0.0

  @property
  def fragment(self) -> FragmentState:
    return self.state.fragments[0]


def after_delivery(seconds: float, pause=None, late: int = 0) -> float:
  """The grace window after a version took so long to all but `late` learners, which say it after
  50 s. They report every 0.1 s meanwhile."""
  shard = Shard()
  shard.sync(10.0)
  now = 10.0
  while now < 10.0 + seconds - 0.05:
    for m in range(3):
      shard.report(m, 0, 4, now)
    now += 0.1
  if pause is not None:
    shard.state, _ = says.take_in(shard.state, Resumed(pause))
  for m in range(3 - late):
    shard.report(m, 1, 1, 10.0 + seconds)
  for m in range(3 - late, 3):
    shard.report(m, 1, 1, 60.0)
  return shard.grace(70.0)


def test_the_longer_the_way_back_the_shorter_the_grace():
  # Half of what two steps leave, at most a step.
  assert after_delivery(0.2) == pytest.approx(0.5 * (2.0 - 0.2), abs=1e-6)
  assert after_delivery(1.0) == pytest.approx(0.5 * (2.0 - 1.0), abs=1e-6)
  assert after_delivery(3.0) == 0.0


def test_a_pause_of_the_shard_is_no_way_back():
  """It began after the commit: what the shard hears afterwards tells nothing about links."""
  assert after_delivery(1.5, pause=11.5) == after_delivery(0.0, pause=10.5) == 1.0


def test_a_pause_of_the_shard_is_no_way_to_a_quorum():
  shard = Shard()
  shard.begin(10.0)
  shard.state, _ = says.take_in(shard.state, Resumed(13.0))
  for m in range(3):
    shard.push(m, 13.0)
  assert shard.fragment.version == 1 and shard.state.quorum_seconds == 0.0


def test_the_longer_the_way_to_a_quorum_the_shorter_the_grace():
  shard = Shard()
  shard.begin(10.0)
  for m, seconds in enumerate((0.2, 1.0)):
    shard.push(m, 10.0 + seconds)
  assert syncer.next_wake(shard.state) == pytest.approx(11.0 + 0.5 * (2.0 - 1.0))
  shard.push(2, 11.3)
  assert shard.fragment.version == 1 and shard.state.quorum_seconds == 1.0, "of the second push"
  shard.grace(20.0)
  assert shard.state.quorum_seconds == pytest.approx(0.8), "a fifth of the newest"


def test_one_that_says_late_that_it_has_a_version_takes_nobody_s_grace():
  assert after_delivery(0.2, late=1) == after_delivery(0.2)


@pytest.mark.parametrize("idle, seconds", [(0.0, 8.0), (5.0, 3.0), (1e9, 0.0)])
def test_what_it_waited_for_the_learner_s_steps_is_not_in_it(idle, seconds):
  shard = Shard()
  shard.sync(10.0)
  shard.report(0, 1, 1, 18.0, idle_seconds=idle)
  assert shard.state.members[0].sync_seconds == seconds


def test_a_learner_says_how_long_a_version_waited():
  """It arrives at 1.5 s in a step that is over at 2 s, is staged at 2.25 s in one of 3 s. The next
  one comes between two steps."""
  whole = says.publish(0, 0, 0, 0, -1, 0, -1, 0, 0, (), "")
  one = learner.init(0, 0, (0,), target_tokens=10_000)
  said = []
  for event in (
    StepDone(2.0, 10, 1.0),
    Received(whole, 1.5),
    Received(says.pull(0, 0, 0, 0, 0, 0), 1.75),  # no version: it does not count
    StepDone(3.0, 10, 1.0),
    Staged(0, 2.25),
    StepDone(4.0, 10, 1.0),
    Received(replace(whole, round=0, version=1), 4.25),
    Staged(0, 4.5),
  ):
    one, _ = learner.learner_on(one, event, SYNC)
    [send] = learner.reports(one, SYNC)
    said.append(send.message.idle_seconds)
  assert said == [0.0, 0.0, 0.0, 0.0, 0.5 + 0.75, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("change", [{"versions": (-1,)}, {"resends": 1}])
def test_what_is_sent_to_one_that_joins_or_again_is_no_measure(change):
  shard = Shard()
  shard.sync(10.0)
  member = replace(shard.state.members[0], **change)
  shard.state = replace(shard.state, members={**shard.state.members, 0: member})
  shard.report(0, 1, 1, 12.0)
  assert shard.state.members[0].sync_seconds == 0.0
