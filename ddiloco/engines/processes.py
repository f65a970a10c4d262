"""The processes engine: every island and shard of one machine a process of its own, on loopback.

It starts the single roles of `engines/roles.py`, restarts those that die, performs planned faults
with real signals, and follows the global model with an evaluator of its own. One thread does all of
it, in turns; what the children do is read from their event logs.
"""

from __future__ import annotations

import math
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ddiloco import nursery
from ddiloco.config import Config, ConfigError, Fault
from ddiloco.config.chaos import INSIDE
from ddiloco.engines import attend, workdir
from ddiloco.engines.asked import Asked, ask
from ddiloco.engines.children import Child, Command, Spawn
from ddiloco.engines.outcome import Outcome
from ddiloco.engines.place import Place, free_urls
from ddiloco.observe.events import Event, Listener, Recorder, parse_role
from ddiloco.observe.follow import Follower
from ddiloco.resilience import chaos
from ddiloco.runtime import initial
from ddiloco.runtime.evaluator import Evaluator
from ddiloco.runtime.network import seconds_since_2020
from ddiloco.runtime.rejoin import newest_clock
from ddiloco.runtime.transport import EVALUATOR_ADDRESS, learner_address, syncer_address
from ddiloco.training import data

TURN_SECONDS = 0.05
FAULT_TURN_SECONDS = 0.01  # while a process is held up on purpose
FOLLOW_SECONDS = 0.2
PATIENCE_SECONDS = 10.0  # for a process or the evaluator to end, over what it takes to drain
MEASURE_SECONDS = 60.0  # for the evaluator to have the last versions, or to finish a measurement


