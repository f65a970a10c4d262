"""A shard's bits: what it publishes, what it rejects, and what outlives it."""

import itertools
import math
import os
import time
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from ddiloco.checkpoint.buddy import Sealer
from ddiloco.checkpoint.restore import new_syncer
from ddiloco.config import from_dict
from ddiloco.core import codec, fragments
from ddiloco.core.delta import Merger, learner_weights
from ddiloco.network.transport import Counters
from ddiloco.protocol import events
from ddiloco.protocol.actions import InstallValue, TakeSnapshot, Tick
from ddiloco.protocol.messages import (
  NOTHING,
  Goodbye,
  Publish,
  Pull,
  Rejection,
)
from ddiloco.protocol.states import ValueRequest, syncer_part
from ddiloco.protocol.values import replace
from ddiloco.roles.syncer import Syncer
from ddiloco.runtime import Runtime, drive
from tests import says
from tests.made_events import made
from tests.roles import toy


class Outbox:
  """An endpoint that only keeps what is sent."""

  def __init__(self):
    self.counters = Counters()
    self.sent: list[tuple[str, object]] = []

  def send(self, to, message) -> int:
    self.sent.append((to, message))
    return 1

  def wake(self) -> None:
    pass

  def unsent(self, peer: str) -> int:
    return 0

  def take(self, kind: type) -> list[tuple[int, object]]:
    """(learner, message) of this kind since the last `take`."""
    taken = [(int(to.partition("-")[2]), m) for to, m in self.sent if isinstance(m, kind)]
    self.sent = [(to, m) for to, m in self.sent if not isinstance(m, kind)]
    return taken


class Shard:
  """One shard over a store, with learners played by hand; they hold what they were published."""

  sealer: Sealer | None = None
  replication: Any = None

  def __init__(self, learners: int, store=None, incarnation=0, in_place=False, **sections):
    sync = {"num_shards": 1, "num_fragments": 2, "sync_period": 4, "overlap_steps": 2}
    sync |= {"liveness_seconds": 1e6, "grace_safety": 0.9, **sections.pop("sync", {})}
    self.config = from_dict({"islands": {"num_learners": learners}, "sync": sync, **sections})
    self.plan = fragments.make_plan(toy.SPECS, self.config.sync)
    self.learners: Sequence[int] = range(learners)
    self.step = 9
    self.lives = dict.fromkeys(self.learners, 0)
    self.held: dict[int, dict[int, tuple[int, np.ndarray]]] = {m: {} for m in self.learners}
    self.rounds: dict[int, dict[int, int]] = {m: {} for m in self.learners}
    self.store = toy.initial_store(self.plan) if store is None else store
    self.in_place = in_place
    self.start(incarnation)
    for m in self.learners:
      self.hear(says.hello(m, 0))

  def start(self, incarnation: int) -> None:
    self.outbox, self.events = Outbox(), []
    recorder = toy.ListRecorder(self.events)
    state = new_syncer(self.config, 0, incarnation, self.store)
    runtime = Runtime(self.config, self.plan, self.outbox, recorder, time=toy.AtOnce())
    how = {"in_place": True} if self.in_place else {}
    self.syncer = Syncer(state, self.store, runtime, self.replication, self.sealer, **how)
    self.settle()

  def hear(self, message) -> None:
    """The shard handles one message; every learner takes up what is published."""
    drive(self.syncer.take(message, time.monotonic()), self.outbox, 0.0)
    self.settle()
    self.handle(Tick(time.monotonic()))
    self.settle()
    for m, publish in self.outbox.take(Publish):
      assert isinstance(publish, Publish)
      _, value = self.held[m].get(publish.fragment, (-1, None))
      decoded = codec.decode(
        publish.payload, self.plan.fragments[publish.fragment].size, publish.codec
      )
      if publish.base_round != NOTHING:
        has = self.rounds[m][publish.fragment]
        assert publish.base_round == has, "an update to something the learner does not have"
        decoded = value + decoded
      self.held[m][publish.fragment] = (publish.version, decoded)
      self.rounds[m][publish.fragment] = publish.round

  def settle(self) -> None:
    """What follows from the jobs of the worker, which are done at once."""
    while not self.syncer._news.empty():
      drive(self.syncer.finish(), self.outbox, 0.0)

  def handle(self, event) -> None:
    drive(self.syncer.handle(event), self.outbox, 0.0)

  def report(self, m: int, steps_since_sync: int) -> None:
    """With steps so long that the grace window lasts until everybody has answered."""
    versions = tuple(self.held[m][f.index][0] for f in self.plan.fragments)
    rounds = tuple(self.rounds[m][f.index] for f in self.plan.fragments)
    sinces = tuple(steps_since_sync for _ in versions)
    self.hear(says.report(m, self.lives[m], self.step, 1e3, versions, sinces, rounds=rounds))

  def round(self, deltas: dict[int, dict[int, object]], name="f32") -> list[dict]:
    """One round of both fragments; `deltas[learner][fragment]` is a vector or a whole payload."""
    self.step += 9
    for steps_since_sync in (1, 9):  # everybody can be asked before anybody is due
      for m in self.learners:
        self.report(m, steps_since_sync)
    for m, pull in self.outbox.take(Pull):
      assert isinstance(pull, Pull)
      content = deltas[m][pull.fragment]
      codec_name, payload = content if isinstance(content, tuple) else (name, None)
      if payload is None:
        payload = codec.encode(content, name)
      p, base = pull.fragment, pull.base_version
      push = says.push(m, self.lives[m], p, pull.round, base, 3, 30 + m, codec_name, payload)
      self.hear(push)
    return [e for e in self.events if e.kind in ("commit", "abandoned")]


