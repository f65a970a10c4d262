"""Islands of several processes in a run: a host that is lost or hung costs its own island alone."""

from __future__ import annotations

import os
import signal
import threading
from types import SimpleNamespace
from unittest import mock

import pytest
from common import processes_of

from ddiloco import environment
from ddiloco.config import ConfigError, from_dict
from ddiloco.engines import island_hosts
from ddiloco.engines.children import KILL_SECONDS, LOST, WORDS_SECONDS, Child, spawn
from ddiloco.engines.island_hosts import COMPILED_ORDERS, Hosts, check_hosts
from ddiloco.engines.role_spec import RoleSpec
from ddiloco.environment import BAD_USAGE
from ddiloco.network.host_links import HostProgress
from ddiloco.network.webserver import START_SECONDS
from tests.engines.real import PROCESSES, RealRun, tiny
from tests.engines.test_processes import python
from tests.waits import wait_for

SILENCE_SECONDS = 8.0


def hosted(steps: int):
  """Two islands of two processes with four fake devices each."""
  sync = {"min_quorum": 1, "liveness_seconds": 3.0, "snapshot_steps": 4}
  islands = {"num_learners": 2, "batch_size": 4, "min_step_seconds": 0.8}
  islands |= {"devices": 8, "hosts": 2, "data": 2, "fsdp": 2, "tensor": 2}
  return tiny(steps, islands=islands, sync=sync, network={"silence_seconds": SILENCE_SECONDS})


@pytest.mark.slow
def test_a_killed_and_a_hung_host_end_their_islands_and_no_other_waits(tmp_path):
  run = RealRun(tmp_path, hosted(100_000), *PROCESSES)
  workdir, wait = run.workdir, run.wait_for

  def merged(learner: int, life: int) -> bool:
    commits = (zip(e.learners, e.incarnations) for e in run.events("commit"))
    return any(m == learner and n >= life for each in commits for m, n in each)

  def lose(learner: int, number: int, reason: str) -> None:
    """Strikes the second host of an island, and waits until the island is merged again."""
    role = f"learner-{learner}"
    wait(lambda: any(role in e.roles for e in run.events("snapshot")[-1:]),
         f"a snapshot that has {role}'s part")  # fmt: skip
    life = run.events("started", role)[-1].incarnation
    (pid,) = processes_of(workdir, f"--learner={learner}", "--host=1")
    os.kill(pid, number)
    (crash,) = wait(lambda: [e for e in run.events("crash", role) if e.incarnation == life],
                    f"the end of {role}")  # fmt: skip
    assert f"host 1 of this island is lost: {reason}" in crash.trace
    wait(lambda: merged(learner, life + 1), f"a commit of {role}'s next life")
    restored = [e for e in run.events("restored", role) if e.incarnation > life]
    assert restored, "it went on from its own state"

  with run:
    wait(lambda: len(run.events("started", "learner")) == 2, "both islands")
    assert run.events("started", "learner-1")[0].hosts == 2
    lose(1, signal.SIGKILL, "its connection has ended")
    lose(0, signal.SIGSTOP, "it was not heard for")
    blocked = [e.blocked_seconds for e in run.events("step")]
    assert sum(blocked) == 0.0, "no island ever waited"
    assert run.ends(signal.SIGTERM) == 130, run.said()  # as after Ctrl-C
  assert not processes_of(workdir)
  assert "Work was lost" not in run.said() and "not ended within" not in run.said()
  assert len(run.events("restart")) == 2


# --- the processes of one role ------------------------------------------------------------------


def child_of(tmp_path, *codes: str) -> Child:
  child = Child("learner-3", tmp_path, [spawn] * len(codes))
  child.start([python(code) for code in codes])
  return child


SLEEPS = "import time; print('here', flush=True); time.sleep(1000)"


def test_a_role_that_is_held_ends_when_it_is_asked_to(tmp_path):
  hears = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); "
  child = child_of(tmp_path, hears + SLEEPS, hears + SLEEPS)
  for log in child._logs:
    wait_for(lambda log=log: "here" in log.read_text(), "its first words")
  child.hold(True)
  child.terminate()
  try:
    assert wait_for(child.poll, "its end") == 7
  finally:
    child.kill()


def test_the_hosts_that_remain_may_say_what_they_know_before_their_end(tmp_path):
  says = "print('here', flush=True); import sys; sys.stdin.read(1); sys.exit('host 1 is lost')"
  child = child_of(tmp_path, says, SLEEPS)
  wait_for(lambda: "here" in child.log.read_text(), "its first words")
  child._processes[1].kill()
  wait_for(lambda: child._processes[1].poll() is not None, "the end of the second")
  assert child.poll() is None, "the first has not ended"
  child._processes[0].stdin.close()
  assert wait_for(child.poll, "its end") == -signal.SIGKILL
  assert child.bury(-signal.SIGKILL) == "killed by SIGKILL: host 1 is lost"


