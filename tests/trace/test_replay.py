"""What a chaotic run did comes out again, bit by bit; a trace that was changed does not."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import replay_chaos as chaos

from ddiloco import cli, environment
from ddiloco.checkpoint import weights
from ddiloco.observe.eventlog import read_events
from ddiloco.trace import replay
from ddiloco.trace.replay import replay_run
from ddiloco.trace.text import open_trace
from ddiloco.training.island import Island

pytestmark = pytest.mark.slow
SEEDS = (0, 2, 11)  # scripts/replay_chaos.py runs as many as one likes


@pytest.fixture(scope="module")
def bench():
  return chaos.Bench()


@pytest.fixture(autouse=True, scope="module")
def compiled_once():
  """Replays of one plan share the programs of their islands, apart from those of the runs."""
  shared = {}

  def made(config, learner, devices, plan, _):
    return Island(config, learner, devices, plan, shared)

  with mock.patch.object(replay, "Island", made):
    yield


@pytest.fixture(scope="module")
def run(bench, tmp_path_factory):
  """(config, workdir) of the run of a seed, made once."""
  made = {}

  def once(seed: int):
    if seed not in made:
      workdir = tmp_path_factory.mktemp("replay") / f"run-{seed}"
      config = chaos.config_of(seed)
      print(f"{seed=}: {config.chaos.faults}")
      bench.run(config, workdir)
      made[seed] = config, workdir
    return made[seed]

  return once


@pytest.mark.parametrize("seed", SEEDS)
def test_a_chaotic_run_is_replayed_bit_by_bit(seed, run, bench):
  config, workdir = run(seed)
  events = read_events(workdir)
  struck = [e for e in events if e.kind == "fault" and e.action == "kill"]
  assert struck, "no chaos at all"
  summary, difference = replay_run(workdir, open_trace(workdir))
  assert (summary["identical"], difference) == (True, "")
  steps = [e for e in events if e.kind == "step"]
  assert summary["steps"] == summary["losses_compared"] == len(steps) > 100
  assert summary["commits"] == sum(e.kind == "commit" for e in events) > 10
  assert summary["values_compared"] == config.sync.num_fragments
  inherited = any(e.kind == "inherited" for e in events)
  assert inherited == (config.checkpoint.rejoin == "peer")
  saved = [e.arrays for e in events if e.kind == "saved"]
  assert summary["digests_compared"] == sum(map(len, saved))
  assert bool(saved) == bool(config.sync.snapshot_steps)


def copied(workdir: Path, to: Path) -> Path:
  shutil.copytree(workdir, to)
  return to


def change(workdir: Path, role: str, kind: str, **to) -> str:
  """Changes an early one of the role's events of this kind; returns where that is."""
  path = workdir / "events" / f"{role}.jsonl"
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  chosen = [i for i, event in enumerate(lines) if event["kind"] == kind]
  place = chosen[len(chosen) // 10]
  lines[place].update({name: f(lines[place]) for name, f in to.items()})
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  return f"line {place + 1}"


# What no invariant can know: a field of a step, its new value, whether the loss of that very step
# shows it (else the next one's does).
CHANGES = [
  ("position", lambda e: e["position"] + 1000, True),
  ("schedule_step", lambda e: e["schedule_step"] + 1, False),
  ("rate_scale", lambda e: 0.5, False),
  ("loss", lambda e: e["loss"] * (1 + 1e-6), True),
]


@pytest.mark.parametrize(("field", "to", "at_once"), CHANGES, ids=[c[0] for c in CHANGES])
def test_a_changed_trace_is_found_out(field, to, at_once, run, bench, tmp_path):
  _, workdir = run(SEEDS[0])
  workdir = copied(workdir, tmp_path / "changed")
  where = change(workdir, "learner-0", "step", **{field: to})
  if field == "position":
    keep_growing(workdir / "events" / "learner-0.jsonl", field)
  summary, difference = replay_run(workdir, open_trace(workdir))
  assert not summary["identical"] and summary["losses_different"] >= 1
  assert difference.startswith("learner-0, ")
  assert (where in difference) == at_once


def keep_growing(path: Path, field: str) -> None:
  """What follows a changed step, so that the invariants hold."""
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  for before, after in itertools.pairwise(e for e in lines if e["kind"] == "step"):
    if before.get("incarnation") == after.get("incarnation"):
      after[field] = max(after[field], before[field] + 1)
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_another_digest_is_found_out(run, bench, tmp_path):
  seed = next(s for s in range(100) if chaos.config_of(s).sync.snapshot_steps)
  _, workdir = run(seed)
  workdir = copied(workdir, tmp_path / "changed")
  name = next(n for n in first_saved(workdir) if n.startswith("inner/"))
  change(workdir, "learner-0", "saved", arrays=lambda e: {**e["arrays"], name: 1})
  summary, difference = replay_run(workdir, open_trace(workdir))
  assert (summary["digests_different"], summary["identical"]) == (1, False)
  assert difference.startswith("learner-0, ") and name in difference


def first_saved(workdir: Path) -> dict:
  events = read_events(workdir)
  return next(e.arrays for e in events if e.kind == "saved" and e.role == "learner-0")


def test_another_result_is_found_out(run, bench, tmp_path):
  _, workdir = run(SEEDS[0])
  workdir = copied(workdir, tmp_path / "changed")
  params = weights.load(workdir / "result", "result")
  params["embedding"] = np.nextafter(params["embedding"], np.float32(1e9))
  said = weights.metadata(workdir / "result")
  weights.save(workdir / "result", params, said)
  summary, difference = replay_run(workdir, open_trace(workdir))
  assert not summary["identical"] and summary["values_different"] >= 1
  assert "of the result is another than the replay's" in difference
  # A run that went on with more tokens and was killed has the result of its earlier start.
  earlier = {weights.MERGED_TOKENS: str(int(said[weights.MERGED_TOKENS]) - 1)}
  weights.save(workdir / "result", params, {**said, **earlier})
  summary, difference = replay_run(workdir, open_trace(workdir))
  assert (summary["identical"], summary["values_compared"], difference) == (True, 0, "")


def test_the_command_prints_its_verdict(run, monkeypatch, capsys):
  _, workdir = run(SEEDS[0])
  monkeypatch.setattr(environment, "prepare", lambda **settings: None)
  command = ["replay", f"--workdir={workdir}", "--cpu"]
  assert cli.main(command) == 0
  summary = json.loads(capsys.readouterr().out.splitlines()[-1])
  assert summary["identical"] is True and summary["learners"] == 3 < summary["incarnations"]
  different = {**summary, "identical": False}, "learner-0, line 7: something"
  monkeypatch.setattr("ddiloco.trace.replay.replay_run", lambda *args: different)
  assert cli.main(command) == 1
  *_, first, last = capsys.readouterr().out.splitlines()
  assert first == "The first difference: learner-0, line 7: something"
  assert json.loads(last)["identical"] is False


def test_a_run_of_one_island_without_shards_is_replayed(bench, tmp_path):
  config = chaos.config_of(0)
  config = dataclasses.replace(
    config,
    sync=dataclasses.replace(config.sync, num_shards=0),
    chaos=dataclasses.replace(
      config.chaos, faults=tuple(f for f in config.chaos.faults if "learner" in f.role)[:1]
    ),
  )
  bench.run(config, tmp_path / "alone")
  summary, difference = replay_run(tmp_path / "alone", open_trace(tmp_path / "alone"))
  assert (summary["identical"], difference) == (True, "")
  assert summary["values_compared"] == 1 and summary["commits"] == 0
  of_an_earlier_start = {weights.MERGED_TOKENS: str(config.run.total_tokens + 10**6)}
  result = weights.load(tmp_path / "alone" / "result", "result")
  changed = {name: value + 1 for name, value in result.items()}
  weights.save(tmp_path / "alone" / "result", changed, of_an_earlier_start)
  summary, difference = replay_run(tmp_path / "alone", open_trace(tmp_path / "alone"))
  assert (summary["identical"], difference) == (True, "")
  assert summary["values_compared"] == 0


def test_a_failure_in_one_role_ends_all(run, monkeypatch):
  """No role waits for what will never be made."""
  _, workdir = run(SEEDS[0])
  trace = open_trace(workdir)

  def broken(started):
    raise RuntimeError(f"no island for {started.role}")

  monkeypatch.setattr(replay, "islands", lambda *arguments: broken)
  with pytest.raises(RuntimeError, match="no island for learner"):
    replay_run(workdir, trace)
