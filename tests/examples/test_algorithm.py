"""The algorithm in one file: it learns, and the package's roles commit the same."""

import re

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.core.delta import learner_weights
from tests.core.test_outer_merge import fragment_of, merged, randoms
from tests.examples import one_file
from tests.made_events import made
from tests.worlds import check_all, struck

EXAMPLE = one_file.algorithm_with()


def test_the_roles_of_the_package_commit_the_same():
  counted = check_all(one_file.check, range(16))
  print(counted)
  assert struck(counted, [*one_file.KINDS, "differ"]) and counted["commits"] > 16 * 20


def test_no_life_gets_what_was_sent_to_the_one_before():
  """A learner starts anew, and a version is published before the syncer hears of that."""
  one_file.check(777138)


def test_together_they_learn_more_than_one_alone(capsys, monkeypatch):
  monkeypatch.setattr("sys.argv", ["algorithm.py"])
  one_file.algorithm_with()["main"]()
  alone, merged = map(float, re.findall(r"0\.[0-9]+", capsys.readouterr().out)[-2:])
  assert merged < 0.8 * alone


@given(st.lists(st.integers(1, 400), min_size=1, max_size=6))
def test_weights_are_those_of_the_package(steps):
  tokens = tuple(EXAMPLE["BATCH"] * n for n in steps)
  said = {"round": 0, "version": 1, "learners": tuple(range(len(steps)))}
  said |= {"steps": tuple(steps), "tokens": tokens, "step_tokens": (EXAMPLE["BATCH"],) * len(steps)}
  commit = made(0.0, "syncer-0", "commit", **said)
  theirs = learner_weights(commit, one_file.config_of(EXAMPLE))
  np.testing.assert_allclose(EXAMPLE["token_weights"](steps, tokens), theirs, rtol=1e-12)


def test_merges_are_those_of_the_package_also_where_directions_cancel():
  size = 1000
  fragment, zero = fragment_of(size), np.zeros(size, np.float32)
  one, two, three = randoms(3, size)
  nearly = -one + np.float32(1e-5) * two
  for deltas, weights in (
    ([one], [1.0]),
    ([one, 3 * two, three], [0.5, 0.3, 0.2]),
    ([one, zero], [0.5, 0.5]),
    ([one, -one], [0.75, 0.25]),
    ([zero, zero], [0.5, 0.5]),
    ([one, -one], [0.5, 0.5]),
    ([one, -3 * one, zero], [0.4, 0.4, 0.2]),
    ([one, nearly], [0.5, 0.5]),
  ):
    expected = merged(fragment, deltas, weights)
    np.testing.assert_allclose(EXAMPLE["merge"](deltas, weights), expected, rtol=1e-5, atol=1e-6)
