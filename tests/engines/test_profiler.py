"""Traces of chosen steps: taken beside a run, with the names of what a learner does, or refused."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from unittest import mock

import jax
import pytest

from ddiloco.cli import main
from ddiloco.config import ConfigError
from ddiloco.engines import profiler as profiler_module
from ddiloco.engines.profiler import Profiler, ProfileRequest, take_profile
from ddiloco.environment import BAD_USAGE
from ddiloco.protocol import events
from ddiloco.workdir import OUTCOME, PROFILE_REQUESTS, append_request
from tests.made_events import made
from tests.waits import wait_for

ROLE, SECONDS = "learner-1", 60.0


class Steps:
  """A learner that makes steps of a millisecond, and what its process has to do with traces."""

  def __init__(self, workdir, monkeypatch, at=100):
    monkeypatch.setattr(profiler_module, "LOOK_SECONDS", 0.01)
    self.recorded, self._news = [], threading.Condition()
    self.profiler = Profiler(workdir, lambda: self)
    self.at, self._end = at, threading.Event()
    self._thread = threading.Thread(target=self._live, daemon=True)

  def __enter__(self):
    self._thread.start()
    return self

  def __exit__(self, *_):
    self._end.set()
    self._thread.join(SECONDS)
    self.profiler.close()

  def _live(self):
    while not self._end.wait(0.001):
      with jax.profiler.StepTraceAnnotation("step", step_num=self.at + 1):
        self.at += 1
      self.profiler(made(0.0, ROLE, "step", global_step=self.at))

  def record(self, event):
    with self._news:
      self.recorded.append(event)
      self._news.notify_all()

  def wait(self, count=1):
    with self._news:
      assert self._news.wait_for(lambda: len(self.recorded) >= count, SECONDS), self.recorded
      return self.recorded[-1]


def ask(workdir, role=ROLE, **fields):
  append_request(workdir / PROFILE_REQUESTS, {"role": role, **fields})


def steps_in(workdir, path):
  """The numbers of the steps that a trace shows."""
  (file,) = (workdir / path).glob("plugins/profile/*/*.xplane.pb")
  found = set()
  for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
    for line in plane.lines:
      for event in line.events:
        if event.name == "step":
          found.add(dict(event.stats)["step_num"])
  return found


def test_the_next_steps_are_in_the_trace_as_a_whole(tmp_path, monkeypatch):
  with Steps(tmp_path, monkeypatch) as learner:
    ask(tmp_path, steps=4)
    found = learner.wait()
  assert isinstance(found, events.Profiled), found
  assert (found.target, found.path, found.steps) == (ROLE, f"profiles/{ROLE}", 4)
  assert {found.first_step + n for n in range(4)} <= steps_in(tmp_path, found.path)


def test_it_begins_with_the_step_that_was_chosen(tmp_path, monkeypatch):
  learner = Steps(tmp_path, monkeypatch)
  ask(tmp_path, steps=2, from_step=1100)
  ask(tmp_path, steps=1)  # and does not keep another one waiting
  for traces, (first, last, first_whole) in enumerate([(100, 1000, 102), (1001, 1200, 1100)], 1):
    for at in range(first, last + 1):
      learner.profiler(made(0.0, ROLE, "step", global_step=at))
      if at == first_whole - 2:  # the next step is under way when a trace begins
        wait_for(lambda: learner.profiler._traced[0] == ROLE, f"trace {traces}, at step {at}")
    assert learner.wait(traces).first_step == first_whole
  learner.profiler.close()


def test_a_trace_ends_when_the_learner_makes_no_more_steps(tmp_path, monkeypatch):
  monkeypatch.setattr(profiler_module, "PATIENCE_SECONDS", 0.3)
  learner = Steps(tmp_path, monkeypatch)
  ask(tmp_path, steps=4)
  learner.profiler(made(0.0, ROLE, "step", global_step=100))
  found = learner.wait()
  learner.profiler.close()
  assert isinstance(found, events.Profiled) and found.steps == 0


def test_one_trace_at_a_time_and_the_run_goes_on(tmp_path, monkeypatch):
  jax.profiler.start_trace(tmp_path / "own")
  try:
    with Steps(tmp_path, monkeypatch) as learner:
      ask(tmp_path, steps=1)
      found = learner.wait()
  finally:
    jax.profiler.stop_trace()
  assert isinstance(found, events.Unprofiled) and "already" in found.reason.lower(), found


def test_a_full_disk_costs_this_trace_and_no_later_one(tmp_path, monkeypatch):
  """JAX kept the trace that it could not write, and took no other one in this process."""
  with Steps(tmp_path, monkeypatch) as learner:
    with monkeypatch.context() as patch:
      patch.setattr(
        os,
        "posix_fallocate",
        mock.Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))),
      )
      ask(tmp_path, steps=1)
      found = learner.wait()
    assert isinstance(found, events.Unprofiled) and "No space left on device" in found.reason
    ask(tmp_path, steps=1)
    assert isinstance(learner.wait(2), events.Profiled)


def test_others_requests_old_ones_and_garbage_are_left_alone(tmp_path, monkeypatch, capsys):
  ask(tmp_path, steps=1)  # before this process
  ask(tmp_path, steps=1, from_step=50)  # and answered by the one before it
  with (tmp_path / PROFILE_REQUESTS).open("a") as file:
    bad = json.dumps({"time": 9e9, "role": ROLE, "steps": 0})
    file.write(f'{{"time": 1, "role": 5\n{bad}\n')
  with Steps(tmp_path, monkeypatch) as learner:
    ask(tmp_path, "learner-2", steps=1)
    ask(tmp_path, steps=3)
    learner.wait()
  assert [found.steps for found in learner.recorded] == [3]
  assert capsys.readouterr().err.count("asks for no trace") == 2


def test_what_was_answered_before_is_not_answered_again_while_another_learner_steps(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(profiler_module, "PATIENCE_SECONDS", 0.3)
  ask(tmp_path, steps=1, from_step=50)  # answered by the process before this one
  learner = Steps(tmp_path, monkeypatch)
  learner.profiler(made(0.0, "learner-2", "step", global_step=100))
  time.sleep(0.2)  # many looks, while learner 1 still restores its part
  ask(tmp_path, "learner-2", steps=1)
  with learner:
    assert learner.wait().target == "learner-2"
  assert len(learner.recorded) == 1


def test_a_request_outlives_the_process_that_did_not_get_there(tmp_path, monkeypatch):
  ask(tmp_path, steps=2, from_step=1000)
  with Steps(tmp_path, monkeypatch) as learner:
    assert learner.wait().first_step >= 1000


def test_what_no_run_can_do_is_refused(tmp_path):
  (tmp_path / "events").mkdir()
  with pytest.raises(ConfigError, match=r"has no events of learner-7.*there are none"):
    take_profile(tmp_path, ProfileRequest("learner-7"), 0.0)
  (tmp_path / "events" / "learner-0.jsonl").touch()
  with pytest.raises(ConfigError, match=r"has no events of learner-7.*\(learner-0\)"):
    take_profile(tmp_path, ProfileRequest("learner-7"), 0.0)
  there, said = take_profile(tmp_path, ProfileRequest("learner-0"), 0.0)
  assert not there and "may still come" in said
  (tmp_path / "profiles.jsonl").unlink()
  (tmp_path / "profiles.jsonl").mkdir()
  with pytest.raises(ConfigError, match=r"cannot be asked for a trace .*Is a directory.*Fix: "):
    take_profile(tmp_path, ProfileRequest("learner-0"), 0.0)
  (tmp_path / OUTCOME).touch()
  with pytest.raises(ConfigError, match="its run is over"):
    take_profile(tmp_path, ProfileRequest("learner-0"), 0.0)


@pytest.mark.parametrize("flag", ["steps=0", "steps=5000", "from_step=-1", "steps=2.5"])
def test_a_request_out_of_range_is_refused_where_it_is_typed_and_where_it_is_read(
  tmp_path, monkeypatch, capsys, flag
):
  assert main(["profile", f"--workdir={tmp_path}", f"--{flag}"]) == BAD_USAGE
  assert f"--{flag}" in capsys.readouterr().err
  name, value = flag.split("=")
  ask(tmp_path, **{name: json.loads(value)})
  with Steps(tmp_path, monkeypatch) as learner:
    wait_for(lambda: "asks for no trace" in capsys.readouterr().err, "the warning")
  assert not learner.recorded
