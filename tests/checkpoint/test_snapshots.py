"""What is saved comes back bit by bit, on any mesh; what is incomplete or foreign does not."""

import logging
import os
import subprocess
import sys
import threading
import warnings
import weakref
from pathlib import Path

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils.epath import backend, gpath
from fsspec.implementations.memory import MemoryFileSystem
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ddiloco.checkpoint import snapshots as arrays_lib
from ddiloco.checkpoint import weights
from ddiloco.checkpoint.snapshots import Damaged, Storage

ROOT = Path(__file__).parents[2]
STATE = {"global_step": 17, "rounds": {"0": [2**52, 3]}, "rate": 1e-3, "none": None, "text": "α"}


def make(path, plan_id="plan", warnings=None):
  def warn(text):
    assert warnings is not None, f"nothing to warn of, but: {text}"
    warnings.append(text)

  return Storage(path, plan_id, warn)


@pytest.fixture
def storage(tmp_path):
  return make(tmp_path)


def some(seed=0):
  """Values that a careless copy would change, and shapes that a careless one would lose."""
  random = np.random.default_rng(seed)
  odd = np.array([0x7FC12345, 0x80000000, 0xFF800001, 1, 0, 0x7F800000], np.uint32)
  f32_8x4x2 = random.standard_normal((8, 4, 2), np.float32)
  return {
    "layers/attention/query": f32_8x4x2,
    "layers.attention/query": f32_8x4x2[::-1, :, 1],  # not contiguous
    "layers": np.asfortranarray(f32_8x4x2[:, :, 0]),
    "odd": odd.view(np.float32),
    "minus zero": np.full((3,), -0.0, np.float32),
    "zero": np.zeros((1, 5), np.float32),
    "nothing": np.zeros((0, 3), np.int32),
    "flat/bf16": random.standard_normal((5, 3), np.float32).astype(jnp.bfloat16),
    "flat/int32": random.integers(-(2**31), 2**31, (300,), np.int32),
    "int64": np.asarray(-(2**62) - 1),
    "bool": np.array([True, False]),
    "scalar/f32": np.asarray(3.25, np.float32),
    "scalar/numpy's own": np.float32(1 / 3),
    "scalar/bf16": np.asarray(-1.5, jnp.bfloat16),
    "jax": jnp.arange(7, dtype=jnp.int32),
  }


def assert_same(found, expected):
  assert found.keys() == expected.keys()
  for name, value in expected.items():
    value = np.asarray(value)
    assert found[name].dtype == value.dtype, name
    assert found[name].shape == value.shape, name
    assert np.asarray(found[name]).tobytes() == value.tobytes(), name


def test_arrays_and_state_come_back_bit_by_bit(tmp_path):
  storage = make(tmp_path / "checkpoints")
  meta = storage.save(7, "learner-3", 12345, STATE, some())
  part = storage.load(7, "learner-3")
  assert_same(part.arrays, some())
  assert all(type(value) is np.ndarray for value in part.arrays.values())
  assert part.state == STATE
  assert (part.snapshot, part.incarnation) == (7, 12345)
  assert meta == storage.meta(7, "learner-3")


@pytest.mark.parametrize("arrays", [{}, {"nothing": np.zeros((2, 0), jnp.bfloat16)}])
def test_a_part_may_have_no_values_at_all(tmp_path, arrays):
  make(tmp_path).save(0, "learner-0", 1, {}, dict(arrays))
  assert_same(make(tmp_path).load(0, "learner-0").arrays, arrays)


@pytest.mark.parametrize("name", ["", "a/", "/a", "a//b"])
def test_names_that_storage_could_mix_up_are_refused_before_anything_is_touched(name, storage):
  storage.save(0, "syncer-0", 1, {}, some())
  with pytest.raises(ValueError, match=f"array {name!r}"):
    storage.save(0, "syncer-0", 2, {}, {"a": np.ones(3), name: np.zeros(3)})
  assert_same(storage.load(0, "syncer-0").arrays, some())


@pytest.mark.parametrize("role", ["", "learners/0", "..", "manifest.json", "evaluator"])
def test_roles_that_are_no_folders_are_refused(tmp_path, role):
  with pytest.raises(ValueError, match="saves no parts"):
    make(tmp_path).save(0, role, 1, {}, {})


