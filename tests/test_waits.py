"""What tests themselves wait for, and what they may not leave."""

from __future__ import annotations

import threading
import time

import pytest

from tests.waits import PATIENCE_SECONDS, AwakeClock, ended_threads


def test_a_thread_that_is_left_is_named_with_where_it_stands():
  over = threading.Event()
  left = threading.Thread(target=lambda: over.wait(PATIENCE_SECONDS), name="left")
  try:
    with pytest.raises(AssertionError, match=r"(?s)left:.*over\.wait"), ended_threads(0.1):
      left.start()
  finally:
    over.set()
    left.join()


def test_threads_that_end_or_were_there_before_are_none_that_are_left():
  over = threading.Event()
  before = threading.Thread(target=lambda: over.wait(PATIENCE_SECONDS))
  ends = threading.Thread(target=lambda: time.sleep(0.1))
  before.start()
  try:
    with ended_threads():
      ends.start()
    assert before.is_alive() and not ends.is_alive(), "the one was waited for, the other was not"
  finally:
    over.set()
    before.join()


def test_a_clock_goes_on_while_it_is_kept_going_and_no_longer():
  with AwakeClock.running() as clock:
    began = clock.monotonic()
    clock.sleep(0.1)
    assert clock.monotonic() - began > 0.09
  stopped = clock.monotonic()
  threading.Event().wait(0.1)
  assert clock.monotonic() == stopped
