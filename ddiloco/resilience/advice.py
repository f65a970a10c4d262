"""A plan in plain words: what it needs, what does not fit, and what to change."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from typing import Any

from ddiloco.resilience import planner
from ddiloco.resilience.planner import Plan, Setting

COLUMNS = 100


def findings(setting: Setting, plan: Plan) -> list[str]:
  """What does not fit, each with its fix; empty if everything does."""
  found = [*_links(setting, plan), *_cores(setting, plan), *_overlap(setting, plan)]
  if found and plan.copy_share > 0.5:
    found.append(
      f"Copies for buddy shards are {plan.copy_share:.0%} of the busiest link's bytes: they are f32"
      " whatever the codecs. A single shard has none, and shards that stand together with a network"
      " of their own (--shard_gbps) take them off the islands' links."
    )
  window_bytes = 2 * setting.latency_seconds * setting.gbps * 1e9 / 8
  if 0 < setting.window_bytes < window_bytes:
    found.append(
      f"The link holds {_bytes(window_bytes)} until an answer is back, more than"
      f" network.window_bytes = {setting.window_bytes}. Fix: set it to {math.ceil(window_bytes)}."
    )
  return found


def lines(setting: Setting, plan: Plan) -> list[str]:
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
    f" and {plan.core_load:.0%} of a core; {_least(plan)}",
    "joining": f"an island has the whole model after {_seconds(plan.join_seconds)}",
  }
  text = [_fill(f"{name:<9}{row}", " " * 9) for name, row in rows.items()]
  found = [_fill(f"- {finding}", "  ") for finding in findings(setting, plan)]
  return text + ["", *(found or ["Everything fits."])]


def as_json(setting: Setting, plan: Plan) -> dict[str, Any]:
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


def _hidden(setting: Setting, plan: Plan) -> bool:
  return plan.overlap_steps <= setting.sync.overlap_steps


def _links(setting: Setting, plan: Plan) -> list[str]:
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
    needed = planner.make(dataclasses.replace(setting, sync=smaller)).average_gbps
    fixes.append(f"int4 for push_codec and publish_codec ({needed:.3g} Gbit/s)")
  return [
    f"The busiest link needs {plan.average_gbps:.3g} Gbit/s where there are {there:.3g}: {effect}."
    f" Fix: {', or '.join([*_more_shards(setting, plan.shards_for_links), *fixes])}."
  ]


def _cores(setting: Setting, plan: Plan) -> list[str]:
  if plan.core_load <= 1:
    return []
  period = math.ceil(setting.sync.sync_period * plan.core_load)
  fixes = [*_more_shards(setting, plan.shards_for_cores), f"sync.sync_period = {period}"]
  return [
    f"Merging would keep a shard's core busy {plan.core_load:.0%} of the time, and a shard merges"
    f" with one. Fix: {', or '.join(fixes)}."
  ]


def _overlap(setting: Setting, plan: Plan) -> list[str]:
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


def _least(plan: Plan) -> str:
  if plan.least_shards is not None:
    return f"{plan.least_shards} would do"
  names = {"links": plan.shards_for_links, "cores": plan.shards_for_cores}
  said = (f"{least or 'no number'} for the {name}" for name, least in names.items())
  return f"enough would be {', '.join(said)}"


def _parts(plan: Plan) -> str:
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


def _peak(setting: Setting, plan: Plan) -> str:
  if not math.isfinite(plan.peak_gbps):
    return f"no bandwidth would let tau = {setting.sync.overlap_steps} hide a sync"
  return f"tau = {setting.sync.overlap_steps} hides a sync from {plan.peak_gbps:.3g} Gbit/s on"
