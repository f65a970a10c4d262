"""Commands about whole runs: train, generate, evaluate, report."""

from __future__ import annotations

import dataclasses
import json
import signal
import threading
from pathlib import Path
from typing import Any

from absl import flags

from ddiloco import environment
from ddiloco.api import ready
from ddiloco.cli.arguments import config_flag, cpu_flag, final_config, needed, parse, workdir_flag
from ddiloco.config import Config, ConfigError
from ddiloco.dashboard.server import Dashboard, Where
from ddiloco.workdir import saved_config

# --- The command that serves mission control, and its flags, which `train` shares


def dashboard(arguments: list[str]) -> int:
  """Serves one page about the run in workdir, while it runs or afterwards, until Ctrl-C.

  It reads workdir and nothing else, so it may run anywhere that sees it.
  """
  values = flags.FlagValues()
  workdir_flag(values)
  flags.DEFINE_string("bind", "127.0.0.1:0", "HOST:PORT, port 0: a free one.", flag_values=values)
  access_flags(values)
  if not parse(values, arguments, dashboard.__doc__):
    return 0
  workdir = Path(values["workdir"].value)
  if not workdir.is_dir():
    raise ConfigError(f"--workdir={workdir}: is no directory. Fix: name the directory of a run.")
  ended = threading.Event()
  before = signal.signal(signal.SIGTERM, lambda *_: ended.set())
  try:
    with Dashboard(workdir, where(values, "bind")) as served:
      print(f"Dashboard of {workdir}: {served.url}   (Ctrl-C ends it)", flush=True)
      ended.wait()
  except KeyboardInterrupt:
    print()
  finally:
    signal.signal(signal.SIGTERM, before)
  return 0


def access_flags(values: flags.FlagValues) -> None:
  """--token and --allow_faults."""
  flags.DEFINE_string(
    "token",
    "",
    "What the dashboard asks for; needed off loopback. @FILE reads it from a file, which hides it"
    " from `ps`.",
    flag_values=values,
  )
  flags.DEFINE_bool(
    "allow_faults", False, "Faults may be injected from the dashboard.", flag_values=values
  )


def where(values: flags.FlagValues, flag: str) -> Where:
  """What the flags say; the address is that of `flag`."""
  token = values["token"].value
  if token.startswith("@"):
    try:
      token = Path(token[1:]).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
      raise ConfigError(f"--token={token}: cannot be read ({error}). Fix: name a file.") from error
    if not token:
      raise ConfigError(f"--token={values['token'].value}: is empty. Fix: write a token into it.")
  return Where(values[flag].value, token, values["allow_faults"].value, f"--{flag}")


# --- The command that hands a run's result to other programs

SUMMARY = Path("report", "summary.json")


def export(arguments: list[str]) -> int:
  """Writes the global model of a finished run as weights that need nothing of ddiloco to be read.

  --to=NAME.safetensors makes one local file; any other path a plain Orbax checkpoint, a directory,
  also gs://BUCKET/... Both hold f32 arrays with the model's own flat names, such as embedding,
  final_norm/scale or layers/attention/query. What begins with layers/ is all layers stacked: its
  first axis is the layer. The model, the tokenizer and the merged tokens are in the metadata.

  To start another run from it: ddiloco train --config.run.init_from=PATH.
  """
  values = flags.FlagValues()
  workdir_flag(values)
  flags.DEFINE_string(
    "to", None, "What to write: NAME.safetensors, or an Orbax directory.", flag_values=values
  )
  flags.DEFINE_bool("overwrite", False, "Replace what is there.", flag_values=values)
  if not parse(values, arguments, export.__doc__):
    return 0
  to = needed(values, "to", "model.safetensors")
  workdir, overwrite = Path(values["workdir"].value), values["overwrite"].value
  config = saved_config(workdir)
  environment.prepare(num_cpu_devices=1, cpu_only=True)
  from ddiloco.checkpoint import weights
  from ddiloco.engines import session

  refuse_target(to, overwrite)
  params = session.load_result(workdir, config)
  try:
    written = weights.save(to, params, metadata(workdir, config))
  except Exception as error:  # object stores and Orbax have their own
    raise ConfigError(
      f"--to={to}: cannot be written ({type(error).__name__}: {error})."
      " Fix: choose a path that you may write to, with enough room."
    ) from error
  count, size = sum(v.size for v in params.values()), sum(v.nbytes for v in params.values())
  print(f"{written}: {len(params)} tensors, {count:,} parameters, {size:,} bytes")
  return 0


def refuse_target(to: str, overwrite: bool) -> None:
  """Refuses to replace anything unasked, and whatever is no weights even then.

  Raises:
    ConfigError: the path is taken, or is nothing that could be written.
  """
  from ddiloco.checkpoint import weights

  path = weights.absolute(to)
  file = path.name.endswith(weights.SUFFIX)
  if file and "://" in to:
    raise ConfigError(
      f"--to={to}: a safetensors file can only be local. Fix: write it here and copy it, or leave"
      f" out {weights.SUFFIX} for an Orbax checkpoint."
    )
  try:
    if not path.exists():
      return
    ours = path.is_file() if file else path.is_dir() and weights.is_checkpoint(path)
  except Exception as error:
    raise ConfigError(
      f"--to={to}: cannot be reached ({type(error).__name__}: {error}). Fix: choose another path."
    ) from error
  if not ours:
    kind = "no file" if file else "no Orbax checkpoint"
    raise ConfigError(
      f"--to={to}: exists and is {kind}; it is left alone, also with --overwrite."
      " Fix: choose a path where nothing is."
    )
  if not overwrite:
    raise ConfigError(f"--to={to}: exists. Fix: choose another path, or add --overwrite.")


def metadata(workdir: Path, config: Config) -> dict[str, str]:
  """What a reader of the weights alone should know."""
  known = {
    "format": "ddiloco",
    "model": json.dumps(dataclasses.asdict(config.model)),
    "tokenizer": config.data.tokenizer,
  }
  try:
    merged = json.loads((workdir / SUMMARY).read_text()).get("merged_tokens")
  except (OSError, ValueError):
    merged = None  # a result may have been copied here without its report
  return known | ({"merged_tokens": str(merged)} if merged else {})


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
  ready(config, cpu_only, supervises=engine != "threads")
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
  ready(config, cpu=False)
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
  ready(config, cpu=False)
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
