"""Measures a syncer shard's work on one fragment: codec, arrival of a push, commit.

    python scripts/bench_merge.py [--learners=8] [--values=33554432] [--repeats=7] [--quick]

Pushes and updates are int4. A commit (merge, outer step with momentum, published update) is
compared with NumPy copies between existing arrays, of as many bytes, on the same threads (one for
each core), in turn within one run; medians. The bytes of a commit are every input and output once:
M pushes, value, published value and momentum in and out, the update. Arrival is the work on one
push while the round waits anyway: its norms and a sample of it. The last line is one JSON object.
Takes about 20 s and (M / 2 + 28) bytes a value.
"""

from __future__ import annotations

import json
import os
import statistics
import tracemalloc

import common
import numpy as np

from ddiloco.config import from_dict
from ddiloco.core import codec
from ddiloco.core.delta import measure
from ddiloco.core.fragments import Fragment
from ddiloco.engines import virtual
from ddiloco.engines.virtual import seconds_of
from ddiloco.roles import initial
from ddiloco.runtime import ValueThreads

CONFIG = from_dict(
  {
    "sync": {"push_codec": "int4", "publish_codec": "int4"},
    "outer": {"learning_rate": 0.7, "momentum": 0.9},
  }
)


def fragment_of(values: int) -> Fragment:
  """Two decoder layers and an embedding with at least `values` values: matrices and tiny norms."""
  width = 64
  while 37 * width * width + 5 * width < values:
    width += 64
  model = {"vocab_size": 8 * width, **common.small_model(2, width, heads=4, kv_heads=1, mlp=4)}
  sync = {"num_shards": 1, "num_fragments": 1}
  return initial.make_plan(from_dict({"model": model, "sync": sync})).fragments[0]


def bench_codec(size: int, repeats: int) -> dict[str, float]:
  """Median GB/s of f32 that int4 encodes and decodes on one thread."""
  delta = np.random.default_rng(0).standard_normal(size, np.float32)
  payload = codec.encode(delta, "int4")
  encode = [seconds_of(lambda: codec.encode(delta, "int4")) for _ in range(repeats)]
  decode = [seconds_of(lambda: codec.decode(payload, size, "int4")) for _ in range(repeats)]
  return {
    "int4_encode_gbps": delta.nbytes / 1e9 / statistics.median(encode),
    "int4_decode_gbps": delta.nbytes / 1e9 / statistics.median(decode),
  }


def bench_commit(fragment: Fragment, learners: int, repeats: int) -> dict[str, float]:
  """Seconds of an arrival and of a commit, and both beside a copy of as many bytes."""
  size, count = fragment.size, len(os.sched_getaffinity(0))
  push = virtual.random_push(size, "int4")
  moved = (learners + 1) * push.payload.nbytes + 6 * 4 * size
  part = np.ones(min(size, moved // 8 // count), np.float32)
  copies = max(1, round(moved / 8 / count / part.size))
  targets = [np.ones_like(part) for _ in range(count)]
  with ValueThreads(count) as threads:
    commit = virtual.commits(fragment, CONFIG, learners, threads.share)

    def arrive() -> None:
      measure(fragment, push, threads.share)

    def copy_to(target: np.ndarray) -> None:
      for _ in range(copies):
        np.copyto(target, part)

    def copy() -> None:
      threads.share(copy_to, targets)

    arrival = statistics.median(seconds_of(arrive) for _ in range(repeats))
    commit()
    copy()
    pairs = [(seconds_of(copy), seconds_of(commit)) for _ in range(repeats)]
    tracemalloc.start()
    commit()
    extra_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
  copied, committed = (statistics.median(column) for column in zip(*pairs))
  rate = 8 * part.size * copies * count / copied
  return {
    "arrival_seconds": arrival,
    "commit_seconds": committed,
    "commit_gbps": moved / committed / 1e9,
    "copy_gbps": rate / 1e9,
    "commit_vs_copy": moved / committed / rate,
    "extra_fragments": extra_bytes / part.itemsize / size,
    "threads": count,
  }


def main() -> None:
  quick = {"values": 200_000, "repeats": 2}
  args = common.options(__doc__, quick, learners=8, values=32 << 20, repeats=7)
  fragment = fragment_of(args.values)
  found = bench_commit(fragment, args.learners, args.repeats)
  found |= bench_codec(min(fragment.size, 32 << 20), args.repeats)
  found |= {"learners": args.learners, "values": fragment.size}
  rounded = {name: round(value, 4) for name, value in found.items()}
  for name, value in rounded.items():
    print(f"  {name:<20}{value:>16,}")
  print(json.dumps(rounded))


if __name__ == "__main__":
  common.run_script(main)
