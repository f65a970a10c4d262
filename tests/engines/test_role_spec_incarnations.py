"""Clocks that step by hours, in both directions: who may speak, and under which number."""

from __future__ import annotations

import json
import signal

import pytest

from ddiloco.config import from_dict
from ddiloco.engines import role_process, role_spec
from ddiloco.engines.role_process import FINISHED, LOST, RoleRunner
from ddiloco.engines.role_spec import Outnumbered, RoleSpec, another_life, free_urls, newest
from ddiloco.network import frames
from ddiloco.network.frames import FUTURE_SECONDS, ahead, shard_objection
from ddiloco.observe.eventlog import Recorder
from ddiloco.protocol import events
from ddiloco.roles import initial
from tests.waits import wait_for

HOUR, NOW = 3600, 200_000_000  # seconds since 2020
SILENCE_SECONDS = 4.0


@pytest.fixture(autouse=True)
def terminates():
  """Gives this process its own SIGTERM back: a role that has ended ignores it."""
  before = signal.getsignal(signal.SIGTERM)
  yield
  signal.signal(signal.SIGTERM, before)


class Clocks:
  """The wall clock of this host."""

  here = NOW

  def __call__(self) -> int:
    return self.here


@pytest.fixture
def clocks(monkeypatch):
  each = Clocks()
  monkeypatch.setattr(frames, "seconds_since_2020", each)
  monkeypatch.setattr(role_process, "LOOK_SECONDS", 0.01)
  return each


class World:
  """Shards and learners with real endpoints, in one process."""

  def __init__(self, folder, clocks):
    self.folder, self.clocks, (self.url,) = folder, clocks, free_urls(1)
    quick = {"hello_seconds": 0.1, "silence_seconds": SILENCE_SECONDS, "drain_seconds": 0.5}
    self.config = from_dict({"network": quick, "sync": {"num_shards": 1}})
    self.plan = initial.make_plan(self.config)
    self.open: list = []

  def place(self, workdir: str = "run", bind: str = "") -> RoleSpec:
    return RoleSpec(self.folder / workdir, "run", (self.url,), bind=bind)

  def endpoint(self, address: str, incarnation: int):
    bind = self.url if address.startswith("syncer") else ""
    place = self.place(bind=bind)
    each = role_process.connect(self.config, self.plan, place, address, incarnation, None)
    self.open.append(each)
    return each

  def runner(self, address="learner-0", workdir="run", bind="") -> RoleRunner:
    return RoleRunner(address, self.config, self.place(workdir, bind))

  def close(self):
    for each in self.open:
      each.close(0)


@pytest.fixture
def world(tmp_path, clocks):
  each = World(tmp_path, clocks)
  yield each
  each.close()


def is_up(endpoint, peer: str) -> bool:
  return endpoint.links().get(peer, {}).get("state") == "up"


def join(runner: RoleRunner) -> int:
  """A role that is done as soon as it is let in; `live`s on until then."""
  endpoint, looks = runner.connect(), []
  while not is_up(endpoint, "syncer-0"):
    runner.stopped()
    runner.stop.wait(0.005)
  runner.ready = lambda: looks.append(1) or ""
  while len(looks) < 3:  # what is wrong with its number is seen by then
    runner.stopped()
    runner.stop.wait(0.005)
  return FINISHED


# --- steps back -----------------------------------------------------------------------------------


def test_a_role_whose_clock_steps_back_by_hours_is_let_in_again(world, clocks, capsys):
  """Its former life is dead; it knows nothing of it, as on another host."""
  shard = world.endpoint("syncer-0", NOW)
  former = world.endpoint("learner-0", NOW)
  wait_for(lambda: is_up(shard, "learner-0") and is_up(former, "syncer-0"))
  former.close(0)
  clocks.here = NOW - 5 * HOUR
  with world.runner() as runner:
    assert runner.incarnation == NOW - 5 * HOUR
    assert runner.run(lambda: join(runner)) == FINISHED, capsys.readouterr().out
    assert runner.incarnation == NOW + 1
  assert shard._accepted["learner-0"].incarnation == NOW + 1


