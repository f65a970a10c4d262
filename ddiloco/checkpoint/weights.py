"""Parameters at rest: a safetensors file or a plain Orbax checkpoint; neither needs ddiloco.

The path tells the format: a path that ends in .safetensors is one local file; any other is an Orbax
checkpoint, a directory, local or gs://... Names and shapes are the model's own
(`LanguageModel.shapes`).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import re
import secrets
import sys
import threading
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
import safetensors
import safetensors.numpy
from etils import epath

from ddiloco.checkpoint.signed_json import brief, one_error
from ddiloco.checks import ConfigError, differences, kind_of, refusal, require
from ddiloco.checks import is_there as is_local
from ddiloco.observe.guards import warn

Params = dict[str, np.ndarray]
SUFFIX = ".safetensors"
# Name in a safetensors header -> NumPy's name.
_FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
MERGED_TOKENS = "merged_tokens"  # name in the metadata of a run's result, and of what is exported
ONE_SAVE = threading.Lock()
TAG_DIGITS = 16  # of the random number in a temporary name
OLD = ".old"  # after that: a checkpoint that is being replaced
MARK = "_CHECKPOINT_METADATA"  # a file of Orbax, in every checkpoint
READ_BYTES = 128 << 20  # of the tensors of a start that are read together
SAVE_SECONDS = 60.0  # that a save which hangs in its disk may block others
# Orbax searches for what it has written with `glob`, which takes these for patterns: under "[1]" it
# finds nothing, and under "run*" also what is in "run2". TensorStore takes "\\" for "/".
_ODD = "*?[\\"

# Orbax raises the error of the first write that fails, which callers tell in a line. It also logs
# it with all its frames; asyncio logs those of other writes, and prints a traceback for each write
# that ends after Orbax has closed the loop that waited for it: on a slow disk, long after the save.
logging.getLogger("absl").addFilter(lambda record: "/orbax/" not in record.pathname)
logging.getLogger("asyncio").addFilter(lambda record: "tensorstore" not in record.getMessage())


def _unraisable(told: Any, usual: Callable[[Any], object] = sys.unraisablehook) -> None:
  native = told.object is None and isinstance(told.exc_value, RuntimeError)  # no Python called it
  if not (native and str(told.exc_value) == "Event loop is closed"):
    usual(told)


sys.unraisablehook = _unraisable


class Leaf(NamedTuple):
  """What a header says of one tensor."""

  shape: tuple[int, ...]
  dtype: str  # NumPy's name of a float; else the file's own name


@contextlib.contextmanager
def one_save() -> Iterator[None]:
  """Lets Orbax make one save at a time in this process; waits for at most `SAVE_SECONDS`.

  The parts of a save find each other by a number that counts saves of the process: two saves that
  begin at the same moment, in two threads, may wait for each other's signals for ever. A save that
  began long ago has its number already, and is safe to run beside.
  """
  mine = ONE_SAVE.acquire(timeout=SAVE_SECONDS)
  if not mine:
    warn(f"another save of this process takes more than {SAVE_SECONDS:g} s. This one goes on.")
  try:
    yield
  finally:
    if mine:
      ONE_SAVE.release()


def absolute(path: str | os.PathLike, field: str = "weights") -> epath.Path:
  """`path` made absolute; gs://... as it is.

  Raises:
    ConfigError: Orbax could not read a checkpoint that it has written there, or could mix it with
      another; or there is no such kind of object store. The text begins with `field`.
  """
  try:
    there = epath.Path(path).expanduser()
  except KeyError as error:  # epath's word for it
    rule = f"there is no object store of the kind {error}"
    raise refusal(field, str(path), rule, "give a folder, or gs://BUCKET/PATH") from None
  if not there.is_absolute():  # else the folder of the process counts not, and may be gone
    there = epath.Path(os.getcwd()) / there
  odd = [c for c in str(there) if c in _ODD or "\ud800" <= c <= "\udfff"]  # or what is no UTF-8
  if odd and there.suffix != SUFFIX:
    fix = "rename the folder, or choose another"
    raise refusal(field, str(there), f"no path of a checkpoint may have a {odd[0]!r}", fix)
  return there


def followed(path: str | os.PathLike, field: str = "weights") -> epath.Path:
  """The absolute path of what a local link leads to: a result may be kept on another disk.

  Raises:
    ConfigError: as `absolute`, of the path or of what it leads to.
  """
  target = absolute(path, field)
  return target if "://" in str(target) else absolute(os.path.realpath(target), field)


def is_there(path: epath.Path) -> bool:
  """Whether something is at a path; where that is unknown, an error of its file system."""
  return path.exists() if "://" in str(path) else is_local(path)


def replaceable(path: str | os.PathLike, field: str = "weights") -> epath.Path:
  """As `followed`, where a save may put weights: nothing but older weights is there.

  Raises:
    ConfigError: as `followed`; or something else is there, what cannot be looked into, or a link
      to nothing.
  """
  target = followed(path, field)
  rule, fix = "is no {}, and is never replaced", "move it away, or choose another path"
  try:
    there = is_there(target)
    if target.name.endswith(SUFFIX):
      kind, good = "file", target.is_file() or not there
    else:
      names = [inside.name for inside in target.iterdir()] if there else []
      kind, good = "Orbax checkpoint", not names or MARK in names
  except OSError as error:
    rule = rule.format(f"known checkpoint ({brief(error)})")
    raise refusal(field, str(target), rule, fix, kind_of(error)) from error
  require(good, field, str(target), rule.format(kind), fix)
  rule, fix = f"is a link to {target}, where nothing is", "make it, mount it, or remove the link"
  require(there or not os.path.islink(path), field, str(path), rule, fix)
  return target


def save(
  path: str | os.PathLike,
  params: Mapping[str, np.ndarray],
  metadata: Mapping[str, str] | None = None,
) -> epath.Path:
  """Writes name -> array, whole or not at all, and replaces what was there.

  Args:
    path: where to; missing folders above it are made. A link is followed.
    params: what to write, in the dtypes it has.
    metadata: goes into the file's header, or Orbax' custom metadata.

  Returns:
    The absolute path.

  Raises:
    OSError: it cannot be written.
  """
  target = followed(path)
  if os.path.islink(path) and not is_there(target):
    raise OSError(errno.ENOENT, f"is a link to {target}, where nothing is", str(path))
  target.parent.mkdir(parents=True, exist_ok=True)
  params, metadata = dict(params), dict(metadata or {})
  with one_error(target):
    if "://" in str(target):  # a bucket renames by copying: Orbax' own marker tells what is whole
      write(target, params, metadata)
    else:
      _replace(target, params, metadata)
  return target


def checkpointer() -> ocp.Checkpointer:
  """A checkpointer that saves in the caller's thread, and is done when the call returns.

  Uncompressed: weights hardly shrink, and a learner trains meanwhile. One database (OCDBT, Orbax'
  default) suits object stores better than one file per array. Only this process takes part, also
  where JAX has joined others: Orbax would wait for them inside a program on the devices.
  """
  me = jax.process_index()
  alone = ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me})
  handler = ocp.PyTreeCheckpointHandler(use_compression=False, multiprocessing_options=alone)
  return ocp.Checkpointer(handler, multiprocessing_options=alone)


class _Lent(np.ndarray):
  """An array that Orbax takes as it is: it would copy a host's arrays before it writes them."""

  def __deepcopy__(self, memo: Any) -> _Lent:
    return self


