"""The key numbers of a run, against values worked out by hand."""

from __future__ import annotations

import json

import pytest

from ddiloco.observe.eventlog import EventLog
from ddiloco.observe.goodput import CAUSES
from ddiloco.observe.report import key_numbers, summarise
from tests.observe.conftest import KILL

# Two islands of one chip for 6 s. The first step of each ends its start-up; nothing was copied out.
ACCOUNT = {
  "chip_seconds": 12.0,
  "goodput": 0.0,
  "goodput_training": 0.0,
  "uptime": 1.0,
  "lost_time": {
    **dict.fromkeys(CAUSES, 0.0),
    "start_up": 0.233333,
    "pending": 0.033333,
    "other": 0.733333,
  },
  "liveness": {"0": 0.35, "1": 0.0166667},
}


def test_golden(make):
  events = [
    make.run_started(num_learners=2, num_shards=1, num_fragments=2, total_tokens=8000),
    make.event(0.1, "syncer-0", "started", fragments=[0, 1]),
    make.event(0.2, "learner-0", "started", devices=1, device_kind="TPU v5p", batch_size=8),
    make.event(0.2, "evaluator", "evaluation", merged_tokens=0, global_step=0, loss=5.5),
    make.step(1.0, 0, 1, gap_seconds=9.0, blocked_seconds=0.25, data_seconds=0.125),
    make.step(2.0, 0, 2, gap_seconds=0.5, loss=2.0),
    make.step(2.0, 1, 1, gap_seconds=9.0),
    make.step(3.0, 0, 3, gap_seconds=0.7, loss=float("nan")),
    make.commit(3.5, merged_tokens=2048, missing={}),
    make.commit(4.0, fragment=1, weights={0: 1.0}, rejected={1: "nan"}, merged_tokens=1024),
    make.event(4.0, "learner-1", "rejected", fragment=1, round=2, reason="nan"),
    make.event(4.5, "learner-0", "traffic", sent_bytes=100, received_bytes=10),
    make.event(5.0, "evaluator", "evaluation", merged_tokens=1536, global_step=3, loss=4.5),
    make.event(6.0, "engine", "run_finished", reason="finished"),
  ]
  assert summarise(EventLog(events, torn_lines=2)) == {
    "name": "quickstart",
    "finished": "finished",
    "seconds": 6.0,
    "num_learners": 2,
    "num_shards": 1,
    "num_fragments": 2,
    "total_tokens": 8000,
    "merged_tokens": 1024,
    "trained_tokens": 4096,
    "commits": 2,
    "loss_unit": "nats per token",
    "participation": {"0": 1.0, "1": 0.5},
    "outer_gradients": {"agreement": None, "rho": None, "length": None, "staleness": 24.0},
    "rejected_pushes": 1,
    "bytes_sent": 100,
    "bytes_received": 10,
    "heldout_loss_first": 5.5,
    "heldout_loss_last": 4.5,
    "heldout_seconds_last": 5.0,
    "faults": 0,
    "snapshots": 0,
    "restarts": 0,
    "tokens_per_second_per_chip": 1706.666667,
    "mfu": None,
    "kills": [],
    "survivor_max_gap_ratio": None,
    "blocked_seconds": 0.25,
    "data_seconds": 0.125,
    "rejoins": [],
    "learners": {
      "0": {
        "lives": 1,
        "chips": 1,
        "chip_kinds": ["TPU v5p"],
        "steps": 3,
        "tokens": 3072,
        "loss": None,
        "median_step_gap_seconds": 0.6,
        "data_seconds": 0.125,
        "tokens_per_second_per_chip": 1706.666667,
        "mfu": None,
        "rejected_pushes": 0,
      },
      "1": {
        "lives": 1,
        "chips": 0,
        "chip_kinds": [],
        "steps": 1,
        "tokens": 1024,
        "loss": 3.0,
        "median_step_gap_seconds": None,
        "data_seconds": 0.0,
        "tokens_per_second_per_chip": None,
        "mfu": None,
        "rejected_pushes": 1,
      },
    },
    "torn_lines": 2,
    **ACCOUNT,
  }


def test_roles_that_were_started_one_by_one_have_merged_tokens(make):
  events = [
    make.event(0.1, "syncer-0", "started", fragments=[0, 1]),
    make.event(0.2, "learner-0", "started", devices=1),
    make.commit(3.5, merged_tokens=2048),
    make.commit(4.0, fragment=1, merged_tokens=1024),
  ]
  summary = summarise(EventLog(events, torn_lines=0))
  assert (summary["num_shards"], summary["merged_tokens"]) == (1, 1024)


