"""A real run that is watched while it trains, and struck from its dashboard."""

import contextlib
import http.client
import json
import re
import signal
import time
import urllib.parse

import pytest

from tests.engines.real import start, tiny, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def ask(url, path, token, method="GET", body=None):
  connection = http.client.HTTPConnection(url.hostname, url.port, timeout=20)
  headers = {"Authorization": f"Bearer {token}", "Origin": f"http://{url.netloc}"}
  with contextlib.closing(connection):
    connection.request(method, path, body, headers | {"Content-Type": "application/json"})
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_a_run_is_watched_and_struck_from_its_page(tmp_path, engine):
  config, log, workdir = tmp_path / "config.json", tmp_path / "log", tmp_path / "run"
  config.write_text(tiny(10**7, min_step_seconds=0.02).to_json())
  process = start(
    *("train", f"--config={config}", f"--workdir={workdir}", "--cpu", f"--engine={engine}"),
    *("--dashboard=127.0.0.1:0", "--allow_faults"),
    log=log,
  )
  try:
    said = r"Dashboard: (http\S+)\?token=(\S+)"
    found = wait_for(lambda: re.search(said, log.read_text()), "its address", process, log)
    url, token = urllib.parse.urlsplit(found[1]), found[2]

    def status():
      time.sleep(0.1)
      return ask(url, "/api/status", token)[1]

    def merged_by(island):
      return (status()["islands"][island]["participation"] or 0) > 0

    wait_for(lambda: status()["phase"] == "running" and merged_by(1), "a commit", process, log, 240)
    fault = json.dumps({"action": "kill", "role": "learner-1", "seconds": 0.5})
    assert ask(url, "/api/fault", token, "POST", fault)[0] == 202

    def marks():
      return [mark["kind"] for mark in status()["timeline"]["marks"]]

    expected = ["kill", "restart", "merged"]
    wait_for(lambda: marks() == expected, "the island to be back and merged", process, log)
    assert status()["islands"][1]["restarts"] == 1 and status()["odd_events"] == 0
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
  finally:
    process.kill()
    process.wait(20)
