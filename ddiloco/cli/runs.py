"""Commands about whole runs: train, generate, evaluate, report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from absl import flags

from ddiloco import environment
from ddiloco.cli.arguments import config_flag, cpu_flag, final_config, parse, workdir_flag
from ddiloco.cli.dashboard import access_flags, where
from ddiloco.config import Config, ConfigError
from ddiloco.engines.workdir import saved_config


def train(arguments: list[str]) -> int:
  """Trains as the config says, shows the run live, and leaves result, events and report in workdir.

  With --dry_run it prints the final config, the islands, the fragments and the bytes they move, and
  touches no device.
  """
  values = flags.FlagValues()
  path, arguments = config_flag(values, arguments)
  workdir_flag(values)
  flags.DEFINE_bool("dry_run", False, "Print what would run, then exit.", flag_values=values)
  flags.DEFINE_bool("overwrite", False, "Replace the run that is in workdir.", flag_values=values)
  flags.DEFINE_string(
    "engine",
    "threads",
    "threads: all of it in this process; processes: a process for each island and shard; ray: an"
    " actor for each, on this machine or a cluster.",
    flag_values=values,
  )
  flags.DEFINE_string(
    "ray_address",
    "",
    "With --engine=ray: HOST:PORT of a cluster, or auto; else a Ray of this machine alone. All"
    " nodes of a cluster must share workdir.",
    flag_values=values,
  )
  flags.DEFINE_string(
    "dashboard",
    "",
    "HOST:PORT that shows the run in a browser; 127.0.0.1:0: any free port. Else there is none.",
    flag_values=values,
  )
  access_flags(values)
  cpu_flag(values)
  if not parse(values, arguments, train.__doc__):
    return 0
  config, engine = final_config(values, path), values["engine"].value
  options = _engine_options(values)
  cpu_only = values["cpu"].value or values["dry_run"].value  # Orbax looks for devices
  _prepare(config, cpu_only, supervises=engine != "threads")
  from ddiloco.engines import session

  workdir = Path(values["workdir"].value)
  if values["dry_run"].value:
    print(session.describe(config))
    return 0
  return session.train(
    config,
    workdir,
    overwrite=values["overwrite"].value,
    engine=engine,
    options=options,
    dashboard=where(values, "dashboard") if values["dashboard"].value else None,
  )


def generate(arguments: list[str]) -> int:
  """Lets the trained global model of a run continue a prompt."""
  values = flags.FlagValues()
  workdir_flag(values)
  flags.DEFINE_string("prompt", "", "Text to continue.", flag_values=values)
  flags.DEFINE_integer("tokens", 200, "How many tokens.", lower_bound=1, flag_values=values)
  flags.DEFINE_float("temperature", 0.7, "0: greedy.", lower_bound=0.0, flag_values=values)
  flags.DEFINE_integer("seed", 0, "Of the sampling.", flag_values=values)
  if not parse(values, arguments, generate.__doc__):
    return 0
  config = saved_config(Path(values["workdir"].value))
  _prepare(config, cpu_only=False)
  from ddiloco.engines import session

  get = {name: values[name].value for name in ("prompt", "tokens", "temperature", "seed")}
  print(session.sample(Path(values["workdir"].value), config, **get))
  return 0


def evaluate(arguments: list[str]) -> int:
  """Prints the held-out loss of the trained global model of a run, as one JSON line."""
  values = flags.FlagValues()
  workdir_flag(values)
  if not parse(values, arguments, evaluate.__doc__):
    return 0
  config = saved_config(Path(values["workdir"].value))
  _prepare(config, cpu_only=False)
  from ddiloco.engines import session

  print(session.evaluate(Path(values["workdir"].value), config))
  return 0


def report(arguments: list[str]) -> int:
  """Draws the report of a run again from its event logs; also of one that was cut off."""
  values = flags.FlagValues()
  workdir_flag(values)
  if not parse(values, arguments, report.__doc__):
    return 0
  from ddiloco.engines import session

  print(session.report(Path(values["workdir"].value)))
  return 0


def _engine_options(values: flags.FlagValues) -> dict[str, Any]:
  """What the engine is told besides config and workdir."""
  address, engine = values["ray_address"].value, values["engine"].value
  if engine == "ray":
    return {"address": address, "cpu_only": values["cpu"].value}
  if address:
    raise ConfigError(
      f"--ray_address={address}: --engine={engine} does not use Ray. Fix: add --engine=ray."
    )
  return {}


def _prepare(config: Config, cpu_only: bool, supervises: bool = False) -> None:
  counts = [config.islands.island(m).devices or 1 for m in range(config.num_islands())]
  environment.prepare(
    num_cpu_devices=sum(counts) + 1,  # one for the evaluator
    cpu_only=cpu_only,
    supervises=supervises,
  )
