"""Imports point downward only, pure packages stay pure, and files stay small enough to read."""

import ast
import graphlib
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

import ddiloco

ROOT = Path(ddiloco.__file__).parent
# Packages from the ground up: each may import from those it names, all of which stand before it.
ALLOWED = {
  "checks": set(),
  "environment": set(),
  "config": {"checks"},
  "protocol": {"checks", "config"},
  "core": {"config", "protocol"},
  "models": {"checks", "config"},
  "custom": {"checks", "config", "models"},
  "training": {"checks", "environment", "config", "core", "models", "custom"},
  "observe": {"checks", "config", "protocol"},
  "workdir": {"checks", "config", "observe"},
  "network": {"checks", "environment", "config", "protocol", "observe"},
  "runtime": {"config", "protocol", "core", "observe", "network"},
  "checkpoint": {"checks", "config", "protocol", "core", "observe", "network", "runtime"},
  "chaos": {"checks", "config", "protocol", "observe", "network", "workdir"},
  "roles": {
    *("config", "protocol", "core", "models", "custom", "observe", "network", "runtime"),
    *("checkpoint", "chaos"),
  },
  "launch": {"checks", "environment", "config"},
  "simulation": {
    *("checks", "config", "protocol", "core", "observe", "network", "runtime", "checkpoint"),
    *("chaos", "roles"),
  },
  "dashboard": {"config", "protocol", "observe", "network", "chaos", "checks", "workdir"},
  "trace": {
    *("config", "workdir", "protocol", "core", "training", "observe", "checkpoint", "roles"),
  },
  "engines": {
    *(
      "checks",
      "config",
      "environment",
      "workdir",
      "protocol",
      "core",
      "models",
      "custom",
      "training",
      "observe",
    ),
    *("network", "runtime", "checkpoint", "chaos", "roles", "simulation", "dashboard"),
  },
  "baselines": {
    *("config", "environment", "workdir", "protocol", "models", "custom", "training", "observe"),
    *("network", "chaos", "roles", "engines"),
  },
  "api": {
    *("checks", "config", "custom", "environment", "workdir", "checkpoint", "roles", "observe"),
    *("dashboard", "simulation", "engines", "protocol", "models"),
  },
  "__init__": {"config", "models", "training", "api"},
  "cli": {
    "api",
    *("config", "environment", "workdir", "custom", "network", "checkpoint", "roles", "dashboard"),
    *("checks", "training", "trace", "simulation", "engines", "launch"),
  },
  "__main__": {"environment", "cli"},
}
IMPURE_MODULES = {
  "asyncio", "io", "logging", "multiprocessing", "os", "pathlib", "queue", "random", "shutil",
  "socket", "subprocess", "tempfile", "threading", "time", "absl", "grain", "orbax", "rich", "ssl",
}  # fmt: skip
IMPURE_CALLS = {"open", "print", "input"}
# Class names that stand in several files, and why that is the same idea each time.
SAME_IDEA = {
  **dict.fromkeys(
    (
      *("Commit", "Resend", "Stage", "Saved", "Push", "Replicated", "Round", "Dropped"),
      *("Joined", "Lost", "Member"),
    ),
    "what a role does, hears or keeps, and the event that says so (protocol/events.py)",
  ),
  "Fault": "what is planned, and the event that it strikes",
  "Restored": "what a role starts with, and the event that says so",
  "Tick": "time has passed: for a reducer, and for the supervisor",
}
# Base names of modules that stand in several packages: a reducer, and the role that it decides for.
SAME_BASE = {"learner", "syncer"}
# Purity is a rule of a whole package: no clock, no chance, no files, and of packages only these.
PURE = {
  "protocol": {"msgspec", "ddiloco"},  # no arrays: it also runs where there are no parameters
  "core": {"numpy", "ml_dtypes", "numba", "llvmlite", "ddiloco"},
  "models": {"numpy", "jax", "flax", "ddiloco"},
}
STANDARD = {
  "__future__", "bisect", "collections", "dataclasses", "enum", "functools", "hashlib", "heapq",
  "itertools", "json", "math", "operator", "re", "reprlib", "statistics", "struct", "sys", "types",
  "typing", "zlib",
}  # fmt: skip
# These know no arrays, files, clocks or chance either.
PURE_FILES = {f"trace/{name}.py" for name in ("operations", "interpreter", "check")}
MOST_DEEP = 12  # checks, config, actions, reducers, the exchange, the evaluator, engines, Ray
MOST_LINES = 600
FILES = sorted(ROOT.rglob("*.py"))


