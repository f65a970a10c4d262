"""A saver in a test: its storage is watched, its events are kept, and states are in short."""

import errno
import os
import threading

import pytest

from ddiloco.checkpoint.snapshots import Storage
from ddiloco.observe.eventlog import Records
from ddiloco.protocol.events import Event
from ddiloco.protocol.states import shard_key
from tests.waits import PATIENCE_SECONDS

SHARDS = ("syncer-0", "syncer-1")
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a part")


class Events(Records):
  """Keeps events, and lets one wait for them."""

  def __init__(self):
    self.flushed = 0
    self._events: list[Event] = []
    self._news = threading.Condition()

  def record(self, event):
    with self._news:
      self._events.append(event)
      self._news.notify_all()

  def flush(self):
    self.flushed += 1

  def of(self, kind, count=1):
    """All of this kind, when there are so many."""
    with self._news:
      found = lambda: [e for e in self._events if e.kind == kind]
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


def state(role, own=0, **seen):
  """What a role recorded: its own count, and what it knows of others ("learner_1": 5)."""
  names = {name.replace("_", "-"): count for name, count in seen.items()}
  clock = {key(name): count for name, count in {role: own, **names}.items()}
  return {"key": key(role), "vector_clock": {str(who): count for who, count in clock.items()}}


def key(role):
  kind, number = role.split("-")
  return int(number) if kind == "learner" else shard_key(int(number))


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
