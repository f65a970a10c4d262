"""Parts are written beside the work, and shard 0 commits what is a consistent snapshot."""

import errno
import functools
import itertools
import os
import sys
import threading
import time
import weakref
import zlib
from unittest import mock

import fsspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco import runtime
from ddiloco.checkpoint import saver as saver_lib
from ddiloco.checkpoint.saver import Saver, consistent
from ddiloco.checkpoint.snapshots import Storage
from ddiloco.observe.eventlog import Records
from ddiloco.protocol.events import Event
from ddiloco.protocol.states import clock_violations, shard_key
from tests.waits import PATIENCE_SECONDS, wait_for

SHARDS = ("syncer-0", "syncer-1")


class Events(Records):
  """Keeps events, and lets one wait for them."""

  def __init__(self):
    self._events: list[Event] = []
    self._news = threading.Condition()

  def record(self, event):
    with self._news:
      self._events.append(event)
      self._news.notify_all()

  def of(self, kind, count=1):
    """All of this kind, when there are so many."""
    with self._news:
      found = lambda: [e for e in self._events if e.kind == kind]  # noqa: E731
      there = self._news.wait_for(lambda: len(found()) >= count, PATIENCE_SECONDS)
      assert there, f"waited in vain for {count} {kind!r}: {self._events}"
      return found()

  def none(self, *kinds):
    with self._news:
      return not [e for e in self._events if e.kind in kinds]


class Gated(Storage):
  """Says when a save or a look at the parts is under way; saves wait until they are let go."""

  def __init__(self, path):
    super().__init__(path, "plan", pytest.fail)
    self.under_way, self.looks, self.go = (
      threading.Event(),
      threading.Semaphore(0),
      threading.Event(),
    )
    self.go.set()

  def save(self, *arguments):
    self.under_way.set()
    assert self.go.wait(PATIENCE_SECONDS)
    return super().save(*arguments)

  def metas(self, snapshot):
    found = super().metas(snapshot)
    self.looks.release()
    return found

  def looked(self, times=2):
    """Waits for so many looks that end after now."""
    while self.looks.acquire(blocking=False):
      pass
    for _ in range(times):
      assert self.looks.acquire(timeout=PATIENCE_SECONDS)


@pytest.fixture
def storage(tmp_path):
  return Gated(tmp_path / "checkpoints")


@pytest.fixture
def savers(storage):
  """Makes savers with event lists; they end with the test."""
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
def saver(shard_0) -> Saver:
  """Shard 0's."""
  return shard_0[0]


@pytest.fixture
def events(shard_0) -> Events:
  """What shard 0's saver tells of."""
  return shard_0[1]


def state(role, own=0, **seen):
  """What a role recorded: its own count, and what it knows of others ("learner_1": 5)."""
  names = {name.replace("_", "-"): count for name, count in seen.items()}
  clock = {key(name): count for name, count in {role: own, **names}.items()}
  return {"key": key(role), "vector_clock": {str(who): count for who, count in clock.items()}}


def key(role):
  kind, number = role.split("-")
  return int(number) if kind == "learner" else shard_key(int(number))


# --- saving ---------------------------------------------------------------------------------------


def test_a_part_is_saved_in_the_background_with_its_checksums(storage, savers):
  saver, events = savers("learner-3")
  values, then = np.arange(5, dtype=np.float32), threading.Event()

  def written():
    then.set()
    return ()

  saver.save(7, {"x": 1}, {"params/a": values}, written)
  assert then.wait(PATIENCE_SECONDS)
  (saved,) = events.of("saved")
  crc = zlib.crc32(values.tobytes())
  assert (saved.snapshot, saved.bytes, saved.arrays) == (7, 20, {"params/a": crc})
  assert saved.seconds > 0
  part = storage.load(7, "learner-3")
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
  storage, monkeypatch, saver, events
):
  freed = {}

  def saved(number, fails):
    values = np.ones(3, np.float32)
    reference, done = weakref.ref(values), threading.Event()

    def commits():
      freed[number] = reference() is None
      done.set()
      return ()

    with monkeypatch.context() as patch:
      if fails:
        patch.setattr(Gated, "save", lambda *_: (_ for _ in ()).throw(OSError("full")))
      saver.save(number, {}, {"a": values}, commits)
      del values
      assert done.wait(PATIENCE_SECONDS) if not fails else events.of("unsaved")
    wait_for(lambda: not saver.busy)
    return reference

  saved(1, fails=False)
  assert freed == {1: True}
  failed = saved(2, fails=True)
  saved(3, fails=False)
  assert failed() is None


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a part")


