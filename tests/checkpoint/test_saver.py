"""Parts are written in the background, beside the work of their role."""

import itertools
import os
import sys
import threading
import time
import types
import weakref
import zlib
from unittest import mock

import numpy as np
import pytest

from ddiloco import runtime
from ddiloco.checkpoint import saver as saver_lib
from ddiloco.checkpoint.snapshots import Storage
from tests.checkpoint.saving import FULL, Gated, commit, state
from tests.waits import PATIENCE_SECONDS, wait_for


def test_a_part_is_saved_in_the_background_with_its_checksums(storage, savers, monkeypatch):
  saver, events = savers("learner-3")
  monkeypatch.setattr(Gated, "prune", deletes := mock.Mock())
  values, then = np.arange(5, dtype=np.float32), threading.Event()
  saver._time = types.SimpleNamespace(now=itertools.count().__next__)

  def written():
    then.set()
    return ()

  saver.save(7, {"x": 1}, {"params/a": values}, written)
  assert then.wait(PATIENCE_SECONDS)
  (saved,) = events.of("saved")
  crc = zlib.crc32(values.tobytes())
  assert (saved.snapshot, saved.bytes, saved.arrays) == (7, 20, {"params/a": crc})
  assert saved.seconds == 1, "the clock goes on by one whenever it is asked"
  part = storage.load(7, "learner-3")
  wait_for(lambda: not saver.busy)
  assert not deletes.called, "that is shard 0's"
  assert part.state == {"x": 1} and part.incarnation == 0
  np.testing.assert_array_equal(part.arrays["params/a"], values)


def test_a_snapshot_that_comes_while_one_is_written_goes_without_this_role(
  storage, capsys, saver, events
):
  storage.go.clear()
  saver.save(1, {}, {})
  assert storage.under_way.wait(PATIENCE_SECONDS)
  started = time.monotonic()
  saver.save(2, {}, {})
  saver.save(3, {}, {})
  assert time.monotonic() - started < PATIENCE_SECONDS / 2, "nobody waits for the disk"
  unsaved = events.of("unsaved", 2)
  assert [e.snapshot for e in unsaved] == [2, 3]
  assert all("not done yet" in e.reason for e in unsaved)
  storage.go.set()
  events.of("saved")
  wait_for(lambda: not saver.busy)
  saver.save(4, {}, {})
  assert [e.snapshot for e in events.of("saved", 2)] == [1, 4]
  assert storage.metas(2) == storage.metas(3) == {}
  assert "WARNING" not in capsys.readouterr().err, "nothing is wrong"


def test_a_snapshot_is_done_only_when_what_follows_is(storage, saver, events):
  """Shard 0 waits for parts: were it to begin the next one, this one would go without learners."""
  inside, go = threading.Event(), threading.Event()

  def commits():
    inside.set()
    assert go.wait(PATIENCE_SECONDS)
    return ()

  saver.save(1, {}, {}, commits)
  assert inside.wait(PATIENCE_SECONDS)
  saver.save(2, {}, {})
  assert [e.snapshot for e in events.of("unsaved")] == [2]
  go.set()
  wait_for(lambda: not saver.busy)
  saver.save(3, {}, {})
  assert [e.snapshot for e in events.of("saved", 2)] == [1, 3]


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_only_the_thread_that_saves_steps_back(storage, savers, monkeypatch):
  priorities = {}

  def save(self, *arguments):
    mine = threading.get_native_id()
    priorities["saver"] = os.getpriority(os.PRIO_PROCESS, mine)
    thread = threading.Thread(target=lambda: priorities.update(its_child=os.getpriority(0, 0)))
    thread.start()
    thread.join()
    raise OSError("enough")

  monkeypatch.setattr(Gated, "save", save)
  before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
  saver, events = savers()
  saver.save(1, {}, {})
  events.of("unsaved")
  lowered = max(before, saver_lib.NICENESS)  # the tests themselves may be of low priority
  assert priorities == {"saver": lowered, "its_child": lowered}
  assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_a_role_of_low_priority_saves_and_with_no_higher_one(storage, savers, monkeypatch):
  """Only root may take a low priority back; for others the saver's thread once died of it."""
  mine = os.getpriority(os.PRIO_PROCESS, 0)
  priorities, low = {}, max(mine, saver_lib.NICENESS + 5)
  set_priority = os.setpriority

  def as_a_user(which, who, niceness):
    if niceness < os.getpriority(which, who):
      raise PermissionError("only root")
    set_priority(which, who, niceness)

  def save(self, *arguments):
    priorities["saver"] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    return Storage.save(self, *arguments)

  monkeypatch.setattr(os, "setpriority", as_a_user)
  monkeypatch.setattr(Gated, "save", save)
  made = []

  def live():
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), low)
    made.append(savers("learner-0"))

  role = threading.Thread(target=live)
  role.start()
  role.join()
  saver, events = made[0]
  saver.save(1, {}, {})
  events.of("saved")
  assert priorities["saver"] >= low


def test_copies_of_the_state_are_freed_before_anything_is_waited_for(
  storage, monkeypatch, saver, events, capsys
):
  freed, references = {}, {}

  def prune(*_):
    freed["at the end"] = [each() is None for each in references.values()]
    raise OSError("no answer")

  def saved(number, fails):
    values = np.ones(3, np.float32)
    reference, done = references.setdefault(number, weakref.ref(values)), threading.Event()

    def commits():
      freed[number] = reference() is None
      done.set()
      return ()

    with monkeypatch.context() as patch:
      if fails:
        patch.setattr(Gated, "save", lambda *_: (_ for _ in ()).throw(OSError("full")))
        patch.setattr(Gated, "prune", prune)
      saver.save(number, {}, {"a": values}, commits, keep=int(fails))
      del values
      assert done.wait(PATIENCE_SECONDS) if not fails else events.of("unsaved")
      wait_for(lambda: not saver.busy)

  saved(1, fails=False)
  assert freed == {1: True}
  saved(2, fails=True)
  assert freed == {1: True, "at the end": [True, True]}
  assert "old snapshots cannot be deleted: no answer. The run goes on" in capsys.readouterr().err
  saved(3, fails=False)
  assert freed[3]


