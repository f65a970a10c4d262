"""What the stale work of an island does to the global model when it returns after a long absence.

    python scripts/bench_stale.py [--problems=regression,text] [--away=600,2000] [--before=200]
      [--after=200] [--period=24] [--rules=kept,...] [--seed=0] [--quick]

Four islands train together for `before` steps. Then one is cut off from all shards, and trains on
alone; after `away` steps it is connected again, with all the work it has made. The comparison is
with the same run without its return: until the return the two are equal, bit for bit. Roles,
reducers, deltas, merges and outer steps are those of every run, in virtual time, with real vectors.

regression: least squares, 4096 weights, eigenvalues from 0.01 to 1, noise in the labels; its loss
is the excess over the best one, which is known. text: the model of configs/quickstart.py.

The script prints the losses after the return relative to those of the other run: the worst, and the
mean. Other rules than the kept one are there for comparison:

  kept      the rule of every run
  rebase    all work of the absence is pushed, and weighs less by its steps (`worth_steps`)
  unbounded the same, with the weight of its steps and tokens
  age       the weight times exp(-0.1 t) and a cosine gate that is shut at 8, t the periods missed:
            the factor of CGAD (arXiv 2605.09126), its constants chosen here

Last line: {PROBLEM: {AWAY: {RULE: {"worst": relative, "mean": relative, "loss", "without",
"share": of the stale pushes in their merges, "discarded": share of the tokens made while away}}},
"worst": of the rule that is kept}.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import common
import numpy as np
from virtual_training import STEP_SECONDS, Problem, Text, Valued

from ddiloco import environment
from ddiloco.config import Config, Fault
from ddiloco.core import delta, outer
from ddiloco.protocol import events, learner, rules
from ddiloco.protocol.events import Commit, Event
from ddiloco.simulation.stand_ins import VirtualIsland, plan_of
from ddiloco.simulation.world import Actor

AWAY = 3  # which of four islands
EVERY = 10  # steps from one look at the loss to the next
WEIGHTS, BATCH, LABEL_NOISE = 4096, 16, 1.0


class Watched(Valued):
  """A world that records the loss now and then, and the weight of stale work."""

  def __init__(self, problem: Problem, faults: Sequence[Fault], seed: int):
    self.losses: dict[int, float] = {}  # by global step
    self.shares: list[float] = []  # of pushes of stale work in their merges
    super().__init__(problem, seed, faults)

  def reach(self, step: int) -> None:
    if step > self.step and step % EVERY == 0:
      self.losses[step] = self.loss()
    super().reach(step)

  def tell(self, actor: Actor | None, event: Event) -> None:
    if isinstance(event, events.Commit) and AWAY in event.learners:
      state = self.actors["learner", AWAY].state
      f = state.fragments[event.fragment]
      if f.outstanding is not None and f.outstanding.push.steps > 2 * self.sync.sync_period:
        self.shares.append(event.weights[AWAY])


# --- Least squares: 1/2 E (y - x w)^2 with y = x w* + noise, less half the noise's variance


class Regression:
  """Every island draws its own samples of one distribution."""

  def __init__(self, config: Config, seed: int):
    self.config = config
    per_fragment = WEIGHTS // config.sync.num_fragments
    self.plan = plan_of((per_fragment,) * config.sync.num_fragments)
    chance = np.random.default_rng(seed)
    self.scales = np.exp(chance.uniform(math.log(0.1), 0.0, WEIGHTS)).astype(np.float32)
    self.best = chance.normal(size=WEIGHTS).astype(np.float32) / math.sqrt(WEIGHTS / 8)
    self.initial = [np.zeros(per_fragment, np.float32) for _ in self.plan.fragments]

  def island(self, world: Valued, number: int, seed: str) -> Any:
    return Sampler(self, world, number, seed)

  def loss(self, values: list[np.ndarray]) -> float:
    away = (np.concatenate(values) - self.best) * self.scales
    return 0.5 * float(away @ away)


class Sampler(VirtualIsland):
  """Stochastic gradient descent on fresh samples."""

  def __init__(self, problem: Regression, world: Valued, learner: int, seed: str):
    super().__init__(world, learner, seed)
    self._problem = problem
    self._chance = np.random.default_rng(list(seed.encode()))
    self._values = [value.copy() for value in problem.initial]

  def step(self, batch: Any, schedule_step: int, rate_scale: float) -> Mapping[str, float]:
    metrics = super().step(batch, schedule_step, rate_scale)
    problem, values = self._problem, np.concatenate(self._values)
    x = self._chance.standard_normal((BATCH, WEIGHTS), np.float32) * problem.scales
    noise = LABEL_NOISE * self._chance.standard_normal(BATCH, np.float32)
    gradient = (x @ (values - problem.best) - noise) @ x / BATCH
    values -= problem.config.inner.learning_rate * gradient
    self._values = np.split(values, len(self._values))
    return metrics

  def copy_out(self, fragment: int, moments: bool = False) -> np.ndarray:
    return self._values[fragment]

  def apply(self, fragment: int, staged: Any, keep: float, moments: bool = False) -> None:
    self._values[fragment] = np.float32(keep) * self._values[fragment] + staged


# --- Rules for stale work


def gate(steps: int, period: int) -> float:
  """exp(-0.1 t), and half a cosine that reaches 0 at 8 missed periods."""
  missed = max(0.0, steps / period - 1)
  return math.exp(-0.1 * missed) * (0.5 + 0.5 * math.cos(math.pi * min(1.0, missed / 8)))


def aged_weights(what: Commit, config: Config) -> np.ndarray:
  """The weights of a commit's pushes, times the gate."""
  weights = outer.token_weights(what.steps, what.tokens)
  weights = weights * [gate(steps, config.sync.sync_period) for steps in what.steps]
  return weights / weights.sum()


