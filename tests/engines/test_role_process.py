"""What stands around a role of its own process: signals, probes, fencing, exit status."""

from __future__ import annotations

import dataclasses
import errno
import functools
import itertools
import json
import os
import signal
import sys
import threading
import time
import types
import weakref
from unittest import mock

import pytest

from ddiloco.chaos import ask_for
from ddiloco.checks import Unanswered
from ddiloco.config import ConfigError, Fault, from_dict
from ddiloco.engines import role_process, role_spec
from ddiloco.engines.role_process import FINISHED, INTERRUPTED, LOST, RoleRunner, unreached
from ddiloco.engines.role_spec import RoleSpec
from ddiloco.observe.eventlog import read_events
from ddiloco.protocol import events
from ddiloco.workdir import FAULTS, append_request
from tests.waits import PATIENCE_SECONDS, wait_for
from tests.web import ask

SYNCERS = ("tcp://127.0.0.1:7000", "tcp://127.0.0.1:7002")


class Endpoint:
  """Stands for `NetworkEndpoint`."""

  def __init__(self, address, incarnation, run, settings, bind=None, keys=None):
    self.address, self.incarnation, self.run, self.bind = address, incarnation, run, bind
    self.dialed: dict[str, str] = {}
    self.drops: dict[str, tuple[int, str]] = {}
    self.fenced = self.broken = ""
    self.outnumbered = (0, 0)
    self.state = "up"
    self.woken = False
    self.closed_with: float | None = None

  def dial(self, address, url):
    self.dialed[address] = url

  def links(self):
    return {peer: {"state": self.state, "reason": "nobody there"} for peer in self.dialed}

  def wake(self):
    self.woken = True

  def close(self, linger_seconds=1.0):
    self.closed_with = linger_seconds


@pytest.fixture(autouse=True)
def quick(monkeypatch):
  monkeypatch.setattr(role_process, "LOOK_SECONDS", 0.01)
  monkeypatch.setattr(role_process, "PROGRESS_SECONDS", 0.05)
  monkeypatch.setattr(role_process, "NetworkEndpoint", Endpoint)


@pytest.fixture
def clock(monkeypatch):
  """The runner's clock, which stands at the `now` of a test."""
  each = types.SimpleNamespace(now=0.0, monotonic=lambda: each.now, time=time.time)
  monkeypatch.setattr(role_process, "time", each)
  return each


@pytest.fixture
def make(tmp_path):
  def runner(address="learner-3", http="", bind="", hang_seconds=60.0, **network) -> RoleRunner:
    run = {"hang_seconds": hang_seconds}
    config = from_dict({"network": network, "sync": {"num_shards": 2}, "run": run})
    return RoleRunner(address, config, RoleSpec(tmp_path / "r", "r", SYNCERS, bind=bind, http=http))

  return runner


def until(runner: RoleRunner):
  """A role that goes on until it is told to end."""

  return lambda: wait_for(runner.stopped, "a word to end") and FINISHED


def test_a_role_that_ends_by_itself(make, capsys):
  with make() as runner:
    assert runner.run(lambda: FINISHED) == FINISHED
    assert runner.run(lambda: LOST) == LOST
  assert (
    f"learner-3: starts in run 'r', incarnation {runner.incarnation}" in capsys.readouterr().out
  )


def test_a_role_lives_where_the_file_system_has_no_locks(make, monkeypatch):
  no_locks = mock.Mock(side_effect=OSError(errno.ENOLCK, "No locks available"))
  monkeypatch.setattr("ddiloco.workdir.fcntl.flock", no_locks)
  with make() as runner:
    assert runner.run(lambda: FINISHED) == FINISHED


