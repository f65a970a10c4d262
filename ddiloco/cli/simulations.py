"""Commands about runs that do not exist: plan, compile and simulate one."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

from ddiloco import environment
from ddiloco.cli.arguments import Flags
from ddiloco.config import Config, ConfigError, from_dict
from ddiloco.environment import FINISHED, LOST
from ddiloco.simulation import planner
from ddiloco.simulation.chips import ChipTime, Fleet, decoupled, elastic, inelastic

# --- The command that says, before a run is paid for, whether it fits its links


def plan(arguments: list[str]) -> int:
  """Says what a run needs of its links and shards, and what to change where it does not fit.

  The run is a config's, with its real fragments, or has --parameters in equal fragments, with the
  protocol of --config.sync. The time of a step is given, or follows from chips and tokens:

    ddiloco plan --config=configs/dense.py:12b --gbps=5 --latency_ms=30 --step_seconds=4
    ddiloco plan --parameters=12e9 --islands=4 --gbps=2 --latency_ms=30 --codec=int4 \\
      --chips=64 --chip_teraflops=459 --tokens=262144 --config.sync.num_fragments=96

  Bytes are those of rounds in which every learner takes part; no device is touched.
  """
  given = Flags(arguments, "config")
  _add_plan_flags(given)
  given.parse(plan.__doc__)
  if not given.experiment and given.parameters is None:
    raise ConfigError(
      "--config: is needed, or --parameters. Fix: give --config=configs/dense.py:12b, for example."
    )
  config = _config(given)
  if given.experiment:
    from ddiloco.training.data import check_here

    check_here(config)
  setting = _setting(given, config)
  made = planner.make(setting)
  if given.json:
    print(json.dumps(planner.as_json(setting, made)))
  else:
    print("\n".join(planner.lines(setting, made)))
  return FINISHED


def _add_plan_flags(given: Flags) -> None:
  """All flags but --config."""
  given.add("parameters", float, "Size of the model, instead of the config's; fragments are equal.")
  given.add("islands", int, "How many, instead of the config's.")
  given.add("gbps", float, "Gbit/s of every island's link, in each direction.")
  given.add("latency_ms", 0.0, "One way, between any two places.")
  given.add_fields(planner.Setting)
  given.add("codec", str, "Both ways, instead of the config's: f32, bf16, int8, int4.")
  given.add(
    "step_seconds",
    float,
    "How long an inner step takes; else give --chips and --chip_teraflops (and --mfu, --tokens).",
  )
  given.add("chips", float, "In one island.")
  given.add("chip_teraflops", float, "Peak of one chip, in 1e12 FLOP/s.")
  given.add("mfu", 0.5, "Share of the peak that a step reaches.")
  given.add("tokens", float, "Of an island's step, instead of the config's.")
  given.add(
    "measure", False, "Measure --merge_gbytes on this machine, as a shard merges: some seconds."
  )
  given.add("json", False, "One JSON object instead of text.")


def _config(given: Flags) -> Config:
  """The config, with the changes of flags."""
  config: Any = given.config
  if given.islands is not None:
    config.islands.num_learners = given.islands
  if given.codec is not None:
    config.sync.push_codec = config.sync.publish_codec = given.codec
  return from_dict(config)


def _setting(given: Flags, config: Config) -> planner.Setting:
  return planner.Setting.of(
    config,
    gbps=_number(given, "gbps", "2"),
    step_seconds=_step_seconds(given, config),
    sizes=_sizes(given, config),
    latency_seconds=_number(given, "latency_ms", "30", may_be_zero=True) / 1000,
    shard_gbps=_number(given, "shard_gbps", "100", may_be_zero=True),
    merge_gbytes=_merge_gbytes(given, config),
    host_gbytes=_number(given, "host_gbytes", "100"),
  )


def _sizes(given: Flags, config: Config) -> tuple[int, ...]:
  """Sizes of the fragments: the config's own, or equal ones of --parameters."""
  if given.parameters is None:
    from ddiloco.roles import initial  # imports JAX, which takes seconds

    return initial.make_plan(config).sizes
  parameters, count = int(_number(given, "parameters", "12e9")), config.sync.num_fragments
  if parameters < count:
    raise ConfigError(
      f"--parameters={parameters}: must be at least sync.num_fragments ({count})."
      f" Fix: give more, or --config.sync.num_fragments={parameters}."
    )
  return planner.equal_sizes(parameters, count)


