"""The user's own model, data and inner optimizer, found by their names in the config.

`model.custom = "examples/own_model.py:model"` names a function. Every process of a run, and a later
replay of the run, calls this function with the same section of the config. So the config alone
describes the run, whichever engine places its roles, and no object of the user's is pickled or
sent. All roles must have the same source text: its digest is part of the run's contract. The file
may import JAX, but must make no array at its top level: the process is not ready for devices yet.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from ddiloco.checks import kind_of, refusal
from ddiloco.config import Config, ConfigError, DataConfig, InnerConfig, ModelConfig

if TYPE_CHECKING:
  import optax

  from ddiloco.models.model import Model

SECTIONS = ("model", "data", "inner")  # sections of a config that have a field `custom`
Section: TypeAlias = ModelConfig | DataConfig | InnerConfig


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
  wanted = [name for name in vars(Model) if not name.startswith("_")]
  model = make(config, wanted, "ddiloco.models.model.Model")
  shapes = _by_name(config, "shapes()", model.shapes)
  axes = called(config, "logical_axes()", model.logical_axes)
  names = axes.keys() if isinstance(axes, Mapping) else set()
  if not shapes or not names >= shapes.keys():
    _refuse(config, "shapes() and logical_axes() must be dicts that name the same, not none")
  for name, leaf in shapes.items():
    good = str(leaf.dtype) == "float32" and 0 not in leaf.shape  # nothing can save what is empty
    good = good and isinstance(axes[name], tuple) and len(axes[name]) == len(leaf.shape)
    if not (good and all(name.split("/"))):  # no snapshot could tell "a/" from "a"
      rule = "must be float32, have values, and a tuple of names or None, one for each axis"
      what = f"parameter {name!r} is {leaf.dtype}{list(leaf.shape)}, with the axes {axes[name]}"
      _refuse(
        config,
        f"{what}: it {rule}; its name is parts joined by '/', none of them empty",
        "keep it in float32 (a loss may compute in another), or let the model's frozen() have it",
      )
  return model


@functools.cache
def frozen_shapes(config: ModelConfig) -> Mapping[str, Any]:
  """Shape and dtype of the model's frozen arrays, which may be large: they are read once for it.

  Raises:
    ConfigError: `frozen()` fails, or gives no arrays by name.
  """
  import jax

  from ddiloco.models.model import frozen

  given = _by_name(config, "frozen()", lambda: frozen(load_model(config)))
  return {name: jax.ShapeDtypeStruct(each.shape, each.dtype) for name, each in given.items()}


def check(config: Config) -> None:
  """Refuses a custom model or optimizer that breaks its protocol; touches no device.

  Raises:
    ConfigError: names the function, what it returned and what it must return.
  """
  if config.model.custom:
    _check_model(config)
  if config.inner.custom:
    _check_optimizer(config)


def renew(config: Config) -> Config:
  """Forgets custom parts whose source has changed since this process read it; returns the config.

  For a program that makes several runs, before each of them: a run uses one text from its beginning
  to its end.
  """
  for part in (config.model, config.data, config.inner):
    where = part.custom.rpartition(":")[0]
    home = _home(where)
    read = _texts.get(home)
    if read and os.path.isfile(home) and read != _files(where, home):
      del _texts[home]
      for name, module in sys.modules.copy().items():
        if getattr(module, "__file__", None) in read and name != "__main__":
          del sys.modules[name]
      load_model.cache_clear()
      frozen_shapes.cache_clear()
  return config


def _check_model(config: Config) -> None:
  import jax

  from ddiloco.models.model import PLAIN

  own, model, rows = config.model, load_model(config.model), 2
  shapes, length = model.shapes(), config.data.sequence_length
  still = frozen_shapes(own)
  if both := sorted(still.keys() & shapes.keys()):
    _refuse(own, f"frozen() and shapes() both have {both}: a parameter is trained, or it is not")
  if odd := sorted(model.logical_axes().keys() - shapes.keys() - still.keys()):
    _refuse(own, f"shapes() and logical_axes() must name the same: {odd} is in the latter alone")
  seen = {**shapes, **still}
  batch = called(own, "inputs()", lambda: model.inputs(rows, length))
  for leaf in _arrays(own, "inputs()", jax.tree.leaves(batch)):
    if leaf.shape[:1] != (rows,):
      rule = f"inputs({rows}, ...) has an array of shape {leaf.shape}"
      _refuse(own, f"{rule}: its first axis must be the batch")
  key = jax.eval_shape(lambda: jax.random.key(0))
  _require_like(own, "init()", lambda: jax.eval_shape(model.init, key), shapes)

  def loss(params: Any, batch: Any) -> Any:
    return model.loss(params, batch, PLAIN)  # as a step calls it

  found = called(own, "loss()", lambda: jax.eval_shape(loss, seen, batch))
  if not (isinstance(found, tuple | list) and len(found) == 2 and isinstance(found[1], Mapping)):
    rule = 'must give (what is minimised, {"loss": what is reported})'
    _refuse(own, f"loss() gives {found}, {rule}")
  if odd := sorted(found[1].keys() - {"loss", "load_balance"}):
    _refuse(own, f"loss() also reports {odd}; evaluate() is the place")
  measured = called(own, "evaluate()", lambda: jax.eval_shape(model.evaluate, seen, batch))
  if not isinstance(measured, Mapping):
    _refuse(own, f'evaluate() gives {measured}, must give {{"loss": ...}}')
  reported = {"what is minimised": found[0], **found[1]}
  for where, values in (("loss()", reported), ("evaluate()", measured)):
    for name, value in {"loss": None, **values}.items():
      if getattr(value, "shape", None) != () or str(value.dtype) != "float32":
        _refuse(own, f"{where} gives {name} = {value}, must give a float32 scalar")
  flops_per_token(config)


def _check_optimizer(config: Config) -> None:
  import jax
  from jax.interpreters.partial_eval import dce_jaxpr

  own, shapes = config.inner, load_model(config.model).shapes()
  transform = load_optimizer(own)

  def update() -> Any:
    state = jax.eval_shape(transform.init, shapes)
    return state, *jax.eval_shape(transform.update, shapes, state, shapes)

  what = "init(params) or update(grads, state, params)"  # an optimizer may want the loss, too
  before, updates, after = called(own, what, update)
  was, becomes = _kinds(before), _kinds(after)
  if jax.tree.flatten(was) != jax.tree.flatten(becomes):
    _refuse(own, f"update() makes the state {becomes}, must leave it what init() makes: {was}")
  if any(kind.startswith("key<") for kind in jax.tree.leaves(was)):
    rule = f"the state {was} has keys, which no snapshot can hold"
    _refuse(own, f"{rule}: it must have their jax.random.key_data() instead")
  # As `training.step.StateLayout` names them.
  paths = (path for path, _ in jax.tree_util.tree_leaves_with_path({"inner": before}))
  names = [jax.tree_util.keystr(path, simple=True, separator="/") for path in paths]
  if odd := [name for name in names if names.count(name) > 1 or not all(name.split("/"))]:
    rule = f"the state has arrays {odd}, which no snapshot can tell apart"
    _refuse(own, f"{rule}: each needs a path of its own, of keys that are not empty")
  _require_like(own, "update()", lambda: updates, shapes)
  traced = jax.make_jaxpr(transform.init)(shapes).jaxpr
  _, read = dce_jaxpr(traced, [True] * len(traced.outvars))
  if any(read):
    rule = "init() reads the parameters' values, which come later, and are replaced by each version"
    rule = f"{rule}: a state must not hold a copy of them, as schedule-free and DoG have it"
    _refuse(own, rule, "take one without, as optax.adamw; the outer optimizer averages the weights")


def _by_name(config: Section, what: str, call: Callable[[], Any]) -> Mapping[str, Any]:
  """What `call` gives: arrays, or their shapes and dtypes, by name."""
  given = called(config, what, call)
  if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
    rule = f"{what} gives a {type(given).__name__}, must give a dict whose keys are names (str)"
    _refuse(config, rule)
  _arrays(config, what, given.values())
  return dict(given)


def _arrays(config: Section, what: str, given: Iterable[Any]) -> Iterable[Any]:
  for each in given:
    if not (hasattr(each, "shape") and hasattr(each, "dtype")):
      _refuse(config, f"{what} has {each!r} where a jax.ShapeDtypeStruct must be")
  return given


def _require_like(
  config: Section, what: str, call: Callable[[], Any], shapes: Mapping[str, Any]
) -> None:
  if (gives := _kinds(_by_name(config, what, call))) != (wanted := _kinds(dict(shapes))):
    _refuse(config, f"{what} gives {gives}, must give what shapes() says: {wanted}")


def _kinds(tree: Any) -> Any:
  import jax

  return jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", tree)


def flops_per_token(config: Config) -> float:
  """Training FLOPs, forward and backward, of one token.

  0.0 for a custom model without `flops_per_token` (`models.model.Model`). For ddiloco's own model
  see `models.transformer.LanguageModel`.

  Raises:
    ConfigError: the custom model's own fails, or gives no number.
  """
  own = getattr(load_model(config.model), "flops_per_token", None) or (lambda length: 0.0)
  length = config.data.sequence_length
  return called(config.model, "flops_per_token()", lambda: float(own(length)))


def load_optimizer(config: InnerConfig) -> optax.GradientTransformation:
  """The user's own optax transform; only where `config.custom` names one.

  Raises:
    ConfigError: it cannot be made, or is no optax transform.
  """
  return make(config, ("init", "update"), "optax.GradientTransformation")


OWN_RATE = 0.02  # first updates of a gradient of 1 that are shorter than this have a rate in them


def first_update(config: Config) -> float:
  """The longest first update that the user's own transform makes of a gradient of 1; of parameters
  that are shrunk to one value each.

  A transform that normalises and one that does not both give about the learning rate that is in it.
  0: it begins with none, as a schedule may, or it takes no such parameters.
  """
  import jax
  import jax.numpy as jnp

  shapes = load_model(config.model).shapes()
  ones = {name: jnp.ones((1,) * len(leaf.shape)) for name, leaf in shapes.items()}
  with contextlib.suppress(Exception):
    transform = load_optimizer(config.inner)
    updates, _ = transform.update(ones, transform.init(ones), ones)
    return max(float(jnp.max(jnp.abs(each))) for each in jax.tree.leaves(updates))
  return 0.0


# --- Names, and the functions they stand for


def make(config: Section, methods: Iterable[str], protocol: str) -> Any:
  """Calls the function that `config.custom` names with `config`, and returns its result.

  Raises:
    ConfigError: there is no such file, module or function, it fails, or what it returns lacks one
      of the methods that every object of the protocol has.
  """
  where, _, name = config.custom.rpartition(":")
  with _reading:
    module = called(config, where, lambda: _import(config))
  factory = getattr(module, name, None)
  if not callable(factory):
    known = [each for each in vars(module) if callable(getattr(module, each)) and each[0] != "_"]
    fix = f"name one of its functions ({', '.join(known) or 'there are none'})"
    raise refusal(_field(config), config.custom, f"{where} has no function {name!r}", fix)
  made = called(config, f"{name}()", lambda: factory(config))
  if missing := [name for name in methods if not callable(getattr(made, name, None))]:
    what = f"it made a {type(made).__name__}, which has no {', '.join(missing)}"
    _refuse(config, f"{what}; every {protocol} has")
  return made


def identity(config: Section) -> list[str]:
  """What all roles of a run must agree on: [function, digest of its source]; [] without `custom`.

  The source of a file is its text, and those of the files in its folder that it imports; as this
  process has executed them, also if they have changed since. The path of the folder may differ
  between machines.

  Raises:
    ConfigError: the source is not there.
  """
  if not config.custom:
    return []
  where, _, name = config.custom.rpartition(":")
  texts = _texts.get(_home(where))
  if texts is None and (source := _source(config)):
    texts = _files(where, str(source))
  digest = texts and hashlib.sha256(b"".join(texts.values())).hexdigest()[:16]
  return [name, digest or where]


def absolute(config: Config) -> Config:
  """The config with every FILE.py in it absolute, for processes in other working directories."""
  changed = {}
  for section in SECTIONS:
    values = getattr(config, section)
    where, _, name = values.custom.rpartition(":")
    if where.endswith(".py") and not os.path.isabs(where):
      changed[section] = dataclasses.replace(values, custom=f"{os.path.abspath(where)}:{name}")
  return dataclasses.replace(config, **changed) if changed else config


def _field(config: Section) -> str:
  return f"{type(config).__name__.removesuffix('Config').lower()}.custom"


def _source(config: Section) -> Path | None:
  """The source file of the named function; None for a module without a file."""
  where = config.custom.rpartition(":")[0]
  if not where.endswith(".py"):
    found = called(config, where, lambda: importlib.util.find_spec(where))
    return Path(found.origin) if found and found.origin and found.has_location else None
  path = Path(os.path.abspath(where))
  if not path.is_file():
    fix = "name a Python file that every process of the run can read, or a module that is installed"
    fix = f"{fix} wherever they run; where a run's project has moved, give its --config there"
    raise refusal(_field(config), config.custom, f"{path} is no file", fix)
  return path


_reading = threading.RLock()  # one thread executes a file, and others wait until it has

# Source file -> the texts (`_files`) that this process executed.
_texts: dict[str, dict[str, bytes]] = {}


def _files(where: str, home: str) -> dict[str, bytes]:
  """Path -> text, of a source file and of the files in its folder that it imports, directly or not.

  Of a module its own file alone: what that imports is installed, too.
  """
  if not where.endswith(".py"):
    return {home: Path(home).read_bytes()}
  found, waiting, folder = dict[str, bytes](), [Path(home)], Path(home).parent
  while waiting:
    file = waiting.pop(0)
    if str(file) not in found and file.is_file():
      found[str(file)] = text = file.read_bytes()
      with contextlib.suppress(SyntaxError, ValueError):  # who executes it says what is wrong
        waiting += _imported(ast.parse(text), file, folder)
  return found


def _imported(tree: ast.AST, file: Path, folder: Path) -> Iterator[Path]:
  """Where the modules that a file imports are, and the packages around them, if in the folder."""
  for node in ast.walk(tree):
    for each in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
      parts = f"{getattr(node, 'module', None) or ''}.{each.name}".strip(".").split(".")
      level = getattr(node, "level", 0)
      at = file.parents[level - 1] if level else folder
      for part in parts if parts[0] != "ddiloco" else ():  # its version is compared anyway
        at = at / part
        yield from (at / "__init__.py", at.with_suffix(".py"))


def _import(config: Section) -> ModuleType:
  """The module; a file is executed once in a process, however its path is written."""
  where = config.custom.rpartition(":")[0]
  name = _module_name(where)
  if not where.endswith(".py"):
    module = importlib.import_module(name)
    if os.path.isfile(home := _home(where)):
      _texts.setdefault(home, _files(where, home))
    return module
  path = _source(config)
  assert path is not None
  if name in sys.modules and str(path) not in _texts:
    rule = f"{path} is being read for it, and begins a run itself"
    fix = 'put what begins a run under `if __name__ == "__main__":`'
    raise refusal(_field(config), config.custom, rule, fix)
  if name not in sys.modules:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
      texts = _files(where, str(path))
      # Its own text: a file of bytecode may be that of an older one, of the same second and length.
      # And it alone says how it is read: this file's own `annotations` are not inherited.
      exec(compile(texts[str(path)], path, "exec", dont_inherit=True), module.__dict__)
    except BaseException:
      del sys.modules[name]
      raise
    _texts[str(path)] = texts
    import cloudpickle

    cloudpickle.register_pickle_by_value(module)  # Grain's processes find no module of this name
  return sys.modules[name]


def _module_name(where: str) -> str:
  """The name in `sys.modules` of a file or a module."""
  if not where.endswith(".py"):
    return where
  return f"_ddiloco_custom_{hashlib.sha256(os.path.abspath(where).encode()).hexdigest()[:16]}"


def _home(where: str) -> str:
  """The path of a source file; of a module only once it is imported."""
  return getattr(sys.modules.get(where), "__file__", None) or os.path.abspath(where)


def called(config: Section, what: str, call: Callable[[], Any]) -> Any:
  """Returns `call()`; an exception of the user's code becomes a ConfigError.

  An OSError that is not about a path becomes an `Unanswered`.

  Args:
    config: the section that names the user's code.
    what: is called, for the error.
    call: calls it.
  """
  try:
    return call()
  except ConfigError:
    raise
  except (Exception, SystemExit) as error:
    where = config.custom.rpartition(":")[0]
    frames = traceback.extract_tb(error.__traceback__)
    frame = ([each for each in frames if each.filename == _home(where)] or frames)[-1]
    usual = "correct it, or the name"
    if isinstance(config, DataConfig) or isinstance(error, OSError):
      usual = f"{usual}; if a storage did not answer, start again"
    if isinstance(error, ImportError):
      usual = "install it; for a file of your own, set PYTHONPATH to its folder in every process"
    said, _, fix = str(error).partition(" Fix: ")  # errors of `NnxModel` bring their fix
    file, line = frame.filename, frame.lineno
    if isinstance(error, SyntaxError):  # of a text that did not become a frame
      file, line = error.filename or file, error.lineno or line
    at = "" if file == __file__ else f" at {file}, line {line}"  # called as it cannot be
    rule = f"{what} fails{at} ({type(error).__name__}: {said})"
    fix = fix.rstrip(".") or usual
    raise refusal(_field(config), config.custom, rule, fix, kind_of(error)) from error


def _refuse(
  config: Section, rule: str, fix: str = "see examples/own_model.py, which has all of it"
) -> NoReturn:
  raise refusal(_field(config), config.custom, rule, fix)
