"""The command that says whether a run fits its links before anybody pays for it."""

from __future__ import annotations

import json
import math
from typing import Any

from absl import flags

from ddiloco.cli.arguments import config_flag, needed, parse
from ddiloco.config import Config, ConfigError, from_dict
from ddiloco.resilience import advice, planner


def plan(arguments: list[str]) -> int:
  """Says what a run needs of its links and shards, and what to change where it does not fit.

  The run is a config's, cut into its real fragments, or --parameters in equal ones, with the
  protocol of --config.sync. How long a step takes is given, or follows from chips and tokens:

    ddiloco plan --config=configs/dense.py:12b --gbps=5 --latency_ms=30 --step_seconds=4
    ddiloco plan --parameters=12e9 --islands=4 --gbps=2 --latency_ms=30 --codec=int4 \\
      --chips=64 --chip_teraflops=459 --tokens=262144 --config.sync.num_fragments=96

  Bytes are those of rounds in which everybody takes part; no device is touched.
  """
  values = flags.FlagValues()
  path, arguments = config_flag(values, arguments)
  _define(values)
  if not parse(values, arguments, plan.__doc__):
    return 0
  if not path and values["parameters"].value is None:
    raise ConfigError(
      "--config: is needed, or --parameters. Fix: give --config=configs/dense.py:12b, for example."
    )
  setting = _setting(values, _config(values))
  made = planner.make(setting)
  if values["json"].value:
    print(json.dumps(advice.as_json(setting, made)))
  else:
    print("\n".join(advice.lines(setting, made)))
  return 0


def _define(values: flags.FlagValues) -> None:
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
  number("step_seconds", None, "How long an inner step takes; or give the next four.")
  number("chips", None, "In one island.")
  number("chip_teraflops", None, "Peak of one chip, in 1e12 FLOP/s.")
  number("mfu", 0.5, "Share of the peak that a step reaches.")
  number("tokens", None, "Of an island's step, instead of the config's.")
  number("core_gbytes", planner.CORE_GBYTES, "GB/s of f32 that one core of a shard merges.")
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
    sizes = tuple((parameters + i) // count for i in range(count))
  step_seconds = _step_seconds(values, config, sum(sizes) if sizes else None)
  if sizes is None:
    from ddiloco.engines import planning  # JAX's shapes: seconds that --parameters does not need

    sizes = planning.fragment_sizes(config)
  return planner.Setting(
    sizes=sizes,
    sync=config.sync,
    islands=config.islands.num_learners,
    step_seconds=step_seconds,
    gbps=gbps,
    latency_seconds=_not_negative(values, "latency_ms", "30") / 1000,
    momentum=config.outer.momentum > 0,
    shard_gbps=_not_negative(values, "shard_gbps", "100"),
    core_gbytes=_positive(values, "core_gbytes", "4"),
    window_bytes=config.network.window_bytes,
  )


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
  from ddiloco.engines import planning

  flops = planning.step_flops(config)
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
