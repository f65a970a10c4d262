"""Measures islands on this machine's GPU or TPU; without one it says so and measures nothing.

- Two islands, each a process, share the first device, and one is killed with SIGKILL: the other
  island's median step around the kill against that before, and the seconds until the killed island
  is merged again.
- dense:100m and dense:1b on one device: tokens a second and MFU (models/transformer.py), pipelined.
- The 100m's step with the platform's own attention against the einsum, and the error of both.
- A learner with a syncer attached against its bare step, in turn (`bench_overhead.py`).
- Copying a fragment out and in, in GB/s, against one plain array of the same size.

  python scripts/bench_accelerator.py [--steps=20] [--pairs=20] [--cpu] [--quick]

With --cpu it runs on a CPU, to test the script; --quick takes models small enough for that. The
last line is one JSON object; {"accelerator": null} where there is none.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import bench_overhead
import common
import in_process
import jax
import jax.numpy as jnp
import numpy as np
from mixed_hardware import Roles

from ddiloco import environment
from ddiloco import workdir as workdirs
from ddiloco.config import Config, IslandConfig, ModelConfig
from ddiloco.engines.virtual import seconds_of
from ddiloco.models.layers import attend
from ddiloco.models.model import PLAIN, Execution
from ddiloco.protocol.events import Step
from ddiloco.roles import initial
from ddiloco.training import devices
from ddiloco.training.island import Island

# What one device of 40 GB or more holds: (preset, sequences a step, remat, loss chunks).
PRESETS = [("100m", 16, "attention", 8), ("1b", 8, "attention", 8)]
QUICK = [("100k", 2, "none", 1)]
QUICK_PACE_SECONDS = 0.2  # of a step then: leaves cores to a process that starts again
LENGTHS = (2048, 512, 200)  # in positions; the last is no multiple of a block
SHARE_OF_MEMORY = "0.4"  # of the device, for each of two islands
AWAY_SECONDS = 0.5  # between the kill and the next start
COPIES = 5


def config_of(
  preset: str, batch: int, remat: str, chunks: int, more: Mapping[str, Any] | None = None
) -> Config:
  """A preset on one device, without data of its own; `more`: other fields."""
  fields = {
    "islands.batch_size": batch, "islands.remat": remat, "islands.loss_chunks": chunks,
    "islands.num_learners": 1, "islands.topology": "", "sync.num_shards": 1,
    "data.source": "synthetic", "data.path": "", "data.tokenizer": "bytes",
    "run.total_tokens": 1 << 50,
    **(more or {}),
  }  # fmt: skip
  return common.config_of(f"dense:{preset}", fields)


def make_island(config: Config) -> Island:
  """A compiled island with initial values: with zeros a GPU would need less power and be faster."""
  island = Island(config, 0, jax.devices()[:1], initial.make_plan(config))
  island.load(initial.initial_params(config))
  return island


def step_seconds(island: Island, config: Config, steps: int) -> float:
  """Seconds of one step, pipelined as a learner's steps are."""
  batches = itertools.cycle(in_process.batches(config))
  for step in range(3):
    island.step(next(batches), step)
  island.finish()
  began = time.perf_counter()
  for step in range(steps):
    island.step(next(batches), step)
  jax.block_until_ready(island._state)
  return (time.perf_counter() - began) / steps


# --- the parts


def speed(preset: tuple, steps: int) -> dict[str, Any]:
  """Tokens a second and MFU of one preset."""
  config = config_of(*preset)
  island = make_island(config)
  seconds, tokens = step_seconds(island, config, steps), config.tokens_per_step(0)
  flops = island.describe()["flops_per_token"]
  peak = devices.PEAK_FLOPS.get(jax.devices()[0].device_kind)
  mfu = round(flops * tokens / seconds / peak, 4) if peak else None
  found = {"step_ms": round(1000 * seconds, 2), "tokens_per_second": round(tokens / seconds)}
  return {**found, "mfu": mfu, "attention": island.describe()["execution"]["attention"]}


