"""What every engine does around its roles, with roles that are functions: turns, lives, the end."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import types
from pathlib import Path

import pytest

from ddiloco.chaos import Killed, ask_for
from ddiloco.config import Fault
from ddiloco.engines.engine import TURN_SECONDS, Engine, RunResult
from ddiloco.network.transport import EVALUATOR_ADDRESS
from ddiloco.observe.eventlog import Recorder, read_events
from ddiloco.observe.guards import ended
from ddiloco.protocol.supervisor import GONE, LEFT, Dismiss, members
from ddiloco.roles.learner import Quarantined
from tests.engines.test_threads import make_config
from tests.strikes import Interrupt
from tests.waits import PATIENCE_SECONDS

NAME = "learner-0"


class Toy(Engine):
  """One role; each of its lives is a function of `lives`, or an error that its start raises."""

  def __init__(self, workdir: Path, *lives, **sections):
    super().__init__(make_config(learners=1, **sections), workdir, lambda params: {"loss": 0.0})
    self.lives = list(lives)
    self.starts: list[tuple[int, bool]] = []
    self.began = time.monotonic()

  def _begin(self) -> None:
    self._recorder = self._record("engine", 0)

  def _record(self, role: str, incarnation: int) -> Recorder:
    return Recorder(self.workdir, role, incarnation, self.began)

  def _roles(self) -> list[str]:
    return [NAME]

  def _start(self, name: str, life: int, afresh: bool) -> None:
    self.starts.append((life, afresh))
    what = self.lives.pop(0)
    if isinstance(what, Exception):
      raise what
    self._start_thread(name, life, lambda recorder: what())

  def _over(self) -> str | None:
    (role,) = members(self._state).values()
    return {LEFT: "finished", GONE: "failed"}.get(role.phase)

  def _end(self, reason: str) -> None:
    return

  def _outcome(self, reason: str) -> RunResult:
    return RunResult(reason, {}, {})

  def reasons(self) -> list[str]:
    return [e.reason for e in read_events(self.workdir) if e.kind == "exit"]


def raises(error: Exception):
  def live() -> None:
    raise error

  return live


def test_a_signal_that_is_handled_for_longer_than_a_turn_lasts_holds_up_no_turn(tmp_path):
  handled, released = threading.Event(), threading.Event()

  class Handles(Toy):
    def _over(self) -> str | None:
      return "stopped" if handled.is_set() else None

    def _end(self, reason: str) -> None:
      released.set()

  def hear(number: int, frame: object) -> None:
    time.sleep(2 * TURN_SECONDS)
    handled.set()

  before = signal.signal(signal.SIGUSR1, hear)
  timer = threading.Timer(5 * TURN_SECONDS, os.kill, (os.getpid(), signal.SIGUSR1))
  timer.start()
  try:
    with in_time(released):
      assert Handles(tmp_path, released.wait).run().reason == "stopped"
  finally:
    signal.signal(signal.SIGUSR1, before)


@contextlib.contextmanager
def in_time(released: threading.Event):
  """Fails if the block ends only since `released` was set at last: it would have hung."""
  late = threading.Event()
  last = threading.Timer(PATIENCE_SECONDS, lambda: (late.set(), released.set()))
  last.start()
  try:
    yield
    assert not late.is_set()
  finally:
    last.cancel()
    released.set()


def test_what_lives_die_of_is_said_and_the_next_one_begins(tmp_path, capsys):
  kill = Fault("kill", NAME, at_step=0, seconds=0.0)
  deaths = [ValueError("no cable"), Killed(kill), Quarantined("not finite")]
  engine = Toy(tmp_path, *map(raises, deaths), lambda: None)
  assert engine.run().reason == "finished"
  assert engine.starts == [(0, False), (1, False), (2, False), (3, True)]
  said = ["ValueError: no cable", "killed by plan, back in 0 s", "quarantined: not finite"]
  assert engine.reasons() == said
  shown = capsys.readouterr().err
  assert f"{NAME} crashed\nTraceback" in shown and shown.count("WARNING") == 1
  events = read_events(tmp_path)
  assert [e.kind for e in events if e.role == "learner-0"] == ["crash"], "of what went wrong"
  kinds = [e.kind for e in events if e.role == "engine"]
  assert kinds == ["run_started", *["exit", "restart"] * 3, "run_finished"]


def test_a_fault_that_an_earlier_start_was_asked_for_does_not_strike_again(tmp_path):
  ask_for(tmp_path, Fault("kill", NAME, at_step=0))
  released, asked, struck = threading.Event(), [], []

  class Asked(Toy):
    def _over(self) -> str | None:
      asked or asked.append(ask_for(tmp_path, Fault("stall", NAME, at_step=0, seconds=0.0)))
      return "stopped" if struck else None

    def _strike(self, fault: Fault) -> None:
      struck.append(fault.action)

    def _end(self, reason: str) -> None:
      released.set()

  with in_time(released):
    assert Asked(tmp_path, released.wait).run().reason == "stopped"
  assert struck == ["stall"]


def test_a_start_that_fails_is_a_death_and_holds_up_nothing(tmp_path, capsys):
  engine = Toy(tmp_path, OSError("no memory"), RuntimeError("no room"), lambda: None)
  assert engine.run().reason == "finished"
  assert engine.reasons() == ["cannot be started: no memory", "cannot be started: no room"]
  said = capsys.readouterr().err
  assert "RuntimeError: no room" in said and "no memory" not in said, "that is no defect"


def test_a_role_that_cannot_stay_up_ends_the_run_and_why_is_said(tmp_path, capsys):
  lives = [raises(ValueError("broken"))] * 2
  engine = Toy(tmp_path, *lives, run={"max_restarts": 1, "restart_seconds": 0.0})
  ended = engine.run()
  assert ended.reason == "failed" and engine._state.hopeless == ended.why
  why = "its quorum is 1 (sync.min_quorum), the learners that are left: none"
  assert capsys.readouterr().err.count(f"the run cannot reach its end any more: {why}") == 1


class Stopped(Toy):
  """Is stopped at once, and ends in good order."""

  def _over(self) -> str | None:
    return "stopped"

  def _end(self, reason: str) -> None:
    Engine._end(self, reason)


def test_an_evaluator_whose_network_has_failed_ends_to_be_started_again(tmp_path, monkeypatch):
  """It never received anything again, and kept a core busy."""

  class Waits:
    def __init__(self, *_):
      return

    def run(self, stopped) -> None:
      while not stopped():
        reasons.append("out of memory")

  reasons: list[str] = []
  monkeypatch.setattr("ddiloco.engines.engine.Evaluator", Waits)
  engine = Toy(tmp_path)
  runtime = types.SimpleNamespace(recorder=types.SimpleNamespace(incarnation=7))
  with pytest.raises(ConnectionError, match="out of memory"):
    engine._evaluate(runtime, lambda: "".join(reasons))


def test_work_is_lost_with_a_learner_that_fails_when_it_should_bring_it_out(tmp_path):
  def live() -> None:
    engine._works(NAME)
    while NAME not in engine._told:
      time.sleep(0.01)
    raise ValueError("no cable")

  engine = Stopped(tmp_path, live)
  assert engine.run().reason == "stopped"
  assert engine._lost == {NAME: "ValueError: no cable"}


@pytest.mark.parametrize("works", [True, False])
def test_work_is_lost_with_a_learner_that_takes_too_long_to_bring_it_out(
  tmp_path, monkeypatch, capsys, works
):
  """Not with one that still compiled, or read its part of a snapshot: the run's exit status said
  that work was lost."""
  monkeypatch.setattr("ddiloco.engines.engine.PATIENCE_SECONDS", 0.2)
  began, go_on = threading.Event(), threading.Event()

  class Waits(Stopped):
    def _over(self) -> str | None:
      return "stopped" if began.is_set() else None

    def _note_lost(self, name: str, why: str) -> None:
      super()._note_lost(name, why)
      go_on.set()

  def live() -> None:
    if works:
      engine._works(NAME)
    began.set()
    go_on.wait()

  engine = Waits(tmp_path, live, network={"drain_seconds": 0.0})
  with in_time(go_on):
    assert engine.run().reason == "stopped"
  assert engine._lost == ({NAME: "not ended within 0.2 s, and killed"} if works else {})
  assert f"{NAME}: not ended within 0.2 s, and killed." in capsys.readouterr().err


def test_whoever_interrupts_again_waits_for_no_thread_and_has_the_result(tmp_path, monkeypatch):
  """The second Ctrl-C came when all was merged and the evaluator measured that: no outcome. If the
  kernel gave it to another thread than the main one, it was heard a minute later."""
  released, waits, over = threading.Event(), threading.Event(), threading.Event()

  class Measures(Toy):
    def _over(self) -> str | None:
      return "finished"

    def _end(self, reason: str) -> None:
      return

  def waited_for(*arguments) -> bool:
    waits.set()
    return ended(*arguments)

  def interrupt() -> None:
    me = threading.get_ident()
    waits.wait()
    signal.pthread_kill(me, signal.SIGINT)
    engine.leave.wait()  # two signals that come before either is heard are one
    if not over.wait(0.3):
      went_on.set()
      signal.pthread_kill(me, signal.SIGINT)

  monkeypatch.setattr("ddiloco.engines.engine.ended", waited_for)
  monkeypatch.setattr("ddiloco.engines.engine.MEASURE_SECONDS", 9 * PATIENCE_SECONDS)
  engine, went_on = Measures(tmp_path, released.wait), threading.Event()
  threading.Thread(target=interrupt, daemon=True).start()
  with in_time(released):
    assert engine.run().reason == "finished"
    over.set()
  assert went_on.is_set(), "after the first one"
  assert [e.kind for e in read_events(tmp_path) if e.role == "engine"][-1] == "run_finished"


def test_a_run_whose_result_is_still_being_saved_says_that_it_waits(tmp_path, monkeypatch):
  """Where the disk hung, the run never ended, and nothing said why."""
  engine, released, said = Toy(tmp_path, lambda: None), threading.Event(), []
  engine._saving.acquire()
  saves = lambda: (released.wait(), engine._saving.release())
  threading.Thread(target=saves, daemon=True).start()
  told = lambda line: (said.append(line), released.set())
  monkeypatch.setattr("ddiloco.engines.engine.say", told)
  with in_time(released):
    assert engine.run().reason == "finished"
  assert "The result is still being saved" in said[0]


def test_the_final_model_is_measured_to_the_end(tmp_path, monkeypatch, capsys):
  """After a minute the run warned of its evaluator, and measured the same model beside it."""
  released, order = threading.Event(), list[str]()

  class Measures(Toy):
    _end = Engine._end

    def _start(self, name: str, life: int, afresh: bool) -> None:
      super()._start(name, life, afresh)
      self._evaluated = types.SimpleNamespace(finished=True)

    def _roles(self) -> list[str]:
      return [EVALUATOR_ADDRESS]

    def _over(self) -> str | None:
      return "finished"

    def _dismiss(self, kind: str) -> None:
      order.append(kind)
      super()._dismiss(kind)

  def measure() -> None:
    released.wait()
    order.append("measured")

  def hear(line: str) -> None:
    order.append(line)
    released.set()

  monkeypatch.setattr("ddiloco.engines.engine.MEASURE_SECONDS", 0.1)
  monkeypatch.setattr("ddiloco.engines.engine.say", hear)
  with in_time(released):
    assert Measures(tmp_path, measure).run().reason == "finished"
  said = "All is merged. The final model is being saved and measured"
  assert [each.strip()[: len(said)] for each in order] == ["learner-", said, "measured", "syncer-"]
  assert "has not ended" not in capsys.readouterr().err


def test_a_turn_may_be_interrupted_anywhere(tmp_path, monkeypatch):
  """Where it was about to take or leave a lock of its queue, that raised another error than
  KeyboardInterrupt, or stayed locked: the run had no result, or no end."""
  monkeypatch.setattr("ddiloco.engines.engine.TURN_SECONDS", 0.001)

  class Turns(Toy):
    left = 2

    def _over(self) -> str | None:
      self.left -= 1
      return None if self.left else "stopped"

  interrupt, runs = Interrupt(Engine._take_turns.__code__), 0
  while not interrupt.missed:
    engine, runs = Turns(tmp_path / str(runs), lambda: None), runs + 1
    with interrupt:
      assert engine.run().reason == "stopped"
  assert runs > 20


def test_a_role_whose_thread_could_not_be_started_is_not_waited_for(tmp_path, monkeypatch):
  """The end of the run failed with it, and with that its result."""

  start = threading.Thread.start

  def no_room(thread) -> None:
    if thread.name in engine._threads:
      raise RuntimeError("can't start new thread")
    start(thread)

  engine = Toy(tmp_path, lambda: None, run={"max_restarts": 0})
  monkeypatch.setattr(threading.Thread, "start", no_room)
  assert engine.run().reason == "failed"
  assert engine.reasons() == ["cannot be started: can't start new thread"]


@pytest.mark.parametrize("merged, reason", [(True, "finished"), (False, "stopped")])
def test_a_run_that_is_interrupted_again_when_all_is_merged_is_finished(tmp_path, merged, reason):
  """Its result was whole, and the next start trained the last steps again."""

  class Interrupted(Toy):
    def _over(self) -> str | None:
      return "stopped"

    def _merged(self) -> bool:
      return merged

    def _end(self, reason: str) -> None:
      raise KeyboardInterrupt

    def _kill(self) -> None:
      super()._kill()
      raise KeyboardInterrupt  # a third time: while it waited for a process

  assert Interrupted(tmp_path, lambda: None).run().reason == reason


def test_a_run_that_has_failed_is_not_stopped_by_whoever_interrupts_its_end(tmp_path):
  class Failed(Toy):
    def _over(self) -> str | None:
      return "failed"

    def _end(self, reason: str) -> None:
      raise KeyboardInterrupt

  assert Failed(tmp_path, lambda: None).run().reason == "failed"


@pytest.mark.parametrize("saved", [-1, 1])
def test_a_run_that_is_asked_to_end_before_its_first_step_has_no_result(
  tmp_path, monkeypatch, saved
):
  """The untrained model was saved and measured. A run that goes on from a snapshot has one."""
  monkeypatch.setattr("ddiloco.checkpoint.restore.newest_global_step", lambda storage: saved)
  engine = Stopped(tmp_path, lambda: None)
  engine.leave.set()
  with contextlib.nullcontext() if saved > 0 else pytest.raises(KeyboardInterrupt):
    assert engine.run().reason == "stopped"
  assert [e.kind for e in read_events(tmp_path) if e.role == "engine"][-1] == "run_finished"


@pytest.mark.parametrize(
  "error, reason", [(MemoryError("no room to compile"), "failed"), (KeyboardInterrupt(), "stopped")]
)
def test_the_log_of_a_run_that_cannot_begin_says_that_it_is_over(tmp_path, error, reason):
  """All that read it took it for a run that goes on."""

  class Unready(Toy):
    def _prepare(self) -> None:
      raise error

  with pytest.raises(type(error)):
    Unready(tmp_path).run()
  began, ended = read_events(tmp_path)
  assert (began.kind, ended.kind, ended.reason) == ("run_started", "run_finished", reason)


def test_waiting_for_roles_has_a_limit_and_goes_on_with_their_lives(tmp_path):
  go_on = threading.Event()

  class Waits(Toy):
    late: tuple = ()

    def _over(self) -> str | None:
      return "stopped"

    def _end(self, reason: str) -> None:
      self.late = (self._wait([NAME], 0.1), self._wait([NAME], 60.0, lambda: True))
      go_on.set()
      self.late += (self._wait([NAME, "learner-9"], 60.0),)
      self._feed(Dismiss(""))

  engine = Waits(tmp_path, lambda: go_on.wait(60))
  assert engine.run().reason == "stopped"
  assert engine.late == ([NAME], [NAME], [])
