"""The threads engine with islands in NumPy: who dies, who comes back, what the others notice."""

from __future__ import annotations

import re
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from ddiloco.chaos import ask_for
from ddiloco.config import Config, Fault, from_dict
from ddiloco.core import delta
from ddiloco.core.fragments import scatter
from ddiloco.engines import engine as engine_module
from ddiloco.engines.engine import RunResult
from ddiloco.engines.threads import ThreadsEngine
from ddiloco.network import frames
from ddiloco.observe.eventlog import Event, read_events
from ddiloco.observe.goodput import Ledger
from ddiloco.observe.tracks import Aftermath
from ddiloco.protocol import supervisor
from ddiloco.roles import initial
from ddiloco.training import data
from ddiloco.workdir import STARTED
from tests.made_events import changed

STEP_SECONDS = 0.004
TOKENS = 16  # of a step: B = 2, T = 8


class HostIsland:
  """An island without a device: every step moves every value, and takes `STEP_SECONDS`."""

  busy = False

  def __init__(self, config: Config, learner: int, plan):
    shapes = initial.shapes(config.model)
    self.params = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    self._plan = plan
    self.learner = learner
    self.made = 0
    self.lives = 0
    self.trouble = {}  # step of this island's own count -> what then happens, once

  def compile(self) -> float:
    return 0.0

  def describe(self) -> dict:
    return {"devices": 1, "mesh": [1, 1, 1], "batch_size": 2}

  def reset(self) -> None:
    self.lives += 1

  def capture(self) -> dict[str, np.ndarray]:
    return {f"params/{name}": value.copy() for name, value in self.params.items()}

  def place(self, name: str, value: np.ndarray) -> np.ndarray:
    return value

  def restore(self, arrays) -> None:
    self.lives += 1
    self.params = {name: np.array(arrays[f"params/{name}"]) for name in self.params}

  def load(self, params) -> None:
    self.params = {name: value.copy() for name, value in params.items()}

  def step(self, tokens, schedule_step, rate_scale=1.0) -> dict[str, float]:
    time.sleep(STEP_SECONDS)  # stands for the device's work
    self.made += 1
    for value in self.params.values():
      value -= np.float32(0.01) * (value - 1 - self.learner / 4)
    if self.made in self.trouble:
      self.trouble[self.made]()
    return {"loss": 1.0}

  def copy_out(self, fragment: int):
    piece = self._plan.fragments[fragment]
    return [v.copy() for v in (self.params[p.name] for p in piece.pieces)]

  def to_host(self, pieces, fragment: int) -> np.ndarray:
    flat, piece = [], self._plan.fragments[fragment]
    for value, p in zip(pieces, piece.pieces):
      rows = value if p.layer is None else value[p.layer]
      flat.append((rows[p.start : p.stop] if rows.ndim else rows).ravel())
    return np.concatenate(flat).astype(np.float32)

  def stage(self, fragment: int, flat: np.ndarray) -> np.ndarray:
    return flat

  def apply(self, fragment: int, staged: np.ndarray, keep: float) -> None:
    if keep:
      staged = np.float32(keep) * self.to_host(self.copy_out(fragment), fragment) + staged
    scatter(self._plan.fragments[fragment], staged, self.params)

  def params_on_host(self) -> dict[str, np.ndarray]:
    return self.params