def _merge_gbytes(given: Flags, config: Config) -> float:
  if not given.measure:
    return _number(given, "merge_gbytes", "4")
  from ddiloco.engines import virtual

  found = virtual.merge_gbytes(config)
  if not given.json:
    print(f"This machine merges {found:.1f} GB/s of f32 (--merge_gbytes={found:.1f}).\n")
  return found


def _step_seconds(given: Flags, config: Config) -> float:
  """As given, or the FLOPs of a step over an island's FLOPs a second."""
  if given.step_seconds is not None:
    return _number(given, "step_seconds", "1")
  if given.chips is None:
    raise ConfigError(
      "--step_seconds: is needed, or --chips and --chip_teraflops."
      " Fix: give --step_seconds=1, or what a step takes."
    )
  rate = _number(given, "chips", "64") * _number(given, "chip_teraflops", "459") * 1e12
  rate *= _number(given, "mfu", "0.5")
  if given.parameters is not None:
    return 6 * given.parameters * _number(given, "tokens", "262144") / rate
  from ddiloco.roles import initial

  flops = initial.step_flops(config)
  if given.tokens is not None:
    flops *= _number(given, "tokens", "262144") / config.tokens_per_step(0)
  return flops / rate


def _number(given: Flags, name: str, example: str, may_be_zero: bool = False) -> float:
  value: Any = given.needed(name, example)
  if value < 0 or (value == 0 and not may_be_zero):
    rule = "must not be negative" if may_be_zero else "must be greater than 0"
    raise ConfigError(f"--{name}={value:g}: {rule}. Fix: give --{name}={example}.")
  return value


# --- The command that simulates a config's run in virtual time

CAUSES_SHOWN = 4


def protocol(arguments: list[str]) -> int:
  """A config's run in virtual time: its protocol, islands and fault plan, without arrays.

  The roles decide as in a real run; step times, links and faults are simulated:

    ddiloco simulate protocol --config=configs/quickstart.py --step_seconds=0.1
    ddiloco simulate protocol --config=configs/quickstart.py --step_seconds=0.1 --gbps=1 \\
      --latency_ms=30 --config.chaos=configs/chaos/soak.py:7 --workdir=runs/virtual

  --workdir keeps the events, for `ddiloco dashboard` and `ddiloco report`. An island whose
  islands.min_step_seconds is set takes that time for a step. Losses are not simulated.
  """
  given = Flags(arguments, "config")
  _add_protocol_flags(given)
  given.parse(protocol.__doc__)
  config = given.final_config()
  from ddiloco.engines import virtual
  from ddiloco.simulation.run import Speeds

  setting = Speeds(
    sizes=_sizes(given, config),
    gbps=_numbers(given, "gbps"),
    latency_seconds=tuple(ms / 1000 for ms in _numbers(given, "latency_ms")),
    **given.fields(Speeds),
  )
  most_seconds = math.inf if given.seconds is None else given.seconds
  found = virtual.simulate(config, setting, given.workdir, given.overwrite, most_seconds)
  print(json.dumps(found) if given.json else _text(found))
  return FINISHED if found["reason"] != "failed" else LOST


def _add_protocol_flags(given: Flags) -> None:
  """All flags but --config."""
  from ddiloco.simulation.run import Speeds

  given.add_fields(Speeds)
  given.add("gbps", "0", "Gbit/s of every island's link, one or a list a,b,c; 0: no limit.")
  given.add("latency_ms", "1", "One way, one for all islands or a list.")
  given.add("parameters", int, "Size of the model, in equal fragments; default: the config's.")
  given.add("seconds", float, "Of virtual time at most; default: until all tokens are merged.", 0.0)
  given.add("workdir", "", "Gets the events; empty: they are not kept.")
  given.add("overwrite", False, "Replace the run that is in workdir.")
  given.add("json", False, "Print one JSON object instead of text.")


def _numbers(given: Flags, name: str) -> tuple[float, ...]:
  text = getattr(given, name)
  try:
    found = tuple(float(each) for each in text.split(","))
  except ValueError:
    found = (math.nan,)
  if not all(0 <= each < math.inf for each in found):
    raise ConfigError(
      f"--{name}={text}: must be numbers from 0 on. Fix: give --{name}=1 or --{name}=1,1,0.2."
    )
  return found


