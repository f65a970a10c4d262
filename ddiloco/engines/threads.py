"""The threads engine: all islands and shards of one process, a thread each.

For a laptop (islands are fake CPU devices) and for Pathways (one controller sees all slices). It
starts every role, restarts those that die, performs planned faults on them, and ends when the
learners have.
"""

from __future__ import annotations

import concurrent.futures
import math
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np

from ddiloco.config import Config, Fault
from ddiloco.core import fragments
from ddiloco.core.fragments import Plan
from ddiloco.engines.asked import Asked
from ddiloco.engines.outcome import Outcome
from ddiloco.engines.workdir import start_time
from ddiloco.observe.events import Event, Listener, Recorder
from ddiloco.resilience import chaos
from ddiloco.resilience.chaos import Faults, Killed, still_planned
from ddiloco.runtime import initial
from ddiloco.runtime.disturbed import Disturbed
from ddiloco.runtime.evaluator import Evaluator
from ddiloco.runtime.exchange import Quarantined
from ddiloco.runtime.learner import Learner
from ddiloco.runtime.network import seconds_since_2020
from ddiloco.runtime.rejoin import (
  Beginning,
  Restored,
  begin_learner,
  forget,
  new_learner,
  new_syncer,
  newest_clock,
  open_storage,
  restore_fragments,
)
from ddiloco.runtime.saver import Saver
from ddiloco.runtime.store import MemoryStore, new_fragment
from ddiloco.runtime.syncer import Syncer
from ddiloco.runtime.transport import (
  EVALUATOR_ADDRESS,
  Hub,
  learner_address,
  syncer_address,
)
from ddiloco.training import data, devices
from ddiloco.training.island import Island

POLL_SECONDS = 0.2
EVALUATOR_PATIENCE_SECONDS = 60.0  # to finish a measurement when the learners have ended