def test_a_live_twin_is_not_pushed_out_by_one_whose_clock_is_late(world, clocks, capsys):
  shard = world.endpoint("syncer-0", NOW)
  live = world.endpoint("learner-0", NOW)
  wait_for(lambda: is_up(shard, "learner-0") and is_up(live, "syncer-0"))
  clocks.here = NOW - 5 * HOUR
  with world.runner() as runner:
    assert runner.run(lambda: join(runner)) == LOST
  out = capsys.readouterr().out
  assert (
    "may not speak any more" in out and f"incarnation {NOW} of learner-0 is here already" in out
  )
  assert not live.fenced and is_up(live, "syncer-0")


def test_a_role_that_is_let_in_by_who_forgot_it_still_grows(world, clocks):
  """The shard has restarted and knows nothing; the learner's own log does."""
  shard = world.endpoint("syncer-0", NOW)
  with world.runner() as runner:
    runner.recorder.record(events.Started())
    runner.run(lambda: join(runner))
  shard.close(0)
  world.endpoint("syncer-0", NOW + 60)
  clocks.here = NOW - 3 * HOUR
  with world.runner() as again:
    assert again.incarnation == NOW - 3 * HOUR
    assert again.run(lambda: join(again)) == FINISHED
    assert again.incarnation == NOW + 1


def test_a_shard_whose_clock_steps_back_comes_after_its_former_lives(world, clocks):
  with world.runner("syncer-0", bind=world.url) as shard:
    shard.recorder.record(events.Started())
    assert shard.incarnation == NOW
  clocks.here = NOW - 10 * HOUR
  with world.runner("syncer-0", bind=world.url) as again:
    assert again.incarnation == NOW + 1
  # On another host it learns of them from what they left: a fragment's round names the life.
  with world.runner("syncer-0", "elsewhere", world.url) as moved:
    assert moved.incarnation == NOW - 10 * HOUR
    lives = []

    def role() -> int:
      lives.append(moved.incarnation)
      moved.come_after(((NOW << 24) + 17) >> 24)
      return FINISHED

    assert moved.run(role) == FINISHED and lives == [NOW - 10 * HOUR, NOW + 1]


# --- steps forward --------------------------------------------------------------------------------


def test_a_number_from_a_clock_that_was_hours_ahead_locks_nobody_out(world, clocks):
  """Let in, and exceeded after the correction, by the role itself and by those it meets."""
  clocks.here = NOW + 10 * HOUR
  with world.runner("syncer-0", bind=world.url) as wrong:
    wrong.recorder.record(events.Started())
  clocks.here = NOW
  with world.runner("syncer-0", bind=world.url) as corrected:
    assert corrected.incarnation == NOW + 10 * HOUR + 1
    knows, new = world.endpoint("learner-0", NOW), world.endpoint("learner-1", NOW)
    endpoint = corrected.connect()
    for learner in (knows, new):
      wait_for(lambda learner=learner: is_up(learner, "syncer-0"))
    assert corrected.incarnation == endpoint.incarnation


def test_a_learner_believes_no_shard_from_the_future_and_a_shard_no_learner(world, clocks):
  far = NOW + 2 * FUTURE_SECONDS
  world.endpoint("syncer-0", far)
  learner = world.endpoint("learner-0", NOW)
  wait_for(lambda: learner.links()["syncer-0"]["state"] == "refused")
  assert "48 h ahead of the other" in learner.links()["syncer-0"]["reason"]
  assert not learner.fenced
  clocks.here = far  # this host's clock was the wrong one: nothing need be restarted
  wait_for(lambda: is_up(learner, "syncer-0"))


def test_who_is_refused_for_its_clock_is_let_in_when_that_is_corrected(world, clocks):
  world.endpoint("syncer-0", NOW)
  learner = world.endpoint("learner-0", NOW + 2 * FUTURE_SECONDS)
  wait_for(lambda: learner.links()["syncer-0"]["state"] == "refused")
  assert "Fix: set the clock that is wrong" in learner.links()["syncer-0"]["reason"]
  again = world.endpoint("learner-0", NOW)
  wait_for(lambda: is_up(again, "syncer-0"))


