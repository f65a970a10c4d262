"""In real time: loops are driven on a thread, and jobs are done by another one."""

from __future__ import annotations

import gc
import math
import threading
import time
import weakref

import pytest

from ddiloco import runtime
from ddiloco.runtime import REAL_TIME, ValueThreads, drive, short_collections
from tests.waits import PATIENCE_SECONDS


class Endpoint:
  """Gives these messages, one a wait, and knows how long it was to wait."""

  def __init__(self, *messages):
    self.messages, self.timeouts = iter(messages), []

  def receive(self, timeout_seconds: float):
    self.timeouts.append(timeout_seconds)
    return next(self.messages)


def test_a_loop_is_given_what_comes_and_resumed_to_look_around():
  def loop():
    seen = []
    yield None
    for until in (math.inf, REAL_TIME.now() - 1.0, REAL_TIME.now() + 1e6):
      seen.append((yield until))
    return seen

  endpoint = Endpoint("a", None, "b")
  assert drive(loop(), endpoint, 0.02) == ["a", None, "b"]
  assert endpoint.timeouts == [0.02, 0.0, 0.02]


def test_threads_share_work_and_results_keep_their_order():
  together, seen = threading.Barrier(3), set()

  def work(number: int) -> int:
    if number < 3:
      together.wait(PATIENCE_SECONDS)  # only three threads at once get past it
    seen.add(threading.get_ident())
    return -number

  with ValueThreads(3) as threads:
    assert threads.share(work, range(100)) == [-number for number in range(100)]
    assert len(seen) == 3
    assert threads.share(work, []) == []
    with pytest.raises(ZeroDivisionError):
      threads.share(lambda number: 1 // number, range(3))
    assert threads.share(str, iter("ab")) == ["a", "b"]


def test_what_was_there_before_a_role_is_not_collected_while_it_or_another_one_lives(monkeypatch):
  """A collection that looks at all that JAX has loaded keeps every thread waiting for long."""
  assert runtime._roles == 1, "that of `conftest.py` alone: another test has left a role"
  monkeypatch.setattr(runtime, "_roles", 0)
  gc.unfreeze()  # what pytest has imported
  before = [[]]

  def collected(what: list) -> bool:
    return any(each is what for each in gc.get_objects())  # without what is frozen

  with pytest.raises(KeyError), short_collections():
    assert gc.get_freeze_count() > 1000 and not collected(before)
    between = [[]]
    with short_collections():
      assert not collected(before) and collected(between), "once, when the first begins"
    assert not collected(before) and collected(between)
    raise KeyError("a role fails")
  assert gc.get_freeze_count() == 0 and collected(before), "what is left is looked at again"
  gc.freeze()  # for the tests to come


def test_a_loop_is_closed_whatever_ends_it():
  closed = []

  def loop(ends: bool):
    try:
      yield math.inf
      if ends:
        raise KeyError("why")
      yield math.inf
    finally:
      closed.append(ends)

  with pytest.raises(KeyError):
    drive(loop(ends=True), Endpoint(None), 0.02)
  assert closed == [True]

  def broken(timeout_seconds):
    raise OSError("no sockets any more")

  endpoint = Endpoint()
  endpoint.receive = broken
  with pytest.raises(OSError, match="no sockets"):
    drive(loop(ends=False), endpoint, 0.02)
  assert closed == [True, False]


def test_jobs_are_done_in_order_on_a_thread_of_their_own():
  done, over = [], threading.Event()
  worker = REAL_TIME.worker("test", lambda: done.append(threading.current_thread().name))

  def job(name: str):
    yield None
    until = REAL_TIME.now() + 0.01
    yield until
    done.append(name if REAL_TIME.now() >= until else "too early")

  for name in "abc":
    worker.put(job(name))
  worker.put(over.set() for _ in [0])
  assert over.wait(PATIENCE_SECONDS) and done == ["test", "a", "b", "c"]
  worker.close(0.0, PATIENCE_SECONDS)
  assert worker.ending and not worker._thread.is_alive()


def test_a_job_that_fails_is_the_last_one():
  failed = threading.Event()
  worker = REAL_TIME.worker("test", failed=failed.set)
  worker.put(1 / 0 for _ in [0])
  worker.put(pytest.fail("it is done") for _ in [0])
  assert failed.wait(PATIENCE_SECONDS) and isinstance(worker.failure, ZeroDivisionError)
  worker.close(0.0, PATIENCE_SECONDS)
  assert not worker._thread.is_alive()


def test_a_worker_that_cannot_even_begin_says_so():
  failed = threading.Event()
  worker = REAL_TIME.worker("test", begin=lambda: 1 / 0, failed=failed.set)
  assert failed.wait(PATIENCE_SECONDS) and isinstance(worker.failure, ZeroDivisionError)
  worker.close(0.0, PATIENCE_SECONDS)
  assert not worker._thread.is_alive()


def test_a_job_that_is_dropped_is_let_go_of():
  """It may hold a copy of a whole state."""

  class State:
    pass

  def job(state: State):
    yield None

  go, state = threading.Event(), State()
  held, worker = weakref.ref(state), REAL_TIME.worker("test")
  worker.put(go.wait(PATIENCE_SECONDS) and None for _ in [0])
  worker.put(job(state))
  closing = threading.Thread(target=worker.close, args=(0.0, PATIENCE_SECONDS))
  closing.start()
  go.set()
  closing.join(PATIENCE_SECONDS)
  del state
  assert not worker._thread.is_alive() and held() is None


def test_who_closes_a_worker_has_patience_or_none():
  looked = []

  def waits_for_others():
    while not worker.ending:
      yield REAL_TIME.now() + 0.01
    looked.append("gave up")

  worker = REAL_TIME.worker("test")
  worker.put(waits_for_others())
  worker.close(PATIENCE_SECONDS, PATIENCE_SECONDS)
  assert looked == ["gave up"] and not worker._thread.is_alive()

  begun, worker = threading.Event(), REAL_TIME.worker("test")
  worker.put((begun.set(), worker._closing.wait(PATIENCE_SECONDS))[0] for _ in [0])
  worker.put(looked.append("dropped") for _ in [0])
  assert begun.wait(PATIENCE_SECONDS)
  started = time.monotonic()
  worker.close(0.0, PATIENCE_SECONDS)
  assert looked == ["gave up"] and time.monotonic() - started < PATIENCE_SECONDS
