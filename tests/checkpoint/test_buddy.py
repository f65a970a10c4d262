"""Copies on a buddy shard: nobody hears of what one process alone knows, and a kill loses none."""

from __future__ import annotations

import numpy as np
import pytest

from ddiloco.checkpoint.buddy import (
  Copies,
  Replication,
  at_once,
  neighbours,
  pack,
  unpack,
)
from ddiloco.config import Config, OuterConfig
from ddiloco.core import codec, fragments, outer, passes
from ddiloco.core.codec import Encoded
from ddiloco.core.delta import Committed
from ddiloco.network.transport import Counters, syncer_address
from ddiloco.protocol.messages import FragmentState, Recover, Recovered, Replica, Replicated
from ddiloco.protocol.values import replace
from tests.roles import toy
from tests.roles.fleet import bits

SYNC = {"num_shards": 2, "num_fragments": 4, "sync_period": 6, "overlap_steps": 2}
PLAN = fragments.make_plan(toy.SPECS, toy.config(2, 10, **SYNC).sync)


OUTER = OuterConfig(learning_rate=0.7, momentum=0.9, decay_share=0.5)
CONFIG = Config(outer=OUTER)


def round_of(version: int) -> int:
  """The round that made this version in `committed`."""
  return (1 << 50) + version


def committed(
  p: int, version: int, seed: int = 0, published_value: bool = True, momentum: bool = True
):
  random = np.random.default_rng([p, version, seed])
  value, seen, speed = random.standard_normal((3, PLAN.sizes[p])).astype(np.float32)
  value[0] = np.float32("nan")  # bits, not numbers
  state = FragmentState(p, version, 700 + version, {0: 9, 3: 1 << 50}, {0: 8, 3: 40}, 1 << 50, 40)
  state = replace(state, last_round=round_of(version))
  return Committed(state, value, seen if published_value else value, speed if momentum else None)


class Outbox:
  """An endpoint that only keeps what is sent."""

  def __init__(self):
    self.counters = Counters()
    self.sent: list[tuple[str, object]] = []

  def send(self, to, message) -> int:
    self.sent.append((to, message))
    return 1

  def take(self) -> list[tuple[str, object]]:
    taken, self.sent = self.sent, []
    return taken


@pytest.fixture
def box() -> Outbox:
  return Outbox()


@pytest.fixture
def copies(box) -> Copies:
  """What a buddy, shard 1, keeps for others."""
  return Copies(1, 50, box, PLAN, CONFIG)


# --- the message ----------------------------------------------------------------------------------


def received(message: Replica) -> Replica:
  """As out of a frame: read only, and nobody's memory but its own."""
  return replace(message, payload=memoryview(np.asarray(message.payload).tobytes()))


@pytest.mark.parametrize("published_value", [True, False])
@pytest.mark.parametrize("momentum", [True, False])
def test_a_commit_survives_the_way_bit_by_bit(published_value, momentum):
  before = committed(1, 5, published_value=published_value, momentum=momentum)
  after = unpack(received(pack(before, 1, 9, 1)), PLAN)
  expected = replace(before, value=before.published_value)
  assert bits(after) == bits(expected), "what learners have is what it goes on from"
  assert after.value is after.published_value, "no second copy of the same values"


def test_the_next_commit_does_not_change_what_was_sent():
  c = committed(1, 5)
  replica = pack(c, 1, 9, 1)
  sent = bytes(replica.payload)
  c.momentum[:] = 0
  assert bytes(replica.payload) == sent


def change(before: Committed, name: str, seed: int) -> tuple[Committed, Replica]:
  """The next commit of a shard, and the message that says it as learners get it."""
  fragment = PLAN.fragments[before.state.index]
  delta = np.random.default_rng(seed).standard_normal(fragment.size).astype(np.float32)
  ones = np.ones((1, len(fragment.pieces)), np.float32)
  total = passes.Sum(fragment, [Encoded("f32", codec.encode(delta, "f32"))], ones)
  momentum = before.momentum if before.momentum is not None else outer.init(fragment.size, OUTER)
  old = passes.Vectors(before.value, before.published_value, momentum)
  version, last = before.state.version + 1, before.state.last_round
  tokens = before.state.merged_tokens + CONFIG.run.total_tokens // 5
  state = replace(before.state, version=version, last_round=last + 1, merged_tokens=tokens)
  optimizer = outer.at(OUTER, tokens / CONFIG.run.total_tokens)  # its rate falls on the way
  new, update = passes.step(total, old, optimizer, name)
  after = Committed(state, new.value, new.published_value, new.momentum)
  sent = update or Encoded("f32", codec.encode(new.published_value, "f32"))
  return after, pack(after, 0, 9, 0, last, sent)


