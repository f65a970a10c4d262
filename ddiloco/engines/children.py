"""A role in a process of its own, over all its lives: its command, its start, its log, its signals.

No JAX here: what starts roles need not have imported it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Protocol

import setproctitle

from ddiloco import environment
from ddiloco.engines.role_spec import free_urls
from ddiloco.environment import LOST
from ddiloco.observe.guards import exited, warn

KILL_SECONDS = 30.0  # for a process that was killed to be gone: one may be stuck in its disk
WORDS_SECONDS = 5.0  # for the other hosts of an island to say what they know of a failed one
LAST_WORDS_BYTES = 1 << 16  # a log of months is large


class Closable(Protocol):
  def close(self) -> None: ...


class Process(Protocol):
  """What a child needs of its process: a part of `subprocess.Popen`, which may also be far away."""

  @property
  def stdin(self) -> Closable | None:
    """Closed when it is buried."""
    ...

  def poll(self) -> int | None:
    """The exit status, negative for a signal; None while it runs."""
    ...

  def send_signal(self, number: int) -> None:
    """Another one may be started in its place, also after a SIGKILL."""
    ...

  def kill(self) -> None:
    """SIGKILL, for good."""
    ...


Spawn = Callable[[list[str], Path], Process]  # (command, the log that its output is appended to)


def spawn(command: list[str], log: Path) -> Process:
  """A process of this machine that can notice our end: its standard input closes then.

  It starts from nothing; where many start on one machine, `spawn_forked` is quicker.
  """
  with log.open("ab") as file:
    return subprocess.Popen(
      command,
      stdin=subprocess.PIPE,
      stdout=file,
      stderr=subprocess.STDOUT,
      start_new_session=True,  # Ctrl-C is ours to hear; we tell it
    )


def processes_of(workdir: Path, *flags: str) -> list[int]:
  """Others, not zombies, whose command line names the workdir: a run and its roles (Linux).

  With `flags` only those that have all of them too, as `--learner=2`.
  """
  wanted = [f" {word} ".encode() for word in (f"--workdir={workdir}", *flags)]
  found = []
  for folder in Path("/proc").glob("[0-9]*"):
    try:
      line = b" %b " % (folder / "cmdline").read_bytes().replace(b"\0", b" ")
      dead = (folder / "stat").read_text().rpartition(") ")[2][0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
      continue  # it has just ended
    if all(word in line for word in wanted) and not dead and int(folder.name) != os.getpid():
      found.append(int(folder.name))
  return found


def _signal_name(number: int) -> str:
  try:
    return signal.Signals(number).name
  except ValueError:  # a real-time signal has no name of its own
    return f"signal {number}"


class Command:
  """The command lines of a run's roles.

  Args:
    workdir: of the run.
    syncers: urls of all shards, in order.
    keys: folder with the roles' keys; None: loopback only.
    cpu: learners use fake CPU devices. Processes that we start ourselves know it from us.
  """

  def __init__(
    self, workdir: Path, syncers: Sequence[str], keys: Path | None = None, cpu: bool = False
  ):
    self._cpu = cpu
    self._common = (
      f"--config={workdir / 'config.json'}",
      f"--workdir={workdir}",
      f"--syncers={','.join(syncers)}",
      "--attached",
      *([f"--keys={keys}"] if keys else []),
    )

  def learner(self, number: int, hosts: int = 1, hosts_url: str = "") -> list[list[str]]:
    """A line for each host of its island; several meet at `hosts_url`."""
    flags = [f"--learner={number}", *(["--cpu"] if self._cpu else [])]
    own = [(f"--hosts={hosts_url}", f"--host={k}") for k in range(hosts)] if hosts > 1 else [()]
    return [self._line("learner", *flags, *each) for each in own]

  def syncer(self, shard: int, bind: str) -> list[str]:
    return self._line("syncer", f"--shard={shard}", f"--bind={bind}")

  def _line(self, role: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "ddiloco", role, *arguments, *self._common]


class Child:
  """One role's processes, which live and die together; `protocol/supervisor.py` decides when.

  A role has one, and an island of several hosts one on each; what is said of the role is said of
  the first.

  Args:
    name: its address, "learner-3".
    workdir: their output is appended to WORKDIR/logs/NAME.log, and NAME-host-1.log, ...
    spawns: start each.
  """

  def __init__(self, name: str, workdir: Path, spawns: Sequence[Spawn]):
    self.name = name
    self._spawns = spawns
    more = (f"{name}-host-{k}" for k in range(1, len(spawns)))
    self._logs = [workdir / "logs" / f"{each}.log" for each in (name, *more)]
    self._processes: list[Process] = []
    self._apart_at: float | None = None  # when the first of several had ended
    self._unlogged = False

  @property
  def log(self) -> Path:
    """Of the first."""
    return self._logs[0]

  @property
  def running(self) -> bool:
    return bool(self._processes)

  def start(self, commands: Sequence[list[str]]) -> None:
    """A new life; each process must end when its standard input is closed.

    Raises:
      OSError: no process or no memory is left, for example.
    """
    self._apart_at = None
    try:
      for spawn_one, command, log in zip(self._spawns, commands, self._logs, strict=True):
        self._processes.append(spawn_one(command, self._where_to_log(log)))
    except OSError:
      self.kill()
      raise

  def poll(self) -> int | None:
    """The exit status if it has ended and `bury` was not called yet.

    Several have ended when all of them have, or when those that remain do not follow the first: all
    hosts of an island end by themselves when one of them is lost, and the first then logs the loss.
    """
    statuses = [each.poll() for each in self._processes]
    ended = [status for status in statuses if status is not None]
    if not ended:
      return None
    worst = min(filter(None, ended), default=0)  # a signal before the failures that it has caused
    if len(ended) == len(statuses):
      return worst
    self._apart_at = self._apart_at or time.monotonic()
    patience = WORDS_SECONDS if worst else KILL_SECONDS
    return worst or LOST if time.monotonic() - self._apart_at > patience else None

  def bury(self, status: int) -> str:
    """Its end is seen; returns the reason in words."""
    self._end(for_good=False)
    how = f"killed by {_signal_name(-status)}" if status < 0 else f"exit status {status}"
    return f"{how}: {self.last_words()}"

  def _where_to_log(self, log: Path) -> Path:
    """That log; nowhere if it cannot be written: a role is worth more than what it says."""
    try:
      log.parent.mkdir(parents=True, exist_ok=True)
      log.open("ab").close()
      return log
    except OSError as error:
      if not self._unlogged:
        warn(f"{log}: cannot be written: {error}. {self.name} runs without a log.")
      self._unlogged = True
      return Path(os.devnull)

  def last_words(self) -> str:
    """The last line it printed, without the time and name that every line has."""
    try:
      with self.log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_WORDS_BYTES))
        lines = file.read(LAST_WORDS_BYTES).decode(errors="replace").strip().splitlines()
    except OSError:
      lines = []
    if not lines:
      return f"see {self.log}"
    return lines[-1].partition(f"{self.name}: ")[2] or lines[-1]

  # --- signals ------------------------------------------------------------------------------------

  def hold(self, held: bool) -> None:
    """Stops it where it is, or lets it go on."""
    self._send(signal.SIGSTOP if held else signal.SIGCONT)

  def terminate(self) -> None:
    """Asks it to end in good order; it hears that also where it is stopped."""
    self._send(signal.SIGCONT)
    self._send(signal.SIGTERM)

  def strike(self, for_good: bool) -> None:
    """SIGKILL; `poll` tells when it has ended."""
    self._send(signal.SIGKILL, for_good)

  def kill(self) -> None:
    """Ends it for good, whatever it is doing, and waits for that."""
    self._end(for_good=True)

  def _end(self, for_good: bool) -> None:
    self._send(signal.SIGKILL, for_good)
    for each in self._processes:
      exited(each, KILL_SECONDS, f"{self.name}, which was killed,")
      if each.stdin is not None:
        each.stdin.close()
    self._processes = []

  def _send(self, number: signal.Signals, for_good: bool = False) -> None:
    for each in self._processes:
      if each.poll() is None:
        if for_good:
          each.kill()
        else:
          each.send_signal(number)


# --- Processes of this machine, forked from one that has imported everything already
# Importing JAX and what stands on it takes two seconds of a core, for every role and each of its
# lives. The fork server (Python's own, `multiprocessing.forkserver`) imports once. It touches no
# device and has no thread of ours, so it can be forked; a killed role is back without importing.
#
# A process that has been forked from it is in everything else as if its command had been started:
# it has the environment, the folder, the standard streams and the name (`ps`) that it would have
# had.

_UNHEARD = (signal.SIGINT, signal.SIGTERM)
PRELOADED = (  # by name: what is above this package is otherwise none of its business
  "ddiloco.cli",
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
  with _server_unheard():
    forkserver.ensure_running()


@contextlib.contextmanager
def _server_unheard() -> Iterator[None]:
  """A server that is started meanwhile hears no signals: it inherits the calling thread's mask.

  A service manager, or Ctrl-C in a terminal, signals all processes of a run at once. Roles then
  bring out their work; if their server ended at once they would end with it. It ends with its
  supervisor. What it forks hears them again.
  """
  resource_tracker.ensure_running()  # where it must be started it lets signals in again
  before = signal.pthread_sigmask(signal.SIG_BLOCK, _UNHEARD)
  try:
    yield
  finally:
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def spawn_forked(command: list[str], log: Path) -> Forked:
  """A process like `spawn`'s.

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
  why: Exception | None = None
  with _server_unheard(), _main_unsaid():
    for _ in range(100):
      try:
        return process.start()
      except (ConnectionError, EOFError) as error:
        why = error
        time.sleep(0.02)
  raise OSError("what forks the roles ends again and again: no memory, or no process?") from why


