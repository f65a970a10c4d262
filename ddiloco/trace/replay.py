"""Replay: a run's trace performed again with arrays, and compared bit by bit.

The trace alone determines every value: it says which batch each step took, which steps each push
held, which pushes each commit merged, and when each version was applied. The speed of roles, their
waits and repeated messages change no value. So a replay needs no clock and no network, only the
run's own arithmetic: `core/delta.py`, `training/island.py`.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ddiloco.checkpoint import weights
from ddiloco.checkpoint.snapshots import fingerprint
from ddiloco.config import ChaosConfig, Config, ConfigError
from ddiloco.core import codec, delta
from ddiloco.core.delta import Committed, Deltas, new_fragment
from ddiloco.core.fragments import Plan, gather
from ddiloco.observe.guards import warn
from ddiloco.protocol import events
from ddiloco.protocol.events import parse_role
from ddiloco.protocol.messages import FragmentState
from ddiloco.protocol.values import replace
from ddiloco.roles import initial
from ddiloco.trace.check import check
from ddiloco.trace.interpreter import (
  Held,
  LearnerAlgebra,
  LearnerRole,
  Proof,
  Pushed,
  Schedule,
  ShardAlgebra,
  ShardRole,
  TraceRole,
  Version,
)
from ddiloco.trace.operations import INITIAL, Entry, Key, Operation, Trace, makes
from ddiloco.training import data, devices
from ddiloco.training.island import Island
from ddiloco.workdir import saved_config

# --- The comparison: with the losses and the saved digests in the trace


class ReplayDiff:
  """Counts comparisons and differences."""

  def __init__(self, trace: Trace):
    self._saved = {
      (op.role, op.incarnation, op.snapshot): op.arrays
      for op in trace.operations()
      if isinstance(op, events.Saved)
    }
    self.compared = {"losses": 0, "digests": 0, "values": 0}
    self.differences: list[tuple[float, str, str]] = []  # time of the run, what, text

  def count(self, what: str, time: float, differences: Sequence[str], compared: int = 1) -> None:
    """Adds `compared` comparisons with these differences, at this time of the run."""
    self.compared[what] += compared
    self.differences += ((time, what, text) for text in differences)

  def step(self, entry: Entry, metrics: Mapping[str, float] | None) -> None:
    """Compares the losses of a step, if both the run and the replay have one."""
    op = entry.operation
    if op.loss is None or metrics is None:
      return
    loss = metrics["loss"]
    same = loss == op.loss or (math.isnan(loss) and math.isnan(op.loss))
    problem = entry.problem(f"the loss of step {op.step} is {loss!r}, it was {op.loss!r}")
    self.count("losses", op.time, [] if same else [problem])

  def saved(self, captured: events.Captured) -> Mapping[str, int]:
    """The saved digests of the state captured here; none if it was never saved."""
    return self._saved.get((captured.role, captured.incarnation, captured.snapshot), {})

  def state(self, entry: Entry, arrays: Mapping[str, np.ndarray]) -> None:
    """Compares a captured state with its saved digests, if it was saved."""
    op, differences = entry.operation, []
    saved = self.saved(op)
    for name in sorted(saved):
      mine = fingerprint(arrays[name])["crc32"] if name in arrays else "missing"
      if mine != saved[name]:
        text = f"{name} of snapshot {op.snapshot} is {mine}, {saved[name]} was saved"
        differences.append(entry.problem(text))
    self.count("digests", op.time, differences, len(saved))


# --- The algebra ----------------------------------------------------------------------------------

Home = tuple[Any, Callable[[int], np.ndarray]]  # a compiled island, and its batch at a position


class LearnerArrays(LearnerAlgebra):
  """A learner; its island trains as the run's did. The content of a push is its payload.

  Args:
    config: the run's.
    home: makes the island and data of an incarnation, from its `Started` event.
    diff: told of every loss and every captured state.
    wanted: whether an operation will still need a value.
    alone: initial parameters if there are no shards; None: shards send them.
  """

  def __init__(
    self,
    config: Config,
    home: Callable[[events.Started], Home],
    diff: ReplayDiff,
    wanted: Callable[[Key], bool],
    alone: Mapping[str, np.ndarray] | None,
  ):
    self._config, self._home = config, home
    self._diff, self._wanted, self._alone = diff, wanted, alone
    self.island: Any = None
    self.steps = 0  # that the island has made in its newest life

  def begin(self, started: events.Started | None) -> None:
    self._deltas = Deltas(self._config.sync)
    self.island, self._batch = self._home(started)
    self.steps = 0
    if self._alone is None:
      self.island.reset()
    else:
      self.island.load(self._alone)

  def step(self, entry: Entry) -> None:
    op = entry.operation
    at = op.global_step - 1 if op.schedule_step is None else op.schedule_step
    self._diff.step(entry, self.island.step(self._batch(op.position), at, op.rate_scale))
    self.steps += 1

  def copy_out(self, op: events.CopyOut) -> tuple[int, int, np.ndarray]:
    local = self.island.to_host(self.island.copy_out(op.fragment), op.fragment)
    return op.steps, op.tokens, self._deltas.push(op.fragment, local, op.factor)

  def stage(self, op: events.Stage, version: Version | None, included: Pushed | None) -> np.ndarray:
    p, deltas = op.fragment, self._deltas
    value = deltas.base[p] if version is None else version.content.published_value
    return deltas.stage(p, value, op.mode, op.included)

  def apply(self, fragment: int, staged: np.ndarray, mode: str) -> None:
    self.island.apply(fragment, self.island.stage(fragment, staged), self._deltas.keep(mode))

  def capture(self, entry: Entry, fragments: Mapping[int, Held]) -> dict[str, np.ndarray]:
    op = entry.operation
    if not (self._wanted(makes(op)[0]) or self._diff.saved(op)):
      return {}
    captured = {name: np.asarray(value) for name, value in self.island.capture().items()}
    arrays = {**captured, **self._deltas.arrays()}
    for p, held in fragments.items():
      arrays |= {f"staged/{p}/{i}": flat for i, (_, flat) in enumerate(held.staged)}
    self._diff.state(entry, arrays)
    return arrays

  def restore(self, state: dict[str, np.ndarray]) -> None:
    self.island.restore({name: state[name] for name in self.island.layout.leaves})
    self._deltas.restore(state)

  def donate(self, fragment: int) -> tuple[np.ndarray, int]:
    pieces = self.island.copy_out(fragment, moments=True)
    return self.island.to_host(pieces, fragment), int(self.island.count())

  def inherit(self, fragment: int, moments: tuple[np.ndarray, int]) -> None:
    flat, count = moments  # flat f32 [moments * size], and the optimizer's count
    staged = self.island.stage(fragment, flat, moments=True)
    self.island.apply(fragment, staged, 0.0, moments=True)
    self.island.set_count(count)


class EvaluatorArrays(LearnerAlgebra):
  """The evaluator: keeps the newest version of each fragment, over all incarnations."""

  def __init__(self) -> None:
    self.newest: dict[int, Committed] = {}

  def stage(self, op: events.Stage, version: Version | None, included: Pushed | None) -> Any:
    return None if version is None else version.content

  def apply(self, fragment: int, staged: Committed, mode: str) -> None:
    self.newest[fragment] = staged


class ShardArrays(ShardAlgebra):
  """A shard: merges the run's pushes onto their bases. The content of a version is `Committed`."""

  def __init__(self, config: Config, plan: Plan, diff: ReplayDiff):
    self._config, self._plan, self._diff = config, plan, diff
    self.newest: dict[int, Committed] = {}  # of every fragment, over all incarnations

  def own(self, op: events.Owns, version: Version, momentum: Version | None) -> Committed:
    found: Committed = version.content
    if not op.exact:
      found = replace(found, value=found.published_value)
    if op.momentum_round != op.round:
      older = None if momentum is None else momentum.content.momentum
      found = replace(found, value=found.published_value, momentum=older)
    self.newest[op.fragment] = found
    return found

  def commit(
    self, entry: Entry, base: Version, new: Version, pushes: Sequence[Pushed]
  ) -> Committed:
    fragment = self._plan.fragments[new.fragment]
    arrived = {}
    for push in pushes:
      encoded = codec.checked(push.content, fragment.size, self._config.sync.push_codec)
      arrived[push.learner] = delta.measure(fragment, encoded)
    vectors, *_ = delta.commit(fragment, base.content, arrived, entry.operation, self._config)
    state = FragmentState(
      new.fragment, new.version, merged_tokens=new.merged_tokens, last_round=new.round
    )
    found = Committed(state, *vectors, new.round)
    self.newest[new.fragment] = found
    return found

  def capture(self, entry: Entry, owned: Mapping[int, Version]) -> None:
    arrays: dict[str, np.ndarray] = {}
    for p, version in owned.items():
      found: Committed = version.content
      arrays |= {f"{p}/value": found.value, f"{p}/published_value": found.published_value}
      if found.momentum is not None:
        arrays[f"{p}/momentum"] = found.momentum
    self._diff.state(entry, arrays)


