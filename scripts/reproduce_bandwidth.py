"""The bandwidth that islands need, from first principles, beside the published figures.

  python scripts/reproduce_bandwidth.py [--picture=docs/bandwidth.png]

Three tables: the published row of Streaming DiLoCo (arXiv 2501.18512; a 10B model, 0.8 s a step,
H = 100, fragments of 3 layers) computed by `utilisation.py`; Decoupled's "198 against 0.84
Gbit/s between 8 data centres" (arXiv 2604.21428); and a 12B model over four regions on 2 to 5
Gbit/s. Nothing is fitted: quantities that the published row lacks
are in ASSUMED below. No device and no network is used; takes three seconds.

Last line: {"required_gbps": {method: {percent: Gbit/s}}, "published_gbps", "max_ratio_error",
"cells_inside", "case_12b", "reduction_vs_data_parallel"}. `max_ratio_error`: the largest of
max(ours / published, published / ours) - 1 over the published cells. `cells_inside`: how many of
ours round up to the published grid point. `reduction_vs_data_parallel`: Gbit/s of data-parallel for
90 % utilisation over Decoupled's with int4 and H = 24, between 8 sites, by the gradients' dtype;
and the published ratio.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import common
from utilisation import (
  Method,
  Workload,
  average_gbps,
  bits_per_value,
  required_gbps,
  utilisation,
)

from ddiloco.observe.style import GLOBAL_MODEL, MUTED, PALETTE

PERCENT = (50, 80, 90, 95, 99)
PUBLISHED = {  # Gbit/s
  "data_parallel": (104.8, 222, 222, 268, 471),
  "diloco": (1.7, 7.5, 16, 33.9, 104.8),
  "streaming_overlap": (1.7, 3.6, 5.2, 6.2, 7.5),
  "streaming_overlap_fp4": (0.4, 0.9, 1.4, 1.4, 1.7),
}
GRID = tuple(10 ** (-1 + 4 * k / 49) for k in range(50))  # 50 points from 0.1 to 1000 Gbit/s
EIGHT_SITES = (198, 0.84)  # Gbit/s: data-parallel, Decoupled
ONE_SECOND = (104, 1.7)  # the same at a step of one second
SPEEDUP_12B = 20  # "more than", over conventional synchronisation
# Not in the published row, so assumed: two sites, 48 layers (16 fragments of 3), bf16 gradients,
# an overlap of one step, no latency, a backward pass of two thirds of the step.
ASSUMED = Workload(parameters=10e9, step_seconds=0.8, sites=2, layers=48)
DATA_PARALLEL = Method("data-parallel")
DILOCO = Method("DiLoCo", period_steps=100)
STREAMING = Method("Streaming", period_steps=100, fragments=16)
OVERLAP = dataclasses.replace(STREAMING, name="Streaming, overlap", overlap_steps=1)
FP4 = dataclasses.replace(OVERLAP, name="Streaming, overlap, FP4", bits_per_value=4)


def decoupled(name: str) -> Method:
  """Decoupled with the paper's P = H = 24 and tau = 2, and our codec both ways."""
  return Method(f"Decoupled, {name}", bits_per_value(name), 24, 24, 2, waits=False)


METHODS = {
  "data_parallel": DATA_PARALLEL,
  "diloco": DILOCO,
  "streaming": STREAMING,
  "streaming_overlap": OVERLAP,
  "streaming_overlap_fp4": FP4,
  "decoupled_bf16": decoupled("bf16"),
  "decoupled_int4": decoupled("int4"),
}


def rounded_up(gbps: float) -> float:
  """The least point of the published grid that is enough."""
  return next(point for point in GRID if point >= gbps * (1 - 1e-9))


def nearest(gbps: float) -> float:
  """The point of the grid that a published, rounded figure stands for."""
  return min(GRID, key=lambda point: abs(math.log(point / gbps)))


