"""A disk or a network that fails for a while: tried again, passed over, and nothing is deleted.

What one role cannot read others can: no fault of a reader may cost anybody a committed snapshot.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import re
import shutil
import sys
import tempfile
import types
from unittest import mock

import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath
from etils.epath import backend

from ddiloco.checkpoint import signed_json, weights
from ddiloco.checkpoint import snapshots as arrays_lib
from ddiloco.checkpoint.restore import restore_fragments
from ddiloco.checkpoint.saver import Saver
from ddiloco.checkpoint.snapshots import Damaged, Storage
from ddiloco.config import ConfigError
from tests.checkpoint.saving import Events
from tests.checkpoint.test_restore import PLAN, save_shards
from tests.checkpoint.test_snapshots_kill import denied, disk_of

ROLES = ("learner-0", "learner-1", "syncer-0")
PASSING = [errno.EIO, errno.ESTALE, errno.EACCES, errno.EMFILE, errno.ETIMEDOUT]


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
  monkeypatch.setattr(signed_json, "PAUSES_SECONDS", (0.0, 0.0, 0.0))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  """Two committed snapshots of three roles."""
  path = tmp_path_factory.mktemp("saved")
  storage = Storage(path, "plan", pytest.fail)
  for snapshot in (1, 2):
    for role in ROLES:
      storage.save(snapshot, role, snapshot, {"of": snapshot}, {"a": np.full(9, snapshot)})
    storage.commit(snapshot, ROLES)
  return path


@pytest.fixture
def path(saved, tmp_path):
  """A copy of them."""
  return shutil.copytree(saved, tmp_path, dirs_exist_ok=True)


@pytest.fixture
def storage(path):
  return Storage(path, "plan", pytest.fail)


def fail(monkeypatch, what, code, times=10**9):
  """So many calls of the file system fail that would read or list a path that has `what` in it."""
  left = [times]
  kind = type(backend.os_backend)

  def failing(real, error):
    def call(*arguments, **more):
      if left[0] and any(what in str(argument) for argument in arguments):
        left[0] -= 1
        raise error
      return real(*arguments, **more)

    return call

  refused = OSError(code, os.strerror(code))
  # As TensorStore says it.
  said = f"Error reading: {os.strerror(code)} [os_error_code='{code}'] [tensorstore_spec='...']"
  for name in ("open", "listdir"):
    monkeypatch.setattr(kind, name, failing(getattr(kind, name), refused))
  monkeypatch.setattr(arrays_lib, "read", failing(arrays_lib.read, ValueError(said)))


@pytest.mark.parametrize("code", PASSING, ids=errno.errorcode.get)
@pytest.mark.parametrize("what", ["00000002", "manifest.json", "learner-0/meta.json", "arrays"])
def test_what_fails_for_a_moment_is_read_again(path, monkeypatch, code, what, storage):
  fail(monkeypatch, what, code, times=2)
  assert storage.find("learner-0").snapshot == 2


@pytest.mark.parametrize("status", ["UNAVAILABLE", "UNAUTHENTICATED", "ABORTED", "UNKNOWN"])
def test_what_a_bucket_does_not_give_for_a_moment_is_read_again(path, monkeypatch, status):
  """A token that had expired cost the newest snapshot: it counted as damaged."""
  errors, read = [ValueError(f"{status}: Error reading gs://bucket/run")] * 2, arrays_lib.read

  def failing(*arguments):
    if errors:
      raise errors.pop()
    return read(*arguments)

  monkeypatch.setattr(arrays_lib, "read", failing)
  assert Storage(path, "plan", pytest.fail).find("learner-0").snapshot == 2


class NotFoundError(Exception):
  """As TensorFlow's file systems say that nothing is at a path."""


@pytest.mark.parametrize("error", [NotFoundError, FileNotFoundError, NotADirectoryError])
def test_a_folder_that_is_not_there_is_empty(monkeypatch, error):
  def iterdir():
    raise error("gs://bucket/run")

  folder = types.SimpleNamespace(iterdir=iterdir)
  monkeypatch.setattr(signed_json, "PAUSES_SECONDS", ())
  assert signed_json.listed(folder) == []


