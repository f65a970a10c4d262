"""What a role begins with: states as JSON and back, shards' fragments, a learner's own part."""

import dataclasses
import itertools
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import fsspec
import numpy as np
import pytest

from ddiloco.checkpoint import weights
from ddiloco.checkpoint.restore import (
  ResumeState,
  begin_learner,
  new_learner,
  new_syncer,
  open_storage,
  restore_fragments,
)
from ddiloco.checkpoint.snapshots import Storage
from ddiloco.config import ConfigError, from_dict
from ddiloco.core import fragments
from ddiloco.core.delta import Committed, new_fragment
from ddiloco.core.fragments import owned_by
from ddiloco.protocol import learner, rules, states
from ddiloco.protocol.actions import Received
from ddiloco.protocol.messages import FragmentState
from ddiloco.protocol.states import LearnerState
from ddiloco.protocol.values import from_json, replace
from ddiloco.roles import initial
from tests import says
from tests.checkpoint.test_snapshots_kill import denied
from tests.roles import toy

CONFIG = toy.config(2, 100, num_shards=2, num_fragments=4, snapshot_steps=10)
PLAN = fragments.make_plan(toy.SPECS, CONFIG.sync)
ALL = range(4)


@pytest.mark.parametrize("sync", [{"num_shards": 0}, {"num_shards": 1, "snapshot_steps": 0}])
def test_a_run_that_makes_no_snapshots_has_no_storage(sync, tmp_path):
  assert open_storage(from_dict({"sync": sync}), PLAN, tmp_path, "run") is None


def test_a_learner_asks_peers_for_moments_unless_they_may_have_caused_its_quarantine():
  peer = from_dict({"checkpoint": {"rejoin": "peer", "donor_seconds": 7.0}})
  assert new_learner(peer, PLAN, 0, 1).donor_seconds == 7.0
  assert new_learner(peer, PLAN, 0, 1, afresh=True).donor_seconds == 0.0
  assert new_learner(CONFIG, PLAN, 0, 1).donor_seconds == 0.0


def test_an_island_that_trains_alone_makes_its_share_of_the_steps():
  islands = {"num_learners": 2, "batch_size": 3, "overrides": {"1": {"batch_size": 1}}}
  sections = {"sync": {"num_shards": 0}, "data": {"sequence_length": 5}, "islands": islands}
  config = from_dict({**sections, "run": {"total_tokens": 200}})
  state = new_learner(config, PLAN, 1, 7)
  assert (state.target_tokens, state.fragments, state.shards) == (10 * 5, (), ())
  assert new_learner(CONFIG, PLAN, 1, 7).target_tokens == CONFIG.run.total_tokens


# --- shards ---------------------------------------------------------------------------------------


def committed(p, snapshot, with_view=False, with_momentum=True):
  """Fragment p as it was when this snapshot was taken."""
  values = np.random.default_rng([p, snapshot])
  value, published_value, momentum = values.standard_normal((3, PLAN.fragments[p].size), np.float32)
  state = FragmentState(
    p,
    version=10 * snapshot + p,
    merged_tokens=99 * snapshot,
    merged_rounds={0: 7, 1: 8},
    merged_global_steps={0: 5, 1: 6},
    last_round=1000 * snapshot + p,
    global_step=snapshot,
    snapshot=snapshot,
  )
  return Committed(
    state,
    value,
    published_value if with_view else value,
    momentum if with_momentum else None,
    1000 * snapshot + p - 100 * (p == 2),  # one whose value was given back by a learner
  )


def save_shard(storage, snapshot, shard, shards, global_step=0, **kinds):
  """A shard's part as `roles.syncer` makes it."""
  mine = {p: committed(p, snapshot, **kinds) for p in owned_by(shard, shards, len(PLAN.fragments))}
  arrays = {}
  for p, each in mine.items():
    arrays[f"{p}/value"] = each.value
    if each.published_value is not each.value:
      arrays[f"{p}/published_value"] = each.published_value
    if each.momentum is not None:
      arrays[f"{p}/momentum"] = each.momentum
  config = dataclasses.replace(CONFIG, sync=dataclasses.replace(CONFIG.sync, num_shards=shards))
  state = new_syncer(config, shard, snapshot, mine)
  state = replace(
    state,
    global_step=global_step,
    vector_clock={**state.vector_clock, 0: 50 + shard, 1: 60 - shard},
  )
  part = states.syncer_part(state, {p: each.momentum_round for p, each in mine.items()})
  storage.save(snapshot, f"syncer-{shard}", snapshot, part, arrays)


