"""What is seen: a terminal gets a picture that fits, anything else gets plain lines."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from ddiloco.observe.live import LiveView, plain_line, render
from ddiloco.observe.run_state import RunState


def _at(events, time):
  return RunState().read(event for event in events if event.time <= time)


def _text(view, now, width):
  console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
  console.print(render(view, now, width))
  return console.export_text()


@pytest.mark.parametrize("width", [80, 100, 160])
def test_a_frame_shows_the_run_and_fits(run_events, width):
  text = _text(_at(run_events, 25.0), 25.0, width)
  lines = text.splitlines()
  assert max(map(len, lines)) <= width
  assert "quickstart" in lines[0] and "0:25 elapsed" in lines[0] and "held-out loss 1.9" in lines[0]
  assert "33%  657k of 2.0M tokens merged" in lines[1]
  (killed,) = [line for line in lines if line.startswith("● 2")]
  assert killed.split()[2:5] == ["joining", "1", "0"]  # state, life, step
  assert "silent for 2." in killed
  assert sum(line.startswith("● ") for line in lines) == 4
  assert [line[:10] for line in lines if line.startswith("■")] == ["■ shard 0 ", "■ shard 1 "]
  assert "all 3 asked have answered" in text
  assert "0:20  island 2: planned kill" in text


def test_a_long_name_hides_no_figure(run_events):
  """A workdir named after the settings of a sweep left room for nothing else."""
  view = _at(run_events, 25.0)
  view.name = "sweep_rate=0.02_batch=8_seed=0_" + "x" * 200
  first = _text(view, 25.0, 100).splitlines()[0]
  assert first.startswith("sweep_rate=0.02") and "0:25 elapsed" in first and "tokens/s" in first


def test_a_frame_before_anything_happened():
  assert "ddiloco" in _text(RunState(), 0.0, 80)


def test_a_frame_without_shards_counts_trained_tokens(make):
  events = [make.run_started(num_shards=0, num_fragments=0), make.step(1.0, 0, 1)]
  text = _text(_at(events, 2.0), 2.0, 80)
  assert "tokens trained" in text and "shard" not in text


def test_plain_line(run_events):
  view = _at(run_events, 25.0)
  line = plain_line(view, 25.0)
  assert line.startswith("[0:25]  33%")
  assert "held-out loss 1.944" in line
  view.islands[0].global_step += 100  # the run's, to which faster islands have come
  assert "2 joining" in line and f"0 running step {view.islands[0].step}" in plain_line(view, 25.0)
  assert plain_line(RunState(), 0.0) == "[0:00]    –", "a run that goes on is not at its beginning"


def test_a_line_says_what_a_joining_island_has_and_which_shards_are_away(make):
  """It said "joining", however long that took, and nothing of the shards that it waits for; and
  "islands: 0 joining", which reads like none."""
  started = [make.event(2.0, "learner-0", "started"), make.event(2.0, "syncer-0", "started")]
  here = make.event(3.0, "learner-0", "apply", fragment=2)
  view = RunState().read([make.run_started(num_learners=1), *started, here])
  line = plain_line(view, 4.0)
  assert line.endswith("island 0 joining (has received 1 of 4 fragments) · shard 1 starting")
  view.read([make.event(5.0, "syncer-1", "started"), make.event(5.0, "learner-0", "joined")])
  assert plain_line(view, 6.0).endswith("island 0 running step 0")


def _run_live(console, events, clock, **options):
  with LiveView(console, clock=clock, **options) as live:
    for event in events:
      clock.now = event.time
      live(event)
  return console.file.getvalue()


def test_without_a_terminal_there_are_plain_lines_and_all_notes(run_events, fake_clock):
  console = Console(file=io.StringIO(), width=100)
  text = _run_live(console, [e for e in run_events if e.time < 23.0], fake_clock)
  assert "\x1b" not in text and "\r" not in text
  lines = text.splitlines()
  assert "[0:20] island 2: planned kill (restart after 4 s)" in lines
  assert "[0:20] island 2 is down: killed by the fault plan" in lines
  assert sum("joined at global step 0" in line for line in lines) == 4
  assert lines[-1].startswith("[0:22]") and "2 lost" in lines[-1]


def test_a_log_file_is_no_terminal_where_colours_are_forced(make, fake_clock, monkeypatch, capfd):
  """Every second a picture with control codes went into the log."""
  monkeypatch.setenv("FORCE_COLOR", "1")
  with LiveView(clock=fake_clock) as live:
    live(make.run_started())
  assert "\x1b" not in capfd.readouterr().out


def test_important_events_do_not_wait_for_the_next_progress_line(make, fake_clock):
  shown = io.StringIO()
  console = Console(file=shown, width=100)
  with LiveView(console, clock=fake_clock, plain_seconds=1e9) as live:
    live(make.run_started())
    live(make.event(1.0, "engine", "restart", target="learner-1"))
    live._drain.close()  # what was put is consumed; nothing but the note may have been printed
    assert shown.getvalue() == "[0:01] island 1 restarts\n"


def _restarts(make, *roles):
  return [make.event(1.0, "engine", "restart", target=role) for role in roles]


def test_without_a_terminal_no_note_is_left_out_however_many_come_at_once(make, fake_clock):
  shown = io.StringIO()
  live = LiveView(Console(file=shown, width=100), clock=fake_clock)
  live._consume(_restarts(make, *(f"learner-{m}" for m in range(20))))
  assert shown.getvalue().splitlines() == [f"[0:01] island {m} restarts" for m in range(20)]


def test_an_event_that_cannot_be_shown_takes_no_other_with_it(make, fake_clock):
  """A line of a damaged log: a number that no float can hold."""
  shown = io.StringIO()
  live = LiveView(Console(file=shown, width=100), clock=fake_clock)
  live._consume([make.step(1.0, 0, 1, tokens=10**400), *_restarts(make, "learner-1")])
  assert shown.getvalue() == "[0:01] island 1 restarts\n" and live.view.odd_events == 1


@pytest.mark.parametrize("terminal", [False, True])
def test_what_cannot_be_drawn_at_the_end_loses_no_run(fake_clock, capsys, monkeypatch, terminal):
  monkeypatch.setenv("TERM", "xterm")
  console = Console(file=io.StringIO(), width=100, force_terminal=terminal)
  live = LiveView(console, clock=fake_clock)
  live._next_frame = math.inf
  with live:
    live.view.total_tokens, live.view.merged_tokens = 1, {0: 10**400}
  assert "the live view lost its output" in capsys.readouterr().err
  shown = console.file.getvalue().rstrip()
  assert not terminal or shown.endswith("\x1b[?25h"), "the cursor is back"


def test_progress_lines_come_at_their_interval(make, fake_clock):
  console = Console(file=io.StringIO(), width=100)
  live = LiveView(console, clock=fake_clock, plain_seconds=10.0)
  live._start_time = 0.0
  for now in (0.0, 9.0, 10.0, 15.0, 19.9, 20.1, 31.0):
    fake_clock.now = now
    live._consume([])
  lines = console.file.getvalue().splitlines()
  assert [line[:6] for line in lines] == ["[0:10]", "[0:20]", "[0:31]"]


def test_the_end_of_a_run_is_one_progress_line(make, fake_clock):
  """Its last event comes when a line is due, and the end says the same."""
  console = Console(file=io.StringIO(), width=100)
  events = [make.run_started(), make.event(60.0, "engine", "run_finished", reason="finished")]
  over, last = _run_live(console, events, fake_clock).splitlines()
  assert over == "[1:00] the run is over: finished" and last.startswith("[1:00]    – · finished")


def test_a_long_run_prints_hundreds_of_progress_lines_not_thousands(fake_clock):
  console = Console(file=io.StringIO(), width=100)
  live = LiveView(console, clock=fake_clock)
  live._start_time = 0.0
  for now in range(24 * 3600):
    fake_clock.now = float(now)
    live._consume([])
  assert 200 < len(console.file.getvalue().splitlines()) < 400


def test_a_run_that_goes_on_after_a_night_prints_as_often_as_one_that_begins(make, fake_clock):
  """Its first lines came every quarter of an hour."""
  console = Console(file=io.StringIO(), width=100)
  with LiveView(console, clock=fake_clock) as live:
    live(make.changed(make.run_started(), time=12 * 3600.0))
    for now in range(60):
      fake_clock.now = float(now)
      live._consume([])
    assert len(console.file.getvalue().splitlines()) >= 5


def test_on_a_terminal_the_last_frame_stays(run_events, fake_clock, monkeypatch):
  monkeypatch.setenv("TERM", "xterm")
  console = Console(file=io.StringIO(), width=100, height=40, force_terminal=True)
  with LiveView(console, clock=fake_clock) as live:
    live._drain.close()  # from here on nothing else draws
    live._start_time, fake_clock.now = 0.0, 21.0
    live._consume([event for event in run_events if event.time < 21.0])
    assert "planned kill" in console.file.getvalue(), "there are frames before the last one"
    live._consume([event for event in run_events if event.time >= 21.0])
  text = console.file.getvalue()
  assert "\x1b" in text
  assert "all tokens merged" in text.rsplit("quickstart", 1)[1]
  assert text.rstrip().endswith("\x1b[?25h")  # the cursor is back


def test_a_run_of_more_islands_than_lines_shows_what_happened(make, fake_clock, monkeypatch):
  """The table of islands came first: the newest faults, and the shards, were below the screen."""
  monkeypatch.setenv("TERM", "xterm")
  console = Console(file=io.StringIO(), width=100, height=24, force_terminal=True)
  with LiveView(console, clock=fake_clock) as live:
    live._drain.close()
    live._start_time, fake_clock.now = 0.0, 2.0
    live._consume([make.run_started(num_learners=30), *_restarts(make, "learner-1")])
    shown = console.file.getvalue()
  assert "island 1 restarts" in shown and "shard 1" in shown and "● 9" in shown
  assert "● 29" not in shown and "..." in shown[-120:], "it says that there is more"


def test_a_terminal_that_can_only_append_gets_lines_during_the_run(make, fake_clock, monkeypatch):
  monkeypatch.setenv("TERM", "dumb")
  console = Console(file=io.StringIO(), width=100, force_terminal=True)
  with LiveView(console, clock=fake_clock) as live:
    live._consume(_restarts(make, "learner-1"))
    assert console.file.getvalue() == "[0:01] island 1 restarts\n"


def test_the_start_time_comes_with_the_first_event(make, fake_clock):
  console = Console(file=io.StringIO(), width=100)
  fake_clock.now = 500.0
  with LiveView(console, clock=fake_clock) as live:
    live(make.step(3.0, 0, 1))
    fake_clock.now = 504.0
  assert console.file.getvalue().startswith("[0:07]")


def test_a_first_event_that_comes_late_does_not_set_the_clock_back(make, fake_clock):
  """With processes the first one comes when the roles have been started: the time that had passed
  and the time that is left were wrong by as much, and lines of the log were not in order."""
  console = Console(file=io.StringIO(), width=100)
  fake_clock.now = 512.0
  with LiveView(console, clock=fake_clock) as live:
    live(make.run_started())
    live(make.step(11.8, 0, 1))
    fake_clock.now = 513.2
  assert console.file.getvalue().splitlines()[-1].startswith("[0:13]")


def test_a_closed_output_is_one_warning(make, capsys, fake_clock):
  file = io.StringIO()
  with LiveView(Console(file=file, width=100), clock=fake_clock) as live:
    file.close()
    live(make.event(1.0, "engine", "restart", target="learner-1"))
    live._drain.close()
  assert live._drain.failures >= 1
  assert capsys.readouterr().err.count("WARNING") == 1
