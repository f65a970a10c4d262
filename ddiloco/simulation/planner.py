"""Whether a run fits its links and its shards' cores, from sizes, settings and link rates.

Pure arithmetic. Assumptions, besides those of `simulation.bandwidth`:

- All islands have equal steps, and none fails. The ends of their steps are spread evenly, at
  random; in lock-step they coincide.
- Rounds go as in `bandwidth.typical`. For the time of a sync (`SyncTime`) the commit waits for the
  last push, and the last push's part of the merge comes after all pushes.
- Publishes of a version, one for every learner and the evaluator, share the shard's link.
- A learner's host touches `PUSH_VECTORS` vectors to make a push and `STAGE_VECTORS` to take up a
  version, at `host_gbytes` GB/s of f32. A shard takes in a push in one pass over its values. A
  commit of M pushes touches each push and the fragment's state twice (`bandwidth.commit_vectors`).
  `merge_gbytes` is the GB/s of f32 that a shard's threads touch so (`ddiloco plan --measure`).
  Without a measurement 4.0 is assumed for both rates, which one slow core reaches.
- Links are full duplex; `bandwidth.PAYLOAD_SHARE` of what they carry is fragments.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any

from ddiloco.config import SyncConfig
from ddiloco.config.schema import MAX_STREAMS
from ddiloco.observe.style import bytes_text
from ddiloco.protocol import events, rules
from ddiloco.simulation import bandwidth
from ddiloco.simulation.bandwidth import F32_BYTES, Exchanged, Setting, SyncTime, TypicalRound


def equal_sizes(parameters: int, fragments: int) -> tuple[int, ...]:
  """Values of each fragment, if a model is partitioned into equal ones."""
  return tuple((parameters + i) // fragments for i in range(fragments))


@dataclasses.dataclass(frozen=True)
class ExchangePlan(TypicalRound):
  """What the setting needs. Loads are shares of the capacity; above 1 the run does not fit."""

  exchanged: Exchanged
  average_gbps: float  # over the busiest link, in its busier direction
  peak_gbps: float  # of an island's link, others in proportion, for tau to hide a sync; or infinite
  link_load: float  # of the busiest link
  core_load: float  # of the busiest shard's cores
  host_load: float  # of a learner's host, beside its steps
  sync: SyncTime
  overlap_steps: int  # the tau that would hide a sync
  hidden: bool  # whether tau hides it
  utilisation: float  # share of the time that islands compute
  join_seconds: float  # until a joining island has the model
  memory_bytes: int  # of the shard that needs most, while a snapshot is written slowly
  least_shards: int | None  # with which no link and no shard is overloaded; None: no number


def make(setting: Setting) -> ExchangePlan:
  """The plan of one setting; its `period_steps` is the effective H."""
  link_load, average_gbps = _links(setting, setting.sync)
  core_load, model_bytes = _core_load(setting, setting.sync), F32_BYTES * sum(setting.sizes)
  host_bytes = (bandwidth.PUSH_VECTORS + bandwidth.STAGE_VECTORS) * model_bytes
  host_load = host_bytes / (setting.host_gbytes * 1e9) / setting.period_seconds
  sync, usual = bandwidth.sync_time(setting, max(setting.sizes)), _usual(setting)
  overlap_steps = math.ceil(sync.total / setting.step_seconds)
  period_steps, utilisation = _pace(setting, usual, max(link_load, core_load, host_load))
  return ExchangePlan(
    **{**dataclasses.asdict(usual), "period_steps": period_steps},
    exchanged=bandwidth.exchanged(setting.sizes, setting.sync),
    average_gbps=average_gbps,
    peak_gbps=_peak_gbps(setting, sync),
    link_load=link_load,
    core_load=core_load,
    host_load=host_load,
    sync=sync,
    overlap_steps=overlap_steps,
    hidden=overlap_steps <= setting.sync.overlap_steps,
    utilisation=utilisation,
    join_seconds=_join_seconds(setting),
    memory_bytes=_memory_bytes(setting, sync),
    least_shards=_least_shards(setting, _link_load, _core_load),
  )


def _links(setting: Setting, sync: SyncConfig) -> tuple[float, float]:
  """(load, average Gbit/s) of the busiest link."""
  over = bandwidth.flows(
    setting.sizes, sync, setting.islands, setting.apart, int(setting.evaluator)
  )
  there = [setting.gbps] * setting.islands
  there += [setting.shard_gbps] * (len(over) - setting.islands)
  on_wire = 8 / bandwidth.PAYLOAD_SHARE  # bits that carry a byte
  needed = [on_wire * max(flow) / setting.period_seconds / 1e9 for flow in over]  # full duplex
  return max((gbps / most, gbps) for gbps, most in zip(needed, there))


def _link_load(setting: Setting, sync: SyncConfig) -> float:
  return _links(setting, sync)[0]


def _core_load(setting: Setting, sync: SyncConfig) -> float:
  """The share of a period in which the busiest shard takes in pushes and merges."""
  m = setting.islands
  touched = F32_BYTES * (m + bandwidth.commit_vectors(sync, setting.momentum, m))
  most = _most_owned(setting, sync)
  return touched * most / (setting.merge_gbytes * 1e9) / setting.period_seconds


def _most_owned(setting: Setting, sync: SyncConfig) -> int:
  """Values of the shard that owns most."""
  count = sync.num_shards
  return max(sum(bandwidth.owned_sizes(setting.sizes, s, count)) for s in range(count))


def _join_seconds(setting: Setting) -> float:
  """See `ExchangePlan`: over the island's link, and over that of the shard that owns most."""
  rate, shard_rate = setting.rates
  each = sum(setting.sizes) / rate, _most_owned(setting, setting.sync) / shard_rate
  return F32_BYTES * max(each) + setting.latency_seconds