def make_config(learners: int = 3, steps: int = 200, **sections) -> Config:
  sections["sync"] = {
    "num_shards": 2,
    "num_fragments": 4,
    "sync_period": 8,
    "liveness_seconds": 0.3,
    "max_norm_ratio": 1e6,  # these islands pull to different places, so lengths say little
  } | sections.get("sync", {})
  sections["run"] = {
    "total_tokens": learners * steps * TOKENS,
    "evaluations": 2,
    "restart_seconds": 0.05,
  } | sections.get("run", {})
  model = {"num_layers": 1, "model_dim": 8, "num_heads": 1, "num_kv_heads": 1, "head_dim": 4}
  return from_dict(
    {
      "model": model | {"mlp_dim": 8},
      "data": {"source": "synthetic", "sequence_length": TOKENS // 2},
      "islands": {"num_learners": learners, "batch_size": 2},
      **sections,
    }
  )


@pytest.fixture(scope="module")
def corpus() -> data.Corpus:
  return data.open_corpus(make_config().data)


def always_two(params) -> dict[str, float]:
  return {"loss": 2.0}


class Ran:
  """One run of the engine, and what it left in the event logs."""

  def __init__(
    self, config: Config, corpus, workdir, trouble=(), stop_after=None, measure=always_two
  ):
    plan = initial.make_plan(config)
    learners = range(config.num_islands())
    self.islands = {m: HostIsland(config, m, plan) for m in learners}
    for learner, step, what in trouble:
      self.islands[learner].trouble[step] = lambda m=learner, what=what: what(self.islands[m])
    engine: ThreadsEngine

    def listen(event: Event) -> None:
      if stop_after and stop_after(event):
        engine.stop.set()

    engine = ThreadsEngine(config, workdir, corpus, measure, self.islands)
    # What this machine does to a bystander: when it looked, and the seconds since the look before.
    self.looks: list[tuple[float, float]] = []
    over = threading.Event()
    bystander = threading.Thread(target=self._look, args=(over,))
    bystander.start()
    try:
      self.outcome: RunResult = engine.run([listen])
    finally:
      over.set()
      bystander.join()
    self.looks = [(now - engine._start_time, pause) for now, pause in self.looks]
    self.longest_pause = max(pause for _, pause in self.looks)
    self.events: list[Event] = read_events(workdir)

  def _look(self, over: threading.Event) -> None:
    before = time.monotonic()
    while not over.wait(STEP_SECONDS):
      now = time.monotonic()
      self.looks.append((now, now - before))
      before = now

  def of(self, kind: str, role: str = "") -> list[Event]:
    return [e for e in self.events if e.kind == kind and e.role.startswith(role)]

  def steps(self, learner: int) -> int:
    return len(self.of("step", f"learner-{learner}"))

  def exits(self, target: str) -> list[str]:
    return [e.reason for e in self.of("exit") if e.target == target]


def fault(action: str, role: str, at_step: int, **more) -> dict:
  return {"action": action, "role": role, "at_step": at_step, **more}


def raises(error: Exception):
  def trouble(island: HostIsland) -> None:
    raise error

  return trouble


def assert_versions_never_go_back(ran: Ran) -> None:
  newest: dict[int, int] = {}
  for event in ran.of("commit"):
    assert event.version == newest.get(event.fragment, 0) + 1
    newest[event.fragment] = event.version
  assert len(newest) == 4 and min(newest.values()) > 2


@pytest.fixture(scope="module")
def chaos(corpus, tmp_path_factory) -> Ran:
  faults = [
    fault("kill", "learner-1", 60, seconds=0.6),
    fault("kill", "syncer-0", 100, seconds=0.3),
    fault("stall", "learner-2", 150, seconds=0.4),
    fault("slow", "learner-0", 200, seconds=0.3, factor=3.0),
  ]
  config = make_config(steps=300, chaos={"faults": faults})
  return Ran(config, corpus, tmp_path_factory.mktemp("chaos"))


def test_kills_a_stall_and_slowness_and_the_run_still_finishes(chaos):
  assert chaos.outcome.reason == "finished"
  assert sorted((e.target, e.action) for e in chaos.of("fault")) == [
    ("learner-0", "slow"), ("learner-1", "kill"), ("learner-2", "stall"), ("syncer-0", "kill"),
  ]  # fmt: skip
  assert sorted(e.target for e in chaos.of("exit")) == ["learner-1", "syncer-0"]
  assert {e.target for e in chaos.of("restart")} == {"learner-1", "syncer-0"}
  joined = [e.incarnation for e in chaos.of("joined", "learner-1")]
  assert joined == [0, 1]
  assert [e.incarnation for e in chaos.of("started", "syncer-0")] == [0, 1]
  late = [e for e in chaos.of("commit") if e.time > chaos.of("joined", "learner-1")[1].time]
  assert any(1 in e.weights for e in late), "it takes part again"
  assert chaos.of("run_finished")[0].reason == "finished"


def test_versions_never_go_back_also_across_a_shards_restart(chaos):
  assert_versions_never_go_back(chaos)
  assert {e.incarnation for e in chaos.of("commit", "syncer-0")} == {0, 1}


def test_nobody_is_ever_blocked(chaos):
  assert sum(e.blocked_seconds for e in chaos.of("step")) == 0


def test_survivors_go_on_while_another_is_down(chaos):
  """Against the looks of a thread that waits for the processor as they do."""
  down = next(e.time for e in chaos.of("fault") if e.target == "learner-1")
  back = next(e.time for e in chaos.of("joined", "learner-1") if e.incarnation == 1)
  end = min(back, down + 0.6)
  looks = sum(down <= now < end for now, _ in chaos.looks)
  for m in (0, 2):
    steps = sum(down <= e.time < end for e in chaos.of("step", f"learner-{m}"))
    assert steps >= looks // 6


def test_all_steps_of_all_lives_are_in_the_log(chaos):
  for m, island in chaos.islands.items():
    assert chaos.steps(m) == island.made
  assert chaos.islands[1].lives == 2


def test_the_result_is_what_the_learners_ended_with(chaos):
  for name, value in chaos.outcome.params.items():
    assert np.isfinite(value).all()
    np.testing.assert_allclose(value, chaos.islands[0].params[name], atol=0.8)


@pytest.fixture(scope="module")
def storm(corpus, tmp_path_factory) -> Ran:
  """Everything that can happen to messages, a cut region, and an island that comes and goes."""
  faults = [
    fault("drop", "learner-0", 20, seconds=0.4, share=0.5),
    fault("delay", "learner-1", 30, seconds=0.4, delay_seconds=0.05),
    fault("duplicate", "syncer-0", 40, seconds=0.4, share=0.5),
    fault("reorder", "learner-2", 50, seconds=0.4, share=0.5, delay_seconds=0.1),
    fault("corrupt", "learner-0", 60, seconds=0.4, share=0.5),
    fault("throttle", "learner-1", 70, seconds=0.4, bits_per_second=1e6),
    fault("join", "learner-3", 60, seconds=2.0),
    fault("join", "learner-4", 80, seconds=-1),
    fault("cut", "region-east", 100, seconds=1.0),
    fault("poison", "learner-0", 140, seconds=1.0, factor=1e30),
  ]
  regions = {"east": ["learner-1", "syncer-1"]}
  config = make_config(steps=600, chaos={"faults": faults, "regions": regions})
  return Ran(config, corpus, tmp_path_factory.mktemp("storm"))


def test_a_storm_is_survived_without_a_crash_a_block_or_a_lost_round(storm):
  assert storm.outcome.reason == "finished"
  struck = {(e.action, e.target) for e in storm.of("fault")}
  assert len(struck) == 11 and {("cut", "learner-1"), ("cut", "syncer-1")} <= struck
  aftermath = Aftermath().read(storm.events)
  assert [getattr(each, "reason", each) for each in aftermath.unplanned()] == []
  assert aftermath.lost_rounds() == []
  assert_versions_never_go_back(storm)
  assert sum(e.blocked_seconds for e in storm.of("step")) == 0
  assert aftermath.longest_stall_seconds < 1.0 + 2 * storm.longest_pause
  back = {r.target for r in aftermath.recoveries if r.seconds == r.seconds}
  assert {"learner-0", "learner-1", "learner-2", "learner-4", "syncer-0", "syncer-1"} <= back


def test_corrupt_messages_are_counted_and_poison_is_rejected(storm):
  assert sum(max((e.malformed for e in storm.of("traffic", f"syncer-{s}")), default=0)
    for s in range(2)) > 0  # fmt: skip
  assert any("norm" in e.reason for e in storm.of("rejected", "learner-0"))
  assert all(np.isfinite(value).all() for value in storm.outcome.params.values())


def test_islands_join_and_leave_with_their_work_merged(storm):
  ledger = Ledger()
  for event in storm.events:
    ledger.take(event)
  report = ledger.report()
  assert set(report.learners) == {0, 1, 2, 3, 4}
  stopped = storm.of("stopped", "learner-3")[0]
  assert stopped.unmerged_tokens == 0 and stopped.time < storm.of("run_finished")[0].time
  assert any(3 in e.weights for e in storm.of("commit"))
  merged = [e for e in storm.of("commit") if 4 in e.weights]
  assert len({e.fragment for e in merged}) == 4


def test_the_ledger_adds_up_to_what_the_shards_merged(storm, chaos):
  """With steps of a microsecond, useful chip-seconds count steps: as many as the shards merged."""
  for ran in (storm, chaos):
    ledger, merged = Ledger(), {}
    for event in ran.events:
      if event.kind == "commit":
        merged[event.fragment] = event.merged_tokens
      ledger.take(changed(event, seconds=1e-6) if event.kind == "step" else event)
    report = ledger.report()
    assert report.goodput + sum(report.causes.values()) == pytest.approx(1.0)
    counted = {
      p: 1e6 * TOKENS * sum(chain.merged(chain.head)) for p, chain in ledger.chains.items()
    }
    assert counted == pytest.approx(merged)


def test_a_crash_is_restarted_after_a_pause_that_doubles(corpus, tmp_path, capsys, monkeypatch):
  supervise, exits, restarts = supervisor.supervise, list[float](), list[float]()

  def noted(state, event):
    state, actions = supervise(state, event)
    exits.extend([event.now] if isinstance(event, supervisor.Exited) else [])
    restarts.extend(event.now for a in actions if isinstance(a, supervisor.Start) and a.life)
    return state, actions

  monkeypatch.setattr(supervisor, "supervise", noted)
  trouble = [(1, 10, raises(OSError("cable"))), (1, 20, raises(OSError("cable again")))]
  ran = Ran(make_config(steps=150), corpus, tmp_path, trouble)
  assert ran.outcome.reason == "finished"
  assert ran.exits("learner-1") == ["OSError: cable", "OSError: cable again"]
  pauses = [after - before for before, after in zip(exits, restarts)]
  assert len(pauses) == 2 and pauses[0] >= 0.05 and pauses[1] >= 0.1
  assert "cable" in ran.of("crash", "learner-1")[0].trace
  said = capsys.readouterr().err
  assert said.count("learner-1 crashed\nTraceback") == 2 and f'File "{__file__}", line ' in said
  assert ran.islands[1].lives == 3


def always(learner: int):
  return [(learner, step, raises(ValueError("broken"))) for step in range(1, 100)]


def test_roles_that_crash_alike_are_shown_once(corpus, tmp_path, capsys):
  """A mistake in the user's own code strikes every island, in each of its lives."""
  config = make_config(steps=100, run={"max_restarts": 1, "restart_seconds": 0.02})
  ran = Ran(config, corpus, tmp_path, [*always(0), *always(1), *always(2)])
  assert ran.outcome.reason == "failed" and len(ran.of("crash")) == 6
  assert capsys.readouterr().err.count("Traceback") == 1


def test_a_role_that_always_crashes_is_given_up_and_the_others_go_on(corpus, tmp_path):
  config = make_config(steps=100, run={"max_restarts": 2, "restart_seconds": 0.02})
  ran = Ran(config, corpus, tmp_path, always(2))
  assert ran.outcome.reason == "finished"
  assert ran.exits("learner-2") == ["ValueError: broken"] * 3
  assert len(ran.of("restart")) == 2
  assert_versions_never_go_back(ran)


@pytest.mark.parametrize("shards", [0, 2])
def test_when_all_learners_give_up_the_run_has_failed_and_keeps_what_it_has(
  corpus, tmp_path, shards
):
  config = make_config(
    learners=2, run={"max_restarts": 1, "restart_seconds": 0.02}, sync={"num_shards": shards}
  )
  trouble = [(m, 40 + n, raises(ValueError("broken"))) for m in (0, 1) for n in range(1, 60)]
  ran = Ran(config, corpus, tmp_path, trouble)
  assert ran.outcome.reason == ran.of("run_finished")[0].reason == "failed"
  params = ran.outcome.params
  assert all(np.isfinite(v).all() for v in params.values())
  first = initial.initial_params(config)
  if shards:
    assert ran.of("commit")
    assert any((params[name] != first[name]).any() for name in params), "merged work is kept"


def test_who_is_killed_for_good_stays_away_and_the_rest_finishes(corpus, tmp_path):
  faults = [fault("kill", "learner-0", 30, seconds=-1)]
  ran = Ran(make_config(steps=100, chaos={"faults": faults}), corpus, tmp_path)
  assert ran.outcome.reason == "finished"
  assert not ran.of("restart")
  assert ran.steps(0) < 60 and ran.steps(1) + ran.steps(2) > 200


@pytest.mark.parametrize("action, patience", [("kill", 3600.0), ("stall", 1.0)])
def test_a_run_whose_tokens_are_merged_ends_without_who_is_away_by_plan(
  corpus, tmp_path, monkeypatch, action, patience
):
  monkeypatch.setattr("ddiloco.engines.engine.PATIENCE_SECONDS", patience)
  faults = [fault(action, "learner-1", 30, seconds=3600.0)]
  ran = Ran(make_config(steps=60, chaos={"faults": faults}), corpus, tmp_path)
  assert ran.outcome.reason == "finished" and not ran.outcome.lost
  assert ran.events[-1].time < 200 and not ran.of("restart")
  assert ran.steps(1) < 60 and ran.steps(0) + ran.steps(2) > 120


@pytest.mark.parametrize("target, quorum", [("syncer-1", 1), ("learner-0", 3)])
def test_a_run_that_can_never_end_any_more_ends_at_once(corpus, tmp_path, target, quorum):
  """A shard gone for good never merges again; nor do too few learners for a quorum."""
  faults = [fault("kill", target, 30, seconds=-1)]
  sections = {"sync": {"min_quorum": quorum}, "network": {"drain_seconds": 3600.0}}
  ran = Ran(make_config(steps=10**6, chaos={"faults": faults}, **sections), corpus, tmp_path)
  assert ran.outcome.reason == "failed"
  assert all(np.isfinite(v).all() for v in ran.outcome.params.values())


STAY_SECONDS = 1e6  # of a learner that joins by plan: it has joined before they are over


@pytest.fixture
def joined(monkeypatch) -> list[Event]:
  """With the first event in it the supervisor's clock is where a planned stay is over."""
  events: list[Event] = []
  clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 2 * STAY_SECONDS * bool(events))
  monkeypatch.setattr(engine_module, "time", clock)
  return events


