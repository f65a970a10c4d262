"""The protocol's vocabulary: what can happen to a role, and what a role may decide to do. PURE.

A role's behaviour is a reducer `(state, event) -> (state, actions)` without I/O, clocks, threads or
arrays: `protocol.learner.learner_on` and `protocol.syncer.syncer_on`. Time arrives inside events,
payloads are opaque, and the role performs the actions in order (`ddiloco/roles`). Threads,
processes, virtual time and the property tests all drive these same two functions.

The events here are inputs of reducers. Events of the event log are in `events.py`; a reducer
returns them as actions. Times are seconds on the role's own clock.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from ddiloco.protocol.events import Event, Mode
from ddiloco.protocol.messages import ForwardMoments, Message, Publish, Push, Value
from ddiloco.protocol.values import Frozen

# --- events ---------------------------------------------------------------------------------------


class Tick(Frozen):
  """Time has passed, and all messages that arrived until `heard_until` are taken in.

  Taking them in may take long. Messages that arrive meanwhile are not heard yet, so no member's
  silence counts beyond `heard_until`.
  """

  now: float
  heard_until: float = math.inf  # all messages that arrived by then are taken in
  saved: bool = False  # the newest snapshot is committed or given up: shard 0 may begin another one


class Received(Frozen):
  """A message arrived.

  A shard decides nothing about its rounds here, but at the next `Tick`, after all messages.
  """

  message: Message
  now: float  # when it arrived
  unsent: bool = False  # earlier messages to this learner are still queued here
  held: Collection[int] = ()  # fragments whose publishes wait here for the buddy


class ReadDone(Frozen):
  """Shard: the payload of this message was read (`Read`); with what was found."""

  message: Push | Value
  now: float  # when it arrived
  fault: str = ""  # why it could not be decoded, or is not the shard's own value
  norm: float = 0.0  # of a push, the decoded outer gradient's; not finite: to be rejected
  # Of a push, by learner: inner products with the round's pushes read before, and with itself.
  products: Mapping[int, float] = {}
  content: Any = None  # a value, opaque: the action that keeps it carries it


class StepDone(Frozen):
  """The learner finished one inner step."""

  now: float
  tokens: int  # that the step trained on
  seconds: float  # that the step took; 0: not known yet


class Staged(Frozen):
  """The oldest version of this fragment that was being staged now lies on the island's devices."""

  fragment: int
  now: float


class Unmade(Frozen):
  """The initial values cannot be made here, or not with the same bits: they must be sent."""

  now: float


class Taken(Frozen):
  """A peer's moments of this fragment now lie on the island's devices, ready to be applied."""

  fragment: int
  now: float
  content: Any = None  # opaque, for `ApplyMoments`; None: they could not be read


class Resumed(Frozen):
  """The shard's process stood still until now: durations from before do not measure links."""

  now: float


LearnerEvent = Tick | Received | StepDone | Staged | Taken | Unmade
SyncerEvent = Tick | Received | ReadDone | Resumed

# --- actions --------------------------------------------------------------------------------------
# An event of `events.py` as an action: record it in the event log. Before the role records an
# `Apply`, it puts the oldest staged version of the fragment into the parameters; before a `Commit`,
# it merges these learners' pushes, makes the outer step and stores the new version. After a
# `Rejected` with `rejoin` it ends, and starts afresh as a new incarnation.


class Send(Frozen):
  """Send to a peer, a shard's or learner's number.

  The role adds the payload of a publish or a value. For the payload of a push, or of moments, it
  copies the fragment off the devices now.
  """

  to: int
  message: Message


class Resend(Frozen):
  """Learner: send the newest push of this fragment again, now in answer to this round."""

  push: Push


class Stage(Frozen):
  """Learner: decode this publish and bring it onto the devices, in the background."""

  publish: Publish
  mode: Mode
  included: bool  # my outstanding push is part of it


class TakeMoments(Frozen):
  """Learner: bring these moments onto the devices, in the background."""

  forwarded: ForwardMoments


class ApplyMoments(Frozen):
  """Learner: put the staged moments of a fragment into the optimizer state now."""

  content: Any = None  # of the `Taken` event


class TakeSnapshot(Frozen):
  """Both: `state`, with its arrays, is my part of its snapshot; save it in the background.

  A learner that has not joined has no part: no role should wait for it.
  """

  state: Any  # LearnerState or SyncerState


class Read(Frozen):
  """Shard: measure this push, or decode this value, in the background; `ReadDone` answers."""

  message: Push | Value
  now: float  # when it arrived


class InstallValue(Frozen):
  """Shard: this value is newer than mine; from now on it is the fragment's global value."""

  fragment: int
  content: Any = None  # of the `ReadDone` event


LearnerAction = Send | Event | Resend | Stage | TakeMoments | ApplyMoments | TakeSnapshot
SyncerAction = Send | Event | Read | InstallValue | TakeSnapshot