def _peak_gbps(setting: Setting, sync: SyncTime) -> float:
  """See `ExchangePlan`."""
  rest, least = sync.total - (sync.push + sync.copy + sync.publish), 0.0  # not on links
  for begun, seconds in bandwidth.pushes(setting, max(setting.sizes)):
    spare = setting.overlap_seconds - rest - begun
    least = max(least, (seconds + sync.copy + sync.publish) / spare if spare > 0 else math.inf)
  return setting.gbps * least


def _usual(setting: Setting) -> TypicalRound:
  """The mean of typical rounds over all fragments."""
  counts = collections.Counter(setting.sizes)
  rounds = [dataclasses.astuple(bandwidth.typical(setting, size)) for size in counts]
  weights = list(counts.values())
  return TypicalRound(*(statistics.fmean(each, weights) for each in zip(*rounds)))


def _pace(setting: Setting, usual: TypicalRound, load: float) -> tuple[float, float]:
  """(effective H in steps, utilisation)."""
  config = setting.sync
  period = config.sync_period
  if not config.blocking:
    return max(usual.period_steps, period * load), 1.0
  times = {size: bandwidth.sync_time(setting, size) for size in {*setting.sizes}}
  due = collections.defaultdict[int, list[SyncTime]](list)  # at a step of the period
  for p, size in enumerate(setting.sizes):
    due[rules.place_of(p, config)].append(times[size])
  turns, pull_seconds = bandwidth.pull_waits(setting)
  # Learners wait for the pulls of later turns while a version is on its way.
  hidden = setting.overlap_seconds + config.overlap_steps * turns / period * pull_seconds
  waits = turns * pull_seconds
  for each in due.values():  # what is due together shares the links, and waits once for the ways
    busy = sum(sync.total - sync.latency for sync in each)
    waits += max(0.0, busy + each[0].latency - hidden)
  seconds = max(setting.period_seconds + waits, setting.period_seconds * load)
  return float(period), setting.period_seconds / seconds


def _memory_bytes(setting: Setting, sync: SyncTime) -> int:
  count, size = setting.sync.num_shards, max(setting.sizes)
  vectors = bandwidth.state_vectors(setting.sync, setting.momentum)
  owned = [bandwidth.owned_sizes(setting.sizes, s, count) for s in range(count)]
  busiest = max(range(count), key=lambda s: sum(owned[s]))
  mine, neighbours = owned[busiest], sum(owned[busiest - 1]) if count > 1 else 0
  rounds = min(len(mine), math.ceil(sync.total * len(mine) / setting.period_seconds))  # at once
  lossy = setting.sync.publish_codec != "f32"
  updates = bandwidth.exchanged(mine, setting.sync).publish_bytes if lossy else 0
  pushes = setting.islands * bandwidth.exchanged([size], setting.sync).push_bytes
  copies = F32_BYTES * (1 + setting.momentum) * neighbours  # published values and momenta
  # Beside the state: the results of rounds. What a snapshot has not written yet stays meanwhile,
  # and on a slow disk, or in a bucket, all of it may be replaced before.
  made = sum(mine) if setting.sync.snapshot_steps else rounds * size
  return F32_BYTES * vectors * (sum(mine) + made) + updates + copies + rounds * pushes


