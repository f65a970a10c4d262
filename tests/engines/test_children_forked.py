"""Processes forked from one that has imported everything are as if they had been started."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import types
from multiprocessing import forkserver as server
from pathlib import Path
from unittest import mock

import pytest
from common import processes_of

from ddiloco.engines import children
from ddiloco.observe.guards import exited
from tests.waits import PATIENCE_SECONDS, wait_for

SLEEPS = "print('here', flush=True); import time; time.sleep(100)"


@pytest.fixture
def start(tmp_path, monkeypatch):
  """Starts `python -m MODULE ARGUMENTS` with this code as the module; kills it in the end."""
  monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
  monkeypatch.syspath_prepend(tmp_path)
  started = []

  def start(code: str, *arguments: str) -> tuple[children.Forked, Path]:
    name = f"module_{len(started)}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(code))
    log = tmp_path / f"{name}.log"
    started.append(children.spawn_forked([sys.executable, "-m", name, *arguments], log))
    return started[-1], log

  yield start
  for process in started:
    process.send_signal(signal.SIGKILL)
    end_of(process)
    process.stdin.close()


def end_of(process: children.Forked) -> int | None:
  return exited(process.poll, 60.0, "the process")


def said(log: Path, process: children.Forked, word: str) -> None:
  wait_for(lambda: word in log.read_text(), word, process, log)


def test_it_has_the_streams_folder_environment_and_session_of_its_own(start, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("ONLY_NOW", "seen")
  process, log = start("""
    import json, os, sys
    print(json.dumps([sys.argv[1:], os.getcwd(), os.environ["ONLY_NOW"], os.getsid(0), __name__]))
    print("and this", file=sys.stderr)
    sys.exit(7)
  """, "--one=1", "two")  # fmt: skip
  assert end_of(process) == process.poll() == 7
  first, second = sorted(log.read_text().splitlines())
  assert json.loads(first) == [["--one=1", "two"], str(tmp_path), "seen", process.pid, "__main__"]
  assert second == "and this"
  assert os.getsid(0) != process.pid


def test_what_is_imported_need_not_be_imported_again(start):
  process, log = start("""
    import sys
    there = {*sys.modules}
    from ddiloco.engines import session, single_roles
    from ddiloco.training import data, hosts, island
    import jax
    print(there == {*sys.modules}, jax._src.xla_bridge.backends_are_initialized())
  """)
  assert end_of(process) == 0
  assert log.read_text().split() == ["True", "False"]


def test_imports_are_hardly_interrupted_by_the_garbage_collector(start):
  """It took a tenth of the time that a role needs until it can begin."""
  process, log = start("import gc; print(sum(each['collections'] for each in gc.get_stats()))")
  assert end_of(process) == 0
  assert int(log.read_text()) < 250, "more than 400 at Python's own threshold"


def test_the_script_that_starts_it_does_not_run_once_more_in_it(start, tmp_path, monkeypatch):
  script = types.ModuleType("__main__")
  script.__file__ = str(tmp_path / "script.py")
  (tmp_path / "script.py").write_text("raise SystemExit('the script runs once more')")
  monkeypatch.setitem(sys.modules, "__main__", script)
  process, log = start("print(__name__)")
  assert end_of(process) == 0
  assert log.read_text() == "__main__\n"
  assert script.__spec__ is None


def test_it_may_have_processes_of_its_own(start):
  """A user's data may be loaded by some."""
  process, log = start("""
    import multiprocessing
    print(multiprocessing.get_start_method(allow_none=True), flush=True)
    child = multiprocessing.get_context("fork").Process(target=print, args=("its own",))
    child.start()
    child.join()
  """)
  assert end_of(process) == 0
  assert log.read_text() == "None\nits own\n"


def test_a_server_that_has_ended_is_an_os_error(start, monkeypatch):
  monkeypatch.setattr(
    "multiprocessing.context.ForkServerProcess.start",
    mock.Mock(side_effect=EOFError("unexpected EOF")),
  )
  with pytest.raises(OSError, match="no memory"):
    start("print('never')")


