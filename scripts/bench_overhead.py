"""What the exchange costs an inner step: a learner with a syncer attached against a bare loop.

One run, one island, the same compiled step, in turn: a block of steps as `roles.learner` makes
them (with the pull, push and publish of a fragment in each step), then, when the exchange is quiet,
a block of bare compiled steps. `ratio` is the median over neighbouring pairs of blocks of the ratio
of their median step times. The step is kept to one core, so that the syncer has a core of its own:
on real islands it has a machine of its own.

With --engine=ray learner and syncer are two processes, Ray actors, and fragments travel over our
network transport; otherwise they are two threads.

  python scripts/bench_overhead.py [--engine=ray] [--pairs=40] [--block=8] [--quick]

Last line: {"ratio", "blocked_seconds", "step_ms", "bare_ms", "rounds", "pairs", "engine"}.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import common
import in_process
import jax
import jax.numpy as jnp
import numpy as np

from ddiloco.config import Config, from_dict
from ddiloco.network.endpoint import NetworkEndpoint, RunIdentity
from ddiloco.network.transport import Endpoint, Hub, learner_address, syncer_address
from ddiloco.protocol import events
from ddiloco.roles import initial
from ddiloco.training.island import Island

FRAGMENTS = 8
SETTLE_SECONDS = 0.3


def make_config(quick: bool) -> Config:
  """One fragment a step, as in the paper."""
  layers, width = (1, 32) if quick else (4, 128)
  model = {"num_layers": layers, "model_dim": width, "head_dim": width // 4, "mlp_dim": 3 * width}
  sync = {"num_shards": 1, "num_fragments": FRAGMENTS, "sync_period": FRAGMENTS}
  islands, run = {"num_learners": 1}, {"total_tokens": 1 << 50}
  return from_dict({"model": model, "sync": sync, "islands": islands, "run": run})


Step = Callable[[np.ndarray], None]  # on a batch, and waits for it


def bare_step(island: Island) -> Step:
  """The compiled step alone, on a copy of the state, with as many in flight as on the island."""
  state, before = jax.tree.map(jnp.copy, island._state), None  # `capture` may be on the host

  def step(batch: np.ndarray) -> None:
    nonlocal state, before
    rated = batch, np.float32(1e-3), island.programs.frozen
    state, metrics = island.programs.step(state, *rated)
    waited_for, before = (before if island._pipelined else metrics), metrics
    if waited_for is not None:
      np.asarray(jax.block_until_ready(waited_for))

  return step


class Interleaved:
  """Batches for the learner; between two blocks it runs bare steps on the learner's own thread."""

  def __init__(self, step: Step, tokens: list[np.ndarray], block: int, pairs: int):
    self.step, self.tokens, self.block, self.pairs = step, tokens, block, pairs
    self.bare: list[list[float]] = []
    self.stop = threading.Event()

  def __call__(self, position: int):
    for count in itertools.count():
      # The first block warms up; each later one is followed by a bare block.
      if count and count % self.block == 0:
        self.bare.append(self._bare_block())
        if len(self.bare) > self.pairs:
          self.stop.set()
      yield self.tokens[count % len(self.tokens)]

  def _bare_block(self) -> list[float]:
    # The first steps do not count: pushes and publishes under way end meanwhile. Waiting for them
    # instead would rest the device, which would then be faster for a while.
    seconds, last = list[float](), time.perf_counter()
    settled, batches = last + SETTLE_SECONDS, itertools.cycle(self.tokens)
    while len(seconds) < self.block:
      self.step(next(batches))
      now = time.perf_counter()
      if last >= settled:
        seconds.append(now - last)
      last = now
    return seconds


@dataclasses.dataclass
class Measured:
  """Seconds: between attached steps, of bare steps by block, and of waiting for the exchange."""

  gaps: list[float]
  bare: list[list[float]]
  blocked_seconds: float


class Steps(in_process.Silent):
  """Keeps the step events of the learner."""

  def __init__(self):
    self.gaps: list[float] = []
    self.blocked_seconds = 0.0

  def record(self, event: events.Event) -> None:
    if isinstance(event, events.Step):
      self.gaps.append(event.gap_seconds)
      self.blocked_seconds += event.blocked_seconds