def test_it_dials_every_shard_and_a_shard_its_neighbours(make):
  with make() as runner:
    endpoint = runner.connect()
    assert endpoint.dialed == {"syncer-0": SYNCERS[0], "syncer-1": SYNCERS[1]}
    assert (endpoint.address, endpoint.bind) == ("learner-3", None)
    assert endpoint.run.run_id == "r" and len(endpoint.run.plan_id) == 16
    sizes = runner.plan.sizes
    assert endpoint.run.max_payload_bytes == 8 * max(sizes)
    most = max(sum(sizes[0::2]), sum(sizes[1::2]))
    assert endpoint.run.queue_bytes == 12 * most, "one slow peer's backlog is no threat to a shard"
  assert endpoint.closed_with == runner.config.network.drain_seconds
  with make("syncer-1", bind=SYNCERS[1]) as runner:
    endpoint = runner.connect()
    assert endpoint.dialed == {"syncer-0": SYNCERS[0]} and endpoint.bind == SYNCERS[1]
  with make("syncer-1", bind=SYNCERS[1]) as runner:
    runner.place = dataclasses.replace(runner.place, syncers=(*SYNCERS, "tcp://127.0.0.1:3"))
    assert runner.connect().dialed.keys() == {"syncer-0", "syncer-2"}, "its buddy, and whose it is"


def test_who_is_asked_to_end_has_one_time_for_all_that_it_brings_out(make):
  """Its work, its messages and its part of a snapshot each took that long: it was killed meanwhile,
  and work that was merged counted as lost."""
  with make(drain_seconds=1000.0) as runner:
    assert runner.run(lambda: FINISHED) == FINISHED
    assert runner.time_left() == 1000.0, "nobody has asked"
    os.kill(os.getpid(), signal.SIGTERM)
    endpoint = runner.connect()
    assert runner.run(until(runner)) == FINISHED
    assert 900 < runner.time_left() < 1000
    runner._asked_at -= 500.0
    assert 400 < runner.time_left() < 500
    runner._asked_at -= 500.0
  assert endpoint.closed_with == 1.0, "its goodbye still goes out"
  with make(drain_seconds=0.5) as runner:
    runner._asked_at = 0.0
    assert runner.time_left() == 0.5


def test_a_fault_that_was_asked_for_by_a_clock_ahead_lasts_no_longer(make, monkeypatch):
  """It lasted an hour more, if the dashboard ran on a host whose clock was an hour ahead."""
  monkeypatch.setattr(role_process, "LOOK_SECONDS", 1e6)  # the test looks
  now, begun = time.time(), []
  with make() as runner:
    with monkeypatch.context() as patch:
      patch.setattr("ddiloco.workdir.time.time", lambda: now + 3600)
      ask_for(runner.place.workdir, Fault("slow", "learner-3", at_seconds=0.0, seconds=5.0))
    runner.faults.begin = lambda fault, seconds: begun.append(seconds)
    runner._suffer()
  assert len(begun) == 1 and begun[0] <= 5.0


def test_faults_of_others_and_those_that_are_over_do_not_begin(make):
  begun, slow = [], Fault("slow", "learner-3", at_seconds=0.0, seconds=5.0, factor=2.0)
  with make() as before:
    append_request(before.place.workdir / FAULTS, {**dataclasses.asdict(slow), "time": 0.0})
  with make() as runner:
    runner.faults.begin = lambda fault, seconds: begun.append(fault.seconds)
    ask_for(runner.place.workdir, dataclasses.replace(slow, role="learner-4"))
    ask_for(runner.place.workdir, Fault("stall", "learner-3", at_seconds=0.0, seconds=6.0))
    ask_for(runner.place.workdir, dataclasses.replace(slow, seconds=7.0))
    wait_for(lambda: begun, "a fault")
  assert begun == [7.0]


def test_a_port_that_is_taken_ends_the_shard(make, monkeypatch, capsys):
  monkeypatch.setattr(
    role_process, "NetworkEndpoint", mock.Mock(side_effect=OSError("Address already in use"))
  )
  with make("syncer-0", bind=SYNCERS[0]) as runner:
    assert runner.run(lambda: runner.connect()) == LOST
  said = capsys.readouterr().out
  assert f"cannot listen at {SYNCERS[0]}" in said and "tcp://0.0.0.0:PORT is all" in said


