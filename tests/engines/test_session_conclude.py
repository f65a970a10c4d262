"""The result is saved before anything is evaluated; what fails afterwards loses nothing."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

from ddiloco import workdir as workdirs
from ddiloco.checkpoint import weights
from ddiloco.checkpoint.snapshots import Storage
from ddiloco.config import Config, ConfigError
from ddiloco.engines import session
from ddiloco.engines.engine import RunResult
from ddiloco.engines.role_spec import terminates
from ddiloco.observe import report
from ddiloco.observe.eventlog import read_events, to_line
from ddiloco.roles import initial
from ddiloco.training import data
from ddiloco.workdir import OUTCOME, STARTED, check, held, join, live_in
from tests.engines.test_session_resume import soon_over
from tests.engines.test_threads import Ran, make_config
from tests.made_events import made
from tests.waits import PATIENCE_SECONDS, wait_for

ROOT = Path(__file__).parents[2]


def config_of(**run) -> Config:
  config = make_config(learners=2, steps=60)
  run = {"evaluations": 1, "sample_tokens": 0, **run}
  return dataclasses.replace(config, run=dataclasses.replace(config.run, **run))


CONFIG = config_of()
DRAW = report._draw


@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
  """Pictures take longer than all else at a run's end; tests/observe/ looks at them."""
  monkeypatch.setattr(report, "_draw", lambda *_: None)


def params(value: float) -> dict[str, np.ndarray]:
  shapes = initial.shapes(CONFIG.model)
  return {name: np.full(shape, value, np.float32) for name, shape in shapes.items()}


def first(tree) -> float:
  return float(next(iter(tree.values())).ravel()[0])


def out_of_memory(_) -> float:
  raise MemoryError("no room for 7 GiB of logits")


def conclude(workdir, outcome, loss, config=CONFIG, compare=None) -> dict:
  session.conclude(config, workdir, outcome, loss, compare)
  return json.loads((workdir / OUTCOME).read_text())


def test_the_result_is_there_before_the_first_loss_is_asked_for(tmp_path):
  seen = []

  def loss(tree) -> float:
    seen.append(first(session.load_result(tmp_path, CONFIG)))
    seen.append(json.loads((tmp_path / OUTCOME).read_text())["reason"])
    return 1.0

  known = conclude(tmp_path, RunResult("finished", params(3), {}), loss)
  assert seen == [3.0, "finished"] * 2
  assert known["loss_untrained"] == known["loss_merged"] == 1.0


def test_the_time_of_a_run_is_that_since_it_began_not_since_its_last_start(tmp_path):
  (tmp_path / STARTED).write_text(f"{time.time() - 7200}\n")
  known = conclude(tmp_path, RunResult("finished", params(3), {}), lambda tree: 1.0)
  assert 7200 <= known["seconds"] < 7260


def test_the_report_says_on_which_day_its_run_began(tmp_path):
  """A reader who came later found no date at all."""
  (tmp_path / STARTED).write_text("1700000000.5\n")
  conclude(tmp_path, RunResult("finished", params(3), {}), lambda tree: 1.0)
  said = "<th>began</th><td>2023-11-14 22:13 UTC</td>"
  assert said in (tmp_path / "report" / "index.html").read_text()


def test_steps_are_those_of_all_starts_of_a_run(tmp_path, monkeypatch):
  """Learner 0 made 8 steps, one of them twice; learner 1 two, and came when the run was far."""
  (tmp_path / "events").mkdir()
  log = [made(float(n), "learner-0", "step", step=n, global_step=n) for n in range(1, 6)]
  log += [made(60.0 + n, "learner-0", "step", 1, step=n, global_step=n) for n in range(5, 9)]
  log.append(made(5.0, "learner-1", "step", step=1, global_step=1))
  log.append(made(71.0, "learner-1", "step", step=2, global_step=20))
  log.append(made(70.0, "evaluator", "evaluation", loss=2.0))
  for role in ("learner-0", "learner-1", "evaluator"):
    mine = [each for each in log if each.role == role]
    lines = [to_line(each, each is mine[0]) for each in mine]
    (tmp_path / "events" / f"{role}.jsonl").write_bytes(b"".join(lines))
  monkeypatch.setattr(session, "_train_alone", lambda *arguments: {"steps_alone": arguments[-1]})
  ended = RunResult("finished", params(3), {})
  assert train(tmp_path, ended, lambda tree: 1.0, config_of(compare_alone=True)) == 0
  known = json.loads((tmp_path / OUTCOME).read_text())
  assert known["learner_steps"] == {"0": 9, "1": 2}
  assert known["steps_alone"] == 8, "as the busiest island, without what it lost: not as the run"