@pytest.mark.parametrize("momentum", [True, False])
@pytest.mark.parametrize("name", codec.CODECS)
def test_a_buddy_that_gets_what_learners_get_has_value_and_momentum_bit_by_bit(
  name, momentum, box, copies
):
  newest = committed(1, 5, published_value=name != "f32", momentum=momentum)
  newest.value[0] = newest.published_value[0] = 0
  keep(copies, pack(newest, 0, 9, 0))
  for seed in range(5):
    newest, message = change(newest, name, seed)
    assert len(message.payload) == codec.payload_bytes(PLAN.sizes[1], name), "one publish"
    keep(copies, received(message))
    assert box.take()[-1] == ("syncer-0", Replicated(1, 50, 1, newest.state.last_round, True))
  keep(copies, Recover(0, 10))
  [(_, whole), _] = box.take()
  expected = replace(newest, value=newest.published_value)
  assert bits(unpack(received(whole), PLAN)) == bits(expected)


def test_a_value_of_a_later_round_replaces_a_copy_of_a_greater_version(box, copies):
  """An owner that began at version 8 of an old history got version 4 of a newer one from a learner.

  The buddy must not say that it has version 4, and then give version 8 back.
  """
  old, newer = committed(1, 8), committed(1, 4, seed=1)
  newer = replace(newer, state=replace(newer.state, last_round=(1 << 50) + 100))
  for each in (old, newer, old):  # the last one comes again, late
    keep(copies, pack(each, 0, 9, 0))
  assert given_back(copies, box, 0, 10) == {1: 4}


def test_a_change_does_not_continue_the_copy_of_the_life_before(box, copies):
  """Both lives had the value of the same round, but a learner gives no momentum back."""
  first = committed(1, 5)
  first.value[0] = first.published_value[0] = 0
  keep(copies, pack(first, 0, 9, 0))
  second, message = change(replace(first, momentum=first.momentum * 0), "int8", 0)
  box.take()
  keep(copies, replace(message, incarnation=10))  # its first copy, whole, was lost
  assert box.take() == [("syncer-0", Replicated(1, 50, 1, round_of(6), False))]
  keep(copies, pack(second, 0, 10, 0))
  assert given_back(copies, box, 0, 11) == {1: 6}


def test_a_change_of_what_a_buddy_does_not_have_is_not_kept(box, copies):
  first = committed(1, 5)
  first.value[0] = 0
  second, message = change(first, "int8", 0)
  keep(copies, message)
  assert box.take() == [("syncer-0", Replicated(1, 50, 1, round_of(6), False))]
  keep(copies, pack(first, 0, 9, 0))
  keep(copies, replace(message, payload=message.payload[:-1]))
  _, third = change(second, "int8", 1)
  keep(copies, third)
  assert [m.kept for _, m in box.take()] == [True, False, False]
  for each in (message, third, third):  # one that comes twice is here
    keep(copies, each)
  assert [(m.round - round_of(0), m.kept) for _, m in box.take()] == [(6, True), *[(7, True)] * 2]


@pytest.mark.parametrize(
  "wrong",
  [
    {"state": FragmentState(99)},
    {"state": FragmentState(0)},
    {"codec": "int8"},
    {"base_round": 7},
    {"payload": b""},
    {"payload": b"123"},
    {"payload": bytes(12 * PLAN.sizes[1])},
  ],
  ids=str,
)
def test_what_cannot_be_a_commit_of_this_plan_is_none(wrong):
  assert PLAN.sizes[0] != PLAN.sizes[1]
  assert unpack(replace(pack(committed(1, 5), 1, 9, 1), **wrong), PLAN) is None


# --- the buddy ------------------------------------------------------------------------------------


def keep(copies: Copies, message) -> None:
  for _ in copies.on(message):
    pass


