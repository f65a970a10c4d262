"""The dashboard's server: one page about a run, from its workdir alone, during the run and after.

  /             the page (hand-written, no external resources)
  /api/status   all that the page shows, as JSON
  /metrics      its numbers, for Prometheus
  /healthz      200 while the log is being followed, else 503
  /api/fault    POST: injects a fault, where that was allowed

One thread follows the log and others answer requests; none of them is a role's. Off loopback a
token is needed, as "Authorization: Bearer TOKEN" or "?token=TOKEN"; the page's own files and
/healthz say nothing of the run and need none. There is no TLS: from other machines use an ssh
tunnel, or a proxy that has TLS.
"""

from __future__ import annotations

import dataclasses
import hmac
import importlib.resources
import itertools
import json
import math
import re
import secrets
import threading
import time
import urllib.parse
from pathlib import Path
from typing import Any

import msgspec

from ddiloco.chaos import ask_for
from ddiloco.checks import build
from ddiloco.config import Config, ConfigError, Fault
from ddiloco.dashboard.status import LAG_SECONDS, METRICS_KIND, exposition
from ddiloco.dashboard.status import status as run_status
from ddiloco.network.keys import is_loopback
from ddiloco.network.webserver import Answer, Health, Request, WebServer, parse_address
from ddiloco.observe.eventlog import Follower, logs_in
from ddiloco.observe.guards import Warnings, ended
from ddiloco.observe.run_state import RunState
from ddiloco.protocol.events import RunStarted
from ddiloco.workdir import outcome, run_name, saved_config
from ddiloco.workdir import started as run_started

# --- Which requests are answered: checks of host, token and origin. Pure functions of a request

LEAST_TOKEN = 16  # characters of a token for a server off loopback
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")


class RequestRefused(Exception):
  """A request that is refused; `answer` says why."""

  def __init__(self, code: int, text: str, **headers: str):
    super().__init__(text)
    self.answer = Answer(code, text + "\n", headers=headers)


def check_token(token: str, host: str, flag: str) -> None:
  """Refuses (ConfigError) an address off loopback without a token, and tokens that are easy to
  guess."""
  make = "--token=$(python3 -c 'import secrets; print(secrets.token_urlsafe())')"
  if not token and not is_loopback(host):
    raise ConfigError(
      f"{flag}: {host} can be reached from other machines, which needs a token. Fix: add {make},"
      " or stay on 127.0.0.1."
    )
  good = len(token) >= LEAST_TOKEN and token.isascii() and token.isprintable()
  if token and not (good and " " not in token):
    raise ConfigError(
      f"--token: must be at least {LEAST_TOKEN} ASCII characters without blanks. Fix: use {make}."
    )


def require_host(request: Request, loopback: bool) -> str:
  """The request's Host. Refused if there is none, or if on loopback it is not this machine's name.

  A foreign page can make a browser ask 127.0.0.1 under the page's own name (DNS rebinding).
  """
  hosts = request.headers.get_all("Host", [])
  match = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
  if match is None:
    raise RequestRefused(400, "one valid Host header is needed")
  if loopback and not is_loopback(match[1]):
    raise RequestRefused(421, "this server only answers to localhost")
  return hosts[0]


def require_token(request: Request, token: str, in_url: bool = True) -> None:
  """Refused unless the request has the token: "Authorization: Bearer", or ?token= if `in_url`."""
  if not token:
    return
  kind, _, given = str(request.headers.get("Authorization", "")).partition(" ")
  if kind.lower() != "bearer":
    try:
      values = urllib.parse.parse_qs(request.query, max_num_fields=8) if in_url else {}
    except ValueError as error:
      raise RequestRefused(400, "that is no query") from error
    given = values.get("token", [""])[0]
  if not hmac.compare_digest(given.strip().encode("utf-8", "replace"), token.encode()):
    text = "a token is needed: Authorization: Bearer TOKEN"
    raise RequestRefused(401, text, **{"WWW-Authenticate": "Bearer"})


def require_same_origin(request: Request, host: str) -> None:
  """Refused unless a page of this server sent it."""
  origins = request.headers.get_all("Origin", [])
  site = request.headers.get("Sec-Fetch-Site", "same-origin")
  if origins not in ([f"http://{host}"], [f"https://{host}"]) or site != "same-origin":
    raise RequestRefused(403, "faults are taken from this server's own page only")


