"""A state is there whole or not at all, and the newest one of all is found."""

import shutil

import numpy as np

from ddiloco.baselines import member


def arrays(value):
  return {"params/a": np.full((2, 3), value, np.float32), "inner/1/count": np.int32(value)}


def test_the_newest_state_of_anybody_is_found(tmp_path):
  checkpoint = member.folder(tmp_path, member.CHECKPOINT)
  member.save(checkpoint, 7, arrays(7), durable=True)
  for step in (9, 10, 1000):
    member.save(member.folder(tmp_path, "learner-0"), step, arrays(step))
  member.save(member.folder(tmp_path, "learner-1"), 999, arrays(999))
  path = member.newest(tmp_path)
  assert int(path.stem) == 1000
  found = member.load(path)
  assert found.keys() == arrays(0).keys()
  for name, array in arrays(1000).items():
    np.testing.assert_array_equal(found[name], array)
  shutil.rmtree(member.folder(tmp_path, "learner-0"))
  assert int(member.newest(tmp_path).stem) == 999
  shutil.rmtree(member.folder(tmp_path, "learner-1"))
  assert int(member.newest(tmp_path).stem) == 7


def test_only_one_state_is_kept_and_a_torn_one_is_none(tmp_path):
  folder = member.folder(tmp_path, "learner-3")
  for step in range(3):
    member.save(folder, step, arrays(step))
  (folder / "new").write_bytes(b"killed while writing this")
  assert [path.name for path in folder.glob("*.npz")] == ["000000002.npz"]
  assert int(member.newest(tmp_path).stem) == 2