def given_back(copies: Copies, box: Outbox, owner: int, incarnation: int) -> dict[int, int]:
  """Fragment -> version; the list of what is held comes with it."""
  box.take()
  keep(copies, Recover(owner, incarnation))
  sent = [m for to, m in box.take() if to == syncer_address(owner)]
  replicas = [m for m in sent if isinstance(m, Replica)]
  [listed] = [m for m in sent if isinstance(m, Recovered)]
  assert listed.asked_by == incarnation
  assert listed.fragments == tuple(m.state.index for m in replicas)
  assert listed.rounds == tuple(m.state.last_round for m in replicas)
  return {m.state.index: m.state.version for m in replicas}


def test_a_buddy_keeps_the_newest_and_says_so(box, copies):
  for version in (3, 5, 4):
    keep(copies, pack(committed(1, version), 0, 9, 0))
    assert box.take() == [("syncer-0", Replicated(1, 50, 1, round_of(version), True))]
  keep(copies, pack(committed(2, 1), 0, 9, 0))
  keep(copies, pack(committed(0, 8), 3, 9, 3))  # of another neighbour
  assert given_back(copies, box, 0, 10) == {1: 5, 2: 1}
  assert given_back(copies, box, 3, 10) == {0: 8}
  assert given_back(copies, box, 2, 10) == {}


def test_a_new_life_of_the_owner_counts_even_from_an_older_version_on(box, copies):
  keep(copies, pack(committed(1, 7), 0, 9, 0))
  keep(copies, pack(committed(1, 2), 0, 10, 0))  # it could not reach its buddy, and began anew
  assert given_back(copies, box, 0, 11) == {1: 2}


def test_what_a_dead_owner_sent_is_ignored(box, copies):
  """Control overtakes fragments: the new owner was told of version 7, and goes on from there."""
  keep(copies, pack(committed(1, 7), 0, 9, 0))
  assert given_back(copies, box, 0, 10) == {1: 7}
  keep(copies, pack(committed(1, 8), 0, 9, 0))
  keep(copies, Recover(0, 9))
  assert box.take() == [], "no confirmation either: the new owner could take it for its own"
  assert given_back(copies, box, 0, 10) == {1: 7}


def test_nobody_replaces_the_fragments_of_another_shard(box, copies):
  keep(copies, pack(committed(1, 7), 0, 9, 0))
  keep(copies, replace(pack(committed(1, 8), 0, 9, 0), shard=2))
  assert box.take() == [("syncer-0", Replicated(1, 50, 1, round_of(7), True))]
  assert given_back(copies, box, 0, 10) == {1: 7}


def test_what_is_given_back_takes_no_memory_beside_the_copies(box, copies):
  """All fragments of a shard wait to be sent together: packed anew they took 8 bytes a value more
  in the only other process that had them."""
  for p, momentum in ((0, True), (2, False)):
    keep(copies, pack(committed(p, 7, momentum=momentum), 0, 9, 0))
  held = [np.asarray(copy.published_value) for _, copy in copies._held.values()]
  box.take()
  keep(copies, Recover(0, 10))
  sent = [m.payload for _, m in box.take() if isinstance(m, Replica)]
  assert [np.shares_memory(*pair) for pair in zip(sent, held, strict=True)] == [True, True]


def test_what_is_given_back_does_not_change_on_its_way(box, copies):
  """The question of a life came late, when that life had begun already."""
  first = committed(1, 5)
  first.value[0] = first.published_value[0] = 0
  keep(copies, pack(first, 0, 10, 0))
  box.take()
  keep(copies, Recover(0, 10))
  [(_, replica), _] = box.take()
  sent = bytes(replica.payload)
  _, message = change(first, "int8", 0)
  keep(copies, replace(message, incarnation=10))
  assert box.take() == [("syncer-0", Replicated(1, 50, 1, round_of(6), True))]
  assert bytes(replica.payload) == sent


