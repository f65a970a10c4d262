"""Islands of two speeds: what waiting for all of them costs, and what grace gives back.

    python scripts/reproduce_heterogeneous.py [--steps=240] [--seed=0]
                                              [--picture=docs/heterogeneous.png] [--quick]

The protocol's own decisions in virtual time (`ddiloco.simulation`): 4 fast and 4 slow islands, 18 %
apart, every step up to 10 % longer by chance, P = H = 24, tau = 2. Assumed: a fast step takes 1 s;
links of 5 Gbit/s and 10 ms, shards that merge 100 GB/s, hosts that process 100 GB/s, a model of
2 billion parameters in bf16. With 4 GB/s (one core) a sync leaves grace little slack: participation
is 30 % with such shards, 17 % with such hosts (`merge_gbytes`, `host_gbytes` below).

K = 8 is lock-step (`sync.blocking`): learners wait. Otherwise they never wait, and a round commits
with the pushes that are there. The paper publishes goodput but not its definition, so two readings
are shown: the share of chip time not spent waiting, and the share of chip time in steps that
reached the model. Versions overwrite, as in the paper; in the last row islands keep their steps
(`rebase`), as by default.

Last line: {"goodput": {...}, "merged": {...}, "participation": {...}, "published": {...},
"errors": {...}, ...}, in %. Takes a minute, --quick a few seconds.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import common

from ddiloco.config import Config
from ddiloco.engines import virtual
from ddiloco.observe.style import FAINT, PALETTE
from ddiloco.simulation import planner
from ddiloco.simulation.run import Speeds

# Goodput in %, arXiv 2604.21428: 4 islands of TPU v6e and 4 of v5p, 18 % apart, 10 % variance.
PUBLISHED = {"K = 8": 84.0, "K = 1": 100.0, "K = 1 + grace": 100.0}
ROWS: dict[str, dict[str, Any]] = {
  "K = 8": {"sync.min_quorum": 8, "sync.blocking": True, "sync.grace_safety": 0.0},
  "K = 1": {"sync.grace_safety": 0.0},
  "K = 1 + grace": {},
  "rebase": {"sync.apply": "rebase"},  # K = 1 + grace, as by default
}
TICKS = ["K = 8\n(lock-step)", "K = 1", "K = 1\n+ grace", "K = 1 + grace,\nrebase (default)"]
FAST, SLOW, APART, VARIANCE = 4, 4, 1.18, 0.10
PARAMETERS, PERIOD, TAU = 2_000_000_000, 24, 2
WAITING = ("blocked", "stalled", "down", "rejoin")


def config_of(islands: int, steps: int, fields: dict[str, Any]) -> Config:
  """The config of a virtual run of so many steps, which ends by its tokens."""
  return common.config_of(
    "default",
    {
      "islands.num_learners": islands, "islands.batch_size": 1, "data.sequence_length": 1024,
      "sync.num_shards": 4, "sync.num_fragments": PERIOD, "sync.sync_period": PERIOD,
      "sync.overlap_steps": TAU, "sync.push_codec": "bf16", "sync.publish_codec": "bf16",
      "sync.snapshot_steps": 0, "run.total_tokens": steps * islands * 1024, **fields,
    },
  )  # fmt: skip


def speeds_of(fragments: int, seed: int) -> Speeds:
  """The assumed links, shards and hosts, and the assumed model."""
  return Speeds(
    planner.equal_sizes(PARAMETERS, fragments),
    jitter=VARIANCE,
    gbps=(5.0,),
    latency_seconds=(0.01,),
    shard_gbps=100.0,
    merge_gbytes=100.0,
    host_gbytes=100.0,
    seed=seed,
  )


def play(row: str, steps: int, seed: int) -> dict[str, Any]:
  """One run's numbers, all in %."""
  slow = {str(m): {"min_step_seconds": APART} for m in range(FAST, FAST + SLOW)}
  fields = {"islands.overrides": slow, "sync.apply": "overwrite", **ROWS[row]}
  # Overwriting discards the steps that a round lacks, so tokens merge slowly: stop at a time.
  config = config_of(FAST + SLOW, 100 * steps, fields)
  found = virtual.simulate(config, speeds_of(PERIOD, seed), most_seconds=steps * APART)
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
    "merged": "work that reached the model",
    "participation": "islands in a round, on average",
  }
  with common.picture(path, 4.6) as (_, (axes,)):
    axes.set_title(
      "Lock-step waits, K = 1 takes the work of one; grace never waits, and with rebase loses none"
      f"\n({FAST} fast and {SLOW} slow islands, 18 % apart)"
    )
    for i, (name, label) in enumerate(names.items()):
      places = [j + 0.26 * (i - 1) for j in range(len(rows))]
      values = [row[name] for row in rows.values()]
      colour = (PALETTE[0], PALETTE[2], FAINT)[i]
      axes.bar(places, values, 0.24, color=colour, label=label)
      for place, value in zip(places, values):
        inside = name == "goodput"  # the circle of the published figure is at the bar's top
        high, ink = (2, "white") if inside else (value, "black")
        text = axes.annotate(f"{value:.0f}", (place, high), ha="center", va="bottom", fontsize=9.5)
        text.set_color(ink)
    where = [j - 0.26 for j in range(len(PUBLISHED))]
    axes.plot(where, list(PUBLISHED.values()), "o", mfc="white", mec="#111111", ms=8, clip_on=False)
    axes.plot([], [], "o", mfc="white", mec="#111111", ms=8, label="published goodput")
    axes.set_xticks(range(len(rows)), TICKS)
    axes.set_ylabel("%")
    axes.set_ylim(0, 112)
    axes.grid(axis="x", visible=False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)


def main() -> None:
  steps, seed = (240, "of a slow island"), (0, "of the times of steps")
  args = common.options(__doc__, {"steps": 72}, steps=steps, seed=seed, picture=common.OUTPUT)
  began = time.monotonic()
  rows = {row: play(row, args.steps, args.seed) for row in ROWS}
  shown = {row: {"published": PUBLISHED.get(row, math.nan)} for row in rows}
  common.show({row: {**shown[row], **found} for row, found in rows.items()})
  if args.picture:
    draw(rows, args.picture)
  result = {name: {r: round(f[name], 2) for r, f in rows.items()} for name in rows["K = 8"]}
  errors = {r: round(rows[r]["goodput"] - published, 2) for r, published in PUBLISHED.items()}
  wall = round(time.monotonic() - began, 1)
  print(json.dumps({**result, "published": PUBLISHED, "errors": errors, "wall_seconds": wall}))


if __name__ == "__main__":
  common.run_script(main)
