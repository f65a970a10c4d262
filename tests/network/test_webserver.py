"""What the small HTTP server does beyond health's tests: bodies, and answers that fail."""

import contextlib
import errno
import io
import socket
import sys
import threading
import time
from unittest import mock

import pytest

from ddiloco.checks import ConfigError
from ddiloco.network import webserver
from ddiloco.network.frames import PAUSE_SECONDS
from ddiloco.network.webserver import BODY_BYTES, Answer, Request, WebServer, parse_address
from tests.web import address_of, ask

SECONDS = 20


@pytest.fixture
def serve():
  with contextlib.ExitStack() as stack:

    def serve(answer):
      server = WebServer("127.0.0.1:0", answer, "--test")
      stack.callback(server.close)
      return server.url

    yield serve


def echo(request: Request) -> Answer:
  text = f"{request.method} {request.path} {request.query} {len(request.body)}"
  return Answer(200, text, headers={"X-More": "yes"})


def raw(url, *parts: bytes) -> bytes:
  with socket.create_connection(address_of(url), timeout=SECONDS) as connection:
    for part in parts:
      connection.sendall(part)
    answer = b""
    while data := connection.recv(4096):
      answer += data
    return answer


def test_path_query_and_body(serve):
  url = serve(echo)
  assert ask(url, "/a?b=1&c")[:2] == (200, "GET /a b=1&c 0")
  code, text, headers = ask(url, "/a", "POST", body=b"x" * BODY_BYTES)
  assert (code, text) == (200, f"POST /a  {BODY_BYTES}")
  assert headers["X-More"] == "yes" and headers["Server"] == "ddiloco"
  assert raw(url, b"HEAD /a HTTP/1.0\r\n\r\n").endswith(b"\r\n\r\n"), "and no text"


def test_a_body_may_come_in_pieces_and_no_more_of_it_is_read(serve):
  head = b"POST / HTTP/1.1\r\nContent-Length: 6\r\n\r\n"
  assert raw(serve(echo), head + b"ab", b"cd", b"ef").endswith(b"POST /  6")
  assert raw(serve(echo), head + b"abcdefGET / HTTP/1.1\r\n\r\n").count(b"HTTP/1") == 1


def test_a_body_that_is_late_or_too_long_is_not_waited_for(serve, monkeypatch):
  monkeypatch.setattr(webserver, "REQUEST_SECONDS", 0.3)
  head = b"POST / HTTP/1.1\r\nContent-Length: 6\r\n\r\n"
  assert raw(serve(echo), head + b"ab") == b""
  assert ask(serve(echo), "/", "POST", body=b"x" * (BODY_BYTES + 1))[0] == 413
  endless = b"POST / HTTP/1.1\r\nContent-Length: " + 5000 * b"9"  # Python reads no such number
  assert raw(serve(echo), endless + b"\r\n\r\n").startswith(b"HTTP/1.0 413 ")


@pytest.mark.parametrize(
  "head",
  [b"", b"Content-Length: +1", b"Content-Length: \xb2", b"Content-Length: 1_0",
   b"Content-Length: 1\r\nTransfer-Encoding: chunked"],
)  # fmt: skip
def test_a_body_of_unknown_length_is_not_read(serve, head):
  answer = raw(serve(echo), b"POST / HTTP/1.1\r\n" + head + b"\r\n\r\nx")
  assert answer.startswith(b"HTTP/1.0 411 ")


def test_a_body_that_breaks_off_is_not_answered(serve):
  answer = mock.Mock(side_effect=echo)
  with socket.create_connection(address_of(serve(answer)), timeout=SECONDS) as connection:
    connection.sendall(b"POST / HTTP/1.1\r\nContent-Length: 6\r\n\r\nab")
    connection.shutdown(socket.SHUT_WR)
    assert connection.recv(100) == b"" and not answer.called


@pytest.mark.parametrize("error", [KeyError("secret"), OSError("secret")], ids=repr)
def test_an_answer_that_fails_is_printed_here_and_not_there(serve, monkeypatch, error):
  heard = threading.Event()

  class Heard(io.StringIO):  # a thread of the server's writes: pytest's own capture would lose some
    def write(self, text: str) -> int:
      written = super().write(text)
      if f"{type(error).__name__}: {error}" in self.getvalue():
        heard.set()
      return written

  monkeypatch.setattr(sys, "stderr", Heard())
  code, text, _ = ask(serve(mock.Mock(side_effect=error)), "/")
  assert (code, text) == (500, "Internal Server Error\n")
  assert heard.wait(SECONDS)


def test_who_waits_while_no_descriptor_is_left_does_not_keep_the_thread_busy(serve, monkeypatch):
  accept, failed = socket.socket.accept, []

  def crowded(listener):
    if len(failed) < 3:
      failed.append(time.monotonic())
      raise OSError(errno.EMFILE, "Too many open files")
    return accept(listener)

  monkeypatch.setattr(socket.socket, "accept", crowded)
  assert ask(serve(echo), "/a")[0] == 200
  assert failed[2] - failed[0] >= 2 * PAUSE_SECONDS


def test_addresses():
  assert parse_address("127.0.0.1:80", "--x") == ("127.0.0.1", 80)
  assert parse_address("[::1]:0", "--x") == ("::1", 0)
  for wrong in ("", "80", ":80", "a:", "a:65536", "a:-1", "a:8o", "a:８０"):
    with pytest.raises(ConfigError, match=r"--x = .*must be HOST:PORT\. Fix: write --x="):
      parse_address(wrong, "--x")


@pytest.mark.parametrize("host", ["ä..b", 64 * "ä"])
def test_what_is_no_host_name_is_refused_by_the_name_of_its_flag(host):
  with pytest.raises(ConfigError, match=r"--x = .*cannot be opened \(.*\)\. Fix: give an address"):
    WebServer(f"{host}:0", echo, "--x")


def test_the_url_of_an_ipv6_address_has_brackets():
  if not socket.has_ipv6:
    pytest.skip("no IPv6 here")
  try:
    server = WebServer("[::1]:0", echo, "--test")
  except ConfigError as error:
    pytest.skip(f"no IPv6 loopback here: {error}")
  assert ask(server.url, "/")[0] == 200
  server.close()


def test_a_connection_for_which_there_is_no_thread_is_not_the_last_one(serve, monkeypatch):
  url, start, failures = serve(echo), threading.Thread.start, [RuntimeError("no more threads")]

  def crowded(thread):
    if failures and "_admit" in thread.name:
      raise failures.pop()
    start(thread)

  monkeypatch.setattr(threading.Thread, "start", crowded)
  with contextlib.suppress(ConnectionError):
    assert raw(url, b"GET / HTTP/1.0\r\n\r\n") == b""
  assert not failures and ask(url, "/a")[0] == 200
