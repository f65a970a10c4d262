"""The command line: `ddiloco COMMAND --config=FILE --workdir=DIR --config.FIELD=VALUE ...`.

Everything wrong with what was typed is said before a device is touched, with exit status 2.
Exit status 1: work was lost (the run failed); 130: stopped by Ctrl-C, results so far are saved.
"""

from __future__ import annotations

import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import ml_collections
from absl import flags
from ml_collections import config_flags

import ddiloco
from ddiloco import environment
from ddiloco.config import Config, ConfigError, check_field, default, from_dict
from ddiloco.engines.workdir import saved_config

USAGE = """ddiloco: one model, trained across islands that may be far apart and failing.

  ddiloco train     --config=FILE --workdir=DIR [--config.FIELD=VALUE ...]   train; makes DIR/report
  ddiloco generate  --workdir=DIR --prompt=TEXT                              let the result write
  ddiloco evaluate  --workdir=DIR                                            held-out loss of it
  ddiloco report    --workdir=DIR                                            draw DIR/report again

`ddiloco COMMAND --help` lists a command's flags. Experiments are files in configs/."""


def main(argv: Sequence[str] | None = None) -> int:
  """Runs one command; returns the exit status."""
  arguments = list(sys.argv[1:] if argv is None else argv)
  if not arguments or arguments[0] in ("-h", "--help", "help"):
    print(USAGE)
    return 0 if arguments else 2
  if arguments[0] == "--version":
    print(f"ddiloco {ddiloco.__version__}")
    return 0
  command = COMMANDS.get(arguments[0])
  if command is None:
    print(f"ddiloco: there is no command {arguments[0]!r}.\n\n{USAGE}", file=sys.stderr)
    return 2
  try:
    return command(arguments)
  except (ConfigError, flags.Error) as error:
    print(f"ddiloco {arguments[0]}: {error}", file=sys.stderr)
    return 2
  except KeyboardInterrupt:  # while compiling or drawing; a run under way ends in good order
    print(f"ddiloco {arguments[0]}: interrupted", file=sys.stderr)
    return 130


def entry() -> None:
  """The console script."""
  sys.exit(main())


def _train(arguments: list[str]) -> int:
  """Trains as the config says, shows the run live, and leaves result, events and report in workdir.

  With --dry_run it prints the final config, the islands, the fragments and the bytes they move, and
  touches no device.
  """
  values = flags.FlagValues()
  path, arguments = _take_config(arguments)
  config_flags.DEFINE_config_dict(
    "config",
    _experiment(path) if path else default(),
    "Experiment file, e.g. configs/quickstart.py or configs/dense.py:1m; --config.FIELD=VALUE"
    " changes one of its values.",
    values,
    sys_argv=arguments,
  )
  values["config"].default_as_str = None  # too long for --help; config/ has all defaults
  _workdir_flag(values)
  flags.DEFINE_bool("dry_run", False, "Print what would run, then exit.", flag_values=values)
  flags.DEFINE_bool("overwrite", False, "Replace the run that is in workdir.", flag_values=values)
  flags.DEFINE_bool("cpu", False, "Use fake CPU devices even here.", flag_values=values)
  if not _parse(values, arguments, _train.__doc__):
    return 0
  if not path:
    raise ConfigError("--config: is needed. Fix: give --config=configs/quickstart.py, for example.")
  config = from_dict(values["config"].value)
  _prepare(config, values["cpu"].value)
  from ddiloco.engines import session

  workdir = Path(values["workdir"].value)
  if values["dry_run"].value:
    print(session.describe(config))
    return 0
  return session.train(config, workdir, overwrite=values["overwrite"].value)


def _generate(arguments: list[str]) -> int:
  """Lets the trained global model of a run continue a prompt."""
  values = flags.FlagValues()
  _workdir_flag(values)
  flags.DEFINE_string("prompt", "", "Text to continue.", flag_values=values)
  flags.DEFINE_integer("tokens", 200, "How many tokens.", lower_bound=1, flag_values=values)
  flags.DEFINE_float("temperature", 0.7, "0: greedy.", lower_bound=0.0, flag_values=values)
  flags.DEFINE_integer("seed", 0, "Of the sampling.", flag_values=values)
  if not _parse(values, arguments, _generate.__doc__):
    return 0
  config = saved_config(Path(values["workdir"].value))
  _prepare(config, cpu_only=False)
  from ddiloco.engines import session

  get = {name: values[name].value for name in ("prompt", "tokens", "temperature", "seed")}
  print(session.sample(Path(values["workdir"].value), config, **get))
  return 0


def _evaluate(arguments: list[str]) -> int:
  """Prints the held-out loss of the trained global model of a run, as one JSON line."""
  values = flags.FlagValues()
  _workdir_flag(values)
  if not _parse(values, arguments, _evaluate.__doc__):
    return 0
  config = saved_config(Path(values["workdir"].value))
  _prepare(config, cpu_only=False)
  from ddiloco.engines import session

  print(session.evaluate(Path(values["workdir"].value), config))
  return 0


def _report(arguments: list[str]) -> int:
  """Draws the report of a run again from its event logs; also of one that was cut off."""
  values = flags.FlagValues()
  _workdir_flag(values)
  if not _parse(values, arguments, _report.__doc__):
    return 0
  from ddiloco.engines import session

  print(session.report(Path(values["workdir"].value)))
  return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
  "train": _train,
  "generate": _generate,
  "evaluate": _evaluate,
  "report": _report,
}


def _workdir_flag(values: flags.FlagValues) -> None:
  flags.DEFINE_string(
    "workdir", None, "Directory of the run; it is the run's identity.", flag_values=values
  )


def _take_config(arguments: list[str]) -> tuple[str, list[str]]:
  """(value of --config, or "", the other arguments); --config.FIELD is checked and stays."""
  path, rest = "", []
  remaining = iter(arguments)
  for argument in remaining:
    name, equals, value = argument.lstrip("-").partition("=")
    if argument.startswith("-") and name == "config":
      path = value if equals else next(remaining, "")
      continue
    if argument.startswith("-") and name.startswith("config."):
      check_field(name.removeprefix("config."), value)
    rest.append(argument)
  return path, rest


def _experiment(path: str) -> ml_collections.ConfigDict:
  """What `get_config` of an experiment file returns; FILE:PRESET passes it the preset."""
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
      f"--config={path}{line}: {type(error).__name__}: {what}."
      " Fix: name a Python file whose get_config() returns a config, such as configs/quickstart.py."
    ) from error
  if not isinstance(values, ml_collections.ConfigDict):
    raise ConfigError(
      f"--config={path}: get_config() returned {values!r}, must return a ConfigDict."
      " Fix: start from ddiloco.config.default(), change lines, and return it."
    )
  return values


def _parse(values: flags.FlagValues, arguments: list[str], doc: str | None) -> bool:
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
  if not values["workdir"].value:
    raise ConfigError("--workdir: is needed. Fix: give --workdir=DIR, the directory of the run.")
  return True


def _prepare(config: Config, cpu_only: bool) -> None:
  counts = [config.islands.island(m).devices or 1 for m in range(config.islands.num_learners)]
  environment.prepare(num_cpu_devices=sum(counts) + 1, cpu_only=cpu_only)  # one for the evaluator
