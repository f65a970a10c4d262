"""A role in a process of its own, over all its lives: start, exit, backoff, and planned faults."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from ddiloco.config import Fault, RunConfig
from ddiloco.config.chaos import INSIDE
from ddiloco.resilience import chaos

SHORTEST_LIFE_SECONDS = 1.1  # between two starts: incarnations count whole seconds
BAD_USAGE, LOST = 2, 1


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

  def wait(self) -> int:
    """The exit status, once there is one."""
    ...


Spawn = Callable[[list[str], Path], Process]  # (command, the log that its output is appended to)


def spawn(command: list[str], log: Path) -> Process:
  """A process of this machine that can notice our end: its standard input closes then.

  It starts from nothing; where many start on one machine, `nursery.spawn` is quicker.
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
  """One role. `now` is `time.monotonic()` everywhere.

  Args:
    name: its address, "learner/3".
    command: what starts it; it must end when its standard input is closed.
    workdir: its output is appended to WORKDIR/logs/NAME.log.
    run: how often and how soon it is restarted.
    faults: planned for it.
    spawn: starts it.
  """

  def __init__(
    self,
    name: str,
    command: list[str],
    workdir: Path,
    run: RunConfig,
    faults: Sequence[Fault],
    spawn: Spawn,
  ):
    self.name = name
    self.lives = 0
    self.ended = False  # never comes back ...
    self.gone = False  # ... because it gave up or was killed for good
    self.lost = ""  # what it said was lost when it ended
    self.log = workdir / "logs" / f"{name.replace('/', '-')}.log"
    self._command = command
    self._run = run
    self._faults = tuple(faults)
    self._spawn = spawn
    self._process: Process | None = None
    self._start_at = 0.0
    self._started_at = 0.0
    self._crashes = 0
    self._killed: Fault | None = None
    self.leaves_at = math.inf  # asked to end in good order
    self._holds = chaos.Holds()
    self._held = False

  @property
  def running(self) -> bool:
    return self._process is not None

  def due_to_start(self, now: float) -> bool:
    """Whether it is down and its pause is over."""
    return not self.running and not self.ended and now >= self._start_at

  def start(self, now: float) -> None:
    """A new life."""
    self.log.parent.mkdir(parents=True, exist_ok=True)
    self._process = self._spawn(self._command, self.log)
    self.lives += 1
    self._started_at = now
    self._holds, self._held = chaos.Holds(), False

  def poll(self) -> int | None:
    """The exit status if it has ended and nobody has been told yet."""
    return None if self._process is None else self._process.poll()

  def on_exit(self, status: int, now: float, ending: bool, must_stay: bool) -> str:
    """Takes note of its end; returns the reason in words, "" if it left in good order.

    Args:
      status: as `poll` returned it.
      now: the time.
      ending: the run is over: nobody is restarted.
      must_stay: leaving in good order is no good either.
    """
    self._close()
    killed, self._killed = self._killed, None
    if killed is not None:
      reason = str(chaos.Killed(killed))
      self._back_after(killed.seconds, now)
    elif ending or (status == 0 and not must_stay):
      self.ended = True
      if status == LOST:
        self.lost = self.last_words()
      return ""
    else:
      reason = f"{_status_text(status)}: {self.last_words()}"
      self._crashes += 1
      again = self._crashes <= self._run.max_restarts and status != BAD_USAGE
      pause = self._run.restart_seconds * 2 ** (self._crashes - 1)
      self._back_after(pause if again else -1, now)
    self.ended = self.ended or ending
    return reason

  def _back_after(self, seconds: float, now: float) -> None:
    self.gone = self.ended = seconds < 0
    self._start_at = max(now + seconds, self._started_at + SHORTEST_LIFE_SECONDS)

  def last_words(self) -> str:
    """The last line it printed, without the time and name that every line has."""
    lines = self.log.read_text(errors="replace").strip().splitlines()
    if not lines:
      return f"see {self.log}"
    return lines[-1].partition(f"{self.name}: ")[2] or lines[-1]

  # --- signals ------------------------------------------------------------------------------------

  def plan(self, fault: Fault) -> None:
    """One more fault."""
    self._faults = (*self._faults, fault)

  def strike(self, clock: int, seconds: float, now: float) -> Fault | None:
    """The next planned fault if it is due, performed unless it happens inside the role."""
    if self._killed is not None:
      return None  # the next one is for its next life
    fault, self._faults = chaos.strike(self._faults, clock, seconds)
    if fault is None:
      return None
    if fault.action == "kill":
      self._killed = fault
      self._send(signal.SIGKILL, for_good=fault.seconds < 0)
    elif fault.action not in INSIDE:
      self._holds.add(fault, now)
    return fault

  def hold(self, now: float) -> bool:
    """Stops or continues the process as its planned faults say; whether any of them is active."""
    held = self.running and self._holds.held(now)
    if held != self._held:
      self._held = held
      self._send(signal.SIGSTOP if held else signal.SIGCONT)
    return self.running and self._holds.active(now)

  def terminate(self) -> None:
    """Asks it to end in good order; one that is down stays so."""
    self._holds = chaos.Holds()
    if self.running:
      self._send(signal.SIGCONT)
      self._send(signal.SIGTERM)
    else:
      self.ended = True

  def kill(self) -> None:
    """Ends it, whatever it is doing."""
    if self._process is not None:
      self._send(signal.SIGKILL, for_good=True)
      self._process.wait()
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


def _status_text(status: int) -> str:
  if status < 0:
    return f"killed by {signal.Signals(-status).name}"
  return f"exit status {status}"
