"""A small HTTP server beside a role or a run: one request and one answer for each connection.

Each connection has a thread of its own, a time limit and a size limit, and when there are too many
the oldest are closed: clients that hang hold up neither the run nor each other. No request names a
file on disk, and no client gets a traceback.
"""

from __future__ import annotations

import dataclasses
import http.server
import io
import json
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from email.message import Message
from typing import Any, cast

from ddiloco.checks import ConfigError, require
from ddiloco.network.frames import Door, bind
from ddiloco.network.transport import Counters
from ddiloco.observe.guards import warn

REQUEST_SECONDS = 10.0  # for a request to arrive, and for its answer to leave
REQUEST_BYTES = 8192  # of its head, about
BODY_BYTES = 4096
MAX_CONNECTIONS = 32
TEXT = "text/plain; charset=utf-8"


@dataclasses.dataclass(frozen=True)
class Request:
  """One request of a client. `path` is without the query; neither is decoded."""

  method: str  # GET (also for HEAD) or POST
  path: str
  query: str
  headers: Message
  body: bytes = b""


@dataclasses.dataclass(frozen=True)
class Answer:
  """The answer to a request: a status code, a text, its content type, and further headers."""

  code: int
  text: str | bytes
  kind: str = TEXT
  headers: Mapping[str, str] = dataclasses.field(default_factory=dict)


def parse_address(listen: str, flag: str) -> tuple[str, int]:
  """(host, port) of "HOST:PORT"; an IPv6 address is in brackets, and is returned without them.

  Raises:
    ConfigError: `listen` is not HOST:PORT.
  """
  host, colon, port = listen.rpartition(":")
  good = bool(colon and host) and port.isascii() and port.isdecimal() and int(port) < 65536
  example = f"write {flag}=127.0.0.1:8080, with port 0 for a free one"
  require(good, flag, listen, "must be HOST:PORT", example)
  return host.strip("[]"), int(port)


class WebServer:
  """Answers requests from the start, in threads of its own, until `close`.

  Args:
    listen: "HOST:PORT"; port 0 picks a free one.
    answer: called for every request, from that connection's thread.
    flag: the flag that gave the address, for errors.

  Raises:
    ConfigError: the address is not HOST:PORT, or cannot be opened.
  """

  def __init__(self, listen: str, answer: Callable[[Request], Answer], flag: str):
    parse_address(listen, flag)
    self.answer = answer
    try:
      listener, url = bind(f"tcp://{listen}")
    except (OSError, ValueError) as error:  # ValueError: it is no host name
      reason = error.strerror if isinstance(error, OSError) else error
      raise ConfigError(
        f"{flag} = {listen!r}: cannot be opened ({reason})."
        " Fix: give an address of this machine and a free port, or port 0."
      ) from error
    self.url = url.replace("tcp:", "http:")
    self._door = Door(listener, None, self._serve, MAX_CONNECTIONS, REQUEST_SECONDS, Counters())

  def close(self) -> None:
    """Stops the server."""
    self._door.close()

  def _serve(self, connected: socket.socket) -> bool:
    _Handler(connected, None, cast(Any, self))
    return False


class _RequestReader(io.RawIOBase):
  """What a client sends in time, up to the most that a request may have."""

  def __init__(self, connection: socket.socket):
    self._connection, self._left = connection, REQUEST_BYTES + BODY_BYTES
    self._until = time.monotonic() + REQUEST_SECONDS

  def readable(self) -> bool:
    return True

  def readinto(self, buffer) -> int:
    if not self._left:
      raise TimeoutError("the request does not end")  # which ends the connection
    self._connection.settimeout(max(1e-3, self._until - time.monotonic()))
    count = self._connection.recv_into(memoryview(buffer)[: self._left])
    self._left -= count
    return count


class _Handler(http.server.BaseHTTPRequestHandler):
  """One request, one answer, then the connection is closed."""

  server: Any  # the WebServer

  def setup(self) -> None:
    super().setup()
    self.rfile.close()
    self.rfile = io.BufferedReader(_RequestReader(self.connection))

  def do_GET(self) -> None:
    self._serve(b"")

  do_HEAD = do_GET

  def do_POST(self) -> None:
    length = self.headers.get("Content-Length", "")
    if "Transfer-Encoding" in self.headers or not length.isdecimal():
      self.send_error(411)
    elif len(length) > 9 or int(length) > BODY_BYTES:
      self.send_error(413)
    else:
      body = self.rfile.read(int(length))
      if len(body) == int(length):  # else the client has gone
        self._serve(body)

  def _serve(self, body: bytes) -> None:
    path, _, query = self.path.partition("?")
    method = "GET" if self.command == "HEAD" else self.command
    try:
      answer = self.server.answer(Request(method, path, query, self.headers, body))
    except Exception:  # said here, since `handle_error` takes an OSError for a broken connection
      warn(f"a request could not be answered\n{traceback.format_exc()}")
      self.send_error(500)
    else:
      self._answer(answer)

  def send_error(self, code, message=None, explain=None) -> None:
    """Answers an error in plain words, without any text of the request."""
    self._answer(Answer(code, http.HTTPStatus(code).phrase + "\n"))

  def log_message(self, format, *args) -> None:
    """Logs nothing: probes come every few seconds."""

  def version_string(self) -> str:
    return "ddiloco"

  def _answer(self, answer: Answer) -> None:
    body = answer.text.encode() if isinstance(answer.text, str) else answer.text
    self.send_response(answer.code)
    headers = {"Content-Type": answer.kind, "Content-Length": str(len(body))}
    for name, value in {**headers, "Cache-Control": "no-store", **answer.headers}.items():
      self.send_header(name, value)
    self.send_header("Connection", "close")
    self.connection.settimeout(REQUEST_SECONDS)
    self.end_headers()
    if self.command != "HEAD":
      self.wfile.write(body)


