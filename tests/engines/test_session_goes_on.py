"""Runs of real islands that are cut off and go on, also with other learners and shards."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest

from ddiloco.checkpoint.snapshots import Storage
from ddiloco.config import Config, ConfigError, from_dict
from ddiloco.engines import session, threads
from ddiloco.observe.eventlog import Event, read_events
from ddiloco.roles import initial
from ddiloco.trace.check import check
from ddiloco.trace.text import read_trace
from ddiloco.training import data, devices
from ddiloco.training.island import Island
from ddiloco.workdir import CHECKPOINTS
from tests.checkpoint.test_restore_lockstep import PatientSaver
from tests.engines import real
from tests.waits import wait_for

pytestmark = pytest.mark.slow


# --- bit by bit -----------------------------------------------------------------------------------

LOCK_STEP = {
  "num_fragments": 2, "sync_period": 4, "overlap_steps": 1, "blocking": True, "min_quorum": 2,
  "apply": "mix", "push_codec": "int8", "publish_codec": "bf16", "error_feedback": True,
  "liveness_seconds": 60.0, "snapshot_steps": 4,
}  # fmt: skip


def end_of(engine: threads.ThreadsEngine) -> dict[str, bytes]:
  """The bits of everything that a run ends with."""
  found = {}
  for fragment in engine.plan.fragments:
    c = engine._store[fragment.index]
    for name in ("value", "published_value", "momentum"):
      array = getattr(c, name)
      found[f"{name} {fragment.index}"] = array.tobytes()
  for m, island in engine.islands.items():
    found |= {f"learner {m} {n}": np.asarray(a).tobytes() for n, a in island.capture().items()}
  return found


def steps_of(workdir: Path) -> dict[tuple, tuple]:
  """What each learner's batches gave."""
  steps = [e for e in read_events(workdir) if e.kind == "step"]
  return {(e.role, e.position): (e.global_step, e.loss) for e in steps}


def test_islands_go_on_from_every_snapshot_bit_by_bit(tmp_path, monkeypatch):
  overrides = {"0": {"devices": 1}, "1": {"devices": 2, "fsdp": 2}}
  config = real.tiny(
    14,
    islands={"num_learners": 2, "batch_size": 2, "overrides": overrides},
    sync=LOCK_STEP,
    outer={"learning_rate": 0.7, "momentum": 0.9},
    run={"evaluations": 0},
    checkpoint={"keep": 1000},
  )
  plan, corpus = initial.make_plan(config), data.open_corpus(config.data)
  groups = devices.partition(jax.devices(), [1, 2])
  islands = {m: Island(config, m, group, plan) for m, group in enumerate(groups)}

  def run(workdir: Path) -> dict[str, bytes]:
    engine = threads.ThreadsEngine(config, workdir, corpus, lambda params: {"loss": 0.0}, islands)
    assert engine.run().reason == "finished"
    return end_of(engine)

  savers: list[PatientSaver] = []

  def saver(*arguments) -> PatientSaver:
    savers.append(PatientSaver(*arguments))
    return savers[-1]

  with monkeypatch.context() as patient:
    patient.setattr(threads, "Saver", saver)
    expected = run(tmp_path / "whole")
  for each in savers:
    each.commit_all(["learner-0", "learner-1"])
  assert any(bits.strip(b"\0") for name, bits in expected.items() if "inner" in name)
  storage = Storage(tmp_path / "whole" / CHECKPOINTS, plan.plan_id, pytest.fail)
  whole = [n for n in storage.committed() if len(storage.manifest(n)["parts"]) == 4]
  assert len(whole) >= 3, storage.committed()
  steps = steps_of(tmp_path / "whole")
  for snapshot in whole:
    workdir, name = tmp_path / f"from-{snapshot}", f"{snapshot:08d}"
    shutil.copytree(tmp_path / "whole" / CHECKPOINTS / name, workdir / CHECKPOINTS / name)
    found = run(workdir)
    different = [name for name in expected if found[name] != expected[name]]
    assert not different, f"{snapshot=}: {different}"
    assert steps_of(workdir).items() <= steps.items()
    assert len(real.events_of(workdir, "restored")) == 2


# --- as a user sees it ----------------------------------------------------------------------------


