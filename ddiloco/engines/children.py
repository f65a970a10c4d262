"""A role in a process of its own, over all its lives: its command, its log, its signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from ddiloco.observe.guards import exited, warn

BAD_USAGE, LOST = 2, 1
KILL_SECONDS = 30.0  # for a process that was killed to be gone: one may be stuck in its disk
LAST_WORDS_BYTES = 1 << 16  # a log of months is large


class Closable(Protocol):
  def close(self) -> None: ...


class Process(Protocol):
  """What a child needs of its process: a part of `subprocess.Popen`, which may also be far away."""

  stdin: Closable | None

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

  It starts from nothing; where many start on one machine, `forkserver.spawn` is quicker.
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

  def learner(self, number: int) -> list[str]:
    return self._line("learner", f"--learner={number}", *(["--cpu"] if self._cpu else []))

  def syncer(self, shard: int, bind: str) -> list[str]:
    return self._line("syncer", f"--shard={shard}", f"--bind={bind}")

  def _line(self, role: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "ddiloco", role, *arguments, *self._common]


class Child:
  """One role's process; when there is one is decided by `protocol/supervisor.py`.

  Args:
    name: its address, "learner-3".
    command: what starts it; it must end when its standard input is closed.
    workdir: its output is appended to WORKDIR/logs/NAME.log.
    spawn: starts it.
  """

  def __init__(self, name: str, command: list[str], workdir: Path, spawn: Spawn):
    self.name = name
    self.log = workdir / "logs" / f"{name}.log"
    self._command = command
    self._spawn = spawn
    self._process: Process | None = None
    self._unlogged = False

  @property
  def running(self) -> bool:
    return self._process is not None

  def start(self) -> None:
    """A new life.

    Raises:
      OSError: no process or no memory is left, for example.
    """
    self._process = self._spawn(self._command, self._where_to_log())

  def poll(self) -> int | None:
    """The exit status if it has ended and `bury` was not called yet."""
    return None if self._process is None else self._process.poll()

  def bury(self, status: int) -> str:
    """Its end is seen; returns the reason in words."""
    self._close()
    how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    return f"{how}: {self.last_words()}"

  def _where_to_log(self) -> Path:
    """Its log; nowhere if that cannot be written: a role is worth more than what it says."""
    try:
      self.log.parent.mkdir(parents=True, exist_ok=True)
      self.log.open("ab").close()
      return self.log
    except OSError as error:
      if not self._unlogged:
        warn(f"{self.log}: cannot be written: {error}. {self.name} runs without a log.")
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
    if self._process is not None:
      self._send(signal.SIGKILL, for_good=True)
      exited(self._process, KILL_SECONDS, f"{self.name}, which was killed,")
      self._close()

  def _send(self, number: signal.Signals, for_good: bool = False) -> None:
    if self._process is None or self._process.poll() is not None:
      return
    if for_good:
      self._process.kill()
    else:
      self._process.send_signal(number)

  def _close(self) -> None:
    if self._process is not None and self._process.stdin is not None:
      self._process.stdin.close()
    self._process = None
