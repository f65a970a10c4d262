"""Probes get true answers at once, whoever else is connected, and the role never waits for them."""

import contextlib
import json
import math
import os
import socket
import threading
import time
import types
from unittest import mock

import numpy as np
import pytest

from ddiloco.checks import ConfigError
from ddiloco.network import webserver
from ddiloco.network import webserver as module
from ddiloco.network.webserver import MAX_CONNECTIONS, Health
from tests.web import address_of, ask

SECONDS = 20  # until a test gives up on an answer
NOISE = np.random.default_rng(7).bytes(900)  # the same in every process of the tests


@pytest.fixture
def serve():
  """Starts a role's Health on a free port."""
  started = []

  def serve(*status) -> Health:
    health = Health(*status)
    assert health.serve("127.0.0.1:0") == health.url
    started.append(health)
    return health

  yield serve
  for health in started:
    health.close()


@pytest.fixture
def clock(monkeypatch):
  """The time that Health sees; starts at 1000."""
  clock = types.SimpleNamespace(now=1000.0)
  monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: clock.now))
  return clock


def connect(health: Health) -> socket.socket:
  return socket.create_connection(address_of(health.url), timeout=SECONDS)


def ended(connection: socket.socket) -> bytes:
  """What comes until the other side ends the connection."""
  text = b""
  with contextlib.suppress(ConnectionResetError):
    while data := connection.recv(4096):
      text += data
  return text


# --- what is said ---------------------------------------------------------------------------------


def test_a_role_that_compiles_is_alive_and_not_ready(clock):
  health = Health()
  clock.now += 3000
  assert health.livez() == (200, "starting for 3000 s (allowed: 3600 s)")
  assert health.readyz() == (503, "starting")
  clock.now += 600
  assert health.livez()[0] == 503, "not for ever"


def test_who_asks_while_long_work_begins_is_not_told_of_an_older_start(clock):
  class Asked(Health):
    def __setattr__(self, name, value):
      super().__setattr__(name, value)
      if hasattr(self, "_server"):
        answers.append(self.livez()[0])

  answers: list[int] = []
  health = Asked()
  clock.now += 4000
  health.beat()
  answers.clear()
  health.busy("saving")
  assert set(answers) == {200}


def test_alive_as_long_as_the_main_loop_comes_round(clock):
  health = Health()
  health.beat()
  clock.now += 59
  assert health.livez() == (200, "the main loop last came round 59 s ago (allowed: 60 s)")
  clock.now += 1
  assert health.livez() == (503, "the main loop last came round 60 s ago (allowed: 60 s)")
  health.beat()
  assert health.livez()[0] == 200


def test_what_takes_as_long_as_to_start_is_named_until_the_main_loop_comes_round(clock):
  health = Health()
  health.beat()
  clock.now += 50
  health.busy("saving the result")
  clock.now += 3000
  assert health.livez() == (200, "saving the result for 3000 s (allowed: 3600 s)")
  clock.now += 600
  assert health.livez()[0] == 503
  health.beat()
  clock.now += 60
  assert health.livez() == (503, "the main loop last came round 60 s ago (allowed: 60 s)")


def test_ten_usual_steps_may_pass(clock):
  health = Health()
  health.beat()
  health.allow_seconds = 30.0
  clock.now += 299
  assert health.livez()[0] == 200
  clock.now += 2
  assert health.livez()[0] == 503
  health.allow_seconds = 0.01
  health.beat()
  clock.now += 59
  assert health.livez()[0] == 200, "fast steps do not make it impatient"


def test_ready_is_what_the_role_says_while_it_lives(clock):
  health = Health()
  health.beat()
  health.waits_for = ""
  assert health.readyz() == (200, "ready")
  health.waits_for = "no shard answers"
  assert health.readyz() == (503, "no shard answers") and health.livez()[0] == 200
  clock.now += 100
  assert health.readyz() == health.livez() and health.readyz()[0] == 503


# --- over HTTP ------------------------------------------------------------------------------------


def test_the_three_pages(serve, clock):
  health = serve(lambda: {"step": 7, "loss": math.nan, "links": [{"rtt": math.inf}, (1.5, None)]})
  code, text, headers = ask(health.url, "/livez")
  assert code == 200 and text.startswith("starting for 0 s")
  assert headers["Content-Type"].startswith("text/plain") and headers["Cache-Control"] == "no-store"
  assert ask(health.url, "/readyz")[:2] == (503, "starting\n")
  health.beat()
  health.waits_for = ""
  assert ask(health.url, "/readyz?verbose=1")[:2] == (200, "ready\n")
  code, text, headers = ask(health.url, "/status")
  assert code == 200 and headers["Content-Type"] == "application/json"
  assert json.loads(text) == {"step": 7, "loss": None, "links": [{"rtt": None}, [1.5, None]]}


def test_head_is_get_without_the_text(serve):
  health = serve()
  for path in ("/livez", "/readyz", "/status"):
    got, head = ask(health.url, path), ask(health.url, path, "HEAD")
    assert head[0] == got[0] and head[1] == ""
    assert head[2]["Content-Length"] == got[2]["Content-Length"]


@pytest.mark.parametrize("path", ["/", "/etc/passwd", "/../../etc/passwd", "/livez/", "/status/x"])
def test_there_is_nothing_else(serve, path):
  code, text, headers = ask(serve().url, path)
  assert (code, text) == (404, "there are /livez, /readyz and /status\n")
  assert "Python" not in str(headers)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "XYZ"])