@pytest.mark.parametrize("error", [FULL, ValueError("odd"), RuntimeError("xla")])
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


# --- committing -----------------------------------------------------------------------------------


def commit(
  saver,
  snapshot,
  learners=(),
  patience_seconds=PATIENCE_SECONDS,
  keep=9,
  own=0,
  may_lack=True,
  **seen,
):
  """Shard 0 saves its part, and then waits for the rest."""
  how = patience_seconds, may_lack
  saver.save(
    snapshot,
    state("syncer-0", own, **seen),
    {},
    lambda: saver.commit_when_complete(snapshot, SHARDS, lambda: learners, *how),
    keep,
  )


def test_it_is_committed_once_all_parts_are_there(storage, saver, events):
  commit(saver, 1, ["learner-0", "learner-1"])
  for role in ("learner-1", "syncer-1", "learner-0"):
    storage.looked()
    assert storage.committed() == [] and events.none("snapshot", "uncommitted")
    storage.save(1, role, 0, state(role), {})
  (snapshot,) = events.of("snapshot")
  assert snapshot.roles == ("learner-0", "learner-1", *SHARDS)
  digests = {role: meta["digest"] for role, meta in storage.metas(1).items()}
  assert storage.manifest(1)["parts"] == digests


def test_it_waits_for_learners_only_while_they_live(storage, saver, events):
  live = ["learner-0", "learner-1"]
  commit(saver, 1, live)
  for role in ("learner-0", "syncer-1"):
    storage.save(1, role, 0, state(role), {})
  storage.looked(3)
  assert storage.committed() == []
  live.remove("learner-1")
  assert events.of("snapshot")[0].roles == ("learner-0", *SHARDS)


def test_a_learner_that_died_after_it_had_saved_is_part_of_it(storage, saver, events):
  live = ["learner-5"]
  commit(saver, 1, live)
  storage.looked()
  storage.save(1, "learner-5", 0, state("learner-5"), {})
  storage.looked()
  live.clear()
  storage.save(1, "syncer-1", 0, state("syncer-1"), {})
  assert events.of("snapshot")[0].roles == ("learner-5", *SHARDS)


def test_a_learner_that_has_left_in_good_order_is_not_missing(storage, saver, events):
  """At the end of a run learners leave while a snapshot is under way: nothing is lost."""
  live = ["learner-0", "learner-1"]
  storage.save(1, "syncer-1", 0, state("syncer-1"), {})
  has_left = {"learner-1"}.__contains__
  job = lambda: saver.commit_when_complete(1, SHARDS, lambda: live, 60.0, True, has_left)  # noqa: E731
  saver.save(1, state("syncer-0"), {}, job, 9)
  storage.looked()
  live.clear()
  assert events.of("snapshot")[0].lacks == ("learner-0",), "which died"


@pytest.mark.parametrize(
  "ends", ["it is written", "it never comes", "shard 0 ends too", "a look misses it"]
)
def test_a_part_that_a_learner_writes_when_it_leaves_is_waited_for(storage, ends, saver, events):
  """Ctrl-C while a snapshot was made: it was committed without those that were still writing."""
  storage.save(1, "syncer-1", 0, state("syncer-1"), {})
  live, left = ["learner-1"], set()
  patience = 0.5 if ends == "it never comes" else 60.0
  how = (lambda: live), patience, True, left.__contains__
  saver.save(1, state("syncer-0"), {}, lambda: saver.commit_when_complete(1, SHARDS, *how), 9)
  storage.looked()
  part = storage.path / "00000001" / "learner-1" / "arrays"
  part.mkdir(parents=True)
  left.add("learner-1")
  live.clear()
  closing = threading.Thread(target=saver.close, args=(PATIENCE_SECONDS,))
  if ends == "shard 0 ends too":
    closing.start()
  if ends != "it never comes":
    storage.looked()
    if ends == "a look misses it":  # its files are being renamed
      storage.growth = lambda snapshot, roles: dict.fromkeys(roles, 0)
      storage.looked()
      del storage.growth
    assert events.none("snapshot", "uncommitted")
    storage.save(1, "learner-1", 0, state("learner-1"), {})
  (snapshot,) = events.of("snapshot")
  assert snapshot.lacks == (("learner-1",) if ends == "it never comes" else ())
  assert ("learner-1" in snapshot.roles) != ("learner-1" in snapshot.lacks)
  if closing.ident:
    closing.join()