# --- Islands of replayed learners: of the same kind and with the same data as in the run


def live_config(config: Config, started: events.Started) -> Config:
  """The config of one incarnation: islands may differ from those in the saved config.

  Of other islands only the batches matter: they are a part of the order of the data.
  """
  mesh = dict(zip(("data", "fsdp", "tensor"), started.mesh))
  mine = {"devices": started.devices, "batch_size": started.batch_size, **mesh, **started.execution}
  overrides = {str(m): {"batch_size": size} for m, size in enumerate(started.batch_sizes)}
  overrides[str(parse_role(started.role)[1])] = mine
  islands = dataclasses.replace(
    config.islands,
    num_learners=started.learners,
    **dict.fromkeys(("devices", "hosts", "data", "fsdp", "tensor"), 1),
    batch_size=started.batch_sizes[0],
    overrides=overrides,
  )
  # The quorum may have been lower when there were fewer islands; the exchange needs none here.
  sync = dataclasses.replace(config.sync, min_quorum=1)
  live = dataclasses.replace(config, islands=islands, sync=sync, chaos=ChaosConfig())
  # The schedule ends with the run, whose length may have changed since.
  total_tokens = started.planned_steps * live.planned_tokens_per_step
  return dataclasses.replace(live, run=dataclasses.replace(config.run, total_tokens=total_tokens))