def test_one_host_that_fails_is_the_end_of_all_and_says_why(tmp_path, monkeypatch):
  """Of an island whose host 0 hung, the reason was said to be host 0's last line of progress."""
  monkeypatch.setattr("ddiloco.engines.children.WORDS_SECONDS", 0.05)
  child = child_of(tmp_path, SLEEPS, "raise SystemExit('host 0 is lost')", SLEEPS)
  wait_for(lambda: "here" in child.log.read_text(), "its first words")
  status = wait_for(child.poll, "its end")
  living = [each.pid for each in child._processes]
  assert child.bury(status) == "exit status 1: host 0 is lost" and not child.running
  for pid in living:
    with pytest.raises(ProcessLookupError):
      os.kill(pid, 0)
  assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [
    "learner-3-host-1.log", "learner-3-host-2.log", "learner-3.log",
  ]  # fmt: skip


def test_all_hosts_that_end_well_are_a_good_end_and_one_that_stays_is_not(tmp_path, monkeypatch):
  child = child_of(tmp_path, "", "")
  assert wait_for(lambda: None if child.poll() is None else [child.poll()], "its end") == [0]
  child.bury(0)
  monkeypatch.setattr("ddiloco.engines.children.KILL_SECONDS", 0.05)
  child = child_of(tmp_path, "", SLEEPS)
  assert wait_for(child.poll, "the end of patience") == LOST
  monkeypatch.undo()
  child.bury(LOST)


@pytest.mark.parametrize(
  ("status", "patience", "end"),
  [(1, WORDS_SECONDS, 1), (BAD_USAGE, WORDS_SECONDS, BAD_USAGE), (0, KILL_SECONDS, LOST)],
)
def test_how_long_the_other_hosts_may_take_in_each_life(
  tmp_path, monkeypatch, status, patience, end
):
  """After a failure to log what they know of it, after a good end to end as well."""
  now, statuses = [100.0], {}

  def process(number):
    poll = lambda: statuses[number]
    return SimpleNamespace(poll=poll, stdin=None, send_signal=lambda _: statuses.update({1: -9}))

  clock = SimpleNamespace(monotonic=lambda: now[0])
  monkeypatch.setattr("ddiloco.engines.children.time", clock)
  child = Child("learner-3", tmp_path, [lambda *_, n=n: process(n) for n in (0, 1)])
  for _ in range(2):
    statuses |= {0: None, 1: None}
    child.start([[], []])
    now[0] += 1000.0
    assert child.poll() is None
    now[0] += 1000.0
    statuses[0] = status
    assert child.poll() is None, "its words may follow"
    now[0] += patience
    assert child.poll() is None
    now[0] += 0.1
    assert child.poll() == end
    child.bury(end)


def test_a_signal_is_the_reason_and_not_the_failures_that_follow(tmp_path):
  child = child_of(tmp_path, "raise SystemExit(1)", SLEEPS)
  child._processes[1].kill()
  for each in child._processes:
    wait_for(lambda each=each: each.poll() is not None, "its end")
  assert child.poll() == -signal.SIGKILL
  assert child.bury(child.poll()).startswith("killed by SIGKILL")


def test_wrong_usage_of_one_host_is_the_reason_and_not_the_failures_that_follow(tmp_path):
  """The whole island was started again and again, and no word of what was wrong was said."""
  wrong = "import sys; print('data.path: is missing. Fix: copy it'); sys.exit(2)"
  child = child_of(tmp_path, "raise SystemExit(1)", wrong)
  for each in child._processes:
    wait_for(lambda each=each: each.poll() is not None, "its end")
  assert child.poll() == BAD_USAGE
  assert child.bury(child.poll()) == "exit status 2: data.path: is missing. Fix: copy it"


def test_of_hosts_that_cannot_all_be_started_none_goes_on(tmp_path):
  """The first one stayed, and its next life had three processes for two hosts."""
  # Without `kill`, which would end the first one's actor for good.
  status = []
  first = SimpleNamespace(
    poll=lambda: status[-1] if status else None,
    send_signal=lambda number: status.append(-number),
    stdin=None,
  )
  child = Child(
    "learner-3", tmp_path, [lambda *_: first, mock.Mock(side_effect=RuntimeError("no such actor"))]
  )
  for _ in range(2):
    status.clear()
    with pytest.raises(RuntimeError, match="no such actor"):
      child.start([[], []])
    assert not child.running and status == [-signal.SIGKILL]


