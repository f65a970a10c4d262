"""Checkpoints damaged in every way: refused by name, or harmless, or the one before is used."""

import collections
import contextlib
import json
import random
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from ddiloco.checkpoint import signed_json
from ddiloco.checkpoint.snapshots import Damaged, Storage

SEED = 20260421


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
  monkeypatch.setattr(signed_json, "PAUSES_SECONDS", ())


ROLES = ("learner-0", "syncer-0")


def contents(snapshot, role):
  values = np.random.default_rng([snapshot, ROLES.index(role)])
  return {
    "layers/attention": values.standard_normal((40, 30), np.float32),  # beside the index
    "norm": values.standard_normal(6, np.float32),  # small enough to lie in it
    "moment": values.standard_normal((700,), np.float32).astype(jnp.bfloat16),
    "count": np.asarray(snapshot, np.int32),
  }


def state(snapshot, role):
  return {"global_step": 100 * snapshot, "role": role}


def write_run(path, plan_id, snapshots):
  storage = Storage(path, plan_id, pytest.fail)
  for snapshot in snapshots:
    for role in ROLES:
      storage.save(snapshot, role, snapshot, state(snapshot, role), contents(snapshot, role))
    storage.commit(snapshot, ROLES)
  return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  return write_run(tmp_path_factory.mktemp("whole"), "plan", (1, 2))


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
  return write_run(tmp_path_factory.mktemp("foreign"), "other plan", (1, 2))


def is_what_was_saved(part, snapshot, role):
  expected = contents(snapshot, role)
  return (
    (part.snapshot, part.incarnation) == (snapshot, snapshot)
    and part.state == state(snapshot, role)
    and part.arrays.keys() == expected.keys()
    and all(
      part.arrays[name].dtype == value.dtype
      and part.arrays[name].shape == value.shape
      and part.arrays[name].tobytes() == value.tobytes()
      for name, value in expected.items()
    )
  )


# Each takes the folder of all checkpoints and damages snapshot 2; snapshot 1 stays as it is.


def any_file(path, chance):
  return chance.choice(sorted(p for p in (path / "00000002").rglob("*") if p.is_file()))


def truncate(path, chance):
  victim = any_file(path, chance)
  content = victim.read_bytes()
  victim.write_bytes(content[: chance.randrange(len(content))])


def flip(path, chance):
  victim = any_file(path, chance)
  content = bytearray(victim.read_bytes())
  content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
  victim.write_bytes(content)


def lose_file(path, chance):
  any_file(path, chance).unlink()


def lose_meta(path, chance):
  (path / "00000002" / chance.choice(ROLES) / "meta.json").unlink()


def lose_manifest(path, chance):
  (path / "00000002/manifest.json").unlink()


def edit_record(path, chance):
  name = chance.choice(["manifest.json", *(f"{role}/meta.json" for role in ROLES)])
  victim = path / "00000002" / name
  record = json.loads(victim.read_text())
  field = chance.choice(sorted(record))
  if chance.random() < 0.5:
    del record[field]
  else:
    record[field] = chance.choice([None, 0, "", [], {}, {"learner-0": "0"}, "x" * 64])
  victim.write_text(json.dumps(chance.choice([record] * 5 + [[record], None, 3])))


def replace_by_other_plan(path, chance, foreign):
  name = chance.choice(["", "manifest.json", *ROLES])
  source, target = foreign / "00000002" / name, path / "00000002" / name
  shutil.rmtree(target) if target.is_dir() else target.unlink()
  shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)


def mix_snapshots(path, chance):
  role, other = chance.sample(ROLES, 2)
  source, target = chance.choice(
    [
      (f"00000001/{role}", f"00000002/{role}"),
      (f"00000001/{role}/arrays", f"00000002/{role}/arrays"),
      (f"00000001/{role}/meta.json", f"00000002/{role}/meta.json"),
      ("00000001/manifest.json", "00000002/manifest.json"),
      (f"00000002/{other}", f"00000002/{role}"),
      (f"00000002/{other}/arrays", f"00000002/{role}/arrays"),
      (f"00000002/{other}/meta.json", f"00000002/{role}/meta.json"),
      ("00000002/manifest.json", f"00000002/{role}/meta.json"),
      (f"00000002/{role}/meta.json", "00000002/manifest.json"),
    ]
  )
  source, target = path / source, path / target
  shutil.rmtree(target) if target.is_dir() else target.unlink()
  shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)


