"""The page's JSON: true at every moment of a run, and small however long the run is."""

import json
import random

import pytest

from ddiloco.config import Config
from ddiloco.dashboard.status import SILENT_SECONDS
from ddiloco.dashboard.status import status as status_of
from ddiloco.observe.history import MOST_EVALUATIONS
from ddiloco.observe.islands import FIRST_STEP_SECONDS
from ddiloco.observe.report import summarise
from ddiloco.observe.run_state import RunState
from ddiloco.protocol.events import decode


def status(events, now=None, config=None, reason=""):
  run = RunState(config).read(events)
  return status_of(run, run.time if now is None else now, config and config.sync, reason)


def test_it_says_what_the_summary_says(run_events):
  found, summary = status(run_events), summarise(run_events)
  for ours, theirs in (
    ("name", "name"), ("commits", "commits"), ("total_tokens", "total_tokens"),
    ("outer_gradients", "outer_gradients"),
  ):  # fmt: skip
    assert found[ours] == summary[theirs], ours
  merged = {e.fragment: e.merged_tokens for e in run_events if e.kind == "commit"}.values()
  assert (found["tokens_done"], summary["merged_tokens"]) == (sum(merged) / 4, min(merged))
  assert found["heldout_loss"] == pytest.approx(summary["heldout_loss_last"], abs=1e-4)
  for island in found["islands"]:
    theirs = summary["learners"][str(island["number"])]
    assert island["tokens"] == theirs["tokens"] and island["restarts"] == theirs["lives"] - 1
    share = summary["participation"][str(island["number"])]
    assert island["participation"] == pytest.approx(share, abs=1e-3)
  assert [island["restarts"] for island in found["islands"]] == [0, 0, 1, 0]
  assert sum(link["sent_bytes"] for link in found["links"]) == summary["bytes_sent"]


def test_the_page_and_the_report_count_the_same_restarts(make, run_events):
  """Those of islands and shards, whether an engine says so or their own logs."""
  again = make.event(30.0, "syncer-1", "started", 1)
  for events in (run_events, [e for e in run_events if e.role != "engine"]):
    events = [*events, again]
    assert status(events)["restarts"] == summarise(events)["restarts"] == 2


def test_it_is_json_at_every_moment_of_a_run(run_events):
  made, sizes = RunState(), []
  for i, event in enumerate(run_events):
    made.add(event)
    if i % 20 == 0:
      sizes.append(len(json.dumps(status_of(made, event.time), allow_nan=False)))
  assert len(sizes) > 50 and max(sizes) < 40_000


def test_the_phases_of_a_run(make, run_events):
  assert status([], 5.0)["phase"] == "empty" and status([], 5.0)["goodput"] is None
  starting = [make.run_started()]
  assert status(starting, FIRST_STEP_SECONDS - 1)["phase"] == "starting"
  assert status(starting, FIRST_STEP_SECONDS + 1)["phase"] == "silent"
  shard = [make.event(0.0, "syncer-0", "started", 0)]  # no island has come yet, and so none left
  assert status(shard, SILENT_SECONDS + 1)["phase"] == "starting"
  during = [event for event in run_events if event.time < 30]
  assert status(during)["phase"] == "running"
  silent = status(during, 30 + SILENT_SECONDS + 5)
  assert silent["phase"] == "silent" and "has written for 1:05 (min:s): the run" in silent["text"]
  assert "has written for 20:00:00 (h:min:s)" in status(during, during[-1].time + 72_000.5)["text"]
  assert silent["seconds"] < 30.1, "the picture ends where the log does"
  assert {island["state"] for island in silent["islands"]} == {"unknown"}
  assert {island["tokens_per_second"] for island in silent["islands"]} == {None}
  speeds = [island["tokens_per_second"] or 0 for island in status(during)["islands"]]
  assert status(during)["tokens_per_second"] == pytest.approx(sum(speeds), abs=1) and all(speeds)
  over = status(run_events, 1000.0)
  assert (over["phase"], over["seconds"]) == ("over", 60.3)
  assert silent["waiting"] == over["waiting"] == "No role waits: there is no run under way."
  assert {island["state"] for island in over["islands"]} == {"left"}
  assert status(during, 31.0, reason="finished")["phase"] == "over", "its outcome says so"