def parse_fault(request: Request) -> Fault:
  """The fault in a request's body, which strikes at once: action, role, and any other fields of
  `chaos.faults`."""
  if request.headers.get_content_type() != "application/json":
    raise RequestRefused(415, "a fault is application/json")
  try:
    return build(Fault, {**msgspec.json.decode(request.body), "at_seconds": 0.0}, "fault")
  except ConfigError as error:
    raise RequestRefused(400, str(error)) from error
  except (TypeError, ValueError, RecursionError) as error:
    raise RequestRefused(400, "a fault is a JSON object") from error


# --- The state of a run, read from its workdir by a thread of its own

POLL_SECONDS = 1.0
CLOSE_SECONDS = 5.0
FRESH_SECONDS = 0.5  # a status older than that is made anew on request
BATCH_EVENTS = 500  # entered under the lock at a time: a request waits for at most one batch


def check_logs(workdir: Path) -> None:
  """Refuses (ConfigError) a workdir with logs of another version, or that cannot be listed. For one
  in which a run begins that replaces them, this is not called."""
  logs_in(workdir)


class RunFollower:
  """Follows WORKDIR/events from `start` to `close`.

  If another run replaces the one in the workdir, the new one is followed from its start.
  """

  def __init__(self, workdir: Path):
    self.workdir = workdir
    self.health = Health()
    self.health.waits_for = self._trouble = ""  # why the log cannot be read now
    self._warn = Warnings()
    self._lock = threading.Lock()
    self._ended = threading.Event()
    self._thread = threading.Thread(target=self._follow, name="dashboard", daemon=True)
    self._status: tuple[float, dict[str, Any]] | None = None  # when it was made
    self._follower: Follower | None = None  # logs that are there now may be about to be replaced
    self._begin(None)

  def start(self) -> None:
    """Begins to read the log."""
    self._thread.start()

  def close(self) -> None:
    """Stops reading."""
    self._ended.set()
    ended(self._thread, CLOSE_SECONDS)

  def status(self) -> dict[str, Any]:
    """The run's status, at most half a second old; callers must not change it."""
    with self._lock:
      now = time.monotonic()
      if self._status is None or now - self._status[0] >= FRESH_SECONDS:
        self._status = now, self._make()
      return self._status[1]

  def has(self, role: str) -> bool:
    """Whether the run has this role, "learner-2" or "syncer-0"."""
    with self._lock:
      return role in self._run.members()

  def _make(self) -> dict[str, Any]:
    run, started = self._run, self._started
    now = run.time if started is None else time.time() - started + self._ahead
    sync = self._config and self._config.sync
    status = run_status(run, now, sync, self._reason, self._trouble)
    if not (self._caught_up or self._trouble):
      text = f"The log is being read: {run.num_events:,} events so far."
      status |= {"phase": "empty", "text": text}
    name = status["name"] or run_name(self.workdir)
    return status | {"name": name, "unread": self._unread, "started": started}

  def _begin(self, started: float | None) -> None:
    config = _config(self.workdir)
    with self._lock:
      self._started, self._config, self._run = started, config, RunState(config)
      self._ahead = 0.0  # seconds by which clocks of the run are ahead of this host's
      self._caught_up, self._reason, self._status = False, "", None
      self._unread: list[str] = []  # logs that cannot be read now, and why

  def _follow(self) -> None:
    while not self._ended.is_set():
      self.health.beat()
      try:
        self._look()
        self.health.waits_for = self._trouble = ""
        self._warn.over("log")
      except Exception as error:  # file system out of reach; logs of another format
        self.health.waits_for = "the log cannot be followed"
        self._trouble = f"{type(error).__name__}: {error}"
        self._warn("log", f"the dashboard cannot follow the log: {self._trouble}")
      self._ended.wait(POLL_SECONDS)

  def _look(self) -> None:
    started, known = run_started(self.workdir), self._config or self._run.num_events
    if self._follower is None or started != self._started or not known:
      self._follower = Follower(self.workdir)
      self._begin(started)
    events, late = iter(self._follower), math.inf  # since the newest event was written, at most
    while batch := list(itertools.islice(events, BATCH_EVENTS)):
      with self._lock:
        self._run.read(batch)
      if any(isinstance(event, RunStarted) for event in batch):
        self._config = _config(self.workdir)  # a run may go on with another quorum, for example
      late = LAG_SECONDS if self._caught_up else math.inf
      self.health.beat()
      if self._ended.wait(0.001):  # lets requests in
        return
    reason = outcome(self.workdir).get("reason", "")  # from the file beside the result
    failed = self._follower.unread.items()
    with self._lock:
      self._unread = [f"{path.name} ({error.strerror or error})" for path, error in failed]
      self._caught_up, self._reason = True, str(reason)
      newest = self._run.time + (started or 0.0) - time.time()
      self._ahead = min(max(self._ahead, newest), newest + late)


