"""`ddiloco dashboard` and `train --dashboard`: flags, refusals, and the page in the package."""

import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path

import pytest

from ddiloco import cli
from ddiloco.dashboard.server import Where
from ddiloco.engines import session
from tests.observe.conftest import make_run, write_log
from tests.waits import PATIENCE_SECONDS, wait_for
from tests.web import ask

ROOT = Path(__file__).parent.parent.parent
TOKEN = "a-token-of-some-length"


def test_a_finished_run_is_served_until_sigterm(tmp_path):
  write_log(tmp_path, make_run())
  command = [sys.executable, "-m", "ddiloco", "dashboard", f"--workdir={tmp_path}"]
  with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
    line = process.stdout.readline()
    url = line.split(": ", 1)[1].split()[0]
    assert line.startswith(f"Dashboard of {tmp_path}: http://127.0.0.1:"), line
    assert json.loads(ask(url, "/api/status")[1])["phase"] in ("empty", "over")
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(PATIENCE_SECONDS) == 0


def test_a_signal_that_another_thread_gets_ends_it_too(tmp_path, monkeypatch):
  """After `kill %1` of a stopped one the kernel may choose any thread: it was served for ever."""
  served, over, late = threading.Event(), threading.Event(), threading.Event()
  main = threading.get_ident()
  monkeypatch.setattr(cli.runs, "print", lambda *_, **__: served.set(), raising=False)

  def send() -> None:
    served.wait()
    stack = lambda: traceback.format_stack(sys._current_frames()[main])
    wait_for(lambda: "in beside" in "".join(stack()), "its wait")
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
    if not over.wait(PATIENCE_SECONDS):
      late.set()
      signal.pthread_kill(main, signal.SIGTERM)

  thread = threading.Thread(target=send)
  thread.start()
  try:
    assert cli.main(["dashboard", f"--workdir={tmp_path}"]) == 0
  finally:
    over.set()
    thread.join()
  assert not late.is_set()


def test_what_is_wrong_is_said_with_its_fix(refused, tmp_path):
  assert "is no directory" in refused("dashboard", f"--workdir={tmp_path / 'no'}")
  assert "--workdir: is needed" in refused("dashboard")
  here = f"--workdir={tmp_path}"
  assert "needs a token. Fix: add --token=" in refused("dashboard", here, "--bind=0.0.0.0:0")
  assert "must be HOST:PORT" in refused("dashboard", here, "--bind=8080")
  assert "at least 16" in refused("dashboard", here, "--token=short")
  assert "cannot be read" in refused("dashboard", here, f"--token=@{tmp_path / 'no'}")
  (tmp_path / "empty").write_text("\n")
  assert "is empty" in refused("dashboard", here, f"--token=@{tmp_path / 'empty'}")
  (tmp_path / "events").mkdir()
  (tmp_path / "events" / "engine.jsonl").write_text(
    '{"time":0.0,"role":"engine","kind":"run_finished","reason":"","format":1}\n'
  )
  assert "is an event log of format 1" in refused("dashboard", here)


@pytest.fixture
def trained(monkeypatch):
  """What `train` was asked for, without training."""
  calls = []
  monkeypatch.setattr(session, "train", lambda *a, **more: calls.append(more) or 0)
  return calls


def test_train_says_where_it_can_be_watched(trained, tmp_path):
  (tmp_path / "token").write_text(f"{TOKEN}\n")
  usual = ["train", f"--config={ROOT / 'configs' / 'quickstart.py'}", f"--workdir={tmp_path}"]
  assert cli.main(usual) == 0
  assert cli.main([*usual, "--dashboard=127.0.0.1:0"]) == 0
  more = ["--dashboard=0.0.0.0:80", f"--token=@{tmp_path / 'token'}", "--allow_faults"]
  assert cli.main([*usual, *more]) == 0
  assert [call["dashboard"] for call in trained] == [
    None,
    Where("127.0.0.1:0", "", False, "--dashboard"),
    Where("0.0.0.0:80", TOKEN, True, "--dashboard"),
  ]


def test_the_page_is_in_the_package(tmp_path):
  """What is installed has the page: it is data, which only `package_data` names."""
  build = [sys.executable, "setup.py", "-q", "build_py", f"--build-lib={tmp_path}"]
  subprocess.run([*build, "egg_info", f"--egg-base={tmp_path}"], cwd=ROOT, check=True)
  here = {path.name for path in (ROOT / "ddiloco" / "dashboard" / "page").iterdir()}
  there = {path.name for path in (tmp_path / "ddiloco" / "dashboard" / "page").iterdir()}
  assert here == there and {"index.html", "page.css", "app.js"} <= here
