"""The size of the package by capability: modules, lines and code.

  python scripts/lines.py [--files] [--markdown]

Every module of ddiloco/ belongs to the first capability below that names it. Lines are all lines
of a file; code is what is neither empty, nor a comment, nor a docstring. With --files the modules
of each capability are listed, with --markdown it is the table of docs/design.md. Last line:
{"modules", "lines", "code"}.
"""

from __future__ import annotations

import ast
import dataclasses
import fnmatch
import io
import json
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import common

import ddiloco

ROOT = Path(ddiloco.__file__).parent
_NO_CODE = (
  *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
  *(tokenize.ENCODING, tokenize.ENDMARKER),
)

# Capability -> names under ddiloco/; the first match counts, so special names stand first.
CAPABILITIES: Mapping[str, Sequence[str]] = {
  "an island of several hosts": (
    *("training/hosts.py", "network/host_links.py", "engines/island_hosts.py"),
  ),
  "compiling for chips that are not there": ("training/aot.py",),
  "bringing a run to a cloud, costs first": ("launch/*", "cli/launch.py"),
  "text and images": ("training/captions.py",),
  "what a user may bring: model, data, optimizer; the Python face": (
    *("custom.py", "api.py", "models/model.py", "__init__.py"),
  ),
  "keys and TLS": ("network/keys.py",),
  "messages between processes": (
    *("network/endpoint.py", "network/frames.py", "network/peers.py", "network/transport.py"),
    "network/__init__.py",
  ),
  "probes and pages over HTTP": ("network/webserver.py", "dashboard/*"),
  "restarts: one policy for every engine": ("protocol/supervisor.py",),
  "a peer's moments for one that joins": ("protocol/moments.py",),
  "the event log, and the state of a run that it tells": (
    *("protocol/events.py", "observe/eventlog.py", "observe/run_state.py", "observe/islands.py"),
    *("observe/history.py", "observe/tracks.py", "observe/__init__.py"),
  ),
  "where every chip-second went": ("observe/goodput.py",),
  "report, pictures, live view, TensorBoard": (
    *("observe/report.py", "observe/plots.py", "observe/style.py", "observe/live.py"),
  ),
  "waits that have a limit, hangs that are found": ("observe/guards.py",),
  "traces of chosen steps": ("engines/profiler.py",),
  "the protocol: what learners and shards say and decide": ("protocol/*",),
  "the arithmetic: fragments, codecs, merge, outer step": ("core/*",),
  "roles at work": ("roles/*", "runtime.py"),
  "one island: step, mesh, programs, evaluation": ("training/*",),
  "models: dense, mixture of experts, attention by platform": ("models/*",),
  "snapshots, copies at a buddy, going on": ("checkpoint/*",),
  "faults on purpose": ("chaos.py",),
  "engines: threads, processes, Ray, single roles": ("engines/*",),
  "virtual time, chips by the million, plans": ("simulation/*",),
  "the log as proof: checked and replayed": ("trace/*",),
  "data-parallel to compare with, elastic or not": ("baselines/*",),
  "settings and their rules": ("config/*", "checks.py", "environment.py", "workdir.py"),
  "the command line": ("cli/*", "__main__.py"),
}


@dataclasses.dataclass(frozen=True)
class Module:
  """A file of the package; `name` is under ddiloco/."""

  name: str
  lines: int
  code: int


def modules() -> list[Module]:
  """All modules of the package, by name."""
  found = []
  for path in sorted(ROOT.rglob("*.py")):
    text = path.read_text()
    name = path.relative_to(ROOT).as_posix()
    found.append(Module(name, text.count("\n"), code_lines(text)))
  return found


def code_lines(text: str) -> int:
  """The number of lines with code, neither comments nor docstrings.

  >>> code_lines('def f():  # one\\n  "What it does."\\n\\n  return 1\\n')
  2
  """
  said = set[int]()
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
      first = node.body[0] if node.body else None
      if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        said.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
  lines = set[int]()
  for token in tokenize.generate_tokens(io.StringIO(text).readline):
    if token.type not in _NO_CODE:
      lines.update(range(token.start[0], token.end[0] + 1))
  return len(lines - said)


def by_capability() -> dict[str, list[Module]]:
  """The modules of each capability.

  Raises:
    LookupError: a module belongs to none, or a capability has none.
  """
  found: dict[str, list[Module]] = {name: [] for name in CAPABILITIES}
  for module in modules():
    found[capability_of(module.name)].append(module)
  if empty := [name for name, each in found.items() if not each]:
    raise LookupError(f"no module is for {empty}. Fix: change CAPABILITIES in scripts/lines.py")
  return found


def capability_of(name: str) -> str:
  """The first capability that names this module."""
  for capability, patterns in CAPABILITIES.items():
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
      return capability
  raise LookupError(f"{name} is for nothing. Fix: add it to CAPABILITIES in scripts/lines.py")


def table(found: Mapping[str, Sequence[Module]]) -> Iterator[str]:
  """The table in Markdown, the largest capability first."""
  yield "| what | modules | lines | of code |"
  yield "|---|---|---|---|"
  total = [module for each in found.values() for module in each]
  rows = sorted(found.items(), key=lambda item: -sum(module.lines for module in item[1]))
  for name, each in [*rows, ("all", total)]:
    yield f"| {name} | {len(each)} | {_sum(each, 'lines'):,} | {_sum(each, 'code'):,} |"


def _sum(each: Sequence[Module], what: str) -> int:
  return sum(getattr(module, what) for module in each)


def main() -> None:
  options = common.options(__doc__, files=False, markdown=False)
  found = by_capability()
  if options.markdown:
    print(*table(found), sep="\n")
  else:
    for name, each in sorted(found.items(), key=lambda item: -_sum(item[1], "lines")):
      print(f"{len(each):3} modules {_sum(each, 'lines'):6,} lines {_sum(each, 'code'):6,}  {name}")
      for module in each if options.files else ():
        print(f"{'':11} {module.lines:6,} lines {module.code:6,}    {module.name}")
  every = [module for each in found.values() for module in each]
  sums = {"lines": _sum(every, "lines"), "code": _sum(every, "code")}
  print(json.dumps({"modules": len(every), **sums}))


if __name__ == "__main__":
  common.run_script(main)
