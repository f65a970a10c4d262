"""Commands about runs that do not exist: plan, compile and simulate one."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ddiloco import environment
from ddiloco.checks import refusal, require, require_one_of
from ddiloco.cli.arguments import Flags
from ddiloco.config import Config, ConfigError, from_dict
from ddiloco.environment import FINISHED, LOST
from ddiloco.simulation import planner
from ddiloco.simulation.chips import Fleet, decoupled, elastic, inelastic

# Fields that have another name than their flag; those of these sections without the section.
_SECTIONS = ("", "plan", "simulate", "links")
_FLAGS = {
  "latency_seconds": "latency_ms",
  "sizes": "parameters",
  "islands.num_learners": "islands",
  "sync.push_codec": "codec",
}


@contextlib.contextmanager
def _as_typed(given: Flags) -> Iterator[None]:
  """In this context an error about a field that a flag has set names the flag, as it was typed."""
  try:
    yield
  except ConfigError as error:
    field = error.field.partition("[")[0]  # of a list: which of its numbers
    section, _, name = field.rpartition(".")
    own = name if section in _SECTIONS else field
    flag = _FLAGS.get(own, own)
    value = getattr(given, flag, None)
    if value is None:  # of the experiment file
      raise
    raise ConfigError(f"--{flag}={value}: {error.said}") from error


# --- The command that says, before a run is paid for, whether it fits its links


def plan(arguments: list[str]) -> int:
  """Says what a run needs of its links and shards, and what to change where it does not fit.

  The run is a config's, with its real fragments, or has --parameters in equal fragments, with the
  protocol of --config.sync:

    ddiloco plan --config=configs/dense.py:12b --gbps=5 --latency_ms=30 --step_seconds=4
    ddiloco plan --parameters=12e9 --islands=4 --gbps=2 --latency_ms=30 --codec=int4 \\
      --step_seconds=4 --config.sync.num_fragments=96

  Bytes are those of rounds in which every learner takes part; no device is touched. Times are in
  seconds. A load above 1 does not fit, and above a third syncs take longer than planned: fragments
  wait for each other. Peak gbps is the rate of an island's link from which on sync.overlap_steps
  hides a sync, overlap steps are those that would hide it on these links, and least shards are so
  many that no link and no shard is overloaded; None: no number is enough.
  """
  given = Flags(arguments, "config")
  _add_plan_flags(given)
  given.parse(plan.__doc__)
  if not given.experiment:
    given.needed("parameters", "12e9, or a --config")
  changed: Any = given.config
  if given.islands is not None:
    changed.islands.num_learners = given.islands
  if given.codec is not None:
    changed.sync.push_codec = changed.sync.publish_codec = given.codec
  with _as_typed(given):
    config = from_dict(changed)
  if given.experiment:
    from ddiloco.training.data import check_here

    check_here(config)
  rates = given.fields(planner.Setting)
  if given.measure:
    from ddiloco.engines import virtual

    found = rates["merge_gbytes"] = virtual.merge_gbytes(config)
    if not given.json:
      print(f"This machine merges {found:.1f} GB/s of f32 (--merge_gbytes={found:.1f}).\n")
  with _as_typed(given):
    setting = planner.Setting.of(
      config,
      gbps=given.needed("gbps", "2"),
      sizes=_sizes(given, config),
      latency_seconds=given.latency_ms / 1000,
      step_seconds=given.needed("step_seconds", "1"),
      **rates,
    )
  made = planner.as_json(setting, planner.make(setting))
  if given.json:
    print(json.dumps(made))
  else:
    findings = [f"- {finding}" for finding in made.pop("findings")] or ["Everything fits."]
    print("\n".join(_text(made)), "", sep="\n")
    for finding in findings:
      print(textwrap.fill(finding, 100, subsequent_indent="  ", break_on_hyphens=False))
  return FINISHED


def _text(found: Mapping[str, Any], indent: str = "") -> list[str]:
  """For people: a line for each number, and below a name the several that it has."""
  lines = []
  for name, value in found.items():
    title = f"{indent}{name.replace('_', ' ')}"
    if isinstance(value, dict):
      lines += [f"{'':>20}  {title}:", *_text(value, "  ")]
    else:
      shown = str(value)
      if isinstance(value, int | float) and not isinstance(value, bool):
        shown = f"{value:,.4f}".rstrip("0").rstrip(".")
      lines.append(f"{shown:>20}  {title}")
  return lines


def _add_plan_flags(given: Flags) -> None:
  """All flags but --config."""
  given.add(
    "parameters", float, "Size of the model, instead of the config's; fragments are equal.", 1.0
  )
  given.add("islands", int, "Number of islands, instead of the config's.")
  given.add("gbps", float, "Gbit/s of every island's link, in each direction.")
  given.add("latency_ms", 0.0, "Delay one way, between any two places.")
  given.add_fields(planner.Setting)
  given.add("codec", str, "Codec both ways, instead of the config's: f32, bf16, int8, int4.")
  given.add("step_seconds", float, "How long an inner step takes (see `ddiloco compile`).")
  given.add(
    "measure", False, "Measure --merge_gbytes on this machine, as a shard merges: some seconds."
  )
  given.add("json", False, "One JSON object instead of text.")


def _sizes(given: Flags, config: Config) -> tuple[int, ...]:
  """Sizes of the fragments: the config's own, or equal ones of --parameters."""
  if given.parameters is None:
    from ddiloco.roles import initial  # imports JAX, which takes seconds

    return initial.make_plan(config).sizes
  parameters, count = int(given.parameters), config.sync.num_fragments
  rule = f"must be at least sync.num_fragments ({count})"
  fix = f"give more, or --config.sync.num_fragments={parameters}"
  require(parameters >= count, "--parameters", parameters, rule, fix)
  return planner.equal_sizes(parameters, count)


