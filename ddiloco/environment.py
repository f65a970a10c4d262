"""The one place that touches environment variables; call it before JAX makes its devices.

Also how processes end, what their exit statuses mean, and how many descriptors they may have.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import select
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

# Exit statuses of commands, runs and roles.
FINISHED = 0  # done, or ended when asked to and nothing is lost
LOST = 1  # work was lost, a run has failed, or what a command checks does not hold
BAD_USAGE = 2  # the command, its config, or what these name is wrong
INTERRUPTED = 130  # by Ctrl-C; of a whole run also by SIGTERM
TERMINATED = 143  # of a role that ended when asked to, where a scheduler takes 0 for a finished run


def end_now(status: int) -> NoReturn:
  """Ends the process without Python's own shutdown.

  During that shutdown an XLA thread that releases an array would end the process with "exception
  not rethrown" or a segmentation fault, and a success would count as a crash.
  """
  for stream in (sys.stdout, sys.stderr):
    # RuntimeError: a signal's handler ends the process, and a print of this thread is under way.
    with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):
      stream.flush()
  if util := sys.modules.get("multiprocessing.util"):
    # Of that shutdown only this is not left out: the folder in /tmp with the fork server's socket.
    with contextlib.suppress(Exception):
      for each in [*util._finalizer_registry.values()]:
        if each._callback is util._remove_temp_dir:
          each()
  os._exit(status)


@contextlib.contextmanager
def reader_may_leave() -> Iterator[None]:
  """A block that prints ends early, without an error, when its reader has enough (head, less).

  Any other exception of the block passes.
  """
  try:
    yield
  except BrokenPipeError:
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    if not poll.poll(0):  # its reader is there: another pipe broke
      raise
  finally:  # another error goes on, also if the reader has left
    try:
      print(end="", flush=True)  # does nothing where there is no standard output
    except BrokenPipeError:  # Python's own last flush must not fail again
      os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def importing() -> Iterator[None]:
  """In this context of a command Python's garbage collector rests; afterwards it passes over what
  is there. Imports make objects by the hundred thousand, and hardly any garbage."""
  gc.disable()
  try:
    yield
  finally:
    gc.freeze()
    gc.enable()


MOST_DESCRIPTORS = 10_240  # where the system names no limit, or one that it does not grant


def raise_limit() -> int:
  """Raises this process's limit of descriptors as far as the system allows; returns the limit."""
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  for limit in (hard, MOST_DESCRIPTORS):  # a system may grant less than its hard limit
    with contextlib.suppress(ValueError, OSError):
      if limit == resource.RLIM_INFINITY or limit > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
      break
  soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
  return soft if soft != resource.RLIM_INFINITY else MOST_DESCRIPTORS


# Variables that make JAX or libtpu wait for processes or slices outside the island.
_JOINS = (
  *("MEGASCALE_", "JAX_COORDINATOR_", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_LOCAL_DEVICE_"),
  *("JAX_PARTITION_INDEX", "JAX_SLICE_INDEX"),
)


def before_import() -> None:
  """Sets what must be in the environment when JAX makes its devices, here or in a child process.

  An island never waits for another island's devices: variables that would join slices or processes
  are removed. Only `join_hosts` tells JAX which processes belong together.

  NPROC sizes XLA's CPU thread pool. Two meshes of fake CPU devices driven from two threads wait for
  each other inside that pool: with fewer threads than participants a collective never assembles
  and XLA aborts the process ("Termination timeout ... rendezvous").

  CRC32C_SW_MODE is set by tensorboardX when it is imported, in the middle of a run. A new variable
  moves the C library's table of variables, and XLA threads that read it crash: so it is set now.

  XLA pins at most XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB of memory for all GPUs of a process, as it
  needs it. Its own limit is 64; the copy of a state for a snapshot may be larger.
  """
  memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
  os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(max(64, memory_gb)))
  os.environ.setdefault("NPROC", "32")
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
  os.environ.setdefault("CRC32C_SW_MODE", "auto")
  for name in [each for each in os.environ if each.startswith(_JOINS)]:
    del os.environ[name]


