"""The contract of every transport; a new one only adds itself to `TRANSPORTS`."""

import threading
import time

import numpy as np
import pytest

from ddiloco.network.transport import MAX_CONTROL, Hub
from ddiloco.protocol import messages
from ddiloco.protocol.messages import Goodbye, Pull, Push, RequestMoments
from ddiloco.protocol.values import replace
from tests import says
from tests.network.net import Net

TRANSPORTS = {
  "queues": lambda **limits: Hub(**limits),
  "network": lambda **limits: Net("run", "plan", **limits),
  "network with keys": lambda **limits: Net("run", "plan", secure=True, **limits),
}
SECONDS = 10.0  # more than any delivery takes


@pytest.fixture(params=TRANSPORTS, ids=str)
def make_hub(request):
  hubs = []

  def make(**limits):
    hubs.append(TRANSPORTS[request.param](**limits))
    return hubs[-1]

  yield make
  for hub in hubs:
    if isinstance(hub, Net):
      hub.close()


@pytest.fixture
def hub(make_hub):
  return make_hub()


def push(value: int, size: int = 8) -> Push:
  payload = np.full(size, value, np.uint8)
  return says.push(0, 0, 0, value, 0, 1, 1, "f32", payload)


def pull(number: int) -> Pull:
  return says.pull(0, 0, 0, 0, number, 0)


def test_a_message_arrives_with_its_sender_and_payload(hub):
  a, b = hub.connect("learner-0"), hub.connect("syncer-0")
  size = a.send("syncer-0", push(7))
  sender, message, *_ = b.receive(SECONDS)
  assert sender == "learner-0"
  assert message.round == 7
  assert bytes(message.payload) == bytes([7] * 8)
  assert a.counters.sent_bytes == b.counters.received_bytes == size > 8


def test_control_overtakes_bulk_and_each_keeps_its_order(hub):
  a, b = hub.connect("learner-0"), hub.connect("syncer-0")
  for i in range(3):
    a.send("syncer-0", push(i))
  for i in range(3):
    a.send("syncer-0", RequestMoments(0, 0, (i,)))
  if isinstance(hub, Net):
    hub.wait_until(lambda: b.waiting == 6)
  arrived = [b.receive(SECONDS)[1] for _ in range(6)]
  assert [m.fragments for m in arrived[:3]] == [(0,), (1,), (2,)]
  assert [m.round for m in arrived[3:]] == [0, 1, 2]


def test_sending_to_nobody_is_counted_and_harmless(hub):
  a = hub.connect("learner-0")
  a.send("syncer-9", says.request(0, 0))
  assert a.counters.undelivered == 1
  assert a.unsent("syncer-9") == 0, "nothing of it waits here"


def test_a_newer_connection_fences_the_older(hub):
  old = hub.connect("learner-0")
  new, shard = hub.connect("learner-0"), hub.connect("syncer-0")
  old.send("syncer-0", says.request(0, 0))
  new.send("syncer-0", says.request(0, 1))
  assert shard.receive(SECONDS)[1].incarnation == 1
  assert shard.receive(0.1) is None
  shard.send("learner-0", pull(1))
  assert new.receive(SECONDS) is not None
  assert old.receive(0) is None
  old.close()  # late; must not take the address from the new one
  shard.send("learner-0", pull(2))
  assert new.receive(SECONDS)[1].round == 2


def test_wake_ends_a_wait(hub):
  a = hub.connect("learner-0")
  result = []
  waiter = threading.Thread(target=lambda: result.append(a.receive(SECONDS * 4)))
  waiter.start()
  a.wake()
  waiter.join(SECONDS)
  assert result == [None]


def test_a_closed_endpoint_is_silent(hub):
  a, b = hub.connect("learner-0"), hub.connect("syncer-0")
  b.send("learner-0", Goodbye(1, 0))
  a.close()
  assert a.receive(0) is None
  a.send("syncer-0", says.request(0, 0))
  assert b.receive(0.1) is None