def row_table() -> tuple[dict[str, dict[str, float]], float, int]:
  """Prints the published row beside ours; (ours, largest ratio error, cells inside)."""
  print("Gbit/s for a share of the time computing: ours, published. 10B, 0.8 s a step, two sites.")
  ours: dict[str, dict[str, float]] = {}
  shown: dict[str, dict[str, float]] = {}
  errors, inside = [], 0
  for key, method in METHODS.items():
    needed = [required_gbps(ASSUMED, method, p / 100) for p in PERCENT]
    ours[key] = {str(p): round(n, 3) for p, n in zip(PERCENT, needed)}
    shown[method.name] = ours[key]
    if published := PUBLISHED.get(key):
      shown[f"  published, {key}"] = dict(zip(ours[key], published))
      errors += [max(n / p, p / n) - 1 for n, p in zip(needed, published)]
      inside += sum(rounded_up(n) == nearest(p) for n, p in zip(needed, published))
  common.show(shown, digits=1)
  print("  Decoupled never waits: its row is for that share of the planned syncs (H = 24).")
  count = sum(map(len, PUBLISHED.values()))
  print(f"  largest ratio error {max(errors):.3f}; {inside} of {count} round up to the published")
  return ours, max(errors), inside


def grid_notes() -> None:
  """Prints what the published figures imply about their grid and their assumptions."""
  figures = [figure for row in PUBLISHED.values() for figure in row]
  step = GRID[1] / GRID[0]
  off = {f for f in figures if abs(nearest(f) - f) > max(0.051, 0.0015 * f)}
  print(f"\nThe published figures repeat: {len(set(figures))} values in {len(figures)} cells.")
  print(
    f"  All but {', '.join(f'{f:g}' for f in sorted(off)) or 'none'} are rounded points of 50 from"
    f" 0.1 to 1000, a factor {step:.4f} apart:\n  presumably each is the first point that was"
    f" enough, and what is needed lies up to {1 - 1 / step:.0%} below it."
  )
  best: dict[int, list[float]] = {}
  for thousandths in range(700, 1301, 5):
    scaled = dataclasses.replace(ASSUMED, parameters=ASSUMED.parameters * thousandths / 1000)
    hits = sum(
      rounded_up(required_gbps(scaled, METHODS[key], p / 100)) == nearest(figure)
      for key, row in PUBLISHED.items()
      for p, figure in zip(PERCENT, row)
    )
    best.setdefault(hits, []).append(thousandths / 1000)
  most = max(best)
  print(
    f"  With {min(best[most]):.3f} to {max(best[most]):.3f} of our bytes {most} cells would be the"
    " same: theirs are fewer than 2 bytes x 10e9, or their step is longer."
  )


def sites_tables() -> dict[str, float]:
  """Prints 8 data centres; returns the reductions."""
  eight = dataclasses.replace(ASSUMED, sites=8, step_seconds=1.0)
  int4 = average_gbps(eight, decoupled("int4"))
  reductions = {}
  print("\nBetween 8 sites, how many times fewer Gbit/s than data-parallel for 90 %:")
  for dtype, bits in (("bf16", 16.0), ("f32", 32.0)):
    method = dataclasses.replace(DATA_PARALLEL, bits_per_value=bits)
    reductions[dtype] = round(required_gbps(eight, method, 0.9) / int4, 1)
    print(f"  Decoupled, int4, against gradients in {dtype:4} {reductions[dtype]:6.1f}")
  published, second = (pair[0] / pair[1] for pair in (EIGHT_SITES, ONE_SECOND))
  print(f"  published: 198 / 0.84 = {published:.1f}; model, step and dtypes are not given")
  print(f"  104 / 1.7 = {second:.1f} (1 s a step) are the two figures of the row above at 50 %.")
  return {**reductions, "published": round(published, 1)}