def put_folder(path, chance):
  victim = any_file(path, chance)
  victim.unlink()
  victim.mkdir()
  if chance.random() < 0.5:
    (victim / "inside").write_text("?")


def put_file(path, chance):
  folders = [p for p in (path / "00000002").rglob("*") if p.is_dir()] + [path / "00000002"]
  victim = chance.choice(sorted(folders))
  shutil.rmtree(victim)
  victim.write_text("no folder")


DAMAGES = (
  truncate,
  flip,
  flip,
  flip,
  lose_file,
  lose_meta,
  lose_manifest,
  edit_record,
  replace_by_other_plan,
  mix_snapshots,
  put_folder,
  put_file,
)
MUST_BE_NOTICED = {"lose_meta", "edit_record", "replace_by_other_plan", "mix_snapshots", "put_file"}


def outcome(path, role, case):
  """How `find` and `load` took the damage; fails if they took it badly."""
  told = []
  storage = Storage(path, "plan", told.append)
  part = storage.find(role)
  assert part is not None, f"{case}: nothing found, though snapshot 1 is whole"
  assert is_what_was_saved(part, part.snapshot, role), f"{case}: changed values were restored"
  if part.snapshot == 2:
    assert not told, f"{case}: {told}"
    return "harmless"
  with contextlib.suppress(Damaged):  # it may be another file than the role's that is damaged
    assert is_what_was_saved(storage.load(2, role), 2, role), f"{case}: changed values were loaded"
  if storage.committed() == [1]:
    return "uncommitted"
  assert len(told) == 1 and str(path / "00000002") in told[0], f"{case}: {told}"
  return "named"


@pytest.mark.slow
def test_200_damaged_checkpoints(whole, foreign, tmp_path):
  print(f"seed {SEED}")
  chance, outcomes = random.Random(SEED), collections.defaultdict(collections.Counter)
  for number in range(200):
    damage, path = DAMAGES[number % len(DAMAGES)], tmp_path / "run"
    shutil.copytree(whole / "00000002", path / "00000002")
    (path / "00000001").symlink_to(whole / "00000001")
    more = (foreign,) if damage is replace_by_other_plan else ()
    damage(path, chance, *more)
    case = f"{damage.__name__}, number {number} of seed {SEED}"
    took = {outcome(path, role, case) for role in ROLES}
    assert took != {"harmless"} or damage.__name__ not in MUST_BE_NOTICED, case
    outcomes[damage.__name__]["+".join(sorted(took))] += 1
    shutil.rmtree(path)
  for name, counts in outcomes.items():
    print(name, dict(counts))
  assert outcomes.keys() == {damage.__name__ for damage in DAMAGES}
  assert set(outcomes["lose_manifest"]) == {"uncommitted"}
  noticed = {name: counts.total() - counts["harmless"] for name, counts in outcomes.items()}
  assert all(noticed.values()), f"of some kind nothing was noticed: {noticed}"
  assert noticed["flip"] >= 10, "Orbax reads only some of its files, but not that few"


def test_every_bit_of_the_values_counts(whole, tmp_path):
  """Where the values themselves lie, no flipped bit passes."""
  path, role = tmp_path / "run", "learner-0"
  shutil.copytree(whole, path)
  raw = contents(2, role)["layers/attention"].tobytes()
  holding = [p for p in path.rglob("*") if p.is_file() and raw in p.read_bytes()]
  assert holding, "the values are stored as they are"
  for bit in random.Random(SEED).sample(range(8 * len(raw)), 20):
    for victim in holding:
      content = bytearray((whole / victim.relative_to(path)).read_bytes())
      content[content.index(raw) + bit // 8] ^= 1 << bit % 8
      victim.write_bytes(content)
    with pytest.raises(Damaged, match=r"00000002/learner-0/arrays: .*'layers/attention' is"):
      Storage(path, "plan", pytest.fail).load(2, role)


def test_when_all_are_damaged_each_is_named_and_none_is_found(whole, tmp_path):
  path, told = tmp_path / "run", []
  shutil.copytree(whole, path)
  (path / "00000001/learner-0/meta.json").write_text("{}")
  shutil.rmtree(path / "00000002/learner-0/arrays")
  assert Storage(path, "plan", told.append).find("learner-0") is None
  assert len(told) == 2
  assert "00000002/learner-0/arrays: " in told[0]
  assert "00000001/learner-0/meta.json: is not what was written" in told[1]
