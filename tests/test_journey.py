"""scripts/journey.py tells the truth: every stop exists, and each really leads on to the next."""

import ast
import importlib.util
import itertools
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "journey.py"


def load():
  spec = importlib.util.spec_from_file_location("journey", SCRIPT)
  module = importlib.util.module_from_spec(spec)
  sys.modules["journey"] = module  # dataclasses look their module up
  spec.loader.exec_module(module)
  return module


journey = load()


def tree(file: str) -> ast.Module:
  return ast.parse((journey.ROOT / file).read_text())


def used(file: str) -> set[str]:
  """Every name that a file's code uses or defines; not those in comments and docstrings."""
  found = set()
  for node in ast.walk(tree(file)):
    match node:
      case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
        found.add(name)
      case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
        found.add(name)
      case ast.alias(name=name, asname=other):
        found |= {name, other}
  return found


@pytest.mark.parametrize("stop", journey.JOURNEY, ids=lambda stop: f"{stop.file}:{stop.function}")
def test_every_stop_exists_and_says_what_happens(stop):
  first, last = stop.lines
  source = (journey.ROOT / stop.file).read_text().splitlines()[first - 1 : last]
  assert source[0].lstrip().startswith(("def ", "class "))
  assert stop.function.rpartition(".")[2] in source[0]
  assert stop.what.endswith(".") and "\n" not in stop.what


def pairs():
  return [(a, b) for a, b in itertools.pairwise(journey.JOURNEY) if a.file != b.file]


@pytest.mark.parametrize(("here", "there"), pairs(), ids=lambda stop: stop.file)
def test_every_stop_leads_on_to_the_next(here, there):
  for stop in (here, there):
    assert here.leads in used(stop.file), f"{stop.file} knows no {here.leads}"


def test_its_totals_are_printed(capsys, monkeypatch):
  monkeypatch.setattr(sys, "argv", ["journey.py", "--brief"])
  status = journey.main()
  *lines, last = capsys.readouterr().out.splitlines()
  assert len(lines) == len({stop.file for stop in journey.JOURNEY})
  assert f'"files": {len(lines)}' in last
  total = sum(int(line.split()[1]) for line in lines)
  assert f'"lines": {total}' in last
  assert status == (len(lines) > journey.MOST_FILES or total > journey.MOST_LINES)
