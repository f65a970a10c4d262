"""What families of random worlds share.

A family is a module with the `KINDS` of faults that it knows, and `check(seed)`, which runs the
world of this seed, judges it, and counts what happened in it. A fault that struck counts under its
kind. A world may have any subset of the kinds, so that some have much of one and nothing of another
that would hide it. `scripts/random_worlds.py` runs all families; their tests run some hundred
worlds of each.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Callable, Iterable


def swarm(seed: int, kinds: Iterable[str]) -> frozenset[str]:
  """The kinds of faults of the world of this seed: each is in with probability one half."""
  return frozenset(kind for kind in kinds if random.Random(f"{kind} {seed}").random() < 0.5)


def check_all(
  check: Callable[[int], collections.Counter[str]], seeds: Iterable[int]
) -> collections.Counter[str]:
  """What happened in these worlds.

  Raises:
    AssertionError: names the seed of the first that failed.
  """
  counted: collections.Counter[str] = collections.Counter()
  for seed in seeds:
    try:
      counted.update(check(seed))
    except Exception as error:
      raise AssertionError(f"world {seed}: {error!r}") from error
  return counted


def struck(counted: collections.Counter[str], kinds: Iterable[str]) -> bool:
  """Whether every kind of fault has struck at least once."""
  return all(counted[kind] > 0 for kind in kinds)
