"""Saves a role's parts of snapshots beside its work; on shard 0 also commits the snapshots.

Saving never holds up the role: one worker of low priority writes, a snapshot that comes while the
one before is not done goes without this role, and what cannot be written is a loud warning.
A snapshot is committed once the parts of all shards are there, and of all learners that were there
when it began and still live. Shard 0 looks after that: without it there is no snapshot to commit.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Collection, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from ddiloco.observe.eventlog import Records
from ddiloco.observe.guards import warn
from ddiloco.protocol import events
from ddiloco.protocol.states import clock_violations
from ddiloco.runtime import REAL_TIME, Job, Loop, Time

if TYPE_CHECKING:
  from ddiloco.checkpoint.snapshots import Storage

# Between two looks whether all parts are there: a share of the time that it has taken so far.
LOOK_SECONDS, LOOK_SHARE, LOOK_SECONDS_MOST = 0.05, 0.2, 2.0
MOST_PATIENCE = 20  # times that, for parts that grow: no learner holds up snapshots for ever
NICENESS = 10  # of the worker's thread: a tenth of the processor where there is none to spare


class Saver:
  """One incarnation's.

  Args:
    storage: where parts go.
    role: as parts are named, "learner-3".
    incarnation: of the role.
    recorder: event log.
    disk: raises OSError where a planned fault fills the disk.
    time: where it lives.
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
    self.hold: Callable[[], str] = lambda: ""  # why nothing of this role is to be saved now
    self._disk, self._time = disk, time
    self._busy = False  # from `save` to the end of its `then`
    self._worker = time.worker(f"save {role}", _lower_priority, self._say_failed)
    self._worker.put(self._forget())

  @property
  def busy(self) -> bool:
    """Whether it has not done all yet that follows from the newest snapshot."""
    return self._busy

  @property
  def refusal(self) -> str:
    """Why a snapshot that came now would go without this role; "": it would not."""
    return "the one before is not done yet" if self.busy else self.hold()

  def save(
    self,
    snapshot: int,
    state: Mapping[str, Any],
    arrays: MutableMapping[str, Any],
    then: Callable[[int], Job] = lambda snapshot: (),
    at_last: Callable[[int], Job] = lambda snapshot: (),
  ) -> None:
    """Queues this role's part: its state as JSON values, and arrays that are not changed any more;
    `arrays` is emptied while they are written.

    The job `then(snapshot)` is done in the background once it is written, and after that, or once
    it cannot be written, `at_last(snapshot)`.
    """
    if reason := self.refusal:
      self.recorder.record(events.Unsaved(snapshot=snapshot, reason=reason))
      self._worker.put(self._leave_word(snapshot, reason))
      return
    self._busy = True
    self._worker.put(self._work(snapshot, state, arrays, then, at_last))

  def decline(self, snapshot: int, reason: str) -> None:
    """There will be no part of this role: says so to the log, and to shard 0, which would wait.

    Not of a snapshot that is committed: a role that hears of it only then was not there.
    """
    self._worker.put(self._decline(snapshot, reason))

  def _decline(self, snapshot: int, reason: str) -> Job:
    with contextlib.suppress(OSError):  # then it is said
      if self.storage.is_committed(snapshot):
        return
    self.recorder.record(events.Unsaved(snapshot=snapshot, reason=reason))
    yield from self._leave_word(snapshot, reason)

  def _leave_word(self, snapshot: int, reason: str) -> Job:
    """For shard 0, which else would wait."""
    with contextlib.suppress(OSError):  # it waits, as long as it has patience
      self.storage.decline(snapshot, self.role, reason)
    yield None

  def close(self, patience_seconds: float = 0.0) -> None:
    """Ends the worker; what it is writing has this long. What is half done never counts."""
    self._worker.close(patience_seconds, LOOK_SECONDS_MOST)  # what is left of it does not count

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
    then: Callable[[int], Job],
    at_last: Callable[[int], Job],
  ) -> Job:
    written = yield from self._write(snapshot, state, arrays)
    del arrays  # a copy of an island's whole state: free it before waiting for anything
    if written:
      yield from then(snapshot)
    yield from at_last(snapshot)
    self._busy = False

  def _write(
    self, snapshot: int, state: Mapping[str, Any], arrays: MutableMapping[str, Any]
  ) -> Loop[bool]:
    size = sum(array.nbytes for array in arrays.values())
    started = self._time.now()
    self.recorder.flush()  # a life may begin with this part: the log must know how it came to be
    try:
      self._disk()
      if self.storage.is_committed(snapshot):  # by an earlier life, which knew more
        self.recorder.record(events.Unsaved(snapshot=snapshot, reason="it is committed already"))
        return False
      meta = self.storage.save(snapshot, self.role, self.incarnation, state, arrays)
      yield None
    except Exception as error:  # whatever it is: training goes on without this snapshot
      reason = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
      warn(f"{self.role}: its part of snapshot {snapshot} is not saved: {reason}. The run goes on.")
      self.recorder.record(events.Unsaved(snapshot=snapshot, reason=reason))
      yield from self._leave_word(snapshot, reason)
      return False
    self.recorder.record(
      events.Saved(
        snapshot=snapshot,
        seconds=round(self._time.now() - started, 3),
        bytes=size,
        arrays={name: each["crc32"] for name, each in meta["arrays"].items()},
      )
    )
    return True

  # --- shard 0 ------------------------------------------------------------------------------------

  def commit_when_complete(
    self,
    snapshot: int,
    shards: Collection[str],
    learners: Callable[[], Collection[str]],
    patience_seconds: float,
    may_lack: bool = True,
  ) -> Job:
    """Waits for the parts, and commits the snapshot.

    Learners that are not expected at first are no part of it.

    Args:
      snapshot: which; the own part is written.
      shards: parts it cannot do without.
      learners: parts that are still to be expected: fewer when a learner dies.
      patience_seconds: for learners that live and whose parts do not grow.
      may_lack: whether learners that live may decline, for instance since they are busy. A run in
        lock-step, which repeats bit by bit what it lost, needs them all.
    """
    try:
      self._disk()
      yield from self._commit(snapshot, set(shards), learners, patience_seconds, may_lack)
    except Exception as error:  # whatever it is: training goes on without this snapshot
      reason = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
      warn(f"snapshot {snapshot} is not committed: {reason}. The run goes on.")
      self.recorder.record(events.Uncommitted(snapshot=snapshot, reason=reason))

  def prune(self, keep: int, snapshot: int) -> Job:
    """Deletes old snapshots but `keep`, and what was saved for those up to this one in vain.

    Not that where the role ends, and so perhaps the run: others are still writing theirs.
    """
    try:
      self.storage.prune(keep, 0 if self._worker.ending else snapshot)
    except Exception as error:
      warn(f"old checkpoints cannot be deleted: {type(error).__name__}: {error}. The run goes on.")
    yield None

  def _commit(
    self,
    snapshot: int,
    shards: set[str],
    learners: Callable[[], Collection[str]],
    patience_seconds: float,
    may_lack: bool,
  ) -> Job:
    started = self._time.now()
    known = {*shards, *learners()}  # others may have left a part in a former life of the run
    grew_at, sizes = started, self.storage.growth(snapshot, known)
    while True:
      # Asked before looking: what is there only later does not count as missing.
      now, ending = self._time.now(), self._worker.ending
      declined = self.storage.declined(snapshot)
      metas = self.storage.metas(snapshot)
      states = {role: meta["state"] for role, meta in metas.items() if role in known}
      roles = consistent(states, shards)
      missing = {*shards, *learners()} - declined - roles
      late = ending or now - grew_at > patience_seconds
      most = now - started > MOST_PATIENCE * patience_seconds
      if late and missing and not (ending or most):  # what grows is on its way
        grown = self.storage.growth(snapshot, known)
        if any(grown[role] > sizes[role] for role in missing & known):
          grew_at, sizes, late = now, grown, False
      needed = shards if may_lack else {*shards, *learners()}
      refused = declined & needed
      if late or refused:
        missing = needed - roles
      if not missing:
        break
      if late or refused:
        self.recorder.record(events.Uncommitted(snapshot=snapshot, missing=tuple(sorted(missing))))
        return
      look_seconds = LOOK_SHARE * (self._time.now() - started)
      yield self._time.now() + min(max(look_seconds, LOOK_SECONDS), LOOK_SECONDS_MOST)
    self.storage.commit(snapshot, roles)
    self.recorder.record(
      events.Snapshot(
        snapshot=snapshot,
        roles=tuple(sorted(roles)),
        lacks=tuple(sorted(known - roles)),
        seconds=round(self._time.now() - started, 3),
      )
    )


