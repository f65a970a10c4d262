"""The devices of an island, its mesh, the layout of arrays, and the cache of compiled programs.

A mesh has three axes: `data` (copies of the parameters), `fsdp` (parameters and batch split) and
`tensor` (heads, MLP width and vocabulary split). Logical axis names, as the model gives them,
become mesh axes through `RULES` alone.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import itertools
import logging
import math
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ddiloco.checks import require
from ddiloco.config import Config, IslandConfig, ModelConfig
from ddiloco.models.model import Execution

Device = Any  # a jax.Device; tests use stand-ins

MESH_AXES = ("data", "fsdp", "tensor")

# Logical axis -> mesh axes that may split it. An axis that is missing here is never split.
RULES: dict[str, tuple[str, ...]] = {
  "batch": ("data", "fsdp"),
  "copies": ("data",),  # the batch axis of an array whose "embed" axis is split too
  "embed": ("fsdp",),
  "vocab": ("tensor",),
  "heads": ("tensor",),
  "kv_heads": ("tensor",),
  "mlp": ("tensor",),
  # Activations are whole on every tensor shard, so experts spread over it need no all-to-all.
  "experts": ("tensor",),
}

# JAX's `device_kind` -> peak FLOPs a second of one device: bf16, without sparsity, as its maker
# states it. For a kind that is not listed no MFU is shown.
PEAK_FLOPS = {
  "TPU v4": 275e12,
  **dict.fromkeys(("TPU v5 lite", "TPU v5e"), 197e12),
  **dict.fromkeys(("TPU v5", "TPU v5p"), 459e12),
  **dict.fromkeys(("TPU v6 lite", "TPU v6e"), 918e12),
  "TPU7x": 2307e12 / 2,  # each of its two cores is a device
  **dict.fromkeys(("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB"), 312e12),
  **dict.fromkeys(("NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe"), 312e12),
  "NVIDIA H100 PCIe": 756e12,
  **dict.fromkeys(("NVIDIA H100 NVL", "NVIDIA H200 NVL"), 835e12),
  **dict.fromkeys(("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GH200 480GB"), 989e12),
  "NVIDIA B200": 2250e12,
  "NVIDIA GB200": 2500e12,
  "NVIDIA L4": 121e12,
  "NVIDIA L40S": 362e12,
}


def usable() -> list[Device]:
  """All devices that islands of this process may use.

  Raises:
    ConfigError: accelerators are asked for, and JAX has found the CPU alone.
  """
  found, platforms = jax.devices(), jax.config.jax_platforms or ""
  gpus = jax.config.values["jax_cuda_visible_devices"]
  alone = found[0].platform == "cpu"
  rule = "JAX finds no such devices here"
  fix = "repair the driver, or leave it out to train on the CPU"
  require(not alone or gpus == "all", "--gpus", gpus, rule, fix)
  good = not alone or platforms.partition(",")[0] in ("", "cpu")
  require(good, "JAX_PLATFORMS", platforms, rule, fix)
  return found


def partition(devices: Sequence[Device], counts: Sequence[int]) -> list[list[Device]]:
  """The devices of every learner, in learner order.

  `counts` are the learners' islands.devices. A learner with a count gets so many devices, in order
  (inside one slice where they fit). A learner with 0 gets a whole slice where devices have several
  distinct `slice_index`, else an even share of what the other counts leave. Spare devices stay
  unused.

  On the CPU, all islands of one device share one. Fake devices are the same cores anyway, and a
  program compiled for one device runs on no other; so these islands compile once, and a program
  that has used JAX may train any number of them. Islands of several devices keep their own: on
  shared devices their collectives would wait for each other.

  Raises:
    ConfigError: there are too few devices or slices.
  """
  slices: dict[Any, list[Device]] = {}
  for device in devices:
    slices.setdefault(getattr(device, "slice_index", None), []).append(device)
  free, wanted = [slices[index] for index in sorted(slices)], list(counts)
  if len(slices) <= 1:
    shared = (len(devices) - sum(counts)) // max(1, wanted.count(0))
    wanted = [count or max(1, shared) for count in counts]
  given: dict[int, list[Device]] = {}
  shared_one: list[Device] = []
  for m, count in sorted(enumerate(wanted), key=lambda each: each[1] > 0):  # slices come first
    if count:
      every = [device for group in free for device in group]
      own = next((group for group in free if len(group) >= count), every)[:count]
      given[m] = shared_one if count == 1 and shared_one else own
      free = [[device for device in group if device not in given[m]] for group in free]
    else:
      given[m] = free.pop(0) if free else []
    rule = f"{len(counts)} learners need more than {len(devices)} devices in {len(slices)} slices"
    fix = "lower it, islands.num_learners or run.evaluator_devices, or give the run more devices"
    fix = f"{fix} (where JAX was used before the run, it has made them: use a new process)"
    require(len(given[m]) >= max(1, count), "islands.devices", list(counts), rule, fix)
    if len(given[m]) == 1 and given[m][0].platform == "cpu":
      shared_one = shared_one or given[m]
  return [given[m] for m in range(len(counts))]


class Shares:
  """The devices of every island, the same for all its lives; the evaluator has the last ones.

  Args:
    config: the run's.
    visible: all devices that the run may use.

  Raises:
    ConfigError: they are too few.
  """

  def __init__(self, config: Config, visible: Sequence[Device]):
    self._islands = config.islands
    self._usable = visible[: max(0, len(visible) - config.run.evaluator_devices)]
    counts = [config.islands.island(m).devices for m in range(config.num_islands())]
    self._given = dict(enumerate(partition(self._usable, counts)))

  def of(self, learner: int) -> list[Device]:
    """Its devices; a learner that was not planned gets some that no other has, or on the CPU, where
    all have some, the one that islands of one device share.

    Raises:
      ConfigError: too few are left.
    """
    if learner not in self._given:
      groups = self._given.values()
      used = {device for group in groups for device in group}
      shared = [group[0] for group in groups if len(group) == 1 and group[0].platform == "cpu"]
      free = [device for device in self._usable if device not in used] or shared[:1]
      (self._given[learner],) = partition(free, [self._islands.island(learner).devices])
    return self._given[learner]


def island_devices(
  island: IslandConfig, visible: Sequence[Device], learner: int, host: int = 0
) -> list[Device]:
  """The devices that an island uses, of all that its processes see: the first ones of each host.

  `host` is the number of this process in its island.

  Raises:
    ConfigError: there are too few devices, or JAX has another number for this process: the hosts
      would take each other's values.
  """
  mine, fix = jax.process_index(), "number hosts as their slice does (TPU_WORKER_ID)"
  good = host == mine or jax.process_count() != island.hosts  # which is refused later
  require(good, "--host", host, f"is process {mine} of its island to JAX", fix)
  hosts: dict[int, list[Device]] = {}
  for device in visible:
    hosts.setdefault(device.process_index, []).append(device)
  share = (island.devices or len(visible)) // len(hosts)
  fewest, fix = min(map(len, hosts.values())), "lower it, or give the process more devices"
  rule = f"learner {learner} sees {len(visible)} devices on {len(hosts)} hosts, {fewest} on one"
  require(share <= fewest, "islands.devices", island.devices, rule, fix)
  return [device for host in sorted(hosts) for device in hosts[host][:share]]


def host_memory(device: Device) -> str | None:
  """The kind of host memory that a device copies to directly; None: there is none.

  By default a copy to the host goes through one small staging buffer, at a tenth of the speed of
  the connection (on an H100: 2.7 of 25 GB/s). A CPU's arrays lie in host memory already.
  """
  kinds = {memory.kind for memory in device.addressable_memories()}
  return "pinned_host" if device.platform != "cpu" and "pinned_host" in kinds else None


def lost_devices(error: BaseException | None) -> bool:
  """Whether an error comes from the runtime, such as of a failed slice, not from the program."""
  return error is not None and (
    isinstance(error, jax.errors.JaxRuntimeError) or lost_devices(error.__cause__)
  )


def answering(devices: Sequence[Device]) -> list[Device] | None:
  """The devices with the same ids that JAX has now, if all are there and compute; else None.

  After a slice has failed, a controller of several slices (Pathways) may give the ids to other
  devices.
  """
  now = {device.id: device for device in jax.devices(devices[0].platform)}
  found = [now[device.id] for device in devices if device.id in now]
  try:
    jax.block_until_ready([jax.device_put(np.float32(1), device) + 1 for device in found])
  except jax.errors.JaxRuntimeError:
    return None
  return found if len(found) == len(devices) else None


def require_processes(hosts: int) -> None:
  """Refuses to go on (ConfigError) if JAX joins more or fewer processes than an island's hosts."""
  rule = f"JAX has joined {jax.process_count()} processes, whose devices this one could not read"
  fix = (
    "set islands.hosts to the island's processes and let --engine=processes, or `ddiloco learner"
    " --hosts=... --host=...`, join them; do not call jax.distributed.initialize"
  )
  require(jax.process_count() == hosts, "islands.hosts", hosts, rule, fix)


