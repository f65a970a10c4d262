"""What a restarted shard begins with: its buddy's copies, a newer snapshot, and its time for it."""

from __future__ import annotations

import dataclasses
import shutil
import time
import types

import pytest

from ddiloco.checkpoint.buddy import Copies, pack
from ddiloco.checkpoint.restore import open_storage
from ddiloco.core.delta import Committed
from ddiloco.core.fragments import owned_by
from ddiloco.engines import single_roles
from ddiloco.engines.role_spec import RoleSpec
from ddiloco.network.frames import seconds_since_2020
from ddiloco.network.transport import Delivery
from ddiloco.network.webserver import START_SECONDS, Health
from ddiloco.protocol.messages import Recovered
from ddiloco.protocol.values import replace
from ddiloco.runtime import REAL_TIME
from tests.checkpoint import test_restore
from tests.checkpoint.test_restore import PLAN, assert_same, committed

CONFIG = test_restore.CONFIG
OWNED = owned_by(0, 2, 4)


class Runner:
  """Stands for `RoleRunner`, with the health of a real one."""

  def __init__(self, workdir):
    self.config, self.plan, self.place = CONFIG, PLAN, RoleSpec(workdir, "run", ())
    self.storage = open_storage(CONFIG, PLAN, workdir, "run")
    self.started, self.incarnation = time.time() - 100, seconds_since_2020()
    self.recorder = types.SimpleNamespace(role="syncer-0")
    self.health, self.lines = Health(), list[str]()
    self.say, self.busy = self.lines.append, self.health.busy


@pytest.fixture
def runner(tmp_path):
  return Runner(tmp_path)


def begin(runner, copies: dict[int, Committed], monkeypatch) -> tuple[dict, object]:
  """(the fragments, the state) of a shard whose buddy has these."""
  monkeypatch.setattr(single_roles, "_ask_buddy", lambda *_: dict(copies))
  store, state, _ = single_roles._recover(runner, 0, None, OWNED)
  return {p: store[p] for p in OWNED}, state


@pytest.fixture
def storage(runner):
  return runner.storage


def test_a_newer_snapshot_beats_a_copy_from_before_the_buddy_was_cut_off(
  runner, storage, monkeypatch
):
  test_restore.save_shards(storage, 3)
  found, state = begin(runner, {0: committed(0, 2), 2: committed(2, 4)}, monkeypatch)
  assert_same(found, [committed(0, 3), committed(2, 4)])
  assert state.snapshot == 4, "of the newest fragment"
  assert runner.lines == ["has from snapshot 3: fragments [0]"]


def test_as_old_a_snapshot_is_not_read(runner, storage, monkeypatch):
  test_restore.save_shards(storage, 3)
  monkeypatch.setattr(type(storage), "load", lambda *_, **__: pytest.fail("its arrays are read"))
  copies = {p: committed(p, 3 + (p == 2)) for p in OWNED}
  found, state = begin(runner, copies, monkeypatch)
  assert_same(found, copies.values())
  assert state.snapshot == 4 and runner.lines == []


def test_a_snapshot_of_what_the_buddy_has_is_not_taken_again(runner, storage, monkeypatch):
  """The copies were made before it was taken, and have an older one's number."""
  test_restore.save_shards(storage, 3)
  made = (committed(p, 3) for p in OWNED)
  before = [replace(c, state=replace(c.state, snapshot=2)) for c in made]
  _, state = begin(runner, {c.state.index: c for c in before}, monkeypatch)
  assert state.snapshot == 3 and runner.lines == []


def test_a_damaged_snapshot_does_not_bring_back_what_is_older_than_the_copy(
  runner, storage, monkeypatch
):
  for snapshot in (1, 3):
    test_restore.save_shards(storage, snapshot)
  shutil.rmtree(runner.place.workdir / "checkpoints" / "00000003" / "syncer-0" / "arrays")
  copies = {p: committed(p, 2) for p in OWNED}
  found, _ = begin(runner, copies, monkeypatch)
  assert_same(found, copies.values())
  assert runner.lines == []


# --- its time for it ------------------------------------------------------------------------------


class Trickling:
  """An endpoint on which the buddy's messages arrive one after the other; only waiting for them
  takes time."""

  def __init__(self, gap_seconds: float, *messages):
    self.gap_seconds, self.messages, self.now = gap_seconds, list(messages), 0.0

  def send(self, to, message) -> int:
    return 1

  def receive(self, timeout_seconds: float):
    self.now += min(self.gap_seconds, timeout_seconds)
    return Delivery("syncer-1", self.messages.pop(0), self.now) if self.messages else None


@pytest.fixture
def ask(runner, monkeypatch):
  def ask(endpoint: Trickling) -> dict[int, Committed]:
    monkeypatch.setattr(REAL_TIME, "now", lambda: endpoint.now)
    copies = Copies(0, runner.incarnation, endpoint, PLAN, runner.config)
    return single_roles._ask_buddy(runner, copies)

  return ask


def test_a_shard_that_asked_its_buddy_has_still_not_begun(runner, ask):
  """Initial values or a snapshot of billions of parameters take minutes without a sign of life."""
  assert ask(Trickling(0.0, Recovered(1, 50, runner.incarnation, (), ()))) == {}
  code, text = runner.health.livez()
  assert code == 200 and text.startswith("asking its buddy for its fragments for"), text
  assert f"{START_SECONDS:.0f} s" in text


def test_a_shard_says_what_it_does_before_it_serves(runner, monkeypatch):
  """Of a minute in which it drew initial values it said that it looked for its fragments."""
  doing = list[str]()
  monkeypatch.setattr(runner, "busy", doing.append)
  values = {p: committed(p, 0).value for p in OWNED}
  monkeypatch.setattr(single_roles.initial, "initial_values", lambda *_: values)
  begin(runner, {}, monkeypatch)
  assert doing == ["restoring a snapshot", "making the initial values of fragments [0, 2]"]


def test_silence_ends_the_asking_and_not_the_time_that_copies_take(runner, ask):
  network = dataclasses.replace(CONFIG.network, silence_seconds=1.0)
  runner.config = dataclasses.replace(CONFIG, network=network)
  held = [pack(committed(p, 3), 1, 9, 0) for p in range(4)]
  rounds = tuple(each.state.last_round for each in held)
  listed = Recovered(1, 50, runner.incarnation, tuple(range(4)), rounds)
  assert ask(Trickling(0.4, *held, listed)).keys() == set(range(4)), "2 s in all"
  incomplete = Trickling(0.4, *held[:1], listed)
  assert ask(incomplete).keys() == {0}
  assert 1.0 < incomplete.now < 10.0