# --- The command that simulates a config's run in virtual time


def protocol(arguments: list[str]) -> int:
  """A config's run in virtual time: its protocol, islands and fault plan, without arrays.

  The roles decide as in a real run; step times, links and faults are simulated:

    ddiloco simulate protocol --config=configs/quickstart.py --step_seconds=0.1
    ddiloco simulate protocol --config=configs/quickstart.py --step_seconds=0.1 --gbps=1 \\
      --latency_ms=30 --config.chaos=configs/chaos/soak.py:7 --workdir=runs/virtual

  --workdir keeps the events, for `ddiloco dashboard` and `ddiloco report`. An island whose
  islands.min_step_seconds is set takes that time for a step. Losses are not simulated.
  """
  from ddiloco.engines import virtual
  from ddiloco.simulation.run import Speeds

  given = Flags(arguments, "config")
  given.add_fields(Speeds)
  given.add("gbps", "0", "Gbit/s of every island's link, one or a list a,b,c; 0: no limit.")
  given.add("latency_ms", "1", "Delay one way, one or a list; between two islands the longer.")
  given.add("parameters", int, "Size of the model, in equal fragments; default: the config's.", 1)
  given.add("seconds", float, "Virtual time at most; default: until all tokens are merged.", 0.0)
  given.add("workdir", "", "Gets the events; empty: they are not kept.")
  given.add("overwrite", False, "Replace the run that is in workdir.")
  given.add("json", False, "Print one JSON object instead of text.")
  given.parse(protocol.__doc__)
  config = given.final_config()
  most_seconds = math.inf if given.seconds is None else given.seconds
  with _as_typed(given):
    setting = Speeds(
      sizes=_sizes(given, config),
      gbps=_numbers(given, "gbps"),
      latency_seconds=tuple(ms / 1000 for ms in _numbers(given, "latency_ms")),
      **given.fields(Speeds),
    )
    found = virtual.simulate(config, setting, given.workdir, given.overwrite, most_seconds)
  print(json.dumps(found) if given.json else "\n".join(_text(found)))
  return FINISHED if found["reason"] != "failed" else LOST


def _numbers(given: Flags, name: str) -> tuple[float, ...]:
  text = getattr(given, name)
  try:
    return tuple(map(float, text.split(",")))
  except ValueError as error:
    fix = f"give --{name}=1 or --{name}=1,1,0.2"
    raise refusal(f"--{name}", text, "must be numbers", fix) from error


# --- The command that simulates failures at any size

CAUSES = ("downscale", "upscale", "restart", "absent")


def simulate(arguments: list[str]) -> int:
  """`ddiloco simulate [WHAT] --NAME=VALUE ...`; WHAT: chips, also if left out, or protocol."""
  command, *rest = arguments
  what = rest.pop(0) if rest and not rest[0].startswith("-") else "chips"
  require_one_of("ddiloco simulate", what, SIMULATIONS)
  return SIMULATIONS[what]([f"{command} {what}", *rest])