@pytest.mark.parametrize("error", [FULL, OSError(5, "odd"), RuntimeError("xla")])
def test_what_cannot_be_written_is_one_event_and_the_role_goes_on(
  storage, savers, capsys, monkeypatch, error
):
  saver, events = savers("learner-1")
  with monkeypatch.context() as patch:
    patch.setattr(Gated, "save", mock.Mock(side_effect=error))
    for snapshot in (1, 2):
      saver.save(snapshot, {}, {}, lambda: pytest.fail("it is not written"))
      events.of("unsaved", snapshot)
      wait_for(lambda: not saver.busy)
  assert [e.snapshot for e in events.of("unsaved")] == [1, 2]
  assert all(str(error) in e.reason for e in events.of("unsaved"))
  assert (". Fix: make room" in events.of("unsaved")[0].reason) == (error is FULL)
  assert storage.declined(1) == storage.declined(2) == {"learner-1"}, "shard 0 need not wait"
  assert not capsys.readouterr().err, "the event is shown"
  saver.save(3, {}, {})
  assert events.of("saved")[0].snapshot == 3


def test_a_real_file_in_the_way_is_an_oserror_too(storage, savers, tmp_path):
  (tmp_path / "checkpoints").write_text("no folder")
  saver, events = savers()
  saver.save(1, {}, {"a": np.ones(3)})
  (unsaved,) = events.of("unsaved")
  assert str(tmp_path) in unsaved.reason
  (tmp_path / "checkpoints").unlink()
  wait_for(lambda: not saver.busy)
  saver.save(2, {}, {"a": np.ones(3)})
  events.of("saved")


# --- the end --------------------------------------------------------------------------------------


def test_to_close_does_not_wait_for_a_stuck_disk_and_half_a_part_does_not_count(
  storage, capsys, saver, events
):
  storage.go.clear()
  commit(saver, 1)
  assert storage.under_way.wait(PATIENCE_SECONDS)
  assert events.flushed == 1, "a part of which the log knows nothing could not be gone on from"
  started = time.monotonic()
  saver.close(0.1)
  assert time.monotonic() - started < PATIENCE_SECONDS / 2
  assert storage.metas(1) == {} and storage.committed() == []
  assert events.none("saved", "snapshot")
  assert "save syncer-0 has not ended" in capsys.readouterr().err


def test_who_was_killed_waits_for_no_part(storage, savers, monkeypatch):
  saver, _ = savers()
  storage.go.clear()
  commit(saver, 1)
  assert storage.under_way.wait(PATIENCE_SECONDS)
  with monkeypatch.context() as patch:
    patch.setattr(runtime, "ended", lambda *_: pytest.fail("it waits, and warns"))
    saver.close()
  assert storage.metas(1) == {}


def test_to_close_waits_little_for_who_does_not_end(saver):
  """A save that hangs in its disk ends with the process."""
  waits, worker = [], saver._worker
  saver._worker = types.SimpleNamespace(close=lambda *seconds: waits.append(seconds))
  for patience in (0.5, 60.0):
    saver.close(patience)
  saver._worker = worker
  assert waits == [(0.5, 0.5), (60.0, saver_lib.LOOK_SECONDS_MOST)]


def test_a_worker_that_fails_is_said(saver, capsys):
  saver._worker.put(1 / 0 for _ in [0])
  saver._worker._thread.join(PATIENCE_SECONDS)
  assert "syncer-0: saves no more: ZeroDivisionError" in capsys.readouterr().err


def test_to_close_lets_a_part_be_finished_in_time(storage, saver, events):
  saver.save(1, {}, {"a": np.ones(1000)})
  saver.close(PATIENCE_SECONDS)
  assert storage.metas(1).keys() == {"syncer-0"} and not events.none("saved")


def test_what_has_nothing_yet_saves_nothing(storage, saver, events):
  """A shard that asks learners for what it has lost must not be in a snapshot with nothing."""
  lacks = ["it has nothing to save yet"]
  saver.hold = lambda: lacks[0] if lacks else ""
  saver.save(1, {}, {}, lambda: pytest.fail("it is not saved"))
  assert events.of("unsaved")[0].reason == lacks[0] and not saver.busy
  lacks.clear()
  saver.save(2, {}, {})
  events.of("saved")
  assert storage.metas(1) == {} and storage.metas(2).keys() == {"syncer-0"}


@pytest.mark.parametrize("complete, of_former_life", [(True, False), (True, True), (False, False)])
def test_to_close_ends_the_wait_for_others(storage, complete, of_former_life, saver, events):
  if complete:
    storage.save(1, "syncer-1", 0, state("syncer-1"), {})
  if of_former_life:
    storage.save(1, "learner-0", 0, state("learner-0", own=4), {})
  commit(saver, 1, ["learner-0"], patience_seconds=3600.0, learner_0=5)
  storage.looked()
  saver.close(PATIENCE_SECONDS)
  assert not saver._worker._thread.is_alive()
  assert storage.committed() == ([1] if complete else [])
  assert events.none("uncommitted") and events.none("snapshot") != complete, "no loss is told of"
  assert "syncer-0" in storage.metas(1), "others may still write theirs"
