"""The dashboard's server: the page, the numbers, who gets what, and faults for the run."""

import contextlib
import errno
import json
import socket
import threading
import time
import urllib.parse

import pytest

from ddiloco.chaos import fault_requests
from ddiloco.config import Config, ConfigError, Fault
from ddiloco.dashboard import server as module
from ddiloco.dashboard.server import Dashboard, Where
from ddiloco.dashboard.status import LAG_SECONDS
from ddiloco.network.webserver import MAX_CONNECTIONS
from ddiloco.observe import eventlog
from ddiloco.protocol.events import LOG_FORMAT
from ddiloco.workdir import OUTCOME, STARTED
from tests.waits import wait_for
from tests.web import address_of, ask

SECONDS = 20
TOKEN = "a-token-of-some-length"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


def log(workdir, *events, role="engine"):
  (workdir / "events").mkdir(parents=True, exist_ok=True)
  with (workdir / "events" / f"{role}.jsonl").open("a") as file:
    for time_, kind, fields in events:
      head = {"time": time_, "role": role, "incarnation": 0, "format": LOG_FORMAT, "kind": kind}
      event = head | fields
      file.write(json.dumps(event) + "\n")


RUN = {"name": "r", "num_learners": 3, "num_shards": 1, "num_fragments": 2, "total_tokens": 1000}
STEP = {"step": 1, "global_step": 1, "position": 0, "tokens": 8, "loss": 2.5}
STEP |= {"seconds": 0.1, "gap_seconds": 0.1}


@pytest.fixture
def workdir(tmp_path):
  """A run under way."""
  (tmp_path / STARTED).write_text(f"{time.time() - 6.0}\n")
  log(tmp_path, (0.0, "run_started", RUN))
  log(tmp_path, (5.0, "step", STEP), role="learner-0")
  return tmp_path


@pytest.fixture
def serve(workdir):
  """Starts a dashboard of the workdir; ends when the test does."""
  with contextlib.ExitStack() as stack:
    yield lambda **where: stack.enter_context(Dashboard(workdir, Where(**where)))


def status(dashboard, headers=None):
  code, text, _ = ask(dashboard.url, "/api/status", headers=headers)
  assert code == 200, text
  return json.loads(text)


def known(dashboard, phase="running", headers=None):
  """The status, once the log has been read."""
  return wait_for(lambda: (s := status(dashboard, headers))["phase"] == phase and s)


# --- what is served -------------------------------------------------------------------------------


def test_the_page_needs_nothing_from_elsewhere(serve):
  dashboard = serve()
  code, page, headers = ask(dashboard.url, "/")
  assert code == 200 and headers["Content-Type"] == "text/html; charset=utf-8"
  assert "default-src 'none'" in headers["Content-Security-Policy"]
  assert headers["X-Content-Type-Options"] == "nosniff"
  for path, kind in (("page.css", "text/css"), ("app.js", "text/javascript")):
    assert f'"{path}"' in page
    code, text, headers = ask(dashboard.url, f"/{path}")
    assert code == 200 and headers["Content-Type"].startswith(kind)
    assert "//cdn" not in text and "https://" not in text
  outside = page.replace("http://www.w3.org/2000/svg", "")  # a name, not an address
  assert "http://" not in outside and "https://" not in outside


def test_status_metrics_and_health(serve):
  dashboard = serve()
  found = known(dashboard)
  assert found["name"] == "r" and found["islands"][0]["loss"] == 2.5
  assert 5.9 < found["seconds"] < 60 and found["allow_faults"] is False
  code, text, headers = ask(dashboard.url, "/metrics")
  assert code == 200 and headers["Content-Type"].startswith("text/plain; version=0.0.4")
  assert 'ddiloco_island_loss{island="0"} 2.5' in text
  code, text, headers = ask(dashboard.url, "/healthz")
  assert (code, text) == (200, "ready\n") and headers["Cache-Control"] == "no-store"
  assert ask(dashboard.url, "/healthz", "HEAD")[:2] == (200, "")


def test_it_follows_the_log_and_says_when_the_run_is_over(serve, workdir):
  dashboard = serve()
  known(dashboard)
  log(workdir, (6.5, "step", STEP | {"step": 2, "loss": 1.5}), role="learner-0")
  wait_for(lambda: status(dashboard)["islands"][0]["loss"] == 1.5)
  (workdir / OUTCOME).write_text('{"reason": "stopped"}')
  assert "can go on" in known(dashboard, "over")["text"]


