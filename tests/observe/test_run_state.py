"""The fold of events into what is shown: golden sequences, and that it is pure."""

from __future__ import annotations

import math
import re

import pytest

from ddiloco.dashboard.status import status
from ddiloco.observe.islands import RECENT_COMMITS
from ddiloco.observe.run_state import RECENT_LOG_EVENTS, RunState, note_of
from ddiloco.observe.style import clock_time, compact, island_colour, percent
from ddiloco.protocol import events
from ddiloco.protocol.events import Odd
from tests.made_events import changed, made
from tests.observe.conftest import fold


def _states(events, learner):
  """The learner's states in order, repeats left out."""
  view, states = RunState(), []
  for event in events:
    view.add(event)
    state = view.islands[learner].state
    if not states or states[-1] != state:
      states.append(state)
  return states


def test_the_life_of_a_killed_island(run_events):
  assert _states(run_events, 2) == [
    "starting",
    "joining",
    "running",
    "lost",
    "restarting",
    "joining",
    "running",
    "left",
  ]
  assert _states(run_events, 0) == ["starting", "joining", "running", "left"]


def test_numbers_of_a_whole_run(run_events):
  view = fold(run_events)
  steps = [event for event in run_events if event.kind == "step"]
  mine = [event for event in steps if event.role == "learner-2"]
  island = view.islands[2]
  assert island.tokens == sum(event.tokens for event in mine)
  assert (island.step, island.global_step, island.incarnation) == (
    mine[-1].step,
    mine[-1].global_step,
    1,
  )
  assert sum(shard.commits for shard in view.shards.values()) == sum(
    event.kind == "commit" for event in run_events
  )
  assert sum(shard.rejected for shard in view.shards.values()) == 1
  assert view.finished == "all tokens merged"
  assert view.time == run_events[-1].time
  assert view.tokens_done == sum(view.merged_tokens.values()) / 4


def test_what_keeps_many_roles_out_of_a_snapshot_is_noted_once(make):
  """Thirteen lines for each snapshot, with a disk that stayed full."""
  full = "[Errno 28] No space left on device: '/run/00000020/{}'"
  view = RunState()
  for n in (20, 40):
    for role in ("syncer-0", "learner-0", "learner-1"):
      view.add(make.event(1.0, role, "unsaved", snapshot=n, reason=full.format(role)))
    view.add(make.event(1.0, "learner-2", "unsaved", snapshot=n, reason="not done yet"))
  first = f"shard 0 is not in snapshot 20: {full.format('syncer-0')}"
  notes = [first, "island 2 is not in snapshot 20: not done yet"]
  assert [e.text for e in view.log_events] == notes + [n.replace("hot 20", "hot 40") for n in notes]


def test_kill_and_rejoin_are_noted(make):
  events = [
    make.run_started(),
    make.event(0.5, "learner-2", "joined", global_step=0, seconds=0.2),
    make.event(2.0, "engine", "fault", target="learner-2", action="kill", detail="back after 5 s"),
    make.event(2.0, "engine", "exit", target="learner-2", reason="killed by plan"),
    make.event(4.0, "syncer-0", "member", learner=2, state="lost", reason="silent"),
    make.event(7.0, "engine", "restart", target="learner-2"),
    make.event(7.1, "learner-2", "started", 1, devices=1, mesh=[1, 1, 1], batch_size=8),
    make.event(7.5, "learner-2", "joined", 1, global_step=30, seconds=0.4),
    make.step(7.9, 2, 31, incarnation=1),
    *(
      make.event(7.9, "learner-2", "compiled", 1, target="learner-2", program=name, seconds=seconds)
      for name, seconds in (("", 0.1), ("tiny", 0.1), ("evaluate", 3.0))
    ),
    make.commit(8.0, weights={0: 0.5, 2: 0.5}),
    make.commit(9.0, weights={0: 0.5, 2: 0.5}),
  ]
  noted = []
  view = RunState(noted=noted.append).read(events)
  assert list(view.log_events) == noted
  assert [(note.time, note.text) for note in noted] == [
    (0.5, "island 2 joined at global step 0 after 0.2 s"),
    (2.0, "island 2: planned kill (back after 5 s)"),
    (2.0, "island 2 is down: killed by plan"),
    (7.0, "island 2 restarts"),
    (7.5, "island 2 joined at global step 30 after 0.4 s"),
    (7.9, "island 2 is compiled after 0 s"),
    (7.9, "island 2 compiled evaluate in the middle of its work: 3.0 s"),
    (8.0, "island 2 is merged again"),
  ]
  assert view.islands[2].missed_reason == "silent"


