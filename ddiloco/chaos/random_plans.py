"""Fault plans drawn by chance. PURE: the same seed is the same plan."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from ddiloco.config import Fault
from ddiloco.config.chaos import ACTIONS

KINDS = tuple(action for action in ACTIONS if action != "join")
SHARD_KINDS = tuple(action for action in KINDS if action != "poison")


def random_faults(
  seed: int,
  count: int,
  span_seconds: float,
  num_learners: int,
  num_shards: int,
  kinds: Sequence[str] = KINDS,
) -> tuple[Fault, ...]:
  """`count` faults of all kinds, in order of time, spread evenly by chance over the run.

  One in five strikes a shard, the others learners; one in ten strikes a second role a moment later.

  Args:
    seed: of chance.
    count: how many.
    span_seconds: of the run, since training began.
    num_learners: learners that may be struck ...
    num_shards: ... of each kind.
    kinds: actions to choose from, each as often as the others.
  """
  rng = random.Random(f"faults {seed}")
  order = [kinds[i % len(kinds)] for i in range(count)]
  rng.shuffle(order)
  times = sorted(rng.uniform(0, span_seconds) for _ in range(count))
  faults: list[Fault] = []
  for action, at in zip(order, times):
    if faults and rng.random() < 0.1:  # together with the one before
      at = faults[-1].at_seconds + rng.uniform(0, 0.2)
    on_shard = num_shards and action in SHARD_KINDS and rng.random() < 0.2
    role = f"syncer-{rng.randrange(num_shards)}" if on_shard else None
    faults.append(_fault(rng, action, role or f"learner-{rng.randrange(num_learners)}", at))
  return tuple(sorted(faults, key=lambda fault: fault.at_seconds))


def random_kills(
  seed: str, per_second: float, span_seconds: float, num_learners: int, down_seconds: float
) -> tuple[Fault, ...]:
  """Kills by one Poisson process over all islands, each as likely as any other; by time.

  Args:
    seed: of chance.
    per_second: of all islands together, in the mean.
    span_seconds: of the run, since training began.
    num_learners: learners that may be struck.
    down_seconds: until a killed one is started again.
  """
  rng, now, faults = random.Random(seed), 0.0, []
  while (now := now + rng.expovariate(per_second)) < span_seconds:
    role = f"learner-{rng.randrange(num_learners)}"
    faults.append(Fault("kill", role, at_seconds=round(now, 3), seconds=down_seconds))
  return tuple(faults)


def _fault(rng: random.Random, action: str, role: str, at_seconds: float) -> Fault:
  fault = Fault(
    action, role, at_seconds=round(at_seconds, 3), seconds=round(rng.uniform(0.5, 3), 2)
  )
  changes: dict[str, float] = {}
  if action in ("drop", "duplicate", "reorder", "corrupt"):
    changes["share"] = round(rng.uniform(0.1, 0.9), 2)
  if action in ("delay", "reorder"):
    changes["delay_seconds"] = round(rng.uniform(0.01, 0.5), 3)
  if action == "throttle":
    changes["bits_per_second"] = float(rng.choice((1e5, 1e6, 1e7)))
  if action == "slow":
    changes["factor"] = round(rng.uniform(1.5, 4), 2)
  if action == "poison":
    changes["factor"] = float(rng.choice((0.0, 100.0, 1e6, 1e30)))
  return dataclasses.replace(fault, **changes)