def test_islands_of_accelerators_are_not_compared_with_islands_of_a_cpu(
  tmp_path, monkeypatch, capsys
):
  """A supervisor of processes on GPUs trained them all alone on its own CPU, without an end."""
  (tmp_path / "events").mkdir()
  began = made(0.0, "learner-0", "started", devices=8, device_kind="NVIDIA H200")
  log = [to_line(began, True), to_line(made(1.0, "learner-0", "step", step=1, global_step=1))]
  (tmp_path / "events" / "learner-0.jsonl").write_bytes(b"".join(log))
  monkeypatch.setattr(session, "_train_alone", lambda *_: pytest.fail("they train"))
  ended = RunResult("finished", params(3), {})
  assert train(tmp_path, ended, lambda tree: 1.0, config_of(compare_alone=True)) == 0
  said = "the comparison is left out: run.compare_alone = True: islands trained on NVIDIA H200"
  assert said in capsys.readouterr().out
  stopped = RunResult("stopped", params(3), {})
  assert train(tmp_path, stopped, lambda tree: 1.0, config_of(compare_alone=True)) == 130
  assert "comparison" not in capsys.readouterr().out


def test_a_disk_that_is_full_at_the_end_leaves_the_first_outcome(tmp_path, monkeypatch, capsys):
  outcome = RunResult("finished", params(3), {})
  write_text = type(tmp_path).write_text

  def fails(self, text) -> int:
    if '"loss_merged"' in text:
      write_text(self, text[:9])
      raise OSError(28, "No space left on device")
    return write_text(self, text)

  monkeypatch.setattr(type(tmp_path), "write_text", fails)
  assert conclude(tmp_path, outcome, lambda tree: 1.0)["reason"] == "finished"
  assert not list(tmp_path.glob(f"{OUTCOME}.*"))
  assert "WARNING: the report is left out: OSError: [Errno 28] No space" in capsys.readouterr().out


def test_a_report_that_cannot_be_written_is_no_lost_work(tmp_path, capsys):
  """Its run is finished: the same command, once said to be the fix, would have been refused."""
  workdir = tmp_path / "run"
  workdir.mkdir()
  (workdir / "report").write_text("a file in its way")
  assert train(workdir, RunResult("finished", params(3), {}), lambda tree: 1.0) == 0
  said = capsys.readouterr().out
  assert "WARNING: the report is left out: FileExistsError" in said and "is not saved" not in said
  assert f"Result: {workdir / 'result'}" in said
  with pytest.raises(ConfigError, match=r"its report cannot be drawn .*Fix: "):
    session.report(workdir)
  (workdir / "report").unlink()
  assert Path(session.report(workdir)).exists()


@pytest.mark.parametrize("lives", [held, live_in], ids=["a run", "a role"])
def test_a_report_of_a_run_under_way_says_that_it_goes_on(tmp_path, lives):
  join(tmp_path, CONFIG)
  with lives(tmp_path):
    assert "it goes on: this is its report so far" in Path(session.report(tmp_path)).read_text()
  assert "it did not end in good order" in Path(session.report(tmp_path)).read_text()


def test_a_failed_evaluation_loses_nothing_and_is_named(tmp_path, capsys):
  known = conclude(tmp_path, RunResult("finished", params(3), {}, "one step"), out_of_memory)
  assert first(session.load_result(tmp_path, CONFIG)) == 3.0
  assert known["reason"] == "finished" and known["lost"] == "one step"
  assert "loss_merged" not in known and "loss_untrained" not in known
  said = capsys.readouterr().out
  for what in ("the untrained model's loss", "the result's loss"):
    assert f"WARNING: {what} is left out: MemoryError: no room for 7 GiB of logits." in said
    assert what in known["left_out"]
    assert f"\n  {what} ...\n" in said, "it may take hours"
  assert (tmp_path / "report" / "index.html").exists()