def save_shards(storage, snapshot, shards=2, **kinds):
  for shard in range(shards):
    step = 10 * snapshot + -shard % shards  # the last one is not the newest of more than two
    save_shard(storage, snapshot, shard, shards, global_step=step, **kinds)
  storage.commit(snapshot, [f"syncer-{shard}" for shard in range(shards)])


def assert_same(found, expected):
  assert found.keys() == {each.state.index for each in expected}
  for each in expected:
    mine = found[each.state.index]
    assert mine.state == each.state and mine.momentum_round == each.momentum_round
    for name in ("value", "published_value", "momentum"):
      a, b = getattr(mine, name), getattr(each, name)
      assert a is b is None or (a.dtype, a.tobytes()) == (b.dtype, b.tobytes()), name


@pytest.fixture
def said():
  return []


@pytest.fixture
def storage(tmp_path, said, monkeypatch):
  monkeypatch.setattr("ddiloco.checkpoint.restore.warn", said.append)
  monkeypatch.setattr("ddiloco.checkpoint.signed_json.PAUSES_SECONDS", ())
  return Storage(tmp_path, PLAN.plan_id, said.append)


KINDS = [{}, {"with_view": True}, {"with_momentum": False}]


@pytest.mark.parametrize("kinds", KINDS, ids=["plain", "lossy", "no momentum"])
@pytest.mark.parametrize("before, after", [(2, 2), (1, 3), (3, 2), (4, 1)])
def test_any_number_of_shards_takes_over_what_others_had(storage, said, before, after, kinds):
  save_shards(storage, 3, before, **kinds)
  for shard in range(after):
    wanted = owned_by(shard, after, 4)
    restored = restore_fragments(storage, wanted)
    assert_same(restored.fragments, [committed(p, 3, **kinds) for p in wanted])
    assert restored.snapshot == 3
    owners = {p % before for p in wanted}
    assert restored.global_step == max(30 + -s % before for s in owners)
    known = {0: max(50 + s for s in owners), 1: max(60 - s for s in owners)}
    known |= {states.shard_key(s): rules.numbered(3, 0) for s in owners}
    assert restored.vector_clock == known
  assert not said


@pytest.mark.parametrize("keep", [True, False])
def test_all_fragments_of_a_part_are_read_in_one_go(storage, monkeypatch, keep):
  """One after the other, two hundred of a small model took a minute and a half."""
  read = mock.Mock(wraps=weights.read)
  monkeypatch.setattr(weights, "read", read)
  save_shards(storage, 3, 1)
  restored = restore_fragments(storage, ALL, keep=keep)
  assert read.call_count == 1
  assert_same(restored.fragments, [committed(p, 3) for p in ALL] if keep else [])


def test_one_fragment_is_found_too(storage):
  save_shards(storage, 3, 2)
  assert_same(restore_fragments(storage, [2]).fragments, [committed(2, 3)])


def test_a_shard_goes_on_where_the_run_was(storage):
  save_shards(storage, 3, 2)
  restored = restore_fragments(storage, owned_by(0, 2, 4))
  state = restored.resume(new_syncer(CONFIG, 0, 777, restored.fragments))
  assert (state.global_step, state.snapshot, state.incarnation) == (30, 3, 777)
  assert [f.version for f in state.fragments] == [30, 32]
  me = states.shard_key(0)
  assert state.vector_clock == {**restored.vector_clock, me: rules.numbered(777, 0)}, (
    "both lives are known"
  )


