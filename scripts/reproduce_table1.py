"""Table 1 of the Decoupled DiLoCo paper: goodput when chips fail, from 150k to 2.4M chips.

    python scripts/reproduce_table1.py [--seeds=5] [--days=30] [--picture=docs/table1.png]
                                       [--sensitivity] [--quick]

All 30 cells come from one set of assumptions, the defaults of `ddiloco.simulation.chips.Fleet`. A
cell is the mean over the seeds; an error is its distance from the published figure, in points.
`--sensitivity` halves and doubles each assumption that the paper does not publish, one at a time,
and prints what that does to the errors. `--quick`: one seed, ten days.

Last line: {"cells": {row: [5 values, %]}, "uptime": {row: [5 values, %, the lowest of the seeds]},
"max_error", "mean_error", "worst_seed_error" (points), "seconds_largest" (wall seconds of the
slowest row at 2.4M chips, median over the seeds), ...}. Takes 20 s, with --sensitivity 60 s.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import common
import numpy as np

from ddiloco.observe.style import GLOBAL_MODEL, PALETTE
from ddiloco.simulation import chips
from ddiloco.simulation.chips import Fleet

CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)
# Goodput in %, arXiv 2604.21428, Table 1: mean time between interruptions one year per chip.
PUBLISHED = {
  "inelastic": (72, 57, 38, 27, 18),
  "elastic": (88, 80, 69, 58, 40),
  "M=2": (94, 88, 80, 70, 54),
  "M=4": (96, 93, 89, 82, 73),
  "M=8": (98, 96, 94, 88, 80),
  "M=16": (99, 98, 96, 93, 86),
}
NAMES = {"inelastic": "data-parallel, not elastic", "elastic": "data-parallel, elastic"}
COLOURS = dict(zip(PUBLISHED, (PALETTE[7], GLOBAL_MODEL, *PALETTE[3::-1])))
INFERRED = tuple(f.name for f in dataclasses.fields(Fleet) if "[inferred" in f.metadata["help"])
Cell = tuple[float, float, float]  # goodput %, uptime %, wall seconds it took


def simulate(row: str, fleet: Fleet) -> Cell:
  """One cell of one seed."""
  start = time.perf_counter()
  if row == "inelastic":
    spent = chips.inelastic(fleet)
  else:
    learners = 1 if row == "elastic" else int(row.removeprefix("M="))
    spent = chips.decoupled(dataclasses.replace(fleet, learners=learners))
  return 100 * spent.goodput, 100 * spent.uptime, time.perf_counter() - start


def table(fleet: Fleet, seeds: range) -> dict[str, np.ndarray]:
  """Row -> [5 sizes, seeds, (goodput %, uptime %, seconds)]."""
  return {
    row: np.array(
      [
        [simulate(row, dataclasses.replace(fleet, chips=n, learners=1, seed=s)) for s in seeds]
        for n in CHIPS
      ]
    )
    for row in PUBLISHED
  }


def errors(cells: dict[str, np.ndarray]) -> np.ndarray:
  """Points by which goodput misses the published figures, [6 rows, 5 sizes, seeds]."""
  return np.array([cells[row][:, :, 0] - np.array(PUBLISHED[row])[:, None] for row in PUBLISHED])


def print_sensitivity(days: float) -> None:
  """Errors in points, worst (mean), of one seed with one assumption halved, and doubled."""
  rows: dict[str, dict[str, str]] = {}
  for name in ("days", *INFERRED):  # days: nothing is changed
    for title, factor in (("halved", 0.5), ("doubled", 2.0)):
      value = getattr(Fleet, name)
      changed = Fleet(**{name: type(value)(value * factor), "days": days})
      miss = np.abs(errors(table(changed, range(1))))
      rows.setdefault(name, {})[title] = f"{miss.max():.1f} ({miss.mean():.1f})"
  print("Errors in points, worst (mean), with one assumption changed:")
  common.show({"nothing": rows.pop("days"), **rows})


def draw(goodput: dict[str, np.ndarray], worst: float, path: Path) -> None:
  """Ours as lines, the published figures as circles."""
  with common.picture(path, 5.4) as (_, (axes,)):
    axes.set_title(
      "Chips fail; the more learners, the more of their time still trains"
      f"\n(all 30 published figures within {math.ceil(10 * worst) / 10:.1f} points)"
    )
    for row, ours in goodput.items():
      colour = COLOURS[row]
      axes.plot(CHIPS, ours, color=colour, lw=2, ls="--" if row in NAMES else "-")
      axes.plot(CHIPS, PUBLISHED[row], "o", mfc="white", mec=colour, mew=1.6, ms=7, clip_on=False)
      label = NAMES.get(row, f"{row.removeprefix('M=')} learners")
      place: dict[str, Any] = {
        "xytext": (10, -4),
        "textcoords": "offset points",
        "annotation_clip": False,
      }
      axes.annotate(label, (CHIPS[-1], ours[-1]), color=colour, weight="bold", **place)
    axes.plot([], [], color="#777777", lw=2, label="simulated here")
    axes.plot([], [], "o", mfc="white", mec="#777777", mew=1.6, ms=7, label="published (Table 1)")
    axes.legend(loc="lower left")
    axes.set_xscale("log", base=2)
    axes.set_xticks(CHIPS, [f"{n / 1e6:g}M" if n >= 1e6 else f"{n // 1000}k" for n in CHIPS])
    axes.minorticks_off()
    axes.set_xlabel("chips, each of which fails once a year on average")
    axes.set_ylabel("goodput, % of chip time")
    axes.set_ylim(0, 102)


def main() -> None:
  quick = {"seeds": 1, "days": 10.0}
  args = common.options(
    __doc__, quick, seeds=5, days=30.0, picture=common.OUTPUT, sensitivity=False
  )
  days, seeds = args.days, args.seeds
  found = table(Fleet(days=days), range(seeds))
  goodput = {row: cells[:, :, 0].mean(axis=1) for row, cells in found.items()}
  uptime = {row: cells[:, :, 1].min(axis=1) for row, cells in found.items()}
  miss = errors(found)
  mean_miss = np.abs(miss.mean(axis=2))
  titles = [f"{n // 1000}k" for n in CHIPS]
  for row in PUBLISHED:
    numbers = {"goodput": goodput[row], "published": PUBLISHED[row], "uptime": uptime[row]}
    cells = {f"{row}, {name}, %": np.ravel(of) for name, of in numbers.items()}
    common.show({name: dict(zip(titles, of)) for name, of in cells.items()})
  if args.sensitivity:
    print_sensitivity(days=min(days, 10.0))
  if args.picture:
    draw(goodput, mean_miss.max(), args.picture)
  result = {
    "cells": {row: [round(g, 2) for g in values] for row, values in goodput.items()},
    "uptime": {row: [round(u, 3) for u in values] for row, values in uptime.items()},
    "max_error": round(mean_miss.max(), 2),
    "mean_error": round(mean_miss.mean(), 2),
    "worst_seed_error": round(np.abs(miss).max(), 2),
    "seconds_largest": round(max(statistics.median(c[-1, :, 2]) for c in found.values()), 3),
    "days": days,
    "seeds": seeds,
  }
  print(json.dumps(result))


if __name__ == "__main__":
  common.run_script(main)
