"""What commands share: flags, experiment files, and errors that say what to type instead."""

from __future__ import annotations

import json
import runpy
import traceback
from pathlib import Path
from typing import Any

import ml_collections
from absl import flags
from ml_collections import config_flags

from ddiloco.config import Config, ConfigError, check_field, default, from_dict


def workdir_flag(values: flags.FlagValues) -> None:
  flags.DEFINE_string(
    "workdir", None, "Directory of the run; it is the run's identity.", flag_values=values
  )


def cpu_flag(values: flags.FlagValues) -> None:
  flags.DEFINE_bool("cpu", False, "Use fake CPU devices even here.", flag_values=values)


def config_flag(values: flags.FlagValues, arguments: list[str]) -> tuple[str, list[str]]:
  """Defines --config and --config.FIELD; returns (the file, the arguments without it)."""
  path, chaos, arguments = _take_config(arguments)
  config = _experiment(path) if path else default()
  if chaos:
    config.chaos = _experiment(chaos, "config.chaos")
  config_flags.DEFINE_config_dict(
    "config",
    config,
    "Experiment file, e.g. configs/quickstart.py or configs/dense.py:1m, or a run's config.json;"
    " --config.FIELD=VALUE changes one of its values, --config.chaos=FILE its fault plan.",
    values,
    sys_argv=arguments,
  )
  values["config"].default_as_str = None  # too long for --help; config/ has all defaults
  return path, arguments


def final_config(values: flags.FlagValues, path: str) -> Config:
  if not path:
    raise ConfigError("--config: is needed. Fix: give --config=configs/quickstart.py, for example.")
  return from_dict(values["config"].value)


def _take_config(arguments: list[str]) -> tuple[str, str, list[str]]:
  """(--config, --config.chaos, the other arguments); --config.FIELD is checked and stays."""
  path, chaos, rest = "", "", []
  remaining = iter(arguments)
  for argument in remaining:
    name, equals, value = argument.lstrip("-").partition("=")
    if argument.startswith("-") and name == "config":
      path = value if equals else next(remaining, "")
      continue
    if argument.startswith("-") and name == "config.chaos":
      chaos = value if equals else next(remaining, "")
      continue
    if argument.startswith("-") and name.startswith("config."):
      check_field(name.removeprefix("config."), value)
    rest.append(argument)
  return path, chaos, rest


def _experiment(path: str, flag: str = "config") -> ml_collections.ConfigDict:
  """What `get_config` of an experiment file returns; FILE:PRESET passes it the preset.

  A file named .json holds the values themselves, as a run leaves them in its workdir.
  """
  if path.endswith(".json"):
    return _saved(Path(path))
  file, _, preset = path.partition(":")
  try:
    values = runpy.run_path(file)["get_config"](*([preset] if preset else []))
  except ConfigError:
    raise
  except Exception as error:  # somebody's program: it may raise anything
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    line = f", line {frames[-1].lineno}" if frames else ""
    what = "has no get_config()" if error.args == ("get_config",) else str(error)
    raise ConfigError(
      f"--{flag}={path}{line}: {type(error).__name__}: {what}."
      " Fix: name a Python file whose get_config() returns a config, such as configs/quickstart.py."
    ) from error
  if not isinstance(values, ml_collections.ConfigDict):
    raise ConfigError(
      f"--{flag}={path}: get_config() returned {values!r}, must return a ConfigDict."
      " Fix: start from ddiloco.config.default(), change lines, and return it."
    )
  return values


def _saved(path: Path) -> ml_collections.ConfigDict:
  try:
    values = json.loads(path.read_text())
  except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
    raise ConfigError(
      f"--config={path}: cannot be read ({error}). Fix: name the config.json of a run."
    ) from error
  from_dict(values)  # says what is wrong with it better than the update would
  config = default()
  config.update(values)
  return config


def parse(
  values: flags.FlagValues, arguments: list[str], doc: str | None, needs_workdir: bool = True
) -> bool:
  """Parses; False if help was asked for. Wrong flags and fields raise with a suggestion."""
  flags.DEFINE_bool("help", False, "Show this.", short_name="h", flag_values=values)
  if any(a in ("-h", "--help", "-help") for a in arguments):
    print(f"ddiloco {arguments[0]}: {doc}\nFlags:")
    print(values.get_help(include_special_flags=False))
    return False
  try:
    rest = values(arguments)
  except (AttributeError, KeyError, TypeError, ValueError, OSError) as error:
    raise ConfigError(f"{error}. Fix: see `ddiloco {arguments[0]} --help` and the file.") from error
  if rest[1:]:
    raise ConfigError(f"{rest[1]!r}: is not a flag. Fix: write --NAME=VALUE.")
  if needs_workdir and "workdir" in values and not values["workdir"].value:
    raise ConfigError("--workdir: is needed. Fix: give --workdir=DIR, the directory of the run.")
  return True


def needed(values: flags.FlagValues, name: str, example: str) -> Any:
  """The value of a flag that has no default; `example` says what to give."""
  if values[name].value is None:
    raise ConfigError(f"--{name}: is needed. Fix: give --{name}={example}.")
  return values[name].value
