"""A restarted shard asks its buddy: what counts as an answer, and how long it asks."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest

from ddiloco.checkpoint.buddy import Copies, pack, recover
from ddiloco.core.commit import Committed
from ddiloco.network.transport import Counters, Hub, syncer_address
from ddiloco.protocol.messages import Recover, Recovered, Replica
from tests import says
from tests.checkpoint.test_buddy import CONFIG, PLAN, Outbox, committed, keep
from tests.roles import toy
from tests.roles.fleet import PATIENCE_SECONDS, bits


def ask(hub: Hub, give_up_seconds: float = PATIENCE_SECONDS) -> dict[int, Committed]:
  endpoint = hub.connect(syncer_address(0))
  until = time.monotonic() + give_up_seconds
  copies = Copies(0, 12, endpoint, PLAN, CONFIG)
  found = recover(endpoint, copies, 0, 12, PLAN, 1, lambda: time.monotonic() < until)
  endpoint.close()
  return found


class Buddy(threading.Thread):
  """A shard that only holds copies."""

  def __init__(self, hub: Hub, *held: Committed):
    super().__init__(daemon=True)
    self.endpoint = hub.connect(syncer_address(1))
    self.copies = Copies(1, 50, self.endpoint, PLAN, CONFIG)
    for c in held:
      keep(self.copies, pack(c, 0, 11))
    self.ended = threading.Event()
    self.start()

  def run(self):
    while not self.ended.is_set():
      if arrived := self.endpoint.receive(0.05):
        keep(self.copies, arrived[1])

  def __exit__(self, *_):
    self.ended.set()
    self.join(PATIENCE_SECONDS)

  def __enter__(self):
    return self


def test_a_restarted_shard_gets_back_what_its_buddy_holds():
  hub, held = Hub("run", PLAN.plan_id), [committed(0, 7), committed(2, 9, momentum=False)]
  with Buddy(hub, *held):
    found = ask(hub)
  assert {p: bits(c)[2:] for p, c in found.items()} == {c.state.index: bits(c)[2:] for c in held}


def test_a_buddy_with_nothing_says_so_at_once_and_one_that_is_away_is_not_waited_for():
  hub = Hub("run", PLAN.plan_id)
  started = time.monotonic()
  with Buddy(hub):
    assert ask(hub) == {}
  assert time.monotonic() - started < PATIENCE_SECONDS / 2
  hub.find("syncer-1").close()
  assert ask(hub, give_up_seconds=0.2) == {}


class Given:
  """An endpoint to which everything has arrived already."""

  def __init__(self, *messages):
    self.counters, self.messages, self.sent = Counters(), list(messages), []

  def send(self, to, message) -> int:
    self.sent.append(message)
    return 1

  def receive(self, timeout_seconds):
    del timeout_seconds
    message = self.messages.pop(0)
    return "whoever sent it", message


def back(c: Committed, shard: int = 1, owner: int = 0) -> Replica:
  return dataclasses.replace(pack(c, owner, 9), shard=shard, incarnation=50)


def test_only_the_buddys_answer_to_this_life_counts():
  wire = Given(
    Recovered(1, 50, 11, ()),  # asked by the life before: it knows of less
    Recovered(2, 50, 12, ()),  # not my buddy
    says.hello(0, 1),
    back(committed(0, 99), shard=2),
    back(committed(1, 3), owner=1),  # its own
    Recovered(1, 50, 12, (0, 2)),  # overtakes what it lists
    back(committed(2, 4)),
    Recover(1, 50),  # it has restarted itself and asks me
    back(committed(0, 5)),
  )
  found = recover(
    wire, Copies(0, 12, wire, PLAN, CONFIG), 0, 12, PLAN, 1, lambda: bool(wire.messages)
  )
  assert {p: c.state.version for p, c in found.items()} == {0: 5, 2: 4}
  assert Recovered(0, 12, 50, (1,)) in wire.sent, "it gets what I have of it"


# --- asking and answering, on a clock turned by hand ----------------------------------------------


class Late(Outbox):
  """An endpoint on which messages arrive at given times; waiting turns the clock."""

  def __init__(self, arrivals: list[tuple[float, object]]):
    super().__init__()
    self.now, self.arrivals = 100.0, list(arrivals)
    self.asked_at: list[float] = []
    self.clock = toy.AtOnce()
    self.clock.now = lambda: self.now

  def send(self, to, message) -> int:
    if isinstance(message, Recover):
      assert (to, message) == ("syncer-1", Recover(0, 12))
      self.asked_at.append(self.now - 100.0)
    return super().send(to, message)

  def receive(self, timeout_seconds: float):
    until = self.now + timeout_seconds
    if self.arrivals and self.arrivals[0][0] <= until - 100.0:
      at, message = self.arrivals.pop(0)
      self.now = max(self.now, 100.0 + at)
      return "syncer-1", message
    self.now = until
    return None

  def recover(self, give_up_seconds: float) -> dict[int, int]:
    """Fragment -> version that it has back."""
    copies = Copies(0, 12, self, PLAN, CONFIG)
    still = lambda: self.now < 100.0 + give_up_seconds  # noqa: E731
    found = recover(self, copies, 0, 12, PLAN, 1, still, self.clock)
    return {p: c.state.version for p, c in found.items()}


def test_a_buddy_that_answers_late_is_asked_ever_more_rarely():
  late = Late(
    [
      (6.2, Recovered(1, 50, 12, (0, 2))),
      (6.3, back(committed(2, 4))),
      (6.4, back(committed(0, 7))),
    ],
  )
  assert late.recover(give_up_seconds=60.0) == {0: 7, 2: 4}
  assert late.asked_at == [0.0, 0.5, 1.5, 3.5], "after 1/2, 1, 2, 4 s; it answered within the last"
  assert late.now == pytest.approx(106.4), "not a moment longer"


def test_without_a_buddy_it_gives_up_when_it_is_told_to():
  nobody = Late([])
  assert nobody.recover(give_up_seconds=10.0) == {}
  assert nobody.asked_at == [0.0, 0.5, 1.5, 3.5, 7.5] and nobody.now == 110.0


def test_a_buddy_that_ends_in_the_middle_has_given_what_it_gave():
  half = Late([(0.1, Recovered(1, 50, 12, (0, 2))), (0.2, back(committed(2, 4)))])
  assert half.recover(give_up_seconds=10.0) == {2: 4}
  assert half.now >= 110.0
