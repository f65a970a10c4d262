"""Data-parallel over real processes: it trains like one island, and comes through kills."""

import contextlib
import itertools
import os
import shutil
import signal
import sys
import time

import jax
import numpy as np
import pytest
from common import processes_of

from ddiloco.baselines import data_parallel, member
from ddiloco.baselines.data_parallel import DataParallel
from ddiloco.baselines.member import PROGRAMS
from ddiloco.config import ConfigError
from ddiloco.core.fragments import Plan
from ddiloco.engines.children import Child, spawn
from ddiloco.observe.eventlog import Follower, Recorder, read_events
from ddiloco.observe.goodput import Ledger
from ddiloco.protocol.supervisor import Tick
from ddiloco.roles import initial
from ddiloco.training import data
from ddiloco.training.island import Island
from tests.engines.real import tiny

STEPS = 12
CHECKPOINT_STEPS = 5
ALONE = 20  # steps of the island that is left: a second, longer than starts differ
AFTERWARDS = 8  # steps after everybody is back


def make_config(faults=(), batch_size=4, learners=2, min_step_seconds=0.05, **islands):
  islands |= {"num_learners": learners, "batch_size": batch_size}
  return tiny(
    100 * batch_size // 2,
    learners,
    islands={"min_step_seconds": min_step_seconds, **islands},
    sync={"snapshot_steps": CHECKPOINT_STEPS},
    chaos={"faults": list(faults)},
  )


def kill(learner, at_seconds, seconds=0.5):
  return {
    "action": "kill", "role": f"learner-{learner}", "at_seconds": at_seconds, "seconds": seconds
  }  # fmt: skip


class Back:
  """`over`: all that were killed are back, and the world has made some more steps."""

  def __init__(self, workdir, kills, learners=2):
    self.kills, self.learners = kills, learners
    self.follower = Follower(workdir)
    self.killed, self.killed_at = 0, 0.0
    self.after: dict[str, int] = {}

  def __call__(self, global_step, seconds):
    for event in self.follower.poll():
      if event.kind == "fault":
        self.killed, self.killed_at = self.killed + 1, event.time
        self.after = {}
      elif event.kind == "step" and self.killed == self.kills and event.time > self.killed_at:
        self.after[event.role] = self.after.get(event.role, 0) + 1
    # One more than is asked for: the end kills one island before the other, within a step.
    return len(self.after) == self.learners and min(self.after.values()) > AFTERWARDS


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
  """What one test has compiled, for the others."""
  return tmp_path_factory.mktemp("programs")


def run(config, workdir, programs, elastic, over):
  """The events of a run, in order of time."""
  shutil.copytree(programs, workdir / PROGRAMS)
  assert DataParallel(config, workdir, elastic).run(over) == "finished"
  shutil.copytree(workdir / PROGRAMS, programs, dirs_exist_ok=True)
  assert not processes_of(workdir)
  return read_events(workdir)


def ledger_of(events):
  ledger = Ledger()
  for event in events:
    ledger.take(event)
  report = ledger.report()
  assert report.goodput + sum(report.causes.values()) == pytest.approx(1.0)
  return report


def of(events, kind, **fields):
  return [
    e for e in events if e.kind == kind and all(getattr(e, k, None) == v for k, v in fields.items())
  ]


@pytest.mark.slow
def test_two_processes_train_like_one_with_both_batches(tmp_path, programs):
  config = make_config(min_step_seconds=0.0)
  events = run(config, tmp_path, programs, False, lambda global_step, _: global_step >= STEPS)
  losses = []
  for m in range(2):
    steps = of(events, "step", role=f"learner-{m}")[:STEPS]
    assert [e.step for e in steps] == list(range(1, STEPS + 1))
    losses.append([(e.loss, e.grad_norm) for e in steps])
  assert losses[0] == losses[1], "all replicas see the same loss, over both batches"

  both = make_config(batch_size=8, learners=1)
  assert both.planned_steps() == config.planned_steps()
  island = Island(both, 0, jax.devices()[:1], Plan(()))
  island.load(initial.initial_params(config))
  corpus = data.open_corpus(config.data)
  streams = [data.Stream(corpus, config, m) for m in range(2)]
  alone = []
  for step in range(STEPS):
    metrics = island.step(np.concatenate([s.batch(step) for s in streams]), step)
    alone.append((metrics["loss"], metrics["grad_norm"]))
  np.testing.assert_allclose(losses[0], alone, rtol=2e-4)
  assert losses[0][-1][0] < losses[0][0][0] - 0.1, "it learns"