def test_a_failed_comparison_or_sample_loses_nothing(tmp_path, monkeypatch, capsys):
  def broken(*_, **__):
    raise RuntimeError("no device")

  monkeypatch.setattr(session, "sample", broken)
  config = config_of(sample_tokens=3)
  ended = RunResult("finished", params(3), {})
  known = conclude(tmp_path, ended, lambda _: 2.0, config, broken)
  assert known["loss_merged"] == 2.0
  said = capsys.readouterr().out
  assert "the comparison is left out: RuntimeError: no device" in said
  assert "the sample is left out: RuntimeError: no device" in said


@pytest.mark.parametrize(
  "reason, said", [("stopped", "interrupted"), ("failed", "RuntimeError: none is left")]
)
def test_a_comparison_that_does_not_finish_is_left_out_and_why_is_said(
  tmp_path, monkeypatch, reason, said
):
  """No word told of it, and a program that was asked to end meanwhile began its next run."""
  alone = RunResult(reason, {}, {}, why="none is left")
  monkeypatch.setattr("ddiloco.engines.threads.ThreadsEngine.__init__", lambda *_: None)
  monkeypatch.setattr("ddiloco.engines.threads.ThreadsEngine.run", lambda *_: alone)
  heldout, ended = types.SimpleNamespace(measure=None), RunResult("finished", params(3), {})
  compare = lambda _: session._train_alone(CONFIG, tmp_path, None, heldout, None, 5)
  known = conclude(tmp_path, ended, lambda _: 2.0, compare=compare)
  assert known["left_out"] == {"the comparison": said}


def test_who_interrupts_what_is_measured_at_the_end_gets_the_report_without_it(
  tmp_path, capsys, monkeypatch
):
  """The process ended, without a word about the result; nothing drew the report."""

  def loss(_) -> float:
    os.kill(os.getpid(), signal.SIGINT)
    return 2.0

  workdir, ended = tmp_path / "run", RunResult("finished", params(3), {})
  assert train(workdir, ended, loss, config_of(compare_alone=True)) == 0
  known = json.loads((workdir / OUTCOME).read_text())
  assert known["loss_untrained"] == 2.0
  assert known["left_out"] == dict.fromkeys(["the result's loss", "the comparison"], "interrupted")
  assert (workdir / "report" / "index.html").exists()
  assert "the comparison is left out: interrupted. The result is saved." in capsys.readouterr().out

  asked, over, seen = threading.Event(), threading.Event(), []
  monkeypatch.setattr(session, "write_report", lambda *_: seen.append(over.is_set()))
  again = threading.Thread(
    target=lambda: asked.wait(PATIENCE_SECONDS) and os.kill(os.getpid(), signal.SIGINT)
  )

  def twice(_) -> float:
    """The second Ctrl-C comes while it computes, in C code, which Python cannot end."""
    again.start()
    loss(_)
    try:
      hashlib.pbkdf2_hmac("sha256", b"", b"", 10_000_000)
    finally:
      over.set()
    return 2.0

  assert train(tmp_path / "2", RunResult("finished", params(3), {}), twice, asked=asked) == 0
  assert seen == [False], "it is not waited for"
  known = json.loads((tmp_path / "2" / OUTCOME).read_text())
  assert known["left_out"]["the untrained model's loss"] == "interrupted"
  assert "the comparison" not in known["left_out"], "none was asked for"


@pytest.mark.parametrize("reason", ["finished", "stopped"])
def test_a_run_that_is_not_finished_says_how_it_goes_on(tmp_path, capsys, reason):
  conclude(tmp_path, RunResult(reason, params(3), {}), lambda tree: 1.0)
  assert ("the same command goes on" in capsys.readouterr().out) == (reason == "stopped")


def test_a_run_that_has_failed_says_why(tmp_path, capsys):
  ended = RunResult("failed", params(3), {}, why="its quorum is 2, left: learner-0")
  known = conclude(tmp_path, ended, lambda tree: 1.0)
  assert (known["reason"], known["why"]) == ("failed", ended.why)
  assert f"The run is not finished ({ended.why}): the same command" in capsys.readouterr().out


def test_with_no_evaluations_nothing_is_evaluated(tmp_path, capsys):
  never = lambda *_: pytest.fail("it is evaluated")
  config = config_of(evaluations=0)
  known = conclude(tmp_path, RunResult("finished", params(3), {}), never, config, never)
  assert first(session.load_result(tmp_path, config)) == 3.0
  assert not [name for name in known if "loss" in name] and "left_out" not in known
  assert "loss" not in capsys.readouterr().out
  assert (tmp_path / "report" / "index.html").exists()


