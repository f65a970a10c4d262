"""When roles start, start again, join, leave and are given up: the policy of every engine."""

import ast
import dataclasses
import math
from pathlib import Path

import pytest

import ddiloco
from ddiloco.config import Fault, RunConfig
from ddiloco.protocol.supervisor import (
  DOWN,
  GONE,
  LEFT,
  LONGEST_PAUSE_SECONDS,
  UP,
  Dismiss,
  Exited,
  Hold,
  Left,
  Lost,
  Requested,
  Start,
  Strike,
  Terminate,
  Tick,
  Working,
  after_exit,
  due,
  healthy_seconds,
  next_wake,
  pause_seconds,
)
from tests.protocol import supervised
from tests.protocol.supervised import LEARNER, RUN, SHARD, Play, for_good
from tests.worlds import check_all, struck


def lives(run: RunConfig, *worked: float) -> list[float | None]:
  """The pause after each of these lives of one role."""
  deaths, pauses = 0, []
  for seconds in worked:
    deaths, pause = after_exit(deaths, seconds, run)
    pauses.append(pause)
  return pauses


def kill(**more) -> Fault:
  return Fault("kill", LEARNER, **more)


# --- restarts -------------------------------------------------------------------------------------


def test_pauses_double_and_the_death_after_the_last_restart_gives_up():
  assert lives(RUN, *[0.0] * 6) == [1.0, 2.0, 4.0, 8.0, 16.0, None]
  assert lives(RunConfig(max_restarts=0), 0.0) == [None]


def test_the_sixth_death_in_a_month_does_not_end_the_run():
  assert lives(RUN, *[5 * 86_400.0] * 100) == [1.0] * 100


def test_a_healthy_while_resets_count_and_backoff_and_a_shorter_one_does_not():
  healthy = healthy_seconds(RUN)
  assert healthy == 160.0, "ten times the longest pause, 16 s"
  assert lives(RUN, 0, 0, 0, healthy, 0) == [1.0, 2.0, 4.0, 1.0, 2.0]
  assert lives(RUN, *[healthy - 1] * 6)[-1] is None


@pytest.mark.parametrize("seconds", [0.0, 0.05, 1.0, 30.0, 3600.0])
@pytest.mark.parametrize("restarts", [0, 1, 5, 40, 10**6])
def test_the_backoff_is_bounded(seconds, restarts):
  run = RunConfig(restart_seconds=seconds, max_restarts=restarts)
  most = max(seconds, LONGEST_PAUSE_SECONDS)
  pauses = [pause_seconds(n, run) for n in (1, 2, 3, 50, 5000, 10**6)]
  assert pauses == sorted(pauses) and pauses[0] == seconds and pauses[-1] <= most
  assert 60.0 <= healthy_seconds(run) <= 10 * most
  # Whoever is healthy between its deaths is there nine tenths of its time, however often it dies.
  assert healthy_seconds(run) >= 10 * pause_seconds(max(1, restarts), run)


def test_a_role_that_cannot_stay_up_is_given_up_also_without_any_pause():
  run = RunConfig(restart_seconds=0.0, max_restarts=3)
  assert lives(run, *[1.0] * 4) == [0.0, 0.0, 0.0, None]


# --- what is said and done ------------------------------------------------------------------------


def test_all_roles_start_at_the_first_tick_in_order_and_once():
  play = Play(SHARD, LEARNER)
  assert play(Tick(0.0)) == [Start(SHARD, 0, False), Start(LEARNER, 0, False)]
  assert play(Tick(1.0)) == []