@pytest.mark.slow
def test_elastic_goes_on_without_the_killed_island_and_takes_it_in_again(
  tmp_path, programs, monkeypatch
):
  over = Back(tmp_path, kills=1)

  decide = DataParallel._decide

  def decide_late(runner, now):
    """The killed one is not seen to be back until the other has trained without it."""
    late = over.killed and over.after.get("learner-0", 0) < ALONE
    hidden = runner._alive & {1} if late else set()
    runner._alive -= hidden
    decide(runner, now)
    runner._alive |= hidden

  monkeypatch.setattr(DataParallel, "_decide", decide_late)
  events = run(make_config([kill(1, 1.0)]), tmp_path, programs, True, over)
  (fault,) = of(events, "fault")
  (back,) = of(events, "restart", target="learner-1")
  returned = next(e for e in of(events, "step", role="learner-1") if e.time > back.time)
  steps = of(events, "step", role="learner-0")
  between = [e for e in steps if fault.time < e.time < returned.time]
  assert len(between) >= ALONE, "the other one trained meanwhile"
  steps = [e.step for e in of(events, "step", role="learner-0")]
  assert sum(b <= a for a, b in itertools.pairwise(steps)) <= 1, "at most the one under way, twice"
  assert returned.step > between[0].step, "it is given the state of the other"
  losses = {e.step: e.loss for e in of(events, "step", role="learner-0")}
  # Since its return: a last step before its death may be one that the survivor made again, alone.
  mine = [e for e in of(events, "step", role="learner-1") if e.time > back.time]
  both = [e for e in mine if e.step in losses]  # the end may have cut one off
  assert len(both) >= AFTERWARDS
  assert [e.loss for e in both] == [losses[e.step] for e in both], "replicas agree"
  report = ledger_of(events)
  survivor, killed = report.learners[0], report.learners[1]
  assert survivor.liveness > killed.liveness and min(survivor.goodput, killed.goodput) > 0


@pytest.mark.slow
def test_inelastic_waits_for_the_killed_island_and_repeats_steps(tmp_path, programs):
  config = make_config([kill(1, 1.0)])
  events = run(config, tmp_path, programs, False, Back(tmp_path, kills=1))
  (died,) = of(events, "exit", target="learner-1")
  restart = of(events, "restart", target="learner-0")[0]
  before = max(e.step for e in of(events, "step") if e.time < died.time)
  pause = [e for e in of(events, "step") if died.time + 0.5 < e.time < restart.time]
  assert not pause, "nobody trains without the killed island"
  first = [
    next(e.step for e in of(events, "step", role=f"learner-{m}") if e.time > restart.time)
    for m in range(2)
  ]
  check_checkpoint(first, before)
  report = ledger_of(events)
  assert report.uptime < 0.9 and report.causes["down"] > 0 and report.causes["discarded"] > 0
  losses = {}
  for e in of(events, "step"):  # also those that were made twice
    assert e.loss == pytest.approx(losses.setdefault(e.step, e.loss), rel=1e-4)


def check_checkpoint(first, before):
  """The steps that the islands began again with are those after the newest checkpoint."""
  assert len(set(first)) == 1 and first[0] % CHECKPOINT_STEPS == 1
  assert 0 <= before - (first[0] - 1) <= CHECKPOINT_STEPS  # 5: killed just before writing it


@pytest.mark.slow
def test_elastic_that_lost_all_memories_goes_on_from_its_checkpoint(tmp_path, programs):
  both = [kill(m, -1.0) | {"at_step": 3 * CHECKPOINT_STEPS} for m in range(2)]
  config = make_config(both)
  events = run(config, tmp_path, programs, True, Back(tmp_path, kills=2))
  died = max(e.time for e in of(events, "fault"))
  before = max(e.step for e in of(events, "step") if e.time < died)
  again = next(e.step for e in of(events, "step") if e.time > died + 0.4)
  assert before > CHECKPOINT_STEPS
  check_checkpoint([again], before)
  ledger_of(events)


@pytest.mark.slow
def test_a_world_that_hangs_is_ended(tmp_path, programs, monkeypatch):
  """A process that stands still holds the others up in a collective, until somebody looks."""
  monkeypatch.setattr(data_parallel, "HANG_SECONDS", 10.0)
  follower, stopped, again = Follower(tmp_path), [], []

  def over(global_step, seconds):
    for event in follower.poll():
      if event.kind == "exit":
        again.append(event)
    if global_step >= STEPS and not stopped:
      stopped.append(max(processes_of(tmp_path)))
      os.kill(stopped[0], signal.SIGSTOP)
    return bool(again) and global_step >= 2 * STEPS

  events = run(make_config(), tmp_path, programs, True, over)
  assert [e.reason for e in of(events, "exit")][:2] == 2 * ["the world hangs"]
  assert not of(events, "fault") and stopped[0] not in processes_of(tmp_path)
  ledger_of(events)


@pytest.mark.slow
def test_a_process_killed_from_outside_is_its_islands_death(tmp_path, programs):
  """As a planned kill is: the supervisor starts the island again."""
  follower, killed, back = Follower(tmp_path), [], []

  def over(global_step, seconds):
    back.extend(e for e in follower.poll() if e.kind == "restart" and e.target == "learner-1")
    if global_step >= STEPS and not killed:
      killed.extend(processes_of(tmp_path, "--learner=1"))
      os.kill(killed[0], signal.SIGKILL)
    return bool(back) and global_step >= 2 * STEPS

  events = run(make_config(), tmp_path, programs, True, over)
  death, *survivors = of(events, "exit")
  assert len(killed) == 1 and death.target == "learner-1" and "SIGKILL" in death.reason
  assert survivors[0].reason == "learner-1 is gone"
  ledger_of(events)


