"""Commands in the tests' own process."""

from pathlib import Path

import pytest

from ddiloco import cli, environment


@pytest.fixture(autouse=True)
def no_device(monkeypatch):
  """These calls share the tests' process, whose devices are made already."""
  monkeypatch.setattr(environment, "prepare", lambda **settings: None)
  monkeypatch.setattr(environment, "describe_only", lambda: None)


def contents(folder: Path) -> dict[str, bytes | None]:
  """Of each file; None for a folder."""
  return {str(p): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


@pytest.fixture
def refused(capsys, tmp_path):
  """Runs a command that must be refused; returns what it says."""

  def run(*arguments: object) -> str:
    before = contents(tmp_path)
    capsys.readouterr()
    assert cli.main([str(a) for a in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("ddiloco") and "Traceback" not in err
    assert contents(tmp_path) == before, "a refusal changes nothing"
    return err

  return run
