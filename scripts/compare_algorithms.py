"""The algorithms on one small model: a row each, held-out loss of the global model.

Every row is a config with a few fields changed, trained by the command line in its own workdir;
finished rows are not run again, so the script can be stopped and started.

  python scripts/compare_algorithms.py [--tokens=1228800] [--workdir=runs/compare] [--only=NAME;...]

Two losses a row. `loss_at_equal_steps`: when the islands have made as many steps as the token
budget plans (tokens / (islands x tokens per step)), interpolated between evaluations; what an
island's time buys. `loss_at_equal_merged_tokens`: at the end of the run, when the whole budget is
merged; runs that discard work (overwrite, mix) have made more steps by then.

Last line: {"loss_at_equal_steps": {row: x}, "loss_at_equal_merged_tokens": {row: x}, "tokens": n}.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import launch
import numpy as np

from ddiloco.observe.eventlog import read_events

SMALL = {
  "model.num_layers": 2,
  "sync.num_fragments": 6,
  "sync.sync_period": 12,
  "run.evaluations": 20,
  "run.sample_tokens": 0,
}
BATCH = {"islands.batch_size": 4}
PLAIN_OUTER = {"outer.learning_rate": 1.0, "outer.momentum": 0.0}


def outer(rate: float, momentum: float) -> dict:
  """Outer Nesterov SGD."""
  return {"outer.learning_rate": rate, "outer.momentum": momentum}


ROWS: dict[str, tuple[str, dict]] = {
  "data-parallel": ("data_parallel", {"islands.batch_size": 16}),
  "diloco": ("diloco", {**BATCH, "sync.num_fragments": 1}),
  "streaming": ("streaming_diloco", {**BATCH, "sync.num_fragments": 2}),
  "decoupled as published": ("decoupled", BATCH),
  "decoupled, outer lr 1": ("decoupled", {**BATCH, **PLAIN_OUTER}),
  "default": ("default", BATCH),
  "default, average": ("default", {**BATCH, "sync.merge": "average"}),
  "default, outer 0.4/0.9": ("default", {**BATCH, **outer(0.4, 0.9)}),
  "default, outer 0.7/0.9": ("default", {**BATCH, **outer(0.7, 0.9)}),
  "default, outer 0.7/0.5": ("default", {**BATCH, **outer(0.7, 0.5)}),
  "default, int4 both ways": (
    "default",
    {**BATCH, "sync.push_codec": "int4", "sync.publish_codec": "int4"},
  ),
  "default, grace 0.5": ("default", {**BATCH, "sync.grace_safety": 0.5}),
  "default, grace off": ("default", {**BATCH, "sync.grace_safety": 0.0}),
  "default, inner lr 4e-3": ("default", {**BATCH, "inner.learning_rate": 4e-3}),
  "default, inner lr 16e-3": ("default", {**BATCH, "inner.learning_rate": 16e-3}),
}


def train(name: str, tokens: int, workdir: Path) -> tuple[dict, Path]:
  """The summary and workdir of one row, from an earlier run of it or a new one."""
  base, fields = ROWS[name]
  folder = workdir / "".join(c if c.isalnum() else "-" for c in name)
  launch.train(launch.config_of(base, {**SMALL, **fields, "run.total_tokens": tokens}), folder)
  return launch.summary(folder), folder


def loss_at(folder: Path, step: int) -> float | None:
  """Held-out loss of the global model at a global step; None if never evaluated."""
  points = [(e.global_step, e.loss) for e in read_events(folder) if e.kind == "evaluation"]
  return float(np.interp(step, *zip(*points))) if points else None


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--tokens", type=int, default=4 * 600 * 4 * 128)
  parser.add_argument("--workdir", type=Path, default=launch.ROOT / "runs" / "compare")
  parser.add_argument("--only", default="", help="names of rows, separated by ';'")
  args = parser.parse_args()
  steps = args.tokens // (4 * 4 * 128)
  result: dict = {"loss_at_equal_steps": {}, "loss_at_equal_merged_tokens": {}}
  for name in [n for n in args.only.split(";") if n] or ROWS:
    summary, folder = train(name, args.tokens, args.workdir.absolute())
    end = round(summary["loss_merged"], 4)
    equal = loss_at(folder, steps)
    result["loss_at_equal_merged_tokens"][name] = end
    result["loss_at_equal_steps"][name] = end if equal is None else round(equal, 4)
    made = sum(summary["learner_steps"].values()) / len(summary["learner_steps"])
    shares = [share for share in summary["participation"].values() if share is not None]
    taken = f"{sum(shares) / len(shares):4.0%} participation" if shares else ""
    print(
      f"{name:<36} {result['loss_at_equal_steps'][name]:.3f} at step {steps},"
      f" {end:.3f} at the end (step {made:.0f})  {taken}",
      flush=True,
    )
  print(json.dumps({**result, "tokens": args.tokens}))


if __name__ == "__main__":
  main()