class Ends:
  """An island whose process ends with these statuses, one for each look; None while it runs."""

  log = "its log"

  def __init__(self, name, statuses):
    self.name, self.statuses = name, list(statuses)

  def poll(self):
    return self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]

  def bury(self, status):
    return f"status {status}"

  def kill(self):
    pass

  def last_words(self):
    return "some"


def test_a_kill_counts_before_the_failures_it_caused(tmp_path):
  """A survivor may be seen to fail before the killed process's status is there."""
  runner = DataParallel(make_config(), tmp_path, elastic=True)
  runner._islands = [Ends("learner-0", [-signal.SIGABRT]), Ends("learner-1", [None, -9])]
  runner._world, runner._alive = (0, 1), {0, 1}
  with Recorder(tmp_path, "engine", 0, 0.0, lambda: 0.0) as runner._recorder:
    runner._feed(Tick(99.0))
    runner._look(100.0)
    runner._look(100.1)
  death, survivor = of(read_events(tmp_path), "exit")
  assert (death.target, death.reason) == ("learner-1", "status -9")
  assert (survivor.target, survivor.reason) == ("learner-0", "learner-1 is gone")


@pytest.mark.parametrize("elastic", [True, False])
def test_a_world_is_of_all_that_live_or_of_all_there_are(elastic, tmp_path, monkeypatch):
  runner, began = DataParallel(make_config([kill(1, 5.0)]), tmp_path, elastic), time.monotonic()
  runner._islands = [Ends(f"learner-{m}", [None]) for m in range(2)]
  worlds = []
  monkeypatch.setattr(runner, "_tell", lambda members, train: worlds.append(members))
  with Recorder(tmp_path, "engine", 0, 0.0, lambda: 0.0) as runner._recorder:
    for at, runner._global_step in (0.0, 0), (4.0, 7), (5.0, 7), (6.0, 7):
      runner._feed(Tick(began + at, runner._global_step, at))
      runner._decide(began + at)
    assert worlds == ([(0, 1), (0,), (0, 1)] if elastic else [(0, 1), (0, 1)])
    with pytest.raises(RuntimeError, match="hangs, for the 11th time"):
      for n in itertools.count():
        runner._decide(began + 6.0 + n * (data_parallel.HANG_SECONDS + 1.0))
  assert len(worlds) == (13 if elastic else 12)
  reasons = [e.reason for e in of(read_events(tmp_path), "exit")]
  assert reasons[0].startswith("killed by plan") and reasons[1] == "learner-1 is gone"
  assert ("an island is back" in reasons) == elastic and reasons[-1] == "the world hangs"


@pytest.mark.parametrize("elastic", [True, False])
def test_an_island_that_is_gone_for_good_ends_a_run_that_needs_it(elastic, tmp_path):
  runner = DataParallel(make_config([kill(1, 5.0, -1)]), tmp_path, elastic)
  runner._islands = [Ends(f"learner-{m}", [None]) for m in range(2)]
  with Recorder(tmp_path, "engine", 0, 0.0, lambda: 0.0) as runner._recorder:
    for at in (0.0, 4.0, 5.0):
      assert not runner._state.hopeless
      runner._feed(Tick(at, 7, at))
  assert runner._alive == {0} and bool(runner._state.hopeless) != elastic


@pytest.mark.parametrize("compiles", [True, False])
def test_what_counts_of_a_process_that_compiles_is_the_program(compiles, tmp_path, monkeypatch):
  """The first of them that ends takes the others' meeting along, and they may abort."""
  config = make_config()
  program = member.program(tmp_path / PROGRAMS, config, size=2)
  program.parent.mkdir()
  member.save(member.folder(tmp_path, member.CHECKPOINT), 0, {})

  def command(workdir, learner, order):
    if compiles:
      program.touch()
    return [sys.executable, "-c", "import os; os.abort()"]

  monkeypatch.setattr(member, "command", command)
  runner = DataParallel(config, tmp_path, elastic=False)
  runner._started = 0.0
  runner._islands = [Child(f"learner-{m}", tmp_path, [spawn]) for m in range(2)]
  with contextlib.nullcontext() if compiles else pytest.raises(RuntimeError, match="not compiled"):
    runner._prepare()
  assert not any(island.running for island in runner._islands)


@pytest.mark.parametrize(
  ("wrong", "says"),
  [
    ({"devices": 2}, "of one device each"),
    ({"overrides": {"1": {"batch_size": 2}}}, "all alike"),
    ({"faults": [{"action": "stall", "role": "learner-1", "at_step": 3}]}, "stall of learner-1"),
    ({"faults": [{"action": "kill", "role": "syncer-0", "at_step": 3}]}, "kill of syncer-0"),
  ],
)
def test_what_data_parallel_cannot_have_is_refused(wrong, says, tmp_path):
  with pytest.raises(ConfigError, match=says):
    DataParallel(make_config(**wrong), tmp_path, elastic=True)