def test_a_learner_that_comes_back_meanwhile_is_no_part_of_it(storage, saver, events):
  """It has saved one of the same number, in a life of the run that was never committed. Once it was
  heard again it was waited for with all patience, and then a KeyError ended the commit."""
  live = []
  storage.save(1, "learner-5", 0, state("learner-5"), {})
  commit(saver, 1, live)
  storage.looked()
  live.append("learner-5")
  storage.save(1, "syncer-1", 0, state("syncer-1"), {})
  assert events.of("snapshot")[0].roles == SHARDS


def test_a_new_life_forgets_what_was_never_committed(storage, savers, capsys, monkeypatch):
  for n in (1, 2, 3):
    for role in ("learner-0", *SHARDS):
      storage.save(n, role, 0, state(role), {})
  storage.commit(2, SHARDS)
  saver, events = savers("learner-0")
  saver.save(4, {}, {})
  events.of("saved")
  assert [n for n in range(5) if "learner-0" in storage.metas(n)] == [2, 4]
  assert all(storage.metas(n).keys() >= set(SHARDS) for n in (1, 2, 3)), "others are left alone"
  monkeypatch.setattr(Gated, "forget", mock.Mock(side_effect=OSError("denied")))
  saver, events = savers("syncer-1")
  saver.save(5, {}, {})
  events.of("saved")
  assert "syncer-1" in capsys.readouterr().err


@pytest.mark.parametrize("may_lack", [True, False])
def test_a_learner_that_does_not_answer_is_waited_for_with_patience(
  storage, may_lack, saver, events
):
  """A run in lock-step has no snapshot without a learner that lives: it could not repeat bit by bit
  what it lost."""
  storage.save(1, "syncer-1", 0, state("syncer-1"), {})
  commit(saver, 1, ["learner-0"], patience_seconds=0.3, may_lack=may_lack)
  if may_lack:
    (snapshot,) = events.of("snapshot")
    assert snapshot.roles == SHARDS and snapshot.seconds >= 0.3
    assert snapshot.lacks == ("learner-0",)
  else:
    assert events.of("uncommitted")[0].missing == ("learner-0",) and storage.committed() == []


def test_a_part_that_still_grows_is_waited_for(storage, monkeypatch, saver, events):
  """Patience is for parts that do not grow."""
  storage.save(1, "syncer-1", 0, state("syncer-1"), {})
  asked = []

  def growth(snapshot, roles):
    asked.append(snapshot)
    if len(asked) == 4:
      storage.save(1, "learner-0", 0, state("learner-0"), {})
    return dict.fromkeys(roles, len(asked))

  monkeypatch.setattr(storage, "growth", growth)
  monkeypatch.setattr(saver_lib, "MOST_PATIENCE", 10_000)
  commit(saver, 1, ["learner-0"], patience_seconds=0.05)
  (snapshot,) = events.of("snapshot")
  assert snapshot.roles == ("learner-0", *SHARDS) and snapshot.lacks == ()
  assert len(asked) == 4 and snapshot.seconds >= 0.1


def test_a_part_that_grows_for_ever_holds_up_no_snapshot(storage, monkeypatch, saver, events):
  storage.save(1, "syncer-1", 0, state("syncer-1"), {})
  sizes = itertools.count()
  monkeypatch.setattr(storage, "growth", lambda _, roles: dict.fromkeys(roles, next(sizes)))
  monkeypatch.setattr(saver_lib, "MOST_PATIENCE", 3)
  commit(saver, 1, ["learner-0"], patience_seconds=0.1)
  (snapshot,) = events.of("snapshot")
  assert snapshot.lacks == ("learner-0",) and snapshot.seconds > 0.3


def test_the_bytes_of_a_part_under_way_are_its_growth(storage):
  assert storage.growth(1, ["learner-0", "syncer-0"]) == {"learner-0": 0, "syncer-0": 0}
  folder = storage.path / "00000001/learner-0/arrays/0.tmp"
  folder.mkdir(parents=True)
  (folder / "d").touch()  # on a tmpfs a folder grows by each name in it
  before = storage.growth(1, ["learner-0"])["learner-0"]
  (folder / "d").write_bytes(bytes(1000))
  assert storage.growth(1, ["learner-0"])["learner-0"] == before + 1000


