"""Does a run fit its links and its shards' cores? From sizes, settings and links to plain words.

Pure arithmetic. Assumptions, besides those of `simulation.bandwidth`:

- All islands step alike, none fails, all take part in every round: the most bytes there can be.
- A sync is measured from the first copy-out of a fragment to its new version at the learners, which
  is what `sync.overlap_steps` is about. Learners come to the ends of their steps independently (in
  lock-step together), so the last of M copy-outs (M - 1) / (M + 1) of a step later than the first.
  One fragment at a time has the links it needs. Its pushes arrive together and share the shard's
  link; so do the copies of its new version. The last push's part of the merge comes after all
  pushes.
- A shard takes in a push in one pass over its values. A commit of M pushes touches M + 2 vectors
  and the fragment's state twice (`bandwidth.commit_vectors`). `core_gbytes` is the GB/s of f32 that
  its threads touch so: `ddiloco plan --measure` measures it here; without it 4.0 is assumed, which
  one slow core reaches.
"""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Callable
from typing import Any

from ddiloco.checks import not_negative, positive, require
from ddiloco.config import Config, SyncConfig
from ddiloco.simulation import bandwidth
from ddiloco.simulation.bandwidth import F32_BYTES, Exchanged

CORE_GBYTES = 4.0


def equal_sizes(parameters: int, fragments: int) -> tuple[int, ...]:
  """Values of each fragment, if a model is partitioned into equal ones."""
  return tuple((parameters + i) // fragments for i in range(fragments))


CONNECTION_BYTES = 4 << 20  # under way over one TCP connection at most: Linux's default


@dataclasses.dataclass(frozen=True)
class Setting:
  """What is to run, and on what."""

  sizes: tuple[int, ...]  # values of every fragment
  sync: SyncConfig
  islands: int
  step_seconds: float
  gbps: float  # of every island's link, in each direction
  latency_seconds: float = 0.0  # one way, between any two places
  momentum: bool = False  # of the outer optimizer
  shard_gbps: float = 0.0  # of shards that stand on their own; 0: beside the islands
  core_gbytes: float = CORE_GBYTES  # GB/s of f32 that a shard merges
  window_bytes: int = 0  # under way to one peer at most; 0: any number

  def __post_init__(self):
    positive("plan", self, "islands", "step_seconds", "gbps", "core_gbytes")
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
    """Of this config's run, in fragments of these sizes; `rates` are the other fields."""
    return cls(
      sizes=sizes,
      sync=config.sync,
      islands=config.islands.num_learners,
      momentum=config.outer.momentum > 0,
      window_bytes=config.network.streams * CONNECTION_BYTES,
      **rates,
    )

  @property
  def apart(self) -> bool:
    return self.shard_gbps > 0

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
  """Seconds of one sync of the largest fragment, in order of time."""

  copy_outs: float  # from the first learner's end of a step to the last one's
  push: float
  merge: float
  copy: float  # to the buddy, before any learner hears of the version
  publish: float
  latency: float

  @property
  def total(self) -> float:
    return sum(dataclasses.astuple(self))

  @property
  def on_links(self) -> float:
    """The part that more bandwidth shortens."""
    return self.push + self.copy + self.publish


@dataclasses.dataclass(frozen=True)
class Memory:
  """Bytes of the shard that needs most."""

  state: int  # value, published value and momentum of its own fragments, and the newest update
  copies: int  # of its neighbour's: published value and momentum
  rounds: int  # pushes as received, and what a commit makes

  @property
  def total(self) -> int:
    return self.state + self.copies + self.rounds


@dataclasses.dataclass(frozen=True)
class ExchangePlan:
  """What the setting needs. Loads are shares of what there is; above 1 it does not fit."""

  exchanged: Exchanged
  average_gbps: float  # over the busiest link, in its busier direction
  peak_gbps: float  # an island's, others in proportion, so that tau hides a sync; may be infinite
  link_load: float  # of the busiest link
  copy_share: float  # of the busiest link's bytes
  core_load: float  # of what the busiest shard merges with
  sync: SyncTime
  overlap_steps: int  # tau that would hide it
  period_steps: float  # effective H
  utilisation: float  # share of the time that islands compute
  join_seconds: float  # until a joining island has the model
  memory: Memory
  shards_for_links: int | None  # least, so that no link is over-loaded; None: no number does it
  shards_for_cores: int | None  # the same for cores
  least_shards: int | None  # for both: copies make links busier from two shards on


def make(setting: Setting) -> ExchangePlan:
  """The plan of one setting."""
  link_load, average_gbps, copy_share = _links(setting, setting.sync)
  core_load = _core_load(setting, setting.sync)
  sync = _sync_time(setting)
  period_steps, utilisation = _pace(setting, sync, max(link_load, core_load))
  spare_seconds = setting.overlap_seconds - (sync.total - sync.on_links)
  hidden = spare_seconds > 0
  values = sum(setting.sizes)
  return ExchangePlan(
    exchanged=bandwidth.exchanged(setting.sizes, setting.sync),
    average_gbps=average_gbps,
    peak_gbps=setting.gbps * sync.on_links / spare_seconds if hidden else math.inf,
    link_load=link_load,
    copy_share=copy_share,
    core_load=core_load,
    sync=sync,
    overlap_steps=math.ceil(sync.total / setting.step_seconds),
    period_steps=period_steps,
    utilisation=utilisation,
    join_seconds=8 * F32_BYTES * values / (setting.gbps * 1e9) + setting.latency_seconds,
    memory=_memory(setting, sync),
    shards_for_links=_least_shards(setting, lambda sync: _links(setting, sync)[0]),
    shards_for_cores=_least_shards(setting, lambda sync: _core_load(setting, sync)),
    least_shards=_least_shards(
      setting, lambda sync: max(_links(setting, sync)[0], _core_load(setting, sync))
    ),
  )


def _links(setting: Setting, sync: SyncConfig) -> tuple[float, float, float]:
  """(load, average Gbit/s, share of copies) of the busiest link."""
  over = bandwidth.flows(setting.sizes, sync, setting.islands, setting.apart)
  there = [setting.gbps] * setting.islands
  there += [setting.shard_gbps] * (len(over) - setting.islands)
  needed = [8 * flow.busier_bytes / setting.period_seconds / 1e9 for flow in over]
  busiest = max(range(len(over)), key=lambda place: needed[place] / there[place])
  flow = over[busiest]
  both = flow.sent_bytes + flow.received_bytes
  share = flow.copy_bytes / both if both else 0.0
  return needed[busiest] / there[busiest], needed[busiest], share


def _core_load(setting: Setting, sync: SyncConfig) -> float:
  """How long the busiest shard takes in pushes and merges in a period, over the period."""
  m = setting.islands
  touched = F32_BYTES * (m + bandwidth.commit_vectors(sync, setting.momentum, m))
  largest = max(
    sum(bandwidth.owned_sizes(setting.sizes, s, sync.num_shards)) for s in range(sync.num_shards)
  )
  return touched * largest / (setting.core_gbytes * 1e9) / setting.period_seconds


def _sync_time(setting: Setting) -> SyncTime:
  sync, size, m = setting.sync, max(setting.sizes), setting.islands
  one = bandwidth.exchanged([size], sync)
  away = m if setting.apart else m - 1  # learners whose pushes cross a link
  shard_gbps = setting.shard_gbps or setting.gbps

  def seconds(nbytes: float) -> float:  # the slower of an island's link and the shard's
    return 8 * nbytes / 1e9 * max(min(away, 1) / setting.gbps, away / shard_gbps)

  places = {s if setting.apart else s % m for s in range(sync.num_shards)}
  copied = len(places) > 1  # else the buddy is the shard itself, or its neighbour at one place
  hops = 2 * min(away, 1) + 2 * copied  # push and publish, copy and its receipt
  touched = 1 + bandwidth.commit_vectors(sync, setting.momentum, m)  # the last push, the commit
  return SyncTime(
    copy_outs=0.0 if sync.blocking else setting.step_seconds * (m - 1) / (m + 1),
    push=seconds(one.push_bytes),
    merge=F32_BYTES * size * touched / (setting.core_gbytes * 1e9),
    copy=8 * one.publish_bytes * copied / (shard_gbps * 1e9),
    publish=seconds(one.publish_bytes),
    latency=hops * setting.latency_seconds,
  )


def _pace(setting: Setting, sync: SyncTime, load: float) -> tuple[float, float]:
  """(effective H in steps, utilisation)."""
  period = setting.sync.sync_period
  if not setting.sync.blocking:  # a fragment's next round begins when this one is over
    return max(period * max(1.0, load), sync.total / setting.step_seconds), 1.0
  waits = setting.sync.num_fragments * max(0.0, sync.total - setting.overlap_seconds)
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
  found = [*_on_links(setting, plan), *_cores(setting, plan), *_overlap(setting, plan)]
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
    "links": f"the busiest needs {plan.average_gbps:.3g} Gbit/s on average, {plan.link_load:.0%} of"
    f" what it has; {_peak(setting, plan)}",
    "a sync": f"{_seconds(plan.sync.total)}: {_parts(plan)}; tau = {sync.overlap_steps} hides"
    f" {_seconds(setting.overlap_seconds)}",
    "pace": f"islands compute {plan.utilisation:.0%} of the time; a fragment syncs every"
    f" {plan.period_steps:.3g} steps",
    "shards": f"{sync.num_shards}, each at most {_bytes(memory.total)} of memory (state"
    f" {_bytes(memory.state)}, copies {_bytes(memory.copies)}, rounds {_bytes(memory.rounds)})"
    f" and busy {plan.core_load:.0%} of the time; {_least(plan)}",
    "joining": f"an island has the whole model after {_seconds(plan.join_seconds)}",
  }
  text = [_fill(f"{name:<9}{row}", " " * 9) for name, row in rows.items()]
  found = [_fill(f"- {finding}", "  ") for finding in findings(setting, plan)]
  return text + ["", *(found or ["Everything fits."])]