def test_copies_that_are_on_their_way_are_not_sent_twice_and_lost_ones_come_again(box, copies):
  """A restarted shard asks again and again while gigabytes of copies leave."""
  for p in (0, 2):
    keep(copies, pack(committed(p, 7), 0, 9, 0))
  box.take()
  jobs = [copies.on(Recover(0, 10)) for _ in range(3)]  # asked while the worker was busy
  for job in jobs:
    at_once(job)
  asks = [Recovered(1, 50, 10, fragments=(0, 2), rounds=(round_of(7),) * 2)] * 3
  assert [m.state.index for _, m in box.sent if isinstance(m, Replica)] == [0, 2]
  assert [m for _, m in box.sent if isinstance(m, Recovered)] == asks, "an answer may be lost too"
  del box.sent[0]  # one has left
  keep(copies, Recover(0, 10))
  assert sum(isinstance(m, Replica) for _, m in box.sent) == 1, "the other has not"
  assert given_back(copies, box, 0, 10) == {0: 7, 2: 7}, "all have left, and were lost"
  keep(copies, Recover(0, 10))
  first = box.sent
  keep(copies, Recover(0, 11))
  fresh = [m for _, m in box.sent if isinstance(m, Replica)]
  assert len(fresh) == 4 and first is box.sent, "what is sent to the life before helps nobody"


@pytest.mark.parametrize(
  ("shard", "count", "others"), [(0, 1, []), (1, 2, [0]), (0, 3, [1, 2]), (2, 5, [1, 3])]
)
def test_a_shard_exchanges_copies_with_its_buddy_and_with_the_shard_whose_buddy_it_is(
  shard, count, others
):
  assert neighbours(shard, count) == others


# --- the owner ------------------------------------------------------------------------------------


class Owner:
  """The owner's side alone, its buddy played by hand, its clock turned by hand."""

  def __init__(self, patience_seconds=2.0):
    self.now_is = 100.0
    self.box, self.events, self.done = Outbox(), [], []
    recorder = toy.ListRecorder(self.events)
    clock = toy.AtOnce()
    clock.now = lambda: self.now_is
    self.copies = Copies(0, 9, self.box, PLAN, CONFIG)
    self.side = Replication(self.copies, patience_seconds, recorder, clock)

  def commit(self, p: int, version: int) -> None:
    self.side.changes(p)
    self.side.committed(committed(p, version))
    self.side.when_safe(p, lambda: self.done.append((p, version)))

  def confirm(self, p: int, version: int, incarnation: int = 50, shard: int = 1) -> None:
    self.side.on(Replicated(shard, incarnation, p, round_of(version), True))

  def later(self, seconds: float) -> None:
    self.now_is += seconds
    self.side.tick()

  def sent(self) -> list[tuple[int, int]]:
    sent = [m for to, m in self.box.take() if to == "syncer-1" and isinstance(m, Replica)]
    return [(m.state.index, m.state.version) for m in sent]

  def kinds(self) -> list[str]:
    return [e.kind for e in self.events]


@pytest.fixture
def owner() -> Owner:
  return Owner()


def test_nobody_hears_of_a_version_before_the_buddy_has_it(owner):
  owner.commit(0, 1)
  owner.commit(2, 1)
  assert owner.sent() == [(0, 1), (2, 1)] and owner.done == []
  owner.confirm(0, 0)
  owner.confirm(0, 1, shard=3)
  assert owner.done == [], "another version, another shard"
  assert set(owner.side.held) == {0, 2}
  owner.side.when_safe(0, lambda: owner.done.append("newcomer"))
  owner.confirm(0, 1)
  assert owner.done == [(0, 1), "newcomer"], "in order"
  owner.side.when_safe(0, lambda: owner.done.append("late"))
  assert owner.done[-1] == "late", "at once: the buddy has it"
  assert set(owner.side.held) == {2}
  owner.confirm(2, 1)
  assert (2, 1) in owner.done and owner.side.missing() == [] and owner.events == []


def test_a_version_number_that_comes_twice_is_confirmed_by_its_own_copy_alone(owner):
  """A shard began at version 9; a learner gave it version 8 of a later history; it commits on that.

  The copy of the first version 9 is still on its way: its receipt says nothing about the second.
  """

  owner.side.begin([committed(0, 9)])
  for version, made_in in ((8, round_of(100)), (9, round_of(101))):
    c = committed(0, version)
    owner.side.committed(replace(c, state=replace(c.state, last_round=made_in)))
    owner.side.when_safe(0, lambda version=version: owner.done.append(version))
  owner.confirm(0, 9)
  assert owner.done == [] and owner.side.missing() == [0], "only this process has the second"
  owner.confirm(0, 101)
  assert owner.done == [8, 9] and owner.side.missing() == []


