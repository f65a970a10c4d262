"""How fast this machine merges, measured on a fragment of its own; for the planner's figures."""

from __future__ import annotations

import concurrent.futures
import os
import statistics
import time

import numpy as np

from ddiloco.config import OuterConfig, SyncConfig
from ddiloco.core import codec, merge, outer, passes
from ddiloco.core.codec import Encoded
from ddiloco.core.fragments import Fragment, Piece
from ddiloco.simulation import bandwidth
from ddiloco.simulation.bandwidth import F32_BYTES

VALUES = 32 << 20  # more than caches hold
PUSHES, REPEATS = 4, 3


def merge_gbytes(sync: SyncConfig, config: OuterConfig) -> float:
  """GB/s of f32 that a shard of this machine touches, as the planner counts them; seconds.

  A commit of a few random pushes in the run's codecs and with its outer optimizer, by as many
  threads as a shard of this config has; the median of three.
  """
  fragment = Fragment(0, (Piece("values", None, 0, VALUES, (VALUES,), 0, average=False),))
  delta = np.random.default_rng(0).standard_normal(VALUES, np.float32)
  pushes = [Encoded(sync.push_codec, codec.encode(delta, sync.push_codec))] * PUSHES
  published = delta.copy() if sync.publish_codec != "f32" else delta
  momentum = outer.init(VALUES, config)
  passes.compile_for(fragment, config)
  seconds = []
  count = sync.value_threads or len(os.sched_getaffinity(0))
  with concurrent.futures.ThreadPoolExecutor(count) as threads:
    share = threads.map
    squares = np.stack([passes.squares(fragment, pushes[0], share)] * PUSHES)
    directions = merge.Directions(fragment, squares, np.full(PUSHES, 1 / PUSHES))
    for _ in range(1 + REPEATS):
      began = time.perf_counter()
      out = np.empty(VALUES, np.float32)
      stretch = directions.stretch(passes.combine(fragment, pushes, directions.units, out, share))
      vectors = delta, published, momentum
      passes.step(fragment, out, stretch, *vectors, config, sync.publish_codec, share)
      seconds.append(time.perf_counter() - began)
  touched = bandwidth.commit_vectors(sync, config.momentum > 0, PUSHES) * F32_BYTES * VALUES
  return touched / statistics.median(seconds[1:]) / 1e9
