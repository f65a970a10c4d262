"""Saying something never kills anything: broken pipes and full disks under what a process says."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ddiloco.config import from_dict
from ddiloco.engines import role_process
from ddiloco.engines.children import Child, spawn
from ddiloco.engines.role_spec import RoleSpec
from ddiloco.observe.guards import Guard
from tests.engines.real import tiny
from tests.engines.test_role_process import Endpoint, until
from tests.waits import PATIENCE_SECONDS, wait_for
from tests.web import ask

FULL = Path("/dev/full")


class Role:
  """The process of `tests.engines.attended`."""

  def __init__(self, folder: Path, output):
    self.folder = folder
    command = [sys.executable, "-m", "tests.engines.attended", str(folder)]
    self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output)
    self.url = wait_for(self.answers, "its url")[0]

  def answers(self) -> list[str]:
    file = self.folder / "answers"
    return file.read_text().splitlines() if file.exists() else []

  def tell(self, line: str) -> None:
    known = len(self.answers())
    self.process.stdin.write(f"{line}\n".encode())
    self.process.stdin.flush()
    wait_for(lambda: len(self.answers()) > known, line)

  def ready(self) -> int:
    return ask(self.url, "/readyz")[0]


@pytest.fixture(params=["broken pipe", "full disk"])
def role(request, tmp_path):
  """A role that nobody can hear any more."""
  if request.param == "broken pipe":
    role = Role(tmp_path, subprocess.PIPE)
    role.process.stdout.close()
  elif FULL.exists():
    with FULL.open("wb") as output:
      role = Role(tmp_path, output)
  else:
    pytest.skip("has no /dev/full")
  role.tell("speak")
  yield role
  role.process.kill()
  role.process.wait()


def test_a_role_nobody_can_hear_is_still_fenced_and_still_tells_its_readiness(role):
  assert role.ready() == 503
  role.tell("ready")
  wait_for(lambda: role.ready() == 200, "readiness")
  role.tell("speak")
  role.process.stdin.write(b"fenced\n")
  role.process.stdin.flush()
  assert role.process.wait(PATIENCE_SECONDS) == 1


def test_a_role_nobody_can_hear_still_gives_up(role):
  role.process.stdin.write(b"cut\n")
  role.process.stdin.flush()
  assert role.process.wait(PATIENCE_SECONDS) == 1


def test_a_duty_that_fails_is_said_once_and_has_its_next_turn(capsys):
  guard, turns = Guard("who looks after learner-0"), []

  def duty(turn: int) -> str:
    turns.append(turn)
    if turn < 3:
      raise OSError("no space left")
    return "done"

  assert [guard(duty, turn, instead="later") for turn in range(4)] == ["later"] * 3 + ["done"]
  assert turns == [0, 1, 2, 3]
  err = capsys.readouterr().err
  assert err.count("WARNING: who looks after learner-0: duty failed") == 1
  assert "no space left" in err and "Traceback" in err


class Broken:
  """A stream whose reader is gone."""

  def write(self, text):
    raise BrokenPipeError(32, "Broken pipe")

  flush = write


def test_an_attendant_without_streams_still_guards(monkeypatch, tmp_path):
  """Also a program that embeds a role and knows nothing of the command line's streams."""
  monkeypatch.setattr(role_process, "LOOK_SECONDS", 0.01)
  monkeypatch.setattr(role_process, "PROGRESS_SECONDS", 0.01)
  monkeypatch.setattr(role_process, "NetworkEndpoint", Endpoint)
  monkeypatch.setattr(sys, "stdout", Broken())
  monkeypatch.setattr(sys, "stderr", Broken())
  place = RoleSpec(tmp_path / "run", "run", ("tcp://127.0.0.1:7000",))
  looks = []

  def ready() -> str:
    looks.append(1)
    raise RuntimeError("the role's state changed while it was read")

  with role_process.RoleRunner(
    "learner-0", from_dict({"sync": {"num_shards": 1}}), place
  ) as runner:
    runner.ready = ready
    endpoint = runner.connect()
    wait_for(lambda: len(looks) > 5, "looks")
    endpoint.endpoint.fenced = "a newer incarnation of learner-0 is here"
    assert runner.run(until(runner)) == role_process.LOST


