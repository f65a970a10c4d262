"""The recorder: what is on disk, what a kill or a bad disk does to it, and that nobody waits."""

from __future__ import annotations

import json
import math
import os
import threading

import numpy as np
import pytest

from ddiloco.observe.events import EventLog, NullRecorder, Recorder, parse_role, read_events


def _refuse(constant):
  raise AssertionError(f"{constant} is not JSON")


def _lines(workdir, role="learner-0"):
  text = (workdir / "events" / f"{role}.jsonl").read_text()
  return [json.loads(line, parse_constant=_refuse) for line in text.splitlines()]


def test_lines_on_disk(tmp_path, fake_clock):
  with Recorder(tmp_path, "learner-0", 3, start_time=100.0, clock=fake_clock) as recorder:
    fake_clock.now = 100.5
    recorder.event("joined", clock=7, seconds=0.25)
    fake_clock.now = 102.0
    recorder.event("push", fragment=1, weights={2: 0.5})
  common = {"role": "learner-0", "incarnation": 3}
  assert _lines(tmp_path) == [
    {"time": 0.5, **common, "kind": "joined", "clock": 7, "seconds": 0.25},
    {"time": 2.0, **common, "kind": "push", "fragment": 1, "weights": {"2": 0.5}},
  ]
  assert recorder.lost_events == 0


def test_roles_are_read_together_in_order_of_time(tmp_path, fake_clock):
  for role, times in (("learner-0", (1.0, 4.0)), ("syncer-0", (0.5, 3.0))):
    with Recorder(tmp_path, role, 0, start_time=0.0, clock=fake_clock) as recorder:
      for fake_clock.now in times:
        recorder.event("traffic")
  assert [event["time"] for event in read_events(tmp_path)] == [0.5, 1.0, 3.0, 4.0]


def test_no_folder_is_no_events(tmp_path):
  assert read_events(tmp_path / "nothing") == EventLog() == []


def test_a_new_incarnation_appends_after_a_torn_line(tmp_path):
  with Recorder(tmp_path, "learner-0", 0, start_time=0.0) as recorder:
    recorder.event("step", step=1)
  path = tmp_path / "events" / "learner-0.jsonl"
  with path.open("a") as file:
    file.write('{"time": 1.0, "role": "learner-0", "ki')  # killed inside this write
  with Recorder(tmp_path, "learner-0", 1, start_time=0.0) as recorder:
    recorder.event("step", step=2)
  events = read_events(tmp_path)
  assert [(event["incarnation"], event["step"]) for event in events] == [(0, 1), (1, 2)]
  assert events.torn_lines == 1


def test_a_log_cut_anywhere_gives_its_whole_lines(tmp_path):
  folder = tmp_path / "events"
  folder.mkdir()
  lines = [b'{"time":%d,"role":"learner-0","kind":"step"}\n' % k for k in range(3)]
  whole = b"".join(lines)
  for cut in range(len(whole) + 1):
    (folder / "learner-0.jsonl").write_bytes(whole[:cut])
    events = read_events(tmp_path)
    complete, rest = divmod(cut, len(lines[0]))
    only_newline_missing = rest == len(lines[0]) - 1
    assert len(events) == complete + only_newline_missing
    assert events.torn_lines == (rest > 0 and not only_newline_missing)


@pytest.mark.parametrize(
  "line", [b"[1]", b"\xff\x00", b'{"time":"x","role":"a","kind":"b"}', b"{}"]
)
def test_lines_that_are_no_events_are_counted(tmp_path, line):
  (tmp_path / "events").mkdir()
  (tmp_path / "events" / "engine.jsonl").write_bytes(line + b"\n")
  events = read_events(tmp_path)
  assert (list(events), events.torn_lines) == ([], 1)


def test_not_finite_numbers_are_valid_json_and_come_back(tmp_path):
  with Recorder(tmp_path, "learner-0", 0, start_time=0.0) as recorder:
    recorder.event("step", loss=math.nan, grad_norm=math.inf, parts={1: [-math.inf, 2.0]})
  (line,) = _lines(tmp_path)
  assert (line["loss"], line["grad_norm"], line["parts"]) == ("nan", "inf", {"1": ["-inf", 2.0]})
  (event,) = read_events(tmp_path)
  assert math.isnan(event["loss"])
  assert event["grad_norm"] == math.inf
  assert event["parts"] == {"1": [-math.inf, 2.0]}


