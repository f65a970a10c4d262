"""The processes engine: every island and shard is a process of its own, on one machine's loopback.

The engine divides the machine's GPUs among the islands, as the threads engine does. It starts the
single roles of `engines/single_roles.py`, restarts those that die, performs planned faults with
real signals, and follows the global model with an evaluator of its own. One thread does all of it,
in turns; it reads the children's progress from their event logs.
"""

from __future__ import annotations

import contextlib
import functools
import math
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ddiloco import workdir
from ddiloco.chaos import ask_for
from ddiloco.checkpoint import restore
from ddiloco.checks import require
from ddiloco.config import Config, Fault
from ddiloco.config.schema import INSIDE
from ddiloco.engines.children import Accelerator, Child, Spawn, accelerators, spawn_forked
from ddiloco.engines.engine import MEASURE_SECONDS, Engine, RunResult
from ddiloco.engines.role_process import connect, load_keys
from ddiloco.engines.role_spec import RoleSpec, free_urls, newest, require_shards
from ddiloco.environment import INTERRUPTED
from ddiloco.network import frames
from ddiloco.network.transport import EVALUATOR_ADDRESS
from ddiloco.observe.eventlog import Follower, Recorder
from ddiloco.observe.guards import HangWatch, say, warn
from ddiloco.protocol.events import parse_role
from ddiloco.protocol.supervisor import DOWN, Exited, Left, Working
from ddiloco.roles import initial
from ddiloco.roles.evaluator import Measure
from ddiloco.runtime import Runtime
from ddiloco.training import data
from ddiloco.training.devices import Shares, attention_path

FOLLOW_SECONDS = 0.2
SHORTEST_LIFE_SECONDS = 1.1  # between two starts: incarnations count whole seconds
AT_WORK = ("joined", "owns")  # events after which a role counts as started
STILL = "No thread of its process runs: it is stopped, or C code keeps Python's lock."


