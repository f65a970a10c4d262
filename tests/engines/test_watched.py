"""Runs that are watched: hangs with stacks, traces on request, rejoins in phases."""

from __future__ import annotations

import dataclasses
import json
import signal
import threading

import jax
import pytest

from ddiloco.cli import main
from ddiloco.config import Fault
from ddiloco.engines.profiler import ProfileRequest, take_profile
from ddiloco.engines.role_spec import free_urls
from ddiloco.engines.threads import ThreadsEngine
from ddiloco.environment import LOST
from ddiloco.observe.eventlog import read_events
from ddiloco.observe.report import summarise
from ddiloco.training import data
from tests.engines.real import RealRun, events_of, tiny
from tests.waits import PATIENCE_SECONDS, wait_for


def names_in(folder):
  """What traces have, by the names of their events."""
  files = map(str, folder.glob("plugins/profile/*/*.xplane.pb"))
  planes = [plane for f in files for plane in jax.profiler.ProfileData.from_file(f).planes]
  return {event.name for plane in planes for line in plane.lines for event in line.events}


def back(workdir):
  """The rejoins that are over."""
  return [each for each in summarise(read_events(workdir))["rejoins"] if each["seconds"]]


def hangs(workdir, role):
  return [event for event in events_of(workdir, "hung") if event.target == role]


def planned(config, *faults):
  return dataclasses.replace(config, chaos=dataclasses.replace(config.chaos, faults=faults))


def test_threads(tmp_path):
  stall = Fault("stall", "learner-1", at_step=30, seconds=1e4)  # longer than slow steps allow
  kill = Fault("kill", "learner-0", at_step=60, seconds=2.0)
  config = tiny(100_000, min_step_seconds=0.02, run={"hang_seconds": 0.8})
  config = planned(config, stall, kill)
  engine = ThreadsEngine(config, tmp_path, data.open_data(config.data), dict)
  run = threading.Thread(target=engine.run, daemon=True)
  run.start()

  def traced() -> bool:
    """Whether traces show all that a round takes, which may last for more steps than one has."""
    there, said = take_profile(tmp_path, ProfileRequest("learner-0", steps=12), PATIENCE_SECONDS)
    assert there, said
    found = names_in(tmp_path / "profiles" / "learner-0")
    return {"step", "copy_out", "to_host", "stage", "apply"} <= found

  try:
    # A busy machine may hold up any of its steps for so long as well.
    stalled = lambda event: "faults.check" in event.stacks.split("\n\n")[0]
    hung, *_ = wait_for(lambda: [*filter(stalled, hangs(tmp_path, "learner-1"))], "the hang")
    assert hung.seconds >= 0.8 and hung.usual_seconds > 0.01
    assert hung.stacks.startswith("learner-1:")
    assert "exchange-1" in hung.stacks, "all threads"
    wait_for(traced, "a round in a trace")
    wait_for(lambda: back(tmp_path), "the rejoin")
  finally:
    engine.stop.set()
    run.join(PATIENCE_SECONDS)
  (rejoin,) = summarise(read_events(tmp_path))["rejoins"]
  assert list(rejoin["phases"]) == ["detect", "pause", "restore", "receive", "first_step", "merge"]
  assert rejoin["phases"]["pause"] > 1.0
  assert sum(rejoin["phases"].values()) == pytest.approx(rejoin["seconds"], abs=0.01)


def test_a_shard_whose_loop_hangs_ends_and_is_seen_in_the_log(tmp_path):
  """It was left running, and nothing was merged into its fragments any more."""
  (url,) = free_urls(1)
  flags = "--shard=0", f"--bind={url}", f"--syncers={url}"
  config = tiny(10, run={"hang_seconds": 1.0}, sync={"num_shards": 1})
  with RealRun(tmp_path, config, "syncer", *flags, module="tests.engines.stuck") as run:
    assert run.ends() == LOST, run.said()
  assert "s, and ends to be started again" in run.said().splitlines()[-1]
  (hung,) = run.events("hung")
  assert hung.target == "syncer-0" and hung.seconds >= 1.0 and hung.usual_seconds == 0.0
  assert "for_ever" in hung.stacks.split("\n\n")[0]


@pytest.mark.slow
def test_processes(tmp_path, capsys):
  config = tiny(100_000, min_step_seconds=0.05)
  kill = Fault("kill", "learner-0", at_step=20, seconds=0.5)
  with RealRun(tmp_path, planned(config, kill), "train", "--engine=processes") as run:
    workdir = run.workdir
    (rejoin,) = run.wait_for(lambda: back(workdir), "the rejoin")
    there = main(["profile", f"--workdir={workdir}", "--learner=1", "--steps=3"])
    said = capsys.readouterr().out
    assert there == 0 and "3 steps from global step" in said and "tensorboard" in said, said
    assert main(["profile", f"--workdir={workdir}", "--learner=9"]) == 2
    assert "has no events of learner-9" in capsys.readouterr().err
    run.ends(signal.SIGTERM)
  phases = rejoin["phases"]
  assert list(phases) == [
    *("detect", "pause", "process", "devices", "compile", "restore", "receive"),
    *("first_step", "merge"),
  ]
  assert sum(phases.values()) == pytest.approx(rejoin["seconds"], abs=0.01)
  assert "step" in names_in(workdir / "profiles" / "learner-1")
  assert main(["profile", f"--workdir={workdir}"]) == 2
  assert "its run is over" in capsys.readouterr().err
  summary = json.loads((workdir / "report" / "summary.json").read_text())
  assert summary["rejoins"][0]["phases"] == phases
  assert summary["tokens_per_second_per_chip"] > 0 and summary["mfu"] is None, "a CPU has no peak"
