"""Requests are read once each, whatever else stands in their file."""

from __future__ import annotations

import errno
import time

import pytest

from ddiloco.workdir import RequestFile, append_request
from tests.disks import answer_for


@pytest.fixture
def path(tmp_path):
  return tmp_path / "asked.jsonl"


def read(requests: RequestFile) -> list[int]:
  return [request for _, request in requests.poll()]


def test_each_is_read_once_and_half_a_line_waits_for_its_other_half(path):
  requests = RequestFile(path, lambda fields: fields["n"], "number")
  assert read(requests) == []
  append_request(path, {"n": 1})
  assert read(requests) == [1] and read(requests) == []
  with path.open("ab") as file:
    file.write(b'{"time": 0, ')
  assert read(requests) == []
  with path.open("ab") as file:
    file.write(b'"n": 2}\n')
  assert read(requests) == [2] and read(requests) == []


@pytest.mark.parametrize(
  "odd, asked",
  [
    (b"one\rtwo\n", []),
    (b"\r\n", []),
    (b"\xff\n", []),
    (b'{"time": 0,\r"n": 2}\r\n', [2]),
  ],
)
def test_an_odd_line_does_not_hide_those_after_it(path, odd, asked, capsys):
  requests = RequestFile(path, lambda fields: fields["n"], "number")
  append_request(path, {"n": 1})
  with path.open("ab") as file:
    file.write(odd)
  append_request(path, {"n": 3})
  assert read(requests) == [1, *asked, 3] and read(requests) == []
  assert ("asks for no number" in capsys.readouterr().err) != bool(asked)


def test_what_is_there_already_is_no_news_where_only_news_are_wanted(path):
  append_request(path, {"n": 1})
  requests = RequestFile(path, lambda fields: fields["n"], "number", news_only=True)
  append_request(path, {"n": 2})
  assert read(requests) == [2]


def test_only_what_is_there_already_has_an_age(path, monkeypatch):
  """A fault goes on for the rest of its time in a role that starts again; the clock of who asks for
  one now may be another."""
  append_request(path, {"n": 1})
  requests = RequestFile(path, lambda fields: fields["n"], "number")
  append_request(path, {"n": 2})
  now = time.time
  monkeypatch.setattr(time, "time", lambda: now() + 100.0)
  (old, _), (new, _) = requests.poll()
  assert 100.0 <= old < 200.0 and new == 0.0


def cuts_off(write, file, data):
  return write(file, data[:9])


def test_a_request_that_a_full_disk_cuts_off_is_an_error(tmp_path, monkeypatch):
  """The dashboard said that a fault was requested, and no role ever heard of it."""
  answer_for(tmp_path, monkeypatch, "write", cuts_off)
  with pytest.raises(OSError, match="No space left"):
    append_request(tmp_path / "requests", {"n": 1})


def test_a_request_after_one_that_was_cut_off_is_read(path, monkeypatch, capsys):
  """It stood in the same line, and so was ignored, too."""
  with monkeypatch.context() as full, pytest.raises(OSError):
    answer_for(path.parent, full, "write", cuts_off)
    append_request(path, {"n": 1})
  append_request(path, {"n": 2})
  append_request(path, {"n": 3})
  assert read(RequestFile(path, lambda fields: fields["n"], "number")) == [2, 3]
  assert capsys.readouterr().err.count("asks for no number") == 1


def test_what_was_asked_before_is_not_new_where_the_file_does_not_answer(path, monkeypatch):
  """On Python 3.14 it seemed to be missing, and faults of days before were performed again."""
  append_request(path, {"n": 1})

  def stale(self, **_):
    raise OSError(errno.ESTALE, "Stale file handle", str(self))

  with monkeypatch.context() as patch, pytest.raises(OSError, match="Stale"):
    patch.setattr(type(path), "stat", stale)
    patch.setattr(type(path), "exists", lambda self: False)  # what it says since 3.14
    RequestFile(path, lambda fields: fields["n"], "number", news_only=True)