def test_only_the_named_arrays_are_read(storage):
  storage.save(0, "learner-0", 1, {}, some())
  names = ("flat/bf16", "nothing")
  assert_same(
    storage.load(0, "learner-0", names=names).arrays, {name: some()[name] for name in names}
  )
  assert storage.load(0, "learner-0", names=()).arrays == {}
  with pytest.raises(KeyError, match="else"):
    storage.load(0, "learner-0", names=("flat/bf16", "else"))


AXES = ("data", "fsdp", "tensor")
MESHES = {8: (2, 2, 2), 4: (1, 2, 2), 2: (1, 1, 2), 1: (1, 1, 1)}
SPECS = {"f32": P("fsdp", "tensor"), "bf16": P(None, ("data", "fsdp")), "int32": P("tensor")}
EXCHANGED = {"f32": P("tensor", ("fsdp", "data")), "bf16": P("fsdp", "data"), "int32": P()}


def over(mesh, specs):
  return {name: NamedSharding(mesh, spec) for name, spec in specs.items()}


def mesh_of(devices, axes=AXES):
  return Mesh(np.array(jax.devices()[-devices:]).reshape(MESHES[devices]), axes)


def matrices():
  random = np.random.default_rng(5)
  values = random.standard_normal((3, 16, 8), np.float32)
  values[0, 0, :3] = [np.nan, -0.0, np.inf]
  return {
    "f32": values[0],
    "bf16": values[1].astype(jnp.bfloat16),
    "int32": values[2].view(np.int32),
  }


def placed_by(shardings):
  return lambda name, value: jax.device_put(value, shardings[name]) if name in shardings else value


@pytest.mark.parametrize("devices", MESHES)
@pytest.mark.parametrize("before", MESHES)
def test_one_mesh_writes_and_another_reads(tmp_path, before, devices):
  storage, arrays = make(tmp_path), matrices()
  storage.save(0, "learner-0", 1, {}, jax.device_put(arrays, over(mesh_of(before), SPECS)))
  shardings = over(mesh_of(devices, AXES[::-1]), EXCHANGED)
  part = storage.load(0, "learner-0", placed_by(shardings))
  assert_same(part.arrays, arrays)
  for name, sharding in shardings.items():
    assert isinstance(part.arrays[name], jax.Array)
    assert part.arrays[name].sharding == sharding
  mixed = storage.load(0, "learner-0", placed_by({"f32": shardings["f32"]})).arrays
  assert_same(mixed, arrays)
  assert type(mixed["int32"]) is np.ndarray


def test_saving_again_replaces_the_part(tmp_path):
  told = []
  storage = make(tmp_path, warnings=told)
  for snapshot in (1, 2):
    storage.save(snapshot, "learner-0", 1, {"of": snapshot}, some(snapshot))
    storage.commit(snapshot, ["learner-0"])
  storage.save(2, "learner-0", 2, {"of": 3}, {"w": np.ones(4)})
  assert_same(storage.load(2, "learner-0").arrays, {"w": np.ones(4)})
  # It is not the part that was committed, so the whole that fits together is the one before.
  assert_same(storage.find("learner-0").arrays, some(1))
  assert len(told) == 1 and "00000002/learner-0: is not the part" in told[0]
  storage.commit(2, ["learner-0"])
  assert storage.find("learner-0").state == {"of": 3}


def test_a_kill_while_a_part_is_replaced_leaves_none(storage, monkeypatch):
  """Else the meta of the one before would vouch for arrays of both."""
  storage.save(1, "learner-0", 1, {}, {"a": np.ones(3)})

  def killed(*_):
    raise KeyboardInterrupt

  monkeypatch.setattr(weights, "write", killed)
  with pytest.raises(KeyboardInterrupt):
    storage.save(1, "learner-0", 2, {}, {"a": np.zeros(3)})
  assert storage.metas(1) == {}