def islands(
  config: Config, trace: Trace, visible: Sequence[jax.Device]
) -> Callable[[events.Started], Home]:
  """A function that makes the compiled island and the data of an incarnation.

  Args:
    config: the run's.
    trace: its trace.
    visible: devices to use; learners take theirs in order of their numbers.

  Raises:
    ConfigError: there are too few devices, or of another kind; the function: such an island cannot
      be made here.
  """
  plan, corpus = initial.make_plan(config), data.open_data(config.data)
  shared: dict[Any, Any] = {}  # equal islands' programs
  counts = trace.devices()
  groups = devices.partition(visible, list(counts.values()))
  owned = dict(zip(counts, groups))
  for op in trace.operations():
    if isinstance(op, events.Started) and op.mesh:
      _require_kind(op, visible)

  def home(started: events.Started) -> Home:
    learner, live = parse_role(started.role)[1], live_config(config, started)
    island = Island(live, learner, owned[learner][: started.devices], plan, shared)
    island.compile()
    return island, data.Stream(corpus, live, learner).batch

  return home


def _require_kind(started: events.Started, visible: Sequence[jax.Device]) -> None:
  """Refuses (ConfigError) devices of another kind than an incarnation had: their bits differ."""
  here, kind = {device.device_kind for device in visible}, started.device_kind
  if kind not in ("", *here):
    raise ConfigError(
      f"{started.role} trained on {kind!r}, and here are {', '.join(sorted(here))}, which give"
      " other bits. Fix: replay the run where there are such devices, and without --cpu."
    )


# --- The replay, and its verdict -----------------------------------------------------------------


