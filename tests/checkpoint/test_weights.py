"""Weights at rest come back bit by bit, also to others; what is missing or damaged is said."""

import contextlib
import errno
import json
import logging
import os
import shutil
import stat
import subprocess
import sys
import threading
import tracemalloc
import types
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors
import safetensors.numpy
from etils import epath

from ddiloco.checkpoint import weights
from ddiloco.checkpoint.restore import open_storage
from ddiloco.checks import Unanswered, lasts
from ddiloco.config import ConfigError, from_dict

SHAPES = {"embedding": (7, 4), "layers/attention/query": (2, 4, 2, 2), "final_norm/scale": (4,)}
FORMS = ["result", "model.safetensors"]


def params(seed: int = 0) -> dict[str, np.ndarray]:
  random = np.random.default_rng(seed)
  return {name: random.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}


def assert_same(a, b) -> None:
  assert a.keys() == b.keys()
  for name in a:
    assert np.asarray(a[name]).dtype == np.float32
    assert np.asarray(a[name]).tobytes() == b[name].tobytes()


@pytest.fixture(params=FORMS)
def path(request, tmp_path):
  return tmp_path / request.param


def start(path):
  return dict(weights.start(str(path), SHAPES, "run.init_from", SHAPES))


def refused(path) -> str:
  """What `start` says; `check` says the same if the header tells it."""
  with pytest.raises(ConfigError) as error:
    start(path)
  text = str(error.value)
  assert text.startswith("run.init_from = ") and str(path) in text and ". Fix: " in text
  assert lasts(error.value)
  return text


def test_what_is_saved_comes_back_bitwise(path, capsys):
  assert str(weights.save(path, params())) == str(path)
  assert "another save" not in capsys.readouterr().err, "there is none"
  assert_same(weights.load(path), params())
  assert weights.load(path, only=["embedding"]).keys() == {"embedding"}
  assert_same(start(path), params())
  assert list(start(path)) == list(SHAPES)
  assert weights.leaves(path) == {n: weights.Leaf(s, "float32") for n, s in SHAPES.items()}


@pytest.mark.parametrize("most_bytes, reads", [(weights.READ_BYTES, 1), (4 * (28 + 32), 2), (1, 3)])
def test_small_tensors_of_a_start_are_read_together(tmp_path, monkeypatch, most_bytes, reads):
  """One after the other, three hundred took three minutes, in every role."""
  read = mock.Mock(wraps=weights.read)
  monkeypatch.setattr(weights, "read", read)
  monkeypatch.setattr(weights, "READ_BYTES", most_bytes)
  path = weights.save(tmp_path / "result", params())
  assert_same(start(path), params())
  assert read.call_count == reads
  assert not [*weights.start(str(path), SHAPES, "run.init_from", ())]
  assert read.call_count == reads, "of a role that needs none"


def test_a_group_has_as_many_tensors_as_fit_or_one_that_is_larger():
  shapes = {"a": (2, 3), "b": (1,), "c": (10,), "d": (3,), "e": (2,)}
  for most_bytes, expected in ((27, "a b c de"), (28, "ab c de"), (60, "ab cde"), (88, "abcde")):
    assert ["".join(group) for group in weights.groups(shapes, most_bytes)] == expected.split()
  assert not [*weights.groups({}, 28)]


def test_plain_libraries_read_it(tmp_path):
  said = {"format": "ddiloco", "model": json.dumps({"num_layers": 2})}
  folder, path = (weights.save(tmp_path / form, params(), said) for form in FORMS)
  with ocp.StandardCheckpointer() as plain:
    assert_same(plain.restore(folder), params())
    assert plain.metadata(folder).custom_metadata == said
  assert_same(safetensors.numpy.load_file(path), params())
  with safetensors.safe_open(path, framework="np") as file:
    assert file.metadata() == said


