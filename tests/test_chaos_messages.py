"""What planned faults do to messages: each its own thing, to the right links, for its time only."""

from __future__ import annotations

import math

import pytest

from ddiloco.chaos import MessageFate, MessageFaults
from ddiloco.config import Fault

PEER = "syncer-0"


def weather(action: str, until: float = 100.0, **fields) -> MessageFaults:
  made = MessageFaults("learner-0", seed=7)
  made.begin(Fault(action, "learner-0", at_seconds=0.0, **fields), until)
  return made


def fates(w: MessageFaults, now: float, peer: str = PEER, size: int = 1000, bulk: bool = False):
  return w.fates(now, peer, False, bulk, size)


def test_in_calm_weather_a_message_arrives_at_once():
  w = MessageFaults("learner-0")
  assert w.calm and fates(w, 3.0) == (MessageFate(3.0),)


def test_a_cut_link_carries_nothing_until_it_heals():
  w = weather("cut", until=10.0)
  assert not w.calm and fates(w, 9.9) == ()
  assert [*fates(w, 10.0)] == [MessageFate(10.0)] and w.calm


def test_only_the_named_links_suffer():
  w = weather("cut", peers=("syncer-0",))
  assert fates(w, 1.0) == () and fates(w, 1.0, "syncer-1")
  w = weather("cut", peers=("!syncer-0", "!learner-0"))  # of a region: what leaves it
  assert fates(w, 1.0) and fates(w, 1.0, "syncer-1") == ()


def test_a_share_of_messages_is_dropped():
  w = weather("drop", share=0.25)
  lost = sum(not fates(w, float(i)) for i in range(99))
  assert 10 <= lost <= 40


def test_delayed_messages_keep_their_order_when_the_delay_ends():
  w = weather("delay", until=10.0, delay_seconds=2.0)
  w.begin(Fault("drop", "learner-0", at_seconds=0.0, share=1e-9), 20.0)  # it is not calm afterwards
  first, second = fates(w, 9.5)[0], fates(w, 10.5)[0]
  assert first.at == 11.5 and second.at == 11.5


def test_duplicates_come_twice_and_corrupt_ones_are_marked():
  assert len(fates(weather("duplicate"), 1.0)) == 2
  assert [f.corrupt for f in fates(weather("corrupt"), 1.0)] == [True]


def test_reordered_messages_overtake_one_another():
  w = weather("reorder", delay_seconds=5.0, share=0.5)
  arrivals = [fates(w, 0.1 * i)[0].at for i in range(100)]
  assert arrivals != sorted(arrivals)
  assert all(0.1 * i <= at <= 0.1 * i + 5 for i, at in enumerate(arrivals))
  assert 30 < sum(at == 0.1 * i for i, at in enumerate(arrivals)) < 70, "half of them are on time"


def test_a_throttled_link_carries_so_many_bits_a_second_and_control_does_not_queue():
  w = weather("throttle", bits_per_second=8e3)
  arrivals = [fates(w, 0.0, size=1000, bulk=True)[0].at for _ in range(5)]
  assert arrivals == pytest.approx([1, 2, 3, 4, 5])
  assert fates(w, 0.0, size=10)[0].at == pytest.approx(0.01)
  assert fates(w, 0.0, "syncer-1", size=1000, bulk=True)[0].at == pytest.approx(1)


def test_when_a_throttle_ends_nothing_waits_any_more():
  """0.6 s of it must not hold up for a minute what it has begun to carry."""
  w = MessageFaults("learner-0")
  w.begin(Fault("throttle", "learner-0", at_seconds=0.0, bits_per_second=8e3), 3.0)
  w.begin(Fault("throttle", "learner-0", at_seconds=0.0, bits_per_second=4e3), 0.5)
  arrivals = [fates(w, 0.25, size=1000, bulk=True)[0].at for _ in range(5)]
  assert arrivals == pytest.approx([1.375, 2.375, 3, 3, 3])
  assert fates(w, 2.9, size=10**9, bulk=True)[0].at == pytest.approx(3)
  assert fates(w, 3.5, size=10**9, bulk=True)[0].at == 3.5
  assert w.calm


def test_the_same_seed_has_the_same_weather():
  def make(seed):
    w = MessageFaults("learner-0", seed)
    w.begin(Fault("reorder", "learner-0", at_seconds=0.0, share=0.5), math.inf)
    return [tuple(fates(w, float(i))) for i in range(50)]

  assert make(1) == make(1) != make(2)


def test_spoiled_headers_differ():
  w, header = MessageFaults("learner-0"), bytes(range(60))
  assert sum(w.spoil(header) != header for _ in range(100)) >= 90  # two flips may cancel
  assert all(len(w.spoil(header)) == 60 for _ in range(10))