def test_a_snapshot_is_there_when_it_is_committed_and_not_before(storage):
  assert storage.committed() == [] and storage.find("syncer-0") is None
  metas = {
    role: storage.save(1, role, 1, {}, some(n))
    for n, role in enumerate(("syncer-0", "learner-0", "learner-10"))
  }
  assert storage.metas(1) == metas and storage.metas(2) == {}
  digests = {role: meta["digest"] for role, meta in metas.items()}
  assert storage.committed() == [] and storage.find("syncer-0") is None
  storage.commit(1, ["syncer-0", "learner-10"])
  assert storage.committed() == [1]
  assert storage.manifest(1)["parts"] == {r: digests[r] for r in ("syncer-0", "learner-10")}
  assert_same(storage.find("learner-10").arrays, some(2))
  assert storage.find("learner-0") is None, "it was not part of the snapshot"


def test_other_names_in_the_folder_are_no_snapshots(storage, tmp_path):
  for snapshot in (3, 123_456_789):
    storage.save(snapshot, "learner-0", 0, STATE, {})
    storage.commit(snapshot, ["learner-0"])
  assert storage.set_aside(3) == [str(tmp_path / "123456789.aside")]
  (tmp_path / "notes").mkdir()
  (tmp_path / "7").mkdir()
  assert storage.committed() == [3]
  assert storage.find("learner-0").snapshot == 3
  storage.forget()
  assert sorted(inside.name for inside in tmp_path.iterdir()) == [
    "00000003",
    "123456789.aside",
    "7",
    "notes",
  ]


def test_what_is_not_complete_cannot_be_committed(storage):
  storage.save(1, "syncer-0", 1, {}, some())
  with pytest.raises(Damaged, match=r"00000001/learner-0/meta.json: is missing"):
    storage.commit(1, ["syncer-0", "learner-0"])
  assert storage.committed() == []
  with pytest.raises(Damaged, match=r"manifest.json: is missing"):
    storage.manifest(1)


def test_a_role_that_was_away_is_found_where_it_was_last(storage):
  for snapshot, roles in ((9, ["syncer-0", "learner-0"]), (10, ["syncer-0"]), (11, ["syncer-0"])):
    for role in roles:
      storage.save(snapshot, role, 1, {"of": snapshot}, {})
    storage.commit(snapshot, roles)
  assert storage.committed() == [11, 10, 9]
  assert storage.find("syncer-0").snapshot == 11
  assert storage.find("learner-0").snapshot == 9


def test_another_plan_is_refused_by_name(tmp_path):
  make(tmp_path).save(1, "learner-0", 1, {}, some())
  make(tmp_path).commit(1, ["learner-0"])
  told = []
  other = make(tmp_path, "other plan", told)
  with pytest.raises(Damaged, match=r"another plan: 'plan', not 'other plan'"):
    other.load(1, "learner-0")
  assert other.find("learner-0") is None and other.metas(1) == {}
  assert len(told) == 1 and "00000001/manifest.json" in told[0]


def test_another_format_is_refused_by_name(tmp_path, monkeypatch):
  with monkeypatch.context() as then:
    then.setattr(arrays_lib, "FORMAT", 1)
    make(tmp_path).save(1, "learner-0", 1, {}, some())
    make(tmp_path).commit(1, ["learner-0"])
  told = []
  now = make(tmp_path, warnings=told)
  with pytest.raises(Damaged, match=f"belongs to another format: 1, not {arrays_lib.FORMAT}"):
    now.load(1, "learner-0")
  assert now.find("learner-0") is None and len(told) == 1


@pytest.mark.parametrize("change", [('"of": 1', '"of": 2'), ('"digest"', '"none"')])
def test_a_record_that_is_not_what_was_signed_is_refused(tmp_path, storage, change):
  storage.save(1, "learner-0", 1, {"of": 1}, {})
  meta = tmp_path / "00000001" / "learner-0" / "meta.json"
  meta.write_text(meta.read_text().replace(*change))
  with pytest.raises(Damaged, match=r"meta.json: is not what was written"):
    storage.load(1, "learner-0")


def test_pruning_keeps_the_newest_and_what_is_under_way(tmp_path, storage):
  storage.prune(keep=2)
  for snapshot in range(1, 9):
    storage.save(snapshot, "syncer-0", 1, {}, {"w": np.ones(3)})
    if snapshot not in (2, 5, 8):
      storage.commit(snapshot, ["syncer-0"])
  storage.prune(keep=3)
  assert storage.committed() == [7, 6, 4]
  assert sorted(path.name for path in tmp_path.iterdir()) == [
    "00000004",
    "00000006",
    "00000007",
    "00000008",
  ]


