"""What the docs name is there: the glossary's names in the code, the files of a page, its links."""

import ast
import collections
import re
from pathlib import Path

import pytest

import ddiloco
from ddiloco import cli
from ddiloco.config import check_field
from tests.test_journey import journey

ROOT = Path(ddiloco.__file__).parent
CONFIGS = sorted((ROOT.parent / "configs").rglob("*.py"))
DOCS = ROOT.parent / "docs"
NAMING = [*sorted(DOCS.glob("*.md")), ROOT.parent / "CONTRIBUTING.md"]  # pages about the code
PAGES = [*NAMING, ROOT.parent / "README.md"]
OTHERS = {"dataclasses", "grain", "jax", "json", "nnx", "np", "optax"}  # whose names pages mention
ENDINGS = {
  "html",
  "js",
  "json",
  "jsonl",
  "md",
  "py",
  "safetensors",
  "sh",
  "yaml",
}  # a file's, no name


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


def named_files(page: Path) -> set[str]:
  return set(re.findall(r"`((?:\w+/)+\w+\.py)`", page.read_text()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_are_there(page):
  homes = ROOT, ROOT.parent
  missing = [f for f in named_files(page) if not any((home / f).exists() for home in homes)]
  assert not missing, f"{page.name} names {missing}"


def test_the_walk_passes_by_every_file_of_the_journey():
  left_out = set(journey.files()) - named_files(DOCS / "architecture.md")
  assert not left_out, f"architecture.md does not pass by {sorted(left_out)}"


@pytest.mark.parametrize("page", NAMING, ids=lambda page: page.name)
def test_what_a_page_calls_by_its_module_is_there(page):
  """`module.name`, `package.module.name`, or `section.field` of the config."""
  known = collections.defaultdict(set)  # a module, package or section -> words in it
  for path in ROOT.rglob("*.py"):
    stem = path.parent.name if path.stem == "__init__" else path.stem
    known[stem].update(re.findall(r"\w+", path.read_text()))
    known[path.parent.name].add(stem)
  for section, fields in ddiloco.default().items():
    known[section].update(fields if hasattr(fields, "items") else ())
  for called in re.findall(r"`([a-z_/]+(?:\.\w+)+)(?:\([^`]*\))?`", page.read_text()):
    holder, *names = called.split("/")[-1].split(".")
    if names[-1] in ENDINGS or holder in OTHERS:
      continue
    for name in names:
      assert name in known[holder], f"{page.name}: {called!r} names no {name!r} in {holder!r}"
      holder = name if name in known else holder


def test_what_pages_call_by_a_class_is_there():
  known = collections.defaultdict(set)  # a class -> words in it
  for path in ROOT.rglob("*.py"):
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
      if isinstance(node, ast.ClassDef):
        lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
        known[node.name].update(re.findall(r"\w+", "\n".join(lines)))
  for page in NAMING:
    for owner, name in re.findall(r"`([A-Z]\w+)\.(\w+)`", page.read_text()):
      assert name in known[owner], f"{page.name}: there is no {name!r} in the class {owner!r}"


def test_the_table_of_defaults_has_those_of_the_config():
  text = (DOCS / "design.md").read_text().partition("## Defaults")[2]
  rows = re.findall(r"^\| `(\w+)\.(\w+)` \| ([\w.-]+) \|", text, re.MULTILINE)
  assert len(rows) > 5
  for section, field, said in rows:
    default = ddiloco.default()[section][field]
    assert type(default)(said) == default, f"{section}.{field} is {default}, the table has {said}"


def headings(page: Path) -> set[str]:
  """The anchors of a page's headings, as GitHub makes them."""
  titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
  return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
  for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
    path, _, anchor = link.partition("#")
    if "://" in path:
      continue
    target = (page.parent / path).resolve() if path else page
    assert target.exists(), f"{page.name} links to {link!r}, which is not there"
    assert not anchor or anchor in headings(target), f"{page.name}: no heading for {link!r}"


def test_sections_that_the_code_cites_are_there():
  """A citation (docs/PAGE, "SECTION") names a heading, or bold words that begin a paragraph."""
  folders = (ROOT, *(ROOT.parent / name for name in ("configs", "scripts", "tests")))
  cited = re.compile(r'docs/(\w+\.md)`?, "([^"]+)"')
  found = 0
  for source in (path for folder in folders for path in folder.rglob("*.py")):
    for page, section in cited.findall(re.sub(r"\s*\n\s*(# )?", " ", source.read_text())):
      found += 1
      begins = rf"^(#+ |\*\*){re.escape(section)}"
      there = re.search(begins, (DOCS / page).read_text(), re.MULTILINE)
      assert there, f"{source.name}: {page} has no section {section!r}"
  assert found > 10


def typed(page: Path) -> list[tuple[str, str]]:
  """(Command, its flags) of every `ddiloco` command that a page or a config's header shows."""
  text = re.sub(r"\\+\n", " ", page.read_text())
  if page.suffix == ".md":
    text = "".join(re.findall(r"^```\w+\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
  command = rf"ddiloco ({'|'.join(cli.COMMANDS)})((?: protocol| gke| tpu-vms)?)( [^\n#&]*)"
  return [(f"{name}{more}", flags) for name, more, flags in re.findall(command, text)]


def test_flags_that_pages_type_are_there(capsys):
  helps: dict[str, str] = {}
  seen = 0
  for page in (*PAGES, *CONFIGS):
    for command, flags in typed(page):
      if command not in helps:
        assert cli.main([*command.split(), "--help"]) == 0
        helps[command] = capsys.readouterr().out
      for name in re.findall(r"--([\w.]+)", flags):
        seen += 1
        if name.startswith("config."):
          check_field(name.removeprefix("config."), "")
        else:
          known = f"--{name}:" in helps[command] or f"--[no]{name}:" in helps[command]
          assert known, f"{page.name}: ddiloco {command} has no --{name}"
  assert seen > 100