class Bench:
  """The run and its measurement, the same on both sides. Made anew in every process."""

  def __init__(self, config: Config, pairs: int, block: int):
    self.config, self.plan = config, initial.make_plan(config)
    self.pairs, self.block = pairs, block

  def endpoint(self, address: str, bind: str | None = None) -> NetworkEndpoint:
    """A connection of this process to the others."""
    size = 4 * sum(self.plan.sizes)
    run = RunIdentity("bench", self.plan.plan_id, max_payload_bytes=size, queue_bytes=3 * size)
    return NetworkEndpoint(address, 0, run, self.config.network, bind=bind)

  def train(self, endpoint: Endpoint) -> Measured:
    """The learner: blocks of steps with the exchange and without, in turn."""
    island = Island(self.config, 0, jax.devices()[:1], self.plan)
    # Not zeros: with zeros a GPU needs less power, and bare steps would be faster.
    island.load(initial.initial_params(self.config))
    return self.measure(endpoint, island, self.interleaved(bare_step(island)))

  def interleaved(self, step: Step) -> Interleaved:
    """Batches, with bare steps in between."""
    return Interleaved(step, in_process.batches(self.config), self.block, self.pairs)

  def measure(self, endpoint: Endpoint, island: Any, loop: Interleaved) -> Measured:
    """A learner on this island, until the blocks are done."""
    steps = Steps()
    batches = getattr(island, "batches", None)
    read = functools.partial(batches, loop) if batches else loop
    stop = loop.stop.is_set
    in_process.train(self.config, self.plan, endpoint, island, read, stop, recorder=steps)
    return Measured(steps.gaps, loop.bare, steps.blocked_seconds)


class LearnerActor:
  """A Ray actor: the learner in a process of its own."""

  def train(self, settings: tuple, url: str) -> Measured:
    in_process.prepare()
    bench = Bench(*settings)
    endpoint = bench.endpoint(learner_address(0))
    endpoint.dial(syncer_address(0), url)
    measured = bench.train(endpoint)
    endpoint.close()
    return measured


class ShardActor:
  """A Ray actor: the shard in a process of its own."""

  def listen(self, settings: tuple) -> str:
    """Starts the shard; returns its url."""
    in_process.prepare()
    bench = Bench(*settings)
    self._endpoint = bench.endpoint(syncer_address(0), bind="tcp://127.0.0.1:0")
    self._shard = in_process.Shard(bench.config, bench.plan, self._endpoint)
    return self._endpoint.bound

  def end(self) -> int:
    rounds = self._shard.end()
    self._endpoint.close()
    return rounds


def with_threads(settings: tuple) -> tuple[Measured, int]:
  bench = Bench(*settings)
  hub = Hub()
  shard = in_process.Shard(bench.config, bench.plan, hub.connect(syncer_address(0)))
  measured = bench.train(hub.connect(learner_address(0)))
  return measured, shard.end()


def with_ray(settings: tuple) -> tuple[Measured, int]:
  import ray

  from ddiloco.engines.ray import connect

  connect("")
  try:
    actors: Any = (ray.remote(actor) for actor in (ShardActor, LearnerActor))
    shard, learner = (actor.options(num_cpus=0).remote() for actor in actors)
    url = ray.get(shard.listen.remote(settings))
    measured = ray.get(learner.train.remote(settings, url))
    return measured, ray.get(shard.end.remote())
  finally:
    ray.shutdown()


def main() -> None:
  engine = {"choices": list(ENGINES), "default": "threads"}
  args = common.options(__doc__, {"pairs": 1}, engine=engine, pairs=40, block=FRAGMENTS)
  in_process.prepare()
  config = make_config(args.quick)
  measured, rounds = ENGINES[args.engine]((config, args.pairs, args.block))

  result = compared(measured, args.pairs, args.block)
  print(json.dumps({**result, "rounds": rounds, "engine": args.engine}))


def compared(measured: Measured, pairs: int, block: int) -> dict[str, float]:
  """The median ratio of neighbouring blocks, and the numbers behind it."""
  ratios, attached = [], []
  for pair in range(1, pairs + 1):  # block 0 warms up
    gaps = measured.gaps[pair * block : (pair + 1) * block][1:]  # the first follows a bare block
    attached.append(statistics.median(gaps))
    ratios.append(attached[-1] / statistics.median(measured.bare[pair][1:]))
    print(f"pair {pair:3d}: attached {attached[-1] * 1e3:8.3f} ms, ratio {ratios[-1]:.4f}")
  return {
    "ratio": round(statistics.median(ratios), 4),
    "blocked_seconds": measured.blocked_seconds,
    "step_ms": round(statistics.median(attached) * 1e3, 3),
    "bare_ms": round(statistics.median(itertools.chain(*measured.bare[1:])) * 1e3, 3),
    "pairs": pairs,
  }


ENGINES = {"threads": with_threads, "ray": with_ray}

if __name__ == "__main__":
  common.run_script(main)
