"""Compiles an island's programs for chips that are not there: their memory, and their collectives.

libtpu, and XLA for NVIDIA GPUs, compile for a topology that is only described. What a program needs
and moves is read off its compiled form; all else follows from shapes and from the chip.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from ddiloco import custom
from ddiloco.checks import refusal, require
from ddiloco.config import Config, IslandConfig
from ddiloco.core.fragments import Plan
from ddiloco.training.devices import PEAK_FLOPS, make_mesh
from ddiloco.training.island import lower_piece, piece_kinds
from ddiloco.training.step import IslandStep

# --- Chips, and slices of them


@dataclasses.dataclass(frozen=True)
class Chip:
  """A chip, or what of it JAX has as a device: the memory that programs may use, and the peak in
  bf16; of a GPU what XLA compiles for."""

  hbm_bytes: int
  flops_per_second: float
  target: str = ""  # XLA's GpuTargetConfigProto as text


_GIB = 1 << 30
# Of XLA's description of a GPU: what CUDA allows on all that are here, and what differs.
_CUDA = """
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_block_limit: 65536 registers_per_core_limit: 65536 shared_memory_per_block: 49152
"""
_AMPERE = """
  cuda_compute_capability { major: 8 } core_count: 108 fpus_per_core: 64 clock_rate_ghz: 1.41
  l2_cache_size: 41943040 shared_memory_per_core: 167936 shared_memory_per_block_optin: 166912
"""
_HOPPER = """
  cuda_compute_capability { major: 9 } core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  l2_cache_size: 52428800 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
"""


def _gpu(name: str, memory_gib: float, gbytes_per_second: int, kind: str) -> Chip:
  """A GPU of which programs have three quarters of the memory: what JAX takes by default."""
  size = int(memory_gib * _GIB)
  memory = f"device_memory_size: {size} memory_bandwidth: {gbytes_per_second}000000000"
  target = f"""
