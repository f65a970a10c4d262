"""Synchronous data-parallel on one machine, a process for each island, under failures.

A world is the set of processes that train together. Inelastic: a failure ends the world for all
islands. They wait until the dead island is back, and all go on from the last checkpoint. Elastic:
the others go on at once as a smaller world with the state they have; when the dead island is back,
that world ends and a larger one begins.

Both are spared costs that machines of their own would not have. A death is noticed at once; the
processes of a world are forked from one that has imported everything; the programs for all sizes of
worlds are compiled before the run begins; the exchange of gradients takes no time if it fits into
`islands.min_step_seconds`.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ddiloco import chaos
from ddiloco.baselines import member
from ddiloco.baselines.member import CHECKPOINT, PROGRAMS, Order
from ddiloco.config import Config, require
from ddiloco.engines.children import Child, spawn_forked
from ddiloco.engines.role_spec import free_urls
from ddiloco.network.transport import learner_address
from ddiloco.observe.eventlog import Follower, Recorder
from ddiloco.protocol import events, supervisor
from ddiloco.protocol.events import parse_role
from ddiloco.protocol.supervisor import Event, Exited, Lost, Start, Strike, Tick, Working
from ddiloco.workdir import run_name

TURN_SECONDS = 0.01
FOLLOW_SECONDS = 0.1
HANG_SECONDS = 60.0  # a world that makes no step for so long is ended
KILL_SECONDS = 0.5  # after a failure: a killed process's status may come later than what it caused
START_SECONDS = 600.0  # for imports and all compilations, before the run begins
MAX_FAILURES = 10  # worlds in a row that fail without a step, though no island was killed


class DataParallel:
  """One run.

  An island lives from when the supervisor starts it until a fault kills it. Its process lasts no
  longer than the world that it trains in: between two worlds a living island has no process.

  Args:
    config: the run's (see `check`); planned kills of learners by time are performed.
    workdir: events go to `workdir/events`, the processes' output to `workdir/logs`.
    elastic: go on with the islands that are left.
  """

  def __init__(self, config: Config, workdir: Path, elastic: bool):
    check(config)
    self._config, self._workdir, self._elastic = config, workdir, elastic
    names = [learner_address(m) for m in range(config.islands.num_learners)]
    self._islands = [Child(name, workdir, [spawn_forked]) for name in names]
    quorum = 1 if elastic else len(names)
    roles = dict.fromkeys(names, supervisor.Role())
    self._state = supervisor.Supervisor(config.run, roles, tuple(config.chaos.faults), quorum)
    self._alive: set[int] = set()  # living islands
    self._world: tuple[int, ...] = ()  # islands that train now
    self._out: set[int] = set()  # living islands of ended worlds, which wait for the next world
    self._orders = 0
    self._failures = 0
    self._failing_since: float | None = None  # when a process of this world ended by itself
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
    checkpoint = member.folder(self._workdir, CHECKPOINT)
    member.save(checkpoint, 0, member.initial_state(self._config), durable=True)
    self._started = time.time()
    self._follower = Follower(self._workdir)
    with Recorder(self._workdir, "engine", 0, self._started, time.time) as self._recorder:
      self._recorder.record(
        events.RunStarted(
          name=run_name(self._workdir),
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
    """Starts all islands, and compiles the program of every possible size of world."""
    self._feed(Tick(time.monotonic()))  # starts all
    sizes = range(1, len(self._islands) + 1) if self._elastic else [len(self._islands)]
    for size in sizes:
      program = member.program(self._workdir / PROGRAMS, self._config, size)
      if not program.exists():
        self._tell(range(size), train=False)
        self._await_ends()
        if not program.exists():
          raise RuntimeError(f"{program}: was not compiled. {_last_words(self._islands[0])}")

  def _await_ends(self) -> None:
    """Waits until all processes have ended. Any exit status is good: when rank 0 ends first, so
    does its coordination service, and the others fail.

    Raises:
      RuntimeError: the wait takes too long.
    """
    deadline = time.monotonic() + START_SECONDS
    for island in self._islands:
      while island.running and (status := island.poll()) is None:
        if time.monotonic() > deadline:
          raise RuntimeError(f"compiling takes too long. {_last_words(island)}")
        time.sleep(TURN_SECONDS)
      if island.running:
        island.bury(status)

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
      self._look(now)
      if self._state.hopeless:
        return "failed"
      self._decide(now)
      time.sleep(TURN_SECONDS)

  def _look(self, now: float) -> None:
    """If a process was killed, its island is dead; if it ended otherwise, the world has failed."""
    ended = {m: self._islands[m].poll() for m in self._world}
    for m, status in ended.items():
      if status == -signal.SIGKILL:
        island = self._islands[m]
        self._feed(Exited(island.name, now, island.bury(status)))
    failed = [m for m in self._world if ended[m] is not None]
    if failed:
      self._failing_since = self._failing_since or now
      if now - self._failing_since >= KILL_SECONDS:
        self._failed(f"the world failed at {self._islands[failed[0]].name}")

  def _feed(self, event: Event) -> None:
    """Gives the supervisor an event, and performs its actions."""
    self._state, actions = supervisor.supervise(self._state, event)
    for action in actions:
      match action:
        case Start(name, life):
          if life:
            self._recorder.record(events.Restart(target=name))
          self._alive.add(parse_role(name)[1])
        case Strike(fault):
          self._recorder.record(chaos.struck(fault, self._global_step))
          self._feed(Exited(fault.role, time.monotonic()))
        case Lost(name, reason):
          self._lost(parse_role(name)[1], reason)

  def _lost(self, m: int, reason: str) -> None:
    """An island is dead, and its memory is lost."""
    self._islands[m].kill()
    name, in_world = self._islands[m].name, m in self._world
    shutil.rmtree(member.folder(self._workdir, name), ignore_errors=True)
    self._alive.discard(m)
    self._out.discard(m)
    self._recorder.record(events.Exit(target=name, reason=reason))
    if in_world:
      self._world = tuple(each for each in self._world if each != m)
      self._dissolve(f"{name} is gone")

  def _decide(self, now: float) -> None:
    """Ends a world that hangs or could be larger, and begins one when there is none."""
    if self._world and now - self._moved_at > HANG_SECONDS:
      self._failed("the world hangs")
    if self._world and self._alive > set(self._world):
      self._dissolve("an island is back")
    enough = 1 if self._elastic and self._global_step else len(self._islands)
    if not self._world and len(self._alive) >= enough:
      for m in sorted(self._out):
        self._recorder.record(events.Restart(target=self._islands[m].name))
      self._world, self._out, self._moved_at = tuple(sorted(self._alive)), set(), now
      self._failing_since = None
      self._tell(self._world, train=True)

  def _failed(self, reason: str) -> None:
    """The world has failed, though its islands live."""
    self._failures += 1
    if self._failures > MAX_FAILURES:
      words = _last_words(self._islands[self._world[0]])
      raise RuntimeError(f"{reason}, for the {self._failures}th time. {words}")
    self._dissolve(reason)

  def _dissolve(self, reason: str) -> None:
    """Ends the world: its islands that live wait for the next world."""
    for m in self._world:
      self._islands[m].kill()
      self._recorder.record(events.Exit(target=self._islands[m].name, reason=reason))
    self._out |= set(self._world)
    self._world = ()

  def _tell(self, members: Sequence[int], train: bool) -> None:
    self._orders += 1
    state = str(member.newest(self._workdir))
    meeting = free_urls(1)[0].removeprefix("tcp://")
    for rank, m in enumerate(members):
      order = Order(
        number=self._orders,
        rank=rank,
        size=len(members),
        meeting=meeting,
        started=self._started,
        state=state,
        remember=self._elastic,
        train=train,
      )
      self._islands[m].start([member.command(self._workdir, m, order)])

  def _follow(self) -> None:
    for event in self._follower.poll():
      if event.kind != "step":
        continue
      self._global_step, self._failures = max(self._global_step, event.global_step), 0
      self._moved_at = time.monotonic()
      for m in self._world:
        self._feed(Working(self._islands[m].name, self._moved_at))
      if self._training_since is None:
        self._training_since = self._started + event.time

  def _seconds(self) -> float:
    return -1.0 if self._training_since is None else time.time() - self._training_since


def check(config: Config) -> None:
  """Refuses (ConfigError) what data-parallel cannot have."""
  own = dict(config.islands.overrides), config.islands.devices
  rule = "data-parallel islands are all alike and of one device each"
  fix = "overrides = {}, devices = 1"
  require(own == ({}, 1), "islands.(overrides, devices)", own, rule, fix)
  for fault in config.chaos.faults:
    good = fault.action == "kill" and fault.role.startswith("learner-")
    rule = "data-parallel has learners that can be killed, and nothing else"
    require(good, "chaos.faults", f"{fault.action} of {fault.role}", rule, "drop this fault")


def _last_words(island: Child) -> str:
  return f"The last words of {island.name} (more in {island.log}): {island.last_words()}"
