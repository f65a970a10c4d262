"""Islands of two speeds: what waiting for all of them costs, and what grace gives back.

    python scripts/reproduce_heterogeneous.py [--steps=240] [--seed=0]
                                              [--picture=docs/heterogeneous.png] [--quick]

The protocol's own decisions in virtual time (`ddiloco.simulation`): 4 fast and 4 slow islands, 18 %
apart, every step up to 10 % longer by chance, P = H = 24, tau = 2. Assumed: a fast step takes 1 s;
links of 5 Gbit/s and 10 ms, shards that merge 100 GB/s, hosts that process 100 GB/s, a model of
2 billion parameters in bf16. With 4 GB/s (one core) a sync leaves grace little slack: participation
was 74 % with such shards, 27 % with such hosts.

K = 8 is lock-step (`sync.blocking`): learners wait. Otherwise they never wait, and a round commits
with the pushes that are there. The paper publishes goodput but not its definition, so two readings
are shown: the share of chip time not spent waiting, and the share of chip time in steps that
reached the model, where versions overwrite, as in the paper.

Last line: {"goodput": {...}, "merged": {...}, "participation": {...}, "published": {...},
"errors": {...}, ...}, in %. Takes a minute, --quick a few seconds.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import common

from ddiloco import config as config_lib
from ddiloco.engines import virtual
from ddiloco.observe.style import FAINT, PALETTE
from ddiloco.simulation import planner
from ddiloco.simulation.run import Speeds

# Goodput in %, arXiv 2604.21428: 4 islands of TPU v6e and 4 of v5p, 18 % apart, 10 % variance.
PUBLISHED = {"K = 8": 84.0, "K = 1": 100.0, "K = 1 + grace": 100.0}
ROWS: dict[str, dict[str, Any]] = {
  "K = 8": {"min_quorum": 8, "blocking": True, "grace_safety": 0.0},
  "K = 1": {"min_quorum": 1, "grace_safety": 0.0},
  "K = 1 + grace": {"min_quorum": 1, "grace_safety": 0.9},
}
FAST, SLOW, APART, VARIANCE = 4, 4, 1.18, 0.10
PARAMETERS, PERIOD, TAU = 2_000_000_000, 24, 2
WAITING = ("blocked", "stalled", "down", "rejoin")


def make_config(row: str, steps: int) -> config_lib.Config:
  """One row's run."""
  c = config_lib.default()
  c.islands.num_learners, c.islands.batch_size, c.data.sequence_length = FAST + SLOW, 1, 1024
  c.islands.overrides.update(
    {str(m): {"min_step_seconds": APART} for m in range(FAST, FAST + SLOW)}
  )
  c.sync.update(num_shards=4, num_fragments=PERIOD, sync_period=PERIOD, overlap_steps=TAU)
  c.sync.update(apply="overwrite", push_codec="bf16", publish_codec="bf16", **ROWS[row])
  c.sync.snapshot_steps = 0
  c.run.total_tokens = steps * (FAST + SLOW) * 1024
  return config_lib.from_dict(c)


def play(row: str, steps: int, seed: int) -> dict[str, Any]:
  """One run's numbers, all in %."""
  setting = Speeds(
    sizes=planner.equal_sizes(PARAMETERS, PERIOD),
    step_seconds=1.0,
    jitter=VARIANCE,
    gbps=(5.0,),
    latency_seconds=(0.01,),
    shard_gbps=100.0,
    merge_gbytes=100.0,
    host_gbytes=100.0,
    seed=seed,
  )
  # Overwriting discards the steps that a round lacks, so tokens merge slowly: stop at a time.
  found = virtual.simulate(make_config(row, 100 * steps), setting, most_seconds=steps * APART)
  began = 1.0 - found["causes"].get("start_up", 0.0)
  waited = sum(found["causes"].get(cause, 0.0) for cause in WAITING)
  return {
    "goodput": 100 * (1 - waited / began),
    "merged": 100 * found["goodput"] / (began - found["causes"].get("pending", 0.0)),
    "participation": 100 * found["participation"],
    "lowest": 100 * found["lowest_participation"],
    "seconds_per_sync": found["seconds_per_sync"]["median"],
    "steps": found["steps"],
  }


def draw(rows: dict[str, dict[str, Any]], path: Path) -> None:
  """Bars: time not spent waiting, work in the model, participation; circles: published."""
  names = {
    "goodput": "chip time not spent waiting",
    "merged": "work that reached the model (overwriting)",
    "participation": "islands in a round, on average",
  }
  with common.picture(path, 4.6) as (_, (axes,)):
    axes.set_title(
      "Lock-step waits, K = 1 takes the work of one; grace takes most of it and never waits"
      f"\n({FAST} fast and {SLOW} slow islands, 18 % apart)"
    )
    for i, (name, label) in enumerate(names.items()):
      places = [j + 0.26 * (i - 1) for j in range(len(rows))]
      values = [row[name] for row in rows.values()]
      colour = (PALETTE[0], PALETTE[2], FAINT)[i]
      axes.bar(places, values, 0.24, color=colour, label=label)
      for place, value in zip(places, values):
        axes.annotate(f"{value:.0f}", (place, value), ha="center", va="bottom", fontsize=9.5)
    where = [j - 0.26 for j in range(len(rows))]
    axes.plot(where, list(PUBLISHED.values()), "o", mfc="white", mec="#111111", ms=8, clip_on=False)
    axes.plot([], [], "o", mfc="white", mec="#111111", ms=8, label="published goodput")
    axes.set_xticks(range(len(rows)), ["K = 8 (lock-step)", "K = 1", "K = 1 + grace"])
    axes.set_ylabel("%")
    axes.set_ylim(0, 112)
    axes.grid(axis="x", visible=False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2)


def main() -> None:
  parser = common.parser(__doc__, "72 steps")
  parser.add_argument("--steps", type=int, default=240, help="of a slow island (240)")
  parser.add_argument("--seed", type=int, default=0, help="of the times of steps (0)")
  parser.add_argument("--picture", type=Path, help="draws it there")
  args = parser.parse_args()
  if args.steps < 2 * PERIOD:
    parser.error(f"--steps={args.steps}: must be at least {2 * PERIOD}, two periods")
  steps, began = 72 if args.quick else args.steps, time.monotonic()
  rows = {row: play(row, steps, args.seed) for row in ROWS}
  head = ("goodput", "published", "merged", "participation", "lowest", "a sync, s")
  print(f"{'':16}" + "".join(f"{name:>15}" for name in head))
  for row, found in rows.items():
    shown = [found["goodput"], PUBLISHED[row]]
    shown += [found[name] for name in ("merged", "participation", "lowest")]
    cells = "".join(f"{value:>15.1f}" for value in shown)
    print(f"{row:16}{cells}{found['seconds_per_sync']:>15.2f}")
  if args.picture:
    draw(rows, args.picture)
  result = {name: {r: round(f[name], 2) for r, f in rows.items()} for name in rows["K = 8"]}
  errors = {r: round(f["goodput"] - PUBLISHED[r], 2) for r, f in rows.items()}
  wall = round(time.monotonic() - began, 1)
  print(json.dumps({**result, "published": PUBLISHED, "errors": errors, "wall_seconds": wall}))


if __name__ == "__main__":
  common.run_script(main)