@pytest.mark.parametrize("code", PASSING, ids=errno.errorcode.get)
def test_a_folder_that_cannot_be_listed_is_not_taken_for_an_empty_one(path, monkeypatch, code):
  storage, told = Storage(path, "plan", pytest.fail), []
  with monkeypatch.context() as patch:
    fail(patch, path.name, code)
    for ask in (storage.committed, storage.forget, lambda: storage.prune(1), storage.metas):
      with pytest.raises(OSError, match=re.escape(os.strerror(code))):
        ask(*([2] if ask == storage.metas else []))
    assert Storage(path, "plan", told.append).find("learner-0") is None
  assert len(told) == 1 and "checkpoints skipped: " in told[0] and "cannot be read" in told[0]
  assert storage.find("learner-0").snapshot == 2


@pytest.mark.parametrize("code", PASSING, ids=errno.errorcode.get)
@pytest.mark.parametrize(
  "what", ["00000002", "manifest.json", "syncer-0/meta.json", "syncer-0/arrays"]
)
def test_one_roles_read_error_takes_no_snapshot_from_anybody(path, monkeypatch, code, what):
  """Whatever it does at its start and when it prunes, the others find what they had."""
  told = []
  with monkeypatch.context() as patch:
    mine = Storage(path, "plan", told.append)
    fail(patch, f"00000002/{what}" if "/" in what or "." in what else what, code)
    assert mine.find("syncer-0").snapshot == 1, "passed over"
    for does in (lambda: mine.forget("syncer-0"), lambda: mine.prune(1)):
      with contextlib.suppress(OSError):
        does()
  assert told, "and said"
  others = Storage(path, "plan", pytest.fail)
  assert {role: others.find(role).snapshot for role in ROLES} == dict.fromkeys(ROLES, 2)


def test_who_may_not_read_for_a_while_passes_over_and_deletes_nothing(path):
  """A real refusal: the folder belongs to somebody else."""
  told, mine = [], Storage(path, "plan", pytest.fail)
  mine._warn = told.append
  with denied(path / "00000002", 0o000):
    assert mine.find("syncer-0") is None
    with pytest.raises(OSError, match="Permission denied"):
      mine.prune(1)
  assert told and "Permission denied" in told[0]
  assert mine.committed() == [2, 1] and mine.find("syncer-0").snapshot == 2


def test_a_lost_host_is_no_fault_of_a_snapshot(path):
  """Where an island has several hosts, its arrays go to the others as they are read. Every snapshot
  was passed over, with the lost connection as the reason."""
  with pytest.raises(ConnectionError, match="host 1 is gone"):
    Storage(path, "plan", pytest.fail).find(
      "learner-0", mock.Mock(side_effect=ConnectionError("host 1 is gone"))
    )


def test_parts_are_seen_to_grow_where_the_user_has_no_name(path, monkeypatch):
  """As in a container with a user id of its own: no snapshot was ever committed."""

  def nameless(uid):
    raise KeyError(f"getpwuid(): uid not found: {uid}")

  monkeypatch.setattr(pwd, "getpwuid", nameless)
  found = Storage(path, "plan", pytest.fail).growth(2, [*ROLES, "learner-9"])
  assert found.pop("learner-9") == 0 and min(found.values()) > 9 * 8


def test_fragments_are_restored_from_an_older_snapshot_and_the_newest_stays(tmp_path, monkeypatch):
  told, tried = [], []
  storage = Storage(tmp_path, PLAN.plan_id, told.append)
  for snapshot in (1, 2):
    save_shards(storage, snapshot)
  with monkeypatch.context() as patch:
    fail(patch, "00000002/syncer-1/meta.json", errno.EIO)
    assert restore_fragments(storage, range(4), tried).snapshot == 1
  assert len(tried) == 1 and "00000002/syncer-1" in tried[0] and "Input/output error" in tried[0]
  assert told == tried
  assert restore_fragments(storage, range(4)).snapshot == 2


def test_what_belongs_to_another_run_is_never_pruned(path):
  """Two runs that were given one checkpoint.path by mistake."""
  told = []
  other = Storage(path, "another plan", told.append)
  for snapshot in (3, 4):
    other.save(snapshot, "syncer-0", 1, {}, {})
    other.commit(snapshot, ["syncer-0"])
  other.prune(keep=1)
  assert other.committed() == [4, 2, 1]
  assert len(told) == 2 and all("belongs to another plan" in text for text in told)
  mine = Storage(path, "plan", told.append)
  mine.prune(keep=1)
  assert mine.committed() == [4, 2]
  assert mine.find("syncer-0").snapshot == 2, "the other run's does not count"


