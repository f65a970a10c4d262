"""The one place that touches environment variables; call it before JAX makes its devices."""

from __future__ import annotations

import os
import sys


def prepare(num_cpu_devices: int, cpu_only: bool = False, supervises: bool = False) -> None:
  """Readies this process for several islands; must run before JAX is first used.

  Where JAX finds accelerators it uses them; else the CPU pretends to be `num_cpu_devices` devices
  (`cpu_only` forces that, for tests and laptops with a GPU).

  A process that only `supervises` others leaves the accelerators to them: it uses the CPU itself,
  and hands on what it was told.

  NPROC sizes XLA's CPU thread pool. Two meshes of fake CPU devices driven from two threads wait for
  each other inside that pool: with fewer threads than participants a collective never assembles
  and XLA aborts the process ("Termination timeout ... rendezvous").
  """
  if "jax" in sys.modules and "NPROC" not in os.environ:
    raise RuntimeError("JAX was imported before ddiloco.environment.prepare()")
  os.environ.setdefault("NPROC", "32")
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
  platforms = "cpu" if cpu_only else os.environ.get("JAX_PLATFORMS", "")
  if platforms and "cpu" not in platforms.split(","):
    platforms += ",cpu"  # shards and the evaluator live there
  if platforms:
    os.environ["JAX_PLATFORMS"] = platforms
  import jax  # only now: NPROC must be set before

  if supervises:
    jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", num_cpu_devices)


def bare() -> dict[str, str]:
  """The environment for a child that is to start as from a shell, and prepares itself."""
  return {k: v for k, v in os.environ.items() if k not in ("NPROC", "XLA_FLAGS")}
