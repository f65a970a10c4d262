"""What a role says of itself over HTTP: is it alive, is it ready, how does it stand.

  /livez    200 while the role's main loop goes round, else 503: restart it
  /readyz   200 while the role does its work, else 503
  /status   JSON, for people and scripts

The answers are given by threads of their own from a few attributes, without a lock the role could
wait for. Whoever can reach the port may read; nothing can be changed through it.
"""

from __future__ import annotations

import contextlib
import http.server
import io
import json
import math
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from ddiloco.checked import ConfigError, require

LIVE_SECONDS = 60.0  # without a beat, at least; more where ten steps take longer
START_SECONDS = 3600.0  # until the first beat: reading data, compiling
REQUEST_SECONDS = 5.0  # for a request to arrive, and for its answer to leave
REQUEST_BYTES = 8192
MAX_CONNECTIONS = 32


class Health:
  """How a role is; written by its main loop, read by its HTTP server.

  Args:
    status: called for /status, from a thread of the server; whatever JSON can hold.

  Attributes:
    allow_seconds: how long the longest usual step of the role takes; it may change any time.
    url: where the server listens, once it does.
  """

  def __init__(self, status: Callable[[], dict[str, Any]] = dict):
    self.allow_seconds = 0.0
    self.url = ""
    self._status = status
    self._asking = threading.Lock()  # one /status at a time: a stuck one keeps one thread
    self._started = time.monotonic()
    self._beaten: float | None = None
    self._ready, self._reason = False, "starting"
    self._server: _Server | None = None

  def beat(self) -> None:
    """The role's main loop has come round."""
    self._beaten = time.monotonic()

  def ready(self, reason: str = "") -> None:
    """The role does its work."""
    self._ready, self._reason = True, reason

  def not_ready(self, reason: str) -> None:
    """The role cannot do its work now, and why; it is alive all the same."""
    self._ready, self._reason = False, reason

  def livez(self) -> tuple[int, str]:
    """(HTTP status, reason)."""
    now, beaten = time.monotonic(), self._beaten
    if beaten is None:
      seconds, limit, since = now - self._started, START_SECONDS, "starting for"
    else:
      seconds, limit = now - beaten, max(LIVE_SECONDS, 10 * self.allow_seconds)
      since = "the main loop last came round"
    text = f"{since} {seconds:.0f} s{'' if beaten is None else ' ago'} (allowed: {limit:.0f} s)"
    return (200 if seconds < limit else 503), text

  def readyz(self) -> tuple[int, str]:
    """(HTTP status, reason)."""
    live, reason = self.livez()
    if live != 200:
      return live, reason
    return (200, self._reason or "ready") if self._ready else (503, self._reason)

  def status(self) -> tuple[int, str]:
    """(HTTP status, JSON)."""
    if not self._asking.acquire(timeout=1):
      return 503, json.dumps({"error": "the role is busy"})
    try:
      return 200, json.dumps(_finite(self._status()), allow_nan=False)
    except Exception as error:  # the role goes on, whatever its status function does
      return 500, json.dumps({"error": f"the role's status failed: {type(error).__name__}"})
    finally:
      self._asking.release()

  def serve(self, listen: str) -> str:
    """Answers at `listen`, "HOST:PORT", port 0 being a free one; returns the url.

    Raises:
      ConfigError: it is not HOST:PORT, or cannot be opened.
    """
    host, colon, port = listen.rpartition(":")
    good = bool(colon and host) and port.isascii() and port.isdecimal() and int(port) < 65536
    example = "write --http=127.0.0.1:8080, with port 0 for a free one"
    require(good, "--http", listen, "must be HOST:PORT", example)
    try:
      self._server = _Server(host.strip("[]"), int(port), self)
    except OSError as error:
      raise ConfigError(
        f"--http = {listen!r}: cannot be opened ({error.strerror})."
        " Fix: give an address of this machine and a free port, or port 0."
      ) from error
    threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True).start()
    self.url = f"http://{host}:{self._server.server_address[1]}"
    return self.url

  def close(self) -> None:
    """Answers no more."""
    if self._server is not None:
      self._server.shutdown()
      self._server.server_close()
      self._server = None


class _Server(socketserver.ThreadingTCPServer):
  """A thread per connection; when there are too many the oldest are cut off, so a probe gets in."""

  allow_reuse_address = True
  daemon_threads = True
  block_on_close = False
  request_queue_size = 128

  def __init__(self, host: str, port: int, health: Health):
    self.health = health
    self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
    self._open: dict[socket.socket, None] = {}  # oldest first
    self._lock = threading.Lock()
    super().__init__((host, port), _Handler)

  def process_request(self, request, client_address) -> None:
    with self._lock:
      self._open[request] = None
      waiting = list(self._open)
    for oldest in waiting[:-MAX_CONNECTIONS]:
      with contextlib.suppress(OSError):  # it has just ended
        oldest.shutdown(socket.SHUT_RDWR)  # wakes its thread, which closes it
    if len(waiting) > 2 * MAX_CONNECTIONS:
      self.shutdown_request(request)  # they do not end
    else:
      super().process_request(request, client_address)

  def shutdown_request(self, request) -> None:
    with self._lock:
      self._open.pop(request, None)
    super().shutdown_request(request)

  def handle_error(self, request, client_address) -> None:
    if not isinstance(sys.exception(), OSError):  # a connection that breaks is no error of ours
      super().handle_error(request, client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
  """One request, one answer, then the connection is closed."""

  server: _Server

  def setup(self) -> None:
    super().setup()
    self.rfile.close()
    self.rfile = io.BytesIO(self._head())

  def do_GET(self) -> None:
    health, path = self.server.health, self.path.partition("?")[0]
    if path == "/status":
      self._answer(*health.status(), kind="application/json")
    elif path in ("/livez", "/readyz"):
      self._answer(*(health.livez() if path == "/livez" else health.readyz()))
    else:
      self._answer(404, "there are /livez, /readyz and /status")

  do_HEAD = do_GET

  def send_error(self, code, message=None, explain=None) -> None:
    """What the parser refuses: in plain words, without what was sent."""
    self._answer(code, http.HTTPStatus(code).phrase)

  def log_message(self, format, *args) -> None:
    """Probes come every few seconds; nobody wants to read that."""

  def version_string(self) -> str:
    return "ddiloco"

  def _answer(self, code: int, text: str, kind: str = "text/plain; charset=utf-8") -> None:
    body = (text + "\n").encode()
    self.send_response(code)
    self.send_header("Content-Type", kind)
    self.send_header("Content-Length", str(len(body)))
    self.send_header("Cache-Control", "no-store")
    self.send_header("Connection", "close")
    self.end_headers()
    if self.command != "HEAD":
      self.wfile.write(body)

  def _head(self) -> bytes:
    """What arrives until an empty line; TimeoutError, which ends the connection, if it is late."""
    deadline, head = time.monotonic() + REQUEST_SECONDS, b""
    while b"\r\n\r\n" not in head and b"\n\n" not in head:
      left = deadline - time.monotonic()
      if left <= 0 or len(head) >= REQUEST_BYTES:
        raise TimeoutError("the request is not complete")
      self.connection.settimeout(left)
      received = self.connection.recv(1024)
      if not received:
        break
      head += received
    self.connection.settimeout(REQUEST_SECONDS)
    return head


def _finite(value: Any) -> Any:
  """JSON has no NaN and no infinity: null."""
  if isinstance(value, dict):
    return {key: _finite(v) for key, v in value.items()}
  if isinstance(value, list | tuple):
    return [_finite(v) for v in value]
  return None if isinstance(value, float) and not math.isfinite(value) else value
