"""Starts processes of this machine by forking one that has imported everything already.

Importing JAX and what stands on it takes two seconds of a core, for every role and each of its
lives. The fork server (Python's own, `multiprocessing.forkserver`) imports once. It touches no
device and has no thread of ours, so it can be forked; a killed role is back without importing.

A process that has been forked from it is in everything else as if its command had been started: it
has the environment, the folder, the standard streams and the name (`ps`) that it would have had.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import runpy
import signal
import sys
import time
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import setproctitle

from ddiloco import environment

PRELOADED = (  # by name: what is above this package is otherwise none of its business
  "ddiloco.engines.forkserver_preload",
  "ddiloco.cli.roles",
  "ddiloco.engines.single_roles",
  "ddiloco.roles.learner",
  "ddiloco.training.data",
  "ddiloco.training.island",
  "ddiloco.baselines.member",
)


def warm() -> None:
  """Lets the fork server begin to import, if it does not run yet; does not wait for it."""
  environment.before_import()
  forkserver.set_forkserver_preload(list(PRELOADED))
  forkserver.ensure_running()


def spawn(command: list[str], log: Path) -> Forked:
  """A process like `children.spawn`'s.

  Args:
    command: this Python, "-m", a module and its arguments.
    log: its output is appended to it.

  Raises:
    OSError: the log cannot be written, or nothing more can be started.
  """
  warm()
  log.open("ab").close()  # what is wrong with it is said here
  context = multiprocessing.get_context("forkserver")
  stdin, ours = context.Pipe(duplex=False)
  arguments = (command, environment.whole(), Path.cwd(), log, stdin)
  process = context.Process(target=_become, args=arguments, daemon=True)
  with stdin:  # theirs
    _start(process)
  return Forked(process, ours)


def _start(process: BaseProcess) -> None:
  """Also when the server was killed a moment ago: another one is begun once it is a zombie."""
  for _ in range(100):
    try:
      return process.start()
    except (ConnectionError, EOFError):
      time.sleep(0.02)
  process.start()


class Forked:
  """What a supervisor needs of a process (`children.Process`)."""

  def __init__(self, process: BaseProcess, stdin: Connection):
    assert process.pid is not None, "it has been started"
    self.pid, self.stdin = process.pid, stdin
    self._process = process

  def poll(self) -> int | None:
    return self._process.exitcode

  def send_signal(self, number: int) -> None:
    if self.poll() is None:
      with contextlib.suppress(ProcessLookupError):  # it has ended, and its status is on the way
        os.kill(self.pid, number)

  def kill(self) -> None:
    self.send_signal(signal.SIGKILL)

  def wait(self, timeout_seconds: float | None = None) -> int | None:
    """The exit status; None if it still runs after so long."""
    self._process.join(timeout_seconds)
    return self._process.exitcode


def _become(
  command: list[str], variables: dict[str, str], folder: Path, log: Path, stdin: Connection
) -> None:
  """Runs in the forked process, until the command's end."""
  setproctitle.setproctitle(" ".join(command))  # looks for its place beside the environment
  os.setsid()  # Ctrl-C is for our parent, which tells us
  signal.signal(signal.SIGINT, signal.default_int_handler)
  signal.signal(signal.SIGTERM, signal.SIG_DFL)
  environment.take_over(variables)
  os.chdir(folder)
  _take_streams(log, stdin)
  _, _, module, *arguments = command
  sys.argv = [module, *arguments]
  runpy.run_module(module, run_name="__main__", alter_sys=True)


def _take_streams(log: Path, stdin: Connection) -> None:
  """What was handed over, and the log, become descriptors 0 to 2; they may lie there already."""
  with stdin, log.open("ab") as output:
    above = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 3) for each in (stdin, output, output)]
  for number, each in enumerate(above):
    os.dup2(each, number)
    os.close(each)
  sys.stdin = os.fdopen(0, closefd=False)  # not what the server has put in its place
