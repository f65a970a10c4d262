"""How fast this machine merges, measured on a fragment of its own; for the planner's figures."""

from __future__ import annotations

import concurrent.futures
import os
import statistics
import time
from collections.abc import Callable

import numpy as np

from ddiloco.config import Config
from ddiloco.core import codec
from ddiloco.core.codec import Encoded
from ddiloco.core.commit import Committed, ReceivedPushes, commit
from ddiloco.core.fragments import Fragment, Piece
from ddiloco.core.passes import Share, compile_for
from ddiloco.protocol.actions import Commit
from ddiloco.protocol.states import FragmentState
from ddiloco.simulation import bandwidth
from ddiloco.simulation.bandwidth import F32_BYTES

VALUES = 32 << 20  # more than caches hold
PUSHES, REPEATS = 4, 3


def random_push(size: int, name: str) -> Encoded:
  """A payload of one chunk of random values, again and again."""
  values = np.random.default_rng(0).standard_normal(min(size, codec.CHUNK), np.float32)
  push = Encoded(name, np.empty(codec.payload_bytes(size, name), np.uint8))
  for start in range(0, size, codec.CHUNK):
    here = values[: size - start] * np.float32(1e-3)
    codec.encode_chunk(here, name, codec.part(push, size, start), np.empty_like(here))
  return push


def commits(fragment: Fragment, config: Config, pushes: int, share: Share) -> Callable[[], object]:
  """A function that makes the same commit of so many random pushes at every call."""
  compile_for(fragment, config.outer)
  value = np.full(fragment.size, 0.02, np.float32)
  published = value if config.sync.publish_codec == "f32" else value - np.float32(1e-5)
  momentum = value * np.float32(0.05) if config.outer.momentum else None
  old = Committed(FragmentState(0), value, published, momentum)
  arrivals = ReceivedPushes(fragment, 0)
  for learner in range(pushes):
    push = random_push(fragment.size, config.sync.push_codec)
    arrivals.add(learner, push, arrivals.measure(push, share))
  learners = tuple(range(pushes))
  steps, tokens = (24,) * pushes, tuple(24 * 1024 + m for m in learners)
  what = Commit(0, 0, 1, learners, steps, tokens, progress=0.0)
  return lambda: commit(fragment, old, arrivals, what, config, share, in_place=True)


def seconds_of(work: Callable[[], object]) -> float:
  """Seconds that one call takes."""
  began = time.perf_counter()
  work()
  return time.perf_counter() - began


def merge_gbytes(config: Config) -> float:
  """GB/s of f32 that a shard of this machine touches, as the planner counts them; seconds.

  Commits in the run's codecs and with its outer optimizer, by as many threads as a shard of this
  config has; the median of a few.
  """
  fragment = Fragment(0, (Piece("values", None, 0, VALUES, (VALUES,), 0, average=False),))
  count = config.sync.value_threads or len(os.sched_getaffinity(0))
  with concurrent.futures.ThreadPoolExecutor(count) as threads:
    work = commits(fragment, config, PUSHES, threads.map)
    work()  # the first touches all memory
    seconds = statistics.median(seconds_of(work) for _ in range(REPEATS))
  vectors = bandwidth.commit_vectors(config.sync, config.outer.momentum > 0, PUSHES)
  return vectors * F32_BYTES * VALUES / seconds / 1e9
