"""How a learner should come back: with its own optimizer state, a peer's, or a fresh one.

One small model, four islands in threads; islands 1, 2 and 3 are killed in turn, again and again. A
row is a policy (`checkpoint.rejoin`), trained by the command line for every seed; finished runs are
not made again, so the script can be stopped and started. "undisturbed" has no kills.

  python scripts/compare_rejoin.py [--seeds=3] [--tokens=1228800] [--workdir=runs/rejoin] [--quick]

Last line: {"loss": {row: mean held-out loss at equal merged tokens}, "spread": {row: max - min over
seeds}, "rejoins": {row: n}, "rejoin_seconds": {row: median from start to joined}, "tokens": n}.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import launch

from ddiloco.observe.eventlog import Event

SMALL = {
  "model.num_layers": 2,
  "islands.batch_size": 4,
  "sync.num_fragments": 6,
  "sync.sync_period": 12,
  "sync.snapshot_steps": 50,
  "run.evaluations": 1,  # the end's is what is compared
  "run.sample_tokens": 0,
}
POLICIES = ("own", "peer", "fresh")
KILL_EVERY = 60  # global steps
DOWN_SECONDS = 0.5


def faults(steps: int) -> tuple[dict, ...]:
  """Kills of islands 1, 2, 3 in turn, from step 100 on and not in the last tenth of the run."""
  times = range(100, steps * 9 // 10, KILL_EVERY)
  return tuple(
    {"action": "kill", "role": f"learner-{1 + i % 3}", "at_step": at, "seconds": DOWN_SECONDS}
    for i, at in enumerate(times)
  )


def train(row: str, seed: int, tokens: int, workdir: Path) -> tuple[dict, list[Event]]:
  """(summary, events of learners that came back) of one run, an earlier one or a new one."""
  fields = {**SMALL, "run.total_tokens": tokens, "seed": seed}
  if row != "undisturbed":
    fields |= {"checkpoint.rejoin": row, "chaos.faults": faults(tokens // (4 * 4 * 128))}
  folder = workdir / f"{row}-{seed}"
  events = launch.train(launch.config_of("default", fields), folder)
  back = [e for e in events if e.kind == "joined" and e.incarnation > 0]
  return launch.summary(folder), [e for e in back if e.role.startswith("learner")]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--seeds", type=int, default=3)
  parser.add_argument("--tokens", type=int, default=4 * 600 * 4 * 128)
  parser.add_argument("--workdir", type=Path, default=launch.ROOT / "runs" / "rejoin")
  parser.add_argument("--quick", action="store_true", help="a smoke test: numbers mean nothing")
  args = parser.parse_args()
  if args.quick:
    args.seeds, args.tokens = 1, 4 * 180 * 4 * 128
  result: dict[str, dict] = {"loss": {}, "spread": {}, "rejoins": {}, "rejoin_seconds": {}}
  for row in ("undisturbed", *POLICIES):
    losses, seconds = [], []
    for seed in range(args.seeds):
      summary, back = train(row, seed, args.tokens, args.workdir.absolute())
      losses.append(summary["loss_merged"])
      seconds += [e.seconds for e in back]
    result["loss"][row] = round(statistics.mean(losses), 4)
    result["spread"][row] = round(max(losses) - min(losses), 4)
    result["rejoins"][row] = len(seconds)
    result["rejoin_seconds"][row] = round(statistics.median(seconds), 3) if seconds else None
    each = ", ".join(f"{loss:.4f}" for loss in losses)
    print(f"{row:<12} {result['loss'][row]:.4f}  ({each}); {len(seconds)} rejoins", flush=True)
  print(json.dumps({**result, "tokens": args.tokens}))


if __name__ == "__main__":
  main()
