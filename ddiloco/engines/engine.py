"""What every engine does around its roles: begin a run, watch over the roles, and end the run.

`protocol/supervisor.py` decides what to do about roles. An engine feeds it what happens to roles,
and performs the actions it returns, on one thread, in turns.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ddiloco import chaos
from ddiloco.chaos import fault_requests
from ddiloco.checkpoint import restore, weights
from ddiloco.checkpoint.snapshots import Storage
from ddiloco.checks import lasts
from ddiloco.config import Config, ConfigError, Fault
from ddiloco.config.schema import INSIDE
from ddiloco.core.delta import Store
from ddiloco.core.fragments import Plan
from ddiloco.engines.role_spec import beside, terminates
from ddiloco.network.transport import EVALUATOR_ADDRESS, learner_address, syncer_address
from ddiloco.observe.eventlog import Listener, Recorder
from ddiloco.observe.guards import Guard, Warnings, ended, say, warn
from ddiloco.protocol import events, supervisor
from ddiloco.protocol.supervisor import UP
from ddiloco.protocol.values import Frozen, replace
from ddiloco.roles import initial
from ddiloco.roles.evaluator import Evaluator, Measure
from ddiloco.roles.learner import Quarantined
from ddiloco.runtime import Runtime
from ddiloco.workdir import RESULT, run_name

T = TypeVar("T")
TURN_SECONDS = 0.05
PATIENCE_SECONDS = 10.0  # for roles to end, beyond the time to drain
MEASURE_SECONDS = 60.0  # for the evaluator to get the last versions ...
LAST_SECONDS = 3600.0  # ... and to save and measure the final model


class RunResult(Frozen):
  """What a run leaves: the global model, every learner's steps, and why the run ended."""

  reason: str  # finished, stopped (as asked) or failed (it could not reach its end)
  params: Mapping[str, np.ndarray]  # global model; without shards of the first remaining learner
  island_params: dict[int, dict[str, np.ndarray]]  # of remaining learners; only without shards
  lost: str = ""  # work that is lost although the run went on
  saved: bool = False  # `params`, or a newer result, are in WORKDIR/result already
  loss: float | None = None  # held-out, of `params`; None: not measured
  merged_tokens: int = 0  # that `params` have seen; without shards, those of all islands
  why: str = ""  # it cannot reach its end


def newer_result(config: Config, workdir: Path, merged_tokens: int) -> str:
  """That the result that is there has seen more tokens, in words; "": it has not.

  A run that goes on begins at a snapshot, which is older than the result of its earlier start. A
  run that has reached its end has the model that was asked for, also if it was given fewer tokens.
  """
  final = merged_tokens >= config.run.total_tokens
  if final or (there := weights.merged_tokens(workdir / RESULT)) <= merged_tokens:
    return ""
  it = "the result of an earlier start, which stays"
  return f"it has seen {merged_tokens:,} tokens, and {it}, has seen {there:,}"


def save_result(
  config: Config, workdir: Path, params: Mapping[str, np.ndarray], merged_tokens: int
) -> None:
  """Saves the global model as the run's result, unless a newer result is there.

  Raises:
    OSError: it cannot be saved.
  """
  if not newer_result(config, workdir, merged_tokens):
    weights.save(workdir / RESULT, params, initial.said_of_result(config, merged_tokens))