def test_participation_counts_the_recent_commits(make):
  view = fold([make.run_started(num_learners=3)])
  for number in range(RECENT_COMMITS + 10):
    there = {0: 1.0} if number % 4 else {0: 0.5, 1: 0.5}
    view.add(make.commit(float(number), weights=there, missing={2: "no answer"}))
  assert view.islands[0].participation == 1.0
  assert view.islands[1].participation == 0.25
  assert view.islands[2].participation == 0.0
  assert len(view.islands[2].took_part) == RECENT_COMMITS
  assert (view.islands[2].missed_reason, view.islands[2].missed_time) == ("no answer", 41.0)
  assert math.isnan(fold([make.run_started()]).islands[0].participation)
  view.add(make.event(50.0, "learner-1", "stopped", reason="all is merged"))
  for number in range(RECENT_COMMITS):
    view.add(make.commit(51.0 + number, weights={0: 1.0}))
  assert view.islands[1].participation == 0.25, "it has left, and misses none"


@pytest.mark.parametrize("name", ["agreement", "rho", "length"])
def test_outer_gradients_are_means_of_the_recent_commits_that_could_compare(make, name):
  run = RunState()
  assert math.isnan(run.outer_gradients[name])
  for number in range(RECENT_COMMITS + 10):
    run.add(make.commit(float(number), **{name: 9 if number < 10 else 2}))
  run.add(make.commit(99.0, weights={0: 1.0}))
  for odd in (math.nan, math.inf, -math.inf):
    run.add(make.commit(99.0, **{name: odd}))
  assert run.outer_gradients[name] == 2
  curve = run.curves.page.means(name)
  assert curve[0] == 9 and curve[-1] == 2


def test_learner_numbers_may_be_text_as_json_makes_them(make):
  commit = make.commit(
    1.0, weights={"0": 0.5, "1": 0.5}, rejected={"2": "norm 9"}, missing={"3": "slow"}
  )
  view = fold([make.run_started(), commit])
  assert [list(view.islands[m].took_part) for m in range(4)] == [[True], [True], [False], [False]]
  assert [view.islands[m].missed_reason for m in (2, 3)] == ["norm 9", "slow"]
  assert view.shards[0].rejected == 1
  assert view.log_events[-1].text == "push of island 2 rejected: norm 9"


def test_silence_is_a_stall_only_once_it_steps(make):
  joined = make.event(1.0, "learner-0", "joined", global_step=0, seconds=0.5)
  view = fold([make.run_started(), joined])
  # Its first step may be slow, or load programs: after a minute it was shown as stalled.
  assert view.islands[0].state_at(600.0) == "running"
  assert view.islands[0].state_at(902.0) == "stalled"
  # On an accelerator it is only begun when it is logged.
  view = view.read([make.step(21.0, 0, 1, seconds=0.01)])
  assert view.islands[0].state_at(620.0) == "running"
  view = view.read([make.step(621.1, 0, 2, seconds=0.5)])
  assert view.islands[0].spans(622.0, 622.0) == [[0.0, 1.0, "joining"], [1.0, 622.0, "running"]]
  assert view.islands[0].state_at(626.0) == "running"  # ten steps of half a second
  assert view.islands[0].state_at(626.2) == "stalled"
  assert view.read([make.step(627.0, 0, 3)]).islands[0].state_at(627.5) == "running"


