"""A minimum quorum of 1 must not silently become solo runs: rounds of one that repeat are said."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from ddiloco.dashboard.status import status
from ddiloco.observe.live import render
from ddiloco.observe.report import key_numbers, summarise
from tests.observe.conftest import fold

LATE = "no answer within the grace window"


@pytest.fixture
def rounds(make):
  """The events of a run of two fragments and three islands, and its rounds: who was in each."""

  def rounds(*who, learners=3):
    start = make.run_started(num_learners=learners, num_fragments=2, num_shards=1)
    events = [start, *(make.step(1.0, m, 1) for m in range(learners))]
    for n, taking in enumerate(who):
      missing = {str(m): LATE for m in range(learners) if m not in taking}
      fields = {"fragment": n % 2, "round": n, "version": n // 2 + 1, "missing": missing}
      events += [make.step(2.0 + n, m, n + 2) for m in range(learners)]
      weights = {str(m): 1 / len(taking) for m in taking}
      events.append(make.commit(2.0 + n, weights=weights, **fields))
    return events

  return rounds


def test_a_minimum_quorum_of_1_must_not_silently_become_solo_runs(rounds):
  events = rounds((1, 2), *[(0,)] * 6)
  said = fold(events).solo
  assert "6 of the last 6 rounds merged island 0 alone, of 3" in said
  assert f"Why: island 1: {LATE}; island 2: {LATE}. " in said and "sync.min_quorum" in said
  found = status(fold(events), events[-1].time + 1)
  assert found["phase"] == "running" and found["solo"] == said
  assert [note["text"] for note in found["log_events"] if note["tone"] == "bad"] == [said]
  screen = Console(file=io.StringIO(), width=100)
  screen.print(render(fold(events), 10.0))
  assert "rounds merged island 0 alone" in screen.file.getvalue()


def test_it_is_over_when_several_are_merged_again(rounds):
  events = rounds(*[(0,)] * 6, (0, 1), learners=2)
  view = fold(events)
  assert view.solo == "" and view.log_events[-1].text == "rounds merge several islands again"
  assert view.log_events[-1].tone == "good"


def test_each_on_its_own_is_as_bad(rounds):
  said = fold(rounds((0,), (1,), (2,), (0,), (1,), (2,), learners=7)).solo
  assert "merged only one island each, of 7" in said and said.count(LATE) == 4, "not all"


def test_the_report_counts_them(rounds):
  found = summarise(rounds((0, 1, 2), *[(0,)] * 9, (0, 1)))
  assert found["solo_rounds"] == 4, "from the sixth in a row on"
  assert dict(key_numbers(found))["commits that repeated one island alone"] == "4"
  assert "solo_rounds" not in summarise(rounds(*[(0, 1)] * 9))


def test_where_nobody_else_is_expected_it_is_as_it_should_be(make, rounds):
  assert fold(rounds(*[(0,)] * 9, learners=1)).solo == ""
  left = [make.event(1.5, f"learner-{m}", "stopped", reason="drained") for m in (1, 2)]
  events = rounds(*[(0,)] * 3)
  assert fold(events).solo == "", "three are not many"
  assert fold(rounds(*[(0,)] * 5)).solo == "", "nor are two of each fragment: a process had no core"
  more = [
    make.commit(9.0 + n, fragment=n % 2, round=9 + n, weights={"0": 1.0}, missing={})
    for n in range(6)
  ]
  assert fold([*events, *left, *more]).solo == ""
  assert fold([*events, *more]).solo != ""


def test_without_an_engine_there_are_as_many_fragments_as_shards_have(make, rounds):
  """No event says that the run has started."""
  _, *events = rounds(*[(0,)] * 32, (0, 1), (0,))
  owned = [make.event(0.5, "syncer-0", "owns", fragment=p) for p in range(40)]
  assert fold([*owned, *events[:19]]).solo == "", "four rounds of 40 fragments say little"
  view = fold([*owned, *events])
  assert "31 of the last 32 rounds merged island 0 alone" in view.solo and view.solo_rounds == 2
