"""A whole run with toy islands: the real roles, queues and threads around a NumPy problem."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ddiloco.chaos import Faults
from ddiloco.checkpoint.restore import begin_learner, new_learner, new_syncer, restore_fragments
from ddiloco.checkpoint.saver import Saver
from ddiloco.config import Config, from_dict
from ddiloco.core import fragments
from ddiloco.core.delta import Committed, new_fragment
from ddiloco.core.fragments import TensorSpec
from ddiloco.network.transport import Hub, learner_address, syncer_address
from ddiloco.observe.eventlog import Recorder, Records
from ddiloco.protocol.events import Event
from ddiloco.roles.learner import Learner
from ddiloco.roles.syncer import Syncer
from ddiloco.runtime import Runtime, Time

if TYPE_CHECKING:  # processes of toy roles import this file, and do without JAX
  from ddiloco.checkpoint.snapshots import Storage

SPECS = (
  TensorSpec("embedding", (6, 4), stacked=False, embedding=True),
  TensorSpec("layers/a", (3, 4, 5), stacked=True, embedding=False),
  TensorSpec("layers/b", (3, 7), stacked=True, embedding=False),
  TensorSpec("scale", (4,), stacked=False, embedding=False),
)
INNER_RATE = 0.05
HURRY = "hurry"  # the file that tells processes of toy roles to go on faster


def target(learner: int, position: int, shape: tuple[int, ...]) -> np.ndarray:
  """What the learner's data pulls every parameter to at this position: f32."""
  random = np.random.default_rng([learner, position, *shape])
  return (learner + 1 + random.standard_normal(shape)).astype(np.float32)


def initial_params() -> dict[str, np.ndarray]:
  random = np.random.default_rng(7)
  return {s.name: random.standard_normal(s.shape).astype(np.float32) for s in SPECS}


def inner_step(
  params: dict[str, np.ndarray], learner: int, position: int, rate_scale: float = 1.0
) -> None:
  """SGD on half the squared distance to the target, in place."""
  for value in params.values():
    value -= np.float32(INNER_RATE * rate_scale) * (value - target(learner, position, value.shape))


class ToyIsland:
  """What `roles.learner` needs of an island, in NumPy.

  SGD has nothing to remember; so that there is something to save and to send, the island keeps a
  running mean of the parameters as if it were a moment.
  """

  num_moments, busy = 1, False

  def __init__(self, learner: int, plan: fragments.Plan, step_seconds: float = 0.0):
    self.learner = learner
    self.plan = plan
    self.step_seconds = step_seconds
    self.params = {s.name: np.zeros(s.shape, np.float32) for s in SPECS}
    self.mean = {s.name: np.zeros(s.shape, np.float32) for s in SPECS}
    self.updates = 0
    self.position = 0
    self.poison_at = -1  # local step whose gradient is NaN

  def describe(self) -> dict:
    return {"devices": 1, "mesh": [1, 1, 1], "batch_size": 1}

  def compile(self) -> float:
    return 0.0

  def reset(self) -> None:
    """Zeros, as a new island has; its shards send what it trains on."""
    for value in (*self.params.values(), *self.mean.values()):
      value[:] = 0
    self.updates = 0

  def step(
    self, tokens: np.ndarray, schedule_step: int, rate_scale: float = 1.0
  ) -> dict[str, float]:
    del schedule_step
    if self.step_seconds:
      time.sleep(self.step_seconds)  # stands for the device's work
    inner_step(self.params, self.learner, int(tokens[0, 0]), rate_scale)
    for name, mean in self.mean.items():
      mean += np.float32(0.1) * (self.params[name] - mean)
    self.updates += 1
    if self.position == self.poison_at:
      self.params["scale"][:] = np.nan
    self.position += 1
    return {"loss": float(np.sum(self.params["scale"] ** 2))}

  def _tree(self, moments: bool) -> dict[str, np.ndarray]:
    return self.mean if moments else self.params

  def copy_out(self, fragment: int, moments: bool = False) -> np.ndarray:
    return fragments.gather(self.plan.fragments[fragment], self._tree(moments))

  def to_host(self, pieces: np.ndarray, fragment: int) -> np.ndarray:
    del fragment
    return pieces

  def stage(self, fragment: int, flat: np.ndarray, moments: bool = False) -> np.ndarray:
    del fragment, moments
    return flat

  def apply(self, fragment: int, staged: np.ndarray, keep: float, moments: bool = False) -> None:
    piece, tree = self.plan.fragments[fragment], self._tree(moments)
    mixed = staged if keep == 0 else np.float32(keep) * fragments.gather(piece, tree) + staged
    fragments.scatter(piece, mixed, tree)

  def count(self) -> int:
    return self.updates

  def set_count(self, count: int) -> None:
    self.updates = count

  def capture(self) -> dict[str, np.ndarray]:
    state = {f"params/{name}": value.copy() for name, value in self.params.items()}
    state |= {f"inner/mean/{name}": value.copy() for name, value in self.mean.items()}
    return state | {"inner/count": np.array(self.updates, np.int32)}

  def place(self, name: str, value: np.ndarray) -> np.ndarray:
    return value  # everything stays on the host

  def restore(self, arrays) -> None:
    assert arrays.keys() == self.capture().keys(), sorted(arrays)
    self.params = {s.name: np.array(arrays[f"params/{s.name}"]) for s in SPECS}
    self.mean = {s.name: np.array(arrays[f"inner/mean/{s.name}"]) for s in SPECS}
    self.updates = int(arrays["inner/count"])


