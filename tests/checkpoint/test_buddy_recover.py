"""A restarted shard asks its buddy: what counts as an answer, and how long it asks."""

from __future__ import annotations

import threading
import time

import pytest

from ddiloco.checkpoint.buddy import Copies, pack, recover
from ddiloco.config import Config, SyncConfig
from ddiloco.core.delta import Committed
from ddiloco.network.transport import Counters, Delivery, Hub, syncer_address
from ddiloco.protocol.messages import Recover, Recovered, Replica
from ddiloco.protocol.values import replace
from tests import says
from tests.checkpoint.test_buddy import CONFIG, PLAN, Outbox, committed, keep, round_of
from tests.network.net import Net
from tests.roles import toy
from tests.roles.fleet import PATIENCE_SECONDS, bits


def ask(hub: Hub, give_up_seconds: float = PATIENCE_SECONDS) -> dict[int, Committed]:
  endpoint = hub.connect(syncer_address(0))
  copies = Copies(0, 12, endpoint, PLAN, CONFIG)
  found = recover(copies, lambda quiet: quiet < give_up_seconds)
  endpoint.close()
  return found


class Buddy(threading.Thread):
  """A shard that only holds copies."""

  def __init__(self, hub: Hub, *held: Committed):
    super().__init__(daemon=True)
    self.endpoint = hub.connect(syncer_address(1))
    self.copies = Copies(1, 50, self.endpoint, PLAN, CONFIG)
    for c in held:
      keep(self.copies, pack(c, 0, 11, 0))
    self.ended = threading.Event()
    self.start()

  def run(self):
    while not self.ended.is_set():
      if arrived := self.endpoint.receive(0.05):
        keep(self.copies, arrived.message)

  def __exit__(self, *_):
    self.ended.set()
    self.join(PATIENCE_SECONDS)

  def __enter__(self):
    return self


def test_a_restarted_shard_gets_back_what_its_buddy_holds():
  hub, held = Hub(), [committed(0, 7), committed(2, 9, momentum=False)]
  with Buddy(hub, *held):
    found = ask(hub)
  assert {p: bits(c)[2:] for p, c in found.items()} == {c.state.index: bits(c)[2:] for c in held}


def test_a_buddy_with_nothing_says_so_at_once_and_one_that_is_away_is_not_waited_for():
  hub = Hub()
  started = time.monotonic()
  with Buddy(hub):
    assert ask(hub) == {}
  assert time.monotonic() - started < PATIENCE_SECONDS / 2
  hub.endpoints["syncer-1"].close()
  assert ask(hub, give_up_seconds=0.2) == {}


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "TLS"])
def test_what_has_left_over_a_real_connection_is_given_again_when_it_is_asked_for(secure):
  net = Net("run", PLAN.plan_id, secure=secure)
  try:
    asking, holding = net.connect(syncer_address(0)), net.open(syncer_address(1), 50)
    holding.dial(syncer_address(0), net.url(syncer_address(0)))
    net.wait_up(holding, syncer_address(0))
    copies = Copies(1, 50, holding, PLAN, CONFIG)
    for p in (0, 2):
      keep(copies, pack(committed(p, 7), 0, 9, 0))
    for _ in range(2):
      keep(copies, Recover(0, 10))
      came = []
      while came.count(Replica) < 2:
        arrived = asking.receive(PATIENCE_SECONDS)
        assert arrived is not None, "it takes the copies before for copies on their way"
        came.append(type(arrived.message))
      net.wait_until(lambda: not any(payload() is not None for payload in copies._answers[0][1]))
  finally:
    net.close()


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
    return Delivery("whoever sent it", message, 0.0)


def back(c: Committed, shard: int = 1, owner: int = 0) -> Replica:
  return pack(c, shard, 50, owner)


def held(*copies: tuple[int, int]) -> Recovered:
  """The buddy's list of what it holds: (fragment, version)."""
  rounds = tuple(round_of(version) for _, version in copies)
  return Recovered(1, 50, 12, tuple(p for p, _ in copies), rounds)


def test_only_the_buddys_answer_to_this_life_counts():
  wire = Given(
    Recovered(1, 50, 11, (), ()),  # asked by the life before: it knows of less
    Recovered(2, 50, 12, (), ()),  # not my buddy
    says.hello(0, 1),
    back(committed(0, 99), shard=2),
    back(committed(1, 3), owner=1),  # its own
    held((0, 5), (2, 4)),  # overtakes what it lists
    replace(back(committed(0, 5)), payload=b"no vectors"),
    back(committed(2, 4)),
    Recover(1, 50),  # it has restarted itself and asks me
    back(committed(0, 5)),
  )
  wire.messages[-2:-2] = [back(committed(2, 3))]  # late, of the answer to the life before
  copies = Copies(0, 12, wire, PLAN, CONFIG)
  found = recover(copies, lambda quiet: bool(wire.messages))
  assert {p: c.state.version for p, c in found.items()} == {0: 5, 2: 4}
  assert Recovered(0, 12, 50, (1,), (round_of(3),)) in wire.sent, "it gets what I have of it"


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
      return Delivery("syncer-1", message, self.now)
    self.now = until
    return None

  def recover(self, give_up_seconds: float) -> dict[int, int]:
    """Fragment -> version that it has back."""
    copies = Copies(0, 12, self, PLAN, CONFIG)
    still = lambda quiet: quiet < give_up_seconds
    found = recover(copies, still, self.clock)
    return {p: c.state.version for p, c in found.items()}