def test_a_run_whose_quorum_has_left_has_failed_and_says_why(corpus, tmp_path, capsys, joined):
  """One is given up, and one that had joined leaves by plan: the run waited for ever."""

  def kill_once_joined(event: Event) -> None:
    if event.kind == "joined" and event.role == "learner-2":
      ask_for(tmp_path, Fault("kill", "learner-1", at_seconds=0.0, seconds=-1))
      joined.append(event)

  faults = [fault("join", "learner-2", 20, seconds=STAY_SECONDS)]
  # No round has a quorum that would merge its work, and nothing waits for one.
  network = {"drain_seconds": 2.0, "give_up_seconds": 1.0}
  sections = {"chaos": {"faults": faults}, "sync": {"min_quorum": 2}, "network": network}
  config = make_config(2, steps=10**6, **sections)
  ran = Ran(config, corpus, tmp_path, stop_after=kill_once_joined)
  assert ran.outcome.reason == "failed" and ran.of("stopped", "learner-2")
  assert [e.action for e in ran.of("fault")] == ["join", "kill"]
  why = "its quorum is 2 (sync.min_quorum), the learners that are left: learner-0"
  assert ran.outcome.why == why and why in capsys.readouterr().err


def test_a_learner_that_has_left_joins_again_and_what_is_planned_for_it_strikes(
  corpus, tmp_path, joined
):
  merged, stalled = [], []

  def all_seen(event) -> bool:
    if event.kind == "joined" and event.role == "learner-2":
      joined.append(event)
      if len(joined) == 2:
        ask_for(tmp_path, Fault("stall", "learner-2", at_seconds=0.0, seconds=1.0))
    if event.kind == "stopped" and event.role == "learner-2" and len(joined) == 1:
      ask_for(tmp_path, Fault("join", "learner-2", at_seconds=0.0, seconds=-1))
    if len(joined) == 2:
      merged.extend([event] if event.kind == "commit" and 2 in event.weights else [])
      stops = event.kind == "step" and event.role == "learner-2" and event.gap_seconds > 1
      stalled.extend([event] if stops else [])
    return bool(merged and stalled)

  faults = [fault("join", "learner-2", 20, seconds=STAY_SECONDS)]
  config = make_config(2, steps=10**6, chaos={"faults": faults})
  ran = Ran(config, corpus, tmp_path, stop_after=all_seen)
  first, second = joined
  assert second.incarnation > first.incarnation and merged and stalled
  assert not ran.of("exit") and not ran.of("crash")