def test_an_island_alone_whose_steps_take_minutes_is_not_silent(make):
  """Between two steps of more than a minute the page said that the run was killed."""
  alone = [make.run_started(num_learners=1, num_shards=0)]
  alone += [make.step(100.0 * n, 0, n, seconds=100.0) for n in (1, 2)]
  assert [status(alone, time)["phase"] for time in (299.0, 1199.0, 1203.0)] == [
    "running",
    "running",
    "silent",
  ]
  shared = [make.run_started(num_learners=1), *alone[1:]]
  assert status(shared, 299.0)["phase"] == "silent", "shards write once a second"
  quick = [make.run_started(num_learners=2, num_shards=0)]
  quick += [make.step(1.0 * n, 0, n) for n in (1, 2, 3)]
  assert status(quick, 70.0)["phase"] == "silent", "of the other island nothing has come yet"


def test_why_it_ended_is_said_in_a_sentence(make):
  for reason, words in (
    ("finished", "merged all its tokens"), ("stopped", "can go on"), ("failed", "gone for good"),
    ("a whim", "a whim"),
  ):  # fmt: skip
    events = [make.run_started(), make.event(9.0, "engine", "run_finished", reason=reason)]
    assert words in status(events)["text"]


def test_single_roles_without_an_engine_are_over_when_all_have_left(make):
  config = Config()
  events = [make.step(1.0, m, 1) for m in range(config.islands.num_learners)]
  assert status(events, 2.0, config)["phase"] == "running"
  expected = status(events[:1], 2.0, config)["islands"]
  assert [each["state"] for each in expected] == ["running", "joining", "joining", "joining"]
  events += [make.event(3.0, e.role, "stopped", reason="done") for e in events]
  events += [make.step(3.1, 0, 2)]  # told late
  assert status(events, 4.0, config)["phase"] == "running"
  assert status(events, 100.0, config)["phase"] == "over"
  assert status(events, 100.0, config)["total_tokens"] == config.run.total_tokens


def test_a_cut_is_told_by_shards_that_do_not_hear_islands_which_train(make):
  """All islands ran, and so did both shards: the page's first lines said that all was well."""
  events = [make.run_started()]
  events += [make.event(0.5, f"syncer-{s}", "started") for s in range(2)]
  events += [make.step(1.0 + n, m, n + 1, seconds=1.0) for n in range(8) for m in (1, 2)]

  def member(time, shard, learner, state):
    return make.event(time, f"syncer-{shard}", "member", learner=learner, state=state)

  events += [member(4.0, 1, 2, "lost"), member(4.0, 1, -1, "lost"), member(4.0, 0, 3, "lost")]
  events.sort(key=lambda event: event.time)
  assert [each["unheard"] for each in status(events)["shards"]] == [[], [2]], "3 does not train"
  assert status(events, 25.0)["shards"][1]["unheard"] == [], "2 has stalled"
  heard = [*events, member(8.0, 1, 2, "joined")]
  again = [*events, make.event(8.0, "syncer-1", "started", 1)]
  for each in (heard, again):
    assert [shard["unheard"] for shard in status(each)["shards"]] == [[], []]


def test_an_island_that_has_never_joined_has_a_reason_too(make):
  """No shard knows it, so none says why it misses each round: it was joining for days."""
  events = [make.run_started(), make.step(1.0, 0, 1), make.event(1.0, "learner-2", "started")]
  events += [make.event(2.0, "learner-2", "apply", fragment=1)]
  assert not any(each["missed_reason"] for each in status(events)["islands"]), "nothing is missed"
  events += [make.commit(3.0, weights={0: 1.0}, missing={1: "no answer within the grace window"})]
  events += [make.event(4.0, "engine", "restart", target="learner-0")]  # it was there
  assert [each["missed_reason"] for each in status(events)["islands"]] == [
    "",
    "no answer within the grace window",
    "it joins, and has received 1 of 4 fragments",
    "nothing has been heard of it: was it started?",
  ]
  assert [each["missed_seconds"] for each in status(events)["islands"]] == [None, 3.0, None, None]


def test_a_run_that_goes_on_is_not_over(make, run_events):
  events = [*run_events, make.changed(make.run_started(), time=100.0), make.step(110.0, 0, 1, 2)]
  assert status(events, 110.5)["phase"] == "running"