def _least_shards(setting: Setting, *loads: Callable[[Setting, SyncConfig], float]) -> int | None:
  for count in range(1, setting.sync.num_fragments + 1):
    sync = dataclasses.replace(setting.sync, num_shards=count)
    if all(load(setting, sync) <= 1 for load in loads):
      return count
  return None


# --- What does not fit, and what to change, in plain words


def findings(setting: Setting, plan: ExchangePlan) -> list[str]:
  """What does not fit, each with its fix; empty if everything does."""
  return [*_overloads(setting, plan), *_lateness(setting, plan), *_window(setting)]


def _overloads(setting: Setting, plan: ExchangePlan) -> Iterator[str]:
  sync, fewer = setting.sync, []
  if (sync.push_codec, sync.publish_codec) != ("int4", "int4"):
    fewer = ["int4 for push_codec and publish_codec"]

  def shards(load: Callable[[Setting, SyncConfig], float]) -> list[str]:
    least = _least_shards(setting, load)  # or fewer: copies for buddies load links too
    return [f"sync.num_shards = {least}"] if least else []

  loads = {
    "The busiest link": (plan.link_load, [*shards(_link_load), *fewer]),
    "A shard": (plan.core_load, [*shards(_core_load), "more cores (--merge_gbytes)"]),
    "A learner's host": (plan.host_load, ["more cores (--host_gbytes)"]),
  }
  for what, (load, fixes) in loads.items():
    if load > 1:
      longer = f"sync.sync_period = {math.ceil(sync.sync_period * load)}"
      yield f"{what} would be busy {load:.0%} of the time. Fix: {', or '.join([longer, *fixes])}."


def _lateness(setting: Setting, plan: ExchangePlan) -> Iterator[str]:
  sync, steps = setting.sync, plan.overlap_steps
  if plan.hidden:
    return
  if sync.blocking:
    effect = f"All islands wait: they compute {plan.utilisation:.0%} of the time"
  else:
    effect = f"No learner waits, but a version is {plan.applied_steps:.2g} steps old when applied"
    if sync.apply not in events.KEEPS_WORK:
      effect += f", and {sync.apply} discards work of those steps"
  fix = "use more, smaller fragments, fewer bytes (int4) or more bandwidth"
  if steps < sync.sync_period:
    fix = f"raise sync.overlap_steps to {steps}, or use more, smaller fragments"
  yield (
    f"tau = {sync.overlap_steps} steps hide {setting.overlap_seconds:.3g} s of a sync's"
    f" {plan.sync.total:.3g} s. {effect}. Fix: {fix}."
  )


def _window(setting: Setting) -> Iterator[str]:
  needed = 2 * setting.latency_seconds * min(setting.rates)
  if 0 < setting.window_bytes < needed:
    streams = math.ceil(needed / bandwidth.CONNECTION_BYTES)
    more = f"set network.streams = {streams}, or " if streams <= MAX_STREAMS else ""
    yield (
      f"The link holds {bytes_text(needed)} until an answer is back, more than the"
      f" {bytes_text(setting.window_bytes)} that Linux lets one peer have under way. Fix: {more}"
      "raise net.ipv4.tcp_wmem and tcp_rmem on both sides."
    )


def as_json(setting: Setting, plan: ExchangePlan) -> dict[str, Any]:
  """The whole plan; None where no bandwidth or number of shards is enough."""
  content = {
    "parameters": sum(setting.sizes),
    "bytes_per_step": plan.exchanged.per_step(setting.sync),
    **dataclasses.asdict(plan),
    "sync_seconds": plan.sync.total,
    "findings": findings(setting, plan),
  }
  return {k: None if v == math.inf else v for k, v in content.items()}
