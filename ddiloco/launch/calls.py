"""Runs kubectl and gcloud: each call has a name, a limit and a line in the log."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from ddiloco.checks import ConfigError


class LaunchError(Exception):
  """The cloud did not do what was asked; the text says what, why, and what to do."""


@dataclasses.dataclass(frozen=True)
class Ran:
  """What a program left: its exit status, None if it ran past its limit, and what it wrote."""

  status: int | None
  out: str
  error: str

  @property
  def reason(self) -> str:
    """One line."""
    said = " ".join((self.error or self.out).split())
    return f"status {self.status}: {said[-500:]}"


def say(text: str) -> None:
  """A line in the log: standard error, since documents go to standard output."""
  print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def attempt(
  what: str, command: Sequence[str], limit_seconds: float, stdin: str = "", looks: bool = False
) -> Ran:
  """Runs `command`, for at most so long; `what` says in the log what it is for.

  One that only `looks`, again and again, is not in the log unless it takes too long.

  Raises:
    ConfigError: there is no such program.
  """
  if not looks:
    say(f"{what} (at most {limit_seconds:g} s): {shlex.join(command)}")
  try:
    process = subprocess.Popen(
      list(command),
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      start_new_session=True,  # gcloud has children, which end with it
    )
  except FileNotFoundError as error:
    raise ConfigError(
      f"{command[0]}: is not installed here. Fix: install it (Google Cloud's command line has both"
      " gcloud and kubectl), or use --dry_run, which needs neither."
    ) from error
  try:
    out, error_text = process.communicate(stdin, timeout=limit_seconds)
  except subprocess.TimeoutExpired:
    _kill(process)
    say(f"{what}: gave up after {limit_seconds:g} s")
    return Ran(None, "", f"took longer than {limit_seconds:g} s")
  except BaseException:  # Ctrl-C
    _kill(process)
    raise
  return Ran(process.returncode, out, error_text)


def call(
  what: str, command: Sequence[str], limit_seconds: float, stdin: str = "", looks: bool = False
) -> str:
  """As `attempt`; returns what the program wrote.

  Raises:
    LaunchError: it failed.
  """
  ran = attempt(what, command, limit_seconds, stdin, looks)
  if ran.status != 0:
    raise LaunchError(
      f"{what}: {command[0]} failed, {ran.reason}. Fix: what it says, then the same command again."
    )
  return ran.out


def _kill(process: subprocess.Popen[str]) -> None:
  with contextlib.suppress(ProcessLookupError):
    os.killpg(process.pid, signal.SIGKILL)
  process.communicate()
