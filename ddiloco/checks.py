"""Checks that name the field, the value, the rule and the fix; dataclasses from nested mappings."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import errno
import functools
import itertools
import math
import os
import sys
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_collections

_MISSING = dataclasses.MISSING
_LARGEST = 1 << 53  # larger integers are rounded where they are computed with as floats
_LONGEST_SECONDS = 1e9  # 31 years; threads cannot wait for more than some centuries
_HUGE = 1e100  # products and quotients of a few numbers up to this are finite
_SHOWN = 200  # characters of a value in an error
_ODD_SHOWN = 8  # names that an error lists


class ConfigError(ValueError):
  """A config field breaks its rule. The text names field, value, rule and fix.

  Attributes:
    field: its name; "" where the error is about something else.
    said: the rule and the fix.
  """

  field = said = ""


class Unanswered(ConfigError, OSError):
  """A user's storage does not answer. It may do so the next time: a role crashes, to be started
  again."""


FULL = errno.ENOSPC, errno.EDQUOT  # numbers of the errors of a disk, or a quota, that is full
_ABOUT_PATHS = (
  FileNotFoundError | FileExistsError | NotADirectoryError | IsADirectoryError | PermissionError
)


def kind_of(error: BaseException) -> type[ConfigError]:
  """The kind of refusal that an error causes: one of a file that is not about its path may be gone
  the next time."""
  passing = isinstance(error, OSError) and not isinstance(error, _ABOUT_PATHS)
  return Unanswered if passing else ConfigError


def lasts(error: BaseException) -> bool:
  """Whether an error is about the config, and would be the same after a restart."""
  return isinstance(error, ConfigError) and not isinstance(error, Unanswered)


def refusal(
  field: str, value: Any, rule: str, fix: str, kind: type[ConfigError] = ConfigError
) -> ConfigError:
  """The error to raise for a value that breaks its rule."""
  said = f"{rule}. Fix: {fix}."
  error = kind(f"{field} = {shown(value)}: {said}")
  error.field, error.said = field, said
  return error


def shown(value: Any) -> str:
  """The value for an error, not too long."""
  try:
    text = repr(value)
  except ValueError:  # Python prints no integer of thousands of digits
    return f"a {type(value).__name__} too long to print"
  return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def require(ok: bool, field: str, value: Any, rule: str, fix: str) -> None:
  if not ok:
    raise refusal(field, value, rule, fix)


def is_there(path: str | os.PathLike[str]) -> bool:
  """Whether something is at a local path; `exists` may say no where that cannot be known.

  Raises:
    OSError: it cannot be known: a file system does not answer, or denies it.
  """
  with contextlib.suppress(FileNotFoundError, NotADirectoryError):
    return bool(Path(path).stat())
  return False


def differences(given: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
  """Names that are given but not wanted, or otherwise than wanted, or missing; "" if none is.

  >>> differences({"a": (2,), "b": ()}, {"a": (3,), "b": ()})
  'a is (2,), not (3,) (1 in all)'
  """
  names = sorted(given.keys() | wanted.keys())
  odd = [name for name in names if given.get(name) != wanted.get(name)]
  each = (f"{n} is {given.get(n, 'missing')}, not {wanted.get(n, 'known')}" for n in odd)
  return f"{'; '.join(itertools.islice(each, _ODD_SHOWN))} ({len(odd)} in all)" if odd else ""


def must(section: str, config: Any, name: str, ok: bool, rule: str, fix: str) -> None:
  """`require` of a section's field."""
  require(ok, f"{section}.{name}", getattr(config, name), rule, fix)


def positive(section: str, config: Any, *names: str) -> None:
  for name in names:
    value, least = getattr(config, name), 1 / _HUGE  # what is divided by it stays finite
    rule = f"must be at least {least:g}" if value > 0 else "must be greater than 0"
    must(section, config, name, value >= least, rule, "set a positive value")


def not_negative(section: str, config: Any, *names: str) -> None:
  for name in names:
    ok = getattr(config, name) >= 0
    must(section, config, name, ok, "must not be negative", "set 0 or more")


def require_one_of(field: str, value: Any, choices: Iterable[str]) -> None:
  choices = list(choices)
  if value not in choices:  # looking for a close one takes longer than all other checks
    close = difflib.get_close_matches(str(value), choices, 1) or choices
    rule = f"must be one of {', '.join(choices)}"
    raise refusal(field, value, rule, f"for example {close[0]!r}")


def share(section: str, config: Any, *names: str) -> None:
  for name in names:
    ok = 0 <= getattr(config, name) < 1
    must(section, config, name, ok, "must lie in [0, 1)", "set a share below 1")


