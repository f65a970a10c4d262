"""What every engine does around its roles: begin a run, watch over the roles, and end the run.

`protocol/supervisor.py` decides what to do about roles. An engine feeds it what happens to roles,
and performs the actions it returns, on one thread, in turns.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from ddiloco import chaos
from ddiloco.chaos import fault_requests
from ddiloco.checkpoint import weights
from ddiloco.checkpoint.restore import newest_global_step, open_storage
from ddiloco.checkpoint.snapshots import Storage
from ddiloco.config import Config, Fault
from ddiloco.core.fragments import Plan
from ddiloco.engines.role_spec import terminates
from ddiloco.network.transport import EVALUATOR_ADDRESS, Endpoint
from ddiloco.observe.eventlog import Listener, Recorder
from ddiloco.observe.guards import Guard, warn
from ddiloco.protocol import events, supervisor
from ddiloco.roles import initial
from ddiloco.roles.evaluator import Evaluator, Measure
from ddiloco.roles.learner import Quarantined
from ddiloco.runtime import Runtime
from ddiloco.workdir import RESULT, run_name

T = TypeVar("T")
TURN_SECONDS = 0.05
PRESSING_TURN_SECONDS = 0.01  # while a process is held up on purpose
PATIENCE_SECONDS = 10.0  # for roles to end, beyond the time to drain


@dataclasses.dataclass(frozen=True)
class RunResult:
  """What a run leaves: the global model, every learner's steps, and why the run ended."""

  reason: str  # finished, stopped or failed
  params: Mapping[str, np.ndarray]  # global model; without shards of the first remaining learner
  island_params: dict[int, dict[str, np.ndarray]]  # of remaining learners; only without shards
  steps: dict[int, int]  # inner steps of every learner over all incarnations
  lost: str = ""  # work that is lost although the run went on
  saved: bool = False  # `params` are in WORKDIR/result already
  untrained_loss: float | None = None  # held-out, of the initial parameters; None: not measured
  merged_tokens: int = 0  # that `params` have seen; without shards, those of all islands


class NewerResult(Exception):
  """The result that is there has seen more tokens, and stays."""


def save_result(workdir: Path, params: Mapping[str, np.ndarray], merged_tokens: int) -> None:
  """Saves the global model as the run's result.

  A run that goes on begins at a snapshot, which is older than the result of its earlier start.

  Raises:
    NewerResult: as it says; nothing is changed.
    OSError: it cannot be saved.
  """
  there = weights.merged_tokens(workdir / RESULT)
  if there > merged_tokens:
    raise NewerResult(
      f"it has seen {merged_tokens:,} tokens, and the result of an earlier start, which stays, has"
      f" seen {there:,}"
    )
  weights.save(workdir / RESULT, params, {weights.MERGED_TOKENS: str(merged_tokens)})