class ProcessesEngine(Engine):
  """One run. Everything that can be wrong with config, data or devices is found on construction.

  Args:
    config: the run's.
    workdir: event logs go to `workdir/events`, what the processes print to `workdir/logs`.
    corpus: opened training data; the children open their own.
    measure: the held-out measures of a parameter tree, for the evaluator.
  """

  shortest_life_seconds, processes = SHORTEST_LIFE_SECONDS, True
  cpu_only = False  # whether learners get the flag --cpu; children of this process inherit it

  def __init__(self, config: Config, workdir: Path, corpus: data.Source, measure: Measure | None):
    require_shards(config)
    super().__init__(config, workdir, measure)
    self._found = self._look()
    gpus = self._found and self._found[0].platform == "gpu"
    self._shares = Shares(config, self._found) if gpus else None  # None: they take what they see
    for m in range(config.num_islands()):
      data.Stream(corpus, config, m)  # refuses what the children would refuse
      self._check(m)
    self._follow_at = 0.0
    self._children: dict[str, Child] = {}
    self._hangs = HangWatch(config.run.hang_seconds, lambda: self._recorder, seen=lambda _: STILL)

  def _begin(self) -> None:
    self._go_on(keep=False)  # roles find their parts of the snapshot themselves
    self._started = workdir.join(self.workdir, self.config)
    self._recorder = self._record("engine", 0)
    self._follower = Follower(self.workdir)
    self._follower.skip()  # events of an earlier session of this run are not news

  def _prepare(self) -> None:
    self._spec = self._place()
    now = frames.seconds_since_2020()
    self._first_evaluator = max(now, newest(self.workdir, now, EVALUATOR_ADDRESS) + 1)
    self._evaluator_keys = load_keys(self._spec, EVALUATOR_ADDRESS)  # or the run is refused

  # --- supervision --------------------------------------------------------------------------------

  def _look(self) -> Sequence[Accelerator]:
    """The accelerators that this engine has to divide."""
    return accelerators()

  def _check(self, learner: int) -> None:
    """Refuses an island that its processes would refuse: for its devices, mesh, batch or attention.

    Raises:
      ConfigError: says what.
    """
    self._gpus(learner)
    island = self.config.islands.island(learner)
    seen = self._found if self._shares is None else self._shares.of(learner)
    count = island.devices or max(1, len(seen) // island.hosts) * island.hosts
    rule = f"learner {learner} sees {len(seen)} devices"
    good = not seen or count <= len(seen)  # on the CPU a process makes as many as it is to have
    require(good, "islands.devices", island.devices, rule, "lower it")
    island.require_even_batch(count, self.config.inner.accumulation_steps, learner)
    attention_path(island, self.config.model, seen[0].platform if seen else "cpu")

  def _gpus(self, learner: int) -> list[list[str]]:
    """The flags by which each host of an island gets its GPUs.

    Raises:
      ConfigError: too few are left, or devices that are no GPUs are the first learner's.
    """
    hosts = self.config.islands.island(learner).hosts
    if self._shares is None:
      rule = f"several processes cannot divide {len(self._found)} devices that are no GPUs"
      alone = not self._found or (learner == 0 and hosts == 1)
      require(alone, "--engine", "processes", rule, "use --engine=threads")
      return [[]] * hosts
    group = self._shares.of(learner)
    rule = f"learner {learner} gets {len(group)} GPUs, too few for its processes"
    require(len(group) >= hosts, "islands.hosts", hosts, rule, "lower it, or add GPUs")
    each = len(group) // hosts
    parts = (group[k * each : (k + 1) * each] for k in range(hosts))
    return [[f"--gpus={','.join(str(gpu.number) for gpu in part)}"] for part in parts]

  def _place(self) -> RoleSpec:
    """Where roles reach the shards: on free ports of loopback, the same for all lives."""
    urls = free_urls(self.config.sync.num_shards)
    return RoleSpec(self.workdir, workdir.run_name(self.workdir), tuple(urls))

  def _spawn(self, name: str, host: int) -> Spawn:
    """The function that starts a role's process on this host of its island."""
    return spawn_forked

  def _meeting(self, learner: int) -> str:
    """The url where the hosts of an island meet."""
    return free_urls(1)[0]

  def _start(self, name: str, life: int, afresh: bool) -> None:
    if name == EVALUATOR_ADDRESS:
      if "syncer-" in self._state.dismissed:
        return None  # what its last life had is the newest that is left
      self._evaluated = None  # what its last life had is older than what the shards have
      return self._start_thread(name, self._first_evaluator + life, self._run_evaluator)
    # A role that starts again finds its config, also where the workdir was deleted under the run.
    workdir.join(self.workdir, self.config, self._started)
    commands = self._commands(name)
    if name not in self._children:
      spawns = [self._spawn(name, host) for host in range(len(commands))]
      self._children[name] = Child(name, self.workdir, spawns)
    self._children[name].start(commands)

  def _commands(self, name: str) -> list[list[str]]:
    """The commands of a role's processes, for its next life."""
    (kind, number), spec = parse_role(name), self._spec
    if kind == "syncer":
      return [spec.command("syncer", f"--shard={number}", f"--bind={spec.syncers[number]}")]
    flags = [f"--learner={number}", *(["--cpu"] if self.cpu_only else [])]
    gpus = self._gpus(number)
    if len(gpus) > 1:
      flags.append(f"--hosts={self._meeting(number)}")
    return [spec.command("learner", *flags, f"--host={k}", *own) for k, own in enumerate(gpus)]

  def _requested(self, fault: Fault) -> None:
    if fault.action == "join":
      self._check(parse_role(fault.role)[1])
    super()._requested(fault)

  def _observe(self) -> None:
    children = self._children.values()
    ended = {child: status for child in children if (status := child.poll()) is not None}
    if ended or time.monotonic() >= self._follow_at:  # what a life has logged, before its next one
      self._follow_at = time.monotonic() + FOLLOW_SECONDS
      self._guard(self._follow)
    for child, status in ended.items():
      self._guard(self._on_exit, child, status)
    self._guard(self._watch)

  def _watch(self) -> None:
    """Kills processes that hang as a whole; one in which only the role's loop hangs ends itself,
    after the same times."""
    for name, child in self._children.items():
      role = self._state.roles[name]
      if not child.running or role.working_since == math.inf or role.held_until > -math.inf:
        self._hangs.end(name)
      elif child.heard():
        self._hangs.beat(name, 0.0)
    for name, silent in self._hangs.look().items():
      if silent > (0.0 if name.startswith("syncer-") else self.config.network.give_up_seconds):
        self._hangs.end(name)
        warn(f"{name}: its process hangs for {silent:.0f} s, and is killed to be started again.")
        self._children[name].strike()

  def _on_exit(self, child: Child, status: int) -> None:
    """Handles a process that has ended. If the run ends, or it ended in good order, its role needs
    no other process; but learners that end still need a shard, until it is asked to end, too."""
    reason, name = child.bury(status), child.name
    role = self._state.roles[name]
    early = name.startswith("syncer-") and not self._merged()
    ending = self._ending and (not early or role.asked_to_end)
    asked = ending or role.asked_to_end
    # SIGTERM ends a process that has not begun. One that heard a Ctrl-C itself, as where a service
    # manager sends it to all processes of a run, says so by its status, and has lost nothing.
    good = (status == 0 and not early) or (asked and status in (-signal.SIGTERM, INTERRUPTED))
    if role.kill is None and (ending or good):
      if not good:
        self._note_lost(name, reason)
      self._feed(Left(name))
    else:
      self._feed(Exited(name, time.monotonic(), reason))

  def _strike(self, fault: Fault) -> None:
    if fault.action in INSIDE:
      return ask_for(self.workdir, fault)
    if fault.action == "kill":
      self._children[fault.role].strike()
    super()._strike(fault)

  def _hold(self, name: str, held: bool) -> None:
    self._children[name].hold(held)

  def _terminate(self, name: str) -> None:
    super()._terminate(name)
    if name in self._children:
      self._children[name].terminate()

  def _merged(self) -> bool:
    """Whether the global model is final, and the evaluator has it."""
    return self._evaluated is not None and self._evaluated.finished

  def _follows(self) -> bool:
    """Whether the evaluator has the whole model, and has not died since."""
    down = self._state.roles[EVALUATOR_ADDRESS].phase == DOWN
    return not down and self._evaluated is not None and self._evaluated.joined

  def _snapshot_has_the_end(self) -> bool:
    return self._global_step <= max(0, restore.newest_global_step(self._storage))

  def _dismiss(self, kind: str) -> None:
    # Once shards have ended no role has what an evaluator lacks that was just started again.
    if kind == "syncer-" and not self._snapshot_has_the_end():
      follows = self._take_turns(self._follows, MEASURE_SECONDS)
      self._evaluated = self._evaluated if follows else None
    super()._dismiss(kind)

  def _end(self, reason: str) -> None:
    super()._end(reason)
    # The shards' last messages have arrived, and the evaluator's next turn takes them in.
    self._wait([EVALUATOR_ADDRESS], 1.0)

  def _kill(self) -> None:
    for child in self._children.values():  # first: a further Ctrl-C ends the waits that follow
      child.strike()
    super()._kill()
    for child in self._children.values():
      child.kill()

  def _finish(self, reason: str) -> None:
    super()._finish(reason)
    self._guard(self._follow)

  # --- events -------------------------------------------------------------------------------------

  def _record(self, role: str, incarnation: int) -> Recorder:
    return Recorder(self.workdir, role, incarnation, self._started, time.time)

  def _follow(self) -> None:
    """Passes new events to the listeners, and takes the global step from them."""
    for event in self._follower.poll():
      if event.kind == "step":
        self._global_step = max(self._global_step, event.global_step)
        ago = time.time() - self._started - event.time
        self._training_since = min(self._training_since, time.monotonic() - ago)
      elif event.kind in AT_WORK:
        self._feed(Working(event.role, time.monotonic()))
      elif event.kind == "crash":
        self._crashes(event.trace, f"{event.role} crashed\n{event.trace}")
      for listener in self._listeners:
        self._guard(listener, event)

  def _run_evaluator(self, recorder: Recorder) -> None:
    who = EVALUATOR_ADDRESS, recorder.incarnation, self._evaluator_keys
    with contextlib.closing(connect(self.config, self.plan, self._spec, *who)) as endpoint:
      make = functools.partial(initial.initial_values, self.config, self.plan)
      runtime = Runtime(self.config, self.plan, endpoint, recorder, initial=make)
      self._evaluate(runtime, lambda: endpoint.broken or endpoint.fenced)

  def _outcome(self, reason: str) -> RunResult:
    role = self._evaluated
    if role is not None and role.joined:
      return self._result(reason, role.store.params(), role.exchange.state.merged_tokens)
    if not self._snapshot_has_the_end():
      self._lost[EVALUATOR_ADDRESS] = "it never had the whole model, and no snapshot has the end"
    return self._result(reason, *self._newest_params())

  def _newest_params(self) -> tuple[Mapping[str, np.ndarray], int]:
    """The global model of the newest snapshot, if the evaluator never had a whole model, and the
    tokens that it has seen."""
    storage, every = self._storage, range(len(self.plan.fragments))
    if (newest := restore.newest_global_step(storage)) >= 0:  # gigabytes may take minutes
      say(f"\nNo role had the whole model at the end: that of snapshot {newest} is being read.")
    restored = storage and restore.restore_fragments(storage, every)
    if not restored:
      return initial.initial_params(self.config), 0
    return self._global_params(restored.fragments)
