"""A learner that is told to stop in mid-run: what it had is merged, or said to be lost."""

from __future__ import annotations

import threading
import time

import pytest

from ddiloco.chaos import Faults
from ddiloco.checkpoint.restore import ResumeState, new_learner, new_syncer
from ddiloco.core import fragments
from ddiloco.network.transport import Hub, learner_address, syncer_address
from ddiloco.protocol import events
from ddiloco.protocol.learner import unmerged_tokens
from ddiloco.roles.learner import Learner
from ddiloco.roles.syncer import Syncer
from ddiloco.runtime import Runtime, Time
from tests.roles import toy
from tests.roles.fleet import Threads, serve
from tests.roles.toy import ListRecorder

SYNC = {"num_shards": 1, "num_fragments": 3, "sync_period": 8, "overlap_steps": 2, "min_quorum": 1}


class Run(Threads):
  """A shard and some learners; each can be stopped for itself."""

  def __init__(self, learners: int, **sync):
    super().__init__(toy.config(learners, 1_000_000, **{**SYNC, **sync}))
    self.store = toy.initial_store(self.plan)
    self.stops: dict[str, threading.Event] = {}

  def stoppable(self, name: str, work) -> None:
    self.stops[name] = threading.Event()
    self.start(name, work, self.stops[name].is_set)

  def shard(self) -> None:
    name, faults = syncer_address(0), Faults((), time.monotonic())
    state = new_syncer(self.config, 0, 0, self.store)
    role = Syncer(state, self.store, self.runtime(name))
    self.stoppable(name, lambda stopped: serve(role, faults, stopped))

  def learner(self, m: int, drain_seconds: float, at_once=lambda: False) -> Learner:
    island, faults = toy.ToyIsland(m, self.plan, step_seconds=0.002), Faults((), time.monotonic())
    role = self.toy_learner(m, 0, island)
    live = lambda stopped: role.run(faults, stopped, drain_seconds, at_once)
    self.stoppable(learner_address(m), live)
    return role

  def stop(self, name: str) -> float:
    """Returns how long it took to end."""
    started = time.monotonic()
    self.stops[name].set()
    self.join(name)
    return time.monotonic() - started

  def merged_tokens(self, m: int) -> list[int]:
    """Of one learner, by fragment: from its pushes and the shard's commits, nobody's counters."""
    rounds = {(e.fragment, e.round) for e in self.of("syncer-0", "commit") if m in e.learners}
    merged = [0] * len(self.plan.fragments)
    for e in self.of(learner_address(m), "push"):
      if (e.fragment, e.round) in rounds:
        merged[e.fragment] += e.tokens
    return merged

  def __enter__(self) -> Run:
    self.shard()
    return self

  def __exit__(self, *_) -> None:
    for name in reversed(self.stops):  # learners before the shard, which they need
      self.stop(name)
    assert not self.failures, self.failures


@pytest.mark.parametrize("learners", [1, 2])
@pytest.mark.parametrize("steps", [21, 30])
def test_a_stopped_learner_gets_everything_merged_and_ends(learners, steps):
  with Run(learners) as run:
    roles = [run.learner(m, drain_seconds=1e9) for m in range(learners)]
    run.until(lambda: roles[0].exchange.state.step >= steps)
    run.stop("learner-0")  # it does not sit out its time
    state = roles[0].exchange.state
    trained = state.trained_tokens
    assert state.done and trained >= steps and unmerged_tokens(state) == 0
    [stopped] = run.of("learner-0", "stopped")
    assert stopped.unmerged_tokens == 0 and "everything it had is merged" in stopped.reason
    assert run.merged_tokens(0) == [trained] * 3, "every token, in every fragment"
    run.until(lambda: "left" in [e.state for e in run.of("syncer-0", "member")])
    if learners == 2:
      count, step = len(run.of("syncer-0", "commit")), roles[1].exchange.state.step
      run.until(lambda: len(run.of("syncer-0", "commit")) >= count + 4)
      assert roles[1].exchange.state.step > step and not roles[1].exchange.state.leaving


def test_the_usual_time_of_a_step_is_that_of_one_that_was_waited_for():
  """On accelerators the first step is only dispatched. Its shards were told that time, and took the
  learner for lost during the second."""
  config = toy.config(1, 4, num_shards=0, snapshot_steps=0)
  plan, seen = fragments.make_plan(toy.SPECS, config.sync), []

  class Pipelined(toy.ToyIsland):
    def step(self, *arguments):
      seen.append((role.exchange.state.step_seconds, role.usual_seconds))
      if self.position:
        time.sleep(0.05)
      metrics = super().step(*arguments)
      return metrics if self.position > 1 else None

  runtime = Runtime(config, plan, Hub().connect("learner-0"), ListRecorder([]))
  beginning = ResumeState(new_learner(config, plan, 0, 0))
  role = Learner(beginning, Pipelined(0, plan), toy.batches, runtime)
  role.run(Faults((), time.monotonic()), lambda: False)
  assert seen[:2] == [(0.0, None)] * 2 and len(seen) == 4
  assert all(step_seconds >= 0.05 and usual == step_seconds for step_seconds, usual in seen[2:])