def test_a_role_that_drops_messages_says_so_now_and_then(
  make, monkeypatch, clock, capsys, tmp_path
):
  monkeypatch.setattr(role_process, "LOOK_SECONDS", 1e6)  # the test looks
  reason = "global_step is\x1b[2J\nout of range"  # whatever a peer likes to say
  with make() as runner:
    endpoint, counts = runner.connect().endpoint, itertools.count(1)
    for _ in range(2):
      for _ in range(20):
        endpoint.drops = dict.fromkeys(("syncer-0", "syncer-1"), (next(counts), reason))
        runner._check_links()
      clock.now += role_process.PROGRESS_SECONDS
  out = capsys.readouterr().out
  assert "has dropped 1 messages of syncer-0: global_step is [2J out of range" in out
  assert "has dropped 20 messages of syncer-0: " in out
  assert out.count("messages of syncer-0") == 2, "not a line for each"
  events = [e for e in read_events(tmp_path / "r") if e.kind == "dropped"]
  assert [(e.peer, e.count) for e in events] == [
    (peer, count) for count in (1, 20) for peer in ("syncer-0", "syncer-1")
  ]
  assert all(e.reason == reason for e in events)


def test_a_process_that_stood_still_does_not_make_up_for_its_lines(
  make, monkeypatch, clock, capsys
):
  """After an hour of SIGSTOP there were three a second, for minutes."""
  looks = []

  def look() -> dict[str, float]:
    looks.append(clock.now)
    clock.now = 3600.0
    return {}

  with make() as runner:
    monkeypatch.setattr(runner._hangs, "look", look)
    wait_for(lambda: len(looks) > 20, "looks after the stop")
  assert capsys.readouterr().out.count("waits: starting") == 1


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 0), (signal.SIGINT, INTERRUPTED)])
def test_a_signal_lets_the_role_end_in_good_order(make, capsys, number, status):
  before = signal.getsignal(signal.SIGINT)
  with make() as runner:
    os.kill(os.getpid(), number)
    assert runner.run(until(runner)) == status
    assert runner.stop.wait(100.0), "a pause ends at once"
  assert "was asked to end" in capsys.readouterr().out
  assert signal.getsignal(signal.SIGINT) == before
  os.kill(os.getpid(), signal.SIGTERM)  # too late to change how it ended


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 143), (signal.SIGINT, INTERRUPTED)])
def test_a_scheduler_can_tell_a_role_that_left_from_one_that_is_done(make, number, status):
  """Kubernetes would take 0 of a pod that is evicted to mean that the run is over."""
  with make() as runner:
    runner.place = dataclasses.replace(runner.place, term_status=143)
    assert runner.run(lambda: FINISHED) == FINISHED, "it was not asked"
    os.kill(os.getpid(), number)
    assert runner.run(until(runner)) == status
    assert runner.run(lambda: LOST) == LOST


@pytest.mark.parametrize("connects", [False, True])
def test_a_role_that_still_compiles_or_restores_ends_soon_after_a_signal(
  make, monkeypatch, capsys, connects
):
  """A shard connects first, to ask its buddy. It read its snapshot to the end, and said then that
  work was lost."""
  over = threading.Event()

  monkeypatch.setattr(role_process, "EARLY_SECONDS", 0.01)
  monkeypatch.setattr(role_process.os, "_exit", sys.exit)
  with make() as runner:
    if connects:
      runner.connect()
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
      runner.run(lambda: over.wait(10.0) and LOST)
    over.set()
  assert ended.value.code == FINISHED
  assert "was asked to end before it had begun; nothing is lost" in capsys.readouterr().out
  with make() as runner:
    endpoint = runner.connect()
    assert not runner.stopped()  # from now on it hears of signals itself
    os.kill(os.getpid(), signal.SIGTERM)
    heard = lambda: runner.time_left() < runner.config.network.drain_seconds
    assert runner.run(lambda: wait_for(heard, "the signal") and FINISHED) == FINISHED
    assert not endpoint.woken


