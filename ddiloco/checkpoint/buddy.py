"""Copies of committed fragments on another shard, so that a killed shard loses no round.

Shard s streams every commit to its buddy, shard (s + 1) mod S, and holds back what it would publish
of it until the buddy has it: no role hears of a version that only one process has. A restarted
shard asks its buddy for everything. A buddy that does not answer delays publishes only for a short
while: then versions go out without a copy, which is said, until it is back.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import numpy as np

from ddiloco.core.commit import Committed
from ddiloco.core.fragments import Plan
from ddiloco.network.transport import Endpoint, syncer_address
from ddiloco.observe.eventlog import Recorder
from ddiloco.protocol import events
from ddiloco.protocol.actions import smooth
from ddiloco.protocol.messages import Recover, Recovered, Replica, Replicated, flat, pairs
from ddiloco.protocol.syncer_state import FragmentState

ASK_SECONDS = 0.5  # between two requests of a restarted shard, doubling
PATIENCE_FACTOR = 8.0  # over the usual time until a copy is confirmed


def buddy_of(shard: int, num_shards: int) -> int:
  """Who holds the copies of this shard's fragments; itself if it is the only one."""
  return (shard + 1) % num_shards


class Copies:
  """What this shard holds for its neighbour: the newest commit of each of its fragments."""

  def __init__(self, shard: int, incarnation: int, endpoint: Endpoint):
    self.shard, self.incarnation, self.endpoint = shard, incarnation, endpoint
    self._held: dict[tuple[int, int], Replica] = {}  # by owner and fragment
    self._lives: dict[int, int] = {}  # owner -> its newest incarnation

  def on(self, message: Replica | Recover) -> None:
    """Keeps a copy if it is the newest, or gives back all there are."""
    mine = {"shard": self.shard, "incarnation": self.incarnation}
    owner = syncer_address(message.shard)
    if message.incarnation < self._lives.get(message.shard, -1):
      return  # sent by a dead one; what lives now was told something else
    self._lives[message.shard] = message.incarnation
    if isinstance(message, Recover):
      held = {p: copy for (o, p), copy in sorted(self._held.items()) if o == message.shard}
      for copy in held.values():
        self.endpoint.send(owner, dataclasses.replace(copy, **mine))
      asked_by = message.incarnation
      self.endpoint.send(owner, Recovered(**mine, asked_by=asked_by, fragments=tuple(held)))
    elif message.owner == message.shard:
      key = (message.owner, message.fragment)
      known = self._held.get(key)
      # A newer incarnation of the owner is right also if it had to begin at an older version.
      rank = (message.incarnation, message.version)
      if known is None or rank >= (known.incarnation, known.version):
        self._held[key] = message
      done = Replicated(**mine, fragment=message.fragment, version=message.version)
      self.endpoint.send(owner, done)


class Replication:
  """The owner's side: sends commits to the buddy, and holds publishes back until it has them.

  Args:
    copies: what this shard holds for its neighbour in turn; its endpoint has dialed the buddy.
    buddy: the shard that gets the copies of ours.
    patience_seconds: least time until the buddy is taken to be away.
    recorder: event log.
  """

  def __init__(
    self,
    copies: Copies,
    buddy: int,
    patience_seconds: float,
    recorder: Recorder,
  ):
    self._copies, self._buddy, self._recorder = copies, buddy, recorder
    self._patience_seconds = patience_seconds
    self._copy_seconds = 0.0  # smoothed, until a copy is confirmed
    self._newest: dict[int, Replica] = {}  # of each fragment, what the buddy should have
    self._sent_at: dict[int, float] = {}  # not confirmed: fragment -> when
    self._held: list[tuple[int, int, Callable[[], None]]] = []  # fragment, version, what to do then
    self._buddy_incarnation = -1
    self._away = False

  def committed(self, committed: Committed) -> None:
    """Sends a copy of a fragment that was just committed."""
    state = committed.state
    self._newest[state.index] = pack(committed, self._copies.shard, self._copies.incarnation)
    self._send(state.index)

  def _send(self, fragment: int) -> None:
    self._sent_at[fragment] = time.monotonic()
    self._copies.endpoint.send(syncer_address(self._buddy), self._newest[fragment])

  def when_safe(self, fragment: int, version: int, do: Callable[[], None]) -> None:
    """Does it as soon as the buddy has this version; at once if it has, or is away."""
    waits = any(f == fragment for f, _, _ in self._held) or self._waits_for(fragment, version)
    if waits and not self._away:
      self._held.append((fragment, version, do))
    else:
      do()

  def _waits_for(self, fragment: int, version: int) -> bool:
    newest = self._newest.get(fragment)
    return fragment in self._sent_at and newest is not None and version >= newest.version

  def on(self, message: Replica | Replicated | Recover | Recovered) -> None:
    """What another shard says: the neighbour about its copies here, the buddy about ours there."""
    match message:
      case Replica() | Recover():
        self._copies.on(message)
      case Replicated():
        self._confirmed(message)

  def _confirmed(self, message: Replicated) -> None:
    if message.shard != self._buddy or message.incarnation < self._buddy_incarnation:
      return
    newest = self._newest.get(message.fragment)
    if newest is not None and message.version == newest.version:
      sent_at = self._sent_at.pop(message.fragment, None)
      if sent_at is not None:
        self._copy_seconds = smooth(self._copy_seconds, time.monotonic() - sent_at)
    again = message.incarnation > self._buddy_incarnation >= 0  # it restarted, and has nothing
    if self._away or again:
      self._recorder.record(events.Replicated(buddy=self._buddy))
      for fragment in self._newest:
        if fragment != message.fragment or fragment in self._sent_at:
          self._send(fragment)
    self._away, self._buddy_incarnation = False, message.incarnation
    self._release()

  def tick(self) -> float:
    """Gives up waiting for a buddy that is away; returns when to look again."""
    now = time.monotonic()
    patience = max(self._patience_seconds, PATIENCE_FACTOR * self._copy_seconds)
    if not self._held:
      return now + patience
    until = min(self._sent_at.values(), default=now) + patience
    if now >= until:
      self._away = True
      self._recorder.record(
        events.Unreplicated(buddy=self._buddy, fragments=tuple(sorted(self._sent_at)))
      )
      self._release()
    return until

  def _release(self) -> None:
    held, self._held = self._held, []
    for fragment, version, do in held:
      if self._waits_for(fragment, version) and not self._away:
        self._held.append((fragment, version, do))
      else:
        do()

  def missing(self) -> list[int]:
    """Fragments whose newest commit the buddy has not confirmed."""
    return sorted(self._sent_at)