# --- supervisors ----------------------------------------------------------------------------------


def test_a_child_starts_also_where_nothing_can_be_logged(tmp_path, capsys):
  """A file where the folder of logs should be: even root cannot write there."""
  (tmp_path / "logs").write_text("in the way")
  command = [sys.executable, "-S", "-c", "raise SystemExit(3)"]
  child = Child("learner-3", tmp_path, [spawn])
  child.start([command])
  status = wait_for(lambda: child.poll(), "its end")
  assert child.bury(status) == f"exit status 3: see {child.log}" and not child.running
  child.start([command])
  child.kill()
  assert capsys.readouterr().err.count("cannot be written") == 2, "said at each start"


def test_a_child_that_a_signal_without_a_name_has_ended_can_be_buried(tmp_path):
  child, number = Child("learner-3", tmp_path, [spawn]), signal.SIGRTMIN + 1
  child.start([[sys.executable, "-S", "-c", f"import os; os.kill(os.getpid(), {number})"]])
  status = wait_for(lambda: child.poll(), "its end")
  assert child.bury(status) == f"killed by signal {number}: see {child.log}" and not child.running


def test_last_words_of_a_process_that_xla_aborts_are_no_frame_of_its_stack(tmp_path):
  """ "killed by SIGABRT: @ 0x7f812b2a71f5 (unknown)" was all that was said."""
  child = Child("learner-3", tmp_path, [spawn])
  child.log.parent.mkdir()
  fatal = "F1201 03:32:44.396224   13396 client.h:80] Terminating process: out of memory."
  of_the_life_before = "F1130 03:32:44.396224   13396 client.h:80] Terminating process: no cable."
  stack = "*** Check failure stack trace: ***\n    @     0x7f811b14  f()\n    @     0x7f812b2a  g()"
  child.log.write_text(f"{of_the_life_before}\n[0:01] learner-3: goes on\n{fatal}\n1\n\n{stack}\n")
  assert child.last_words() == fatal
  child.log.write_text(f"{fatal}\n{stack}\n[0:09] learner-3: goes on\n")
  assert child.last_words() == "goes on"


def test_last_words_of_a_log_of_months_are_its_end(tmp_path):
  child = Child("learner-3", tmp_path, [spawn])
  child.log.parent.mkdir()
  with child.log.open("wb") as file:
    file.truncate(1 << 40)  # a sparse file of a terabyte
    file.seek(0, 2)
    file.write(b"\n[0:01] learner-3: crashed: no cable\n")
  assert child.last_words() == "crashed: no cable"


@pytest.mark.slow
@pytest.mark.skipif(not FULL.exists(), reason="has no /dev/full")
@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_a_whole_run_that_nobody_can_hear_finishes(tmp_path, engine):
  """Its pipe is broken, and nothing of its learners' logs reaches the disk."""
  (tmp_path / "config.json").write_text(tiny(40).to_json())
  workdir = tmp_path / "run"
  (workdir / "logs").mkdir(parents=True)
  for m in (0, 1):
    (workdir / "logs" / f"learner-{m}.log").symlink_to(FULL)
  where = f"--config={tmp_path / 'config.json'}", f"--workdir={workdir}"
  command = [sys.executable, "-m", "ddiloco", "train", f"--engine={engine}", "--cpu", *where]
  pipe, both = subprocess.PIPE, subprocess.STDOUT
  run = subprocess.Popen(command, stdout=pipe, stderr=both)
  run.stdout.close()  # the other end of the pipe
  try:
    assert run.wait() == 0
  finally:
    run.kill()
  assert json.loads((workdir / "outcome.json").read_text())["reason"] == "finished"