def test_an_island_whose_clock_is_behind_is_not_silent(make):
  """It was shown as stalled from beginning to end, and its speed left out."""
  view = fold([make.run_started()])
  for n in range(1, 6):  # each read a second after the one before
    view.read([make.step(90.0 + n, 0, n, tokens=100), make.step(100.0 + n, 1, n, tokens=100)])
  assert [view.islands[m].state_at(105.5) for m in range(2)] == ["running", "running"]
  assert view.speed(105.5).tokens_per_second == pytest.approx(200)
  assert [view.islands[m].state_at(108.5) for m in range(2)] == ["stalled", "stalled"]


def test_a_planned_stall_shows_at_once_and_ends_with_the_next_step(make):
  fault = make.event(2.0, "engine", "fault", target="learner-0", action="stall", detail="")
  # The step that it strikes after may be read later: in virtual time it ends at the same time.
  view = fold([make.run_started(), make.step(1.9, 0, 1), fault, make.step(2.0, 0, 2)])
  assert view.islands[0].state == "stalled"
  assert view.read([make.step(7.0, 0, 3)]).islands[0].state == "running"
  cut = make.changed(fault, time=8.0, action="cut")
  assert view.read([cut]).islands[0].state == "running", "it trains on"


def test_a_quarantined_island_stays_so_until_it_rejoins(make):
  member = make.event(2.0, "syncer-1", "member", learner=0, state="quarantined", reason="3 bad")
  view = fold([make.run_started(), make.step(1.9, 0, 1), member, make.step(2.1, 0, 2)])
  assert view.islands[0].state == "quarantined"
  joined = make.event(3.0, "learner-0", "joined", 1, global_step=9, seconds=0.1)
  assert view.read([joined]).islands[0].state == "running"


def test_lost_to_a_shard_while_it_steps_is_a_reason_not_a_state(make):
  events = [make.run_started(), make.step(1.8, 0, 1), make.step(1.9, 0, 2)]
  member = make.event(2.0, "syncer-1", "member", learner=0, state="lost", reason="cut off")
  island = fold([*events, member]).islands[0]
  assert (island.state, island.missed_reason, island.missed_time) == ("running", "cut off", 2.0)
  late = make.changed(member, time=30.0)
  assert fold([*events, late]).islands[0].state == "lost"
  assert fold([*events, make.changed(late, state="ahead")]).islands[0].state == "running"
  joins = make.event(3.0, "learner-0", "started", 1)
  assert fold([*events, joins, late]).islands[0].state == "joining"


def test_both_shards_tell_of_one_loss_in_one_note(make):
  """Each has its own seconds of silence, so each loss was noted once for each shard."""
  events = [
    make.event(
      *(2.0 + shard / 10, f"syncer-{shard}", "member"),
      **{"learner": 1, "state": "lost", "reason": f"silent for 3.0{shard} s"},
    )
    for shard in range(2)
  ]
  view = fold([make.run_started(), *events])
  (note,) = view.log_events
  assert note.text == "the syncer counts island 1 as lost: silent for 3.00 s"
  assert len(view.read([make.changed(events[0], time=60.0)]).log_events) == 2, "of another loss"


def test_the_end_of_a_cut_is_noted_as_its_beginning_is(make):
  """What happened ended with the island's loss, in red, days after the link was back."""
  lost, again = (
    [
      make.event(time + shard / 10, f"syncer-{shard}", "member", learner=0, **fields)
      for shard in range(2)
    ]
    for time, fields in (
      (2.0, {"state": "lost", "reason": "silent for 3.00 s"}),
      (9.0, {"state": "joined", "reason": "heard again"}),
    )
  )
  born = make.event(1.0, "syncer-0", "member", learner=0, state="joined", reason="incarnation 0")
  again.append(make.changed(again[0], learner=-1))  # the evaluator is no island
  view = fold([make.run_started(), born, *lost, *again])
  assert not any(shard.unheard for shard in view.shards.values())
  assert [(note.text, note.tone) for note in view.log_events] == [
    ("the syncer counts island 0 as lost: silent for 3.00 s", "bad"),
    ("the syncer hears island 0 again", "good"),
  ]