def test_it_is_told_by_the_end_of_its_input(start):
  process, log = start("import sys; print('here', flush=True); print(len(sys.stdin.read()))")
  said(log, process, "here")
  process.stdin.close()
  assert end_of(process) == 0
  assert log.read_text().split() == ["here", "0"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals(start, number):
  process, log = start(SLEEPS)
  said(log, process, "here")
  assert process.poll() is None
  process.send_signal(number)
  assert end_of(process) == (1 if number == signal.SIGINT else -number)
  process.send_signal(number)  # nobody is there: nothing happens


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_it_gives_signs_of_life_while_it_runs(start):
  process, log = start(SLEEPS)
  said(log, process, "here")
  for _ in range(2):
    wait_for(process.heard, "a sign of life")
  process.send_signal(signal.SIGSTOP)
  wait_for(lambda: state_of(process.pid) == "T", "its stop")
  process.heard()
  assert not process.heard()
  process.send_signal(signal.SIGCONT)
  wait_for(process.heard, "a sign of life")


def test_its_command_line_names_it(start, tmp_path):
  process, log = start(SLEEPS, "--learner=2", f"--workdir={tmp_path}")
  said(log, process, "here")
  assert processes_of(tmp_path, "--learner=2") == [process.pid]
  assert processes_of(tmp_path, "--learner=3") == []
  assert processes_of(tmp_path.parent) == []


def test_an_exception_is_in_its_log(start):
  process, log = start("raise ValueError('of its own')")
  assert end_of(process) == 1
  assert "ValueError: of its own" in log.read_text()


def test_a_log_that_cannot_be_written_is_said_at_once(tmp_path):
  with pytest.raises(OSError):
    children.spawn_forked([sys.executable, "-m", "json.tool"], tmp_path / "missing" / "log")


def test_the_fork_server_outlives_what_a_service_manager_sends_to_all(start):
  """Roles that bring out their work must not end with it."""
  process, log = start("import sys; print('here', flush=True); print(sys.stdin.readline())")
  said(log, process, "here")
  for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    os.kill(server._forkserver._forkserver_pid, number)
  again, _ = start("print('again')")
  assert end_of(again) == 0, "the server is there"
  assert process.poll() is None
  process.stdin.close()
  assert end_of(process) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_who_waits_for_a_fork_server_that_stands_still_hears_ctrl_c(start):
  """Signals were held back until a process was there: of a supervisor whose server still imported,
  from a file system that did not answer, only SIGKILL was the end."""
  children.warm()
  pid, late = server._forkserver._forkserver_pid, threading.Event()
  os.kill(pid, signal.SIGSTOP)
  wait_for(lambda: state_of(pid) == "T", "its stop")

  def interrupt() -> None:
    waits = lambda: sys._current_frames()[me].f_code is server.read_signed.__code__
    wait_for(waits, "a wait for the server")
    signal.pthread_kill(me, signal.SIGINT)
    if not over.wait(PATIENCE_SECONDS):
      late.set()
      os.kill(pid, signal.SIGCONT)

  me, over = threading.get_ident(), threading.Event()
  thread = threading.Thread(target=interrupt)
  thread.start()
  try:
    with pytest.raises(KeyboardInterrupt):
      start("print('never')")
  finally:
    over.set()
    thread.join()
    os.kill(pid, signal.SIGCONT)
  assert not late.is_set()
  again, _ = start("print('again')")
  assert end_of(again) == 0, "the server goes on"


def state_of(pid: int) -> str:
  """T: stopped, Z: it has ended, and its parent does not know yet, "": it is gone, ..."""
  with contextlib.suppress(OSError):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
  return ""


@pytest.mark.skipif(sys.platform != "linux", reason="only there the kernel ends it")
def test_a_stopped_role_ends_with_the_fork_server(start):
  process, log = start(f"""
    from ddiloco.engines.role_spec import end_with_parent
    end_with_parent()  # as a role with --attached does
    {SLEEPS}
  """)
  said(log, process, "here")
  process.send_signal(signal.SIGSTOP)
  wait_for(lambda: state_of(process.pid) == "T", "its stop")
  pid = server._forkserver._forkserver_pid
  os.kill(pid, signal.SIGKILL)
  assert end_of(process) == 255
  wait_for(lambda: {state_of(process.pid), state_of(pid)} <= {"Z", ""}, "their ends")


SUPERVISOR = """
  import pathlib, sys, time
  from ddiloco.engines import children
  children.PRELOADED = ()  # quick
  process = children.spawn_forked([sys.executable, "-m", "stays"], pathlib.Path(sys.argv[1]))
  print(process.pid, flush=True)
  time.sleep(100)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only there the kernel ends it")
def test_a_stopped_role_ends_with_a_supervisor_that_is_killed(tmp_path, monkeypatch):
  """It kept the fork server, which kept it: both stayed for ever, and the run could not go on where
  a role of it lived."""
  monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
  attached = "from ddiloco.engines.role_spec import end_with_parent; end_with_parent()"
  (tmp_path / "stays.py").write_text(f"{attached}; {SLEEPS}")
  log, script = tmp_path / "log", textwrap.dedent(SUPERVISOR)
  with subprocess.Popen([sys.executable, "-c", script, log], stdout=subprocess.PIPE) as supervisor:
    pid = int(supervisor.stdout.readline())
    try:
      wait_for(lambda: "here" in log.read_text(), "its first words", supervisor, log)
      os.kill(pid, signal.SIGSTOP)
      wait_for(lambda: state_of(pid) == "T", "its stop")
      supervisor.kill()
      wait_for(lambda: state_of(pid) in ("Z", ""), "its end")
      assert supervisor.wait() == -signal.SIGKILL
    finally:
      supervisor.kill()
      with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def test_another_fork_server_takes_over(start):
  """One that was killed (out of memory) counts as the end of all it has started. Nothing said what
  had happened: the reason of each role's end was a bare status and its last line of progress."""
  process, log = start("import sys; print('here', flush=True); sys.stdin.read()")
  said(log, process, "here")
  pid = server._forkserver._forkserver_pid
  os.kill(pid, signal.SIGKILL)
  status = end_of(process)
  wait_for(lambda: state_of(pid) == "Z", "its status")
  child = children.Child("syncer-0", log.parent, [lambda *_: process])
  child.start([[]])
  assert "their fork server is killed" in child.bury(status)  # closes its input: so it really ends
  again, log = start("print('again')")
  assert end_of(again) == 0
  assert log.read_text() == "again\n"
