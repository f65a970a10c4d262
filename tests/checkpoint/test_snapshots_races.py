"""A part is deleted while its snapshot is committed, call by call, and either may be killed."""

from __future__ import annotations

import itertools
import os
import random
import threading

import pytest
from etils.epath import backend

from ddiloco.checkpoint import signed_json
from ddiloco.checkpoint.snapshots import Damaged, Storage

SEED, SCHEDULES = 11, 250
ROLES = ("learner-0", "syncer-0")
CHANGES = ("makedirs", "rmtree", "remove", "rename", "replace")
CALLS = ("open", "exists", "isdir", "listdir", *CHANGES)


class Killed(BaseException):
  """The process of a side is gone."""


class Side(threading.Thread):
  """One process: it makes a call of the file system whenever it is let.

  Attributes:
    calls: that it has made.
    error: with which it has ended; None: in good order.
    ended: whether it has.
  """

  def __init__(self, work, dies_after: int):
    super().__init__(daemon=True)
    self.calls, self.error, self.ended = 0, None, False
    self.listings: dict[str, list[str]] = {}  # of a network file system, as this host knows them
    self._work, self._dies_after = work, dies_after
    self._let, self._waits = threading.Semaphore(0), threading.Semaphore(0)

  def run(self) -> None:
    try:
      self._work()
    except (OSError, Killed) as error:
      self.error = error
    self.ended = True
    self._waits.release()

  def call(self) -> None:
    """Before each call, on this thread."""
    self._waits.release()
    assert self._let.acquire(timeout=60)
    if self.calls == self._dies_after:
      raise Killed
    self.calls += 1

  def step(self) -> None:
    """Lets it make one call, and waits until it comes to the next one, or ends."""
    self._let.release()
    self.wait()

  def wait(self) -> None:
    assert self._waits.acquire(timeout=60)


@pytest.fixture(params=["a local disk", "a network file system"])
def sides(monkeypatch, request):
  """Runs two sides by a schedule: which one makes the next call, again and again.

  On a network file system a host sees a folder as it was when it first listed it, until it makes a
  change in this folder itself.
  """
  monkeypatch.setattr(signed_json, "PAUSES_SECONDS", ())
  network = request.param != "a local disk"
  for name in CALLS:

    def gated(self, *arguments, name=name, real=getattr(type(backend.os_backend), name), **more):
      if not isinstance(side := threading.current_thread(), Side):
        return real(self, *arguments, **more)
      side.call()
      place = str(arguments[0])
      if name == "listdir" and network:
        if place not in side.listings:
          side.listings[place] = real(self, *arguments)
        return side.listings[place]
      if name in CHANGES or (name == "open" and "w" in arguments[1]):
        side.listings.pop(os.path.dirname(place), None)
      return real(self, *arguments, **more)

    monkeypatch.setattr(type(backend.os_backend), name, gated)

  def run(works, dies_after, schedule):
    both = [Side(work, after) for work, after in zip(works, dies_after)]
    for side in both:
      side.start()
      side.wait()
    for turn in itertools.chain(schedule, itertools.cycle((0, 1))):
      if all(side.ended for side in both):
        return both
      if not both[turn].ended:
        both[turn].step()

  return run


def check(path, case) -> bool:
  """Whether the snapshot is committed; if so, every part that it vouches for is whole."""
  storage = Storage(path, "plan", pytest.fail)
  if not storage.is_committed(1):
    return False
  for role, digest in storage.manifest(1)["parts"].items():
    assert storage.load(1, role, committed=digest).state == {"of": role}, case
  return True


def test_whatever_the_order_and_whoever_is_killed_no_committed_part_is_lost(tmp_path, sides):
  """A part was hidden, and its role killed before it saw that the snapshot was committed."""
  chance, outcomes = random.Random(SEED), set()
  for number in range(SCHEDULES):
    path = tmp_path / str(number)
    storages = [Storage(path, "plan", pytest.fail) for _ in range(2)]
    for role in ROLES:
      storages[0].save(1, role, 1, {"of": role}, {})
    works = (lambda s=storages: s[0].forget(ROLES[0])), (lambda s=storages: s[1].commit(1, ROLES))
    dies_after = [chance.choice((chance.randrange(14), 10**9)) for _ in works]
    turns = [turn for turn in (0, 1) for _ in range(chance.randrange(14))]
    if number % 2:
      chance.shuffle(turns)
    forgets, commits = sides(works, dies_after, turns)
    case = f"number {number} of seed {SEED}: {dies_after}, {turns}"
    committed = check(path, case)
    if forgets.error is None and not committed:
      assert ROLES[0] not in storages[0].metas(1), f"{case}: it is left, though nobody was killed"
    if commits.error is None:
      assert committed, f"{case}: it was said to be committed"
    assert not isinstance(forgets.error, OSError), f"{case}: {forgets.error}"
    outcomes.add((committed, type(forgets.error), isinstance(commits.error, Killed)))
    storages[0].forget(ROLES[0])  # of the next life
    assert check(path, case) == committed
    assert committed or ROLES[0] not in storages[0].metas(1), case
  assert len(outcomes) >= 6, f"all kinds of ends: {outcomes}"


def test_a_note_keeps_a_part_out_of_a_snapshot(tmp_path):
  """Its role was killed before it could delete the part."""
  storage = Storage(tmp_path, "plan", pytest.fail)
  for role in ROLES:
    storage.save(1, role, 1, {}, {})
  storage.decline(1, ROLES[0], "it is being deleted")
  with pytest.raises(Damaged, match="is withdrawn"):
    storage.commit(1, ROLES)
  storage.commit(1, ROLES[1:])
  assert storage.committed() == [1]