def test_a_life_sends_its_fragments_one_by_one_and_copies_them_in_the_background(owner):
  jobs = []
  owner.side.background = jobs.append
  owner.side.begin([committed(p, 3) for p in (0, 2, 3)])
  assert owner.sent() == [] and owner.side.missing() == [0, 2, 3]
  for p in (0, 2):
    at_once(jobs.pop())
    assert owner.sent() == [(p, 3)] and not jobs, "the next one waits for its confirmation"
    owner.confirm(p, 3)
  owner.commit(3, 4)  # in place of what was still to be sent
  for job in jobs:
    at_once(job)
  assert owner.sent()[-1] == (3, 4)
  owner.confirm(3, 4)
  assert owner.sent() == [] and owner.side.missing() == [] and owner.done == [(3, 4)]


def test_what_the_buddy_had_before_is_published_meanwhile(owner):
  owner.commit(0, 1)
  owner.confirm(0, 1)
  owner.commit(0, 2)
  owner.side.when_safe(3, lambda: owner.done.append("initial value"))
  assert owner.done == [(0, 1), "initial value"]


def test_a_silent_buddy_holds_up_nobody_for_long_and_it_is_said_once(owner):
  owner.commit(0, 1)
  owner.later(1.9)
  assert owner.done == []
  owner.later(0.2)
  assert owner.done == [(0, 1)] and owner.kinds() == ["unreplicated"]
  for version in range(2, 6):
    owner.commit(0, version)
    owner.later(5.0)
    assert owner.done[-1] == (0, version), "at once"
  assert owner.kinds() == ["unreplicated"] and owner.side.missing() == [0]
  owner.commit(2, 1)
  owner.sent()
  owner.confirm(0, 5)  # it is back: it gets everything it may lack
  assert owner.kinds() == ["unreplicated", "replicated"] and owner.sent() == [(2, 1)]
  owner.commit(0, 6)
  assert owner.done[-1] != (0, 6), "and is waited for again"
  owner.later(60.0)
  assert owner.kinds() == ["unreplicated", "replicated", "unreplicated"]


def test_a_buddy_is_not_away_because_whole_copies_wait_for_their_turn(owner):
  """Three copies are to follow, and each takes long; the commit's own copy is confirmed at once."""
  owner.side.begin([committed(p, 3) for p in range(4)])
  owner.confirm(0, 3)
  owner.later(60.0)
  owner.commit(0, 4)
  owner.later(0.1)
  assert owner.done == [] and owner.events == [], "it waits for its copy"
  owner.confirm(0, 4)
  assert owner.done == [(0, 4)] and owner.side.missing() == [1, 2, 3]


def test_a_copy_that_the_buddy_could_not_keep_comes_again_in_each_of_its_lives(owner):
  owner.commit(0, 1)
  owner.confirm(0, 1)
  owner.commit(0, 2)
  owner.sent()
  for life in (50, 51):
    owner.side.on(Replicated(1, life, 0, round_of(2), False))
    assert owner.sent() == [(0, 2)] and owner.done == [(0, 1)]
  owner.confirm(0, 2, incarnation=51)
  assert owner.done == [(0, 1), (0, 2)] and owner.side.missing() == []


def test_a_buddy_that_missed_one_copy_does_not_get_all_again(owner):
  for p in (0, 1, 2):
    owner.commit(p, 1)
    owner.confirm(p, 1)
  owner.commit(2, 2)  # lost on the way
  owner.later(2.1)
  assert owner.kinds() == ["unreplicated"]
  owner.commit(0, 2)
  owner.sent()
  owner.confirm(0, 2)
  assert owner.sent() == [(2, 2)] and owner.side.missing() == [2]


def test_a_receipt_has_no_other_copy_sent_again_and_may_come_twice(owner):
  for version in (1, 2):
    for p in (0, 1):
      owner.commit(p, version)
  owner.sent()
  for _ in range(2):
    owner.confirm(0, 2)
    assert owner.sent() == [] and owner.side.missing() == [1]
  owner.confirm(1, 2)
  assert owner.side.missing() == [] and owner.side.tick() > owner.now_is, "there is no hurry"


