"""What a learner's side of the exchange does to bits, with its shard played by hand."""

import collections
import math
import os
import threading
import time
import weakref

import numpy as np
import pytest

from ddiloco.config import Config, ConfigError, from_dict
from ddiloco.core import codec, fragments
from ddiloco.network.transport import Counters, Delivery
from ddiloco.protocol import learner
from ddiloco.protocol.actions import StepDone
from ddiloco.protocol.messages import (
  EVALUATOR,
  MADE,
  ForwardMoments,
  Goodbye,
  Moments,
  ProvideMoments,
  Push,
  Rejection,
  Report,
  RequestMoments,
  RequestValue,
  Value,
)
from ddiloco.protocol.states import LearnerPart
from ddiloco.protocol.values import from_json, replace
from ddiloco.roles import initial
from ddiloco.roles.evaluator import Evaluator, GlobalView
from ddiloco.roles.learner import LOOK_SECONDS, Exchange
from ddiloco.runtime import REAL_TIME, Runtime, drive
from tests import says
from tests.roles import toy
from tests.roles.toy import ListRecorder
from tests.waits import PATIENCE_SECONDS

RANDOM = np.random.default_rng(11)


class Wire:
  """An endpoint whose other end is the test."""

  def __init__(self):
    self.counters = Counters()
    self.sent = []
    self.inbox: collections.deque = collections.deque()
    self.ready = threading.Condition()

  def send(self, to, message) -> int:
    with self.ready:
      self.sent.append(message)
    return 1

  def receive(self, timeout_seconds):
    with self.ready:
      if not self.inbox:
        self.ready.wait(timeout_seconds)
      at = time.monotonic()
      return Delivery("syncer-0", self.inbox.popleft(), at) if self.inbox else None

  def unsent(self, peer: str) -> int:
    return 0

  def wake(self):
    with self.ready:
      self.ready.notify_all()

  def close(self):
    pass


class Bench:
  """One exchange with a toy island, and the messages a shard would send it."""

  def __init__(
    self, island=None, initial=dict, saver=None, donor_seconds=0.0, time=REAL_TIME, **sync
  ):
    settings = {"num_shards": 1, "num_fragments": 2, "sync_period": 4, **sync}
    self.config: Config = from_dict({"sync": settings})
    self.plan = fragments.make_plan(toy.SPECS, self.config.sync)
    self.island = island or toy.ToyIsland(0, self.plan)
    self.wire = Wire()
    state = learner.init(0, 0, (0, 0), 10**9, donor_seconds=donor_seconds)
    self.events = []
    parts = self.wire, toy.ListRecorder(self.events), saver, time
    runtime = Runtime(self.config, self.plan, *parts, initial=initial)
    self.exchange = Exchange(state, self.island, runtime)
    self.give(says.welcome(0, 0, 0, 3 if donor_seconds else 0, (0, 1)))  # a run under way

  def give(self, message) -> None:
    with self.wire.ready:
      self.wire.inbox.append(message)

  def publish(self, p: int, version: int, flat, merged=-1, base=-1, name="f32") -> None:
    payload = codec.encode(flat, name)
    mine, round = (() if merged < 0 else (0, merged)), 100 * version - 1
    self.give(says.publish(0, 0, 0, p, round, version, base, 0, 0, mine, name, payload))

  def publish_digest(self, p: int, of: np.ndarray, incarnation: int = 0) -> None:
    digest = np.frombuffer(codec.digest(of), np.uint8)
    self.give(says.publish(0, incarnation, 0, p, -1, 0, -1, 0, 0, (), MADE, digest))

  def pull(self, p: int, round: int, version: int) -> None:
    self.give(says.pull(0, 0, 0, p, round, version))

  def until(self, done) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not done():
      assert time.monotonic() < deadline, "nothing happened"
      drive(self.exchange.wait(), self.wire, LOOK_SECONDS)

  def version(self, p: int) -> int:
    return self.exchange.state.fragments[p].version

  def join(self) -> list[np.ndarray]:
    """Version 0 of both fragments; returns their values."""
    values = [vector(f.size) for f in self.plan.fragments]
    for p, value in enumerate(values):
      self.publish(p, 0, value)
    self.until(lambda: self.exchange.state.joined)
    for p, value in enumerate(values):
      np.testing.assert_array_equal(self.local(p), value)
    return values

  def train(self) -> None:
    """One step: every parameter moves by numbers that no float holds exactly."""
    for value in self.island.params.values():
      value += RANDOM.standard_normal(value.shape).astype(np.float32) / 7
    self.exchange.boundary(StepDone(time.monotonic(), 5, 0.1))

  def local(self, p: int) -> np.ndarray:
    return fragments.gather(self.plan.fragments[p], self.island.params)

  def pushes(self, p: int) -> list[Push]:
    with self.wire.ready:
      return [m for m in self.wire.sent if isinstance(m, Push) and m.fragment == p]

  def push(self, p: int, round: int, version: int) -> tuple[Push, np.ndarray]:
    """Pulls; returns the push and the local value when it was copied out."""
    count = len(self.pushes(p))
    local = self.local(p)
    self.pull(p, round, version)
    self.until(lambda: len(self.pushes(p)) > count)
    return self.pushes(p)[-1], local


