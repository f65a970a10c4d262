"""Shared by all commands: flags, experiment files, and errors that say what to type instead."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, TextIO

from absl import flags
from ml_collections import config_flags

from ddiloco import custom
from ddiloco.api import experiment
from ddiloco.config import Config, ConfigError, check_field, default, from_dict

flags.disclaim_key_flags()  # --help lists a flag under the module of the command that adds it


class Helped(Exception):
  """--help was given, and the help has been printed."""


class Flags:
  """The flags of one command: first added, then parsed, then read as attributes.

  Args:
    arguments: the command's name, and the arguments after it.
  """

  def __init__(self, arguments: list[str]):
    self._arguments = arguments
    self._values = flags.FlagValues()
    self._needs_workdir = False
    self._experiment = ""  # file of --config

  def __getattr__(self, name: str) -> Any:
    return getattr(self._values, name)

  def add_text(self, name: str, default: str | None, what: str) -> None:
    flags.DEFINE_string(name, default, what, self._values)

  def add_list(self, name: str, what: str) -> None:
    """Adds --NAME=ONE,TWO."""
    flags.DEFINE_list(name, [], what, self._values)

  def add_repeated(self, name: str, what: str) -> None:
    """Adds --NAME=ONE --NAME=TWO."""
    flags.DEFINE_multi_string(name, [], what, self._values)

  def add_choice(self, name: str, choices: list[str], what: str) -> None:
    """Adds a flag with these values, of which the first is the default."""
    flags.DEFINE_enum(name, choices[0], choices, what, self._values)

  def add_integer(
    self,
    name: str,
    default: int | None,
    what: str,
    least: int | None = None,
    most: int | None = None,
  ) -> None:
    flags.DEFINE_integer(name, default, what, least, most, self._values)

  def add_number(
    self, name: str, default: float | None, what: str, least: float | None = None
  ) -> None:
    flags.DEFINE_float(name, default, what, least, flag_values=self._values)

  def add_switch(self, name: str, what: str) -> None:
    flags.DEFINE_bool(name, False, what, self._values)

  def add_fields(self, cls: type) -> None:
    """Adds a flag for each option field of a dataclass, with the field's name, type and default."""
    for field in dataclasses.fields(cls):
      match field.type, field.metadata.get("help"):
        case _, None:
          continue
        case "int", text:
          self.add_integer(field.name, field.default, text)
        case "float", text:
          self.add_number(field.name, field.default, text)
        case "str", text:
          self.add_text(field.name, field.default, text)
        case "bool", text:
          self.add_switch(field.name, text)
        case _, text:
          self.add_list(field.name, text)

  def fields(self, cls: type) -> dict[str, Any]:
    """The values of the flags that `add_fields` added."""
    options = (f.name for f in dataclasses.fields(cls) if "help" in f.metadata)
    given = {name: getattr(self, name) for name in options}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}

  def add_workdir(self) -> None:
    """Adds --workdir, which must be given."""
    self._needs_workdir = True
    self.add_text("workdir", None, "Directory of the run; it is the run's identity.")

  def add_cpu(self) -> None:
    self.add_switch("cpu", "Use CPU devices, also where JAX finds accelerators.")

  def add_config(self) -> None:
    """Adds --config and --config.FIELD."""
    self._experiment, chaos, self._arguments = _take_config(self._arguments)
    config = experiment(self._experiment, "config") if self._experiment else default()
    if chaos:
      config.chaos = experiment(chaos, "config.chaos")
    try:
      config_flags.DEFINE_config_dict(
        "config",
        config,
        "Experiment file, e.g. configs/quickstart.py or configs/dense.py:1m, or a run's"
        " config.json; --config.FIELD=VALUE changes one of its values, --config.chaos=FILE its"
        " fault plan.",
        self._values,
        sys_argv=self._arguments,
      )
    except AttributeError as error:  # an unknown name in `options`, which the file defines
      raise ConfigError(
        f"--config: {error}. Fix: use an option that {self._experiment} gives."
      ) from error
    self._values["config"].default_as_str = None  # too long for --help; config/ has all defaults

  def parse(self, doc: str | None) -> None:
    """Parses the arguments.

    Args:
      doc: the command's docstring, for --help.

    Raises:
      ConfigError: a flag or field is wrong, with a suggestion, or --workdir is missing.
      Helped: --help was given, and has been printed.
    """
    command = self._arguments[0]
    flags.DEFINE_bool("help", False, "Show this.", short_name="h", flag_values=self._values)
    if any(a in ("-h", "--help", "-help") for a in self._arguments):
      print(f"ddiloco {command}: {doc}\nFlags:")
      print(self._values.get_help(include_special_flags=False))
      raise Helped
    try:
      rest = self._values(self._arguments)
    except (AttributeError, KeyError, TypeError, ValueError, OSError) as error:
      raise ConfigError(f"{error}. Fix: see `ddiloco {command} --help` and the file.") from error
    if rest[1:]:
      raise ConfigError(f"{rest[1]!r}: is not a flag. Fix: write --NAME=VALUE.")
    if self._needs_workdir and not self.workdir:
      raise ConfigError("--workdir: is needed. Fix: give --workdir=DIR, the directory of the run.")

  def needed(self, name: str, example: str) -> Any:
    """The value of a flag that has no default; `example`: a value, for the error message."""
    value = getattr(self, name)
    if value is None:
      raise ConfigError(f"--{name}: is needed. Fix: give --{name}={example}.")
    return value

  def has_experiment(self) -> bool:
    """Whether --config was given."""
    return bool(self._experiment)

  def final_config(self) -> Config:
    """The experiment file's config, with the changes of flags.

    Raises:
      ConfigError: --config is missing, or the config breaks a rule.
    """
    if not self._experiment:
      raise ConfigError(
        "--config: is needed. Fix: give --config=configs/quickstart.py, for example."
      )
    return custom.absolute(from_dict(self.config))


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


# --- Standard output of commands whose work must not end when printing fails


class Unheard:
  """A stream that drops text that cannot be written: its reader is gone, or its disk is full.

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
  """From now on a failure to print does not end this process."""
  for name in ("stdout", "stderr"):
    stream = getattr(sys, name)
    if stream is not None:
      setattr(sys, name, Unheard(stream))
