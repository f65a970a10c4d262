"""The command that hands a run's result to other programs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from absl import flags

from ddiloco import environment
from ddiloco.cli.arguments import needed, parse, workdir_flag
from ddiloco.config import Config, ConfigError
from ddiloco.engines.workdir import saved_config

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
  from ddiloco.engines import session
  from ddiloco.runtime import weights

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
  from ddiloco.runtime import weights

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