def poison(island: HostIsland) -> None:
  for value in island.params.values():
    value[:] = np.nan


def test_a_poisoned_island_is_rejected_quarantined_and_starts_afresh(corpus, tmp_path):
  # From step 30 on its first life makes NaN whatever it receives; its second one is well.
  trouble = [
    (1, step, lambda island: poison(island) if island.lives == 1 else None)
    for step in range(30, 2000)
  ]
  ran = Ran(make_config(steps=200), corpus, tmp_path, trouble)
  assert ran.outcome.reason == "finished"
  reasons = {r for e in ran.of("commit") + ran.of("abandoned") for r in e.rejected.values()}
  assert reasons and all("not finite" in r for r in reasons)
  assert "quarantined" in {e.state for e in ran.of("member", "syncer")}
  assert len(ran.exits("learner-1")) >= 1
  assert ran.exits("learner-1")[0].startswith("quarantined: ")
  assert ran.islands[1].lives >= 2
  assert all(np.isfinite(v).all() for v in ran.outcome.params.values())
  assert np.isfinite(ran.islands[1].params["final_norm/scale"]).all(), "it was healed"
  assert_versions_never_go_back(ran)


def test_stopping_keeps_what_is_there(corpus, tmp_path):
  faults = [fault("stall", "learner-1", 5, seconds=3600.0)]
  config = make_config(steps=10**6, chaos={"faults": faults})
  ran = Ran(config, corpus, tmp_path, stop_after=lambda e: e.kind == "step" and e.step > 60)
  assert ran.outcome.reason == "stopped", "a stall of an hour does not hold up the end"
  assert {e.reason for e in ran.of("stopped", "learner")} == {"the run was stopped"}


