"""What waits for a role: in turn, within bounds, and with the time at which it came."""

import collections
import random
import tracemalloc

import numpy as np
import pytest

from ddiloco.network import transport
from ddiloco.network.transport import BULK_AFTER, MAX_CONTROL, MAX_CONTROL_BYTES, Endpoint
from ddiloco.protocol import messages
from ddiloco.protocol.messages import Goodbye, Message, Push, Report, RequestMoments
from tests import says


class Box:
  """An inbox and what it was told."""

  def __init__(self, max_bulk_bytes: int = 1 << 30):
    self.inbox = Endpoint("syncer-0", max_bulk_bytes)
    self.counters = self.inbox.counters

  def put(self, message: Message, incarnation: int | None = None, sender: str = "") -> bool:
    header, payload = messages.encode(message)
    sender = sender or transport.claimed_sender(message)
    return self.inbox.put(sender, header, payload, incarnation)

  def all(self) -> list[Message]:
    found = []
    while (got := self.inbox.receive(0.0)) is not None:
      found.append(got.message)
    return found


@pytest.fixture
def box() -> Box:
  return Box()


def report(m: int, global_step: int, incarnation: int = 0) -> Report:
  return says.report(m, incarnation, global_step, 0.1, (1,), (global_step,))


def push(m: int, number: int, size: int = 8) -> Push:
  return says.push(m, 0, 0, number, 0, 1, 1, "f32", np.zeros(size, np.uint8))


def test_a_flood_of_one_peer_costs_each_of_the_others_one_turn(box):
  for number in range(MAX_CONTROL):
    box.put(RequestMoments(0, 0, (number,)))
  for m in (1, 2):
    for number in range(3):
      box.put(RequestMoments(m, 0, (number,)))
  got = [(m.learner, m.fragments[0]) for m in box.all()]
  assert [got.index((m, 2)) for m in (1, 2)] == [7, 8], "in turn with the flood, from the first on"
  for m, count in ((0, MAX_CONTROL), (1, 3), (2, 3)):
    assert [n for learner, n in got if learner == m] == list(range(count)), "each in its order"


def test_what_waits_from_one_peer_is_bounded_in_number_and_in_bytes_and_drops_are_counted():
  box = Box(max_bulk_bytes=900)
  for number in range(3 * MAX_CONTROL):
    box.put(RequestMoments(0, 0, (number,)))
    box.put(push(0, number, size=300))
  assert box.inbox.waiting == MAX_CONTROL + 2, "and two pushes of 300 bytes and their headers"
  assert box.counters.overflowed == 5 * MAX_CONTROL - 2
  assert box.put(Goodbye(1, 0)), "another peer has room of its own"
  got = box.all()
  assert [m.round for m in got if isinstance(m, Push)] == [0, 1], "the others may come again"
  asked = [m.fragments[0] for m in got if isinstance(m, RequestMoments)]
  assert asked == list(range(MAX_CONTROL)), "and so may these"
  why = "too many of its messages wait here"
  assert box.inbox.drops == {"learner-0": (5 * MAX_CONTROL - 2, why)}


def test_large_messages_of_control_are_bounded_by_their_bytes(box):
  for number in range(200):
    box.put(RequestMoments(2, 0, (number, *range(1 << 15))))
  got = [m.fragments[0] for m in box.all()]
  assert 10 < len(got) < 100 and got == list(range(len(got)))
  assert box.counters.overflowed == 200 - len(got)


def test_one_message_is_let_in_however_large_it_is():
  box = Box(max_bulk_bytes=1000)
  assert box.put(push(0, 1, size=5000)) and not box.put(push(0, 2, size=10))
  assert box.all()[0].round == 1
  assert box.put(push(0, 3, size=10))


def test_memory_does_not_grow_with_the_length_of_a_flood(box):
  header, _ = messages.encode(RequestMoments(0, 0, tuple(range(100))))

  def flood(count: int) -> int:
    for _ in range(count):
      box.inbox.put("learner-0", bytes(bytearray(header)), None)
    return tracemalloc.get_traced_memory()[0]

  tracemalloc.start()
  try:
    first = flood(2 * MAX_CONTROL)
    assert flood(20 * MAX_CONTROL) - first < 50_000
  finally:
    tracemalloc.stop()


def test_of_a_learners_reports_only_the_newest_waits(box):
  for global_step in range(5 * MAX_CONTROL):
    assert box.put(report(0, global_step))
    assert box.put(report(1, global_step))
  box.put(push(0, 1))
  assert [(m.learner, m.global_step) for m in box.all()[:2]] == [
    (m, 5 * MAX_CONTROL - 1) for m in (0, 1)
  ]
  assert box.counters.overflowed == 0