def test_a_part_whose_files_cannot_be_counted_has_been_begun(storage, monkeypatch):
  """They are renamed while they are counted. Of a learner that leaves, the part counted as none."""
  (storage.path / "00000001/learner-0").mkdir(parents=True)
  renamed = mock.Mock(side_effect=FileNotFoundError("0.tmp"))
  monkeypatch.setattr(fsspec.filesystem("file"), "find", renamed)
  assert storage.growth(1, ["learner-0", "learner-1"]) == {"learner-0": 1, "learner-1": 0}
  assert renamed.called


def test_who_says_that_there_is_no_part_of_it_is_not_waited_for(storage, savers, saver, events):
  learner, said = savers("learner-0")
  storage.save(1, "syncer-1", 0, state("syncer-1"), {})
  commit(saver, 1, ["learner-0"])
  storage.looked()
  learner.decline(1, "it waits for fragments [1]")
  (snapshot,) = events.of("snapshot")
  assert (snapshot.roles, snapshot.lacks) == (SHARDS, ("learner-0",))
  assert said.of("unsaved")[0].reason == "it waits for fragments [1]"
  learner.decline(1, "it is new")
  learner.save(2, state("learner-0"), {})
  said.of("saved")
  assert len(said.of("unsaved")) == 1, "of a snapshot that is committed nothing is to be said"
  storage.commit(2, ["learner-0"])
  storage.prune(1)
  assert not storage.is_committed(1)
  learner.decline(1, "it is late")
  learner.save(3, state("learner-0"), {})
  said.of("saved", 2)
  assert len(said.of("unsaved")) == 1, "nor of one that is deleted, since a newer one is there"


def test_a_part_that_its_role_had_begun_to_delete_is_no_part_of_it(storage, saver, events):
  """A new life was killed between its note and the deletion of what its former life had left."""
  for role in ("syncer-1", "learner-0"):
    storage.save(1, role, 0, state(role), {})
  storage.decline(1, "learner-0", "")
  commit(saver, 1, ["learner-0"])
  (snapshot,) = events.of("snapshot")
  assert (snapshot.roles, snapshot.lacks) == (SHARDS, ("learner-0",))


def test_a_shard_that_has_no_part_ends_the_wait_and_word_of_a_former_life_does_not(
  storage, saver, events
):
  storage.decline(1, "syncer-1", "full")
  commit(saver, 1, ["learner-0"])
  assert events.of("uncommitted")[0].missing == ("syncer-1",)
  storage.decline(2, "learner-0", "busy")
  storage.decline(2, "syncer-1", "busy")
  storage.forget("learner-0")
  assert storage.declined(2) == {"syncer-1"}
  storage.save(2, "syncer-1", 0, state("syncer-1"), {})
  assert storage.declined(2) == set()


def test_the_next_snapshot_goes_without_shard_0_while_this_one_is_not_committed(
  storage, saver, events
):
  commit(saver, 1, ["learner-0"])
  storage.save(1, "syncer-1", 0, state("syncer-1"), {})
  storage.looked()
  commit(saver, 2, ["learner-0"])
  assert events.of("unsaved")[0].snapshot == 2
  storage.save(1, "learner-0", 0, state("learner-0"), {})
  assert events.of("snapshot")[0].roles == ("learner-0", *SHARDS)


def test_a_former_lifes_part_of_a_learner_does_not_count(storage, saver, events):
  """The shard has merged its push 5, of which that part knows nothing."""
  storage.save(1, "syncer-1", 0, state("syncer-1"), {})
  storage.save(1, "learner-0", 0, state("learner-0", own=4), {})
  commit(saver, 1, ["learner-0"], own=1, learner_0=5)
  storage.looked(3)
  assert storage.committed() == [], "the new part is waited for"
  storage.save(1, "learner-0", 1, state("learner-0", own=5, syncer_0=1), {})
  assert events.of("snapshot")[0].roles == ("learner-0", *SHARDS)
  wait_for(lambda: not saver.busy)
  storage.save(2, "syncer-1", 0, state("syncer-1"), {})
  storage.save(2, "learner-0", 0, state("learner-0", own=6, syncer_0=2), {})
  commit(saver, 2, ["learner-0"], patience_seconds=0.2, own=1, learner_0=5)
  assert events.of("snapshot", 2)[1].roles == SHARDS, "it knows what shard 0 did later"
  assert "learner-0" not in storage.manifest(2)["parts"]


