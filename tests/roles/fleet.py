"""Whole runs of toy islands: the real roles, queues and threads around a NumPy problem.

A `Fleet` has shards that keep copies for each other, and can be killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Self

import numpy as np

from ddiloco.chaos import Faults
from ddiloco.checkpoint.buddy import Copies, Replication, recover
from ddiloco.checkpoint.restore import begin_learner, new_learner, new_syncer, restore_fragments
from ddiloco.checkpoint.saver import Saver
from ddiloco.checkpoint.snapshots import Storage
from ddiloco.config import Config
from ddiloco.core import fragments
from ddiloco.core.delta import Committed
from ddiloco.core.fragments import owned_by
from ddiloco.network.transport import Hub, learner_address, syncer_address
from ddiloco.observe.eventlog import Records
from ddiloco.protocol.events import Event
from ddiloco.roles.learner import Learner
from ddiloco.roles.syncer import Syncer
from ddiloco.runtime import Runtime
from tests.roles import toy
from tests.waits import PATIENCE_SECONDS, wait_for


def bits(c: Committed) -> tuple:
  momentum = None if c.momentum is None else c.momentum.tobytes()
  return c.state, c.value.tobytes(), c.published_value.tobytes(), momentum


class History(dict):
  """A store that remembers the bits of every commit of its life."""

  def __init__(self):
    super().__init__()
    self.commits: dict[tuple[int, int], tuple] = {}

  def __setitem__(self, p: int, c: Committed) -> None:
    self.commits[p, c.state.version] = bits(c)
    super().__setitem__(p, c)


class Threads:
  """Roles as threads around one hub, with what they record and why they failed.

  `saver(role, recorder)` makes what writes a role's parts of snapshots.
  """

  def __init__(self, config: Config, saver: Callable[[str, Records], Saver] | None = None):
    self.config, self.plan = config, fragments.make_plan(toy.SPECS, config.sync)
    self.hub, self.over = Hub(), threading.Event()
    self.events: dict[str, list[Event]] = defaultdict(list)
    self.failures: list[BaseException] = []
    self.threads: list[threading.Thread] = []
    self._saver, self._savers = saver, list[Saver]()

  def runtime(self, name: str) -> Runtime:
    """What this role runs with: a new connection, and a recorder."""
    recorder = toy.ListRecorder(self.events[name])
    saver = self._saver and self._saver(name, recorder)
    self._savers += [saver] if saver else []
    return Runtime(self.config, self.plan, self.hub.connect(name), recorder, saver)

  def start(self, name: str, work, *args) -> None:
    def guarded():
      try:
        work(*args)
      except BaseException as error:  # reported by the test's own thread
        self.failures.append(error)
        self.over.set()

    self.threads.append(threading.Thread(target=guarded, name=name, daemon=True))
    self.threads[-1].start()

  def join(self, name: str) -> None:
    for thread in [t for t in self.threads if t.name == name]:
      thread.join(PATIENCE_SECONDS)
      assert not thread.is_alive(), f"{name} does not end"

  def end(self) -> None:
    """Ends all; raises what one has failed with."""
    self.over.set()
    for name in {thread.name for thread in self.threads}:
      self.join(name)
    for saver in self._savers:
      saver.close(PATIENCE_SECONDS)
    if self.failures:
      raise self.failures[0]

  def toy_learner(
    self, m: int, incarnation: int, island: toy.ToyIsland, resume: Storage | None = None
  ) -> Learner:
    """One that begins with nothing, or with its newest part of a snapshot there."""
    runtime = self.runtime(learner_address(m))
    new = new_learner(self.config, self.plan, m, incarnation)
    beginning = begin_learner(new, self.config, island, resume, runtime.recorder)
    return Learner(beginning, island, toy.batches, runtime)

  def of(self, role: str, kind: str) -> list:
    return [e for e in list(self.events[role]) if e.kind == kind]

  def until(self, happened) -> None:
    wait_for(lambda: self.failures or happened())
    assert not self.failures, self.failures


def serve(role: Syncer, faults: Faults, stopped: Callable[[], bool]) -> None:
  """Runs a shard, of which no thread is left then."""
  with contextlib.closing(role):
    role.run(faults, stopped)


@dataclasses.dataclass
class Result:
  params: dict[str, np.ndarray]  # global
  versions: list[int]
  islands: list[toy.ToyIsland]
  learners: list[Learner]
  events: dict[str, list[Event]]
  committed: list[Committed]  # of every fragment


def run(
  config: Config,
  islands: list[toy.ToyIsland] | None = None,
  saver: Callable[[str, Records], Saver] | None = None,
  resume: Storage | None = None,
) -> Result:
  """Runs learners and shards until the token budget is merged.

  With `resume` everybody begins with the newest snapshot there.
  """
  threads, faults = Threads(config, saver), Faults((), time.monotonic())
  plan, stopped = threads.plan, threads.over.is_set
  store = toy.initial_store(plan)
  restored = restore_fragments(resume, range(len(plan.fragments))) if resume else None
  store |= restored.fragments if restored else {}
  incarnation = 1000 if restored else 0
  for s in range(config.sync.num_shards):
    state = new_syncer(config, s, incarnation, store)
    state = restored.resume(state) if restored else state
    name = syncer_address(s)
    threads.start(name, serve, Syncer(state, store, threads.runtime(name)), faults, stopped)
  islands = islands or [toy.ToyIsland(m, plan) for m in range(config.islands.num_learners)]
  learners = [threads.toy_learner(m, incarnation, each, resume) for m, each in enumerate(islands)]
  for m, role in enumerate(learners):
    threads.start(learner_address(m), role.run, faults, stopped)
  for m in range(len(learners)):
    threads.join(learner_address(m))
  threads.end()
  committed = [store[f.index] for f in plan.fragments]
  params = toy.initial_params()
  for fragment, each in zip(plan.fragments, committed):
    fragments.scatter(fragment, each.value, params)
  versions = [c.state.version for c in committed]
  return Result(params, versions, islands, learners, threads.events, committed)


class Fleet(Threads):
  """Shards with replication and toy learners; all of the config are there from the beginning."""

  def __init__(self, config: Config, patience_seconds: float = PATIENCE_SECONDS):
    super().__init__(config)
    self.patience_seconds = patience_seconds
    self.kills: dict[int, threading.Event] = {}
    self.stores: dict[int, History] = {}
    self.found: dict[int, dict[int, Committed]] = {}
    self.learners = [learner_address(m) for m in range(config.islands.num_learners)]

  def __enter__(self) -> Self:
    for s in range(self.config.sync.num_shards):
      self.shard(s, 1)
    for m, address in enumerate(self.learners):
      role = self.toy_learner(m, 1, toy.ToyIsland(m, self.plan, step_seconds=0.004))
      self.start(address, role.run, Faults((), 0.0), self.over.is_set)
    return self

  def __exit__(self, *_) -> None:
    self.end()

  def shard(self, s: int, incarnation: int) -> None:
    kill = self.kills[s] = threading.Event()
    self.start(syncer_address(s), self._serve, s, incarnation, kill)

  def finish(self) -> None:
    """Waits until all learners have ended by themselves."""
    for address in self.learners:
      self.join(address)

  def _serve(self, s: int, incarnation: int, kill: threading.Event) -> None:
    """As a process of its own would: everything it knows dies with it."""
    runtime, store = self.runtime(syncer_address(s)), History()
    copies = Copies(s, incarnation, runtime.endpoint, self.plan, self.config)
    replication = Replication(copies, self.patience_seconds, runtime.recorder)
    found = recover(copies, lambda quiet: not self.over.is_set())
    first = toy.initial_store(self.plan)
    for p in owned_by(s, self.config.sync.num_shards, len(self.plan.fragments)):
      store[p] = found.get(p) or first[p]
    self.found[s], self.stores[s] = found, store
    role = Syncer(new_syncer(self.config, s, incarnation, store), store, runtime, replication)
    replication.begin(found.values())
    serve(role, Faults((), 0.0), lambda: self.over.is_set() or kill.is_set())
    runtime.endpoint.close()
