"""The recorder: what is on disk, what a kill or a bad disk does to it, and that nobody waits."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import math
import os
import shutil
import threading
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from ddiloco.checks import Unanswered
from ddiloco.config import ConfigError
from ddiloco.observe.eventlog import (
  EventLog,
  Follower,
  Recorder,
  check_format,
  newest_event,
  read_events,
)
from ddiloco.observe.guards import Drain
from ddiloco.protocol import events
from ddiloco.protocol.events import parse_role
from ddiloco.trace.text import read_trace
from tests.disks import answer_for
from tests.waits import PATIENCE_SECONDS, wait_for


def _refuse(constant):
  raise AssertionError(f"{constant} is not JSON")


def _lines(workdir, role="learner-0"):
  text = (workdir / "events" / f"{role}.jsonl").read_text()
  return [json.loads(line, parse_constant=_refuse) for line in text.splitlines()]


def step(number, **fields):
  lengths = {"seconds": 0.1, "gap_seconds": 0.1} | fields
  return events.Step(step=number, global_step=number, position=0, tokens=8, **lengths)


def flush(recorder):
  """As `recorder.flush()`, which waits no longer for a busy machine than for a stuck disk."""
  patiently = functools.partial(Drain.flush, recorder._drain, PATIENCE_SECONDS)
  with mock.patch.object(recorder._drain, "flush", patiently):
    recorder.flush()


def test_lines_on_disk(tmp_path, fake_clock):
  with Recorder(tmp_path, "learner-0", 3, start_time=100.0, clock=fake_clock) as recorder:
    fake_clock.now = 100.5
    recorder.record(events.Joined(global_step=7, seconds=0.25))
    fake_clock.now = 102.0
    recorder.record(events.Lost(learner=1, versions={2: 5}, reason="late"))
  common = {"role": "learner-0", "incarnation": 3}
  assert _lines(tmp_path) == [
    {"time": 0.5, **common, "kind": "joined", "global_step": 7, "seconds": 0.25}
    | {"format": events.LOG_FORMAT},
    {"time": 2.0, **common, "kind": "lost", "learner": 1, "versions": {"2": 5}, "reason": "late"},
  ]


def test_roles_are_read_together_in_order_of_time(tmp_path, fake_clock):
  for role, times in (("learner-0", (1.0, 4.0)), ("syncer-0", (0.5, 3.0))):
    with Recorder(tmp_path, role, 0, start_time=0.0, clock=fake_clock) as recorder:
      for fake_clock.now in times:
        recorder.record(events.Traffic(sent_bytes=1, received_bytes=2))
  assert [event.time for event in read_events(tmp_path)] == [0.5, 1.0, 3.0, 4.0]


@pytest.mark.parametrize("number", [None, events.LOG_FORMAT - 1, events.LOG_FORMAT + 1])
def test_a_log_of_another_format_is_refused_by_name(tmp_path, number):
  """By whoever reads it, and by a role that would append to it."""
  (tmp_path / "events").mkdir()
  line = {"time": 0.0, "role": "learner-0", "kind": "joined", "another": 3, "seconds": 0.1}
  line |= {} if number is None else {"format": number}
  (tmp_path / "events" / "learner-0.jsonl").write_text(json.dumps(line) + "\n")
  readers = [
    lambda: read_events(tmp_path),
    lambda: Follower(tmp_path),
    lambda: newest_event(tmp_path, events.Joined),
    lambda: Recorder(tmp_path, "learner-0", 1, start_time=0.0),
  ]
  text = "format without a number," if number is None else f"format {number},"
  for read in readers:
    with pytest.raises(ConfigError, match=f"learner-0.jsonl: .*{text} .*Fix: "):
      read()


def test_every_incarnation_says_the_format_once(tmp_path):
  for incarnation in range(2):
    with Recorder(tmp_path, "learner-0", incarnation, start_time=0.0) as recorder:
      recorder.record(step(1))
      flush(recorder)
      recorder.record(step(2))
  numbers = [line.get("format") for line in _lines(tmp_path)]
  assert numbers == [events.LOG_FORMAT, None] * 2


def test_no_folder_is_no_events(tmp_path):
  assert read_events(tmp_path / "nothing") == EventLog() == []


def test_a_log_cut_anywhere_gives_its_whole_lines(tmp_path):
  folder = tmp_path / "events"
  folder.mkdir()
  fields = b'"role":"learner-0","kind":"restart","target":"x","format":%d' % events.LOG_FORMAT
  lines = [b'{"time":%d,%b}\n' % (k, fields) for k in range(3)]
  whole = b"".join(lines)
  for cut in range(len(whole) + 1):
    (folder / "learner-0.jsonl").write_bytes(whole[:cut])
    found = read_events(tmp_path)
    complete, rest = divmod(cut, len(lines[0]))
    only_newline_missing = rest == len(lines[0]) - 1
    assert len(found) == complete + only_newline_missing
    assert found.torn_lines == (rest > 0 and not only_newline_missing)


def test_not_finite_numbers_are_valid_json_and_come_back(tmp_path):
  with Recorder(tmp_path, "learner-0", 0, start_time=0.0) as recorder:
    recorder.record(step(1, loss=math.nan, grad_norm=math.inf, seconds=-math.inf))
  (line,) = _lines(tmp_path)
  assert (line["loss"], line["grad_norm"], line["seconds"]) == ("nan", "inf", "-inf")
  (event,) = read_events(tmp_path)
  assert math.isnan(event.loss)
  assert event.grad_norm == math.inf
  assert event.seconds == -math.inf


def test_values_json_does_not_know(tmp_path):
  with Recorder(tmp_path, "learner-0", 0, start_time=0.0) as recorder:
    recorder.record(step(np.int64(3), loss=np.float32(1.5), grad_norm=np.float32("nan")))
    recorder.record(events.Crash(trace=tmp_path))
    recorder.record(events.Started(mesh=(1, 2)))
  first, second, third = _lines(tmp_path)
  assert (first["loss"], first["step"], first["grad_norm"]) == (1.5, 3, "nan")
  assert (second["trace"], third["mesh"]) == (str(tmp_path), [1, 2])


def test_a_text_that_is_no_unicode_is_written_with_escapes(tmp_path):
  """As the trace of a crash over a file whose name is no UTF-8."""
  with Recorder(tmp_path, "learner-0", 0, start_time=0.0) as recorder:
    recorder.record(events.Crash(trace="no such file: caf\udce9"))
    recorder.record(
      events.Evaluation(merged_tokens=1, global_step=1, loss=2.0, measures={"\ud800": 3.0})
    )
    flush(recorder)
    recorder.record(step(1))
  crash, evaluation, after = read_events(tmp_path)
  assert crash.trace == "no such file: caf\\udce9" and crash.format == events.LOG_FORMAT
  assert evaluation.measures == {"\\ud800": 3.0} and after.step == 1


def test_an_event_that_cannot_be_said_is_lost_alone(tmp_path, capsys):
  class Speechless:
    def __str__(self):
      raise RuntimeError("no words")

  with Recorder(tmp_path, "learner-0", 0, start_time=0.0) as recorder:
    for trace in (Speechless(), "first", Speechless(), "last"):
      event = events.stamped(events.Crash(trace=trace), 0.0, "learner-0", 0)
      recorder._drain.put(event)  # all in one batch
  assert [event.trace for event in read_events(tmp_path)] == ["first", "last"]
  assert capsys.readouterr().err.count("no words") == 1


def test_listeners_get_the_same_dict(tmp_path):
  first, second = [], []
  with Recorder(
    tmp_path, "engine", 0, start_time=0.0, listeners=(first.append, second.append)
  ) as recorder:
    recorder.record(events.Restart(target="learner-2"))
  assert first[0] is second[0]
  assert first[0].target == "learner-2"


def test_a_listener_that_raises_is_dropped_loudly_once(tmp_path, capsys):
  calls, heard = [], []

  def broken(event):
    calls.append(event)
    raise RuntimeError("no screen")

  with Recorder(
    tmp_path, "engine", 0, start_time=0.0, listeners=(broken, heard.append)
  ) as recorder:
    recorder.record(events.Started())
    recorder.record(events.Started())
  assert (len(calls), len(heard), len(read_events(tmp_path))) == (1, 2, 2)
  assert capsys.readouterr().err.count("no screen") == 1


def test_a_denied_path_is_one_warning_and_the_run_goes_on(tmp_path, capsys, monkeypatch):
  (tmp_path / "file").write_text("not a folder")
  recorder = Recorder(tmp_path / "file", "learner-0", 0, start_time=0.0)
  hurry(recorder, monkeypatch)
  for number in range(3):
    recorder.record(step(number))
  recorder.record(events.Stopped(reason="done"))
  recorder.close()
  said = capsys.readouterr().err
  assert said.count("WARNING") == 2 and said.count(f"cannot write {recorder.path}") == 1
  assert "4 events could not be written yet; they are lost if this process ends" in said
  (tmp_path / "file").unlink()
  wait_for(lambda: not recorder._drain.running, "its thread, which goes on trying")
  assert len(read_events(tmp_path / "file")) == 4


def hurry(recorder, monkeypatch):
  """Has it try again after a moment, and close after a moment where there is no room."""
  monkeypatch.setattr(recorder._drain, "_interval_seconds", 0.01)
  monkeypatch.setattr(recorder._drain, "close", lambda: Drain.close(recorder._drain, 0.1))


class Disk:
  """Has room for so many bytes more; then writes are cut off, or refused."""

  def __init__(self, patch, folder, room):
    self.room = room
    answer_for(folder, patch, "write", self.write)

  def write(self, write, file, data):
    if data and not self.room:
      raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    written = write(file, data[: self.room])
    self.room -= written
    return written


@pytest.mark.parametrize("room", range(0, 700, 7))
def test_a_full_disk_tears_no_line_and_nothing_is_lost(tmp_path, capsys, monkeypatch, room):
  """A torn line in the middle of a life, and a gap, were violations of `ddiloco trace`."""
  disk, follower = Disk(monkeypatch, tmp_path, room), Follower(tmp_path)
  with Recorder(tmp_path, "learner-0", 0, start_time=0.0) as recorder:
    seen = []
    for number in range(5):
      if number == 4:
        disk.room = 10**6
      recorder.record(step(number))
      flush(recorder)
      seen += [event.step for event in follower.poll()]
  found = read_events(tmp_path)
  assert [event.step for event in found] == seen == [0, 1, 2, 3, 4] and not found.torn_lines
  assert found[0].format == events.LOG_FORMAT
  said = capsys.readouterr().err.count("cannot write")
  assert said <= 1 and (said or room > 500)


def test_a_disk_that_is_full_again_is_warned_of_again(tmp_path, capsys, monkeypatch):
  disk = Disk(monkeypatch, tmp_path, 0)
  with Recorder(tmp_path, "learner-0", 0, start_time=0.0) as recorder:
    for number, room in enumerate((0, 0, 10**6, 0, 10**6)):
      disk.room = room
      recorder.record(step(number))
      flush(recorder)
  assert [event.step for event in read_events(tmp_path)] == [0, 1, 2, 3, 4]
  assert capsys.readouterr().err.count("cannot write") == 2


def test_a_disk_that_is_slow_again_is_warned_of_again(tmp_path, capsys, monkeypatch):
  with Recorder(tmp_path, "learner-0", 0, start_time=0.0) as recorder:
    monkeypatch.setattr(recorder._drain, "flush", iter((False, False, True, False)).__next__)
    for _ in range(4):
      recorder.flush()
  assert capsys.readouterr().err.count("is written too slowly") == 2


def test_a_role_that_ends_while_the_disk_is_full_has_its_last_events_when_there_is_room(
  tmp_path, monkeypatch
):
  """Its next life has written meanwhile. The end of a run waits for room, and for its log too."""
  disk = Disk(monkeypatch, tmp_path, 200)
  with Recorder(tmp_path, "learner-0", 0, start_time=0.0) as recorder:
    hurry(recorder, monkeypatch)
    recorder.record(step(0))
    recorder.record(step(1))
  assert recorder._drain.left == 1
  write, there = recorder._append, threading.Event()
  monkeypatch.setattr(recorder, "_append", lambda batch: [write(batch), there.set()][0])
  with Recorder(tmp_path, "learner-0", 1, start_time=0.0) as new:
    disk.room = 10**6
    new.record(step(2))
  assert there.wait(PATIENCE_SECONDS)
  found = read_events(tmp_path)
  assert sorted((event.incarnation, event.step) for event in found) == [(0, 0), (0, 1), (1, 2)]


def test_events_beyond_what_memory_keeps_are_counted_in_the_log(tmp_path, monkeypatch):
  disk = Disk(monkeypatch, tmp_path, 0)
  with Recorder(tmp_path, "learner-0", 0, start_time=0.0) as recorder:
    monkeypatch.setattr(recorder._drain, "_capacity", 3)
    for number in range(7):
      recorder.record(step(number))
      flush(recorder)
    assert not read_events(tmp_path)
    disk.room = 10**6
    flush(recorder)
    recorder.record(step(7))
  first, second, third, dropped, last = read_events(tmp_path)
  assert [first.step, second.step, third.step, last.step] == [0, 1, 2, 7]
  assert (dropped.kind, dropped.peer, dropped.count) == ("dropped", "learner-0", 4)
  assert "No space left on device" in dropped.reason
  (problem,) = read_trace(tmp_path).problems
  assert "line 4: 4 events before it could not be written" in problem


def test_a_line_that_a_failed_close_has_left_is_not_doubled(tmp_path, monkeypatch):
  """Over NFS a write fails when the file is closed: nobody knows what has arrived."""
  real, fails = Path.open, threading.Event()

  @contextlib.contextmanager
  def fails_to_close(path, *arguments, **more):
    with real(path, *arguments, **more) as file:
      yield file
    if fails.is_set():
      raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

  def opened(path, *arguments, **more):
    mine = path.is_relative_to(tmp_path)
    return (fails_to_close if mine else real)(path, *arguments, **more)

  monkeypatch.setattr(Path, "open", opened)
  with Recorder(tmp_path, "learner-0", 0, start_time=0.0) as recorder:
    for number in range(4):
      (fails.set if number in (1, 2) else fails.clear)()
      recorder.record(step(number))
      flush(recorder)
  assert [event.step for event in read_events(tmp_path)] == [0, 1, 2, 3]


def test_a_log_goes_on_when_its_file_system_is_back(tmp_path, monkeypatch):
  """A server of NFS that has restarted knows no old handle."""
  stale = set()

  def refuse(write, file, data):
    if not stale or file in stale:
      stale.add(file)
      raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
    return write(file, data)

  with Recorder(tmp_path, "learner-0", 0, start_time=0.0) as recorder:
    recorder.record(step(0))
    flush(recorder)
    with monkeypatch.context() as patch:
      answer_for(tmp_path, patch, "write", refuse)
      recorder.record(step(1))
      flush(recorder)
      other = os.open(os.devnull, os.O_RDONLY)  # takes the old handle's number
      recorder.record(step(2))
      flush(recorder)
    os.close(other)
  assert [event.step for event in read_events(tmp_path)] == [0, 1, 2]


def test_a_log_that_was_deleted_says_its_format_anew(tmp_path, monkeypatch):
  """A stale handle may be that of a deleted file; without its format no role starts again."""
  with Recorder(tmp_path, "learner-0", 0, start_time=0.0) as recorder:
    recorder.record(step(0))
    flush(recorder)
    recorder.path.unlink()
    with monkeypatch.context() as patch:
      stale = OSError(errno.ESTALE, os.strerror(errno.ESTALE))
      answer_for(tmp_path, patch, "write", mock.Mock(side_effect=stale))
      recorder.record(step(1))
      flush(recorder)
    recorder.record(step(2))
    flush(recorder)
    recorder.path.unlink()
    recorder.record(step(3))
  check_format(recorder.path)
  assert [event.step for event in read_events(tmp_path)] == [3]


def test_a_log_that_is_moved_away_just_before_it_is_opened_begins_anew(tmp_path, monkeypatch):
  """The new file had no format: no role started again, and the run could not be read."""
  with Recorder(tmp_path, "learner-0", 0, start_time=0.0) as recorder:
    recorder.record(step(0))
    flush(recorder)
    openly = type(recorder.path).open

    def moved(path, *args, **options):
      if path == recorder.path and path.exists():
        path.rename(tmp_path / "old.jsonl")
      return openly(path, *args, **options)

    with monkeypatch.context() as patch:
      patch.setattr(type(recorder.path), "open", moved)
      recorder.record(step(1))
      flush(recorder)
  check_format(recorder.path)
  assert [event.step for event in read_events(tmp_path)] == [1]


def test_a_workdir_that_is_deleted_under_a_role_is_said_once_and_the_role_goes_on(tmp_path, capsys):
  """Its log began anew in silence."""
  with Recorder(tmp_path / "run", "learner-0", 0, start_time=0.0) as recorder:
    for number in range(4):
      if number in (1, 2):
        shutil.rmtree(tmp_path / "run")
      recorder.record(step(number))
      flush(recorder)
  assert [event.step for event in read_events(tmp_path / "run")] == [2, 3]
  assert capsys.readouterr().err.count("learner-0.jsonl: was deleted while its run goes on") == 1


def test_a_log_whose_end_cannot_be_read_costs_no_descriptors(tmp_path, monkeypatch):
  with Recorder(tmp_path, "learner-0", 0, start_time=0.0) as recorder:
    recorder.record(step(0))
  failing = mock.Mock(side_effect=OSError(errno.EIO, "Input/output error"))
  new = Recorder(tmp_path, "learner-0", 1, start_time=0.0)
  with new as recorder, monkeypatch.context() as patch:  # it can be read again at the end
    answer_for(tmp_path, patch, "pread", failing)
    for number in range(3):
      recorder.record(step(number))
      flush(recorder)
    descriptors = [each.resolve() for each in Path("/proc/self/fd").iterdir()]
    assert recorder.path.resolve() not in descriptors
  assert len(read_events(tmp_path)) == 4


def test_a_stuck_disk_does_not_hold_the_caller(tmp_path, monkeypatch):
  stuck, free = threading.Event(), threading.Event()

  def hang(write, file, data):
    stuck.set()
    assert free.wait(PATIENCE_SECONDS)
    return write(file, data)

  answer_for(tmp_path, monkeypatch, "write", hang)
  recorder = Recorder(tmp_path, "learner-0", 0, start_time=0.0)
  recorder.record(events.Started())
  assert stuck.wait(PATIENCE_SECONDS)
  for number in range(1000):  # every one returns although the disk does not
    recorder.record(step(number))
  assert not recorder.path.read_bytes()
  free.set()
  recorder.close()
  assert len(read_events(tmp_path)) == 1001


def test_events_after_close_are_lost_not_raised(tmp_path):
  recorder = Recorder(tmp_path, "learner-0", 0, start_time=0.0)
  recorder.close()
  recorder.close()
  recorder.record(step(0))
  assert not recorder.path.exists()


@pytest.mark.parametrize(
  "role, parts",
  [
    ("learner-2", ("learner", 2)),
    ("learner-12", ("learner", 12)),
    ("engine", ("engine", -1)),
    ("", ("", -1)),
    ("learner-²", ("learner", -1)),
    ("learner-02", ("learner", -1)),
    pytest.param(f"learner-{'9' * 5000}", ("learner", -1), id="a number too long for Python"),
  ],
)
def test_parse_role(role, parts):
  assert parse_role(role) == parts


@pytest.mark.parametrize("code", [errno.EACCES, errno.ESTALE])
def test_a_folder_that_cannot_be_listed_is_not_taken_for_an_empty_one(tmp_path, monkeypatch, code):
  """A run whose snapshots were out of reach, too, began anew: it seemed to have none."""
  with Recorder(tmp_path, "syncer-0", 0, start_time=0.0) as recorder:
    recorder.record(events.Snapshot(snapshot=4, roles=(), lacks=(), seconds=0.0))
  assert newest_event(tmp_path, events.Snapshot, "syncer-0").snapshot == 4
  follower = Follower(tmp_path)
  real = {name: getattr(os, name) for name in ("listdir", "scandir")}
  for name in real:

    def denied(path=".", name=name):
      if str(path).endswith("events"):
        raise OSError(code, os.strerror(code), str(path))
      return real[name](path)

    monkeypatch.setattr(os, name, denied)
  for read in (
    lambda: newest_event(tmp_path, events.Snapshot, "syncer-0"),
    lambda: read_events(tmp_path),
    follower.poll,
  ):
    with pytest.raises(Unanswered, match=r"--workdir = .*: its events cannot be listed .*Fix: "):
      read()
  monkeypatch.undo()
  assert len(follower.poll()) == 1