def case_12b() -> dict[str, Any]:
  """Prints the 12B model over four regions on 2 to 5 Gbit/s: the shortest step that keeps H = 24,
  and how many times as long that step of data-parallel (bf16) takes."""
  shown: dict[str, dict[str, float]] = {}
  for name in ("bf16", "int4"):
    gbps = average_gbps(Workload(12e9, 1.0, 4), decoupled(name))  # with steps of one second
    longer = 1 / utilisation(Workload(12e9, gbps / 2, 4), DATA_PARALLEL, 2)  # at any Gbit/s
    shown[name] = {"on 2 Gbit/s": gbps / 2, "on 5 Gbit/s": gbps / 5, "data-parallel": longer}
  print(
    "\n12B over four regions: s a step that fill the links, and how many times as long it takes"
  )
  common.show(shown, digits=1)
  print(f"  published: more than {SPEEDUP_12B} times as long")
  return {
    "full_at_step_seconds": {name: round(row["on 2 Gbit/s"], 2) for name, row in shown.items()},
    "speedup_link_full": {name: round(row["data-parallel"], 1) for name, row in shown.items()},
    "published_speedup": SPEEDUP_12B,
  }


def draw(path: Path) -> None:
  """Utilisation against Gbit/s; published figures are the points."""
  points = [10 ** (-1 + 4 * i / 400) for i in range(401)]
  shown = {
    "data_parallel": ("data-parallel", PALETTE[7], (150, 40)),
    "diloco": ("DiLoCo", PALETTE[1], (5.2, 62)),
    "streaming_overlap": ("Streaming DiLoCo,\noverlap", PALETTE[5], (1.75, 36)),
    "streaming_overlap_fp4": ("Streaming\nDiLoCo,\noverlap,\nFP4", PALETTE[2], (0.105, 45)),
  }
  with common.picture(path, 5.2) as (_, (axes,)):
    for key, (label, colour, place) in shown.items():
      size = 10 if key == "diloco" else 7  # larger, since one of its points lies under another
      y = [100 * utilisation(ASSUMED, METHODS[key], x) for x in points]
      axes.plot(points, y, color=colour, lw=2)
      axes.plot(PUBLISHED[key], PERCENT, "o", color=colour, mec="white", ms=size, zorder=5)
      axes.annotate(label, place, color=colour, weight="bold")
    keeps = average_gbps(ASSUMED, METHODS["decoupled_int4"])
    axes.plot([GRID[0], keeps], [100, 100], color=GLOBAL_MODEL, lw=2.5, ls=(0, (1, 1.5)))
    axes.plot([keeps, GRID[-1]], [100, 100], color=GLOBAL_MODEL, lw=2.5)
    axes.plot([keeps], [100], "|", color=GLOBAL_MODEL, ms=14, mew=2.5)
    text = f"Decoupled: never waits; keeps H = 24 from {keeps:.1f} Gbit/s on (int4)"
    axes.annotate(text, (keeps, 104), color=GLOBAL_MODEL, weight="bold", ha="center")
    axes.plot([], [], "o", color=MUTED, label="published (rounded up to a grid)")
    axes.plot([], [], color=MUTED, lw=2, label="ours, from bytes and overlap")
    axes.legend(loc="lower right")
    axes.set(xscale="log", xlim=(GRID[0], GRID[-1]), ylim=(0, 112))
    axes.set_yticks(range(0, 101, 20), [f"{y} %" for y in range(0, 101, 20)])
    axes.set_xticks([0.1, 1, 10, 100, 1000], ["0.1", "1", "10", "100", "1000"])
    axes.set_xlabel("Gbit/s between two sites (10B parameters, 0.8 s a step)")
    axes.set_ylabel("time spent computing")
    axes.set_title("Decoupled computes at any bandwidth; data-parallel needs hundreds of Gbit/s")


def main() -> None:
  args = common.options(__doc__, picture=common.OUTPUT)
  ours, error, inside = row_table()
  grid_notes()
  reductions = sites_tables()
  case = case_12b()
  if args.picture:
    draw(args.picture)
  result = {
    "required_gbps": ours,
    "published_gbps": {k: dict(zip(map(str, PERCENT), v)) for k, v in PUBLISHED.items()},
    "max_ratio_error": round(error, 4),
    "cells_inside": inside,
    "case_12b": case,
    "reduction_vs_data_parallel": reductions,
  }
  print(json.dumps(result))


if __name__ == "__main__":
  common.run_script(main)