def test_malformed_frames_are_dropped_and_counted():
  hub = Hub()
  a = hub.connect("learner-0")
  a.put("syncer-0", b"\xc1garbage", None)
  a.put("syncer-0", b"", None)
  header, _ = messages.encode(pull(2))
  a.put("syncer-0", header, None)
  assert a.receive(SECONDS)[1].round == 2
  assert a.counters.malformed == 2


def test_nobody_speaks_in_somebody_elses_name(hub):
  a, b = hub.connect("learner-0"), hub.connect("syncer-0")
  a.send("syncer-0", says.request(1, 0))
  a.send("syncer-0", pull(1))
  a.send("syncer-0", says.request(0, 0))
  assert b.receive(SECONDS)[1] == says.request(0, 0)
  assert b.counters.malformed == 2


def test_memory_is_bounded_and_a_full_queue_is_counted(make_hub):
  """More than both ends may hold, and the kernel between them."""
  hub = make_hub(max_bulk_bytes=10 << 20)
  a, b = hub.connect("learner-0"), hub.connect("syncer-0")
  for i in range(30):
    a.send("syncer-0", push(i, size=3 << 20))
  assert 0 < a.counters.undelivered < 30
  arrived = 30 - a.counters.undelivered
  got = [b.receive(SECONDS)[1].round for _ in range(arrived)]
  assert got == sorted(set(got)) and got[:3] == [0, 1, 2]
  for size in (300, 11 << 20):  # one is let in whatever its size
    if isinstance(hub, Net):
      hub.wait_until(lambda: not a.links()["syncer-0"]["queued_bytes"])
    a.send("syncer-0", push(3, size=size))
    assert b.receive(SECONDS) is not None


def test_who_sends_without_end_holds_up_nobody_else(hub):
  shard = hub.connect("syncer-0")
  flood, other = hub.connect("learner-0"), hub.connect("learner-1")
  for number in range(20 * MAX_CONTROL):
    flood.send("syncer-0", RequestMoments(0, 0, (number,)))
  other.send("syncer-0", RequestMoments(1, 0, (7,)))
  other.send("syncer-0", replace(push(7), learner=1))
  if isinstance(hub, Net):
    hub.wait_until(lambda: "learner-1" in shard._waiting_control and shard._waiting_bulk)
  assert shard.waiting <= MAX_CONTROL + 2
  got = [shard.receive(SECONDS) for _ in range(MAX_CONTROL)]
  heard = {type(d.message).__name__ for d in got if d.sender == "learner-1"}
  assert heard == {"RequestMoments", "Push"}
  assert "learner-1" in [d.sender for d in got[:3]]


def test_messages_come_with_the_time_at_which_they_arrived(hub):
  a, b = hub.connect("learner-0"), hub.connect("syncer-0")
  before = time.monotonic()
  a.send("syncer-0", push(1))
  a.send("syncer-0", says.request(0, 0))
  if isinstance(hub, Net):
    hub.wait_until(lambda: b.waiting == 2)
  after = time.monotonic()
  time.sleep(0.05)
  assert all(before <= b.receive(SECONDS).at <= after for _ in range(2))


def test_large_payloads_arrive_bit_by_bit_the_same(hub):
  a, b = hub.connect("learner-0"), hub.connect("syncer-0")
  random = np.random.default_rng(0)
  sent = [random.integers(0, 256, size, np.uint8) for size in (0, 1, 4096, 999_999, 9_000_001)]
  for i, payload in enumerate(sent):
    a.send("syncer-0", says.push(0, 0, 0, i, 0, 1, 1, "f32", payload))
  for i, payload in enumerate(sent):
    message = b.receive(SECONDS)[1]
    assert message.round == i
    assert bytes(message.payload) == payload.tobytes()
  assert b.counters.payload_bytes == sum(p.nbytes for p in sent)


def test_payloads_travel_by_reference():
  hub = Hub()
  a, b = hub.connect("learner-0"), hub.connect("syncer-0")
  message = push(1)
  a.send("syncer-0", message)
  assert b.receive(SECONDS)[1].payload is message.payload
