"""Messages of a role whose weather is bad, over real queues."""

from __future__ import annotations

import math
import threading
import time

import pytest

from ddiloco.chaos import FaultyEndpoint, MessageFaults
from ddiloco.config import Fault
from ddiloco.network.transport import Hub
from ddiloco.protocol.messages import Goodbye, Pull
from tests.waits import wait_for

SECONDS = 10.0
PULL = Pull(0, 1, 0, 2, 5, 3, 0)


class Pair:
  """A learner in bad weather and a shard, on one hub."""

  def __init__(self):
    hub = Hub()
    self.weather = MessageFaults("learner-0", seed=3)
    self.learner = FaultyEndpoint(hub.connect("learner-0"), self.weather)
    self.shard = hub.connect("syncer-0")

  def begin(self, action: str, seconds: float = math.inf, **fields) -> None:
    fault = Fault(action, "learner-0", at_seconds=0.0, **fields)
    self.weather.begin(fault, time.monotonic() + seconds)

  def end(self) -> None:
    """Ends all faults, once they have done what they should however long that took."""
    self.weather._faults = ()

  def send(self, count: int = 1) -> None:
    for i in range(count):
      self.learner.send("syncer-0", Goodbye(0, i))

  def got(self, count: int) -> list[int]:
    found = [self.shard.receive(SECONDS) for _ in range(count)]
    return [each[1].incarnation for each in found]


@pytest.fixture
def pair():
  made = Pair()
  yield made
  made.learner.close()
  made.shard.close()


def test_in_calm_weather_it_is_the_endpoint_itself(pair):
  pair.send(3)
  assert pair.got(3) == [0, 1, 2]
  assert pair.learner.counters.sent_bytes and pair.learner.address == "learner-0"
  pair.shard.send("learner-0", PULL)
  assert pair.learner.receive(SECONDS)[:2] == ("syncer-0", PULL)


def test_a_message_of_a_calm_link_does_not_wait_for_a_late_one(pair):
  pair.begin("delay", delay_seconds=3600.0, peers=("syncer-1",))
  pair.learner.send("syncer-1", Goodbye(0, 9))
  wait_for(lambda: pair.learner._turn._waiters, "its wait")
  pair.send()
  assert pair.got(1) == [0]


def test_what_comes_in_suffers_too(pair):
  pair.begin("delay", delay_seconds=0.2)
  began = time.monotonic()
  pair.shard.send("learner-0", PULL)
  early = pair.learner.receive(0.05)
  assert early is None or time.monotonic() - began >= 0.2, "it has not arrived yet"
  assert (early or pair.learner.receive(SECONDS))[:2] == ("syncer-0", PULL)
  assert time.monotonic() - began >= 0.2
  pair.end()
  pair.begin("corrupt")
  pair.shard.send("learner-0", PULL)
  assert pair.learner.receive(0.3) is None and pair.learner.counters.malformed == 1


def test_who_does_not_wait_does_not_wait_for_a_late_message_either(pair, monkeypatch):
  receive, waits = pair.learner.endpoint.receive, []
  monkeypatch.setattr(
    pair.learner.endpoint, "receive", lambda seconds: waits.append(seconds) or receive(0.0)
  )
  pair.begin("delay", delay_seconds=30.0)
  pair.shard.send("learner-0", PULL)
  assert pair.learner.receive(0.0) is None and pair.learner.waiting == 1
  assert len(waits) == 2 and max(waits) <= 0.0
  # Who is woken before it has arrived does not wait on.
  assert pair.learner.receive(SECONDS * SECONDS) is None and len(waits) == 3


def test_a_waiting_receive_can_be_woken_in_any_weather(pair):
  pair.begin("delay", delay_seconds=0.1)
  threading.Timer(0.1, pair.learner.wake).start()
  began = time.monotonic()
  assert pair.learner.receive(SECONDS) is None and time.monotonic() - began < SECONDS / 2


def test_late_messages_arrive_later_and_in_order(pair):
  pair.begin("delay", delay_seconds=1.0)
  began = time.monotonic()
  pair.send(3)
  assert pair.got(3) == [0, 1, 2] and time.monotonic() - began >= 1.0


def test_messages_sent_after_a_delay_ends_do_not_overtake(pair):
  pair.begin("delay", seconds=0.1, delay_seconds=0.3)
  pair.send(1)
  time.sleep(0.12)
  pair.learner.send("syncer-0", Goodbye(0, 1))
  assert pair.got(2) == [0, 1]


def test_no_message_overtakes_one_that_is_being_sent(pair, monkeypatch):
  """Over a real connection none can, and the wrapper let one pass in calm weather."""
  passes_on = pair.learner.endpoint.send

  def send(to, message, *spoil):
    if message == Goodbye(0, 0):
      pair.learner.send(to, Goodbye(0, 1))
    return passes_on(to, message, *spoil)

  monkeypatch.setattr(pair.learner.endpoint, "send", send)
  pair.begin("delay", seconds=0.0, delay_seconds=1.0)  # over already, which the first send finds
  pair.send(1)
  assert pair.got(2) == [0, 1]


def test_duplicates_are_two_real_messages(pair):
  pair.begin("duplicate")
  pair.send(2)
  assert pair.got(4) == [0, 0, 1, 1]


def test_corrupt_messages_are_refused_and_counted_by_whoever_receives_them(pair):
  pair.begin("corrupt")
  pair.send(20)
  pair.end()
  pair.send(1)
  assert pair.got(1) == [0]
  assert pair.shard.counters.malformed == 20


def test_closing_forgets_what_waits(pair, monkeypatch):
  closed = []
  monkeypatch.setattr(pair.learner.endpoint, "close", lambda *given: closed.append(given))
  pair.begin("delay", delay_seconds=30.0)
  began = time.monotonic()
  pair.send(2)
  assert time.monotonic() - began < 30.0, "sending does not wait"
  pair.learner.close(1.0)
  assert pair.shard.receive(0.05) is None and closed == [(1.0,)]
