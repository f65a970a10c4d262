"""The algorithm in one file: it learns, and the package's roles commit the same."""

import re

from tests.examples import one_file
from tests.worlds import check_all, struck


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