class Engine:
  """One run. Subclasses say how roles are started, observed and ended.

  Args:
    config: the run's.
    workdir: event logs go to `workdir/events`.
    measure: the held-out measures of a parameter tree, for the evaluator; None: never measured.
  """

  shortest_life_seconds = 0.0  # between two starts of a role
  processes = False  # whether learners and shards are processes; else threads of this one

  def __init__(self, config: Config, workdir: Path, measure: Measure | None):
    self.config, self.workdir = config, workdir
    self.plan: Plan = initial.make_plan(config)
    self.leave = threading.Event()  # learners push what they have, and leave
    self.stop = threading.Event()  # as `leave`; where roles are threads, all end at once
    name = run_name(workdir)
    self._storage: Storage | None = restore.open_storage(config, self.plan, workdir, name)
    self._measure = measure
    self._listeners: Sequence[Listener] = ()
    self._recorder: Recorder
    self._state = supervisor.Supervisor(config.run, {})
    self._global_step = 0  # the run's, as far as its newest snapshot or learners have said
    self._training_since = math.inf  # when training began; inf: it has not
    self._crashes = Warnings()  # where roles crashed, once of those alike: the logs have each
    self._guard = Guard("the supervisor")  # if the supervisor ended, all roles would end
    # What happens to roles that are threads, as events of the moment when they are taken. No Queue:
    # its `get` is Python, and where Ctrl-C interrupts that, its lock stays held, or is missed. No
    # SimpleQueue: its `get` forgets its timeout if a signal's handler runs until that has passed.
    self._news: deque[Callable[[], supervisor.Event]] = deque()
    self._awaited = threading.Lock()  # released when there are news
    self._threads: dict[str, threading.Thread] = {}  # of each role, the newest
    self._told: set[str] = set()  # roles whose threads are asked to end
    self._evaluated: Evaluator | None = None  # of the newest incarnation
    self._saving = threading.Lock()  # held while the model of the end is saved
    self._ending = False  # the run is over, and roles end in good order
    self._lost: dict[str, str] = {}  # role -> its work that was not merged at the end

  def run(self, listeners: Sequence[Listener] = ()) -> RunResult:
    """Runs to the end of the token budget, until Ctrl-C or SIGTERM, or until `stop` is set.

    `listeners` get every event of every role (live view, TensorBoard).

    Raises:
      KeyboardInterrupt: the run was asked to end before anything was trained.
    """
    self._listeners = listeners
    with terminates(self.leave):
      self._begin()
      num_shards = self.config.sync.num_shards
      self._recorder.record(
        events.RunStarted(
          name=run_name(self.workdir),
          num_learners=self.config.islands.num_learners,
          num_shards=num_shards,
          num_fragments=len(self.plan.fragments) if num_shards else 0,
          total_tokens=self.config.run.total_tokens,
        )
      )
      try:
        self._prepare()
      except BaseException as error:
        self._finish("stopped" if isinstance(error, KeyboardInterrupt) else "failed")
        raise
      self._plan()
      reason = "stopped"
      try:
        reason = self._take_turns(self._over)
        if reason == "failed":
          warn(f"the run cannot reach its end any more: {self._state.hopeless}.")
        self._ending = True
        self._end(reason)
      except KeyboardInterrupt:  # a second Ctrl-C: do not wait until work is merged
        reason, self._ending = "finished" if self._merged() else reason, False
      finally:
        with contextlib.suppress(KeyboardInterrupt):  # a further Ctrl-C: wait for no role
          self._kill()
    self._finish(reason)
    if reason == "stopped" and self.leave.is_set() and not self._global_step:
      raise KeyboardInterrupt
    self._await_save()
    return replace(self._outcome(reason), why=self._state.hopeless)

  def close(self) -> None:
    """Lets go of what the engine has held since its construction, whether it ran or was refused."""

  # --- for subclasses to define -------------------------------------------------------------------

  def _begin(self) -> None:
    """Finds what the run goes on from, and opens `_recorder`."""

  def _prepare(self) -> None:
    """Work that takes long, before the first role starts."""

  def _roles(self) -> list[str]:
    """The names of the run's first roles, in the order in which they start."""
    shards = [syncer_address(s) for s in range(self.config.sync.num_shards)]
    learners = [learner_address(m) for m in range(self.config.islands.num_learners)]
    # The result of processes is the evaluator's.
    watched = shards and (self.processes or self.config.run.evaluations)
    return [*shards, *learners, *([EVALUATOR_ADDRESS] if watched else [])]

  def _observe(self) -> None:
    """Feeds what has happened to roles since the last turn, except to those that are threads."""

  def _requested(self, fault: Fault) -> None:
    """Takes a fault that was requested during the run, by `_strike` perhaps.

    Raises:
      ConfigError: this engine cannot perform it.
    """
    if fault.action in INSIDE:  # its role has heard of it, too
      self._recorder.record(chaos.struck(fault, self._global_step))
    else:
      self._feed(supervisor.Requested(fault))

  def _merged(self) -> bool:
    """Whether the run has reached its end."""

  def _start(self, name: str, life: int, afresh: bool) -> None:
    """Starts a role's next life. An exception counts as the end of that life."""

  def _strike(self, fault: Fault) -> None:
    """Performs a planned fault and logs it; stalls of a role go by `_hold`, joins by `_start`."""
    self._recorder.record(chaos.struck(fault, self._global_step))

  def _hold(self, name: str, held: bool) -> None:
    """Stops a role where it is, or lets it go on."""

  def _terminate(self, name: str) -> None:
    """Asks a role to end in good order."""
    self._told.add(name)

  def _record(self, role: str, incarnation: int) -> Recorder:
    """The recorder of a life's events."""

  def _outcome(self, reason: str) -> RunResult:
    """What the run leaves, once all its roles have ended."""

  # --- from the beginning to the end --------------------------------------------------------------

  def _go_on(self, keep: bool) -> restore.Restored | None:
    """Says what the run goes on from, or refuses; with the snapshot's fragments if `keep`."""
    storage, tried, every = self._storage, list[str](), range(len(self.plan.fragments))
    if (newest := restore.newest_global_step(storage)) >= 0:  # gigabytes may take minutes
      say(f"\nThe newest snapshot in {self.workdir}, {newest}, is being read and checked.")
    found = restore.restore_fragments(storage, every, tried, keep) if storage else None
    restore.go_on(self.config, self.workdir, storage, found.snapshot if found else None, tried)
    return found

  def _over(self) -> str | None:
    """Why the run is over: finished, stopped or failed; None: it goes on."""
    if self._merged():
      return "finished"
    if self.leave.is_set() or self.stop.is_set():
      return "stopped"
    if self._state.hopeless:
      return "failed"
    return None

  def _end(self, reason: str) -> None:
    """Ends learners and shards in good order: learners push their work while shards merge it."""
    if reason == "finished":  # learners that are up know it, and end by themselves
      learners = supervisor.members(self._state, "learner-").items()
      self._wait([name for name, role in learners if role.phase == UP], PATIENCE_SECONDS)
    self._dismiss("learner-")
    if reason == "finished":
      late = self._wait([EVALUATOR_ADDRESS], MEASURE_SECONDS, asked := self.leave.is_set)
      if late and not asked() and self._evaluated is not None and self._evaluated.finished:
        say("\nAll is merged. The final model is being saved and measured (Ctrl-C: no longer).")
        self._wait(late, LAST_SECONDS, asked)
    self._dismiss("syncer-")

  def _dismiss(self, kind: str) -> None:
    """Asks all roles of a kind to end, and waits until they have brought out what they have."""
    self._feed(supervisor.Dismiss(kind))
    seconds = self.config.network.drain_seconds + PATIENCE_SECONDS
    for name in self._wait([*supervisor.members(self._state, kind)], seconds):
      late = f"not ended within {seconds:g} s, and killed"
      warn(f"{name}: {late}.")
      self._note_lost(name, late)

  def _note_lost(self, name: str, why: str) -> None:
    """Keeps in mind that a role ends without having brought out its work, if it had any and the run
    needs that: once all is merged it needs none, and the evaluator has what the shards had."""
    # A process that had not begun its work has said so, by its exit status.
    worked = self.processes or self._state.roles[name].working_since < math.inf
    if self._ending and worked and name.startswith("learner-") and not self._merged():
      self._lost[name] = why

  def _kill(self) -> None:
    """Ends at once all roles that still live."""
    self._feed(supervisor.Dismiss(""))
    for thread in self._threads.values():
      ended(thread, MEASURE_SECONDS)

  def _await_save(self) -> None:
    """Waits for the evaluator's save, without a limit: a large model on a slow disk takes long. One
    that hangs in its disk looks the same, so a second Ctrl-C ends the wait."""
    if self._saving.locked():
      again = "a second Ctrl-C ends it without its result, and the same command goes on with it"
      say(f"The result is still being saved, and the run waits for that ({again}).")
    beside(self._saving.acquire)
    self._saving.release()

  # --- turns --------------------------------------------------------------------------------------

  def _plan(self) -> None:
    """Sets the supervisor's first state; faults of steps before the current one are left out."""
    config = self.config
    began_at = restore.newest_global_step(self._storage)
    self._global_step = max(0, began_at)
    self._planned = chaos.still_planned(config.chaos.of_roles(), began_at)
    self._requests = fault_requests(self.workdir, news_only=True)
    self._state = supervisor.Supervisor(
      config.run,
      dict.fromkeys(self._roles(), supervisor.Role()),
      tuple(f for f in self._planned if self.processes or f.action == "join"),
      quorum=config.sync.min_quorum if config.sync.num_shards else 1,
      # When learners have left, the evaluator may be behind, or about to start again.
      patience_seconds=config.network.give_up_seconds,
      shortest_life_seconds=self.shortest_life_seconds,
    )

  def _take_turns(self, over: Callable[[], T], seconds: float = math.inf) -> T:
    """Takes turns until `over()` is true, or for so long; returns what it returned last."""
    deadline = time.monotonic() + seconds
    while True:
      for duty in (self._observe, self._hear):
        self._guard(duty)
      now = time.monotonic()
      trained_seconds = max(0.0, now - self._training_since)
      self._feed(supervisor.Tick(now, self._global_step, trained_seconds))
      if (found := over()) or time.monotonic() >= deadline:
        return found
      due_seconds = supervisor.next_wake(self._state) - time.monotonic()  # a restart, for example
      self._awaited.acquire(timeout=max(0.0, min(TURN_SECONDS, due_seconds)))
      while self._news:
        self._feed(self._news.popleft()())

  def _wait(
    self, names: Sequence[str], seconds: float, unless: Callable[[], bool] = lambda: False
  ) -> list[str]:
    """Takes turns until these roles have ended, for `seconds` at most; returns the late ones."""

    def late() -> list[str]:
      return [n for n in names if n in self._state.roles and not self._state.roles[n].ended]

    self._take_turns(lambda: not late() or unless(), seconds)
    return late()

  def _feed(self, event: supervisor.Event) -> None:
    """Tells the supervisor, and performs its actions; a failed action holds up no other."""
    self._state, actions = supervisor.supervise(self._state, event)
    for action in actions:
      self._guard(self._perform, action)

  def _perform(self, action: supervisor.Action) -> None:
    match action:
      case supervisor.Start(name, life, afresh):
        if life:
          self._recorder.record(events.Restart(target=name))
        try:
          self._told.discard(name)
          self._start(name, life, afresh)
        except Exception as error:  # no memory is left, for example: an exit like any other
          self._feed(supervisor.Exited(name, time.monotonic(), f"cannot be started: {error}"))
          if not isinstance(error, OSError):
            raise
      case supervisor.Lost(name, reason):
        self._recorder.record(events.Exit(target=name, reason=reason))
      case supervisor.Strike(fault):
        self._strike(fault)
      case supervisor.Hold(name, held):
        self._hold(name, held)
      case supervisor.Terminate(name):
        self._terminate(name)

  def _hear(self) -> None:
    """Takes faults that were requested during the run, by the dashboard for example."""
    for _, fault in self._requests.poll():
      try:
        self._requested(fault)
      except ConfigError as error:
        warn(f"{fault.role} cannot {fault.action} a run of {type(self).__name__}: {error}")

  def _finish(self, reason: str) -> None:
    self._recorder.record(events.RunFinished(reason=reason))
    self._recorder.close()

  # --- roles that are threads ---------------------------------------------------------------------

  def _start_thread(self, name: str, incarnation: int, live: Callable[[Recorder], None]) -> None:
    """Starts a life, `live(recorder)`; its failure ends no other thread."""
    recorder = self._record(name, incarnation)
    arguments = name, recorder, live
    thread = threading.Thread(target=self._live, args=arguments, name=name, daemon=True)
    self._threads[name] = thread
    try:
      thread.start()
    except RuntimeError:  # there are too many; the recorder has one as well
      recorder.close()
      raise

  def _live(self, name: str, recorder: Recorder, live: Callable[[Recorder], None]) -> None:
    how: dict[str, Any] = {}  # it ended; nothing: in good order
    with recorder:
      try:
        live(recorder)
      except chaos.Killed as killed:
        how = {"kill": killed.fault}
      except Quarantined as error:
        how = {"reason": f"quarantined: {error}", "afresh": True}
      except BaseException as error:  # a user's program may also raise SystemExit
        trace = traceback.format_exc()
        recorder.record(events.Crash(trace=trace))
        if not lasts(error):  # else the text says all
          self._crashes(trace, f"{name} crashed\n{trace}")
        how = {"reason": f"{type(error).__name__}: {error}"}
        self._note_lost(name, how["reason"])
    exited = lambda: supervisor.Exited(name, time.monotonic(), **how)
    self._tell(exited if how else lambda: supervisor.Left(name))

  def _works(self, name: str) -> None:
    """To be called by a life that begins its work, once it has all that it had to wait for."""
    self._tell(lambda: supervisor.Working(name, time.monotonic()))

  def _tell(self, news: Callable[[], supervisor.Event]) -> None:
    """Tells the engine's own thread."""
    self._news.append(news)
    with contextlib.suppress(RuntimeError):  # there are others, and the lock is not held
      self._awaited.release()

  def _evaluate(self, runtime: Runtime, broken: Callable[[], str] = lambda: "") -> None:
    """One life of the evaluator; `broken` says why its endpoint works no more."""

    def stopped() -> bool:
      if reason := broken():
        raise ConnectionError(reason)
      return EVALUATOR_ADDRESS in self._told

    life = runtime, runtime.recorder.incarnation, self._save_result
    self._evaluated = role = Evaluator(self._measure, *life)
    role.run(stopped)

  def _global_params(self, store: Store) -> tuple[initial.Assembled, int]:
    """The global model of a store, and the tokens that it has seen."""
    values = {p: committed.value for p, committed in store.items()}
    seen = min(committed.state.merged_tokens for committed in store.values())
    return initial.Assembled(self.plan, self.config, values), seen

  def _result(self, reason: str, params: Mapping[str, np.ndarray], merged_tokens: int) -> RunResult:
    """The result of a run with shards; `params`: the global model, which has seen these tokens."""
    lost = "; ".join(f"{name}: {what}" for name, what in sorted(self._lost.items()))
    result = RunResult(reason, params, {}, lost, merged_tokens=merged_tokens)
    if (known := self._evaluated) is None:
      return result
    return replace(result, saved=known.saved, loss=known.final_loss)

  def _save_result(self, params: initial.Assembled, merged_tokens: int) -> None:
    """Saves the final model, as the evaluator has it, before it is measured."""
    with self._saving:
      save_result(self.config, self.workdir, params, merged_tokens)