@pytest.mark.parametrize("replaced", [True, False])
def test_a_former_lifes_part_of_a_shard_is_waited_out(storage, replaced, saver, events):
  storage.save(1, "syncer-1", 0, state("syncer-1", own=3), {})
  commit(saver, 1, patience_seconds=PATIENCE_SECONDS if replaced else 0.3, syncer_1=7)
  if replaced:
    storage.looked(3)
    assert storage.committed() == []
    storage.save(1, "syncer-1", 1, state("syncer-1", own=8), {})
    assert events.of("snapshot")[0].roles == SHARDS
  else:
    assert "syncer-1" in events.of("uncommitted")[0].missing
    assert storage.committed() == []


def test_old_ones_are_deleted(storage, saver, events):
  for n in range(1, 6):
    if n != 3:  # never complete
      storage.save(n, "syncer-1", 0, state("syncer-1"), {})
    commit(saver, n, keep=2, patience_seconds=0.1 if n == 3 else PATIENCE_SECONDS)
    events.of("uncommitted" if n == 3 else "snapshot", 1 if n == 3 else n - (n > 3))
    wait_for(lambda: not saver.busy)
  saver.close(PATIENCE_SECONDS)
  (uncommitted,) = events.of("uncommitted")
  assert uncommitted.missing == ("syncer-1",), "without every shard there is no snapshot"
  assert storage.committed() == [5, 4]
  assert all(storage.metas(n) == {} for n in (1, 2, 3))


@pytest.mark.parametrize("lacks", SHARDS)
def test_what_is_saved_in_vain_does_not_fill_the_disk(storage, savers, monkeypatch, lacks):
  """A shard cannot save its part for a while; what others saved stayed until a commit."""
  full = threading.Event()
  full.set()

  def save(self, snapshot, role, *rest):
    if role == lacks and full.is_set():
      raise OSError("disk full")
    return Storage.save(self, snapshot, role, *rest)

  monkeypatch.setattr(Gated, "save", save)
  (saver, _), (other, others), (learner, learners) = map(savers, (*SHARDS, "learner-0"))
  for n in (1, 2, 3):
    if n == 3:
      full.clear()
    learner.save(n, state("learner-0"), {"a": np.ones(1000)})
    other.save(n, state("syncer-1"), {})
    learners.of("saved", n)
    others.of("unsaved" if lacks == "syncer-1" and n < 3 else "saved")
    wait_for(lambda: not other.busy)
    commit(saver, n, ["learner-0"], patience_seconds=0.1 if n < 3 else PATIENCE_SECONDS)
    wait_for(lambda: not saver.busy and not learner.busy)
    assert storage.committed() == ([3] if n == 3 else [])
    assert sorted(path.name for path in storage.path.iterdir()) == (["00000003"] if n == 3 else [])


def test_a_snapshot_that_cannot_be_committed_is_said_and_the_next_one_is(
  storage, monkeypatch, saver, events
):
  for n in (1, 2):
    storage.save(n, "syncer-1", 0, state("syncer-1"), {})
  with monkeypatch.context() as patch:
    patch.setattr(Gated, "commit", mock.Mock(side_effect=FULL))
    commit(saver, 1)
    assert f"{FULL}. Fix: make room" in events.of("uncommitted")[0].reason
    wait_for(lambda: not saver.busy)
  commit(saver, 2)
  events.of("snapshot")
  assert storage.committed() == [2]


# --- the end --------------------------------------------------------------------------------------


def test_to_close_does_not_wait_for_a_stuck_disk_and_half_a_part_does_not_count(
  storage, capsys, saver, events
):
  storage.go.clear()
  commit(saver, 1)
  assert storage.under_way.wait(PATIENCE_SECONDS)
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