def prepare(
  num_cpu_devices: int,
  cpu_only: bool = False,
  supervises: bool = False,
  gpus: Sequence[int] = (),
) -> None:
  """Readies this process for several islands; must run before JAX makes its devices.

  Where JAX finds accelerators it uses them; else the CPU pretends to be `num_cpu_devices` devices
  (`cpu_only` forces that, for tests and laptops with a GPU).

  A process that only `supervises` others leaves the accelerators to them: it uses the CPU itself,
  and its children inherit the setting of JAX_PLATFORMS. JAX reads the environment only when it is
  imported. The user's own model or `engines/children.py` may have imported it already, so
  `jax.config` gets the same setting.

  With `gpus` it has these alone, by the numbers that JAX would give them; where the user restricts
  the whole run (CUDA_VISIBLE_DEVICES), JAX numbers those that are left.

  Raises:
    RuntimeError: JAX has made its devices already.
  """
  before_import()
  platforms = "cpu" if cpu_only else os.environ.get("JAX_PLATFORMS", "")
  if platforms and "cpu" not in platforms.split(","):
    platforms += ",cpu"  # shards and the evaluator live on the CPU
  if platforms:
    os.environ["JAX_PLATFORMS"] = platforms
  import jax

  if supervises or platforms:
    jax.config.update("jax_platforms", "cpu" if supervises and not gpus else platforms)
  for maker in ("cuda", "rocm") if gpus else ():
    jax.config.update(f"jax_{maker}_visible_devices", ",".join(map(str, gpus)))
  jax.config.update("jax_num_cpu_devices", num_cpu_devices)


def join_hosts(
  coordinator: str, hosts: int, host: int, timeout_seconds: float, silence_seconds: float
) -> None:
  """Joins the processes of one island, before JAX makes its devices; waits for all of them.

  JAX is given every value that it would otherwise look up. So it asks neither a scheduler nor the
  machine's metadata, which would name the hosts of other slices too.

  Args:
    coordinator: HOST:PORT, where host 0 serves; it listens nowhere else.
    hosts: how many processes the island has.
    host: number of this process.
    timeout_seconds: how long to wait for the other processes.
    silence_seconds: after which JAX ends the processes of an island that has lost one.
  """
  import jax

  # gRPC would ask an HTTP proxy of the environment, which may be for gs:// alone, for a connection.
  os.environ["no_grpc_proxy"] = coordinator.rpartition(":")[0].strip("[]")  # noqa: SIM112
  jax.config.update("jax_check_proxy_envs", False)  # it would warn of that
  # JAX's preemption service would catch SIGTERM, by which a role is asked to save its work and end.
  jax.config.update("jax_enable_preemption_service", False)
  # For CPU devices only; accelerators have their interconnect.
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
  """Readies this process to compile for chips that are only described (`training/aot.py`).

  Several such processes, and one that does use TPUs, may share a machine.
  """
  os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
  os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # ask no cloud which TPU this machine has
  prepare(num_cpu_devices=1, cpu_only=True)


def takes_the_cpu() -> bool:
  """Whether JAX_PLATFORMS says that JAX shall use the CPU, whatever else is there."""
  return os.environ.get("JAX_PLATFORMS", "").partition(",")[0] == "cpu"


def whole() -> dict[str, str]:
  """All environment variables, for `take_over` in another process."""
  return dict(os.environ)


@contextlib.contextmanager
def of_one_run() -> Iterator[None]:
  """After this context JAX_PLATFORMS and JAX's own setting are what they were: a program's next run
  may use other devices, if JAX has made none yet."""
  before, jax = os.environ.get("JAX_PLATFORMS"), sys.modules.get("jax")
  platforms = jax.config.jax_platforms if jax else before
  try:
    yield
  finally:
    os.environ.pop("JAX_PLATFORMS", None)
    if before is not None:
      os.environ["JAX_PLATFORMS"] = before
    if jax := sys.modules.get("jax"):
      jax.config.update("jax_platforms", platforms)


def take_over(variables: dict[str, str]) -> None:
  """Makes these the only environment variables of this process, which was forked."""
  os.environ.clear()
  os.environ.update(variables)
  if jax := sys.modules.get("jax"):  # the fork server, begun by an earlier run, has read its own
    jax.config.update("jax_platforms", variables.get("JAX_PLATFORMS"))
