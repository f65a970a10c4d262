"""A barrier without limit: every wait has a limit, a name and a line that says it was exceeded."""

from __future__ import annotations

import ast
import threading
import time
from pathlib import Path

import pytest

import ddiloco
from ddiloco.observe import guards

ROOT = Path(ddiloco.__file__).parent
WAITS = {"join", "wait", "wait_for", "get", "result", "acquire", "communicate", "accept", "recv"}
NEEDS = {"wait_for": 2}  # arguments, of which the last is the limit; of the others one is enough
# Waits without a limit of their own, and why each is none that anybody is held up by.
ALLOWED = {
  ("runtime.py", "self._jobs.get()"): "a worker waits for work; `close` ends it",
  ("roles/evaluator.py", "self.exchange.wait()"): "a generator: its driver has limits",
  ("network/frames.py", "self._listener.accept()"): "its socket does not block",
  ("network/peers.py", "answer.result()"): "the thread is calling the function now",
  ("training/hosts.py", "self._values.setdefault(number, Future()).result()"): (
    "the order that makes the value is under way; `HostWatch` ends a host that waits in vain"
  ),
  ("launch/cloud.py", "process.communicate()"): "it and its children have been killed",
  ("launch/cloud.py", "each.result()"): "every island's thread has limits of its own",
}


def unlimited(path: Path) -> list[str]:
  """The waits of a file that may take for ever, as they are written there."""
  found = []
  for node in ast.walk(ast.parse(path.read_text())):
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
      continue
    name, limits = node.func.attr, [k for k in node.keywords if k.arg and "timeout" in k.arg]
    if name not in WAITS or any(not none(k.value) for k in limits):
      continue
    needs = 99 if ast.unparse(node.func) in ("ray.get", "ray.wait") else NEEDS.get(name, 1)
    given = len(node.args) + sum(not none(k.value) for k in node.keywords)
    if given < needs or (node.args and none(node.args[-1])):
      found.append(ast.unparse(node))
  return found


def none(node: ast.expr) -> bool:
  return isinstance(node, ast.Constant) and node.value is None


def test_a_barrier_without_limit():
  """None is written anywhere but for those that are listed, each with its reason."""
  found = {
    (str(path.relative_to(ROOT)), wait)
    for path in sorted(ROOT.rglob("*.py"))
    for wait in unlimited(path)
  }
  assert not found - set(ALLOWED), "give it a limit, a name and a line (observe/guards.py)"
  assert not set(ALLOWED) - found, "is not there any more: take it off the list"


def test_the_search_finds_what_it_is_for(tmp_path):
  code = tmp_path / "code.py"
  code.write_text(
    "thread.join()\nthread.join(None)\nthread.join(timeout=None)\nqueue.get()\nray.get(urls)\n"
    "turns.wait_for(lambda: done)\nfuture.result()\nlock.acquire()\nprocess.wait()\n"
    "', '.join(names)\nthread.join(5)\nthread.join(timeout=5)\nray.get(urls, timeout=5)\n"
    "turns.wait_for(lambda: done, 5)\nknown.get(name)\n"
  )
  assert len(unlimited(code)) == 9


# --- what is said ---------------------------------------------------------------------------------


@pytest.fixture
def stuck():
  """A thread that ends with the test."""
  end = threading.Event()
  thread = threading.Thread(target=end.wait, args=(60,), name="save learner-3", daemon=True)
  thread.start()
  yield thread
  end.set()
  thread.join(10)


def said(capsys) -> str:
  (line,) = capsys.readouterr().err.splitlines()
  return line


def test_a_thread_that_does_not_end_is_named_and_left_behind(stuck, capsys):
  assert not guards.ended(stuck, 0.01)
  assert "save learner-3 has not ended within 0.01 s" in said(capsys)
  done = threading.Thread(target=time.sleep, args=(0.05,))
  done.start()
  assert guards.ended(done, 10) and not capsys.readouterr().err


def test_a_process_that_cannot_be_killed_is_named_and_left_behind(capsys):
  class Process:
    def poll(self):
      return None

  process = Process()
  assert guards.exited(process.poll, 0.02, "learner-3") is None
  assert "learner-3 has not ended within 0.02 s" in said(capsys)
  process.poll = iter([None, None, -9]).__next__
  assert guards.exited(process.poll, 60.0, "learner-3") == -9


def test_an_exchange_whose_copy_is_stuck_can_be_closed(monkeypatch, capsys, stuck):
  from ddiloco import runtime
  from ddiloco.roles.learner import Exchange

  monkeypatch.setattr(runtime, "CLOSE_SECONDS", 0.01)
  closing = object.__new__(Exchange)
  closing._count_traffic, closing._threads = lambda always: None, runtime.ValueThreads(1)
  closing._worker = object.__new__(runtime.ThreadWorker)
  closing._worker._closing, closing._worker._thread = threading.Event(), stuck
  closing._worker._jobs = runtime.queue.SimpleQueue()
  closing.close()
  assert "has not ended within 0.01 s" in said(capsys)


def test_a_saver_that_hangs_in_its_disk_can_be_closed(monkeypatch, capsys, tmp_path):
  from ddiloco.checkpoint import saver
  from tests.roles.toy import ListRecorder

  begun, end = threading.Event(), threading.Event()

  class Storage:
    def forget(self, role):
      begun.set()
      end.wait(60)

  monkeypatch.setattr(saver, "LOOK_SECONDS_MOST", 0.01)
  hangs = saver.Saver(Storage(), "learner-3", 0, ListRecorder([]))
  assert begun.wait(60)  # a thread that has not begun ends at once
  hangs.close(0.01)
  assert "save learner-3 has not ended" in said(capsys)
  end.set()


def test_a_killed_child_that_does_not_go_away_holds_nobody_up(monkeypatch, capsys, tmp_path):
  from ddiloco.engines import children

  class Stuck:
    stdin = None

    def poll(self):
      return None

    def send_signal(self, number):
      return None

  monkeypatch.setattr(children, "KILL_SECONDS", 0.02)
  child = children.Child("learner-3", tmp_path, [lambda *_: Stuck()])
  child.start([[]])
  child.kill()
  assert "learner-3, which was killed, has not ended" in said(capsys) and not child.running
