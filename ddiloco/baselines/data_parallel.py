"""Synchronous data-parallel on one machine, a process for each island, and what a failure does.

Inelastic: a failure ends the world for all islands. They wait until the one that died is back, and
all go on from the last checkpoint. Elastic: the others go on at once as a smaller world with the
state they have; an island that is back is taken in by ending that world for a larger one.

Both are given whatever machines of their own would give them and shared cores would not. A death is
noticed at once; survivors do not import again (`member.py`); the programs for all sizes of worlds
are compiled before the run begins; exchanging gradients takes no time beyond the step's pace.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from ddiloco.baselines import orders
from ddiloco.baselines.member import PROGRAMS, initial_state, program
from ddiloco.baselines.orders import END, READY, Lines, Order, line
from ddiloco.chaos import faults
from ddiloco.config import Config, ConfigError
from ddiloco.engines import forkserver
from ddiloco.observe.eventlog import Follower, Recorder
from ddiloco.observe.guards import exited
from ddiloco.protocol import events, supervisor
from ddiloco.protocol.supervisor import Event, Exited, Lost, Start, Strike, Tick, Working

# --- One island of data-parallel as the supervisor sees it: its process, over all its lives

KILL_SECONDS = 30.0  # for a process that was killed, or is about to end, to be gone


class IslandProcess:
  """Starts, ends and hears its process; when it starts is for `protocol/supervisor.py` to say.

  Attributes:
    ready: it has imported what it needs and waits for orders.
    order: the number of the order that its child is at, -1: none.

  Args:
    number: of the learner.
    workdir: its output is appended to WORKDIR/logs/learner-NUMBER.log.
  """

  def __init__(self, number: int, workdir: Path):
    self.number = number
    self.name = f"learner-{number}"
    self.ready = False
    self.order = -1
    self._log = workdir / "logs" / f"learner-{number}.log"
    self._command = [
      *(sys.executable, "-m", "ddiloco.baselines.member"),
      *(f"--workdir={workdir}", f"--learner={number}"),
    ]
    self._process: forkserver.Forked | None = None
    self._lines = Lines()

  def start(self) -> None:
    """A new life, in a process group of its own: a kill takes its child as well."""
    self._log.parent.mkdir(parents=True, exist_ok=True)
    self._process = forkserver.spawn(self._command, self._log, answers=True)
    os.set_blocking(self._stream("stdout").fileno(), False)

  def kill(self) -> None:
    """SIGKILL for the whole island."""
    if self._process is None:
      return
    with contextlib.suppress(ProcessLookupError):  # it has ended by itself
      os.killpg(self._process.pid, signal.SIGKILL)
    self._process.kill()  # too young to have a group
    self.bury()

  def bury(self) -> int:
    """Its process has ended, or will in a moment; returns the exit status."""
    assert self._process is not None
    status = exited(self._process, KILL_SECONDS, "an island's process")
    self._stream("stdin").close()
    self._stream("stdout").close()
    self._process, self._lines = None, Lines()
    self.ready, self.order = False, -1
    return -signal.SIGKILL if status is None else status

  def died(self) -> bool:
    """Whether its process has ended, which has not been handled yet."""
    return self._process is not None and self._process.poll() is not None

  def tell(self, order: Order | None) -> None:
    """A new order, None: only end the one before. One that dies at this moment hears nothing."""
    message = END if order is None else vars(order)
    try:
      os.write(self._stream("stdin").fileno(), line(message))
    except BrokenPipeError:
      return  # `died` will say so
    if order is not None:
      self.order = order.number

  def hear(self) -> bool:
    """Takes in what it has said; whether the child of its order has ended meanwhile."""
    try:
      data = b"" if self._process is None else os.read(self._stream("stdout").fileno(), 4096)
    except BlockingIOError:
      data = b""
    ended = False
    for message in self._lines.take(data):
      if message == READY:
        self.ready = True
      elif message == self.order:
        self.order, ended = -1, True
    return ended

  def last_words(self) -> str:
    """The end of its log, for errors."""
    return self._log.read_text(errors="replace")[-2000:] if self._log.exists() else ""

  def _stream(self, name: str) -> Connection:
    stream = getattr(self._process, name)
    assert stream is not None
    return stream


TURN_SECONDS = 0.01
FOLLOW_SECONDS = 0.1
HANG_SECONDS = 60.0  # a world that makes no step for so long is ended
START_SECONDS = 600.0  # for imports and compilation of everything, before the run begins
MAX_FAILURES = 10  # worlds in a row that end by themselves without a step


class DataParallel:
  """One run.

  Args:
    config: the run's; planned kills of learners by time are performed.
    workdir: events go to `workdir/events`, what the processes print to `workdir/logs`.
    elastic: go on with the islands that are left.

  Raises:
    ConfigError: data-parallel cannot have that.
  """

  def __init__(self, config: Config, workdir: Path, elastic: bool):
    check(config)
    self._config, self._workdir, self._elastic = config, workdir, elastic
    self._everybody = range(config.islands.num_learners)
    self._islands = [IslandProcess(m, workdir) for m in self._everybody]
    self._state = supervisor.init(
      config.run,
      [island.name for island in self._islands],
      config.chaos.faults,
      quorum=1 if elastic else len(self._islands),
    )
    self._world: tuple[int, ...] = ()  # islands that train now
    self._out: set[int] = set()  # islands that are alive and wait for another world
    self._orders = 0
    self._failures = 0
    self._global_step = 0
    self._moved_at = 0.0  # when this world began, or made its last step
    self._training_since: float | None = None  # unix seconds

  def run(self, over: Callable[[int, float], bool]) -> str:
    """Trains until `over(steps done, seconds since the first step)`; returns "finished", or
    "failed" when too few islands are left for good.

    Raises:
      RuntimeError: worlds fail again and again, or nothing starts.
    """
    shutil.rmtree(self._workdir / "states", ignore_errors=True)
    shutil.rmtree(self._workdir / "events", ignore_errors=True)
    self._workdir.mkdir(parents=True, exist_ok=True)
    (self._workdir / "config.json").write_text(self._config.to_json() + "\n")
    orders.save(
      orders.folder(self._workdir, orders.CHECKPOINT), 0, initial_state(self._config), durable=True
    )
    self._started = time.time()
    self._follower = Follower(self._workdir)
    with Recorder(self._workdir, "engine", 0, self._started, time.time) as self._recorder:
      self._recorder.record(
        events.RunStarted(
          name=self._workdir.name,
          num_learners=len(self._islands),
          num_shards=0,
          num_fragments=0,
          total_tokens=self._config.run.total_tokens,
        )
      )
      try:
        self._prepare()
        reason = self._supervise(over)
      finally:
        for island in self._islands:
          island.kill()
      self._recorder.record(events.RunFinished(reason=reason))
    return reason

  # --- before it begins ---------------------------------------------------------------------------

  def _prepare(self) -> None:
    """All islands have imported, and every size of world that there may be has its program."""
    self._feed(Tick(time.monotonic()))  # starts all
    self._wait("imports", lambda: all(island.ready for island in self._islands))
    sizes = range(1, len(self._islands) + 1) if self._elastic else [len(self._islands)]
    for size in sizes:
      if not program(self._workdir / PROGRAMS, self._config, size).exists():
        self._tell(range(size), train=False)
        self._wait("compilation", lambda: all(island.order < 0 for island in self._islands))

  def _wait(self, what: str, done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not done():
      for island in self._islands:
        island.hear()
        if island.died() or time.monotonic() > deadline:
          raise RuntimeError(f"{island.name}: {what} failed; its log ends:\n{island.last_words()}")
      time.sleep(TURN_SECONDS)

  # --- while it runs ------------------------------------------------------------------------------

  def _supervise(self, over: Callable[[int, float], bool]) -> str:
    follow_at = 0.0
    while True:
      now = time.monotonic()
      if now >= follow_at:
        follow_at = now + FOLLOW_SECONDS
        self._follow()
        if over(self._global_step, self._seconds()):
          return "finished"
      self._feed(Tick(now, self._global_step, self._seconds()))
      for island in self._islands:
        if island.died():
          self._feed(Exited(island.name, now, f"exit status {island.bury()}"))
        elif island.hear() and island.number in self._world:
          self._failed(f"the world failed at {island.name}")
      if self._state.hopeless:
        return "failed"
      self._decide(now)
      time.sleep(TURN_SECONDS)

  def _feed(self, event: Event) -> None:
    """Tells the supervisor, and performs what it says."""
    self._state, actions = supervisor.supervise(self._state, event)
    for action in actions:
      match action:
        case Start(name, life):
          if life:
            self._recorder.record(events.Restart(target=name))
          self._island(name).start()
        case Strike(fault):
          self._recorder.record(faults.struck(fault, faults.detail(fault, self._global_step)))
          self._island(fault.role).kill()
          self._feed(Exited(fault.role, time.monotonic()))
        case Lost(name, reason):
          self._lost(self._island(name), reason)

  def _island(self, name: str) -> IslandProcess:
    return next(island for island in self._islands if island.name == name)

  def _lost(self, island: IslandProcess, reason: str) -> None:
    """An island is dead, with what it had in its memory."""
    orders.forget(orders.folder(self._workdir, f"learner-{island.number}"))
    self._out.discard(island.number)
    in_world, self._world = self._world, tuple(m for m in self._world if m != island.number)
    self._recorder.record(events.Exit(target=island.name, reason=reason))
    if in_world != self._world:
      self._dissolve(f"{island.name} is gone")

  def _decide(self, now: float) -> None:
    """Ends the world if there is a better one, and begins one when there is none."""
    ready = [island.number for island in self._islands if island.ready]
    if self._world and now - self._moved_at > HANG_SECONDS:
      self._failed("the world hangs")
    if self._world and set(ready) > set(self._world):
      self._dissolve("an island is back")
    enough = len(ready) if self._elastic and self._global_step else len(self._islands)
    idle = all(island.order < 0 for island in self._islands)
    if not self._world and idle and 0 < enough <= len(ready):
      self._begin(ready, now)

  def _begin(self, members: list[int], now: float) -> None:
    for m in sorted(self._out):
      self._recorder.record(events.Restart(target=f"learner-{m}"))
    self._world, self._out, self._moved_at = tuple(members), set(), now
    self._tell(members, train=True)

  def _failed(self, reason: str) -> None:
    """The world has failed, though no process is dead."""
    self._failures += 1
    if self._failures > MAX_FAILURES:
      words = self._islands[self._world[0]].last_words()
      raise RuntimeError(f"{reason}, for the {self._failures}th time. A log ends:\n{words}")
    self._dissolve(reason)

  def _dissolve(self, reason: str) -> None:
    """All survivors end what they do; the next world begins when all have."""
    for m in self._world:
      self._recorder.record(events.Exit(target=f"learner-{m}", reason=reason))
      self._islands[m].tell(None)
    self._out |= set(self._world)
    self._world = ()

  def _tell(self, members: list[int] | range, train: bool) -> None:
    self._orders += 1
    step, state = orders.newest(self._workdir)
    port = _free_port()
    for rank, m in enumerate(members):
      order = Order(
        number=self._orders,
        rank=rank,
        size=len(members),
        port=port,
        started=self._started,
        state=str(state),
        step=step,
        remember=self._elastic,
        train=train,
      )
      self._islands[m].tell(order)

  def _follow(self) -> None:
    for event in self._follower.poll():
      if event.kind != "step":
        continue
      self._global_step, self._failures = max(self._global_step, event.global_step), 0
      self._moved_at = max(self._moved_at, time.monotonic())
      for m in self._world:
        self._feed(Working(self._islands[m].name, self._moved_at))
      if self._training_since is None:
        self._training_since = self._started + event.time

  def _seconds(self) -> float:
    return -1.0 if self._training_since is None else time.time() - self._training_since


def check(config: Config) -> None:
  """Refuses what data-parallel cannot have.

  Raises:
    ConfigError: names the field, the value, the rule and the fix.
  """
  if config.islands.overrides or config.islands.devices != 1:
    raise ConfigError(
      f"islands.(overrides, devices) = {(dict(config.islands.overrides), config.islands.devices)}:"
      " data-parallel islands are all alike and of one device each. Fix: overrides = {}, devices"
      " = 1."
    )
  for fault in config.chaos.faults:
    if fault.action != "kill" or not fault.role.startswith("learner-"):
      raise ConfigError(
        f"chaos.faults = {fault.action} of {fault.role}: data-parallel has learners that can be"
        " killed, and nothing else. Fix: drop this fault."
      )


def _free_port() -> int:
  """Of this moment; if it is taken before the world uses it, that world fails and is retried."""
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    return probe.getsockname()[1]
