"""Checks that name the field, the value, the rule and the fix; dataclasses from nested mappings."""

from __future__ import annotations

import dataclasses
import difflib
import math
import sys
import typing
from collections.abc import Mapping
from typing import Any

import ml_collections


class ConfigError(ValueError):
  """A config field breaks its rule. The text names field, value, rule and fix."""


def require(ok: bool, field: str, value: Any, rule: str, fix: str) -> None:
  if not ok:
    raise ConfigError(f"{field} = {value!r}: {rule}. Fix: {fix}.")


def must(section: str, config: Any, name: str, ok: bool, rule: str, fix: str) -> None:
  """`require` of a section's field."""
  require(ok, f"{section}.{name}", getattr(config, name), rule, fix)


def positive(section: str, config: Any, *names: str) -> None:
  for name in names:
    ok = getattr(config, name) > 0
    must(section, config, name, ok, "must be greater than 0", "set a positive value")


def not_negative(section: str, config: Any, *names: str) -> None:
  for name in names:
    ok = getattr(config, name) >= 0
    must(section, config, name, ok, "must not be negative", "set 0 or more")


def one_of(section: str, config: Any, name: str, *choices: str) -> None:
  value = getattr(config, name)
  close = difflib.get_close_matches(str(value), choices, 1) or choices[:1]
  rule = f"must be one of {', '.join(choices)}"
  must(section, config, name, value in choices, rule, f"for example {close[0]!r}")


def share(section: str, config: Any, *names: str) -> None:
  for name in names:
    ok = 0 <= getattr(config, name) < 1
    must(section, config, name, ok, "must lie in [0, 1)", "set a share below 1")


def typed(section: str, config: Any) -> None:
  """Refuses fields of another type, and numbers that are not finite."""
  for name, hint in typing.get_type_hints(type(config)).items():
    coerce(hint, getattr(config, name), f"{section}.{name}")


def option(default: Any, text: str) -> Any:
  """A dataclass field that is a command-line flag too (`cli/arguments.py`), with its help text."""
  return dataclasses.field(default=default, metadata={"help": text})


def is_number(text: Any) -> bool:
  """Whether a role's number is written as the roles' own names write it: 2, not 02."""
  if not isinstance(text, str) or len(text) > 9:  # Python converts no text of thousands of digits
    return False
  return text.isdecimal() and text == str(int(text))


def refuse_unknown(where: str, values: Mapping[str, Any], cls: type) -> None:
  known = [f.name for f in dataclasses.fields(cls)]
  for name in values:
    close = difflib.get_close_matches(str(name), known, 1)
    fix = f"did you mean {close[0]!r}" if close else f"known fields are {', '.join(known)}"
    require(
      name in known, f"{where}.{name}".lstrip("."), values[name], "there is no such field", fix
    )


def build(cls: type, values: Mapping[str, Any], where: str) -> Any:
  """A frozen dataclass from a nested mapping, with types checked field by field."""
  if isinstance(values, ml_collections.ConfigDict):
    values = values.to_dict()
  require(isinstance(values, Mapping), where or "config", values, "must be a mapping", "nest it")
  refuse_unknown(where, values, cls)
  hints = typing.get_type_hints(cls)
  built = {}
  for name, value in values.items():
    field = f"{where}.{name}".lstrip(".")
    built[name] = coerce(hints[name], value, field)
  try:
    return cls(**built)
  except TypeError as error:
    raise ConfigError(f"{where}: {error}. Fix: give the missing field.") from error


def coerce(hint: Any, value: Any, field: str) -> Any:
  if isinstance(hint, type) and dataclasses.is_dataclass(hint):
    return build(hint, value, field)
  if typing.get_origin(hint) is tuple:
    require(isinstance(value, tuple | list), field, value, "must be a sequence", "use a tuple")
    each = typing.get_args(hint)[0]
    return tuple(coerce(each, v, f"{field}[{i}]") for i, v in enumerate(value))
  if hint is float and isinstance(value, int) and not isinstance(value, bool):
    rule, fix = "must be a finite number", "give a finite value"
    require(abs(value) <= sys.float_info.max, field, value, rule, fix)
    return float(value)
  if typing.get_origin(hint) is Mapping:
    require(isinstance(value, Mapping), field, value, "must be a mapping", "use {'2': {...}}")
    each = typing.get_args(hint)[1]
    if each is Any:
      return dict(value)
    return {name: coerce(each, v, f"{field}.{name}") for name, v in value.items()}
  right = isinstance(value, hint) and not (hint is int and isinstance(value, bool))
  require(right, field, value, f"must be of type {hint.__name__}", f"give a {hint.__name__}")
  require(
    not isinstance(value, float) or math.isfinite(value),
    field,
    value,
    "must be a finite number",
    "give a finite value",
  )
  return value