class ProcessesEngine:
  """One run. Everything that can be wrong with config or data is found on construction.

  Args:
    config: the run's.
    workdir: event logs go to `workdir/events`, what the processes print to `workdir/logs`.
    corpus: opened training data; the children open their own.
    loss: held-out loss of a parameter tree, for the evaluator.
  """

  cpu_only = False  # said to learners; those that we start ourselves know it from us

  def __init__(
    self,
    config: Config,
    workdir: Path,
    corpus: data.Corpus,
    loss: Callable[[dict[str, np.ndarray]], float],
  ):
    if not config.sync.num_shards:
      raise ConfigError(
        "sync.num_shards = 0: processes meet at a syncer shard."
        " Fix: set it to 1 or more, or use --engine=threads."
      )
    for m in range(config.num_islands()):
      data.Stream(corpus, config, m)  # refuses what the children would refuse
    self.config = config
    self.workdir = workdir
    self.plan = initial.make_plan(config)
    self.stop = threading.Event()
    self.steps: dict[int, int] = {m: 0 for m in range(config.islands.num_learners)}
    self._loss = loss
    self._listeners: Sequence[Listener] = ()
    self._clock = 0
    self._training_since: float | None = None  # faults by time count from the first step
    self._ending = False
    self._evaluator_stop = threading.Event()
    self._evaluated: Evaluator | None = None  # of the newest incarnation

  def run(self, listeners: Sequence[Listener] = ()) -> Outcome:
    """Runs to the end of the token budget, or until `stop` is set, Ctrl-C or SIGTERM.

    `listeners` get every event of every role (live view, TensorBoard), a moment later.
    """
    nursery.warm()
    self._listeners = listeners
    self._started = workdir.join(self.workdir, self.config)
    self._recorder = self._record("engine", 0)
    self._follower = Follower(self.workdir)
    self._follower.poll()  # what an earlier session of this run has left is not news
    self._recorder.event(
      "run_started",
      name=self.workdir.name,
      num_learners=self.config.islands.num_learners,
      num_shards=self.config.sync.num_shards,
      num_fragments=len(self.plan.fragments),
      total_tokens=self.config.run.total_tokens,
    )
    began_at = newest_clock(self.config, self.plan, self.workdir)
    self._planned = chaos.still_planned(self.config.chaos.of_roles(), began_at)
    self._joins = tuple(fault for fault in self._planned if fault.action == "join")
    self._asked = Asked(self.workdir, news_only=True)
    place = self._place()
    self._children = self._make_children(place)
    evaluator = threading.Thread(target=self._follow_model, args=(place,), name=EVALUATOR_ADDRESS)
    evaluator.daemon = True
    evaluator.start()
    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, lambda *_: self.stop.set()) if in_main else None
    try:
      reason = self._supervise()
    except KeyboardInterrupt:
      reason = "stopped"
    try:
      self._end(reason, evaluator)
    finally:  # also after a second Ctrl-C
      for child in self._children:
        child.kill()
      if in_main:
        signal.signal(signal.SIGTERM, before)
    self._recorder.event("run_finished", reason=reason)
    self._recorder.close()
    self._follow()
    return self._outcome(reason)

  # --- supervision --------------------------------------------------------------------------------

  def _place(self) -> Place:
    """Where the run meets: shards on free ports of loopback, the same for all their lives."""
    urls = free_urls(self.config.sync.num_shards)
    return Place(self.workdir, self.workdir.name, tuple(urls))

  def _make_children(self, place: Place) -> list[Child]:
    self._command = Command(place.workdir, place.syncers, place.keys, self.cpu_only)
    run, config = self._command, self.config
    shards = {syncer_address(s): run.syncer(s, url) for s, url in enumerate(place.syncers)}
    learners = {learner_address(m): run.learner(m) for m in range(config.islands.num_learners)}
    return [
      Child(name, command, self.workdir, config.run, self._faults(name), self._spawn(name))
      for name, command in (shards | learners).items()
    ]

  def _faults(self, name: str) -> list[Fault]:
    return [fault for fault in self._planned if fault.role == name and fault.action != "join"]

  def _spawn(self, name: str) -> Spawn:
    """What starts the process of a role."""
    return nursery.spawn

  def _of(self, kind: str) -> list[Child]:
    return [child for child in self._children if child.name.startswith(kind)]

  def _supervise(self) -> str:
    """Until the run is over or never could be; returns why."""
    follow_at = 0.0
    all_left_at: float | None = None
    while True:
      now = time.monotonic()
      if now >= follow_at:
        follow_at = now + FOLLOW_SECONDS
        self._follow()
        self._hear()
        self._welcome(now)
      held = [self._tend(child, now) for child in self._children]
      if self._merged():
        return "finished"
      if self.stop.is_set():
        return "stopped"
      if self._hopeless():
        return "failed"
      if not all(child.ended for child in self._of("learner/")):
        all_left_at = None
      elif all_left_at is None:
        all_left_at = now
      elif now - all_left_at > MEASURE_SECONDS:  # not only the evaluator, a moment behind
        return "stopped"
      self.stop.wait(FAULT_TURN_SECONDS if any(held) else TURN_SECONDS)

  def _tend(self, child: Child, now: float) -> bool:
    """One turn of one child; returns whether it is being held up on purpose."""
    if child.due_to_start(now):
      if child.lives:
        self._recorder.event("restart", target=child.name)
      child.start(now)
    elif (status := child.poll()) is not None:
      early = child.name.startswith("syncer/") and not self._merged()
      reason = child.on_exit(status, now, self._ending, must_stay=early)
      if reason:
        self._recorder.event("exit", target=child.name, reason=reason)
    elif child.running:
      seconds = 0.0 if self._training_since is None else time.time() - self._training_since
      while (fault := child.strike(self._clock, seconds, now)) is not None:
        if fault.action in INSIDE:
          ask(self.workdir, fault)
        else:
          self._note_fault(fault)
      if now >= child.leaves_at:
        child.leaves_at = math.inf
        child.terminate()
    return child.hold(now)

  def _note_fault(self, fault: Fault) -> None:
    self._recorder.event("fault", **chaos.struck(fault, chaos.detail(fault, self._clock)))

  def _hear(self) -> None:
    """What was asked for while the run goes on, by the dashboard or by us."""
    for _, fault in self._asked.poll():
      child = next((child for child in self._children if child.name == fault.role), None)
      if fault.action in INSIDE:
        self._note_fault(fault)
      elif fault.action == "join":
        self._joins = (*self._joins, fault)
      elif child is not None:
        child.plan(fault)

  def _welcome(self, now: float) -> None:
    """Learners that the plan brings in while the run goes on."""
    seconds = 0.0 if self._training_since is None else time.time() - self._training_since
    while True:
      fault, self._joins = chaos.strike(self._joins, self._clock, seconds)
      if fault is None:
        return
      if any(child.name == fault.role for child in self._children):
        continue
      name, number = fault.role, int(fault.role.partition("/")[2])
      command = self._command.learner(number)
      child = Child(
        name, command, self.workdir, self.config.run, self._faults(name), self._spawn(name)
      )
      child.leaves_at = now + fault.seconds if fault.seconds >= 0 else math.inf
      self._children.append(child)
      self._note_fault(fault)

  def _merged(self) -> bool:
    """Whether the global model is as it will be at the end of the run, and the evaluator has it."""
    role = self._evaluated
    return role is not None and role.exchange.state.merged_tokens >= self.config.run.total_tokens

  def _hopeless(self) -> bool:
    """Whether a shard, or every possible quorum, is gone for good: nothing would ever merge."""
    left = sum(not child.gone for child in self._of("learner/"))
    return any(c.gone for c in self._of("syncer/")) or left < self.config.sync.min_quorum

  def _end(self, reason: str, evaluator: threading.Thread) -> None:
    """Everybody leaves in good order: learners bring out their work while shards still merge it."""
    self._ending = True
    drain = self.config.network.drain_seconds
    for kind in ("learner/", "syncer/"):
      if reason == "finished":  # they know it themselves
        self._wait(self._of(kind), PATIENCE_SECONDS)
      for child in self._of(kind):
        child.terminate()
      self._wait(self._of(kind), drain + PATIENCE_SECONDS)
      if reason == "finished":
        evaluator.join(MEASURE_SECONDS)
    # After a stop: what the shards said last has arrived, and is taken in by its next turn.
    evaluator.join(1.0)
    self._evaluator_stop.set()
    evaluator.join(PATIENCE_SECONDS)

  def _wait(self, children: Sequence[Child], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not all(child.ended for child in children) and time.monotonic() < deadline:
      for child in self._children:
        self._tend(child, time.monotonic())
      self._follow()
      time.sleep(TURN_SECONDS)

  # --- what happens -------------------------------------------------------------------------------

  def _record(self, role: str, incarnation: int) -> Recorder:
    return Recorder(self.workdir, role, incarnation, self._started, time.time)

  def _follow(self) -> None:
    """Hands on what has happened since the last time, and learns the run's clock from it."""
    for event in self._follower.poll():
      if event["kind"] == "step":
        self._count(event)
      for listener in self._listeners:
        listener(event)

  def _count(self, event: Event) -> None:
    number = parse_role(event["role"])[1]
    self.steps[number] = self.steps.get(number, 0) + 1
    self._clock = max(self._clock, event["clock"])
    if self._training_since is None:
      self._training_since = self._started + event["time"]

  def _follow_model(self, place: Place) -> None:
    """On its own thread: the evaluator, restarted like every other role."""
    incarnation, keys = seconds_since_2020(), attend.load_keys(place, EVALUATOR_ADDRESS)
    for crashes in range(self.config.run.max_restarts + 1):
      recorder = self._record(EVALUATOR_ADDRESS, incarnation + crashes)
      endpoint = attend.connect(
        self.config, self.plan, place, EVALUATOR_ADDRESS, incarnation + crashes, keys
      )
      try:
        for shard, url in enumerate(place.syncers):
          endpoint.dial(syncer_address(shard), url)
        role = Evaluator(
          self.config, self.plan, self._loss, endpoint, recorder, incarnation + crashes
        )
        self._evaluated = role
        role.run(self._evaluator_stop.is_set)
        return
      except Exception as error:  # nobody else notices, as with every role
        recorder.event("crash", trace=traceback.format_exc())
        reason = f"{type(error).__name__}: {error}"
        self._recorder.event("exit", target=EVALUATOR_ADDRESS, reason=reason)
      finally:
        endpoint.close()
        recorder.close()
      if self._evaluator_stop.wait(self.config.run.restart_seconds * 2**crashes):
        return

  def _outcome(self, reason: str) -> Outcome:
    role = self._evaluated
    if role is not None and role.exchange.state.joined:
      params = role.holder.params
    else:
      params = initial.initial_params(self.config)
    lost = "; ".join(f"{child.name}: {child.lost}" for child in self._children if child.lost)
    return Outcome(reason, params, {}, dict(self.steps), lost)
