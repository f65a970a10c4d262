"""How a host that follows another one ends when it was asked to."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from ddiloco.config import from_dict
from ddiloco.engines import island_hosts
from ddiloco.engines.role_spec import RoleSpec


@pytest.mark.parametrize(("asked", "status"), [(True, 143), (False, 0)])
def test_it_says_by_its_status_whether_it_was_asked(asked, status, monkeypatch):
  """Else Kubernetes would take a host that is evicted to be done."""

  def follow(config, number, place, progress, told, joined, speak, lost):
    joined.set()
    if asked:
      os.kill(os.getpid(), signal.SIGTERM)
      assert told.wait(10.0)
      while not progress.asked_to_end:  # host 0 hears it with the next sign of life
        time.sleep(0.01)

  monkeypatch.setattr(island_hosts, "_follow", follow)
  place = RoleSpec(Path("w"), "run", (), hosts="tcp://127.0.0.1:7001", host=1, term_status=143)
  assert island_hosts.run_host(from_dict({}), 0, place) == status


def test_a_host_ends_at_once_when_asked_before_its_island_has_met(monkeypatch):
  """JAX waited for the others in the main thread, which then heard no signal for ten minutes."""
  over = threading.Event()

  def follow(*_):
    os.kill(os.getpid(), signal.SIGTERM)
    over.wait(10.0)

  def exit_now(status):
    raise SystemExit(status)

  monkeypatch.setattr(island_hosts, "_follow", follow)
  monkeypatch.setattr(island_hosts.os, "_exit", exit_now)
  place = RoleSpec(Path("w"), "run", (), hosts="tcp://127.0.0.1:7001", host=1, term_status=143)
  with pytest.raises(SystemExit) as ended:
    island_hosts.run_host(from_dict({}), 0, place)
  over.set()
  assert ended.value.code == 143
