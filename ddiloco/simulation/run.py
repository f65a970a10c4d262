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

from ddiloco.checkpoint.buddy import Replication
from ddiloco.checks import not_negative, option, positive, require, typed
from ddiloco.config import Config
from ddiloco.observe.history import Thinned
from ddiloco.observe.run_state import RunState
from ddiloco.observe.style import rounded
from ddiloco.observe.tracks import Aftermath
from ddiloco.protocol import events
from ddiloco.protocol.events import Event, stamped
from ddiloco.protocol.messages import Message
from ddiloco.simulation import bandwidth
from ddiloco.simulation.stand_ins import SizedCopies, SizedReplication, plan_of
from ddiloco.simulation.virtual_time import LinkRate, Links, Role
from ddiloco.simulation.world import Actor, Pace, World


@dataclasses.dataclass(frozen=True)
class Speeds:
  """How fast everything is, which a config does not say."""

  sizes: tuple[int, ...]  # values of every fragment
  step_seconds: float = option(1.0, "Time of a step, of islands without islands.min_step_seconds.")
  jitter: float = option(0.1, "A step lasts up to this share longer.")
  gbps: tuple[float, ...] = (0.0,)  # of every island's link, one for all or one each; 0: no limit
  latency_seconds: tuple[float, ...] = (0.001,)  # one way; one for all or one each
  shard_gbps: float = option(0.0, bandwidth.ABOUT_SHARD_GBPS)
  copy_seconds: float = 0.004  # a copy-out or a new version between devices and host
  merge_gbytes: float = option(
    bandwidth.CORE_GBYTES, "GB/s of f32 that a shard merges (`ddiloco plan --measure`)."
  )
  host_gbytes: float = option(bandwidth.CORE_GBYTES, bandwidth.ABOUT_HOST_GBYTES)
  late_seconds: float = 0.0  # a life's first step takes up to this longer: learners spread
  seed: int = option(0, "Seed of the step times.")

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
    bandwidth.require_shards(config.sync)
    count = config.num_islands()
    gbps = _each(setting.gbps, count, "gbps")
    latency = _each(setting.latency_seconds, count, "latency_ms")
    shards = LinkRate(setting.shard_gbps, max(latency)) if setting.shard_gbps else None
    islands = [LinkRate(rate, late) for rate, late in zip(gbps, latency)]
    self.links = Links(self, islands, config.islands.num_learners, shards)
    own_seconds = [config.islands.island(m).min_step_seconds for m in range(count)]
    pace = Pace(
      tuple(seconds or setting.step_seconds for seconds in own_seconds),
      setting.jitter,
      copy_out_seconds=setting.copy_seconds,
      stage_seconds=setting.copy_seconds,
      merge_seconds=0.0,
      late_seconds=setting.late_seconds,
      host_gbytes=setting.host_gbytes,
      merge_gbytes=setting.merge_gbytes,
    )
    self._emit = emit
    started = events.RunStarted(
      name="virtual",
      num_learners=config.islands.num_learners,
      num_shards=config.sync.num_shards,
      num_fragments=config.sync.num_fragments,
      total_tokens=config.run.total_tokens,
    )
    emit(stamped(started, 0.0, "engine", 0))
    super().__init__(config, pace, setting.seed, plan_of(setting.sizes))

  def finish(self, most_seconds: float = math.inf) -> str:
    """Runs to the end of the token budget, or for `most_seconds`; returns why the run ended."""
    self.run(most_seconds, self._is_over)
    reason = "finished" if self._merged() else "failed" if self._is_over() else "stopped"
    for actor in self.actors.values():
      actor.die()
    self.say(events.RunFinished(reason=reason))
    return reason

  def _merged(self) -> bool:
    return min(f.merged_tokens for f in self.store.values()) >= self.config.run.total_tokens

  def _is_over(self) -> bool:
    struck, there, quorum = self.planned_faults, len(self.working), self.sync.min_quorum
    if struck.hopeless:
      return True
    if there >= quorum:
      return False
    if there:  # at the end they take the last versions in
      return there + struck.down("learner-") < quorum and not self._merged()
    return self._merged() or not struck.down()

  def tell(self, actor: Actor | None, event: Event) -> None:
    self._emit(event)

  def travel(self, sender: Role, to: Role, message: Message, size: int) -> None:
    arrived = functools.partial(self.enter, sender, to, message, size)
    self.links.carry(sender, to, size, arrived)

  def unsent(self, sender: Role, to: Role) -> int:
    return self.links.unsent(sender, to)

  def replication(self, actor: Actor) -> Replication | None:
    if self.sync.num_shards == 1:
      return None
    copies = SizedCopies(actor.number, actor.incarnation, actor, self.plan, self.config)
    return SizedReplication(copies, self.config.network.patience_seconds, actor, actor)


