"""Children and their supervisor: quick stand-ins for roles first, then a whole run of real ones."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from common import processes_of

from ddiloco import workdir as workdirs
from ddiloco.chaos import ask_for, fault_requests
from ddiloco.checkpoint import weights
from ddiloco.config import ConfigError, Fault, RunConfig, from_dict
from ddiloco.engines import processes, session
from ddiloco.engines.children import Child, spawn
from ddiloco.engines.processes import SHORTEST_LIFE_SECONDS, ProcessesEngine, free_urls
from ddiloco.network.transport import EVALUATOR_ADDRESS
from ddiloco.observe.guards import HangWatch, Warnings
from ddiloco.protocol import events, supervisor
from ddiloco.protocol.events import Event
from ddiloco.protocol.supervisor import DOWN, GONE, LEFT, UP, Dismiss, Tick
from ddiloco.protocol.values import replace
from ddiloco.training import data
from tests.engines.real import PROCESSES, RealRun, events_of, run_here, tiny
from tests.waits import wait_for

LINUX = sys.platform == "linux"
RUN = RunConfig(restart_seconds=10.0, max_restarts=2)
NAME = "learner-3"


def python(code: str) -> list[str]:
  return [sys.executable, "-S", "-c", textwrap.dedent(code)]


class Engine(ProcessesEngine):
  """The engine's own turns around quick stand-ins for a role, at times that a test gives."""

  def __init__(self, workdir: Path, name: str, code: str, *faults: Fault):
    self.config = from_dict({"run": {"total_tokens": 1}})
    self.workdir, self._started = workdir, 7.0
    self.now, self.merged = 0.0, False
    self.said: list[tuple[str, str]] = []  # what was logged: kind, reason or action
    self._recorder = self
    self._guard = lambda duty, *arguments: duty(*arguments)
    self._told, self._lost, self._crashes, self._threads = set(), {}, Warnings(), {}
    self._ending, self._global_step = False, 0
    self._follower, self._follow_at = SimpleNamespace(poll=list), 0.0
    self._hangs = HangWatch(60.0, lambda: self, lambda: self.now, lambda thread: "none runs")
    self._children, self._code = {name: Child(name, workdir, [spawn])}, code
    shortest = self.shortest_life_seconds
    self._state = supervisor.Supervisor(
      RUN, {name: supervisor.Role()}, faults, shortest_life_seconds=shortest
    )
    self.name, self.child = name, self._children[name]

  def _commands(self, name: str) -> list[list[str]]:
    return [python(self._code)]

  def record(self, event: Event) -> None:
    self.said.append((event.kind, getattr(event, "reason", getattr(event, "action", ""))))

  def _merged(self) -> bool:
    return self.merged

  def tick(self, now: float, global_step: int = 0, seconds: float = 0.0) -> None:
    self.now = now
    self._feed(Tick(now, global_step, seconds))

  def turns(self, first: float, last: float) -> None:
    """What it does in so many seconds."""
    for now in np.arange(first, last):
      self.now = now
      self._observe()
      self.tick(now)

  def hear(self, event: Event, now: float) -> None:
    """The event is new in the log."""
    self.now = now
    self._follower, self._listeners = SimpleNamespace(poll=lambda: [event]), []
    self._follow()

  def see_the_end(self, now: float) -> str:
    """Waits for the end of the process; the role's phase after it."""
    self.now = now
    status = wait_for(lambda: self.child.poll() is not None and [self.child.poll()], "its end")[0]
    self._on_exit(self.child, status)
    return self.phase

  @property
  def phase(self) -> str:
    return self._state.roles[self.name].phase

  @property
  def reasons(self) -> list[str]:
    return [reason for kind, reason in self.said if kind == "exit"]


SLEEP = "import time; print('here', flush=True); time.sleep(100)"


@pytest.fixture
def make(tmp_path, monkeypatch):
  """Makes an engine around one child; kills that in the end."""
  engines: list[Engine] = []

  def make(code: str, *faults: Fault, name: str = NAME) -> Engine:
    engine = Engine(tmp_path, name, code, *faults)
    engines.append(engine)
    monkeypatch.setattr(processes.time, "monotonic", lambda: engine.now)
    return engine

  yield make
  for engine in engines:
    monkeypatch.undo()
    engine.child.kill()