ENDS = [  # (what is told of a life that began at 0 s, what is said, the role's phase after it)
  (Left(LEARNER), [], LEFT),
  (Exited(LEARNER, 5.0, "broken"), [Lost(LEARNER, "broken")], DOWN),
  (
    Exited(LEARNER, 5.0, "its words", kill=kill(at_step=0, seconds=4.0)),
    [Lost(LEARNER, "killed by plan, back in 4 s")],
    DOWN,
  ),
  (
    Exited(LEARNER, 5.0, kill=kill(at_step=0, seconds=0.0)),
    [Lost(LEARNER, "killed by plan, back in 0 s")],
    DOWN,
  ),
  (
    Exited(LEARNER, 5.0, kill=kill(at_step=0, seconds=-1)),
    [Lost(LEARNER, "killed by plan, for good")],
    GONE,
  ),
  (Exited("learner-9", 5.0, "nobody"), [], UP),
  (Left("learner-9"), [], UP),
  (Working("learner-9", 5.0), [], UP),
  (Requested(Fault("kill", "learner-9", at_step=0)), [], UP),
]


@pytest.mark.parametrize("event, said, phase", ENDS)
def test_what_the_end_of_a_life_leads_to(event, said, phase):
  play = Play(LEARNER)
  play(Tick(0.0))
  assert play(event) == said and play.phase() == phase
  if phase in (LEFT, GONE):
    assert next_wake(play.state) == float("inf")
    assert play(Tick(1e9)) == play(Exited(LEARNER, 1e9)) == play(Dismiss("")) == []
    assert play.phase() == phase, "who was given up has not left"


@pytest.mark.parametrize(
  "exited, back_at",
  [
    (Exited(LEARNER, 5.0), 6.0),
    (Exited(LEARNER, 5.0, kill=kill(at_step=0, seconds=4.0)), 9.0),
    (Exited(LEARNER, 0.5, kill=kill(at_step=0, seconds=0.0)), 1.1),  # two lives in one second
  ],
)
def test_a_role_is_back_when_its_pause_is_over_and_not_before(exited, back_at):
  play = Play(LEARNER, shortest_life_seconds=1.1)
  play(Tick(0.0))
  play(exited)
  assert next_wake(play.state) == back_at
  assert play(Tick(back_at - 0.01)) == []
  assert play(Tick(back_at)) == [Start(LEARNER, 1, False)]


def test_planned_kills_do_not_count_and_healthy_lives_forget():
  play, now = Play(LEARNER, run=RunConfig(restart_seconds=1.0, max_restarts=1)), 0.0
  for _ in range(5):
    play(Tick(now))
    play(Exited(LEARNER, now, kill=kill(at_step=0, seconds=0.0)))
  for _ in range(5):
    play(Tick(now))
    play(Working(LEARNER, now + 3.0))
    play(Working(LEARNER, now + 9.0))
    now += 3.0 + healthy_seconds(play.state.run)
    play(Exited(LEARNER, now))
    assert next_wake(play.state) == now + 1.0, "the first pause"
    now += 1.0
  play(Tick(now))
  play(Exited(LEARNER, now + 1e6))  # it compiled for long, and never did its work
  assert play.phase() == GONE


def test_a_bad_state_is_left_behind_once():
  play = Play(LEARNER)
  play(Tick(0.0))
  play(Exited(LEARNER, 0.0, "quarantined: not finite", afresh=True))
  assert play(Tick(1.0)) == [Start(LEARNER, 1, True)]
  play(Exited(LEARNER, 1.0))
  assert play(Tick(9.0)) == [Start(LEARNER, 2, False)]


# --- planned faults -------------------------------------------------------------------------------


def test_two_kills_that_are_due_together_take_two_lives():
  first, second = kill(at_step=10, seconds=4.0), kill(at_step=11, seconds=-1)
  play = Play(LEARNER, planned=[first, second])
  play(Tick(0.0))
  assert play(Tick(1.0, global_step=9)) == []
  assert play(Tick(1.0, global_step=11)) == [Strike(first)]
  assert play(Tick(1.5, global_step=11)) == [], "the second kill is for its next life"
  assert play(Exited(LEARNER, 2.0, "killed by SIGKILL")) == [
    Lost(LEARNER, "killed by plan, back in 4 s")
  ]
  assert play(Tick(5.9, global_step=11)) == []
  assert play(Tick(6.0, global_step=11)) == [Start(LEARNER, 1, False)]
  assert play(Tick(6.1, global_step=11)) == [Strike(second)]
  play(Exited(LEARNER, 6.2))
  assert play.phase() == GONE
  join = Fault("join", LEARNER, at_step=12)
  play(Requested(join))
  assert play(Tick(9.0, global_step=12)) == [Strike(join), Start(LEARNER, 2, False)]


