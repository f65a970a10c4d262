"""A config's run in virtual time: its islands' paces, its links, its fault plan, its events.

What is left out: values and losses; the evaluator; copies between shards (a shard that was killed
finds what it had committed, as in the threads engine); start-up and compilation, which take no
time; a peer's moments for those that join. A commit keeps its shard busy for what
`resilience/planner.py` says of vectors and memory speed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from ddiloco.checked import not_negative, positive, require
from ddiloco.config import Config
from ddiloco.core import codec
from ddiloco.core.messages import Message, Publish, Push, Value
from ddiloco.resilience.flows import F32_BYTES
from ddiloco.simulation.actors import Part, Role
from ddiloco.simulation.events import Event, Events
from ddiloco.simulation.links import Link, Links
from ddiloco.simulation.world import Pace, World

CORE_GBYTES = 4.0  # what one core of a shard merges, as in `resilience/planner.py`


@dataclasses.dataclass(frozen=True)
class Setting:
  """What a config does not say: how fast things are."""

  sizes: tuple[int, ...]  # values of every fragment
  step_seconds: float = 1.0  # of islands without islands.pace_seconds
  jitter: float = 0.1  # a step lasts up to this share longer
  gbps: tuple[float, ...] = (0.0,)  # of every island's link, one for all or one each; 0: no limit
  latency_seconds: tuple[float, ...] = (0.001,)  # one way; one for all or one each
  shard_gbps: float = 0.0  # of shards that stand apart; 0: they stand beside islands
  copy_seconds: float = 0.004  # a cut or a new version between devices and host
  merge_gbytes: float = CORE_GBYTES  # GB/s of f32 that a shard merges
  seed: int = 0

  def __post_init__(self):
    positive("simulate", self, "step_seconds", "merge_gbytes")
    not_negative("simulate", self, "jitter", "shard_gbps", "copy_seconds", "seed")


class Run(World):
  """One run of `config`.

  Args:
    config: the run's; `run.total_tokens` ends it.
    setting: how fast everything is.
    emit: takes every event, in order of time.
  """

  def __init__(self, config: Config, setting: Setting, emit: Callable[[Event], None]):
    require(
      config.sync.num_shards > 0,
      "sync.num_shards",
      config.sync.num_shards,
      "without shards nobody exchanges anything, so there is no protocol to simulate",
      "use 1 or more",
    )
    count, self.config, self._setting = config.num_islands(), config, setting
    gbps = _each(setting.gbps, count, "gbps")
    latency = _each(setting.latency_seconds, count, "latency_ms")
    shards = Link(setting.shard_gbps) if setting.shard_gbps else None
    islands = [Link(rate, late) for rate, late in zip(gbps, latency)]
    self.links = Links(islands, config.islands.num_learners, shards)
    sync = config.sync
    self._push_bytes = [codec.payload_bytes(n, sync.push_codec) for n in setting.sizes]
    self._publish_bytes = [codec.payload_bytes(n, sync.publish_codec) for n in setting.sizes]
    paces = [config.islands.island(m).pace_seconds or setting.step_seconds for m in range(count)]
    pace = Pace(
      tuple(paces),
      setting.jitter,
      cut_seconds=setting.copy_seconds,
      stage_seconds=setting.copy_seconds,
      tokens=tuple(config.tokens_per_step(m) for m in range(count)),
    )
    self._planned_steps = config.planned_steps()
    self.now = 0.0
    planned_tokens = config.planned_tokens_per_step()
    self.events = Events(emit, lambda: self.now, planned_tokens, self._describe)
    self._say_started()
    target, planned = config.run.total_tokens, config.islands.num_learners
    super().__init__(sync, pace, setting.seed, target, self.events, planned)
    self.measure = lambda push: {"norm": push.steps * push.payload}
    struck = self.disturbances
    struck.restart_seconds = config.run.restart_seconds
    struck.max_restarts = config.run.max_restarts
    struck.drain_seconds = config.network.drain_seconds
    struck.plan(config.chaos.of_roles())
    self._traffic_seconds = max(1.0, sync.sync_period * max(paces))
    self.at(self._traffic_seconds, self._count_traffic)

  def finish(self, most_seconds: float = math.inf) -> str:
    """Runs to the end of the token budget, or for so long; returns the reason why it ended."""
    self.run(most_seconds, self._ended)
    reason = "finished" if self._ended() else "stopped"
    if self._hopeless() or (reason == "finished" and self._all_gone()):
      reason = "failed"
    self._tell_traffic()
    self.events.supervisor("run_finished", reason=reason)
    return reason

  def _ended(self) -> bool:
    return not (self.working or self.disturbances.returning) or self._hopeless()

  def _hopeless(self) -> bool:
    """Whether a shard, or every possible quorum, is gone for good: nothing would ever merge."""
    gone = self.disturbances.gone
    if not gone:
      return False
    left = self.config.islands.num_learners - sum(kind == "learner" for kind, _ in gone)
    return left < self.sync.min_quorum or any(kind == "syncer" for kind, _ in gone)

  def _all_gone(self) -> bool:
    return all(role in self.disturbances.gone for role in self.starts if role[0] == "learner")

  def save(self, snapshot: int, role: Role, part: Part) -> None:
    super().save(snapshot, role, part)
    if len(self.cuts) > self.config.checkpoint.keep:
      self.forget(self.config.checkpoint.keep)

  # --- the network --------------------------------------------------------------------------------

  def size(self, message: Message) -> int:
    match message:
      case Push():
        return self._push_bytes[message.fragment]
      case Publish() if message.base_version >= 0:
        return self._publish_bytes[message.fragment]
      case Publish() | Value():
        return F32_BYTES * self._setting.sizes[message.fragment]
    return 0

  def arrivals(self, sender: Role, to: Role, message: Message) -> Sequence[float]:
    return (self.links.arrival(self.now, sender, to, self.size(message)),)

  def merge_seconds(self, fragment: int, pushes: int) -> float:
    merged_bytes = (pushes + 4) * F32_BYTES * self._setting.sizes[fragment]
    return merged_bytes / (self._setting.merge_gbytes * 1e9)

  # --- events -------------------------------------------------------------------------------------

  def _describe(self, learner: int) -> dict[str, Any]:
    island = self.config.islands.island(learner)
    devices = island.devices or 1
    return {
      "devices": devices,
      "mesh": list(island.mesh_shape(devices)),
      "batch_size": island.batch_size,
      "learners": self.config.islands.num_learners,
      "planned_steps": self._planned_steps,
    }

  def _say_started(self) -> None:
    self.events.supervisor(
      "run_started",
      name="virtual",
      num_learners=self.config.islands.num_learners,
      num_shards=self.config.sync.num_shards,
      num_fragments=self.config.sync.num_fragments,
      total_tokens=self.config.run.total_tokens,
    )

  def _count_traffic(self) -> None:
    self._tell_traffic()
    self.at(self.now + self._traffic_seconds, self._count_traffic)

  def _tell_traffic(self) -> None:
    """Counters of a link outlive its role's lives."""
    for role in self.starts:
      sent, received = self.links.sent_bytes[role], self.links.received_bytes[role]
      self.events.say(role, 0, "traffic", sent_bytes=sent, received_bytes=received)


def _each(values: Sequence[float], count: int, name: str) -> Sequence[float]:
  require(
    len(values) in (1, count),
    name,
    values,
    f"has {len(values)} values for {count} learners (those that join included)",
    "give one for all, or one for each",
  )
  return values * count if len(values) == 1 else values