def test_words_of_an_older_life_are_ignored(make):
  view = fold([make.run_started(), make.step(5.0, 1, 4, incarnation=2)])
  assert view.read([make.step(5.1, 1, 900, incarnation=1)]).islands[1].step == 4
  view.add(make.event(5.0, "syncer-1", "started", 2, fragments=[1, 3]))
  late = [
    make.event(5.2, "learner-1", "started", 1, devices=7),
    make.event(5.3, "learner-1", "joined", 1, global_step=900),
    make.event(5.4, "learner-1", "stopped", 1, reason="drained"),
    make.event(5.5, "syncer-1", "started", 1, fragments=[0]),
  ]
  island = view.read(late).islands[1]
  assert (island.state, island.lives, island.chips) == ("running", 1, 0)
  assert (island.step, island.global_step, island.alive_at) == (4, 4, 5.0)
  assert view.shards[1].fragments == (1, 3)


def test_what_a_life_said_before_its_death_may_be_read_after_it(make):
  """It was running again until the next one began."""
  roles = "learner-1", "syncer-1"
  lives = [
    [make.event(1.0, role, "started", life, fragments=[1]) for role in roles] for life in (0, 1)
  ]
  exits = [make.event(4.0, "engine", "exit", target=role, reason="crash") for role in roles]
  said = [make.event(time, role, "started", fragments=[1]) for role in roles for time in (3.9, 4.0)]
  said += [make.event(4.0, "learner-1", "joined", global_step=5)]
  view = fold([make.run_started(), *lives[0], *exits, *said])
  assert (view.islands[1].state, view.shards[1].state) == ("lost", "lost")
  view.read(lives[1])  # whose clock is behind
  assert (view.islands[1].state, view.shards[1].state) == ("joining", "running")


def test_an_exit_in_good_order_is_no_loss(make):
  stopped = make.event(5.0, "learner-1", "stopped", reason="the run is over")
  exited = make.event(5.1, "engine", "exit", target="learner-1", reason="done")
  left, lost = (
    make.event(time, "syncer-0", "member", learner=1, state=state)
    for time, state in ((4.9, "left"), (9.0, "lost"))
  )
  view = fold([make.run_started(), left, stopped, exited])
  assert (view.islands[1].state, view.islands[1].missed_reason) == ("left", "")
  assert len(view.read([lost]).log_events) == 1


def test_a_shard_is_down_though_the_island_of_its_number_has_left(make):
  view = RunState()
  view.add(make.event(1.0, "learner-1", "stopped", reason="the end", unmerged_tokens=0))
  view.add(make.event(2.0, "engine", "exit", target="syncer-1", reason="crashed"))
  assert view.log_events[-1].text == "shard 1 is down: crashed"


def test_a_learner_that_no_engine_starts_again_is_on_its_way_once_its_process_is_there(make):
  events = [make.event(0.1, "learner-1", "launched")]
  events += [make.event(1.0, "learner-1", "started"), make.step(2.0, 1, 1)]
  events += [make.event(40.0, "learner-1", "launched", 1)]
  assert _states([make.run_started(), *events], 1) == [
    "starting",
    "joining",
    "running",
    "restarting",
  ]


def test_a_crash_is_told_by_its_error_and_not_by_a_note_below_it(make):
  """JAX and Grain add a line on the frames that they hide to each error that passes them."""
  trace = "ValueError: one\n--------------------\nFor simplicity, JAX ...\n"
  more = f"{trace}\nThe above exception was the direct cause ...:\n\nOSError: no data\n"
  twice = f"{trace}--------------------\nFor simplicity, Grain ...\n"
  crashes = [make.event(3.0, "learner-1", "crash", trace=each) for each in (trace, more, twice)]
  errors = "ValueError: one", "OSError: no data", "ValueError: one"
  assert [note_of(each)[0] for each in crashes] == [f"island 1 crashed: {it}" for it in errors]


