"""What a replay does for each operation of the tape: the run's own arithmetic, in the tape's order.

A player is one role over all its lives (`core.tape.Actor`), with arrays for values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ddiloco.config import Config
from ddiloco.core import codec, merge, protocol
from ddiloco.core.fragments import Plan
from ddiloco.core.tape import (
  Apply,
  Commit,
  Cut,
  Donated,
  Entry,
  Inherited,
  Key,
  Life,
  Momentum,
  Owns,
  Pushed,
  Recorded,
  Resend,
  Restored,
  Stage,
  Started,
  Step,
  Value,
  makes,
  needs,
)
from ddiloco.engines.findings import Findings
from ddiloco.runtime import commits
from ddiloco.runtime.deltas import Deltas
from ddiloco.runtime.store import Committed

Given = Mapping[Any, Any]
Home = tuple[Any, Callable[[int], np.ndarray]]  # a compiled island, and its batch of a position


@dataclasses.dataclass(frozen=True)
class Push:
  """A push as it was sent."""

  payload: np.ndarray
  steps: int
  tokens: int


@dataclasses.dataclass
class Moments:
  """What one learner gave another: flat f32 [moments * size], and the optimizer's count."""

  flat: np.ndarray
  count: int


@dataclasses.dataclass(frozen=True)
class _State:
  """What a learner recorded for a snapshot."""

  arrays: Mapping[str, np.ndarray]
  rounds: Mapping[int, int]
  pushes: Mapping[int, Push]
  staged: Mapping[int, tuple[np.ndarray, ...]]


class LearnerPlayer:
  """A learner; its island trains as the run's did.

  Args:
    config: the run's.
    home: where an incarnation lives that started like this.
    findings: told of every loss and every recorded state.
    wanted: whether a made thing will be needed.
    alone: parameters to begin with where there are no shards; None: they send them.
  """

  def __init__(
    self,
    config: Config,
    home: Callable[[Started], Home],
    findings: Findings,
    wanted: Callable[[Key], bool],
    alone: Mapping[str, np.ndarray] | None,
  ):
    self._config, self._home = config, home
    self._findings, self._wanted, self._alone = findings, wanted, alone
    self.island: Any = None

  def begin(self, life: Life) -> None:
    self.deltas = Deltas(self._config.sync)
    self._pushes: dict[int, Push] = {}  # of each fragment the newest, until a value answers it
    self._staged: dict[int, tuple[np.ndarray, ...]] = {}
    self._rounds: dict[int, int] = {}  # of the newest value
    started = next((e.operation for e in life.entries if isinstance(e.operation, Started)), None)
    if started is None:
      return  # killed before it did anything
    self.island, self._batch = self._home(started)
    if self._alone is None:
      self.island.reset()
    else:
      self.island.load(self._alone)

  def perform(self, entry: Entry, given: Given) -> Given:
    match entry.operation:
      case Restored():
        self._restore(given[needs(entry)[0]])
      case Step() as op:
        at = op.clock - 1 if op.schedule_step is None else op.schedule_step
        metrics = self.island.step(self._batch(op.position), at, op.rate_scale)
        self._findings.step(entry, metrics)
      case Cut() | Resend():
        return {makes(entry)[0]: self._push(entry.operation)}
      case Stage() as op:
        self._stage(op, given[Value(op.fragment, op.round)].view)
      case Apply(fragment, mode=mode):
        flat, *rest = self._staged[fragment]
        self.island.apply(fragment, self.island.stage(fragment, flat), self.deltas.keep(mode))
        self._staged[fragment] = tuple(rest)
      case Recorded():
        return self._record(entry)
      case Donated(fragment):
        moments = self.island.cut_moments(fragment)
        flat = self.island.moments_to_host(moments, fragment)
        return {makes(entry)[0]: Moments(flat, int(self.island.count()))}
      case Inherited(fragment):
        moments = given[needs(entry)[0]]
        staged = self.island.stage_moments(fragment, moments.flat)
        self.island.apply_moments(fragment, staged, moments.count)
    return {}

  def _push(self, op: Cut | Resend) -> Push:
    p = op.fragment
    if isinstance(op, Cut):
      local = self.island.to_host(self.island.cut(p), p)
      self._pushes[p] = Push(self.deltas.push(p, local, op.factor), op.steps, op.tokens)
    return self._pushes[p]

  def _stage(self, op: Stage, view: np.ndarray) -> None:
    p = op.fragment
    if self._rounds.get(p) == op.round:  # its push was rejected
      flat = self.deltas.back(p)
    else:
      flat = self.deltas.stage(p, view, op.mode, op.included)
    self._staged[p] = (*self._staged.get(p, ()), flat)
    self._pushes.pop(p, None)
    self._rounds[p] = op.round

  def _record(self, entry: Entry) -> Given:
    key = makes(entry)[0]
    if not (self._wanted(key) or self._findings.saved(entry)):
      return {}
    captured = {name: np.asarray(value) for name, value in self.island.capture().items()}
    arrays = {**captured, **self.deltas.arrays()}
    for p, each in self._staged.items():
      arrays |= {f"staged/{p}/{i}": flat for i, flat in enumerate(each)}
    for p, push in self._pushes.items():
      arrays[f"outbox/{p}"] = np.frombuffer(push.payload, np.uint8)
    self._findings.state(entry, arrays)
    return {key: _State(arrays, dict(self._rounds), dict(self._pushes), dict(self._staged))}

  def _restore(self, state: _State) -> None:
    if self.island is None:
      return  # it never got further
    self.island.restore({name: state.arrays[name] for name in self.island.shardings()})
    self.deltas.restore(state.arrays)
    self._rounds, self._pushes = dict(state.rounds), dict(state.pushes)
    self._staged = dict(state.staged)


