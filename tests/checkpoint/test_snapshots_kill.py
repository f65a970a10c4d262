"""Saving that is killed, finds the disk full or the folder denied: nothing half-written counts.

Run as a script, this file starts savers and kills them; a fork costs less than a new process.
"""

import contextlib
import itertools
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

if __name__ == "__main__":
  from ddiloco import environment

  environment.prepare(num_cpu_devices=2, cpu_only=True)

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ddiloco.checkpoint.snapshots import Damaged, Storage

REPOSITORY = pathlib.Path(__file__).parents[2]
SEED = 7
ROLES = ("learner-0", "syncer-0")
# What Python asks of the file system; TensorStore's own writes happen between these.
FILE_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir"}


def contents(incarnation):
  values = np.random.default_rng(incarnation)
  return {
    "large": values.standard_normal((512, 256), np.float32),
    "small": values.integers(0, 99, (3,), np.int32),
  }


def save_one(storage, snapshot, incarnation):
  mesh = Mesh(np.array(jax.devices()[:2]), ("fsdp",))
  arrays = contents(incarnation)
  arrays["large"] = jax.device_put(arrays["large"], NamedSharding(mesh, P("fsdp")))
  for role in ROLES:
    storage.save(snapshot, role, incarnation, {"mine": incarnation}, dict(arrays))
  storage.commit(snapshot, ROLES)


def check(part):
  """Whatever incarnation saved it, it is all of that one."""
  assert part.state == {"mine": part.incarnation}
  expected = contents(part.incarnation)
  assert part.arrays.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_array_equal(np.asarray(part.arrays[name]), value, strict=True)


# --- in the other process -------------------------------------------------------------------------


