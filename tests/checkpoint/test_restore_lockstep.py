"""Lock-step runs, saved at every outer step: whichever snapshot they go on from, the bits agree.

The real roles, threads, savers and storage around toy islands; learners wait for each other, so a
run has one course, whatever the threads do.
"""

from __future__ import annotations

import collections
import dataclasses
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddiloco.checkpoint.saver import Saver
from ddiloco.checkpoint.snapshots import Storage
from ddiloco.config import CheckpointConfig, Config
from ddiloco.core import fragments
from ddiloco.runtime import Job
from tests.roles import fleet, toy

STEPS = 12  # two rounds of every fragment: what the first one leaves counts in the second
NESTEROV = {"learning_rate": 0.7, "momentum": 0.9}
DILOCO: dict[str, Any] = {"overlap_steps": 0, "apply": "overwrite"}
STREAMING: dict[str, Any] = {"overlap_steps": 2, "apply": "mix"}
ROUNDED = {"push_codec": "int8", "publish_codec": "bf16", "error_feedback": True}
COARSE = {"push_codec": "int4", "publish_codec": "int8", "error_feedback": True}


class PatientSaver(Saver):
  """Drops no part because it is busy; commits when it is told that everybody's are written."""

  def __init__(self, *arguments):
    self.commits: list[tuple] = []
    super().__init__(*arguments)

  # The next snapshot begins whether or not this one is written.
  busy = property(lambda saver: False, lambda saver, busy: None)

  def commit_when_complete(self, *arguments) -> Job:
    self.commits.append(arguments)
    return ()

  def _prune(self, *arguments) -> Job:
    return ()

  def close(self, patience_seconds: float = 0.0) -> None:
    super().close(max(patience_seconds, 60.0))

  def commit_all(self, learners: Collection[str]) -> None:
    for snapshot, shards, _, *settings in self.commits:
      collections.deque(super().commit_when_complete(snapshot, shards, lambda: learners, *settings))


def lock_step(learners: int, shards: int, num_fragments: int = 3, **sync) -> Config:
  """A snapshot whenever a fragment is due."""
  period = 2 * num_fragments
  config = toy.config(
    learners,
    STEPS,
    num_shards=shards,
    num_fragments=num_fragments,
    sync_period=period,
    min_quorum=learners,
    blocking=True,
    snapshot_steps=2,
    **sync,
  )
  return dataclasses.replace(config, checkpoint=CheckpointConfig(keep=1000))


def storage_of(config: Config, path: Path) -> Storage:
  plan = fragments.make_plan(toy.SPECS, config.sync)
  return Storage(path, plan.plan_id, lambda text: pytest.fail(f"not whole: {text}"))


def only(config: Config, path: Path, snapshot: int) -> Storage:
  """A storage in which this one is the newest."""
  folder = path.with_name(f"only-{snapshot}")
  shutil.copytree(path / f"{snapshot:08d}", folder / f"{snapshot:08d}")
  return storage_of(config, folder)


def bits(result: fleet.Result) -> dict[str, object]:
  """Everything of the end of a run that must not depend on where it was interrupted."""
  found: dict[str, object] = {}
  for c in result.committed:
    p, f = c.state.index, c.state
    found[f"global {p}"] = f.version, f.merged_tokens, f.participants
    arrays = {"value": c.value, "published_value": c.published_value, "momentum": c.momentum}
    found |= {f"{name} {p}": None if a is None else a.tobytes() for name, a in arrays.items()}
  for m, (island, role) in enumerate(zip(result.islands, result.learners)):
    state = role.exchange.state
    arrays = {**island.capture(), **role.exchange._deltas.arrays()}
    found |= {f"learner {m} {name}": np.asarray(a).tobytes() for name, a in arrays.items()}
    found[f"learner {m}"] = state.step, state.global_step, state.trained_tokens
    for p, f in enumerate(state.fragments):
      counters = f.steps, f.tokens, f.acknowledged_tokens, f.discarded_tokens, f.merged_tokens
      found[f"learner {m}, fragment {p}"] = f.version, f.steps_since_sync, *counters
  return found


@pytest.mark.parametrize(
  "config",
  [
    pytest.param(lock_step(2, 1, **DILOCO, outer=NESTEROV), id="diloco"),
    pytest.param(lock_step(3, 2, **DILOCO, **ROUNDED, outer=NESTEROV), id="diloco, rounded"),
    pytest.param(lock_step(2, 2, **STREAMING, outer=NESTEROV), id="streaming"),
    pytest.param(lock_step(2, 1, **STREAMING, **COARSE, outer=NESTEROV), id="streaming, coarse"),
    pytest.param(
      lock_step(2, 2, overlap_steps=1, apply="rebase", push_codec="int4", publish_codec="bf16"),
      id="rebase",
    ),
  ],
)
@pytest.mark.slow
def test_a_run_goes_on_from_every_snapshot_bit_by_bit(config, tmp_path):
  path = tmp_path / "checkpoints"
  storage = storage_of(config, path)
  savers: list[PatientSaver] = []

  def saver(role: str, recorder) -> Saver:
    savers.append(PatientSaver(storage, role, 0, recorder))
    return savers[-1]

  undisturbed = fleet.run(config, saver=saver)
  learners, shards = config.islands.num_learners, config.sync.num_shards
  for each in savers:
    each.commit_all([f"learner-{m}" for m in range(learners)])
  expected = bits(undisturbed)
  assert bits(fleet.run(config)) == expected, "the run itself has one course only"
  everybody = {f"learner-{m}" for m in range(learners)} | {f"syncer-{s}" for s in range(shards)}
  snapshots = [n for n in storage.committed() if storage.manifest(n)["parts"].keys() == everybody]
  began = {e.snapshot for e in undisturbed.events["syncer-0"] if e.kind == "captured"}
  print(f"{len(snapshots)} of {len(began)} snapshots have all roles: {snapshots}")
  assert len(snapshots) >= 4
  for snapshot in snapshots:
    resumed = fleet.run(config, resume=only(config, path, snapshot))
    for m in range(learners):
      assert [e.snapshot for e in resumed.events[f"learner-{m}"] if e.kind == "restored"]
    found = bits(resumed)
    different = [name for name in expected if found.get(name) != expected[name]]
    assert found.keys() == expected.keys() and not different, f"{snapshot=}: {different}"
