"""The command that says what a run's islands take on TPUs, without any TPU."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from ddiloco import environment
from ddiloco.cli.arguments import Flags
from ddiloco.config import Config, ConfigError
from ddiloco.environment import FINISHED, LOST

_GIB = 1 << 30


def compile_islands(arguments: list[str]) -> int:
  """Compiles every island's real programs for TPUs, without any, and says whether they fit.

  The topology is --topology for all islands, or islands.topology of each (islands that are alike
  are compiled once):

    ddiloco compile --config=configs/dense.py:12b --topology=v5p:4x4x4
    ddiloco compile --config=configs/regions_12b.py --mfu=0.4 --json

  Memory is per chip, with the copies for snapshots and syncs beside the step. Takes about a minute
  of CPU an island, and needs libtpu (pip install 'ddiloco[tpu]'). Exit status 1: one does not fit.
  """
  given = Flags(arguments)
  given.add_config()
  given.add_text("topology", "", "Of every island, instead of its islands.topology.")
  given.add_integer("num_slices", 1, "Slices of one controller (Pathways), one an island.", 1)
  given.add_number("mfu", 0.4, "Share of the peak that steps are assumed to reach.", 0.0)
  given.add_choice(
    "level",
    ["O0", "O1", "O2", "O3", "UNKNOWN"],
    "Of the compiler's search for quick programs: UNKNOWN is what islands run, and searches minutes"
    " long for the quickest tiles; O0 takes about as much memory, and a third of the time.",
  )
  given.add_switch("json", "Print one JSON object instead of text.")
  given.parse(compile_islands.__doc__)
  config = given.final_config()
  if not 0 < given.mfu <= 1:
    raise ConfigError(f"--mfu={given.mfu:g}: must lie in (0, 1]. Fix: give --mfu=0.4.")
  environment.describe_only()
  slices, level = given.num_slices, given.level
  found = fits(config, given.topology, slices, level)
  mfu = given.mfu
  if given.json:
    print(json.dumps([{"islands": m, **as_json(each, mfu)} for m, each in found]))
  else:
    print("\n\n".join("\n".join(lines(m, each, mfu)) for m, each in found))
  return FINISHED if all(each.fits for _, each in found) else LOST


def fits(config: Config, topology: str, num_slices: int, level: str) -> list[tuple[list[int], Any]]:
  """(Learners, what their islands take: a `training.aot.Fit`); islands that are alike are one."""
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
      described = devices.partition(described, config.islands)[learners[0]]
    found.append((learners, aot.fit(config, learners[0], plan, shape, described, level)))
  return found


def as_json(found: Any, mfu: float) -> dict[str, Any]:
  """All fields, and what follows from them."""
  return {
    **dataclasses.asdict(found),
    "fits": found.fits,
    "gathers_by_layer": found.gathers_by_layer,
    "mfu": mfu,
    "step_seconds": found.step_seconds(mfu),
  }


def lines(learners: list[int], found: Any, mfu: float) -> list[str]:
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
