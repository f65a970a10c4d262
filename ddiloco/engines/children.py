"""A role in a process of its own, over all its lives: its command, its start, its log, its signals.

Also the accelerators that these processes share out among them. This module imports no JAX: a
process that starts roles needs none.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import functools
import json
import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

import setproctitle

from ddiloco import environment
from ddiloco.checks import require
from ddiloco.engines.role_spec import free_urls
from ddiloco.environment import BAD_USAGE, LOST
from ddiloco.observe.guards import exited, warn

KILL_SECONDS = 30.0  # for a killed process to be gone: it may be stuck in its disk
SIGN_SECONDS = 0.5  # between two signs of life of a forked process
WORDS_SECONDS = 5.0  # for the other hosts of an island to log what they know of a failed host
FATAL, STACK = re.compile(r"F\d{4} "), "    @ "  # how lines of XLA's log begin
SERVER_ENDED = 255  # of each forked process, says multiprocessing once their server was killed
LAST_WORDS_BYTES = 1 << 16  # only the end of a log is read: a log of months is large


class Process(Protocol):
  """What a `Child` needs of its process: a part of `subprocess.Popen`; it may be far away."""

  @property
  def stdin(self) -> Any:
    """What is closed once the process has ended; None: nothing."""
    ...

  def poll(self) -> int | None:
    """The exit status, negative for a signal; None while it runs."""
    ...

  def heard(self) -> bool:
    """Whether it has given a sign of life since the last call; it need not give any."""
    return False

  def send_signal(self, number: int) -> None:
    """Sends a signal; another process may be started in its place, also after a SIGKILL."""
    ...


Spawn = Callable[[list[str], Path], Process]  # (command, log to which its output is appended)


def spawn(command: list[str], log: Path) -> subprocess.Popen[bytes]:
  """A process of this machine; its standard input closes when this process ends.

  It starts from the beginning; where many start on one machine, `spawn_forked` is quicker.
  """
  with log.open("ab") as file:
    return subprocess.Popen(
      command,
      stdin=subprocess.PIPE,
      stdout=file,
      stderr=subprocess.STDOUT,
      start_new_session=True,  # only this process gets Ctrl-C, and then tells its children
    )


def _how(status: int) -> str:
  """How a process has ended, in words."""
  if status == SERVER_ENDED:
    return f"exit status {status}, as of all roles when their fork server is killed (no memory?)"
  if status >= 0:
    return f"exit status {status}"
  try:
    return f"killed by {signal.Signals(-status).name}"
  except ValueError:  # a real-time signal has no name of its own
    return f"killed by signal {-status}"


class Child:
  """One role's processes, which start and end together; `protocol/supervisor.py` decides when.

  A role has one process; an island of several hosts has one on each host. The log of a role is that
  of its first process.

  Args:
    name: the role's address, "learner-3".
    workdir: output is appended to WORKDIR/logs/NAME.log, and NAME-host-1.log, ...
    spawns: for each process, the function that starts it.
  """

  def __init__(self, name: str, workdir: Path, spawns: Sequence[Spawn]):
    self.name = name
    self._spawns = spawns
    more = (f"{name}-host-{k}" for k in range(1, len(spawns)))
    self._logs = [workdir / "logs" / f"{each}.log" for each in (name, *more)]
    self.log = self._logs[0]  # of the first process
    self._processes: list[Process] = []
    self._apart_at: float | None = None  # when the first of several processes was seen to end

  @property
  def running(self) -> bool:
    return bool(self._processes)

  def start(self, commands: Sequence[list[str]]) -> None:
    """Starts a new life; each process must end when its standard input is closed.

    Raises:
      OSError: no process or no memory is left, for example. None of them runs then.
    """
    self._apart_at = None
    try:
      for spawn_one, command, log in zip(self._spawns, commands, self._logs, strict=True):
        self._processes.append(spawn_one(command, self._where_to_log(log)))
    except BaseException:
      self.kill()
      raise

  def poll(self) -> int | None:
    """The exit status if the role has ended and `bury` was not called yet.

    Several processes have ended when all of them have, or when the rest do not follow the first in
    time: all hosts of an island end by themselves when one is lost, and host 0 then logs the loss.
    """
    ended = [each for each in (process.poll() for process in self._processes) if each is not None]
    if not ended:
      return None
    # A signal, or wrong usage, counts before the failures that it caused on the other hosts.
    worst = min(filter(None, ended), key=lambda each: (each > 0, each != BAD_USAGE), default=0)
    if len(ended) == len(self._processes):
      return worst
    self._apart_at = self._apart_at or time.monotonic()
    patience = WORDS_SECONDS if worst else KILL_SECONDS
    return worst or LOST if time.monotonic() - self._apart_at > patience else None

  def bury(self, status: int) -> str:
    """Clears away an ended life; returns the reason of its end in words: those of the first process
    that found a failure and ended by itself. Host 0 did not if it was killed, or hung."""
    statuses = [each.poll() or 0 for each in self._processes]
    found = (number for number, each in enumerate(statuses) if each > 0)
    speaker = min(found, key=lambda number: statuses[number] != BAD_USAGE, default=0)
    self.kill()
    return f"{_how(status)}: {self.last_words(speaker)}"

  def heard(self) -> bool:
    """Whether its first process was alive since the last call: host 0 finds others that hang."""
    return any(each.heard() for each in self._processes[:1])

  def _where_to_log(self, log: Path) -> Path:
    """That log; /dev/null if it cannot be written: the role is worth more than its log."""
    try:
      log.parent.mkdir(parents=True, exist_ok=True)
      log.open("ab").close()
    except OSError as error:
      warn(f"{log}: cannot be written: {error}. {self.name} runs without a log.")
      return Path(os.devnull)
    return log

  def last_words(self, number: int = 0) -> str:
    """The last line of a process' log, without the time and name that every line has; of one that
    XLA has aborted its fatal line, which a stack of C++ follows."""
    log, text = self._logs[number], ""
    with contextlib.suppress(OSError), log.open("rb") as file:
      file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_WORDS_BYTES))
      text = file.read(LAST_WORDS_BYTES).decode(errors="replace").strip()
    *before, last = text.splitlines() or [f"see {log}"]
    if last.startswith(STACK):
      last = next(filter(FATAL.match, reversed(before)), last)
    return last.partition(f"{self.name}: ")[2] or last

  # --- signals ------------------------------------------------------------------------------------

  def hold(self, held: bool) -> None:
    """Stops the processes where they are, or lets them go on."""
    self._send(signal.SIGSTOP if held else signal.SIGCONT)

  def terminate(self) -> None:
    """Asks the role to end in good order, also if it is stopped."""
    self._send(signal.SIGCONT)
    self._send(signal.SIGTERM)

  def strike(self) -> None:
    """Sends SIGKILL; `poll` tells when the role has ended."""
    self._send(signal.SIGKILL)

  def kill(self) -> None:
    """Kills the role, and waits until it has ended."""
    self._send(signal.SIGKILL)
    for each in self._processes:
      exited(each.poll, KILL_SECONDS, f"{self.name}, which was killed,")
      if each.stdin is not None:
        each.stdin.close()
    self._processes = []

  def _send(self, number: signal.Signals) -> None:
    for each in self._processes:
      if each.poll() is None:
        each.send_signal(number)


# --- Processes of this machine, forked from a server that has imported everything already
# Importing JAX and the modules that use it takes two seconds of a core, for every role and each of
# its lives. The fork server (Python's own, `multiprocessing.forkserver`) imports once. The server
# touches no device and has no thread of this package, so it can be forked; a killed role is back
# without importing.
#
# A forked process counts on in memory that it shares with its supervisor, until it hangs as a
# whole: stopped, or in C code that does not give back Python's lock.
#
# In all else a forked process is as if its command had been started: it has the same environment,
# working directory, standard streams and name (`ps`).

_UNHEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PRELOADED = (  # by name: this package does not depend on those above it
  "ddiloco.cli",
  "ddiloco.engines.session",
  "ddiloco.engines.single_roles",
  "ddiloco.training.hosts",
  "ddiloco.baselines.member",
)


def warm() -> None:
  """Starts the fork server, if it does not run yet; does not wait for its imports."""
  environment.before_import()
  forkserver.set_forkserver_preload(list(PRELOADED))
  with _server_unheard():
    forkserver.ensure_running()


@contextlib.contextmanager
def _server_unheard() -> Iterator[None]:
  """A fork server started in this context gets no signals: it inherits the calling thread's mask.

  A service manager, or Ctrl-C in a terminal, signals all processes of a run at once. Roles then
  save their work; if the server ended at once, they would end with it. The server ends with its
  supervisor. The processes that it forks get signals again.
  """
  resource_tracker.ensure_running()  # before the mask: its own start unblocks signals
  before = signal.pthread_sigmask(signal.SIG_BLOCK, _UNHEARD)
  try:
    yield
  finally:
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def spawn_forked(command: list[str], log: Path) -> Forked:
  """A process like that of `spawn`, forked from the server.

  Args:
    command: this Python, "-m", a module and its arguments.
    log: the process' output is appended to this file.

  Raises:
    OSError: the log cannot be written, or no process can be started.
  """
  warm()
  log.open("ab").close()  # raises here if the log cannot be written
  context = multiprocessing.get_context("forkserver")
  (stdin, ours), signs = context.Pipe(duplex=False), context.RawValue("L")
  arguments = (command, environment.whole(), Path.cwd(), log, stdin, signs)
  process = context.Process(target=_become, args=arguments, daemon=True)
  try:
    with stdin, _main_unsaid():  # the child's end of the pipe is not needed here
      process.start()
  except (ConnectionError, EOFError) as error:
    raise OSError(f"what forks the roles has ended ({error}): no memory, or no process?") from error
  return Forked(process, ours, signs)


@contextlib.contextmanager
def _main_unsaid() -> Iterator[None]:
  """In this context Python does not run the main program again in a new process, as it would to
  find that program's functions. No role needs these, and a user's script may train when it runs."""
  main = sys.modules["__main__"]
  before, main.__spec__ = main.__spec__, ModuleSpec("__main__", None)
  try:
    yield
  finally:
    main.__spec__ = before


class Forked:
  """A `Process` forked by the server."""

  def __init__(self, process: BaseProcess, stdin: Connection, signs: Any):
    assert process.pid is not None, "it has been started"
    self.pid, self.stdin = process.pid, stdin
    self._process, self._signs, self._heard = process, signs, 0

  def poll(self) -> int | None:
    return self._process.exitcode

  def heard(self) -> bool:
    before, self._heard = self._heard, self._signs.value
    return self._heard != before

  def send_signal(self, number: int) -> None:
    if self.poll() is None:
      with contextlib.suppress(ProcessLookupError):  # it has ended; its status comes in a moment
        os.kill(self.pid, number)


def _become(
  command: list[str],
  variables: dict[str, str],
  folder: Path,
  log: Path,
  stdin: Connection,
  signs: Any,
) -> None:
  """Runs the command in the forked process, until its end."""
  setproctitle.setproctitle(" ".join(command))  # first: it finds argv beside the old environment
  # The server ends, and the kernel its roles, once no process has this end of its pipe: only the
  # supervisor may have it. A role that is stopped would keep the server and itself for ever.
  os.close(forkserver._forkserver._forkserver_alive_fd)
  os.setsid()  # Ctrl-C goes to the parent, which tells this process
  signal.signal(signal.SIGINT, signal.default_int_handler)
  signal.signal(signal.SIGTERM, signal.SIG_DFL)
  signal.pthread_sigmask(signal.SIG_UNBLOCK, _UNHEARD)
  multiprocessing.current_process().daemon = False  # else it could start no processes of its own,
  multiprocessing.set_start_method(None, force=True)  # which start by Python's default method
  environment.take_over(variables)
  os.chdir(folder)
  _take_streams(log, stdin)
  threading.Thread(target=_give_signs, args=(signs,), name="alive", daemon=True).start()
  _, _, module, *arguments = command
  sys.argv = [module, *arguments]
  runpy.run_module(module, run_name="__main__", alter_sys=True)


def _give_signs(signs: Any) -> None:
  while True:
    signs.value += 1
    time.sleep(SIGN_SECONDS)


def _take_streams(log: Path, stdin: Connection) -> None:
  """`stdin` and the log become descriptors 0 to 2; they may have such numbers already."""
  with stdin, log.open("ab") as output:
    above = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 3) for each in (stdin, output, output)]
  for number, each in enumerate(above):
    os.dup2(each, number)
    os.close(each)
  sys.stdin = os.fdopen(0, closefd=False)  # replaces the one that the server has set


# --- The accelerators of this machine, which its supervisor divides and does not touch


@dataclasses.dataclass(frozen=True)
class Accelerator:
  """A device that JAX finds on this machine: its platform, and the number that selects it."""

  platform: str  # gpu, tpu, ...
  number: int


_LOOK = """
import json, jax
print(json.dumps([(each.platform, each.local_hardware_id) for each in jax.devices()]))
"""


def accelerators() -> tuple[Accelerator, ...]:
  """The accelerators that JAX finds here, in its order; () where it takes the CPU.

  Raises:
    ConfigError: JAX cannot open them.
  """
  return () if environment.takes_the_cpu() else _found()


@functools.cache  # this process may use some of them itself, and another could not open these then
def _found() -> tuple[Accelerator, ...]:
  """Asks JAX in a process that holds the devices for a moment only."""
  variables = environment.whole() | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
  look = [sys.executable, "-c", _LOOK]
  done = subprocess.run(look, env=variables, capture_output=True, text=True)
  platforms, words = variables.get("JAX_PLATFORMS", ""), done.stderr.strip().splitlines()
  devices = [] if done.returncode else json.loads(done.stdout.splitlines()[-1])
  found = tuple(Accelerator(*each) for each in devices if each[0] != "cpu")
  rule = f"JAX finds no such devices here ({words[-1] if words else 'only the CPU'})"
  good = found or (devices and not platforms)
  require(bool(good), "JAX_PLATFORMS", platforms, rule, "repair the driver, or add --cpu")
  return found


# --- The process of a role on Ray: the actor that holds it

MEETING = "{meeting}"  # in a command: stands for the url where the hosts of an island meet


class RoleActor:
  """Holds the process of one role on the machine where Ray put it; the role ends with the actor.

  The role has a process of its own, apart from the actor: it gets signals, its crash does not end
  the actor, and it starts as a role does everywhere else. It sees the devices that Ray reserved for
  the actor.
  """

  def __init__(self) -> None:
    self._process: subprocess.Popen[bytes] | None = None

  async def free_url(self, host: str) -> str:
    """A free url on this machine, whose address is `host`; "": the address that Ray knows."""
    from ray.util import get_node_ip_address

    return free_urls(1, host or get_node_ip_address())[0]

  async def run(self, command: list[str], log: str, meeting: str = "") -> int:
    """The exit status of `command`, run by this machine's Python; output is appended to `log`.

    `meeting`: a url that stands for `MEETING` in the command.
    """
    if self._process is not None and self._process.poll() is None:
      # The driver takes the process for dead, as after a broken connection. Of two processes of one
      # role the shards would fence one.
      self._process.kill()
      exited(self._process.poll, KILL_SECONDS, "the role's process before")
    Path(log).parent.mkdir(parents=True, exist_ok=True)
    arguments = [word.replace(MEETING, meeting) for word in command[1:]]
    process = self._process = spawn([sys.executable, *arguments], Path(log))
    return await asyncio.to_thread(process.wait)

  async def signal(self, number: int) -> None:
    """Sends the process a signal, if it runs."""
    if self._process is not None and self._process.poll() is None:
      self._process.send_signal(number)
