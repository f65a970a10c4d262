"""Shared by all commands: flags, experiment files, and errors that say what to type instead."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from pathlib import Path
from typing import Any, TextIO

from absl import flags
from ml_collections import config_flags

from ddiloco import custom
from ddiloco.api import experiment
from ddiloco.checks import coerce, refusal, shown
from ddiloco.config import Config, ConfigError, check_field, default, from_dict
from ddiloco.workdir import require_local, saved_config

flags.disclaim_key_flags()  # --help lists a flag under the module of the command that adds it


class Helped(Exception):
  """--help was given, and the help has been printed."""


class Flags:
  """The flags of one command: first added, then parsed, then read as attributes.

  Args:
    arguments: the command's name, and the arguments after it.
    common: flags that several commands have: config, workdir (which must be given), cpu.
  """

  def __init__(self, arguments: list[str], *common: str):
    self.experiment = ""  # file of --config; empty: not given
    self._arguments, self._common = arguments, common
    self._values = flags.FlagValues()
    if "config" in common:
      self.add_config()
    if "workdir" in common:
      self.add("workdir", str, "Directory of the run; it is the run's identity.")
    if "cpu" in common:
      self.add("cpu", False, "Use CPU devices, also where JAX finds accelerators.")

  def __getattr__(self, name: str) -> Any:
    return getattr(self._values, name)

  def add(self, name: str, default: Any, what: str, least: Any = None, most: Any = None) -> None:
    """Adds a flag of the default's type; a type as default: the flag has none, and is None.

    A tuple: --NAME=ONE,TWO; a list: --NAME=ONE --NAME=TWO.
    """
    kind, default = (default, None) if isinstance(default, type) else (type(default), default)
    if kind is int:
      flags.DEFINE_integer(name, default, what, least, most, self._values)
    elif kind is float:
      flags.DEFINE_float(name, default, what, least, most, self._values)
    else:
      define = {
        bool: flags.DEFINE_bool,
        str: flags.DEFINE_string,
        tuple: flags.DEFINE_list,
        list: flags.DEFINE_multi_string,
      }[kind]
      define(name, list(default) if kind in (tuple, list) else default, what, self._values)

  def add_choice(self, name: str, choices: list[str], what: str) -> None:
    """Adds a flag with these values, of which the first is the default."""
    flags.DEFINE_enum(name, choices[0], choices, what, self._values)

  def add_fields(self, cls: type) -> None:
    """Adds a flag for each option field of a dataclass, with the field's name and default."""
    for field in dataclasses.fields(cls):
      if "help" in field.metadata:
        self.add(field.name, field.default, field.metadata["help"], *field.metadata["limits"])

  def fields(self, cls: type) -> dict[str, Any]:
    """The values of the flags that `add_fields` added."""
    options = (f.name for f in dataclasses.fields(cls) if "help" in f.metadata)
    given = {name: getattr(self, name) for name in options}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}

  def add_config(self) -> None:
    """Adds --config and --config.FIELD."""
    self.experiment, chaos, self._arguments = _take_config(self._arguments)
    config = experiment(self.experiment, "config") if self.experiment else default()
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
      fix = f"use an option that {self.experiment} gives"
      raise refusal("--config", self.experiment, str(error), fix) from error
    except flags.Error as error:  # an option that is a list, or None
      fix = "give all options of the section together: --config.model.options=\"{'NAME': [1, 2]}\""
      raise ConfigError(f"{str(error).partition('. ')[0]}. Fix: {fix}.") from error
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
    except (AttributeError, KeyError, TypeError, ValueError, OSError, flags.Error) as error:
      fix = f"`ddiloco {command} --help` has all flags, ddiloco/config/schema.py all fields"
      raise ConfigError(f"{str(error).rstrip(' ?.')}. Fix: {fix}.") from error
    for name in self._values:
      value = self._values[name].value
      if name in ("workdir", "keys") and value:  # no shell reads the "~" of --workdir=~/runs
        self._values[name].value = os.path.expanduser(value)
      own = not name.startswith("config.")  # those are checked with the config
      if own and type(value) in (int, float):
        try:
          coerce(type(value), value, name)
        except ConfigError as error:
          raise ConfigError(f"--{name}={shown(value)}: {error.said}") from error
    if rest[1:]:
      raise ConfigError(f"{rest[1]!r}: is not a flag. Fix: write --NAME=VALUE.")
    if "workdir" in self._common:
      self.needed("workdir", "DIR, the directory of the run")
    if "workdir" in self._values and self._values.workdir:
      _require_path("workdir", self._values.workdir)

  def needed(self, name: str, example: str) -> Any:
    """The value of a flag that must be given; `example`: a value, for the error message."""
    value = getattr(self, name)
    if value in (None, [], ""):  # also of a variable that a shell does not have
      raise ConfigError(f"--{name}: is needed. Fix: give --{name}={example}.")
    return value

  @property
  def workdir(self) -> Any:
    """The path of --workdir; None where it may be missing, and is."""
    return Path(self._values.workdir) if self._values.workdir else None

  def run_config(self) -> Config:
    """The config of the run in --workdir; where --config is given, that one.

    Raises:
      ConfigError: there is no run, or --config is that of another one.
    """
    changed = any(argument.lstrip("-").startswith("config.") for argument in self._arguments)
    mine = self.final_config() if self.experiment or changed else None
    return saved_config(self.workdir, mine)

  def final_config(self) -> Config:
    """The experiment file's config, with the changes of flags.

    Raises:
      ConfigError: --config is missing, or the config breaks a rule.
    """
    if not self.experiment:
      raise ConfigError("--config: is needed. Fix: give --config=configs/quickstart.py, say.")
    return custom.absolute(from_dict(self.config))


def _require_path(flag: str, path: str) -> None:
  """Refuses what can be no path, or cannot be reached; nothing need be there yet."""
  require_local(f"--{flag}", path)
  try:
    os.stat(path)
  except (FileNotFoundError, NotADirectoryError):
    return
  except (OSError, ValueError) as error:  # too long, a loop of links, denied, a zero in it, ...
    rule = f"cannot be reached ({str(error)[:100]})"
    raise refusal(f"--{flag}", path, rule, "choose another path") from error


def _take_config(arguments: list[str]) -> tuple[str, str, list[str]]:
  """(--config, --config.chaos, the other arguments); --config.FIELD is checked and stays."""
  files, rest = {"config": "", "config.chaos": ""}, []
  remaining = iter(arguments)
  for argument in remaining:
    name, equals, value = argument.lstrip("-").partition("=")
    if argument.startswith("-") and name in files:
      files[name] = value if equals else next(remaining, "")
      continue
    if argument.startswith("-") and name.startswith("config."):
      check_field(name.removeprefix("config."), value)
    rest.append(argument)
  return files["config"], files["config.chaos"], rest


# --- Standard output of commands whose work must not end when printing fails


class Unheard:
  """A stream that drops text that cannot be written: its reader is gone, or its disk is full.

  Otherwise a `print` would end the run, and Python's last flush would change the exit status.
  """

  def __init__(self, stream: TextIO):
    self._stream = stream

  def write(self, text: str) -> int:
    with contextlib.suppress(OSError, ValueError):
      self._stream.write(text)
    return len(text)

  def flush(self) -> None:
    with contextlib.suppress(OSError, ValueError):
      self._stream.flush()

  def __getattr__(self, name: str) -> Any:
    return getattr(self._stream, name)


def go_on_unheard() -> None:
  """From now on a failure to print does not end this process."""
  for name in ("stdout", "stderr"):
    stream = getattr(sys, name)
    if stream is not None:
      setattr(sys, name, Unheard(stream))