def test_values_json_does_not_know(tmp_path):
  with Recorder(tmp_path, "learner-0", 0, start_time=0.0) as recorder:
    recorder.event("a", loss=np.float32(1.5), count=np.int64(3), bad=np.float32("nan"))
    recorder.event("b", asked={2, 1}, path=tmp_path, mesh=(1, 2))
  first, second = _lines(tmp_path)
  assert (first["loss"], first["count"], first["bad"]) == (1.5, 3, "nan")
  assert (second["asked"], second["path"], second["mesh"]) == ([1, 2], str(tmp_path), [1, 2])


def test_listeners_get_the_same_dict(tmp_path):
  first, second = [], []
  with Recorder(
    tmp_path, "engine", 0, start_time=0.0, listeners=(first.append, second.append)
  ) as recorder:
    recorder.event("restart", target="learner/2")
  assert first[0] is second[0]
  assert first[0]["target"] == "learner/2"


def test_a_listener_that_raises_is_dropped_loudly_once(tmp_path, capsys):
  calls, heard = [], []

  def broken(event):
    calls.append(event)
    raise RuntimeError("no screen")

  with Recorder(
    tmp_path, "engine", 0, start_time=0.0, listeners=(broken, heard.append)
  ) as recorder:
    recorder.event("a")
    recorder.event("b")
  assert (len(calls), len(heard), len(read_events(tmp_path))) == (1, 2, 2)
  assert capsys.readouterr().err.count("no screen") == 1


def test_a_denied_path_is_one_warning_and_the_run_goes_on(tmp_path, capsys):
  (tmp_path / "file").write_text("not a folder")
  recorder = Recorder(tmp_path / "file", "learner-0", 0, start_time=0.0)
  for step in range(3):
    recorder.event("step", step=step)
  recorder.event("stopped", reason="done")
  recorder.close()
  assert recorder.lost_events == 4
  assert capsys.readouterr().err.count("WARNING") == 1


def test_a_full_disk_tears_one_line_and_is_counted(tmp_path, capsys, monkeypatch):
  recorder = Recorder(tmp_path, "learner-0", 0, start_time=0.0)
  write, first = os.write, threading.Event()

  def nearly_full(file, data):
    if data.startswith(b"\n"):
      return write(file, data)  # there is room again
    first.set()
    return write(file, data[: data.index(b"\n") + 5])

  monkeypatch.setattr(os, "write", nearly_full)
  for step in range(3):
    recorder._drain.put({"time": 0.0, "role": "learner-0", "kind": "step", "step": step})
  recorder._drain.wake()
  assert first.wait(10)
  recorder.event("stopped", reason="over")
  recorder.close()
  events = read_events(tmp_path)
  written = [event.get("step", event["kind"]) for event in events]
  assert written == [0, "stopped"] and events.torn_lines == 1
  assert recorder.lost_events == 2
  assert "is the disk full?" in capsys.readouterr().err


def test_a_stuck_disk_does_not_hold_the_caller(tmp_path, monkeypatch):
  write, stuck, free = os.write, threading.Event(), threading.Event()

  def hang(file, data):
    stuck.set()
    assert free.wait(10)
    return write(file, data)

  monkeypatch.setattr(os, "write", hang)
  recorder = Recorder(tmp_path, "learner-0", 0, start_time=0.0)
  recorder.event("started")
  assert stuck.wait(10)
  for step in range(1000):  # every one returns although the disk does not
    recorder.event("step", step=step)
  assert not recorder.path.read_bytes()
  free.set()
  recorder.close()
  assert len(read_events(tmp_path)) == 1001


def test_events_after_close_are_counted_not_raised(tmp_path):
  recorder = Recorder(tmp_path, "learner-0", 0, start_time=0.0)
  recorder.close()
  recorder.close()
  recorder.event("step")
  assert recorder.lost_events == 1


def test_the_null_recorder_has_the_same_face():
  public = {name for name in dir(Recorder) if not name.startswith("_")}
  assert public <= {name for name in dir(NullRecorder()) if not name.startswith("_")}
  with NullRecorder() as recorder:
    recorder.event("step", loss=1.0)


@pytest.mark.parametrize(
  "role, parts",
  [
    ("learner-2", ("learner", 2)),
    ("learner/12", ("learner", 12)),
    ("engine", ("engine", -1)),
    ("", ("", -1)),
  ],
)
def test_parse_role(role, parts):
  assert parse_role(role) == parts
