"""What commands share: flags, experiment files, and errors that say what to type instead."""

from __future__ import annotations

import sys
from typing import Any, TextIO

from absl import flags
from ml_collections import config_flags

from ddiloco import custom
from ddiloco.api import experiment
from ddiloco.config import Config, ConfigError, check_field, default, from_dict

# --- Standard output of commands that do work which is worth more than what they say about it


class Unheard:
  """A stream that drops what cannot be written: its reader is gone, or its disk is full.

  Otherwise a `print` would end the run, and Python's last flush would change the exit status.
  """

  def __init__(self, stream: TextIO):
    self._stream = stream

  def write(self, text: str) -> int:
    try:
      return self._stream.write(text)
    except (OSError, ValueError):
      return len(text)

  def flush(self) -> None:
    try:
      self._stream.flush()
    except (OSError, ValueError):
      return

  def __getattr__(self, name: str) -> Any:
    return getattr(self._stream, name)


def go_on_unheard() -> None:
  """From now on nothing that is said in this process can end it."""
  for name in ("stdout", "stderr"):
    stream = getattr(sys, name)
    if stream is not None:
      setattr(sys, name, Unheard(stream))


def workdir_flag(values: flags.FlagValues) -> None:
  flags.DEFINE_string(
    "workdir", None, "Directory of the run; it is the run's identity.", flag_values=values
  )


def cpu_flag(values: flags.FlagValues) -> None:
  flags.DEFINE_bool(
    "cpu", False, "Use CPU devices, also where JAX finds accelerators.", flag_values=values
  )


def config_flag(values: flags.FlagValues, arguments: list[str]) -> tuple[str, list[str]]:
  """Defines --config and --config.FIELD; returns (the file, the arguments without it)."""
  path, chaos, arguments = _take_config(arguments)
  config = experiment(path, "config") if path else default()
  if chaos:
    config.chaos = experiment(chaos, "config.chaos")
  try:
    config_flags.DEFINE_config_dict(
      "config",
      config,
      "Experiment file, e.g. configs/quickstart.py or configs/dense.py:1m, or a run's config.json;"
      " --config.FIELD=VALUE changes one of its values, --config.chaos=FILE its fault plan.",
      values,
      sys_argv=arguments,
    )
  except AttributeError as error:  # of `options`, whose names are the experiment file's own
    raise ConfigError(f"--config: {error}. Fix: use an option that {path} gives.") from error
  values["config"].default_as_str = None  # too long for --help; config/ has all defaults
  return path, arguments


def final_config(values: flags.FlagValues, path: str) -> Config:
  if not path:
    raise ConfigError("--config: is needed. Fix: give --config=configs/quickstart.py, for example.")
  return custom.absolute(from_dict(values["config"].value))


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
