"""Compute that comes and goes: how much sooner a run ends with +25 to +300 % of it.

    python scripts/reproduce_scavenging.py [--steps=1200] [--seeds=2]
                                           [--picture=docs/scavenging.png] [--quick]

Four islands by day and more of them by night, for two days and two nights. Each is as long as it
takes to make a quarter of the run's tokens, so that half of them are made with the extra islands.
If these came and went at no cost, a run with x times as much compute more would take
1/2 + 1/2 / (1 + x) of the time. The published times of Decoupled DiLoCo are just these, to their
last digit, which is why the pattern is assumed; of its nights one account of the paper tells.

Decoupled: the protocol's own decisions in virtual time (`ddiloco.simulation`); learners join, get
every fragment over their link, and leave again without losing their work. Data-parallel: the same
joins and departures, in closed form; all islands stand still for PAUSE_SECONDS when the number of
islands changes, and in each step an island takes an equal share of the batch, at no cost. A learner
that joins takes no time to start, besides the transfer of the model.

Assumed, since no account has it: how many days, and that they are so short, which makes a change
dear. A step takes 1 s; 5 Gbit/s and 10 ms a link; shards merge 100 GB/s; a model of 2 billion
parameters in bf16. The pause is that of Table 1's reproduction.

Last line: {"no_cost": {"+25 %": time relative to +0 %, ...}, "decoupled": {...},
"data_parallel": {...}, "published": {...}, "errors": {...}}. Takes some minutes, --quick a few
seconds.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import common
from reproduce_heterogeneous import config_of, speeds_of

from ddiloco.engines import virtual
from ddiloco.observe.style import GLOBAL_MODEL, PALETTE
from ddiloco.simulation.chips import Fleet

EXTRA = {"+25 %": 1, "+50 %": 2, "+100 %": 4, "+300 %": 12}  # islands
# Training time relative to +0 %, arXiv 2604.21428.
PUBLISHED = {
  "decoupled": {"+25 %": 0.90, "+50 %": 0.83, "+100 %": 0.75, "+300 %": 0.62},
  "data_parallel": {"+25 %": 1.07, "+50 %": 1.09, "+100 %": 1.02, "+300 %": 0.80},
}
ALWAYS, NIGHTS = 4, 2
PAUSE_SECONDS = Fleet().downscale_pause_seconds
FRAGMENTS = 12
Spell = tuple[float, float]  # from, until


def spells(extra: int, seconds: float) -> list[Spell]:
  """When the extra islands are present, one by one; `seconds`: of the run without them.

  The last night does not end before the run."""
  day = seconds / (2 * NIGHTS)
  night = day * ALWAYS / (ALWAYS + extra)
  begins = [day + k * (day + night) for k in range(NIGHTS)]
  ends = [begin + night for begin in begins[:-1]] + [math.inf]
  return [spell for spell in zip(begins, ends) for _ in range(extra)]


def decoupled(there: Sequence[Spell], steps: int, seed: int) -> float:
  """Seconds until as many tokens are merged as four islands make in so many steps."""
  joins = tuple(
    {
      "action": "join",
      "role": f"learner-{m}",
      "at_seconds": begin,
      "seconds": end - begin if end < math.inf else -1,
    }
    for m, (begin, end) in enumerate(there, ALWAYS)
  )
  config = config_of(ALWAYS, steps, {"sync.num_fragments": FRAGMENTS, "chaos.faults": joins})
  found = virtual.simulate(config, speeds_of(FRAGMENTS, seed))
  if found["reason"] != "finished":
    raise RuntimeError(f"the virtual run did not end: {found}")
  return found["virtual_seconds"]


def data_parallel(there: Sequence[Spell], steps: int, step_seconds: float) -> float:
  """The same for one job that uses all present islands, and pauses at each change."""
  left, count, until = steps * ALWAYS * step_seconds, ALWAYS, 0.0
  changes = sorted([(a, 1) for a, _ in there] + [(b, -1) for _, b in there])
  for at, change in changes:
    works = max(0.0, at - until)
    if works * count >= left:
      break
    left -= works * count
    count += change
    if works:
      until = at + PAUSE_SECONDS
  return until + left / count


def play(steps: int, seeds: range) -> dict[str, dict[str, float]]:
  """Relative times, mean over seeds."""
  found: dict[str, dict[str, float]] = {"no_cost": {}, "decoupled": {}, "data_parallel": {}}
  alone = {seed: decoupled((), steps, seed) for seed in seeds}
  for name, extra in EXTRA.items():
    there = {seed: spells(extra, alone[seed]) for seed in seeds}
    times = {
      "decoupled": [decoupled(there[seed], steps, seed) / alone[seed] for seed in seeds],
      "data_parallel": [
        data_parallel(there[seed], steps, alone[seed] / steps) / alone[seed] for seed in seeds
      ],
    }
    found["no_cost"][name] = 0.5 + 0.5 * ALWAYS / (ALWAYS + extra)
    for what, values in times.items():
      found[what][name] = statistics.mean(values)
  return found


def draw(found: dict[str, dict[str, float]], path: Path) -> None:
  """Ours as lines, published as circles."""
  with common.picture(path, 4.6) as (_, (axes,)):
    axes.set_title(
      "Islands that come and go shorten a decoupled run; a data-parallel job gains less"
    )
    places = range(len(EXTRA) + 1)
    for name, label, colour, beside in (
      ("decoupled", "Decoupled", PALETTE[0], -20),
      ("data_parallel", "data-parallel", GLOBAL_MODEL, 10),
    ):
      ours = [1.0, *found[name].values()]
      axes.plot(places, ours, color=colour, lw=2)
      axes.plot(places, [1.0, *PUBLISHED[name].values()], "o", mfc="white", mec=colour, ms=8)
      at = (2.5, (ours[2] + ours[3]) / 2)
      axes.annotate(
        label, at, xytext=(0, beside), textcoords="offset points", color=colour, weight="bold"
      )
    axes.plot([], [], color="#777777", lw=2, label="simulated here: half of the tokens by night")
    axes.plot([], [], "o", mfc="white", mec="#777777", ms=8, label="published")
    axes.set_xticks(places, ["+0 %", *EXTRA])
    axes.set_xlabel("extra compute that comes and goes, of what is there all the time")
    axes.set_ylabel("training time, relative to +0 %")
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower left")


def main() -> None:
  steps, quick = (1200, "of four islands alone"), {"steps": 200, "seeds": 1}
  args = common.options(__doc__, quick, steps=steps, seeds=2, picture=common.OUTPUT)
  began = time.monotonic()
  found = play(args.steps, range(args.seeds))
  common.show({**found, **{f"published, {name}": of for name, of in PUBLISHED.items()}})
  if args.picture:
    draw(found, args.picture)
  rounded = {what: {e: round(v, 3) for e, v in of.items()} for what, of in found.items()}
  errors = {
    name: {e: round(found[name][e] - PUBLISHED[name][e], 3) for e in EXTRA} for name in PUBLISHED
  }
  wall = round(time.monotonic() - began, 1)
  print(json.dumps({**rounded, "published": PUBLISHED, "errors": errors, "wall_seconds": wall}))


if __name__ == "__main__":
  common.run_script(main)
