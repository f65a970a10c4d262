"""Shard 0 commits a snapshot once it has all parts that are to come and that fit together."""

import functools
import itertools
import threading
from unittest import mock

import fsspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco import runtime
from ddiloco.checkpoint import saver as saver_lib
from ddiloco.checkpoint.saver import consistent
from ddiloco.checkpoint.snapshots import Storage
from ddiloco.protocol.states import clock_violations
from tests.checkpoint.saving import FULL, SHARDS, Gated, commit, key, state
from tests.waits import PATIENCE_SECONDS, wait_for


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
  job = lambda: saver.commit_when_complete(1, SHARDS, lambda: live, 60.0, True, has_left)
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


class Clock(runtime.Time):
  """Time passes only where `drive` waits."""

  seconds = 50.0

  def now(self):
    return self.seconds

  def drive(self, job):
    """Does a job; returns how long each of its waits was."""
    waits = []
    for until in job:
      waits.append(round(until - self.seconds, 6))
      self.seconds = until
    return waits


@pytest.mark.parametrize("grows, patience, most", [(False, 100.0, 100.0), (True, 5.0, 100.0)])
def test_a_part_that_never_comes_or_grows_for_ever_holds_up_no_snapshot(
  storage, savers, monkeypatch, grows, patience, most
):
  """In a bucket every look is a request for each role: they become rarer."""
  sizes, clock, learners = itertools.count(), Clock(), ["learner-0", "learner-2"]
  growth = lambda _, roles: dict.fromkeys(roles, 0) | {learners[0]: grows * next(sizes)}
  monkeypatch.setattr(storage, "growth", growth)
  saver, events = savers("learner-1")  # which forgets no part of a shard
  saver._time = clock
  for role in SHARDS:
    storage.save(1, role, 0, state(role), {})
  waits = clock.drive(saver.commit_when_complete(1, SHARDS, lambda: learners, patience))
  (snapshot,) = events.of("snapshot")
  assert snapshot.roles == SHARDS and snapshot.lacks == (*learners,)
  assert most < snapshot.seconds <= most + grows * patience + 2.0
  assert (waits[0], waits[-1], waits == sorted(waits)) == (0.05, 2.0, True) and len(waits) < 85


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
  commit(saver, 1, ["learner-0", "learner-1"])
  storage.looked()
  learner.decline(1, "it waits for fragments [1]")
  said.of("unsaved")
  storage.looked()
  assert events.none("snapshot", "uncommitted"), "others are"
  storage.save(1, "learner-1", 0, state("learner-1"), {})
  (snapshot,) = events.of("snapshot")
  assert (snapshot.roles, snapshot.lacks) == (("learner-1", *SHARDS), ("learner-0",))
  assert said.of("unsaved")[0].reason == "it waits for fragments [1]"
  learner.decline(1, "it is new")
  learner.save(2, state("learner-0"), {})
  said.of("saved")
  assert len(said.of("unsaved")) == 1, "of a snapshot that is committed nothing is to be said"
  saver.close(PATIENCE_SECONDS)  # it looks for old ones after its commit, and would beside us
  storage.commit(2, ["learner-0"])
  storage.prune(1, since=2)
  assert not storage.is_committed(1)
  learner.save(3, state("learner-0"), {})
  said.of("saved", 2)
  learner.decline(1, "it is late")
  learner.close(PATIENCE_SECONDS)
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
  storage, saver, events, capsys
):
  storage.decline(1, "syncer-1", "full")
  commit(saver, 1, ["learner-0"])
  assert events.of("uncommitted")[0].missing == ("syncer-1",)
  wait_for(lambda: not saver.busy)
  assert not capsys.readouterr().err, "nobody was waited for in vain"
  storage.decline(2, "learner-0", "busy")
  storage.decline(2, "syncer-1", "busy")
  storage.forget("learner-0")
  assert storage.declined(2) == {"syncer-1"}
  storage.save(2, "syncer-1", 0, state("syncer-1"), {})
  assert storage.declined(2) == set()


def test_a_role_that_saves_elsewhere_is_named_with_the_folder_that_it_does_not_reach(
  storage, saver, events, capsys
):
  """Where the shared folder was not mounted no snapshot was ever complete, without a reason."""
  for number in (1, 2):
    storage.save(number, "learner-0", 0, state("learner-0"), {})
    commit(saver, number, ["learner-0", "learner-1"], patience_seconds=0.1)
    assert events.of("uncommitted", number)[-1].missing == ("syncer-1",)
    wait_for(lambda: not saver.busy)
  said = capsys.readouterr().err
  assert said.count(f"of syncer-1 is in {storage.path}/ after 0.1 s") == 1, "once"
  assert "let learner-1 reach this folder" in said and "learner-0" not in said


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
  for n in (1, 2, 3):
    storage.save(n, "syncer-1", 0, state("syncer-1"), {})
  fails, by_plan = mock.Mock(side_effect=FULL), mock.Mock(side_effect=[None, FULL])
  for n, where, name, failure in ((1, Gated, "commit", fails), (2, saver, "_disk", by_plan)):
    with monkeypatch.context() as patch:
      patch.setattr(where, name, failure)
      commit(saver, n)
      assert f"{FULL}. Fix: make room" in events.of("uncommitted", n)[-1].reason
      wait_for(lambda: not saver.busy)
  commit(saver, 3)
  events.of("snapshot")
  assert storage.committed() == [3]


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
