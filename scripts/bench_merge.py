"""Measures what a syncer shard does to one fragment: codec, arrival, merge and outer step.

    python scripts/bench_merge.py [--learners=8] [--values=33554432] [--repeats=7] [--quick]

The commit (merge + outer step) is compared with plain NumPy copies between existing arrays of the
same total size, taken in turn within one run; medians. Useful bytes of a commit: every input and
output once, that is M deltas, the value and the momentum in, the value and the momentum out.
Arrival is what is done while the round waits anyway: decoding one int4 push, its norms, its dot
products with all others. Everything runs in one thread. The last line is one JSON object. Takes
about 20 s and (M + 6) x 4 bytes a value.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import tracemalloc
from collections.abc import Callable

import numpy as np

from ddiloco.config import OuterConfig, SyncConfig
from ddiloco.core import codec, merge, outer
from ddiloco.core.fragments import Fragment, TensorSpec, make_plan

OUTER = OuterConfig(learning_rate=0.7, momentum=0.9, nesterov=True)


def fragment_of(values: int) -> Fragment:
  """Two decoder layers and an embedding, at least `values` values: matrices beside tiny norms."""
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


def seconds_of(work: Callable[[], object]) -> float:
  """Seconds that one call takes."""
  start = time.perf_counter()
  work()
  return time.perf_counter() - start


def bench_codec(delta: np.ndarray, repeats: int) -> tuple[float, float, np.ndarray]:
  """Median GB/s of f32 that int4 encodes and decodes, and the payload."""
  payload = codec.encode(delta, "int4")
  encode = [seconds_of(lambda: codec.encode(delta, "int4")) for _ in range(repeats)]
  decode = [seconds_of(lambda: codec.decode(payload, delta.size, "int4")) for _ in range(repeats)]
  gigabytes = delta.nbytes / 1e9
  return gigabytes / statistics.median(encode), gigabytes / statistics.median(decode), payload


def bench_arrival(
  fragment: Fragment, deltas: list[np.ndarray], payload: np.ndarray
) -> tuple[float, np.ndarray]:
  """Seconds of the last, most expensive arrival, and the Gram matrices of all pushes."""
  gram = merge.empty_gram(fragment)
  for count, delta in enumerate(deltas):
    start = time.perf_counter()
    codec.decode(payload, fragment.size, "int4")
    squares = merge.squared_norms(fragment, delta)
    gram = merge.extend_gram(gram, merge.products(fragment, deltas[:count], delta), squares)
    seconds = time.perf_counter() - start
  return seconds, gram


def bench_commit(
  fragment: Fragment, deltas: list[np.ndarray], gram: np.ndarray, repeats: int
) -> tuple[float, float, float]:
  """Median bytes per second of a commit and of a copy, and the extra memory in fragments."""
  weights = merge.token_weights([24] * len(deltas), [24 * 1024 + m for m in range(len(deltas))])
  value, momentum = np.ones(fragment.size, np.float32), outer.init(fragment.size, OUTER)
  momentum += 1e-3  # touched, so that the system has really given the memory
  target, copies = np.ones_like(value), (len(deltas) + 4) // 2

  def commit() -> np.ndarray:
    factors = merge.coefficients(fragment, gram, weights)
    return merge.commit(fragment, value, momentum, deltas, factors, OUTER)

  def copy() -> None:
    for index in range(copies):
      np.copyto(target, deltas[index % len(deltas)])

  commit(), copy()
  pairs = [(seconds_of(copy), seconds_of(commit)) for _ in range(repeats)]
  copy_seconds, commit_seconds = (statistics.median(column) for column in zip(*pairs))
  tracemalloc.start()
  before = tracemalloc.get_traced_memory()[0]
  commit()
  extra_bytes = tracemalloc.get_traced_memory()[1] - before
  tracemalloc.stop()
  useful_bytes = (len(deltas) + 4) * value.nbytes
  copied_bytes = 2 * copies * value.nbytes
  return useful_bytes / commit_seconds, copied_bytes / copy_seconds, extra_bytes / value.nbytes


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--learners", type=int, default=8, help="pushes that are merged (8)")
  parser.add_argument("--values", type=int, default=32 << 20, help="least size of the fragment")
  parser.add_argument("--repeats", type=int, default=7, help="of every measurement (7)")
  parser.add_argument("--quick", action="store_true", help="tiny sizes: is the script alive?")
  args = parser.parse_args()
  if min(args.learners, args.values, args.repeats) < 1:
    parser.error("--learners, --values and --repeats must be at least 1")
  values, repeats = (200_000, 2) if args.quick else (args.values, args.repeats)

  fragment = fragment_of(values)
  rng = np.random.default_rng(0)
  deltas = [rng.standard_normal(fragment.size, np.float32) for _ in range(args.learners)]
  encode_gbps, decode_gbps, payload = bench_codec(deltas[0], repeats)
  arrival_seconds, gram = bench_arrival(fragment, deltas, payload)
  commit_rate, copy_rate, extra = bench_commit(fragment, deltas, gram, repeats)

  megabytes = fragment.size * 4 / 1e6
  useful_seconds = (args.learners + 4) * fragment.size * 4 / commit_rate
  print(f"{args.learners} learners, {fragment.size:,} values ({megabytes:.0f} MB)", end=" ")
  print(f"in {len(fragment.pieces)} pieces, medians of {repeats}")
  for name, text in {
    "commit (merge + outer)": f"{commit_rate / 1e9:8.2f} GB/s   {useful_seconds * 1e3:8.1f} ms",
    "plain NumPy copy": f"{copy_rate / 1e9:8.2f} GB/s",
    "commit / copy": f"{commit_rate / copy_rate:8.2f}        wanted: at least 0.50",
    "int4 encode": f"{encode_gbps:8.2f} GB/s   wanted: at least 1",
    "int4 decode": f"{decode_gbps:8.2f} GB/s   wanted: at least 1",
    "last arrival": f"{arrival_seconds * 1e3:8.1f} ms     decode + norms + dot products",
    "extra memory": f"{extra:8.3f} fragments: the new value and a fixed 128 KiB of scratch",
  }.items():
    print(f"  {name:<24}{text}")
  result = {
    "merge_vs_copy": round(commit_rate / copy_rate, 3),
    "int4_encode_gbps": round(encode_gbps, 2),
    "int4_decode_gbps": round(decode_gbps, 2),
    "extra_fragments": round(extra, 2),
    "arrival_seconds": round(arrival_seconds, 4),
    "commit_seconds": round(useful_seconds, 4),
    "learners": args.learners,
    "values": fragment.size,
  }
  print(json.dumps(result))


if __name__ == "__main__":
  main()
