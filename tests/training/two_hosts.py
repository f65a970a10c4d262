"""One of two processes that are one island: the calls of a learner, and what came out of them.

python -m tests.training.two_hosts HOST URL MESH FILE
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from ddiloco import environment
from ddiloco.config import Config, from_dict
from ddiloco.core.fragments import Plan, gather
from ddiloco.network.host_links import HostProgress, IslandIdentity, Meeting, join

HOSTS, DEVICES, PATIENCE_SECONDS = 2, 8, 120.0


def config_of(mesh: str, hosts: int) -> Config:
  """A tiny model on eight devices; `mesh` as "2x4x1": data, fsdp, tensor."""
  data, fsdp, tensor = map(int, mesh.split("x"))
  return from_dict(
    {
      "model": {
        "num_layers": 2, "model_dim": 16, "num_heads": 2, "num_kv_heads": 2, "head_dim": 8,
        "mlp_dim": 32,
      },
      "data": {"source": "synthetic", "sequence_length": 16},
      "inner": {"learning_rate": 1e-2, "warmup_steps": 2},
      "islands": {
        "devices": DEVICES, "hosts": hosts, "data": data, "fsdp": fsdp, "tensor": tensor,
        "batch_size": 8, "num_learners": 1,
      },
      "sync": {"num_shards": 1, "num_fragments": 3, "sync_period": 3},
    }
  )  # fmt: skip


def batches(position: int) -> Iterator[np.ndarray]:
  """Of the whole island, a function of the position."""
  for at in itertools.count(position):
    yield np.random.default_rng(at).integers(0, 256, (8, 17), np.int32)


def calls(island: Any, plan: Plan, read: Any) -> dict[str, np.ndarray]:
  """Everything a learner asks of its island; every value that comes back, by name."""
  from ddiloco.roles import initial

  out: dict[str, np.ndarray] = {}
  island.reset()
  params = initial.initial_params(config_of("1x8x1", 1))
  for fragment in plan.fragments:
    flat = gather(fragment, params)
    island.apply(fragment.index, island.stage(fragment.index, flat), 0.0)

  def steps(name: str, position: int, count: int) -> None:
    stream, losses = read(position), []
    for k in range(count):
      metrics = island.step(next(stream), position + k)
      losses.append([metrics["loss"], metrics["grad_norm"]])
    out[name] = np.array(losses)

  steps("first", 0, 4)
  random = np.random.default_rng(0)
  for fragment in plan.fragments:
    p = fragment.index
    out[f"copied/{p}"] = island.to_host(island.copy_out(p), p)
    shift = island.stage(p, random.normal(size=fragment.size, scale=1e-3).astype(np.float32))
    island.apply(p, shift, 1.0)
    moments = island.to_host(island.copy_out(p, moments=True), p)
    out[f"moments/{p}"] = moments
    out["count"] = np.array(int(island.count()))
    island.apply(p, island.stage(p, moments / 2, moments=True), 0.0, moments=True)
    island.set_count(7)
  captured = {name: np.array(value) for name, value in dict(island.capture()).items()}
  out |= {f"captured/{name}": value for name, value in captured.items()}
  steps("second", 4, 3)
  island.restore({name: island.place(name, value) for name, value in captured.items()})
  again = {name: np.array(value) for name, value in dict(island.capture()).items()}
  assert all(np.array_equal(again[name], captured[name]) for name in captured)
  steps("again", 4, 3)
  return out


def main(host: int, url: str, mesh: str, file: str) -> None:
  environment.prepare(num_cpu_devices=DEVICES // HOSTS, cpu_only=True)
  config, agreed = config_of(mesh, HOSTS), IslandIdentity("run", "", 0, HOSTS)
  if host:
    links, coordinator = join(url, agreed, host, None, PATIENCE_SECONDS)
  else:
    meeting = Meeting(url, agreed, None, PATIENCE_SECONDS)
    links, coordinator = meeting.wait(PATIENCE_SECONDS), meeting.coordinator
  environment.join_hosts(coordinator, HOSTS, host, PATIENCE_SECONDS, PATIENCE_SECONDS)
  import jax

  from ddiloco.checkpoint import snapshots
  from ddiloco.roles import initial
  from ddiloco.training import hosts, step
  from ddiloco.training.island import Island

  step.host_memory = lambda _: "pinned_host"  # as accelerators have it
  plan = initial.make_plan(config)
  island = Island(config, 0, jax.devices(), plan)
  island.compile()
  assert len(island.rows) == 8 // HOSTS
  happened, copy_out = list[str](), island.copy_out
  listen = jax.monitoring.register_event_duration_secs_listener
  listen(lambda event, *_, **__: happened.append(event))

  def copied(*what: Any) -> Any:
    happened.clear()
    pieces = copy_out(*what)
    assert not [event for event in happened if "compile" in event], "the next step would wait"
    return pieces

  island.copy_out = copied

  def own(position: int) -> Iterator[np.ndarray]:
    """Only the rows that a host needs must be there (`training.data.Stream`)."""
    for batch in batches(position):
      yield np.where(np.isin(np.arange(8), island.rows)[:, None], batch, 0)

  if host:
    progress = HostProgress()
    hosts.follow(island, links, own, progress, lambda _: os._exit(1))
    print(f"done {progress.done}")
  else:
    leading = hosts.LeadingIsland(island, plan, links, progress := HostProgress())
    found = calls(leading, plan, lambda position: leading.batches(own, position))
    assert leading.describe()["hosts"] == HOSTS
    collect, taken = leading.collect, []
    leading.collect = lambda number, arrays, views, name="": (
      taken.append(name),
      collect(number, arrays, views, name),
    )
    captured, saved, values = leading.capture(), leading.capture(), leading.capture()
    assert not taken, "nothing of a capture moves until it is asked for"
    name, array = next(iter(captured.items()))
    assert np.asarray(array).shape == array.shape and taken == [name], "then that array alone"
    storage = snapshots.Storage(f"{file}.snapshots", "plan", print)
    storage.save(1, "learner-0", 1, {}, saved)
    storage.commit(1, ["learner-0"])
    part = storage.find("learner-0", leading.place)
    assert all(isinstance(value, hosts.SharedValue) for value in part.arrays.values())
    leading.restore(part.arrays)
    again = leading.capture()
    assert all(np.array_equal(np.asarray(again[n]), np.asarray(values[n])) for n in values)
    leading.end(asked=False)
    np.savez(file, **found)
    print(f"done {progress.done}")
  jax.distributed.shutdown()
  environment.end_now(environment.FINISHED)


if __name__ == "__main__":
  main(int(sys.argv[1]), *sys.argv[2:])
