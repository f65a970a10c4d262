"""SIGTERM, with real processes: what is there is brought out, a compiler does not hold it up."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from unittest import mock

import numpy as np
import pytest
from common import processes_of

from ddiloco.checkpoint.restore import open_storage
from ddiloco.engines import session
from ddiloco.engines.processes import free_urls
from ddiloco.engines.role_spec import beside, terminates
from ddiloco.models.transformer import language_model
from ddiloco.roles import initial
from tests.engines.real import RealRun, tiny
from tests.strikes import Interrupt

STUCK = "tests.engines.stuck"  # as ddiloco, but compiling never ends


@pytest.mark.slow
@pytest.mark.parametrize(
  ("engine", "number"), [("threads", signal.SIGTERM), ("processes", signal.SIGINT)]
)
def test_a_signal_drains_a_run(tmp_path, engine, number):
  """On threads as on processes: learners bring out what they have, shards merge it."""
  config = tiny(10**7, min_step_seconds=0.06, sync={"snapshot_steps": 7})
  with RealRun(tmp_path, config, "train", f"--engine={engine}", "--cpu") as run:
    run.wait_for(lambda: run.events("snapshot"), "a snapshot")
    assert run.ends(number) == 130, run.said()
  assert "Traceback" not in run.said()
  outcome, workdir = run.outcome(), run.workdir
  assert outcome["reason"] == "stopped" and "lost" not in outcome
  assert np.isfinite(outcome["loss_merged"])
  result = session.load_result(workdir, config)
  assert result.keys() == language_model(config.model).shapes().keys()
  summary = json.loads((workdir / "report" / "summary.json").read_text())
  assert summary["reason"] == "stopped" and summary["loss_merged"] == outcome["loss_merged"]
  ended = run.events("stopped", "learner")
  assert len(ended) == 2
  for event in ended:
    assert event.unmerged_tokens == 0, event
    assert event.reason == "left, and everything it had is merged"
    if engine == "processes":
      assert "nothing is lost" in (workdir / "logs" / f"{event.role}.log").read_text()
  last_step = max(e.time for e in run.events("step"))
  assert any(e.time > last_step for e in run.events("commit")), "merged after that"
  storage = open_storage(config, initial.make_plan(config), workdir, "run")
  assert storage.committed(), "it goes on from there"
  assert processes_of(workdir) == []


@pytest.mark.slow
@pytest.mark.parametrize(
  ("engine", "number", "status"),
  [("", signal.SIGTERM, 0), ("", signal.SIGINT, 130), ("threads", signal.SIGTERM, 130)],
)
def test_a_signal_while_it_compiles_ends_it_in_seconds(tmp_path, engine, number, status):
  """One learner, or a whole run, whose status is that of an interrupt after both signals."""
  (url,) = free_urls(1)
  arguments = ("train",) if engine else ("learner", "--learner=0", f"--syncers={url}")
  config = tiny(10**6, sync={} if engine else {"num_shards": 1})
  with RealRun(tmp_path, config, *arguments, "--cpu", module=STUCK) as run:
    run.wait_for(lambda: "stuck" in run.said(), "compiling")
    assert run.ends(number) == status
  assert not run.events("compiled"), "it had not done"
  if engine:
    assert "interrupted" in run.said()
    assert [e.reason for e in run.events("run_finished")] == ["stopped"]
  else:
    assert "asked to end before it had begun; nothing is lost" in run.said(), run.said()


# --- in pieces ------------------------------------------------------------------------------------


def test_what_runs_beside_returns_raises_and_is_left_behind():
  assert beside(lambda: 7) == 7
  with pytest.raises(ZeroDivisionError):
    beside(lambda: 1 // 0)
  stuck = threading.Event()
  with pytest.raises(KeyboardInterrupt):
    beside(lambda: stuck.wait(60), mock.Mock(side_effect=KeyboardInterrupt))
  stuck.set()


def test_a_wait_for_what_runs_beside_may_be_interrupted_anywhere(monkeypatch):
  """At some places the interrupt became an error about a lock: a role's status told of a crash."""
  monkeypatch.setattr("ddiloco.engines.role_spec.POLL_SECONDS", 0.001)
  interrupt, stuck, waits = Interrupt(beside.__code__), threading.Event(), 0
  try:
    while not interrupt.missed:
      waits += 1
      with interrupt, pytest.raises(KeyboardInterrupt):
        beside(lambda: stuck.wait(60), mock.Mock(side_effect=[None, KeyboardInterrupt]))
  finally:
    stuck.set()
  assert waits > 10


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_is_an_event_while_it_lasts_and_in_the_main_thread(number):
  """So is SIGHUP: the work since the last snapshot was lost when a terminal was closed."""
  asked, before = threading.Event(), signal.signal(number, signal.SIG_DFL)  # nohup ignores it
  try:
    with terminates(asked):
      os.kill(os.getpid(), number)
      assert asked.wait(10)
    assert signal.getsignal(number) == signal.SIG_DFL
  finally:
    signal.signal(number, before)
  errors = []

  def elsewhere():
    try:
      with terminates(asked):
        pass
    except ValueError as error:
      errors.append(error)

  thread = threading.Thread(target=elsewhere)
  thread.start()
  thread.join()
  assert not errors


def test_the_first_ctrl_c_asks_and_the_second_one_interrupts():
  asked, before = threading.Event(), signal.getsignal(signal.SIGINT)
  with terminates(asked) as heard:
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    assert asked.wait(10) and heard == [signal.SIGTERM, signal.SIGINT]
    with pytest.raises(KeyboardInterrupt):
      os.kill(os.getpid(), signal.SIGINT)
      time.sleep(10)
  assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_ctrl_c_stays_ignored_in_the_background_of_a_shell(number):
  asked, before = threading.Event(), signal.signal(number, signal.SIG_IGN)
  try:
    with terminates(asked) as heard:
      os.kill(os.getpid(), number)
      os.kill(os.getpid(), signal.SIGTERM)
      assert asked.wait(10) and heard == [signal.SIGTERM]
    assert signal.getsignal(number) is signal.SIG_IGN
  finally:
    signal.signal(number, before)
