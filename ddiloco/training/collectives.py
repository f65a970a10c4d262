"""What a compiled program says of the exchanges between its devices, read from its text."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence


@dataclasses.dataclass(frozen=True)
class CollectiveTotal:
  """One kind of exchange between devices in one program.

  `times` counts loops; `bytes` is what each device holds of the results, all times together.
  """

  kind: str
  times: int
  bytes: int


@dataclasses.dataclass(frozen=True)
class Collective:
  """One collective of a program's text; `times` says how often its loops run it."""

  kind: str
  bytes: int
  times: int
  devices: frozenset[int]
  line: str


_KIND = r"all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
_COLLECTIVE = re.compile(rf"= (?P<shape>.*?) (?P<kind>{_KIND})(?P<start>-start)?\((?P<rest>.*)$")
_FAR = re.compile(r"= .*? (?:send|recv)(?:-done)?\(")  # between slices, by the network of hosts
_COMPUTATION = re.compile(r"^(?:ENTRY )?%(?P<name>\S+) \(.*\{$")
_CALL = re.compile(r"(?:calls|to_apply|body|condition|branch_computations)=\{?(%[\w.\-, %]+)")
_WHILE = re.compile(r" while\(.*condition=%(?P<condition>[\w.\-]+), body=%(?P<body>[\w.\-]+)")
_ARRAY = re.compile(r"(?P<type>[a-z]+\d*\w*)\[(?P<dims>[\d,]*)\]")
_BITS = {"pred": 8, "bf16": 16, "s4": 4, "u4": 4}


def find_collectives(text: str) -> Iterator[Collective]:
  """Every collective of an optimized program's text.

  Raises:
    ValueError: it talks to other hosts by send and recv, which stay in no mesh.
  """
  bodies = _computations(text)
  times = _times(bodies, text)
  for name, lines in bodies.items():
    for line in lines:
      if _FAR.search(line) and "is_host_transfer=true" not in line:
        raise ValueError(f"a program of one island sends to another: {line.strip()[:200]}")
      found = _COLLECTIVE.search(line)
      devices = _devices(found["rest"]) if found else None
      if found and devices:  # else every device is alone in its group
        yield Collective(
          kind=found["kind"],
          bytes=_bytes(found["shape"], started=bool(found["start"])),
          times=times.get(name, 1),
          devices=devices,
          line=line.strip()[:200],
        )


def _computations(text: str) -> dict[str, list[str]]:
  """Computation -> its lines."""
  found: dict[str, list[str]] = {}
  lines: list[str] = []
  for line in text.splitlines():
    start = _COMPUTATION.match(line)
    if start:
      lines = found[start["name"]] = []
    elif line.startswith(" "):
      lines.append(line)
  return found


def _times(bodies: dict[str, list[str]], text: str) -> dict[str, int]:
  """Computation -> how often it runs in one run of the program."""
  entry = re.search(r"^ENTRY %(\S+)", text, re.MULTILINE)
  assert entry is not None, "a program has an entry"
  times: dict[str, int] = {}

  def visit(name: str, factor: int) -> None:
    times[name] = times.get(name, 0) + factor
    for line in bodies.get(name, ()):
      loop = _WHILE.search(line)
      if loop:
        visit(loop["body"], factor * _trips(bodies[loop["condition"]]))
        continue
      for called in _CALL.findall(line):
        for each in re.findall(r"%([\w.\-]+)", called):
          if each in bodies:
            visit(each, factor)

  visit(entry[1], 1)
  return times


def _trips(condition: Sequence[str]) -> int:
  """How often a loop runs that counts from 0: the bound that its condition compares with."""
  bounds = [int(n) for line in condition for n in re.findall(r"constant\((\d+)\)", line)]
  return max(bounds, default=1)


def _bytes(shape: str, started: bool) -> int:
  """Of the results; what starts an exchange names its operands first, and its handles last."""
  sizes = []
  for array in _ARRAY.finditer(re.sub(r"\{[^}]*\}", "", shape)):
    digits = re.search(r"\d+", array["type"])
    bits = _BITS.get(array["type"]) or (int(digits[0]) if digits else 0)
    sizes.append(math.prod(int(n) for n in array["dims"].split(",") if n) * bits // 8)
  if started and len(sizes) > 1:
    sizes = [size for size in sizes if size > 4]
    sizes = sizes[len(sizes) // 2 :]
  return sum(sizes)


def _devices(rest: str) -> frozenset[int]:
  """Which devices exchange something, of whatever form the groups are written in.

  Raises:
    ValueError: it is a form that this does not know.
  """
  listed = re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}", rest)
  if listed:
    groups = [group.split(",") for group in re.findall(r"[\d,]+", listed[1].replace("},", "} "))]
    return frozenset(int(n) for group in groups if len(group) > 1 for n in group)
  iota = re.search(r"replica_groups=\[\d+,(?P<size>\d+)\]<=\[(?P<all>[\d,]+)\]", rest)
  if iota:
    count = math.prod(int(n) for n in iota["all"].split(","))
    return frozenset(range(count if int(iota["size"]) > 1 else 0))
  mesh = re.search(r"replica_groups=mesh\[(?P<axes>[^\]]*)\]", rest)
  if mesh:
    return frozenset(range(math.prod(int(n) for n in re.findall(r"=(\d+)", mesh["axes"]))))
  raise ValueError(f"a collective whose devices cannot be read: {rest[:300]}")


def by_kind(found: Sequence[Collective]) -> tuple[CollectiveTotal, ...]:
  """Those that move most first."""
  kinds = {each.kind for each in found}
  collectives = [
    CollectiveTotal(
      kind=kind,
      times=sum(each.times for each in found if each.kind == kind),
      bytes=sum(each.times * each.bytes for each in found if each.kind == kind),
    )
    for kind in kinds
  ]
  return tuple(sorted(collectives, key=lambda each: -each.bytes))
