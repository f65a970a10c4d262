"""Logs are followed while others write them: every whole line once, whatever is torn or new."""

import math
import os
import random

import pytest

from ddiloco.observe.eventlog import Follower, Recorder, read_events, to_line
from ddiloco.protocol import events
from tests.made_events import made


def line(time: float, role: str = "learner-0", **fields) -> str:
  return to_line(made(time, role, "step", **fields), begins=True).decode()


@pytest.fixture
def log(tmp_path):
  """Appends text to a role's log."""
  (tmp_path / "events").mkdir()

  def append(text: str, role: str = "learner-0") -> None:
    with (tmp_path / "events" / f"{role}.jsonl").open("a") as file:
      file.write(text)

  return append


def times(events) -> list[float]:
  return [event.time for event in events]


def test_no_folder_yet_is_no_event(tmp_path):
  assert Follower(tmp_path / "nowhere").poll() == []


def test_each_line_comes_once_and_new_files_are_found(tmp_path, log):
  follower = Follower(tmp_path)
  log(line(1.0) + line(3.0))
  assert times(follower.poll()) == [1.0, 3.0]
  assert follower.poll() == []
  log(line(4.0))
  log(line(2.0, "syncer-0"), "syncer-0")
  events = follower.poll()
  assert times(events) == [2.0, 4.0], "of one poll, in order of time"
  assert [e.role for e in events] == ["syncer-0", "learner-0"]
  assert follower.poll() == [] and follower.torn_lines == 0


def test_half_a_line_waits_for_its_other_half(tmp_path, log):
  follower = Follower(tmp_path)
  whole = line(1.0, loss=math.nan)
  log(whole[:20])
  assert follower.poll() == []
  log(whole[20:-1])
  assert follower.poll() == [], "its end is missing"
  log("\n" + line(2.0)[:5])
  (event,) = follower.poll()
  assert event.time == 1.0 and event.loss != event.loss
  log(line(2.0)[5:])
  assert times(follower.poll()) == [2.0]


def test_what_a_kill_has_torn_is_counted_when_the_next_life_writes(tmp_path, log):
  follower = Follower(tmp_path)
  log(line(1.0) + line(2.0)[:9])
  assert times(follower.poll()) == [1.0]
  with Recorder(tmp_path, "learner-0", 1, 0.0, clock=lambda: 3.0) as recorder:
    recorder.record(events.Started())
  assert times(follower.poll()) == [3.0]
  assert follower.torn_lines == 1


def test_a_file_that_was_replaced_is_read_from_its_start(tmp_path, log):
  follower = Follower(tmp_path)
  log(line(1.0) + line(2.0))
  follower.poll()
  (tmp_path / "events" / "learner-0.jsonl").unlink()
  log(line(7.0))
  assert times(follower.poll()) == [7.0]


@pytest.mark.parametrize("seed", range(5))
def test_followed_in_any_pieces_it_is_what_is_read_at_the_end(tmp_path, log, seed):
  chance = random.Random(seed)
  texts = {
    role: "".join(line(round(chance.random(), 3), role, position=i) for i in range(200))
    for role in ("learner-0", "learner-1", "syncer-0")
  }
  follower = Follower(tmp_path)
  seen = []
  while any(texts.values()):
    role = chance.choice([role for role, text in texts.items() if text])
    cut = chance.randrange(1, 200)
    log(texts[role][:cut], role)
    texts[role] = texts[role][cut:]
    seen += follower.poll()

  def key(event):
    return event.role, event.position

  assert len(seen) == 600 and sorted(seen, key=key) == sorted(read_events(tmp_path), key=key)


def test_a_log_that_vanishes_between_two_looks_is_no_error(tmp_path, log):
  follower = Follower(tmp_path)
  log(line(1.0))
  os.symlink(tmp_path / "gone", tmp_path / "events" / "a.jsonl")
  assert times(follower.poll()) == [1.0]