def test_a_run_that_goes_on_with_another_quorum_waits_for_that_one(serve, workdir):
  def quorum(count):
    config = {"sync": {"num_shards": 1, "num_fragments": 2, "min_quorum": count}}
    (workdir / "config.json").write_text(json.dumps(config))

  quorum(1)
  dashboard = serve()
  assert "of the 1 it needs" in known(dashboard)["waiting"]
  quorum(3)
  log(workdir, (6.0, "run_finished", {"reason": "stopped"}), (6.5, "run_started", RUN))
  wait_for(lambda: "of the 3 it needs" in status(dashboard)["waiting"])


@pytest.mark.parametrize("ahead", [-3600.0, 3600.0])
def test_a_clock_of_another_host_makes_a_run_neither_silent_nor_alive(
  serve, workdir, ahead, monkeypatch
):
  """What is written while it looks shows that the run lives, whatever the time in it."""
  monkeypatch.setattr("ddiloco.dashboard.status.SILENT_SECONDS", 3.0)
  (workdir / STARTED).write_text(f"{time.time() - 5.0 + ahead}")
  dashboard = serve()
  known(dashboard, "silent")
  log(workdir, (5.5, "step", STEP | {"step": 2}), role="learner-0")
  assert 5.5 <= known(dashboard)["seconds"] <= 5.5 + 2 * LAG_SECONDS
  known(dashboard, "silent")


def test_nothing_is_known_of_an_empty_workdir(tmp_path):
  with Dashboard(tmp_path / "not yet") as dashboard:
    found = status(dashboard)
    assert found["phase"] == "empty" and found["name"] == "not yet"
    assert ask(dashboard.url, "/metrics")[0] == 200
    log(tmp_path / "not yet", (0.0, "run_started", RUN))
    wait_for(lambda: status(dashboard)["name"] == "r")


def test_a_new_run_in_the_workdir_replaces_the_old_one(serve, workdir):
  dashboard = serve()
  known(dashboard)
  for path in (workdir / "events").iterdir():
    path.unlink()
  (workdir / STARTED).write_text(f"{time.time()}\n")
  log(workdir, (0.0, "run_started", RUN | {"name": "other"}))
  found = wait_for(lambda: (s := status(dashboard))["name"] == "other" and s)
  assert found["islands"][0]["loss"] is None


def test_a_new_run_whose_log_cannot_be_read_is_said(serve, workdir, capsys):
  dashboard = serve()
  known(dashboard)
  other = {"time": 0.0, "role": "engine", "incarnation": 0, "format": 1, "kind": "run_started"}
  (workdir / "events" / "engine.jsonl").write_text(json.dumps(other | RUN) + "\n")
  (workdir / STARTED).write_text(f"{time.time()}\n")
  wait_for(lambda: ask(dashboard.url, "/healthz")[:2] == (503, "the log cannot be followed\n"))
  time.sleep(1.2 * module.POLL_SECONDS)
  assert ask(dashboard.url, "/healthz")[0] == 503 and status(dashboard)["odd_events"] == 0
  found = known(dashboard, "silent")
  assert found["text"].startswith("Nothing new is known") and "of format 1" in found["text"]
  assert {island["state"] for island in found["islands"]} == {"unknown"}, "and not stalled"
  assert capsys.readouterr().err.count("is an event log of format 1") == 1


def test_old_logs_that_the_run_is_about_to_replace_are_not_refused(workdir):
  """`train --overwrite --dashboard=...` was refused in the workdir of another version's run."""
  file = workdir / "events" / "engine.jsonl"
  mine, head = file.read_text(), {"time": 0.0, "role": "engine", "format": 1}
  file.write_text(json.dumps(head | {"kind": "run_started"} | RUN) + "\n")
  dashboard = Dashboard(workdir)
  file.write_text(mine)
  with dashboard:
    found = known(dashboard)
  assert found["name"] == RUN["name"] and not found["unread"] and found["odd_events"] == 0


def test_one_log_that_cannot_be_read_is_said_until_it_can(serve, workdir, monkeypatch):
  """Its island was stalled on the page, and only stderr said why."""
  read = eventlog._read

  def stale(path, *place):
    if path.stem == "learner-0":
      raise OSError(errno.ESTALE, "Stale file handle")
    return read(path, *place)

  with monkeypatch.context() as patched:
    patched.setattr(eventlog, "_read", stale)
    dashboard = serve()
    log(workdir, (5.5, "step", STEP | {"step": 2}), role="learner-0")
    found = wait_for(lambda: (s := status(dashboard))["unread"] and s)
    assert found["unread"] == ["learner-0.jsonl (Stale file handle)"]
  found = wait_for(lambda: not (s := status(dashboard))["unread"] and s)
  assert found["islands"][0]["step"] == 2


def test_before_it_has_looked_it_does_not_say_that_there_are_no_events(workdir):
  """Of two thousand logs it said so for seconds."""
  said = module.RunFollower(workdir).status()
  assert (said["phase"], said["text"]) == ("empty", "The log is being read: 0 events so far.")


