"""What other launchers leave in the environment joins no island to what is not its own."""

from __future__ import annotations

import os

from ddiloco import environment
from tests.training.test_hosts import POISON


def test_what_would_join_slices_or_processes_is_taken_away(monkeypatch):
  for name, value in POISON.items():
    monkeypatch.setenv(name, value)
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  environment.before_import()
  assert not POISON.keys() & os.environ.keys()
  assert os.environ["JAX_PLATFORMS"] == "cpu"
