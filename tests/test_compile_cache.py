"""A killed run of the tests leaves its compile cache to the next run, which deletes it."""

import os

from tests.compile_cache import new_folder


def test_folders_of_dead_runs_are_deleted_and_those_of_others_stay(tmp_path):
  folder, owned = new_folder(tmp_path)
  other, _ = new_folder(tmp_path)
  (tmp_path / "of another program").mkdir()
  assert os.path.exists(folder), "its owner lives"
  os.close(owned)  # as the kernel does when a process is killed
  new_folder(tmp_path)
  assert not os.path.exists(folder) and os.path.exists(other)
  assert (tmp_path / "of another program").exists()