def test_an_order_may_take_long_until_the_usual_step_is_known():
  """With 24 fragments the limit was that of usual steps before there had been one."""
  config = from_dict({"network": {"silence_seconds": 30.0, "give_up_seconds": 600.0}})
  hosts, usual_seconds = Hosts.__new__(Hosts), [None, 1.0, 43.0]
  hosts.progress = HostProgress(done=50)
  hosts._runner = SimpleNamespace(config=config, usual_seconds=lambda: usual_seconds.pop(0))
  assert [hosts._order_seconds(False) for _ in range(3)] == [600.0, 30.0, 430.0]


def test_an_order_may_take_long_while_a_host_waits_for_data():
  """A batch that was 30 s late, of a remote disk say, was the end of its island. Nor may a probe of
  host 0 end it earlier."""
  config = from_dict({"network": {"silence_seconds": 30.0, "give_up_seconds": 600.0}})
  hosts, usual_seconds, beats = Hosts.__new__(Hosts), [1.0, 100.0], []
  hosts.progress = HostProgress(done=50)
  hosts._runner = SimpleNamespace(
    config=config,
    usual_seconds=lambda: usual_seconds.pop(0),
    health=SimpleNamespace(beat=lambda: beats.append(1)),
  )
  assert [hosts._order_seconds(True) for _ in range(2)] == [600.0, 1000.0]
  assert len(beats) == 2


@pytest.mark.parametrize(
  "silence, give_up, limit",
  [
    (30.0, 600.0, 600.0),
    (300.0, 600.0, 900.0),
    (1.0, 1.0, 100.0),
    (1e9, 600.0, 2**31 - 1),  # three times as long did not fit into JAX's 32 bits
  ],
)
def test_jax_is_not_quicker_than_what_finds_an_island_that_slept(
  monkeypatch, silence, give_up, limit
):
  """All hosts stood still for 130 s, as where a machine sleeps. JAX aborted them when they went on,
  100 s having been its limit."""
  given = []
  monkeypatch.setattr(environment, "join_hosts", lambda *arguments: given.append(arguments))
  config = from_dict({"network": {"silence_seconds": silence, "give_up_seconds": give_up}})
  island_hosts._join("localhost:1", config, SimpleNamespace(hosts=2), 0)
  assert given == [("localhost:1", 2, 0, give_up, limit)]


def test_a_host_that_does_not_come_to_its_end_of_compiling_is_named():
  """The others waited for ever: it lives, and no order was given that it could be late for."""
  hosts, ready = Hosts.__new__(Hosts), threading.Event()
  values = SimpleNamespace(receive=lambda: ready.wait(60))
  hosts.progress, hosts.links = HostProgress(), {1: SimpleNamespace(values=values)}
  network = SimpleNamespace(give_up_seconds=0.0, silence_seconds=0.0)
  config = SimpleNamespace(network=network)
  hosts._runner = SimpleNamespace(config=config, usual_seconds=lambda: 0.0)
  waiting = threading.Thread(target=hosts.wait_until_compiled)
  waiting.start()
  wait_for(lambda: hosts.progress.done == COMPILED_ORDERS, "the order")
  assert hosts._order_seconds(False) == START_SECONDS
  assert hosts._runner.ready() == "host 1 of its island, which still compiles"
  ready.set()
  waiting.join()
  hosts.progress.done += 1
  assert hosts._order_seconds(False) == 0.0


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ("hosts", "flags", "message"),
  [
    (2, {}, r"--hosts = '': must be given if, and only if, .*islands.hosts = 2.*Fix"),
    (1, {"hosts": "tcp://127.0.0.1:1"}, r"--hosts = 'tcp://127.0.0.1:1': must be given if"),
    (2, {"hosts": "tcp://127.0.0.1:1", "host": 2}, r"--host = 2: must be below islands.hosts = 2"),
    (1, {"host": 1}, r"--host = 1: must be below islands.hosts = 1"),
    (2, {"hosts": "tcp://10.0.0.1:1"}, r"--hosts = 'tcp://10.0.0.1:1': can be reached from other"),
    (2, {"hosts": "here"}, r"--hosts = 'here': must be tcp://HOST:PORT"),
    (2, {"hosts": "tcp://*:1"}, r"--hosts = 'tcp://\*:1': stands for all.*Fix: give tcp:"),
    (2, {"hosts": "tcp://[::]:1"}, r"--hosts = 'tcp://\[::\]:1': stands for all addresses"),
  ],
)
def test_flags_that_do_not_fit_the_island_are_refused_by_name(tmp_path, hosts, flags, message):
  config = from_dict({"islands": {"devices": 2 * hosts, "hosts": hosts}})
  with pytest.raises(ConfigError, match=message):
    check_hosts(config, 0, RoleSpec(tmp_path, "run", (), **flags))


def test_hosts_share_the_devices_evenly():
  with pytest.raises(ConfigError, match=r"islands.devices = 3: must be shared evenly .*use 2"):
    from_dict({"islands": {"devices": 3, "hosts": 2}})
