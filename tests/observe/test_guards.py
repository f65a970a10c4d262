"""The background queue: order, the last batch, capacity, and a consumer that fails."""

from __future__ import annotations

import threading

from ddiloco.observe.guards import Drain
from tests.waits import PATIENCE_SECONDS


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
  assert arrived.wait(PATIENCE_SECONDS)
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
    assert free.wait(PATIENCE_SECONDS)
    taken.extend(batch)

  drain = Drain("test", slow, interval_seconds=60, capacity=3)
  drain.wake()
  assert entered.wait(PATIENCE_SECONDS)
  for number in range(5):
    drain.put(number)
  free.set()
  drain.close()
  drain.put(9)
  assert taken == [0, 1, 2]


def test_close_waits_for_a_full_disk_to_have_room():
  """A process that ended meanwhile took its last events with it."""
  full, taken = 3, []

  def consume(batch):
    nonlocal full
    full -= bool(batch)
    if full > 0:
      return batch
    taken.extend(batch)

  drain = Drain("test", consume, interval_seconds=0.01)
  drain.put("last")
  drain.close()
  assert taken == ["last"] and not drain.left and not drain.running


def test_what_cannot_be_handed_over_in_time_is_waited_for_once_more_at_the_end(monkeypatch):
  room, taken, at_the_end = threading.Event(), [], []
  monkeypatch.setattr("atexit.register", at_the_end.append)
  monkeypatch.setattr("atexit.unregister", at_the_end.remove)
  drain = Drain("test", lambda b: taken.extend(b) if room.is_set() else b, interval_seconds=0.01)
  drain.put("last")
  drain.close(timeout_seconds=0.1)
  assert drain.left == 1 and not taken
  room.set()
  at_the_end[0]()
  assert taken == ["last"] and not drain.running and not at_the_end


def test_what_can_never_be_handed_over_is_not_tried_for_ever(monkeypatch):
  monkeypatch.setattr("ddiloco.observe.guards.AFTER_CLOSE_SECONDS", 0.02)
  drain = Drain("test", lambda batch: batch, interval_seconds=0.01)
  drain.put("last")
  drain.close(PATIENCE_SECONDS)
  assert drain.left == 1 and not drain.running


def test_a_consumer_that_hangs_is_named(capsys):
  entered, free = threading.Event(), threading.Event()
  hangs = lambda batch: entered.set() or (free.wait(PATIENCE_SECONDS) and None)
  drain = Drain("events of learner-3", hangs)
  drain.wake()
  assert entered.wait(PATIENCE_SECONDS)
  drain.close(0.01)
  free.set()
  assert "events of learner-3 has not ended within 0.01 s" in capsys.readouterr().err


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
      assert failed.wait(PATIENCE_SECONDS)
  drain.close()
  assert seen == [0, 1, 2]
  assert drain.failures == 2
  assert capsys.readouterr().err.count("WARNING") == 1