platform_name: "CUDA" device_description_str: "{name}"
dnn_version_info {{ major: 9 minor: 10 }} runtime_version {{ major: 12 minor: 8 }}
gpu_device_info {{ {_CUDA} {kind} {memory} }}
"""
  return Chip(size * 3 // 4, PEAK_FLOPS[name], target)


CHIPS = {
  "v5e": Chip(int(15.75 * _GIB), PEAK_FLOPS["TPU v5 lite"]),
  "v5p": Chip(int(95.74 * _GIB), PEAK_FLOPS["TPU v5"]),
  "v6e": Chip(int(31.25 * _GIB), PEAK_FLOPS["TPU v6 lite"]),
  "tpu7x": Chip(int(94.75 * _GIB), PEAK_FLOPS["TPU7x"]),  # one of its two cores
  "a100": _gpu("NVIDIA A100-SXM4-80GB", 79.2, 2039, _AMPERE),
  "h100": _gpu("NVIDIA H100 80GB HBM3", 79.1, 3352, _HOPPER),
  "h200": _gpu("NVIDIA H200", 140.0, 4800, _HOPPER),
}


def chip(topology: str) -> Chip:
  """The chip that "v5p:4x4x4" is made of, or "h100:8", or "h100:2x8" (two hosts).

  Raises:
    ConfigError: the chip is not in `CHIPS`, or the topology has no valid shape.
  """
  kind, _, shape = topology.partition(":")
  axes = r"\d+(x\d+)?" if kind in CHIPS and CHIPS[kind].target else r"\d+(x\d+){1,2}"
  good = kind in CHIPS and re.fullmatch(axes, shape) is not None
  rule = f"must be a chip ({', '.join(CHIPS)}) and a shape"
  require(good, "topology", topology, rule, "for example v5p:4x4x4, v6e:8x8 or h100:8")
  return CHIPS[kind]


def devices(topology: str, num_slices: int = 1) -> list[Any]:
  """The devices of `num_slices` slices of this topology, described only.

  Raises:
    ConfigError: libtpu, or JAX's part for CUDA, is not installed, or knows no such topology.
  """
  target, shape = chip(topology).target, topology.partition(":")[2]
  from jax.experimental import topologies

  where = {"num_slices": num_slices} if num_slices > 1 else {}
  if target:
    hosts = "" if "x" in shape else "1x"
    where = {"target_config": target, "topology": f"{num_slices}x{hosts}{shape}"}
  kind = "cuda" if target else "tpu"
  try:
    described = topologies.get_topology_desc(topology, kind, **where)
  except Exception as error:
    rule = f"JAX's {kind} plugin refuses it, or is not installed ({str(error).splitlines()[0]})"
    fix = f"pip install 'ddiloco[{kind}]'; give a shape that such chips are sold in, as v6e:8x8"
    raise refusal("topology", topology, rule, fix) from error
  return list(described.devices)


# --- What a compiled program needs and moves


@dataclasses.dataclass(frozen=True)
class Program:
  """A compiled program, or several of one purpose, per device.

  Attributes:
    hbm_bytes: arguments, results that are not written over arguments, temporaries and code; of the
      program that takes most.
    added_bytes: the same without the arguments; of the program that adds most.
    host_bytes: results in the host's memory.
    cpu_seconds: CPU time that compiling all programs took.
    count: how many programs.
    collectives: by kind, the kinds that move most first.
    largest_collective_bytes: the largest result of one collective on a device; but for all-to-alls,
      which leave it no more than it had.
  """

  name: str
  hbm_bytes: int
  added_bytes: int
  host_bytes: int
  count: int
  cpu_seconds: float
  collectives: tuple[Collective, ...]
  largest_collective_bytes: int


def compiled(name: str, all_lowered: Sequence[jax.stages.Lowered], num_devices: int) -> Program:
  """Compiles the programs of an island of so many devices; raises as `find_collectives`."""
  start = time.process_time()
  programs = [lowered.compile() for lowered in all_lowered]
  seconds = time.process_time() - start
  texts = (program.as_text() or "" for program in programs)
  found = [each for text in texts for each in find_collectives(text, num_devices)]
  memory: list[Any] = [program.memory_analysis() for program in programs]
  added = [
    m.output_size_in_bytes
    - m.alias_size_in_bytes
    + m.temp_size_in_bytes
    + m.generated_code_size_in_bytes
    for m in memory
  ]
  grown = (each.bytes // each.times for each in found if each.kind != "all-to-all")
  return Program(
    name=name,
    hbm_bytes=max(m.argument_size_in_bytes + more for m, more in zip(memory, added)),
    added_bytes=max(added),
    host_bytes=max(m.host_output_size_in_bytes for m in memory),
    count=len(programs),
    cpu_seconds=seconds,
    collectives=by_kind(found),
    largest_collective_bytes=max(grown, default=0),
  )


# The compiler's error for a program that does not fit: "... HLO temporaries (99.67G) exceeds ...".
_WANTED = re.compile(r"RESOURCE_EXHAUSTED.*?(?:temporaries \(|Used )([\d.]+)([KMGT])", re.DOTALL)


def wanted_bytes(error: jax.errors.JaxRuntimeError) -> int:
  """The temporaries of a program that the compiler refuses because the memory is too small.

  Raises:
    JaxRuntimeError: this error, if it is about something else.
  """
  wanted = _WANTED.search(str(error))
  if wanted is None:
    raise error
  return int(float(wanted[1]) * 1024 ** (1 + "KMGT".index(wanted[2])))


# --- The memory that an island takes on its slice


@dataclasses.dataclass(frozen=True)
class Fit:
  """Whether an island fits its chips, and the memory it takes there; bytes are per chip.

  Attributes:
    island: a description for people.
    chips: how many chips.
    chip: their kind.
    parameters: of the whole model.
    state_bytes: parameters and moments.
    beside_bytes: may lie on the chip beside a step: the on-chip part of a snapshot's copy of the
      state, one fragment on its way out and one on its way in.
    host_bytes: the part of a snapshot's copy that lies in the host's memory.
    step: the inner step; None if the compiler refuses it (`wanted_bytes`).
    needed_bytes: of the step and of `beside_bytes` together.
    copies: the programs that copy pieces of fragments out, the programs that write them, and the
      program that copies the state for a snapshot, if the run has snapshots.
    layer_bytes: the weights of one layer, or of one chunk of the embedding, in f32.
    flops_per_token: see `custom.flops_per_token`.
    tokens: of one step.
    remedies: changes that would make the island fit; empty if it fits.
  """

  island: str
  chips: int
  chip: Chip
  parameters: int
  state_bytes: int
  beside_bytes: int
  host_bytes: int
  step: Program | None
  needed_bytes: int
  copies: tuple[Program, ...]
  layer_bytes: int
  flops_per_token: float
  tokens: int
  remedies: tuple[str, ...] = ()

  @property
  def fits(self) -> bool:
    """Whether `needed_bytes` have room."""
    return self.needed_bytes <= self.chip.hbm_bytes

  @property
  def gathers_by_layer(self) -> bool:
    """Whether no collective of the step leaves a device with more than one layer's weights.

    All kinds count: TPU compilers also gather by an all-reduce of zeros and the device's own part.
    """
    return self.step is not None and self.step.largest_collective_bytes <= self.layer_bytes

  def step_seconds(self, mfu: float) -> float:
    """The seconds of a step that reaches this share of the chips' peak."""
    rate = self.chips * self.chip.flops_per_second * mfu
    return self.flops_per_token * self.tokens / rate