def test_what_plain_libraries_write_is_read(tmp_path):
  safetensors.numpy.save_file(params(), tmp_path / "model.safetensors")
  assert_same(start(tmp_path / "model.safetensors"), params())
  flat = {tuple(name.split("/")): value for name, value in params().items()}
  nested: dict = {}
  for (*folders, last), value in flat.items():
    inside = nested
    for folder in folders:
      inside = inside.setdefault(folder, {})
    inside[last] = jnp.asarray(value)
  with ocp.StandardCheckpointer() as plain:
    plain.save(tmp_path / "nested", nested)
  assert_same(start(tmp_path / "nested"), params())


def test_arrays_of_another_mesh_are_read_on_the_host(tmp_path):
  mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
  split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
  value = np.arange(16, dtype=np.float32)
  with ocp.StandardCheckpointer() as plain:
    plain.save(tmp_path / "sharded", {"a": jax.device_put(value, split)})
  loaded = weights.load(tmp_path / "sharded")["a"]
  assert type(loaded) is np.ndarray
  np.testing.assert_array_equal(loaded, value)


def test_views_and_scalars_are_written_as_they_look(path):
  odd = {"turned": np.arange(6, dtype=np.float32).reshape(2, 3).T, "one": np.asarray(np.float32(3))}
  loaded = weights.load(weights.save(path, odd))
  for name in odd:
    assert loaded[name].shape == odd[name].shape
    np.testing.assert_array_equal(loaded[name], odd[name])


def test_saving_again_replaces(path):
  weights.save(path, params(0))
  weights.save(path, params(1))
  assert_same(weights.load(path), params(1))
  assert [p.name for p in path.parent.iterdir()] == [path.name], "nothing half-written stays"


def test_what_is_saved_is_not_copied_before(tmp_path):
  """Orbax copies a host's arrays: a third model in the evaluator's memory at the end of a run."""
  params = {name: np.full((8, 1 << 16), i, np.float32) for i, name in enumerate("ab")}
  weights.save(tmp_path / "warm", {"a": np.ones(3)})
  tracemalloc.start()
  try:
    weights.save(tmp_path / "run", params)
    _, peak = tracemalloc.get_traced_memory()
  finally:
    tracemalloc.stop()
  assert peak < params["a"].nbytes / 2
  assert_same(weights.load(tmp_path / "run"), params)


@pytest.mark.parametrize("name", ["run[1]", "run*", "run?", "a\\b", "\udcff"])
def test_a_path_that_orbax_cannot_read_is_refused(tmp_path, name):
  """It was written: the result and all snapshots of a run in a folder "[1]" could not be read."""
  for path in (tmp_path / name / "result", tmp_path / name):
    with pytest.raises(ConfigError, match=r"no path of a checkpoint may have a .*Fix: rename"):
      weights.save(path, params())
  with pytest.raises(ConfigError, match="no path of a checkpoint"):
    weights.load(tmp_path / name)
  (tmp_path / "link").symlink_to(tmp_path / name)
  with pytest.raises(ConfigError, match="no path of a checkpoint"):
    weights.save(tmp_path / "link" / "result", params())
  assert [p.name for p in tmp_path.iterdir()] == ["link"]


def test_an_object_store_that_is_not_known_is_refused_in_words(tmp_path):
  for use in (lambda: weights.save("memory://x", params()), lambda: weights.load("memory://")):
    with pytest.raises(
      ConfigError, match=r"'memory://x?': there is no object store.* Fix: .*gs://"
    ):
      use()
  config = from_dict({"checkpoint": {"path": "memory://x"}, "sync": {"snapshot_steps": 9}})
  with pytest.raises(ConfigError, match=r"'memory://x': there is no object store"):
    open_storage(config, None, tmp_path, "run")


