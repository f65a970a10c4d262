"""A config's run in virtual time: its islands' paces, its links, its fault plan, its events.

What is left out: values and losses; the evaluator; copies between shards (a shard that was killed
finds what it had committed, as in the threads engine); start-up and compilation, which take no
time. What a shard and a learner's host do to vectors takes what `simulation/planner.py` says of
vectors and memory speed.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from ddiloco.checks import not_negative, positive, require
from ddiloco.config import Config
from ddiloco.observe.goodput import Goodput, Ledger
from ddiloco.protocol import events
from ddiloco.protocol.events import Event, stamped
from ddiloco.protocol.messages import Message
from ddiloco.protocol.supervisor import GONE, LEFT, UP
from ddiloco.simulation import bandwidth
from ddiloco.simulation.actor import Actor, Role
from ddiloco.simulation.bandwidth import F32_BYTES
from ddiloco.simulation.disturbances import HEADER_BYTES
from ddiloco.simulation.planner import CORE_GBYTES
from ddiloco.simulation.world import Pace, World

# --- The links of a virtual run: how long a message takes, and what every role has moved
# Every island has one link, full duplex; what it carries goes one after the other. Shard s stands
# beside island s mod M and shares its link, or at a place of its own; what stays at one place does
# not cross a link. Control has a connection of its own and never queues behind fragments; it takes
# the latency only. A payload leaves when those that were sent before it have left, and arrives when
# those that were sent there before it have arrived.


@dataclasses.dataclass(frozen=True)
class LinkRate:
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

  def __init__(self, islands: Sequence[LinkRate], num_planned: int, shards: LinkRate | None = None):
    self.sent_bytes: dict[Role, int] = collections.defaultdict(int)
    self.received_bytes: dict[Role, int] = collections.defaultdict(int)
    self._islands, self._planned, self._shards = islands, num_planned, shards
    self._leaving_until: dict[Role, float] = collections.defaultdict(float)  # by place
    self._entering_until: dict[Role, float] = collections.defaultdict(float)
    self._on_the_way: dict[tuple[Role, Role], tuple[float, int]] = {}  # until when, and the last

  def place(self, role: Role) -> Role:
    """Where a role stands: the island's learner, or the shard itself if it stands apart."""
    if role[0] == "learner" or self._shards is not None:
      return role
    return "learner", role[1] % self._planned

  def arrival(self, now: float, sender: Role, to: Role, size: int) -> float:
    """When a message of so many bytes that is sent now arrives."""
    self.sent_bytes[sender] += size
    self.received_bytes[to] += size
    payload_bytes = size - HEADER_BYTES
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
    self._on_the_way[sender, to] = arrived, payload_bytes
    return arrived

  def unsent(self, now: float, sender: Role, to: Role) -> int:
    """As TCP has it: what has not entered the far end's link waits at the near end."""
    until, size = self._on_the_way.get((sender, to), (now, 0))
    return size if until > now else 0

  def _link(self, place: Role) -> LinkRate:
    if place[0] == "learner":
      return self._islands[place[1]]
    assert self._shards is not None
    return self._shards


@dataclasses.dataclass(frozen=True)
class Speeds:
  """What a config does not say: how fast things are."""

  sizes: tuple[int, ...]  # values of every fragment
  step_seconds: float = 1.0  # of islands without islands.min_step_seconds
  jitter: float = 0.1  # a step lasts up to this share longer
  gbps: tuple[float, ...] = (0.0,)  # of every island's link, one for all or one each; 0: no limit
  latency_seconds: tuple[float, ...] = (0.001,)  # one way; one for all or one each
  shard_gbps: float = 0.0  # of shards that stand apart; 0: they stand beside islands
  copy_seconds: float = 0.004  # a copy-out or a new version between devices and host
  merge_gbytes: float = CORE_GBYTES  # GB/s of f32 that a shard merges
  host_gbytes: float = CORE_GBYTES  # GB/s of f32 that a learner's host touches beside the step
  seed: int = 0

  def __post_init__(self):
    positive("simulate", self, "step_seconds", "merge_gbytes", "host_gbytes")
    not_negative("simulate", self, "jitter", "shard_gbps", "copy_seconds", "seed")