class Replay:
  """A trace performed on islands of this process.

  Args:
    config: the run's.
    trace: its trace.
    home: makes the island and the data of an incarnation.

  Raises:
    ValueError: the trace has problems; the text is the first.
  """

  def __init__(self, config: Config, trace: Trace, home: Callable[[events.Started], Home]):
    checked = check(trace)
    if checked.problems:
      raise ValueError(f"the trace does not fit together: {checked.problems[0]}")
    self.counts, self.diff, self._config = checked.counts, ReplayDiff(trace), config
    self._plan, first = initial.make_plan(config), initial.initial_params(config)
    proof, made = Proof(), {}
    for p, fragment in enumerate(self._plan.fragments):
      content = new_fragment(fragment, gather(fragment, first))
      made[Key("value", INITIAL, p)] = proof.add(Version(p, INITIAL, 0, content=content))
    self._schedule = Schedule(trace, made, proof)
    alone = None if config.sync.num_shards else first
    self._learners: list[LearnerArrays] = []
    self._shards: list[ShardArrays] = []
    self._evaluator = EvaluatorArrays()
    self._roles: dict[str, TraceRole] = {}
    for role in trace.roles:
      if role.startswith("learner"):
        mine = LearnerArrays(config, home, self.diff, self._schedule.wanted, alone)
        self._learners.append(mine)
        self._roles[role] = LearnerRole(proof, mine)
      elif role.startswith("syncer"):
        self._shards.append(ShardArrays(config, self._plan, self.diff))
        self._roles[role] = ShardRole(proof, self._shards[-1])
      else:
        self._roles[role] = LearnerRole(proof, self._evaluator)

  def run(self, progress: Callable[[int, int], None] = lambda done, of: None) -> None:
    """Performs the whole trace; `progress` as of `Schedule.perform_all`."""
    self._schedule.perform_all(self._roles, progress)

  @property
  def merged_tokens(self) -> set[int]:
    """The tokens that a result of this end may have seen, as `RunResult` counts them: with the
    values that the shards had at last, or the evaluator."""
    if not self._shards:
      furthest = max((each.steps for each in self._learners), default=0)
      return {furthest * self._config.planned_tokens_per_step}
    fragments = len(self._plan.fragments)
    ends = [[self._newest(p) for p in range(fragments)], self._evaluator.newest.values()]
    return {min(v.state.merged_tokens for v in end) for end in ends if len(end) == fragments}

  def _newest(self, p: int) -> Committed:
    every = (shard.newest[p] for shard in self._shards if p in shard.newest)
    return max(every, key=lambda committed: committed.state.last_round)

  def compare_result(self, result: Mapping[str, np.ndarray]) -> None:
    """Compares the global model that the run saved, fragment by fragment.

    The result has the shards' last values, or the values that the evaluator had received by then,
    with the rounding of a lossy publish codec. Without shards it is the model of an island.
    """
    if not self._shards:
      models = [each.island.params_on_host() for each in self._learners if each.island]
      same = any(all(_same(mine[name], result[name]) for name in result) for mine in models)
      self.diff.count("values", math.inf, [] if same else ["the result is no island's"])
      return
    for p, fragment in enumerate(self._plan.fragments):
      newest, mine = self._newest(p), gather(fragment, result)
      received = self._evaluator.newest.get(p, newest).published_value
      known = newest.value, newest.published_value, received
      same = any(_same(mine, value) for value in known)
      text = f"fragment {p} of the result is another than the replay's"
      self.diff.count("values", math.inf, [] if same else [text])


def _same(a: np.ndarray, b: np.ndarray) -> bool:
  """Compares bit by bit, so that NaN equals itself and -0 does not equal 0."""
  return a.shape == b.shape and np.asarray(a).tobytes() == np.asarray(b).tobytes()


def _saved(op: Operation) -> bool:
  """Whether digests of a state are known; those of virtual time have none."""
  return isinstance(op, events.Saved) and bool(op.arrays)


def _warn_of_hosts(trace: Trace) -> None:
  """Warns of islands whose sums over devices were not made by one process, as they are here."""
  lives = (op for op in trace.operations() if isinstance(op, events.Started))
  if roles := sorted({life.role for life in lives if life.hosts > 1}):
    rule = "several processes may add over their devices in another order than this one does"
    warn(f"{', '.join(roles)}: {rule}. Values that differ a little then tell of no fault.")


def replay_run(
  workdir: Path,
  trace: Trace,
  progress: Callable[[int, int], None] = lambda done, of: None,
  config: Config | None = None,
) -> tuple[dict[str, Any], str]:
  """Replays a run on this process's devices; compares its losses, saved states and result.

  Args:
    workdir: of the run.
    trace: its trace, without problems.
    progress: called with the operations done, and of all.
    config: the run's, None: as the workdir has it.

  Returns:
    (counts, and "identical": whether there were comparisons and no differences; the first
    difference, or "").

  Raises:
    ConfigError: there is nothing to compare with, the result cannot be read, or there are too few
      devices.
  """
  started = time.monotonic()
  config = saved_config(workdir, config)
  result = workdir / "result"
  told = any(getattr(op, "loss", None) is not None or _saved(op) for op in trace.operations())
  if not told and not result.exists():
    raise ConfigError(
      f"--workdir={workdir}: its run has no losses, no saved states and no result to compare with,"
      " as in virtual time. Fix: name a run that has trained."
    )
  initial.warn_of_changes(config, result)
  _warn_of_hosts(trace)
  replay = Replay(config, trace, islands(config, trace, jax.devices()))
  replay.run(progress)
  if result.exists() and weights.merged_tokens(result) in replay.merged_tokens:
    replay.compare_result(weights.load(result, "result"))  # else an earlier start left it
  compared, differences = replay.diff.compared, sorted(replay.diff.differences)
  different = collections.Counter(what for _, what, _ in differences)
  return {
    "identical": not differences and any(compared.values()),
    "steps": replay.counts["step"],
    "commits": replay.counts["commit"],
    "learners": replay.counts["learners"],
    "incarnations": replay.counts["incarnations"],
    **{f"{name}_compared": compared[name] for name in compared},
    **{f"{name}_different": different[name] for name in compared},
    "seconds": round(time.monotonic() - started, 1),
  }, differences[0][2] if differences else ""