def fit(
  config: Config, learner: int, plan: Plan, topology: str, slice_devices: Sequence[Any]
) -> Fit:
  """Compiles this learner's island for all these devices of the topology.

  Raises:
    ConfigError: the island cannot be made of these devices.
    AssertionError: a collective leaves the island.
  """
  island = config.islands.island(learner)
  mesh = make_mesh(slice_devices, island)
  parts = IslandStep(config, learner, mesh)
  kinds = [piece_kinds(fragment, parts.leaves) for fragment in plan.fragments]
  distinct = dict.fromkeys(itertools.chain(*kinds))
  out, into = zip(*(lower_piece(kind, parts.replicated) for kind in distinct))
  copies = [compiled("copy out", out, mesh.size), compiled("apply", into, mesh.size)]
  state = sum(_local_bytes(leaf) for leaf in parts.layout.leaves.values())
  beside, host = 2 * max(sum(_local_bytes(kind.piece) for kind in each) for each in kinds), 0
  if config.sync.snapshot_steps:
    snapshot = compiled("snapshot", [parts.lower_copy(parts.host_memory)], mesh.size)
    if chip(topology).target:  # described GPUs have no host's memory, to which real ones copy
      added = snapshot.added_bytes - state
      snapshot = dataclasses.replace(snapshot, added_bytes=added, host_bytes=state)
    beside, host = beside + snapshot.added_bytes, snapshot.host_bytes
    copies.append(snapshot)
  try:
    step = compiled("step", [parts.lower()], mesh.size)
    needed = step.hbm_bytes + beside
  except jax.errors.JaxRuntimeError as error:
    step, needed = None, state + wanted_bytes(error) + beside
  layers = [leaf for name, leaf in parts.leaves.items() if name.startswith("layers/")]
  layer = sum(math.prod(leaf.shape) for leaf in layers) // config.model.num_layers
  table = config.model.vocab_size * config.model.model_dim // island.loss_chunks
  shape = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
  found = Fit(
    island=f"{topology}, mesh {shape or 'of one chip'}, {island.batch_size} x"
    f" {config.data.sequence_length} tokens a step, attention {parts.execution.attention}, remat"
    f" {island.remat}, loss in {island.loss_chunks} chunks",
    chips=mesh.size,
    chip=chip(topology),
    parameters=sum(math.prod(leaf.shape) for leaf in parts.leaves.values()),
    state_bytes=state,
    beside_bytes=beside,
    host_bytes=host,
    step=step,
    needed_bytes=needed,
    copies=tuple(copies),
    layer_bytes=4 * max(layer, table),
    flops_per_token=custom.flops_per_token(config),
    tokens=config.tokens_per_step(learner),
  )
  gradients = sum(map(_local_bytes, parts.leaves.values()))
  remedies = () if found.fits else _remedies(found, gradients, island, config)
  return dataclasses.replace(found, remedies=remedies)


