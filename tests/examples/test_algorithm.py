"""The algorithm in one file against the package's roles, in virtual time, commit by commit."""

import functools
import math
import re
import runpy

import numpy as np
import pytest

from ddiloco.config import from_dict
from ddiloco.core.delta import Committed, Deltas, Merger
from ddiloco.core.fragments import Fragment, Piece, Plan
from ddiloco.protocol import events
from ddiloco.simulation.stand_ins import VirtualIsland
from ddiloco.simulation.world import Pace, World

STEPS = 300
STAGE_SECONDS = 1e-3  # a new version is not on the devices before the next step has begun


def algorithm_with(**settings):
  """The names of the example, with other settings."""
  names = runpy.run_path("examples/algorithm.py")["World"].__init__.__globals__
  names.update(settings)
  return names


def config_of(algorithm):
  return from_dict(
    {
      "islands": {
        "num_learners": len(algorithm["STEP_SECONDS"]),
        "batch_size": algorithm["BATCH"],
      },
      "data": {"sequence_length": 1},
      "run": {"total_tokens": 10**6},
      "sync": {
        "num_shards": 1,
        "num_fragments": algorithm["P"],
        "sync_period": algorithm["H"],
        "overlap_steps": algorithm["TAU"],
        "min_quorum": algorithm["K"],
        "grace_safety": algorithm["GAMMA"],
        "snapshot_steps": 0,
      },
      "outer": {
        "learning_rate": algorithm["OUTER_RATE"],
        "momentum": algorithm["MOMENTUM"],
        "decay_share": 0.0,
      },
    }
  )


class Island(VirtualIsland):
  """An island that trains the problem of the example."""

  def __init__(self, world, learner, seed):
    super().__init__(world, learner, seed)
    self._problem, self._begun = world.algorithm, world.begun
    self.params = [np.zeros_like(first) for first in self._problem["FIRST"]]

  def step(self, batch, schedule_step, rate_scale):
    super().step(batch, schedule_step, rate_scale)
    self._problem["inner_step"](self.params, self._learner, self._begun[self._learner])
    self._begun[self._learner] += 1

  def copy_out(self, fragment):
    return self.params[fragment].reshape(-1).copy()

  def apply(self, fragment, staged, keep):
    flat = self.params[fragment].reshape(-1)
    flat[:] = staged if keep == 0 else np.float32(keep) * flat + staged


class Roles(World):
  """The package's learners and syncer with the vectors of the example."""

  def __init__(self, algorithm):
    self.algorithm, self.commits = algorithm, []
    self.begun = [0] * len(algorithm["STEP_SECONDS"])
    pace = Pace(algorithm["STEP_SECONDS"], 0.0, 0.0, STAGE_SECONDS, 0.0)
    super().__init__(config_of(algorithm), pace)

  def new_plan(self, sizes):
    shapes = [first.shape for first in self.algorithm["FIRST"]]
    return Plan(
      tuple(
        Fragment(p, (Piece(f"{p}", None, 0, math.prod(shape), shape, 0, average=False),))
        for p, shape in enumerate(shapes)
      )
    )

  def put(self, state):
    value = self.algorithm["FIRST"][state.index].reshape(-1)
    self.kept.save(Committed(state, value, value, None))

  def initial_values(self):
    return {p: first.reshape(-1) for p, first in enumerate(self.algorithm["FIRST"])}

  def island(self, actor):
    return Island(self, actor.number, "")

  def deltas(self, actor):
    return Deltas(self.sync)

  def merger(self, actor, fragments):
    return Merger(fragments, self.kept, self.config)

  def travel(self, sender, to, message, size):
    arrive = functools.partial(self.enter, sender, to, message, size)
    self.at(self.now + self.algorithm["LATENCY"], arrive)

  def tell(self, actor, event):
    if isinstance(event, events.Commit):
      self.commits.append((event.fragment, event.version, event.learners, event.steps))


@pytest.mark.parametrize(
  "settings",
  [
    {},
    {"K": 3},
    {"GAMMA": 0.0},
    {"H": 10, "TAU": 1, "LATENCY": 0.31},
    {"STEP_SECONDS": (1.0, 1.0213, 1.0719, 1.3037, 1.9041, 5.3089)},
  ],
  ids=str,
)
def test_the_roles_of_the_package_commit_the_same(settings):
  """Which pushes, of how many steps, and the values; with an island killed and back."""
  algorithm = algorithm_with(**settings)
  roles, reference = Roles(algorithm), algorithm["World"]()
  roles.at(STEPS / 3, roles.kill, ("learner", 2), STEPS / 6)
  reference.at(STEPS / 3, reference.kill, 2)
  reference.at(STEPS / 2, reference.start, 2)
  roles.run(STEPS)
  reference.run(STEPS)
  assert roles.commits == reference.commits
  assert len({learners for _, _, learners, _ in reference.commits}) > 2, "not always the same"
  assert roles.begun == reference.begun
  for p, value in enumerate(reference.syncer.value):
    np.testing.assert_allclose(roles.kept.load(p).value, value.reshape(-1), rtol=0, atol=1e-5)


def test_together_they_learn_more_than_one_alone(capsys, monkeypatch):
  monkeypatch.setattr("sys.argv", ["algorithm.py"])
  algorithm_with()["main"]()
  alone, merged = map(float, re.findall(r"0\.[0-9]+", capsys.readouterr().out)[-2:])
  assert merged < 0.8 * alone
