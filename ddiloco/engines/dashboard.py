"""Mission control: one page about a run, from its workdir alone, while it runs and afterwards.

  /             the page (hand-written, nothing from elsewhere)
  /api/status   all it shows, as JSON
  /metrics      its numbers, for Prometheus
  /healthz      200 while the log is being followed, else 503
  /api/fault    POST: injects a fault, where that was allowed

The log is followed by one thread and requests are answered by others, none of them a role's. Off
loopback a token is needed, as "Authorization: Bearer TOKEN" or "?token=TOKEN"; the page's own files
and /healthz say nothing of the run and need none. There is no TLS: leave the machine through an ssh
tunnel or a proxy that has it.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import secrets
import time
from pathlib import Path

from ddiloco.engines.access import (
  Refused,
  check_token,
  parse_fault,
  require_host,
  require_same_origin,
  require_token,
)
from ddiloco.engines.asked import ask
from ddiloco.engines.followed import FollowedRun
from ddiloco.observe.exposition import KIND, exposition
from ddiloco.runtime.keys import is_loopback
from ddiloco.runtime.webserver import Answer, Request, WebServer, parse_address

JSON = "application/json"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
PAGE = "index.html"
FAULT_SECONDS = 1.0  # between two injected faults
HEADERS = {
  "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
  " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
  "X-Content-Type-Options": "nosniff",
  "Referrer-Policy": "no-referrer",  # the first url may have the token in it
  "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclasses.dataclass(frozen=True)
class Where:
  """Where a dashboard is served, and what may be done there."""

  bind: str = "127.0.0.1:0"
  token: str = dataclasses.field(default="", repr=False)
  allow_faults: bool = False
  flag: str = "--bind"  # that `bind` came from


class Dashboard:
  """The server of one workdir; its port is open from the start, `with` answers.

  Faults need a token also on loopback, where every user of the machine can connect: without one it
  is made up, and is part of `url`.

  Raises:
    ConfigError: the address cannot be opened, or needs a token.
  """

  def __init__(self, workdir: Path, where: Where = Where()):
    host, _ = parse_address(where.bind, where.flag)
    check_token(where.token, host, where.flag)
    self._token = where.token
    if where.allow_faults and not self._token:
      self._token = secrets.token_urlsafe()
    self._loopback, self._allow_faults = is_loopback(host), where.allow_faults
    self._files = _page_files()
    self._run = FollowedRun(workdir)
    self._fault_at = -FAULT_SECONDS
    self._server = WebServer(where.bind, self._answer, where.flag, methods=("GET", "POST"))
    made_up = f"/?token={self._token}" if self._token != where.token else "/"
    self.url = self._server.url + made_up

  def __enter__(self) -> Dashboard:
    self._run.start()
    self._server.start()
    return self

  def __exit__(self, *_: object) -> None:
    self._server.close()
    self._run.close()

  def _answer(self, request: Request) -> Answer:
    try:
      answer = self._route(request, require_host(request, self._loopback))
    except Refused as refused:
      answer = refused.answer
    return dataclasses.replace(answer, headers=HEADERS | dict(answer.headers))

  def _route(self, request: Request, host: str) -> Answer:
    path = request.path
    if request.method != ("POST" if path == "/api/fault" else "GET"):
      raise Refused(405, "not in this way", Allow="POST" if path == "/api/fault" else "GET, HEAD")
    if path in self._files:
      return self._files[path]
    if path == "/healthz":
      code, text = self._run.health.livez()
      return Answer(code, text + "\n")
    if path == "/api/fault":
      return self._inject(request, host)
    if path not in ("/api/status", "/metrics"):
      raise Refused(404, "there are /, /api/status, /metrics and /healthz")
    require_token(request, self._token)
    status = self._run.status()
    if path == "/metrics":
      return Answer(200, exposition(status), KIND)
    status = status | {"allow_faults": self._allow_faults}
    return Answer(200, json.dumps(status, allow_nan=False, separators=(",", ":")) + "\n", JSON)

  def _inject(self, request: Request, host: str) -> Answer:
    if not self._allow_faults:
      raise Refused(403, "faults are not allowed here: start it with --allow_faults")
    require_same_origin(request, host)
    require_token(request, self._token, in_url=False)
    fault = parse_fault(request)
    if not self._run.has(fault.role):
      raise Refused(400, f"there is no {fault.role} in this run")
    if self._run.status()["phase"] in ("over", "silent"):
      raise Refused(409, "there is no run under way")
    now = time.monotonic()
    if now - self._fault_at < FAULT_SECONDS:
      raise Refused(429, "one fault a second", **{"Retry-After": "1"})
    self._fault_at = now
    ask(self._run.workdir, fault)
    return Answer(202, json.dumps({"asked": dataclasses.asdict(fault)}) + "\n", JSON)


def _page_files() -> dict[str, Answer]:
  """The page's files by path, read once: no request names a file on the disk."""
  folder = importlib.resources.files("ddiloco.observe") / "page"
  files = {}
  for file in folder.iterdir():
    kind = KINDS.get(Path(file.name).suffix)
    if kind:
      answer = Answer(200, file.read_bytes(), f"{kind}; charset=utf-8")
      files["/" if file.name == PAGE else f"/{file.name}"] = answer
  return files
