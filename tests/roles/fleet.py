"""Shards that keep copies for each other, and two toy learners: threads around one hub."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict

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


class Fleet:
  """Shards with replication and two toy learners, as threads around one hub."""

  def __init__(self, config, patience_seconds: float = PATIENCE_SECONDS):
    self.patience_seconds = patience_seconds
    self.config, self.plan = config, fragments.make_plan(toy.SPECS, config.sync)
    self.hub, self.stop = Hub(), threading.Event()
    self.events: dict[str, list] = defaultdict(list)
    self.failures: list[BaseException] = []
    self.threads: list[threading.Thread] = []
    self.kills: dict[int, threading.Event] = {}
    self.stores: dict[int, History] = {}
    self.found: dict[int, dict[int, Committed]] = {}

  def start(self, name: str, work, *args) -> threading.Thread:
    def guarded():
      try:
        work(*args)
      except BaseException as error:  # reported by the test's own thread
        self.failures.append(error)
        self.stop.set()

    thread = threading.Thread(target=guarded, name=name, daemon=True)
    thread.start()
    self.threads.append(thread)
    return thread

  def shard(self, s: int, incarnation: int) -> threading.Thread:
    kill = self.kills[s] = threading.Event()
    return self.start(syncer_address(s), self._serve, s, incarnation, kill)

  def _serve(self, s: int, incarnation: int, kill: threading.Event) -> None:
    """As a process of its own would: everything it knows dies with it."""
    address = syncer_address(s)
    endpoint, store = self.hub.connect(address), History()
    recorder = toy.ListRecorder(self.events[address])
    count = self.config.sync.num_shards
    copies = Copies(s, incarnation, endpoint, self.plan, self.config)
    replication = Replication(copies, self.patience_seconds, recorder)
    found = recover(copies, lambda quiet: not self.stop.is_set())
    first = toy.initial_params()
    for p in owned_by(s, count, len(self.plan.fragments)):
      fragment = self.plan.fragments[p]
      store[p] = found.get(p) or new_fragment(fragment, fragments.gather(fragment, first))
    self.found[s], self.stores[s] = found, store
    role = Syncer(
      new_syncer(self.config, s, incarnation, store),
      self.config,
      self.plan,
      store,
      Runtime(endpoint, recorder),
      replication,
    )
    replication.begin(found.values())
    with contextlib.closing(role):  # of one that dies the thread must not live on, either
      role.run(Faults((), 0.0), lambda: self.stop.is_set() or kill.is_set())
    endpoint.close()

  def learner(self, m: int) -> threading.Thread:
    address = learner_address(m)
    island = toy.ToyIsland(m, self.plan, step_seconds=0.004)
    recorder, endpoint = toy.ListRecorder(self.events[address]), self.hub.connect(address)
    beginning = ResumeState(new_learner(self.config, self.plan, m, 1))
    runtime = Runtime(endpoint, recorder)
    role = Learner(beginning, self.config, self.plan, island, toy.batches, runtime)
    return self.start(address, role.run, Faults((), 0.0), self.stop.is_set)

  def of(self, role: str, kind: str) -> list[dict]:
    return [e for e in list(self.events[role]) if e.kind == kind]

  def until(self, happened) -> None:
    wait_for(lambda: self.failures or happened())
    assert not self.failures, self.failures

  def end(self) -> None:
    self.stop.set()
    for thread in self.threads:
      thread.join(PATIENCE_SECONDS)
    assert not self.failures, self.failures
