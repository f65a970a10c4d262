"""One role of a toy run as a process: `python -m tests.engines.toy_role learner 2 --dir=DIR ...`.

Signals, network, protocol, copies, exit status: all is what `ddiloco learner` and `ddiloco syncer`
run. Only the model is a toy in NumPy, for which JAX compiles nothing.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from pathlib import Path

from ddiloco.config import Config, from_dict
from ddiloco.core import fragments
from ddiloco.engines import single_roles
from ddiloco.engines.role_process import RoleRunner
from ddiloco.engines.role_spec import RoleSpec, end_with_parent
from ddiloco.engines.single_roles import run_syncer
from ddiloco.environment import FINISHED
from ddiloco.network import frames
from ddiloco.network.transport import EVALUATOR_ADDRESS, learner_address
from ddiloco.roles import initial
from ddiloco.roles.evaluator import Evaluator
from ddiloco.runtime import Runtime
from tests.roles import toy

STEP_SECONDS = 0.015
HURRIED_STEP_SECONDS = 0.004  # where the file toy.HURRY is in the workdir

# The model's shapes and initial values are all that roles ask JAX for.
initial.make_plan = lambda config: fragments.make_plan(toy.SPECS, config.sync)
initial.contract = lambda config, plan: plan.plan_id
initial.initial_values = lambda config, plan, wanted=None: {
  p: fragments.gather(plan.fragments[p], toy.initial_params())
  for p in wanted or range(len(plan.fragments))
}
initial.Assembled = lambda plan, config, values: dict(values)  # by fragment


class Island(toy.ToyIsland):
  """Outlives incarnations, as the real one."""

  def __init__(self, learner: int, plan: fragments.Plan, folder: Path):
    super().__init__(learner, plan, self.pace_seconds)
    self._hurry = folder / toy.HURRY

  def step(self, *arguments) -> dict[str, float]:
    if self._hurry.exists():
      self.step_seconds = HURRIED_STEP_SECONDS
    return super().step(*arguments)


def run_learner(config: Config, number: int, place: RoleSpec) -> int:
  """As `single_roles.run_learner`, on a toy island."""
  with RoleRunner(learner_address(number), config, place) as runner:
    island = Island(number, runner.plan, place.workdir)
    return runner.run(lambda: single_roles.live(runner, number, island, toy.batches))


def run_evaluator(config: Config, number: int, place: RoleSpec) -> int:
  """As `single_roles.run_evaluator`; it measures and saves nothing."""
  with RoleRunner(EVALUATOR_ADDRESS, config, place) as runner:
    return runner.run(lambda: evaluate(runner))


def evaluate(runner: RoleRunner) -> int:
  config, plan, endpoint = runner.config, runner.plan, runner.connect()
  make = functools.partial(initial.initial_values, config, plan)
  runtime = Runtime(config, plan, endpoint, runner.recorder, initial=make)
  Evaluator(None, runtime, runner.incarnation).run(runner.stopped)
  runner.disconnect()
  return FINISHED


RUN = {"learner": run_learner, "syncer": run_syncer, "evaluator": run_evaluator}


def main() -> int:
  parser = argparse.ArgumentParser()
  parser.add_argument("kind", choices=RUN)
  parser.add_argument("number", type=int)
  parser.add_argument("--dir", type=Path, required=True)
  parser.add_argument("--syncers", required=True)
  parser.add_argument("--bind", default="")
  parser.add_argument("--keys", type=Path)
  parser.add_argument("--config", required=True)
  parser.add_argument("--late_clock_seconds", type=int, default=0)  # this host's clock is wrong
  parser.add_argument("--step_seconds", type=float, default=STEP_SECONDS)
  flags = parser.parse_args()
  Island.pace_seconds = flags.step_seconds
  end_with_parent()
  if late := flags.late_clock_seconds:
    now = frames.seconds_since_2020
    frames.seconds_since_2020 = lambda: now() - late
  place = RoleSpec(
    flags.dir, flags.dir.name, tuple(flags.syncers.split(",")), flags.bind, flags.keys
  )
  config = from_dict(json.loads(flags.config))
  return RUN[flags.kind](config, flags.number, place)


if __name__ == "__main__":
  sys.exit(main())
