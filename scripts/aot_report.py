"""What presets take on TPUs and GPUs, as a table: compiled ahead of time, without the chips.

    python scripts/aot_report.py [--only=12b] [--largest] [--mfu=0.4] [--rows=runs/aot.json]
                                 [--docs=docs/accelerators.md]

Every row is `ddiloco compile --json` in a process of its own: a preset on its own topology, or on
one of `ALSO`; `configs/regions_12b.py` with each kind of its islands. `--largest` adds to each 12B
row the largest batch that leaves 10 % of the memory free, found by compiling. Rows are kept in the
file `--rows`; with `--only` (a part of a config's and topology's name) some of them are compiled
anew. `--docs` writes the table of all rows into that page. Needs libtpu and JAX's part for CUDA
(pip install 'ddiloco[tpu,cuda]', 6 GB); half a minute to four minutes a row on two cores.

Last line: {"rows": how many, "all_fit", "by_layer", "slowest_compile_seconds" (of CPU)}.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import OUTPUT, ROOT, options, run_script

from ddiloco.checks import require

# (config with other flags, topology); "" is the config's own.
DENSE = [(f"dense.py:{p}", "") for p in ("100m", "500m", "1b", "2b", "5b", "9b", "12b")]
ALSO = [
  *(("dense.py:12b", slice_) for slice_ in ("v6e:8x8", "tpu7x:2x4x4")),
  *(("moe.py:3.8b", slice_) for slice_ in ("", "v6e:8x8")),
]
GPUS = [("dense.py:100m", "h100:1"), *((f"dense.py:{p}", "h100:8") for p in ("1b", "5b", "12b"))]
OTHERS = [("regions_12b.py", ""), ("text_image.py:2b", "")]
MUON = [
  (f"dense.py:{preset} --config.inner.optimizer=muon", topology)
  for preset, topology in (("12b", ""), ("12b", "v6e:8x8"), ("1b", "h100:8"), ("12b", "h100:8"))
]
ROWS = [*DENSE, *ALSO, *OTHERS, *GPUS, *MUON]
LARGEST = {("dense.py:12b", ""), ("dense.py:12b", "v6e:8x8")}
FREE = 0.1  # of the memory, at the largest batch
TRIES = 4
BEGIN, END = "<!-- aot_report: begin -->", "<!-- aot_report: end -->"
_GIB = 1 << 30


def compiled(config: str, topology: str, mfu: float, batch: int = 0) -> list[dict[str, Any]]:
  """A row for each kind of island of this config."""
  command = [sys.executable, "-m", "ddiloco", "compile", *f"--config=configs/{config}".split()]
  command += ["--json", f"--mfu={mfu}"]
  command += [f"--topology={topology}"] if topology else []
  command += [f"--config.islands.batch_size={batch}"] if batch else []
  done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
  if done.returncode not in (0, 1) or not done.stdout:
    raise SystemExit(f"{' '.join(command)}: status {done.returncode}")
  return [{"config": config, **row} for row in json.loads(done.stdout.splitlines()[-1])]


def largest(config: str, topology: str, mfu: float, start: dict[str, Any]) -> dict[str, Any]:
  """The row of the largest batch that leaves `FREE` of the memory, found by the secant method.

  Memory grows linearly with the batch. The first point is a guess from below: state and gradients
  without a batch.
  """
  rows = start["chips"]  # the presets' meshes cut the batch over all chips
  limit = (1 - FREE) * start["chip"]["hbm_bytes"]
  before = (0, start["beside_bytes"] + start["state_bytes"] * 4 / 3)
  best, refused = start, math.inf
  here = (batch_of(start), start["needed_bytes"])
  for _ in range(TRIES):
    per_row = (here[1] - before[1]) / (here[0] - before[0])
    batch = here[0] + math.floor((limit - here[1]) / per_row / rows) * rows
    batch = int(min(batch, refused - rows))
    if batch <= batch_of(best):
      break
    (tried,) = compiled(config, topology, mfu, batch)
    before, here = here, (batch, tried["needed_bytes"])
    if tried["needed_bytes"] <= limit:
      best = tried
    else:
      refused = batch
  return {**best, "largest": True}


def batch_of(row: dict[str, Any]) -> int:
  return row["tokens"] // 2048


def name(row: dict[str, Any]) -> str:
  preset = row["config"].removesuffix(".py").replace(".py:", " ")
  preset = preset.replace(" --config.inner.optimizer=", ", ")
  return f"{preset}, {row['island'].split(',')[0]}" + (", largest" if row.get("largest") else "")


def table(rows: list[dict[str, Any]]) -> str:
  """Markdown."""
  columns = (
    ("preset, slice", name),
    ("mesh", lambda r: r["island"].split(", ")[1].removeprefix("mesh ")),
    ("batch", lambda r: f"{batch_of(r)} x 2048"),
    ("step, GiB a device", lambda r: f"{step_bytes(r) / _GIB:.1f}"),
    (
      "all, GiB",
      lambda r: f"{r['needed_bytes'] / _GIB:.1f} of {r['chip']['hbm_bytes'] / _GIB:.1f}",
    ),
    ("fits", lambda r: "yes" if r["fits"] else "**no**"),
    ("gathers", lambda r: "by layer" if r["gathers_by_layer"] else "**more**"),
    ("PFLOP a step", lambda r: f"{r['flops_per_token'] * r['tokens'] / 1e15:.2f}"),
    ("a step, s", lambda r: f"{r['step_seconds']:.2f}"),
    ("compiling, CPU s", lambda r: f"{seconds(r):.0f}"),
  )
  lines = ["| " + " | ".join(title for title, _ in columns) + " |", "|---" * len(columns) + "|"]
  lines += ["| " + " | ".join(said(row) for _, said in columns) + " |" for row in rows]
  return "\n".join(lines)


def step_bytes(row: dict[str, Any]) -> float:
  return row["needed_bytes"] - row["beside_bytes"]


def seconds(row: dict[str, Any]) -> float:
  programs = [*row["copies"], *([row["step"]] if row["step"] else [])]
  return sum(program["cpu_seconds"] for program in programs)


def main() -> None:
  file = {**OUTPUT, "default": ROOT / "runs" / "aot.json"}
  given = options(__doc__, only="", largest=False, mfu=0.4, rows=file, docs=Path)
  wanted = [row for row in ROWS if given.only in " ".join(row)]
  require(
    bool(wanted),
    "--only",
    given.only,
    "is part of no row",
    f"give one of {', '.join(map(' '.join, ROWS))}",
  )
  before = json.loads(given.rows.read_text()) if given.rows.exists() else []
  kept = {name(row): row for row in before}
  for config, topology in wanted:
    found = compiled(config, topology, given.mfu)
    if given.largest and (config, topology) in LARGEST:
      found.append(largest(config, topology, given.mfu, found[0]))
    for row in found:
      kept[name(row)] = row
      print(f"{name(row)}: {step_bytes(row) / _GIB:.2f} GiB a device", flush=True)
    given.rows.parent.mkdir(parents=True, exist_ok=True)
    given.rows.write_text(json.dumps(list(kept.values()), indent=1))
  rows = [kept[each] for each in sorted(kept)]
  print("\n" + table(rows) + "\n")
  if given.docs:
    before, _, rest = given.docs.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    given.docs.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{after}")
  sums = {
    "rows": len(rows),
    "all_fit": all(row["fits"] for row in rows),
    "by_layer": all(row["gathers_by_layer"] for row in rows),
    "slowest_compile_seconds": max(map(seconds, rows), default=0.0),
  }
  print(json.dumps(sums))


if __name__ == "__main__":
  run_script(main)
