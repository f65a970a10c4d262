"""Children and their supervisor: quick stand-ins for roles first, then a whole run of real ones."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from ddiloco.config import ConfigError, Fault, RunConfig, from_dict
from ddiloco.engines.children import SHORTEST_LIFE_SECONDS, Child, processes_of, spawn
from ddiloco.engines.processes import ProcessesEngine, free_urls
from ddiloco.runtime import weights
from ddiloco.training import data
from tests.engines.real import events_of, start, tiny
from tests.engines.real import wait_for as wait_long

LINUX = sys.platform == "linux"
RUN = RunConfig(restart_seconds=10.0, max_restarts=2)


def python(code: str) -> list[str]:
  return [sys.executable, "-S", "-c", textwrap.dedent(code)]


def child(tmp_path, code: str, *faults: Fault) -> Child:
  return Child("learner/3", python(code), tmp_path, RUN, faults, spawn)


SLEEP = "import time; print('here', flush=True); time.sleep(100)"


@pytest.fixture
def started(tmp_path):
  """Starts a child at time 0 once it has said something; kills it in the end."""
  children = []

  def start(code: str, *faults: Fault) -> Child:
    each = child(tmp_path, code, *faults)
    children.append(each)
    each.start(0.0)
    wait_for(lambda: each.log.read_text(), "its first words")
    return each

  yield start
  for each in children:
    each.kill()


def wait_for(what, name: str, seconds: float = 20.0):
  deadline = time.monotonic() + seconds
  while not (value := what()):
    assert time.monotonic() < deadline, f"waited in vain for {name}"
    time.sleep(0.005)
  return value


def status_of(each: Child) -> int:
  wait_for(lambda: each.poll() is not None, "its end")
  status = each.poll()
  assert status is not None
  return status


def test_urls_are_pairs_of_free_ports():
  urls = free_urls(8)
  ports = [int(url.rpartition(":")[2]) for url in urls]
  assert len({p + i for p in ports for i in (0, 1)}) == 16
  for port in ports:
    for number in (port, port + 1):
      with socket.socket() as free:
        free.bind(("127.0.0.1", number))


def test_who_ends_in_good_order_is_not_started_again(tmp_path):
  each = child(tmp_path, "print('done')")
  assert each.due_to_start(0.0)
  each.start(0.0)
  assert not each.due_to_start(1e9), "it runs"
  assert each.on_exit(status_of(each), 5.0, ending=False, must_stay=False) == ""
  assert each.ended and not each.gone and not each.lost and not each.due_to_start(1e9)


def test_a_shard_that_leaves_too_early_comes_back(tmp_path):
  each = child(tmp_path, "print('bye')")
  each.start(0.0)
  reason = each.on_exit(status_of(each), 5.0, ending=False, must_stay=True)
  assert reason == "exit status 0: bye" and each.due_to_start(15.0)


def test_crashes_are_restarted_after_pauses_that_double_and_then_given_up(tmp_path):
  each = child(tmp_path, "print('no cable'); raise SystemExit(3)")
  now = 0.0
  for pause in (10.0, 20.0):
    each.start(now)
    assert each.on_exit(status_of(each), now, False, False) == "exit status 3: no cable"
    assert not each.due_to_start(now + pause - 0.1) and each.due_to_start(now + pause)
    now += pause
  each.start(now)
  each.on_exit(status_of(each), now, False, False)
  assert each.gone and each.ended and not each.due_to_start(1e9)
  assert each.lives == 3 and each.log.read_text() == "no cable\n" * 3


def test_bad_usage_is_given_up_at_once(tmp_path):
  each = child(tmp_path, "print('--learner: is needed'); raise SystemExit(2)")
  each.start(0.0)
  assert "--learner: is needed" in each.on_exit(status_of(each), 0.0, False, False)
  assert each.gone


def test_when_the_run_ends_nobody_is_restarted_and_lost_work_is_kept_in_mind(tmp_path):
  each = child(tmp_path, "print('lost 7 tokens'); raise SystemExit(1)")
  each.start(0.0)
  assert each.on_exit(status_of(each), 0.0, ending=True, must_stay=False) == ""
  assert each.ended and not each.gone and each.lost == "lost 7 tokens"


def test_a_planned_kill_is_real_comes_back_and_does_not_count_as_a_crash(started):
  kills = [Fault("kill", "learner/3", at_step=n, seconds=4.0) for n in (10, 11)]
  each = started(SLEEP, *kills)
  assert each.strike(9, 0.0, 1.0) is None
  assert each.strike(10, 0.0, 1.0).action == "kill"
  assert each.strike(11, 0.0, 1.0) is None, "the second kill is for its next life"
  assert status_of(each) == -signal.SIGKILL
  assert each.on_exit(-signal.SIGKILL, 2.0, False, True) == "killed by plan, back in 4 s"
  assert not each.due_to_start(5.9) and each.due_to_start(6.0)
  each.start(6.0)
  assert each.strike(11, 0.0, 6.0).action == "kill"


def test_a_kill_for_good(started):
  each = started(SLEEP, Fault("kill", "learner/3", at_seconds=3.0, seconds=-1))
  assert each.strike(10**9, 2.9, 1.0) is None
  assert each.strike(0, 3.0, 1.0).action == "kill"
  each.on_exit(status_of(each), 2.0, False, True)
  assert each.gone and each.ended


def test_two_lives_never_begin_in_the_same_second(started):
  each = started(SLEEP, Fault("kill", "learner/3", at_step=0, seconds=0.0))
  each.strike(0, 0.0, 0.1)
  each.on_exit(status_of(each), 0.2, False, False)
  assert not each.due_to_start(1.0) and each.due_to_start(SHORTEST_LIFE_SECONDS)


def state(each: Child) -> str:
  """R or S: runs or sleeps; T: stopped."""
  stat = Path(f"/proc/{each._process.pid}/stat").read_text()
  return stat.rpartition(") ")[2][0]


@pytest.mark.skipif(not LINUX, reason="looks into /proc")
def test_a_stall_is_a_real_stop_and_it_goes_on_afterwards(started):
  each = started(SLEEP, Fault("stall", "learner/3", at_step=5, seconds=2.0))
  assert not each.hold(1.0)
  assert each.strike(5, 0.0, 10.0).action == "stall"
  assert each.hold(10.0)
  wait_for(lambda: state(each) == "T", "the stop")
  assert each.hold(11.9) and state(each) == "T"
  assert not each.hold(12.0)
  wait_for(lambda: state(each) == "S", "its going on")


@pytest.mark.skipif(not LINUX, reason="looks into /proc")
def test_slow_stops_and_continues_in_turns(started):
  each = started(SLEEP, Fault("slow", "learner/3", at_step=5, seconds=2.0, factor=2.0))
  each.strike(5, 0.0, 10.0)
  for now, expected in [(10.01, "S"), (10.07, "T"), (10.11, "S"), (10.17, "T"), (12.0, "S")]:
    each.hold(now)
    wait_for(lambda expected=expected: state(each) == expected, f"{expected} at {now}")


def test_who_is_stopped_hears_that_it_should_end(started):
  code = """
    import signal, sys, time
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print('here', flush=True)
    while True:  # a signal just before one long sleep would wait for its end
      time.sleep(0.01)
  """
  each = started(code, Fault("stall", "learner/3", at_step=0, seconds=1e6))
  each.strike(0, 0.0, 0.0)
  assert each.hold(0.0)
  each.terminate()
  assert status_of(each) == 0
  assert each.on_exit(0, 1.0, ending=True, must_stay=True) == "" and each.ended


def test_who_waits_for_its_restart_when_all_ends_stays_away(tmp_path):
  each = child(tmp_path, "raise SystemExit(3)")
  each.start(0.0)
  each.on_exit(status_of(each), 0.0, False, False)
  each.terminate()
  assert each.ended and not each.due_to_start(1e9)


PARENT = """
  import subprocess, sys, time
  code = "from ddiloco.engines.place import end_with_parent; import time;"
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


