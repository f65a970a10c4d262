"""The background queue: order, the last batch, capacity, and a consumer that fails."""

from __future__ import annotations

import threading

from ddiloco.observe.guards import Drain


def test_close_hands_over_everything_in_order():
  taken: list[int] = []
  drain = Drain("test", taken.extend, interval_seconds=60)
  for number in range(1000):
    drain.put(number)
  drain.close()
  assert taken == list(range(1000))
  assert not drain.running


def test_wake_does_not_wait_for_the_interval():
  arrived = threading.Event()
  drain = Drain("test", lambda batch: arrived.set() if batch else None, interval_seconds=60)
  drain.put(1)
  drain.wake()
  assert arrived.wait(10)
  drain.close()


def test_many_threads_lose_nothing():
  taken: list[int] = []
  drain = Drain("test", taken.extend, interval_seconds=0.001)
  threads = [
    threading.Thread(target=lambda k=k: [drain.put((k, i)) for i in range(500)]) for k in range(4)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  drain.close()
  assert len(taken) == len(set(taken)) == 2000
  for k in range(4):
    assert [i for owner, i in taken if owner == k] == list(range(500))


def test_beyond_the_capacity_items_are_dropped():
  entered, free, taken = threading.Event(), threading.Event(), []

  def slow(batch):
    entered.set()
    assert free.wait(10)
    taken.extend(batch)

  drain = Drain("test", slow, interval_seconds=60, capacity=3)
  drain.wake()
  assert entered.wait(10)
  for number in range(5):
    drain.put(number)
  free.set()
  drain.close()
  drain.put(9)
  assert taken == [0, 1, 2]


def test_a_failing_consumer_is_loud_once_and_called_again(capsys):
  seen, failed = [], threading.Event()

  def consume(batch):
    seen.extend(batch)
    if batch and len(seen) < 3:
      failed.set()
      raise ValueError("broken consumer")

  drain = Drain("test", consume, interval_seconds=60)
  for number in range(3):
    failed.clear()
    drain.put(number)
    drain.wake()
    if number < 2:
      assert failed.wait(10)
  drain.close()
  assert seen == [0, 1, 2]
  assert drain.failures == 2
  assert capsys.readouterr().err.count("WARNING") == 1