@pytest.mark.parametrize("complete", [True, False])
def test_to_close_ends_the_wait_for_others(storage, complete, saver, events):
  if complete:
    storage.save(1, "syncer-1", 0, state("syncer-1"), {})
  commit(saver, 1, ["learner-0"], patience_seconds=3600.0)
  storage.looked()
  saver.close(PATIENCE_SECONDS)
  assert not saver._worker._thread.is_alive()
  assert storage.committed() == ([1] if complete else [])
  assert events.none("uncommitted") and events.none("snapshot") != complete, "no loss is told of"
  assert "syncer-0" in storage.metas(1), "others may still write theirs"


# --- consistent snapshots -------------------------------------------------------------------------

ROLES = ("learner-0", "learner-1", "learner-2", *SHARDS)


@given(st.lists(st.lists(st.integers(0, 3), min_size=5, max_size=5), min_size=5, max_size=5))
def test_what_is_committed_is_always_a_consistent_cut(counts):
  states = {
    role: {"key": key(role), "vector_clock": {str(key(r)): n for r, n in zip(ROLES, known)}}
    for role, known in zip(ROLES, counts)
  }
  roles = consistent(states, set(SHARDS))
  assert not roles or set(SHARDS) <= roles <= set(ROLES)
  clocks = {r: dict(zip(map(key, ROLES), known)) for r, known in zip(ROLES, counts)}
  assert not clock_violations({key(r): clocks[r] for r in roles})
  of_shards = {key(r): clocks[r] for r in SHARDS}
  assert bool(roles) == (not clock_violations(of_shards))


def test_who_fits_is_in_and_who_does_not_is_out():
  fits = {r: state(r, own=5, learner_0=0) for r in ROLES[1:]}
  assert consistent(fits, SHARDS) == set(ROLES[1:])
  late = {**fits, "learner-0": state("learner-0", own=9, syncer_0=6)}
  assert consistent(late, SHARDS) == set(ROLES[1:])


def test_a_learner_that_is_too_old_does_not_take_others_with_it():
  states = {r: state(r, own=5) for r in SHARDS} | {"learner-0": state("learner-0", own=4)}
  states["learner-1"] = state("learner-1", own=5, learner_0=5)
  assert consistent(states, SHARDS) == {"learner-1", *SHARDS}


# --- who is away for long -------------------------------------------------------------------------


def test_the_newest_part_of_who_is_away_outlives_its_snapshot(storage):
  for n in range(1, 7):
    roles = [*SHARDS, *(["learner-0"] if n <= 2 else []), *(["learner-1"] if n in (1, 5) else [])]
    for role in roles:
      storage.save(n, role, n, state(role), {"a": np.full(3, n)})
    storage.commit(n, roles)
    storage.prune(2)
  assert {n: set(storage.metas(n)) for n in range(1, 7)} == {
    **{1: set(), 2: {"learner-0"}, 3: set(), 4: set()},
    **{5: {"learner-1", *SHARDS}, 6: set(SHARDS)},
  }
  assert storage.find("learner-0").snapshot == 2 and storage.find("learner-1").snapshot == 5
  assert storage.find("syncer-0").snapshot == 6
  storage.save(7, "learner-0", 7, state("learner-0"), {})
  for role in SHARDS:
    storage.save(7, role, 7, state(role), {})
  storage.commit(7, ["learner-0", *SHARDS])
  storage.prune(2)
  assert storage.metas(2) == {} and storage.committed() == [7, 6, 5], "5 has learner 1's newest"


def test_the_part_of_who_is_away_for_too_long_goes(storage, savers):
  """In a run of months every learner that was ever there left its part on the disk for good."""
  saver, _ = savers("syncer-0")
  there = {1: ["learner-0", "learner-1"], 2: ["learner-1"]}
  for n in range(1, 6):
    learners, done = there.get(n, []), threading.Event()
    for role in ("syncer-1", *learners):
      storage.save(n, role, n, state(role), {"a": np.full(3, n)})
    commit = functools.partial(
      saver.commit_when_complete, n, SHARDS, lambda there=learners: there, PATIENCE_SECONDS
    )
    saver.save(n, state("syncer-0"), {"a": np.full(3, n)}, commit, keep=2, since=n - 3)
    saver._worker.put(done.set() for _ in range(1))
    assert done.wait(PATIENCE_SECONDS)
    assert storage.find("learner-1").snapshot == 2 or n < 2
  assert storage.committed() == [5, 4, 2] and storage.find("learner-0") is None
  assert set(storage.metas(2)) == {"learner-1"}
  assert sorted(path.name for path in storage.path.iterdir())[0] == "00000002"