@pytest.fixture
def started(make):
  """As `make`, and it is started at time 0 and has said something."""

  def start(code: str, *faults: Fault) -> Engine:
    engine = make(code, *faults)
    engine.tick(0.0, global_step=-1, seconds=-1.0)
    wait_for(lambda: engine.child.log.read_text(), "its first words")
    return engine

  return start


def test_urls_have_free_ports():
  ports = [int(url.rpartition(":")[2]) for url in free_urls(8)]
  assert len(set(ports)) == 8
  for port in ports:
    with socket.socket() as free:
      free.bind(("127.0.0.1", port))


def test_the_url_of_an_ipv6_address_has_brackets():
  try:
    (url,) = free_urls(1, "::1")
  except OSError as error:
    pytest.skip(f"no IPv6 loopback here: {error}")
  assert url.startswith("tcp://[::1]:")


def test_a_host_that_is_another_machines_has_no_free_ports_and_that_is_said():
  """Every port was tried, and too many open files were the reason that was given."""
  with pytest.raises(OSError, match="Cannot assign requested address"):
    free_urls(1, "192.0.2.1")


def test_who_ends_in_good_order_is_not_started_again(make):
  engine = make("print('done')")
  engine.tick(0.0)
  (process,) = engine.child._processes
  assert engine.see_the_end(5.0) == LEFT
  engine.tick(1e9)
  assert not engine.child.running and not engine.said and not engine._lost
  assert process.stdin.closed


def test_a_shard_that_leaves_too_early_comes_back(make):
  engine = make("print('bye')", name="syncer-0")
  engine.tick(0.0)
  assert engine.see_the_end(5.0) == DOWN
  assert engine.reasons == ["exit status 0: bye"]
  engine.tick(15.0)
  assert engine.phase == UP
  engine.merged = True
  assert engine.see_the_end(20.0) == LEFT


def test_a_shard_that_dies_while_learners_bring_out_their_work_comes_back(make):
  """They waited for it in vain, until `network.drain_seconds` were over."""
  engine = make("raise SystemExit(3)", name="syncer-0")
  engine.tick(0.0)
  engine._ending = True
  assert engine.see_the_end(5.0) == DOWN
  engine.tick(15.0)
  assert engine.phase == UP
  engine._feed(supervisor.Dismiss("syncer-"))
  assert engine.see_the_end(20.0) == LEFT and not engine._lost


@pytest.mark.parametrize("status", [2, 3])
def test_crashes_are_restarted_after_pauses_that_double_and_then_given_up(make, status):
  """So is wrong usage: what a role could not read may be there when it starts again. A learner that
  came back while its user's storage was away was given up at once."""
  engine, now = make(f"print('no cable'); raise SystemExit({status})"), 0.0
  for pause in (10.0, 20.0):
    engine.tick(now)
    assert engine.see_the_end(now) == DOWN
    engine.tick(now + pause - 0.1)
    assert not engine.child.running
    now += pause
  engine.tick(now)
  assert engine.see_the_end(now) == GONE
  assert engine.reasons == [f"exit status {status}: no cable"] * 3
  assert engine.child.log.read_text() == "no cable\n" * 3


def test_a_process_that_cannot_be_started_is_a_death_of_its_role(make):
  """No memory or no process left: back after a pause, as after every other death."""
  engine = make("")
  engine.child._spawns = [
    mock.Mock(side_effect=BlockingIOError(11, "Resource temporarily unavailable"))
  ]
  engine.tick(10.0)
  assert engine.phase == DOWN and not engine.child.running
  assert engine.reasons == ["cannot be started: [Errno 11] Resource temporarily unavailable"]
  engine.tick(19.9)
  assert len(engine.reasons) == 1
  engine.tick(20.0)
  assert len(engine.reasons) == 2


