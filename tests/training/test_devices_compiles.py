"""Who compiles while it should train is noticed; programs are found again, also torn ones.

What the compiler is asked beyond its defaults is never more than what it knows.
"""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from ddiloco.config import IslandConfig
from ddiloco.training import devices
from ddiloco.training.devices import kept_in, make_mesh, overlap_options, told_what_compiles


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
  monkeypatch.setattr(devices, "LEAST_SECONDS", 1e9)  # of small arrays nobody is told
  with told_what_compiles(lambda program, seconds: found.append((program, seconds))):
    jax.jit(lambda x: jnp.sinh(x))(x)
  assert len(found) == 1


@pytest.fixture
def folder(tmp_path):
  """Compiles in it, as the first program of a process does."""
  own = jax.config.jax_compilation_cache_dir
  jax.config.update("jax_compilation_cache_dir", None)  # else it would take precedence

  def compile() -> dict[str, int]:
    with kept_in(tmp_path):
      jax.clear_caches()
      jax.jit(lambda x: jnp.sin(x) @ jnp.cos(x)).lower(jnp.ones(7)).compile()
    return {path.name: path.stat().st_size for path in tmp_path.glob("*-cache")}

  yield tmp_path, compile
  jax.config.update("jax_compilation_cache_dir", own)


@pytest.mark.parametrize("size", [0, 0.5])
def test_a_torn_program_is_replaced(folder, size):
  """It was compiled again at every start, since JAX replaces no entry."""
  path, compile = folder
  whole = compile()
  (torn,) = (name for name in whole if "lambda" in name)
  os.truncate(path / torn, int(size * whole[torn]))
  with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry"):
    assert compile().keys() == whole.keys()
  assert (path / torn).stat().st_size > 0.9 * whole[torn]
  assert compile().keys() == whole.keys()


def test_a_program_that_a_full_disk_cuts_off_leaves_no_entry(folder, monkeypatch):
  path, compile = folder
  write = Path.write_bytes

  def full(self, data):
    write(self, data[: len(data) // 2])
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  with monkeypatch.context() as patch, pytest.warns(UserWarning, match="Error writing persistent"):
    patch.setattr(type(jax._src.path.Path(path)), "write_bytes", full)
    assert not compile()
  assert compile()


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
