"""The algorithm in one file as a family of random worlds: the package commits the same.

The package's roles, in virtual time, against `examples/algorithm.py`: the same problem, paces,
latency and kills; settings are drawn. Every commit has to be the same (fragment, version, learners,
steps), and the values at the end too. Two commits of one instant may come in either order.
"""

from __future__ import annotations

import collections
import functools
import math
import pathlib
import random
import runpy
from typing import Any

import numpy as np

from ddiloco.config import from_dict
from ddiloco.core.delta import Committed, Deltas, Merger
from ddiloco.core.fragments import Fragment, Piece, Plan
from ddiloco.protocol import events
from ddiloco.simulation.stand_ins import VirtualIsland
from ddiloco.simulation.world import Pace, World
from tests.worlds import swarm

KINDS = ("kill", "straggler", "long_links")
FILE = pathlib.Path(__file__).parents[2] / "examples" / "algorithm.py"
SECONDS = 300.0
STAGE_SECONDS = 1e-7  # a new version is not on the devices before the next step has begun


def algorithm_with(**settings):
  """The names of the example, with other settings."""
  names = runpy.run_path(str(FILE))["World"].__init__.__globals__
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
        "liveness_steps": algorithm["SILENT_STEPS"],
        "liveness_seconds": algorithm["SILENT_SECONDS"],
        "max_norm_ratio": 1e9,  # no update is screened
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
    metrics = super().step(batch, schedule_step, rate_scale)
    self._problem["inner_step"](self.params, self._learner, self._begun[self._learner])
    self._begun[self._learner] += 1
    return metrics

  def copy_out(self, fragment):
    return self.params[fragment].reshape(-1).copy()

  def apply(self, fragment, staged, keep):
    flat = self.params[fragment].reshape(-1)
    flat[:] = staged if keep == 0 else np.float32(keep) * flat + staged


class Roles(World):
  """The package's learners and syncer with the vectors of the example."""

  def __init__(self, algorithm):
    self.algorithm, self.commits = algorithm, []
    self.rounds: collections.Counter[int] = collections.Counter()  # how often each asked
    self.begun = [0] * len(algorithm["STEP_SECONDS"])
    pace = Pace(algorithm["STEP_SECONDS"], 0.0, 0.0, STAGE_SECONDS, 0.0)
    shapes = [first.shape for first in algorithm["FIRST"]]
    plan = Plan(
      tuple(
        Fragment(p, (Piece(f"{p}", None, 0, math.prod(shape), shape, 0, average=False),))
        for p, shape in enumerate(shapes)
      )
    )
    super().__init__(config_of(algorithm), pace, plan=plan)

  def put(self, state):
    value = self.algorithm["FIRST"][state.index].reshape(-1)
    self.kept[state.index] = Committed(state, value, value, None)

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
    elif isinstance(event, events.Round):
      self.rounds[event.round] += 1


def settings(seed: int) -> dict[str, Any]:
  """Settings of the world of this seed; times have so many digits that nothing happens at once."""
  kinds, chance = swarm(seed, KINDS), random.Random(f"settings {seed}")
  times = [1 + chance.random() for _ in range(chance.randint(2, 6))]
  if "straggler" in kinds:
    times[chance.randrange(len(times))] = 3 + 3 * chance.random()
  drawn = {
    "STEP_SECONDS": tuple(times),
    "H": chance.randint(6, 30),
    "TAU": chance.randint(0, 4),
    "K": chance.randint(1, min(3, len(times))),
    "GAMMA": chance.choice([0.0, 0.5, 0.9]),
    "LATENCY": chance.uniform(*((0.3, 0.9) if "long_links" in kinds else (0.02, 0.06))),
  }
  # So that next to nothing is asked for twice, which the example never does: a round that lacks a
  # quorum waits for a learner that was killed, at most until it is back.
  return drawn | {"SILENT_SECONDS": 30.0 if drawn["K"] == 1 else 60.0}


def kills(seed: int, learners: int) -> list[tuple[int, float, float]]:
  """(learner, when it is killed, for how many seconds), one after the other."""
  chance, count = random.Random(f"kills {seed}"), 3 if "kill" in swarm(seed, KINDS) else 0
  times = [40 + 80 * i + 40 * chance.random() for i in range(count)]
  return [(chance.randrange(learners), at, 5 + 30 * chance.random()) for at in times]


def check(seed: int) -> collections.Counter[str]:
  """Runs the world of this seed."""
  drawn = settings(seed)
  algorithm = algorithm_with(**drawn)
  roles, reference = Roles(algorithm), algorithm["World"]()
  planned = kills(seed, len(drawn["STEP_SECONDS"]))
  for learner, at, seconds in planned:
    roles.at(at, roles.kill, ("learner", learner), seconds)
    reference.at(at, reference.kill, learner)
    reference.at(at + seconds, reference.start, learner)
  for now in range(1, int(SECONDS) + 1):
    roles.run(now)
    if max(roles.rounds.values(), default=0) > 1:
      # A learner was killed when a round waited for it alone, and counted as present until that
      # round asked others too. The example would begin a new round, a moment later.
      assert planned and drawn["K"] == 1, drawn
      return collections.Counter({"asked_again": 1})
    reference.run(now)
    assert sorted(roles.commits) == sorted(reference.commits), drawn
    began = [roles.kept[p].state.global_step for p in range(len(reference.syncer.value))]
    if began != reference.syncer.synced_at:
      # A straggler got a version later, since the one before it was on its way; with it came a
      # later global step.
      assert "straggler" in swarm(seed, KINDS), drawn
      return collections.Counter({"another_clock": 1})
  assert roles.begun == reference.begun
  for p, value in enumerate(reference.syncer.value):
    np.testing.assert_allclose(roles.kept[p].value, value.reshape(-1), rtol=0, atol=1e-4)
  kinds = collections.Counter(swarm(seed, KINDS) - {"kill"})
  sizes = {len(learners) for _, _, learners, _ in reference.commits}
  kinds.update({"kill": len(planned), "commits": len(reference.commits), "differ": len(sizes) > 1})
  return kinds