def test_a_fragment_that_is_being_committed_goes_to_a_restarted_buddy_when_that_is_done(owner):
  """Its vectors are written over meanwhile."""
  for p in (0, 1):
    owner.commit(p, 1)
    owner.confirm(p, 1)
  owner.sent()
  owner.side.changes(0)
  owner.side.on(Recover(1, 60))
  assert owner.sent() == [(1, 1)]
  owner.side.committed(committed(0, 2))
  assert owner.sent() == [(0, 2)]


def test_patience_follows_the_measured_time_of_a_copy(owner):
  for version in range(1, 4):  # a slow line: every copy takes 1.5 s
    owner.commit(0, version)
    owner.later(1.5)
    owner.confirm(0, version)
  owner.commit(0, 4)
  owner.later(8.0)
  assert owner.events == [] and owner.done[-1] == (0, 3)
  owner.later(8.0)
  assert owner.kinds() == ["unreplicated"]


def test_a_copy_in_whose_time_a_shard_stood_still_is_no_measure(owner):
  """After ten minutes its buddy had a quarter of an hour to be away before versions went out."""
  for version in range(1, 9):
    owner.commit(0, version)
    owner.later(0.05)
    owner.confirm(0, version)
  owner.commit(0, 9)
  owner.now_is += 600.0  # before its loop looks again the receipt is there
  owner.confirm(0, 9)
  owner.commit(0, 10)
  owner.later(10.0)
  assert owner.kinds() == ["unreplicated"] and owner.done[-1] == (0, 10)


def test_a_whole_copy_has_time_for_its_bytes(owner, monkeypatch):
  """At the first commit of each large fragment the buddy was taken to be away, and the version went
  out without a copy: 4 GB take longer than two seconds to pack."""
  monkeypatch.setattr("ddiloco.checkpoint.buddy.WHOLE_BYTES", 8 * PLAN.sizes[0] / 20)
  owner.commit(0, 1)
  owner.later(21.9)
  assert owner.events == [] and owner.done == []
  owner.confirm(0, 1)
  owner.side._copy_seconds = 0.0
  newest, message = change(committed(0, 1), "int8", 0)
  owner.side.committed(newest, Encoded(message.codec, message.payload))
  owner.side.when_safe(0, lambda: owner.done.append((0, 2)))
  owner.later(1.9)
  assert owner.events == [] and owner.done == [(0, 1)]
  owner.later(0.2)
  assert owner.kinds() == ["unreplicated"] and owner.done == [(0, 1), (0, 2)], "it is no whole one"


def test_a_restarted_buddy_gets_everything_again(owner):
  for p in (0, 1, 2):
    owner.commit(p, 1)
    owner.confirm(p, 1)
  owner.commit(1, 2)
  owner.sent()
  owner.confirm(1, 2, incarnation=60)
  assert owner.sent() == [(0, 1)], "one after the other: all together are a whole model"
  owner.confirm(0, 1, incarnation=50)
  assert owner.side.missing() == [0, 2], "what the dead one said does not count"
  owner.confirm(0, 1, incarnation=60)
  assert owner.sent() == [(2, 1)]
  owner.confirm(2, 1, incarnation=60)
  assert owner.side.missing() == [] and owner.done == [(0, 1), (1, 1), (2, 1), (1, 2)]


@pytest.mark.parametrize("away", [False, True])
def test_a_buddy_that_asks_for_its_own_fragments_has_restarted(away, owner):
  """The copies that its former life was sent are lost: a confirmation would never come."""
  for p in (0, 2):
    owner.commit(p, 1)
    owner.confirm(p, 1)
  for p in (0, 2):
    owner.commit(p, 2)
  owner.later(2.1 if away else 1.9)
  owner.sent()
  for shard, incarnation in ((1, 50), (1, 49), (3, 60)):
    owner.side.on(Recover(shard, incarnation))
  assert owner.sent() == [], "another life, another shard"
  owner.side.on(Recover(1, 60))
  assert owner.sent() == [(0, 2)], "one after the other"
  owner.side.on(Recover(1, 60))
  assert owner.sent() == [], "it asks twice"
  owner.later(1.9)
  assert owner.kinds() == (["unreplicated"] if away else []) + ["replicated"]
  owner.confirm(0, 2, incarnation=60)
  assert owner.sent() == [(2, 2)]
  owner.confirm(2, 2, incarnation=60)
  assert owner.side.missing() == [] and owner.done[2:] == [(0, 2), (2, 2)]