@contextlib.contextmanager
def _main_unsaid() -> Iterator[None]:
  """A process that is started meanwhile does not run our main program once more: Python's way to
  find the functions in it, of which no role has any, and a script may train when it is run."""
  main = sys.modules["__main__"]
  before, main.__spec__ = main.__spec__, ModuleSpec("__main__", None)
  try:
    yield
  finally:
    main.__spec__ = before


class Forked:
  """A `Process` that the server has forked."""

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
  signal.pthread_sigmask(signal.SIG_UNBLOCK, _UNHEARD)
  multiprocessing.current_process().daemon = False  # else it could start none of its own,
  multiprocessing.set_start_method(None, force=True)  # which start as they do everywhere else
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


# --- The same where Ray puts a role: what runs inside its actor

MEETING = "{meeting}"  # in a command: where the hosts of its island meet


class RoleActor:
  """Holds the process of one role on the machine where Ray put it; the role ends with the actor.

  A process of its own, and not the actor itself: it hears signals, a crash of it is its own, and it
  starts as a role does everywhere else. It sees the devices that Ray reserved for the actor.
  """

  def __init__(self) -> None:
    self._process: Process | None = None

  async def free_url(self, host: str) -> str:
    """A url on this machine, whose address is `host`; "": as Ray knows it."""
    from ray.util import get_node_ip_address

    return free_urls(1, host or get_node_ip_address())[0]

  async def run(self, command: list[str], log: str, meeting: str = "") -> int:
    """The exit status of `command`, run by this machine's Python; output is appended to `log`.

    `meeting`: a url that stands for `MEETING` in the command.
    """
    if self._process is not None and self._process.poll() is None:
      # The driver believes us dead, as after a broken connection. Two of one role would be fenced.
      self._process.kill()
      exited(self._process, KILL_SECONDS, "the role's process before")
    Path(log).parent.mkdir(parents=True, exist_ok=True)
    arguments = [word.replace(MEETING, meeting) for word in command[1:]]
    process = self._process = spawn([sys.executable, *arguments], Path(log))
    return await asyncio.to_thread(process.wait)

  async def signal(self, number: int) -> None:
    """Sends the process a signal, if it runs."""
    if self._process is not None and self._process.poll() is None:
      self._process.send_signal(number)