def write(path: epath.Path, arrays: Params, metadata: dict[str, str] | None = None) -> None:
  """Writes an Orbax checkpoint, all of it or nothing; replaces what was there. The arrays must not
  change before it returns."""
  lent = {name: np.asarray(value).view(_Lent) for name, value in arrays.items()}
  with one_save(), checkpointer() as orbax:
    orbax.save(path, args=ocp.args.PyTreeSave(lent), force=True, custom_metadata=metadata)
  if "://" in str(path):  # objects are where they stay
    return
  for file in path.iterdir():  # Orbax' own files, without which the arrays cannot be read
    if file.is_file():
      with file.open("rb") as opened:
        os.fsync(opened.fileno())


def read(path: epath.Path, tree: Any, wanted: Collection[str]) -> Params:
  """The arrays `wanted` of an Orbax checkpoint whose structure is that of `tree`, on the host."""
  item = jax.tree_util.tree_map_with_path(
    lambda path, leaf: leaf if _name(path) in wanted else ocp.PLACEHOLDER, tree
  )
  host = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
  orbax = checkpointer()
  try:
    found = _flat(orbax.restore(path, args=ocp.args.PyTreeRestore(item=item, restore_args=host)))
  finally:
    with contextlib.suppress(Exception):  # what was read is here, or the error that says why not
      orbax.close()
  return {name: np.asarray(found[name]) for name in wanted}


def clear(path: str | os.PathLike) -> None:
  """Ends what killed saves have begun beside `path`, and deletes their remainders.

  Each is as large as the weights. Another save to this path that is under way fails. A remainder
  that cannot be deleted stays.
  """
  if "://" in str(path):
    return
  target = followed(path)
  with contextlib.suppress(OSError):
    if (whole := standing(target)) != target:
      whole.rename(target)
    _discard(_remainders(target))


