"""What several of these tests use."""

import importlib

import pytest


@pytest.fixture
def script():
  """A module of scripts/ by its name; pytest.ini says where they are."""
  return importlib.import_module