def test_a_run_of_the_engine_with_no_evaluations_evaluates_nothing(tmp_path):
  config = config_of(evaluations=0)
  ran = Ran(config, data.open_corpus(config.data), tmp_path, measure=None)
  assert ran.outcome.reason == "finished"
  assert not ran.of("evaluation") and not ran.of("started", "evaluator")


ALONE = {0: params(7), 3: params(2), 4: params(5)}


@pytest.mark.parametrize("worse", [7.0, math.nan])
def test_of_islands_that_trained_alone_all_are_saved_and_the_best_is_the_result(tmp_path, worse):
  """Which one is best takes a loss, and that may fail."""
  before, each = {}, {0: params(worse), 3: params(2)}

  def loss(tree) -> float:
    before.update({m: first(weights.load(tmp_path / "islands" / f"learner-{m}")) for m in each})
    return first(tree)

  known = conclude(tmp_path, RunResult("finished", each[0], each), loss)
  assert str(before) == str({0: worse, 3: 2.0})
  assert first(session.load_result(tmp_path, CONFIG)) == 2.0
  assert known["loss_merged"] == 2.0 and known["result_of_learner"] == 3


@pytest.mark.parametrize(("shards", "result"), [(0, "best island"), (2, "merged model")])
def test_the_end_names_what_the_result_is(tmp_path, capsys, monkeypatch, shards, result):
  """It spoke of a merged model where nothing was merged."""
  monkeypatch.setattr(report, "_draw", DRAW)
  config, asked = config_of(sample_tokens=3), []
  sync = dataclasses.replace(config.sync, num_shards=shards)
  config = dataclasses.replace(config, seed=5, sync=sync)
  monkeypatch.setattr(session, "sample", lambda *how: asked.append(how[2:]) or "def x")
  islands = {} if shards else ALONE
  monkeypatch.setattr(session.initial, "initial_params", lambda config: params(3e-4))
  conclude(tmp_path, RunResult("finished", ALONE[0], islands), first, config)
  assert asked == [(config.run.prompt, 3, 0.7, 5)]
  said = capsys.readouterr().out
  loss = "7.000" if shards else "2.000"
  assert f"  untrained          0.000300\n  {result:<18} {loss}\n" in said
  assert f"The {result} writes:\ndef x\n" in said
  rows = (tmp_path / "report" / "index.html").read_text()
  assert f"<th>held-out loss, {result}</th><td>{loss}</td>" in rows
  assert all((tmp_path / "report" / name).exists() for name in report.PICTURES)


def test_no_loss_that_is_known_is_measured_again(tmp_path):
  """Of a large model each takes minutes to hours: the result's was measured by the evaluator and
  again by the run, that of the initial values again at the end of every run that went on."""
  (tmp_path / "events").mkdir()
  log = [
    made(1.0 + n, "evaluator", "evaluation", merged_tokens=n, global_step=n, loss=loss)
    for n, loss in ((0, 5.5), (3, 4.5))
  ]
  lines = [to_line(each, each is log[0]) for each in log]
  (tmp_path / "events" / "evaluator.jsonl").write_bytes(b"".join(lines))
  known = conclude(tmp_path, RunResult("finished", params(3), {}, loss=2.25), out_of_memory)
  assert (known["loss_untrained"], known["loss_merged"]) == (5.5, 2.25)
  assert "left_out" not in known


@pytest.mark.parametrize("evaluations", [0, 1])
def test_of_islands_that_cannot_be_compared_none_is_lost(tmp_path, evaluations):
  config = config_of(evaluations=evaluations)
  conclude(tmp_path, RunResult("finished", ALONE[0], ALONE), out_of_memory, config)
  assert first(session.load_result(tmp_path, config)) == 7.0
  kept = {m: first(weights.load(tmp_path / "islands" / f"learner-{m}")) for m in ALONE}
  assert kept == {0: 7.0, 3: 2.0, 4: 5.0}