def test_a_shard_that_the_run_has_no_more_leaves_no_part(tmp_path, storage):
  """The run went on with fewer shards: their parts stayed for ever, a share of the model each."""
  for snapshot, shards in ((1, 2), (2, 1), (3, 1)):
    roles = [f"syncer-{shard}" for shard in range(shards)]
    for role in roles:
      storage.save(snapshot, role, 1, {}, some())
    storage.commit(snapshot, roles)
  storage.prune(keep=2)
  assert sorted(path.name for path in tmp_path.iterdir()) == ["00000002", "00000003"]


def test_saving_is_silent_needs_no_main_thread_and_leaves_none(tmp_path, caplog):
  """Roles of the threads engine save beside each other."""
  before, failures = set(threading.enumerate()), []
  sharded = jax.device_put(matrices(), over(mesh_of(8), SPECS))

  def role(name, number):
    try:
      storage = make(tmp_path)
      for snapshot in range(3):
        storage.save(snapshot, name, number, {"n": snapshot}, {**sharded, **some(number)})
        storage.save(snapshot, name, number, {"n": snapshot}, {**sharded, **some(snapshot)})
        assert_same(
          storage.load(snapshot, name, placed_by(over(mesh_of(4), SPECS))).arrays,
          {**matrices(), **some(snapshot)},
        )
    except Exception as error:
      failures.append(error)

  with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
    warnings.simplefilter("error")
    threads = [threading.Thread(target=role, args=(f"learner-{n}", n)) for n in range(4)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
  assert not failures, failures
  assert set(threading.enumerate()) == before
  assert caplog.messages == []


def test_a_relative_path_is_taken_from_here(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  storage = make("checkpoints")
  monkeypatch.chdir("/")
  storage.save(0, "syncer-0", 1, {}, some())
  assert_same(make(tmp_path / "checkpoints").load(0, "syncer-0").arrays, some())


class Bucket(MemoryFileSystem):
  """Objects instead of files, under gs://."""

  protocol = ("gs", "gcs")
  store = {}
  pseudo_dirs = [""]

  @classmethod
  def _strip_protocol(cls, path):
    return "/" + path.removeprefix("gs://").strip("/")


def test_a_bucket_is_used_like_a_folder(monkeypatch):
  bucket, written, asked = Bucket(), {}, set()
  bucket.store.clear()

  def filesystem(self, path):
    asked.add(str(path))
    return bucket

  monkeypatch.setattr(type(backend.fsspec_backend), "fs", filesystem)
  monkeypatch.setattr(gpath, "_is_tf_installed", lambda: False)

  def write(path, arrays):
    """TensorStore speaks to gs:// itself; what it is told is what can be seen from here."""
    written[str(path)] = dict(arrays)
    bucket.pipe_file(f"{path}/d", b"")

  monkeypatch.setattr(weights, "write", write)
  monkeypatch.setattr(arrays_lib, "read", lambda path, *_: written[str(path)])
  storage = make("gs://bucket/runs/one")
  assert storage.find("learner-3") is None
  for snapshot in (1, 2, 3):
    storage.save(snapshot, "learner-3", 1, STATE, some(0))
    storage.save(snapshot, "learner-3", 1, STATE, some(snapshot))
    storage.commit(snapshot, ["learner-3"])
  storage.prune(keep=2)
  assert storage.committed() == [3, 2]
  monkeypatch.setattr(fsspec, "filesystem", {"gs": bucket}.get)
  grown = storage.growth(3, ["learner-3", "learner-4"])
  assert grown["learner-3"] > 99 > grown["learner-4"] == 0
  assert storage.find("learner-3").state == STATE
  assert storage.metas(3)["learner-3"]["digest"] == storage.manifest(3)["parts"]["learner-3"]
  assert_same(storage.load(2, "learner-3").arrays, some(2))
  assert "gs://bucket/runs/one/00000003/learner-3/arrays/0" in written
  assert all(path.startswith("gs://bucket/runs/one") for path in asked), asked
  assert sorted(bucket.store) == [
    f"/bucket/runs/one/0000000{snapshot}/{file}"
    for snapshot in (2, 3)
    for file in ("learner-3/arrays/0/d", "learner-3/meta.json", "manifest.json")
  ]


def test_listings_of_a_bucket_are_never_remembered():
  """Else nobody would see the others' parts: fsspec's file systems keep what they listed."""

  class Store(fsspec.AbstractFileSystem):
    protocol = ("gs", "gcs")
    cachable = False

  assert not Store().dircache.use_listings_cache


def test_what_was_never_committed_is_forgotten(tmp_path):
  warnings: list[str] = []
  storage = Storage(tmp_path / "checkpoints", "plan", warnings.append)
  storage.forget("learner-0")  # nothing there yet
  for snapshot in (1, 2, 3):
    for role in ("syncer-0", "learner-0"):
      storage.save(snapshot, role, 0, {}, {"x": np.arange(3, dtype=np.float32)})
    if snapshot < 3:
      storage.commit(snapshot, ["syncer-0", "learner-0"])
  storage.forget("learner-0")
  assert storage.metas(3).keys() == {"syncer-0"}, "its own part alone"
  assert storage.committed() == [2, 1]
  assert storage.metas(2).keys() == {"syncer-0", "learner-0"}
  storage.forget()
  assert storage.metas(3) == {} and storage.metas(1).keys() == {"syncer-0", "learner-0"}
  assert storage.committed() == [2, 1], "what was committed is nobody's to forget"
  assert warnings == []


def test_a_snapshot_that_the_run_does_not_go_on_from_is_set_aside_whole(tmp_path, storage):
  """Its number comes again, and somebody may want to know what is wrong with it."""
  for again in range(2):
    for snapshot in (1, 2, 3):
      storage.save(snapshot, "syncer-0", again, {}, some(snapshot))
      if snapshot < 3:
        storage.commit(snapshot, ["syncer-0"])
    (moved,) = storage.set_aside(newer_than=1)
    assert moved == str(tmp_path / ("00000002.aside" + "1" * again))
    assert storage.committed() == [1] and storage.metas(3), "what is not committed stays"
    storage.prune(keep=1)
  copies = sorted(path.name for path in tmp_path.iterdir() if "aside" in path.name)
  assert copies == ["00000002.aside", "00000002.aside1"]
  (tmp_path / "00000002.aside").rename(tmp_path / "00000002")  # as who knows better would do
  assert storage.committed() == [2, 1]
  assert_same(storage.find("syncer-0").arrays, some(2))


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_saving_and_restoring_take_a_window_of_memory_beside_the_state(tmp_path):
  """Measured in processes of their own, on arrays that are cut over eight devices."""
  mib, count = 128, 16
  bar = 3 * mib / 8 + 3 * mib / count  # three windows, three arrays
  # So that the C library gives back what is freed: its hoard is not what is measured.
  variables = {**os.environ, "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"}

  def rose(what: str) -> float:
    command = [sys.executable, "-m", "tests.checkpoint.peak_memory", tmp_path, what]
    command += [str(mib), str(count)]
    return float(subprocess.check_output(command, env=variables, cwd=ROOT))

  assert rose("save") < bar
  assert rose("load") < mib + bar


def test_what_is_written_is_let_go_of(tmp_path, monkeypatch):
  """The capture of a state may be its only copy beside the one that trains on."""
  monkeypatch.setattr(arrays_lib, "WINDOW_BYTES", 100)
  arrays = {str(i): np.full(20, i, np.float32) for i in range(5)}
  alive = [weakref.ref(each) for each in arrays.values()]
  seen, real = [], ocp.Checkpointer.save

  def save(self, *arguments, **more):
    seen.append(sum(ref() is not None for ref in alive))
    return real(self, *arguments, **more)

  monkeypatch.setattr(ocp.Checkpointer, "save", save)
  storage = make(tmp_path)
  meta = storage.save(0, "learner-0", 1, {}, arrays)
  assert meta["windows"] == [["0", "1"], ["2", "3"], ["4"]]
  assert not arrays and seen == [5, 3, 1]
  assert_same(
    storage.load(0, "learner-0").arrays, {str(i): np.full(20, i, np.float32) for i in range(5)}
  )
  assert storage.load(0, "learner-0", names=["4", "1"]).arrays.keys() == {"4", "1"}
