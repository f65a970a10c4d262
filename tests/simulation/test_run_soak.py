"""Five hundred random faults in virtual time, and the same plan in the threads engine."""

from __future__ import annotations

import json
import math

import pytest

from ddiloco import workdir
from ddiloco.chaos import random_faults
from ddiloco.config import ConfigError, Fault
from ddiloco.engines import virtual
from ddiloco.observe.eventlog import EventStream, read_events
from ddiloco.observe.report import summarise
from ddiloco.observe.tracks import Aftermath
from ddiloco.simulation.run import VirtualRun
from tests.simulation.test_run import STEP_SECONDS, make, of, setting

FAULTS, LEARNERS, SHARDS, STALL_SECONDS = 500, 4, 2, 5.0


@pytest.mark.parametrize("seed", [1])
def test_five_hundred_random_faults_lose_nothing_and_stop_nobody(seed, capsys):
  span = 250.0
  plan = random_faults(seed, FAULTS, span, LEARNERS, SHARDS)
  config = make(learners=LEARNERS, steps=900, faults=plan, num_fragments=4, snapshot_steps=100)
  events: list[dict] = []
  run = VirtualRun(config, setting(seed=seed, step_seconds=0.25), events.append)
  assert run.finish(2000.0) == "finished", f"{seed=}"
  aftermath = Aftermath().read(events)
  found = aftermath.recoveries
  print(f"{seed=}: {len(found)} faults in {run.now:.0f} s of virtual time")
  assert len(found) == FAULTS and {r.action for r in found} == {f.action for f in plan}
  assert aftermath.longest_stall_seconds < STALL_SECONDS
  assert aftermath.lost_rounds() == []
  assert aftermath.unplanned() == []
  assert not any(event.blocked_seconds for event in of(events, "step"))
  back = [r for r in found if math.isfinite(r.seconds)]
  assert len(back) >= FAULTS - LEARNERS - SHARDS, "only who was struck last may not be back"


def test_events_in_a_workdir_are_a_run_that_can_be_read(tmp_path):
  plan = random_faults(5, 10, 4.0, 3, 2)
  config = make(faults=plan)
  said = virtual.simulate(config, setting(), tmp_path / "run")
  events = read_events(tmp_path / "run")
  assert events.torn_lines == 0 and said["faults"] == len(plan) == len(of(events, "fault"))
  assert said["steps"] == len(of(events, "step")) and said["commits"] == len(of(events, "commit"))
  assert {event.role for event in events} >= {"engine", "syncer-0", "learner-2"}
  with pytest.raises(ConfigError, match="holds a run"):
    virtual.simulate(config, setting(), tmp_path / "run")
  with pytest.raises(ConfigError, match="holds a simulated run"):  # it was trained over
    workdir.check(tmp_path / "run", config, overwrite=False)
  with pytest.raises(ConfigError, match="gbps"):  # and then what is there stays
    virtual.simulate(config, setting(gbps=(1.0, 2.0)), tmp_path / "run", overwrite=True)
  assert len(read_events(tmp_path / "run")) == len(events)
  again = virtual.simulate(config, setting(), tmp_path / "run", overwrite=True)
  assert {k: v for k, v in again.items() if k != "wall_seconds"} == {
    k: v for k, v in said.items() if k != "wall_seconds"
  }


@pytest.mark.parametrize("kills", [[], [(2.0, 0.5)], [(1.3, 0.5), (3.0, -1.0)]])
def test_the_report_has_the_same_shares_of_time_as_the_command_prints(tmp_path, kills):
  """What ends a role, or the run, was read before the role's last step: uptime was 97 or 100 %."""
  faults = [Fault("kill", "learner-0", at_seconds=at, seconds=away) for at, away in kills]
  said = virtual.simulate(make(1, faults=faults, num_shards=1), setting(), tmp_path / "run")
  found = summarise(EventStream(tmp_path / "run"))
  for name in ("goodput", "uptime"):
    assert found[name] == pytest.approx(said[name], abs=1e-5), name
  lost = {cause: share for cause, share in found["lost_time"].items() if share > 1e-5}
  assert lost == pytest.approx({c: s for c, s in said["causes"].items() if s > 1e-5}, abs=2e-5)


def test_a_workdir_of_which_nothing_can_be_known_is_not_written_to(tmp_path):
  """Here a link that leads to itself; on other days a disk that does not answer."""
  (tmp_path / "events").symlink_to("events")
  with pytest.raises(OSError, match="symbolic links"):
    virtual.simulate(make(), setting(), tmp_path)
  assert [path.name for path in tmp_path.iterdir()] == ["events"]


def test_numbers_that_a_short_run_does_not_have_are_none():
  """JSON has no NaN."""
  said = virtual.simulate(make(), setting(), most_seconds=STEP_SECONDS / 2)
  assert said["steps"] == 0 and said["uptime"] is None
  json.dumps(said, allow_nan=False)
