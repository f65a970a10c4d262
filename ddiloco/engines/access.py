"""Who may ask the dashboard what: host, token, origin. Pure functions of a request."""

from __future__ import annotations

import hmac
import json
import re
import urllib.parse

from ddiloco.config import ConfigError, Fault
from ddiloco.runtime.keys import is_loopback
from ddiloco.runtime.webserver import Answer, Request

LEAST_TOKEN = 16  # characters of a token that may leave the machine
MOST = 1e15  # of any number in a fault
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")
_NUMBERS = ("seconds", "factor", "share", "delay_seconds", "bits_per_second")


class Refused(Exception):
  """A request that is not answered; `answer` says why, in plain words."""

  def __init__(self, code: int, text: str, **headers: str):
    super().__init__(text)
    self.answer = Answer(code, text + "\n", headers=headers)


def check_token(token: str, host: str, flag: str) -> None:
  """Refuses an address beyond this machine without a token, and tokens that are easy to guess.

  Raises:
    ConfigError: naming the flag, the rule and the fix.
  """
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
  """The request's Host; Refused unless there is one, and on loopback names this machine.

  A page elsewhere can make a browser ask 127.0.0.1 under the page's own name (DNS rebinding).
  """
  hosts = request.headers.get_all("Host", [])
  match = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
  if match is None:
    raise Refused(400, "one valid Host header is needed")
  if loopback and not is_loopback(match[1]):
    raise Refused(421, "this server only answers to localhost")
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
      raise Refused(400, "that is no query") from error
    given = values.get("token", [""])[0]
  if not hmac.compare_digest(given.strip().encode("utf-8", "replace"), token.encode()):
    text = "a token is needed: Authorization: Bearer TOKEN"
    raise Refused(401, text, **{"WWW-Authenticate": "Bearer"})


def require_same_origin(request: Request, host: str) -> None:
  """Refused unless a page of this very server sent it."""
  origins = request.headers.get_all("Origin", [])
  site = request.headers.get("Sec-Fetch-Site", "same-origin")
  if origins not in ([f"http://{host}"], [f"https://{host}"]) or site != "same-origin":
    raise Refused(403, "faults are taken from this server's own page only")


def parse_fault(request: Request) -> Fault:
  """The fault that a body asks for: action, role, and what else one of `chaos.faults` may have."""
  if request.headers.get_content_type() != "application/json":
    raise Refused(415, "a fault is application/json")
  try:
    fields = json.loads(request.body)
  except (ValueError, RecursionError) as error:
    raise Refused(400, "a fault is a JSON object") from error
  names = {"action", "role"}
  if not isinstance(fields, dict) or not names <= fields.keys() <= {*names, *_NUMBERS}:
    raise Refused(400, f"a fault has action and role, and may have {', '.join(_NUMBERS)}")
  for name, value in fields.items():
    kind = str if name in names else (int, float)
    if not isinstance(value, kind) or isinstance(value, bool):
      raise Refused(400, f"{name} has the wrong type")
    if not isinstance(value, str) and not abs(value) < MOST:
      raise Refused(400, f"{name} must be finite, and less than {MOST:g}")
  try:
    return Fault(**fields, at_seconds=0.0)
  except ConfigError as error:
    raise Refused(400, str(error)) from error