class VirtualRun(World):
  """One run of `config`.

  Args:
    config: the run's; `run.total_tokens` ends it.
    setting: how fast everything is.
    emit: takes every event, in order of time.
  """

  def __init__(self, config: Config, setting: Speeds, emit: Callable[[Event], None]):
    require(
      config.sync.num_shards > 0,
      "sync.num_shards",
      config.sync.num_shards,
      "without shards nobody exchanges anything, so there is no protocol to simulate",
      "use 1 or more",
    )
    count = config.num_islands()
    gbps = _each(setting.gbps, count, "gbps")
    latency = _each(setting.latency_seconds, count, "latency_ms")
    shards = LinkRate(setting.shard_gbps) if setting.shard_gbps else None
    islands = [LinkRate(rate, late) for rate, late in zip(gbps, latency)]
    self.links = Links(islands, config.islands.num_learners, shards)
    paces = [
      config.islands.island(m).min_step_seconds or setting.step_seconds for m in range(count)
    ]
    copy_seconds = setting.copy_seconds
    pace = Pace(tuple(paces), setting.jitter, cut_seconds=copy_seconds, stage_seconds=copy_seconds)
    self._setting, self._emit = setting, emit
    self._say(
      events.RunStarted(
        name="virtual",
        num_learners=config.islands.num_learners,
        num_shards=config.sync.num_shards,
        num_fragments=config.sync.num_fragments,
        total_tokens=config.run.total_tokens,
      ),
      0.0,
    )
    super().__init__(config, pace, setting.seed, setting.sizes, config.chaos.of_roles())

  def finish(self, most_seconds: float = math.inf) -> str:
    """Runs to the end of the token budget, or for so long; returns the reason why it ended."""
    self.run(most_seconds, self._is_over)
    reason, struck = "finished" if self._is_over() else "stopped", self.disturbances
    if struck.hopeless or (reason == "finished" and struck.all_are("learner-", GONE)):
      reason = "failed"
    for actor in self.actors.values():
      actor.die()
    self._say(events.RunFinished(reason=reason), self.now)
    return reason

  def _is_over(self) -> bool:
    struck = self.disturbances
    return struck.hopeless or (not self.working and struck.all_are("", UP, LEFT, GONE))

  def tell(self, actor: Actor | None, event: Event) -> None:
    if actor is None:
      self._say(event, self.now)
    else:
      self._emit(event)

  def _say(self, event: Event, time: float) -> None:
    self._emit(stamped(event, time, "engine", 0))

  # --- what takes time ----------------------------------------------------------------------------

  def arrivals(self, sender: Role, to: Role, message: Message, size: int) -> Sequence[float]:
    return (self.links.arrival(self.now, sender, to, size),)

  def unsent(self, sender: Role, to: Role) -> int:
    return self.links.unsent(self.now, sender, to)

  def host_seconds(self, fragment: int, vectors: int) -> float:
    return self._touched(fragment, vectors, self._setting.host_gbytes)

  def take_in_seconds(self, fragment: int) -> float:
    return self._touched(fragment, 1, self._setting.merge_gbytes)

  def merge_seconds(self, fragment: int, pushes: int) -> float:
    vectors = bandwidth.commit_vectors(self.sync, self.config.outer.momentum > 0, pushes)
    return self._touched(fragment, vectors, self._setting.merge_gbytes)

  def _touched(self, fragment: int, vectors: int, gbytes: float) -> float:
    """How long it takes to touch so many vectors at so many GB/s."""
    return vectors * F32_BYTES * self.plan.fragments[fragment].size / (gbytes * 1e9)


def _each(values: Sequence[float], count: int, name: str) -> Sequence[float]:
  require(
    len(values) in (1, count),
    name,
    values,
    f"has {len(values)} values for {count} learners (those that join included)",
    "give one for all, or one for each",
  )
  return values * count if len(values) == 1 else values


# --- What a virtual run amounts to, from its events alone, with bounded memory