# --- Health of a role over HTTP: is it alive, is it ready, what is its status
# /livez    200 while the role's main loop makes turns, else 503: restart it
# /readyz   200 while the role does its work, else 503
# /status   JSON, for people and scripts
#
# Threads of the server answer from a few attributes, without a lock that the role could wait for.
# Every client that reaches the port may read; nothing can be changed through it.

LIVE_SECONDS = 60.0  # allowed without a beat, at least; longer where ten steps take longer
START_SECONDS = 3600.0  # allowed before the first beat: reading data, compiling, saving the result


class Health:
  """The health of a role; written by its main loop, read by its HTTP server.

  Args:
    status: called for /status, from a thread of the server; returns what JSON can hold.

  Attributes:
    allow_seconds: how long the longest usual step of the role takes; it may change any time.
    waits_for: why the role, though alive, cannot do its work now; "": it does.
    url: where the server listens, once it does.
  """

  def __init__(self, status: Callable[[], dict[str, Any]] = dict):
    self.allow_seconds = 0.0
    self.url = ""
    self._status = status
    self._asking = threading.Lock()  # one /status at a time: a stuck call blocks only one thread
    self._started = time.monotonic()
    self._beaten: float | None = None
    self._doing = "starting"  # the long work before the next beat
    self.waits_for = "starting"
    self._server: WebServer | None = None

  def beat(self) -> None:
    """The role's main loop has made a turn."""
    self._beaten = time.monotonic()

  def busy(self, what: str) -> None:
    """Until the next beat the main loop does long work: the limit is that of the start."""
    self._started, self._doing = time.monotonic(), what
    self._beaten = None  # last: `livez`, from another thread, then counts from the new start

  def livez(self) -> tuple[int, str]:
    """(HTTP status, reason)."""
    now, beaten = time.monotonic(), self._beaten
    if beaten is None:
      seconds, limit = now - self._started, START_SECONDS
      text = f"{self._doing} for {seconds:.0f} s"
    else:
      seconds, limit = now - beaten, max(LIVE_SECONDS, 10 * self.allow_seconds)
      text = f"the main loop last came round {seconds:.0f} s ago"
    return (200 if seconds < limit else 503), f"{text} (allowed: {limit:.0f} s)"

  def readyz(self) -> tuple[int, str]:
    """(HTTP status, reason)."""
    live, reason = self.livez()
    if live == 200:
      reason = self.waits_for or "ready"
    return (503 if self.waits_for else live), reason

  def status(self) -> tuple[int, str]:
    """(HTTP status, JSON)."""
    if not self._asking.acquire(timeout=1):
      return 503, json.dumps({"error": "the role is busy"})
    try:
      text = json.dumps(self._status())
      # JSON lacks NaN and infinity: null for them.
      return 200, json.dumps(json.loads(text, parse_constant=lambda name: None))
    except Exception as error:  # an error of the status function must not end the role
      return 500, json.dumps({"error": f"the role's status failed: {type(error).__name__}"})
    finally:
      self._asking.release()

  def serve(self, listen: str) -> str:
    """Answers at `listen`, "HOST:PORT"; port 0 picks a free one; returns the url.

    Raises:
      ConfigError: `listen` is not HOST:PORT, or cannot be opened.
    """
    self._server = WebServer(listen, self._answer, "--http")
    self.url = self._server.url
    return self.url

  def close(self) -> None:
    """Stops the server."""
    if self._server is not None:
      self._server.close()
      self._server = None

  def _answer(self, request: Request) -> Answer:
    found = {"/livez": self.livez, "/readyz": self.readyz, "/status": self.status}
    if request.method != "GET":
      return Answer(405, "nothing can be changed here\n", headers={"Allow": "GET, HEAD"})
    if request.path not in found:
      return Answer(404, "there are /livez, /readyz and /status\n")
    code, text = found[request.path]()
    return Answer(code, text + "\n", "application/json" if request.path == "/status" else TEXT)
