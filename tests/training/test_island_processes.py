"""Processes that JAX has joined are refused by name where they are not the hosts of one island."""

from __future__ import annotations

import subprocess
import sys

import jax
import pytest

from ddiloco.config import ConfigError
from ddiloco.engines.role_spec import free_urls
from ddiloco.roles import initial
from ddiloco.training.devices import require_processes
from ddiloco.training.island import Island
from tests.engines.real import tiny

CHILD = """
import sys
from ddiloco import environment
environment.prepare(num_cpu_devices=1, cpu_only=True)
import jax
port, rank = sys.argv[1:]
jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(rank), initialization_timeout=200)
from ddiloco.config import Config, ConfigError
from ddiloco.roles import initial
from ddiloco.training.island import Island
try:
  Island(Config(), 0, jax.devices()[:2], initial.make_plan(Config()))
except ConfigError as error:
  print(f"refused: {error}", flush=True)
jax.distributed.shutdown()
"""


def test_an_island_of_several_processes_is_refused_before_it_compiles(monkeypatch):
  monkeypatch.setattr(jax, "process_count", lambda: 4)
  config = tiny(10)
  with pytest.raises(ConfigError, match=r"islands.hosts = 1: JAX has joined 4 processes"):
    Island(config, 0, jax.devices()[:1], initial.make_plan(config))


def test_the_devices_of_this_process_are_fine():
  assert {device.process_index for device in jax.devices()} == {jax.process_index()}
  require_processes(1)  # raises if not


@pytest.mark.slow
def test_two_processes_that_have_joined_jax_are_both_refused():
  port = free_urls(1)[0].rpartition(":")[2]
  children = [
    subprocess.Popen(
      [sys.executable, "-c", CHILD, port, str(rank)],
      stdout=subprocess.PIPE,
      text=True,
    )
    for rank in range(2)
  ]
  for child in children:
    said, _ = child.communicate()
    assert "refused: islands.hosts = 1: JAX has joined 2 processes" in said
    assert "Fix: set islands.hosts" in said