def save_forever(path, progress, die_after):
  """Saves every snapshot twice; may kill itself at a given call of the file system."""
  save_one(Storage(f"{path}.warm", "plan", print), 0, 0)  # imports, devices: not to be killed in
  storage = Storage(path, "plan", print)
  calls = itertools.count(1)

  def audit(event, arguments):
    if event in FILE_EVENTS and next(calls) == die_after:
      os.kill(os.getpid(), signal.SIGKILL)

  os.write(progress, b"!")
  if die_after:
    sys.addaudithook(audit)
  for incarnation in itertools.count(4):
    save_one(storage, incarnation // 2, incarnation)
    storage.prune(keep=2)
    os.write(progress, b"!")


def serve():
  """For each line "path calls commits seconds" forks a saver and kills it then, or at that call."""
  for line in sys.stdin:
    path, calls, commits, seconds = line.split()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
      try:
        save_forever(path, writer, int(calls))
      finally:
        os._exit(1)  # it never ends by itself
    os.close(writer)
    if not int(calls):
      for _ in range(1 + int(commits)):
        os.read(reader, 1)
      time.sleep(float(seconds))  # the moment of the kill, not something to wait for
      os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(reader)
    shutil.rmtree(f"{path}.warm")
    print(os.waitstatus_to_exitcode(status), flush=True)


# --- in this process ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def killer():
  command = [sys.executable, "-m", "tests.checkpoint.test_snapshots_kill"]
  process = subprocess.Popen(
    command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
  )

  def kill(path, calls=0, commits=0, seconds=0.0):
    process.stdin.write(f"{path} {calls} {commits} {seconds}\n")
    process.stdin.flush()
    assert process.stdout.readline() == f"{-signal.SIGKILL}\n"

  with process:
    yield kill
    process.stdin.close()


@pytest.fixture(scope="module")
def committed(tmp_path_factory):
  path = tmp_path_factory.mktemp("committed")
  save_one(Storage(path, "plan", pytest.fail), 1, 1)
  return path


def after_kill(committed, killer, path, **moment):
  """Fails unless all that is left is whole, or known not to be; returns what was going on."""
  told, case = [], f"killed at {moment}"
  shutil.copytree(committed, path)
  killer(path, **moment)
  storage = Storage(path, "plan", told.append)
  for role in ROLES:
    part = storage.find(role)
    assert part is not None, f"{case}: nothing is left of what was committed; {told}"
    check(part)
  newest = part.snapshot
  for snapshot in range(newest + 2):
    complete = storage.metas(snapshot)
    for role in ROLES:
      with contextlib.nullcontext() if role in complete else contextlib.suppress(Damaged):
        check(storage.load(snapshot, role))
  left = {file.name for file in path.rglob("*")}
  # Whatever lies about, the next one saves over it.
  save_one(storage, newest + 1, 1000)
  assert all(storage.find(role).incarnation == 1000 for role in ROLES), case
  shutil.rmtree(path)
  return newest, any("orbax-checkpoint-tmp" in name for name in left)


def test_a_saver_killed_at_any_call_leaves_what_was_committed(committed, killer, tmp_path):
  seen = []
  for calls in random.Random(SEED).sample(range(1, 161), 20):
    seen.append(after_kill(committed, killer, tmp_path / "run", calls=calls))
  assert len({newest for newest, _ in seen}) > 1, "before the first commit, and after it"
  assert {torn for _, torn in seen} == {True, False}, "while arrays were written, and not"


def test_a_saver_killed_at_any_time_leaves_what_was_committed(committed, killer, tmp_path):
  print(f"seed {SEED}")
  chance, seen = random.Random(SEED), []
  for number in range(12):
    moment = {"commits": number % 3, "seconds": chance.uniform(0.0, 0.2)}
    seen.append(after_kill(committed, killer, tmp_path / "run", **moment))
  assert len({newest for newest, _ in seen}) > 1


@pytest.mark.parametrize(
  "delete, goes", [(lambda storage: storage.prune(1), 1), (Storage.forget, 3)], ids=["old", "unfit"]
)
def test_what_is_half_deleted_does_not_look_complete(
  committed, tmp_path, monkeypatch, delete, goes
):
  """Stopped before every single file of it."""
  remove, left, full = os.unlink, 0, tmp_path / "full"
  shutil.copytree(committed, full)
  save_one(Storage(full, "plan", pytest.fail), 2, 2)
  for role in ROLES:
    Storage(full, "plan", pytest.fail).save(3, role, 3, {"mine": 3}, contents(3))

  def until_stopped(*args, **kwargs):
    nonlocal left
    left -= 1
    if left < 0:
      raise OSError("stopped")
    remove(*args, **kwargs)

  for calls in itertools.count():
    path, told = tmp_path / str(calls), []
    shutil.copytree(full, path)
    storage = Storage(path, "plan", told.append)
    with monkeypatch.context() as patched, contextlib.suppress(OSError):
      left = calls
      patched.setattr(os, "unlink", until_stopped)
      patched.setattr(os, "remove", until_stopped)
      delete(storage)
    ended = left >= 0
    for snapshot in (1, 2, 3) if ended else (goes,):  # in between it has removed of that one alone
      for role in storage.metas(snapshot):
        check(storage.load(snapshot, role))
    for role in ROLES:
      check(storage.find(role))
    if ended:
      break
  assert calls > 10 and not (path / f"{goes:08d}").exists()


@contextlib.contextmanager
def disk_of(size_bytes):
  """No file can become longer: what a full disk says, without filling one."""
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def denied(path, mode=0o500):
  """Nobody may write here; root asks as somebody else."""
  os.chmod(path, mode)
  if root := os.geteuid() == 0:
    os.seteuid(65534)
  try:
    yield
  finally:
    if root:
      os.seteuid(0)
    os.chmod(path, 0o700)


@pytest.mark.parametrize("size_bytes", [0, 100, 5_000, 300_000])
def test_a_full_disk_is_said_and_leaves_what_was_committed(committed, tmp_path, size_bytes):
  """Full when the first record is written, somewhere between, or in the middle of values."""
  path = tmp_path / "checkpoints"
  shutil.copytree(committed, path)
  storage = Storage(path, "plan", pytest.fail)
  with pytest.raises(OSError, match=r"File too large"), disk_of(size_bytes):
    storage.save(2, "learner-0", 2, {"mine": 2}, contents(2))
  assert storage.metas(2) == {} and storage.committed() == [1]
  check(storage.find("learner-0"))
  with pytest.raises(OSError), disk_of(0):
    storage.commit(1, ["learner-0"])
  check(storage.find("syncer-0"))
  save_one(storage, 3, 3)  # as a run does: with the next one
  assert storage.find("learner-0").incarnation == 3


def test_a_denied_folder_is_said_and_leaves_what_was_committed(committed, tmp_path, monkeypatch):
  monkeypatch.setattr("ddiloco.checkpoint.signed_json.PAUSES_SECONDS", ())
  path, told = tmp_path / "checkpoints", []
  shutil.copytree(committed, path)
  storage = Storage(path, "plan", told.append)
  with denied(path):
    with pytest.raises(PermissionError):
      storage.save(2, "learner-0", 2, {"mine": 2}, contents(2))
    with pytest.raises(PermissionError):
      storage.save(1, "learner-0", 2, {"mine": 2}, contents(2))
  assert not told
  check(storage.find("learner-0"))


def test_a_folder_that_cannot_be_made_is_said(tmp_path, monkeypatch):
  monkeypatch.setattr("ddiloco.checkpoint.signed_json.PAUSES_SECONDS", ())
  (tmp_path / "file").write_text("no folder")
  storage = Storage(tmp_path / "file", "plan", pytest.fail)
  with pytest.raises(OSError):
    storage.save(2, "learner-0", 2, {"mine": 2}, contents(2))
  assert storage.find("learner-0") is None


if __name__ == "__main__":
  serve()
