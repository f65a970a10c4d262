"""The model's quality under faults: the same run with and without them, at equal merged tokens.

configs/quickstart.py: one small model, four islands and two shards in threads. One run suffers
random faults of all kinds (kills, stalls, slowness, all kinds of network faults, full disks,
poisoned updates), placed by step, so that they strike the same share of the work on every
machine; a fault's role is down or disturbed for up to three seconds. A seed determines the initial
model, the order of the data and the fault plan. Both runs of a seed end when the same number of
tokens is merged; faults cost time, which is printed too.

  python scripts/reproduce_quality.py [--seeds=3] [--tokens=1228800] [--faults=40]
    [--kinds=kill,stall,...] [--workdir=runs/quality] [--picture=docs/quality.png]
    [--virtual [--missed=halve]] [--quick]

With --virtual the same plans strike the same model in virtual time (virtual_training.py), at equal
trained tokens, merged or not: a run is a pure function of its config. --missed is what becomes of
work that missed its round: "rebase" keeps it, "halve" half of its length, "overwrite" nothing.
Finished runs are not made again, so the script can be stopped and started.

Last line: {"loss": {"undisturbed": [held-out loss, by seed], "faults": [...]}, "mean": {...},
"difference": of the means, relative to undisturbed, "of_one_seed": [the same, seed by seed],
"struck": faults in all, "kinds": {...}, "seconds": {...}, "published": ..., "tokens": n}; with
--virtual only the first four.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import common
from virtual_training import STEP_SECONDS, Losses, Text, Valued

from ddiloco import environment
from ddiloco.chaos import KINDS, random_faults
from ddiloco.checks import require
from ddiloco.config import Config
from ddiloco.observe.eventlog import EventLog
from ddiloco.observe.style import GLOBAL_MODEL, PALETTE
from ddiloco.observe.tracks import Aftermath
from ddiloco.protocol import learner
from ddiloco.protocol.events import Evaluation, Step

ROWS = ("undisturbed", "faults")
LEARNERS, SHARDS = 4, 2  # of the configs
STEP_TOKENS = LEARNERS * 4 * 128  # of configs/quickstart.py
QUICK_STEP_TOKENS = LEARNERS * 4 * 64  # of configs/tutorial.py
PACE_SECONDS = 0.2  # least time of a step: four islands' steps take less on two cores
OUTLIVED = 50  # quarantines and crashes that a role may have had
# Mean benchmark scores (text, vision), 5B on 1T tokens, arXiv 2604.21428: data-parallel without
# failures, and Decoupled with 8 learners at 1.2 million failing chips.
PUBLISHED = {"undisturbed": (70.1, 58.7), "faults": (69.8, 58.6)}


def make_config(
  row: str, seed: int, options: argparse.Namespace, more: Mapping[str, Any]
) -> Config:
  name = "tutorial" if options.quick else "quickstart"
  fields: dict[str, Any] = {
    **more,
    "seed": seed,
    "sync.snapshot_steps": 50,
    "run.total_tokens": options.tokens,
    "run.evaluations": 12,
    "run.sample_tokens": 0,
    "run.max_restarts": OUTLIVED,
    "run.compare_alone": False,
    "chaos.faults": (),
  }
  if row == "faults":
    steps = options.tokens // (QUICK_STEP_TOKENS if options.quick else STEP_TOKENS)
    plan = random_faults(seed, options.faults, 0.9 * steps, LEARNERS, SHARDS, options.kinds)
    by_step = [
      dataclasses.replace(fault, at_step=1 + int(fault.at_seconds), at_seconds=-1.0)
      for fault in plan
    ]
    fields["chaos.faults"] = tuple(dataclasses.asdict(fault) for fault in by_step)
  return common.config_of(name, fields)


def in_virtual_time(options: argparse.Namespace) -> dict[str, list[float]]:
  """The final losses of both rows, by seed."""
  environment.prepare(1, cpu_only=True)
  kept, missed = Losses(options.workdir / "virtual.jsonl"), options.missed
  slowness = (PACE_SECONDS / STEP_SECONDS,) * LEARNERS
  fields = {"islands.devices": 1, "network.drain_seconds": 1e3}
  final: dict[str, list[float]] = {row: [] for row in ROWS}

  def loss(config: Config) -> float:
    with mock.patch.object(learner, "MISSED", missed):
      return Valued(Text(config), config.seed, config.chaos.faults, slowness).train()

  for seed in range(options.seeds):
    for row in ROWS:
      config = make_config(row, seed, options, fields)
      final[row].append(kept.of(row, missed, config, loss))
  return final


def losses(events: EventLog) -> list[tuple[int, float]]:
  """(merged tokens, held-out loss of the global model) of every evaluation."""
  return [(e.merged_tokens, e.loss) for e in events.of(Evaluation)]


def span_seconds(events: EventLog) -> float:
  """Seconds from the first step to the end."""
  steps = [e.time for e in events.of(Step)]
  return max(steps) - min(steps)


def draw(logs: dict[str, list[EventLog]], path: Path, difference: float) -> None:
  """Held-out loss over merged tokens: a line for every run."""
  from matplotlib.ticker import EngFormatter

  with common.picture(path, 4.8) as (_, (axes,)):
    names = ("undisturbed", "under faults")
    for row, name, colour in zip(ROWS, names, (GLOBAL_MODEL, PALETTE[1])):
      seeds = "one seed" if len(logs[row]) == 1 else f"{len(logs[row])} seeds"
      for i, events in enumerate(logs[row]):
        xs, ys = zip(*losses(events)[1:])
        label = None if i else f"{name}, {seeds}"
        axes.plot(xs, ys, color=colour, lw=1.6, alpha=0.75, label=label)
    axes.set_title(f"With faults and without: final loss {difference:+.1%} at equal merged tokens")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlabel("tokens merged into the global model")
    axes.set_ylabel("held-out loss, nats per token")
    axes.legend()


def compared(final: dict[str, list[float]]) -> dict[str, Any]:
  """The final losses of both rows, by seed, beside each other."""
  mean = {row: statistics.mean(final[row]) for row in ROWS}
  return {
    "loss": {row: [round(loss, 4) for loss in final[row]] for row in ROWS},
    "mean": {row: round(mean[row], 4) for row in ROWS},
    "difference": round(mean["faults"] / mean["undisturbed"] - 1, 5),
    "of_one_seed": [round(b / a - 1, 4) for a, b in zip(final["undisturbed"], final["faults"])],
  }


def summarise(logs: dict[str, list[EventLog]], tokens: int) -> dict[str, Any]:
  struck = [each for events in logs["faults"] for each in Aftermath().read(events).recoveries]
  return {
    **compared({row: [losses(events)[-1][1] for events in logs[row]] for row in ROWS}),
    "struck": len(struck),
    "kinds": dict(collections.Counter(each.action for each in struck)),
    "seconds": {row: [round(span_seconds(events), 1) for events in logs[row]] for row in ROWS},
    "published": PUBLISHED,
    "tokens": tokens,
  }


def main() -> None:
  options = common.options(
    __doc__,
    {"seeds": 1, "tokens": 40 * QUICK_STEP_TOKENS, "faults": 6},
    seeds=3,
    tokens=600 * STEP_TOKENS,
    faults=(40, "in each run under faults"),
    kinds={"type": common.names_of(KINDS), "default": ",".join(KINDS)},
    workdir=common.ROOT / "runs" / "quality",
    picture=common.OUTPUT,
    virtual=False,
    missed={"choices": ["halve", "rebase", "overwrite"], "default": learner.MISSED},
  )
  kinds = options.kinds
  real, fix = not (options.picture and options.virtual), "leave out --virtual"
  require(real, "--picture", str(options.picture), "shows runs in real time", fix)
  usual = options.missed == learner.MISSED or options.virtual
  require(usual, "--missed", options.missed, "is for virtual time", "add --virtual")
  if options.virtual:
    print(json.dumps(compared(in_virtual_time(options))))
    return
  fields = {"islands.min_step_seconds": 0.0 if options.quick else PACE_SECONDS}
  names = dict(zip(ROWS, ROWS))
  if len(kinds) < len(KINDS):
    names["faults"] = "faults-" + "-".join(kinds)
  logs: dict[str, list[EventLog]] = {row: [] for row in ROWS}
  for seed in range(options.seeds):
    for row in ROWS:
      config = make_config(row, seed, options, fields)
      events = common.train(config, options.workdir.absolute() / f"{names[row]}-{seed}")
      logs[row].append(events)
      print(
        f"seed {seed}, {row:<12} loss {losses(events)[-1][1]:.4f}, {span_seconds(events):.0f} s,"
        f" {len(Aftermath().read(events).recoveries)} faults",
        flush=True,
      )
  result = summarise(logs, options.tokens)
  if options.picture:
    draw(logs, options.picture, result["difference"])
  print(json.dumps(result))


if __name__ == "__main__":
  common.run_script(main)