@pytest.mark.parametrize("islands", [{}, ALONE])
def test_a_result_of_fewer_tokens_replaces_none_and_the_one_that_stays_is_measured(
  tmp_path, islands, capsys
):
  def ended(value: float, merged_tokens: int) -> RunResult:
    each = {m: params(value + m) for m in islands}
    return RunResult("stopped", params(value), each, merged_tokens=merged_tokens)

  conclude(tmp_path, ended(3, 500), first)
  known = conclude(tmp_path, ended(1, 499), first)
  assert first(session.load_result(tmp_path, CONFIG)) == known["loss_merged"] == 3.0
  assert "it has seen 499 tokens" in known["left_out"]["the model of this start"]
  assert "WARNING: the model of this start is left out" in capsys.readouterr().out
  known = conclude(tmp_path, ended(2, 500), first)
  assert first(session.load_result(tmp_path, CONFIG)) == known["loss_merged"] == 2.0
  shorter = dataclasses.replace(CONFIG, run=dataclasses.replace(CONFIG.run, total_tokens=400))
  conclude(tmp_path, ended(1, 400), first, shorter)
  assert first(session.load_result(tmp_path, CONFIG)) == 1.0, "it has reached its end"


# --- the exit status ------------------------------------------------------------------------------


class Runner:
  def __init__(self, outcome: RunResult, ends: Callable[[], None] = lambda: None):
    self.leave, self._outcome, self._ends = threading.Event(), outcome, ends

  def run(self, listeners):
    with terminates(self.leave):
      pass
    self._ends()
    return self._outcome


def train(workdir, outcome, loss, config=CONFIG, ends=lambda: None, asked=None) -> int:
  workdir.mkdir(exist_ok=True)
  (workdir / "config.json").write_text(config.to_json())
  arguments = workdir, None, types.SimpleNamespace(loss=loss), asked or threading.Event()
  return session._train(Runner(outcome, ends), config, *arguments)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_between_the_end_of_a_run_and_its_outcome_ends_no_process(tmp_path, number):
  """The run could be finished, and nothing said so; its result was lost."""
  ended, late = RunResult("finished", params(3), {}), lambda: os.kill(os.getpid(), number)
  assert train(tmp_path / "run", ended, lambda tree: 1.0, ends=late) == 0
  known = json.loads((tmp_path / "run" / OUTCOME).read_text())
  assert known["reason"] == "finished" and known["left_out"]["the result's loss"] == "interrupted"
  assert first(session.load_result(tmp_path / "run", CONFIG)) == 3.0


def test_a_signal_while_the_report_is_drawn_is_heard_and_leaves_it_whole(tmp_path, monkeypatch):
  asked, draw = threading.Event(), session.write_report

  def write_report(*arguments) -> Path:
    os.kill(os.getpid(), signal.SIGTERM)
    return draw(*arguments)

  monkeypatch.setattr(session, "write_report", write_report)
  ended = RunResult("finished", params(3), {})
  assert train(tmp_path / "run", ended, lambda tree: 1.0, asked=asked) == 0
  assert asked.is_set() and (tmp_path / "run" / "report" / "index.html").exists()
  assert "left_out" not in json.loads((tmp_path / "run" / OUTCOME).read_text())


@pytest.mark.parametrize(
  "reason, lost, status",
  [("finished", "", 0), ("finished", "7 tokens", 1), ("stopped", "", 130), ("failed", "", 1)],
)
def test_the_exit_status_is_about_the_training(tmp_path, reason, lost, status):
  outcome = RunResult(reason, params(3), {}, lost)
  assert train(tmp_path / "run", outcome, out_of_memory) == status
  assert first(session.load_result(tmp_path / "run", CONFIG)) == 3.0


SHORT = dataclasses.replace(
  CONFIG, network=dataclasses.replace(CONFIG.network, give_up_seconds=0.01)
)


def full_for(times: int, real):
  """`real`, on a disk that is full for so many calls."""
  left = [OSError(28, "No space left on device", "result")] * times

  def maybe(*arguments, **more):
    if left:
      raise left.pop()
    return real(*arguments, **more)

  return maybe


