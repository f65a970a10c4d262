"""One member that lies, in as many random worlds as you like, in virtual time.

  scripts/liar_worlds.py [--seeds=10000] [--first=0] [--processes=2]

A world has two to four honest learners and one member with a valid key that sends arbitrary
well-formed messages at arbitrary moments; in half of them a shard dies with its copies. In every
world commits and snapshots must go on, no honest learner may wait or be refused, and global steps,
versions, tokens, shares and memory must stay within what honest work can make
(`tests/protocol/liar.py`). A world is its seed: a failure names it, and `--first=SEED --seeds=1`
runs it again. 10,000 worlds take about 20 minutes on two cores. Last line: JSON; exit status 1 if a
world failed.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from tests.protocol import liar

BLOCK = 50  # worlds between two lines of progress, in one process


def check_block(seeds: range) -> tuple[collections.Counter, list[str]]:
  """Counts of what happened in these worlds, and the failures."""
  counted: collections.Counter = collections.Counter()
  failures = []
  for seed in seeds:
    try:
      counted.update(liar.check(seed))
    except Exception as error:  # whatever a world dies of, the others are still to be judged
      failures.append(f"world {seed}: {error!r}")
  return counted, failures


def main(arguments: argparse.Namespace) -> int:
  began, worlds = time.monotonic(), range(arguments.first, arguments.first + arguments.seeds)
  blocks = [worlds[i : i + BLOCK] for i in range(0, len(worlds), BLOCK)]
  counted: collections.Counter = collections.Counter()
  failures: list[str] = []
  with concurrent.futures.ProcessPoolExecutor(arguments.processes) as pool:
    for done, (counts, failed) in enumerate(pool.map(check_block, blocks), 1):
      counted.update(counts)
      failures += failed
      for line in failed:
        print(line, flush=True)
      if sys.stderr.isatty() or done % 20 == 0 or done == len(blocks):
        print(f"{done * BLOCK} worlds, {len(failures)} failed", file=sys.stderr, flush=True)
  seconds = round(time.monotonic() - began, 1)
  result = {"worlds": len(worlds), "failed": len(failures), "seconds": seconds, **counted}
  print(json.dumps(result))
  return 1 if failures else 0


if __name__ == "__main__":
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--seeds", type=int, default=10_000, help="how many worlds")
  parser.add_argument("--first", type=int, default=0, help="the first one's seed")
  parser.add_argument("--processes", type=int, default=2, help="that share the work")
  sys.exit(main(parser.parse_args()))
