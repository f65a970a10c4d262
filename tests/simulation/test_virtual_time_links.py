"""Virtual links: whoever moves has a fair share of every link it needs, at any moment."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from ddiloco.simulation.bandwidth import payload_bytes_per_second
from ddiloco.simulation.virtual_time import HEADER_BYTES, LinkRate, Links, VirtualTime


def capacity(links: Links, end) -> float:
  return links._link(end[0]).bytes_per_second


def assert_fair(links: Links) -> None:
  """Each link carries no more than it can, and each transfer is held by a full one that gives no
  other more: that is max-min fairness, and there is only one such allocation."""
  moving = links._moving
  for end, each in moving.items():
    total = sum(transfer.rate for transfer in each)
    assert total <= capacity(links, end) * (1 + 1e-6) or math.isinf(total)
  for transfer in (transfer for each in moving.values() for transfer in each):
    if math.isinf(transfer.rate):
      assert all(math.isinf(capacity(links, end)) for end in transfer.ends)
      continue
    held = [
      end
      for end in transfer.ends
      if sum(t.rate for t in moving[end]) >= capacity(links, end) * (1 - 1e-6)
      and transfer.rate >= max(t.rate for t in moving[end]) * (1 - 1e-6)
    ]
    assert held, "it could have more and nobody with less would have to give"


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_rates_are_max_min_fair_whatever_begins_and_ends(seed, apart):
  chance, time = random.Random(seed), VirtualTime()
  islands = [LinkRate(chance.choice((0.0, 0.5, 1.0, 2.0, 8.0)), 0.01) for _ in range(6)]
  shards = LinkRate(chance.choice((0.0, 1.0, 4.0, 100.0)), 0.01) if apart else None
  links, arrived = Links(time, islands, 6, shards), []
  sent = 0
  for _ in range(60):
    learner, shard = ("learner", chance.randrange(6)), ("syncer", chance.randrange(3))
    pair = (learner, shard) if chance.random() < 0.5 else (shard, learner)
    size = HEADER_BYTES + chance.choice((1, 10, 1000)) * 1_000_000
    time.at(chance.random() * 20.0, links.carry, *pair, size, lambda: arrived.append(time.now))
    sent += 1
  for moment in range(200):
    time.run(moment * 0.11)
    assert_fair(links)
  time.run(math.inf)
  assert len(arrived) == sent and not links._waiting and not any(links._moving.values())


@pytest.mark.parametrize("count", [1, 2])
def test_a_transfer_alone_takes_its_bytes_and_the_latency_and_two_take_twice_as_long(count):
  """The other direction is free, and control, which waits for no fragment, takes the latency."""
  time, arrived, heard = VirtualTime(), [], []
  links = Links(time, [LinkRate(1.0, 0.25)] * count, count, LinkRate(1.0))
  size = HEADER_BYTES + round(payload_bytes_per_second(1.0))
  for m in range(count):
    links.carry(("learner", m), ("syncer", 0), size, lambda: arrived.append(time.now))
    links.carry(("syncer", 0), ("learner", m), size, lambda: arrived.append(time.now))
  links.carry(("learner", 0), ("syncer", 0), HEADER_BYTES, lambda: heard.append(time.now))
  time.run(0.5)
  assert heard == [0.25]
  left = size * (1 - 0.5 / count)
  assert links.unsent(("learner", 0), ("syncer", 0)) == pytest.approx(left, rel=1e-3)
  time.run(math.inf)
  assert arrived == pytest.approx([count + 0.25] * 2 * count)


@pytest.mark.parametrize("apart", [True, False])
def test_a_far_island_is_far_from_all_also_the_shard_beside_it(apart):
  """Only shards that stand apart are as near to an island as its own link says."""
  time, arrived = VirtualTime(), {}
  links = Links(time, [LinkRate(0.0, 0.01), LinkRate(0.0, 0.3)], 2, LinkRate() if apart else None)
  learners, shards = [("learner", m) for m in range(2)], [("syncer", s) for s in range(2)]
  ways = itertools.chain(itertools.product(learners, shards), itertools.product(shards, learners))
  for way, size in itertools.product(ways, (1, HEADER_BYTES + 1)):
    links.carry(*way, size, lambda key=(*way, size): arrived.update({key: time.now}))
  time.run(math.inf)
  for (sender, to, _), at in arrived.items():
    far = ("learner", 1) in (sender, to) if apart else links.place(sender) != links.place(to)
    beside = links.place(sender) == links.place(to)
    assert at == pytest.approx(0.3 if far else 0.0 if beside else 0.01)
  assert len(arrived) == 16


def test_who_shares_no_full_link_gets_no_new_rate(monkeypatch):
  """With each transfer all others were looked at: a run of many islands took seconds for that."""
  time, looked = VirtualTime(), []
  links = Links(time, [LinkRate(1.0)] * 64, 64, LinkRate(100.0))
  rates = links._rates
  monkeypatch.setattr(links, "_rates", lambda over: looked.append(rates(over)) or looked[-1])
  for m in range(64):
    to = ("learner", m), ("syncer", 0)
    time.at(0.01 * m, links.carry, *to, HEADER_BYTES + 10**9, lambda: None)
  time.run(math.inf)
  assert sum(map(len, looked)) == 64, "each when it begins"