def standing(path: epath.Path) -> epath.Path:
  """`path`; where nothing is, the checkpoint that a killed save has left beside it, if any."""
  if "://" in str(path) or is_there(path):
    return path
  # The new checkpoint before the old one, and none that Orbax was still writing.
  left = [each for each in _remainders(followed(path)) if not each.suffix.startswith(".orbax-")]
  return next((each for each in left if is_there(each / MARK)), path)


def _remainders(target: epath.Path, tag: str = f"[0-9a-f]{{{TAG_DIGITS}}}") -> list[epath.Path]:
  """What saves of `target` have left beside it, in order of name."""
  name = re.compile(rf"\.{re.escape(target.name)}\.{tag}(\{OLD}|\.orbax-.*)?")
  with contextlib.suppress(FileNotFoundError):
    return sorted(left for left in target.parent.iterdir() if name.fullmatch(left.name))
  return []


def _discard(remainders: Iterable[epath.Path]) -> None:
  """Deletes what it can, of each first the file that makes it look like a whole checkpoint."""
  for left in remainders:
    with contextlib.suppress(OSError):
      (left / MARK).unlink()
    with contextlib.suppress(OSError):
      left.rmtree()


def _replace(target: epath.Path, params: Params, metadata: dict[str, str]) -> None:
  """Replaces what was there once the new one is whole; Orbax alone would delete it first.

  A kill or an error between the two renames of a checkpoint leaves both, whole, under other names:
  `standing` finds them.
  """
  tag = secrets.token_hex(TAG_DIGITS // 2)
  mine, old = (target.with_name(f".{target.name}.{tag}{end}") for end in ("", OLD))
  try:
    if target.name.endswith(SUFFIX):
      _write_file(mine, params, metadata)
    else:
      write(mine, params, metadata)
      if is_there(target):
        target.rename(old)
    mine.replace(target)
  finally:
    if standing(target) == target:  # else only the remainders are whole
      _discard(_remainders(target, tag))  # also what Orbax leaves of a failed save


def _write_file(path: epath.Path, params: Params, metadata: dict[str, str]) -> None:
  path.touch()
  mode = os.stat(path).st_mode  # what the umask allows; the library would allow only the owner
  whole = {name: np.asarray(value, order="C") for name, value in params.items()}
  safetensors.numpy.save_file(whole, path, metadata)
  os.chmod(path, mode)
  with path.open("rb") as file:
    os.fsync(file.fileno())  # else a power cut could leave the name without the bytes


def locate(path: str | os.PathLike, field: str = "weights") -> epath.Path:
  """Where the weights are: `path` itself, or the result in it if it is the workdir of a run.

  Raises:
    ConfigError: nothing is there, or a run without a result; the text begins with `field`.
  """
  fix = "finish a run there first, or name a file, a checkpoint or a workdir that is there"
  with _reading(field, target := absolute(path, field)):
    target = standing(target)
    require(is_there(target), field, str(target), "does not exist", fix)
    if not is_there(target / "config.json"):
      return target
    result, rule = standing(target / "result"), "is a run that has left no result yet"
    if any(is_there(target / f"model{SUFFIX}{more}") for more in ("", ".index.json")):
      rule, fix = "is a model of Hugging Face's", "scripts/from_huggingface.py makes a start of it"
    require(is_there(result), field, str(target), rule, fix)
    return result


def leaves(path: str | os.PathLike, field: str = "weights") -> dict[str, Leaf]:
  """Shape and dtype of every tensor, from the header alone; a nested tree's names are a/b/c.

  Raises:
    ConfigError: as `locate`, or the file holds no weights, or is torn.
  """
  target = locate(path, field)
  with _reading(field, target):
    if target.name.endswith(SUFFIX):
      target.open("rb").close()  # of a folder `safe_open` would say that the device is not there
      with safetensors.safe_open(target, framework="np") as file:
        headers = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {
          name: Leaf(tuple(header.get_shape()), _FLOATS.get(kind := header.get_dtype(), kind))
          for name, header in headers.items()
        }
    return {
      name: Leaf(tuple(getattr(leaf, "shape", ())), str(getattr(leaf, "dtype", leaf)))
      for name, leaf in _flat(_orbax_tree(target)).items()
    }


def load(
  path: str | os.PathLike, field: str = "weights", only: Collection[str] | None = None
) -> dict[str, np.ndarray]:
  """The tensors as they were written, or `only` these, on the host.

  Raises:
    ConfigError: as `leaves`.
  """
  target = locate(path, field)
  with _reading(field, target):
    if target.name.endswith(SUFFIX):
      with safetensors.safe_open(target, framework="np") as file:
        return {name: file.get_tensor(name) for name in (file.keys() if only is None else only)}
    tree = _orbax_tree(target)
    return read(target, tree, _flat(tree) if only is None else only)


def metadata(path: str | os.PathLike) -> Mapping[str, str]:
  """What an Orbax checkpoint was saved with beside its arrays; empty if nothing, or not there."""
  try:
    target = standing(absolute(path))
    if not target.exists():  # Orbax would warn
      return {}
    with ocp.StandardCheckpointer() as checkpointer:
      return dict(checkpointer.metadata(target).custom_metadata)
  except Exception:  # Orbax raises errors of many types for what is missing or damaged
    return {}


def merged_tokens(path: str | os.PathLike) -> int:
  """Tokens that an Orbax checkpoint has seen, by its metadata; 0: it says none, or is not there.

  Raises:
    OSError: it cannot be read, which `metadata` does not tell.
  """
  with contextlib.suppress(FileNotFoundError, NotADirectoryError):
    (standing(absolute(path)) / MARK).read_bytes()
  said = str(metadata(path).get(MERGED_TOKENS))
  return int(said) if said.isdecimal() else 0


def require_fit(
  path: str | os.PathLike,
  found: Mapping[str, Leaf | np.ndarray],
  shapes: Mapping[str, tuple[int, ...]],
  field: str = "weights",
) -> None:
  """Refuses (ConfigError) tensors that are not exactly those of the model, names and `shapes` by
  name: the text has the first odd ones, what was found and what is expected."""
  odd = differences({name: tuple(value.shape) for name, value in found.items()}, shapes)
  fix = "use the config.model that these weights were trained with, or weights of this model"
  require(not odd, field, str(path), f"is of another model: {odd}", fix)


def check(path: str, shapes: Mapping[str, tuple[int, ...]], field: str) -> None:
  """Refuses (ConfigError) weights that `start` would refuse, as far as the header tells: they are
  missing, unreadable, of another model, or not floats."""
  found = leaves(path, field)
  require_fit(path, found, shapes, field)
  for name, leaf in found.items():
    rule = f"{name} is of type {leaf.dtype}, must be one of {', '.join(_FLOATS.values())}"
    fix = "convert the weights (a quantized model is no start for training)"
    require(leaf.dtype in _FLOATS.values(), field, path, rule, fix)


def start(
  path: str, shapes: Mapping[str, tuple[int, ...]], field: str, wanted: Container[str]
) -> Iterator[tuple[str, np.ndarray]]:
  """Weights to start a run from: name and f32 array, one after the other, in the order of `shapes`.

  Raises:
    ConfigError: as `check`, or a value is not finite in f32.
  """
  check(path, shapes, field)
  mine = {name: shape for name, shape in shapes.items() if name in wanted}
  # Not one by one: to open a checkpoint takes as long as hundreds of small tensors.
  for names in groups(mine, READ_BYTES):
    found = load(path, field, names)
    for name in names:
      with np.errstate(over="ignore"):  # refused below
        value = found.pop(name).astype(np.float32, copy=False)
      bad = value.size - int(np.isfinite(value).sum())
      rule = f"{name} has {bad} values that are not finite in float32"
      require(not bad, field, path, rule, "use weights from before they diverged")
      yield name, value


def groups(shapes: Mapping[str, tuple[int, ...]], most_bytes: int) -> Iterator[list[str]]:
  """Groups of names: of tensors of up to so many bytes together in f32, or a single larger one."""
  names, nbytes = list[str](), 0
  for name, shape in shapes.items():
    nbytes += 4 * math.prod(shape)
    if names and nbytes > most_bytes:
      yield names
      names, nbytes = [], 4 * math.prod(shape)
    names.append(name)
  if names:
    yield names


def _orbax_tree(target: epath.Path) -> Any:
  """The checkpoint's tree with shapes and dtypes at the leaves."""
  with ocp.StandardCheckpointer() as checkpointer:
    tree = getattr(checkpointer.metadata(target).item_metadata, "tree", None)
  if tree is None:
    list(target.iterdir())  # raises an error that Orbax hides, such as a missing permission
    raise ValueError("no plain Orbax checkpoint of one tree")
  return tree


def _flat(tree: Any) -> dict[str, Any]:
  flat, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {_name(path): leaf for path, leaf in flat}


def _name(path: Any) -> str:
  return jax.tree_util.keystr(path, simple=True, separator="/")


@contextlib.contextmanager
def _reading(field: str, target: epath.Path) -> Iterator[None]:
  """Turns any error of reading into a ConfigError; Orbax and object stores raise all kinds."""
  try:
    yield
  except ConfigError:
    raise
  except Exception as error:
    fix = "name a whole .safetensors file or plain Orbax checkpoint, or the workdir of a run"
    rule = f"cannot be read ({brief(error)})"
    raise refusal(field, str(target), rule, fix, kind_of(error)) from error