def _each(values: Sequence[float], count: int, name: str) -> Sequence[float]:
  rule = f"has {len(values)} values for {count} learners (those that join included)"
  require(len(values) in (1, count), name, values, rule, "give one for all, or one for each")
  return values * count if len(values) == 1 else values


# --- The numbers of a virtual run, from its events alone

_NUMBER = re.compile(r"[0-9][0-9.]*")
MOST_SYNCS = 100_000  # whose times are kept, evenly over the run


class Account:
  """Takes a run's events one by one."""

  def __init__(self) -> None:
    self.aftermath, self.run = Aftermath(), RunState()
    self.reasons: collections.Counter[str] = collections.Counter()  # why rounds committed
    self.missing: collections.Counter[str] = collections.Counter()  # why learners had no part
    self._copied_out_at: dict[tuple[str, int], tuple[int, float]] = {}  # by learner and fragment
    self.sync_seconds = Thinned(MOST_SYNCS)  # from a copy-out to the apply of the version with it

  @property
  def steps(self) -> int:
    """Inner steps of all learners."""
    return self.run.kinds[events.Step]

  def take(self, event: Event) -> None:
    """Adds one event; events come in order of time."""
    self.run.add(event)
    self.aftermath.take(event)
    match event:
      case events.Commit():
        self.reasons[_NUMBER.sub("N", event.reason.partition(" without ")[0])] += 1
        self.missing.update(_NUMBER.sub("N", why) for why in event.missing.values())
      case events.CopyOut():
        self._copied_out_at[event.role, event.fragment] = event.round, event.time
      case events.Apply() if event.included:
        round_id, copied_out_at = self._copied_out_at.get((event.role, event.fragment), (None, 0.0))
        if round_id == event.round:
          self.sync_seconds.add(event.time - copied_out_at)

  def summary(self) -> dict[str, Any]:
    """All numbers except those of faults, as JSON has them."""
    run, found = self.run, self.run.ledger.report()
    part = [share for m in found.learners if (share := run.participation(m)) is not None]
    live = [g.liveness for g in found.learners.values() if math.isfinite(g.liveness)]
    traffic = run.traffic.by_role
    moved = [bytes for role, bytes in traffic.items() if role.startswith("learner")]
    sent, received = zip(*moved) if moved else ((), ())
    return {
      "goodput": rounded(found.goodput, 5),
      "uptime": rounded(found.uptime, 5),
      "causes": {cause: round(share, 5) for cause, share in found.causes.items() if share},
      "participation": _mean(part),
      "lowest_participation": round(min(part), 5) if part else None,
      "liveness": _mean(live),
      "steps": self.steps,
      "commits": run.commits,
      "blocked_seconds": round(run.blocked_seconds, 3),
      "seconds_per_sync": _middle(sorted(self.sync_seconds.items)),
      "bytes_sent_per_learner": _mean(sent),
      "bytes_received_per_learner": _mean(received),
      "committed_because": dict(self.reasons.most_common()),
      "had_no_part_because": dict(self.missing.most_common()),
    }


def _mean(values: Sequence[float]) -> float | None:
  return round(statistics.mean(values), 5) if values else None


def _middle(ordered: list[float]) -> dict[str, float] | None:
  if not ordered:
    return None
  count = len(ordered)
  found = {
    "mean": statistics.mean(ordered),
    "median": statistics.median(ordered),
    "tenth": ordered[count // 10],
    "nine_tenths": ordered[count * 9 // 10],
  }
  return {name: round(seconds, 4) for name, seconds in found.items()}
