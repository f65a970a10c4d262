"""Imports point downward only, pure rooms stay pure, and files stay small enough to read."""

import ast
import re
from pathlib import Path

import pytest

import ddiloco

ROOT = Path(ddiloco.__file__).parent
# room -> rooms it may import from, besides itself
ALLOWED = {
  "checked": set(),
  "config": {"checked"},
  "core": {"config"},
  "models": {"config", "core"},
  "training": {"config", "core", "models"},
  "resilience": {"checked", "config", "core"},
  "observe": {"config", "core", "resilience"},
  "simulation": {"checked", "config", "core", "resilience"},
  "environment": set(),
  "nursery": {"environment"},
  "nursery_server": set(),
  "runtime": {"checked", "config", "core", "models", "training", "resilience", "observe"},
  "baselines": {
    *("config", "core", "environment", "models", "training", "resilience", "observe", "runtime"),
    "nursery",
  },
  "engines": {
    *("checked", "config", "core", "models", "training", "resilience", "simulation", "observe"),
    *("runtime", "nursery"),
  },
  "cli": {"config", "environment", "engines", "resilience", "runtime", "simulation"},
  "__main__": {"cli"},
  "__init__": set(),
}
PURE = ("core", "models")
IMPURE_MODULES = {
  "asyncio", "io", "logging", "multiprocessing", "os", "pathlib", "queue", "random", "shutil",
  "socket", "subprocess", "tempfile", "threading", "time", "absl", "grain", "orbax", "rich", "zmq",
}  # fmt: skip
IMPURE_CALLS = {"open", "print", "input"}
PURE_ALLOWS = {
  "core": {"numpy", "ml_dtypes", "msgpack", "ddiloco"},
  "models": {"numpy", "jax", "flax", "ddiloco"},
}
STANDARD = {
  "__future__", "bisect", "collections", "dataclasses", "enum", "functools", "hashlib", "heapq",
  "itertools", "json", "math", "operator", "reprlib", "statistics", "struct", "sys", "types",
  "typing", "zlib",
}  # fmt: skip
FILES = sorted(ROOT.rglob("*.py"))


def imported(path: Path) -> set[str]:
  names = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f"{path}: relative imports hide the room they reach into"
      names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
  return names


def room(path: Path) -> str:
  first = path.relative_to(ROOT).parts[0]
  return first.removesuffix(".py")


def name(path: Path) -> str:
  return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=name)
def test_imports_point_downward(path):
  here = room(path)
  assert here in ALLOWED, f"{here} is a new room: say in this test what it may import"
  for module in imported(path):
    parts = module.split(".")
    if parts[0] == "ddiloco" and len(parts) > 1 and parts[1] in ALLOWED:
      assert parts[1] in ALLOWED[here] | {here}, f"{name(path)} imports {module}: that is upward"


@pytest.mark.parametrize("path", [p for p in FILES if room(p) in PURE], ids=name)
def test_pure_rooms_stay_pure(path):
  for module in imported(path):
    top = module.split(".")[0]
    assert top not in IMPURE_MODULES, f"{name(path)} imports {module}"
    assert top in PURE_ALLOWS[room(path)] | STANDARD, f"{name(path)} imports {module}"
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
      assert node.func.id not in IMPURE_CALLS, f"{name(path)}:{node.lineno} calls {node.func.id}"


@pytest.mark.parametrize("path", [p for p in FILES if room(p) == "simulation"], ids=name)
def test_virtual_time_is_the_only_time_of_the_simulator(path):
  """Chance has a seed there; clocks, threads, files and processes it has none."""
  for module in imported(path):
    assert module.split(".")[0] not in IMPURE_MODULES - {"random"}, f"{name(path)}: {module}"


@pytest.mark.parametrize("file", ["messages", "quorum", "protocol", "learner", "syncer"])
def test_the_protocol_knows_no_arrays(file):
  """The reducers also run in the simulator, where there are no parameters at all."""
  assert not {m for m in imported(ROOT / "core" / f"{file}.py") if m.split(".")[0] == "numpy"}


@pytest.mark.parametrize("path", FILES, ids=name)
def test_environment_variables_are_read_in_one_place(path):
  if room(path) != "environment":
    assert not re.search(r"\b(environ|getenv|putenv)\b", path.read_text()), name(path)


@pytest.mark.parametrize("path", FILES, ids=name)
def test_files_are_short(path):
  lines = path.read_text().count("\n")
  assert lines <= 400, f"{name(path)}: {lines} lines"