def attention(preset: tuple, steps: int, lengths: Sequence[int]) -> dict[str, Any]:
  """How much longer a step takes with the einsum, and the error of both against f32 arithmetic."""
  seconds = {}
  name, batch, remat, chunks = preset
  paths: list[Any] = ["auto", "einsum"]
  for path in paths:  # fewer sequences, since the einsum keeps its scores
    config = config_of(name, min(batch, 4), remat, chunks, {"islands.attention": path})
    seconds[path] = step_seconds(make_island(config), config, steps)
  ratio = round(seconds["einsum"] / seconds["auto"], 3)
  errors = {path: error_of(path, config.model, lengths) for path in paths}
  return {"einsum_vs_own": ratio, **errors}


def error_of(path: Any, model: ModelConfig, lengths: Sequence[int]) -> dict[str, float]:
  """|found - exact| / |exact| of the output and of each gradient, the largest over all lengths.

  The inputs are normal, rounded to the model's type; exact is the einsum in f32.
  """
  island = IslandConfig(attention=path)
  execution = devices.make_execution(devices.make_mesh(jax.devices()[:1], island), island, model)

  @functools.partial(jax.jit, static_argnums=1)
  def outcome(arrays: tuple[jax.Array, ...], execution: Execution) -> list[jax.Array]:
    def total(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array]:
      mixed = attend(query, key, value, execution)
      return jnp.sum(jnp.sin(mixed.astype(jnp.float32))), mixed

    gradients, mixed = jax.grad(total, argnums=(0, 1, 2), has_aux=True)(*arrays)
    return [each.astype(jnp.float32) for each in (mixed, *gradients)]

  worst = dict.fromkeys(("output", "query", "key", "value"), 0.0)
  for positions in lengths:
    heads = (model.num_heads, model.num_kv_heads, model.num_kv_heads)
    arrays = tuple(
      jax.random.normal(jax.random.key(n), (2, k, positions, model.head_dim), model.compute_dtype)
      for n, k in enumerate(heads)
    )
    with jax.default_matmul_precision("highest"):
      exact = outcome(tuple(x.astype(jnp.float32) for x in arrays), PLAIN)
    for name, one, other in zip(worst, outcome(arrays, execution), exact):
      error = float(jnp.linalg.norm(one - other) / jnp.linalg.norm(other))
      worst[name] = max(worst[name], round(error, 6))
  return worst


def overhead(preset: tuple, pairs: int) -> dict[str, Any]:
  """Steps with a syncer attached against bare ones."""
  config = config_of(*preset)
  period = config.sync.num_fragments  # a fragment a step
  config = dataclasses.replace(config, sync=dataclasses.replace(config.sync, sync_period=period))
  measured, rounds = bench_overhead.with_threads((config, pairs, 8))
  return {**bench_overhead.compared(measured, pairs, 8), "rounds": rounds}


def copies(preset: tuple) -> dict[str, Any]:
  """GB/s of the largest fragment, and of a plain array; medians."""
  config = config_of(*preset)
  plan, island = initial.make_plan(config), make_island(config)
  p = max(range(len(plan.sizes)), key=plan.sizes.__getitem__)
  gigabytes = 4e-9 * plan.sizes[p]
  flat = np.zeros(plan.sizes[p], np.float32)
  device = jax.devices()[0]
  plain = jax.device_put(flat, device)
  kind = devices.host_memory(device)

  def plain_out() -> None:
    if kind is None:
      np.array(plain)
    else:
      sharding = plain.sharding.with_memory_kind(kind)
      jax.block_until_ready(jax.device_put(plain + 0, sharding))

  def rate(work: Callable[[], Any]) -> float:
    seconds = [seconds_of(work) for _ in range(COPIES + 1)]  # the first warms up
    return round(gigabytes / statistics.median(seconds[1:]), 2)

  return {
    "fragment_mb": round(1000 * gigabytes, 1),
    "copy_out_gbps": rate(lambda: jax.block_until_ready(island.copy_out(p))),
    "copy_out_to_numpy_gbps": rate(lambda: island.to_host(island.copy_out(p), p)),
    "plain_out_gbps": rate(plain_out),
    "stage_gbps": rate(lambda: island.stage(p, flat)),
    "plain_in_gbps": rate(lambda: jax.block_until_ready(jax.device_put(flat, device))),
  }