def _config(workdir: Path) -> Config | None:
  try:
    return saved_config(workdir)
  except ConfigError:
    return None  # not there yet, or of another version: events say most without it


JSON = "application/json"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
PAGE = "index.html"
HEADERS = {
  "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self';"
  " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
  "X-Content-Type-Options": "nosniff",
  "Referrer-Policy": "no-referrer",  # the first url may have the token in it
  "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclasses.dataclass(frozen=True)
class Where:
  """A dashboard's address, and what requests may do there."""

  bind: str = "127.0.0.1:0"
  token: str = dataclasses.field(default="", repr=False)
  allow_faults: bool = False
  flag: str = "--bind"  # the flag that gave `bind`


class Dashboard:
  """The server of one workdir; its port is open from the start, the log is followed in `with`.

  Faults need a token also on loopback, where every user of the machine can connect: if none is
  given, one is generated, and is part of `url`.

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
    self._run = RunFollower(workdir)
    self._server = WebServer(where.bind, self._answer, where.flag)
    made_up = f"/?token={self._token}" if self._token != where.token else "/"
    self.url = self._server.url + made_up

  def __enter__(self) -> Dashboard:
    self._run.start()
    return self

  def __exit__(self, *_: object) -> None:
    self._server.close()
    self._run.close()

  def _answer(self, request: Request) -> Answer:
    try:
      answer = self._route(request, require_host(request, self._loopback))
    except RequestRefused as refused:
      answer = refused.answer
    return dataclasses.replace(answer, headers=HEADERS | dict(answer.headers))

  def _route(self, request: Request, host: str) -> Answer:
    path = request.path
    allowed = "POST" if path == "/api/fault" else "GET, HEAD"
    if request.method not in allowed:
      raise RequestRefused(405, "not in this way", Allow=allowed)
    if path in self._files:
      return self._files[path]
    if path == "/healthz":
      code, text = self._run.health.readyz()
      return Answer(code, text + "\n")
    if path == "/api/fault":
      return self._inject(request, host)
    if path not in ("/api/status", "/metrics"):
      raise RequestRefused(404, "there are /, /api/status, /metrics and /healthz")
    require_token(request, self._token)
    status = self._run.status()
    if path == "/metrics":
      return Answer(200, exposition(status), METRICS_KIND)
    status = status | {"allow_faults": self._allow_faults}
    return Answer(200, json.dumps(status, allow_nan=False, separators=(",", ":")) + "\n", JSON)

  def _inject(self, request: Request, host: str) -> Answer:
    if not self._allow_faults:
      raise RequestRefused(403, "faults are not allowed here: start it with --allow_faults")
    require_same_origin(request, host)
    require_token(request, self._token, in_url=False)
    fault = parse_fault(request)
    if not self._run.has(fault.role):
      raise RequestRefused(400, f"there is no {fault.role} in this run")
    if self._run.status()["phase"] in ("over", "silent"):
      raise RequestRefused(409, "there is no run under way")
    ask_for(self._run.workdir, fault)
    return Answer(202, json.dumps({"asked": dataclasses.asdict(fault)}) + "\n", JSON)


def _page_files() -> dict[str, Answer]:
  """The page's files by path, read once: no request makes the server open a file."""
  folder = importlib.resources.files("ddiloco.dashboard") / "page"
  files = {
    f"/{file.name}": Answer(200, file.read_bytes(), f"{kind}; charset=utf-8")
    for file in folder.iterdir()
    if (kind := KINDS.get(Path(file.name).suffix))
  }
  return files | {"/": files.pop(f"/{PAGE}")}