def test_a_number_nobody_can_have_let_in_binds_nobody(tmp_path):
  for number in (NOW, NOW + 23 * HOUR, NOW + 2 * FUTURE_SECONDS):
    with Recorder(tmp_path, "learner-0", number, 0.0) as recorder:
      recorder.record(events.Started())
  assert newest(tmp_path, NOW, "learner-0") == NOW + 23 * HOUR
  assert newest(tmp_path, NOW) == NOW + 23 * HOUR and newest(tmp_path, NOW, "learner-1") == -1


# --- in pieces ------------------------------------------------------------------------------------


def test_a_clock_from_before_2020_is_no_negative_number(world, clocks):
  clocks.here = -HOUR
  for address, bind in (("learner-0", ""), ("syncer-0", world.url)):
    with world.runner(address, bind=bind) as runner:
      assert runner.incarnation == 0


def test_round_numbers_fit_into_floats_for_every_number_that_is_let_in_until_2036():
  in_2036 = 16 * 365 * 24 * HOUR
  assert ((in_2036 + FUTURE_SECONDS) << 24) + (1 << 24) < 1 << 53


def test_damaged_logs_bind_nobody(tmp_path):
  folder = tmp_path / "events"
  folder.mkdir()
  line = {"time": 0.0, "role": "learner-0", "kind": "started"}
  odd = [{**line, "incarnation": n} for n in (7, "8", None, 9.5, True)]
  text = "\n".join(["torn", "[]", "{}", *map(json.dumps, odd), '{"time": 0.0, "inc'])
  (folder / "learner-0.jsonl").write_text(text)
  (folder / "learner-1.jsonl").mkdir()
  assert newest(tmp_path, NOW, "learner-0") == 7 and newest(tmp_path, NOW) == 7


def test_what_is_read_of_a_log_is_its_end(tmp_path, monkeypatch):
  with Recorder(tmp_path, "learner-0", 5, 0.0) as recorder:
    recorder.record(events.Started())
    for _ in range(100):
      recorder.record(events.Restart(target="learner-0"))
  monkeypatch.setattr(role_spec, "TAIL_BYTES", 200)
  assert newest(tmp_path, NOW, "learner-0") == 5


@pytest.mark.parametrize(
  "after, silent, waited, number, wait_seconds",
  [
    (0, 0, False, None, 0.0),  # pushed out by a newer one
    (0, 99, True, None, 0.0),
    (8, 0, False, 0, 6.0),  # it may have died a moment ago ...
    (8, 26, False, 0, 5.0),  # ... and then its patience is over sooner
    (8, 1, True, None, 0.0),  # ... but was heard again
    (8, 3, True, 0, 28.0),  # ... and was not: it has its patience
    (8, 30, True, 8, 0.0),
    (8, 31, False, 8, 0.0),
  ],
)
def test_what_becomes_of_who_is_outnumbered(after, silent, waited, number, wait_seconds):
  life = another_life("here already", after, silent, 30.0, waited)
  if number is None:
    assert life is None
  else:
    assert isinstance(life, Outnumbered)
    assert (life.after, life.wait_seconds) == (number, wait_seconds)


def test_what_a_life_of_the_same_number_has_left_is_another_life_s(tmp_path):
  config = from_dict({"sync": {"num_shards": 1}})
  with RoleRunner("learner-0", config, RoleSpec(tmp_path, "r", tuple(free_urls(1)))) as runner:
    runner.come_after(runner.incarnation - 1)
    with pytest.raises(Outnumbered):
      runner.come_after(runner.incarnation)


def test_who_was_silent_for_all_the_patience_is_over_even_if_that_is_short():
  life = another_life("here already", 8, 1, 1.0, waited=True)
  assert life is not None and life.after == 8


def test_why_a_greeting_or_its_answer_is_doubted(clocks):
  assert ahead(NOW + FUTURE_SECONDS) == ""
  assert shard_objection(NOW, NOW) == shard_objection(NOW + 1, -1) == ""
  assert "is an old one" in shard_objection(NOW - 1, NOW)
  assert "25 h ahead" in shard_objection(NOW + FUTURE_SECONDS + HOUR, NOW)
