"""A loop that does not come round is said once, with the stacks of all threads; others are not."""

from __future__ import annotations

import threading

import pytest

from ddiloco.observe import guards
from ddiloco.observe.guards import FIRST_STEP_SECONDS, HANG_STEPS, PAUSED_SECONDS, HangWatch, stacks
from ddiloco.observe.report import key_numbers, numbers
from ddiloco.observe.run_state import RunState


class Watched:
  """One role of this thread, on a clock that is set."""

  def __init__(self, clock, least_seconds=30.0, usual=0.5):
    self.clock, self.usual, self.found = clock, usual, []
    self.watch = HangWatch(least_seconds, lambda: self, clock)
    self.watch.beat("learner-1", usual)

  def record(self, event):
    self.found.append(event)

  def pass_(self, seconds, beat=False):
    """Looks every half a second for so long."""
    for _ in range(round(2 * seconds)):
      self.clock.now += 0.5
      if beat:
        self.watch.beat("learner-1", self.usual)
      self.watch.look()


def test_a_loop_that_stands_still_is_said_once_until_it_comes_round(fake_clock, capsys):
  role = Watched(fake_clock)
  role.pass_(30)
  assert role.found == []
  role.pass_(60)
  (event,) = role.found
  assert (event.target, event.seconds, event.usual_seconds) == ("learner-1", 30.5, 0.5)
  assert "test_a_loop_that_stands_still" in event.stacks
  assert "learner-1 has not come round for 30 s" in capsys.readouterr().err
  role.pass_(1, beat=True)
  role.pass_(31)
  assert len(role.found) == 2


def test_slow_steps_that_are_usual_hang_later(fake_clock):
  role = Watched(fake_clock, usual=3.0)
  role.pass_(HANG_STEPS * 3)
  assert role.found == []
  role.pass_(1)
  assert len(role.found) == 1


def test_a_shard_has_the_least_and_a_first_step_more(fake_clock):
  """A first step that loaded programs for over a minute was noted as one that hangs."""
  shard = Watched(fake_clock, usual=0.0)
  shard.pass_(31)
  assert shard.found[0].usual_seconds == 0.0
  learner = Watched(fake_clock, usual=None)
  learner.pass_(HANG_STEPS * FIRST_STEP_SECONDS)
  assert not learner.found
  learner.pass_(1)
  assert learner.found[0].usual_seconds == 0.0


def test_nobody_looks_where_the_limit_is_zero_or_the_role_has_ended(fake_clock):
  role = Watched(fake_clock, least_seconds=0.0)
  role.pass_(1000)
  assert role.found == []
  role = Watched(fake_clock)
  role.watch.end("learner-1")
  role.pass_(1000)
  assert role.found == []


def test_a_process_that_stood_still_as_a_whole_is_no_hang_of_a_role(fake_clock):
  role = Watched(fake_clock)
  role.pass_(30)
  fake_clock.now += 0.5 + PAUSED_SECONDS  # SIGSTOP, SIGCONT
  role.watch.look()
  role.pass_(29)
  assert role.found == []
  role.pass_(2)
  assert len(role.found) == 1


def test_a_short_limit_has_short_pauses(fake_clock):
  role = Watched(fake_clock, least_seconds=2.0, usual=0.01)
  role.pass_(1)
  fake_clock.now += 4.0
  role.watch.look()
  assert role.found == []


def test_looks_that_are_seconds_apart_are_no_pause(fake_clock):
  role = Watched(fake_clock)
  for _ in range(8):
    fake_clock.now += PAUSED_SECONDS
    role.watch.look()
  assert len(role.found) == 1


def test_a_limit_shorter_than_the_pause_between_two_looks_is_no_pause(fake_clock):
  role = Watched(fake_clock, least_seconds=0.2, usual=0.001)
  role.pass_(3)
  (event,) = role.found
  assert event.seconds == 0.5


def test_stacks_have_every_thread_by_name_and_the_roles_own_first(monkeypatch):
  end, ready = threading.Event(), threading.Barrier(3)

  def stand_still():
    ready.wait(10)
    end.wait(10)

  threads = [threading.Thread(target=stand_still, name=f"exchange-{n}") for n in range(2)]
  for thread in threads:
    thread.start()
  ready.wait(10)
  try:
    text = stacks(threads[1].ident)
    assert text.index("exchange-1") < text.index("MainThread") and "stand_still" in text
    assert stacks(threading.get_ident()).startswith("MainThread")
    assert "characters more" not in text
    assert text.count("end.wait(10)") <= 2, "threads that stand alike are named together"
    monkeypatch.setattr(guards, "MOST_CHARACTERS", 50)
    assert "characters more" in stacks() and len(stacks()) < 120
  finally:
    end.set()
    for thread in threads:
      thread.join(10)


@pytest.mark.parametrize("usual, said", [(0.5, "a step takes 0.5 s"), (0.0, "for 61 s; its")])
def test_the_report_shows_what_the_log_says(make, usual, said):
  hung = make.event(
    50.0, "engine", "hung", target="learner-1", seconds=61.0, usual_seconds=usual, stacks="a < b"
  )
  run = RunState().read([make.run_started(), make.step(1.0, 1, 1), hung])
  assert run.log_events[-1].tone == "bad" and said in run.log_events[-1].text
  assert (run.marks[-1].mark, run.marks[-1].role) == ("hang", "learner-1")
  summary = numbers(run)
  assert summary["num_hangs"] == 1
  assert ("times that a role hung", "1") in key_numbers(summary)
  from ddiloco.observe import plots

  with plots.styled():
    legend = plots.timeline_figure(run).legends[0]
  assert "hung: stacks are in the log" in [text.get_text() for text in legend.get_texts()]
  assert "num_hangs" not in numbers(RunState().read([make.run_started()]))