KEPT = (
  *(events.Step, events.Commit, events.Fault, events.Exit, events.Restart, events.Crash),
  *(events.Owns, events.Recalled, events.RunFinished),
)
_NUMBER = re.compile(r"[0-9][0-9.]*")


class Account:
  """Takes a run's events one by one.

  `kept` are those that recoveries, stalls and lost rounds are found from.
  """

  def __init__(self) -> None:
    self.kept: list[Event] = []
    self.steps = self.commits = 0
    self.blocked_seconds = 0.0
    self.reasons: collections.Counter[str] = collections.Counter()  # why rounds committed
    self.missing: collections.Counter[str] = collections.Counter()  # why learners had no part
    self._ledger = Ledger()
    self._copied_out_at: dict[tuple[str, int], tuple[int, float]] = {}  # by learner and fragment
    self.sync_seconds: list[float] = []  # from a copy-out to the version that has it
    self._traffic: dict[str, dict[int, tuple[int, int]]] = collections.defaultdict(dict)

  def take(self, event: Event) -> None:
    """Enters one event; they come in order of time."""
    self._ledger.take(event)
    if isinstance(event, KEPT):
      self.kept.append(event)
    match event:
      case events.Step():
        self.steps += 1
        self.blocked_seconds += event.blocked_seconds
      case events.Commit():
        self.commits += 1
        self.reasons[_NUMBER.sub("N", event.reason.partition(" without ")[0])] += 1
        self.missing.update(_NUMBER.sub("N", why) for why in event.missing.values())
      case events.CopyOut():
        self._copied_out_at[event.role, event.fragment] = event.round, event.time
      case events.Apply() if event.included:
        round_id, copied_out_at = self._copied_out_at.get((event.role, event.fragment), (None, 0.0))
        if round_id == event.round:
          self.sync_seconds.append(event.time - copied_out_at)
      case events.Traffic():
        self._traffic[event.role][event.incarnation] = event.sent_bytes, event.received_bytes

  @property
  def traffic(self) -> dict[str, tuple[int, int]]:
    """By role, the bytes that all its lives have sent and received."""
    return {
      role: (sum(sent for sent, _ in lives.values()), sum(taken for _, taken in lives.values()))
      for role, lives in self._traffic.items()
    }

  def goodput(self) -> Goodput:
    """The ledger's account."""
    return self._ledger.report()

  def summary(self) -> dict[str, Any]:
    """All numbers but those of faults, as JSON has them."""
    found = self.goodput()
    part = [g.participation for g in found.learners.values() if math.isfinite(g.participation)]
    live = [g.liveness for g in found.learners.values() if math.isfinite(g.liveness)]
    traffic = self.traffic
    sent = [pair[0] for role, pair in traffic.items() if role.startswith("learner")]
    taken = [pair[1] for role, pair in traffic.items() if role.startswith("learner")]
    return {
      "goodput": round(found.goodput, 5),
      "uptime": round(found.uptime, 5),
      "causes": {cause: round(share, 5) for cause, share in found.causes.items() if share},
      "participation": round(statistics.mean(part), 5) if part else None,
      "lowest_participation": round(min(part), 5) if part else None,
      "liveness": round(statistics.mean(live), 5) if live else None,
      "steps": self.steps,
      "commits": self.commits,
      "blocked_seconds": round(self.blocked_seconds, 3),
      "seconds_per_sync": _middle(self.sync_seconds),
      "learner_sent_bytes": round(statistics.mean(sent)) if sent else 0,
      "learner_received_bytes": round(statistics.mean(taken)) if taken else 0,
      "busiest_link_bytes": max(map(max, traffic.values()), default=0),
      "committed_because": dict(self.reasons.most_common()),
      "had_no_part_because": dict(self.missing.most_common()),
    }


def _middle(values: list[float]) -> dict[str, float] | None:
  if not values:
    return None
  ordered = sorted(values)
  tenths = ordered[len(ordered) // 10], ordered[len(ordered) * 9 // 10]
  return {
    "median": round(statistics.median(ordered), 4),
    "tenth": round(tenths[0], 4),
    "nine_tenths": round(tenths[1], 4),
  }