def test_roles_without_an_engine_say_themselves_that_they_crash_and_restart(make):
  """The page said that nothing had struck a run of a dozen restarts, and not why roles died."""
  trace = "Traceback (most recent call last):\n  ...\nOSError: no data\n"
  begun = [make.run_started(), make.event(0.5, "syncer-0", "started")]
  begun += [make.event(1.0, "learner-1", "started"), make.step(2.0, 1, 1)]
  crash = make.event(3.0, "learner-1", "crash", trace=trace)
  again = [
    make.event(40.0, "learner-1", "launched", 1),
    make.event(41.0, "learner-1", "started", 1),
    make.event(42.0, "syncer-0", "started", 1),
    make.event(43.0, "learner-1", "crash", trace=trace),  # told late
  ]
  view = fold([*begun, crash])
  assert view.islands[1].state == "lost"
  view.read(again[:3])
  assert [(mark.time, mark.mark, mark.text) for mark in view.marks] == [
    (3.0, "exit", "island 1 crashed: OSError: no data"),
    (40.0, "restart", "island 1 restarts"),
    (42.0, "restart", "shard 0 restarts"),
  ]
  assert view.mark_counts["restart"] == view.restarts == 2
  assert view.read(again[3:]).islands[1].state == "joining"
  engine = [
    make.event(3.1, "engine", "exit", target="learner-1", reason="exit status 1"),
    make.event(9.0, "engine", "restart", target="learner-1"),
  ]
  view = fold([*begun, crash, *engine, *again[:2]])
  assert view.mark_counts == {"exit": 1, "restart": 1}
  assert [note.text for note in view.log_events] == [
    "island 1 crashed: OSError: no data",
    "island 1 is down: exit status 1",
    "island 1 restarts",
  ]


def test_an_evaluation_that_failed_is_noted(make):
  """The loss on the page grew old, and only the evaluator's own stderr said why."""
  failed = make.event(9.0, "evaluator", "unevaluated", merged_tokens=2000, reason="no memory")
  (note,) = fold([make.run_started(), failed]).log_events
  assert (note.text, note.tone) == (
    "the held-out loss at 2,000 merged tokens is missing: no memory",
    "bad",
  )


def test_a_shard_can_die_and_return(make):
  kill = make.event(2.0, "engine", "fault", target="syncer-1", action="kill", detail="")
  view = fold([make.run_started(), make.event(0.1, "syncer-1", "started", fragments=[1, 3]), kill])
  assert (view.shards[1].state, view.shards[1].fragments) == ("lost", (1, 3))
  back = make.event(3.1, "syncer-1", "started", 1, fragments=[1, 3])
  view.read([make.event(3.0, "engine", "restart", target="syncer-1"), back])
  assert (view.shards[1].state, view.shards[1].incarnation) == ("running", 1)


def test_the_evaluator_is_no_island(make):
  member = make.event(1.0, "syncer-0", "member", learner=-1, state="lost", reason="")
  commit = make.commit(2.0, missing={-1: "never trains"})
  started = make.event(0.1, "evaluator", "started")
  crash = make.event(3.0, "evaluator", "crash", trace="OSError: no data")
  its = [make.event(2.5, "evaluator", kind) for kind in ("joined", "stopped")]
  view = fold([make.run_started(), started, member, commit, *its, crash])
  assert set(view.islands) == {0, 1, 2, 3}
  assert [note.text for note in view.log_events] == ["evaluator crashed: OSError: no data"]


def test_progress_is_merged_tokens_or_without_shards_trained_ones(make):
  start = make.run_started(num_fragments=4, total_tokens=1000)
  view = fold([start, make.commit(10.0, fragment=0, merged_tokens=800)])
  assert view.progress == 0.2  # 800 of one fragment, none of three
  late = fold([start, *(make.commit(10.0, fragment=p, merged_tokens=1300) for p in range(3))])
  assert late.progress == 0.75, "what three have beyond the end does not make the fourth's share"
  alone = make.run_started(num_shards=0, num_fragments=0, total_tokens=1000)
  view = fold([alone, make.step(1.0, 0, 1, tokens=100), make.step(3.0, 1, 1, tokens=100)])
  assert view.progress == 0.2
  assert view.seconds_left(3.0) == pytest.approx(2.0 * 0.8 / 0.2)
  assert math.isnan(RunState().seconds_left(1.0)) and math.isnan(RunState().seconds_left(9e3))
  assert RunState().progress == 0.0


