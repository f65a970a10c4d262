"""What several of these tests use."""

import importlib

import pytest

from tests.scripts.commands import SCRIPTS


@pytest.fixture
def script(monkeypatch):
  """A module of scripts/ by its name, as the scripts beside it see it."""
  monkeypatch.syspath_prepend(str(SCRIPTS))
  return importlib.import_module