def test_lost_work_counts_more_than_a_signal(make):
  with make() as runner:
    os.kill(os.getpid(), signal.SIGINT)
    assert runner.run(lambda: LOST) == LOST


def test_a_second_interrupt_ends_at_once(make, capsys):
  over = threading.Event()

  def stubborn() -> int:
    os.kill(os.getpid(), signal.SIGINT)
    while not runner.stopped():
      time.sleep(0.002)
    os.kill(os.getpid(), signal.SIGINT)
    over.wait(PATIENCE_SECONDS)
    return FINISHED

  with make() as runner:
    endpoint = runner.connect()
    assert runner.run(stubborn) == INTERRUPTED
  over.set()
  assert endpoint.closed_with == 0.0, "nothing is waited for"
  assert "ends at once" in capsys.readouterr().out


@pytest.mark.parametrize(
  ("address", "fix"),
  [("learner-3", "end one of them, or give it another number."), ("evaluator", "end one of them.")],
)
def test_a_fenced_role_ends_and_says_so(make, capsys, address, fix):
  with make(address) as runner:
    endpoint = runner.connect()
    endpoint.fenced = f"a newer incarnation of {address} is here"
    assert runner.run(until(runner)) == LOST
    assert endpoint.woken
  out = capsys.readouterr().out
  assert "may not speak any more: a newer incarnation" in out and f" Fix: {fix}\n" in out
  assert endpoint.closed_with == 0.0


def test_a_role_in_a_long_step_waits_for_who_may_be_dead_all_the_same(make, monkeypatch, capsys):
  """It was looked at again before its step was over, and its next life ended at once for that."""
  monkeypatch.setattr(role_spec, "WAIT_SECONDS", 0.01)
  lives = []

  def role() -> int:
    lives.append(runner.connect())
    if len(lives) == 1:
      lives[0].endpoint.fenced, lives[0].endpoint.outnumbered = "incarnation 8 is here", (9, 0)
      time.sleep(0.2)  # a step, and many looks
    return LOST if runner.stopped() else FINISHED

  with make() as runner:
    assert runner.run(role) == FINISHED and len(lives) == 2, capsys.readouterr().out


def test_a_role_whose_network_thread_failed_says_that_and_not_that_it_is_fenced(make, capsys):
  with make() as runner:
    endpoint = runner.connect()
    endpoint.endpoint.broken = "its network thread failed: MemoryError()"
    assert runner.run(until(runner)) == LOST
    assert endpoint.woken
  out = capsys.readouterr().out
  assert "cannot speak any more: its network thread failed: MemoryError()" in out and "Fix: " in out
  assert "Another process" not in out


def test_nothing_of_a_life_is_kept_for_the_next_one(make):
  """It has a copy of the whole model: both were in memory until the next life had begun."""

  class Exchange:
    """Of a life that was quarantined, for example."""

  with make() as runner:
    runner.connect()
    exchange = Exchange()
    gone = weakref.ref(exchange)
    runner.ready = lambda exchange=exchange: ""
    runner.progress = lambda exchange=exchange: "global step 7"
    runner.usual_seconds = lambda exchange=exchange: 1.0
    runner.disconnect()
    del exchange
    wait_for(lambda: gone() is None, "its end")  # the runner's thread may just look at it
    assert runner.ready() and runner.usual_seconds() == 1.0


def test_what_a_role_does_between_two_lives_is_no_hang(make, monkeypatch, clock, tmp_path):
  monkeypatch.setattr(role_process, "LOOK_SECONDS", 1e6)  # the test looks
  watch = functools.partial(role_process.HangWatch, clock=clock.monotonic)
  monkeypatch.setattr(role_process, "HangWatch", watch)
  with make(hang_seconds=1.0) as runner:
    for waits in (True, False):
      runner.connect()
      runner.stopped()
      if waits:  # as after a quarantine: its loop is over
        runner.disconnect()
      for _ in range(3):
        clock.now += 0.9
        runner._watch()
  (hung,) = [e for e in read_events(tmp_path / "r") if e.kind == "hung"]
  assert hung.seconds == 1.8, "of the life that did not end"


