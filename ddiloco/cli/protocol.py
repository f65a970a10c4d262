"""The command that plays a config's run in virtual time."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from absl import flags

from ddiloco.cli.arguments import config_flag, final_config, parse
from ddiloco.config import Config, ConfigError

CAUSES_SHOWN = 4


def protocol(arguments: list[str]) -> int:
  """A config's run in virtual time: its protocol, islands and fault plan, without arrays.

  The same decisions as in a real run, in its order, with step times, links and faults simulated:

    ddiloco simulate protocol --config=configs/quickstart.py --step_seconds=0.1
    ddiloco simulate protocol --config=configs/quickstart.py --step_seconds=0.1 --gbps=1 \\
      --latency_ms=30 --config.chaos=configs/chaos/soak.py:7 --workdir=runs/virtual

  --workdir leaves the events, for `ddiloco dashboard` and `ddiloco report`. An island whose
  islands.pace_seconds is set steps at that pace. Losses are not simulated.
  """
  values = flags.FlagValues()
  path, arguments = config_flag(values, arguments)
  _define(values)
  if not parse(values, arguments, protocol.__doc__, needs_workdir=False):
    return 0
  config = final_config(values, path)
  from ddiloco.engines import virtual
  from ddiloco.simulation.run import Setting

  setting = Setting(
    sizes=_sizes(values, config),
    step_seconds=values["step_seconds"].value,
    jitter=values["jitter"].value,
    gbps=_numbers(values, "gbps"),
    latency_seconds=tuple(ms / 1000 for ms in _numbers(values, "latency_ms")),
    shard_gbps=values["shard_gbps"].value,
    merge_gbytes=values["merge_gbytes"].value,
    seed=values["seed"].value,
  )
  workdir = values["workdir"].value
  most = values["seconds"].value
  found = virtual.simulate(
    config,
    setting,
    Path(workdir) if workdir else None,
    values["overwrite"].value,
    math.inf if most is None else most,
  )
  print(json.dumps(found) if values["json"].value else _text(found))
  return 0 if found["reason"] != "failed" else 1


def _define(values: flags.FlagValues) -> None:
  """All flags but --config."""
  define = {"flag_values": values}
  flags.DEFINE_float("step_seconds", 1.0, "Of islands without islands.pace_seconds.", 0.0, **define)
  flags.DEFINE_float("jitter", 0.1, "A step lasts up to this share longer.", 0.0, **define)
  flags.DEFINE_string(
    "gbps", "0", "Gbit/s of every island's link, one or a list a,b,c; 0: no limit.", **define
  )
  flags.DEFINE_string("latency_ms", "1", "One way, one for all islands or a list.", **define)
  flags.DEFINE_float(
    "shard_gbps",
    0.0,
    "Gbit/s of shards that stand on their own; 0: they stand beside the islands and share links.",
    0.0,
    **define,
  )
  flags.DEFINE_float(
    "merge_gbytes", 4.0, "GB/s of f32 that a shard merges: 4 for each of its cores.", 0.0, **define
  )
  flags.DEFINE_integer(
    "parameters", None, "Size of the model, in equal fragments; default: the config's.", **define
  )
  flags.DEFINE_integer("seed", 0, "Of step times.", 0, **define)
  flags.DEFINE_float(
    "seconds", None, "Of virtual time at most; default: until all tokens are merged.", 0.0, **define
  )
  flags.DEFINE_string("workdir", "", "Gets the events; empty: nobody does.", **define)
  flags.DEFINE_bool("overwrite", False, "Replace the run that is in workdir.", **define)
  flags.DEFINE_bool("json", False, "Print one JSON object instead of text.", **define)


def _sizes(values: flags.FlagValues, config: Config) -> tuple[int, ...]:
  parameters, count = values["parameters"].value, config.sync.num_fragments
  if parameters is None:
    from ddiloco.engines import planning  # JAX's shapes: seconds that --parameters does not need

    return planning.fragment_sizes(config)
  if parameters < count:
    raise ConfigError(
      f"--parameters={parameters}: must be at least sync.num_fragments ({count})."
      f" Fix: give --parameters={max(count, 1_000_000)}."
    )
  from ddiloco.engines import virtual

  return virtual.equal_sizes(parameters, count)


def _numbers(values: flags.FlagValues, name: str) -> tuple[float, ...]:
  text = values[name].value
  try:
    found = tuple(float(each) for each in text.split(","))
  except ValueError:
    found = (math.nan,)
  if not all(0 <= each < math.inf for each in found):
    raise ConfigError(
      f"--{name}={text}: must be numbers from 0 on. Fix: give --{name}=1 or --{name}=1,1,0.2."
    )
  return found


def _text(found: dict[str, Any]) -> str:
  """For people."""

  def share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"

  lines = [
    f"{found['learners']} learners, {found['virtual_seconds']:,.0f} s of virtual time in"
    f" {found['wall_seconds']:.1f} s: {found['reason']}.",
    f"{found['steps']:,} steps, {found['commits']:,} commits, clock {found['clock']:,}.",
    "",
    f"goodput        {share(found['goodput'])}   ({_causes(found['causes'])})",
    f"uptime         {share(found['uptime'])}",
    f"liveness       {share(found['liveness'])}",
    f"participation  {share(found['participation'])}, the lowest"
    f" {share(found['lowest_participation'])}",
  ]
  if found["seconds_per_sync"]:
    seconds = found["seconds_per_sync"]
    lines.append(
      f"a sync         {seconds['median']:.3g} s from cut to apply"
      f" ({seconds['tenth']:.3g} to {seconds['nine_tenths']:.3g})"
    )
  lines.append(
    f"links          a learner sent {found['learner_sent_bytes'] / 1e6:,.1f} MB and received"
    f" {found['learner_received_bytes'] / 1e6:,.1f} MB"
  )
  lines += _counted("rounds committed because", found["committed_because"])
  lines += _counted("learners had no part because", found["had_no_part_because"])
  if found["faults"]:
    lines += ["", f"{found['faults']} faults, {found['recovered']} recovered"]
    if found["recovered"]:
      lines[-1] += (
        f" (median {found['median_recovery_seconds']:g} s, worst"
        f" {found['worst_recovery_seconds']:g} s)"
      )
  lines.append(
    f"longest time without any step {found['longest_stall_seconds']:g} s, lost rounds"
    f" {found['lost_rounds']}, unplanned exits {found['unplanned']}"
  )
  return "\n".join(lines)


def _causes(causes: dict[str, float]) -> str:
  most = sorted(causes.items(), key=lambda item: -item[1])[:CAUSES_SHOWN]
  return ", ".join(f"{cause} {value:.1%}" for cause, value in most) or "nothing lost"


def _counted(title: str, counts: dict[str, int]) -> list[str]:
  return ["", f"{title}:", *(f"  {n:8,} x {why}" for why, n in counts.items())] if counts else []
