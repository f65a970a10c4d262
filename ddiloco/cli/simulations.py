"""Commands about runs that are not there: plan one, simulate its chips, play its protocol."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import flags

from ddiloco.cli.arguments import config_flag, final_config, needed, parse
from ddiloco.config import Config, ConfigError, from_dict
from ddiloco.simulation import planner
from ddiloco.simulation.chips import ChipTime, Fleet, decoupled, elastic, inelastic

# --- The command that says whether a run fits its links before it is paid for


def plan(arguments: list[str]) -> int:
  """Says what a run needs of its links and shards, and what to change where it does not fit.

  The run is a config's, partitioned into its real fragments, or --parameters in equal ones, with
  the protocol of --config.sync. How long a step takes is given, or follows from chips and tokens:

    ddiloco plan --config=configs/dense.py:12b --gbps=5 --latency_ms=30 --step_seconds=4
    ddiloco plan --parameters=12e9 --islands=4 --gbps=2 --latency_ms=30 --codec=int4 \\
      --chips=64 --chip_teraflops=459 --tokens=262144 --config.sync.num_fragments=96

  Bytes are those of rounds in which every learner takes part; no device is touched.
  """
  values = flags.FlagValues()
  path, arguments = config_flag(values, arguments)
  _define_plan(values)
  if not parse(values, arguments, plan.__doc__):
    return 0
  if not path and values["parameters"].value is None:
    raise ConfigError(
      "--config: is needed, or --parameters. Fix: give --config=configs/dense.py:12b, for example."
    )
  setting = _setting(values, _config(values))
  made = planner.make(setting)
  if values["json"].value:
    print(json.dumps(planner.as_json(setting, made)))
  else:
    print("\n".join(planner.lines(setting, made)))
  return 0


def _define_plan(values: flags.FlagValues) -> None:
  """All flags but --config."""

  def number(name: str, default: float | None, text: str) -> None:
    flags.DEFINE_float(name, default, text, flag_values=values)

  number("parameters", None, "Size of the model, instead of the config's; fragments are equal.")
  flags.DEFINE_integer("islands", None, "How many, instead of the config's.", flag_values=values)
  number("gbps", None, "Gbit/s of every island's link, in each direction.")
  number("latency_ms", 0.0, "One way, between any two places.")
  number(
    "shard_gbps",
    0.0,
    "Gbit/s of shards that stand on their own; 0: they stand beside the islands and share links.",
  )
  flags.DEFINE_string(
    "codec", None, "Both ways, instead of the config's: f32, bf16, int8, int4.", flag_values=values
  )
  number(
    "step_seconds",
    None,
    "How long an inner step takes; else give --chips and --chip_teraflops (and --mfu, --tokens).",
  )
  number("chips", None, "In one island.")
  number("chip_teraflops", None, "Peak of one chip, in 1e12 FLOP/s.")
  number("mfu", 0.5, "Share of the peak that a step reaches.")
  number("tokens", None, "Of an island's step, instead of the config's.")
  number("core_gbytes", planner.CORE_GBYTES, "GB/s of f32 that a shard merges.")
  number("host_gbytes", planner.CORE_GBYTES, "GB/s that a learner's host touches beside its step.")
  flags.DEFINE_bool(
    "measure",
    False,
    "Measure --core_gbytes on this machine, as a shard would merge: some seconds.",
    flag_values=values,
  )
  flags.DEFINE_bool("json", False, "One JSON object instead of text.", flag_values=values)


def _config(values: flags.FlagValues) -> Config:
  """The config, with what flags say instead."""
  config: Any = values["config"].value
  codec = values["codec"].value
  if values["islands"].value is not None:
    config.islands.num_learners = values["islands"].value
  if codec is not None:
    config.sync.push_codec = config.sync.publish_codec = codec
  return from_dict(config)


def _setting(values: flags.FlagValues, config: Config) -> planner.Setting:
  gbps = _positive(values, "gbps", "2")
  sizes: tuple[int, ...] | None = None
  count = config.sync.num_fragments
  if values["parameters"].value is not None:
    parameters = int(_positive(values, "parameters", "12e9"))
    if parameters < count:
      raise ConfigError(
        f"--parameters={parameters}: must be at least sync.num_fragments ({count})."
        f" Fix: give more, or --config.sync.num_fragments={parameters}."
      )
    sizes = planner.equal_sizes(parameters, count)
  step_seconds = _step_seconds(values, config, sum(sizes) if sizes else None)
  if sizes is None:
    from ddiloco.roles import initial  # JAX's shapes: seconds that --parameters does not need

    sizes = initial.fragment_sizes(config)
  return planner.Setting.of(
    config,
    sizes,
    step_seconds=step_seconds,
    gbps=gbps,
    latency_seconds=_not_negative(values, "latency_ms", "30") / 1000,
    shard_gbps=_not_negative(values, "shard_gbps", "100"),
    core_gbytes=_core_gbytes(values, config),
    host_gbytes=_positive(values, "host_gbytes", "100"),
  )


def _core_gbytes(values: flags.FlagValues, config: Config) -> float:
  if not values["measure"].value:
    return _positive(values, "core_gbytes", "4")
  from ddiloco.engines import rates

  found = rates.merge_gbytes(config)
  if not values["json"].value:
    print(f"This machine merges {found:.1f} GB/s of f32 (--core_gbytes={found:.1f}).\n")
  return found


def _step_seconds(values: flags.FlagValues, config: Config, parameters: int | None) -> float:
  """As given, or FLOPs of a step over what an island computes in a second."""
  if values["step_seconds"].value is not None:
    return _positive(values, "step_seconds", "1")
  if values["chips"].value is None:
    raise ConfigError(
      "--step_seconds: is needed, or --chips and --chip_teraflops."
      " Fix: give --step_seconds=1, or what a step takes."
    )
  rate = _positive(values, "chips", "64") * _positive(values, "chip_teraflops", "459") * 1e12
  rate *= _positive(values, "mfu", "0.5")
  if parameters is not None:
    return 6 * parameters * _positive(values, "tokens", "262144") / rate
  from ddiloco.roles import initial

  flops = initial.step_flops(config)
  if values["tokens"].value is not None:
    flops *= _positive(values, "tokens", "262144") / config.tokens_per_step(0)
  return flops / rate


def _positive(values: flags.FlagValues, name: str, example: str) -> float:
  value = _finite(values, name, example)
  if value <= 0:
    raise ConfigError(f"--{name}={value:g}: must be greater than 0. Fix: give --{name}={example}.")
  return value


def _not_negative(values: flags.FlagValues, name: str, example: str) -> float:
  value = _finite(values, name, example)
  if value < 0:
    raise ConfigError(f"--{name}={value:g}: must not be negative. Fix: give --{name}={example}.")
  return value


def _finite(values: flags.FlagValues, name: str, example: str) -> float:
  value: Any = needed(values, name, example)
  if not math.isfinite(value):
    raise ConfigError(f"--{name}={value}: must be finite. Fix: give --{name}={example}.")
  return value


# --- The command that plays a config's run in virtual time

CAUSES_SHOWN = 4


def protocol(arguments: list[str]) -> int:
  """A config's run in virtual time: its protocol, islands and fault plan, without arrays.

  The same decisions as in a real run, in its order, with step times, links and faults simulated:

    ddiloco simulate protocol --config=configs/quickstart.py --step_seconds=0.1
    ddiloco simulate protocol --config=configs/quickstart.py --step_seconds=0.1 --gbps=1 \\
      --latency_ms=30 --config.chaos=configs/chaos/soak.py:7 --workdir=runs/virtual

  --workdir leaves the events, for `ddiloco dashboard` and `ddiloco report`. An island whose
  islands.min_step_seconds is set steps at that pace. Losses are not simulated.
  """
  values = flags.FlagValues()
  path, arguments = config_flag(values, arguments)
  _define_protocol(values)
  if not parse(values, arguments, protocol.__doc__, needs_workdir=False):
    return 0
  config = final_config(values, path)
  from ddiloco.engines import virtual
  from ddiloco.simulation.run import Speeds

  setting = Speeds(
    sizes=_sizes(values, config),
    step_seconds=values["step_seconds"].value,
    jitter=values["jitter"].value,
    gbps=_numbers(values, "gbps"),
    latency_seconds=tuple(ms / 1000 for ms in _numbers(values, "latency_ms")),
    shard_gbps=values["shard_gbps"].value,
    merge_gbytes=values["merge_gbytes"].value,
    host_gbytes=values["host_gbytes"].value,
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


def _define_protocol(values: flags.FlagValues) -> None:
  """All flags but --config."""
  define = {"flag_values": values}
  flags.DEFINE_float(
    "step_seconds", 1.0, "Of islands without islands.min_step_seconds.", 0.0, **define
  )
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
    "merge_gbytes",
    4.0,
    "GB/s of f32 that a shard merges (`ddiloco plan --measure`).",
    0.0,
    **define,
  )
  flags.DEFINE_float(
    "host_gbytes", 4.0, "GB/s of f32 that a learner's host touches beside its step.", 0.0, **define
  )
  flags.DEFINE_integer(
    "parameters", None, "Size of the model, in equal fragments; default: the config's.", **define
  )
  flags.DEFINE_integer("seed", 0, "Of step times.", 0, **define)
  flags.DEFINE_float(
    "seconds", None, "Of virtual time at most; default: until all tokens are merged.", 0.0, **define
  )
  flags.DEFINE_string("workdir", "", "Gets the events; empty: they are not kept.", **define)
  flags.DEFINE_bool("overwrite", False, "Replace the run that is in workdir.", **define)
  flags.DEFINE_bool("json", False, "Print one JSON object instead of text.", **define)


def _sizes(values: flags.FlagValues, config: Config) -> tuple[int, ...]:
  parameters, count = values["parameters"].value, config.sync.num_fragments
  if parameters is None:
    from ddiloco.roles import initial  # JAX's shapes: seconds that --parameters does not need

    return initial.fragment_sizes(config)
  if parameters < count:
    raise ConfigError(
      f"--parameters={parameters}: must be at least sync.num_fragments ({count})."
      f" Fix: give --parameters={max(count, 1_000_000)}."
    )
  return planner.equal_sizes(parameters, count)


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
    f"{found['steps']:,} steps, {found['commits']:,} commits,"
    f" global step {found['global_step']:,}.",
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
      f"a sync         {seconds['median']:.3g} s from copy-out to apply"
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


# --- The command that simulates what cannot be run here

CAUSES = ("downscale", "upscale", "restart", "absent")


def simulate(arguments: list[str]) -> int:
  """`ddiloco simulate [WHAT] --NAME=VALUE ...`; WHAT: chips, also if left out, or protocol."""
  command, *rest = arguments
  what = rest.pop(0) if rest and not rest[0].startswith("-") else "chips"
  if what not in SIMULATIONS:
    known = ", ".join(SIMULATIONS)
    raise ConfigError(f"{what!r}: cannot be simulated. Fix: give one of {known}, or flags alone.")
  return SIMULATIONS[what]([f"{command} {what}", *rest])


def chips(arguments: list[str]) -> int:
  """Chips that fail: how much of their time trains, for one job that needs all of them, one
  elastic job, and learners that never wait for each other. Takes seconds; needs no accelerator.

  goodput: share of all chip time that trains. uptime: share of time in which a learner trains. The
  rest is where the other chip time went. Every assumption is a flag; --json prints one JSON object.
  `ddiloco simulate protocol --help`: a config's run in virtual time, with its faults and links.
  """
  values = flags.FlagValues()
  for field in dataclasses.fields(Fleet):
    define = flags.DEFINE_integer if field.type == "int" else flags.DEFINE_float
    define(field.name, field.default, field.metadata["help"], flag_values=values)
  flags.DEFINE_bool("json", False, "Print one JSON object instead of a table.", flag_values=values)
  if not parse(values, arguments, chips.__doc__):
    return 0
  fleet = Fleet(**{field.name: values[field.name].value for field in dataclasses.fields(Fleet)})
  as_json = values["json"].value
  rows: dict[str, ChipTime] = {}
  for name, simulated in (
    ("inelastic", inelastic),
    ("elastic", elastic),
    ("decoupled", decoupled),
  ):
    rows[name] = simulated(fleet)
    if not as_json:
      if len(rows) == 1:
        print(_heading(fleet, rows[name].failures))
      print(_row(_label(name, fleet), rows[name]), flush=True)
  if as_json:
    found = {name: _shares(spent) for name, spent in rows.items()}
    failures = rows["decoupled"].failures
    print(json.dumps({"fleet": dataclasses.asdict(fleet), "failures": failures, **found}))
  return 0


def _label(name: str, fleet: Fleet) -> str:
  if name == "decoupled":
    return f"decoupled, {fleet.learners} learner{'s' * (fleet.learners > 1)}"
  return {"inelastic": "data-parallel, not elastic", "elastic": "data-parallel, elastic"}[name]


def _heading(fleet: Fleet, failures: int) -> str:
  often = f", one every {fleet.seconds / failures:.3g} s" if failures else ""
  head = (
    f"{fleet.chips:,} chips, {fleet.days:g} days, {fleet.mtbi_chip_years:g} years between failures"
    f" of one chip: {failures:,} failures{often} (seed {fleet.seed})."
  )
  columns = "".join(f"{name:>10}" for name in ("goodput", "uptime", *CAUSES))
  return f"{head}\n\n{'':27}{columns}"


def _row(label: str, spent: ChipTime) -> str:
  shares = _shares(spent)
  cells = [f"{shares[name]:10.2%}" for name in ("goodput", "uptime")]
  cells += [f"{shares[name]:10.2%}" if shares[name] else f"{'–':>10}" for name in CAUSES]
  return f"{label:27}" + "".join(cells)


def _shares(spent: ChipTime) -> dict[str, float]:
  causes = {name: getattr(spent, name) / spent.total for name in CAUSES}
  return {"goodput": spent.goodput, "uptime": spent.uptime, **causes}


SIMULATIONS: dict[str, Callable[[list[str]], int]] = {"chips": chips, "protocol": protocol}