def test_a_role_starts_again_although_the_workdir_was_deleted(make, tmp_path):
  """It found no config, and was given up; of a shard the run had failed then."""
  engine = make("raise SystemExit(3)")
  engine.tick(0.0)
  assert engine.see_the_end(5.0) == DOWN
  for file in ("config.json", "started"):
    (tmp_path / file).unlink()
  engine.tick(15.0)
  assert engine.phase == UP
  assert workdirs.saved_config(tmp_path) == engine.config
  assert workdirs.started(tmp_path) == 7.0, "events have the times that they had before"


@pytest.mark.parametrize(
  "code, name, lost",
  [
    ("print('lost 7 tokens'); raise SystemExit(1)", NAME, "exit status 1: lost 7 tokens"),
    ("print('here', flush=True); os.kill(os.getpid(), 9)", NAME, "killed by SIGKILL: here"),
    ("os.kill(os.getpid(), 15)", NAME, ""),  # it had not begun, or it would have handled that
    ("print('nothing is lost'); raise SystemExit(130)", NAME, ""),  # Ctrl-C, or SIGINT to all
    ("print('no other shard has them'); raise SystemExit(1)", "syncer-0", ""),
  ],
)
def test_when_the_run_ends_nobody_is_restarted_and_lost_work_is_kept_in_mind(
  make, code, name, lost
):
  """Of a learner that was killed while it drained, the run said that its work was saved. What a
  shard had, the evaluator has: Ctrl-C of a run with one shard had the status of lost work. So had
  SIGINT to all processes of a run at once, with the reason that nothing was lost."""
  engine = make(f"import os; {code}", name=name)
  engine.tick(0.0)
  engine._ending = True
  wait_for(lambda: engine.child.poll() is not None, "its end")
  engine._feed(supervisor.Dismiss("syncer-"))  # shards are asked after the learners
  assert engine.see_the_end(0.0) == LEFT
  assert not engine.reasons and engine._lost == ({name: lost} if lost else {})


def test_who_comes_when_all_is_merged_has_lost_nothing_that_the_run_needs(make):
  engine = make("print('lost 7 tokens'); raise SystemExit(1)")
  engine.tick(0.0)
  engine._ending = engine.merged = True
  assert engine.see_the_end(0.0) == LEFT
  assert not engine.reasons and not engine._lost


def test_an_evaluator_that_dies_after_the_shards_were_asked_to_end_leaves_what_it_had(make):
  """It was started again, got nothing from them, and the result was that of the newest snapshot."""
  engine = make("", name="syncer-0")
  had = engine._evaluated = SimpleNamespace(joined=True)
  engine._state = replace(engine._state, roles={EVALUATOR_ADDRESS: supervisor.Role()})
  engine._feed(supervisor.Dismiss("syncer-"))
  engine.tick(0.0)
  assert engine._state.roles[EVALUATOR_ADDRESS].lives == 1 and engine._evaluated is had


def test_deaths_are_forgotten_after_work_that_the_log_tells_of(make):
  engine, now = make("raise SystemExit(3)"), 0.0
  for _ in range(2 * RUN.max_restarts):
    engine.tick(now)
    engine.hear(events.Joined(role=NAME, global_step=0), now)
    now += supervisor.healthy_seconds(RUN)
    assert engine.see_the_end(now) == DOWN
    now += RUN.restart_seconds


def test_where_roles_crash_is_shown_once_of_those_alike(make, capsys):
  """Else it is in their logs alone: the mistake may be in the user's own code."""
  engine = make("")
  for role in (NAME, NAME, "learner-1"):
    engine.hear(events.Crash(role=role, trace='File "mine.py", line 3\nKeyError: 7'), 0.0)
  said = f'ddiloco: WARNING: {NAME} crashed\nFile "mine.py", line 3\nKeyError: 7\n'
  assert capsys.readouterr().err == said


