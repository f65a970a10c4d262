"""The user's own model, data and inner optimizer, found by their names in the config.

`model.custom = "examples/own_model.py:model"` names a function. Every process of a run, and a later
replay of the run, calls this function with the same section of the config. So the config alone
describes the run, whichever engine places its roles, and no object of the user's is pickled or
sent. All roles must have the same source text: its digest is part of the run's contract. The file
may import JAX, but must make no array at its top level: the process is not ready for devices yet.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ddiloco.config import Config, ConfigError, InnerConfig, ModelConfig

if TYPE_CHECKING:
  import optax

  from ddiloco.models.model import Model

SECTIONS = ("model", "data", "inner")  # sections of a config that have a field `custom`


# --- The config's model and optimizer, ddiloco's own or the user's


@functools.cache
def load_model(config: ModelConfig) -> Model:
  """The model that `config` means, checked against `models.model.Model`.

  Raises:
    ConfigError: the user's own model cannot be made, or does not fit the protocol.
  """
  from ddiloco.models import transformer
  from ddiloco.models.model import Model

  if not config.custom:
    return transformer.language_model(config)
  model = make("model", config)
  wanted = [name for name in vars(Model) if not name.startswith("_")]
  refuse_missing("model", config.custom, model, wanted, "ddiloco.models.model.Model")
  shapes = _called("model", config.custom, "shapes()", model.shapes)
  axes = _called("model", config.custom, "logical_axes()", model.logical_axes)
  for name, leaf in shapes.items():
    if str(leaf.dtype) != "float32":
      raise _unfit("model", config.custom, f"parameter {name} is {leaf.dtype}, must be float32")
    if 0 in leaf.shape:
      text = f"parameter {name} has shape {tuple(leaf.shape)}"
      raise _unfit("model", config.custom, f"{text}: it must have values, or nothing can save it")
    if len(axes.get(name, ())) != len(leaf.shape):
      text = f"parameter {name} has shape {tuple(leaf.shape)}, and axes {axes.get(name)}"
      raise _unfit("model", config.custom, f"{text}: there must be a name or None for each")
  if not shapes or axes.keys() != shapes.keys():
    raise _unfit("model", config.custom, "shapes() and logical_axes() must name the same, not none")
  return model


def check(config: Config) -> None:
  """Refuses a custom model or optimizer that breaks its protocol; touches no device.

  Raises:
    ConfigError: names the function, what it returned and what it must return; or the file of a
      custom part has changed since this process read it.
  """
  for section in SECTIONS:
    _refuse_changed(section, getattr(config, section).custom)
  if config.model.custom:
    _check_model(config)
  if config.inner.custom:
    _check_optimizer(config)


def _check_model(config: Config) -> None:
  import jax

  text, model = config.model.custom, load_model(config.model)
  shapes, batch = model.shapes(), _inputs(config, 2)
  key = jax.eval_shape(lambda: jax.random.key(0))
  made = _called("model", text, "init()", lambda: jax.eval_shape(model.init, key))
  if (given := _kinds(made)) != (wanted := _kinds(shapes)):
    raise _unfit("model", text, f"init() gives {given}, must give what shapes() says: {wanted}")

  def loss() -> dict[str, Any]:
    total, metrics = jax.eval_shape(model.loss, shapes, batch)
    return {"what is minimised": total, **metrics}

  def evaluate() -> dict[str, Any]:
    return dict(jax.eval_shape(model.evaluate, shapes, batch))

  reported = _called("model", text, "loss()", loss)
  if odd := sorted(reported.keys() - {"what is minimised", "loss", "load_balance"}):
    raise _unfit("model", text, f"loss() also reports {odd}; evaluate() is the place")
  measured = _called("model", text, "evaluate()", evaluate)
  for where, found in (("loss()", reported), ("evaluate()", measured)):
    for name, value in {"loss": None, **found}.items():
      if value is None or value.shape or str(value.dtype) != "float32":
        raise _unfit("model", text, f"{where} gives {name} = {value}, must give a float32 scalar")


def _check_optimizer(config: Config) -> None:
  import jax

  transform, shapes = load_optimizer(config.inner), load_model(config.model).shapes()

  def update() -> Any:
    state = jax.eval_shape(transform.init, shapes)
    return state, *jax.eval_shape(transform.update, shapes, state, shapes)

  before, updates, after = _called("inner", config.inner.custom, "init() or update()", update)
  if (was := _state_kinds(before)) != (becomes := _state_kinds(after)):
    text = f"update() makes the state {becomes}, must leave it what init() makes: {was}"
    raise _unfit("inner", config.inner.custom, text)
  if keys := [name for name, kind in was.items() if kind.startswith("key<")]:
    text = f"the state has keys ({', '.join(keys)}), which no snapshot can hold: it must have"
    raise _unfit("inner", config.inner.custom, f"{text} their jax.random.key_data() instead")
  if (given := _kinds(updates)) != (wanted := _kinds(shapes)):
    text = f"update() gives {given}, must give an update of every parameter: {wanted}"
    raise _unfit("inner", config.inner.custom, text)


def _kinds(arrays: Any) -> Any:
  return {name: f"{value.dtype}{list(value.shape)}" for name, value in arrays.items()}


def _state_kinds(state: Any) -> dict[str, str]:
  import jax

  leaves, structure = jax.tree_util.tree_flatten_with_path(state)
  return {"structure": str(structure)} | _kinds({jax.tree_util.keystr(p): x for p, x in leaves})


def _inputs(config: Config, batch_size: int) -> Any:
  import jax

  model, length = load_model(config.model), config.data.sequence_length
  inputs = _called(
    "model", config.model.custom, "inputs()", lambda: model.inputs(batch_size, length)
  )
  for leaf in jax.tree.leaves(inputs):
    if leaf.shape[:1] != (batch_size,):
      text = f"inputs({batch_size}, ...) has an array of shape {leaf.shape}"
      raise _unfit("model", config.model.custom, f"{text}: its first axis must be the batch")
  return inputs


def flops_per_token(config: Config) -> float:
  """Training FLOPs, forward and backward, of one token.

  0.0 for a custom model without `flops_per_token` (`models.model.Model`). For ddiloco's own model
  see `models.transformer.LanguageModel`.
  """
  own = getattr(load_model(config.model), "flops_per_token", None)
  return float(own(config.data.sequence_length)) if own is not None else 0.0


def load_optimizer(config: InnerConfig) -> optax.GradientTransformation:
  """The user's own optax transform; only where `config.custom` names one.

  Raises:
    ConfigError: it cannot be made, or is no optax transform.
  """
  made = make("inner", config)
  refuse_missing("inner", config.custom, made, ("init", "update"), "optax.GradientTransformation")
  return made


# --- Names, and the functions they stand for


def make(section: str, config: Any) -> Any:
  """Calls the function that `config.custom` names with `config`, and returns its result.

  Args:
    section: "model", "data" or "inner".
    config: that section.

  Raises:
    ConfigError: there is no such file, module or function, or it fails.
  """
  where, _, name = config.custom.rpartition(":")
  module = _called(section, config.custom, where, lambda: _import(section, config.custom))
  factory = getattr(module, name, None)
  if not callable(factory):
    known = [each for each in vars(module) if callable(getattr(module, each)) and each[0] != "_"]
    raise ConfigError(
      f"{section}.custom = {config.custom!r}: {where} has no function {name!r}. Fix: name one of"
      f" its functions ({', '.join(known) or 'there are none'})."
    )
  return _called(section, config.custom, f"{name}()", lambda: factory(config))


def refuse_missing(
  section: str, text: str, made: Any, names: tuple[str, ...] | list[str], protocol: str
) -> None:
  """Refuses an object that lacks methods of the protocol.

  Raises:
    ConfigError: names the missing methods.
  """
  missing = [name for name in names if not callable(getattr(made, name, None))]
  if missing:
    what = f"it made a {type(made).__name__}, which has no {', '.join(missing)}"
    raise _unfit(section, text, f"{what}; every {protocol} has")


def identity(config: Any) -> list[str]:
  """What all roles of a run must agree on: [function, digest of its source]; [] without `custom`.

  The path of the file may differ between machines.

  Raises:
    ConfigError: the source is not there.
  """
  if not config.custom:
    return []
  where, _, name = config.custom.rpartition(":")
  section = type(config).__name__.removesuffix("Config").lower()
  source = _source(section, config.custom)
  return [name, hashlib.sha256(source.read_bytes()).hexdigest()[:16] if source else where]


def absolute(config: Config) -> Config:
  """The config with every FILE.py in it absolute, for processes in other working directories."""
  changed = {}
  for section in SECTIONS:
    values = getattr(config, section)
    where, _, name = values.custom.rpartition(":")
    if where.endswith(".py") and not os.path.isabs(where):
      changed[section] = dataclasses.replace(values, custom=f"{os.path.abspath(where)}:{name}")
  return dataclasses.replace(config, **changed) if changed else config


def _source(section: str, text: str) -> Path | None:
  """The source file of the named function; None for a module without a file."""
  where = text.rpartition(":")[0]
  if not where.endswith(".py"):
    found = _called(section, text, where, lambda: importlib.util.find_spec(where))
    return Path(found.origin) if found and found.origin and found.has_location else None
  path = Path(os.path.abspath(where))
  if not path.is_file():
    raise ConfigError(
      f"{section}.custom = {text!r}: {path} is no file. Fix: name a Python file that every process"
      " of the run can read, or a module that is installed wherever they run."
    )
  return path


def _import(section: str, text: str) -> ModuleType:
  """The module; a file is executed once in a process, however its path is written."""
  where = text.rpartition(":")[0]
  if not where.endswith(".py"):
    return importlib.import_module(where)
  path = _source(section, text)
  assert path is not None
  name = _module_name(path)
  if name not in sys.modules:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    setattr(module, _READ, path.read_bytes())
    try:
      spec.loader.exec_module(module)
    except BaseException:
      del sys.modules[name]
      raise
  return sys.modules[name]


_READ = "_ddiloco_source"  # of a module that is a file: its text when it was executed


def _module_name(path: Path) -> str:
  return f"_ddiloco_custom_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"


def _refuse_changed(section: str, text: str) -> None:
  """Refuses a file whose old text this process would run, under the digest of the new text."""
  path = Path(os.path.abspath(text.rpartition(":")[0]))
  module = sys.modules.get(_module_name(path))
  if module and path.is_file() and getattr(module, _READ) != path.read_bytes():
    raise ConfigError(
      f"{section}.custom = {text!r}: {path} has changed since this process read it. Fix: train in a"
      " new process (in a notebook: restart the kernel)."
    )


def _called(section: str, text: str, what: str, call: Callable[[], Any]) -> Any:
  """Returns `call()`; any exception of the user's code becomes a ConfigError."""
  try:
    return call()
  except ConfigError:
    raise
  except Exception as error:
    where = text.rpartition(":")[0]
    home = getattr(sys.modules.get(where), "__file__", None) or os.path.abspath(where)
    frames = traceback.extract_tb(error.__traceback__)
    frame = ([each for each in frames if each.filename == home] or frames)[-1]
    raise ConfigError(
      f"{section}.custom = {text!r}: {what} fails at {frame.filename}, line {frame.lineno}"
      f" ({type(error).__name__}: {error}). Fix: correct it there, or the name."
    ) from error


def _unfit(section: str, text: str, rule: str) -> ConfigError:
  return ConfigError(
    f"{section}.custom = {text!r}: {rule}. Fix: see examples/own_model.py, which has all of it."
  )