def test_a_file_with_the_name_of_a_snapshot_is_left_alone(path):
  """Another program's, which was deleted as a snapshot without parts."""
  (path / "00000000").write_text("mine")
  (path / "20260101").write_text("mine")
  storage = Storage(path, "plan", pytest.fail)
  storage.forget()
  storage.prune(1, over=20260102)
  assert (path / "20260101").read_text() == (path / "00000000").read_text() == "mine"
  assert storage.find("learner-0").snapshot == 2


def test_a_folder_of_another_program_is_left_alone(path):
  """By its date its name was a snapshot's that was never committed, and a new run deleted it."""
  files = [path / "20260101" / "model.pt", path / "20260102" / "weights" / "0"]
  for file in files:
    file.parent.mkdir(parents=True)
    file.write_text("mine")
  storage = Storage(path, "plan", pytest.fail)
  storage.forget()
  storage.forget("learner-0")
  storage.prune(1, over=20260102)
  assert [file.read_text() for file in files] == ["mine", "mine"]


def test_what_was_read_counts_also_if_its_reader_cannot_be_closed(path, monkeypatch):
  """Every snapshot of a bucket that hung up there was passed over, and the run was refused."""
  monkeypatch.setattr(
    ocp.Checkpointer, "close", mock.Mock(side_effect=RuntimeError("the bucket hung up"))
  )
  assert Storage(path, "plan", pytest.fail).find("learner-0").snapshot == 2


def test_an_error_without_a_text_is_named(path):
  """As fsspec's when a bucket does not answer in time."""
  with pytest.raises(Damaged, match=r"cannot be read \(TimeoutError:\)"):
    signed_json.patiently(epath.Path(path), mock.Mock(side_effect=TimeoutError))
  assert signed_json.brief(FileNotFoundError("bucket/it")) == "FileNotFoundError: bucket/it"
  assert signed_json.brief(Damaged(epath.Path("it"), "is missing")) == "it: is missing"
  assert signed_json.brief(PermissionError(13, "denied", "it")) == "[Errno 13] denied: 'it'"
  with pytest.raises(OSError, match=r"^it: RuntimeError: hung up$"), signed_json.one_error("it"):
    raise RuntimeError("hung up")


def test_of_a_long_error_both_ends_are_told():
  first, last = "a" * 200, "b" * 200
  assert signed_json.brief(OSError(first + last)) == first + last
  assert signed_json.brief(OSError(f"{first} and so on {last}")) == f"{first} ... {last}"


@pytest.mark.parametrize("file", ["learner-0/meta.json", "manifest.json"])
def test_a_signed_file_is_on_the_disk_before_it_has_its_name(path, monkeypatch, file):
  """With checkpoint.keep = 1 a power cut after a commit could take the old snapshot and the new."""
  done, fsync, replace = [], os.fsync, os.replace

  def synced(descriptor):
    what = "on the disk" if os.fstat(descriptor).st_size else "still in memory"
    done.append((what, os.readlink(f"/proc/self/fd/{descriptor}")))
    fsync(descriptor)

  def named(source, target):
    done.append(("named", str(target)))
    replace(source, target)

  monkeypatch.setattr(os, "fsync", synced)
  monkeypatch.setattr(os, "replace", named)
  storage = Storage(path, "plan", pytest.fail)
  storage.save(3, "learner-0", 3, {}, {})
  storage.commit(3, ["learner-0"])
  there = str(path / "00000003" / file)
  assert [what for what, name in done if name.removesuffix(".tmp") == there] == [
    "on the disk",
    "named",
  ]


def test_all_that_a_checkpoint_needs_is_on_the_disk(tmp_path, monkeypatch):
  """TensorStore sees to its own files only: a power cut left values that Orbax could not find."""
  done, fsync = set(), os.fsync

  def synced(descriptor):
    done.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    fsync(descriptor)

  monkeypatch.setattr(os, "fsync", synced)
  arrays = {"a": np.ones(9, np.float32)}
  Storage(tmp_path, "plan", pytest.fail).save(3, "learner-0", 3, {}, dict(arrays))
  weights.save(tmp_path / "result", arrays)
  for folder in ("00000003/learner-0/arrays/0", r"\.result\.[0-9a-f]{16}"):
    for name in ("_METADATA", "_CHECKPOINT_METADATA"):
      assert any(re.search(rf"/{folder}/{name}$", file) for file in done), (folder, name)