class ThreadsEngine:
  """One run. Everything that can be wrong with config, data or devices is found on construction.

  Args:
    config: the run's.
    workdir: event logs go to `workdir/events`.
    corpus: opened training data.
    loss: held-out loss of a parameter tree, for the evaluator.
    islands: compiled by an earlier run of the same model and islands; None: new ones.
  """

  def __init__(
    self,
    config: Config,
    workdir: Path,
    corpus: data.Corpus,
    loss: Callable[[dict[str, np.ndarray]], float],
    islands: dict[int, Island] | None = None,
  ):
    self.config = config
    self.workdir = workdir
    self.plan: Plan = initial.make_plan(config)
    self.stop = threading.Event()
    # Opened once: a restarted learner has nothing to prepare that could hold up the others.
    self._streams = [data.Stream(corpus, config, m) for m in range(config.num_islands())]
    self._loss = loss
    self._listeners: Sequence[Listener] = ()
    self._start_time = self._training_since = time.monotonic()
    # No learner ever has more than the whole model under way, in either direction.
    model_bytes, members = 4 * sum(self.plan.sizes), config.islands.num_learners + 1
    room = members * model_bytes + (1 << 30)
    self._hub = Hub(workdir.name, self.plan.plan_id, max_bulk_bytes=room)
    self._store = MemoryStore()
    self.islands = islands or {
      m: Island(config, m, group, self.plan)
      for m, group in enumerate(
        devices.partition(jax.devices(), config.islands, config.num_islands())
      )
    }
    self.steps: dict[int, int] = {}
    self._storage = open_storage(config, self.plan, workdir)
    self._restored: Restored | None = None
    self._planned: list[Fault] = []
    self._joins: tuple[Fault, ...] = ()  # learners that the plan brings in later
    self._leaves_at: dict[int, float] = {}  # and takes away again
    self._first_incarnation = 0
    self._clock = 0  # the run's, as far as learners have reported it
    self._faults: dict[str, Faults] = {}
    self._quarantined: set[int] = set()  # learners that must begin afresh
    self._gone: list[str] = []  # roles that never come back

  def run(self, listeners: Sequence[Listener] = ()) -> Outcome:
    """Runs to the end of the token budget, or until `stop` is set.

    `listeners` get every event of every role (live view, TensorBoard).
    """
    config = self.config
    self._listeners = listeners
    if (self.workdir / "events").exists():  # it goes on: nobody may pass for who was here before
      self._first_incarnation = seconds_since_2020()
    self._start_time = time.monotonic() - (time.time() - start_time(self.workdir))
    self._recorder = self._record("engine", 0)
    self._recorder.event(
      "run_started",
      name=self.workdir.name,
      num_learners=config.islands.num_learners,
      num_shards=config.sync.num_shards,
      num_fragments=len(self.plan.fragments) if config.sync.num_shards else 0,
      total_tokens=config.run.total_tokens,
    )
    first = initial.initial_params(config)
    with concurrent.futures.ThreadPoolExecutor() as pool:
      list(pool.map(self._compile, self.islands))
    self._seed(first)
    self._first = first
    self._training_since = time.monotonic()  # faults by time count from here, not from compiling
    began_at = newest_clock(self.config, self.plan, self.workdir)
    self._planned = still_planned(self.config.chaos.of_roles(), began_at)
    self._joins = tuple(fault for fault in self._planned if fault.action == "join")
    self._asked = Asked(self.workdir, news_only=True)
    shards = [
      self._start(syncer_address(s), self._run_syncer, s) for s in range(config.sync.num_shards)
    ]
    watcher = self._start_evaluator() if config.sync.num_shards and config.run.evaluations else None
    learners = [
      self._start(learner_address(m), self._run_learner, m)
      for m in range(config.islands.num_learners)
    ]
    try:
      reason = self._wait_for(learners)
      if watcher is not None and reason == "finished":
        watcher.join(EVALUATOR_PATIENCE_SECONDS)
    except KeyboardInterrupt:
      reason = "stopped"
    self._stop_all([*learners, *shards, *([watcher] if watcher else [])])
    self._recorder.event("run_finished", reason=reason)
    self._recorder.close()
    return self._outcome(reason)

  # --- roles --------------------------------------------------------------------------------------

  def _seed(self, first: dict[str, np.ndarray]) -> None:
    """Version 0, or the newest snapshot, goes into the store; without shards, into the islands."""
    if self._storage is not None:
      self._restored = restore_fragments(self._storage, self.plan, range(len(self.plan.fragments)))
      newest = self._restored.snapshot if self._restored is not None else None
      forget(self._storage, "", newest)
    if self._restored is not None:
      self._first_incarnation = seconds_since_2020()  # also if only the snapshots are left of it
      for committed in self._restored.fragments.values():
        self._store.save(committed)
    elif self.config.sync.num_shards:
      for fragment in self.plan.fragments:
        self._store.save(new_fragment(fragment, fragments.gather(fragment, first)))
    else:
      for island in self.islands.values():
        island.load(first)

  def _compile(self, m: int) -> None:
    seconds = self.islands[m].compile()
    self._recorder.event("compiled", target=learner_address(m), seconds=round(seconds, 3))

  def _run_learner(self, m: int, incarnation: int, faults: Faults, recorder: Recorder) -> None:
    island, config = self.islands[m], self.config
    new = new_learner(config, self.plan, m, incarnation)
    if config.sync.num_shards:
      storage = None if m in self._quarantined else self._storage  # what it had was bad
      self._quarantined.discard(m)
      beginning = begin_learner(new, config, self.plan, island, storage, recorder)
    else:
      beginning = Beginning(new)
      if incarnation:
        island.load(self._first)  # nobody else has what it had learned
    endpoint, saver = self._connect(learner_address(m), faults), self._saver(recorder, faults)
    batches = self._streams[m].iterate
    role = Learner(beginning, config, self.plan, island, batches, endpoint, recorder, saver)
    leaves_at = self._leaves_at.get(m, math.inf)
    drain_seconds = config.network.drain_seconds if leaves_at < math.inf else 0.0
    try:
      role.run(faults, lambda: self.stop.is_set() or time.monotonic() >= leaves_at, drain_seconds)
    finally:
      made = role.exchange.state.step - beginning.state.step
      self.steps[m] = self.steps.get(m, 0) + made
      endpoint.close()
      if saver is not None:
        saver.close()

  def _run_syncer(self, shard: int, incarnation: int, faults: Faults, recorder: Recorder) -> None:
    config, endpoint = self.config, self._connect(syncer_address(shard), faults)
    state = new_syncer(config, shard, incarnation, self._store)
    if self._restored is not None and incarnation == self._first_incarnation:
      state = self._restored.resume(state)
    saver = self._saver(recorder, faults)
    try:
      role = Syncer(state, config, self.plan, endpoint, self._store, recorder, saver=saver)
      role.run(faults, self.stop.is_set)
    finally:
      endpoint.close()
      if saver is not None:
        saver.close()

  def _start_evaluator(self) -> threading.Thread:
    def run(_, incarnation: int, faults: Faults, recorder: Recorder) -> None:
      endpoint = self._connect(EVALUATOR_ADDRESS, faults)
      try:
        Evaluator(self.config, self.plan, self._loss, endpoint, recorder, incarnation).run(
          self.stop.is_set
        )
      finally:
        endpoint.close()

    return self._start(EVALUATOR_ADDRESS, run, -1)

  def _saver(self, recorder: Recorder, faults: Faults) -> Saver | None:
    if self._storage is None:
      return None
    return Saver(self._storage, recorder.role, recorder.incarnation, recorder, faults.disk)

  # --- supervision --------------------------------------------------------------------------------

  def _record(self, role: str, incarnation: int) -> Recorder:
    name = role.replace("/", "-")
    listeners = [*self._listeners, self._note_clock]
    return Recorder(self.workdir, name, incarnation, self._start_time, listeners=listeners)

  def _note_clock(self, event: Event) -> None:
    if event["kind"] == "step":
      self._clock = max(self._clock, event["clock"])

  def _connect(self, address: str, faults: Faults):
    endpoint = Disturbed(self._hub.connect(address), faults.weather)
    faults.cut = endpoint.close
    return endpoint

  def _start(self, name: str, run: Callable, number: int) -> threading.Thread:
    plan = [f for f in self._planned if f.role == name and f.action != "join"]

    faults = self._faults[name] = Faults(plan, self._training_since, self._note_fault, name)
    faults.stopped = self.stop
    thread = threading.Thread(
      target=self._supervise, args=(name, run, number, faults), name=name, daemon=True
    )
    thread.start()
    return thread

  def _supervise(self, name: str, run: Callable, number: int, faults: Faults) -> None:
    """One role over all its incarnations; whatever it dies of, nobody else notices."""
    crashes, incarnation = 0, self._first_incarnation
    while True:
      recorder = self._record(name, incarnation)
      try:
        run(number, incarnation, faults, recorder)
        return
      except Killed as kill:
        pause, reason = kill.seconds, str(kill)
      except Exception as error:  # crashed, or quarantined: back after a pause, but not for ever
        crashes += 1
        again = crashes <= self.config.run.max_restarts
        pause = self.config.run.restart_seconds * 2 ** (crashes - 1) if again else -1
        if isinstance(error, Quarantined):
          reason = f"quarantined: {error}"
          self._quarantined.add(number)
        else:
          reason = f"{type(error).__name__}: {error}"
          recorder.event("crash", trace=traceback.format_exc())
      finally:
        recorder.close()
      self._recorder.event("exit", target=name, reason=reason)
      if pause < 0:
        self._gone.append(name)
      if pause < 0 or self.stop.wait(pause):
        return
      incarnation += 1
      self._recorder.event("restart", target=name)

  def _wait_for(self, learners: list[threading.Thread]) -> str:
    """Until all learners have ended, or never could: then the run has failed.

    Meanwhile performs what nobody else does: `learners` grows with those that join.
    """
    for thread in learners:
      while thread.is_alive():
        if self._hopeless():
          return "failed"
        self._hear()
        learners += self._welcome()
        thread.join(POLL_SECONDS)  # short, so that Ctrl-C is heard
    if all(thread.name in self._gone for thread in learners):
      return "failed"
    return "stopped" if self.stop.is_set() else "finished"

  def _note_fault(self, fault: Fault, said: str) -> None:
    self._recorder.event("fault", **chaos.struck(fault, said))

  def _hear(self) -> None:
    """Faults that were asked for while the run goes on."""
    for _, fault in self._asked.poll():
      if fault.action != "join" and fault.role in self._faults:
        self._faults[fault.role].plan(fault)

  def _welcome(self) -> list[threading.Thread]:
    """The learners that join now."""
    started = []
    while True:
      seconds = time.monotonic() - self._training_since
      fault, self._joins = chaos.strike(self._joins, self._clock, seconds)
      if fault is None:
        return started
      m = int(fault.role.partition("/")[2])
      if fault.seconds >= 0:
        self._leaves_at[m] = time.monotonic() + fault.seconds
      self._note_fault(fault, chaos.detail(fault, self._clock))
      if fault.role not in self._faults:
        started.append(self._start(fault.role, self._run_learner, m))

  def _hopeless(self) -> bool:
    """Whether a shard, or every possible quorum, is gone for good: nothing would ever merge."""
    sync = self.config.sync
    left = self.config.islands.num_learners - sum(n.startswith("learner/") for n in self._gone)
    shard_gone = any(name.startswith("syncer/") for name in self._gone)
    return shard_gone or left < (sync.min_quorum if sync.num_shards else 1)

  def _stop_all(self, threads: Sequence[threading.Thread]) -> None:
    self.stop.set()
    for thread in threads:
      thread.join(EVALUATOR_PATIENCE_SECONDS)

  def _outcome(self, reason: str) -> Outcome:
    if self.config.sync.num_shards:
      values = {f.index: self._store.load(f.index).value for f in self.plan.fragments}
      return Outcome(reason, initial.assemble(self.plan, self.config, values), {}, dict(self.steps))
    left = [m for m in self.islands if learner_address(m) not in self._gone] or list(self.islands)
    each = {m: self.islands[m].params_on_host() for m in left}
    return Outcome(reason, each[left[0]], each, dict(self.steps))
