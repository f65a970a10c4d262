"""One member that has joined, to which a test says one thing after the other."""

import pytest

from tests.protocol.scripts import ALONE, Script, join
from tests.says import hello


@pytest.fixture
def shard() -> Script:
  """The only shard, with learner 0, which it may merge alone."""
  script = Script(ALONE)
  script.feed(hello(0, 0))
  return script


@pytest.fixture
def one() -> Script:
  """Learner 0, with the first values of both fragments."""
  script = Script(role="learner")
  join(script)
  return script
