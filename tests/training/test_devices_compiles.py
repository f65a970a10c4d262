"""A thread that compiles while it should train is noticed; what others compile is not its own.

What the compiler is asked beyond its defaults is never more than what it knows.
"""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import pytest

from ddiloco.config import IslandConfig
from ddiloco.training import devices
from ddiloco.training.devices import make_mesh, overlap_options, told_what_compiles


def test_what_this_thread_compiles_is_told_while_it_lasts(monkeypatch):
  monkeypatch.setattr(devices, "LEAST_SECONDS", 0.0)
  found = []
  x = jnp.ones(3)

  def mine(x):
    return jnp.sin(x) @ jnp.cos(x)

  def others(x):
    return jnp.cos(x) @ jnp.cos(x)

  with told_what_compiles(lambda program, seconds: found.append((program, seconds))):
    other = threading.Thread(target=lambda: jax.jit(others)(x))
    other.start()
    other.join(60)
    jitted = jax.jit(mine)
    jitted(x)
    jitted(x)
  jax.jit(lambda x: jnp.tan(x))(x)
  assert [program for program, _ in found] == ["jit(mine)"] and found[0][1] > 0


KNOWN = {"xla_cpu_enable_fast_math": False}


@pytest.mark.parametrize(
  ("asked", "count", "taken"),
  [(KNOWN, 8, KNOWN), (KNOWN, 1, {}), ({**KNOWN, "xla_of_another_version": True}, 8, {})],
  ids=["known", "one device", "unknown"],
)
def test_options_that_a_compiler_does_not_know_are_left_out(monkeypatch, asked, count, taken):
  monkeypatch.setattr(devices, "OVERLAP", {"cpu": asked})
  mesh = make_mesh(jax.devices()[:count], IslandConfig())
  assert overlap_options(mesh) == taken