def test_a_planned_kill_is_real_comes_back_and_does_not_count_as_a_crash(started):
  kills = [Fault("kill", NAME, at_step=n, seconds=4.0) for n in (10, 11)]
  engine = started(SLEEP, *kills)
  engine.tick(1.0, global_step=9)
  assert not engine.said
  engine.tick(1.0, global_step=10)
  engine.tick(1.0, global_step=11)
  assert engine.said == [("fault", "kill")], "the second kill is for its next life"
  assert wait_for(engine.child.poll, "its end") == -signal.SIGKILL
  assert engine.see_the_end(2.0) == DOWN
  assert engine.reasons == ["killed by plan, back in 4 s"]
  engine.tick(6.0, global_step=11)
  assert engine.said[2:] == [("restart", "")]
  engine.tick(6.0, global_step=11)
  assert engine.said[3:] == [("fault", "kill")]


def test_two_lives_never_begin_in_the_same_second(started):
  engine = started(SLEEP, Fault("kill", NAME, at_step=0, seconds=0.0))
  engine.tick(0.1)
  engine.see_the_end(0.2)
  engine.tick(1.0)
  assert not engine.child.running
  engine.tick(SHORTEST_LIFE_SECONDS)
  assert engine.child.running


def state(engine: Engine) -> str:
  """R or S: runs or sleeps; T: stopped."""
  stat = Path(f"/proc/{engine.child._processes[0].pid}/stat").read_text()
  return stat.rpartition(") ")[2][0]


@pytest.mark.skipif(not LINUX, reason="looks into /proc")
def test_a_stall_is_a_real_stop_and_it_goes_on_afterwards(started):
  engine = started(SLEEP, Fault("stall", NAME, at_step=5, seconds=2.0))
  engine.tick(10.0, global_step=5)
  wait_for(lambda: state(engine) == "T", "the stop")
  engine.tick(11.9, global_step=5)
  assert state(engine) == "T"
  engine.tick(12.0, global_step=5)
  wait_for(lambda: state(engine) == "S", "its going on")


def test_the_role_itself_is_told_to_be_slow(started, tmp_path):
  slow = Fault("slow", NAME, at_step=5, seconds=2.0, factor=2.0)
  engine = started(SLEEP, slow)
  asked = fault_requests(tmp_path)
  engine.tick(10.0, global_step=5)
  ((_, told),) = asked.poll()
  assert told == dataclasses.replace(slow, at_step=-1, at_seconds=0.0)
  engine._requested(told)  # as it is heard from the file
  assert engine.said == [("fault", "slow")]


def test_who_is_stopped_hears_that_it_should_end(started):
  code = """
    import signal, sys, time
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print('here', flush=True)
    while True:  # a signal just before one long sleep would wait for its end
      time.sleep(0.01)
  """
  engine = started(code, Fault("stall", NAME, at_step=0, seconds=1e6))
  engine.tick(0.0)
  engine._feed(Dismiss("learner-"))
  assert engine.see_the_end(1.0) == LEFT and not engine.reasons


def test_a_learner_that_leaves_before_it_has_begun_has_left(started):
  """SIGTERM ends its process then. It was started again, to be ended again, until it was given
  up."""
  engine = started(SLEEP)
  leaves = replace(engine._state.roles[NAME], leaves_at=1.0)
  engine._state = replace(engine._state, roles={NAME: leaves})
  engine.tick(1.0)
  assert engine.see_the_end(1.0) == LEFT and not engine.reasons and not engine._lost


def test_who_interrupts_the_kill_waits_for_no_process_and_leaves_none(started, monkeypatch):
  """A program that trained in a notebook kept the processes that it did not come to."""
  engine = started(SLEEP)
  pid = engine.child._processes[0].pid
  assert os.getsid(pid) == pid, "Ctrl-C in a terminal is for the supervisor alone"
  engine._children["learner-4"] = other = Child("learner-4", engine.workdir, [spawn])
  other.start([python(SLEEP)])
  monkeypatch.setattr(engine.child, "kill", mock.Mock(side_effect=KeyboardInterrupt))
  try:
    with pytest.raises(KeyboardInterrupt):
      engine._kill()
    assert wait_for(other.poll, "its end") == -signal.SIGKILL
  finally:
    other.kill()
    monkeypatch.undo()


def test_who_waits_for_its_restart_when_all_ends_stays_away(make):
  engine = make("raise SystemExit(3)")
  engine.tick(0.0)
  engine.see_the_end(0.0)
  engine._feed(Dismiss("learner-"))
  engine.tick(1e9)
  assert engine.phase == LEFT and not engine.child.running


