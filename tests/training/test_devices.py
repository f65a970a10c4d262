import dataclasses
import itertools
import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ddiloco.config import ConfigError, IslandConfig, ModelConfig, from_dict
from ddiloco.training import devices


@dataclasses.dataclass(frozen=True)
class SliceDevice:
  id: int
  slice_index: int
  platform: str = "stub"


def _slices(*sizes):
  owner = [index for index, size in enumerate(sizes) for _ in range(size)]
  return [SliceDevice(id, slice_index) for id, slice_index in enumerate(owner)]


def _ids(groups):
  return [[device.id for device in group] for group in groups]


def _partition(available, *counts):
  return _ids(devices.partition(available, counts))


@pytest.mark.parametrize(
  ("available", "counts", "expected"),
  [
    (_slices(8), (0, 0, 0, 0), [[0, 1], [2, 3], [4, 5], [6, 7]]),
    (_slices(8), (0, 0, 0), [[0, 1], [2, 3], [4, 5]]),
    (_slices(8), (1, 4, 1), [[0], [1, 2, 3, 4], [5]]),
    (_slices(8), (4, 0, 0), [[0, 1, 2, 3], [4, 5], [6, 7]]),  # a share of what the counts leave
    (_slices(3, 2, 3), (0, 0, 0), [[0, 1, 2], [3, 4], [5, 6, 7]]),  # a slice each
    (_slices(4), (0, 0), [[0, 1], [2, 3]]),
    (_slices(4, 4), (3, 3), [[0, 1, 2], [4, 5, 6]]),  # inside a slice where they fit,
    (_slices(2, 2), (3,), [[0, 1, 2]]),  # else across
    (_slices(2, 2), (1, 0), [[2], [0, 1]]),  # whole slices come first
  ],
)
def test_partition(available, counts, expected):
  assert _partition(available, *counts) == expected


def test_devices_without_slices_are_one():
  assert _partition(jax.devices(), 0, 0) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_slices_are_told_apart_in_any_order():
  shuffled = [_slices(3, 2, 3)[i] for i in (5, 0, 3, 1, 6, 4, 2, 7)]
  assert _partition(shuffled, 0, 0, 0) == [[0, 1, 2], [3, 4], [5, 6, 7]]


def test_islands_of_one_cpu_device_share_it():
  assert _partition(jax.devices(), 1, 4, 1) == [[0], [1, 2, 3, 4], [0]]
  assert _partition(jax.devices()[:3], 1, 2, *(1,) * 9) == [[0], [1, 2], *[[0]] * 9]
  assert _partition(jax.devices(), 4, 1, 1) == [[0, 1, 2, 3], [4], [4]]
  assert _partition(jax.devices()[:1], 0, 0) == [[0], [0]]
  assert _partition(_slices(1, 1), 1, 1) == [[0], [1]], "an accelerator serves one island"


@pytest.mark.parametrize(
  ("available", "counts", "needed"),
  [
    (_slices(8), (1,) * 9, "9 learners need more than 8 devices"),
    (_slices(8), (5, 5), "2 learners need more than 8 devices"),
    (_slices(2), (0, 0, 0), "3 learners need more than 2 devices"),
    (_slices(4, 4), (0, 0, 0), "need more than 8 devices in 2 slices"),
    (_slices(4, 4), (0, 6), "2 learners need more than 8 devices"),
  ],
)
def test_too_few_devices_are_named(available, counts, needed):
  with pytest.raises(ConfigError, match=rf"^islands\.devices = .*{needed}.*Fix: lower"):
    _partition(available, *counts)


def _shares(num_learners: int, visible: int, evaluator: int = 0, **islands) -> devices.Shares:
  sections = {"islands": {"num_learners": num_learners, **islands}}
  config = from_dict(sections | {"run": {"evaluator_devices": evaluator}})
  return devices.Shares(config, _slices(visible))