def chips(arguments: list[str]) -> int:
  """Chips that fail: how much of their time trains, for one job that needs all of them, one
  elastic job, and learners that never wait for each other. Takes seconds; needs no accelerator.

  goodput: share of all chip time that trains. uptime: share of time in which a learner trains. The
  rest is where the other chip time went. Every assumption is a flag; --json prints one JSON object.
  `ddiloco simulate protocol --help`: a config's run in virtual time, with its faults and links.
  """
  given = Flags(arguments)
  given.add_fields(Fleet)
  given.add("json", False, "Print one JSON object instead of a table.")
  given.parse(chips.__doc__)
  with _as_typed(given):
    fleet = Fleet(**given.fields(Fleet))
  jobs = {
    "data-parallel, not elastic": inelastic,
    "data-parallel, elastic": elastic,
    f"decoupled, {_count(fleet.learners, 'learner')}": decoupled,
  }
  spent = {label: job(fleet) for label, job in jobs.items()}
  shares = {
    label: {"goodput": each.goodput, "uptime": each.uptime}
    | {name: getattr(each, name) / each.total for name in CAUSES}
    for label, each in spent.items()
  }
  failures = next(iter(spent.values())).failures
  if given.json:
    rows = {job.__name__: shares[label] for label, job in jobs.items()}
    print(json.dumps({"fleet": dataclasses.asdict(fleet), "failures": failures, **rows}))
    return FINISHED
  often = f", one every {fleet.seconds / failures:.3g} s" if failures else ""
  print(
    f"{_count(fleet.chips, 'chip')}, {_count(fleet.days, 'day')},"
    f" {_count(fleet.mtbi_chip_years, 'year')} between failures of one chip:"
    f" {_count(failures, 'failure')}{often} (seed {fleet.seed}).\n"
  )
  columns = ("goodput", "uptime", *CAUSES)
  print(f"{'':27}" + "".join(f"{name:>10}" for name in columns))
  for label, row in shares.items():
    cells = (f"{row[name]:10.2%}" if row[name] else f"{'–':>10}" for name in columns)
    print(f"{label:27}" + "".join(cells))
  return FINISHED


def _count(number: float, what: str) -> str:
  return f"{number:,.12g} {what}" + "s" * (number != 1)


SIMULATIONS: dict[str, Callable[[list[str]], int]] = {"chips": chips, "protocol": protocol}


# --- The command that says, without any chip, what a run's islands take on TPUs or GPUs

_GIB = 1 << 30


def compile_islands(arguments: list[str]) -> int:
  """Compiles every island's real programs for chips that need not be here; says whether they fit.

  The topology is --topology for all islands, or islands.topology of each (equal islands are
  compiled once):

    ddiloco compile --config=configs/dense.py:12b --topology=v5p:4x4x4
    ddiloco compile --config=configs/dense.py:5b --topology=h100:8
    ddiloco compile --config=configs/regions_12b.py --mfu=0.4 --json

  Memory is per device (of TPU7x each core is one), with the copies for snapshots and syncs beside
  the step. Takes up to a minute of CPU an island, and needs libtpu (pip install 'ddiloco[tpu]')
  or, for GPUs, the CUDA libraries ('ddiloco[cuda]', or jax[cuda12]). Exit status 1: an island does
  not fit.
  """
  given = Flags(arguments, "config")
  given.add("topology", "", "Topology of every island, instead of its islands.topology.")
  given.add("num_slices", 1, "Slices of one controller (Pathways), one an island.", 1)
  given.add("mfu", 0.4, "Share of the peak that steps are assumed to reach.", 0.01, 1.0)
  given.add_choice(
    "level",
    ["O0", "O1", "O2", "O3", "UNKNOWN"],
    "Effort of the compiler's search for quick programs: UNKNOWN is what islands run, and searches"
    " minutes long for the quickest tiles; O0 takes a fraction of the time, and as much memory.",
  )
  given.add("json", False, "Print one JSON object instead of text.")
  given.parse(compile_islands.__doc__)
  config = given.final_config()
  environment.describe_only()
  import jax

  jax.config.update("jax_optimization_level", given.level)
  found, mfu = fits(config, given.topology, given.num_slices), given.mfu
  if given.json:
    print(json.dumps([{"islands": m, **_fields(each, mfu)} for m, each in found]))
  else:
    print("\n\n".join("\n".join(fit_lines(m, each, mfu)) for m, each in found))
  return FINISHED if all(each.fits for _, each in found) else LOST


