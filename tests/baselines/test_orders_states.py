"""A state is there whole or not at all, and the newest one of all is found."""

import numpy as np
import pytest

from ddiloco.baselines import orders


def arrays(value):
  return {"params/a": np.full((2, 3), value, np.float32), "inner/1/count": np.int32(value)}


def test_the_newest_state_of_anybody_is_found(tmp_path):
  checkpoint = orders.folder(tmp_path, orders.CHECKPOINT)
  orders.save(checkpoint, 7, arrays(7), durable=True)
  for step in (9, 10, 1000):
    orders.save(orders.folder(tmp_path, "learner-0"), step, arrays(step))
  orders.save(orders.folder(tmp_path, "learner-1"), 999, arrays(999))
  step, path = orders.newest(tmp_path)
  assert step == 1000
  found = orders.load(path)
  assert found.keys() == arrays(0).keys()
  for name, array in arrays(1000).items():
    np.testing.assert_array_equal(found[name], array)
  orders.forget(orders.folder(tmp_path, "learner-0"))
  assert orders.newest(tmp_path)[0] == 999
  orders.forget(orders.folder(tmp_path, "learner-1"))
  assert orders.newest(tmp_path)[0] == 7


def test_only_one_state_is_kept_and_a_torn_one_is_none(tmp_path):
  folder = orders.folder(tmp_path, "learner-3")
  for step in range(3):
    orders.save(folder, step, arrays(step))
  (folder / "new").write_bytes(b"killed while writing this")
  assert [path.name for path in folder.glob("*.npz")] == ["000000002.npz"]
  assert orders.newest(tmp_path)[0] == 2


def test_no_state_at_all_is_an_error(tmp_path):
  orders.forget(orders.folder(tmp_path, "learner-0"))  # was never there
  with pytest.raises(FileNotFoundError, match="no state"):
    orders.newest(tmp_path)