PARENT = """
  import subprocess, sys, time
  code = "from ddiloco.engines.role_spec import end_with_parent; import time;"
  code += "end_with_parent(); print('up', flush=True); time.sleep(100)"
  child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
  print(child.pid, flush=True)
  time.sleep(100)
"""


@pytest.mark.skipif(os.name != "posix", reason="kills by signal")
@pytest.mark.parametrize("stopped", [False, pytest.param(True, marks=pytest.mark.skipif(
  not LINUX, reason="needs the kernel's help"))])  # fmt: skip
def test_children_end_with_a_parent_that_is_killed(stopped):
  """Their end of the pipe tells; also the test's own: it reads until all of them have closed it."""
  command = [sys.executable, "-c", textwrap.dedent(PARENT)]
  parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
  pid = int(parent.stdout.readline())
  try:
    assert parent.stdout.readline() == "up\n"
    if stopped:
      os.kill(pid, signal.SIGSTOP)
    parent.kill()
    parent.wait()
    assert parent.stdout.read() == ""  # ends when the child has ended too
    pid = 0
  finally:
    if pid:
      os.kill(pid, signal.SIGKILL)


def test_what_no_child_could_run_is_refused_on_construction(tmp_path):
  config = tiny(1, sync={"num_shards": 0})
  corpus = data.open_corpus(config.data)
  with pytest.raises(ConfigError, match=r"sync.num_shards = 0: .*Fix: .*--engine=threads"):
    ProcessesEngine(config, tmp_path, corpus, lambda params: {"loss": 0.0})
  config = tiny(1, islands={"batch_size": 10**6})
  with pytest.raises(ConfigError, match=r"islands\.batch_size"):
    ProcessesEngine(config, tmp_path, corpus, lambda params: {"loss": 0.0})
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  ("island", "said"),
  [
    ({"attention": "splash"}, r"islands\.attention = 'splash': must be einsum .*Fix: use 'auto'"),
    (
      {"devices": 0, "fsdp": 2},
      r"islands\.\(data, fsdp, tensor\) = \(1, 2, 1\): .*island's 1 devices",
    ),
    (
      {"devices": 0, "hosts": 2, "batch_size": 3},
      r"islands\.batch_size = 3: must be a multiple of .* = 2",
    ),
  ],
)
def test_what_an_island_s_devices_do_not_take_is_refused_before_anything_starts(
  tmp_path, island, said
):
  """Its process refused it, and was started again and again."""
  config = tiny(1, islands={"batch_size": 2, "overrides": {"1": island}})
  with pytest.raises(ConfigError, match=said):
    ProcessesEngine(config, tmp_path, data.open_corpus(config.data), None)


# --- whole runs of real processes -----------------------------------------------------------------


@pytest.fixture(scope="module")
def chaos(tmp_path_factory):
  """A learner and a shard are killed with -9, together; both come back, and the run finishes."""
  folder = tmp_path_factory.mktemp("processes")
  kills = [
    {"action": "kill", "role": role, "at_step": 25, "seconds": 0.2}
    for role in ("learner-1", "syncer-0")
  ]
  # With a quorum of two, the run is not over before both are back.
  config = tiny(170, min_step_seconds=0.06, sync={"min_quorum": 2}, chaos={"faults": kills})
  said, workdir = io.StringIO(), folder / "run"
  with contextlib.redirect_stdout(said):
    return session.train(config, workdir, engine="processes"), workdir, said.getvalue()


@pytest.mark.slow
def test_after_kills_of_a_learner_and_a_shard_the_run_finishes(chaos):
  status, workdir, said = chaos
  assert status == 0, said
  outcome = json.loads((workdir / "outcome.json").read_text())
  assert outcome["reason"] == "finished" and "lost" not in outcome
  assert outcome["loss_merged"] < outcome["loss_untrained"] - 0.5
  assert set(outcome["learner_steps"]) == {"0", "1"}
  params = weights.load(workdir / "result")
  assert all(np.isfinite(value).all() for value in params.values())
  assert "island 1 joined" in said, "the live view follows the children"
  assert list((workdir / "tensorboard").rglob("*tfevents*"))


