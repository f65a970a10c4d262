"""One controller of several slices: one that fails is its island's failure alone, and comes back.

The slices are fake CPU devices. While one is "lost", JAX does not list its devices, and whatever
its island asks of them raises what the runtime raises.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import jax
import pytest

from ddiloco.config import Fault, from_dict
from ddiloco.engines import engine as engine_module
from ddiloco.engines import threads
from ddiloco.engines.threads import ThreadsEngine
from ddiloco.observe.eventlog import read_events
from ddiloco.protocol import supervisor
from ddiloco.training import data, devices
from ddiloco.training.island import Island
from ddiloco.workdir import FAULTS, append_request
from tests.training.test_island_state import cheap_loss

LOST = "UNAVAILABLE: slice 1 has failed"
MODEL = {
  "num_layers": 1, "model_dim": 16, "num_heads": 2, "num_kv_heads": 2, "head_dim": 8, "mlp_dim": 32
}  # fmt: skip
CONFIG = from_dict(
  {
    "model": MODEL,
    "data": {"source": "synthetic", "sequence_length": 8},
    "islands": {"num_learners": 2, "devices": 2, "batch_size": 2},
    "sync": {
      "num_shards": 1, "num_fragments": 2, "sync_period": 8, "min_quorum": 1,
      "liveness_seconds": 0.5, "snapshot_steps": 20,
    },
    "inner": {"decay_steps": 1000},
    "run": {"total_tokens": 1 << 50, "evaluations": 0, "restart_seconds": 0.05},
  }
)  # fmt: skip


class FakeSlice:
  """Two devices that can be lost."""

  def __init__(self, monkeypatch, members):
    self.ids, self.lost = {device.id for device in members}, threading.Event()
    every = jax.devices
    listed = lambda *platform: [d for d in every(*platform) if not self.without(d.id)]
    monkeypatch.setattr(jax, "devices", listed)
    for call in ("step", "to_host", "place", "reset"):
      monkeypatch.setattr(Island, call, self.failing(getattr(Island, call)))

  def without(self, number: int) -> bool:
    return self.lost.is_set() and number in self.ids

  def failing(self, call):
    def guarded(island, *arguments, **more):
      if any(self.without(device.id) for device in island.mesh.devices.flat):
        raise jax.errors.JaxRuntimeError(LOST)
      return call(island, *arguments, **more)

    return guarded


@pytest.fixture
def quick_to_compile():
  """Three islands compile; what they train says nothing here."""
  with cheap_loss():
    yield


@pytest.mark.usefixtures("quick_to_compile")
@pytest.mark.parametrize("killed", [False, True])
def test_a_lost_slice_is_one_islands_failure_and_its_island_is_rebuilt(
  monkeypatch, tmp_path, killed
):
  """Also one that is lost when its learner is down: that began on it again and again, in vain."""
  corpus = data.open_data(CONFIG.data)
  engine = ThreadsEngine(CONFIG, tmp_path, corpus, lambda params: {"loss": 2.0})
  first = engine.islands[1]
  slice_1 = FakeSlice(monkeypatch, list(first.mesh.devices.flat))
  alone, saved = [0], []

  def listen(event) -> None:
    if event.kind == "snapshot" and "learner-1" in event.roles and not saved:
      saved.append(event.snapshot)
      if killed:
        engine._faults["learner-1"].plan(Fault("kill", "learner-1", at_step=0, seconds=0.0))
      else:
        slice_1.lost.set()
    if event.kind == "exit" and not alone[0]:  # the killed learner is down
      slice_1.lost.set()
    if event.kind == "step" and event.role == "learner-0" and slice_1.lost.is_set():
      alone[0] += 1
      if alone[0] == 60:
        slice_1.lost.clear()
    if event.kind == "commit" and event.incarnations[-1] > 0 and 1 in event.learners:
      engine.stop.set()

  result = engine.run([listen])
  events = read_events(tmp_path)
  assert result.reason == "stopped" and alone[0] >= 60, "the other island trained on meanwhile"
  exits = [(e.target, e.reason) for e in events if e.kind == "exit"]
  assert {target for target, _ in exits} == {"learner-1"} and len(exits) == 1 + killed
  assert LOST in exits[-1][1]
  assert not any(e.blocked_seconds for e in events if e.kind == "step" and e.role == "learner-0")
  assert engine.islands[1] is not first, "its programs are compiled anew"
  assert [e.target for e in events if e.kind == "compiled"].count("learner-1") == 2
  lives = [e.incarnation for e in events if e.kind == "joined" and e.role == "learner-1"]
  assert lives == [0, 1 + killed]
  assert [e for e in events if e.kind == "restored" and e.role == "learner-1"]


@pytest.mark.usefixtures("quick_to_compile")
def test_a_learner_that_nobody_planned_joins_while_devices_are_left(tmp_path, capsys, monkeypatch):
  some = jax.devices()[:6]  # of which two islands have four
  monkeypatch.setattr(devices, "usable", lambda: some)
  engine = ThreadsEngine(CONFIG, tmp_path, data.open_data(CONFIG.data), None)
  asked: list[str] = []

  def listen(event) -> None:
    if event.kind == "step" and not asked:
      for role in ("syncer-1", "region-east", "learner-2", "learner-2", "learner-9"):
        asked.append(role)
        fields = {"action": "join", "role": role, "seconds": -1.0}
        append_request(tmp_path / FAULTS, fields)
    if event.kind == "commit" and 2 in event.learners:
      engine.stop.set()

  assert engine.run([listen]).reason == "stopped"
  events = read_events(tmp_path)
  assert {e.role for e in events if e.kind == "joined"} >= {"learner-0", "learner-1", "learner-2"}
  assert [e.target for e in events if e.kind == "fault"] == ["learner-2"]
  assert not any(e.blocked_seconds for e in events if e.kind == "step")
  said = capsys.readouterr().err
  assert "learner-9 cannot join a run of ThreadsEngine: islands.devices = [2]: " in said
  assert "role = 'syncer-1': only a learner can join" in " ".join(said.split())
  assert "role = 'region-east': must be one role" in said


def test_a_slice_that_fails_again_and_again_is_given_up(monkeypatch, tmp_path):
  """The waits for its devices are longer than a healthy period, but no work."""
  failed, waits = [0], [0]  # the second has for each wait how often it had failed by then

  def answering(lost):
    if waits[-1] < failed[0]:
      return waits.append(failed[0])
    return lost

  passed = lambda: 1000.0 * len(waits) + time.monotonic()
  monkeypatch.setattr(engine_module, "time", SimpleNamespace(monotonic=passed))
  monkeypatch.setattr(devices, "answering", answering)
  monkeypatch.setattr(supervisor, "HEALTHY_SECONDS", 500.0)
  monkeypatch.setattr(supervisor, "HEALTHY_PAUSES", 1)
  monkeypatch.setattr(threads, "DEVICES_SECONDS", 0.05)
  monkeypatch.setattr(Island, "compile", lambda island: 0.0)
  config = from_dict(
    {
      "model": MODEL,
      "data": {"source": "synthetic", "sequence_length": 8},
      "islands": {"num_learners": 1, "batch_size": 2},
      "run": {"evaluations": 0, "restart_seconds": 0.01, "max_restarts": 2},
    }
  )

  def train(m, faults, recorder, afresh) -> None:
    if failed[0] > config.run.max_restarts + 1:
      engine.stop.set()
    with engine._connected(faults, recorder):
      failed[0] += 1
      raise jax.errors.JaxRuntimeError(LOST)

  engine = ThreadsEngine(config, tmp_path, data.open_data(config.data), None)
  monkeypatch.setattr(engine, "_train", train)
  assert engine.run().reason == "failed"
  exits = [e.target for e in read_events(tmp_path) if e.kind == "exit" and e.target == "learner-0"]
  assert len(exits) == config.run.max_restarts + 1 == len(waits)


def test_a_slice_that_fails_while_its_island_is_rebuilt_is_waited_for_again(monkeypatch, tmp_path):
  devices_of, compiles = [], [0.0, jax.errors.JaxRuntimeError(LOST), 0.0]
  monkeypatch.setattr(devices, "answering", lambda lost: devices_of.append(lost) or lost)
  monkeypatch.setattr(Island, "compile", mock.Mock(side_effect=compiles))
  run = replace(CONFIG.run, restart_seconds=0.01)
  config = replace(CONFIG, run=run, islands=replace(CONFIG.islands, num_learners=1))
  engine = ThreadsEngine(config, tmp_path, data.open_data(config.data), None)
  mine = list(engine.islands[0].mesh.devices.flat)

  def train(m, faults, recorder, afresh) -> None:
    if not devices_of:
      raise jax.errors.JaxRuntimeError(LOST)
    engine.stop.set()

  monkeypatch.setattr(engine, "_train", train)
  assert engine.run().reason == "stopped"
  assert devices_of == [mine, mine] and not engine._unbuilt
  exits = [e.reason for e in read_events(tmp_path) if e.kind == "exit" and e.target == "learner-0"]
  assert len(exits) == 2 and all(LOST in reason for reason in exits)


def test_an_island_that_waits_for_its_devices_ends_when_it_is_asked_to(tmp_path, monkeypatch):
  monkeypatch.setattr(devices, "answering", lambda lost: None)
  engine = ThreadsEngine(CONFIG, tmp_path, data.open_data(CONFIG.data), None)
  engine._told.add("learner-1")
  waits = mock.Mock(check=mock.Mock(side_effect=AssertionError("it waits")))
  assert not engine._build(1, waits)


def test_a_run_alone_whose_islands_are_all_lost_has_an_outcome_that_says_so(tmp_path):
  """It ended with a traceback: max() of nothing."""
  config = replace(CONFIG, sync=replace(CONFIG.sync, num_shards=0))
  engine = ThreadsEngine(config, tmp_path, data.open_data(config.data), None)
  engine._first, engine._unbuilt = {"w": 1.0}, set(engine.islands)
  engine._plan()
  ended = engine._outcome("stopped")
  assert (ended.params, ended.island_params, ended.merged_tokens) == ({"w": 1.0}, {}, 0)
  assert ended.lost == "the devices of all islands have failed, with what was learned there"


def test_an_island_alone_whose_devices_fail_at_the_end_takes_no_other_result_with_it(
  tmp_path, monkeypatch
):
  """The run ended with a traceback, and no island's work was saved."""
  config = replace(CONFIG, sync=replace(CONFIG.sync, num_shards=0))
  engine = ThreadsEngine(config, tmp_path, data.open_data(config.data), None)
  engine._first, engine._life_steps = {"w": 1.0}, {0: 9, 1: 3}
  engine._plan()
  lost = mock.Mock(side_effect=jax.errors.JaxRuntimeError(LOST))
  monkeypatch.setattr(engine.islands[0], "params_on_host", lost)
  monkeypatch.setattr(engine.islands[1], "params_on_host", lambda: {"w": 2.0})
  ended = engine._outcome("finished")
  assert (ended.params, ended.island_params) == ({"w": 2.0}, {1: {"w": 2.0}})
  assert ended.merged_tokens == 3 * config.planned_tokens_per_step
  assert ended.lost == f"learner-0: JaxRuntimeError: {LOST}"


def test_devices_answer_when_all_of_them_are_there(monkeypatch):
  mine, every = jax.devices()[2:4], jax.devices()
  assert devices.answering(mine) == mine
  monkeypatch.setattr(jax, "devices", lambda *_: every[:3])
  assert devices.answering(mine) is None
  monkeypatch.undo()
  monkeypatch.setattr(jax, "device_put", mock.Mock(side_effect=jax.errors.JaxRuntimeError(LOST)))
  assert devices.answering(mine) is None


def test_only_the_runtimes_errors_are_lost_devices():
  lost = jax.errors.JaxRuntimeError(LOST)
  behind = RuntimeError("the background thread failed")
  behind.__cause__ = lost
  assert devices.lost_devices(lost) and devices.lost_devices(behind)
  assert not devices.lost_devices(ValueError("a batch of another shape"))
  assert not devices.lost_devices(None)
