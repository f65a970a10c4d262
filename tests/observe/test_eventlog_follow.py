"""Logs are followed while others write them: every whole line once, whatever is torn or new."""

import errno
import math
import os
import random
from unittest import mock

import pytest

from ddiloco.observe import eventlog
from ddiloco.observe.eventlog import Follower, Recorder, read_events
from ddiloco.protocol import events
from tests.observe.conftest import line, times


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
  log(b"\n" + line(2.0)[:5])
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


def test_a_replaced_file_that_cannot_be_read_at_first_is_read_from_its_start(
  tmp_path, log, monkeypatch
):
  follower, read = Follower(tmp_path), eventlog._read
  log(line(1.0) + line(2.0))
  follower.poll()
  (tmp_path / "events" / "learner-0.jsonl").unlink()
  log(line(7.0))
  monkeypatch.setattr(eventlog, "_read", mock.Mock(side_effect=OSError("stale file handle")))
  assert follower.poll() == []
  monkeypatch.setattr(eventlog, "_read", read)
  log(line(8.0) + line(9.0))  # it is longer now than the one before
  assert times(follower.poll()) == [7.0, 8.0, 9.0]


@pytest.mark.parametrize("seed", range(5))
def test_followed_in_any_pieces_it_is_what_is_read_at_the_end(tmp_path, log, seed):
  chance = random.Random(seed)
  texts = {
    role: b"".join(line(round(chance.random(), 3), role, position=i) for i in range(200))
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


def test_the_end_of_a_run_never_comes_before_the_last_lines_of_its_roles(
  tmp_path, log, monkeypatch
):
  """Of thousands of logs, in which a run ended while their sizes were looked at."""
  log(line(1.0))
  log(line(0.0, "engine"), "engine")
  follower, lines_back, looks = Follower(tmp_path), eventlog._lines_back, []
  assert len(follower.poll()) == 2

  def look(*args):
    found = [*lines_back(*args)]
    if not looks:  # the first size is known, and now the run ends
      log(line(2.0))
      log(line(3.0, "engine"), "engine")
    looks.append(args)
    return iter(found)

  monkeypatch.setattr(eventlog, "_lines_back", look)
  assert times([*follower.poll(), *follower.poll()]) == [2.0, 3.0]


def test_a_log_that_vanishes_between_two_looks_is_no_error(tmp_path, log):
  follower = Follower(tmp_path)
  log(line(1.0))
  os.symlink(tmp_path / "gone", tmp_path / "events" / "a.jsonl")
  assert times(follower.poll()) == [1.0]


@pytest.mark.parametrize("good_reads", range(12))
def test_a_log_that_cannot_be_read_for_once_loses_nothing_of_any_role(
  tmp_path, log, monkeypatch, capsys, good_reads
):
  """Its first read looks for the end of lines, the later ones for events."""
  monkeypatch.setattr(eventlog, "PIECE_BYTES", 300)
  follower, read, left = Follower(tmp_path), eventlog._read, [good_reads]
  late = [2.0, 4.0, 6.0, 3.0, 5.0]
  log(b"".join(map(line, late)) + line(1.0)[:9] + b"\n" + line(8.0))
  log(line(1.0, "syncer-0") + line(7.0, "syncer-0"), "syncer-0")

  def stale(path, start, end):
    if path.stem == "learner-0":
      left[0] -= 1
      if left[0] == -1:
        raise OSError(errno.ESTALE, "Stale file handle")
    return read(path, start, end)

  monkeypatch.setattr(eventlog, "_read", stale)
  first = follower.poll()
  assert [e.time for e in first if e.role == "syncer-0"] == [1.0, 7.0], "the others are read"
  failed = left[0] < 0
  log(line(9.0))
  second = follower.poll() + follower.poll()
  assert sorted(e.time for e in [*first, *second] if e.role == "learner-0") == sorted(
    [*late, 8.0, 9.0]
  )
  assert follower.torn_lines == 1 and follower.poll() == []
  assert ("Stale file handle" in capsys.readouterr().err) == (failed or left[0] < 0)


def test_a_log_that_cannot_be_read_again_is_said_again(tmp_path, log, monkeypatch, capsys):
  follower = Follower(tmp_path)
  for time, good in enumerate((False, False, True, True, False)):
    log(line(float(time)))
    with monkeypatch.context() as patch:
      if not good:
        patch.setattr(eventlog, "_read", mock.Mock(side_effect=OSError("stale file handle")))
      follower.poll()
  assert capsys.readouterr().err.count("cannot be read now") == 2
