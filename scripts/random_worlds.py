"""Runs random worlds in virtual time, as many as you like, of every family in the tests.

  scripts/random_worlds.py [--family=all|NAME] [--seeds=10000] [--first=0] [--processes=2]

  faults      whole runs of the real roles under plans of all kinds of faults, joins and losses
  storms      message faults and kills, after which the run must go on
  disasters   the same; roles come back with parts of snapshots, shards lose their copies, all die
  endings     the same; and the run ends, also in lock-step, and with learners that leave
  liar        one member with a valid key sends arbitrary well-formed messages
  supervisor  roles come, go, hang and die; one policy starts them again
  algorithm   drawn settings and kills; every commit must be that of `examples/algorithm.py`

A world draws a subset of its family's kinds of faults first, then faults of these kinds; the checks
are in `tests/worlds.py`. Family and seed determine a world: a failure names both, and
`--family=NAME --first=SEED --seeds=1` runs it again. Counts say how often each kind of fault
struck. 10,000 seeds of all families take about an hour on two cores. Last line: JSON; exit status 1
if a world failed.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import io
import json
import pathlib
import sys
import time

import common

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from tests.examples import one_file
from tests.protocol import disasters, endings, liar, storms, supervised
from tests.simulation import faulted

FAMILIES = {
  "faults": faulted.check,
  "storms": storms.check,
  "disasters": disasters.check,
  "endings": endings.check,
  "liar": liar.check,
  "supervisor": supervised.check,
  "algorithm": one_file.check,
}
BLOCK = 50  # worlds between two lines of progress, in one process


def check_block(family: str, seeds: range) -> tuple[collections.Counter[str], list[str]]:
  """Counts of what happened in these worlds, and the failures."""
  counted: collections.Counter[str] = collections.Counter()
  failures = []
  for seed in seeds:
    try:
      with contextlib.redirect_stderr(io.StringIO()):  # roles warn of the faults
        counted.update(FAMILIES[family](seed))
    except Exception as error:  # any failure of a world: the other worlds still run
      failures.append(f"{family}: world {seed}: {error!r}")
  return counted, failures


def check_family(
  pool: concurrent.futures.Executor, family: str, worlds: range
) -> dict[str, int | float]:
  """Runs a family's worlds; returns failures, seconds, and the counts of events in them."""
  began, failed = time.monotonic(), 0
  counted: collections.Counter[str] = collections.Counter()
  blocks = [worlds[i : i + BLOCK] for i in range(0, len(worlds), BLOCK)]
  for done, (counts, failures) in enumerate(
    pool.map(check_block, [family] * len(blocks), blocks), 1
  ):
    counted.update(counts)
    failed += len(failures)
    for line in failures:
      print(line, flush=True)
    if done % 20 == 0 or done == len(blocks):
      so_far = min(done * BLOCK, len(worlds))
      print(f"{family}: {so_far} worlds, {failed} failed", file=sys.stderr, flush=True)
  seconds = round(time.monotonic() - began, 1)
  happened = dict(sorted(counted.items()))
  return {"worlds": len(worlds), "failed": failed, "seconds": seconds, **happened}


def main() -> int:
  family = {"choices": ["all", *FAMILIES], "default": "all"}
  seeds = 10_000, "how many worlds of each family"
  arguments = common.options(__doc__, family=family, seeds=seeds, first=0, processes=2)
  worlds = range(arguments.first, arguments.first + arguments.seeds)
  names = list(FAMILIES) if arguments.family == "all" else [arguments.family]
  with concurrent.futures.ProcessPoolExecutor(arguments.processes) as pool:
    families = {name: check_family(pool, name, worlds) for name in names}
  failed = sum(found["failed"] for found in families.values())
  print(json.dumps({"worlds": len(worlds) * len(names), "failed": failed, "families": families}))
  return 1 if failed else 0


if __name__ == "__main__":
  common.run_script(main)
