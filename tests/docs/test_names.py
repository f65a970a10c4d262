"""What the docs name is there: the glossary's names in the code, the architecture's files."""

import ast
import re
from pathlib import Path

import pytest

import ddiloco
from tests.test_journey import journey

ROOT = Path(ddiloco.__file__).parent
DOCS = ROOT.parent / "docs"


def names_in_the_code() -> set[str]:
  """Every identifier and every word of a string that the package's code holds."""
  found = set()
  for path in ROOT.rglob("*.py"):
    found.add(path.stem)
    for node in ast.walk(ast.parse(path.read_text())):
      match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
          found.add(name)
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
          found.add(name)
        case ast.Constant(value=str() as text) if text.isidentifier():
          found.add(text)
  return found


def glossary() -> list[list[str]]:
  """The cells of every row: term, what it is, names, symbol."""
  rows = [line for line in (DOCS / "glossary.md").read_text().splitlines() if line[:2] == "| "]
  cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
  return [row for row in cells if row[0] != "term"]


def test_the_glossary_names_what_is_there():
  known = names_in_the_code()
  for term, _, names, _ in glossary():
    found = re.findall(r"`(\w+)`", names)
    assert found, f"{term} has no name in the code"
    assert set(found) <= known, f"{term}: the code knows no {sorted(set(found) - known)}"


def test_the_glossary_has_a_sentence_for_each_term_once():
  terms = [term for term, *_ in glossary()]
  assert len(terms) == len(set(terms)) > 40
  assert all(sentence.endswith(".") for _, sentence, *_ in glossary())


@pytest.mark.parametrize("page", ["architecture.md"])
def test_files_that_are_named_are_there(page):
  text = (DOCS / page).read_text()
  named = set(re.findall(r"`(\w+/\w+\.py)`", text))
  missing = [f for f in named if not ((ROOT / f).exists() or (ROOT.parent / f).exists())]
  assert not missing, f"{page} names {missing}"
  left_out = set(journey.files()) - named
  assert not left_out, f"{page} does not pass by {sorted(left_out)}"