@pytest.mark.slow
def test_both_came_back_by_themselves_and_were_merged_again(chaos):
  _, workdir, said = chaos
  assert {e.target for e in events_of(workdir, "restart")} == {"learner-1", "syncer-0"}, said
  reasons = [e.reason for e in events_of(workdir, "exit")]
  assert reasons == ["killed by plan, back in 0.2 s"] * 2
  first, second = events_of(workdir, "joined", "learner-1")
  assert second.incarnation > first.incarnation and second.global_step > first.global_step
  lives = {e.incarnation for e in events_of(workdir, "started", "syncer-0")}
  assert len(lives) == 2
  after = [e for e in events_of(workdir, "commit", "syncer-0") if e.incarnation == max(lives)]
  assert any(1 in e.weights for e in after if e.time > second.time)


@pytest.mark.slow
def test_the_survivor_never_waited(chaos):
  _, workdir, _ = chaos
  steps = events_of(workdir, "step", "learner-0")
  (down,) = [e.time for e in events_of(workdir, "fault") if e.target == "learner-1"]
  back = events_of(workdir, "joined", "learner-1")[1].time
  assert sum(down < e.time < back for e in steps) > 8, "more than a sync period"
  assert sum(e.blocked_seconds for e in steps) == 0


@pytest.mark.slow
def test_versions_agree_at_the_end(chaos):
  _, workdir, _ = chaos
  final = {}
  for event in events_of(workdir, "commit"):
    final[event.fragment] = max(event.version, final.get(event.fragment, 0))
  for role in ("learner-0", "learner-1", "evaluator"):
    newest = {}
    for event in events_of(workdir, "apply", role):
      newest[event.fragment] = event.version  # of its last life
    assert newest == final, role


@pytest.mark.slow
@pytest.mark.skipif(not LINUX, reason="looks into /proc")
def test_nobody_is_left_behind(chaos):
  assert processes_of(chaos[1]) == []


@pytest.mark.slow
def test_a_run_that_loses_its_quorum_has_failed_and_was_not_stopped(tmp_path, capsys):
  faults = [{"action": "kill", "role": "learner-1", "at_step": 10, "seconds": -1}]
  sections = {"sync": {"min_quorum": 2}, "network": {"drain_seconds": 1.0}}
  config = tiny(10**7, min_step_seconds=0.06, chaos={"faults": faults}, **sections)
  assert session.train(config, tmp_path, engine="processes") == 1
  outcome = json.loads((tmp_path / "outcome.json").read_text())
  said, why = "".join(capsys.readouterr()), "the learners that are left"
  assert outcome["reason"] == "failed" and outcome["why"].endswith(f"{why}: learner-0")
  assert f"{why}: learner-0" in said and np.isfinite(outcome["loss_merged"])


@pytest.mark.slow
@pytest.mark.skipif(not LINUX, reason="looks into /proc")
def test_a_learner_that_has_left_joins_again(tmp_path):
  faults = [{"action": "join", "role": "learner-2", "at_step": 4, "seconds": -1}]
  config = tiny(10**7, min_step_seconds=0.1, chaos={"faults": faults})
  find = functools.partial(events_of, tmp_path)
  with run_here(config, tmp_path) as run:
    wait_for(lambda: find("joined", "learner-2"), "a learner to join")
    os.kill(*processes_of(tmp_path, "--learner=2"), signal.SIGTERM)
    join = Fault("join", "learner-2", at_seconds=0.0, seconds=-1)
    again = lambda: ask_for(tmp_path, join) or find("fault")[1:]
    wait_for(again, "its supervisor to see that it has left")
    (second,) = wait_for(lambda: find("joined", "learner-2")[1:], "its return")
    later = lambda: [e for e in find("commit") if e.time > second.time]
    wait_for(lambda: any(2 in e.weights for e in later()), "its work to be merged")
  assert (run.result().reason, run.result().lost) == ("stopped", "")
  assert not find("exit")


