"""Where a role runs, its incarnation, and how its process learns to end. Imports no JAX."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import errno
import itertools
import os
import random
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ddiloco.checks import option, require
from ddiloco.config import Config
from ddiloco.environment import INTERRUPTED
from ddiloco.network.frames import FUTURE_SECONDS
from ddiloco.observe.eventlog import lines_of
from ddiloco.protocol.events import decode

PORTS = range(10_000, 32_000)  # below the ports that the system gives to outgoing connections


@dataclasses.dataclass(frozen=True)
class RoleSpec:
  """Where a role runs and the peers it reaches: all that its process gets beside the config."""

  workdir: Path
  run_id: str = option("", "Name of the run, the same for all its roles; else workdir's.")
  syncers: tuple[str, ...] = option((), "Urls of all shards in order, tcp://HOST:PORT,...")
  bind: str = ""  # a shard's own url
  keys: Path | None = None  # folder; None: loopback only
  http: str = option("", "HOST:PORT that answers readiness and liveness probes.")
  term_status: int = option(
    0,
    "Exit status of a role that SIGTERM has ended and that lost nothing. Kubernetes takes 0 to mean"
    " that the run is over: give it 143.",
    *(0, 255),
  )
  hosts: str = ""  # where the hosts of an island meet: the url of host 0; "": it has one host
  host: int = 0  # number of this host

  def command(self, role: str, *flags: str) -> list[str]:
    """The command line of a role in a process of its own; `flags`: those of its kind alone."""
    common = [
      *(f"--config={self.workdir / 'config.json'}", f"--workdir={self.workdir}"),
      *(f"--syncers={','.join(self.syncers)}", "--attached"),
      *([f"--keys={self.keys}"] if self.keys else []),
    ]
    return [sys.executable, "-m", "ddiloco", role, *flags, *common]

  def asked_status(self, heard: Sequence[int]) -> int:
    """The exit status of a role that these signals have ended, and that lost nothing."""
    return INTERRUPTED if signal.SIGINT in heard else self.term_status


def require_shards(config: Config) -> None:
  """Refuses a config without shards for roles that are processes."""
  rule, count = "roles of their own meet at a syncer shard", config.sync.num_shards
  fix = "set it to 1 or more, or use `ddiloco train --engine=threads`"
  require(count > 0, "sync.num_shards", count, rule, fix)


def check_spec(config: Config, place: RoleSpec) -> None:
  """Refuses a config or spec that no role can run with.

  Raises:
    ConfigError: the config has no shards, or the spec has not a url of its own for each.
  """
  require_shards(config)
  given, shards = len(place.syncers), config.sync.num_shards
  rule = f"names {given} shards, the config has sync.num_shards = {shards}"
  fix = "give the url of every shard, in order"
  require(given == shards, "--syncers", ",".join(place.syncers), rule, fix)
  once = len(set(place.syncers)) == given
  require(once, "--syncers", ",".join(place.syncers), "names one url twice", fix)


def free_urls(count: int, host: str = "127.0.0.1") -> list[str]:
  """`count` urls of this machine, each with a port that is free now.

  Raises:
    OSError: there are not so many free ports, or `host` is not this machine.
  """
  family = socket.AF_INET6 if ":" in host else socket.AF_INET
  shown = f"[{host}]" if ":" in host else host
  urls: list[str] = []
  first = random.SystemRandom().randrange(len(PORTS))
  with contextlib.ExitStack() as held:
    for port in itertools.chain(PORTS[first:], PORTS[:first]):
      each = held.enter_context(socket.socket(family))
      try:
        each.bind((host, port))
      except OSError as error:
        if error.errno != errno.EADDRINUSE:
          raise
        continue
      urls.append(f"tcp://{shown}:{port}")
      if len(urls) == count:
        return urls
  raise OSError(f"found no {count} free ports between {PORTS[0]} and {PORTS[-1]}")


# --- Incarnations: the number of a role's life comes from its host's clock, and must always grow
# Clocks step, in both directions. A number that is not greater would be refused, or worse: round
# ids contain the number, and must never be used twice. A role's event log has its former numbers.

TAIL_BYTES = 1 << 20  # of a log: it has the role's newest lives
WAIT_SECONDS = 6.0  # until a second look at the other life; a shard that stands still hears late
HEARD_SECONDS = 2.5  # a role heard within this time lives: a sign of life comes every second


class Outnumbered(Exception):
  """This life's number is too small; the role may begin anew after a while.

  Args:
    reason: in words.
    after: the least number that the next life needs, 0 if that is not known yet.
    wait_seconds: until the role may begin anew.
  """

  def __init__(self, reason: str, after: int, wait_seconds: float = 0.0):
    super().__init__(reason)
    self.after, self.wait_seconds = after, wait_seconds


def another_life(
  reason: str, after: int, silent_seconds: int, patience_seconds: float, waited: bool
) -> Outnumbered | None:
  """How a fenced role may begin anew; None: it must end, since a newer life of it lives.

  If the newer life is over, this life's number is too small because the clock has stepped back.
  PURE.

  Args:
    reason: why this life is fenced.
    after: the least number that is let in once the newer life is over; 0: no number would be.
    silent_seconds: since the newer life was heard.
    patience_seconds: the silence after which the newer life is over.
    waited: this role has waited already, for so long that a living role would have been heard.
  """
  if not after or (waited and silent_seconds < min(HEARD_SECONDS, patience_seconds)):
    return None
  reason = f"{reason}; that one was heard {silent_seconds} s ago"
  if silent_seconds >= patience_seconds:
    return Outnumbered(reason, after)
  wait_seconds = patience_seconds - silent_seconds + 1.0
  return Outnumbered(reason, 0, wait_seconds if waited else min(WAIT_SECONDS, wait_seconds))


def newest(workdir: Path, now: int, role: str = "*") -> int:
  """The greatest number that a role of this run, or any, has logged; -1 if there is none.

  Numbers too far ahead of the clock are left out: they were never let in, and one wrong clock must
  not force larger numbers on later lives.
  """
  found = -1
  for path in (workdir / "events").glob(f"{role}.jsonl"):
    with contextlib.suppress(OSError):  # it is no bound then; the shards know the number too
      size = path.stat().st_size
      for _, line in lines_of(path, max(0, size - TAIL_BYTES), size):
        event = decode(line)
        if event is not None and found < event.incarnation <= now + FUTURE_SECONDS:
          found = event.incarnation
  return found


# --- How a run's process learns that it should end, also while a compiler is at work

POLL_SECONDS = 0.2  # short, so that signals are handled soon


def end_with_parent() -> None:
  """Ends this process when its parent ends, in any way.

  The parent's end of this process' standard input closes then, also after a kill -9. On Linux the
  kernel also kills this process then, since a stopped process would not read its input.
  """
  if sys.platform == "linux":
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, int(signal.SIGKILL))

  def wait() -> None:
    while os.read(0, 4096):
      continue
    os._exit(1)

  threading.Thread(target=wait, name="parent", daemon=True).start()


@contextlib.contextmanager
def terminates(asked: threading.Event) -> Iterator[list[int]]:
  """In this context SIGTERM, SIGHUP (the terminal was closed) and the first Ctrl-C set `asked`;
  works in the main thread alone.

  A second Ctrl-C raises KeyboardInterrupt there. Other threads cannot handle signals. Where SIGINT
  or SIGHUP is ignored, as in the background of a shell or by nohup, it stays so. Yields the list of
  the signals that have come, in order.
  """
  heard: list[int] = []
  if threading.current_thread() is not threading.main_thread():
    yield heard
    return

  def hear(number: int, _frame: object) -> None:
    if number == signal.SIGINT and number in heard:
      raise KeyboardInterrupt
    heard.append(number)
    asked.set()

  ignored = (n for n in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_IGN)
  heeded = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}.difference(ignored)
  before = {number: signal.signal(number, hear) for number in heeded}
  try:
    yield heard
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


def beside(work: Callable[[], Any], look: Callable[[], None] = lambda: None) -> Any:
  """Returns `work()`, which runs in a thread of its own, so that this thread can handle signals.

  Python handles no signal while its main thread compiles, and nothing can interrupt a compiler.
  `look` is called now and then. An exception of `look` is raised here: `work` then runs on in the
  background, and ends with the process.
  """
  done: concurrent.futures.Future[Any] = concurrent.futures.Future()

  def run() -> None:
    try:
      done.set_result(work())
    except BaseException as error:  # raised in the waiting thread
      done.set_exception(error)

  thread = threading.Thread(target=run, name="work", daemon=True)
  thread.start()
  while True:
    thread.join(POLL_SECONDS)  # Ctrl-C in `concurrent.futures.wait` may be an error about its locks
    over = not thread.is_alive()
    look()
    if over:
      return done.result(0)