def test_the_time_left_of_a_run_of_weeks_is_known_after_minutes(make):
  """It took a percent: three hours of two weeks, after each start of the run."""
  begun = make.run_started(num_fragments=1, total_tokens=1_000_000)
  step, commit = make.step(100.0, 0, 1), make.commit(650.0, merged_tokens=500, tokens=(500,))
  assert math.isnan(fold([begun, step]).seconds_left(900.0)), "nothing is merged"
  assert math.isnan(fold([begun, step, commit]).seconds_left(650.0))
  assert fold([begun, step, commit]).seconds_left(900.0) == pytest.approx(800 * 999_500 / 500)


def test_the_time_left_of_a_run_that_goes_on_follows_from_its_pace_since_then(make):
  """Nothing that an earlier start merged, no night in which it was down, is part of the pace."""

  def start(time, merged):
    going = [make.step(time + 1.0, 0, 1)]
    going += [
      make.commit(time + 2.0 + i, merged_tokens=merged + 100 * i, tokens=(100,)) for i in (0, 1)
    ]
    begun = make.run_started(num_fragments=1, total_tokens=1000)
    return [changed(begun, time=time), *going]

  early, late = start(0.0, 100), start(900.0, 600)
  assert fold(early).seconds_left(3.0) == pytest.approx(2.0 * 800 / 200)
  for view in (fold(late), fold([*early, *late])):  # in the terminal, and on the page
    assert view.progress == 0.7
    assert view.seconds_left(903.0) == pytest.approx(2.0 * 300 / 200)


@pytest.mark.parametrize("told", [True, False])
def test_a_shard_of_which_only_commits_are_told_is_part_of_the_pace(make, told):
  """Clocks of hosts differ, and lines may be lost: a step comes before the shard's start."""
  start = [make.event(1.5, "syncer-0", "started", fragments=[3])] if told else []
  commits = [make.commit(2.0 + n, fragment=3, merged_tokens=100 * n, tokens=(100,)) for n in (1, 2)]
  view = fold([make.step(1.0, 0, 1), *start, *commits])
  assert math.isnan(view.seconds_left(4.0)), "nobody says how long the run is"
  view.total_tokens = 1000
  assert math.isnan(view.seconds_left(1.0)), "no time has passed"
  assert view.num_shards == 1 and view.seconds_left(4.0) == pytest.approx(3.0 * 800 / 200)


def test_a_shard_that_goes_back_takes_versions_and_tokens_with_it(make):
  """It is restored at version 5 of 7, gets 7 back from a learner, and at last begins anew."""

  def has(kind, version, tokens):
    value = {"fragment": 0, "version": version, "merged_tokens": tokens}
    return make.event(10.0, "syncer-0", kind, **value)

  def commit(n):
    return make.commit(float(n), round=n, version=n, merged_tokens=100 * n, tokens=(100,))

  view = fold([make.run_started(num_fragments=1, total_tokens=1000), *map(commit, range(1, 8))])
  for kind, version, tokens in (("owns", 5, 500), ("regained", 7, 700), ("owns", 0, 0)):
    view.read([has(kind, version, tokens)])
    assert (view.versions[0], view.tokens_done) == (version, tokens)


def test_a_view_that_begins_with_a_later_start_knows_what_was_merged_before_it(make):
  """The terminal's view sees no event of an earlier start."""
  view = fold([make.run_started(num_fragments=2, total_tokens=1000)])
  for p in (0, 1):
    known = {"fragment": p, "version": 7, "merged_tokens": 700}
    view.read([make.event(1.0, "syncer-0", "owns", **known)])
  assert view.progress == 0.7


