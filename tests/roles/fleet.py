"""Shards that keep copies for each other, and two toy learners: threads around one hub."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from typing import Self

from ddiloco.chaos import Faults
from ddiloco.checkpoint.buddy import Copies, Replication, recover
from ddiloco.checkpoint.restore import ResumeState, new_learner, new_syncer
from ddiloco.core import fragments
from ddiloco.core.delta import Committed, new_fragment
from ddiloco.core.fragments import owned_by
from ddiloco.network.transport import Hub, learner_address, syncer_address
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
  """Roles as threads around one hub, with what they record and why they failed."""

  def __init__(self, config):
    self.config, self.plan = config, fragments.make_plan(toy.SPECS, config.sync)
    self.hub, self.over = Hub(), threading.Event()
    self.events: dict[str, list] = defaultdict(list)
    self.failures: list[BaseException] = []
    self.threads: list[threading.Thread] = []

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

  def toy_learner(self, m: int, incarnation: int, step_seconds: float) -> Learner:
    address, island = learner_address(m), toy.ToyIsland(m, self.plan, step_seconds=step_seconds)
    recorder, endpoint = toy.ListRecorder(self.events[address]), self.hub.connect(address)
    beginning = ResumeState(new_learner(self.config, self.plan, m, incarnation))
    runtime = Runtime(self.config, self.plan, endpoint, recorder)
    return Learner(beginning, island, toy.batches, runtime)

  def of(self, role: str, kind: str) -> list:
    return [e for e in list(self.events[role]) if e.kind == kind]

  def until(self, happened) -> None:
    wait_for(lambda: self.failures or happened())
    assert not self.failures, self.failures


class Fleet(Threads):
  """Shards with replication and toy learners; all of the config are there from the beginning."""

  def __init__(self, config, patience_seconds: float = PATIENCE_SECONDS):
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
      self.start(address, self.toy_learner(m, 1, 0.004).run, Faults((), 0.0), self.over.is_set)
    return self

  def __exit__(self, *_) -> None:
    self.over.set()
    for thread in self.threads:
      thread.join(PATIENCE_SECONDS)
    assert not self.failures, self.failures

  def shard(self, s: int, incarnation: int) -> None:
    kill = self.kills[s] = threading.Event()
    self.start(syncer_address(s), self._serve, s, incarnation, kill)

  def finish(self) -> None:
    """Waits until all learners have ended by themselves."""
    for address in self.learners:
      self.join(address)

  def _serve(self, s: int, incarnation: int, kill: threading.Event) -> None:
    """As a process of its own would: everything it knows dies with it."""
    address = syncer_address(s)
    endpoint, store = self.hub.connect(address), History()
    recorder = toy.ListRecorder(self.events[address])
    count = self.config.sync.num_shards
    copies = Copies(s, incarnation, endpoint, self.plan, self.config)
    replication = Replication(copies, self.patience_seconds, recorder)
    found = recover(copies, lambda quiet: not self.over.is_set())
    first = toy.initial_params()
    for p in owned_by(s, count, len(self.plan.fragments)):
      fragment = self.plan.fragments[p]
      store[p] = found.get(p) or new_fragment(fragment, fragments.gather(fragment, first))
    self.found[s], self.stores[s] = found, store
    runtime = Runtime(self.config, self.plan, endpoint, recorder)
    role = Syncer(new_syncer(self.config, s, incarnation, store), store, runtime, replication)
    replication.begin(found.values())
    with contextlib.closing(role):  # of one that dies the thread must not live on, either
      role.run(Faults((), 0.0), lambda: self.over.is_set() or kill.is_set())
    endpoint.close()
