"""Prometheus gets every number, in its format, and nothing that is not known."""

import re

from ddiloco.dashboard.status import PHASES, exposition, status
from ddiloco.observe.run_state import RunState

SAMPLE = re.compile(r'(ddiloco_[a-z_]+)(\{[a-z]+="[^"]*"(?:,[a-z]+="[^"]*")*\})? (\S+)')


def samples(events, **changes) -> dict[str, float]:
  run = RunState().read(events)
  text = exposition(status(run, run.time) | changes)
  assert text.endswith("\n")
  found, kinds = {}, {}
  for line in text.splitlines():
    if line.startswith("# TYPE"):
      _, _, name, kind = line.split()
      assert name not in kinds, "each metric is one group"
      kinds[name] = kind
    elif not line.startswith("# HELP"):
      name, labels, value = SAMPLE.fullmatch(line).groups()
      assert kinds[name] == ("counter" if name.endswith("_total") else "gauge")
      assert name == list(kinds)[-1] and name + (labels or "") not in found
      found[name + (labels or "")] = float(value)
  return found


def test_the_numbers_of_a_run(run_events):
  found = samples(run_events)
  assert found['ddiloco_run_phase{phase="over"}'] == 1
  assert sum(value for name, value in found.items() if name.startswith("ddiloco_run_phase")) == 1
  assert found["ddiloco_commits_total"] == sum(e.kind == "commit" for e in run_events)
  assert found['ddiloco_island_restarts_total{island="2"}'] == 1
  assert found['ddiloco_island_state{island="2",state="left"}'] == 1
  assert 0 < found['ddiloco_lost_time_ratio{cause="down"}'] < 0.2
  assert found['ddiloco_sent_bytes_total{role="syncer-0"}'] > 0
  assert found['ddiloco_rejected_pushes_total{shard="1"}'] == 1
  assert 0 == found["ddiloco_goodput_ratio"] < found["ddiloco_uptime_ratio"] <= 1
  assert found["ddiloco_outer_gradient_staleness"] == 6


def test_what_is_not_known_is_left_out(make):
  found = samples([make.run_started()])
  assert found['ddiloco_run_phase{phase="starting"}'] == 1
  assert not any("loss" in name or "version" in name for name in found)
  assert samples([])['ddiloco_run_phase{phase="empty"}'] == 1


def test_a_log_that_is_being_read_has_no_numbers_yet(run_events):
  """A dashboard that was started again told of all commits of the run as of the last seconds'."""
  assert set(samples(run_events, phase="empty")) == {
    f'ddiloco_run_phase{{phase="{phase}"}}' for phase in PHASES
  }


def test_labels_are_escaped():
  link = {"role": 'a"b\\c\nd', "sent_bytes": 1, "received_bytes": 2}
  text = exposition(status(RunState(), 0.0) | {"links": [link], "phase": "running"})
  assert 'ddiloco_sent_bytes_total{role="a\\"b\\\\c\\nd"} 1.0' in text
