"""A NumPy problem for whole runs of the real roles, and the islands that train on it."""

from __future__ import annotations

import time

import numpy as np

from ddiloco.config import Config, from_dict
from ddiloco.core import fragments
from ddiloco.core.delta import Store, new_fragment
from ddiloco.core.fragments import TensorSpec
from ddiloco.observe.eventlog import Records
from ddiloco.protocol.events import Event
from ddiloco.runtime import Time

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


def initial_store(plan: fragments.Plan) -> Store:
  """What shards have at the beginning of a run."""
  params = initial_params()
  return {f.index: new_fragment(f, fragments.gather(f, params)) for f in plan.fragments}


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