@pytest.mark.parametrize("rejoin", ["own", "peer"])
def test_a_shard_is_told_of_its_run(rejoin):
  sync = {"num_shards": 1, "num_fragments": 4}
  sections = {"sync": sync, "islands": {"num_learners": 3}, "run": {"total_tokens": 900}}
  config = from_dict({**sections, "checkpoint": {"rejoin": rejoin}})
  store = {p: new_fragment(PLAN.fragments[p], np.zeros(1, np.float32)) for p in range(4)}
  state = new_syncer(config, 0, 7, store, recovery_deadline=4.0, first_round=2)
  told = state.planned_learners, state.target_tokens, state.recovery_deadline, state.first_round
  assert told == (3, 900, 4.0, 2) and state.passes_moments == (rejoin == "peer")
  assert new_syncer(config, 0, 7, store).first_round == 0


def test_a_shard_knows_the_steps_of_all_islands_also_of_one_that_may_join():
  islands = {"num_learners": 1, "batch_size": 4, "overrides": {n: {"batch_size": 8} for n in "012"}}
  store = {p: new_fragment(PLAN.fragments[p], np.zeros(1, np.float32)) for p in range(4)}
  for mine, others in ((12, 4), (2, 8)):
    islands["overrides"]["2"]["batch_size"] = mine
    config = from_dict({"islands": islands, "sync": {"num_shards": 1, "num_fragments": 4}})
    state, length = new_syncer(config, 0, 7, store), config.data.sequence_length
    expected = length * min(mine, others), length * max(mine, others)
    assert (state.fewest_tokens, state.step_tokens) == expected


def test_a_run_that_goes_on_with_smaller_batches_merges_the_work_of_the_larger_ones(storage):
  """Its learners were quarantined for claims of more tokens than a step has now."""
  save_shards(storage, 3, 2)
  last = storage.load(3, "syncer-1")  # a shard that knew of smaller ones
  storage.save(3, "syncer-1", 3, {**last.state, "step_tokens": 0}, last.arrays)
  storage.commit(3, ["syncer-0", "syncer-1"])
  restored = restore_fragments(storage, ALL)
  new = new_syncer(CONFIG, 0, 777, restored.fragments)
  smaller = replace(new, step_tokens=new.step_tokens - 1)
  assert restored.resume(smaller).step_tokens == new.step_tokens


@pytest.mark.parametrize(("age_seconds", "believed"), [(3600.0, True), (None, False)])
def test_a_shard_believes_a_lone_learner_what_the_run_has_had_time_for(age_seconds, believed):
  """Else a shard that has lost all would take an island that is far ahead for a liar."""
  store = {p: new_fragment(PLAN.fragments[p], np.zeros(1, np.float32)) for p in (0, 2)}
  now = time.monotonic()
  began_at = None if age_seconds is None else now - age_seconds
  state = new_syncer(CONFIG, 0, 7, store, began_at=began_at)
  report = says.report(0, 1, 500, 1.0, (-1, -1), (0, 0), joins=True)
  state, _ = says.take_in(state, Received(report, now))
  assert (state.global_step == 500) == believed


def test_what_its_buddy_had_newer_keeps_its_place_in_the_run(storage):
  save_shards(storage, 3, 2)
  restored = restore_fragments(storage, [2])
  store = {**restored.fragments, 0: committed(0, 5)}  # captured for snapshot 5 by then
  fresh = new_syncer(CONFIG, 0, 777, store)
  fresh = replace(fresh, global_step=57)
  state = restored.resume(fresh)
  assert (state.global_step, state.snapshot) == (57, 5), "snapshot 4 is not captured again"


def test_a_snapshot_that_has_nothing_newer_than_the_buddy_is_not_captured_again(storage):
  save_shards(storage, 3, 2)
  store = {p: committed(p, 3) for p in owned_by(0, 2, 4)}  # as in it, but committed before it
  store = {p: replace(c, state=replace(c.state, snapshot=2)) for p, c in store.items()}
  rounds = {p: c.state.last_round for p, c in store.items()}
  restored = restore_fragments(storage, store, than=rounds)
  assert restored.fragments == {}
  assert restored.resume(new_syncer(CONFIG, 0, 777, store)).snapshot == 3