class Engine:
  """One run. Subclasses say how roles are started, observed and ended.

  Args:
    config: the run's.
    workdir: event logs go to `workdir/events`.
    measure: the held-out measures of a parameter tree, for the evaluator; None: never measured.
  """

  shortest_life_seconds = 0.0  # between two starts of a role
  strikes_roles = False  # whether the supervisor performs planned faults, and not the roles

  def __init__(self, config: Config, workdir: Path, measure: Measure | None):
    self.config, self.workdir = config, workdir
    self.plan: Plan = initial.make_plan(config)
    self.leave = threading.Event()  # learners push what they have, and leave
    self.stop = threading.Event()  # as `leave`; where roles are threads, all end at once
    self.steps: dict[int, int] = {}
    self._measure = measure
    self._listeners: Sequence[Listener] = ()
    self._recorder: Recorder
    self._state = supervisor.init(config.run, ())
    self._global_step = 0  # the run's, as far as learners have reported it
    self._guard = Guard("the supervisor")  # if the supervisor ended, all roles would end
    self._lock = threading.RLock()  # roles that are threads feed the supervisor themselves
    self._news = threading.Event()  # a role that is a thread has fed its end
    self._threads: dict[str, threading.Thread] = {}  # of each role's newest life
    self._told: set[str] = set()  # roles whose threads are asked to end
    self._evaluated: Evaluator | None = None  # of the newest incarnation
    self._saving = threading.Lock()  # held while the model of the end is saved
    self._drains = False  # asked to end in good order
    self._ending = False  # the run is over, and roles end
    self._lost: dict[str, str] = {}  # role -> its work that was not merged at the end

  def run(self, listeners: Sequence[Listener] = ()) -> RunResult:
    """Runs to the end of the token budget, until Ctrl-C or SIGTERM, or until `stop` is set.

    `listeners` get every event of every role (live view, TensorBoard).

    Raises:
      KeyboardInterrupt: the run was asked to end before anything was trained, or asked again while
        it ended.
    """
    self._listeners = listeners
    with terminates(self.leave):
      self._begin()
      self._say_started()
      try:
        self._prepare()
      except KeyboardInterrupt:
        self._finish("stopped")
        raise
      self._plan()
      try:
        reason = self._take_turns(self._over)
        assert reason is not None, "there is no limit"
        if reason == "failed" and self._state.hopeless:
          warn(f"the run cannot reach its end any more: {self._state.hopeless}.")
      except KeyboardInterrupt:  # a second Ctrl-C: do not wait until work is merged
        reason, self._drains = "stopped", False
      self._ending = True
      self._end(reason)
    self._finish(reason)
    with self._saving:
      return self._outcome(reason)

  def close(self) -> None:
    """Lets go of what the engine has held since its construction, whether it ran or was refused."""

  def _say_started(self) -> None:
    """Logs all that a reader of the log needs to know of the run."""
    config = self.config
    started = events.RunStarted(
      name=run_name(self.workdir),
      num_learners=config.islands.num_learners,
      num_shards=config.sync.num_shards,
      num_fragments=len(self.plan.fragments) if config.sync.num_shards else 0,
      total_tokens=config.run.total_tokens,
    )
    self._recorder.record(started)

  # --- for subclasses to define -------------------------------------------------------------------

  def _begin(self) -> None:
    """Finds what the run goes on from, and opens `_recorder`."""
    raise NotImplementedError

  def _prepare(self) -> None:
    """Work that takes long, before the first role starts."""

  def _roles(self) -> list[str]:
    """The names of the run's first roles, in the order in which they start."""
    raise NotImplementedError

  def _seconds(self) -> float:
    """Seconds since training began, 0 before."""
    raise NotImplementedError

  def _observe(self) -> None:
    """Feeds what has happened to roles since the last turn, except to those that are threads."""

  def _requested(self, fault: Fault) -> None:
    """Takes a fault that was requested during the run."""
    raise NotImplementedError

  def _over(self) -> str | None:
    """Why the run is over: finished, stopped or failed; None: it goes on."""
    raise NotImplementedError

  def _start(self, name: str, life: int, afresh: bool) -> None:
    """Starts a role's next life. An exception counts as the end of that life."""
    raise NotImplementedError

  def _strike(self, fault: Fault) -> None:
    """Performs a planned fault and logs it; stalls of a role go by `_hold`, joins by `_start`."""
    self._note_fault(fault, chaos.detail(fault, self._global_step))

  def _hold(self, name: str, held: bool) -> None:
    """Stops a role where it is, or lets it go on."""

  def _terminate(self, name: str) -> None:
    """Asks a role to end in good order."""
    self._told.add(name)

  def _end(self, reason: str) -> None:
    """Ends all roles that still live."""
    raise NotImplementedError

  def _record(self, role: str, incarnation: int) -> Recorder:
    raise NotImplementedError

  def _outcome(self, reason: str) -> RunResult:
    raise NotImplementedError

  def _open_storage(self) -> Storage | None:
    return open_storage(self.config, self.plan, self.workdir, run_name(self.workdir))

  # --- turns --------------------------------------------------------------------------------------

  def _plan(self) -> None:
    """Sets the supervisor's first state; faults of steps before the current one are left out."""
    config = self.config
    began_at = newest_global_step(self._open_storage())
    self._planned = chaos.still_planned(config.chaos.of_roles(), began_at)
    self._requests = fault_requests(self.workdir, news_only=True)
    self._state = supervisor.init(
      config.run,
      self._roles(),
      [f for f in self._planned if self.strikes_roles or f.action == "join"],
      config.sync.min_quorum if config.sync.num_shards else 1,
      self.shortest_life_seconds,
    )

  def _take_turns(self, over: Callable[[], T], seconds: float = math.inf) -> T:
    """Takes turns until `over()` is true, or for so long; returns what it returned last."""
    deadline = time.monotonic() + seconds
    while True:
      for duty in (self._observe, self._hear):
        self._guard(duty)
      self._feed(supervisor.Tick(time.monotonic(), self._global_step, self._seconds()))
      if (found := over()) or time.monotonic() >= deadline:
        return found
      # The next turn is earlier if a restart is due or a role is held up on purpose.
      now = time.monotonic()
      pressing = supervisor.pressing(self._state, now)
      wake_at = now + (PRESSING_TURN_SECONDS if pressing else TURN_SECONDS)
      self._news.wait(max(0.0, min(wake_at, supervisor.next_wake(self._state)) - now))
      self._news.clear()

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
    with self._lock:
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
      self._requested(fault)

  def _note_fault(self, fault: Fault, said: str) -> None:
    self._recorder.record(chaos.struck(fault, said))

  def _finish(self, reason: str) -> None:
    self._recorder.record(events.RunFinished(reason=reason))
    self._recorder.close()

  # --- roles that are threads ---------------------------------------------------------------------

  def _start_thread(
    self, name: str, incarnation: int, live: Callable[[int, Recorder], None]
  ) -> None:
    """Starts a life, `live(incarnation, recorder)`; its failure ends no other thread."""
    arguments = name, incarnation, live
    self._threads[name] = threading.Thread(
      target=self._live, args=arguments, name=name, daemon=True
    )
    self._threads[name].start()

  def _live(self, name: str, incarnation: int, live: Callable[[int, Recorder], None]) -> None:
    end: supervisor.Event = supervisor.Left(name)
    # Islands are compiled before a life begins.
    self._feed(supervisor.Working(name, time.monotonic()))
    try:
      with self._record(name, incarnation) as recorder:
        try:
          live(incarnation, recorder)
        except (chaos.Killed, Quarantined):
          raise
        except Exception:
          recorder.record(events.Crash(trace=traceback.format_exc()))
          raise
    except chaos.Killed as killed:
      end = supervisor.Exited(name, time.monotonic(), kill=killed.fault)
    except Quarantined as error:
      end = supervisor.Exited(name, time.monotonic(), f"quarantined: {error}", afresh=True)
    except Exception as error:
      end = supervisor.Exited(name, time.monotonic(), f"{type(error).__name__}: {error}")
    finally:
      self._feed(end)
      self._news.set()

  def _evaluate(self, endpoint: Endpoint, incarnation: int, recorder: Recorder) -> None:
    """One life of the evaluator."""
    runtime = Runtime(endpoint, recorder, initial=self._initial_values)
    role = Evaluator(self.config, self.plan, self._measure, runtime, incarnation, self._save_result)
    self._evaluated = role
    role.run(lambda: EVALUATOR_ADDRESS in self._told)

  def _result(
    self, reason: str, params: Mapping[str, np.ndarray], merged_tokens: int, saved: bool
  ) -> RunResult:
    """The result of a run with shards; `params`: the global model, which has seen these tokens."""
    lost = "; ".join(f"{name}: {what}" for name, what in sorted(self._lost.items()))
    untrained_loss = None if self._evaluated is None else self._evaluated.untrained_loss
    steps = dict(self.steps)
    return RunResult(reason, params, {}, steps, lost, saved, untrained_loss, merged_tokens)

  def _initial_values(self) -> Mapping[int, np.ndarray]:
    """Fragment -> initial value, as far as this process can make it."""
    return initial.initial_values(self.config, self.plan, range(len(self.plan.fragments)))

  def _save_result(self, params: initial.Assembled, merged_tokens: int) -> None:
    """Saves the final model, as the evaluator has it, before it is measured."""
    with self._saving:
      save_result(self.workdir, params, merged_tokens)