def test_a_report_that_has_no_room_does_not_take_the_place_of_the_one_before_it(box):
  box.put(report(0, 1))
  while box.put(RequestMoments(0, 0, tuple(range(1 << 13)))):
    pass
  longer = says.report(0, 0, 2, 0.1, (1,) * (1 << 14), (2,) * (1 << 14))
  assert not box.put(longer) and box.counters.overflowed == 2
  assert box.all()[0] == report(0, 1)


def test_what_is_no_message_takes_no_room(box):
  header, _ = messages.encode(report(0, 1))
  for frame in ((b"garbage", None), (header, np.zeros(4, np.uint8))):
    for _ in range(2):
      assert box.inbox.put("learner-0", *frame), "it had room"
  assert box.inbox.waiting == 0 and box.counters.malformed == box.inbox.drops["learner-0"][0] == 4


def test_a_sender_is_held_back_from_half_of_what_is_too_much_on(box):
  """In number or in bytes."""
  crowded = lambda m: box.inbox.crowded(f"learner-{m}")
  for number in range(MAX_CONTROL // 2):
    assert not crowded(0)
    box.put(RequestMoments(0, 0, (number,)))
  assert crowded(0) and not crowded(1)
  while not crowded(1):
    assert box.put(RequestMoments(1, 0, tuple(range(1 << 15))))
  count, size = box.inbox._waiting_control.of("learner-1")
  assert size * (count - 1) // count < MAX_CONTROL_BYTES // 2 <= size


def test_who_was_woken_or_closed_before_it_waited_does_not_wait(box, monkeypatch):
  monkeypatch.setattr(box.inbox._ready, "wait", lambda seconds: pytest.fail("it waits"))
  box.inbox.wake()
  assert box.inbox.receive(60.0) is None
  for message in (report(0, 1), push(0, 1)):
    assert box.put(message)
  box.inbox.close()
  assert box.inbox.receive(60.0) is None, "what waited is dropped"
  assert not box.put(report(0, 2)) and box.inbox.waiting == 0


def test_what_another_thread_drops_while_a_message_is_sent_is_counted():
  class Sender(Endpoint):
    def _way(self, to: str) -> transport.Post:
      return self.full

    def full(self, header: bytes, payload: messages.Payload) -> bool:
      self.counters.undelivered += 5  # as the thread for control does when a peer has restarted
      return False

  sender = Sender("learner-0", 1 << 30)
  sender.send("syncer-0", report(0, 1))
  assert sender.counters.undelivered == 6
  before = sender.counters.sent_bytes
  size = sender.send("syncer-0", push(0, 1, size=300))
  assert sender.counters.payload_bytes == 300 < size == sender.counters.sent_bytes - before


def test_a_report_does_not_overtake_what_its_learner_said_before_it(box):
  for message in (
    report(0, 1),
    Goodbye(0, 1),
    report(0, 2, 1),
    RequestMoments(0, 1, ()),
    report(0, 3, 1),
  ):
    box.put(message)
  got = box.all()
  assert [type(m).__name__ for m in got] == ["Goodbye", "RequestMoments", "Report"]
  assert got[-1].global_step == 3


def test_control_does_not_starve_bulk_and_is_hardly_held_up_by_it(box):
  for m in range(50):
    box.put(push(m, 0))
  for m in range(50):
    for number in range(100):
      box.put(RequestMoments(m, 0, (number,)))
  kinds = [type(m).__name__ for m in box.all()]
  places = [place for place, kind in enumerate(kinds) if kind == "Push"]
  assert len(places) == 50
  assert places == [BULK_AFTER + place * (BULK_AFTER + 1) for place in range(50)]


def test_who_greeted_as_one_incarnation_does_not_speak_as_another(box):
  for message in (Goodbye(0, 6), report(0, 1, 7), push(0, 1), says.pull(0, 8, 0, 0, 1, 0)):
    box.put(message, incarnation=7)
  assert box.all() == [report(0, 1, 7)]
  assert box.counters.malformed == 3
  count, reason = box.inbox.drops["learner-0"]
  assert count == 2 and "has greeted as incarnation 7 and speaks as 0" in reason


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_lost_doubled_or_reordered_whatever_comes(seed):
  chance, box = random.Random(seed), Box()
  sent, got = collections.defaultdict(list), collections.defaultdict(list)

  def receive() -> None:
    if (delivery := box.inbox.receive(0.0)) is not None:
      message = delivery.message
      number = message.round if isinstance(message, Push) else message.fragments[0]
      got[message.learner, type(message)].append(number)

  for number in range(2000):
    m = chance.choice([0, 0, 0, 1, 2])
    message = push(m, number) if chance.random() < 0.2 else RequestMoments(m, 0, (number,))
    if box.put(message):
      sent[m, type(message)].append(number)
    if box.inbox.waiting > 100:  # less than what is too much
      for _ in range(chance.randrange(100)):
        receive()
  while box.inbox.waiting:
    receive()
  assert got == sent