@pytest.mark.parametrize(
  "address, silent, usual, ends",
  [
    ("syncer-0", 61.0, 0.0, True),
    ("learner-3", 599.0, 1.0, False),
    ("learner-3", 601.0, 1.0, True),
    ("learner-3", 601.0, None, False),  # a first step may take long
  ],
)
def test_a_role_whose_loop_hangs_ends_to_be_started_again(
  make, monkeypatch, address, silent, usual, ends
):
  ended = mock.Mock()
  with make(address) as runner:
    monkeypatch.setattr(runner, "_end_now", ended)
    runner.usual_seconds = lambda: usual
    runner._watch()
    ended.assert_not_called()
    monkeypatch.setattr(runner._hangs, "look", lambda: {address: silent})
    runner._watch()
    assert ended.called == ends


def test_who_reaches_nobody_gives_up(make, capsys):
  with make(give_up_seconds=0.2) as runner:
    runner.connect().endpoint.state = "connecting"
    began = time.monotonic()
    assert runner.run(until(runner)) == LOST
    assert time.monotonic() - began >= 0.2
  out = capsys.readouterr().out
  assert "has reached no shard for 0.2 s: syncer-0 is connecting (nobody there)" in out
  assert "Fix: what that says, else check --syncers" in out


def test_who_reaches_one_goes_on(make):
  with make(give_up_seconds=0.05) as runner:
    runner.connect()
    time.sleep(0.3)
    assert not runner.stopped()


@pytest.mark.parametrize("role", ["learner-0", "syncer-1"])
def test_the_time_before_a_role_connects_is_no_silence_and_a_shard_may_reach_nobody(make, role):
  """A large model compiles for longer than `network.give_up_seconds`. Learners and a shard's buddy
  may come at any time."""
  looks = []
  shard = {"bind": SYNCERS[1], "give_up_seconds": 1e-6} if role == "syncer-1" else {}
  with make(role, **shard) as runner:
    runner._reached_at -= 1e6
    runner.connect().endpoint.state = "connecting"
    runner.ready = lambda: looks.append(1) or ""
    wait_for(lambda: len(looks) > 2)
    assert not runner.stopped()


@pytest.mark.parametrize("kind", [ValueError, Unanswered])
def test_a_crash_is_logged_and_has_a_status(make, capsys, tmp_path, kind):
  """So has a storage that does not answer: its error names the config, but will not come again."""
  with make() as runner:
    assert runner.run(mock.Mock(side_effect=kind("no cable"))) == LOST
  out, err = capsys.readouterr()
  assert f"crashed: {kind.__name__}: no cable" in out and "Traceback" in err
  (event,) = [e for e in read_events(tmp_path / "r") if e.kind == "crash"]
  assert "no cable" in event.trace and event.role == "learner-3"


def test_a_crash_needs_no_room_on_the_disk_of_its_log(make, monkeypatch):
  """The error that it could not be printed was raised instead. Host 0 of an island then waited for
  its other hosts."""
  full = types.SimpleNamespace(write=mock.Mock(side_effect=OSError(errno.ENOSPC, "full")))
  with make() as runner:
    monkeypatch.setattr(sys, "stderr", full)
    assert runner.run(mock.Mock(side_effect=ValueError("no cable"))) == LOST
  assert full.write.called


def test_bad_usage_is_for_the_command_line_to_say(make):
  with make() as runner, pytest.raises(ConfigError):
    runner.run(mock.Mock(side_effect=ConfigError("--x: no. Fix: y")))


def test_a_role_that_starts_again_is_a_new_incarnation(make, tmp_path):
  with make() as runner:
    first = runner.incarnation
    runner.recorder.record(events.Started())
    runner.reborn()
    runner.recorder.record(events.Started())
    assert runner.incarnation > first
  assert [e.incarnation for e in read_events(tmp_path / "r")] == [first, runner.incarnation]