TINY = {
  "model": {"num_layers": 1, "model_dim": 8, "num_heads": 1, "num_kv_heads": 1, "head_dim": 4,
            "mlp_dim": 8},
  "data": {"source": "synthetic", "sequence_length": 8},
}  # fmt: skip


def test_what_no_child_could_run_is_refused_on_construction(tmp_path):
  config = from_dict({**TINY, "sync": {"num_shards": 0}})
  corpus = data.open_corpus(config.data)
  with pytest.raises(ConfigError, match=r"sync.num_shards = 0: .*Fix: .*--engine=threads"):
    ProcessesEngine(config, tmp_path, corpus, lambda params: 0.0)
  config = from_dict({**TINY, "islands": {"batch_size": 10**6}})
  with pytest.raises(ConfigError, match=r"islands\.batch_size"):
    ProcessesEngine(config, tmp_path, corpus, lambda params: 0.0)
  assert not list(tmp_path.iterdir())


# --- whole runs of real processes -----------------------------------------------------------------


@pytest.fixture(scope="module")
def chaos(tmp_path_factory):
  """A learner and a shard are killed with -9, together; both come back, and the run finishes."""
  folder = tmp_path_factory.mktemp("processes")
  kills = [
    {"action": "kill", "role": role, "at_step": 150, "seconds": 0.2}
    for role in ("learner/1", "syncer/0")
  ]
  # With a quorum of two, the run is not over before both are back.
  config = tiny(1000, pace_seconds=0.01, sync={"min_quorum": 2}, chaos={"faults": kills})
  (folder / "config.json").write_text(config.to_json())
  workdir, log = folder / "run", folder / "log"
  run = start(
    "train",
    "--engine=processes",
    "--cpu",
    f"--config={folder / 'config.json'}",
    f"--workdir={workdir}",
    log=log,
  )
  try:
    status = run.wait(200)
  finally:
    run.kill()
  return status, workdir, log.read_text()