# --- at the same moment ---------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["forgets, then commits", "commits, then forgets"])
def test_a_role_that_forgets_while_its_snapshot_is_committed(path, monkeypatch, order):
  """Its new life deletes what it takes for left over; shard 0 has just counted it in."""
  mine, shard0 = Storage(path, "plan", pytest.fail), Storage(path, "plan", pytest.fail)
  for role in ROLES:
    mine.save(3, role, 3, {}, {})
  first, then = (mine, shard0) if order.startswith("forgets") else (shard0, mine)
  do = {id(mine): lambda: mine.forget("learner-0"), id(shard0): lambda: shard0.commit(3, ROLES)}

  def between(real, *arguments):
    """The other one comes in the middle: after this one has looked, before it has written."""
    monkeypatch.undo()
    found = real(*arguments)
    if then is mine:
      mine.forget("learner-0")
    else:
      with contextlib.suppress(Damaged):
        shard0.commit(3, ROLES)
    return found

  name = "_digests" if first is shard0 else "is_committed"
  real = getattr(first, name)

  def patched(*arguments):
    if arguments[0] != 3:
      return real(*arguments)
    return between(real, *arguments)

  monkeypatch.setattr(first, name, patched)
  with contextlib.suppress(Damaged):
    do[id(first)]()
  if 3 in mine.committed():
    there = {role: meta["digest"] for role, meta in mine.metas(3).items()}
    assert there == mine.manifest(3)["parts"], "what is vouched for is there"
  assert mine.find("syncer-0").snapshot in (2, 3)


def test_what_is_given_up_and_committed_all_the_same_stays(path, monkeypatch):
  """A shard 0 that stood still gives up what its next life commits at this moment."""
  old, new = Storage(path, "plan", pytest.fail), Storage(path, "plan", pytest.fail)
  for role in ROLES:
    new.save(3, role, 3, {}, {})
  look = old.committed

  def committed():
    monkeypatch.undo()
    found = look()
    new.commit(3, ROLES)
    return found

  monkeypatch.setattr(old, "committed", committed)
  old.prune(9, over=3)
  assert new.committed() == [3, 2, 1]
  digests = {role: meta["digest"] for role, meta in new.metas(3).items()}
  assert digests == new.manifest(3)["parts"]


@pytest.mark.parametrize("when", ["between two windows", "before its meta", "after its forgetting"])
def test_what_is_forgotten_while_it_is_written_is_never_complete(path, monkeypatch, when):
  """A former life that still wrote completed a part that had lost its first arrays, and shard 0
  committed it."""
  old, new = Storage(path, "plan", pytest.fail), Storage(path, "plan", pytest.fail)
  monkeypatch.setattr(arrays_lib, "WINDOW_BYTES", 1)
  write, sign, rmtree = weights.write, signed_json.write, type(old.path).rmtree

  def windows(folder, window):
    if when == "between two windows" and folder.name == "2":
      new.forget("learner-0")
    write(folder, window)

  def meta(file, signed):
    if when == "before its meta":
      new.forget("learner-0")
    if when != "after its forgetting":
      return sign(file, signed)

    def deleted(folder, **more):
      rmtree(folder, **more)
      if folder == file.parent:
        folder.mkdir()
        sign(file, signed)

    with monkeypatch.context() as patched:
      patched.setattr(type(old.path), "rmtree", deleted)
      new.forget("learner-0")

  monkeypatch.setattr(weights, "write", windows)
  monkeypatch.setattr(signed_json, "write", meta)
  with pytest.raises(OSError):
    old.save(3, "learner-0", 3, {}, {f"a/{i}": np.full(9, i) for i in range(4)})
  assert new.metas(3) == {}


def test_a_newer_part_is_read_where_the_newest_was_pruned_while_it_was_read(path, monkeypatch):
  """A learner that comes back reads for minutes; meanwhile its former life's part is committed."""
  told: list[str] = []
  mine, shard = Storage(path, "plan", told.append), Storage(path, "plan", pytest.fail)
  monkeypatch.setattr(arrays_lib, "WINDOW_BYTES", 1)
  for n in (3, 4):
    shard.save(n, "learner-0", n, {"of": n}, {"a": np.full(9, n), "b": np.full(9, n)})
  shard.commit(3, ["learner-0"])

  def place(name, value):
    if not told and 4 not in shard.committed():
      shard.commit(4, ["learner-0"])
      shard.prune(1)
    return value

  assert mine.find("learner-0", place).state == {"of": 4}
  assert len(told) == 1 and "checkpoint 3 skipped" in told[0]