def test_restarts_continue_the_runs_time(make, tmp_path):
  with make() as runner:
    runner.recorder.record(events.Started())
  with make() as again:
    assert again.started == runner.started
    time.sleep(0.02)
    again.recorder.record(events.Started())
  first, second = (e.time for e in read_events(tmp_path / "r"))
  assert 0 <= first < second < 60


def test_probes_tell_what_it_waits_for(make, capsys):
  with make(http="127.0.0.1:0") as runner:
    url = capsys.readouterr().out.split("probes at ")[1].split()[0]
    runner.stopped()
    runner.ready = lambda: "syncer-1 is connecting"
    wait_for(lambda: "syncer-1" in ask(url, "/readyz")[1])
    assert ask(url, "/readyz")[0] == 503 and ask(url, "/livez")[0] == 200
    runner.ready, runner.progress = lambda: "", lambda: "global step 7"
    wait_for(lambda: ask(url, "/readyz")[0] == 200)
    runner.connect()
    status = json.loads(ask(url, "/status")[1])
    assert status["role"] == "learner-3" and status["progress"] == "global step 7"
    assert status["links"]["syncer-0"]["state"] == "up"


def test_a_role_that_waits_for_what_has_its_own_limit_lives(make):
  with make() as runner:
    runner.stopped()
    runner.health._beaten -= 1000.0
    assert runner.health.livez()[0] == 503
    runner.health.beat()
    assert runner.health.livez()[0] == 200


@pytest.mark.parametrize(("address", "allowed"), [("learner-3", 600), ("syncer-0", 60)])
def test_a_learner_has_longer_for_its_first_steps(make, address, allowed):
  """An island whose steps take two minutes was restarted before it had made one."""
  with make(address, bind=SYNCERS[0] if address == "syncer-0" else "") as runner:
    runner.stopped()
    wait_for(lambda: f"(allowed: {allowed} s)" in runner.health.livez()[1])
    runner.usual_seconds = lambda: 20.0
    wait_for(lambda: "(allowed: 200 s)" in runner.health.livez()[1])
    assert runner.health.livez()[0] == 200


def test_lines_of_progress_and_at_once_what_matters(make, capsys):
  with make() as runner:
    runner.busy("compiling")
    assert runner.health.livez()[1].startswith("compiling for")
    wait_for(lambda: "learner-3: waits: compiling" in capsys.readouterr().out)
    runner.busy("restoring a snapshot")
    wait_for(lambda: "learner-3: waits: restoring a snapshot" in capsys.readouterr().out)
    runner.ready, runner.progress = lambda: "", lambda: "7% of the run"
    wait_for(lambda: "learner-3: 7% of the run" in capsys.readouterr().out)
    runner.recorder.record(events.Joined(global_step=5, seconds=1.0))
    assert "island 3 joined at global step 5" in capsys.readouterr().out
    runner.recorder.record(
      events.Step(step=1, global_step=6, position=5, tokens=1, seconds=1.0, gap_seconds=1.0)
    )
    assert "step" not in capsys.readouterr().out


def test_a_role_that_goes_on_without_a_shard_says_so(make, capsys):
  """With all shards dead its lines were those of a run that is well."""
  with make() as runner:
    runner.ready, runner.progress = lambda: "", lambda: "7% of the run"
    runner.connect().endpoint.state = "connecting"
    away = "syncer-0 is connecting (nobody there); syncer-1 is connecting (nobody there)"
    assert wait_for(lambda: f"learner-3: 7% of the run; {away}\n" in capsys.readouterr().out)
    runner.endpoint.endpoint.state = "up"
    assert wait_for(lambda: "learner-3: 7% of the run\n" in capsys.readouterr().out)


def test_unreached_names_who_and_why():
  links = {
    "syncer-1": {"state": "refused", "reason": "another run"},
    "syncer-0": {"state": "up", "reason": ""},
    "syncer-2": {"state": "connecting", "reason": ""},
  }
  assert unreached(links) == "syncer-1 is refused (another run); syncer-2 is connecting"
  assert unreached({}) == ""
