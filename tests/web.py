"""Requests over HTTP, as tests make them."""

from __future__ import annotations

import contextlib
import http.client
import urllib.parse

from tests.waits import PATIENCE_SECONDS


def address_of(url: str) -> tuple[str, int]:
  """Host and port."""
  parts = urllib.parse.urlsplit(url)
  return parts.hostname or "", parts.port or 0


def ask(url: str, path: str, method: str = "GET", headers=None, body=None) -> tuple[int, str, dict]:
  """Status, text and headers of the answer."""
  connection = http.client.HTTPConnection(*address_of(url), timeout=PATIENCE_SECONDS)
  with contextlib.closing(connection):
    connection.request(method, path, body, headers or {})
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), dict(answer.getheaders())