def _text(found: dict[str, Any]) -> str:
  """For people."""

  def share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"

  most = sorted(found["causes"].items(), key=lambda item: -item[1])[:CAUSES_SHOWN]
  causes = ", ".join(f"{cause} {value:.1%}" for cause, value in most)
  lines = [
    f"{found['learners']} learners, {found['virtual_seconds']:,.0f} s of virtual time in"
    f" {found['wall_seconds']:.1f} s: {found['reason']}.",
    f"{found['steps']:,} steps, {found['commits']:,} commits,"
    f" global step {found['global_step']:,}.",
    "",
    f"goodput        {share(found['goodput'])}   ({causes or 'nothing lost'})",
    f"uptime         {share(found['uptime'])}",
    f"liveness       {share(found['liveness'])}",
    f"participation  {share(found['participation'])}, the lowest"
    f" {share(found['lowest_participation'])}",
  ]
  if found["seconds_per_sync"]:
    seconds = found["seconds_per_sync"]
    lines.append(
      f"a sync         {seconds['median']:.3g} s from copy-out to apply"
      f" ({seconds['tenth']:.3g} to {seconds['nine_tenths']:.3g})"
    )
  lines.append(
    f"links          a learner sent {found['learner_sent_bytes'] / 1e6:,.1f} MB and received"
    f" {found['learner_received_bytes'] / 1e6:,.1f} MB"
  )
  lines += _counted("rounds committed because", found["committed_because"])
  lines += _counted("learners had no part because", found["had_no_part_because"])
  if found["faults"]:
    lines += ["", f"{found['faults']} faults, {found['recovered']} recovered"]
    if found["recovered"]:
      lines[-1] += (
        f" (median {found['median_recovery_seconds']:g} s, worst"
        f" {found['worst_recovery_seconds']:g} s)"
      )
  lines.append(
    f"longest time without any step {found['longest_stall_seconds']:g} s, lost rounds"
    f" {found['lost_rounds']}, unplanned exits {found['unplanned']}"
  )
  return "\n".join(lines)


def _counted(title: str, counts: dict[str, int]) -> list[str]:
  return ["", f"{title}:", *(f"  {n:8,} x {why}" for why, n in counts.items())] if counts else []


# --- The command that simulates failures at any size

CAUSES = ("downscale", "upscale", "restart", "absent")


def simulate(arguments: list[str]) -> int:
  """`ddiloco simulate [WHAT] --NAME=VALUE ...`; WHAT: chips, also if left out, or protocol."""
  command, *rest = arguments
  what = rest.pop(0) if rest and not rest[0].startswith("-") else "chips"
  if what not in SIMULATIONS:
    known = ", ".join(SIMULATIONS)
    raise ConfigError(f"{what!r}: cannot be simulated. Fix: give one of {known}, or flags alone.")
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
  fleet = Fleet(**given.fields(Fleet))
  rows: dict[str, ChipTime] = {}
  for simulated in (inelastic, elastic, decoupled):
    name = simulated.__name__
    rows[name] = simulated(fleet)
    if not given.json:
      if len(rows) == 1:
        print(_heading(fleet, rows[name].failures))
      print(_row(_label(name, fleet), rows[name]), flush=True)
  if given.json:
    found = {name: _shares(spent) for name, spent in rows.items()}
    failures = rows["decoupled"].failures
    print(json.dumps({"fleet": dataclasses.asdict(fleet), "failures": failures, **found}))
  return FINISHED


def _label(name: str, fleet: Fleet) -> str:
  if name == "decoupled":
    return f"decoupled, {fleet.learners} learner{'s' * (fleet.learners > 1)}"
  return {"inelastic": "data-parallel, not elastic", "elastic": "data-parallel, elastic"}[name]


def _heading(fleet: Fleet, failures: int) -> str:
  often = f", one every {fleet.seconds / failures:.3g} s" if failures else ""
  head = (
    f"{fleet.chips:,} chips, {fleet.days:g} days, {fleet.mtbi_chip_years:g} years between failures"
    f" of one chip: {failures:,} failures{often} (seed {fleet.seed})."
  )
  columns = "".join(f"{name:>10}" for name in ("goodput", "uptime", *CAUSES))
  return f"{head}\n\n{'':27}{columns}"


def _row(label: str, spent: ChipTime) -> str:
  shares = _shares(spent)
  cells = [f"{shares[name]:10.2%}" for name in ("goodput", "uptime")]
  cells += [f"{shares[name]:10.2%}" if shares[name] else f"{'–':>10}" for name in CAUSES]
  return f"{label:27}" + "".join(cells)


def _shares(spent: ChipTime) -> dict[str, float]:
  causes = {name: getattr(spent, name) / spent.total for name in CAUSES}
  return {"goodput": spent.goodput, "uptime": spent.uptime, **causes}


SIMULATIONS: dict[str, Callable[[list[str]], int]] = {"chips": chips, "protocol": protocol}


# --- The command that says, without any TPU, what a run's islands take on TPUs

_GIB = 1 << 30