def test_in_a_bucket_weights_are_written_where_they_stay(monkeypatch):
  """It renames by copying, and what looks like a link or a remainder is none."""
  there, written = weights.absolute("gs://b/it"), []
  orbax = types.SimpleNamespace(save=lambda path, **how: written.append((path, how)))
  monkeypatch.setattr(weights, "checkpointer", lambda: contextlib.nullcontext(orbax))
  monkeypatch.setattr(type(there), "mkdir", lambda self, **how: None)
  monkeypatch.setattr(type(there), "iterdir", lambda self: pytest.fail("it is listed"))
  weights.clear("gs://b/it")
  assert weights.save("gs://b/it", params(), {"said": "so"}) == there
  assert weights.followed("gs://b/it") == weights.standing(there) == there
  [(path, how)] = written
  assert (path, how["custom_metadata"], how["force"]) == (there, {"said": "so"}, True)
  assert how["args"].item.keys() == SHAPES.keys()


def test_a_file_may_have_any_name(tmp_path):
  path = tmp_path / "run[1]" / "model*.safetensors"
  for seed in range(2):
    weights.save(path, params(seed))
  weights.clear(path)
  assert [p.name for p in path.parent.iterdir()] == [path.name]
  assert_same(weights.load(path), params(1))


@pytest.mark.parametrize("name", ["a b", "50%#1", "c:1", "a::b", "{a,b}", "~", "'\"", "ü", "a\nb"])
def test_other_odd_names_are_read_again(tmp_path, name):
  weights.save(tmp_path / name / "result", params(), {weights.MERGED_TOKENS: "7"})
  assert_same(weights.load(tmp_path / name / "result"), params())
  assert weights.merged_tokens(tmp_path / name / "result") == 7


def test_a_relative_path_is_taken_from_here(path, monkeypatch):
  monkeypatch.chdir(path.parent)
  weights.save(path.name, params())
  assert_same(weights.load(path), params())


def test_a_save_does_not_need_the_folder_of_the_process(path, tmp_path, monkeypatch):
  """The result of weeks was not saved where the folder in which the run was begun was deleted."""
  gone = tmp_path / "gone"
  gone.mkdir()
  monkeypatch.chdir(gone)
  gone.rmdir()
  weights.save(path, params())
  assert_same(weights.load(path), params())


def test_folders_above_are_made_and_the_file_is_as_readable_as_others(tmp_path):
  path = weights.save(tmp_path / "a" / "b" / "model.safetensors", params())
  (tmp_path / "other").touch()
  assert stat.S_IMODE(os.stat(path).st_mode) == stat.S_IMODE((tmp_path / "other").stat().st_mode)


