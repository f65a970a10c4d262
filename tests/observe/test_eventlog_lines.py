"""Logs with anything in them: damaged lines are counted and passed over, the rest comes by time."""

from __future__ import annotations

import random
import subprocess
import sys
import tracemalloc

import pytest

from ddiloco.observe import eventlog
from ddiloco.observe.eventlog import EventStream, Follower, newest_event, read_events, to_line
from ddiloco.protocol.events import Commit, Restart, Step, decode
from tests.made_events import made
from tests.observe.conftest import line, times

DAMAGE = {
  "deeply nested": b'{"time":2.0,"role":"x","kind":"crash","a":' + b"[" * 200_000,
  "nested": b'{"time":2.0,"role":"x","kind":"k"' + b',"a":[{"b":1' * 25 + b"}]" * 25 + b"}",
  "binary": bytes(range(1, 10)) + bytes(range(11, 256)),
  "NUL bytes": b"\0" * 5000,
  "no object": b"[1, 2]",
  "nothing": b"{}",
  "no time": b'{"role":"x","kind":"k"}',
  "no role": b'{"time":2.0,"kind":"restart","target":"x"}',
  "a time in letters": b'{"time":"x","role":"x","kind":"k"}',
  "a time that is none": b'{"time":NaN,"role":"x","kind":"k"}',
  "a time without end": b'{"time":1e400,"role":"x","kind":"k"}',
  "a time before all others": b'{"time":-1e99,"role":"x","kind":"k"}',
  "a number of many digits": b'{"time":1' + b"0" * 6000 + b',"role":"x","kind":"k"}',
  "true is no time": b'{"time":true,"role":"x","kind":"k"}',
  "torn": b'{"time":2.0,"ro',
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_line_is_counted_and_the_rest_is_read(tmp_path, log, what):
  assert decode(DAMAGE[what]) is None
  log(line(1.0) + DAMAGE[what] + b"\n" + line(3.0))
  found = read_events(tmp_path)
  assert (times(found), found.torn_lines) == ([1.0, 3.0], 1)
  follower = Follower(tmp_path)
  assert times(follower.poll()) == [1.0, 3.0] and follower.torn_lines == 1


def test_a_gigantic_line_is_passed_over_without_being_held(tmp_path, log, monkeypatch):
  monkeypatch.setattr(eventlog, "MOST_LINE_BYTES", 100_000)
  monkeypatch.setattr(eventlog, "SCAN_BYTES", 50_000)
  log(line(1.0))
  for _ in range(30):
    log(b'{"time":2.0,"role":"x","kind":"k","text":"' + b"y" * 1_000_000)
  log(b'"}\n' + line(3.0) + line(4.0))
  tracemalloc.start()
  try:
    found = read_events(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
  finally:
    tracemalloc.stop()
  assert (times(found), found.torn_lines) == ([1.0, 3.0, 4.0], 1)
  assert peak < 2_000_000


@pytest.mark.parametrize("block", [7, 64, 1 << 20])
def test_the_newest_event_is_found_in_whatever_blocks_a_log_is_read(
  tmp_path, log, monkeypatch, block
):
  monkeypatch.setattr(eventlog, "SCAN_BYTES", block)
  monkeypatch.setattr(eventlog, "MOST_LINE_BYTES", 500)
  log(b"", "syncer-1")
  assert newest_event(tmp_path, Step) is None
  log(line(1.0) + line(2.0) + b"\n" + to_line(made(3.0, "learner-0", "restart")))
  log(b'{"time":3.5,"role":"learner-0","kind":"note","text":"\\"kind\\":\\"step\\""}\n')
  log(b'{"kind":"step",' * 200 + b"\n" + line(4.0)[:-5])
  assert newest_event(tmp_path, Step).time == 2.0
  assert newest_event(tmp_path, Restart).time == 3.0
  assert newest_event(tmp_path, Commit) is None
  log(line(9.0, "syncer-0")[:-1], "syncer-0")
  assert newest_event(tmp_path, Step).time == 9.0
  assert newest_event(tmp_path, Step, "learner-0").time == 2.0


CUT = """
import os, pathlib, sys
from ddiloco.observe import eventlog
from ddiloco.protocol import events
log, decode = pathlib.Path(sys.argv[1], "events", "learner-0.jsonl"), events.decode
def cut(line):
  if b"torn" in line:
    os.truncate(log, 0)
  return decode(line)
events.decode = cut
print(eventlog.newest_event(sys.argv[1], events.Joined))
"""


def test_a_log_that_is_cut_off_while_it_is_searched_kills_no_process(tmp_path, log):
  log(line(1.0) * 30_000 + b'{"kind":"joined","torn')
  command = [sys.executable, "-c", CUT, str(tmp_path)]
  assert subprocess.check_output(command) == b"None\n"


def test_a_line_that_never_ends_is_not_scanned_at_every_look(tmp_path, log, monkeypatch):
  log(line(1.0))
  follower = Follower(tmp_path)
  assert times(follower.poll()) == [1.0]
  log(b"x" * 300_000)
  assert follower.poll() == []
  looked = []
  monkeypatch.setattr(eventlog, "_read", lambda path, a, b: looked.append((a, b)) or b"")
  assert follower.poll() == [] and looked == []


def test_where_a_clock_was_set_back_a_roles_events_keep_their_order(tmp_path, log):
  """A role died and came back on a machine whose clock is half an hour behind."""
  log(b"".join(line(t) for t in (10.0, 1811.0, 13.0, 14.0, 1820.0)))
  log(b"".join(line(t, "syncer-0") for t in (10.5, 1812.0)), "syncer-0")
  assert times(read_events(tmp_path)) == [10.0, 10.5, 1811.0, 13.0, 14.0, 1812.0, 1820.0]


def test_what_threads_of_a_role_swapped_keeps_its_order(tmp_path, log):
  log(b"".join(line(t, position=n) for n, t in enumerate((1.0, 1.2, 1.1999, 1.3))))
  assert [event.position for event in read_events(tmp_path)] == [0, 1, 2, 3]


@pytest.mark.parametrize("seed", range(5))
def test_merged_lazily_it_is_what_sorting_all_of_it_gives(tmp_path, log, seed, monkeypatch):
  monkeypatch.setattr(eventlog, "PIECE_BYTES", 100 + 37 * seed)
  monkeypatch.setattr(eventlog, "SCAN_BYTES", 150 + 41 * seed)
  chance = random.Random(seed)
  wrote = []
  for role in ("engine", "learner-0", "learner-1", "syncer-0"):
    time = 0.0
    for n in range(200):
      time += chance.choice([0.0, 0.5, 1.0, chance.uniform(0, 20)])
      if chance.random() < 0.1:
        log(DAMAGE["binary"] + b"\n\n", role)
      log(line(round(time, 3), role, position=n), role)
      wrote.append(made(round(time, 3), role, "step", position=n))

  def key(event):
    return event.time, event.role, event.position

  stream = EventStream(tmp_path)
  assert list(map(key, stream)) == sorted(map(key, wrote)) and stream.torn_lines > 20


def test_a_follower_passes_over_what_is_no_news(tmp_path, log):
  log(line(1.0) + line(2.0)[:5])
  follower = Follower(tmp_path)
  follower.skip()
  log(line(2.0)[5:] + line(3.0))
  assert times(follower.poll()) == [2.0, 3.0]


def test_the_bounds_of_a_line_leave_room_for_thousands_of_members():
  reasons = {str(m): "silent for 12.3 s, counted as lost" for m in range(10_000)}
  commit = made(1.0, "syncer-0", "commit", missing=reasons)
  assert len(to_line(commit)) < eventlog.MOST_LINE_BYTES
  assert decode(to_line(commit)) == commit