def compile_islands(arguments: list[str]) -> int:
  """Compiles every island's real programs for TPUs, without any TPU, and says whether they fit.

  The topology is --topology for all islands, or islands.topology of each (equal islands are
  compiled once):

    ddiloco compile --config=configs/dense.py:12b --topology=v5p:4x4x4
    ddiloco compile --config=configs/regions_12b.py --mfu=0.4 --json

  Memory is per chip, with the copies for snapshots and syncs beside the step. Takes about a minute
  of CPU an island, and needs libtpu (pip install 'ddiloco[tpu]'). Exit status 1: an island does not
  fit.
  """
  given = Flags(arguments, "config")
  given.add("topology", "", "Of every island, instead of its islands.topology.")
  given.add("num_slices", 1, "Slices of one controller (Pathways), one an island.", 1)
  given.add("mfu", 0.4, "Share of the peak that steps are assumed to reach.", 0.0)
  given.add_choice(
    "level",
    ["O0", "O1", "O2", "O3", "UNKNOWN"],
    "Of the compiler's search for quick programs: UNKNOWN is what islands run, and searches minutes"
    " long for the quickest tiles; O0 takes about as much memory, and a third of the time.",
  )
  given.add("json", False, "Print one JSON object instead of text.")
  given.parse(compile_islands.__doc__)
  config = given.final_config()
  if not 0 < given.mfu <= 1:
    raise ConfigError(f"--mfu={given.mfu:g}: must lie in (0, 1]. Fix: give --mfu=0.4.")
  environment.describe_only()
  import jax

  jax.config.update("jax_optimization_level", given.level)
  found, mfu = fits(config, given.topology, given.num_slices), given.mfu
  if given.json:
    print(json.dumps([{"islands": m, **fit_json(each, mfu)} for m, each in found]))
  else:
    print("\n\n".join("\n".join(fit_lines(m, each, mfu)) for m, each in found))
  return FINISHED if all(each.fits for _, each in found) else LOST


def fits(config: Config, topology: str, num_slices: int) -> list[tuple[list[int], Any]]:
  """(Learners, their islands' `training.aot.Fit`), one for each group of equal islands."""
  from ddiloco.roles import initial
  from ddiloco.training import aot, devices

  if config.model.custom:
    raise ConfigError(
      f"model.custom = {config.model.custom!r}: its FLOPs and layers are not known."
      " Fix: compile ddiloco's own models."
    )

  plan = initial.make_plan(config)
  alike: dict[str, list[int]] = {}
  for learner in range(config.islands.num_learners):
    island = dataclasses.replace(config.islands.island(learner), resources={}, min_step_seconds=0.0)
    alike.setdefault(repr(island), []).append(learner)
  found = []
  for learners in alike.values():
    island = config.islands.island(learners[0])
    shape = topology or island.topology
    if not shape:
      raise ConfigError(
        f"islands.topology = '' (learner {learners[0]}): is needed to compile for."
        " Fix: give --topology=v5p:4x4x4, for example, or set it in the experiment file."
      )
    described = aot.devices(shape, num_slices)
    if num_slices > 1:
      counts = [config.islands.island(m).devices for m in range(config.islands.num_learners)]
      described = devices.partition(described, counts)[learners[0]]
    found.append((learners, aot.fit(config, learners[0], plan, shape, described)))
  return found


def fit_json(found: Any, mfu: float) -> dict[str, Any]:
  """All fields and derived values."""
  return {
    **dataclasses.asdict(found),
    "fits": found.fits,
    "gathers_by_layer": found.gathers_by_layer,
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
    f"  memory       {_gib(found.needed_bytes)} of {_gib(limit)} GiB a chip: {verdict}",
    f"               {_gib(found.state_bytes)} parameters and moments,"
    f" {_gib(found.needed_bytes - found.state_bytes - found.beside_bytes)} the step beside them,"
    f" {_gib(found.beside_bytes)} copies for snapshots and syncs",
    f"  host memory  {_gib(found.host_bytes)} GiB a chip while a snapshot is written",
    f"  parameters   {found.parameters:,}",
    f"  FLOPs        {flops / 1e9:.1f} G a token (6 x weights + 6 x layers x heads x head dim x"
    f" length: causal attention halved), {flops * found.tokens / 1e15:.2f} P a step",
    f"  a step       {found.step_seconds(mfu):.2f} s at {mfu:.0%} of"
    f" {found.chip.flops_per_second / 1e12:.0f} TFLOP/s a chip,"
    f" {found.tokens / found.step_seconds(mfu) / found.chips:,.0f} tokens/s a chip",
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
