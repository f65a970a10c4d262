"""What several of these tests use."""

import importlib

import pytest

from ddiloco import environment
from tests.scripts import commands


@pytest.fixture
def script():
  """A module of scripts/ by its name; pytest.ini says where they are."""
  return importlib.import_module


@pytest.fixture
def here(script, monkeypatch, capsys):
  """`commands.said` in this process, which has imported JAX already, and made its devices."""
  monkeypatch.setattr(environment, "prepare", lambda *_, **__: None)

  def said(line, *arguments):
    name, *words = line.split()
    module = script(name.removesuffix(".py"))
    assert commands.status(module, monkeypatch, *words, *map(str, arguments)) == 0
    return capsys.readouterr().out

  return said
