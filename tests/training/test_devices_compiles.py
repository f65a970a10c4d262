"""A thread that compiles while it should train is noticed; what others compile is not its own."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp

from ddiloco.training import devices
from ddiloco.training.devices import told_what_compiles


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
