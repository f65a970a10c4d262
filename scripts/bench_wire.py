"""Bytes on the wire per inner step and learner, for every codec, beside data-parallel's all-reduce.

Real learners and shards exchange real frames over the in-process queues, in lock-step so that
every fragment syncs once a period; only the training is left out. All bytes that a learner sends
and receives are counted, reports included. Data-parallel: a ring all-reduce of f32 gradients sends
and receives 2 (M - 1) / M values of 4 bytes per parameter and step.

  python scripts/bench_wire.py [--learners=4] [--periods=8] [--quick]

Last line: {"bytes_per_step": {codec: n}, "versus_data_parallel": {codec: x}, "framing_overhead"}.
`versus_data_parallel`: how many times fewer bytes. `framing_overhead`: bytes of headers and control
over bytes of payload, the largest of all codecs.
"""

from __future__ import annotations

import functools
import itertools
import json
import threading
from collections.abc import Iterator

import common
import in_process
import numpy as np

from ddiloco.config import Config, from_dict
from ddiloco.core import codec, fragments
from ddiloco.network.transport import Hub, learner_address, syncer_address
from ddiloco.roles import initial

PERIOD = 24  # steps between two syncs of a fragment


class Holder:
  """Parameters without training: every step moves every value a little."""

  busy = False

  def __init__(self, plan: fragments.Plan, learner: int):
    random = np.random.default_rng(learner)
    self.values = [random.standard_normal(f.size, dtype=np.float32) for f in plan.fragments]

  def describe(self) -> dict:
    return {}

  def step(self, tokens, schedule_step, rate_scale) -> dict:
    for value in self.values:
      value += 1e-3
    return {}

  def copy_out(self, fragment: int) -> np.ndarray:
    return self.values[fragment].copy()

  def to_host(self, pieces: np.ndarray, fragment: int) -> np.ndarray:
    return pieces

  def stage(self, fragment: int, flat: np.ndarray) -> np.ndarray:
    return flat

  def apply(self, fragment: int, staged: np.ndarray, keep: float) -> None:
    self.values[fragment] = keep * self.values[fragment] + staged


def make_config(learners: int, periods: int, name: str, quick: bool) -> Config:
  codecs = {"push_codec": name, "publish_codec": name}
  schedule = {"num_fragments": 8 if quick else 24, "sync_period": PERIOD}
  sync = {**schedule, **codecs, "min_quorum": learners, "blocking": True}
  model = {"num_layers": 2 if quick else 8, "model_dim": 128, "mlp_dim": 512}
  sections = {"islands": {"num_learners": learners}, "model": model, "sync": sync}
  step_tokens = from_dict(sections).planned_tokens_per_step
  return from_dict({**sections, "run": {"total_tokens": PERIOD * (periods + 1) * step_tokens}})


def measure(config: Config, plan: fragments.Plan) -> tuple[float, float]:
  """Bytes and payload bytes per step and learner, over whole periods after the join."""
  hub, stop = Hub(), threading.Event()
  marks: list[tuple[int, int, int]] = []  # learner 0's step, bytes and payload after each period

  def read(learner: int, position: int) -> Iterator[np.ndarray]:
    counters = endpoints[learner].counters
    for step, batch in enumerate(itertools.cycle(in_process.batches(config)), position):
      if learner == 0 and step and step % config.sync.sync_period == 0:
        total = counters.sent_bytes + counters.received_bytes
        marks.append((step, total, counters.payload_bytes))
      yield batch

  shards = [
    in_process.Shard(config, plan, hub.connect(syncer_address(s)), s)
    for s in range(config.sync.num_shards)
  ]
  learners = range(config.islands.num_learners)
  endpoints = [hub.connect(learner_address(m)) for m in learners]
  threads = []
  for m in learners:
    reads = functools.partial(read, m)
    role = config, plan, endpoints[m], Holder(plan, m), reads, stop.is_set, m
    threads.append(threading.Thread(target=in_process.train, args=role, daemon=True))
    threads[-1].start()
  for thread in threads:
    thread.join(300)
  stop.set()
  for shard in shards:
    shard.end()
  (first_step, first, first_payload), (step, total, payload) = marks[0], marks[-1]
  steps = step - first_step
  return (total - first) / steps, (payload - first_payload) / steps


def main() -> None:
  args = common.options(__doc__, {"periods": 1}, learners=4, periods=(8, "that count"))
  periods = args.periods + 1
  result: dict = {"bytes_per_step": {}, "versus_data_parallel": {}, "framing_overhead": 0.0}
  for name in codec.CODECS:
    config = make_config(args.learners, periods, name, args.quick)
    plan = initial.make_plan(config)
    total, payload = measure(config, plan)
    data_parallel = 2 * 2 * (args.learners - 1) / args.learners * 4 * sum(plan.sizes)
    overhead = round((total - payload) / payload, 5)
    result["bytes_per_step"][name] = round(total)
    result["versus_data_parallel"][name] = round(data_parallel / total, 1)
    result["framing_overhead"] = max(result["framing_overhead"], overhead)
  print(json.dumps(result))


if __name__ == "__main__":
  common.run_script(main)