def vector(size: int) -> np.ndarray:
  return RANDOM.standard_normal(size).astype(np.float32)


@pytest.fixture
def bench():
  made = []

  def make(**settings) -> Bench:
    made.append(Bench(**settings))
    return made[-1]

  yield make
  for each in made:
    each.exchange.close()
    assert not each.exchange._worker._thread.is_alive()


def bits(x: np.ndarray) -> bytes:
  return np.ascontiguousarray(x).tobytes()


@pytest.mark.parametrize("name", ["f32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("included", [True, False])
def test_rebase_keeps_what_the_new_version_does_not_know_bitwise(bench, name, included):
  b = bench(apply="rebase", push_codec=name)
  base = b.join()[1]
  b.train()
  push, local = b.push(1, round=3, version=0)
  assert (push.codec, push.steps, push.tokens, push.base_version) == (name, 1, 5, 0)
  assert bits(push.payload) == bits(codec.encode(base - local, name))
  b.train()  # work that is under way while the round is
  before, new = b.local(1), vector(base.size)
  b.publish(1, 1, new, merged=3 if included else -1)
  b.until(lambda: b.version(1) == 1)
  sent = codec.decode(push.payload, base.size, name)
  keep = np.float32(1 if included else 0.5)  # what missed its round goes out at half its length
  known = base - sent if included else base
  assert bits(b.local(1)) == bits(keep * before + (new - keep * known))
  fragment = b.exchange.state.fragments[1]
  assert (fragment.steps, fragment.tokens) == ((1, 5) if included else (2, 10))
  assert fragment.acknowledged_tokens == (5 if included else 0)
  # What the global model lacks of mine is exactly what the next push holds, rounding errors too.
  push, local = b.push(1, round=4, version=1)
  assert bits(push.payload) == bits(codec.encode(new - local, name))
  assert push.tokens == fragment.tokens


@pytest.mark.parametrize("apply", ["overwrite", "mix"])
def test_overwrite_and_mix_do_what_their_formula_says(bench, apply):
  b = bench(apply=apply, mix_alpha=0.25)
  base = b.join()[0]
  b.train()
  before, new = b.local(0), vector(base.size)
  b.publish(0, 1, new)
  b.until(lambda: b.version(0) == 1)
  mixed = np.float32(0.25) * before + np.float32(0.75) * new
  assert bits(b.local(0)) == bits(new if apply == "overwrite" else mixed)
  assert b.exchange.state.fragments[0].discarded_tokens == 5


def test_error_feedback_adds_what_rounding_lost_exactly(bench):
  b = bench(apply="overwrite", push_codec="int4", error_feedback=True)
  base, residual = b.join()[0], None
  for number in range(5):
    b.train()
    push, local = b.push(0, round=number, version=number)
    delta = base - local
    if residual is not None:
      delta = delta + residual
    assert bits(push.payload) == bits(codec.encode(delta, "int4"))
    missed = number == 2  # that round went on without me: its rounding was never suffered
    if not missed:
      residual = delta - codec.decode(push.payload, base.size, "int4")
      assert np.abs(residual).max() > 0, "int4 loses something"
    base = vector(base.size)
    b.publish(0, number + 1, base, merged=-1 if missed else number)
    b.until(lambda number=number: b.version(0) == number + 1)
    assert bits(b.exchange._deltas.residual[0]) == bits(residual)


@pytest.mark.parametrize("apply", ["overwrite", "mix"])
@pytest.mark.parametrize("merged", [1, 2], ids=["its last push", "one it does not remember"])
def test_after_a_restore_what_rounding_lost_is_sent_once(bench, apply, merged):
  """The push of round 2, made after the snapshot, has the residual of round 0 in it already."""
  saver = Refusing()
  settings = {"apply": apply, "push_codec": "int4", "error_feedback": True}
  b = bench(saver=saver, **settings)
  base = b.join()[0]
  b.train()
  b.push(0, round=0, version=0)
  base = vector(base.size)
  b.publish(0, 1, base, merged=0)
  b.until(lambda: b.version(0) == 1)
  b.train()
  push, local = b.push(0, round=1, version=1)
  owed = base - local + b.exchange._deltas.residual[0]
  rounding = owed - codec.decode(push.payload, base.size, "int4")
  b.give(replace(says.pull(0, 0, 0, 1, 5, 0), snapshot=1))
  b.until(lambda: saver.saved)
  state, arrays = saver.parts[1]
  again = bench(**settings)
  again.exchange.state = learner.revive(state, learner.init(0, 0, (0, 0), 10**9))
  again.island.params = {n: arrays[f"params/{n}"].copy() for n in again.island.params}
  again.exchange.restore(arrays)
  base = vector(base.size)
  again.publish(0, 2, base, merged=merged)
  again.until(lambda: again.version(0) == 2)
  again.give(says.welcome(0, 0, 0, 0, (0, 1)))
  again.train()
  push, local = again.push(0, round=199, version=2)
  owed = base - local + rounding if merged == 1 else base - local
  assert bits(push.payload) == bits(codec.encode(owed, "int4"))
  # What was sent, and what is left for the next push, are together what was owed.
  left = again.exchange._deltas.rounding[0]
  assert bits(left) == bits(owed - codec.decode(push.payload, base.size, "int4"))


def test_a_push_that_got_lost_comes_again_as_the_very_same_bytes(bench):
  b = bench(push_codec="int4")
  b.join()
  b.train()
  first, _ = b.push(0, round=7, version=0)
  b.train()
  again, _ = b.push(0, round=7, version=0)
  assert bits(first.payload) == bits(again.payload)
  assert (first.round, first.steps, first.tokens) == (again.round, again.steps, again.tokens)
  fresh, _ = b.push(0, round=8, version=0)  # that round was abandoned: a newer one has newer work
  assert fresh.steps == 2 and bits(fresh.payload) != bits(first.payload)


def test_a_learner_that_waits_says_twice_a_second_that_it_lives():
  b = Bench(time=toy.AtOnce())
  b.join()
  at, said = time.monotonic() + 1.0, []
  b.exchange.time.now = lambda: at
  for seconds in (0.0, 0.4, 0.2, 0.4, 0.1):
    at += seconds
    b.wire.sent.clear()
    drive(b.exchange.wait(at), b.wire, 0.0)
    said.append(sum(isinstance(m, Report) for m in b.wire.sent))
  assert said == [1, 0, 1, 0, 1]
  b.publish(0, 1, vector(b.plan.sizes[0]))
  b.wire.sent.clear()
  drive(b.exchange.wait(at), b.wire, 0.0)
  assert [m.versions for m in b.wire.sent] == [(1, 0)], "and at once what is new"
  waits = [next(b.exchange.wait(at + seconds)) - at for seconds in (0.3, 0.7, math.inf)]
  assert waits == pytest.approx([0.3, 0.5, 0.5]), (
    "for what it is told to, or until it has to say so"
  )


def test_who_leaves_says_goodbye_once():
  b = Bench(time=toy.AtOnce())
  b.join()
  for _ in range(2):
    b.exchange.leave("it is over")
  assert sum(isinstance(m, Goodbye) for m in b.wire.sent) == 1
  assert [e.reason for e in b.events if e.kind == "stopped"] == ["it is over"]


def test_the_log_says_how_long_it_took_to_join():
  b = Bench(time=toy.AtOnce())
  b.exchange._started_at -= 100.0
  b.join()
  assert [e.seconds >= 100 for e in b.events if e.kind == "joined"] == [True]


def test_a_push_that_waits_to_be_sent_is_not_sent_again():
  b = Bench(time=toy.AtOnce())
  b.join()
  b.train()
  b.push(0, round=1, version=0)
  for unsent, count in ((1, 1), (0, 2)):
    b.wire.unsent = lambda peer, unsent=unsent: unsent
    b.pull(0, round=1, version=0)
    b.until(lambda: not b.wire.inbox)
    assert len(b.pushes(0)) == count


def test_the_log_on_disk_has_what_a_shard_may_use_before_it_is_sent():
  """A copy was logged after its job had begun, whose flush might then come first."""
  b = Bench(time=toy.AtOnce(), blocking=True, apply="overwrite")
  b.join()
  on_disk, seen, send = [], [], b.wire.send

  def sent(to, message):
    if isinstance(message, Push | Moments):
      seen.append(on_disk[-1])
    return send(to, message)

  b.wire.send = sent
  b.exchange.recorder.flush = lambda: on_disk.append(b.events[-1].kind)
  b.train()
  b.push(0, round=1, version=0)
  b.push(0, round=2, version=0)  # its shard has restarted: the same push answers
  b.give(ProvideMoments(0, 0, 0, 0))
  b.until(lambda: len(seen) == 3)
  assert seen == ["copy_out", "resend", "donated"]


def test_a_value_that_waits_to_be_sent_is_not_sent_again(bench):
  """A shard that lost everything asks every few seconds; a value takes minutes on a slow link."""
  b = bench()
  values = b.join()
  b.wire.unsent = lambda peer: sum(isinstance(m, Value) for m in b.wire.sent)

  def ask(*fragments: int) -> list[int]:
    """Which values wait to be sent, once all that was asked for is answered."""
    for p in fragments:
      b.give(RequestValue(0, 0, 0, p))
    count = len(b.pushes(1))
    b.train()
    b.push(1, round=len(b.wire.sent) + 100, version=0)  # the worker has come so far
    assert len(b.pushes(1)) > count
    return [m.publish.fragment for m in b.wire.sent if isinstance(m, Value)]

  assert ask(0, 0) == [0]
  assert ask(0, 1, 0) == [0, 1]
  [first] = [m for m in b.wire.sent if isinstance(m, Value) and m.publish.fragment == 0]
  assert bits(first.payload) == bits(values[0])
  b.wire.sent.remove(first)  # it has left, and was lost
  del first
  assert ask(0) == [1, 0]
  b.wire.unsent = lambda peer: 0  # it has left, and its shard holds it in this process
  assert ask(0) == [1, 0, 0]


def test_a_refusal_restores_the_base_bitwise_and_forgets_the_residual(bench):
  b = bench(apply="mix", push_codec="int8", error_feedback=True)
  base = b.join()[0]
  b.train()
  b.push(0, round=1, version=0)
  for value in b.island.params.values():
    value[:] = np.nan
  b.give(Rejection(0, 0, 0, 0, 1, False, "not finite (nan)"))
  b.until(lambda: bits(b.local(0)) == bits(base))
  assert 0 not in b.exchange._deltas.residual
  assert np.isnan(b.local(1)).all(), "only that fragment was refused"
  b.train()
  push, local = b.push(0, round=2, version=0)
  assert bits(push.payload) == bits(codec.encode(base - local, "int8"))


def test_an_update_is_taken_from_what_was_received_not_from_what_was_trained(bench):
  b = bench(apply="overwrite")
  base = b.join()[0]
  b.train()
  for version in (1, 2):
    update = codec.encode(vector(base.size), "int8")
    which = (0, 0, 0, 0, version - 1, version, version - 1, 0, 0, ())
    b.give(says.publish(*which, "int8", update))
    base = base + codec.decode(update, base.size, "int8")
  b.until(lambda: b.version(0) == 2)
  assert bits(b.local(0)) == bits(base)


def test_a_poisoned_push_is_logged_as_such(bench):
  b = bench()
  base = b.join()[1]
  b.train()
  b.exchange.poison = lambda: -3.0
  push, local = b.push(1, round=3, version=0)
  assert bits(push.payload) == bits(codec.encode(np.float32(-3) * (base - local), "f32"))
  b.until(lambda: b.events[-1].kind == "push")
  copied, pushed = (e for e in b.events if e.kind in ("copy_out", "push"))
  assert (copied.factor, copied.base_round, copied.round) == (-3.0, -1, 3)
  said = ("fragment", "round", "version", "steps", "tokens")
  assert [getattr(copied, name) for name in said] == [getattr(pushed, name) for name in said]
  assert (pushed.version, pushed.steps, pushed.tokens, pushed.bytes) == (0, 1, 5, 1)


@pytest.mark.parametrize("value_threads, count", [(0, 4), (3, 3)])
def test_work_on_large_fragments_leaves_half_of_the_cores_to_the_steps(
  bench, monkeypatch, value_threads, count
):
  monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
  small = bench(value_threads=value_threads)
  assert small.exchange._threads.count == 1, "a small one is done by then"
  monkeypatch.setattr("ddiloco.runtime.COMPILED_FROM", max(small.plan.sizes))
  exchange = bench(value_threads=value_threads).exchange
  assert exchange._threads.count == count and exchange._deltas.share == exchange._threads.share


class Broken(toy.ToyIsland):
  def stage(self, fragment, flat):
    if fragment == 1:
      raise MemoryError("no room on the device")
    return flat


def test_what_fails_in_the_background_is_raised_at_the_next_boundary(bench):
  plan = fragments.make_plan(toy.SPECS, from_dict({"sync": {"num_fragments": 2}}).sync)
  b = bench(island=Broken(0, plan))
  b.publish(0, 0, vector(plan.sizes[0]))
  b.publish(1, 0, vector(plan.sizes[1]))
  with pytest.raises(RuntimeError, match="no room on the device") as caught:
    b.until(lambda: b.exchange.state.joined)
  assert isinstance(caught.value.__cause__, MemoryError)
  with pytest.raises(RuntimeError, match="background thread"):
    b.exchange.boundary()


def test_a_payload_that_cannot_be_decoded_fails_loudly(bench):
  b = bench()
  b.give(says.publish(0, 0, 0, 0, -1, 0, -1, 0, 0, (), "f32", np.zeros(3, np.uint8)))
  with pytest.raises(RuntimeError, match="CodecError"):
    b.until(lambda: b.exchange.state.joined)


class Refusing:
  """A saver that may be busy."""

  def __init__(self):
    self.refusal, self.saved, self.declined, self.parts = "", [], [], {}

  def save(self, snapshot, part, arrays):
    self.parts[snapshot] = from_json(LearnerPart, part).learner, dict(arrays)
    self.saved.append(snapshot)

  def decline(self, snapshot, reason):
    self.declined.append((snapshot, reason))


def test_a_snapshot_that_goes_without_a_learner_costs_it_no_copy(bench, monkeypatch):
  """The next step waits for the copy, which takes as much memory as the state."""
  saver, captured = Refusing(), []
  b = bench(saver=saver)
  b.join()
  capture = b.island.capture
  monkeypatch.setattr(b.island, "capture", lambda: captured.append(1) or capture())
  for snapshot, reason in enumerate(["", "the one before is not done yet", ""], start=1):
    saver.refusal = reason
    b.give(replace(says.pull(0, 0, 0, 0, 5, 0), snapshot=snapshot))
    b.until(lambda heard=snapshot: len(saver.saved) + len(saver.declined) == heard)
  assert saver.saved == [1, 3] and len(captured) == 2
  assert saver.declined == [(2, "the one before is not done yet")]
  took = [(e.snapshot, e.seconds < PATIENCE_SECONDS) for e in b.events if e.kind == "captured"]
  assert took == [(1, True), (3, True)]
  for snapshot, wants in ((4, (0,)), (5, ())):
    b.exchange.warms_up = not wants
    b.exchange.state = replace(b.exchange.state, wants=wants, wants_until=1e12)
    b.give(replace(says.pull(0, 0, 0, 0, 5, 0), snapshot=snapshot))
    b.until(lambda heard=snapshot - 2: len(saver.declined) == heard)
  assert {reason.partition(":")[0] for _, reason in saver.declined[1:]} == {
    "its inner moments are new"
  }
  assert len(captured) == 2


def test_a_learner_that_has_not_joined_says_which_values_it_waits_for(bench, monkeypatch):
  """Also those that have arrived, and are on their way to the devices."""
  saver, place = Refusing(), threading.Event()
  b = bench(saver=saver)
  monkeypatch.setattr(b.island, "stage", lambda p, flat: place.wait(PATIENCE_SECONDS) and flat)
  for p, f in enumerate(b.plan.fragments):
    b.publish(p, 0, vector(f.size))
  b.give(replace(says.pull(0, 0, 0, 0, 5, 0), snapshot=1))
  b.until(lambda: saver.declined)
  place.set()
  assert saver.declined == [(1, "it has not joined: it waits for fragments [0, 1]")]


def copies_there(b, monkeypatch, owner, name):
  """At each call of the owner's method of this name: whether the island's last copy is in memory.

  The worker calls it before the role's thread goes on, as it may.
  """
  copies, there, made = [], [], threading.Event()
  copy_out, method, put = b.island.copy_out, getattr(owner, name), b.exchange._worker.put

  def copied(*what, **how):
    pieces = copy_out(*what, **how)
    copies.append(weakref.ref(pieces))
    return pieces

  def called(*arguments):
    there.append(copies[-1]() is not None)
    made.set()
    return method(*arguments)

  def put_in_time(job):
    put(job)
    assert made.wait(PATIENCE_SECONDS)

  monkeypatch.setattr(b.island, "copy_out", copied)
  monkeypatch.setattr(b.island, "to_host", lambda pieces, fragment: pieces.copy())
  monkeypatch.setattr(owner, name, called)
  monkeypatch.setattr(b.exchange._worker, "put", put_in_time)
  return there


def test_a_copy_is_freed_before_the_push_is_made(bench, monkeypatch):
  """It lay on the devices, or in the pinned memory of their host, until the push was sent."""
  b = bench()
  b.join()
  b.train()
  there = copies_there(b, monkeypatch, b.exchange._deltas, "push")
  b.push(0, round=1, version=0)
  assert there == [False]


def test_a_copy_of_moments_is_freed_before_they_are_sent(bench, monkeypatch):
  b = bench()
  b.join()
  b.island.updates = 9
  for value in b.island.mean.values():
    value[:] = RANDOM.standard_normal(value.shape)
  there = copies_there(b, monkeypatch, b.exchange.recorder, "flush")  # the last thing before
  b.give(ProvideMoments(0, 0, 0, 1))
  b.until(lambda: any(isinstance(m, Moments) for m in b.wire.sent))
  assert there == [False]
  [moments] = (m for m in b.wire.sent if isinstance(m, Moments))
  assert (moments.fragment, moments.donation, moments.count) == (1, 1, 9)
  mean = fragments.gather(b.plan.fragments[1], b.island.mean)
  assert bits(moments.payload) == bits(codec.encode(mean, "f32"))
  [donated] = (e for e in b.events if e.kind == "donated")
  assert (donated.fragment, donated.donation) == (1, 1)


def test_a_version_on_its_way_to_the_devices_is_in_a_snapshot(bench):
  saver, staging, go_on = Refusing(), threading.Event(), threading.Event()
  b = bench(saver=saver, apply="rebase")
  b.join()
  b.train()
  stage = b.island.stage

  def wait(*arguments):
    staging.set()
    assert go_on.wait(PATIENCE_SECONDS)
    return stage(*arguments)

  b.island.stage = wait
  before = b.local(0)
  b.publish(0, 1, vector(before.size))
  b.until(staging.is_set)
  b.give(replace(says.pull(0, 0, 0, 1, 5, 0), snapshot=1))
  b.until(lambda: b.exchange.state.snapshot == 1)
  go_on.set()
  b.until(lambda: saver.saved and b.version(0) == 1)
  state, arrays = saver.parts[1]
  again = bench(apply="rebase")
  again.exchange.state = learner.revive(state, learner.init(0, 0, (0, 0), 10**9))
  again.island.params = {n: arrays[f"params/{n}"] for n in again.island.params}
  assert bits(again.local(0)) == bits(before)
  again.exchange.restore(arrays)
  again.until(lambda: again.version(0) == 1)
  assert bits(again.local(0)) == bits(b.local(0)) != bits(before)


def test_what_comes_back_from_a_snapshot_is_freed_when_it_is_replaced(bench):
  """Who began the learner holds on to what it began with, for as long as it lives."""
  b = bench()
  values = b.join()
  beginning = {f"base/{p}": value.copy() for p, value in enumerate(values)}
  base = weakref.ref(beginning["base/0"])
  b.exchange.restore(beginning)
  b.train()
  b.publish(0, 1, vector(values[0].size))
  b.until(lambda: b.version(0) == 1)
  assert base() is None and not beginning


def test_moments_of_a_peer_lie_in_the_island_as_they_came_and_damaged_ones_are_ignored(bench):
  one = bench(donor_seconds=PATIENCE_SECONDS)
  one.join()
  one.until(lambda: any(isinstance(m, RequestMoments) for m in one.wire.sent))
  given = [vector(f.size) for f in one.plan.fragments]
  ignored = lambda: [e.learner for e in one.events if getattr(e, "message", "") == "ForwardMoments"]
  for p, flat in enumerate(given):
    unfit = np.full(flat.size, np.nan, np.float32)
    for bad, sent in enumerate((flat[1:], unfit, flat), 1):
      payload = codec.encode(sent, "f32")
      one.give(ForwardMoments(0, 0, 0, p, 1, 0, p, count=7, payload=payload))
      if sent is not flat:  # while moments are being staged, no others are taken
        one.until(lambda: (len(ignored()), one.exchange.state.staging) == (2 * p + bad, ()))  # noqa: B023
    one.until(lambda: p not in one.exchange.state.wants)  # noqa: B023
  assert ignored() == [1] * 4
  for f, flat in zip(one.plan.fragments, given, strict=True):
    np.testing.assert_array_equal(fragments.gather(f, one.island.mean), flat)
  assert one.island.updates == 7
  took = [(e.fragment, e.learner, e.donation) for e in one.events if e.kind == "inherited"]
  assert took == [(0, 1, 0), (1, 1, 1)]


def test_moments_are_as_many_vectors_as_the_optimizer_has(bench):
  b, staged = bench(donor_seconds=PATIENCE_SECONDS), []
  b.join()
  b.until(lambda: any(isinstance(m, RequestMoments) for m in b.wire.sent))
  size, b.island.num_moments = b.plan.sizes[0], 2
  b.island.stage = lambda p, flat, moments=False: staged.append((p, flat.size, moments))
  b.island.apply = lambda *arguments, **more: None
  payload = codec.encode(vector(2 * size), "f32")
  b.give(ForwardMoments(0, 0, 0, 0, 1, 0, 1, count=7, payload=payload))
  b.until(lambda: b.exchange.state.wants == (1,))
  assert staged == [(0, 2 * size, True)]


def test_the_evaluator_overwrites_whatever_the_learners_do(bench):
  config = from_dict(
    {"sync": {"apply": "rebase", "num_shards": 1, "num_fragments": 2}, "model": {"num_layers": 1}}
  )
  plan = initial.make_plan(config)
  wire = Wire()
  runtime = Runtime(config, plan, wire, ListRecorder([]))
  evaluator = Evaluator(lambda params: {"loss": 0.0}, runtime)
  exchange = evaluator.exchange
  values = [[vector(f.size) for _ in range(2)] for f in plan.fragments]
  try:
    wire.inbox.append(says.welcome(0, 0, 0, 0, (0, 1)))
    for p in range(2):
      for version in range(2):
        payload = codec.encode(values[p][version], "f32")
        wire.inbox.append(
          says.publish(0, 0, 0, p, version - 1, version, -1, 9, 0, (), "f32", payload)
        )
    wire.inbox.append(says.pull(0, 0, 0, 0, 5, 1))
    deadline = time.monotonic() + PATIENCE_SECONDS
    while [f.version for f in exchange.state.fragments] != [1, 1] or wire.inbox:
      assert time.monotonic() < deadline
      drive(exchange.wait(), wire, LOOK_SECONDS)
    for fragment in plan.fragments:
      held = fragments.gather(fragment, evaluator.store.params())
      assert bits(held) == bits(values[fragment.index][1])
    assert not [m for m in wire.sent if isinstance(m, Push)], "it has nothing to push"
    assert {m.learner for m in wire.sent if isinstance(m, Report)} == {EVALUATOR}
  finally:
    exchange.close()
  with pytest.raises(AssertionError, match="only overwrites"):
    GlobalView(config, plan).apply(0, values[0][0], keep=1.0)


def test_an_initial_value_is_made_here_if_it_is_the_one_that_the_shard_has(bench):
  values, made = [], []

  def make():
    made.append(1)
    return dict(enumerate(values))

  b = bench(initial=make)
  values.extend(vector(f.size) for f in b.plan.fragments)
  for p, value in enumerate(values):
    b.publish_digest(p, value)
    b.publish_digest(p, value)  # it was resent meanwhile
  b.until(lambda: b.exchange.state.joined)
  for p, value in enumerate(values):
    np.testing.assert_array_equal(b.local(p), value)
  assert len(made) == 1, "all fragments at once"
  for p, value in enumerate(values):
    b.publish_digest(p, value)  # and once more, while it joined
  b.until(lambda: not b.wire.inbox)
  done = threading.Event()
  b.exchange._worker.put(done.set() for _ in [0])
  assert done.wait(PATIENCE_SECONDS)
  assert len(made) == 1, "a whole model, for a value that is here"
  assert not any(isinstance(m, Report) and m.whole for m in b.wire.sent)


def test_an_initial_value_is_made_again_if_its_shard_restarts_meanwhile(bench):
  values, making, go_on = [], threading.Event(), threading.Event()

  def make():
    making.set()
    assert go_on.wait(PATIENCE_SECONDS)
    return dict(enumerate(values))

  b = bench(initial=make)
  values.extend(vector(f.size) for f in b.plan.fragments)
  for p, value in enumerate(values):
    b.publish_digest(p, value)
  b.until(making.is_set)
  b.give(says.welcome(0, 1, 0, 0, (0, 1)))
  b.until(lambda: b.exchange.state.shards[0] == 1)
  go_on.set()
  b.until(lambda: sum(e.kind == "ignored" for e in b.events) == 2)
  for p, value in enumerate(values):
    b.publish_digest(p, value, incarnation=1)
  b.until(lambda: b.exchange.state.joined)
  assert not b.exchange._made, "a learner that has joined needs no initial values"


def unreadable():
  raise ConfigError("run.init_from: is not on this machine")


@pytest.mark.parametrize("make", [dict, unreadable, "others"])
def test_an_initial_value_that_cannot_be_made_is_asked_for(bench, make):
  b = bench(initial=(lambda: {0: vector(b.plan.sizes[0])}) if make == "others" else make)
  b.publish_digest(0, vector(b.plan.sizes[0]))
  b.until(lambda: any(isinstance(m, Report) and m.whole for m in b.wire.sent))
  assert not b.exchange.state.fragments[0].fresh
  [ignored] = (e for e in b.events if e.kind == "ignored")
  why = "is not on this machine" if make is unreadable else "it is another one here, or none"
  assert ignored.message == "Publish" and ignored.reason.endswith(why)
  b.join()


def test_moments_that_cannot_be_read_are_asked_for_again(bench):
  b = bench()
  b.join()
  b.exchange.state = replace(
    b.exchange.state, wants=(0, 1), wants_until=1e12, ask_at=-1e12, donor_seconds=1.0
  )
  damaged = np.zeros(3, np.uint8)
  b.give(ForwardMoments(0, 0, 0, 0, 1, 0, 1, 9, damaged))
  b.until(lambda: not b.wire.inbox and b.exchange.state.staging == ())
  assert b.exchange.state.wants == (0, 1)
  good = codec.encode(vector(b.plan.fragments[0].size), "f32")
  b.give(ForwardMoments(0, 0, 0, 0, 2, 0, 1, 9, good))
  b.until(lambda: b.exchange.state.wants == (1,))