def test_other_methods_are_refused(serve, method):
  code, text, _ = ask(serve(lambda: {"secret": 1}).url, "/status", method)
  assert code == (405 if method == "POST" else 501) and "secret" not in text


def test_a_status_names_a_run_whose_folder_is_no_unicode(serve):
  """Such a name reaches Python as lone surrogates, which UTF-8 lacks."""
  run, loss = os.fsdecode(b"run-\xff"), np.float64("nan")
  code, text, _ = ask(serve(lambda: {"run": run, "loss": loss}).url, "/status")
  assert (code, json.loads(text)) == (200, {"run": run, "loss": None})


def test_a_status_that_fails_is_said_without_its_insides(serve):
  for status in (
    mock.Mock(side_effect=KeyError("/home/somebody/secret")),
    lambda: {"thread": threading.current_thread()},
    lambda: {1j: 2},
  ):
    health = serve(status)
    code, text, _ = ask(health.url, "/status")
    assert code == 500 and "secret" not in text and "Thread" not in text
    assert "failed" in json.loads(text)["error"]
    assert ask(health.url, "/livez")[0] == 200


@pytest.mark.parametrize("listen", ["", "8080", ":8080", "127.0.0.1:", "127.0.0.1:65536", "a:-1"])
def test_a_listen_address_that_is_none_is_said(listen):
  with pytest.raises(ConfigError, match=r"--http = .*must be HOST:PORT. Fix: write --http="):
    Health().serve(listen)


def test_a_taken_port_is_said(serve):
  _, port = address_of(serve().url)
  with pytest.raises(ConfigError, match=rf"--http = '127.0.0.1:{port}': cannot be opened .*Fix: "):
    Health().serve(f"127.0.0.1:{port}")


def test_close_frees_the_port_and_may_come_twice(serve):
  health = serve()
  host, port = address_of(health.url)
  health.close()
  health.close()
  with pytest.raises(ConnectionRefusedError):
    connect(health)
  again = Health()
  again.serve(f"{host}:{port}")
  again.close()


# --- hostile and hanging clients ------------------------------------------------------------------


def test_clients_that_hang_hold_up_nobody_and_are_cut_off(serve):
  """More than may be connected; each says something and then nothing."""
  health = serve()
  hanging = [connect(health) for _ in range(3 * MAX_CONNECTIONS)]
  for connection in hanging:
    with contextlib.suppress(OSError):
      connection.sendall(b"GET /livez HTTP/1.1\r\nHost: ")
  assert ask(health.url, "/livez")[0] == 200
  for oldest in hanging[:MAX_CONNECTIONS]:
    assert ended(oldest) == b""
  assert ask(health.url, "/livez")[0] == 200
  mine = [t for t in threading.enumerate() if "_admit" in t.name]
  assert len(mine) <= 2 * MAX_CONNECTIONS
  start = time.monotonic()
  for _ in range(1000):
    health.beat()
    health.waits_for = "busy"
  assert time.monotonic() - start < webserver.REQUEST_SECONDS / 2, "the role does not notice"
  for connection in hanging:
    connection.close()


def test_a_request_that_drips_is_over_when_its_time_is(serve, monkeypatch):
  monkeypatch.setattr(webserver, "REQUEST_SECONDS", 0.3)
  with connect(serve()) as connection:
    start = time.monotonic()
    with contextlib.suppress(OSError):
      while time.monotonic() - start < SECONDS:
        connection.sendall(b"x")
        connection.settimeout(0.05)
        with contextlib.suppress(TimeoutError):
          if not connection.recv(10):
            break
    assert 0.2 < time.monotonic() - start < SECONDS / 2


def test_a_request_that_does_not_end_is_cut_off(serve, monkeypatch):
  monkeypatch.setattr(webserver, "REQUEST_SECONDS", 10 * SECONDS)
  with connect(serve()) as connection:
    with contextlib.suppress(ConnectionError):
      most = webserver.REQUEST_BYTES + webserver.BODY_BYTES
      connection.sendall(b"X-More: " + b"x" * (most + 1000))
    assert ended(connection) == b""


@pytest.mark.parametrize(
  "request_", [b"\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01\x02\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
               b"GET /livez HTTP/1.1\r\nbad header\r\n\r\n", NOISE + b"\r\n\r\n", b""],
)  # fmt: skip
def test_garbage_ends_its_own_connection_only(serve, request_, capsys):
  health = serve()
  with connect(health) as connection:
    connection.sendall(request_)
    connection.shutdown(socket.SHUT_WR)
    answer = ended(connection)
  assert b"Traceback" not in answer and b"Python" not in answer and len(answer) < 1000
  assert ask(health.url, "/livez")[0] == 200
  assert capsys.readouterr().err == ""


def test_a_status_that_hangs_holds_up_no_probe(serve):
  go, asked = threading.Event(), threading.Event()

  def status():
    asked.set()
    go.wait(SECONDS)
    return {}

  health = serve(status)
  with connect(health) as connection:
    connection.sendall(b"GET /status HTTP/1.1\r\n\r\n")
    assert asked.wait(SECONDS)
    assert ask(health.url, "/status")[:2] == (503, '{"error": "the role is busy"}\n')
    assert ask(health.url, "/livez")[0] == 200
    go.set()
    assert ended(connection).endswith(b"{}\n")
  assert ask(health.url, "/status")[0] == 200