def test_a_fault_waits_for_a_role_that_is_down_and_may_be_asked_for_later():
  drop, later = Fault("drop", LEARNER, at_seconds=0.0), Fault("drop", LEARNER, at_step=9)
  play = Play(LEARNER, planned=[later])
  play(Tick(0.0))
  play(Exited(LEARNER, 0.0))
  play(Requested(drop))
  assert play(Tick(0.5)) == [] and play(Tick(1.0)) == [Start(LEARNER, 1, False)]
  assert play(Tick(1.1)) == [Strike(drop)] and play(Tick(1.2)) == []
  assert play(Tick(1.3, global_step=9)) == [Strike(later)], "it is still planned"


def test_a_stalled_role_is_held_let_go_and_heard_when_it_should_end():
  stall = Fault("stall", LEARNER, at_step=5, seconds=2.0)
  play = Play(LEARNER, planned=[stall, dataclasses.replace(stall, at_step=6, seconds=1e6)])
  play(Tick(0.0))
  assert play(Tick(10.0, global_step=5)) == [Strike(stall), Hold(LEARNER, True)]
  assert next_wake(play.state) == 12.0 and play(Tick(11.9, global_step=5)) == []
  assert play(Tick(12.0, global_step=5)) == [Hold(LEARNER, False)]
  play(Tick(13.0, global_step=6))
  assert play(Dismiss("learner-")) == [Terminate(LEARNER)]
  assert play(Tick(2e6, global_step=6)) == [] and next_wake(play.state) == math.inf


def test_a_short_stall_inside_a_long_one_does_not_end_it():
  long = Fault("stall", LEARNER, at_step=5, seconds=9.0)
  play = Play(LEARNER, planned=[long, dataclasses.replace(long, at_step=6, seconds=1.0)])
  play(Tick(0.0))
  play(Tick(10.0, global_step=5))
  play(Tick(11.0, global_step=6))
  assert next_wake(play.state) == 19.0 and play(Tick(18.9, global_step=6)) == []
  assert play(Tick(19.0, global_step=6)) == [Hold(LEARNER, False)]


def test_a_new_life_is_not_held_for_what_the_last_one_suffered():
  play = Play(LEARNER, planned=[Fault("stall", LEARNER, at_step=0, seconds=1e6)])
  play(Tick(0.0, global_step=-1))
  play(Tick(0.0))
  play(Exited(LEARNER, 1.0))
  assert play(Tick(2.0)) == [Start(LEARNER, 1, False)] and play(Tick(2.1)) == []


def test_faults_are_due_by_step_or_by_time():
  late, by_time, early = kill(at_step=50), kill(at_seconds=3.0), kill(at_step=5)
  plan = (late, by_time, early)
  assert not any(due(fault, global_step=4, seconds=2.9) for fault in plan)
  assert [due(fault, global_step=5, seconds=0.0) for fault in plan] == [False, False, True]
  assert [due(fault, global_step=5, seconds=3.0) for fault in plan] == [False, True, True]


# --- joins, departures, the end -------------------------------------------------------------------


def test_a_learner_joins_and_is_asked_to_leave_also_when_it_has_died_meanwhile():
  join = Fault("join", "learner-7", at_step=20, seconds=10.0)
  fault = Fault("drop", "learner-7", at_step=25)
  play = Play(LEARNER, planned=[join, fault])
  play(Tick(0.0))
  assert play(Tick(3.0, global_step=20)) == [Strike(join), Start("learner-7", 0, False)]
  assert play(Tick(4.0, global_step=25)) == [Strike(fault)]
  assert next_wake(play.state) == 13.0
  assert play(Tick(13.0, global_step=30)) == [Terminate("learner-7")]
  assert play(Tick(14.0, global_step=30)) == [] and next_wake(play.state) == math.inf
  play(Exited("learner-7", 15.0))
  assert play(Tick(16.0, global_step=30)) == [Start("learner-7", 1, False)]
  assert play(Tick(16.1, global_step=30)) == [Terminate("learner-7")]
  assert play(Left("learner-7")) == []


