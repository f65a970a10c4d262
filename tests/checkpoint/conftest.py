"""Savers of a storage that a test watches (`tests/checkpoint/saving.py`).

pytest imports this file before it sets its own `sys.unraisablehook`, and `checkpoint/weights.py`
must come after that: so what needs it is imported in the fixtures.
"""

import pytest

from tests.waits import PATIENCE_SECONDS


@pytest.fixture
def storage(tmp_path):
  from tests.checkpoint.saving import Gated

  return Gated(tmp_path / "checkpoints")


@pytest.fixture
def savers(storage):
  """Makes savers with event lists; they end with the test."""
  from ddiloco.checkpoint.saver import Saver
  from tests.checkpoint.saving import Events

  made = []

  def make(role="syncer-0"):
    events = Events()
    made.append(Saver(storage, role, 0, events))
    return made[-1], events

  yield make
  storage.go.set()
  for saver in made:
    saver.close(PATIENCE_SECONDS)
    assert not saver._worker._thread.is_alive()


@pytest.fixture
def shard_0(savers):
  return savers()


@pytest.fixture
def saver(shard_0):
  """Shard 0's."""
  return shard_0[0]


@pytest.fixture
def events(shard_0):
  """What shard 0's saver tells of."""
  return shard_0[1]