def test_without_shards_a_life_that_begins_anew_does_not_count_its_steps_twice(make):
  alone = make.run_started(num_shards=0, num_fragments=0, total_tokens=600)
  steps = [make.step(float(s), 0, s, tokens=100) for s in (1, 2, 3)]
  again = [make.step(10.0 + s, 0, s, tokens=100, incarnation=1) for s in (1, 2)]
  view = fold([alone, *steps, make.event(9.0, "learner-0", "started", incarnation=1), *again])
  assert view.progress == pytest.approx(200 / 600)
  assert view.islands[0].tokens == 500


def test_a_late_step_of_an_earlier_life_counts_with_its_tokens(make):
  started = make.event(2.0, "learner-0", "started", incarnation=1)
  view = fold([make.step(1.0, 0, 1, tokens=100), started, make.step(2.1, 0, 2, tokens=100)])
  assert (view.islands[0].steps, view.islands[0].tokens) == (2, 200)


def test_a_loss_that_is_not_finite_is_said_once_not_shown_as_unknown_alone(make):
  losses = [2.0, math.nan, math.nan, None, 2.0, math.inf]
  steps = [make.step(10.0 * n, 0, n, loss=loss) for n, loss in enumerate(losses, 1)]
  held = [make.event(70.0, "evaluator", "evaluation", loss=loss) for loss in (2.0, math.nan)]
  said = [each.text for each in fold([make.run_started(), *steps, *held]).log_events]
  assert said == [
    "island 0: its loss is nan",
    "island 0: its loss is inf",
    "the held-out loss is nan",
  ]


def test_an_island_that_waits_for_its_data_is_noted_until_it_does_not(make):
  """A few late batches are none; of impossible numbers no share is made."""
  waits = [0.0] * 5 + [0.09] * 5 + [0.0] * 50 + [0.09] * 40 + [math.nan, 1e300] + [0.01] * 40
  steps = [make.step(0.1 * n, 0, n, data_seconds=each) for n, each in enumerate(waits, 1)]
  view = fold([make.run_started(), *steps])
  assert [(each.tone, each.text) for each in view.log_events] == [
    ("bad", "island 0 waits for its data most of the time"),
    ("good", "island 0 has its data in time again"),
  ]
  first, second = (each.time for each in view.log_events)
  assert 6.0 < first < 9.0 < 10.0 < second < 14.0


def test_steps_that_end_at_the_same_time_are_counted(make):
  """Times have microseconds, and a clock may stand still."""
  view = fold([make.run_started(), *(make.step(1.0, 0, n, tokens=100) for n in (1, 2, 3))])
  assert view.odd_events == 0 and view.islands[0].tokens == 300
  assert view.islands[0].tokens_per_second == pytest.approx(100 / 0.1), "that of the steps alone"


def test_steps_without_metrics_and_unknown_kinds(make):
  bare = make.step(1.0, 0, 1, loss=None, grad_norm=None)
  view = fold([bare, Odd(time=2.0, role="learner-0", said="something_new", reason="")])
  assert view.islands[0].step == 1 and math.isnan(view.islands[0].loss)
  assert view.time == 2.0 and view.odd_events == 1


def test_notes_are_few(make):
  events = [
    make.event(10.0 * k, "engine", "restart", target=f"learner-{k}")
    for k in range(RECENT_LOG_EVENTS + 3)
  ]
  noted = []
  view = RunState(noted=noted.append).read(events)
  assert len(view.log_events) == RECENT_LOG_EVENTS and len(noted) == RECENT_LOG_EVENTS + 3


def test_curves_are_coarser_the_more_islands_have_joined():
  """Also where no engine says how many there are: each new one had as many bins as the first."""
  run = RunState()
  for m in range(200):
    run.add(made(m / 10, f"learner-{m}", "step", step=2, gap_seconds=0.1, loss=1.0, tokens=10))
  run.add(made(59.9, "learner-0", "step", step=3, gap_seconds=0.1, loss=1.0))
  assert 20 < len(run.curves.page.means("loss 0")) <= 40
  assert 100 < len(run.curves.loss.means("0 1")) <= 200, "over tokens, for the report"