@pytest.mark.parametrize("trouble", [OSError("out of reach"), KeyError("a mistake of a view")])
def test_trouble_with_the_log_that_comes_again_is_said_again(workdir, capsys, monkeypatch, trouble):
  monkeypatch.setattr(module, "POLL_SECONDS", 0.0)
  follower = module.RunFollower(workdir)
  looks = iter((False, False, True, False))

  def look() -> None:
    good = next(looks, None)
    if good is None:
      follower._ended.set()
    elif not good:
      raise trouble

  monkeypatch.setattr(follower, "_look", look)
  follower._follow()
  assert capsys.readouterr().err.count(str(trouble)) == 2


def test_what_the_config_says_is_used(serve, workdir):
  (workdir / "config.json").write_text(Config().to_json())
  (workdir / "events" / "engine.jsonl").unlink()
  found = known(serve())
  assert len(found["islands"]) == Config().islands.num_learners
  assert found["total_tokens"] == Config().run.total_tokens


def test_events_that_cannot_be_read_are_counted(serve, workdir, capsys):
  log(workdir, (5.5, "commit", {}), (5.6, "commit", {"fragment": "x"}), role="syncer-0")
  dashboard = serve()
  found = wait_for(lambda: (s := status(dashboard))["odd_events"] == 2 and s)
  assert found["islands"][0]["loss"] == 2.5
  assert capsys.readouterr().err.count("WARNING") == 1


# --- who gets what --------------------------------------------------------------------------------


def test_off_loopback_a_token_is_needed_before_the_port_is_open(workdir):
  with pytest.raises(ConfigError, match=r"--dashboard: 0\.0\.0\.0 can be reached from other"):
    Dashboard(workdir, Where("0.0.0.0:0", flag="--dashboard"))
  with pytest.raises(ConfigError, match="--bind = 'nowhere': must be HOST:PORT"):
    Dashboard(workdir, Where("nowhere"))


def test_without_the_token_there_are_no_numbers(serve):
  dashboard = serve(token=TOKEN)
  for path in ("/api/status", "/metrics", "/api/status?token=wrong", "/metrics?token="):
    code, text, headers = ask(dashboard.url, path)
    assert code == 401 and headers["WWW-Authenticate"] == "Bearer"
    assert TOKEN not in text and "island" not in text
  assert ask(dashboard.url, "/")[0] == ask(dashboard.url, "/healthz")[0] == 200
  assert known(dashboard, headers=BEARER)["name"] == "r"
  assert ask(dashboard.url, f"/metrics?token={TOKEN}")[0] == 200
  assert TOKEN not in dashboard.url


def test_off_loopback_it_serves_who_has_the_token(serve):
  dashboard = serve(bind="0.0.0.0:0", token=TOKEN)
  headers = {"Host": "training.example.org"}
  assert ask(dashboard.url, "/api/status", headers=headers)[0] == 401
  assert ask(dashboard.url, "/api/status", headers=headers | BEARER)[0] == 200


def test_another_name_for_this_machine_is_refused(serve):
  """A page of evil.com, whose name was made to point here, must not read a run."""
  dashboard = serve()
  for path in ("/", "/api/status", "/healthz"):
    assert ask(dashboard.url, path, headers={"Host": "evil.com"})[0] == 421


@pytest.mark.parametrize(
  "path",
  ["/nothing", "/..", "/../../etc/passwd", "/%2e%2e/page.css", "/index.html", "/page",
   "/api/", "/api/status/", "*", "/page.css%00"],
)  # fmt: skip
def test_there_is_nothing_else(serve, path):
  code, text, _ = ask(serve().url, path)
  assert code == 404 and "Traceback" not in text


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "PATCH", "CONNECT", "NONE"])
def test_other_methods_are_refused(serve, method):
  assert ask(serve().url, "/api/status", method)[0] == 501


def test_the_wrong_method_says_which_is_right(serve):
  dashboard = serve()
  code, _, headers = ask(dashboard.url, "/api/status", "POST", body="{}")
  assert code == 405 and headers["Allow"] == "GET, HEAD"
  code, _, headers = ask(dashboard.url, "/api/fault")
  assert code == 405 and headers["Allow"] == "POST"