def test_an_island_keeps_its_share_and_the_evaluator_has_the_last_devices():
  shares = _shares(2, 7, evaluator=2, devices=2, overrides={"1": {"devices": 1}})
  assert _ids(map(shares.of, (0, 1, 0))) == [[0, 1], [2], [0, 1]]
  assert _ids(map(shares.of, (5, 5))) == [[3, 4]] * 2, "one that joins gets the next"
  with pytest.raises(ConfigError, match=r"islands\.devices = \[2\]: 1 learners need more than 0"):
    shares.of(6)
  one_cpu = devices.Shares(from_dict({"islands": {"num_learners": 2}}), jax.devices()[:1])
  assert _ids(map(one_cpu.of, (0, 1, 2))) == [[0]] * 3, "also where JAX was used before the run"
  assert _ids([_shares(1, 3, devices=0).of(0)]) == [[0, 1, 2]]
  with pytest.raises(ConfigError, match=r"2 learners need more than 3 .*or run\.evaluator_devices"):
    _shares(2, 4, evaluator=1, devices=2)


DRIVERLESS = """
from ddiloco import environment

environment.prepare(num_cpu_devices=1, gpus=GPUS)
from ddiloco.training import devices

devices.usable()
"""


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="JAX finds the GPUs")
@pytest.mark.parametrize(
  ("platforms", "gpus", "said"),
  [("cuda", [], "JAX_PLATFORMS = 'cuda,cpu'"), ("", [0, 1], "--gpus = '0,1'")],
)
def test_an_island_that_shall_have_gpus_takes_no_cpu(platforms, gpus, said):
  """Where there is no driver at all JAX leaves CUDA out, also where JAX_PLATFORMS names it."""
  variables = os.environ | {"JAX_PLATFORMS": platforms}
  command = [sys.executable, "-c", DRIVERLESS.replace("GPUS", str(gpus))]
  done = subprocess.run(command, env=variables, capture_output=True, text=True)
  assert f"{said}: JAX finds no such devices here. Fix: " in done.stderr
  assert devices.usable() == jax.devices()


def test_make_mesh():
  mesh = devices.make_mesh(jax.devices(), IslandConfig(devices=8, data=2, fsdp=-1, tensor=2))
  assert mesh.axis_names == ("data", "fsdp", "tensor")
  assert mesh.devices.shape == (2, 2, 2)
  assert mesh.axis_types == (AxisType.Auto,) * 3
  assert [d.id for d in mesh.devices.flat] == list(range(8))
  with pytest.raises(ConfigError, match=r"must multiply to the island's 3 devices"):
    devices.make_mesh(jax.devices()[:3], IslandConfig(devices=0, data=2, fsdp=-1))


@pytest.fixture
def mesh():
  return devices.make_mesh(jax.devices(), IslandConfig(devices=8, data=2, fsdp=2, tensor=2))


@pytest.mark.parametrize(
  ("axes", "shape", "spec"),
  [
    (("vocab", "embed"), (64, 16), ("tensor", "fsdp")),
    (("vocab", "embed"), (63, 16), (None, "fsdp")),  # 2 does not divide 63
    (("layers", "embed", "heads", "head_dim"), (2, 16, 4, 8), (None, "fsdp", "tensor", None)),
    (("experts", "embed", "mlp"), (4, 16, 32), ("tensor", "fsdp", None)),  # tensor is used already
    (("experts", "embed", "mlp"), (3, 16, 32), (None, "fsdp", "tensor")),
    (("batch", "time", "embed"), (8, 5, 16), (("data", "fsdp"), None, None)),
    (("batch", None), (2, 5), ("data", None)),  # 2 rows: only the first mesh axis fits
    (("layers", "norm"), (2, 16), (None, None)),
    ((), (), ()),
  ],
)
def test_param_sharding(mesh, axes, shape, spec):
  sharding = devices.param_sharding(axes, shape, mesh)
  assert sharding.spec == PartitionSpec(*spec)
  sharding.shard_shape(shape)  # raises where a split does not divide