def test_only_what_is_newer_than_what_a_caller_has_is_read(storage, said, tmp_path):
  """A shard's buddy may have been away: its copies are then older than a snapshot."""
  save_shards(storage, 2)
  save_shards(storage, 3)
  have = {0: 3000, 1: 3000, 2: 9999}  # all the newest, older, newer; nothing of 3
  restored = restore_fragments(storage, ALL, than=have)
  assert_same(restored.fragments, [committed(p, 3) for p in (1, 3)])
  for arrays in tmp_path.glob("*/*/arrays"):
    shutil.rmtree(arrays)
  nothing = restore_fragments(storage, ALL, than={p: 3000 + p for p in ALL})
  assert nothing.fragments == {} and not said, "no array is read"


def test_the_newest_snapshot_that_has_all_of_them(storage, said):
  save_shards(storage, 1)
  save_shards(storage, 2)
  save_shard(storage, 3, 0, 2)
  storage.commit(3, ["syncer-0"])
  for shard in (0, 1):
    save_shard(storage, 4, shard, 2)  # never committed
  assert restore_fragments(storage, [0, 2]).snapshot == 3
  assert not said
  restored = restore_fragments(storage, ALL)
  assert restored.snapshot == 2
  assert_same(restored.fragments, [committed(p, 2) for p in ALL])
  assert len(said) == 1 and "3 skipped" in said[0] and "lacks fragments [1, 3]" in said[0]


def flip_values(storage, path):
  raw = committed(0, 2).value.tobytes()
  holding = [p for p in path.rglob("*") if p.is_file() and raw in p.read_bytes()]
  assert holding
  for victim in holding:
    content = bytearray(victim.read_bytes())
    content[content.index(raw) + 5] ^= 1
    victim.write_bytes(content)


def cut_meta(storage, path):
  meta = path / "syncer-1" / "meta.json"
  meta.write_bytes(meta.read_bytes()[:-10])


def lose_manifest_s_end(storage, path):
  (path / "manifest.json").write_text("{")


def replace_part(storage, path):
  save_shard(storage, 2, 1, 2, global_step=12345)


def save_state(change):
  """A part that is whole, but whose state is none."""

  def damage(storage, path):
    part = storage.load(2, "syncer-1")
    storage.save(2, "syncer-1", 2, change(dict(part.state)), part.arrays)
    storage.commit(2, ["syncer-0", "syncer-1"])

  return damage


def without(name):
  return lambda state: {k: v for k, v in state.items() if k != name}


