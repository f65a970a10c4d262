"""The links of a virtual run: when a message arrives, and what every role has moved.

Every island has one link, full duplex. Shard s stands beside island s mod M and shares its link, or
at a place of its own; what stays at one place does not cross a link. Fragments between two roles go
one after the other, as over a connection; connections share the links they need as TCP's do over a
long time: none could have more unless one with less had to give (max-min fairness). The last byte
arrives a latency after it has left. Control has connections of its own and never queues behind
fragments; it takes the latency only.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

from ddiloco.checks import not_negative
from ddiloco.simulation import bandwidth
from ddiloco.simulation.actor import Role
from ddiloco.simulation.disturbances import HEADER_BYTES
from ddiloco.simulation.virtual_time import VirtualTime

LEAST_SECONDS = 1e-6  # what takes less is over


@dataclasses.dataclass(frozen=True)
class LinkRate:
  """One place's, in each direction."""

  gbps: float = 0.0  # Gbit/s; 0: no limit
  latency_seconds: float = 0.001  # one way, from there to any other place

  def __post_init__(self):
    not_negative("links", self, "gbps", "latency_seconds")

  @property
  def bytes_per_second(self) -> float:
    """Of payloads; infinite without a limit."""
    return bandwidth.payload_bytes_per_second(self.gbps) if self.gbps else math.inf


@dataclasses.dataclass(eq=False)
class Transfer:
  """A fragment on its way."""

  left_bytes: float
  latency_seconds: float
  arrived: Callable[[], None]
  link_ends: tuple[tuple[Role, bool], tuple[Role, bool]]  # place, whether it comes in there
  rate: float = 0.0  # bytes a second, at present


class Links:
  """All links of a run.

  Args:
    time: where they are.
    islands: one for every learner, those that join later included.
    num_planned: learners that are there from the start: shards stand beside these.
    shards: of shards that stand apart; None: they stand beside islands.
  """

  def __init__(
    self,
    time: VirtualTime,
    islands: Sequence[LinkRate],
    num_planned: int,
    shards: LinkRate | None = None,
  ):
    self.sent_bytes: dict[Role, int] = collections.defaultdict(int)
    self.received_bytes: dict[Role, int] = collections.defaultdict(int)
    self._time, self._islands, self._planned, self._shards = time, islands, num_planned, shards
    self._waiting: dict[tuple[Role, Role], collections.deque[Transfer]] = {}  # the first one moves
    self._shared_at = 0.0  # when rates were found
    self._planned_call = 0  # the newest call of `_share`: others are of the past

  def place(self, role: Role) -> Role:
    """Where a role stands: the island's learner, or the shard itself if it stands apart."""
    if role[0] == "learner" or self._shards is not None:
      return role
    return "learner", role[1] % self._planned

  def carry(self, sender: Role, to: Role, size: int, arrived: Callable[[], None]) -> None:
    """Calls `arrived` when a message of so many bytes that is sent now has arrived."""
    self.sent_bytes[sender] += size
    self.received_bytes[to] += size
    now, here, there = self._time.now, self.place(sender), self.place(to)
    if here == there:
      return self._time.at(now, arrived)
    island = sender if sender[0] == "learner" else to
    latency = self._link(self.place(island)).latency_seconds
    if size <= HEADER_BYTES:
      return self._time.at(now + latency, arrived)
    transfer = Transfer(size - HEADER_BYTES, latency, arrived, ((here, False), (there, True)))
    queue = self._waiting.setdefault((sender, to), collections.deque())
    queue.append(transfer)
    if len(queue) == 1:
      self._plan(now)

  def unsent(self, sender: Role, to: Role) -> int:
    """Bytes of payloads that wait at the near end or move."""
    self._advance()
    return math.ceil(sum(each.left_bytes for each in self._waiting.get((sender, to), ())))

  def _link(self, place: Role) -> LinkRate:
    if place[0] == "learner":
      return self._islands[place[1]]
    assert self._shards is not None
    return self._shards

  def _plan(self, at: float) -> None:
    self._planned_call += 1
    self._time.at(at, self._share, self._planned_call)

  def _advance(self) -> None:
    now = self._time.now
    for queue in self._waiting.values():
      first = queue[0]
      first.left_bytes = max(0.0, first.left_bytes - first.rate * (now - self._shared_at))
    self._shared_at = now

  def _share(self, planned: int) -> None:
    """Something has begun or ended: who has moved so far, who moves how fast from now on."""
    if planned != self._planned_call:
      return
    self._advance()
    now = self._time.now
    for pair, queue in list(self._waiting.items()):
      while queue and queue[0].left_bytes <= LEAST_SECONDS * queue[0].rate:
        over = queue.popleft()
        self._time.at(now + over.latency_seconds, over.arrived)
      if not queue:
        del self._waiting[pair]
    moving = [queue[0] for queue in self._waiting.values()]
    self._find_rates(moving)
    if moving:
      self._plan(now + min(each.left_bytes / each.rate for each in moving))

  def _find_rates(self, moving: Iterable[Transfer]) -> None:
    """The narrowest link's transfers have an even share of it; then the same with what is left."""
    over: dict[tuple[Role, bool], dict[Transfer, None]] = collections.defaultdict(dict)
    for each in moving:
      each.rate = math.inf
      for end in each.link_ends:
        over[end][each] = None
    left = {end: self._link(end[0]).bytes_per_second for end in over}
    while over:
      narrowest = min(over, key=lambda end: left[end] / len(over[end]))
      rate = left[narrowest] / len(over[narrowest])
      if math.isinf(rate):
        return
      for each in list(over[narrowest]):
        each.rate = rate
        for end in each.link_ends:
          left[end] -= rate
          del over[end][each]
          if not over[end]:
            del over[end]