def test_a_learner_that_joins_for_good_is_not_asked_to_leave():
  play = Play(LEARNER, planned=[Fault("join", "learner-7", at_step=20, seconds=-1)])
  assert play(Tick(3.0, global_step=20))[-1] == Start("learner-7", 0, False)
  assert play(Tick(1e6, global_step=25)) == [] and next_wake(play.state) == math.inf
  play(Requested(Fault("join", "learner-8", at_step=20, seconds=0.0)))
  play(Tick(1e6, global_step=25))
  assert play(Tick(1e6, global_step=25)) == [Terminate("learner-8")], "that one is to go again"


@pytest.mark.parametrize("end", [Left("learner-7"), for_good("learner-7", 15.0)])
def test_a_learner_that_has_left_or_is_gone_may_join_again(end):
  """Its second join was dropped without a word."""
  join = Fault("join", "learner-7", at_step=20, seconds=10.0)
  again = dataclasses.replace(join, at_step=40, seconds=5.0)
  play = Play(LEARNER, planned=[join, again], shortest_life_seconds=1.1)
  play(Tick(0.0))
  play(Tick(3.0, global_step=20))
  play(Exited("learner-7", 12.0))
  play(Tick(14.5, global_step=25))
  play(end)
  assert play(Tick(15.0, global_step=30)) == []
  assert play(Tick(15.1, global_step=40)) == [Strike(again)], "too soon after its last start"
  assert play(Tick(15.6, global_step=40)) == [Start("learner-7", 2, False)]
  assert play(Tick(19.0, global_step=50)) == [] and play.state.roles["learner-7"].deaths == 0
  assert play(Tick(20.1, global_step=50)) == [Terminate("learner-7")], "by its second plan"


def test_a_learner_joins_again_once_it_has_left():
  joins = [Fault("join", "learner-7", at_step=step, seconds=9.0) for step in (20, 30)]
  play = Play(LEARNER, planned=joins)
  play(Tick(0.0))
  play(Tick(1.0, global_step=20))
  assert play(Tick(10.0, global_step=29)) == [Terminate("learner-7")]
  assert play(Tick(11.0, global_step=30)) == [], "it brings out what it has"
  play(Left("learner-7"))
  assert play(Tick(12.0, global_step=31)) == [Strike(joins[1]), Start("learner-7", 1, False)]


def test_who_is_here_cannot_join():
  play = Play(LEARNER, planned=[Fault("join", LEARNER, at_step=5)])
  play(Tick(0.0))
  assert play(Tick(1.0, global_step=5)) == [] and not play.state.planned


def test_no_learner_joins_a_run_that_ends():
  """It was started while the others brought out their work, and not asked to end."""
  joins = [Fault("join", name, at_seconds=9.0) for name in ("learner-4", "learner-7")]
  play = Play(LEARNER, "learner-4", planned=joins)
  play(Tick(0.0))
  play(Left("learner-4"))
  play(Dismiss("learner-"))
  assert play(Tick(9.0, seconds=9.0)) == []


def test_who_is_dismissed_does_not_come_back():
  play = Play(SHARD, LEARNER, "learner-4")
  play(Tick(0.0))
  play(Exited("learner-4", 0.5))
  assert play(Dismiss("learner-")) == [Terminate(LEARNER)]
  assert play.phase("learner-4") == LEFT
  assert play(Exited(LEARNER, 1.0, "crashed")) == [Lost(LEARNER, "crashed")]
  assert play.phase() == LEFT
  play(Exited(SHARD, 1.0))
  assert play(Tick(9.0)) == [Start(SHARD, 1, False)], "learners still bring out their work"
  assert play(Dismiss("syncer-")) == [Terminate(SHARD)]
  play(Requested(Fault("join", LEARNER, at_step=0)))
  assert play(Tick(99.0)) == [], "learners do not join again then"