def deltas(plan, learners, seed: int) -> dict:
  random = np.random.default_rng(seed)
  return {
    m: {f.index: random.standard_normal(f.size).astype(np.float32) / 50 for f in plan.fragments}
    for m in learners
  }


def same(a: np.ndarray, b: np.ndarray) -> bool:
  return a.tobytes() == b.tobytes()


@pytest.mark.parametrize("name", ["f32", "bf16", "int8", "int4"])
def test_learners_hold_exactly_the_shards_view_round_after_round(name):
  shard = Shard(3, sync={"publish_codec": name, "push_codec": name, "min_quorum": 3})
  for number in range(6):
    if number == 3:  # a new incarnation of the shard sends updates to what learners have
      shard.start(incarnation=1)
    if number == 4:  # a new incarnation of a learner gets everything whole
      shard.held[2], shard.lives[2] = {}, 1
      shard.hear(says.hello(2, 1))
      assert {version for version, _ in shard.held[2].values()} == {4}
    shard.round(deltas(shard.plan, shard.learners, seed=number), name)
    for f in shard.plan.fragments:
      committed = shard.syncer.committed[f.index]
      assert committed.state.version == number + 1
      for m in shard.learners:
        version, value = shard.held[m][f.index]
        assert version == number + 1 and same(value, committed.published_value)
      error = np.abs(committed.published_value - committed.value).max()
      assert (error == 0) if name == "f32" else (0 < error < 0.02), "errors do not add up"


def whole(size: int, value: float) -> np.ndarray:
  return codec.encode(np.full(size, value, np.float32), "f32")


def broken_scale(size: int, scale: float) -> np.ndarray:
  payload = codec.encode(np.ones(size, np.float32), "int8")
  payload[:4] = np.frombuffer(np.float32(scale).tobytes(), np.uint8)
  return payload