@pytest.mark.parametrize("committed", [False, True])
def test_what_is_pruned_while_it_is_written_goes_when_it_is_written(path, monkeypatch, committed):
  """A slow learner's part of a snapshot that shard 0 has given up, or committed without it: the
  deletion failed in the middle, and so did the learner's write. Then the part stayed for long."""
  slow, shard = Storage(path, "plan", pytest.fail), Storage(path, "plan", pytest.fail)
  for role in ROLES:
    shard.save(3, role, 3, {}, {})
  if committed:
    shard.commit(3, ROLES)
    for n in (4, 5):
      for role in ROLES:
        shard.save(n, role, n, {}, {})
      shard.commit(n, ROLES)
  write = weights.write

  def pruned(folder, window):
    write(folder, window)
    shard.prune(1, over=3)
    assert [*shard.metas(3)] == [], "complete parts are deleted"

  monkeypatch.setattr(weights, "write", pruned)
  with pytest.raises(Damaged, match="learner-7: was given up while it was written"):
    slow.save(3, "learner-7", 3, {}, {"a": np.zeros(9)})
  assert not (path / "00000003" / "learner-7").exists() and 3 not in slow.committed()
  shard.prune(1, over=3)
  assert not (path / "00000003").exists()


def test_a_part_that_is_committed_stays_though_its_saving_seems_to_fail(path, monkeypatch):
  """A bucket has named the meta, and its answer is lost: the part was deleted again, and a
  committed snapshot had none of it."""
  mine, shard, sign = Storage(path, "plan", pytest.fail), Storage(path, "plan", pytest.fail), []
  for role in ROLES[1:]:
    shard.save(3, role, 3, {}, {})
  sign = signed_json.write

  def unanswered(file, content):
    patched.undo()
    sign(file, content)
    shard.commit(3, ROLES)
    raise TimeoutError

  with monkeypatch.context() as patched, pytest.raises(TimeoutError):
    patched.setattr(signed_json, "write", unanswered)
    mine.save(3, ROLES[0], 3, {}, {"a": np.full(9, 3)})
  assert mine.find(ROLES[0]).snapshot == 3


def test_half_a_part_is_deleted_once_its_role_begins_a_newer_one_or_is_away_long(path, storage):
  for n in (3, 4):
    (path / f"{n:08d}" / "learner-7" / "arrays").mkdir(parents=True)
    storage.prune(9, over=4)
  assert not (path / "00000003").exists() and (path / "00000004" / "learner-7").exists()
  storage.prune(9, over=4, since=5)  # a learner that never came back
  assert not (path / "00000004").exists()
  (path / "00000005" / "learner-7" / "arrays").mkdir(parents=True)
  storage.forget()
  assert not (path / "00000005").exists()


def test_parts_are_not_looked_into_where_nothing_is_to_be_deleted(path, monkeypatch):
  """In a bucket each look is a request, and there is a part for every learner."""
  storage, looked = Storage(path, "plan", pytest.fail), []
  for role in ROLES:
    storage.save(3, role, 3, {}, {})
  storage.commit(3, ROLES)
  storage.save(4, ROLES[0], 4, {}, {})
  listed = signed_json.listed
  monkeypatch.setattr(signed_json, "listed", lambda p: looked.append(p.name) or listed(p))
  storage.prune(1)
  assert looked and not {*looked} & {*ROLES}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO], ids=errno.errorcode.get)
def test_what_is_given_up_is_deleted_where_there_is_no_room_for_a_note(path, monkeypatch, code):
  """A quota of files: parts of a snapshot that had no room for a manifest would stay for ever."""
  told: list[str] = []
  storage = Storage(path, "plan", told.append)
  for role in ROLES:
    storage.save(3, role, 3, {}, {})

  def full(self, *_):
    raise OSError(code, os.strerror(code), str(self))

  with monkeypatch.context() as patch:
    patch.setattr(type(storage.path), "write_text", full)
    storage.prune(9, over=3)
  assert (path / "00000003").exists() == bool(told) == (code == errno.EIO)
  storage.prune(9, over=3)
  assert not (path / "00000003").exists()