def imported(path: Path) -> set[str]:
  names = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f"{path}: relative imports hide the package they reach into"
      names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
  return names


def module(path: Path) -> str:
  parts = path.relative_to(ROOT.parent).with_suffix("").parts
  return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_at_the_top(path: Path) -> set[str]:
  """Modules that importing this one imports."""
  names = set()
  for node in ast.parse(path.read_text()).body:
    if isinstance(node, ast.ImportFrom):
      names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
  return names - {"ddiloco", module(path)}


def package(path: Path) -> str:
  first = path.relative_to(ROOT).parts[0]
  return first.removesuffix(".py")


def name(path: Path) -> str:
  return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=name)
def test_imports_point_downward(path):
  here = package(path)
  assert here in ALLOWED, f"{here} is a new package: say in this test what it may import"
  for module in imported(path):
    parts = module.split(".")
    if parts[0] == "ddiloco" and len(parts) > 1 and parts[1] in ALLOWED:
      assert parts[1] in ALLOWED[here] | {here}, f"{name(path)} imports {module}: that is upward"


@pytest.mark.parametrize("path", [p for p in FILES if package(p) in PURE], ids=name)
def test_pure_packages_stay_pure(path):
  for module in imported(path):
    top = module.split(".")[0]
    assert top not in IMPURE_MODULES, f"{name(path)} imports {module}"
    assert top in PURE[package(path)] | STANDARD, f"{name(path)} imports {module}"
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
      assert node.func.id not in IMPURE_CALLS, f"{name(path)}:{node.lineno} calls {node.func.id}"


@pytest.mark.parametrize("path", [p for p in FILES if package(p) == "simulation"], ids=name)
def test_virtual_time_is_the_only_time_of_the_simulator(path):
  """Chance has a seed there; clocks, threads, files and processes it has none."""
  for module in imported(path):
    assert module.split(".")[0] not in IMPURE_MODULES - {"random"}, f"{name(path)}: {module}"


@pytest.mark.parametrize("file", sorted(PURE_FILES))
def test_a_trace_is_read_and_checked_without_arrays_files_or_clocks(file):
  for module in imported(ROOT / file):
    top, *rest = module.split(".")
    assert top in STANDARD | {"ddiloco"}, f"{file} imports {module}"
    assert top != "ddiloco" or rest[0] in ("protocol", "trace"), f"{file} imports {module}"


def places(found: Iterable[tuple[str, Path]]) -> dict[str, list[str]]:
  """Names that stand in more than one file, with the files."""
  files: dict[str, list[str]] = {}
  for each, path in found:
    files.setdefault(each, []).append(name(path))
  return {each: paths for each, paths in files.items() if len(paths) > 1}


def test_a_class_name_stands_for_one_idea():
  classes = (
    (node.name, path)
    for path in FILES
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.ClassDef)
  )
  for each, paths in places(classes).items():
    assert each in SAME_IDEA, f"{each} is defined in {paths}"


def test_a_base_name_stands_for_one_module():
  modules = ((path.stem, path) for path in FILES if path.stem != "__init__")
  for base, paths in places(modules).items():
    assert base in SAME_BASE, f"{base} is the name of {paths}"


def test_packages_make_no_circle():
  packages = list(ALLOWED)
  for here, below in ALLOWED.items():
    assert below <= set(packages[: packages.index(here)]), f"{here} stands too low"


def test_modules_make_no_circle():
  """Not even in a package; imports within functions, and for type checkers alone, do not count."""
  graph = {module(path): imports_at_the_top(path) for path in FILES}
  order = graphlib.TopologicalSorter({m: found & set(graph) for m, found in graph.items()})
  depth: dict[str, int] = {}
  for m in order.static_order():
    depth[m] = 1 + max((depth[other] for other in graph[m] & set(graph)), default=0)
  deepest = max(depth, key=depth.__getitem__)
  assert depth[deepest] <= MOST_DEEP, f"{deepest} stands on {depth[deepest]} modules in a row"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_environment_variables_are_read_in_one_place(path):
  if package(path) != "environment":
    assert not re.search(r"\b(environ|getenv|putenv)\b", path.read_text()), name(path)


@pytest.mark.parametrize("path", FILES, ids=name)
def test_files_are_short(path):
  lines = path.read_text().count("\n")
  assert lines <= MOST_LINES, f"{name(path)}: {lines} lines"