@pytest.mark.parametrize(
  ("spec", "shape", "once"),
  [
    (("tensor", "fsdp"), (64, 16), (("tensor", "data"), "fsdp")),
    (("tensor", "fsdp"), (6, 16), ("tensor", ("fsdp", "data"))),  # 4 does not divide 6
    ((None, ("data", "fsdp")), (5, 16), (None, ("data", "fsdp", "tensor"))),
    ((), (3, 4), (None, ("data", "fsdp"))),  # 8 does not divide 4
    ((), (), ()),
  ],
)
def test_a_layout_without_copies_where_the_mesh_divides_the_array(mesh, spec, shape, once):
  given = NamedSharding(mesh, PartitionSpec(*spec))
  found = devices.without_copies(given, shape, given)
  assert found.spec == PartitionSpec(*once)
  found.shard_shape(shape)
  split = NamedSharding(mesh, PartitionSpec("data", "fsdp", "tensor"))
  assert devices.cutting_axes(devices.without_copies(given, shape, split), len(shape)) == (
    devices.cutting_axes(given, len(shape))
  )


@dataclasses.dataclass(frozen=True)
class HostDevice:
  id: int
  process_index: int
  platform: str = "stub"


def test_a_process_needs_no_values_of_another_one_that_has_the_same():
  """The leading host of an island has a copy of all that is cut within a host: it asked the others
  for their part of it, over the network."""
  four = [HostDevice(id, process_index=id // 2) for id in range(4)]
  mesh = Mesh(np.array(four, object).reshape(2, 2, 1), devices.MESH_AXES)
  given = NamedSharding(mesh, PartitionSpec())
  found = devices.without_copies(given, (4, 4), given)
  assert set(itertools.chain(*devices.cutting_axes(found, 2))) == {"fsdp", "tensor"}


def test_axes_must_match_the_shape(mesh):
  with pytest.raises(ValueError, match=r"longer|shorter"):
    devices.param_sharding(("embed",), (2, 3), mesh)


def _execution(
  platform: str, dtype: str = "bfloat16", head_dim: int = 64, capability: str = "9.0", **fields
):
  chip = types.SimpleNamespace(platform=platform, process_index=0, compute_capability=capability)
  mesh = types.SimpleNamespace(devices=np.array([chip]), size=1)
  model = ModelConfig(compute_dtype=dtype, head_dim=head_dim)
  return devices.make_execution(mesh, IslandConfig(**fields), model)


@pytest.mark.parametrize(
  ("platform", "dtype", "path"),
  [
    ("tpu", "bfloat16", "splash"),
    ("tpu", "float32", "splash"),
    ("gpu", "bfloat16", "cudnn"),
    ("gpu", "float32", "einsum"),  # cuDNN's kernel takes bf16 alone
    ("cpu", "bfloat16", "einsum"),
  ],
)
def test_attention_by_platform(platform, dtype, path):
  assert _execution(platform, dtype).attention == path
  assert _execution(platform, dtype, attention="einsum").attention == "einsum"


@pytest.mark.parametrize(
  ("platform", "dtype", "asked"),
  [("cpu", "bfloat16", "splash"), ("gpu", "float32", "cudnn"), ("tpu", "bfloat16", "cudnn")],
)
def test_a_path_of_another_platform_is_refused(platform, dtype, asked):
  with pytest.raises(ConfigError, match=f"islands.attention = {asked!r}.*Fix: use 'auto'"):
    _execution(platform, dtype, attention=asked)


@pytest.mark.parametrize("head_dim", [12, 264])
def test_heads_that_cudnn_does_not_take_have_the_reference(head_dim):
  assert _execution("gpu", head_dim=head_dim).attention == "einsum"
  with pytest.raises(ConfigError, match=f"must be einsum for .* heads of {head_dim}"):
    _execution("gpu", head_dim=head_dim, attention="cudnn")


@pytest.mark.parametrize(
  ("capability", "most"),
  [
    ("7.5", 0),  # T4
    ("8.0", 128),  # A100
    ("8.9", 128),  # L4
    ("9.0", 256),  # H100
    ("10.0", 128),  # B200
    ("12.0", 128),
    ("gfx942", 0),  # AMD's
  ],
)
def test_the_largest_heads_that_cudnn_takes_depend_on_the_gpu(capability, most):
  sizes = [size for size in (64, 128, 136, 256) if size <= most]
  for size in (64, 128, 136, 256):
    path = "cudnn" if size in sizes else "einsum"
    assert _execution("gpu", head_dim=size, capability=capability).attention == path


def test_gpus_of_two_kinds_have_heads_that_both_take():
  kinds = [("gpu", "9.0"), ("gpu", "10.0")]
  gpus = [
    types.SimpleNamespace(platform=p, process_index=0, compute_capability=c) for p, c in kinds
  ]
  mesh = types.SimpleNamespace(devices=np.array(gpus), size=1)
  for size, path in ((128, "cudnn"), (256, "einsum")):
    model = ModelConfig(compute_dtype="bfloat16", head_dim=size)
    assert devices.make_execution(mesh, IslandConfig(), model).attention == path


def test_the_kind_of_an_island_s_gpus_is_asked_of_a_device_of_this_process():
  """The device of another process may not know it."""
  far = types.SimpleNamespace(platform="gpu", process_index=1)
  near = types.SimpleNamespace(platform="gpu", process_index=0, compute_capability="9.0")
  mesh = types.SimpleNamespace(devices=np.array([far, near]), size=1)
  model = ModelConfig(compute_dtype="bfloat16", head_dim=64)
  assert devices.make_execution(mesh, IslandConfig(), model).attention == "cudnn"


@pytest.mark.parametrize(
  ("kind", "sparse"),  # of NVIDIA's data sheets, which count zeros: twice the peak
  [
    ("NVIDIA A100 80GB PCIe", 624e12),
    ("NVIDIA H100 PCIe", 1513e12),
    ("NVIDIA H100 NVL", 1671e12),
    ("NVIDIA H100 80GB HBM3", 1979e12),
    ("NVIDIA H200", 1979e12),
    ("NVIDIA B200", 4.5e15),
    ("NVIDIA L4", 242e12),
  ],
)
def test_a_gpu_s_peak_is_half_of_what_its_data_sheet_says_with_sparsity(kind, sparse):
  assert devices.PEAK_FLOPS[kind] == pytest.approx(sparse / 2, rel=2e-3)


@pytest.mark.parametrize(
  ("platform", "kinds", "found"),
  [
    ("gpu", ["device", "pinned_host"], "pinned_host"),
    ("tpu", ["device"], None),
    ("cpu", ["device", "pinned_host"], None),
  ],
)
def test_accelerators_alone_copy_to_the_hosts_memory(platform, kinds, found):
  memories = [types.SimpleNamespace(kind=kind) for kind in kinds]
  device = types.SimpleNamespace(platform=platform, addressable_memories=lambda: memories)
  assert devices.host_memory(device) == found


def test_an_execution_has_the_islands_settings():
  found = _execution("cpu", remat="products", loss_chunks=4)
  assert (found.layout, found.remat, found.loss_chunks) == (None, "products", 4)


def test_an_island_takes_the_same_share_of_what_each_of_its_processes_sees():
  seen = [types.SimpleNamespace(process_index=h, id=i) for h in (0, 1) for i in range(3)]

  def taken(count: int, hosts: int, visible) -> list[tuple[int, int]]:
    island = IslandConfig(devices=count, hosts=hosts)
    return [(d.process_index, d.id) for d in devices.island_devices(island, visible, 7)]

  assert taken(2, 1, seen[:3]) == [(0, 0), (0, 1)]
  assert taken(0, 1, seen[:3]) == [(0, 0), (0, 1), (0, 2)]
  assert taken(4, 2, seen) == [(0, 0), (0, 1), (1, 0), (1, 1)]
  assert len(taken(0, 2, seen)) == 6
  with pytest.raises(ConfigError, match=r"islands.devices = 2: learner 7 sees 1 devices.*Fix"):
    taken(2, 1, seen[:1])
  with pytest.raises(ConfigError, match=r"islands.devices = 6: learner 7 sees 5 devices.*2 on one"):
    taken(6, 2, seen[:5])


def test_a_host_that_jax_numbers_otherwise_is_refused(monkeypatch):
  """Each host would take what the leader sends to the other: parts of the same shape."""
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  monkeypatch.setattr(jax, "process_index", lambda: 1)
  seen = [types.SimpleNamespace(process_index=h, id=h) for h in (0, 1)]
  island = IslandConfig(devices=2, hosts=2)
  assert devices.island_devices(island, seen, 7, host=1) == seen
  with pytest.raises(ConfigError, match=r"--host = 0: is process 1 of its island to JAX.*Fix: "):
    devices.island_devices(island, seen, 7, host=0)