@pytest.mark.parametrize(
  "value, text",
  [(0, "0"), (950, "950"), (12_345, "12.3k"), (999_960, "1.0M"), (4e6, "4.0M"), (math.nan, "–")],
)
def test_compact(value, text):
  assert compact(value) == text


@pytest.mark.parametrize(
  "seconds, text",
  [
    *((0, "0:00"), (7.9, "0:07"), (754, "12:34"), (3723, "1:02:03"), (math.nan, "–"), (-1, "0:00")),
    *((86_399, "23:59:59"), (86_400, "1 d 0:00:00"), (90 * 86_400 + 3723, "90 d 1:02:03")),
  ],
)
def test_clock_time(seconds, text):
  assert clock_time(seconds) == text


def test_eight_islands_have_eight_colours():
  assert len({island_colour(m) for m in range(8)}) == 8
  assert island_colour(8) == island_colour(0)


def test_an_update_that_opposes_all_others_is_said_before_it_is_rejected(make):
  merged = make.commit(1.0, opposing={"2": -0.31})
  again = make.commit(2.0, opposing={"2": -0.31}, rejected={"2": "opposes all others"})
  said = [note.text for note in fold([make.run_started(), merged, again]).log_events]
  assert said[-2:] == [
    "push of island 2 points against all others'",
    "push of island 2 rejected: opposes all others",
  ]


def test_what_a_snapshot_lacks_is_said():
  common = {"role": "syncer-0", "time": 1.0}
  whole = events.Snapshot(**common, snapshot=1, roles=("learner-0", "syncer-0"), seconds=0.1)
  lacking = events.Snapshot(
    **common, snapshot=2, roles=("syncer-0",), seconds=60.0, lacks=("learner-0",)
  )
  lost = events.Uncommitted(**common, snapshot=3, missing=("syncer-1",))
  full = events.Uncommitted(**common, snapshot=4, reason="no room")
  said = [each.text for each in fold([whole, lacking, lost, full]).log_events]
  assert said == [
    "snapshot 2 is committed without island 0",
    "snapshot 3 is given up: it lacks shard 1",
    "snapshot 4 is given up: no room",
  ]


def test_of_many_roles_that_a_snapshot_lacks_a_few_are_named_in_order(make):
  """Four lines of names, with island 10 before island 2."""
  lacks = sorted(f"learner-{m}" for m in range(3, 30))
  lacking = make.event(1.0, "syncer-0", "snapshot", snapshot=2, roles=[], seconds=1.0, lacks=lacks)
  (note,) = fold([make.run_started(), lacking]).log_events
  assert note.text.endswith("without island 3, island 4, island 5, island 6, 23 more")


def test_events_that_a_full_disk_has_taken_from_a_log_are_said(make):
  """All numbers of the role are too low from then on."""
  why = "[Errno 28] No space left on device"
  dropped = [
    make.event(1.0, "learner-2", "dropped", peer=peer, count=count, reason=why)
    for peer, count in (("syncer-0", 7), ("learner-2", 12_345))
  ]
  (said,) = fold([make.run_started(), *dropped]).log_events
  assert said.text == f"island 2: 12,345 events of its log are lost: {why}"


def test_every_handler_has_the_name_of_a_kind():
  found = [re.fullmatch("_(on|learner|shard)_(.*)", name) for name in vars(RunState)]
  handled = {match[2] for match in found if match}
  assert len(handled) > 20 and handled <= {"odd", *events.KINDS}


def test_an_island_that_missed_one_commit_of_very_many_was_not_in_all_of_them(make):
  """On the page and in summary.json it was in 100 %, in the report's picture in 99 %."""
  view = RunState().read([make.run_started(num_learners=2)])
  view.commits, view.islands[0].commits = 25_000, 24_999
  assert percent(view.participation(0)) == "99%"
  view.merged_tokens = dict.fromkeys(view.fragments, view.total_tokens - 3)
  assert percent(status(view, 0.0)["progress"]) == "99%"