def _local_bytes(leaf: jax.ShapeDtypeStruct) -> int:
  return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _remedies(found: Fit, gradients: int, island: IslandConfig, config: Config) -> tuple[str, ...]:
  """What to try, the cheapest first; compiling again shows the effect. `gradients`: their bytes."""
  fixed = found.beside_bytes + found.state_bytes + gradients
  if fixed > 0.9 * found.chip.hbm_bytes:
    chips = math.ceil(found.chips * fixed / (0.8 * found.chip.hbm_bytes))
    text = "mesh: parameters, moments and gradients alone are too much: islands.data = 1"
    return (f"{text}, {chips} chips",)
  chunks = math.gcd(8, config.model.vocab_size)  # others would be refused
  shards, steps = island.data_shards(found.chips), config.inner.accumulation_steps
  share = (0.9 * found.chip.hbm_bytes - fixed) / (found.needed_bytes - fixed)
  rows = shards * steps
  batch = int(island.batch_size * share) // rows * rows
  mine = island.batch_size // shards  # rows of a device, which micro-batches share evenly
  more = next((n for n in range(steps, mine + 1) if mine % n == 0 and n * share >= steps), 0)
  remedies = {
    "remat: islands.remat = 'full'": island.remat != "full",
    f"loss: islands.loss_chunks = {chunks}": island.loss_chunks == 1 < chunks,
    f"batch: islands.batch_size = {batch}, or inner.accumulation_steps = {more}": batch > 0,
    f"mesh: fewer rows a step than its {rows} parts: raise islands.tensor": not batch,
  }
  return tuple(remedy for remedy, helps in remedies.items() if helps)


# --- The collectives of a program, read from its text


@dataclasses.dataclass(frozen=True)
class Collective:
  """A collective of a program's text, or all of one kind.

  `times` counts every iteration of a loop; `bytes` are the results on each device, of all times
  together.
  """

  kind: str
  times: int
  bytes: int