def as_json(setting: Setting, plan: ExchangePlan) -> dict[str, Any]:
  """The same for programs; what no bandwidth or number reaches is null."""
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


def _on_links(setting: Setting, plan: ExchangePlan) -> list[str]:
  if plan.link_load <= 1:
    return []
  sync = setting.sync
  there = plan.average_gbps / plan.link_load
  period = math.ceil(sync.sync_period * plan.link_load)
  effect = f"each fragment syncs every {plan.period_steps:.3g} steps instead of {sync.sync_period}"
  if sync.blocking:
    effect = f"islands compute only {plan.utilisation:.0%} of the time"
  fixes = [f"sync.sync_period = {period}"]
  smaller = dataclasses.replace(sync, push_codec="int4", publish_codec="int4")
  if smaller != sync:
    needed = make(dataclasses.replace(setting, sync=smaller)).average_gbps
    fixes.append(f"int4 for push_codec and publish_codec ({needed:.3g} Gbit/s)")
  return [
    f"The busiest link needs {plan.average_gbps:.3g} Gbit/s where there are {there:.3g}: {effect}."
    f" Fix: {', or '.join([*_more_shards(setting, plan.shards_for_links), *fixes])}."
  ]


def _cores(setting: Setting, plan: ExchangePlan) -> list[str]:
  if plan.core_load <= 1:
    return []
  period = math.ceil(setting.sync.sync_period * plan.core_load)
  fixes = [*_more_shards(setting, plan.shards_for_cores), f"sync.sync_period = {period}"]
  return [
    f"Merging would keep a shard busy {plan.core_load:.0%} of the time, at"
    f" {setting.core_gbytes:.3g} GB/s. Fix: {', or '.join(fixes)}, or more cores (--measure)."
  ]


