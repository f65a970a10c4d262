"""Programs that are run: their limit, their line in the log, and what they leave."""

import os
import subprocess
import sys

import pytest

from ddiloco.config import ConfigError
from ddiloco.launch.cloud import LaunchError, attempt, call
from tests.waits import wait_for


def python(text: str) -> list[str]:
  return [sys.executable, "-S", "-c", text]


def test_a_call_has_a_name_a_limit_and_a_line(capsys):
  command = python("import sys; print(sys.stdin.read().upper())")
  assert call("what it is for", command, 30, "hello") == "HELLO\n"
  assert "] what it is for (at most 30 s): " in capsys.readouterr().err


def test_a_limit_that_is_longer_than_any_wait_is_a_week(capsys):
  assert call("it", python("print(1)"), 1e12) == "1\n"
  assert "(at most 604800 s)" in capsys.readouterr().err


def test_one_that_takes_too_long_is_ended_with_its_children(tmp_path, capsys, monkeypatch):
  child, communicate = tmp_path / "child", subprocess.Popen.communicate

  def late(process, text=None, timeout=None):
    """It has a child before it is too late."""
    if timeout:
      wait_for(lambda: child.exists() and child.read_text(), "its child", process)
      timeout = 0.0
    return communicate(process, text, timeout)

  monkeypatch.setattr(subprocess.Popen, "communicate", late)
  sleep = f"import os, pathlib, time; pathlib.Path({str(child)!r}).write_text(str(os.getpid()));"
  sleep += "time.sleep(300)"
  text = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {sleep!r}])"
  ran = attempt("too slow", python(text), 3)
  assert ran.status is None and "longer than 3 s" in ran.error
  assert "too slow: gave up after 3 s" in capsys.readouterr().err
  with pytest.raises(ProcessLookupError):
    wait_for(lambda: os.kill(int(child.read_text()), 0), "its end")


def test_bytes_that_are_no_text_are_read_all_the_same():
  assert call("it", python("import os; os.write(1, b'gr\\xfc\\xdfe')"), 30) == "gr\ufffd\ufffde"


def test_one_that_fails_says_why():
  with pytest.raises(LaunchError, match=r"it: .* failed, status 1: no quota\. Fix: "):
    call("it", python("raise SystemExit('no quota')"), 30)


def test_a_program_that_is_not_there_is_named():
  with pytest.raises(
    ConfigError, match=r"'kubectl-none': is not installed here\. Fix: .*--dry_run"
  ):
    attempt("it", ["kubectl-none"], 30)