class Run:
  """`ddiloco train` in one workdir, again and again."""

  def __init__(self, folder: Path, config: Config):
    self.workdir, self.log, self.config = folder / "run", folder / "log.txt", folder / "config.json"
    self.config.write_text(config.to_json())
    plan = initial.make_plan(config)
    self.storage = Storage(self.workdir / CHECKPOINTS, plan.plan_id, print)

  def train(self, *arguments: str) -> subprocess.Popen[bytes]:
    where = f"--config={self.config}", f"--workdir={self.workdir}"
    return real.start("train", *where, "--cpu", *arguments, log=self.log)

  def refused(self) -> str:
    """What it says when it is started now."""
    with pytest.raises(ConfigError) as said:
      session.train(from_dict(json.loads(self.config.read_text())), self.workdir)
    return str(said.value)

  def until_saved(self, process: subprocess.Popen[bytes], more: int) -> None:
    """Waits for so many further snapshots."""
    newest = max(self.storage.committed(), default=0)

    def there() -> bool:
      return sum(n > newest for n in self.storage.committed()) >= more

    wait_for(there, "snapshots", process, self.log)

  def begun(self) -> set[tuple[int, int, int]]:
    """Fragment, version and round that the newest life began with."""
    first: dict[int, Event] = {}
    for event in read_events(self.workdir):
      if event.kind == "run_started":
        first = {}
      if event.kind == "owns":
        first.setdefault(event.fragment, event)
    return {(p, e.version, e.round) for p, e in first.items()}

  def saved(self, snapshot: int) -> set[tuple[int, int, int]]:
    roles = [r for r in self.storage.manifest(snapshot)["parts"] if r.startswith("syncer")]
    states = [self.storage.meta(snapshot, role)["state"] for role in roles]
    fragments = [f for state in states for f in state["fragments"]]
    return {(f["index"], f["version"], f["last_round"]) for f in fragments}


def killed(process: subprocess.Popen[bytes]) -> None:
  process.send_signal(signal.SIGKILL)
  process.wait()


def test_a_run_goes_on_with_other_numbers_of_learners_and_shards(tmp_path):
  sync = {"num_shards": 2, "num_fragments": 3, "snapshot_steps": 15}
  run = Run(tmp_path, real.tiny(135, min_step_seconds=0.06, sync=sync, checkpoint={"keep": 3}))
  first = run.train()
  try:
    run.until_saved(first, 2)
    first.send_signal(signal.SIGSTOP)  # it must not end before another has tried
    text = run.refused()
    assert "another process trains in it" in text and "Fix: " in text
  finally:
    killed(first)
  newest, older, *_ = run.storage.committed()
  (tmp_path / "run" / CHECKPOINTS / f"{newest:08d}" / "syncer-0" / "meta.json").write_text("{")
  second = run.train("--config.sync.num_shards=1", "--config.islands.num_learners=3")
  try:
    run.until_saved(second, 1)
  finally:
    killed(second)
  assert run.begun() == run.saved(older), "the newest one is damaged"
  said = f"WARNING: checkpoint {newest} skipped: .*{newest:08d}.*syncer-0"
  assert re.search(said, run.log.read_text())
  newest = run.storage.committed()[0]
  saved = run.saved(newest)
  third = run.train("--config.sync.num_shards=3", "--config.islands.num_learners=1")
  assert third.wait() == 0, run.log.read_text()
  assert run.begun() == saved and min(version for _, version, _ in saved) > 0
  assert not check(read_trace(run.workdir)).problems
  text = run.refused()
  assert "its run is finished" in text and "--overwrite" in text and "total_tokens" in text


def test_without_a_place_for_checkpoints_every_snapshot_is_a_line_and_the_run_ends(tmp_path):
  """Nobody may make a folder under /proc, whoever he is."""
  place = {"path": f"/proc/{os.getpid()}/checkpoints"}
  run = Run(tmp_path, real.tiny(60, sync={"snapshot_steps": 30}, checkpoint=place))
  assert run.train().wait() == 0, run.log.read_text()
  unsaved = real.events_of(run.workdir, "unsaved")
  text = run.log.read_text()
  said = [int(n) for n in re.findall(r" is not in snapshot (\d+): .*/checkpoints'", text)]
  assert sorted(said) == sorted({e.snapshot for e in unsaved}) and "Traceback" not in text
  assert {e.role for e in unsaved} == {"learner-0", "learner-1", "syncer-0", "syncer-1"}