def test_work_that_a_stopped_run_has_not_merged_in_time_is_said_to_be_lost(corpus, tmp_path):
  config = make_config(learners=1, steps=10**6, network={"drain_seconds": 0.0})
  islands = {0: HostIsland(config, 0, initial.make_plan(config))}
  engine = ThreadsEngine(config, tmp_path, corpus, always_two, islands)
  ended = engine.run([lambda event: event.kind == "step" and engine.leave.set()])
  assert ended.reason == "stopped"
  assert re.fullmatch(r"learner-0: [1-9]\d* tokens were not merged in time", ended.lost)


def test_stopping_while_a_learner_waits_for_its_restart_is_no_failure(corpus, tmp_path):
  config = make_config(learners=1, steps=10**6, run={"restart_seconds": 3600.0})
  ran = Ran(
    config,
    corpus,
    tmp_path,
    [(0, 20, raises(OSError("cable")))],
    stop_after=lambda e: e.kind == "exit",
  )
  assert ran.outcome.reason == "stopped"


def test_lives_come_after_those_of_earlier_starts_also_if_the_clock_stepped_back(corpus, tmp_path):
  config = make_config(learners=1)
  islands = {0: HostIsland(config, 0, initial.make_plan(config))}
  engine = ThreadsEngine(config, tmp_path, corpus, None, islands)
  later = frames.seconds_since_2020() + 3600
  for earlier in (later, 7):
    engine._start_after(earlier)
    assert engine._first_incarnation == later + 1