@pytest.mark.slow
def test_a_workdir_that_is_deleted_under_a_run_is_reported_and_the_run_goes_on(tmp_path, capsys):
  config = tiny(200, min_step_seconds=0.06, sync={"snapshot_steps": 25})
  workdir = tmp_path / "run"
  with ThreadPoolExecutor() as beside:
    ended = beside.submit(session.train, config, workdir, engine="processes")
    wait_for(lambda: ended.done() or events_of(workdir, "commit"), "a commit")
    while (workdir / "config.json").exists():  # its roles write meanwhile
      shutil.rmtree(workdir, ignore_errors=True)
    assert ended.result() == 0
  assert "evaluator.jsonl: was deleted while its run goes on" in capsys.readouterr().err
  assert all(np.isfinite(value).all() for value in weights.load(workdir / "result").values())
  assert json.loads((workdir / "outcome.json").read_text())["reason"] == "finished"


def have_left(engine: ProcessesEngine, kind: str) -> bool:
  return all(r.ended for r in supervisor.members(engine._state, kind).values())


@pytest.mark.slow
def test_shards_keep_the_final_model_for_an_evaluator_that_was_never_there(tmp_path):
  """It had died at each of its starts. The shards ended after the learners, and what they had was
  lost."""

  class Late(ProcessesEngine):
    def _run_evaluator(self, recorder) -> None:
      while not have_left(self, "learner-"):
        time.sleep(0.05)
      wait_for(self._kept, "the shards to wait for it")
      super()._run_evaluator(recorder)

    def _kept(self) -> bool:
      logs = (self._children[f"syncer-{s}"].log.read_text() for s in range(2))
      return all("waits: the evaluator, which has not saved the final model" in log for log in logs)

  config = tiny(60)
  engine = Late(config, tmp_path / "run", data.open_corpus(config.data), lambda _: {"loss": 0.0})
  ended = engine.run()
  assert (ended.reason, ended.saved, ended.lost) == ("finished", True, "")
  assert ended.merged_tokens >= config.run.total_tokens
  assert not events_of(tmp_path / "run", "exit"), "no role was started again"


@pytest.mark.slow
def test_shards_keep_the_model_of_a_stopped_run_for_an_evaluator_that_is_not_back_yet(tmp_path):
  """They ended before it had the model: the newest snapshot's was the result, or, where there was
  none, the untrained one."""

  class Dies(ProcessesEngine):
    def _run_evaluator(self, recorder) -> None:
      if recorder.incarnation > self._first_evaluator:
        wait_for(lambda: have_left(self, "learner-"), "the learners to end")
        with contextlib.suppress(AssertionError):  # the shards are not asked to end
          wait_for(lambda: self._told & {"syncer-0"}, patience_seconds=1.0)
          wait_for(lambda: have_left(self, "syncer-"), "them to end")
      super()._run_evaluator(recorder)

    def _evaluate(self, runtime, broken) -> None:
      first = runtime.recorder.incarnation == self._first_evaluator
      super()._evaluate(runtime, lambda: "cut off" if first and self.leave.is_set() else "")

  def listen(event: Event) -> None:
    if event.kind == "commit" and event.version >= 3:
      engine.leave.set()

  config = tiny(10**7, min_step_seconds=0.06)
  engine = Dies(config, tmp_path / "run", data.open_corpus(config.data), None)
  ended = engine.run([listen])
  assert (ended.reason, ended.lost) == ("stopped", "")
  (died,) = events_of(tmp_path / "run", "exit")
  assert (died.target, died.reason) == ("evaluator", "ConnectionError: cut off")
  merged = {e.fragment: e.merged_tokens for e in events_of(tmp_path / "run", "commit")}
  assert ended.merged_tokens == min(merged.values())


@pytest.mark.slow
@pytest.mark.skipif(not LINUX, reason="looks into /proc")
def test_when_the_supervisor_is_killed_nobody_is_left_behind(tmp_path):
  with RealRun(tmp_path, tiny(10**7, min_step_seconds=0.2), *PROCESSES) as run:
    run.wait_for(lambda: len(processes_of(run.workdir)) == 5, "its four children")
  assert wait_for(lambda: not processes_of(run.workdir), "the end of its children")