@pytest.mark.parametrize("busy", [False, True])
def test_a_step_says_how_long_it_waited_for_its_batch(busy):
  """An island whose data came late looked slow, and nothing said why. One whose devices were busy
  meanwhile, with the step before, looked starved."""
  config = toy.config(1, 4, num_shards=0, snapshot_steps=0)
  plan, said = fragments.make_plan(toy.SPECS, config.sync), []

  class Clock(Time):
    late_seconds = 0.0

    def now(self) -> float:
      return time.monotonic() + self.late_seconds

  def batches(position):
    for batch in toy.batches(position):
      clock.late_seconds += 100.0
      yield batch

  clock = Clock()
  parts = Hub().connect("learner-0"), toy.ListRecorder(said)
  runtime = Runtime(config, plan, *parts, time=clock)
  beginning = ResumeState(new_learner(config, plan, 0, 0))
  island = toy.ToyIsland(0, plan)
  island.busy = busy
  role = Learner(beginning, island, batches, runtime)
  role.run(Faults((), time.monotonic()), lambda: False)
  steps = [each for each in said if isinstance(each, events.Step)]
  assert len(steps) == 4
  for each in steps:
    waited, took = (each.seconds, each.data_seconds)[:: 1 if busy else -1]
    assert 100 <= waited <= each.gap_seconds and took < 100 and not (busy and took)


def test_without_time_to_drain_it_leaves_at_once_and_says_what_is_lost():
  with Run(1, sync_period=30_000) as run:
    role = run.learner(0, drain_seconds=0)
    run.until(lambda: role.exchange.state.step >= 20)
    run.stop("learner-0")
    state = role.exchange.state
    [stopped] = run.of("learner-0", "stopped")
    assert stopped.reason == "the run was stopped"
    # The first fragment is due after 10 000 steps: all of it is lost.
    assert stopped.unmerged_tokens == state.trained_tokens == unmerged_tokens(state) >= 20
    assert run.merged_tokens(0) == [0, 0, 0]


def test_one_that_must_end_at_once_does_not_drain():
  with Run(1, sync_period=30_000) as run:
    role = run.learner(0, drain_seconds=1e9, at_once=lambda: True)
    run.until(lambda: role.exchange.state.step >= 20)
    run.stop("syncer-0")
    run.stop("learner-0")
    assert role.exchange.state.done


def test_a_drain_that_cannot_succeed_ends_after_its_time():
  with Run(1) as run:
    role = run.learner(0, drain_seconds=0.4)
    run.until(lambda: role.exchange.state.step >= 10)
    run.stop("syncer-0")
    step = role.exchange.state.step
    run.until(lambda: role.exchange.state.step > step)
    assert run.stop("learner-0") >= 0.4
    [stopped] = run.of("learner-0", "stopped")
    assert stopped.reason == "the run was stopped" and stopped.unmerged_tokens > 0
    lacks = [role.exchange.state.trained_tokens - n for n in run.merged_tokens(0)]
    assert stopped.unmerged_tokens <= max(lacks), "a push may be merged, and nobody hears of it"


def test_who_never_joined_leaves_without_waiting():
  with Run(1, min_quorum=1) as run:
    run.stop("syncer-0")
    role = run.learner(0, drain_seconds=1e9)
    run.until(lambda: run.of("learner-0", "started"))
    run.stop("learner-0")
    assert not role.exchange.state.joined and role.exchange.state.done
    assert [e.unmerged_tokens for e in run.of("learner-0", "stopped")] == [0]


def test_data_that_cannot_be_closed_leave_no_worker_behind(monkeypatch):
  endless = toy.batches

  def batches(position):
    try:
      yield from endless(position)
    finally:
      raise OSError("stale file handle")

  monkeypatch.setattr(toy, "batches", batches)
  with Run(1) as run:
    role = run.learner(0, drain_seconds=0)
    run.until(lambda: role.exchange.state.step)
    run.stop("learner-0")
    assert not role.exchange._worker._thread.is_alive()
    assert [str(error) for error in run.failures] == ["stale file handle"]
    run.failures.clear()
