"""What a supervisor sees of a process: that it hangs as a whole, and its last events."""

from __future__ import annotations

import functools
import math
import os
import signal
from types import SimpleNamespace

import pytest
from common import processes_of

from ddiloco.config import Fault
from ddiloco.engines import processes
from ddiloco.protocol import events, supervisor
from ddiloco.protocol.supervisor import DOWN, UP
from tests.engines.real import events_of, run_here, tiny
from tests.engines.test_processes import LINUX, NAME, Engine
from tests.waits import wait_for


class Alive:
  """A process that gives signs of life until it is `still`."""

  stdin, status = None, None

  def __init__(self):
    self.still, self.got = False, []

  def poll(self) -> int | None:
    return self.status

  def heard(self) -> bool:
    return not self.still

  def send_signal(self, number: int) -> None:
    self.got.append(number)


@pytest.fixture
def alive(tmp_path, monkeypatch):
  """An engine around a process that is at work since 0, and that process."""

  def start(name: str, *faults: Fault) -> tuple[Engine, Alive]:
    engine, process = Engine(tmp_path, name, "", *faults), Alive()
    monkeypatch.setattr(processes.time, "monotonic", lambda: engine.now)
    engine.child._spawns = [lambda command, log: process]
    engine.tick(0.0, global_step=-1)
    engine._feed(supervisor.Working(name, 0.0))
    engine.turns(0, 10)
    return engine, process

  return start


@pytest.mark.parametrize(("name", "seconds"), [("syncer-0", 60), (NAME, 600)])
def test_a_process_that_hangs_as_a_whole_is_killed_to_be_started_again(
  alive, capsys, name, seconds
):
  """Nobody did, unless its probe was watched: the fragments of a shard stood still for good."""
  engine, process = alive(name)
  process.still = True
  engine.turns(10, 10 + seconds)
  assert process.status is None and engine.said == [("hung", "")] * (seconds > 60)
  engine.turns(10 + seconds, 12 + seconds)
  assert process.got == [signal.SIGKILL], "once, though its disk holds it for a while"
  process.status = -signal.SIGKILL
  engine.turns(12 + seconds, 13 + seconds)
  assert engine.phase == DOWN
  assert engine.said[0] == ("hung", "") and engine.reasons[0].startswith("killed by SIGKILL: ")
  said = capsys.readouterr().err
  assert f"{name} has not come round for 61 s. Its threads:\nnone runs\n" in said
  assert (
    f"{name}: its process hangs for {seconds + 1} s, and is killed to be started again." in said
  )
  process.status = None
  engine.turns(13 + seconds, 100 + seconds)
  assert engine.phase == UP and process.got == [signal.SIGKILL], "of the life that hung"


def test_who_stands_still_by_plan_or_with_its_supervisor_or_is_not_there_does_not_hang(alive):
  stall = Fault("stall", "syncer-0", at_step=1, seconds=500.0)
  kill = Fault("kill", "syncer-0", at_step=2, seconds=500.0)
  engine, process = alive("syncer-0", stall, kill)
  process.still = True
  engine.turns(1000, 1061)  # the supervisor itself stood still before
  process.still = False
  engine.tick(1061, global_step=1)
  engine.turns(1061, 1062)  # its last sign of life may be seen only now
  process.still = True
  engine.turns(1062, 1600)
  process.still = False
  engine.turns(1600, 1700)
  engine.tick(1700, global_step=2)
  process.status = -signal.SIGKILL
  engine.turns(1700, 2200)
  process.status = None
  engine.turns(2200, 2300)
  process.still = True  # it begins, which may take long
  engine.turns(2300, 2400)
  assert engine.phase == UP and process.status is None
  assert [kind for kind, _ in engine.said] == ["fault", "fault", "exit", "restart"]


def test_what_a_life_has_logged_is_not_taken_for_work_of_the_next_one(alive):
  """A learner that died as soon as it had joined was never given up: the next life was healthy
  before it had begun."""
  engine, process = alive(NAME)
  joined, engine._listeners = [events.Joined(role=NAME, global_step=0)], []
  engine._follower = SimpleNamespace(poll=lambda: [joined.pop()] if joined else [])
  engine._follow_at, process.status = engine.now + 1, 3
  engine._observe()
  assert engine.phase == DOWN and not joined
  process.status = None
  engine.turns(10, 30)
  assert engine.phase == UP and engine._state.roles[NAME].working_since == math.inf
  joined.append(events.Joined(role=NAME, global_step=0))
  engine.turns(30, 31)
  assert not joined and engine._state.roles[NAME].working_since == 30


@pytest.mark.slow
@pytest.mark.skipif(not LINUX, reason="looks into /proc")
def test_a_shard_that_is_stopped_for_good_is_replaced_and_the_run_goes_on(tmp_path):
  config = tiny(10**7, min_step_seconds=0.1, run={"hang_seconds": 8.0}, sync={"num_shards": 1})
  find = functools.partial(events_of, tmp_path)
  with run_here(config, tmp_path) as run:
    wait_for(lambda: find("commit"), "a commit")
    os.kill(*processes_of(tmp_path, "--shard=0"), signal.SIGSTOP)
    back, *_ = wait_for(lambda: find("started", "syncer")[1:], "its next life")
    later = lambda: [e for e in find("commit") if e.time > back.time]
    wait_for(later, "a commit of it")
  assert (run.result().reason, run.result().lost) == ("stopped", "")
  hung = [e.stacks for e in find("hung", "engine") if e.target == "syncer-0"]
  assert hung == [processes.STILL], "others may be late on a busy machine"
  assert {e.target for e in find("exit")} == {"syncer-0"}