DAMAGES = {
  "flipped": flip_values,
  "torn meta": cut_meta,
  "torn manifest": lose_manifest_s_end,
  "replaced": replace_part,
  "no global step": save_state(without("global_step")),
  "no momentum_rounds": save_state(without("momentum_rounds")),
  "fragments": save_state(lambda state: {**state, "fragments": [{"index": 1}]}),
  "no list": save_state(lambda state: {**state, "fragments": 7}),
  "vector_clock": save_state(lambda state: {**state, "vector_clock": [3]}),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_ones_are_named_and_skipped(storage, said, tmp_path, damage):
  save_shards(storage, 1)
  save_shards(storage, 2)
  damage(storage, tmp_path / "00000002")
  restored = restore_fragments(storage, ALL)
  assert restored.snapshot == 1
  assert_same(restored.fragments, [committed(p, 1) for p in ALL])
  assert len(said) == 1 and "skipped" in said[0] and "2" in said[0], said


def test_another_plan_and_an_empty_folder_have_nothing(storage, said, tmp_path):
  assert restore_fragments(storage, ALL) is None and not said
  save_shards(Storage(tmp_path, "another", pytest.fail), 1)
  assert restore_fragments(storage, ALL) is None
  assert len(said) == 1 and "belongs to another plan" in said[0]


def test_a_folder_that_cannot_be_read_is_a_warning(storage, said, tmp_path):
  path = tmp_path / "file"
  path.write_text("")
  nothing = Storage(path / "inside", PLAN.plan_id, said.append)
  assert restore_fragments(nothing, ALL) is None


# --- learners -------------------------------------------------------------------------------------


class Island(toy.ToyIsland):
  """Says how it began."""

  began = ""

  def compile(self):
    return 0.0

  def reset(self):
    self.began = "anew"

  def restore(self, arrays):
    super().restore(arrays)
    self.began = "restored"


def begin(storage, incarnation=9, number=1, rejoin="own"):
  """(how it begins, its island, the events)."""
  settings = dataclasses.replace(CONFIG.checkpoint, rejoin=rejoin)
  config = dataclasses.replace(CONFIG, checkpoint=settings)
  events, island = [], Island(number, PLAN)
  new = new_learner(config, PLAN, number, incarnation)
  clock = itertools.count().__next__
  began = begin_learner(new, config, island, storage, toy.ListRecorder(events), clock)
  return began, island, events


def save_learner(storage, snapshot=3, number=1, change=lambda state: state, lose=()):
  """A part of an island that has made four steps; its arrays."""
  island = Island(number, PLAN)
  for position in range(4):
    island.step(np.full((1, 2), position), position)
  state = learner.init(number, 2, (0, 1, 0, 1), 1)
  state = replace(state, global_step=40, step=4, trained_tokens=4)
  arrays = {**island.capture(), "base/2": np.arange(3, dtype=np.float32)}
  kept = {name: value for name, value in arrays.items() if name not in lose}
  storage.save(snapshot, f"learner-{number}", 2, change(states.learner_part(state, 44)), kept)
  storage.commit(snapshot, [f"learner-{number}"])
  return arrays


def test_a_learner_comes_back_with_its_own_newest_part(storage, said):
  save_learner(storage, 2, change=lambda state: {**state, "position": 1})
  arrays = save_learner(storage, 3)
  began, island, events = begin(storage)
  assert island.began == "restored" and not began.fresh and not said
  captured = island.capture()
  for name, value in captured.items():
    assert value.tobytes() == np.asarray(arrays[name]).tobytes(), name
  assert began.position == 44 and began.arrays.keys() == {"base/2"}
  state = began.state
  assert (state.global_step, state.step, state.trained_tokens) == (40, 4, 4)
  assert state.incarnation == 9 and state.target_tokens == CONFIG.run.total_tokens
  assert not state.joined, "shards say first what is newer"
  (restored,) = events
  assert restored.kind == "restored"
  assert (restored.snapshot, restored.of_incarnation, restored.seconds) == (3, 2, 1)


def assert_afresh(began, island, events):
  assert began == ResumeState(new_learner(CONFIG, PLAN, 1, 9))
  assert began.fresh and island.began == "anew" and not events


@pytest.mark.parametrize("how", ["fresh policy", "no storage", "nobody saved", "only others"])
def test_a_learner_begins_afresh(storage, said, how):
  save_learner(storage, number=1 if how in ("fresh policy", "no storage") else 0)
  if how == "nobody saved":
    storage.prune(1)
  chosen = None if how == "no storage" else storage
  assert_afresh(*begin(chosen, rejoin="fresh" if how == "fresh policy" else "own"))
  assert not said


MISFITS = {
  "field": lambda part: {**part, "learner": without("global_step")(part["learner"])},
  "unknown": lambda part: {**part, "learner": {**part["learner"], "colour": 3}},
  "type": lambda part: {**part, "learner": {**part["learner"], "global_step": "soon"}},
  "no learner": without("learner"),
  "no position": without("position"),
  "position": lambda part: {**part, "position": "there"},
  "a list": lambda part: {**part, "learner": [part["learner"]]},
}


@pytest.mark.parametrize("change", MISFITS.values(), ids=MISFITS)
def test_a_part_that_does_not_fit_is_named_and_the_learner_starts_afresh(storage, said, change):
  save_learner(storage, change=change)
  assert_afresh(*begin(storage))
  assert len(said) == 1 and "checkpoint 3 skipped: NotAState: " in said[0], said


def test_a_part_that_does_not_fit_is_skipped_for_an_older_one(storage, said):
  save_learner(storage, 2, change=lambda state: {**state, "position": 17})
  save_learner(storage, 3, change=MISFITS["no position"])
  began, island, events = begin(storage)
  assert island.began == "restored" and began.position == 17 and events[0].snapshot == 2
  assert len(said) == 1 and "checkpoint 3 skipped: " in said[0]


def test_a_part_of_another_plan_is_named_and_the_learner_starts_afresh(storage, said, tmp_path):
  save_learner(Storage(tmp_path, "another", pytest.fail))
  assert_afresh(*begin(storage))
  assert len(said) == 1 and "belongs to another plan" in said[0] and "00000003" in said[0]


def test_a_damaged_part_is_skipped_for_an_older_one(storage, said, tmp_path):
  save_learner(storage, 2, change=lambda state: {**state, "position": 17})
  save_learner(storage, 3)
  (tmp_path / "00000003" / "learner-1" / "meta.json").write_text("{}")
  began, island, events = begin(storage)
  assert island.began == "restored" and began.position == 17 and events[0].snapshot == 2
  assert len(said) == 1 and "00000003/learner-1" in said[0]


def test_random_states_of_a_learner_survive_a_part(storage):
  """Through storage itself, with everything a learner may have under way."""
  seed = random.randrange(2**32)
  print(f"seed {seed}")
  state = learner.init(1, 2, (0, 1, 0, 1), 1)
  rng = random.Random(seed)
  state = replace(state, step_seconds=rng.random(), vector_clock={1: rng.randrange(2**60), -2: 5})
  storage.save(1, "learner-1", 2, states.learner_part(state, rng.randrange(2**50)), {})
  part = storage.load(1, "learner-1")
  assert from_json(LearnerState, part.state["learner"]) == state


def test_a_place_that_nothing_here_can_reach_is_refused_at_once(tmp_path):
  (tmp_path / "file").write_text("no folder")
  for path in ("nowhere://bucket/run", str(tmp_path / "file")):
    config = from_dict({"checkpoint": {"path": path}})
    with pytest.raises(ConfigError, match=rf"checkpoint.path = '{path}'.*Fix: "):
      open_storage(config, initial.make_plan(config), tmp_path, "run")


def test_a_bucket_whose_package_is_not_installed_is_refused_at_once(tmp_path, monkeypatch):
  monkeypatch.setattr(fsspec, "get_filesystem_class", mock.Mock(side_effect=ImportError("gcsfs")))
  config = from_dict({"checkpoint": {"path": "gs://bucket"}})
  with pytest.raises(ConfigError, match=r"checkpoint.path = .*gcsfs.*Fix: pip install .ddiloco"):
    open_storage(config, initial.make_plan(config), tmp_path, "run")


def test_a_place_that_may_not_be_looked_into_is_no_traceback(monkeypatch):
  monkeypatch.setattr("ddiloco.checkpoint.signed_json.PAUSES_SECONDS", ())
  with tempfile.TemporaryDirectory() as folder:  # its parents are everybody's to read
    os.chmod(folder, 0o755)
    config = from_dict({"checkpoint": {"path": f"{folder}/mine"}})
    plan = initial.make_plan(config)  # here, since another user may not import what it needs
    with denied(Path(folder), 0):
      storage = open_storage(config, plan, Path(folder), "run")
      with pytest.raises(OSError, match="Permission denied"):
        storage.committed()


def test_runs_of_one_model_that_share_a_path_have_snapshots_of_their_own(tmp_path):
  """The second one went on from the first one's, silently."""
  config = from_dict({"checkpoint": {"path": str(tmp_path / "shared")}})
  plan = initial.make_plan(config)
  first = open_storage(config, plan, tmp_path, "first")
  first.save(1, "learner-0", 1, {}, {})
  first.commit(1, ["learner-0"])
  assert open_storage(config, plan, tmp_path, "second").committed() == []
  assert open_storage(config, plan, tmp_path / "moved", "first").committed() == [1]


def test_all_learners_of_a_process_may_read_their_parts_at_once():
  """msgspec crashed the process where several threads were the first to read a part."""
  program = """
import sys, threading
from ddiloco.protocol import learner, states
from ddiloco.protocol.values import from_json

sys.setswitchinterval(1e-6)
part = states.learner_part(learner.init(1, 5, (0, 1, 0), 1000), 3)
together = threading.Barrier(8)

def read():
  together.wait()
  assert from_json(states.LearnerPart, part).position == 3
  print("read\\n", end="")

for _ in range(8):
  threading.Thread(target=read).start()
"""
  for _ in range(3):
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "read\n" * 8), done.stderr
