"""SIGTERM, with real processes: what is there is brought out, a compiler does not hold it up."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import numpy as np
import pytest

from ddiloco.checkpoint.restore import open_storage
from ddiloco.engines.processes import free_urls
from ddiloco.engines.role_spec import beside, terminates
from ddiloco.observe.eventlog import read_events
from tests.engines.real import events_of, start, tiny, wait_for

pytestmark = pytest.mark.timeout(300)
STUCK = "tests.engines.stuck"  # as ddiloco, but compiling never ends


def begin(tmp_path, config, *arguments: str, module: str = "ddiloco"):
  (tmp_path / "config.json").write_text(config.to_json())
  flags = [f"--config={tmp_path / 'config.json'}", f"--workdir={tmp_path / 'run'}", "--cpu"]
  return start(*arguments, *flags, log=tmp_path / "log", module=module)


def drained(tmp_path, engine: str):
  """A run that SIGTERM ended in the middle: (status, outcome, events)."""
  config = tiny(10**7, min_step_seconds=0.02, sync={"snapshot_steps": 20})
  run, log = begin(tmp_path, config, "train", f"--engine={engine}"), tmp_path / "log"
  try:
    wait_for(lambda: events_of(tmp_path / "run", "snapshot"), "a snapshot", run, log)
    run.send_signal(signal.SIGTERM)
    status = run.wait(100)
  finally:
    run.kill()
  assert "Traceback" not in log.read_text(), log.read_text()
  outcome = json.loads((tmp_path / "run" / "outcome.json").read_text())
  return config, status, outcome, read_events(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_sigterm_drains_a_run(tmp_path, engine):
  """On threads as on processes: learners bring out what they have, shards merge it."""
  config, status, outcome, events = drained(tmp_path, engine)
  assert status == 130
  assert outcome["reason"] == "stopped" and "lost" not in outcome
  assert np.isfinite(outcome["loss_merged"]) and (tmp_path / "run" / "result").is_dir()
  ended = [e for e in events if e.kind == "stopped" and e.role.startswith("learner")]
  assert len(ended) == 2
  for event in ended:
    assert event.unmerged_tokens == 0, event
    assert event.reason == "left, and everything it had is merged"
  last_step = max(e.time for e in events if e.kind == "step")
  assert any(e.kind == "commit" and e.time > last_step for e in events), "merged after that"
  from ddiloco.roles import initial

  storage = open_storage(config, initial.make_plan(config), tmp_path / "run", "run")
  assert storage.committed(), "it goes on from there"


def compiling(tmp_path, run) -> None:
  log = tmp_path / "log"
  wait_for(lambda: "stuck in a compiler" in log.read_text(), "compiling", run, log)


@pytest.mark.slow
@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_while_a_learner_compiles_ends_it_in_seconds(tmp_path, number, status):
  config, (url,) = tiny(10**6, sync={"num_shards": 1}), free_urls(1)
  run = begin(tmp_path, config, "learner", "--learner=0", f"--syncers={url}", module=STUCK)
  try:
    compiling(tmp_path, run)
    asked = time.monotonic()
    run.send_signal(number)
    assert run.wait(60) == status
    print(f"ended {time.monotonic() - asked:.1f} s after the signal")
  finally:
    run.kill()
  said = (tmp_path / "log").read_text()
  assert "asked to end before it had begun; nothing is lost" in said, said
  assert not events_of(tmp_path / "run", "compiled"), "it had not done"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_threads_compile_ends_the_run_in_seconds(tmp_path, number):
  run = begin(tmp_path, tiny(10**6), "train", module=STUCK)
  try:
    compiling(tmp_path, run)
    asked = time.monotonic()
    run.send_signal(number)
    assert run.wait(60) == 130
    print(f"ended {time.monotonic() - asked:.1f} s after the signal")
  finally:
    run.kill()
  assert "interrupted" in (tmp_path / "log").read_text()
  (finished,) = events_of(tmp_path / "run", "run_finished")
  assert finished.reason == "stopped"
  assert not events_of(tmp_path / "run", "compiled")


# --- in pieces ------------------------------------------------------------------------------------


def test_what_runs_beside_returns_raises_and_is_left_behind():
  def leave():
    raise KeyboardInterrupt

  assert beside(lambda: 7) == 7
  with pytest.raises(ZeroDivisionError):
    beside(lambda: 1 // 0)
  stuck = threading.Event()
  with pytest.raises(KeyboardInterrupt):
    beside(lambda: stuck.wait(60), leave)
  stuck.set()


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
