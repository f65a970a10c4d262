"""Who comes back, and with what: other hardware, and the three policies of `checkpoint.rejoin`."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest

from ddiloco.checkpoint import restore
from ddiloco.checkpoint.snapshots import Storage
from ddiloco.config import Config, ConfigError, from_dict
from ddiloco.engines.threads import ThreadsEngine
from ddiloco.observe.eventlog import read_events
from ddiloco.roles import initial
from ddiloco.training import data
from ddiloco.training.island import Island
from tests.engines.test_threads import TOKENS, HostIsland, Ran, make_config, poison
from tests.training.test_island_state import cheap_loss

# --- other hardware -------------------------------------------------------------------------------

MODEL = {"num_layers": 2, "model_dim": 16, "num_heads": 4, "num_kv_heads": 4, "head_dim": 4,
         "mlp_dim": 32}  # fmt: skip
CHAINS = {
  "fewer and fewer": [
    {"devices": 4, "fsdp": 2, "tensor": 2},
    {"devices": 2, "fsdp": 1, "tensor": 2},
    {"devices": 1, "fsdp": 1, "tensor": 1},
  ],
  "axes exchanged": [
    {"devices": 4, "data": 1, "fsdp": 4, "tensor": 1},
    {"devices": 4, "data": 1, "fsdp": 1, "tensor": 4},
    {"devices": 4, "data": 2, "fsdp": 2, "tensor": 1},
  ],
}


def on_mesh(mesh: dict[str, int], total_steps: int) -> Config:
  return from_dict(
    {
      "model": MODEL,
      "data": {"source": "synthetic", "sequence_length": 8},
      "islands": {"num_learners": 1, "batch_size": 8, "overrides": {"0": mesh}},
      "sync": {"num_shards": 1, "num_fragments": 2, "sync_period": 8, "snapshot_steps": 20},
      "inner": {"decay_steps": 1000},
      "checkpoint": {"keep": 1000},  # to compare with later
      "run": {"total_tokens": total_steps * 64, "evaluations": 0},
    }
  )


@pytest.fixture
def restored(monkeypatch) -> list[dict[str, np.ndarray]]:
  """Every state that an island has restored, copied from its devices at that moment."""
  states = []
  original = Island.restore

  def restore(self, arrays):
    original(self, arrays)
    states.append({name: np.array(value) for name, value in self.capture().items()})

  monkeypatch.setattr(Island, "restore", restore)
  return states


def run(config: Config, workdir, to_the_end: bool = False) -> str:
  """One run of the engine, at most until it has a snapshot of the learner; why it ended."""

  def listen(event) -> None:
    if not to_the_end and event.kind == "snapshot" and "learner-0" in event.roles:
      engine.stop.set()

  corpus = data.open_corpus(config.data)
  with cheap_loss():
    engine = ThreadsEngine(config, workdir, corpus, lambda params: {"loss": 0.0})
    return engine.run([listen]).reason


@pytest.mark.slow
@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_a_learner_comes_back_on_other_devices_bit_by_bit(chain, restored, tmp_path):
  *before, last = chain
  for mesh in before:
    assert run(on_mesh(mesh, 10**6), tmp_path) == "stopped"
  steps = max(e.global_step for e in read_events(tmp_path) if e.kind == "step")
  assert run(on_mesh(last, steps + 60), tmp_path, to_the_end=True) == "finished"

  events = [e for e in read_events(tmp_path) if e.role == "learner-0"]
  came_back = [e for e in events if e.kind == "restored"]
  assert len(came_back) == len(restored) == len(before)
  plan = initial.make_plan(on_mesh(last, 1))
  storage = Storage(tmp_path / "checkpoints", plan.plan_id, pytest.fail)
  for event, state in zip(came_back, restored):
    part = storage.load(event.snapshot, "learner-0")
    assert part.incarnation == event.of_incarnation
    assert {n for n in part.arrays if n.startswith(("params/", "inner/"))} == state.keys()
    assert sum(name.startswith("inner/") for name in state) > 2 * len(MODEL)
    for name, value in state.items():
      saved = part.arrays[name]
      assert (value.dtype, value.shape) == (saved.dtype, saved.shape), name
      assert value.tobytes() == saved.tobytes(), name
    assert state["inner/1/count"] > 0 and state["inner/1/mu/embedding"].any()

  lives = [e for e in events if e.kind == "started"]
  assert [e.devices for e in lives] == [mesh["devices"] for mesh in chain]
  assert len({tuple(e.mesh) for e in lives}) == len(chain)
  steps = [e for e in events if e.kind == "step"]
  assert not [e for e in steps if e.rate_scale != 1.0], "its moments were not fresh"
  assert_goes_on(read_events(tmp_path), came_back)


def assert_goes_on(events, came_back) -> None:
  """Steps are made from where the part was recorded, and rounds only go up."""
  for event in came_back:
    step = next(e for e in events if e.kind == "step" and e.incarnation == event.incarnation)
    assert step.global_step >= event.snapshot - 8, "the global step is the run's"
  commits = [e for e in events if e.kind == "commit"]
  for p in (0, 1):
    rounds = [e.round for e in commits if e.fragment == p]
    assert rounds == sorted(set(rounds)) and len(rounds) > 3


# --- policies -------------------------------------------------------------------------------------


class Story(Ran):
  """Once the last learner is in a snapshot, `what` happens to it; the run ends when it was back.

  The first snapshot begins when all are there.
  """

  def __init__(self, corpus, workdir, what, learners: int = 1, **checkpoint):
    self.victim, self._saved, self._again = learners - 1, threading.Event(), 0
    config = make_config(
      learners=learners,
      steps=10**6,
      sync={"snapshot_steps": 60, "min_quorum": learners},
      checkpoint={"warmup_steps": 8, **checkpoint},
    )

    def happens(island: HostIsland) -> None:
      if self._saved.is_set() and island.lives == 1:
        what(island)

    trouble = [(self.victim, step, happens) for step in range(1, 20_000)]
    super().__init__(config, corpus, workdir, trouble, stop_after=self.over)
    assert self.outcome.reason == "stopped" and len(self.exits(f"learner-{self.victim}")) == 1

  def over(self, event) -> bool:
    role = f"learner-{self.victim}"
    if event.kind == "snapshot" and role in event.roles:
      self._saved.set()
    self._again += (event.kind, event.role, event.incarnation) == ("step", role, 1)
    return self._again >= 20

  def lives(self, kind: str) -> list[list[dict]]:
    """Events of this kind of the victim, by incarnation."""
    found = self.of(kind, f"learner-{self.victim}")
    return [[e for e in found if e.incarnation == life] for life in (0, 1)]


def crash(island: HostIsland) -> None:
  raise OSError("cable")


@pytest.fixture(scope="module")
def corpus():
  return data.open_corpus(make_config().data)


def test_own_goes_on_at_full_rate(corpus, tmp_path):
  ran = Story(corpus, tmp_path, crash, rejoin="own")
  assert [len(each) for each in ran.lives("restored")] == [0, 1]
  (event,) = ran.of("restored")
  assert event.of_incarnation == 0 and event.seconds > 0
  assert not [e for e in ran.of("step") if e.rate_scale != 1.0]


def test_fresh_warms_up_only_in_the_middle_of_a_run(corpus, tmp_path):
  ran = Story(corpus, tmp_path, crash, rejoin="fresh")
  assert not ran.of("restored")
  first, second = ran.lives("step")
  assert not [e for e in first if e.rate_scale != 1.0], "the schedule has a warm-up of its own"
  scales = [e.rate_scale for e in second]
  assert scales[:8] == [(i + 1) / 8 for i in range(8)] and set(scales[8:]) == {1.0}
  assert second[0].global_step > 50, "the global step is the run's"


@pytest.mark.parametrize("warmup_steps", [5, 10**6])
def test_a_part_is_saved_only_when_the_warm_up_is_over(corpus, tmp_path, warmup_steps):
  """The next life went on from it at full rate, with moments of a few steps or none."""
  back, later, warm = threading.Event(), [], warmup_steps == 5

  def enough() -> bool:
    """One may lack its part since that of the one before is still being written."""
    return len(later) >= 3 and (not warm or "learner-1" in later[-1].roles)

  def over(event) -> bool:
    if (event.kind, event.role, event.incarnation) == ("step", "learner-1", 1):
      back.set()
    later.extend([event] if event.kind == "snapshot" and back.is_set() and not enough() else [])
    return enough() or event.time > 200

  config = make_config(
    learners=2,
    steps=10**6,
    sync={"snapshot_steps": 40, "min_quorum": 1},
    checkpoint={"warmup_steps": warmup_steps},
  )
  ran = Ran(config, corpus, tmp_path, [(1, 20, crash)], stop_after=over)
  newest = later[-1]
  assert ("learner-1" in newest.roles) == warm and ("learner-1" in newest.lacks) != warm
  reasons = [e.reason for e in ran.of("unsaved", "learner-1") if "not warmed up" in e.reason]
  assert reasons or warm


def test_a_quarantined_learner_never_begins_with_its_own_part(corpus, tmp_path):
  """What it saved before it was found out is there, and would be found."""
  ran = Story(corpus, tmp_path, poison, learners=2, rejoin="own")
  assert ran.exits("learner-1")[0].startswith("quarantined: ")
  assert ran.of("saved", "learner-1") and not ran.of("restored", "learner-1")
  assert ran.islands[1].lives == 2
  again = ran.lives("step")[1]
  assert again[0].rate_scale < 1 and again[-1].rate_scale == 1
  assert np.isfinite(ran.islands[1].params["final_norm/scale"]).all()


# --- parts that do not fit ------------------------------------------------------------------------


def first_run(corpus, workdir) -> tuple[Config, Storage]:
  """Stopped in the middle; (its config, its snapshots)."""
  everybody = {"learner-0", "learner-1", "syncer-0", "syncer-1"}
  config = make_config(learners=2, steps=10**6, sync={"snapshot_steps": 60, "min_quorum": 2})
  ran = Ran(
    config,
    corpus,
    workdir,
    stop_after=lambda e: e.kind == "snapshot" and everybody == set(e.roles),
  )
  assert ran.outcome.reason == "stopped"
  plan = initial.make_plan(config)
  return config, Storage(workdir / "checkpoints", plan.plan_id, pytest.fail)


def shorter(config: Config, workdir, steps: int = 100, **sync) -> Config:
  """The same run, to end soon."""
  global_step = max(e.global_step for e in read_events(workdir) if e.kind == "step")
  run = dataclasses.replace(config.run, total_tokens=2 * (global_step + steps) * TOKENS)
  return dataclasses.replace(config, run=run, sync=dataclasses.replace(config.sync, **sync))


def test_a_state_that_is_none_is_named_and_that_learner_starts_afresh(
  corpus, tmp_path, monkeypatch
):
  config, storage = first_run(corpus, tmp_path)
  newest = storage.committed()[0]
  roles = storage.manifest(newest)["parts"]
  assert "learner-1" in roles
  part = storage.load(newest, "learner-1")
  broken = {**part.state, "learner": {**part.state["learner"], "global_step": None}}
  storage.save(newest, "learner-1", part.incarnation, broken, part.arrays)
  storage.commit(newest, roles)
  said = []
  monkeypatch.setattr(restore, "warn", said.append)
  ran = Ran(shorter(config, tmp_path), corpus, tmp_path)
  assert ran.outcome.reason == "finished"
  assert [e.role for e in ran.of("restored")] == ["learner-0"]
  assert len(said) == 1 and f"checkpoint {newest} skipped: NotAState" in said[0]
  assert "$.learner.global_step" in said[0]


def test_snapshots_of_another_plan_are_named_and_the_run_is_refused(corpus, tmp_path, monkeypatch):
  config, _ = first_run(corpus, tmp_path)
  monkeypatch.setattr(restore, "warn", lambda text: None)
  with pytest.raises(ConfigError, match="belongs to another plan"):
    Ran(shorter(config, tmp_path, num_fragments=3), corpus, tmp_path)
