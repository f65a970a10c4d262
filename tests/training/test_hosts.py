"""An island of two processes computes what the same island computes in one."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import jax
import msgspec
import numpy as np
import pytest

from ddiloco import environment
from ddiloco.engines.role_spec import free_urls
from ddiloco.network.host_links import HostProgress
from ddiloco.roles import initial
from ddiloco.training import hosts
from ddiloco.training.hosts import parts_held, parts_sent
from ddiloco.training.island import Island
from tests.training.two_hosts import batches, calls, config_of

# What a multislice job or another launcher leaves in the environment of every process.
POISON = {
  "MEGASCALE_COORDINATOR_ADDRESS": "192.0.2.1:8080",
  "MEGASCALE_NUM_SLICES": "4",
  "MEGASCALE_SLICE_ID": "3",
  "JAX_COORDINATOR_ADDRESS": "192.0.2.1:1234",
  "JAX_COORDINATOR_BIND_ADDRESS": "192.0.2.1:1234",
  "JAX_NUM_PROCESSES": "7",
  "JAX_PROCESS_ID": "5",
}


def together(mesh: str, folder) -> dict[str, np.ndarray]:
  """What comes out on two processes."""
  url, coordinator = free_urls(2)
  file = folder / "found.npz"
  command = [sys.executable, "-m", "tests.training.two_hosts"]
  coordinator = coordinator.removeprefix("tcp://")
  processes = [
    subprocess.Popen(
      [*command, str(host), url, coordinator, mesh, str(file)],
      env={**environment.bare(), **POISON},
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    for host in range(2)
  ]
  try:
    said = [each.communicate(timeout=240)[0] for each in processes]
  finally:
    for each in processes:
      each.kill()
  assert [each.returncode for each in processes] == [0, 0], "\n".join(said)
  done = {next(line for line in text.splitlines() if line.startswith("done")) for text in said}
  assert len(done) == 1, "every order was carried out on every host"
  with np.load(file) as found:
    return dict(found)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_processes_are_the_same_island_as_one_whatever_the_environment_says(tmp_path):
  """What is only moved is the same bit by bit. Sums over devices are made in another order."""
  mesh = "2x2x2"
  found = together(mesh, tmp_path)
  config = config_of(mesh, 1)
  plan = initial.make_plan(config)
  island = Island(config, 0, jax.devices()[:8], plan)
  alone = calls(island, plan, batches)
  assert found.keys() == alone.keys()
  assert np.array_equal(found["second"], found["again"]), "restored bit by bit"
  for name, value in alone.items():
    assert found[name].dtype == value.dtype and found[name].shape == value.shape
    np.testing.assert_allclose(found[name], value, rtol=2e-4, atol=2e-6, err_msg=name)
  assert found["count"] == alone["count"] == 7


def test_a_host_that_cannot_move_values_says_so():
  """Or the leader would wait for it, and the island train for ever without a sync."""
  orders = [msgspec.msgpack.encode(hosts.Take(7))]
  link = SimpleNamespace(receive=lambda: orders.pop())
  shelf, told = hosts._Shelf(), []
  shelf.put(7, None)
  error = RuntimeError("RESOURCE_EXHAUSTED")

  def get(number):
    raise error

  shelf.get = get
  hosts._move_values(None, link, shelf, HostProgress(), told.append)
  assert told == [error]


def test_every_part_of_an_array_is_sent_once_and_by_who_has_it():
  config = config_of("2x2x2", 1)
  island = Island(config, 0, jax.devices()[:8], initial.make_plan(config))
  for leaf in island.state_leaves().values():
    held, sent = (parts(leaf.sharding, leaf.shape) for parts in (parts_held, parts_sent))
    seen = np.zeros(leaf.shape, int)
    for host, parts in sent.items():
      assert set(parts) <= set(held[host])
      for part in parts:
        seen[tuple(slice(*each) for each in part)] += 1
    assert (seen == 1).all()
