"""What a role says of itself over HTTP: is it alive, is it ready, how does it stand.

  /livez    200 while the role's main loop goes round, else 503: restart it
  /readyz   200 while the role does its work, else 503
  /status   JSON, for people and scripts

The answers are given by threads of their own from a few attributes, without a lock the role could
wait for. Whoever can reach the port may read; nothing can be changed through it.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable
from typing import Any

from ddiloco.runtime.webserver import Answer, Request, WebServer

LIVE_SECONDS = 60.0  # without a beat, at least; more where ten steps take longer
START_SECONDS = 3600.0  # until the first beat: reading data, compiling


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
    self._server: WebServer | None = None

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
    self._server = WebServer(listen, self._answer, "--http")
    self._server.start()
    self.url = self._server.url
    return self.url

  def close(self) -> None:
    """Answers no more."""
    if self._server is not None:
      self._server.close()
      self._server = None

  def _answer(self, request: Request) -> Answer:
    if request.path == "/status":
      code, text = self.status()
      return Answer(code, text + "\n", "application/json")
    if request.path in ("/livez", "/readyz"):
      code, text = self.livez() if request.path == "/livez" else self.readyz()
      return Answer(code, text + "\n")
    return Answer(404, "there are /livez, /readyz and /status\n")


def _finite(value: Any) -> Any:
  """JSON has no NaN and no infinity: null."""
  if isinstance(value, dict):
    return {key: _finite(v) for key, v in value.items()}
  if isinstance(value, list | tuple):
    return [_finite(v) for v in value]
  return None if isinstance(value, float) and not math.isfinite(value) else value