@pytest.mark.parametrize(
  ("request_", "code"),
  [
    (b"GET / HTTP/1.1\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
    (b"nonsense\r\n\r\n", 400),
    (b"POST /api/fault HTTP/1.1\r\nHost: localhost\r\n\r\n", 411),
    (b"POST /api/fault HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n", 411),
    (b"POST /api/fault HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999\r\n\r\n", 413),
    (b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: " + b"9" * 99 + b"\r\n\r\n", 413),
    (b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 411),
    (b"GET /api/status?" + b"a=1&" * 50 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
  ],
)  # fmt: skip
def test_bad_requests_get_a_4xx_and_never_a_traceback(serve, request_, code, capsys):
  dashboard = serve(token=TOKEN)
  with socket.create_connection(address_of(dashboard.url), timeout=SECONDS) as connection:
    connection.sendall(request_)
    connection.shutdown(socket.SHUT_WR)
    answer = b""
    while data := connection.recv(4096):
      answer += data
  head = answer.split(b"\r\n")[0] if answer.startswith(b"HTTP") else answer[:100]
  assert str(code).encode() in head or (code == 400 and b"Bad" in answer), answer
  assert b"Traceback" not in answer and "Traceback" not in capsys.readouterr().err
  assert ask(dashboard.url, "/healthz")[0] == 200


def test_slow_clients_hold_up_nobody(serve):
  dashboard = serve()
  address = address_of(dashboard.url)
  with contextlib.ExitStack() as stack:
    for i in range(2 * MAX_CONNECTIONS):
      connection = stack.enter_context(socket.create_connection(address, SECONDS))
      with contextlib.suppress(OSError):
        connection.sendall(b"GET /api/status HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"\r\n" * (i % 2))
    start = time.monotonic()
    known(dashboard)
    assert time.monotonic() - start < SECONDS / 2
  mine = [t for t in threading.enumerate() if "_admit" in t.name]
  assert len(mine) <= 2 * MAX_CONNECTIONS


# --- faults ---------------------------------------------------------------------------------------

KILL = {"action": "kill", "role": "learner-2", "seconds": 3.0}


def inject(dashboard, fault=KILL, token=TOKEN, **headers):
  url = urllib.parse.urlsplit(dashboard.url)
  usual = {
    "Authorization": f"Bearer {token}",
    "Origin": f"http://{url.netloc}",
    "Content-Type": "application/json",
  }
  body = json.dumps(fault)
  return ask(dashboard.url, "/api/fault", "POST", usual | headers, body)


def asked(workdir):
  """As the run would read it."""
  return list(fault_requests(workdir).poll())


def test_faults_are_refused_unless_they_are_allowed(serve, workdir):
  code, text, _ = inject(serve(token=TOKEN))
  assert code == 403 and "--allow_faults" in text and asked(workdir) == []


def test_a_fault_is_left_for_the_run(serve, workdir):
  dashboard = serve(token=TOKEN, allow_faults=True)
  assert known(dashboard, headers=BEARER)["allow_faults"] is True
  code, text, _ = inject(dashboard)
  assert code == 202 and json.loads(text)["asked"].items() >= KILL.items()
  assert inject(dashboard, {"action": "stall", "role": "syncer-0"})[0] == 202
  (age_seconds, first), (_, second) = asked(workdir)
  assert 0 <= age_seconds < SECONDS
  assert first == Fault(**KILL, at_seconds=0.0) and second.role == "syncer-0"


def test_a_fault_needs_the_token_and_this_servers_own_page(serve, workdir):
  dashboard = serve(token=TOKEN, allow_faults=True)
  known(dashboard, headers=BEARER)
  assert inject(dashboard, token="wrong")[0] == 401
  assert inject(dashboard, Authorization="")[0] == 401
  assert inject(dashboard, Origin="http://evil.com")[0] == 403
  assert inject(dashboard, **{"Sec-Fetch-Site": "cross-site"})[0] == 403
  assert inject(dashboard, **{"Content-Type": "text/plain"})[0] == 415
  assert inject(dashboard, {"action": "kill", "role": "learner-9"})[0] == 400
  assert inject(dashboard, {"action": "explode", "role": "learner-1"})[0] == 400
  assert asked(workdir) == []


def test_without_a_token_one_is_made_up_where_faults_are_allowed(serve, workdir):
  dashboard = serve(allow_faults=True)
  token = urllib.parse.parse_qs(urllib.parse.urlsplit(dashboard.url).query)["token"][0]
  assert len(token) > 20 and ask(dashboard.url, "/api/status")[0] == 401
  known(dashboard, headers={"Authorization": f"Bearer {token}"})
  assert inject(dashboard, token=token)[0] == 202 and len(asked(workdir)) == 1


def test_faults_come_only_into_a_run_under_way(serve, workdir):
  dashboard = serve(token=TOKEN, allow_faults=True)
  known(dashboard, headers=BEARER)
  assert inject(dashboard)[0] == 202
  (workdir / OUTCOME).write_text('{"reason": "finished"}')
  known(dashboard, "over", BEARER)
  assert inject(dashboard)[0] == 409 and len(asked(workdir)) == 1
