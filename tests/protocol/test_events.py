"""Every kind of event is written and read through one class; a line that is none is said to be."""

from __future__ import annotations

import json
import math

import pytest

from ddiloco.protocol import events
from ddiloco.protocol.events import KINDS, Odd, decode, encode
from tests.made_events import changed, made


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_what_is_read(kind):
  event = made(1.5, "learner-2", kind, 7)
  line = encode(event)
  said = json.loads(line)
  assert (said["time"], said["role"], said["incarnation"], said["kind"]) == (
    *(1.5, "learner-2", 7),
    kind,
  )
  assert decode(line) == event and event.kind == kind and type(event) is KINDS[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_says_when_it_is_written(kind):
  assert KINDS[kind].__doc__, "a docstring"


def test_numbers_by_learner_stay_numbers():
  commit = made(1.0, "syncer-0", "commit", weights={3: 0.5}, missing={4: "lost"})
  found = decode(encode(commit))
  assert found.weights == {3: 0.5} and found.missing == {4: "lost"}


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_numbers_that_are_not_finite_are_valid_json(value):
  step = made(1.0, "learner-0", "step")
  line = encode(changed(step, loss=value, seconds=value))
  json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
  found = decode(line)
  assert str(found.loss) == str(found.seconds) == str(value)
  assert decode(encode(changed(step, loss=value, schedule_step=3))).schedule_step == 3


def test_a_number_that_is_not_finite_may_stand_beside_numbers_by_learner():
  commit = made(1.0, "syncer-0", "commit", weights={3: math.nan}, rejected={5: "far"})
  found = decode(encode(commit))
  assert math.isnan(found.weights[3])


@pytest.mark.parametrize(
  "fields, reason",
  [
    ({"fragment": 1.5}, "fragment"),
    ({"fragment": True}, "fragment"),
    ({"fragment": "1"}, "fragment"),
    ({"fragment": 10**12}, "fragment"),  # a page had a column for each
    ({"fragment": -2}, "fragment"),
    ({"mode": "guess"}, "mode"),
    ({"included": 1}, "included"),
    ({"kind": "teleported"}, "unknown kind 'teleported'"),
  ],
)
def test_an_event_of_another_version_is_odd_and_says_why(fields, reason):
  stage = json.loads(encode(made(2.0, "learner-0", "stage")))
  odd = decode(json.dumps(stage | fields).encode())
  assert isinstance(odd, Odd) and reason in odd.reason
  assert (odd.time, odd.role, odd.said) == (2.0, "learner-0", fields.get("kind", "stage"))


def test_a_field_that_is_missing_is_named():
  stage = json.loads(encode(made(2.0, "learner-0", "stage")))
  del stage["round"]
  assert "round" in decode(json.dumps(stage).encode()).reason


def test_whoever_records_an_event_says_when_and_whose_it_is():
  step = events.stamped(events.Restart(target="learner-1"), 1.23456789, "engine", 0)
  assert (step.time, step.role, step.target) == (1.234568, "engine", "learner-1")
  assert decode(encode(events.Restart(target="learner-1"))) is None, "nobody's"
