"""Bytes of a link add up over all lives of its role; rates are those of the last seconds."""

import pytest

from ddiloco.observe.history import TrafficTotals
from ddiloco.observe.report import summarise


def rows(events, now):
  traffic = TrafficTotals()
  for event in events:
    if event.kind == "traffic":
      traffic.add(event)
  return {row["role"]: row for row in traffic.as_json(now)}


@pytest.fixture
def sent(make):
  def sent(time, sent_bytes, received_bytes=0, incarnation=0, role="learner-0"):
    fields = {"sent_bytes": sent_bytes, "received_bytes": received_bytes}
    return make.event(time, role, "traffic", incarnation, **fields)

  return sent


def test_totals_are_those_of_the_report(run_events):
  found = rows(run_events, 60.0).values()
  totals = sum(row["sent_bytes"] for row in found), sum(row["received_bytes"] for row in found)
  summary = summarise(run_events)
  assert totals == (summary["bytes_sent"], summary["bytes_received"]) and all(totals)


def test_a_new_life_counts_from_nothing_and_adds_up(sent):
  events = [sent(1.0, 100, 10), sent(2.0, 200, 20), sent(3.0, 300, 30)]
  events += [sent(5.0, 50, 5, 1), sent(6.0, 80, 8, 1)]
  row = rows([*events, sent(6.1, 310, 31, 0)], 6.2)["learner-0"]
  assert (row["name"], row["sent_bytes"], row["received_bytes"]) == ("island 0", 380, 38)


def test_the_rate_is_of_the_last_ten_seconds_and_silence_is_none(sent):
  events = [sent(float(t), 1000 * t if t < 50 else 50_000, 10 * t) for t in range(100)]
  assert rows(events, 99.0)["learner-0"]["sent_bytes_per_second"] == 0
  assert rows(events, 99.0)["learner-0"]["received_bytes_per_second"] == 10
  assert rows(events[:50], 49.5)["learner-0"]["sent_bytes_per_second"] == 1000
  assert rows(events[:50], 61.0)["learner-0"]["sent_bytes_per_second"] == 0
  assert rows(events[:1], 0.0)["learner-0"]["sent_bytes_per_second"] == 0


def test_roles_come_in_order(sent):
  events = [
    sent(1.0, 1, role=role) for role in ("syncer-0", "learner-10", "evaluator", "learner-2")
  ]
  assert list(rows(events, 1.0)) == ["evaluator", "learner-2", "learner-10", "syncer-0"]