def killed(folder: Path, cpu: bool, quick: bool) -> dict[str, Any]:
  """Two islands on one device; one is killed, and its work merged again."""
  preset, around = ("100k", 3.0) if quick else ("10m", 10.0)
  more = {
    "islands.num_learners": 2, "sync.snapshot_steps": 50, "run.evaluations": 0,
    "islands.min_step_seconds": QUICK_PACE_SECONDS if quick else 0.0,
  }  # fmt: skip
  config = config_of(preset, 4, "none", 1, more)

  with mock.patch.dict(os.environ, XLA_CLIENT_MEM_FRACTION=SHARE_OF_MEMORY):
    roles = Roles(config, folder / "run", cpu)
    for m in (0, 1):
      roles.start(m, accelerator=True)
    for m in (0, 1):
      roles.wait_merged(m, lives=1, commits=1)
    time.sleep(around)
    struck = time.time() - workdirs.start_time(roles.workdir)
    roles.signal("learner-1", signal.SIGKILL)
    time.sleep(AWAY_SECONDS)
    roles.start(1, accelerator=True)
    roles.wait_merged(1, lives=2, commits=1)
  again = common.merged(roles.log, 1, lives=2)[0].time
  time.sleep(around)
  roles.end()
  steps = roles.log.of(Step, "learner-0")
  before, after = (
    statistics.median(e.gap_seconds for e in steps if start <= e.time < start + around)
    for start in (struck - around, struck)
  )
  return {
    "survivor_step_ratio": round(after / before, 3),
    "survivor_blocked_seconds": round(sum(e.blocked_seconds for e in steps), 6),
    "seconds_until_merged_again": round(again - struck, 2),
  }


def has_accelerator() -> bool:
  """Checked in another process, so that this one does not hold the device yet."""
  code = "import jax; raise SystemExit(jax.default_backend() == 'cpu')"
  return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def main() -> None:
  given = common.options(__doc__, {"steps": 3, "pairs": 1}, steps=20, pairs=20, cpu=False)
  if not given.cpu and not has_accelerator():
    print("No GPU or TPU here: nothing is measured.")
    print(json.dumps({"accelerator": None}))
    return
  presets, lengths = (QUICK, LENGTHS[-1:]) if given.quick else (PRESETS, LENGTHS)
  found: dict[str, Any] = {}
  with common.folder() as folder:
    found["two_islands"] = report("two islands", killed, folder, given.cpu, given.quick)
  environment.prepare(num_cpu_devices=1, cpu_only=given.cpu)
  found["accelerator"] = jax.devices()[0].device_kind
  for preset in presets:
    found[preset[0]] = report(preset[0], speed, preset, given.steps)
  found["attention"] = report("attention", attention, presets[0], given.steps, lengths)
  found["overhead"] = report("overhead", overhead, presets[0], given.pairs)
  found["copies"] = report("copies", copies, presets[-1])
  print(json.dumps(found))
  if any("failed" in part for part in found.values()):
    sys.exit(1)


def report(name: str, part: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
  """The results of one part, printed at once: a later part may fail."""
  try:
    found = part(*arguments)
  except Exception as error:
    found = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"}
  gc.collect()
  print(f"{name}: {json.dumps(found)}", flush=True)
  return found


if __name__ == "__main__":
  common.run_script(main)
