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
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SMALL = {
  "model.num_layers": 2,
  "islands.batch_size": 4,
  "sync.num_fragments": 6,
  "sync.sync_period": 12,
  "sync.snapshot_steps": 50,
  "run.evaluations": 0,
  "run.sample_tokens": 0,
}
POLICIES = ("own", "peer", "fresh")
KILL_EVERY = 60  # steps of the run's clock
DOWN_SECONDS = 0.5


def faults(steps: int) -> list[dict]:
  """Kills of islands 1, 2, 3 in turn, from step 100 on and not in the last tenth of the run."""
  times = range(100, steps * 9 // 10, KILL_EVERY)
  return [
    {"action": "kill", "role": f"learner/{1 + i % 3}", "at_step": at, "seconds": DOWN_SECONDS}
    for i, at in enumerate(times)
  ]


def train(row: str, seed: int, tokens: int, workdir: Path) -> tuple[dict, list[dict]]:
  """(summary, events of learners that came back) of one run, an earlier one or a new one."""
  folder = workdir / f"{row}-{seed}"
  if not (folder / "report" / "summary.json").exists():
    print(f"--- {row}, seed {seed}", flush=True)
    steps = tokens // (4 * 4 * 128)
    experiment = workdir / f"{row}-{seed}.py"
    experiment.parent.mkdir(parents=True, exist_ok=True)
    planned = [] if row == "undisturbed" else faults(steps)
    experiment.write_text(
      "from ddiloco.config import default\n\n\ndef get_config():\n  config = default()\n"
      f"  config.chaos.faults = {tuple(planned)!r}\n  return config\n"
    )
    fields = {**SMALL, "run.total_tokens": tokens, "seed": seed}
    if row != "undisturbed":
      fields["checkpoint.rejoin"] = row
    command = [sys.executable, "-m", "ddiloco", "train", f"--config={experiment}", "--cpu"]
    command += [f"--workdir={folder}", "--overwrite"]
    command += [f"--config.{field}={value}" for field, value in fields.items()]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
      sys.exit(f"{row} failed with status {done.returncode}:\n{done.stdout}\n{done.stderr}")
  lines = "".join(path.read_text() for path in (folder / "events").glob("learner-*.jsonl"))
  events = [json.loads(line) for line in lines.splitlines()]
  back = [e for e in events if e["kind"] == "joined" and e["incarnation"] > 0]
  return json.loads((folder / "report" / "summary.json").read_text()), back


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--seeds", type=int, default=3)
  parser.add_argument("--tokens", type=int, default=4 * 600 * 4 * 128)
  parser.add_argument("--workdir", type=Path, default=ROOT / "runs" / "rejoin")
  parser.add_argument("--quick", action="store_true", help="a smoke test: numbers mean nothing")
  args = parser.parse_args()
  if args.quick:
    args.seeds, args.tokens = 1, 4 * 180 * 4 * 128
  result: dict[str, dict] = {"loss": {}, "spread": {}, "rejoins": {}, "rejoin_seconds": {}}
  for row in ("undisturbed", *POLICIES):
    losses, seconds = [], []
    for seed in range(args.seeds):
      summary, back = train(row, seed, args.tokens, args.workdir)
      losses.append(summary["loss_merged"])
      seconds += [e["seconds"] for e in back]
    result["loss"][row] = round(statistics.mean(losses), 4)
    result["spread"][row] = round(max(losses) - min(losses), 4)
    result["rejoins"][row] = len(seconds)
    result["rejoin_seconds"][row] = round(statistics.median(seconds), 3) if seconds else None
    each = ", ".join(f"{loss:.4f}" for loss in losses)
    print(f"{row:<12} {result['loss'][row]:.4f}  ({each}); {len(seconds)} rejoins", flush=True)
  print(json.dumps({**result, "tokens": args.tokens}))


if __name__ == "__main__":
  main()
