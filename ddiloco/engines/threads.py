"""The threads engine: all islands and shards in one process, a thread each.

For a laptop (fake CPU devices) and for Pathways (one controller sees all slices). The engine starts
every role, restarts roles that die, performs planned faults on them, and ends when the run's tokens
are merged.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from ddiloco.chaos import Faults, FaultyEndpoint
from ddiloco.checkpoint import restore
from ddiloco.checkpoint.saver import Saver
from ddiloco.checks import is_there
from ddiloco.config import Config, Fault
from ddiloco.core.delta import Store, new_fragment
from ddiloco.engines import role_spec
from ddiloco.engines.engine import Engine, RunResult
from ddiloco.engines.profiler import Profiler
from ddiloco.engines.role_spec import beside
from ddiloco.network import frames
from ddiloco.network.transport import EVALUATOR_ADDRESS, Hub, learner_address
from ddiloco.observe.eventlog import Recorder
from ddiloco.observe.guards import HangWatch, say
from ddiloco.protocol import events
from ddiloco.protocol.events import parse_role
from ddiloco.protocol.learner import unmerged_tokens
from ddiloco.protocol.supervisor import GONE, members
from ddiloco.protocol.values import replace
from ddiloco.roles import initial
from ddiloco.roles.evaluator import Measure
from ddiloco.roles.learner import Learner
from ddiloco.roles.syncer import Syncer
from ddiloco.runtime import Runtime
from ddiloco.training import data, devices
from ddiloco.training.island import Island
from ddiloco.workdir import start_time

DEVICES_SECONDS = 1.0  # between two looks whether a lost slice is back


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
    self._corpus = corpus
    # Opened once: a restarted learner has nothing to prepare that could hold up the others.
    self._streams = {m: data.Stream(corpus, config, m) for m in range(config.num_islands())}
    # No member ever has more than the whole model under way, in either direction.
    model_bytes, receivers = 4 * sum(self.plan.sizes), config.islands.num_learners + 1
    room = receivers * model_bytes + (1 << 30)
    self._hub = Hub(max_bulk_bytes=room)
    self._store: Store = {}
    self._shares = devices.Shares(config, devices.usable())
    shared: dict = {}  # equal islands' programs
    self.islands = islands or {
      m: Island(config, m, self._shares.of(m), self.plan, shared) for m in self._streams
    }
    self._unbuilt: set[int] = set()  # islands whose devices have failed, or that join unplanned
    self._life_steps: dict[int, int] = {}  # learner -> steps of its newest life; without shards
    self._restored: restore.Restored | None = None
    self._first_incarnation = 0
    self._faults: dict[str, Faults] = {}
    self._hangs = HangWatch(config.run.hang_seconds, lambda: self._recorder)

  def _begin(self) -> None:
    self._restored = self._go_on(keep=True)
    if is_there(self.workdir / "events"):
      self._start_after(role_spec.newest(self.workdir, frames.seconds_since_2020()))
    # Where the clock was set back, the run began now: a shard believes what there was time for.
    self._start_time = time.monotonic() - max(0.0, time.time() - start_time(self.workdir))
    self._profiler = Profiler(self.workdir, lambda: self._recorder)
    self._recorder = self._record("engine", 0)

  def _prepare(self) -> None:
    beside(self._compile_all, self._leave_early)
    self._training_since = time.monotonic()  # faults by time count from here, not from compiling

  def _leave_early(self) -> None:
    if self.leave.is_set():
      raise KeyboardInterrupt

  # --- roles --------------------------------------------------------------------------------------

  def _compile_all(self) -> None:
    # A thread for each island: an island that waits for equal islands' programs holds up no others.
    with concurrent.futures.ThreadPoolExecutor(len(self.islands)) as pool:
      list(pool.map(self._compile, self.islands))
    self._seed()

  def _start_after(self, incarnation: int) -> None:
    """Sets the first incarnation above `incarnation`, the greatest of the run's earlier lives."""
    after = self._first_incarnation, incarnation + 1
    self._first_incarnation = max(*after, frames.seconds_since_2020())

  def _seed(self) -> None:
    """Puts version 0, or the newest snapshot, into the store; without shards, into the islands."""
    if self._restored is not None:
      self._store |= self._restored.fragments
      for committed in self._store.values():
        self._start_after(committed.state.last_round >> 24)  # the event logs may be lost
      self._restored.fragments.clear()  # else they would stay in memory beside newer versions
    elif self.config.sync.num_shards:
      for p, value in initial.initial_values(self.config, self.plan).items():
        self._store[p] = new_fragment(self.plan.fragments[p], value)
    else:
      self._first = initial.initial_params(self.config)
      for island in self.islands.values():
        island.load(self._first)

  def _compile(self, m: int) -> None:
    seconds = self.islands[m].compile()
    self._recorder.record(events.Compiled(target=learner_address(m), seconds=round(seconds, 3)))

  def _run_learner(self, m: int, faults: Faults, recorder: Recorder, afresh: bool) -> None:
    if m in self._unbuilt and not self._build(m, faults):
      return
    try:
      self._train(m, faults, recorder, afresh)
    except Exception as error:
      if devices.lost_devices(error):
        self._unbuilt.add(m)
      raise

  def _train(self, m: int, faults: Faults, recorder: Recorder, afresh: bool) -> None:
    config, name, island = self.config, recorder.role, self.islands[m]
    new = restore.new_learner(config, self.plan, m, recorder.incarnation, afresh)
    if config.sync.num_shards:
      storage = None if afresh else self._storage  # after a quarantine: its state was bad
      beginning = restore.begin_learner(new, config, island, storage, recorder)
    else:
      beginning = restore.ResumeState(new)
      if recorder.incarnation:
        island.load(self._first)  # no other role has what the island had learned
    drain_seconds = config.network.drain_seconds if config.sync.num_shards else 0.0

    def compiled(program: str, seconds: float) -> None:
      recorder.record(events.Compiled(target=name, seconds=round(seconds, 3), program=program))

    with self._connected(faults, recorder) as runtime, devices.told_what_compiles(compiled):
      role = Learner(beginning, island, self._streams[m].iterate, runtime)
      try:
        stopped = lambda: self._stopped(name, role.usual_seconds)
        role.run(faults, stopped, drain_seconds, self.stop.is_set)
      finally:
        self._life_steps[m] = role.exchange.state.step
      if unmerged := unmerged_tokens(role.exchange.state):
        self._note_lost(name, f"{unmerged} tokens were not merged in time")

  def _build(self, m: int, faults: Faults) -> bool:
    """Makes a new island once its devices answer; False if the run ends before that.

    The programs and arrays of a failed slice are lost with it.
    """
    name, wanted = learner_address(m), list(self.islands[m].mesh.devices.flat)
    say(f"{name}: waits until its {len(wanted)} devices are there")
    while (group := devices.answering(wanted)) is None:
      if name in self._told or self.stop.wait(DEVICES_SECONDS):
        return False
      faults.check(self._global_step)
    self.islands[m] = Island(self.config, m, group, self.plan)
    self._compile(m)
    if not self.config.sync.num_shards:
      self.islands[m].load(self._first)
    self._unbuilt.discard(m)
    return True

  def _run_syncer(self, shard: int, faults: Faults, recorder: Recorder) -> None:
    config, life, name = self.config, recorder.incarnation, recorder.role
    state = restore.new_syncer(config, shard, life, self._store, began_at=self._start_time)
    if self._restored is not None and life == self._first_incarnation:
      state = self._restored.resume(state)
    with self._connected(faults, recorder) as runtime:
      role = Syncer(state, self._store, runtime)
      with contextlib.closing(role):
        role.run(faults, lambda: self._stopped(name, 0.0))

  def _stopped(self, name: str, usual_seconds: float | None) -> bool:
    """Whether the role is asked to end; its loop asks in each turn, which is its sign of life."""
    self._hangs.beat(name, usual_seconds)
    return name in self._told or self.stop.is_set()

  @contextlib.contextmanager
  def _connected(self, faults: Faults, recorder: Recorder) -> Iterator[Runtime]:
    """What a role runs in: a connection, and what saves its parts of snapshots, both closed after
    its life."""
    self._works(recorder.role)
    endpoint = FaultyEndpoint(self._hub.connect(recorder.role), faults.messages)
    faults.cut, saver = endpoint.close, None
    if self._storage is not None and recorder.role != EVALUATOR_ADDRESS:
      saver = Saver(self._storage, recorder.role, recorder.incarnation, recorder, faults.disk)
    try:
      parts = endpoint, recorder, saver
      yield Runtime(self.config, self.plan, *parts, initial=self._initial_values)
    finally:
      self._hangs.end(recorder.role)
      endpoint.close()
      if saver is not None:
        saver.close(self.config.network.drain_seconds if self._ending else 0.0)

  # --- supervision --------------------------------------------------------------------------------

  def _record(self, role: str, incarnation: int) -> Recorder:
    listeners = [*self._listeners, self._profiler]
    return Recorder(self.workdir, role, incarnation, self._start_time, listeners=listeners)

  def _start(self, name: str, life: int, afresh: bool) -> None:
    kind, number = parse_role(name)
    if name not in self._faults:  # it performs those of all its lives itself
      plan = [f for f in self._planned if f.role == name and f.action != "join"]
      self._faults[name] = Faults(plan, self._training_since, self._recorder.record, name)
    faults = self._faults[name]
    faults.stopped.clear()

    def live(recorder: Recorder) -> None:
      if kind == "learner":
        self._run_learner(number, faults, recorder, afresh)
      elif kind == "syncer":
        self._run_syncer(number, faults, recorder)
      else:
        with self._connected(faults, recorder) as runtime:
          self._evaluate(runtime)

    self._start_thread(name, self._first_incarnation + life, live)

  def _requested(self, fault: Fault) -> None:
    if fault.action == "join":
      self._make_room(parse_role(fault.role)[1])
      super()._requested(fault)
    elif fault.role in self._faults:
      self._faults[fault.role].plan(fault)

  def _make_room(self, m: int) -> None:
    """Gives a learner that was not planned devices of its own; its first life compiles.

    Raises:
      ConfigError: no devices are left for it.
    """
    if m not in self.islands:
      group = self._shares.of(m)
      self._streams[m] = data.Stream(self._corpus, self.config, m)
      self.islands[m] = Island(self.config, m, group, self.plan)
      self._unbuilt.add(m)

  def _observe(self) -> None:
    self._hangs.look()
    self._global_step = max(self._global_step, *self._profiler.steps.values(), 0)

  def _merged(self) -> bool:
    if self.config.sync.num_shards:
      merged = min(committed.state.merged_tokens for committed in self._store.values())
      return merged >= self.config.run.total_tokens
    learners = members(self._state, "learner-").values()
    stopped = self.stop.is_set() or self._state.hopeless  # else learners end at the run's end
    return not stopped and all(role.ended for role in learners)

  def _end(self, reason: str) -> None:
    if reason != "failed":  # else learners would wait in vain until their work is merged
      super()._end(reason)

  def _terminate(self, name: str) -> None:
    super()._terminate(name)
    self._faults[name].stopped.set()

  def _kill(self) -> None:
    self.stop.set()
    super()._kill()

  def _finish(self, reason: str) -> None:
    self._profiler.close()
    super()._finish(reason)

  def _initial_values(self) -> Mapping[int, np.ndarray]:
    """The initial values that the shards still have."""
    return {p: c.value for p, c in self._store.items() if not c.state.version}

  def _save_result(self, params: initial.Assembled, merged_tokens: int) -> None:
    """Saves the shards' values, which are exact, instead of the evaluator's."""
    super()._save_result(*self._global_params(self._store))

  def _outcome(self, reason: str) -> RunResult:
    if self.config.sync.num_shards:
      result = self._result(reason, *self._global_params(self._store))
      exact = self.config.sync.publish_codec == "f32"  # else the evaluator's values are rounded
      return result if exact else replace(result, loss=None)
    roles = members(self._state)  # without learners whose planned join has not come
    built = [m for m in self.islands if learner_address(m) in roles and m not in self._unbuilt]
    left = [m for m in built if roles[learner_address(m)].phase != GONE] or built
    each, lost = dict[int, dict[str, np.ndarray]](), list[str]()
    for m in left:
      try:
        each[m] = self.islands[m].params_on_host()
      except Exception as error:  # its devices have failed by now, and no other island's
        lost.append(f"{learner_address(m)}: {type(error).__name__}: {error}")
    if not each:
      lost = ["the devices of all islands have failed, with what was learned there"]
    furthest = max((self._life_steps.get(m, 0) for m in each), default=0)  # each life began anew
    seen = furthest * self.config.planned_tokens_per_step
    first = next(iter(each.values()), self._first)
    return RunResult(reason, first, each, "; ".join(lost), merged_tokens=seen)