_types = functools.cache(typing.get_type_hints)
_hints = functools.cache(functools.partial(typing.get_type_hints, include_extras=True))


def check(section: str, config: Any) -> None:
  """Refuses values that break the rules in their fields' types: a Literal, or Annotated ones."""
  for name, hint in _hints(type(config)).items():
    if typing.get_origin(hint) is typing.Literal:
      require_one_of(f"{section}.{name}", getattr(config, name), typing.get_args(hint))
    for rule in getattr(hint, "__metadata__", ()):
      rule(section, config, name)


def typed(section: str, config: Any) -> None:
  """Refuses fields of another type, and numbers that are not finite."""
  for name, hint in _types(type(config)).items():
    coerce(hint, getattr(config, name), f"{section}.{name}")


def option(default: Any, text: str, least: Any = None, most: Any = None) -> Any:
  """A dataclass field that is a command-line flag too (`cli/arguments.py`), with its help text."""
  flag = {"help": text, "limits": (least, most)}
  return dataclasses.field(default=default, metadata=flag)


def is_number(text: Any) -> bool:
  """Whether a role's number is written as the roles' own names write it: 2, not 02."""
  if not isinstance(text, str) or len(text) > 9:  # Python converts no text of thousands of digits
    return False
  return text.isdecimal() and text == str(int(text))


def refuse_unknown(where: str, values: Mapping[str, Any], cls: type) -> None:
  known = [f.name for f in dataclasses.fields(cls)]
  for name in values:
    if name not in known:
      close = difflib.get_close_matches(str(name), known, 1)
      fix = f"did you mean {close[0]!r}" if close else f"known fields are {', '.join(known)}"
      field = f"{where}.{name}".lstrip(".")
      raise refusal(field, values[name], "there is no such field", fix)


def build(cls: type, values: Mapping[str, Any], where: str) -> Any:
  """A frozen dataclass from a nested mapping, with types checked field by field."""
  typed = typed_fields(cls, values, where)
  needed = [f.name for f in dataclasses.fields(cls) if f.default is f.default_factory is _MISSING]
  missing = [name for name in needed if name not in typed]
  require(not missing, where, typed, f"must have {', '.join(missing)}", "give what is missing")
  return cls(**typed)


def typed_fields(cls: type, values: Mapping[str, Any], where: str) -> dict[str, Any]:
  """Values of some of the dataclass's fields, with names and types checked."""
  require(isinstance(values, Mapping), where or "config", values, "must be a mapping", "nest it")
  refuse_unknown(where, values, cls)
  hints = _types(cls)
  return {n: coerce(hints[n], v, f"{where}.{n}".lstrip(".")) for n, v in values.items()}


def coerce(hint: Any, value: Any, field: str) -> Any:
  if isinstance(value, ml_collections.ConfigDict):
    value = value.to_dict()
  if isinstance(hint, type) and dataclasses.is_dataclass(hint):
    return value if isinstance(value, hint) else build(hint, value, field)
  origin, each = typing.get_origin(hint), typing.get_args(hint)
  if origin is typing.Literal:
    hint = str  # the section itself says which
  if origin is tuple:
    require(isinstance(value, tuple | list), field, value, "must be a sequence", "use a tuple")
    return tuple(coerce(each[0], v, f"{field}[{i}]") for i, v in enumerate(value))
  if origin is Mapping:
    require(isinstance(value, Mapping), field, value, "must be a mapping", "use {'2': {...}}")
    return {name: coerce(each[1], v, f"{field}.{name}") for name, v in value.items()}
  if hint is Any:
    with contextlib.suppress(Exception):  # its section refuses what cannot be copied
      value = copy.deepcopy(value)  # the caller may go on to change it
    return value
  if hint is float and isinstance(value, int) and not isinstance(value, bool):
    value = float(value) if abs(value) <= sys.float_info.max else math.inf
  right = isinstance(value, hint) and not (hint is int and isinstance(value, bool))
  require(right, field, value, f"must be of type {hint.__name__}", f"give a Python {hint.__name__}")
  if hint is float:
    rule = f"must be a finite number, and lie between -{_HUGE:g} and {_HUGE:g}"
    require(abs(value) <= _HUGE, field, value, rule, "give a number of usual size")
    good = not field.endswith("seconds") or abs(value) <= _LONGEST_SECONDS
    require(good, field, value, f"must be at most {_LONGEST_SECONDS:g}", "give a shorter time")
  if hint is int:
    rule = f"must lie between -2**53 and 2**53 ({_LARGEST})"
    require(abs(value) <= _LARGEST, field, value, rule, "give a number of usual size")
  return value
