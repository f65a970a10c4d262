"""A shard's turn: it takes in everything that is there, at the time it came, and then decides."""

from __future__ import annotations

import itertools
import math
import time
import types

import numpy as np
import pytest

from ddiloco.chaos import Faults
from ddiloco.network.transport import Counters, Delivery, Hub
from ddiloco.protocol.actions import Received, Tick
from ddiloco.protocol.messages import Recover, RequestMoments
from ddiloco.protocol.values import replace
from ddiloco.roles import syncer as module
from ddiloco.runtime import Time
from tests import says
from tests.roles.test_syncer import Shard


class Clock(Time):
  """It stands while nobody sleeps."""

  at = 0.0

  def now(self) -> float:
    return self.at

  def sleep(self, seconds: float) -> None:
    self.at += seconds


class Turns:
  """A shard over this endpoint; keeps the events that its reducer got.

  On the machine's own clock, if none is given, it never seems to have been stopped: a busy machine
  may stop it, too.
  """

  def __init__(self, monkeypatch, endpoint, clock: Clock | None = None):
    self.role = Shard(3).syncer
    self.role.endpoint, self.events = endpoint, []
    if clock is None:
      monkeypatch.setattr(module, "STOOD_STILL_SECONDS", math.inf)
    else:
      self.role.time = clock
    monkeypatch.setattr(self.role, "handle", self._handle)

  def _handle(self, event):
    self.events.append(event)
    return iter(())

  def run(self, ticks: int) -> list:
    self.role.run(Faults((), 0.0), lambda: self.kinds().count("Tick") >= ticks)
    return self.events

  def kinds(self) -> list[str]:
    return [type(event).__name__ for event in self.events]


class Scripted:
  """An endpoint whose `receive` is a test's."""

  def __init__(self, receive, waiting: int = 0):
    self.counters, self.receive, self.waiting = Counters(), receive, waiting
    self.wake = lambda: None
    self.unsent = lambda peer: 0


def test_what_came_while_the_shard_was_busy_is_taken_in_at_its_own_time_before_it_decides(
  monkeypatch,
):
  hub = Hub()
  turns, learners = Turns(monkeypatch, hub.connect("syncer-0")), []
  times = [time.monotonic()]
  for m in range(3):
    learners.append(hub.connect(f"learner-{m}"))
    learners[-1].send("syncer-0", says.hello(m, 0))
    learners[-1].send("syncer-0", says.push(m, 0, 0, 1, 0, 1, 1, "f32", np.zeros(4, np.uint8)))
    times.append(time.monotonic())
    time.sleep(0.02)  # busy
  events = turns.run(ticks=1)
  assert turns.kinds() == ["Received"] * 6 + ["Tick"]
  for event in events[:6]:
    m = event.message.learner
    assert times[m] <= event.now <= times[m + 1], "when it came, not when it was looked at"
  assert events[-1].now >= times[-1]


def test_a_tick_says_up_to_when_all_is_heard(monkeypatch):
  """What arrives while pushes are taken in is not heard yet, and its sender was not silent."""
  hub = Hub()
  turns = Turns(monkeypatch, hub.connect("syncer-0"))
  hub.connect("learner-0").send("syncer-0", says.hello(0, 0))
  taken = turns.role.take
  slow = lambda *arguments: time.sleep(0.1) or taken(*arguments)
  monkeypatch.setattr(turns.role, "take", slow)
  hello, tick = turns.run(ticks=1)
  assert hello.now <= tick.heard_until <= tick.now - 0.1


def test_a_flood_does_not_put_off_a_decision(monkeypatch):
  numbers, patience = itertools.count(), []

  def receive(seconds: float) -> Delivery:
    patience.append(seconds)
    return Delivery("learner-0", RequestMoments(0, 0, (next(numbers),)), time.monotonic())

  turns = Turns(monkeypatch, Scripted(receive, waiting=10))
  events = turns.run(ticks=5)
  assert turns.kinds() == (["Received"] * 11 + ["Tick"]) * 5
  assert all(isinstance(e, Tick | Received) for e in events)
  assert not any(n % 11 and seconds for n, seconds in enumerate(patience)), "a turn has one wait"


@pytest.mark.parametrize("stopped", [False, True])
def test_a_shard_that_was_stopped_hears_what_was_said_meanwhile_before_it_decides(
  monkeypatch, stopped
):
  """The message is still on its way through the sockets when the process goes on."""
  clock, waits, arrives_at, patience = Clock(), itertools.count(), list[float](), list[float]()

  def receive(seconds: float) -> Delivery | None:
    patience.append(seconds)
    if next(waits) == 1:  # the first turn decides at once, and this is the wait of the second
      late_seconds = (1.2 if stopped else 0.8) * module.STOOD_STILL_SECONDS
      clock.at += module.LONGEST_WAIT_SECONDS + late_seconds
      arrives_at.append(clock.at + 0.02)
    elif arrives_at and clock.at >= arrives_at[-1]:
      arrives_at.append(math.inf)
      return Delivery("learner-0", says.hello(0, 0), clock.at)
    return None

  turns = Turns(monkeypatch, Scripted(receive), clock)
  turns.run(ticks=2)
  assert turns.kinds() == (["Tick", "Resumed", "Received", "Tick"] if stopped else ["Tick", "Tick"])
  assert not any(patience[2:]), "what is there is taken in, and nothing more is waited for"


