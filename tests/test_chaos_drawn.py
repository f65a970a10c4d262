"""Plans drawn by chance are valid, of all kinds, and the same for the same seed."""

from __future__ import annotations

import collections
from pathlib import Path

import pytest

from ddiloco.chaos import KINDS, random_faults
from ddiloco.config import from_dict


@pytest.mark.parametrize("seed", range(5))
def test_a_plan_has_every_kind_and_fits_the_run(seed):
  faults = random_faults(seed, 240, 100.0, 4, 2)
  kinds = collections.Counter(fault.action for fault in faults)
  assert len(faults) == 240 and set(kinds) == set(KINDS)
  assert max(kinds.values()) - min(kinds.values()) <= 1
  assert [f.at_seconds for f in faults] == sorted(f.at_seconds for f in faults)
  assert {f.role.partition("-")[0] for f in faults} == {"learner", "syncer"}
  place = {"islands": {"num_learners": 4}, "sync": {"num_shards": 2}}
  from_dict({**place, "chaos": {"faults": faults}})


def test_the_published_soak_is_the_plan_of_its_seed():
  """docs/results.md gives the command; who repeats it gets the faults of the table."""
  table = (Path(__file__).parents[1] / "docs" / "soak.tsv").read_text().splitlines()[1:]
  published = collections.Counter(tuple(line.split("\t")[1:4]) for line in table)
  drawn = random_faults(0, 500, 12 * 60.0, 4, 2)
  assert published == collections.Counter((f.role, f.action, f"{f.seconds:g}") for f in drawn)


def test_without_shards_learners_alone_are_struck():
  assert {f.role.partition("-")[0] for f in random_faults(1, 50, 60.0, 4, 0)} == {"learner"}


def test_the_same_seed_is_the_same_plan():
  assert random_faults(1, 50, 60.0, 4, 2) == random_faults(1, 50, 60.0, 4, 2)
  assert random_faults(1, 50, 60.0, 4, 2) != random_faults(2, 50, 60.0, 4, 2)
