"""The links of a virtual run: how long a message takes, and what every role has moved. PURE.

Every island has one link, full duplex; what it carries goes one after the other. Shard s stands
beside island s mod M and shares its link, or at a place of its own; what stays at one place does
not cross a link. Control has a connection of its own and never queues behind fragments; it takes
the latency only. A payload leaves when those that were sent before it have left, and arrives when
those that were sent there before it have arrived.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from ddiloco.checked import not_negative

HEADER_BYTES = 64  # of any message, about
Role = tuple[str, int]


@dataclasses.dataclass(frozen=True)
class Link:
  """One place's, in each direction."""

  gbps: float = 0.0  # Gbit/s; 0: no limit
  latency_seconds: float = 0.001  # one way, from an island to any other place

  def __post_init__(self):
    not_negative("links", self, "gbps", "latency_seconds")

  def seconds(self, size_bytes: int) -> float:
    """How long it is busy with so many bytes."""
    return 8 * size_bytes / (self.gbps * 1e9) if self.gbps else 0.0


class Links:
  """All links of a run.

  Args:
    islands: one for every learner, those that join later included.
    num_planned: learners that are there from the start: shards stand beside these.
    shards: of shards that stand apart; None: they stand beside islands.
  """

  def __init__(self, islands: Sequence[Link], num_planned: int, shards: Link | None = None):
    self.sent_bytes: dict[Role, int] = collections.defaultdict(int)
    self.received_bytes: dict[Role, int] = collections.defaultdict(int)
    self._islands, self._planned, self._shards = islands, num_planned, shards
    self._leaving_until: dict[Role, float] = collections.defaultdict(float)  # by place
    self._entering_until: dict[Role, float] = collections.defaultdict(float)

  def place(self, role: Role) -> Role:
    """Where a role stands: the island's learner, or the shard itself if it stands apart."""
    if role[0] == "learner" or self._shards is not None:
      return role
    return "learner", role[1] % self._planned

  def arrival(self, now: float, sender: Role, to: Role, payload_bytes: int) -> float:
    """When a message that is sent now arrives."""
    self.sent_bytes[sender] += payload_bytes + HEADER_BYTES
    self.received_bytes[to] += payload_bytes + HEADER_BYTES
    here, there = self.place(sender), self.place(to)
    if here == there:
      return now
    island = sender if sender[0] == "learner" else to
    latency = self._islands[island[1]].latency_seconds
    if not payload_bytes:
      return now + latency
    leaves = max(now, self._leaving_until[here])
    left = self._leaving_until[here] = leaves + self._link(here).seconds(payload_bytes)
    enters = max(leaves + latency, self._entering_until[there])
    arrived = max(left + latency, enters + self._link(there).seconds(payload_bytes))
    self._entering_until[there] = arrived
    return arrived

  def _link(self, place: Role) -> Link:
    if place[0] == "learner":
      return self._islands[place[1]]
    assert self._shards is not None
    return self._shards