@pytest.mark.parametrize(
  "quorum, gone, reason",
  [
    (1, ["learner-0"], ""),
    (2, ["learner-0"], "its quorum is 2 (sync.min_quorum), the learners that are left: learner-1"),
    (
      1,
      ["learner-0", "learner-1"],
      "its quorum is 1 (sync.min_quorum), the learners that are left: none",
    ),
    (0, [SHARD], "syncer-0 is gone for good"),
    (1, ["evaluator"], ""),
  ],
)
def test_a_run_is_hopeless_without_a_shard_or_a_quorum_and_why_is_known(quorum, gone, reason):
  play = Play(SHARD, "learner-0", "learner-1", "evaluator", quorum=quorum)
  play(Tick(0.0))
  for name in gone:
    play(for_good(name, 1.0))
  hopeless = play.state.hopeless
  assert hopeless.startswith(reason) and bool(hopeless) == bool(reason)
  for name in ("syncer-0", "learner-1"):
    play(for_good(name, 2.0))
  assert play.state.hopeless == (hopeless or play.state.hopeless), "the first reason stays"


def test_a_run_whose_quorum_has_left_is_hopeless_after_a_while():
  """At first all may be merged, which the evaluator has still to hear."""
  play = Play("learner-0", "learner-1", "learner-2", quorum=2, patience_seconds=10.0)
  play(Tick(0.0))
  play(Left("learner-0"))
  play(Tick(20.0))
  assert not play.state.hopeless
  play(for_good("learner-1", 21.0))
  play(Tick(30.9))
  assert not play.state.hopeless, "learner 0 may have left since all is merged"
  play(Requested(Fault("join", "learner-0", at_seconds=0.0)))
  play(Tick(30.95))
  play(Tick(60.0))
  assert not play.state.hopeless, "they are enough again"
  play(Left("learner-0"))
  play(Tick(61.0))
  play(Tick(71.0))
  assert play.state.hopeless.endswith("the learners that are left: learner-2")


def test_an_evaluator_is_never_given_up_since_no_other_role_writes_the_result():
  """After half a minute without memory, say, the model of a month was not saved."""
  play, now, pauses = Play(LEARNER, "evaluator"), 0.0, []
  for _ in range(3 * RUN.max_restarts):
    play(Tick(now))
    play(Exited("evaluator", now))
    assert play.phase("evaluator") == DOWN
    pauses.append(play.state.roles["evaluator"].start_at - now)
    now += pauses[-1]
  assert pauses[:2] == [1.0, 2.0], "at first like any other"
  assert play.state.roles["evaluator"].deaths > RUN.max_restarts
  play(Tick(now))
  play(Exited("evaluator", now))
  assert play.state.roles["evaluator"].start_at == now + LONGEST_PAUSE_SECONDS


def test_a_learner_that_left_is_still_counted_and_one_that_joined_counts_too():
  play = Play("learner-0", "learner-1", quorum=2)
  play(Tick(0.0))
  play(Left("learner-0"))
  play(Requested(Fault("join", "learner-2", at_seconds=0.0, seconds=-1)))
  play(Tick(1.0))
  assert play(for_good("learner-1", 1.0)) == [Lost("learner-1", "killed by plan, for good")]


@pytest.mark.parametrize("block", range(4))
def test_no_role_is_lost_and_none_started_twice(block):
  counted = check_all(supervised.check, range(block * 75, block * 75 + 75))
  assert struck(counted, supervised.KINDS), counted


def test_the_policy_is_written_once():
  """`run.max_restarts` and `run.restart_seconds` are read by the policy alone."""
  readers = set()
  for path in Path(ddiloco.__file__).parent.rglob("*.py"):
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.Attribute) and node.attr in ("max_restarts", "restart_seconds"):
        readers.add(f"{path.parent.name}/{path.name}")
  # What is launched is restarted by Kubernetes and Docker, which have a limit of their own.
  readers -= {"launch/gke.py", "launch/tpu_vms.py"}
  assert readers == {"protocol/supervisor.py"}
