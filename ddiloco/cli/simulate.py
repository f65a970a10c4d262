"""The command that simulates what cannot be run here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

from absl import flags

from ddiloco.cli.arguments import parse
from ddiloco.cli.protocol import protocol
from ddiloco.config import ConfigError
from ddiloco.simulation import chip_time
from ddiloco.simulation.chip_time import ChipTime
from ddiloco.simulation.fleet import Fleet

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

  goodput: share of all chip time that trains. uptime: share of time in which somebody trains. The
  rest is where the other chip time went. Every assumption is a flag; --json prints one JSON object.
  """
  values = flags.FlagValues()
  for field in dataclasses.fields(Fleet):
    define = flags.DEFINE_integer if field.type == "int" else flags.DEFINE_float
    define(field.name, field.default, field.metadata["help"], flag_values=values)
  flags.DEFINE_bool("json", False, "Print one JSON object instead of a table.", flag_values=values)
  if not parse(values, arguments, chips.__doc__):
    return 0
  fleet = Fleet(**{field.name: values[field.name].value for field in dataclasses.fields(Fleet)})
  as_json = values["json"].value
  rows: dict[str, ChipTime] = {}
  for name, simulated in (
    ("inelastic", chip_time.inelastic),
    ("elastic", chip_time.elastic),
    ("decoupled", chip_time.decoupled),
  ):
    rows[name] = simulated(fleet)
    if not as_json:
      if len(rows) == 1:
        print(_heading(fleet, rows[name].failures))
      print(_row(_label(name, fleet), rows[name]), flush=True)
  if as_json:
    found = {name: _shares(spent) for name, spent in rows.items()}
    failures = rows["decoupled"].failures
    print(json.dumps({"fleet": dataclasses.asdict(fleet), "failures": failures, **found}))
  return 0


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