def test_the_end_of_a_run_is_saved_once_the_disk_has_room(tmp_path, monkeypatch, capsys):
  """It was lost at the first failure: an evaluator that was started again found no shard."""
  paused: list[float] = []
  monkeypatch.setattr(weights, "save", full_for(2, weights.save))
  monkeypatch.setattr(workdirs, "write_whole", full_for(1, workdirs.write_whole))
  outcome = RunResult("finished", params(3), {})
  session.conclude(CONFIG, tmp_path, outcome, None, pause=paused.append)
  assert first(session.load_result(tmp_path, CONFIG)) == 3.0 and (tmp_path / OUTCOME).exists()
  said = capsys.readouterr().out
  assert said.count("The run's end is not saved yet: [Errno 28] No space left") == 3
  assert paused == [session.SAVE_AGAIN_SECONDS] * 3
  assert "Fix: make room, or the place writable. It is tried again for 600 s." in said
  assert f"The result is saved in {tmp_path / 'result'}. Its figures" in said
  monkeypatch.setattr(weights, "save", full_for(2, weights.save))
  with pytest.raises(OSError, match="No space left"):  # asked to end, it waits for no room
    session.conclude(CONFIG, tmp_path, outcome, None, pause=lambda seconds: True)
  monkeypatch.setattr(weights, "save", lambda *_: pytest.fail("it is saved already"))
  session.conclude(CONFIG, tmp_path, RunResult("finished", params(3), {}, saved=True), None)


def test_a_result_that_cannot_be_saved_is_said_and_the_run_can_go_on(tmp_path, monkeypatch, capsys):
  def full(*_, **__):
    raise OSError(28, "No space left on device", str(tmp_path))

  monkeypatch.setattr(weights, "save", full)
  never = lambda _: pytest.fail("it is evaluated")
  assert train(tmp_path / "run", RunResult("finished", params(3), {}), never, SHORT) == 1
  said = capsys.readouterr().out
  assert (
    "The run's end is not saved: [Errno 28] No space left on device" in said and "Fix: " in said
  )
  assert not (tmp_path / "run" / OUTCOME).exists()
  assert check(tmp_path / "run", CONFIG, overwrite=False), "the same command goes on"


# --- the last checkpoint --------------------------------------------------------------------------


def test_the_last_checkpoints_close_fails(tmp_path, monkeypatch, capsys):
  """Others lost the end of their runs there: the one before counts, and nothing is deleted."""
  config = make_config(
    learners=2, steps=10**6, sync={"snapshot_steps": 40, "min_quorum": 2}, run={"evaluations": 0}
  )
  corpus, plan = data.open_corpus(config.data), initial.make_plan(config)
  storage = Storage(tmp_path / "checkpoints", plan.plan_id, pytest.fail)
  everybody = {"learner-0", "learner-1", "syncer-0", "syncer-1"}
  whole, save, close = [], ocp.Checkpointer.save, ocp.Checkpointer.close

  def saves(self, *arguments, **more):
    self.wrote = True
    save(self, *arguments, **more)

  def fails(self):
    close(self)
    if whole and vars(self).get("wrote"):
      raise RuntimeError("the bucket hung up")

  monkeypatch.setattr(ocp.Checkpointer, "save", saves)
  monkeypatch.setattr(ocp.Checkpointer, "close", fails)

  def listen(event) -> bool:
    if event.kind == "snapshot" and not whole and everybody == set(event.roles):
      whole.append(event.snapshot)  # an earlier one lacks a learner that was slow to join
    return event.kind == "unsaved" and bool(whole)

  ran = Ran(config, corpus, tmp_path, stop_after=listen)
  assert ran.outcome.reason == "stopped" and not ran.of("exit")
  assert storage.committed()[:1] == whole
  assert set(storage.manifest(whole[0])["parts"]) == everybody
  assert all(storage.load(whole[0], role) for role in storage.manifest(whole[0])["parts"])
  unsaved = [e for e in ran.of("unsaved") if "the bucket hung up" in e.reason]
  assert unsaved and all(storage.metas(e.snapshot) == {} for e in unsaved)
  assert Ran(soon_over(tmp_path, config), corpus, tmp_path).outcome.reason == "finished"
  assert storage.committed()[:1] == whole
  monkeypatch.undo()
  longer = dataclasses.replace(
    config, run=dataclasses.replace(config.run, total_tokens=2 * 150 * 16)
  )
  assert Ran(longer, corpus, tmp_path).outcome.reason == "finished"
  assert f"goes on from snapshot {whole[0]}." in capsys.readouterr().out


