"""Who may ask the dashboard what."""

import email.message
import json
import math

import pytest

from ddiloco.config import ConfigError, Fault
from ddiloco.dashboard.server import (
  RequestRefused,
  check_token,
  parse_fault,
  require_host,
  require_same_origin,
  require_token,
)
from ddiloco.network.webserver import Request

TOKEN = "a-token-of-some-length"


def request(query="", body=b"", **headers) -> Request:
  message = email.message.Message()
  for name, values in headers.items():
    for value in [values] if isinstance(values, str) else values:
      message[name.replace("_", "-")] = value
  return Request("GET", "/", query, message, body)


def refused(call, *arguments, **more) -> int:
  with pytest.raises(RequestRefused) as info:
    call(*arguments, **more)
  assert TOKEN.encode() not in info.value.answer.text.encode()
  return info.value.answer.code


# --- the token ------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "example.org", "127.0.0.1.evil.com"])
def test_off_loopback_a_token_is_needed(host):
  with pytest.raises(ConfigError, match=r"--bind: .* needs a token\. Fix: add --token="):
    check_token("", host, "--bind")
  check_token(TOKEN, host, "--bind")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1", "LOCALHOST"])
def test_on_loopback_none_is_needed(host):
  check_token("", host, "--bind")


@pytest.mark.parametrize(
  "token", ["short", "a token with blanks in", "ünïcödé-tökén-löng", "x" * 15]
)
def test_tokens_that_are_easy_to_guess_or_to_break_are_refused(token):
  with pytest.raises(ConfigError, match="--token: must be at least 16"):
    check_token(token, "127.0.0.1", "--bind")


def test_the_token_is_taken_from_the_header_or_the_url():
  good = [request(Authorization=f"{kind} {TOKEN}") for kind in ("Bearer", "bearer")]
  for each in (*good, request(query=f"x=1&token={TOKEN}")):
    assert require_token(each, TOKEN) is None, "else it raises"
  for each in (request(), request(Authorization="Bearer of-an-earlier-server-of-this-port")):
    assert require_token(each, "") is None


@pytest.mark.parametrize(
  ("query", "headers"),
  [
    ("", {}),
    ("", {"Authorization": "Bearer"}),
    ("", {"Authorization": f"Basic {TOKEN}"}),
    ("", {"Authorization": f"Bearer {TOKEN}x"}),
    ("", {"Authorization": f"Bearer {TOKEN[:-1]}"}),
    ("", {"Authorization": "Bearer \udcff"}),
    (f"token={TOKEN}", {"Authorization": "Bearer wrong"}),
    ("token=", {}),
    (f"Token={TOKEN}", {}),
    (f"token=wrong&token={TOKEN}", {}),
  ],
)
def test_anything_else_is_refused(query, headers):
  assert refused(require_token, request(query, **headers), TOKEN) == 401


def test_a_query_with_too_many_fields_is_refused():
  assert refused(require_token, request(query="&".join(f"a{i}=1" for i in range(99))), TOKEN) == 400


def test_what_changes_something_needs_the_header():
  assert refused(require_token, request(query=f"token={TOKEN}"), TOKEN, in_url=False) == 401


# --- host and origin ------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1:80", "localhost", "[::1]:8080", "127.9.9.9"])
def test_on_loopback_the_host_is_this_machine(host):
  assert require_host(request(Host=host), loopback=True) == host


@pytest.mark.parametrize("host", ["evil.com", "evil.com:80", "localhost.evil.com", "10.0.0.1"])
def test_another_name_for_loopback_is_refused(host):
  assert refused(require_host, request(Host=host), loopback=True) == 421
  assert require_host(request(Host=host), loopback=False) == host


@pytest.mark.parametrize("hosts", [[], ["a", "a"], [""], ["a b"], ["a/b"], ["a:b"], ["[::1"]])
def test_one_valid_host_is_needed(hosts):
  for loopback in (True, False):
    assert refused(require_host, request(Host=hosts), loopback) == 400


def test_only_this_servers_page_may_inject():
  here = "127.0.0.1:80"
  require_same_origin(request(Origin=f"http://{here}"), here)
  require_same_origin(request(Origin=f"https://{here}", Sec_Fetch_Site="same-origin"), here)
  for headers in (
    {},
    {"Origin": "null"},
    {"Origin": "http://evil.com"},
    {"Origin": f"http://{here}.evil.com"},
    {"Origin": "http://127.0.0.1:81"},
    {"Origin": [f"http://{here}", "http://evil.com"]},
    {"Origin": f"http://{here}", "Sec_Fetch_Site": "cross-site"},
  ):
    assert refused(require_same_origin, request(**headers), here) == 403, headers


# --- faults ---------------------------------------------------------------------------------------


def fault(body, kind="application/json"):
  body = body if isinstance(body, bytes) else json.dumps(body).encode()
  return parse_fault(request(body=body, Content_Type=kind))


def test_a_fault_is_one_of_the_plans():
  kill = {"action": "kill", "role": "learner-2", "seconds": 5}
  assert fault(kill) == fault(kill | {"at_seconds": 60}) == Fault(**kill, at_seconds=0.0)
  slow = {"action": "slow", "role": "syncer-0", "factor": 3}
  assert fault(slow, "application/json; charset=utf-8").factor == 3


@pytest.mark.parametrize(
  "body",
  [
    *(b"", b"{", b"\xff", b"[" * 3000, [], "kill", {}, {"action": "kill"}),
    {"action": "kill", "role": "learner-2", "command": "rm"},
    {"action": "explode", "role": "learner-2"},
    {"action": "kill", "role": "../2"},
    {"action": "kill", "role": 2},
    {"action": ["kill"], "role": "learner-2"},
    {"action": "stall", "role": "learner-2", "seconds": -5},
    {"action": "stall", "role": "learner-2", "seconds": True},
    {"action": "stall", "role": "learner-2", "seconds": None},
    {"action": "slow", "role": "learner-2", "factor": 0},
    {"action": "slow", "role": "learner-2", "factor": math.inf},
    {"action": "slow", "role": "learner-2", "factor": math.nan},
    {"action": "slow", "role": "learner-2", "factor": 10**400},
    {"action": "kill", "role": "learner-2", "at_step": 7},
  ],
)
def test_nothing_else_is(body):
  assert refused(fault, body) == 400


@pytest.mark.parametrize("wrong", [{"seconds": "5"}, {"factor": -1e15}, {"role": 2}])
def test_what_is_wrong_is_named(wrong):
  with pytest.raises(RequestRefused) as caught:
    fault({"action": "slow", "role": "learner-2", **wrong})
  (name,) = wrong
  assert f".{name} = " in str(caught.value)


def test_a_form_cannot_send_one():
  assert refused(fault, {"action": "kill", "role": "learner-2"}, "text/plain") == 415