BAD = {
  "short": (lambda n: ("f32", whole(n, 1.0)[:-4]), "must be uint8"),
  "long": (lambda n: ("f32", whole(n + 1, 1.0)), "must be uint8"),
  "empty": (lambda n: ("f32", np.zeros(0, np.uint8)), "must be uint8"),
  "codec": (lambda n: ("bf16", codec.encode(np.ones(n, np.float32), "bf16")), "must be 'f32'"),
  "nan": (lambda n: ("f32", whole(n, math.nan)), "not finite"),
  "inf": (lambda n: ("f32", whole(n, -math.inf)), "not finite"),
  "exploding": (lambda n: ("f32", whole(n, 1e9)), "is over sync.max_norm_ratio (10) x"),
  "overflowing": (lambda n: ("f32", whole(n, 3e38)), "longer than any push"),
  "nan scale": (lambda n: ("int8", broken_scale(n, math.nan)), "not finite"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_push_is_rejected_with_its_reason_and_changes_no_bit(kind):
  make, reason = BAD[kind]
  name = "int8" if kind == "nan scale" else "f32"
  shard, clean = (Shard(3, sync={"min_quorum": 2, "push_codec": name}) for _ in range(2))
  for number in range(2):  # a bad one after a good one: the past counts as well
    good = deltas(shard.plan, shard.learners, seed=number)
    if number == 0:
      shard.round(good, name)
      clean.round(good, name)
      continue
    bad = {**good, 1: {f.index: make(f.size) for f in shard.plan.fragments}}
    clean.learners = [0, 2]
    shard.round(bad, name)
    clean.round(good, name)
  commits = [e for e in shard.events if e.kind == "commit" and e.version == 2]
  assert len(commits) == len(shard.plan.fragments)
  for event in commits:
    assert set(event.weights) == {0, 2} and list(event.rejected) == [1]
    assert reason in event.rejected[1]
  for f in shard.plan.fragments:
    assert same(shard.syncer.committed[f.index].value, clean.syncer.committed[f.index].value)
  rejected = [m for learner, m in shard.outbox.take(Rejection) if learner == 1]
  assert len(rejected) == len(shard.plan.fragments) and reason in rejected[0].reason


def test_a_round_with_bad_pushes_only_changes_nothing_and_the_next_one_commits():
  shard = Shard(2, sync={"min_quorum": 2, "quarantine_after": 9})
  before = {f.index: shard.store[f.index] for f in shard.plan.fragments}
  bad = {m: {f.index: BAD["nan"][0](f.size) for f in shard.plan.fragments} for m in (0, 1)}
  ended = shard.round(bad)
  assert {e.kind for e in ended} == {"abandoned"}
  assert all("not finite" in reason for e in ended for reason in e.rejected.values())
  assert all(e.rejected for e in ended)
  for p, committed in before.items():
    assert shard.store[p] is committed
  shard.round(deltas(shard.plan, shard.learners, seed=0))
  assert {f.state.version for f in shard.syncer.committed.values()} == {1}


def test_momentum_and_versions_survive_a_restart_of_the_shard():
  settings = {"sync": {"min_quorum": 2, "publish_codec": "int8"}}
  settings["outer"] = {"learning_rate": 0.7, "momentum": 0.9}
  steady, restarted = Shard(2, **settings), Shard(2, **settings)
  for number in range(4):
    if number == 2:
      restarted.start(incarnation=1)
    for shard in (steady, restarted):
      shard.round(deltas(shard.plan, shard.learners, seed=number))
  for f in steady.plan.fragments:
    one, other = (shard.store[f.index] for shard in (steady, restarted))
    assert one.state.version == other.state.version == 4
    assert same(one.value, other.value) and same(one.momentum, other.momentum)
    assert same(one.published_value, other.published_value)
    assert one.state.merged_tokens == other.state.merged_tokens == 4 * (30 + 31)
    assert np.abs(one.momentum).max() > 0


def test_a_value_that_is_given_back_goes_whole_to_the_buddy_and_leaves_the_momentum_alone():
  """As a change, the buddy would make momentum of the jump, and the shard does not."""

  class Buddy:
    told: list = []
    changing: list = []
    held = ()

    def changes(self, fragment: int) -> None:
      self.changing.append(fragment)

    def committed(self, committed, change) -> None:
      self.told.append((committed.state.index, change))

    def when_safe(self, fragment, do) -> None:
      do()

  settings = {"sync": {"publish_codec": "int8"}, "outer": {"learning_rate": 0.7, "momentum": 0.9}}
  shard = Shard(2, **settings)
  shard.syncer.replication = Buddy()
  shard.round(deltas(shard.plan, shard.learners, seed=0))
  assert {p for p, change in Buddy.told if change is not None} == {0, 1}
  assert sorted(Buddy.changing) == [0, 1], "not to be sent while they are overwritten"
  Buddy.told.clear()
  before = shard.syncer.committed[0]
  momentum, later = before.momentum.copy(), before.value + np.float32(1)
  shard.syncer._perform(InstallValue(0, later))
  shard.settle()
  after = shard.syncer.committed[0]
  assert same(after.value, later) and same(after.momentum, momentum)
  assert after.momentum_round == before.momentum_round and Buddy.told == [(0, None)]
  *_, owns = (e for e in shard.events if e.kind == "owns")
  assert (owns.fragment, owns.momentum_round) == (0, before.momentum_round)


def test_publishes_that_wait_for_the_buddy_are_not_sent_again():
  """They are not lost, and each would go out whole as well as soon as the buddy has its copy."""

  class Holding:
    publishes: list = []
    held = property(lambda self: set(self.publishes))

    def changes(self, fragment: int) -> None:
      pass

    def committed(self, committed, change) -> None:
      pass

    def when_safe(self, fragment, do) -> None:
      self.publishes.append(fragment)

  shard = Shard(2, sync={"liveness_seconds": 1e-9, "min_quorum": 2})
  shard.syncer.replication = Holding()
  shard.round(deltas(shard.plan, shard.learners, seed=0))
  for _ in range(3):
    for m in shard.learners:
      shard.report(m, 0)
  assert sorted(Holding.publishes) == [0, 0, 1, 1], "once to each learner"


def test_the_log_on_disk_has_a_commit_before_another_role_hears_of_it():
  shard, on_disk, heard = Shard(2), set(), []
  send = shard.outbox.send

  def sent(to, message):
    if isinstance(message, Publish) and message.version:
      heard.append(message.round in on_disk)
    return send(to, message)

  shard.outbox.send = sent
  shard.syncer.replication = types.SimpleNamespace(
    held=(),
    changes=lambda fragment: None,
    committed=lambda copy, change: heard.append(copy.state.last_round in on_disk),
    when_safe=lambda fragment, do: do(),
  )
  shard.syncer.recorder.flush = lambda: on_disk.update(
    event.round for event in shard.events if event.kind == "commit"
  )
  shard.round(deltas(shard.plan, shard.learners, seed=0))
  assert heard == [True] * 6, "the buddy of two commits, and two learners of each"


def test_values_that_are_given_back_again_and_again_do_not_wait_all_at_once():
  """A shard that compiles asks again, and a bad learner sends without being asked again."""
  shard, waiting = Shard(2), []
  shard.syncer._worker = types.SimpleNamespace(put=waiting.append, failure=None)
  requests = dict.fromkeys([(0, 0), (0, 1)], ValueRequest(0.0, 1, round=5))
  shard.syncer.state = replace(shard.syncer.state, value_requests=requests)
  values = [says.value(m, 0, 0, 1, 5, 10, {}, "", np.zeros(4, np.uint8)) for m in (0, 1)]
  for value in 3 * values:
    shard.hear(value)
  assert len(waiting) == 2, "one of each learner"
  for _ in waiting.pop(0):
    pass
  shard.settle()
  shard.hear(values[0])
  assert len(waiting) == 2, "one that was refused may be sent again"


def test_a_round_that_ends_while_values_are_prepared_takes_no_push_from_the_next_one(monkeypatch):
  """Its end waits for no job, in the log and in the worker, whose jobs are those of decisions."""
  shard, jobs = Shard(2, sync={"min_quorum": 2}), []
  worker = types.SimpleNamespace(put=jobs.append, failure=None)
  monkeypatch.setattr(toy.AtOnce, "worker", lambda *_, **__: worker)
  shard.start(incarnation=1)  # it compiles for long
  for life in (0, 1):
    shard.lives = dict.fromkeys(shard.learners, life)
    for m in shard.learners:
      shard.hear(says.hello(m, life, (-1, -1)))
    for m in shard.learners:
      shard.report(m, 99)
    pulls = shard.outbox.take(Pull)
    assert len(pulls) == 4
    if life == 0:
      for m in shard.learners:
        shard.hear(Goodbye(m, life))
  kinds = [e.kind for e in shard.events if e.kind in ("round", "abandoned")]
  assert kinds == ["round", "round", "abandoned", "abandoned", "round", "round"]
  for m, pull in pulls:
    payload = codec.encode(np.ones(shard.plan.fragments[pull.fragment].size, np.float32), "f32")
    shard.hear(says.push(m, 1, pull.fragment, pull.round, 0, 3, 30, "f32", payload))
  while jobs:
    done, jobs[:] = list(jobs), []
    for job in done:
      for _ in job:
        pass
    shard.settle()
    shard.handle(Tick(time.monotonic()))
  assert [c.state.version for c in shard.syncer.committed.values()] == [1, 1]


def test_a_version_does_not_wait_for_a_commit_that_was_decided_with_its_own(monkeypatch):
  shard, done = Shard(2, sync={"min_quorum": 2}), []
  merger = shard.syncer.merger
  commit, with_payload = merger.commit, merger.with_payload

  def committed(what, state):
    done.append(f"commit {what.fragment}")
    return commit(what, state)

  def prepared(publish):
    done.append(f"publish {publish.fragment}")
    return with_payload(publish)

  for steps_since_sync in (1, 9):
    for m in shard.learners:
      shard.report(m, steps_since_sync)
  for m, pull in shard.outbox.take(Pull):
    payload = codec.encode(np.ones(shard.plan.fragments[pull.fragment].size, np.float32), "f32")
    push = says.push(m, 0, pull.fragment, pull.round, 0, 3, 30, "f32", payload)
    drive(shard.syncer.take(push, time.monotonic()), shard.outbox, 0.0)
    shard.settle()
  monkeypatch.setattr(merger, "commit", committed)
  monkeypatch.setattr(merger, "with_payload", prepared)
  shard.handle(Tick(time.monotonic()))
  assert done == ["commit 0", *["publish 0"] * 2, "commit 1", *["publish 1"] * 2]


def test_what_was_committed_is_never_written_again():
  """Values travel by reference between threads. Of a lossy codec nothing is lent meanwhile."""
  sync = {"min_quorum": 2, "publish_codec": "int8"}
  shard = Shard(2, sync=sync, outer={"momentum": 0.9})
  shard.round(deltas(shard.plan, shard.learners, seed=0))
  kept = [
    (c.value, c.value.copy(), c.published_value, c.published_value.copy())
    for c in shard.syncer.committed.values()
  ]
  pushed = deltas(shard.plan, shard.learners, seed=1)
  copies = {m: {p: d.copy() for p, d in each.items()} for m, each in pushed.items()}
  shard.round(pushed)
  for value, value_copy, published_value, published_copy in kept:
    assert same(value, value_copy) and same(published_value, published_copy)
  for m, each in pushed.items():
    assert all(same(each[p], copies[m][p]) for p in each)


@pytest.mark.parametrize("name", codec.CODECS)
def test_a_shard_that_alone_has_its_vectors_writes_over_them_and_over_nothing_lent(name):
  """The same bits as with fresh memory for every commit, wherever they are written."""
  sync = {"min_quorum": 2, "publish_codec": name, "push_codec": "int8"}
  both = [
    Shard(2, in_place=in_place, sync=sync, outer={"momentum": 0.9}) for in_place in (False, True)
  ]
  alone = both[1]
  where: list[list[int]] = []
  lent: list[tuple[np.ndarray, bytes]] = []
  for seed in range(6):
    for shard in both:
      shard.round(deltas(shard.plan, shard.learners, seed), name="int8")
    for c, d in zip(*(shard.syncer.committed.values() for shard in both)):
      assert c.state == d.state
      assert same(c.value, d.value) and same(c.published_value, d.published_value)
      assert same(c.momentum, d.momentum)
    assert all(value.tobytes() == was for value, was in lent), "still as when they were lent"
    where.append([c.value.ctypes.data for c in alone.syncer.committed.values()])
    if seed == 3:  # a snapshot
      lent = [(v[1:], v[1:].tobytes()) for v in alone.syncer.merger.arrays().values()]
  if name == "f32":  # values go out as they are, and these learners keep them
    assert all(a != b for a, b in itertools.pairwise(where))
  else:
    assert where[1] == where[2] == where[3] != where[4] == where[5]


def test_the_commit_event_says_who_and_why(monkeypatch):
  shard, dragged = Shard(2, sync={"min_quorum": 1}), []
  commit, said = shard.syncer.merger.commit, {"length": 1.23456, "rho": -0.98765}
  thirds = lambda merged: replace(merged, weights=merged.weights / merged.weights / 3, **said)
  monkeypatch.setattr(shard.syncer.merger, "commit", lambda *given: thirds(commit(*given)))
  shard.syncer.time = types.SimpleNamespace(now=itertools.count().__next__)
  shard.syncer._drag = dragged.append
  (first, _) = shard.round(deltas(shard.plan, shard.learners, seed=0))[:2]
  assert first.weights == dict.fromkeys(first.learners, 0.333333) and {*first.learners} <= {0, 1}
  assert first.version == 1 and first.reason
  assert first.merge_seconds == 2, "the clock goes on by one whenever it is asked"
  assert len(dragged) > 2 and {*dragged} == {1}, "a slow shard measures and merges longer"
  assert (first.length, first.rho) == (1.2346, -0.9877)
  assert first.step_tokens == (shard.config.tokens_per_step(0),) * len(first.learners)


def test_a_flood_of_ignored_messages_is_a_line_a_second_that_counts_them():
  shard, now = Shard(2), [1.0]
  shard.syncer.time = types.SimpleNamespace(now=lambda: now[0])
  for now[0], learner in ((1.0, 0), (1.1, 0), (1.2, 1), (1.9, 0), (2.1, 0), (2.2, 0), (3.5, 0)):
    shard.syncer._perform(events.Ignored(reason="odd", message="Push", learner=learner))
  said = [(e.learner, e.times) for e in shard.events if e.kind == "ignored"]
  assert said == [(0, 1), (1, 1), (0, 3), (0, 2)]


def test_replay_weighs_a_commit_by_the_batches_that_its_shard_knew():
  """A run may go on with other batches, which bound the weights of its islands."""
  old = from_dict({})
  new = from_dict({"islands": {"overrides": {"0": {"batch_size": 2 * old.islands.batch_size}}}})
  said = tuple(old.tokens_per_step(m) for m in (0, 1))
  now = tuple(new.tokens_per_step(m) for m in (0, 1))
  what = made(0.0, "syncer-0", "commit", learners=[0, 1], steps=[26, 24], tokens=[26, 24])
  before, after = (learner_weights(replace(what, step_tokens=each), new) for each in (said, now))
  assert not same(before, after)
  assert same(learner_weights(replace(what, step_tokens=said), old), before)


def test_a_snapshot_awaits_no_learner_that_said_goodbye_and_does_not_miss_it():
  shard = Shard(3)
  shard.round(deltas(shard.plan, shard.learners, seed=0))
  shard.syncer._saver = types.SimpleNamespace(commit_when_complete=lambda *given: given)
  captured, settings = replace(shard.syncer.state, snapshot=20), shard.config.checkpoint
  number, shards, expected, *how, has_left = shard.syncer._commit_snapshot(captured)
  assert (number, shards, how) == (20, ["syncer-0"], [settings.patience_seconds, True])
  assert expected() == ["learner-0", "learner-1", "learner-2"] and not has_left("learner-0")
  shard.hear(Goodbye(0, 0))
  assert expected() == ["learner-1", "learner-2"]
  assert has_left("learner-0") and not has_left("learner-1")
  assert not has_left("syncer-0"), "the shard of the same number is there"
  state = shard.syncer.state
  for changes in ({"lost": True}, {"incarnation": 1}):
    shard.syncer.state = state.with_member(1, **changes)
    assert expected() == ["learner-2"] and not has_left("learner-1")


def test_parts_of_learners_stay_for_a_hundred_snapshots_and_those_of_shards_as_configured():
  shard, saved = Shard(3), []
  shard.syncer._saver = types.SimpleNamespace(save=lambda *given: saved.append(given))
  list(shard.syncer._collected(replace(shard.syncer.state, snapshot=100_000), ({}, {})))
  config = shard.syncer.config
  ((*_, keep, since),) = saved
  assert (keep, since) == (config.checkpoint.keep, 100_000 - 100 * config.sync.snapshot_steps)


@pytest.mark.parametrize("blocking", [False, True])
def test_shard_0_alone_commits_snapshots_in_lock_step_those_that_have_a_quorum(blocking):
  shard, saved = Shard(3, sync={"blocking": blocking, "min_quorum": 2}), []
  shard.syncer._saver = types.SimpleNamespace(save=lambda *given: saved.append(len(given) > 3))
  state = shard.syncer.state
  here = state.with_member(0, versions=(0, 0)).with_member(1, versions=(0, 0))
  for each in (state, here, replace(here, shard=1)):
    list(shard.syncer._collected(each, ({}, {})))
  assert saved == [not blocking, True, False]


def test_of_what_is_lost_of_a_fragment_the_newest_version_counts():
  shard, lost = Shard(2), [(0, {0: 5}), (1, {0: 3, 1: 2})]
  assert shard.syncer.lost == {}
  for learner, versions in lost:
    shard.syncer._perform(events.Lost(learner=learner, versions=versions, reason="too late"))
  assert shard.syncer.lost == {0: 5, 1: 2}
  assert [(e.learner, e.versions) for e in shard.events if e.kind == "lost"] == lost


def test_a_shard_says_first_what_it_serves(monkeypatch, capsys):
  """What replay builds a commit on, and that a disk without room for compiled code stops no run."""
  shard = Shard(2, sync={"min_quorum": 2, "publish_codec": "int8"})
  shard.round(deltas(shard.plan, shard.learners, seed=0))
  (commit,) = (e for e in shard.events if e.kind == "commit" and e.fragment == 1)
  given_back = shard.store[1].published_value
  shard.store[1] = replace(shard.store[1], value=given_back, momentum_round=-1)
  prepared = []
  monkeypatch.setattr(Merger, "prepare", lambda self, p: prepared.append(p) or "no room" * p)
  shard.replication = types.SimpleNamespace()
  shard.start(incarnation=1)
  assert shard.replication.background == shard.syncer._worker.put, (
    "copies are in order with commits"
  )
  started, first, second = shard.events
  assert (started.kind, started.fragments, prepared) == ("started", (0, 1), [0, 1])
  assert (first.fragment, first.version, first.exact) == (0, 1, True)
  assert first.momentum_round == first.round == shard.store[0].state.last_round >= 0
  said = second.version, second.round, second.momentum_round, second.exact, second.merged_tokens
  assert said == (1, commit.round, -1, False, sum(commit.tokens))
  assert capsys.readouterr().err.count("cannot be kept on disk: no room. The run goes on") == 1
  assert shard.syncer.idle
  shard.syncer._do(lambda: None)
  assert not shard.syncer.idle, "what follows from the job is still to be done"


def test_a_commit_of_pushes_that_change_nothing_has_no_length():
  shard = Shard(2, sync={"min_quorum": 2})
  zeros = {f.index: np.zeros(f.size, np.float32) for f in shard.plan.fragments}
  commits = shard.round(dict.fromkeys(shard.learners, zeros))
  assert [(e.kind, e.length, e.rho) for e in commits] == [("commit", None, None)] * 2


def test_a_snapshot_has_the_commits_that_were_decided_before_it():
  shard, jobs, saved = Shard(2), [], []
  shard.round(deltas(shard.plan, shard.learners, seed=0))
  role, state = shard.syncer, replace(shard.syncer.state, shard=1, snapshot=20)
  role._perform(TakeSnapshot(state))
  assert not role._capturing, "a run may make none"
  role._worker = types.SimpleNamespace(put=jobs.append, failure=None)
  role._saver = types.SimpleNamespace(save=lambda *given: saved.append(given))
  role._perform(TakeSnapshot(state))
  assert role._capturing and not saved, "its turn comes after theirs"
  for _ in jobs.pop():
    pass
  shard.settle()
  ((snapshot, part, arrays),) = saved
  assert (snapshot, role._capturing, shard.events[-1].snapshot) == (20, False, 20)
  assert part == syncer_part(state, {p: c.momentum_round for p, c in role.committed.items()})
  assert arrays == role.merger.arrays() and shard.events[-1].kind == "captured"


@pytest.mark.parametrize("value_threads, count", [(0, 8), (3, 3)])
def test_a_shards_work_on_large_fragments_may_use_all_cores(monkeypatch, value_threads, count):
  monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
  sizes = Shard(1).plan.sizes
  assert sizes[0] != sizes[1], "the largest fragment counts"
  monkeypatch.setattr("ddiloco.runtime.COMPILED_FROM", max(sizes))
  role = Shard(1, sync={"value_threads": value_threads}).syncer
  assert role._threads.count == count and role.merger.share == role._threads.share
