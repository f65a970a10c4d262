"""Programs that are run: their limit, their line in the log, and what they leave."""

import sys
import time

import pytest

from ddiloco.config import ConfigError
from ddiloco.launch.calls import LaunchError, attempt, call


def python(text: str) -> list[str]:
  return [sys.executable, "-S", "-c", text]


def test_a_call_has_a_name_a_limit_and_a_line(capsys):
  command = python("import sys; print(sys.stdin.read().upper())")
  assert call("what it is for", command, 30, "hello") == "HELLO\n"
  assert "] what it is for (at most 30 s): " in capsys.readouterr().err


def test_one_that_takes_too_long_is_ended_with_its_children(tmp_path, capsys):
  alive = tmp_path / "alive"
  child = f"import time, pathlib; time.sleep(1.5); pathlib.Path({str(alive)!r}).touch()"
  text = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {child!r}])"
  began = time.monotonic()
  ran = attempt("too slow", python(text), 0.5)
  assert ran.status is None and "longer than 0.5 s" in ran.error
  assert time.monotonic() - began < 1.4
  assert "too slow: gave up after 0.5 s" in capsys.readouterr().err
  time.sleep(1.5)  # nothing is there to wait for: that it does not happen is the test
  assert not alive.exists()


def test_one_that_fails_says_why():
  with pytest.raises(LaunchError, match=r"it: .* failed, status 1: no quota\. Fix: "):
    call("it", python("raise SystemExit('no quota')"), 30)


def test_a_program_that_is_not_there_is_named():
  with pytest.raises(ConfigError, match=r"kubectl-none: is not installed here\. Fix: .*--dry_run"):
    attempt("it", ["kubectl-none"], 30)
