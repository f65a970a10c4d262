"""Saves a role's parts of snapshots beside its work; on shard 0 also commits the snapshots.

Saving never holds up the role. One worker of low priority writes; a snapshot that comes while the
role still saves the one before goes without this role; and a part that cannot be written is only an
event, which the terminal shows. A snapshot is committed once it has the parts of all shards, and of
all learners that were there when it began and still live. Shard 0 commits it: a snapshot needs
shard 0's part anyway.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Collection, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from ddiloco.checkpoint.signed_json import brief
from ddiloco.checks import FULL
from ddiloco.observe.eventlog import Records
from ddiloco.observe.guards import Warnings, warn
from ddiloco.protocol import events
from ddiloco.protocol.states import clock_violations
from ddiloco.runtime import REAL_TIME, Job, Loop, Time

if TYPE_CHECKING:
  from ddiloco.checkpoint.snapshots import Storage

# Between two looks whether all parts are there: a share of the time waited so far, within limits.
LOOK_SECONDS, LOOK_SHARE, LOOK_SECONDS_MOST = 0.05, 0.2, 2.0
MOST_PATIENCE = 20  # times the patience, for parts that grow: no learner may block it for ever
NICENESS = 10  # of the worker's thread: it gets a tenth of a busy processor


class Saver:
  """Saves the parts of one incarnation of a role.

  Args:
    storage: where parts go.
    role: the name of its parts, such as "learner-3".
    incarnation: of the role.
    recorder: event log.
    disk: raises OSError where a planned fault fills the disk.
    time: real or virtual time.
  """

  def __init__(
    self,
    storage: Storage,
    role: str,
    incarnation: int,
    recorder: Records,
    disk: Callable[[], None] = lambda: None,
    time: Time = REAL_TIME,
  ):
    self.storage = storage
    self.role = role
    self.incarnation = incarnation
    self.recorder = recorder
    self.hold: Callable[[], str] = lambda: ""  # why this role must save nothing now; "": it may
    self._disk, self._time = disk, time
    self.busy = False  # whether work for the newest snapshot is still under way
    self._unseen = Warnings()
    self._worker = time.worker(f"save {role}", _lower_priority, self._say_failed)
    self._worker.put(self._forget())

  @property
  def refusal(self) -> str:
    """Why a snapshot that came now would go without this role; "": it would include the role."""
    return "the one before is not done yet" if self.busy else self.hold()

  def save(
    self,
    snapshot: int,
    state: Mapping[str, Any],
    arrays: MutableMapping[str, Any],
    commit: Callable[[], Job] = lambda: (),
    keep: int = 0,
    since: int = 0,
  ) -> None:
    """Queues this role's part: its state as JSON values, and arrays that are not changed any more;
    `arrays` is emptied while they are written.

    On shard 0 the job `commit()` (`commit_when_complete`) runs in the background once the part is
    written. After that, or if the part cannot be written, all but the newest `keep` snapshots are
    deleted (0: none is), but for the newest parts of learners from snapshot `since` on.
    """
    if reason := self.refusal:
      self.recorder.record(events.Unsaved(snapshot=snapshot, reason=reason))
      self._worker.put(self._leave_word(snapshot, reason))
      return
    self.busy = True
    self._worker.put(self._work(snapshot, state, arrays, commit, keep, since))

  def decline(self, snapshot: int, reason: str) -> None:
    """Tells the log, and shard 0, which would otherwise wait, that this role will save no part.

    Does nothing if the snapshot is committed already, without this role, or a newer one: this one
    may be deleted by now (`checkpoint.keep`).
    """
    self._worker.put(self._decline(snapshot, reason))

  def _decline(self, snapshot: int, reason: str) -> Job:
    with contextlib.suppress(OSError):  # if storage cannot tell, the role declines
      if self.storage.is_past(snapshot):
        return
    self.recorder.record(events.Unsaved(snapshot=snapshot, reason=reason))
    yield from self._leave_word(snapshot, reason)

  def _leave_word(self, snapshot: int, reason: str) -> Job:
    """Leaves a note for shard 0, which would otherwise wait."""
    with contextlib.suppress(OSError):  # without the note shard 0 waits until its patience ends
      self.storage.decline(snapshot, self.role, reason)
    yield None

  def close(self, patience_seconds: float = 0.0) -> None:
    """Ends the worker; it has `patience_seconds` to finish. A half-written part never counts.

    With 0, as where a thread was killed, nothing is waited for: a part may still be written, beside
    the next life, with which `Storage` reckons.
    """
    self._worker.close(patience_seconds, min(patience_seconds, LOOK_SECONDS_MOST))

  def _say_failed(self) -> None:
    warn(f"{self.role}: saves no more: {self._worker.failure!r}. The run goes on.")

  def _forget(self) -> Job:
    try:
      self.storage.forget(self.role)
    except OSError as error:
      warn(f"{self.role}: what it saved before cannot be deleted: {error}. The run goes on.")
    yield None

  def _work(
    self,
    snapshot: int,
    state: Mapping[str, Any],
    arrays: MutableMapping[str, Any],
    commit: Callable[[], Job],
    keep: int,
    since: int,
  ) -> Job:
    written = yield from self._write(snapshot, state, arrays)
    del arrays  # a copy of an island's whole state: free it before waiting for anything
    try:
      if written:
        yield from commit()
    except Exception as error:  # any error: training goes on without this snapshot
      self.recorder.record(events.Uncommitted(snapshot=snapshot, reason=_reason(error)))
    if keep:
      yield from self._prune(snapshot, keep, since)
    self.busy = False

  def _write(
    self, snapshot: int, state: Mapping[str, Any], arrays: MutableMapping[str, Any]
  ) -> Loop[bool]:
    size = sum(array.nbytes for array in arrays.values())
    started = self._time.now()
    self.recorder.flush()  # a later incarnation may begin with this part: the log must explain it
    try:
      self._disk()
      if self.storage.is_committed(snapshot):  # with a part of an earlier incarnation
        raise OSError("it is committed already")
      meta = self.storage.save(snapshot, self.role, self.incarnation, state, arrays)
      yield None
    except Exception as error:  # any error: training goes on without this snapshot
      reason = _reason(error)
      self.recorder.record(events.Unsaved(snapshot=snapshot, reason=reason))
      yield from self._leave_word(snapshot, reason)
      return False
    took = round(self._time.now() - started, 3)
    arrays = {name: each["crc32"] for name, each in meta["arrays"].items()}
    self.recorder.record(events.Saved(snapshot=snapshot, seconds=took, bytes=size, arrays=arrays))
    return True

  # --- shard 0 ------------------------------------------------------------------------------------

  def commit_when_complete(
    self,
    snapshot: int,
    shards: Collection[str],
    learners: Callable[[], Collection[str]],
    patience_seconds: float,
    may_lack: bool = True,
    has_left: Callable[[str], bool] = lambda role: False,
  ) -> Job:
    """Waits for the parts, and commits the snapshot.

    Learners that are not expected at the start get no part in the snapshot. A learner that has left
    is waited for while it writes its part. When this role ends too, it waits for parts that have
    been begun, and a snapshot that lacks others is dropped in silence: nothing is lost with it.

    Args:
      snapshot: its number; this role's own part is written.
      shards: roles whose parts the snapshot must have.
      learners: roles whose parts are still expected: fewer when a learner dies.
      patience_seconds: for learners that live and whose parts do not grow.
      may_lack: whether learners that live may decline, for instance since they are busy. A run in
        lock-step, which repeats lost work bit by bit, needs the parts of all.
      has_left: whether a learner has left in good order: no part of it is missing.
    """
    self._disk()
    shards, started = {*shards}, self._time.now()
    known = {*shards, *learners()}  # other roles may have left a part before the run went on
    grew_at, sizes = started, self.storage.growth(snapshot, known)
    begun: set[str] = set()  # of those that need not begin any more: what is still written
    while True:
      # Read before the parts are: a part that arrives in between is not counted as late.
      now, ending = self._time.now(), self._worker.ending
      declined, metas = self.storage.declined(snapshot), self.storage.metas(snapshot)
      there = {r: meta["state"] for r, meta in metas.items() if r in known - declined}
      roles = consistent(there, shards)
      expected = {*shards, *learners()}
      needed = shards if may_lack else expected
      gone = {role for role in known - declined - metas.keys() if ending or has_left(role)}
      # A look may miss a part while its files are renamed: what has been begun stays so.
      begun |= {r for r, n in self.storage.growth(snapshot, gone).items() if n} if gone else set()
      begun &= gone
      missing = begun if ending else ((known & expected) - declined - roles - gone) | begun
      late = now - grew_at > patience_seconds
      if late and missing and now - started <= MOST_PATIENCE * patience_seconds:
        grown = self.storage.growth(snapshot, known)
        if any(grown[role] > sizes[role] for role in missing):  # it is still being written
          grew_at, sizes, late = now, grown, False
      if late or declined & needed or not missing:
        break
      look_seconds = LOOK_SHARE * (self._time.now() - started)
      yield self._time.now() + min(max(look_seconds, LOOK_SECONDS), LOOK_SECONDS_MOST)
    if late and missing:
      self._name_unseen(snapshot, missing, patience_seconds)
    if missing := needed - roles:
      if not ending:
        self.recorder.record(events.Uncommitted(snapshot=snapshot, missing=tuple(sorted(missing))))
      return
    self.storage.commit(snapshot, roles)
    lacks = {r for r in known - roles if r in begun or not has_left(r)}
    self._say_committed(snapshot, roles, lacks, self._time.now() - started)

  def _say_committed(
    self, snapshot: int, roles: Collection[str], lacks: Collection[str], seconds: float
  ) -> None:
    said = {"roles": tuple(sorted(roles)), "lacks": tuple(sorted(lacks))}
    self.recorder.record(events.Snapshot(snapshot=snapshot, seconds=round(seconds, 3), **said))

  def _name_unseen(self, snapshot: int, roles: Collection[str], patience_seconds: float) -> None:
    """Warns once of each role that lives, and of whose part this one sees nothing: its host may
    have a folder of its own there, where the shared one is not mounted."""
    sizes, where = self.storage.growth(snapshot, roles), f"in {self.storage.path}/"
    for role in sorted(name for name, size in sizes.items() if not size):
      seen = f"nothing of the part of {role} is {where} after {patience_seconds:g} s"
      fix = f"if that repeats, let {role} reach this folder (checkpoint.path)"
      why = "It stands still, or saves elsewhere"
      self._unseen(role, f"snapshot {snapshot}: {seen}. {why}. Fix: {fix}.")

  def _prune(self, snapshot: int, keep: int, since: int) -> Job:
    """Deletes old snapshots, and parts of uncommitted ones up to this one.

    While the role ends, and so perhaps the run, uncommitted parts stay: other roles may still be
    writing theirs.
    """
    try:
      self.storage.prune(keep, 0 if self._worker.ending else snapshot, since)
    except Exception as error:
      warn(f"old snapshots cannot be deleted: {brief(error)}. The run goes on.")
    yield None


def consistent(states: Mapping[str, Mapping[str, Any]], shards: Collection[str]) -> set[str]:
  """The roles whose captured states are one consistent snapshot, by their vector clocks.

  These are every shard, and each learner that fits. A part that a former incarnation left under the
  same number does not fit. A learner's is left out; with a shard's there is no snapshot until that
  part is replaced.
  """
  names = {str(state["key"]): role for role, state in states.items()}  # text, as in JSON
  snapshot = {str(state["key"]): state["vector_clock"] for state in states.values()}
  while bad := clock_violations(snapshot):
    # A learner of which others know more is too old; a learner that knows more of a shard is too
    # new.
    odd = {whom if names[whom] not in shards else who for who, whom in bad}
    if any(names[key] in shards for key in odd):
      return set()
    for key in odd:
      del snapshot[key]
  return {names[key] for key in snapshot}


def _reason(error: Exception) -> str:
  """Why nothing was written, for the log, and what to do."""
  full = isinstance(error, OSError) and error.errno in FULL
  return f"{brief(error)}. Fix: make room there." if full else brief(error)


def _lower_priority() -> None:
  """Lowers the priority of this thread and of threads it starts: the role's work comes first.

  A process that is nicer already, as in a job of low priority, may not lower its niceness.
  """
  if sys.platform == "linux":  # elsewhere only a whole process has a priority
    me = threading.get_native_id()
    niceness = max(NICENESS, os.getpriority(os.PRIO_PROCESS, me))
    with contextlib.suppress(OSError):  # forbidden: it saves at the normal priority
      os.setpriority(os.PRIO_PROCESS, me, niceness)