def make_mesh(devices: Sequence[Device], island: IslandConfig) -> Mesh:
  """The island's mesh with axes (data, fsdp, tensor), all of them sharded by the compiler (Auto).

  On TPUs devices are ordered so that neighbours in the mesh are neighbours on the interconnect.

  Raises:
    ConfigError: the mesh axes do not multiply to the number of devices.
  """
  shape = island.mesh_shape(len(devices))
  array = np.array(devices, object).reshape(shape)
  if devices[0].platform == "tpu":
    try:
      array = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    except (AssertionError, NotImplementedError, ValueError) as error:
      # Devices that form no cuboid (part of a slice, several slices) train too, but slower.
      logging.warning("devices %s are no TPU sub-grid, taken in plain order: %s", devices, error)
  return Mesh(array, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def param_sharding(
  axes: Sequence[str | None] | None, shape: Sequence[int], mesh: Mesh
) -> NamedSharding:
  """The layout of an array (parameter or activation) with these logical axes, one per dimension.

  A mesh axis is left out where it does not divide the dimension or an earlier dimension uses it.
  `axes` None: no dimension has a name, and every device has the whole array.

  Raises:
    ValueError: `axes` and `shape` have different lengths.
  """
  used: set[str] = set()
  spec: list[Any] = []
  for name, size in zip((None,) * len(shape) if axes is None else axes, shape, strict=True):
    split: list[str] = []
    for axis in RULES.get(name or "", ()):
      parts = math.prod(mesh.shape[a] for a in (*split, axis))
      if axis not in used and mesh.shape[axis] > 1 and size % parts == 0:
        split.append(axis)
    used.update(split)
    spec.append(split[0] if len(split) == 1 else tuple(split) or None)
  return NamedSharding(mesh, PartitionSpec(*spec))


def cutting_axes(sharding: NamedSharding, ndim: int) -> list[tuple[str, ...]]:
  """For each dimension of an array with this layout, the mesh axes that split it."""
  spec = [*sharding.spec, *[None] * ndim][:ndim]
  return [(each,) if isinstance(each, str) else each or () for each in spec]


def without_copies(
  sharding: NamedSharding, shape: Sequence[int], source: NamedSharding
) -> NamedSharding:
  """The layout, split further by the mesh axes along which devices of one process have copies of
  its `source`, where they divide a dimension. Each of them then gives its part: they exchange
  nothing for it, and no process needs values of another one that has the same."""
  mesh, split = sharding.mesh, cutting_axes(sharding, len(shape))
  used = set(itertools.chain(*cutting_axes(source, len(source.spec))))
  process = np.vectorize(lambda device: device.process_index)(mesh.devices)
  for i, axis in enumerate(mesh.axis_names):
    if axis in used or np.ptp(process, axis=i).any():
      continue
    parts = (math.prod(mesh.shape[name] for name in (*each, axis)) for each in split)
    fits = (d for d, (size, count) in enumerate(zip(shape, parts)) if size % count == 0)
    if (d := next(fits, None)) is not None:
      split[d] = (*split[d], axis)
  return NamedSharding(mesh, PartitionSpec(*split))


CUDNN_HEADS = 256  # the largest heads for which cuDNN has attention and its gradient on any GPU


def cudnn_heads(gpu: Device) -> int:
  """The largest heads for which cuDNN has attention and its gradient on this GPU; 0: for none.

  None before Ampere (compute capability 8), and on GPUs of other makers. 256 on Hopper (9) alone:
  on Blackwell larger heads than 128 have no gradient before cuDNN 9.23.
  """
  major = gpu.compute_capability.partition(".")[0]
  return 0 if not major.isdigit() or int(major) < 8 else CUDNN_HEADS if major == "9" else 128


def attention_path(
  island: IslandConfig, model: ModelConfig, platform: str, largest: int = CUDNN_HEADS
) -> str:
  """The path of an island's attention on this platform, whose GPUs take heads up to `largest`.

  `islands.attention = "auto"` is splash attention on TPUs, cuDNN's on GPUs where it takes the
  model (bf16, heads of a multiple of 8 and up to `largest`), and else the reference.

  Raises:
    ConfigError: the configured path of attention does not run on this platform.
  """
  dtype, size = model.compute_dtype, model.head_dim
  taken = dtype == "bfloat16" and size % 8 == 0 and size <= largest
  own = {"tpu": "splash", "gpu": "cudnn" if taken else "einsum"}
  best = own.get(platform, "einsum")
  good = island.attention in ("auto", "einsum", best)
  paths = " or ".join(dict.fromkeys(("einsum", best)))
  rule = f"must be {paths} for platform {platform!r} and a model in {dtype} with heads of {size}"
  fix = f"use 'auto', which is {best} here"
  require(good, "islands.attention", island.attention, rule, fix)
  return best if island.attention == "auto" else island.attention


def make_execution(mesh: Mesh, island: IslandConfig, model: ModelConfig) -> Execution:
  """How this island's devices compute a model.

  Raises:
    ConfigError: as of `attention_path`.
  """
  every, me = list(mesh.devices.flat), jax.process_index()
  # A process knows the kind of its own devices.
  gpus = (each for each in every if each.platform == "gpu" and each.process_index == me)
  largest = min(map(cudnn_heads, gpus), default=0)
  return Execution(
    layout=functools.partial(param_sharding, mesh=mesh) if mesh.size > 1 else None,
    attention=attention_path(island, model, every[0].platform, largest),
    remat=island.remat,
    loss_chunks=island.loss_chunks,
  )


# --- What the compiler is asked beyond its defaults

# By default libtpu gathers weights over a whole slice of v5p by blocking all-reduces, of twice the
# traffic, and over one of v6e by blocking all-gathers. The first three, together, make each
# all-gather a part of the products before it; the others do so with the sums of gradients
# (docs/accelerators.md).
OVERLAP = {
  "tpu": {
    "xla_enable_async_all_gather": True,
    "xla_tpu_prefer_async_allgather_to_allreduce": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
    "xla_enable_async_all_reduce": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": True,
  }
}


def overlap_options(mesh: Mesh) -> dict[str, bool]:
  """`OVERLAP` of the mesh's platform; empty if its compiler does not know all of these options."""
  options = OVERLAP.get(mesh.devices.flat[0].platform) if mesh.size > 1 else None
  if options is None:
    return {}
  scalar = jax.ShapeDtypeStruct((), np.float32, sharding=NamedSharding(mesh, PartitionSpec()))
  try:
    jax.jit(lambda x: x).lower(scalar).compile(compiler_options=options)
  except jax.errors.JaxRuntimeError as error:
    if "No such compile option" not in str(error):
      raise
    logging.warning("steps overlap less with their exchanges: %s", str(error).splitlines()[0])
    return {}
  return options


# --- Compiled programs outlive the process: a restarted role finds them in a folder

_TORN = re.compile("Error (?:read|writ)ing persistent compilation cache entry for '(.+?)'")


@contextlib.contextmanager
def kept_in(folder: str | os.PathLike[str]) -> Iterator[None]:
  """In this context the programs of this process are kept in `folder`, and found there again.

  Several processes may share the folder. JAX replaces no entry: one that a kill or a full disk has
  torn is deleted when JAX warns of it. A user's own folder (JAX_COMPILATION_CACHE_DIR), which many
  runs may share, takes precedence, and is left as it is.
  """
  settings = {
    "jax_compilation_cache_dir": jax.config.jax_compilation_cache_dir or os.fspath(folder),
    # Quickly compiled programs are kept too: a role has a hundred small programs.
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
  }
  before = {name: getattr(jax.config, name) for name in settings}
  show = warnings.showwarning

  def delete_torn(message: Warning | str, *more: Any) -> None:
    if found := _TORN.match(str(message)):
      for entry in Path(folder).glob(f"{glob.escape(found[1])}-*-cache"):
        with contextlib.suppress(OSError):  # gone, or of another user
          entry.unlink()
    show(message, *more)

  warnings.showwarning = delete_torn
  _use(settings)
  try:
    yield
  finally:
    _use(before)
    warnings.showwarning = show


def _use(settings: dict[str, object]) -> None:
  for name, value in settings.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()  # JAX looks at the folder once only


# --- Programs that are compiled while a role trains

LEAST_SECONDS = 0.01  # shorter compilations are of small arrays; their events would be noise
_COMPILED = "/jax/core/compile/backend_compile_duration"  # also for programs from the cache


@contextlib.contextmanager
def told_what_compiles(tell: Callable[[str, float], None]) -> Iterator[None]:
  """In this context calls `tell(program, seconds)` for each program that this thread compiles.

  A role compiles ahead of time, so it should compile nothing while it trains. If it does, its chips
  wait; then the log says so, and the goodput ledger has a cause.
  """
  me = threading.get_ident()

  def listen(event: str, seconds: float, **more: Any) -> None:
    if event == _COMPILED and threading.get_ident() == me and seconds >= LEAST_SECONDS:
      tell(str(more.get("fun_name", "a program")), seconds)

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    yield
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)
