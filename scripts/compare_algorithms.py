"""The algorithms at equal tokens on one small model: a row each, held-out loss of the global model.

Every row is a config with a few fields changed, trained by the command line in its own workdir;
finished rows are not run again, so the script can be stopped and started.

  python scripts/compare_algorithms.py [--tokens=1228800] [--workdir=runs/compare] [--only=NAME;...]

Last line: {"loss": {row: held-out loss}, "tokens": n, "seconds": {row: seconds of training}}.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SMALL = {
  "model.num_layers": 2,
  "sync.num_fragments": 6,
  "sync.sync_period": 12,
  "run.evaluations": 10,
  "run.sample_tokens": 0,
}
BATCH = {"islands.batch_size": 4}
NESTEROV = {"outer.learning_rate": 0.7, "outer.momentum": 0.9}
ROWS: dict[str, tuple[str, dict]] = {
  "data-parallel": ("data_parallel", {"islands.batch_size": 16}),
  "diloco": ("diloco", {**BATCH, "sync.num_fragments": 1}),
  "streaming": ("streaming_diloco", {**BATCH, "sync.num_fragments": 2}),
  "streaming, outer lr 1": (
    "streaming_diloco",
    {**BATCH, "sync.num_fragments": 2, "outer.learning_rate": 1.0, "outer.momentum": 0.0},
  ),
  "decoupled as published, 0.4/0.9": ("decoupled", BATCH),
  "decoupled as published, outer lr 1": (
    "decoupled",
    {**BATCH, "outer.learning_rate": 1.0, "outer.momentum": 0.0},
  ),
  "default (rebase, RDA, outer lr 1)": ("default", BATCH),
  "default, average": ("default", {**BATCH, "sync.merge": "average"}),
  "default, 0.7/0.9": ("default", {**BATCH, **NESTEROV}),
  "default, 0.4/0.9": (
    "default",
    {**BATCH, "outer.learning_rate": 0.4, "outer.momentum": 0.9},
  ),
  "default, 0.7/0.5": (
    "default",
    {**BATCH, "outer.learning_rate": 0.7, "outer.momentum": 0.5},
  ),
  "default, overwrite": ("default", {**BATCH, "sync.apply": "overwrite"}),
  "default, int4 both ways": (
    "default",
    {**BATCH, "sync.push_codec": "int4", "sync.publish_codec": "int4"},
  ),
  "default, grace off": ("default", {**BATCH, "sync.grace_safety": 0.0}),
  "default, grace 0.9": ("default", {**BATCH, "sync.grace_safety": 0.9}),
  "default, inner lr 4e-3": ("default", {**BATCH, "inner.learning_rate": 4e-3}),
  "default, inner lr 16e-3": ("default", {**BATCH, "inner.learning_rate": 16e-3}),
}


def train(name: str, tokens: int, workdir: Path) -> dict:
  """The summary of one row, from an earlier run of it or a new one."""
  base, fields = ROWS[name]
  folder = workdir / "".join(c if c.isalnum() else "-" for c in name)
  summary = folder / "report" / "summary.json"
  if not summary.exists():
    fields = {**SMALL, **fields, "run.total_tokens": tokens}
    command = [sys.executable, "-m", "ddiloco", "train", f"--config={ROOT}/configs/{base}.py"]
    command += [f"--workdir={folder}", "--cpu", "--overwrite"]
    command += [f"--config.{field}={value}" for field, value in fields.items()]
    print(f"--- {name}", flush=True)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
      sys.exit(f"{name} failed with status {done.returncode}:\n{done.stdout}\n{done.stderr}")
  return json.loads(summary.read_text())


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--tokens", type=int, default=4 * 600 * 4 * 128)
  parser.add_argument("--workdir", type=Path, default=ROOT / "runs" / "compare")
  parser.add_argument("--only", default="", help="names of rows, separated by ';'")
  args = parser.parse_args()
  result: dict = {"loss": {}, "tokens": args.tokens, "seconds": {}}
  for name in [n for n in args.only.split(";") if n] or ROWS:
    summary = train(name, args.tokens, args.workdir)
    result["loss"][name] = round(summary["loss_merged"], 4)
    result["seconds"][name] = summary["seconds"]
    shares = [share for share in summary["participation"].values() if share is not None]
    taken = f"{sum(shares) / len(shares):4.0%} participation" if shares else ""
    print(f"{name:<36} {result['loss'][name]:.4f} nats per token   {taken}", flush=True)
  print(json.dumps(result))


if __name__ == "__main__":
  main()