def test_the_results_close_fails_and_the_result_before_stays(tmp_path, monkeypatch, capsys):
  workdir = tmp_path / "run"
  weights.save(workdir / "result", params(1))
  with monkeypatch.context() as patch:
    close = ocp.Checkpointer.close

    def fails(self):
      close(self)
      raise RuntimeError("the bucket hung up")

    patch.setattr(ocp.Checkpointer, "close", fails)
    assert train(workdir, RunResult("finished", params(3), {}), out_of_memory, SHORT) == 1
  assert first(session.load_result(workdir, CONFIG)) == 1.0
  assert "The run's end is not saved: " in capsys.readouterr().out
  assert [p.name for p in workdir.iterdir() if p.name.startswith(".")] == []


def test_what_is_no_result_is_never_replaced_by_one(tmp_path):
  """A run in a folder with a user's own `result` deleted that at its end."""
  (tmp_path / "result").mkdir()
  (tmp_path / "result" / "figures").write_text("mine")
  with pytest.raises(ConfigError, match=r"^--workdir = '.*/result': is no Orbax checkpoint, and"):
    session.train(CONFIG, tmp_path)
  assert (tmp_path / "result" / "figures").read_text() == "mine"
  assert [path.name for path in tmp_path.iterdir()] == ["result"]


def test_a_link_for_the_result_that_leads_nowhere_is_refused_before_the_run(tmp_path):
  """All was trained, and then the result had no place."""
  (tmp_path / "result").symlink_to(tmp_path / "big" / "result")
  with pytest.raises(ConfigError, match=r"^--workdir = '.*/result': is a link to .*/big/result, "):
    session.train(CONFIG, tmp_path)


# --- while the run goes on ------------------------------------------------------------------------


class FailsAtTheEnd:
  """Measures until the result is there; then `fail` is called."""

  def __init__(self, result, fail):
    self.result, self.fail = result, fail

  def __call__(self, tree) -> dict[str, float]:
    if self.result.exists():
      self.fail()
    return {"loss": 2.0}


def test_the_model_of_the_end_is_saved_before_the_evaluator_measures_it(tmp_path):
  config, failed = config_of(), []

  def fail():
    failed.append(weights.load(tmp_path / "result"))
    raise MemoryError("no room")

  ran = Ran(
    config,
    data.open_corpus(config.data),
    tmp_path,
    measure=FailsAtTheEnd(tmp_path / "result", fail),
  )
  assert ran.outcome.reason == "finished" and ran.outcome.saved
  (found,) = failed
  assert found.keys() == ran.outcome.params.keys()
  assert all(found[name].tobytes() == each.tobytes() for name, each in ran.outcome.params.items())
  assert ran.of("unevaluated")[-1].merged_tokens >= config.run.total_tokens


def test_a_process_that_is_killed_while_it_measures_the_end_has_left_the_result(tmp_path):
  code = """
import os, signal, sys
from pathlib import Path
from tests import conftest
from tests.engines import test_session_conclude as this
config, workdir = this.config_of(), Path(sys.argv[1])
kill = lambda: os.kill(os.getpid(), signal.SIGKILL)
this.Ran(config, this.data.open_corpus(config.data), workdir,
         measure=this.FailsAtTheEnd(workdir / "result", kill))
"""
  done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT)
  assert done.returncode == -signal.SIGKILL
  assert not [e for e in read_events(tmp_path) if e.kind == "run_finished"]
  assert session.load_result(tmp_path, CONFIG).keys() == params(0).keys()


def test_an_evaluation_that_fails_is_named_and_the_run_goes_on(tmp_path, capsys):
  config, asked = config_of(evaluations=6), []
  corpus = data.open_corpus(config.data)
  # So that the evaluator has the model before the end.
  waits = [(m, 20, lambda _: wait_for(lambda: asked, "an evaluation")) for m in (0, 1)]

  def sometimes(tree) -> dict[str, float]:
    asked.append(1)
    if len(asked) == 1:
      raise MemoryError("no room")
    return {"loss": 2.0}

  ran = Ran(config, corpus, tmp_path, waits, measure=sometimes)
  assert ran.outcome.reason == "finished" and not ran.exits("evaluator")
  (missing,) = ran.of("unevaluated")
  assert missing.reason == "MemoryError: no room" and missing.role == "evaluator"
  evaluated = ran.of("evaluation")
  assert evaluated and evaluated[-1].merged_tokens >= config.run.total_tokens
  # Rounds may have been merged before the evaluator had the whole model.
  said = f"held-out loss at {missing.merged_tokens} merged tokens is missing: MemoryError"
  assert said in capsys.readouterr().err