_KIND = r"all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
_COLLECTIVE = re.compile(rf"= (?P<shape>.*?) (?P<kind>{_KIND})(?P<start>-start)?\((?P<rest>.*)$")
_FAR = re.compile(r"= .*? (?:send|recv)(?:-done)?\(")  # between slices, by the hosts' network
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%(?P<name>\S+) \(.*\{$")
_CALL = re.compile(r"(?:calls|to_apply|\w+_computations?)=(\{[^}]*\}|%[\w.\-]+)")
_WHILE = re.compile(r" while\(.*condition=%(?P<condition>[\w.\-]+), body=%(?P<body>[\w.\-]+)")
_PASSES = re.compile(r'"known_trip_count":\{"n":"(\d+)"')  # where the compiler says it
_BOUND = re.compile(r"constant\((\d+)\)")
_ARRAY = re.compile(r"(?P<type>[a-z]+\d*\w*)\[(?P<dims>[\d,]*)\]")


def find_collectives(text: str, num_devices: int) -> Iterator[Collective]:
  """Every collective of an optimized program's text, for an island of so many devices.

  Raises:
    ValueError: the program talks to other hosts by send and recv, which may leave the island.
    AssertionError: a collective reaches beyond the island.
  """
  bodies, lines, entry = dict[str, list[str]](), list[str](), ""
  for line in text.splitlines():
    if start := _COMPUTATION.match(line):
      lines = bodies[start["name"]] = []
      entry = start["name"] if start["entry"] else entry
    elif line.startswith(" "):
      lines.append(line)
  times = Counter[str]()

  def visit(name: str, factor: int) -> None:
    times[name] += factor
    for line in bodies[name]:
      if loop := _WHILE.search(line):
        # A loop counts from 0: its condition compares with the bound.
        bounds = _PASSES.findall(line) or _BOUND.findall(" ".join(bodies[loop["condition"]]))
        visit(loop["body"], factor * max(map(int, bounds), default=1))
      for called in re.findall(r"%([\w.\-]+)", " ".join(_CALL.findall(line))):
        if called in bodies:
          visit(called, factor)

  visit(entry, 1)
  for name, lines in bodies.items():
    starts = any("AsyncCollectiveStart" in line for line in lines)
    for line in lines:
      if _FAR.search(line) and "is_host_transfer=true" not in line:
        raise ValueError(f"a program of one island sends to another: {line.strip()[:200]}")
      found = _COLLECTIVE.search(line)
      devices = _devices(found["rest"]) if found else None
      if found and devices:  # else every device is alone in its group
        assert max(devices) < num_devices, f"it reaches beyond its island: {line.strip()[:200]}"
        if "chain_id=" in line and not starts:
          continue  # on TPUs: of the fusions that share one exchange, another starts it
        # An all-reduce that starts has the shape of its results, as one that does not.
        size = _bytes(found["shape"], bool(found["start"]) and found["kind"] != "all-reduce")
        count = times[name] or 1
        yield Collective(found["kind"], count, count * size)


def _bytes(shape: str, started: bool) -> int:
  """Bytes of the results. A "-start" names its operands first, and handles of 4 bytes last."""
  sizes = []
  for array in _ARRAY.finditer(re.sub(r"\{[^}]*\}", "", shape)):
    digits = re.search(r"\d+", array["type"])
    bits = int(digits[0]) if digits else 8  # of pred
    sizes.append(math.prod(int(n) for n in array["dims"].split(",") if n) * bits // 8)
  if started:
    sizes = [size for size in sizes if size > 4]
    sizes = sizes[len(sizes) // 2 :]
  return sum(sizes)


def _devices(rest: str) -> set[int]:
  """The devices that take part in a collective, in any known form of writing the groups.

  Raises:
    ValueError: the form is unknown.
  """
  if listed := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}", rest):
    groups = (group.split(",") for group in re.findall(r"\{([\d,]*)\}", listed[1]))
    return {int(n) for group in groups if len(group) > 1 for n in group}
  if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", rest):  # (groups, devices in each)
    return set(range(int(iota[1]) * int(iota[2]) if int(iota[2]) > 1 else 0))
  # JAX 0.12 and newer name the mesh, and the axes along which a group lies, each whole or a part.
  if named := re.search(r"replica_groups=mesh\[([^\]]*)\].*?\{([^}]*)\}", rest):
    mesh = {axis: int(size) for axis, size in re.findall(r"'([^']*)'=(\d+)", named[1])}
    along = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", named[2])
    together = math.prod(int(part or mesh[axis]) for axis, part in along)
    return set(range(math.prod(mesh.values()) if together > 1 else 0))
  raise ValueError(f"a collective whose devices cannot be read: {rest[:300]}")


def by_kind(found: Sequence[Collective]) -> tuple[Collective, ...]:
  """The totals by kind, the kinds that move most first."""
  times, moved = Counter[str](), Counter[str]()
  for each in found:
    times[each.kind] += each.times
    moved[each.kind] += each.bytes
  return tuple(Collective(kind, times[kind], total) for kind, total in moved.most_common())
