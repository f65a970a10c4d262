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

from ddiloco.config import SyncConfig, from_dict
from ddiloco.core import codec
from ddiloco.core.delta import ReceivedPushes
from ddiloco.core.fragments import Fragment, TensorSpec, make_plan
from ddiloco.engines import virtual
from ddiloco.engines.virtual import seconds_of
from ddiloco.runtime import ValueThreads

CONFIG = from_dict(
  {
    "sync": {"push_codec": "int4", "publish_codec": "int4"},
    "outer": {"learning_rate": 0.7, "momentum": 0.9},
  }
)


def fragment_of(values: int) -> Fragment:
  """Two decoder layers and an embedding with at least `values` values: matrices and tiny norms."""
  dim = 64
  while 37 * dim * dim + 5 * dim < values:
    dim += 64
  stacked = {
    "query": (dim, dim),
    "key": (dim, dim // 4),
    "value": (dim, dim // 4),
    "output": (dim, dim),
    "gate": (dim, 4 * dim),
    "up": (dim, 4 * dim),
    "down": (4 * dim, dim),
    "attention_norm": (dim,),
    "mlp_norm": (dim,),
  }
  specs = [
    TensorSpec("embedding", (8 * dim, dim), stacked=False, embedding=True),
    *(TensorSpec(f"layers/{n}", (2, *shape), True, False) for n, shape in stacked.items()),
    TensorSpec("final_norm", (dim,), stacked=False, embedding=False),
  ]
  sync = SyncConfig(num_shards=1, num_fragments=1)
  return make_plan(specs, sync).fragments[0]


def bench_codec(delta: np.ndarray, repeats: int) -> tuple[float, float, np.ndarray]:
  """Median GB/s of f32 that int4 encodes and decodes, and the payload."""
  payload = codec.encode(delta, "int4")
  encode = [seconds_of(lambda: codec.encode(delta, "int4")) for _ in range(repeats)]
  decode = [seconds_of(lambda: codec.decode(payload, delta.size, "int4")) for _ in range(repeats)]
  gigabytes = delta.nbytes / 1e9
  return gigabytes / statistics.median(encode), gigabytes / statistics.median(decode), payload


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
      ReceivedPushes(fragment, 0).measure(push, threads.share)

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
  parser = common.parser(__doc__, "tiny sizes: is the script alive?")
  parser.add_argument("--learners", type=int, default=8, help="pushes that are merged (8)")
  parser.add_argument("--values", type=int, default=32 << 20, help="least size of the fragment")
  parser.add_argument("--repeats", type=int, default=7, help="of every measurement (7)")
  args = parser.parse_args()
  if min(args.learners, args.values, args.repeats) < 1:
    parser.error("--learners, --values and --repeats must be at least 1")
  values, repeats = (200_000, 2) if args.quick else (args.values, args.repeats)

  fragment = fragment_of(values)
  delta = np.random.default_rng(0).standard_normal(min(fragment.size, 32 << 20), np.float32)
  encode_gbps, decode_gbps, _ = bench_codec(delta, repeats)
  found = bench_commit(fragment, args.learners, repeats)

  print(
    f"{args.learners} learners, {fragment.size:,} values in {len(fragment.pieces)} pieces,", end=" "
  )
  print(f"{found['threads']} threads, medians of {repeats}")
  for name, text in {
    "commit": f"{found['commit_gbps']:8.2f} GB/s   {found['commit_seconds'] * 1e3:8.1f} ms",
    "plain NumPy copy": f"{found['copy_gbps']:8.2f} GB/s",
    "commit / copy": f"{found['commit_vs_copy']:8.2f}        wanted: at least 0.50",
    "int4 encode": f"{encode_gbps:8.2f} GB/s   one thread",
    "int4 decode": f"{decode_gbps:8.2f} GB/s   one thread",
    "arrival": f"{found['arrival_seconds'] * 1e3:8.1f} ms     norms and a sample of one push",
    "extra memory": f"{found['extra_fragments']:8.3f} fragments: new vectors, update, chunks",
  }.items():
    print(f"  {name:<24}{text}")
  rounded = {name: round(value, 4) for name, value in found.items()}
  codecs = {"int4_encode_gbps": round(encode_gbps, 2), "int4_decode_gbps": round(decode_gbps, 2)}
  print(json.dumps({**rounded, **codecs, "learners": args.learners, "values": fragment.size}))


if __name__ == "__main__":
  common.run_script(main)