def test_where_no_note_can_be_left_for_who_still_writes_the_others_are_deleted(path, monkeypatch):
  storage = Storage(path, "plan", pytest.fail)
  (path / "00000001" / "learner-7" / "arrays").mkdir(parents=True)
  full = mock.Mock(side_effect=OSError(errno.ENOSPC, "full"))
  monkeypatch.setattr(type(storage.path), "write_text", full)
  storage.prune(1)
  assert full.called and [file.name for file in (path / "00000001").iterdir()] == ["learner-7"]


def test_a_new_life_never_replaces_its_part_of_a_committed_snapshot(path):
  """A shard that came back with nothing hears of snapshot 2, and is asked for its part of it."""
  storage, events = Storage(path, "plan", pytest.fail), Events()
  saver = Saver(storage, "syncer-0", 7, events)
  saver.save(2, {"of": "nothing"}, {"a": np.zeros(9)}, lambda: pytest.fail("it is not written"))
  (unsaved,) = events.of("unsaved")
  saver.close(30.0)
  assert "committed already" in unsaved.reason
  assert storage.find("syncer-0").state == {"of": 2}


# --- what cannot be written -----------------------------------------------------------------------


@pytest.mark.parametrize("size_bytes", [0, 300_000])
def test_a_limit_on_file_sizes_is_one_plain_oserror_and_leaves_no_half(tmp_path, size_bytes):
  storage = Storage(tmp_path / "checkpoints", "plan", pytest.fail)
  arrays = {"a": np.random.default_rng(0).standard_normal(300_000)}
  with pytest.raises(OSError) as refused, disk_of(size_bytes):
    storage.save(2, "learner-0", 2, {}, arrays)
  assert refused.value.errno == errno.EFBIG
  assert str(tmp_path / "checkpoints/00000002/learner-0") in str(refused.value)
  assert "tensorstore" not in str(refused.value).lower() and len(str(refused.value)) < 300
  assert not list((tmp_path / "checkpoints").rglob("learner-0")), "no half is left"


def test_writes_that_end_after_one_that_failed_print_nothing(tmp_path, monkeypatch):
  """A full disk printed a traceback for each of them, between the lines of the run."""
  told, usual = [], sys.unraisablehook
  monkeypatch.setattr(usual, "__defaults__", (told.append,))
  arrays = {str(i): np.random.default_rng(i).standard_normal(60_000) for i in range(20)}
  with pytest.raises(OSError), disk_of(100_000):
    Storage(tmp_path, "plan", pytest.fail).save(2, "learner-0", 2, {}, arrays)
  assert not told
  closed = "Event loop is closed"
  for cause, said in ((None, "of another kind"), (usual, closed)):  # a user's own __del__
    usual(types.SimpleNamespace(object=cause, exc_value=RuntimeError(said)))
  usual(types.SimpleNamespace(object=None, exc_value=Exception(closed)))
  assert len(told) == 3, "all else is printed"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT], ids=errno.errorcode.get)
def test_a_full_disk_or_quota_is_an_oserror_with_its_number(tmp_path, monkeypatch, code):
  said = f"RESOURCE_EXHAUSTED: Failed to write [os_error_code='{code}'] [tensorstore_spec='...']"
  monkeypatch.setattr(weights, "write", mock.Mock(side_effect=ValueError(said)))
  with pytest.raises(OSError) as refused:
    Storage(tmp_path, "plan", pytest.fail).save(2, "learner-0", 2, {}, {"a": np.ones(3)})
  assert refused.value.errno == code and str(tmp_path) in str(refused.value)


def test_a_result_that_cannot_be_written_is_an_oserror_and_the_one_before_stays(tmp_path):
  params = {"a": np.random.default_rng(0).standard_normal(300_000).astype(np.float32)}
  weights.save(tmp_path / "result", {"a": params["a"][:9]})
  with pytest.raises(OSError) as refused, disk_of(100_000):
    weights.save(tmp_path / "result", params)
  assert refused.value.errno == errno.EFBIG and str(tmp_path / "result") in str(refused.value)
  assert weights.load(tmp_path / "result")["a"].size == 9


def test_a_result_that_may_not_be_read_is_not_taken_for_no_checkpoint():
  """Orbax keeps to itself why it finds none."""
  with tempfile.TemporaryDirectory() as folder:  # its parents are everybody's to read
    os.chmod(folder, 0o755)
    result = weights.save(f"{folder}/result", {"a": np.ones(3, np.float32)})
    with denied(result, 0), pytest.raises(ConfigError, match=r"^result = .*Permission denied"):
      weights.load(result, "result")