def _overlap(setting: Setting, plan: ExchangePlan) -> list[str]:
  if _hidden(setting, plan):
    return []
  sync, steps = setting.sync, plan.overlap_steps
  effect = f"Nobody waits, but a version is {steps} steps old when it is applied"
  if sync.apply == "overwrite":
    effect += ", and overwrite discards those steps"
  if sync.blocking:
    effect = f"Everybody waits: islands compute {plan.utilisation:.0%} of the time"
  fix = "use more, smaller fragments, fewer bytes (int4) or more bandwidth"
  if steps < sync.sync_period:
    fix = f"raise sync.overlap_steps to {steps}, or use more, smaller fragments"
  return [
    f"tau = {sync.overlap_steps} steps hide {_seconds(setting.overlap_seconds)} of a sync's"
    f" {_seconds(plan.sync.total)}. {effect}. Fix: {fix}."
  ]


def _more_shards(setting: Setting, least: int | None) -> list[str]:
  enough = least is not None and least > setting.sync.num_shards
  return [f"sync.num_shards = {least}"] if enough else []


def _least(plan: ExchangePlan) -> str:
  if plan.least_shards is not None:
    return f"{plan.least_shards} would do"
  names = {"links": plan.shards_for_links, "cores": plan.shards_for_cores}
  said = (f"{least or 'no number'} for the {name}" for name, least in names.items())
  return f"enough would be {', '.join(said)}"


def _parts(plan: ExchangePlan) -> str:
  parts = dataclasses.asdict(plan.sync)
  return ", ".join(f"{name} {_seconds(value)}" for name, value in parts.items() if value)


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
  return f"tau = {setting.sync.overlap_steps} hides a sync from {plan.peak_gbps:.3g} Gbit/s on"
