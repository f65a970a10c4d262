"""A real run that is watched while it trains, and struck from its dashboard."""

import json
import re
import signal
import time

import pytest

from tests.engines.real import RealRun, tiny
from tests.web import ask

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_a_run_is_watched_and_struck_from_its_page(tmp_path, engine):
  arguments = "--cpu", f"--engine={engine}", "--dashboard=127.0.0.1:0", "--allow_faults"
  with RealRun(tmp_path, tiny(10**7, min_step_seconds=0.02), "train", *arguments) as run:
    pattern = r"Dashboard: (http\S+)/\?token=(\S+)"
    found = run.wait_for(lambda: re.search(pattern, run.said()), "its address")
    url, token = found.groups()
    headers = {"Authorization": f"Bearer {token}", "Origin": url}

    def status():
      time.sleep(0.1)
      return json.loads(ask(url, "/api/status", headers=headers)[1])

    def merged_by(island):
      return (status()["islands"][island]["participation"] or 0) > 0

    run.wait_for(lambda: status()["phase"] == "running" and merged_by(1), "a commit")
    fault = json.dumps({"action": "kill", "role": "learner-1", "seconds": 0.5})
    headers |= {"Content-Type": "application/json"}
    assert ask(url, "/api/fault", "POST", headers, fault)[0] == 202

    def marks():
      return [mark["kind"] for mark in status()["timeline"]["marks"]]

    expected = ["kill", "restart", "merged"]
    run.wait_for(lambda: marks() == expected, "the island to be back and merged")
    assert status()["islands"][1]["restarts"] == 1 and status()["odd_events"] == 0
    assert run.ends(signal.SIGINT) == 130