def test_a_shard_may_be_stopped_at_any_moment_of_its_turn(monkeypatch):
  """It found that out only where it was stopped during a wait, and lost all learners else."""
  clock = Clock()
  turns = Turns(monkeypatch, Scripted(lambda seconds: None), clock)
  finish = turns.role.finish

  def stopped():
    if turns.kinds() == ["Tick"]:
      clock.sleep(2 * module.STOOD_STILL_SECONDS)
    return finish()

  monkeypatch.setattr(turns.role, "finish", stopped)
  turns.run(ticks=4)
  assert turns.kinds() == ["Tick", "Tick", "Resumed", "Tick", "Tick"], "once for each time"


def test_a_message_that_ends_the_wait_in_which_a_shard_was_stopped_is_taken_in(monkeypatch):
  clock, waits = Clock(), itertools.count()

  def receive(_seconds: float) -> Delivery | None:
    if next(waits) != 1:
      return None
    clock.sleep(2 * module.STOOD_STILL_SECONDS)
    return Delivery("learner-0", says.hello(0, 0), clock.at)

  turns = Turns(monkeypatch, Scripted(receive), clock)
  turns.run(ticks=2)
  assert turns.kinds() == ["Tick", "Resumed", "Received", "Tick"]


@pytest.mark.parametrize("copies", [False, True])
def test_a_shard_waits_no_longer_than_its_state_or_its_copies_need(monkeypatch, copies):
  soon, waits = time.monotonic() + 0.1, []
  turns = Turns(monkeypatch, Scripted(waits.append))
  turns.role.state = replace(turns.role.state, silent_at=math.inf if copies else soon)
  if copies:
    turns.role.replication = types.SimpleNamespace(tick=lambda: soon)
  turns.run(ticks=2)
  assert waits[0] == 0 <= waits[1] <= 0.1


def test_a_tick_says_whether_a_snapshot_is_still_being_saved(monkeypatch):
  turns, said = Turns(monkeypatch, Scripted(lambda seconds: None)), []
  savers = (None, types.SimpleNamespace(busy=True), types.SimpleNamespace(busy=False))
  assert turns.run(ticks=1)[-1].saved, "none has begun"
  turns.events.clear()
  for capturing, saver in (
    (False, savers[0]),
    (True, savers[2]),
    *((False, s) for s in savers[1:]),
  ):
    turns.role._capturing, turns.role._saver = capturing, saver
    said.append(turns.run(ticks=len(said) + 1)[-1].saved)
  assert said == [True, False, False, True]


def test_a_turn_waits_for_so_long_as_nothing_is_due(monkeypatch):
  """Until then the loop must look at faults and stop signals, and can tell that it was stopped."""
  clock = Clock()
  turns = Turns(monkeypatch, Scripted(lambda seconds: None), clock)
  turns.role.state = replace(turns.role.state, silent_at=math.inf)
  loop = turns.role.live(Faults((), 0.0), lambda: turns.kinds().count("Tick") >= 3)
  waits = [until for until in loop if until is not None]
  assert waits == [0.0, module.LONGEST_WAIT_SECONDS, module.LONGEST_WAIT_SECONDS]


def test_a_turn_performs_faults_and_tells_of_its_traffic(monkeypatch):
  """A slow shard takes the longer for all that it does in a turn, but not for its waits."""
  clock, seen = Clock(), []
  turns = Turns(monkeypatch, Scripted(lambda seconds: clock.sleep(0.3)), clock)
  turns.role.state = replace(turns.role.state, global_step=7)
  finish, handle = turns.role.finish, turns.role.handle
  monkeypatch.setattr(turns.role, "finish", lambda: clock.sleep(0.3) or finish())
  monkeypatch.setattr(turns.role, "handle", lambda event: clock.sleep(0.2) or handle(event))
  faults = types.SimpleNamespace(check=seen.append, drag=seen.append)
  turns.role.run(faults, lambda: turns.kinds().count("Tick") >= 3)
  assert seen == 3 * [7, pytest.approx(0.5)]
  assert turns.role._drag == seen.append, "and for the jobs of its worker"
  traffic = [e for e in turns.role.recorder.events if e.kind == "traffic"]
  assert len(traffic) == 3, "after 0.8 and 2.4 s, and in the end"


@pytest.mark.parametrize("copies", [False, True])
def test_what_comes_is_for_the_reducer_or_for_the_copies_of_other_shards(monkeypatch, copies):
  """The reducer is told what is still on its way to the sender: that is not sent again."""
  messages = [says.hello(0, 0), Recover(1, 0), says.hello(1, 0)]
  arrivals, said = (Delivery("its sender", each, 0.0) for each in messages), []
  turns = Turns(monkeypatch, Scripted(lambda seconds: next(arrivals, None), waiting=2))
  turns.role.endpoint.unsent = {"learner-0": 0, "learner-1": 1}.get
  if copies:
    how = {"on": said.append, "tick": lambda: math.inf, "held": {3: "what waits"}}
    turns.role.replication = types.SimpleNamespace(**how)
  first, last, _ = turns.run(ticks=1)
  assert (first.message, last.message, said) == (*messages[::2], messages[1:2] * copies)
  assert (first.unsent, last.unsent) == (False, True)
  assert first.held == last.held == ({3: "what waits"} if copies else ())