def recover(
  endpoint: Endpoint,
  copies: Copies,
  shard: int,
  incarnation: int,
  plan: Plan,
  buddy: int,
  keep_on: Callable[[], bool],
) -> dict[int, Committed]:
  """Asks the buddy for this shard's fragments until it has answered or `keep_on()` says no.

  Returns what it had, by fragment. Meanwhile the neighbour's requests are served.
  """
  found: dict[int, Committed] = {}
  expected: set[int] | None = None  # the list overtakes the fragments, which are bulk
  ask_at, pause = 0.0, ASK_SECONDS
  while keep_on() and not (expected is not None and expected <= found.keys()):
    now = time.monotonic()
    if now >= ask_at:  # also if copies stay away: some were sent to the life before, and dropped
      ask_at, pause = now + pause, 2 * pause
      endpoint.send(syncer_address(buddy), Recover(shard, incarnation))
    arrived = endpoint.receive(ASK_SECONDS)
    message = arrived[1] if arrived else None
    match message:
      case Replica(owner=owner) if owner == shard and message.shard == buddy:
        committed = unpack(message, plan)
        if committed is not None:
          found[message.fragment] = committed
      case Recovered(shard=sender, asked_by=asked_by) if (sender, asked_by) == (buddy, incarnation):
        expected = set(message.fragments)
      case Replica() | Recover():
        copies.on(message)
  return found


def pack(committed: Committed, shard: int, incarnation: int) -> Replica:
  """A commit as a message; its payload is a copy, since the next commit changes the momentum."""
  state = committed.state
  parts = [committed.value]
  lossy = committed.published_value is not committed.value
  if lossy:
    parts.append(committed.published_value)
  if committed.momentum is not None:
    parts.append(committed.momentum)
  return Replica(
    shard=shard,
    incarnation=incarnation,
    owner=shard,
    fragment=state.index,
    version=state.version,
    merged_tokens=state.merged_tokens,
    last_round=state.last_round,
    global_step=state.global_step,
    momentum_round=committed.momentum_round,
    participants=state.participants,
    merged_rounds=flat(state.merged_rounds),
    merged_global_steps=flat(state.merged_global_steps),
    snapshot=state.snapshot,
    has_published_value=lossy,
    has_momentum=committed.momentum is not None,
    payload=np.concatenate(parts).view(np.uint8),
  )


def unpack(replica: Replica, plan: Plan) -> Committed | None:
  """The commit in a message, bit by bit as it was; None if it cannot be one of this plan."""
  odd = len(replica.merged_rounds) % 2 or len(replica.merged_global_steps) % 2
  if not 0 <= replica.fragment < len(plan.fragments) or odd:
    return None
  size = plan.fragments[replica.fragment].size
  count = 1 + replica.has_published_value + replica.has_momentum
  data = np.frombuffer(replica.payload, np.uint8)
  if data.nbytes != 4 * size * count:
    return None
  parts = [part.copy() for part in data.view(np.float32).reshape(count, size)]
  state = FragmentState(
    replica.fragment,
    version=replica.version,
    merged_tokens=replica.merged_tokens,
    merged_rounds=dict(pairs(replica.merged_rounds)),
    merged_global_steps=dict(pairs(replica.merged_global_steps)),
    last_round=replica.last_round,
    global_step=replica.global_step,
    participants=replica.participants,
    snapshot=replica.snapshot,
  )
  published = parts[1] if replica.has_published_value else parts[0]
  momentum = parts[-1] if replica.has_momentum else None
  return Committed(state, parts[0], published, momentum, replica.momentum_round)