def test_a_buddy_that_answers_late_is_asked_ever_more_rarely():
  late = Late(
    [
      (6.2, held((0, 7), (2, 4))),
      (6.3, back(committed(2, 4))),
      (6.4, back(committed(0, 7))),
    ],
  )
  assert late.recover(give_up_seconds=60.0) == {0: 7, 2: 4}
  assert late.asked_at == [0.0, 0.5, 1.5, 3.5], "after 1/2, 1, 2, 4 s; it answered within the last"
  assert late.now == pytest.approx(106.4), "not a moment longer"


@pytest.mark.parametrize(("seconds", "found"), [(29.0, {0: 7, 2: 4}), (31.0, {})])
def test_a_copy_that_is_listed_has_time_for_its_bytes(monkeypatch, seconds, found):
  """4 GB over 1 Gbit/s took longer than a buddy may be silent: the shard began at its snapshot."""
  largest = max(PLAN.sizes[0], PLAN.sizes[2])
  monkeypatch.setattr("ddiloco.checkpoint.buddy.WHOLE_BYTES", 8 * largest / 20)
  late = Late(
    [
      (0.1, held((0, 7), (2, 4))),
      (seconds, back(committed(0, 7))),
      (2 * seconds, back(committed(2, 4))),
    ]
  )
  assert late.recover(give_up_seconds=10.0) == found


def test_a_copy_of_an_earlier_answer_does_not_end_the_wait_for_the_newest():
  """The life before gave up on a buddy that stood still, and committed version 8 in its own round.

  The buddy then answered both lives' questions, one before that commit and one after it.
  """
  late = Late([(0.1, back(committed(0, 7))), (0.2, held((0, 8))), (5.0, back(committed(0, 8)))])
  assert late.recover(give_up_seconds=60.0) == {0: 8}


def test_the_shard_whose_copies_are_lost_hears_of_the_restart_too():
  """With three shards it is not the buddy; its publishes wait for receipts that the former life
  owed."""
  wire, config = Given(Recovered(2, 50, 12, (), ())), Config(sync=SyncConfig(num_shards=3))
  asked = Outbox()
  wire.send = asked.send
  assert recover(Copies(1, 12, wire, PLAN, config), lambda quiet: bool(wire.messages)) == {}
  assert asked.take() == [(syncer_address(s), Recover(1, 12)) for s in (0, 2)]


def test_without_a_buddy_it_gives_up_when_it_is_told_to():
  nobody = Late([])
  assert nobody.recover(give_up_seconds=10.0) == {}
  assert nobody.asked_at == [0.0, 0.5, 1.5, 3.5, 7.5] and nobody.now == 110.0


def test_a_buddy_that_begins_too_is_not_waited_for_while_it_makes_its_values():
  """Of two shards that began together one answered the other and waited 30 s for its answer."""
  begins = Late([(1.0, Recover(1, 50))])
  assert begins.recover(give_up_seconds=30.0) == {}
  assert begins.now == pytest.approx(106.0)
  asking = Late([(1.0, Recover(1, 50)), (5.0, Recover(1, 50)), (9.0, held((0, 7)))])
  asking.arrivals.append((20.0, back(committed(0, 7))))
  assert asking.recover(give_up_seconds=30.0) == {0: 7}, "while it asks it can answer"


def test_a_buddy_that_ends_in_the_middle_has_given_what_it_gave():
  half = Late([(0.1, held((0, 7), (2, 4))), (0.2, back(committed(2, 4)))])
  assert half.recover(give_up_seconds=10.0) == {2: 4}
  assert half.now >= 110.0


def test_as_long_as_copies_come_it_does_not_give_up_and_hardly_asks():
  listed = (0.1, held(*((p, 7) for p in range(4))))
  long = Late([listed, *((2.0 + 8.0 * p, back(committed(p, 7))) for p in range(4))])
  assert long.recover(give_up_seconds=10.0) == dict.fromkeys(range(4), 7), "26 s in all"
  assert long.now == pytest.approx(126.0)
  assert [at for at in long.asked_at if at > 10.0] == [], "as often as a copy comes"


def test_copies_that_come_again_and_again_without_the_missing_one_are_no_progress():
  again = [(5.0 * n, back(committed(2, 4))) for n in range(1, 50)]
  stuck = Late([(0.1, held((0, 7), (2, 4))), *again])
  assert stuck.recover(give_up_seconds=12.0) == {2: 4}
  assert 120.0 <= stuck.now < 130.0, "the second copy is the last that counts"


def test_a_copy_that_was_lost_late_is_asked_for_before_it_gives_up():
  copies = [(4.0 * n, back(committed(n - 1, 7))) for n in (1, 2, 3)]  # 3 stays away
  late = Late([(0.1, held(*((p, 7) for p in range(4)))), *copies, (30.0, back(committed(3, 7)))])
  assert late.recover(give_up_seconds=20.0) == dict.fromkeys(range(4), 7)
  assert [at for at in late.asked_at if at > 12.0], "after the last one that came"
