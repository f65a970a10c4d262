"""The threads engine: all islands and shards in one process, a thread each.

For a laptop (fake CPU devices) and for Pathways (one controller sees all slices). The engine starts
every role, restarts roles that die, performs planned faults on them, and ends when the learners
have ended.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import time
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from ddiloco.chaos import Faults, FaultyEndpoint
from ddiloco.checkpoint import restore
from ddiloco.checkpoint.saver import Saver
from ddiloco.config import Config, Fault
from ddiloco.core.delta import MemoryStore, new_fragment
from ddiloco.engines import role_spec
from ddiloco.engines.engine import PATIENCE_SECONDS, Engine, RunResult
from ddiloco.engines.profiler import Profiler
from ddiloco.engines.role_spec import beside
from ddiloco.network import peers
from ddiloco.network.transport import EVALUATOR_ADDRESS, Hub, learner_address, syncer_address
from ddiloco.observe.eventlog import Event, Recorder
from ddiloco.observe.guards import HangWatch, ended, say
from ddiloco.protocol import events
from ddiloco.protocol.events import parse_role
from ddiloco.protocol.learner import unmerged_tokens
from ddiloco.protocol.supervisor import GONE, Dismiss, members
from ddiloco.roles import initial
from ddiloco.roles.evaluator import Measure
from ddiloco.roles.learner import Learner
from ddiloco.roles.syncer import Syncer
from ddiloco.runtime import Runtime
from ddiloco.training import data, devices
from ddiloco.training.island import Island
from ddiloco.workdir import run_name, start_time

DEVICES_SECONDS = 1.0  # between two looks whether a lost slice is back
EVALUATOR_PATIENCE_SECONDS = 60.0  # for the evaluator to finish after the learners have ended


class ThreadsEngine(Engine):
  """One run. Everything that can be wrong with config, data or devices is found on construction.

  Args:
    config: the run's.
    workdir: event logs go to `workdir/events`.
    corpus: opened training data (`training.data.open_data`).
    measure: the held-out measures of a parameter tree, for the evaluator.
    islands: compiled by an earlier run of the same model and islands; None: new ones.
  """

  def __init__(
    self,
    config: Config,
    workdir: Path,
    corpus: data.Source,
    measure: Measure | None,
    islands: dict[int, Island] | None = None,
  ):
    super().__init__(config, workdir, measure)
    # Opened once: a restarted learner has nothing to prepare that could hold up the others.
    self._streams = [data.Stream(corpus, config, m) for m in range(config.num_islands())]
    self._start_time = self._training_since = time.monotonic()
    # No member ever has more than the whole model under way, in either direction.
    model_bytes, receivers = 4 * sum(self.plan.sizes), config.islands.num_learners + 1
    room = receivers * model_bytes + (1 << 30)
    self._hub = Hub(run_name(workdir), self.plan.plan_id, max_bulk_bytes=room)
    self._store = MemoryStore()
    visible = jax.devices()
    mine = visible[: max(0, len(visible) - config.run.evaluator_devices)]
    counts = [config.islands.island(m).devices for m in range(config.num_islands())]
    shared: dict = {}  # equal islands' programs
    self.islands = islands or {
      m: Island(config, m, group, self.plan, shared)
      for m, group in enumerate(devices.partition(mine, counts))
    }
    self._lost_slices: set[int] = set()  # islands whose devices have failed
    self._life_steps: dict[int, int] = {}  # learner -> steps of its newest life
    self._storage = self._open_storage()
    self._restored: restore.Restored | None = None
    self._saved: Mapping[int, np.ndarray] = {}  # fragment -> value, as saved in WORKDIR/result
    self._first_incarnation = 0
    self._faults: dict[str, Faults] = {}
    self._hangs = HangWatch(config.run.hang_seconds, lambda: self._recorder)
    learners = [learner_address(m) for m in self.islands]
    self._profiler = Profiler(workdir, learners, lambda: self._recorder)
    self._stop_at = math.inf  # when learners that still drain are stopped

  def _begin(self) -> None:
    self._restored = self._resume()
    if (self.workdir / "events").exists():
      self._start_after(role_spec.newest(self.workdir, peers.seconds_since_2020()))
    self._start_time = time.monotonic() - (time.time() - start_time(self.workdir))
    self._recorder = self._record("engine", 0)

  def _prepare(self) -> None:
    beside(self._compile_all, self._leave_early)
    self._training_since = time.monotonic()  # faults by time count from here, not from compiling

  def _leave_early(self) -> None:
    if self.leave.is_set():
      raise KeyboardInterrupt

  def _roles(self) -> list[str]:
    sync, learners = self.config.sync, range(self.config.islands.num_learners)
    shards = [syncer_address(s) for s in range(sync.num_shards)]
    watches = sync.num_shards and self.config.run.evaluations
    return [*shards, *([EVALUATOR_ADDRESS] if watches else []), *map(learner_address, learners)]

  # --- roles --------------------------------------------------------------------------------------

  def _resume(self) -> restore.Restored | None:
    """The newest snapshot's fragments, if the run goes on from a snapshot."""
    tried, every = list[str](), range(len(self.plan.fragments))
    storage = self._storage
    restored = restore.restore_fragments(storage, self.plan, every, tried) if storage else None
    newest = restored.snapshot if restored is not None else None
    restore.go_on(self.config, self.workdir, storage, newest, tried)
    return restored

  def _compile_all(self) -> None:
    # A thread for each island: an island that waits for equal islands' programs holds up no others.
    with concurrent.futures.ThreadPoolExecutor(len(self.islands)) as pool:
      list(pool.map(self._compile, self.islands))
    self._seed()

  def _start_after(self, incarnation: int) -> None:
    """Sets the first incarnation above `incarnation`, the greatest of the run's earlier lives."""
    now = max(self._first_incarnation, peers.seconds_since_2020())
    self._first_incarnation = role_spec.above(now, [incarnation])

  def _seed(self) -> None:
    """Puts version 0, or the newest snapshot, into the store; without shards, into the islands."""
    if self._restored is not None:
      for committed in self._restored.fragments.values():
        self._store.save(committed)
        self._start_after(committed.state.last_round >> 24)  # the event logs may be lost
      self._restored.fragments.clear()  # else they would stay in memory beside newer versions
    elif self.config.sync.num_shards:
      for p, value in super()._initial_values().items():
        self._store.save(new_fragment(self.plan.fragments[p], value))
    else:
      self._first = initial.initial_params(self.config)
      for island in self.islands.values():
        island.load(self._first)

  def _compile(self, m: int) -> None:
    seconds = self.islands[m].compile()
    self._recorder.record(events.Compiled(target=learner_address(m), seconds=round(seconds, 3)))

  def _run_learner(
    self, m: int, incarnation: int, faults: Faults, recorder: Recorder, afresh: bool
  ) -> None:
    if m in self._lost_slices and not self._rebuild(m, faults):
      return
    try:
      self._train(m, incarnation, faults, recorder, afresh)
    except Exception as error:
      if devices.lost_devices(error):
        self._lost_slices.add(m)
      raise

  def _train(
    self, m: int, incarnation: int, faults: Faults, recorder: Recorder, afresh: bool
  ) -> None:
    config, name, island = self.config, learner_address(m), self.islands[m]
    new = restore.new_learner(config, self.plan, m, incarnation, afresh)
    if config.sync.num_shards:
      storage = None if afresh else self._storage  # after a quarantine: its state was bad
      beginning = restore.begin_learner(new, config, island, storage, recorder)
    else:
      beginning = restore.ResumeState(new)
      if incarnation:
        island.load(self._first)  # no other role has what the island had learned
    endpoint, saver = self._connect(name, faults), self._saver(recorder, faults)
    runtime = Runtime(endpoint, recorder, saver, initial=self._initial_values)
    role = Learner(beginning, config, self.plan, island, self._streams[m].iterate, runtime)
    drain_seconds = config.network.drain_seconds if config.sync.num_shards else 0.0

    def stopped() -> bool:
      self._hangs.beat(name, role.usual_seconds)
      return name in self._told or self.stop.is_set()

    def compiled(program: str, seconds: float) -> None:
      recorder.record(events.Compiled(target=name, seconds=round(seconds, 3), program=program))

    try:
      with devices.told_what_compiles(compiled):
        role.run(faults, stopped, drain_seconds, self.stop.is_set)
      if self._drains and (unmerged := unmerged_tokens(role.exchange.state)):
        self._lost[name] = f"{unmerged} tokens were not merged in network.drain_seconds"
    finally:
      self._hangs.end(name)
      made = role.exchange.state.step - beginning.state.step
      self.steps[m] = self.steps.get(m, 0) + made
      self._life_steps[m] = made
      self._close(endpoint, saver)

  def _rebuild(self, m: int, faults: Faults) -> bool:
    """Makes a new island once its devices are back; False if the run ends before that.

    The programs and arrays of a failed slice are lost with it.
    """
    name, lost = learner_address(m), list(self.islands[m].mesh.devices.flat)
    say(f"{name}: waits until its {len(lost)} devices are back")
    while (group := devices.answering(lost)) is None:
      if name in self._told or self.stop.wait(DEVICES_SECONDS):
        return False
      faults.check(self._global_step)
    self.islands[m] = Island(self.config, m, group, self.plan)
    self._compile(m)
    self._lost_slices.discard(m)
    return True

  def _run_syncer(self, shard: int, incarnation: int, faults: Faults, recorder: Recorder) -> None:
    config, endpoint = self.config, self._connect(syncer_address(shard), faults)
    state = restore.new_syncer(config, shard, incarnation, self._store, began_at=self._start_time)
    if self._restored is not None and incarnation == self._first_incarnation:
      state = self._restored.resume(state)
    saver = self._saver(recorder, faults)
    role = Syncer(state, config, self.plan, self._store, Runtime(endpoint, recorder, saver))
    try:
      role.run(faults, self.stop.is_set)
    finally:
      role.close()
      self._close(endpoint, saver)

  def _saver(self, recorder: Recorder, faults: Faults) -> Saver | None:
    if self._storage is None:
      return None
    return Saver(self._storage, recorder.role, recorder.incarnation, recorder, faults.disk)

  def _close(self, endpoint: FaultyEndpoint, saver: Saver | None) -> None:
    endpoint.close()
    if saver is not None:
      saver.close(self.config.network.drain_seconds if self._drains else 0.0)

  # --- supervision --------------------------------------------------------------------------------

  def _record(self, role: str, incarnation: int) -> Recorder:
    listeners = [*self._listeners, self._note_global_step, self._profiler]
    return Recorder(self.workdir, role, incarnation, self._start_time, listeners=listeners)

  def _note_global_step(self, event: Event) -> None:
    if event.kind == "step":
      self._global_step = max(self._global_step, event.global_step)

  def _connect(self, address: str, faults: Faults) -> FaultyEndpoint:
    endpoint = FaultyEndpoint(self._hub.connect(address), faults.messages)
    faults.cut = endpoint.close
    return endpoint

  def _start(self, name: str, life: int, afresh: bool) -> None:
    kind, number = parse_role(name)
    faults = self._faults.get(name) or self._new_faults(name)

    def live(incarnation: int, recorder: Recorder) -> None:
      if kind == "learner":
        self._run_learner(number, incarnation, faults, recorder, afresh)
      elif kind == "syncer":
        self._run_syncer(number, incarnation, faults, recorder)
      else:
        with contextlib.closing(self._connect(name, faults)) as endpoint:
          self._evaluate(endpoint, incarnation, recorder)

    self._start_thread(name, self._first_incarnation + life, live)

  def _new_faults(self, name: str) -> Faults:
    """The planned faults of all lives of a role, which performs them itself."""
    plan = [f for f in self._planned if f.role == name and f.action != "join"]
    faults = self._faults[name] = Faults(plan, self._training_since, self._note_fault, name)
    faults.stopped = self.stop
    return faults

  def _requested(self, fault: Fault) -> None:
    if fault.action != "join" and fault.role in self._faults:
      self._faults[fault.role].plan(fault)

  def _observe(self) -> None:
    for duty in (self._hangs.look, self._profiler.look):
      self._guard(duty)

  def _seconds(self) -> float:
    return time.monotonic() - self._training_since

  def _over(self) -> str | None:
    if self.stop.is_set():
      self.leave.set()
    if self.leave.is_set() and not self._drains:
      self._drains = True
      self._stop_at = time.monotonic() + self.config.network.drain_seconds + PATIENCE_SECONDS
      self._feed(Dismiss("learner-"))
    if time.monotonic() >= self._stop_at:
      self.stop.set()
    learners = members(self._state, "learner-").values()
    if self._state.hopeless:
      return "failed"
    if not all(role.ended for role in learners):
      return None
    if all(role.phase == GONE for role in learners):
      return "failed"
    return "stopped" if self.leave.is_set() else "finished"

  def _end(self, reason: str) -> None:
    if reason == "finished":
      self._wait([EVALUATOR_ADDRESS], EVALUATOR_PATIENCE_SECONDS, self.leave.is_set)
    self.stop.set()
    self._feed(Dismiss(""))
    for thread in self._threads.values():
      ended(thread, EVALUATOR_PATIENCE_SECONDS)
    self._profiler.close()

  def _initial_values(self) -> Mapping[int, np.ndarray]:
    """The initial values that the shards still have."""
    all_committed = (self._store.load(p) for p in range(len(self.plan.fragments)))
    return {c.state.index: c.value for c in all_committed if not c.state.version}

  def _save_result(self, params: initial.Assembled, merged_tokens: int) -> None:
    """Saves the shards' values, which are exact, instead of the evaluator's."""
    params, merged_tokens = self._global_params()
    super()._save_result(params, merged_tokens)
    self._saved = params.values_of

  def _global_params(self) -> tuple[initial.Assembled, int]:
    """The global model, and the tokens that it has seen."""
    every = [self._store.load(f.index) for f in self.plan.fragments]
    params = initial.Assembled(self.plan, self.config, {c.state.index: c.value for c in every})
    return params, min(c.state.merged_tokens for c in every)

  def _outcome(self, reason: str) -> RunResult:
    if self.config.sync.num_shards:
      params, merged_tokens = self._global_params()
      same = [params.values_of[p] is value for p, value in self._saved.items()]
      return self._result(reason, params, merged_tokens, saved=bool(same) and all(same))
    gone = {n for n, role in members(self._state).items() if role.phase == GONE}
    left = [m for m in self.islands if learner_address(m) not in gone] or list(self.islands)
    each = {m: self.islands[m].params_on_host() for m in left}
    furthest = max(self._life_steps.get(m, 0) for m in left)  # each life began anew
    seen = furthest * self.config.planned_tokens_per_step
    return RunResult(reason, each[left[0]], each, dict(self.steps), merged_tokens=seen)
