"""A config's run in virtual time: its islands' paces, its links, its fault plan, its events.

Left out are: values and losses; the evaluator; the recovery of a killed shard from its buddy (the
shard finds its commits, as in the threads engine); start-up and compilation, which take no time.
Work on vectors, by a shard or a learner's host, takes the time that follows from the vectors and
memory speed of `simulation/planner.py`.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from ddiloco.checkpoint.buddy import Replication, buddy_of
from ddiloco.checks import not_negative, option, positive, require, typed
from ddiloco.config import Config
from ddiloco.observe.goodput import Goodput, Ledger
from ddiloco.observe.history import TrafficTotals
from ddiloco.observe.tracks import Aftermath
from ddiloco.protocol import events
from ddiloco.protocol.events import Event, stamped
from ddiloco.protocol.messages import Message
from ddiloco.protocol.supervisor import GONE, LEFT, UP
from ddiloco.simulation import bandwidth
from ddiloco.simulation.bandwidth import F32_BYTES
from ddiloco.simulation.planner import ABOUT_HOST_GBYTES, ABOUT_SHARD_GBPS, CORE_GBYTES
from ddiloco.simulation.stand_ins import SizedCopies, SizedReplication
from ddiloco.simulation.virtual_time import LinkRate, Links, Role
from ddiloco.simulation.world import Actor, Pace, World


@dataclasses.dataclass(frozen=True)
class Speeds:
  """How fast everything is, which a config does not say."""

  sizes: tuple[int, ...]  # values of every fragment
  step_seconds: float = option(1.0, "Of islands without islands.min_step_seconds.")
  jitter: float = option(0.1, "A step lasts up to this share longer.")
  gbps: tuple[float, ...] = (0.0,)  # of every island's link, one for all or one each; 0: no limit
  latency_seconds: tuple[float, ...] = (0.001,)  # one way; one for all or one each
  shard_gbps: float = option(0.0, ABOUT_SHARD_GBPS)
  copy_seconds: float = 0.004  # a copy-out or a new version between devices and host
  merge_gbytes: float = option(
    CORE_GBYTES, "GB/s of f32 that a shard merges (`ddiloco plan --measure`)."
  )
  host_gbytes: float = option(CORE_GBYTES, ABOUT_HOST_GBYTES)
  late_seconds: float = 0.0  # a life's first step takes up to this longer: learners spread
  seed: int = option(0, "Of step times.")

  def __post_init__(self):
    typed("simulate", self)
    positive("simulate", self, "step_seconds", "merge_gbytes", "host_gbytes")
    not_negative("simulate", self, "jitter", "shard_gbps", "copy_seconds", "late_seconds", "seed")


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
      "without shards nothing is exchanged, so there is no protocol to simulate",
      "use 1 or more",
    )
    count = config.num_islands()
    gbps = _each(setting.gbps, count, "gbps")
    latency = _each(setting.latency_seconds, count, "latency_ms")
    shards = LinkRate(setting.shard_gbps, max(latency)) if setting.shard_gbps else None
    islands = [LinkRate(rate, late) for rate, late in zip(gbps, latency)]
    self.links = Links(self, islands, config.islands.num_learners, shards)
    paces = [
      config.islands.island(m).min_step_seconds or setting.step_seconds for m in range(count)
    ]
    copy_seconds = setting.copy_seconds
    pace = Pace(
      tuple(paces),
      setting.jitter,
      copy_out_seconds=copy_seconds,
      stage_seconds=copy_seconds,
      late_seconds=setting.late_seconds,
    )
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
    """Runs to the end of the token budget, or for `most_seconds`; returns why the run ended."""
    self.run(most_seconds, self._is_over)
    reason, struck = "finished" if self._is_over() else "stopped", self.planned_faults
    if struck.hopeless or (reason == "finished" and struck.all_are("learner-", GONE)):
      reason = "failed"
    for actor in self.actors.values():
      actor.die()
    self._say(events.RunFinished(reason=reason), self.now)
    return reason

  def _is_over(self) -> bool:
    struck = self.planned_faults
    return struck.hopeless or (not self.working and struck.all_are("", UP, LEFT, GONE))

  def tell(self, actor: Actor | None, event: Event) -> None:
    if actor is None:
      self._say(event, self.now)
    else:
      self._emit(event)

  def _say(self, event: Event, time: float) -> None:
    self._emit(stamped(event, time, "engine", 0))

  # --- what takes time ----------------------------------------------------------------------------

  def travel(self, sender: Role, to: Role, message: Message, size: int) -> None:
    arrived = functools.partial(self.enter, sender, to, message, size)
    self.links.carry(sender, to, size, arrived)

  def unsent(self, sender: Role, to: Role) -> int:
    return self.links.unsent(sender, to)

  def replication(self, actor: Actor) -> Replication | None:
    count = self.sync.num_shards
    if count == 1:
      return None
    copies = SizedCopies(actor.number, actor.incarnation, actor, self.plan, self.config)
    patience_seconds = self.config.network.patience_seconds
    buddy = buddy_of(actor.number, count)
    return SizedReplication(copies, buddy, patience_seconds, actor, actor)

  def host_seconds(self, fragment: int, vectors: int) -> float:
    return self._touched(fragment, vectors, self._setting.host_gbytes)

  def take_in_seconds(self, fragment: int) -> float:
    return self._touched(fragment, 1, self._setting.merge_gbytes)

  def merge_seconds(self, fragment: int, pushes: int) -> float:
    vectors = bandwidth.commit_vectors(self.sync, self.config.outer.momentum > 0, pushes)
    return self._touched(fragment, vectors, self._setting.merge_gbytes)

  def _touched(self, fragment: int, vectors: int, gbytes: float) -> float:
    """Seconds to touch so many vectors at so many GB/s."""
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


# --- The numbers of a virtual run, from its events alone

_NUMBER = re.compile(r"[0-9][0-9.]*")


class Account:
  """Takes a run's events one by one."""

  def __init__(self) -> None:
    self.aftermath = Aftermath()
    self.steps = self.commits = 0
    self.blocked_seconds = 0.0
    self.reasons: collections.Counter[str] = collections.Counter()  # why rounds committed
    self.missing: collections.Counter[str] = collections.Counter()  # why learners had no part
    self._ledger = Ledger()
    self._copied_out_at: dict[tuple[str, int], tuple[int, float]] = {}  # by learner and fragment
    self.sync_seconds: list[float] = []  # from a copy-out to the apply of the version with it
    self.traffic = TrafficTotals()

  def take(self, event: Event) -> None:
    """Adds one event; events come in order of time."""
    self._ledger.take(event)
    self.aftermath.take(event)
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
        self.traffic.add(event)

  def goodput(self) -> Goodput:
    """The ledger's account."""
    return self._ledger.report()

  def summary(self) -> dict[str, Any]:
    """All numbers except those of faults, as JSON has them."""
    found = self.goodput()
    part = [g.participation for g in found.learners.values() if math.isfinite(g.participation)]
    live = [g.liveness for g in found.learners.values() if math.isfinite(g.liveness)]
    traffic = self.traffic.by_role
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
    "mean": round(statistics.mean(ordered), 4),
    "median": round(statistics.median(ordered), 4),
    "tenth": round(tenths[0], 4),
    "nine_tenths": round(tenths[1], 4),
  }
