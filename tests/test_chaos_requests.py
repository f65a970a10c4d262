"""Faults that are asked for while a run goes on."""

from __future__ import annotations

import json
import time

from ddiloco.chaos import ask_for, fault_requests
from ddiloco.config import Fault
from ddiloco.workdir import FAULTS


def test_what_is_asked_for_arrives_once_and_is_new_whatever_the_clock_of_who_asks(
  tmp_path, monkeypatch
):
  """Of a clock that was far behind it was taken for over, and nobody said so."""
  asked = fault_requests(tmp_path)
  assert list(asked.poll()) == []
  with monkeypatch.context() as late:
    late.setattr(time, "time", lambda now=time.time: now() - 3600.0)
    ask_for(tmp_path, Fault("kill", "learner-1", at_step=99, seconds=3.0))
  ((age_seconds, fault),) = asked.poll()
  assert age_seconds == 0.0 and fault == Fault("kill", "learner-1", at_seconds=0.0, seconds=3.0)
  assert list(asked.poll()) == []
  ((age_seconds, _),) = fault_requests(tmp_path).poll()
  assert 3600.0 <= age_seconds < 3700.0, "who begins later has only the clocks"


def test_who_wants_news_only_does_not_hear_of_the_past(tmp_path):
  ask_for(tmp_path, Fault("stall", "learner-1", at_seconds=0.0))
  asked = fault_requests(tmp_path, news_only=True)
  ask_for(tmp_path, Fault("cut", "syncer-0", at_seconds=0.0, peers=("learner-1",)))
  assert [fault.action for _, fault in asked.poll()] == ["cut"]


def test_garbage_is_said_and_skipped_and_half_a_line_is_waited_for(tmp_path, capsys):
  lines = [
    "{",
    "[1]",
    '{"time": "now"}',
    '{"time": 1, "action": ' + "[" * 100_000,
    '{"time": 1' + "0" * 400 + "}",
    json.dumps({"time": 1.0, "action": "explode", "role": "x"}),
  ]
  good = json.dumps({"time": 2.0, "action": "kill", "role": "learner-0"})
  (tmp_path / FAULTS).write_text("\n".join([*lines, good, good[:10]]))
  asked = fault_requests(tmp_path)
  assert [fault.action for _, fault in asked.poll()] == ["kill"]
  assert capsys.readouterr().err.count("asks for no fault") == len(lines)
  with (tmp_path / FAULTS).open("a") as file:
    file.write(good[10:] + "\n")
  assert [fault.action for _, fault in asked.poll()] == ["kill"]