def test_a_log_that_is_written_a_moment_late_stalls_nobody(make):
  events = [make.run_started(num_learners=2, num_shards=0)]
  events += [make.step(5.0 + 0.1 * i, 0, i + 1) for i in range(50)]
  events += [make.step(5.0 + 0.1 * i, 1, i + 1) for i in range(30)]
  found = status(sorted(events, key=lambda e: e.time), 10.0)
  assert [island["state"] for island in found["islands"]] == ["running", "running"]
  found = status(sorted(events, key=lambda e: e.time), 12.5)
  assert [island["state"] for island in found["islands"]] == ["running", "stalled"]
  assert [lane["spans"][-1] for lane in found["timeline"]["lanes"]] == [
    [5.0, 12.5, "running"],
    [7.9, 12.5, "stalled"],
  ]


def test_spans_that_are_part_of_others_are_counted(make):
  """At the cursor an island ran while it was down; the report's picture said how many are so."""
  events, about = [make.run_started(num_learners=1, num_shards=0)], {"target": "learner-0"}
  for n in range(150):
    events += [make.event(10.0 * n + 1, "engine", "fault", action="kill", **about)]
    events += [make.event(10.0 * n + 5, "engine", "restart", **about)]
  timeline = status(events)["timeline"]
  assert timeline["absorbed"] == 100 and len(timeline["lanes"][0]["spans"]) == 200


def test_versions_are_a_grid(make):
  events = [make.run_started()]
  events += [make.commit(2.0, fragment=p, version=5) for p in range(3)]
  events += [make.event(2.5, "learner-1", "apply", fragment=2, version=4, round=9, mode="rebase")]
  found = status(events)
  assert found["fragments"] == [5, 5, 5, None]
  assert found["islands"][1]["versions"] == [None, None, 4, None]


def test_goodput_and_its_causes_add_up_to_all_time(run_events):
  account = status(run_events)["goodput"]
  assert account["goodput"] + sum(account["lost_time"].values()) == pytest.approx(1, abs=1e-3)
  assert account["lost_time"]["down"] > 0 and set(account["liveness"]) == {"0", "1", "2", "3"}


def test_every_evaluation_is_on_the_curve_until_there_are_too_many(make):
  def evaluations(count):
    return [
      make.event(i / 10, "evaluator", "evaluation", loss=9.0 - i / 1000) for i in range(count)
    ]

  assert status(evaluations(3))["curves"]["heldout"] == [(0.0, 9.0), (0.1, 8.999), (0.2, 8.998)]
  curve = status(evaluations(5000))["curves"]["heldout"]
  assert MOST_EVALUATIONS / 2 <= len(curve) <= MOST_EVALUATIONS
  assert curve[0] == (0.0, 9.0) and curve[-1] == (499.9, 4.001) and curve == sorted(curve)


def test_a_loss_that_is_no_number_is_none(make):
  events = [make.run_started(), make.step(1.0, 0, 1, loss=float("nan"))]
  assert status(events)["islands"][0]["loss"] is None


@pytest.mark.parametrize("fields", ["", ',"fragment":0'])
def test_events_it_does_not_know_are_counted_and_change_no_more(make, fields):
  odd = decode(b'{"time":2.0,"kind":"commit","role":"syncer-0"%s}' % fields.encode())
  found = status([make.run_started(), make.step(1.0, 0, 1), odd], 3.0)
  assert (found["commits"], found["odd_events"]) == (0, 1)


@pytest.mark.parametrize("seed", [1])
def test_a_long_run_of_many_islands_stays_small(make, seed):
  print("seed", seed)
  rng = random.Random(seed)
  events = [make.run_started(num_learners=64, num_fragments=48)]
  for i in range(400):
    m = rng.randrange(64)
    events += [
      make.step(1000.0 * i, m, i + 1),
      make.commit(1000.0 * i + 1, fragment=i % 48, version=i, weights={m: 1.0}),
      make.event(1000.0 * i + 2, "engine", "fault", target=f"learner-{m}", action="stall"),
    ]
  text = json.dumps(status(events), allow_nan=False, separators=(",", ":"))
  assert len(text) < 150_000
