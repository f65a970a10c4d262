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
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from ddiloco.checks import not_negative, option, positive, require
from ddiloco.config import Config, SyncConfig
from ddiloco.protocol import events
from ddiloco.simulation import bandwidth
from ddiloco.simulation.bandwidth import (
  F32_BYTES,
  PUSH_VECTORS,
  STAGE_VECTORS,
  Exchanged,
  RoundCosts,
  TypicalRound,
  payload_bytes_per_second,
  typical,
)

CORE_GBYTES = 4.0
ABOUT_SHARD_GBPS = (
  "Gbit/s of shards that stand on their own; 0: they stand beside the islands and share links."
)
ABOUT_HOST_GBYTES = "GB/s of f32 that a learner's host touches beside its step."


def equal_sizes(parameters: int, fragments: int) -> tuple[int, ...]:
  """Values of each fragment, if a model is partitioned into equal ones."""
  return tuple((parameters + i) // fragments for i in range(fragments))


CONNECTION_BYTES = 4 << 20  # under way over one TCP connection at most: Linux's default


@dataclasses.dataclass(frozen=True)
class Setting:
  """The run, and the links and machines that it runs on."""

  sizes: tuple[int, ...]  # values of every fragment
  sync: SyncConfig
  islands: int
  step_seconds: float
  gbps: float  # of every island's link, in each direction
  latency_seconds: float = 0.0  # one way, between any two places
  momentum: bool = False  # of the outer optimizer
  shard_gbps: float = option(0.0, ABOUT_SHARD_GBPS)
  merge_gbytes: float = option(CORE_GBYTES, "GB/s of f32 that a shard merges.")
  host_gbytes: float = option(CORE_GBYTES, ABOUT_HOST_GBYTES)
  evaluator: bool = False  # one more member that gets every version, at a place of its own
  window_bytes: int = 0  # under way to one peer at most; 0: no limit

  def __post_init__(self):
    positive("plan", self, "islands", "step_seconds", "gbps", "merge_gbytes", "host_gbytes")
    not_negative("plan", self, "latency_seconds", "shard_gbps", "window_bytes")
    require(
      self.sync.num_shards > 0,
      "sync.num_shards",
      self.sync.num_shards,
      "without shards nothing is exchanged, so there is nothing to plan",
      "use 1 or more",
    )
    require(
      len(self.sizes) == self.sync.num_fragments and min(self.sizes) > 0,
      "plan.sizes",
      self.sizes,
      f"must be positive, one for each of sync.num_fragments = {self.sync.num_fragments}",
      "use the sizes of the plan",
    )

  @classmethod
  def of(cls, config: Config, sizes: tuple[int, ...], **rates: Any) -> Setting:
    """The setting of this config's run, with fragments of these sizes; `rates`: other fields."""
    return cls(
      sizes=sizes,
      sync=config.sync,
      islands=config.islands.num_learners,
      momentum=config.outer.momentum > 0,
      evaluator=config.run.evaluations > 0,
      window_bytes=config.network.streams * CONNECTION_BYTES,
      **rates,
    )

  @property
  def apart(self) -> bool:
    """Whether shards have links of their own."""
    return self.shard_gbps > 0

  @property
  def away(self) -> int:
    """Learners whose pushes of a fragment cross a link."""
    return self.islands if self.apart else self.islands - 1

  @property
  def rates(self) -> tuple[float, float]:
    """Bytes of fragments a second over an island's link, and over a shard's."""
    both = self.gbps, self.shard_gbps or self.gbps
    return payload_bytes_per_second(both[0]), payload_bytes_per_second(both[1])

  @property
  def period_seconds(self) -> float:
    """H steps."""
    return self.sync.sync_period * self.step_seconds

  @property
  def overlap_seconds(self) -> float:
    """tau steps: what a sync may take."""
    return self.sync.overlap_steps * self.step_seconds


@dataclasses.dataclass(frozen=True)
class SyncTime:
  """Seconds of one sync of the largest fragment, in order of time, up to the staged version."""

  copy_outs: float  # from the first learner's end of a step to the last learner's
  encode: float  # by a learner's host: the push
  push: float
  merge: float
  copy: float  # to the buddy, before any learner hears of the version
  publish: float
  stage: float  # by a learner's host: the value to stage
  latency: float

  @property
  def total(self) -> float:
    """From the first learner's copy-out until the version is ready at the learners."""
    return sum(dataclasses.astuple(self))

  @property
  def on_links(self) -> float:
    """The part that more bandwidth shortens."""
    return self.push + self.copy + self.publish


@dataclasses.dataclass(frozen=True)
class Memory:
  """Bytes of the shard that needs most memory."""

  state: int  # value, published value and momentum of its own fragments, and the newest update
  copies: int  # of its neighbour's fragments: published value and momentum
  rounds: int  # pushes as received, and the result of a commit

  @property
  def total(self) -> int:
    """All of it."""
    return self.state + self.copies + self.rounds


@dataclasses.dataclass(frozen=True)
class ExchangePlan:
  """What the setting needs. Loads are shares of the capacity; above 1 the run does not fit."""

  exchanged: Exchanged
  average_gbps: float  # over the busiest link, in its busier direction
  peak_gbps: float  # of an island's link, others in proportion, for tau to hide a sync; or infinite
  link_load: float  # of the busiest link
  copy_share: float  # of the busiest link's bytes
  core_load: float  # of the busiest shard's cores
  host_load: float  # of a learner's host, beside its steps
  sync: SyncTime
  overlap_steps: int  # the tau that would hide a sync
  applied_steps: float  # from a learner's copy-out to its apply, on average
  round_seconds: float  # from a round's beginning to its commit
  delivery_seconds: float  # from the commit to the learners' taking it up
  participation: float  # share of learners in a round: grace may end before the last push is there
  period_steps: float  # effective H
  utilisation: float  # share of the time that islands compute
  join_seconds: float  # until a joining island has the model
  memory: Memory
  shards_for_links: int | None  # least number with which no link is overloaded; None: no number
  shards_for_cores: int | None  # the same for cores
  least_shards: int | None  # for both; copies make links busier from two shards on


def make(setting: Setting) -> ExchangePlan:
  """The plan of one setting."""
  link_load, average_gbps, copy_share = _links(setting, setting.sync)
  core_load, model_bytes = _core_load(setting, setting.sync), F32_BYTES * sum(setting.sizes)
  host_seconds = (PUSH_VECTORS + STAGE_VECTORS) * model_bytes / (setting.host_gbytes * 1e9)
  host_load = host_seconds / setting.period_seconds
  sync = _sync_time(setting, max(setting.sizes))
  usual = _usual(setting)
  load = max(link_load, core_load, host_load)
  period_steps, utilisation = _pace(setting, sync, usual, load)
  return ExchangePlan(
    exchanged=bandwidth.exchanged(setting.sizes, setting.sync),
    average_gbps=average_gbps,
    peak_gbps=_peak_gbps(setting, sync),
    link_load=link_load,
    copy_share=copy_share,
    core_load=core_load,
    host_load=host_load,
    sync=sync,
    overlap_steps=math.ceil(sync.total / setting.step_seconds),
    applied_steps=usual.applied_steps,
    round_seconds=usual.round_seconds,
    delivery_seconds=usual.delivery_seconds,
    participation=usual.participation,
    period_steps=period_steps,
    utilisation=utilisation,
    join_seconds=model_bytes / setting.rates[0] + setting.latency_seconds,
    memory=_memory(setting, sync),
    shards_for_links=_least_shards(setting, lambda sync: _links(setting, sync)[0]),
    shards_for_cores=_least_shards(setting, lambda sync: _core_load(setting, sync)),
    least_shards=_least_shards(
      setting, lambda sync: max(_links(setting, sync)[0], _core_load(setting, sync))
    ),
  )


def _links(setting: Setting, sync: SyncConfig) -> tuple[float, float, float]:
  """(load, average Gbit/s, share of copies) of the busiest link."""
  over = bandwidth.flows(
    setting.sizes, sync, setting.islands, setting.apart, int(setting.evaluator)
  )
  there = [setting.gbps] * setting.islands
  there += [setting.shard_gbps] * (len(over) - setting.islands)
  on_wire = 8 / bandwidth.PAYLOAD_SHARE  # bits that carry a byte
  needed = [on_wire * flow.busier_bytes / setting.period_seconds / 1e9 for flow in over]
  busiest = max(range(len(over)), key=lambda place: needed[place] / there[place])
  flow = over[busiest]
  both = flow.sent_bytes + flow.received_bytes
  share = flow.copy_bytes / both if both else 0.0
  return needed[busiest] / there[busiest], needed[busiest], share


def _core_load(setting: Setting, sync: SyncConfig) -> float:
  """The share of a period in which the busiest shard takes in pushes and merges."""
  m = setting.islands
  touched = F32_BYTES * (m + bandwidth.commit_vectors(sync, setting.momentum, m))
  largest = max(
    sum(bandwidth.owned_sizes(setting.sizes, s, sync.num_shards)) for s in range(sync.num_shards)
  )
  return touched * largest / (setting.merge_gbytes * 1e9) / setting.period_seconds


def _copy_outs(setting: Setting) -> list[float]:
  """Mean times of the learners' copy-outs, in steps since they were asked, ascending.

  The learner whose report began the round has a whole step before it, less the latency.
  """
  if setting.sync.blocking:
    return [0.0] * setting.islands
  latency = setting.latency_seconds if setting.away else 0.0
  asker = 1 - math.fmod(2 * latency / setting.step_seconds, 1.0)
  return sorted([asker, *(k / setting.islands for k in range(1, setting.islands))])


def _pushes(setting: Setting, size: int) -> list[tuple[float, float]]:
  """Bounds on the time at which all pushes of `size` values are there, of which the latest holds.

  Each is (begin, seconds on the link): the last learner's push over its own link, and all pushes
  from the k-th copy-out on over the shard's link without a gap. `begin` is in seconds from the last
  copy-out: 0 or less.
  """
  m, away, at = setting.islands, setting.away, _copy_outs(setting)
  if not away:
    return [(0.0, 0.0)]
  push_bytes = bandwidth.exchanged([size], setting.sync).push_bytes
  alone, each = (push_bytes / rate for rate in setting.rates)
  begun = [(at[k] - at[-1]) * setting.step_seconds for k in range(m - away, m)]
  return [(0.0, alone), *((before, (away - k) * each) for k, before in enumerate(begun))]


def _sync_time(setting: Setting, size: int) -> SyncTime:
  """One sync of a fragment of `size` values."""
  sync, m = setting.sync, setting.islands
  one, away, (rate, shard_rate) = bandwidth.exchanged([size], sync), setting.away, setting.rates
  at = _copy_outs(setting)
  listeners = away + setting.evaluator
  publish = max(bool(away) / rate, listeners / shard_rate) * one.publish_bytes if away else 0.0
  places = {s if setting.apart else s % m for s in range(sync.num_shards)}
  copied = len(places) > 1  # else the buddy is the shard itself, or its neighbour at one place
  hops = 2 * min(away, 1) + 2 * copied  # push and publish, copy and its receipt
  touched = 1 + bandwidth.commit_vectors(sync, setting.momentum, m)  # the last push, the commit
  vector = F32_BYTES * size / 1e9
  return SyncTime(
    copy_outs=(at[-1] - at[0]) * setting.step_seconds,
    encode=PUSH_VECTORS * vector / setting.host_gbytes,
    push=max(begun + seconds for begun, seconds in _pushes(setting, size)),
    merge=touched * vector / setting.merge_gbytes,
    copy=copied * one.publish_bytes / shard_rate,
    publish=publish,
    stage=STAGE_VECTORS * vector / setting.host_gbytes,
    latency=hops * setting.latency_seconds,
  )


def _peak_gbps(setting: Setting, sync: SyncTime) -> float:
  """See `ExchangePlan`."""
  rest, least = sync.total - sync.on_links, 0.0
  for begun, seconds in _pushes(setting, max(setting.sizes)):
    spare = setting.overlap_seconds - rest - begun
    least = max(least, (seconds + sync.copy + sync.publish) / spare if spare > 0 else math.inf)
  return setting.gbps * least


def _usual(setting: Setting) -> TypicalRound:
  """The mean of typical rounds over all fragments."""
  counts = collections.Counter(setting.sizes)
  rounds = [dataclasses.astuple(_round(setting, size)) for size in counts]
  weights = list(counts.values())
  return TypicalRound(*(statistics.fmean(each, weights) for each in zip(*rounds)))


def _round(setting: Setting, size: int) -> TypicalRound:
  """A typical round of a fragment of `size` values."""
  config, step = setting.sync, setting.step_seconds
  sync = _sync_time(setting, size)
  period = float(config.sync_period)
  if config.blocking:  # all learners copy out together, and wait for the version
    after = sync.publish + sync.copy + sync.latency / 2
    before = sync.total - after - sync.stage
    return TypicalRound(max(config.overlap_steps, sync.total / step), 1.0, period, before, after)
  push_bytes, (rate, shard_rate) = bandwidth.exchanged([size], config).push_bytes, setting.rates
  costs = RoundCosts(
    islands=setting.islands,
    away=setting.away,
    step=step,
    latency=setting.latency_seconds,
    encode=sync.encode,
    push=push_bytes / rate,
    shard_push=push_bytes / shard_rate,
    merge=sync.merge,
    copy=sync.copy + (2 * setting.latency_seconds if sync.copy else 0.0),
    publish=sync.publish,
    stage=sync.stage,
  )
  return typical(costs, config)


def _pace(
  setting: Setting, sync: SyncTime, usual: TypicalRound, load: float
) -> tuple[float, float]:
  """(effective H in steps, utilisation)."""
  config = setting.sync
  period = config.sync_period
  if not config.blocking:
    return max(usual.period_steps, period * load), 1.0
  waits = config.num_fragments * max(0.0, sync.total - setting.overlap_seconds)
  seconds = max(setting.period_seconds + waits, setting.period_seconds * load)
  return float(period), setting.period_seconds / seconds


def _memory(setting: Setting, sync: SyncTime) -> Memory:
  count, size = setting.sync.num_shards, max(setting.sizes)
  vectors = bandwidth.state_vectors(setting.sync, setting.momentum)
  owned = [bandwidth.owned_sizes(setting.sizes, s, count) for s in range(count)]
  busiest = max(range(count), key=lambda s: sum(owned[s]))
  neighbour, state = sum(owned[busiest - 1]), sum(owned[busiest])
  every_seconds = setting.period_seconds / len(owned[busiest])  # between two of its rounds
  rounds = min(len(owned[busiest]), math.ceil(sync.total / every_seconds))
  one = bandwidth.exchanged([size], setting.sync)
  lossy = setting.sync.publish_codec != "f32"
  updates = bandwidth.exchanged(owned[busiest], setting.sync).publish_bytes if lossy else 0
  return Memory(
    state=F32_BYTES * vectors * state + updates,
    copies=F32_BYTES * (1 + setting.momentum) * neighbour if count > 1 else 0,
    rounds=rounds * (setting.islands * one.push_bytes + F32_BYTES * size * vectors),
  )


def _least_shards(setting: Setting, load: Callable[[SyncConfig], float]) -> int | None:
  for count in range(1, setting.sync.num_fragments + 1):
    if load(dataclasses.replace(setting.sync, num_shards=count)) <= 1:
      return count
  return None


# --- A plan in plain words: what it needs, what does not fit, and what to change

COLUMNS = 100


def findings(setting: Setting, plan: ExchangePlan) -> list[str]:
  """What does not fit, each with its fix; empty if everything does."""
  found = [*_overloads(setting, plan), *_overlap(setting, plan)]
  if found and plan.copy_share > 0.5:
    found.append(
      f"Copies for buddy shards are {plan.copy_share:.0%} of the busiest link's bytes: each is a"
      " publish more. A single shard has none, and shards that stand together with a network"
      " of their own (--shard_gbps) take them off the islands' links."
    )
  window_bytes = 2 * setting.latency_seconds * setting.gbps * 1e9 / 8
  if 0 < setting.window_bytes < window_bytes:
    found.append(
      f"The link holds {_bytes(window_bytes)} until an answer is back, more than the"
      f" {_bytes(setting.window_bytes)} that Linux lets one peer have under way. Fix: set"
      f" network.streams = {math.ceil(window_bytes / CONNECTION_BYTES)}, or raise"
      " net.ipv4.tcp_wmem and tcp_rmem on both sides."
    )
  return found


def lines(setting: Setting, plan: ExchangePlan) -> list[str]:
  """The plan for people, paragraphs of at most 100 columns; `findings` come last."""
  sync, memory = setting.sync, plan.memory
  values = sum(setting.sizes)
  each = plan.exchanged
  codecs = f"{sync.push_codec} there, {sync.publish_codec} back"
  gradients = 2 * (setting.islands - 1) / setting.islands * 2 * values
  rows = {
    "model": f"{values:,} parameters, fragments of {min(setting.sizes):,} to"
    f" {max(setting.sizes):,}: {sync.num_fragments}",
    "islands": f"{setting.islands}, a step in {_seconds(setting.step_seconds)}; each fragment every"
    f" {sync.sync_period} steps ({_seconds(setting.period_seconds)})",
    "traffic": f"a step and island {_bytes(each.per_step(sync))} ({codecs}); data-parallel in bf16:"
    f" {_bytes(2 * gradients)}",
    "links": f"the busiest needs {_rate(plan.average_gbps)} on average, {plan.link_load:.0%} of"
    f" what it has; {_peak(setting, plan)}",
    "a sync": f"{_seconds(plan.sync.total)}: {_parts(plan)}; tau = {sync.overlap_steps} hides"
    f" {_seconds(setting.overlap_seconds)}",
    "a version": f"is applied {_seconds(plan.applied_steps * setting.step_seconds)} after a"
    f" learner's copy-out, or {plan.applied_steps:.2g} steps: it is taken up at the end of one, and"
    " applied at the end of a later one",
    "pace": f"islands compute {plan.utilisation:.0%} of the time; a fragment syncs every"
    f" {plan.period_steps:.3g} steps, with {plan.participation:.0%} of the islands",
    "shards": f"{sync.num_shards}, each at most {_bytes(memory.total)} of memory (state"
    f" {_bytes(memory.state)}, copies {_bytes(memory.copies)}, rounds {_bytes(memory.rounds)})"
    f" and busy {plan.core_load:.0%} of the time; {_least(plan)}",
    "joining": f"an island has the whole model after {_seconds(plan.join_seconds)}",
  }
  text = [_fill(f"{name:<11}{row}", " " * 11) for name, row in rows.items()]
  found = [_fill(f"- {finding}", "  ") for finding in findings(setting, plan)]
  return text + ["", *(found or ["Everything fits."])]


def as_json(setting: Setting, plan: ExchangePlan) -> dict[str, Any]:
  """The plan for programs; null where no bandwidth or number of shards is enough."""
  content = {
    "parameters": sum(setting.sizes),
    "bytes_per_step": plan.exchanged.per_step(setting.sync),
    **dataclasses.asdict(plan),
    "sync_seconds": plan.sync.total,
    "memory_bytes": plan.memory.total,
    "hidden": _hidden(setting, plan),
    "findings": findings(setting, plan),
  }
  return {k: None if v == math.inf else v for k, v in content.items()}


def _hidden(setting: Setting, plan: ExchangePlan) -> bool:
  return plan.overlap_steps <= setting.sync.overlap_steps


def _overloads(setting: Setting, plan: ExchangePlan) -> Iterator[str]:
  sync = setting.sync

  def period(load: float) -> str:
    return f"sync.sync_period = {math.ceil(sync.sync_period * load)}"

  def shards(least: int | None) -> list[str]:
    return [f"sync.num_shards = {least}"] if least and least > sync.num_shards else []

  if plan.link_load > 1:
    effect = f"each fragment syncs every {plan.period_steps:.3g} steps instead of"
    effect += f" {sync.sync_period}"
    if sync.blocking:
      effect = f"islands compute only {plan.utilisation:.0%} of the time"
    fixes = [*shards(plan.shards_for_links), period(plan.link_load)]
    smaller = dataclasses.replace(sync, push_codec="int4", publish_codec="int4")
    if smaller != sync:
      needed = make(dataclasses.replace(setting, sync=smaller)).average_gbps
      fixes.append(f"int4 for push_codec and publish_codec ({_rate(needed)})")
    yield (
      f"The busiest link needs {_rate(plan.average_gbps)} where there are"
      f" {_rate(plan.average_gbps / plan.link_load)}: {effect}. Fix: {', or '.join(fixes)}."
    )
  if plan.core_load > 1:
    fixes = [*shards(plan.shards_for_cores), period(plan.core_load)]
    yield (
      f"Merging would keep a shard busy {plan.core_load:.0%} of the time, at"
      f" {setting.merge_gbytes:.3g} GB/s. Fix: {', or '.join(fixes)}, or more cores (--measure)."
    )
  if plan.host_load > 1:
    yield (
      f"Pushes and new versions would keep a learner's host busy {plan.host_load:.0%} of the time,"
      f" at {setting.host_gbytes:.3g} GB/s. Fix: {period(plan.host_load)}, or more cores"
      " (--host_gbytes)."
    )


def _overlap(setting: Setting, plan: ExchangePlan) -> Iterator[str]:
  sync, steps = setting.sync, plan.overlap_steps
  if _hidden(setting, plan):
    return
  effect = (
    f"No learner waits, but a version is {plan.applied_steps:.2g} steps old when it is applied"
  )
  if sync.apply not in events.KEEPS_WORK:
    effect += f", and {sync.apply} discards work of those steps"
  if sync.blocking:
    effect = f"All islands wait: they compute {plan.utilisation:.0%} of the time"
  fix = "use more, smaller fragments, fewer bytes (int4) or more bandwidth"
  if steps < sync.sync_period:
    fix = f"raise sync.overlap_steps to {steps}, or use more, smaller fragments"
  yield (
    f"tau = {sync.overlap_steps} steps hide {_seconds(setting.overlap_seconds)} of a sync's"
    f" {_seconds(plan.sync.total)}. {effect}. Fix: {fix}."
  )


def _least(plan: ExchangePlan) -> str:
  if plan.least_shards is not None:
    return f"{plan.least_shards} would do"
  names = {"links": plan.shards_for_links, "cores": plan.shards_for_cores}
  said = (f"{least or 'no number'} for the {name}" for name, least in names.items())
  return f"enough would be {', '.join(said)}"


_PARTS = {
  "copy_outs": "until the last island has copied out",
  "encode": "making a push",
  "push": "pushes",
  "merge": "merging",
  "copy": "the copy for the buddy shard",
  "publish": "publishes",
  "stage": "staging",
  "latency": "latency",
}


def _parts(plan: ExchangePlan) -> str:
  """The parts of a sync that take more than 1 % of it."""
  parts = dataclasses.asdict(plan.sync)
  shown = (name for name in parts if parts[name] > 0.01 * plan.sync.total)
  return ", ".join(f"{_PARTS[name]} {_seconds(parts[name])}" for name in shown)


def _rate(gbps: float) -> str:
  return f"{gbps:.3g} Gbit/s" if gbps >= 0.1 else f"{1000 * gbps:.3g} Mbit/s"


def _fill(text: str, indent: str) -> str:
  return textwrap.fill(text, COLUMNS, subsequent_indent=indent, break_on_hyphens=False)


def _seconds(seconds: float) -> str:
  if seconds < 0.1:
    return f"{1000 * seconds:.2g} ms"
  if seconds < 100:
    return f"{seconds:.2g} s"
  return f"{seconds / 60:.3g} min" if seconds < 6000 else f"{seconds / 3600:.3g} h"


def _bytes(count: float) -> str:
  for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
    if count >= limit:
      return f"{count / limit:.3g} {unit}"
  return f"{count:.0f} bytes"


def _peak(setting: Setting, plan: ExchangePlan) -> str:
  if not math.isfinite(plan.peak_gbps):
    return f"no bandwidth would let tau = {setting.sync.overlap_steps} hide a sync"
  return f"tau = {setting.sync.overlap_steps} hides a sync from {_rate(plan.peak_gbps)} on"
