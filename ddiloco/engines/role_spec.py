"""Where a role runs, as which life, and how its process hears that it should end. Knows no JAX."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import random
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ddiloco.config import Config, ConfigError
from ddiloco.network.peers import FUTURE_SECONDS
from ddiloco.observe.eventlog import lines_of
from ddiloco.protocol.events import decode

PORTS = range(10_000, 32_000)  # below those the system gives to outgoing connections


@dataclasses.dataclass(frozen=True)
class RoleSpec:
  """Where a role runs and the peers it reaches: all that its process is told beside the config."""

  workdir: Path
  run_id: str
  syncers: tuple[str, ...]  # control urls of all shards, in order
  bind: str = ""  # a shard's own
  keys: Path | None = None  # folder; None: loopback only
  http: str = ""  # HOST:PORT of the probes, "": none
  term_status: int = 0  # exit status after a SIGTERM that cost nothing
  hosts: str = ""  # where the hosts of an island meet: the url of host 0; "": it has one
  host: int = 0  # which of them this is


def check_spec(config: Config, place: RoleSpec) -> None:
  """Refuses what no role could run with.

  Raises:
    ConfigError: no shards in the config, or not one url for each.
  """
  shards = config.sync.num_shards
  if not shards:
    raise ConfigError(
      "sync.num_shards = 0: roles of their own meet at a syncer shard."
      " Fix: set it to 1 or more, or use `ddiloco train --engine=threads`."
    )
  if len(place.syncers) != shards:
    raise ConfigError(
      f"--syncers={','.join(place.syncers)}: names {len(place.syncers)} shards, the config has"
      f" sync.num_shards = {shards}. Fix: give the url of every shard, in order."
    )


def free_urls(count: int, host: str = "127.0.0.1") -> list[str]:
  """Urls of this machine for so many shards, each with a port that is free now.

  Raises:
    OSError: there are not so many.
  """
  family = socket.AF_INET6 if ":" in host else socket.AF_INET
  held: list[socket.socket] = []
  urls: list[str] = []
  try:
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
      held.append(socket.socket(family))
      try:
        held[-1].bind((host, port))
      except OSError:
        continue  # it is taken
      urls.append(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
      if len(urls) == count:
        return urls
  finally:
    for each in held:
      each.close()
  raise OSError(f"found no {count} free ports between {PORTS[0]} and {PORTS[-1]}")


# --- The number of a role's life: its host's clock, and greater than those of its lives before
# Clocks step, in both directions. A number that is not greater would not be let in, or worse:
# rounds carry it, and must never come twice. What the role's former lives were is in its event log.

TAIL_BYTES = 1 << 20  # of a log: its role's newest lives
WAIT_SECONDS = 3.0  # until a second look at who seems to be there: it may have died a moment ago
HEARD_SECONDS = 2.5  # a role heard since then lives: a sign of life comes every second


class Outnumbered(Exception):
  """This life's number is too small; the role may begin anew after a while.

  Args:
    reason: in words.
    after: the number the next life needs at least, 0 if that is not said yet.
    wait_seconds: until then.
  """

  def __init__(self, reason: str, after: int, wait_seconds: float = 0.0):
    super().__init__(reason)
    self.after, self.wait_seconds = after, wait_seconds


def another_life(
  reason: str, after: int, silent_seconds: int, patience_seconds: float, waited: bool
) -> Outnumbered | None:
  """What becomes of a role that is fenced; None: it must end, a newer one lives.

  A number smaller than that of a life which is over comes from a clock that has stepped back. PURE.

  Args:
    reason: why it may not speak.
    after: the least number that would be let in if the newer life is over; 0: it is not.
    silent_seconds: since that was heard.
    patience_seconds: after which it is over.
    waited: a while was waited already, in which a live one would have been heard.
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

  A number too far ahead to be let in was never let in, and need not be exceeded: a clock that was
  wrong by more must not bind those that are right.
  """
  known = -1
  for path in (workdir / "events").glob(f"{role}.jsonl"):
    known = max(known, *(n for n in _numbers(path) if n <= now + FUTURE_SECONDS), -1)
  return known


def above(now: int, known: Iterable[int]) -> int:
  """The clock, or the first number after all that are known."""
  return max(now, *(number + 1 for number in known), 0)


def _numbers(path: Path) -> Iterable[int]:
  try:
    size = path.stat().st_size
    for line in lines_of(path, max(0, size - TAIL_BYTES), size):
      if (event := decode(line)) is not None:
        yield event.incarnation
  except OSError:
    return  # what cannot be read is no bound; others know it too


# --- How the process of a run hears that it should end, also while a compiler is at work

POLL_SECONDS = 0.2  # short, so that signals are heard


def end_with_parent() -> None:
  """Ends this process when the one that started it does, however that ends.

  Its end of our standard input closes then, also after a kill -9. On Linux the kernel sees to it as
  well, since a stopped process reads nothing.
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
  """While it lasts SIGTERM and the first Ctrl-C set `asked`, in the main thread alone.

  A second Ctrl-C raises KeyboardInterrupt there. Other threads cannot hear signals. Gives the
  numbers of those that have come, in their order.
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

  before = {number: signal.signal(number, hear) for number in (signal.SIGTERM, signal.SIGINT)}
  try:
    yield heard
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


def beside(work: Callable[[], Any], look: Callable[[], None] = lambda: None) -> Any:
  """What `work()` returns, which has a thread of its own: this one goes on hearing signals.

  Python hears none while its main thread compiles, and nothing can interrupt a compiler. `look` is
  called now and then. What it raises is raised here: the work is left behind, and ends with the
  process.
  """
  done: concurrent.futures.Future[Any] = concurrent.futures.Future()

  def run() -> None:
    try:
      done.set_result(work())
    except BaseException as error:  # raised where it is waited for
      done.set_exception(error)

  threading.Thread(target=run, name="work", daemon=True).start()
  while True:
    over = concurrent.futures.wait([done], POLL_SECONDS).done
    look()
    if over:
      return done.result(0)