def test_a_lone_island_is_believed_also_if_the_clock_stepped_back(corpus, tmp_path):
  """Its run stood still until the clock had come to where it was when the run began."""
  (tmp_path / STARTED).write_text(f"{time.time() + 3600}\n")
  late = lambda event: event.kind == "step" and event.step > 1000
  ran = Ran(make_config(learners=1, steps=100), corpus, tmp_path, stop_after=late)
  assert ran.outcome.reason == "finished"


def test_islands_alone_finish_without_a_syncer(corpus, tmp_path):
  config = make_config(learners=2, steps=40, sync={"num_shards": 0})
  ran = Ran(config, corpus, tmp_path, always(1))
  assert ran.outcome.reason == "finished"
  assert list(ran.outcome.island_params) == [0], "who gave up has no result"
  assert ran.steps(0) == 40
  assert not ran.of("commit") and not ran.of("push")


def test_an_island_that_has_not_joined_is_not_among_those_that_trained_alone(corpus, tmp_path):
  """If the others diverge, its initial values would be the best result."""
  late = [fault("join", "learner-2", at_step=1000)]
  config = make_config(learners=2, steps=20, sync={"num_shards": 0}, chaos={"faults": late})
  ran = Ran(config, corpus, tmp_path)
  assert [*ran.islands] == [0, 1, 2] and [*ran.outcome.island_params] == [0, 1]


