"""Loops in virtual time: they wait, their work costs, and nobody hears of it before it is done."""

from __future__ import annotations

import math

import pytest

from ddiloco.config import SyncConfig
from ddiloco.protocol.messages import Goodbye
from ddiloco.simulation.virtual_time import Task, VirtualTime, VirtualWorker
from tests.protocol.virtual import Pace, Weather, World


class Box:
  """An inbox, and when what was taken out of it."""

  def __init__(self, time: VirtualTime):
    self.time, self.waiting, self.taken = time, [], []
    self.task: Task | None = None

  def put(self, message: str) -> None:
    self.waiting.append(message)
    self.task.arrived()

  def receive(self) -> str | None:
    return self.waiting.pop(0) if self.waiting else None


def started(time: VirtualTime, make) -> tuple[Box, list]:
  """A loop that runs, its box, and what ended it: an error or None."""
  box, ends = Box(time), []
  box.task = Task(time, make(box), box.receive, ends.append)
  return box, ends


def test_a_loop_waits_until_its_time_or_for_a_message_or_to_be_woken():
  time, seen = VirtualTime(), []

  def loop(box):
    for until in (1.0, 5.0, math.inf, math.inf):
      news = yield until
      seen.append((time.now, news))

  box, ends = started(time, loop)
  time.at(2.0, box.put, "a")
  time.at(3.0, box.task.wake)
  time.at(4.0, box.put, "b")
  time.run(10.0)
  assert seen == [(1.0, None), (2.0, "a"), (3.0, None), (4.0, "b")] and ends == [None]


def test_who_works_hears_nothing_until_it_is_done():
  time, seen = VirtualTime(), []

  def loop(box):
    news = yield math.inf
    while True:
      seen.append((time.now, news))
      time.spend(1.0)
      assert time.clock() == time.now + 1.0, "its own clock is ahead"
      yield None
      assert time.clock() == time.now == seen[-1][0] + 1.0
      news = yield math.inf

  box, _ = started(time, loop)
  for at, message in ((1.0, "a"), (1.5, "b"), (1.9, "c")):
    time.at(at, box.put, message)
  time.run(10.0)
  assert seen == [(1.0, "a"), (2.0, "b"), (3.0, "c")]


def test_a_wait_begins_when_the_work_before_it_is_over():
  time, seen = VirtualTime(), []

  def loop(box):
    time.spend(2.0)
    seen.append(((yield 1.0), time.now))
    time.spend(2.0)
    seen.append(((yield math.inf), time.now))

  box, _ = started(time, loop)
  time.at(3.0, box.put, "a")
  time.run(10.0)
  assert seen == [(None, 2.0), ("a", 4.0)]


def test_jobs_are_done_in_order_beside_the_loop():
  time, done = VirtualTime(), []
  worker = VirtualWorker(time)

  def job(name: str, seconds: float):
    time.spend(seconds)
    yield None
    done.append((name, time.now))
    yield time.now + 1.0

  for name in "ab":
    worker.put(job(name, 2.0))
  time.at(10.0, lambda: worker.put(job("c", 0.5)))
  time.run(20.0)
  assert done == [("a", 2.0), ("b", 5.0), ("c", 10.5)]
  worker.put(job("d", 0.5))
  worker.close()
  time.run(30.0)
  assert len(done) == 3


def test_what_ends_a_loop_ends_it_when_its_work_is_over():
  time = VirtualTime()

  def loop(box):
    time.spend(1.5)
    raise KeyError("why")
    yield

  _, ends = started(time, loop)
  time.run(1.4)
  assert ends == []
  time.run(2.0)
  assert [type(end) for end in ends] == [KeyError]


def test_a_loop_that_turns_for_ever_at_one_instant_is_found():
  time = VirtualTime()

  def loop(box):
    while True:
      yield 0.0

  _, ends = started(time, loop)
  time.run(1.0)
  assert "turns without end" in str(ends[0])


# --- roles ----------------------------------------------------------------------------------------


def test_a_role_cannot_send_before_its_work_is_over():
  world = World(SyncConfig(num_shards=1, num_fragments=1), Pace((0.1,)))
  actor = world.actors["learner", 0]
  actor.send("syncer-0", Goodbye(0, 0))
  world.spend(0.1)
  with pytest.raises(RuntimeError, match="learner-0 sends before its work is over"):
    actor.send("syncer-0", Goodbye(0, 0))


def slow_shard(merge_seconds: float) -> World:
  sync = SyncConfig(num_shards=1, num_fragments=1, sync_period=20, grace_safety=0.0)
  calm = Weather((0.001, 0.001))  # pushes come at the same instant
  return World(sync, Pace((0.1,) * 6, jitter=0.0, merge_seconds=merge_seconds), weather=calm)


def test_a_slow_shard_takes_in_what_has_come_before_it_decides():
  """Its own slowness is no reason to merge fewer: pushes that lie in its inbox are in time."""
  world = slow_shard(merge_seconds=2.0)  # half a second for a push, five steps of everybody
  world.run(60.0)
  sizes = [len(c.learners) for _, c in world.commits()]
  assert len(sizes) > 5 and sum(sizes) / len(sizes) > 4, sizes
  assert not any(e.kind == "member" and e.state == "lost" for _, _, e in world.history)


def test_its_work_delays_its_publishes():
  lasted = []
  for merge_seconds in (0.004, 1.0):
    world = slow_shard(merge_seconds)
    world.run(20.0)
    [commit_at, version] = next((t, c.version) for t, c in world.commits())
    cut_at = next(t for t, _, e in world.history if e.kind == "copy_out")
    applied = (t for t, _, e in world.history if e.kind == "apply" and e.version == version)
    lasted.append((commit_at - cut_at, next(applied) - cut_at))
  assert lasted[1][0] - lasted[0][0] == pytest.approx(1.0 + 6 * 0.25, abs=0.3)
  assert lasted[1][1] > lasted[0][1] + 1.0


def test_a_shard_that_dies_in_a_merge_has_merged_nothing():
  world = slow_shard(merge_seconds=1.0)
  world.run(60.0, stop=lambda: bool(world.merging))
  [(fragment, round_id)] = world.merging
  assert world.store[fragment].version == 0 and not world.commits()
  world.run(world.now + 0.5)
  world.kill(("syncer", 0), for_seconds=0.5)
  world.run(world.now + 1.0)
  assert world.store[fragment].version == 0 and not world.commits()
  world.run(world.now + 20.0)
  assert world.store[fragment].version > 0
  assert all(c.round != round_id for _, c in world.commits())