@pytest.mark.parametrize("error", [OSError(28, "No space left"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("there", [True, False])
def test_a_torn_write_leaves_nothing_under_the_name(tmp_path, monkeypatch, error, there):
  path = tmp_path / "model.safetensors"
  if there:
    weights.save(path, params(0))
  whole = safetensors.numpy.save_file

  def torn(tensors, file, metadata):
    whole(tensors, file, metadata)
    file.write_bytes(file.read_bytes()[:99])
    raise error

  monkeypatch.setattr(safetensors.numpy, "save_file", torn)
  with pytest.raises(type(error)):
    weights.save(path, params(1))
  assert [p.name for p in tmp_path.iterdir()] == ([path.name] if there else [])
  if there:
    assert_same(weights.load(path), params(0))


KILLED = """
import os, sys
import numpy as np
from ddiloco.checkpoint import weights
path = weights.absolute(sys.argv[1])
type(path).rename = lambda *_: os.kill(os.getpid(), 9)
weights.save(path, {"x": np.ones(3, np.float32)})
"""


def test_what_a_killed_save_leaves_can_be_cleared(tmp_path):
  path, other = tmp_path / "result", tmp_path / ".resulting.x"
  weights.save(path, params())
  other.mkdir()
  killed = subprocess.run([sys.executable, "-c", KILLED, path], check=False, capture_output=True)
  assert killed.returncode == -9, killed.stderr.decode()
  assert len(list(tmp_path.iterdir())) == 3, "a whole model, for ever"
  weights.clear(path)
  assert sorted(tmp_path.iterdir()) == [other, path]
  assert_same(weights.load(path), params())


KILLED_ANYWHERE = """
import itertools, os, sys
from ddiloco.checkpoint import weights

CALLS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir")

def write(folder, params, metadata):
  folder.mkdir()
  for name, text in params.items():
    (folder / name).write_text(text)
  (folder / weights.MARK).touch()

def between(path):
  path.rename(path.with_name(".result.0123456789abcdef.old"))
  write(path.with_name(".result.0123456789abcdef"), dict(a="new", b="new"), {})

weights.write = write

def killed_before(calls, what):
  path = weights.absolute(sys.argv[1]) / what / str(calls) / "result"
  weights.save(path, dict(a="old", b="old"))
  if what == "clear":
    between(path)
  if (child := os.fork()) == 0:
    made = itertools.count()
    def audit(event, _):
      if event in CALLS and next(made) == calls:
        os.kill(os.getpid(), 9)
    sys.addaudithook(audit)
    weights.save(path, dict(a="new", b="new")) if what == "save" else weights.clear(path)
    os._exit(0)
  return os.WIFSIGNALED(os.waitpid(child, 0)[1])

for what in ("save", "clear"):
  next(calls for calls in itertools.count() if not killed_before(calls, what))
"""


def test_a_checkpoint_is_there_whenever_its_replacement_is_killed(tmp_path):
  """Killed before each call of the file system. Between two renames there were two whole models,
  both under temporary names: no reader found one, and the next start deleted them."""
  subprocess.run([sys.executable, "-c", KILLED_ANYWHERE, tmp_path], check=True)

  def content(path):
    assert (path / weights.MARK).exists()
    return {(path / name).read_text() for name in "ab"}

  for what in ("save", "clear"):
    seen = []
    for folder in sorted((tmp_path / what).iterdir(), key=lambda p: int(p.name)):
      path = weights.absolute(folder / "result")
      seen.append((path.exists(), content(weights.standing(path))))
      weights.clear(path)
      assert [p.name for p in folder.iterdir()] == ["result"]
      assert content(path) in ({"old"}, {"new"})
    assert len(seen) > 5 and seen[-1] == (True, {"new"})
    assert (False, {"new"}) in seen
    assert what == "clear" or (True, {"old"}) in seen


def test_a_remainder_of_which_something_stays_is_taken_for_no_checkpoint(tmp_path, monkeypatch):
  result, left = weights.save(tmp_path / "result", params()), tmp_path / f".result.{'0' * 16}"
  shutil.copytree(result, left)
  denied = mock.Mock(side_effect=PermissionError)
  monkeypatch.setattr(type(result), "rmtree", denied)
  weights.clear(result)
  shutil.rmtree(result)
  assert denied.called and left.exists() and weights.standing(result) == result


def test_the_newest_whole_remainder_stands_for_what_is_gone(tmp_path):
  """None that Orbax was still writing, though it looks whole."""
  path, first, second = "result", *(f".result.{each * weights.TAG_DIGITS}" for each in "01")
  torn, old = f"{first}.orbax-checkpoint-tmp-7", f"{second}{weights.OLD}"
  for name, standing in ((torn, path), (old, old), (second, second)):
    (tmp_path / name).mkdir()
    (tmp_path / name / weights.MARK).touch()
    assert weights.standing(weights.absolute(tmp_path / path)).name == standing


def test_what_a_kill_left_under_another_name_is_read(tmp_path):
  (tmp_path / "config.json").touch()
  weights.save(tmp_path / "result", params(0), {weights.MERGED_TOKENS: "7"})
  (tmp_path / "result").rename(tmp_path / ".result.0123456789abcdef.old")
  assert_same(start(tmp_path), params(0))
  assert weights.merged_tokens(tmp_path / "result") == 7


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("fails", ["its place", "an interrupt", "deletion", "every rename"])
def test_a_folder_that_cannot_take_its_place_is_found_all_the_same(
  tmp_path, monkeypatch, fails, there
):
  """As over NFS, where the server goes away between two calls. Where only the old one cannot be
  deleted, since a reader has a file of it open, the save is done: a run's end counted as not
  saved."""
  path, kind = tmp_path / "result", type(weights.absolute(tmp_path))
  if there:
    weights.save(path, params(0))
  rename, error = kind.rename, OSError(errno.EIO, "Input/output error")

  def away(self, target):
    if (there and target.name.endswith(weights.OLD)) or ".orbax-" in self.name:
      return rename(self, target)
    raise error

  patches = {
    "its place": {"replace": mock.Mock(side_effect=error)},
    "an interrupt": {"replace": mock.Mock(side_effect=KeyboardInterrupt)},
    "deletion": {"rmtree": mock.Mock(side_effect=OSError(39, "Directory not empty"))},
    "every rename": {"rename": away, "replace": away},
  }
  raised = {"deletion": contextlib.nullcontext(), "an interrupt": pytest.raises(KeyboardInterrupt)}
  with monkeypatch.context() as patch, raised.get(fails, pytest.raises(OSError)):
    for name, broken in patches[fails].items():
      patch.setattr(kind, name, broken)
    weights.save(path, params(1))
  assert_same(weights.load(path), params(1))
  weights.clear(path)
  assert [p.name for p in tmp_path.iterdir()] == ["result"]
  assert_same(weights.load(path), params(1))


def test_a_path_that_cannot_be_written_is_an_os_error(tmp_path):
  (tmp_path / "file").touch()
  for name in FORMS:
    with pytest.raises(OSError):
      weights.save(tmp_path / "file" / name, params())
  (tmp_path / "model.safetensors").mkdir()
  with pytest.raises(OSError):
    weights.save(tmp_path / "model.safetensors", params())


# --- what is refused ------------------------------------------------------------------------------


def test_what_is_missing_is_said(path):
  with pytest.raises(ConfigError, match=r"^result = .*does not exist. Fix: finish a run"):
    weights.load(path, "result")
  assert "does not exist" in refused(path)


def files(path):
  return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]


def test_every_damage_is_found_or_harmless(path):
  """Each file in turn deleted, emptied and cut in half: an error, or the right values."""
  weights.save(path, params())
  contents = {p: p.read_bytes() for p in files(path)}
  seen = set()
  for victim, content in contents.items():
    for damage, left in ("delete", None), ("empty", b""), ("halve", content[: len(content) // 2]):
      shutil.rmtree(path, ignore_errors=True)
      for p, whole in contents.items():
        p.parent.mkdir(parents=True, exist_ok=True)
        p.write_bytes(whole)
      victim.unlink() if left is None else victim.write_bytes(left)
      try:
        assert_same(weights.load(path), params())
      except ConfigError as error:
        seen.add((victim, damage))
        assert str(path) in str(error) and "Fix: " in str(error), (victim, damage)
  assert len(seen) >= 3, "nothing was noticed at all"


@pytest.mark.parametrize("length", range(0, 400, 13))
def test_a_file_cut_anywhere_is_refused(tmp_path, length):
  path = weights.save(tmp_path / "model.safetensors", params())
  content = path.read_bytes()
  assert len(content) > 400
  path.write_bytes(content[:length])
  assert "cannot be read" in refused(path)
  with pytest.raises(ConfigError, match="cannot be read"):
    weights.check(str(path), SHAPES, "run.init_from")


def test_what_is_no_weights_is_refused(tmp_path):
  for name in ("empty", "folder.safetensors"):
    (tmp_path / name).mkdir()
  for name in ("file", "text.safetensors"):
    (tmp_path / name).write_text("hello")
  for name in ("empty", "folder.safetensors", "file", "text.safetensors"):
    assert "cannot be read" in refused(tmp_path / name), name


def test_what_orbax_raises_it_does_not_log_too(tmp_path, caplog):
  """A full disk filled the terminal with frames of Orbax' threads."""
  with ocp.StandardCheckpointer() as checkpointer, contextlib.suppress(Exception):
    checkpointer.metadata(tmp_path / "nothing")
  said = "Future exception was never retrieved\nfuture: <... ValueError('... [tensorstore_spec=..."
  logging.getLogger("asyncio").error(said)
  assert not caplog.records
  for name in ("absl", "asyncio"):
    logging.getLogger(name).error("of another package")
  assert len(caplog.records) == 2


@pytest.mark.parametrize("name", ["result", "model.safetensors"])
def test_what_is_kept_elsewhere_behind_a_link_is_replaced_there(tmp_path, name):
  """Once the link itself was moved, and deleting it failed after the save."""
  far, link = tmp_path / "far" / name, tmp_path / name
  for value in (1.0, 2.0):
    weights.save(far, {"a": np.full(3, value - 1, np.float32)})
    link.unlink(missing_ok=True)
    link.symlink_to(far)
    weights.save(link, {"a": np.full(3, value, np.float32)})
    assert link.is_symlink() and weights.load(far)["a"][0] == value
  assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["far", name])
  assert [p.name for p in far.parent.iterdir()] == [name]
  far.rename(tmp_path / "moved")
  with pytest.raises(OSError, match=r"is a link to .*where nothing is"):
    weights.save(link, {"a": np.zeros(3, np.float32)})
  assert link.is_symlink()


def test_the_workdir_of_a_run_is_its_result(tmp_path):
  (tmp_path / "config.json").touch()
  assert "is a run that has left no result yet" in refused(tmp_path)
  (theirs := tmp_path / "model.safetensors").touch()  # of a Hugging Face export, say
  assert "a model of Hugging Face's. Fix: scripts/from_huggingface.py" in refused(tmp_path)
  theirs.unlink()
  weights.save(tmp_path / "result", params())
  assert_same(start(tmp_path), params())


@pytest.mark.parametrize(
  "changes, text",
  [
    ({"embedding": (8, 4)}, "embedding is (8, 4), not (7, 4) (1 in all)"),
    ({"embedding": None}, "embedding is missing, not (7, 4) (1 in all)"),
    ({"extra/bias": (3,)}, "extra/bias is (3,), not known (1 in all)"),
    (
      dict.fromkeys("abcdABCDE", (1,)),
      "; ".join(f"{name} is (1,), not known" for name in "ABCDEabc") + " (9 in all)",
    ),
  ],
)
def test_another_model_is_refused_by_its_first_odd_tensors(path, changes, text):
  shapes = {n: s for n, s in (SHAPES | changes).items() if s is not None}
  weights.save(path, {name: np.zeros(shape, np.float32) for name, shape in shapes.items()})
  assert f"is of another model: {text}. Fix: use the config.model" in refused(path)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_every_float_becomes_f32(path, dtype):
  stored = {name: value.astype(dtype) for name, value in params().items()}
  weights.save(path, stored)
  assert_same(start(path), {name: value.astype(np.float32) for name, value in stored.items()})


@pytest.mark.parametrize("dtype", [np.int8, np.int32, bool])
def test_what_is_not_float_is_refused_by_the_header_alone(path, dtype):
  weights.save(path, params() | {"final_norm/scale": np.ones(4, dtype)})
  text = refused(path)
  assert "final_norm/scale is of type " in text and "must be one of float64, float32" in text
  with pytest.raises(ConfigError, match="is of type"):
    weights.check(str(path), SHAPES, "run.init_from")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, np.float64(1e300)])
def test_what_is_not_finite_is_refused(path, value):
  scale = np.asarray([1, value, 2, value], np.float64 if np.isfinite(value) else np.float32)
  weights.save(path, params() | {"final_norm/scale": scale})
  weights.check(str(path), SHAPES, "run.init_from")  # no header tells
  assert "final_norm/scale has 2 values that are not finite in float32. Fix: " in refused(path)


def test_who_reads_or_replaces_weights_that_do_not_answer_may_start_again(path, monkeypatch):
  """An evaluator ended for good, as after a wrong flag."""
  stale = OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
  monkeypatch.setattr(weights, "is_local", mock.Mock(side_effect=stale))
  with pytest.raises(Unanswered, match=r"^run.init_from = .*: cannot be read \(.*Stale.*Fix: "):
    start(path)
  with pytest.raises(Unanswered, match=r"^weights = .*: is no known checkpoint \(.*Stale.*Fix: "):
    weights.replaceable(path)


@pytest.mark.parametrize("method", ["read_bytes", "stat"])
def test_a_result_that_does_not_answer_is_not_taken_for_one_without_tokens(
  tmp_path, monkeypatch, method
):
  """It was replaced by one that had seen fewer tokens."""
  weights.save(tmp_path / "result", params(0), {weights.MERGED_TOKENS: "7"})

  def stale(self, *_, **__):
    raise OSError(errno.ESTALE, "Stale file handle", str(self))

  with monkeypatch.context() as patch, pytest.raises(OSError, match="Stale"):
    for kind in (Path, type(weights.absolute(tmp_path))):
      patch.setattr(kind, method, stale)
    weights.merged_tokens(tmp_path / "result")
  assert weights.merged_tokens(tmp_path / "result") == 7
  assert weights.merged_tokens(tmp_path / "nothing") == 0


def test_a_save_that_can_rename_and_list_nothing_deletes_neither_model(tmp_path, monkeypatch):
  """Its remainders could not be listed, and so seemed not to be there; a moment later they could,
  and both were deleted."""
  path, kind = tmp_path / "result", type(weights.absolute(tmp_path))
  weights.save(path, params(0))
  listed, failures = kind.iterdir, []

  def away(self, *_):
    failures.append(self)
    raise OSError(errno.EIO, "Input/output error")

  def once(self):
    if failures and self == path.parent:
      failures.clear()
      raise OSError(errno.EIO, "Input/output error")
    return listed(self)

  with monkeypatch.context() as patch, pytest.raises(OSError):
    patch.setattr(kind, "replace", away)
    patch.setattr(kind, "iterdir", once)
    weights.save(path, params(1))
  assert_same(weights.load(path), params(1))


def test_saves_of_several_threads_do_not_wait_for_each_other_for_ever(tmp_path):
  """Roles that are threads save their parts while the result is saved."""
  array = np.ones(100, np.float32)

  def save_result() -> None:
    for i in range(20):
      weights.save(tmp_path / f"result{i}", {"x": array})

  def save_parts(role: int) -> None:
    for i in range(20):
      weights.write(epath.Path(tmp_path / f"{role}-{i}"), {"x": array})

  threads = [threading.Thread(target=save_result, daemon=True)]
  threads += [threading.Thread(target=save_parts, args=(m,), daemon=True) for m in range(2)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(60.0)
  assert not any(thread.is_alive() for thread in threads)


def test_a_save_that_hangs_in_its_disk_holds_up_no_other_for_ever(tmp_path, monkeypatch, capsys):
  """A learner's part on a share that does not answer, and the result on this machine's disk."""
  go, hangs = threading.Event(), threading.Event()

  whole = weights.checkpointer

  def stuck():
    if threading.current_thread() is not part:
      return whole()
    hangs.set()
    go.wait(60.0)
    raise OSError(errno.EIO, "stale")

  monkeypatch.setattr(weights, "checkpointer", stuck)
  monkeypatch.setattr(weights, "SAVE_SECONDS", 0.1, raising=False)

  def save_part() -> None:
    with contextlib.suppress(OSError):
      weights.write(epath.Path(tmp_path / "part"), {"x": np.ones(3)})

  part = threading.Thread(target=save_part, daemon=True)
  part.start()
  assert hangs.wait(60.0)
  params = {"x": np.ones(3, np.float32)}
  result = threading.Thread(target=weights.save, args=(tmp_path / "result", params), daemon=True)
  result.start()
  result.join(20.0)
  assert not result.is_alive() and weights.load(tmp_path / "result")["x"].size == 3
  assert "another save" in capsys.readouterr().err
  go.set()
  part.join(60.0)
  with weights.one_save():
    assert weights.ONE_SAVE.locked()
  assert not weights.ONE_SAVE.locked()