def test_what_an_island_alone_loses_counts_not_as_seen(corpus, tmp_path):
  """Else the result of a start with many failures could never be replaced by a better one."""
  config = make_config(learners=2, steps=20, sync={"num_shards": 0})
  ran = Ran(config, corpus, tmp_path, [(0, 15, raises(OSError("cable")))])
  assert (ran.steps(0), ran.steps(1)) == (34, 20)
  assert ran.outcome.merged_tokens == config.run.total_tokens


@pytest.mark.parametrize("able", [True, False])
def test_large_initial_values_are_made_by_learners_that_can(corpus, tmp_path, monkeypatch, able):
  """A process reads `run.init_from`, or computes; where it cannot, the shards send the values."""
  monkeypatch.setattr(delta, "MADE_FROM", 1)
  if not able:
    monkeypatch.setattr(ThreadsEngine, "_initial_values", lambda self: {})
  # All begin with the initial values, since the first version needs all; only the evaluator may
  # come when that is there.
  ran = Ran(make_config(steps=20, sync={"min_quorum": 3}), corpus, tmp_path)
  assert ran.outcome.reason == "finished"
  said = {e.role for e in ran.of("ignored") if "has to be sent" in e.reason}
  learners = {"learner-0", "learner-1", "learner-2"}
  assert said - {"evaluator"} == (set() if able else learners)
  assert not (able and said)
