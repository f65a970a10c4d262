"""A learner's own loop, on a clock turned by hand: what its steps train on, at which rate, and what
the log says of them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import types

import numpy as np
import pytest

from ddiloco.chaos import Faults
from ddiloco.checkpoint.restore import ResumeState, new_learner
from ddiloco.core import codec, fragments
from ddiloco.network.transport import Counters, Delivery
from ddiloco.protocol.messages import Push
from ddiloco.protocol.values import replace
from ddiloco.roles.learner import Learner
from ddiloco.runtime import Runtime
from tests import says
from tests.roles import toy


class Clock(toy.AtOnce):
  """It stands while nobody sleeps."""

  at = 1000.0

  def now(self) -> float:
    return self.at

  def sleep(self, seconds: float) -> None:
    self.at += seconds


class Island(toy.ToyIsland):
  """Keeps what its steps were given; each takes `seconds`."""

  def __init__(self, plan, clock: Clock):
    super().__init__(0, plan)
    self.clock, self.seconds, self.given = clock, 0.2, []

  def step(self, tokens, schedule_step, rate_scale):
    self.given.append((int(tokens[0, 0]), schedule_step, rate_scale))
    self.clock.sleep(self.seconds)
    return super().step(tokens, schedule_step, rate_scale)


class Bench:
  """A learner of this config that begins with these fields of its state, and of `ResumeState`."""

  def __init__(self, config, begins=(), **beginning):
    self.clock, self.events, self.sent = Clock(), [], []
    plan = fragments.make_plan(toy.SPECS, config.sync)
    self.island = Island(plan, self.clock)
    endpoint = types.SimpleNamespace(
      counters=Counters(),
      send=lambda to, message: self.sent.append(message) or 1,
      receive=lambda seconds: None,
      unsent=lambda peer: 0,
      wake=lambda: None,
    )
    runtime = Runtime(config, plan, endpoint, toy.ListRecorder(self.events), time=self.clock)
    state = replace(new_learner(config, plan, 0, 0), **dict(begins))
    self.role = Learner(ResumeState(state, **beginning), self.island, toy.batches, runtime)

  def run(self, faults=None, script=(), stopped=lambda: False) -> Bench:
    """Each time it waits the next message of `script` comes, after ten seconds."""
    loop, news = self.role.live(faults or Faults((), 0.0), stopped, 0.0), None
    with contextlib.suppress(StopIteration):
      while True:
        waits, news = loop.send(news) is not None, None
        if waits:
          self.clock.sleep(10.0)
          news = Delivery("syncer-0", next(script), self.clock.now())
    return self

  def of(self, kind: str) -> list:
    return [each for each in self.events if each.kind == kind]


def alone(steps: int, **sections):
  """Of an island that trains for itself."""
  config = toy.config(1, steps, num_shards=0, snapshot_steps=0)
  changed = {n: dataclasses.replace(getattr(config, n), **v) for n, v in sections.items()}
  return dataclasses.replace(config, **changed)


@pytest.mark.parametrize(
  "fresh, global_step, warmup_steps, expected",
  [
    (True, 40, 4, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
    (True, 0, 4, [1.0] * 6),  # the schedule has a warm-up of its own
    (False, 40, 4, [1.0] * 6),
    (True, 40, 0, [1.0] * 6),
  ],
)
def test_new_moments_warm_up_in_the_middle_of_a_run(fresh, global_step, warmup_steps, expected):
  config = alone(6, checkpoint={"warmup_steps": warmup_steps})
  begins = {"global_step": global_step, "step": 5}
  bench = Bench(config, begins=begins, position=44, fresh=fresh)
  assert bench.role._next_position(bench.role.exchange.state) == 44, "it may be asked before"
  seen, step = [], bench.island.step
  bench.island.step = lambda *given: seen.append(bench.role.exchange.warms_up) or step(*given)
  steps = bench.run().of("step")
  assert [e.rate_scale for e in steps] == expected
  assert bench.island.given == [(44 + n, 5 + n, scale) for n, scale in enumerate(expected)]
  assert seen == [scale < 1 for scale in expected], "moments that are so young are not saved"
  for n, e in enumerate(steps):
    counts = e.step, e.global_step, e.position, e.schedule_step, e.tokens
    assert counts == (6 + n, global_step + 1 + n, 44 + n, 5 + n, 1)
  assert bench.role._next_position(bench.role.exchange.state) == 50, "of the next batch"


def test_a_step_takes_its_least_time_and_the_longer_where_a_fault_slows_it():
  config = alone(4, islands={"min_step_seconds": 0.5})
  bench, seen = Bench(config), []
  usual, step = [], bench.island.step
  bench.island.step = lambda *given: usual.append(bench.role.usual_seconds) or step(*given)

  def drag(seconds: float) -> None:
    bench.island.seconds += 0.15
    seen.append(seconds)
    bench.clock.sleep(0.25)

  bench.run(types.SimpleNamespace(check=seen.append, drag=drag, poison=2.0))
  assert seen[::2] == [0, 1, 2, 3], "faults of a global step strike before the step after it"
  assert seen[1::2] == pytest.approx([0.5, 0.5, 0.5, 0.65])
  steps = bench.of("step")
  assert [e.seconds for e in steps] == pytest.approx([0.75, 0.75, 0.75, 0.9])
  assert [e.gap_seconds for e in steps] == [e.seconds for e in steps]
  assert not any(e.data_seconds or e.blocked_seconds for e in steps)
  assert usual[:2] == [None, None] and usual[2:] == pytest.approx([0.75, 0.75])
  assert len(bench.of("traffic")) == 3, "after 0.75 and 2.25 s, and in the end"
  assert bench.role.exchange.poison() == 2.0
  started = bench.of("started")[0]
  assert (started.learners, started.planned_steps, started.devices) == (1, 4, 1)


def test_what_a_learner_waits_for_in_lock_step_is_time_that_it_was_blocked():
  """The time until it has joined is none: it had nothing to train on."""
  config = toy.config(
    *(1, 100),
    num_shards=1,
    num_fragments=1,
    sync_period=2,
    overlap_steps=0,
    blocking=True,
    apply="overwrite",
  )
  flat = np.ones(fragments.make_plan(toy.SPECS, config.sync).sizes[0], np.float32)
  payload = codec.encode(flat, "f32")
  publish = lambda version, *merged: says.publish(
    *(0, 0, 0, 0, version - 1, version, -1, 0, 2 * version, merged), "f32", payload
  )
  rounds = ((says.pull(0, 0, 0, 0, n, n), publish(n + 1, 0, n)) for n in range(3))
  script = iter([says.welcome(0, 0, 0, 0, (0,)), publish(0), *itertools.chain(*rounds)])
  bench = Bench(config)
  bench.run(script=script, stopped=lambda: bench.role.exchange.state.step >= 5)
  assert [m.round for m in bench.sent if isinstance(m, Push)] == [0, 1]
  steps = bench.of("step")
  assert [e.blocked_seconds for e in steps] == pytest.approx([0, 0, 20, 0, 20])
  assert [e.gap_seconds for e in steps] == pytest.approx([0.2, 0.2, 20.2, 0.2, 20.2])
  assert [e.seconds for e in bench.of("joined")] == [20.0]