Patches = list[tuple[Any, str, Any]]
REBASE: Patches = [(learner, "STALE_PERIODS", math.inf), (learner, "MISSED", "rebase")]
RULES: dict[str, Patches] = {
  "kept": [],
  "rebase": REBASE,
  "unbounded": [
    *REBASE,
    (rules, "worth_steps", lambda steps, sync: steps),
    (outer, "bounded_shares", lambda weights, step_tokens: weights),
  ],
  "age": [*REBASE, (delta, "learner_weights", aged_weights)],
}


@contextlib.contextmanager
def ruled(name: str) -> Iterator[None]:
  """A context in which stale work is treated by this rule."""
  with contextlib.ExitStack() as stack:
    for where, what, instead in RULES[name]:
      stack.enter_context(mock.patch.object(where, what, instead))
    yield


def run(problem: Problem, rule: str, before: int, away: int, after: int, seed: int) -> Watched:
  """The world at the end. `away` 0: the island never returns."""
  seconds = away * STEP_SECONDS if away else 1e9
  cut = Fault("cut", f"learner-{AWAY}", at_step=before, seconds=seconds)
  with ruled(rule):
    world = Watched(problem, (cut,), seed)
    world.run(math.inf, lambda: world.step >= after)
  return world


def compare(here: Watched, without: Watched, before: int, back: int, tokens_per_step: int) -> dict:
  """The effects of the return at step `back`."""
  ratios = [loss / without.losses[at] - 1 for at, loss in here.losses.items() if at > back]
  state = here.actors["learner", AWAY].state
  discarded = statistics.mean(f.discarded_tokens for f in state.fragments)
  return {
    "worst": round(max(ratios), 5),
    "mean": round(statistics.mean(ratios), 5),
    "loss": round(max(here.losses.items())[1], 5),
    "without": round(without.losses[max(here.losses)], 5),
    "share": round(max(here.shares, default=0.0), 4),
    "discarded": round(discarded / (tokens_per_step * (back - before)), 3),
  }


def make_problem(name: str, seed: int, period: int, quick: bool) -> Problem:
  fields = {
    "seed": seed,
    "chaos.faults": (),
    "sync.snapshot_steps": 0,
    "sync.sync_period": period,
    "sync.num_fragments": 8 if name == "regression" else 6,
    "run.total_tokens": 1 << 40,
    "run.compare_alone": False,
    "network.give_up_seconds": 1e9,
    "inner.decay_steps": 1 << 20,
    "inner.final_share": 1.0,  # the rate does not depend on which learners are there
  }
  if name == "text":
    return Text(common.config_of("tutorial" if quick else "quickstart", fields))
  return Regression(common.config_of("quickstart", {**fields, "inner.learning_rate": 5e-3}), seed)


def main() -> None:
  problems = common.names_of(("regression", "text"))
  options = common.options(
    __doc__,
    {"away": [56], "before": 10, "after": 20, "period": 6},
    problems={"type": problems, "default": "regression,text"},
    away={"type": common.several(int), "default": "600,2000", "help": "steps"},
    before=200,
    after=(200, "steps from its return to the end"),
    period=(24, "sync.sync_period, steps"),
    rules={"type": common.names_of(RULES), "default": "kept"},
    seed=0,
  )
  environment.prepare(1, cpu_only=True)
  result: dict[str, Any] = {}
  for name in options.problems:
    problem = make_problem(name, options.seed, options.period, options.quick)
    per_step = problem.config.tokens_per_step(AWAY)
    end = options.before + max(options.away) + options.after
    without = run(problem, "kept", options.before, 0, end, options.seed)
    result[name] = {}
    for away in options.away:
      back, found = options.before + away, {}
      for rule in options.rules:
        here = run(problem, rule, options.before, away, back + options.after, options.seed)
        found[rule] = compare(here, without, options.before, back, per_step)
        print(f"{name}, away for {away} steps, {rule}: {found[rule]}", flush=True)
      result[name][str(away)] = found
  kept = [f["kept"]["worst"] for each in result.values() for f in each.values() if "kept" in f]
  print(json.dumps({**result, "worst": max(kept, default=math.nan)}))


if __name__ == "__main__":
  common.run_script(main)