@pytest.mark.slow
@pytest.mark.timeout(300)
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
  assert {e["target"] for e in events_of(workdir, "restart")} == {"learner/1", "syncer/0"}, said
  reasons = [e["reason"] for e in events_of(workdir, "exit")]
  assert reasons == ["killed by plan, back in 0.2 s"] * 2
  first, second = events_of(workdir, "joined", "learner-1")
  assert second["incarnation"] > first["incarnation"] and second["clock"] > first["clock"]
  lives = {e["incarnation"] for e in events_of(workdir, "started", "syncer-0")}
  assert len(lives) == 2
  after = [e for e in events_of(workdir, "commit", "syncer-0") if e["incarnation"] == max(lives)]
  assert any("1" in e["participants"] for e in after if e["time"] > second["time"])


@pytest.mark.slow
def test_the_survivor_never_waited(chaos):
  _, workdir, _ = chaos
  steps = events_of(workdir, "step", "learner-0")
  (down,) = [e["time"] for e in events_of(workdir, "fault") if e["target"] == "learner/1"]
  back = events_of(workdir, "joined", "learner-1")[1]["time"]
  assert sum(down < e["time"] < back for e in steps) > 20
  assert sum(e["blocked_seconds"] for e in steps) == 0


@pytest.mark.slow
def test_versions_agree_at_the_end(chaos):
  _, workdir, _ = chaos
  final = {}
  for event in events_of(workdir, "commit"):
    final[event["fragment"]] = max(event["version"], final.get(event["fragment"], 0))
  for role in ("learner-0", "learner-1", "evaluator"):
    newest = {}
    for event in events_of(workdir, "apply", role):
      newest[event["fragment"]] = event["version"]  # of its last life
    assert newest == final, role


@pytest.mark.slow
@pytest.mark.skipif(not LINUX, reason="looks into /proc")
def test_nobody_is_left_behind(chaos):
  assert processes_of(chaos[1]) == []


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_ctrl_c_brings_out_what_is_there(tmp_path):
  (tmp_path / "config.json").write_text(tiny(10**7, pace_seconds=0.02).to_json())
  workdir, log = tmp_path / "run", tmp_path / "log"
  config = f"--config={tmp_path / 'config.json'}"
  run = start("train", "--engine=processes", "--cpu", config, f"--workdir={workdir}", log=log)
  try:
    wait_long(lambda: events_of(workdir, "commit"), "a commit", run, log)
    run.send_signal(signal.SIGINT)
    assert run.wait(100) == 130, log.read_text()
  finally:
    run.kill()
  said = log.read_text()
  assert "Traceback" not in said
  outcome = json.loads((workdir / "outcome.json").read_text())
  assert outcome["reason"] == "stopped" and np.isfinite(outcome["loss_merged"])
  for m in (0, 1):
    assert "nothing is lost" in (workdir / "logs" / f"learner-{m}.log").read_text()
  if LINUX:
    assert processes_of(workdir) == []


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.skipif(not LINUX, reason="looks into /proc")
def test_when_the_supervisor_is_killed_nobody_is_left_behind(tmp_path):
  (tmp_path / "config.json").write_text(tiny(10**7, pace_seconds=0.02).to_json())
  workdir, log = tmp_path / "run", tmp_path / "log"
  config = f"--config={tmp_path / 'config.json'}"
  run = start("train", "--engine=processes", "--cpu", config, f"--workdir={workdir}", log=log)
  try:
    wait_long(lambda: len(processes_of(workdir)) == 5, "its four children", run, log)
  finally:
    run.kill()
    run.wait()
  wait_long(lambda: not processes_of(workdir), "the end of its children")