def test_the_synthetic_run(run_events):
  summary = summarise(run_events)
  (kill,) = summary["kills"]
  assert (kill["learner"], kill["seconds"], kill["down_seconds"]) == (2, 20.0, 7.0)
  assert 8.5 <= kill["merged_again_seconds"] < 10
  assert 1.0 <= summary["survivor_max_gap_ratio"] < 1.2  # jitter of the made-up steps only
  assert summary["learners"]["2"]["lives"] == 2
  assert summary["participation"]["0"] == 1.0 > summary["participation"]["2"] > 0.7
  assert summary["blocked_seconds"] == 0.0


@pytest.mark.parametrize("behind, unwritten", [(5.0, 0.0), (0.0, 0.9)])
def test_a_pause_at_the_end_of_a_log_is_not_of_a_clock(make, run_events, behind, unwritten):
  """Of a run under way, or killed whole, a survivor was said to have paused for 45 of its steps."""
  found = [event for event in run_events if event.time <= KILL + 4]
  mine = [event for event in found if event.role == "learner-1"]
  found = [event for event in found if event.role != "learner-1"]
  there = [event for event in mine if event.time <= KILL + 4 - unwritten]
  found += [make.changed(event, time=event.time - behind) for event in there]
  commit = next(event for event in found if event.kind == "commit")
  value = {"fragment": commit.fragment, "round": commit.round}
  found.append(make.event(commit.time + 0.1 - behind, "learner-1", "stage", **value))
  summary = summarise(sorted(found, key=lambda event: event.time))
  assert 1.0 <= summary["survivor_max_gap_ratio"] < 1.2


def test_nothing_gives_nothing():
  summary = summarise([])
  assert summary["seconds"] is None and summary["commits"] == 0
  assert summary["survivor_max_gap_ratio"] is None and summary["learners"] == {}


def test_any_beginning_of_a_log_can_be_summarised(run_events):
  for count in range(0, len(run_events), 97):
    summary = summarise(run_events[:count])
    assert json.loads(json.dumps(summary, allow_nan=False)).keys() == summary.keys()


def test_traffic_counters_restart_with_every_life(make):
  events = [
    make.event(float(k), role, "traffic", life, sent_bytes=sent, received_bytes=got)
    for k, (role, life, sent, got) in enumerate(
      [
        ("learner-0", 0, 10, 1),
        ("learner-0", 0, 30, 3),
        ("learner-0", 1, 5, 2),
        ("syncer-0", 0, 7, 8),
      ]
    )
  ]
  summary = summarise(events)
  assert (summary["bytes_sent"], summary["bytes_received"]) == (30 + 5 + 7, 3 + 2 + 8)


def test_participation_without_commits_says_nothing(make):
  start = make.run_started(num_learners=2)
  assert summarise([start])["participation"] == {"0": None, "1": None}
  found = summarise([make.run_started(), make.commit(1.0, weights={0: 1.0})])
  assert (found["participation"]["0"], found["participation"]["3"]) == (1.0, 0.0)


@pytest.mark.parametrize("shards", [0, 2])
def test_merged_tokens_without_a_syncer_are_none(make, shards):
  events = [make.run_started(num_shards=shards), make.step(1.0, 0, 1)]
  assert summarise(events)["merged_tokens"] == 0


def test_a_run_of_single_roles_says_its_fragments_and_its_end(make):
  """No engine has said how many fragments there are; outcome.json says why the run ended."""
  log = [make.step(1.0, 0, 1), make.event(1.0, "syncer-0", "owns", fragment=2), make.commit(2.0)]
  found = summarise(log)
  assert found["num_fragments"] == 3
  ended = ("how the run ended", "it did not end in good order")
  assert ended in key_numbers(found)
  assert ("how the run ended", "finished") in key_numbers(found | {"reason": "finished"})


@pytest.mark.parametrize(
  "merged, reason, lacks",
  [(1504, "finished", True), (32_000, "finished", False), (1504, "stopped", False)],
)
def test_a_finished_run_whose_log_lacks_commits_says_so(make, merged, reason, lacks):
  """Its disk was full for a while: the report had a run finished with a twentieth of its tokens."""
  events = [
    make.run_started(num_learners=1, num_shards=1, num_fragments=1, total_tokens=32_000),
    make.event(0.1, "syncer-0", "started", fragments=[0]),
    make.commit(3.5, merged_tokens=merged),
    make.event(6.0, "engine", "run_finished", reason=reason),
  ]
  assert ("what the log lacks" in dict(key_numbers(summarise(events)))) == lacks
  alone = [make.changed(events[0], num_shards=0, num_fragments=0), events[-1]]
  assert "what the log lacks" not in dict(key_numbers(summarise(alone)))
