"""A syncer shard at work: receives, lets `protocol.syncer` decide, merges, publishes.

The loop only decides, records and sends. All work on the values of a fragment (norms of a push,
merging, payloads of publishes, copies for the buddy) is done by one worker in the background, job
after job in the order of the decisions, so a report is answered while half a billion values are
merged. When a job is done, the loop does what follows from it, in the same order: for a commit the
log line, the store, the buddy, and then the publishes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from ddiloco.chaos import Faults
from ddiloco.checkpoint.buddy import Replication, Sealer
from ddiloco.core.delta import Committed, Merged, Store
from ddiloco.network.transport import learner_address
from ddiloco.observe.guards import warn
from ddiloco.protocol import actions, events, syncer
from ddiloco.protocol.actions import ReadDone, Received, Send, SyncerAction
from ddiloco.protocol.events import parse_role
from ddiloco.protocol.messages import (
  EVALUATOR,
  BetweenShards,
  FragmentState,
  Message,
  Publish,
  Push,
  Value,
)
from ddiloco.protocol.states import SyncerState, syncer_part
from ddiloco.protocol.values import replace
from ddiloco.runtime import Job, Loop, Runtime, WorkingRole, drive

LONGEST_WAIT_SECONDS = 0.5  # between two checks of faults and the stop signal
STOOD_STILL_SECONDS = 1.0  # if a turn took so much longer than its wait, the process was stopped
IGNORED_SECONDS = 1.0
# A learner's part stays for so many snapshots. By then its unmerged work and its moments are stale:
# a learner that was away for longer begins with fresh moments.
AWAY_SNAPSHOTS = 100

T = TypeVar("T")


class Syncer(WorkingRole):
  """One incarnation of a shard.

  Args:
    state: the reducer's first state, from `protocol.syncer.init`; its fragments are the store's.
    store: where committed fragments live, at first those of the state.
    runtime: config, endpoint, log, clock, ...; shard 0's saver also commits snapshots.
    replication: copies on other shards, of and for this one; None: there are none.
    sealer: proves later that a value is this shard's; None: all members are trusted.
    in_place: commits may overwrite vectors of the store, which does not outlive this role.

  Attributes:
    merger: the shard's vectors.
  """

  def __init__(
    self,
    state: SyncerState,
    store: Store,
    runtime: Runtime,
    replication: Replication | None = None,
    sealer: Sealer | None = None,
    in_place: bool = False,
  ):
    fragments = {f.index: runtime.plan.fragments[f.index] for f in state.fragments}
    size = max(f.size for f in fragments.values())
    super().__init__(runtime, f"merge-{state.shard}", size)
    self.state = state
    self.store = store
    self.replication = replication
    self.lost: dict[int, int] = {}  # fragment -> version that a learner has and this shard lost
    self.merger = runtime.merger(fragments, store, self.config, in_place)
    self.merger.share = self._threads.share
    if replication is not None:
      replication.background = self._worker.put
    self._unfinished = 0  # jobs whose consequences the loop has not handled yet
    self._capturing = False
    self._drag: Callable[[float], None] = lambda seconds: None
    self._looked_at = math.inf  # when it last heard what is there
    self._sealer = sealer
    self._ignored: dict[tuple, tuple[float, int]] = {}  # when logged, and how often seen since
    self.recorder.record(events.Started(fragments=tuple(fragments)))
    for p in fragments:
      self._say_owned(p)
      self._do(functools.partial(self._prepare, p))

  @property
  def committed(self) -> Mapping[int, Committed]:
    """The newest commit of each of the shard's fragments."""
    return self.merger.committed

  def _say_owned(self, fragment: int) -> None:
    """For the log: which value and momentum the next commit of this fragment builds on."""
    committed = self.committed[fragment]
    self.recorder.record(
      events.Owns(
        fragment=fragment,
        version=committed.state.version,
        round=committed.state.last_round,
        momentum_round=committed.momentum_round,
        exact=committed.exact(self.config.sync.publish_codec),
        merged_tokens=committed.state.merged_tokens,
      )
    )

  @property
  def idle(self) -> bool:
    """Whether no job is under way."""
    return not self._unfinished

  def run(self, faults: Faults, stopped: Callable[[], bool]) -> None:
    """Serves until `stopped()`, on this thread; it may be run again until it is closed.

    Raises:
      Killed: by plan.
    """
    drive(self.live(faults, stopped), self.endpoint, LONGEST_WAIT_SECONDS)

  def live(self, faults: Faults, stopped: Callable[[], bool]) -> Loop[None]:
    """The loop of `run`."""
    deadline, now = -math.inf, self.time.now
    self._drag, self._looked_at = faults.drag, now()
    while not stopped():
      faults.check(self.state.global_step)
      yield None  # a planned stall may have passed
      started = yield from self._take_in(min(deadline, syncer.next_wake(self.state)))
      yield from self.finish()
      deadline = math.inf if self.replication is None else self.replication.tick()
      saved = not (self._capturing or (self._saver and self._saver.busy))
      yield from self.handle(actions.Tick(now(), heard_until=started, saved=saved))
      faults.drag(now() - started)
      yield None
      self._count_traffic()
    self._count_traffic(always=True)

  def _take_in(self, until: float) -> Loop[float]:
    """Waits for a message, then takes in all that are there; returns the time when the wait ended.

    Messages that come meanwhile are for the next turn, so that a flood does not delay decisions.
    """
    began = self.time.now()
    until = max(began, min(until, began + LONGEST_WAIT_SECONDS))
    arrived = yield until
    if self.time.now() - self._looked_at - (until - began) > STOOD_STILL_SECONDS:
      # This process was stopped, in this wait or since the last. Members may have sent messages
      # meanwhile, which still have to come through the sockets.
      self.time.sleep(LONGEST_WAIT_SECONDS)
      yield None
      yield from self.handle(actions.Resumed(self.time.now()))
      arrived = arrived or self.endpoint.receive(0.0)
    started, left = self.time.now(), self.endpoint.waiting
    self._looked_at = started
    while arrived is not None:
      if not isinstance(arrived.message, BetweenShards):
        yield from self.take(arrived.message, arrived.at)
      elif self.replication is not None:
        self.replication.on(arrived.message)
      arrived = self.endpoint.receive(0.0) if left > 0 else None
      left -= 1
    return started

  def take(self, message: Message, now: float) -> Loop[None]:
    """A message that arrived `now`; it may have waited since."""
    learner = getattr(message, "learner", EVALUATOR)
    unsent = self.endpoint.unsent(learner_address(learner)) > 0
    held = () if self.replication is None else self.replication.held
    yield from self.handle(Received(message, now, unsent, held))

  def handle(self, event) -> Loop[None]:
    """One event through the reducer, and every action it decides, in order."""
    self.state, todo = syncer.syncer_on(self.state, event)
    yield None
    for action in todo:
      self._perform(action)

  def finish(self) -> Loop[None]:
    """Does what follows the jobs that are done."""
    while (then := self._told()) is not None:
      self._unfinished -= 1
      yield from then()

  def _perform(self, action: SyncerAction) -> None:
    match action:
      case Send(to, Publish() as publish):
        work = functools.partial(self._with_payload, publish)
        self._do(work, functools.partial(self._publish, to))
      case Send(to, message):
        self.endpoint.send(learner_address(to), message)
      case actions.Read(message, now):
        work = self._measure if isinstance(message, Push) else self._check
        self._do(functools.partial(work, message, now), self.handle)
      case events.Commit(fragment=fragment, learners=learners):
        if self.replication is not None:
          self.replication.changes(fragment)
        sizes = tuple(map(self.config.tokens_per_step, learners))
        what = replace(action, step_tokens=sizes)
        work = functools.partial(self._commit, what, self._state_of(fragment))
        self._do(work, functools.partial(self._merged, what))
      case actions.InstallValue(fragment, value):
        work = functools.partial(self.merger.install, value, self._state_of(fragment))
        self._do(work, functools.partial(self._installed, fragment))
      case actions.TakeSnapshot(state) if self._saver is not None:
        self._capturing = True
        work = functools.partial(self._collect, state)
        self._do(work, functools.partial(self._collected, state))
      case events.Ignored():
        self._note_ignored(action)
      case events.Event():
        if isinstance(action, events.Lost):
          self.lost |= {p: max(v, self.lost.get(p, 0)) for p, v in action.versions.items()}
        self.recorder.record(action)

  # --- jobs of the worker, and what the loop does after each --------------------------------------

  def _do(
    self, work: Callable[[], T], then: Callable[[T], Iterable[None]] = lambda result: ()
  ) -> None:
    """Has the worker do `work`, and then the loop go on with its result."""

    def job() -> Job:
      result = work()
      yield None
      self._tell(functools.partial(then, result))

    self._unfinished += 1
    self._worker.put(job())

  def _prepare(self, fragment: int) -> None:
    if reason := self.merger.prepare(fragment):
      warn(f"what is compiled for commits cannot be kept on disk: {reason}. The run goes on.")

  def _measure(self, push: Push, now: float) -> ReadDone:
    started = self.time.now()
    done = self.merger.take_in(push, now)
    self._drag(self.time.now() - started)
    return done

  def _check(self, value: Value, now: float) -> ReadDone:
    done, sealer = self.merger.take_back(value, now), self._sealer
    if done.fault or sealer is None or sealer.fits(value.publish, done.content):
      return done
    return ReadDone(value, now, fault="is no value of this shard: its seal does not fit")

  def _commit(self, what: events.Commit, state: FragmentState) -> tuple[Merged, float]:
    started = self.time.now()
    merged = self.merger.commit(what, state)
    self._drag(self.time.now() - started)
    return merged, self.time.now() - started

  def _merged(self, what: events.Commit, result: tuple[Merged, float]) -> Loop[None]:
    """A commit is stored and in the log before any other role hears of it."""
    p, (merged, seconds) = what.fragment, result
    self.store[p] = self.committed[p]
    self.recorder.record(
      replace(
        what,
        weights={m: round(float(w), 6) for m, w in zip(what.learners, merged.weights)},
        length=None if merged.length is None else round(merged.length, 4),
        rho=None if merged.rho is None else round(merged.rho, 4),
        merge_seconds=seconds,
      )
    )
    self._announce(p)
    yield None

  def _installed(self, fragment: int, result: None) -> Loop[None]:
    """A value that this shard had lost, and a learner gave back, is here."""
    self.store[fragment] = self.committed[fragment]
    self._say_owned(fragment)
    # Whole: from an update the buddy would compute momentum, and this jump is no outer step.
    self._announce(fragment, whole=True)
    yield None

  def _state_of(self, fragment: int) -> FragmentState:
    return next(f for f in self.state.fragments if f.index == fragment)

  def _announce(self, fragment: int, whole: bool = False) -> None:
    """Writes the log to disk, then sends the buddy its copy: the log has all that others know."""
    self.recorder.flush()
    if self.replication is not None:
      change = None if whole else self.merger.change(fragment)
      self.replication.committed(self.committed[fragment], change)

  def _collect(self, state: SyncerState) -> tuple[Any, Mapping[str, Any]]:
    momentum_rounds = {p: c.momentum_round for p, c in self.committed.items()}
    return syncer_part(state, momentum_rounds), self.merger.arrays()

  def _collected(self, captured: SyncerState, result: tuple[Any, Mapping[str, Any]]) -> Loop[None]:
    self._capturing, snapshot = False, captured.snapshot
    self.recorder.record(events.Captured(snapshot=snapshot))  # after its commits' lines
    # Others may have begun it: in lock-step no run can go on from it without a quorum of learners.
    useless = self.config.sync.blocking and len(syncer.joined(captured)) < captured.quorum
    if captured.shard or useless:
      self._saver.save(snapshot, *result)
    else:
      commit = functools.partial(self._commit_snapshot, captured)
      since = snapshot - AWAY_SNAPSHOTS * self.config.sync.snapshot_steps
      self._saver.save(snapshot, *result, commit, self.config.checkpoint.keep, since)
    yield None

  def _commit_snapshot(self, captured: SyncerState) -> Job:
    """Job of the saver: commits the snapshot once all expected learners have saved their parts.

    Expected are the learners of the capture that still live in the same incarnation.
    """
    then, settings = captured.members, self.config.checkpoint
    learners = syncer.joined(captured)

    def expected() -> list[str]:
      now = self.state.members
      return [
        f"learner-{m}"
        for m in learners
        if m in now and not now[m].lost and now[m].incarnation == then[m].incarnation
      ]

    def has_left(role: str) -> bool:
      kind, number = parse_role(role)
      return kind == "learner" and number not in self.state.members

    shards = [f"syncer-{s}" for s in range(self.config.sync.num_shards)]
    how = settings.patience_seconds, not self.config.sync.blocking, has_left
    return self._saver.commit_when_complete(captured.snapshot, shards, expected, *how)

  # --- messages and log lines ---------------------------------------------------------------------

  def _with_payload(self, publish: Publish) -> Publish:
    """With payload and seal, as the fragment is now: between two commits of it."""
    publish = self.merger.with_payload(publish)
    if self._sealer is None:
      return publish
    return self._sealer.sealed(publish, self.committed[publish.fragment].published_value)

  def _publish(self, to: int, publish: Publish) -> Loop[None]:
    send = functools.partial(self.endpoint.send, learner_address(to), publish)
    if self.replication is None:
      send()
    else:
      self.replication.when_safe(publish.fragment, send)
    yield None

  def _note_ignored(self, event: events.Ignored) -> None:
    """At most a line a second for each learner and kind of message: a flood must not fill disks."""
    key, now = (event.learner, event.message), self.time.now()
    said_at, times = self._ignored.get(key, (-math.inf, 0))
    if now - said_at < IGNORED_SECONDS:
      self._ignored[key] = (said_at, times + 1)
    else:
      self._ignored[key] = (now, 0)
      self.recorder.record(replace(event, times=times + 1))