class ShardPlayer:
  """A shard: merges the pushes that it merged, onto what it had."""

  def __init__(self, config: Config, plan: Plan, findings: Findings):
    self._config, self._plan, self._findings = config, plan, findings
    self.newest: dict[int, Committed] = {}  # over all its lives

  def begin(self, life: Life) -> None:
    self.committed: dict[int, Committed] = {}

  def perform(self, entry: Entry, given: Given) -> Given:
    match entry.operation:
      case Owns() as op:
        self.newest[op.fragment] = self.committed[op.fragment] = _owned(op, given)
      case Commit() as op:
        pushes = {
          m: given[Pushed(m, i, op.fragment, op.round)]
          for m, i in zip(op.learners, op.incarnations)
        }
        new = self._commit(op, pushes)
        self.newest[op.fragment] = self.committed[op.fragment] = new
        return {Value(op.fragment, op.round): new, Momentum(op.fragment, op.round): new.momentum}
      case Recorded():
        self._findings.state(entry, self._arrays())
    return {}

  def _commit(self, op: Commit, pushes: Mapping[int, Push]) -> Committed:
    fragment = self._plan.fragments[op.fragment]
    arrivals = commits.Arrivals(fragment, op.round)
    for m, push in pushes.items():
      delta = codec.decode(push.payload, fragment.size, self._config.sync.push_codec)
      arrivals.add(m, delta, merge.squared_norms(fragment, delta))
    what = protocol.Commit(
      op.fragment,
      op.round,
      op.version,
      op.learners,
      steps=tuple(pushes[m].steps for m in op.learners),
      tokens=tuple(pushes[m].tokens for m in op.learners),
    )
    return commits.commit(fragment, self.committed[op.fragment], arrivals, what, self._config)[0]

  def _arrays(self) -> dict[str, np.ndarray]:
    arrays = {}
    for p, each in self.committed.items():
      arrays |= {f"{p}/value": each.value, f"{p}/view": each.view}
      if each.momentum is not None:
        arrays[f"{p}/momentum"] = each.momentum
    return arrays


def _owned(op: Owns, given: Given) -> Committed:
  found: Committed = given[Value(op.fragment, op.round)]
  if op.momentum_round == op.round:
    return found
  momentum = given.get(Momentum(op.fragment, op.momentum_round))
  return dataclasses.replace(found, value=found.view, momentum=momentum)


class Watcher:
  """The evaluator: has what it received last."""

  def __init__(self) -> None:
    self.views: dict[int, np.ndarray] = {}

  def begin(self, life: Life) -> None:
    pass  # what it had is still the newest that anybody saw

  def perform(self, entry: Entry, given: Given) -> Given:
    op = entry.operation
    if isinstance(op, Stage):
      self.views[op.fragment] = given[Value(op.fragment, op.round)].view
    return {}