def consistent(states: Mapping[str, Mapping[str, Any]], shards: Collection[str]) -> set[str]:
  """The roles whose captured states are one consistent snapshot, by their vector clocks.

  Every shard, and each learner that fits. A part that a former life left under the same number does
  not: a learner's is left out, and with a shard's there is no snapshot at all until it is replaced.
  """
  names = {state["key"]: role for role, state in states.items()}
  snapshot = {
    s["key"]: {int(who): n for who, n in s["vector_clock"].items()} for s in states.values()
  }
  while bad := clock_violations(snapshot):
    # A learner that others know more of is too old; one that knows more of a shard is too new.
    odd = {whom if names[whom] not in shards else who for who, whom in bad}
    if any(names[key] in shards for key in odd):
      return set()
    for key in odd:
      del snapshot[key]
  return {names[key] for key in snapshot}


def _lower_priority() -> None:
  """Of this thread, and so of those that writing starts: the role's own work comes first.

  A process that is nicer already, as in a job of low priority, may not take that back.
  """
  if sys.platform == "linux":  # elsewhere it is the whole process that has a priority
    me = threading.get_native_id()
    niceness = max(NICENESS, os.getpriority(os.PRIO_PROCESS, me))
    with contextlib.suppress(OSError):  # forbidden: it saves all the same
      os.setpriority(os.PRIO_PROCESS, me, niceness)
