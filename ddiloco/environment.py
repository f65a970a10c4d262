"""The one place that touches environment variables; call it before JAX makes its devices.

And how processes end, and what they say with their exit statuses.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn

# Exit statuses of commands, runs and roles.
FINISHED = 0  # or left when asked to, and nothing is lost
LOST = 1  # work was lost, or what a command checks does not hold
BAD_USAGE = 2  # another start would end the same way
INTERRUPTED = 130  # by Ctrl-C; of a whole run also by SIGTERM
TERMINATED = 143  # of a role that left when asked to: to schedulers, 0 says that the run is over


def end_now(status: int) -> NoReturn:
  """Ends the process without taking Python apart.

  A thread of XLA that gives back an array meanwhile would end it with "exception not rethrown" or a
  segmentation fault, and work well done would count as a crash.
  """
  for stream in (sys.stdout, sys.stderr):
    with contextlib.suppress(OSError, ValueError, AttributeError):
      stream.flush()
  os._exit(status)


# What makes JAX or libtpu wait for other processes or slices than an island's own.
_JOINS = (
  *("MEGASCALE_", "JAX_COORDINATOR_", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_LOCAL_DEVICE_"),
  *("JAX_PARTITION_INDEX", "JAX_SLICE_INDEX"),
)


def before_import() -> None:
  """What must be in the environment when JAX makes its devices, here or in a child process.

  An island never waits for another one's devices: variables that would join slices or processes
  are taken away. Which processes belong together is said to JAX by `join_hosts` alone.

  NPROC sizes XLA's CPU thread pool. Two meshes of fake CPU devices driven from two threads wait for
  each other inside that pool: with fewer threads than participants a collective never assembles
  and XLA aborts the process ("Termination timeout ... rendezvous").
  """
  os.environ.setdefault("NPROC", "32")
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
  for name in [each for each in os.environ if each.startswith(_JOINS)]:
    del os.environ[name]


def prepare(num_cpu_devices: int, cpu_only: bool = False, supervises: bool = False) -> None:
  """Readies this process for several islands; must run before JAX makes its devices.

  Where JAX finds accelerators it uses them; else the CPU pretends to be `num_cpu_devices` devices
  (`cpu_only` forces that, for tests and laptops with a GPU).

  A process that only `supervises` others leaves the accelerators to them: it uses the CPU itself,
  and hands on what it was told. In a process where JAX is imported already (by the user's own model
  or `engines/children.py`) it says the same to JAX itself, which reads the environment only then.

  Raises:
    RuntimeError: JAX has made its devices.
  """
  before_import()
  platforms = "cpu" if cpu_only else os.environ.get("JAX_PLATFORMS", "")
  if platforms and "cpu" not in platforms.split(","):
    platforms += ",cpu"  # shards and the evaluator live there
  if platforms:
    os.environ["JAX_PLATFORMS"] = platforms
  import jax

  if supervises or platforms:
    jax.config.update("jax_platforms", "cpu" if supervises else platforms)
  jax.config.update("jax_num_cpu_devices", num_cpu_devices)


def join_hosts(
  coordinator: str, hosts: int, host: int, timeout_seconds: float, silence_seconds: float
) -> None:
  """Joins the processes of one island, before JAX makes its devices; waits for all of them.

  All that JAX would look up is said: it asks no scheduler and no metadata of the machine, which
  would name the hosts of other slices too.

  Args:
    coordinator: HOST:PORT, where host 0 serves; it listens nowhere else.
    hosts: how many.
    host: which of them this is.
    timeout_seconds: for the others to come.
    silence_seconds: after which JAX ends the processes of an island that has lost one.
  """
  import jax

  # It would take SIGTERM from us, which asks a role to bring out its work.
  jax.config.update("jax_enable_preemption_service", False)
  # The CPU's own; accelerators have their interconnect.
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  jax.distributed.initialize(
    coordinator,
    hosts,
    host,
    cluster_detection_method="deactivate",
    initialization_timeout=int(timeout_seconds),
    coordinator_bind_address=coordinator,
    heartbeat_timeout_seconds=int(silence_seconds),
    shutdown_timeout_seconds=int(silence_seconds),
  )


def describe_only() -> None:
  """Readies this process for TPUs that are only described (`training/aot.py`): it uses none.

  Several such processes, and one that does use TPUs, may share a machine.
  """
  os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
  os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # nor asks a cloud which TPU this machine has
  prepare(num_cpu_devices=1, cpu_only=True)


def whole() -> dict[str, str]:
  """All of it, for `take_over` in another process."""
  return dict(os.environ)


def take_over(variables: dict[str, str]) -> None:
  """This process has these variables from now on, and no others."""
  os.environ.clear()
  os.environ.update(variables)


def bare() -> dict[str, str]:
  """The environment for a child that is to start as from a shell, and prepares itself."""
  return {k: v for k, v in os.environ.items() if k not in ("NPROC", "XLA_FLAGS")}