def batches(position: int):
  """Batches whose only content is their position."""
  while True:
    yield np.full((1, 2), position, np.int32)
    position += 1


def config(learners: int, steps: int, **sync) -> Config:
  """`steps` inner steps of each learner; one token a step."""
  outer = sync.pop("outer", {})
  return from_dict(
    {
      "islands": {"num_learners": learners, "batch_size": 1},
      "data": {"sequence_length": 1},
      "run": {"total_tokens": learners * steps},
      "sync": {"liveness_seconds": 30.0, "snapshot_steps": 0, **sync},
      "outer": outer,
    }
  )


@dataclasses.dataclass
class Result:
  params: dict[str, np.ndarray]  # global
  versions: list[int]
  islands: list[ToyIsland]
  learners: list[Learner]
  events: dict[str, list[Event]]
  committed: list[Committed]  # of every fragment


class ListRecorder(Records):
  """Keeps events in memory."""

  def __init__(self, events: list[Event]):
    self.events = events

  def record(self, event: Event) -> None:
    self.events.append(event)


class _AtOnce:
  """A worker that does its jobs when it gets them."""

  failure = None
  ending = False

  def put(self, job) -> None:
    for _ in job:
      pass

  def close(self, patience_seconds: float, most_seconds: float) -> None:
    pass


class AtOnce(Time):
  """No job is in the background: tests see what follows from it."""

  def worker(self, name, begin=lambda: None, failed=lambda: None):
    return _AtOnce()


def run(
  config: Config,
  islands: list[ToyIsland] | None = None,
  timeout: float = 60.0,
  saver: Callable[[str, Recorder], Saver] | None = None,
  resume: Storage | None = None,
) -> Result:
  """Runs real learners and shards as threads until the token budget is merged.

  `saver(role, recorder)` makes what writes a role's parts of snapshots; all are closed at the end.
  With `resume` everybody begins with the newest snapshot there.
  """
  plan = fragments.make_plan(SPECS, config.sync)
  hub, first = Hub(), initial_params()
  store = {f.index: new_fragment(f, fragments.gather(f, first)) for f in plan.fragments}
  restored = restore_fragments(resume, range(len(plan.fragments))) if resume else None
  store |= restored.fragments if restored else {}
  incarnation = 1000 if restored else 0
  savers: list[Saver] = []
  islands = islands or [ToyIsland(m, plan) for m in range(config.islands.num_learners)]
  stop = threading.Event()
  events: dict[str, list[dict]] = {}
  failures: list[BaseException] = []

  def start(name: str, work) -> threading.Thread:
    def guarded():
      try:
        work()
      except BaseException as error:  # reported by the test's own thread
        failures.append(error)
        stop.set()

    thread = threading.Thread(target=guarded, name=name, daemon=True)
    thread.start()
    return thread

  def recorder(name: str) -> ListRecorder:
    return ListRecorder(events.setdefault(name, []))

  def saver_of(name: str) -> Saver | None:
    if saver is not None:
      savers.append(saver(name, recorder(name)))
    return savers[-1] if saver else None

  faults = Faults((), time.monotonic())
  shards = []
  for s in range(config.sync.num_shards):
    address = syncer_address(s)
    state = new_syncer(config, s, incarnation, store)
    state = restored.resume(state) if restored else state
    endpoint, writer = hub.connect(address), saver_of(address)
    runtime = Runtime(config, plan, endpoint, recorder(address), writer)
    shard = Syncer(state, store, runtime)

    def serve(shard=shard) -> None:
      try:
        shard.run(faults, stop.is_set)
      finally:
        shard.close()

    shards.append(start(address, serve))
  learners, threads = [], []
  for m, island in enumerate(islands):
    address = learner_address(m)
    new, endpoint = new_learner(config, plan, m, incarnation), hub.connect(address)
    beginning = begin_learner(new, config, island, resume, recorder(address))
    runtime = Runtime(config, plan, endpoint, recorder(address), saver_of(address))
    role = Learner(beginning, island, batches, runtime)
    learners.append(role)
    threads.append(start(address, lambda role=role: role.run(faults, stop.is_set)))
  deadline = time.monotonic() + timeout
  for thread in threads:
    thread.join(max(0.0, deadline - time.monotonic()))
  late = [thread.name for thread in threads if thread.is_alive()]
  stop.set()
  for thread in [*threads, *shards]:
    thread.join(10)
  for each in savers:
    each.close(timeout)
  if failures:
    raise failures[0]
  assert not late, f"still running after {timeout} s: {late}"
  committed = [store[f.index] for f in plan.fragments]
  params = {s.name: np.zeros(s.shape, np.float32) for s in SPECS}
  for fragment, each in zip(plan.fragments, committed):
    fragments.scatter(fragment, each.value, params)
  versions = [c.state.version for c in committed]
  return Result(params, versions, islands, learners, events, committed)