@pytest.mark.parametrize("life", [0, 60])
def test_a_buddy_that_died_before_its_first_receipt_gets_the_copy_again(life, owner):
  """Its owner did not know which life had got the copy, and waited for a receipt in vain."""
  owner.commit(0, 1)
  assert owner.sent() == [(0, 1)]
  owner.side.on(Recover(1, life))
  assert owner.sent() == [(0, 1)]
  owner.side.on(Recover(1, life))
  assert owner.sent() == [] and owner.events == [], "the first life that is known is no news"
  owner.side.on(Recover(1, life + 1))
  assert owner.sent() == [(0, 1)] and owner.kinds() == ["replicated"]
  owner.confirm(0, 1, incarnation=life + 1)
  assert owner.done == [(0, 1)] and owner.side.missing() == []


def test_a_buddy_that_began_together_with_its_owner_gets_no_copy_twice(owner):
  """It asks its own buddy until that one answers; its first request came while the owner asked."""
  keep(owner.copies, Recover(1, 60))
  owner.side.begin([committed(0, 3)])
  assert owner.sent() == [(0, 3)]
  owner.side.on(Recover(1, 60))
  assert owner.sent() == []
  owner.side.on(Recover(1, 61))
  assert owner.sent() == [(0, 3)]


def test_a_buddy_that_restarts_again_and_again_holds_up_nobody_for_long(owner):
  """Each life gets the copy anew, and ends before it could confirm it."""
  owner.commit(0, 1)
  owner.confirm(0, 1)
  owner.commit(0, 2)
  for incarnation in range(60, 64):
    assert owner.done == [(0, 1)]
    owner.later(1.3)
    owner.side.on(Recover(1, incarnation))
  assert owner.done == [(0, 1), (0, 2)] and "unreplicated" in owner.kinds()


def test_copies_that_publishes_wait_for_go_first_to_a_buddy_that_has_restarted(owner):
  """All together are a whole model: the last one would come long after the buddy counts as away."""
  for p in (0, 1, 2):
    owner.commit(p, 1)
    owner.confirm(p, 1)
  owner.commit(2, 2)
  owner.sent()
  owner.side.on(Recover(1, 60))
  assert owner.sent() == [(2, 2)]
  owner.confirm(2, 2, incarnation=60)
  assert owner.done[-1] == (2, 2) and owner.sent() == [(0, 1)]


def test_a_buddy_that_has_restarted_gets_its_own_fragments_before_copies_of_others(owner):
  """It cannot go on without them, and waits only so long for them."""
  owner.commit(0, 1)
  owner.confirm(0, 1)
  owner.side.on(received(pack(committed(1, 4), 1, 50, 1)))
  owner.box.take()
  owner.side.on(Recover(1, 60))
  sent = [getattr(m, "owner", type(m)) for _, m in owner.box.take()]
  assert sent == [1, Recovered, 0], "Recovered lists what it was given"


def test_a_buddy_that_is_back_with_an_old_copy_gets_the_newest(owner):
  """Else that one stays behind until its next commit, and waiting for others is in vain."""
  owner.commit(0, 1)
  owner.later(2.1)
  owner.commit(0, 2)  # lost on the way
  owner.sent()
  owner.confirm(0, 1)  # the answer to the first comes now
  assert owner.kinds() == ["unreplicated", "replicated"]
  assert owner.sent() == [(0, 2)] and owner.side.missing() == [0]
  owner.commit(2, 1)
  owner.later(1.9)
  assert owner.done[-1] == (0, 2), "waits for both copies, which have their time"
  owner.confirm(0, 2)
  owner.confirm(2, 1)
  assert owner.done[-1] == (2, 1) and owner.kinds() == ["unreplicated", "replicated"]


def test_waiting_versions_go_out_in_their_order_with_one_event(owner):
  for p in (2, 0, 1):
    owner.commit(p, 1)
    owner.side.when_safe(p, lambda p=p: owner.done.append((p, "again")))
  assert owner.done == []
  owner.confirm(0, 1)
  assert owner.done == [(0, 1), (0, "again")]
  owner.later(2.1)
  assert owner.done[2:] == [(2, 1), (2, "again"), (1, 1), (1, "again")]
  assert [(e.kind, e.fragments) for e in owner.events] == [("unreplicated", (1, 2))]