def fits(config: Config, topology: str, num_slices: int) -> list[tuple[list[int], Any]]:
  """(Learners, their islands' `training.aot.Fit`), one for each group of equal islands."""
  from ddiloco.roles import initial
  from ddiloco.training import aot, devices

  own, rule = config.model.custom, "its FLOPs and layers are not known"
  require(not own, "model.custom", own, rule, "compile ddiloco's own models")
  plan = initial.make_plan(config)
  alike: dict[str, list[int]] = {}
  for learner in range(config.islands.num_learners):
    island = dataclasses.replace(config.islands.island(learner), resources={}, min_step_seconds=0.0)
    alike.setdefault(repr(island), []).append(learner)
  found = []
  for learners in alike.values():
    island = config.islands.island(learners[0])
    shape = topology or island.topology
    rule = f"learner {learners[0]} needs one to compile for"
    fix = "give --topology=v5p:4x4x4, for example, or set it in the experiment file"
    require(bool(shape), "islands.topology", shape, rule, fix)
    described = aot.devices(shape, num_slices)
    if num_slices > 1:
      counts = [config.islands.island(m).devices for m in range(config.islands.num_learners)]
      described = devices.partition(described, counts)[learners[0]]
    found.append((learners, aot.fit(config, learners[0], plan, shape, described)))
  return found


def _fields(found: Any, mfu: float) -> dict[str, Any]:
  """All fields and derived values."""
  return {
    **dataclasses.asdict(found),
    **{name: getattr(found, name) for name in ("fits", "gathers_by_layer")},
    "mfu": mfu,
    "step_seconds": found.step_seconds(mfu),
  }


def fit_lines(learners: list[int], found: Any, mfu: float) -> list[str]:
  """For people."""
  limit, step = found.chip.hbm_bytes, found.step
  free = 1 - found.needed_bytes / limit
  verdict = f"fits, {free:.0%} free" if found.fits else "DOES NOT FIT"
  flops = found.flops_per_token
  text = [
    f"island {', '.join(map(str, learners))}: {found.island}",
    f"  memory       {_gib(found.needed_bytes)} of {_gib(limit)} GiB a device: {verdict}",
    f"               {_gib(found.state_bytes)} parameters and moments,"
    f" {_gib(found.needed_bytes - found.state_bytes - found.beside_bytes)} the step beside them,"
    f" {_gib(found.beside_bytes)} copies for snapshots and syncs",
    f"  host memory  {_gib(found.host_bytes)} GiB a device while a snapshot is written",
    f"  parameters   {found.parameters:,}",
    f"  FLOPs        {flops / 1e9:.1f} G a token (6 x weights + 6 x layers x heads x head dim x"
    f" length: causal attention halved), {flops * found.tokens / 1e15:.2f} P a step",
    f"  a step       {found.step_seconds(mfu):.2f} s at {mfu:.0%} of"
    f" {found.chip.flops_per_second / 1e12:.0f} TFLOP/s a device,"
    f" {found.tokens / found.step_seconds(mfu) / found.chips:,.0f} tokens/s a device",
  ]
  if step is not None:
    of_layer = "one layer at a time" if found.gathers_by_layer else "MORE THAN A LAYER AT A TIME"
    text.append(
      f"  weights      gathered {of_layer}: an exchange leaves at most"
      f" {step.largest_collective_bytes / 1e6:,.0f} MB, a layer has {found.layer_bytes / 1e6:,.0f}"
    )
  for program in (step, *found.copies) if step is not None else found.copies:
    moved = ", ".join(f"{c.times:,} {c.kind} {c.bytes / 1e9:.3g} GB" for c in program.collectives)
    several = f" {program.count} programs" if program.count > 1 else ""
    seconds = f"{program.cpu_seconds:.0f} s of CPU to compile{several}"
    text.append(f"  {program.name:12} {moved or 'no collectives'}; {seconds}")
  text.append("  no collective leaves the island")
  text += [f"  to make it fit: {remedy}" for remedy in found.remedies]
  return text


def _gib(count: float) -> str:
  return f"{count / _GIB:.2f}"
