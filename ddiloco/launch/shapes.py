"""What a TPU topology is in the cloud: how many hosts, and by which names it is asked for. PURE.

Google Cloud has three names for one slice: GKE selects nodes by accelerator and topology, a node
pool is made of machines of a type, and the TPU API takes an accelerator type that counts cores.
Sources: "Plan TPUs in GKE" and "TPU versions" of its documentation, read in November 2026.
"""

from __future__ import annotations

import dataclasses
import math
import re

from ddiloco.checks import require


@dataclasses.dataclass(frozen=True)
class _Kind:
  """One generation of TPUs."""

  gke_accelerator: str
  machine: str  # of GKE's node pools, before the chips of a host
  accelerator: str  # of the TPU API, before the cores
  runtime: str  # image of TPU VMs
  cores_per_chip: int
  dimensions: int
  one_host: tuple[int, ...]  # chips of slices that are one host


KINDS = {
  "v5e": _Kind(
    "tpu-v5-lite-podslice", "ct5lp-hightpu", "v5litepod", "v2-alpha-tpuv5-lite", 1, 2, (1, 4, 8)
  ),
  "v5p": _Kind("tpu-v5p-slice", "ct5p-hightpu", "v5p", "v2-alpha-tpuv5", 2, 3, (4,)),
  "v6e": _Kind("tpu-v6e-slice", "ct6e-standard", "v6e", "v2-alpha-tpuv6e", 1, 2, (1, 4, 8)),
}
CHIPS_PER_HOST = 4  # of a slice of several hosts
_TOPOLOGY = re.compile(r"(?P<kind>\w+):(?P<shape>[1-9]\d*(x[1-9]\d*)*)")


@dataclasses.dataclass(frozen=True)
class Shape:
  """A slice, as the cloud names it.

  Attributes:
    kind: "v5p".
    topology: "4x4x4", chips along each axis.
    chips: in all.
    hosts: machines, each with an even share of the chips.
    gke_accelerator: what GKE's nodes are selected by, beside the topology.
    machine_type: of a node pool in GKE.
    accelerator_type: what the TPU API calls the slice; v5p's count two cores a chip.
    runtime_version: image of its VMs.
  """

  kind: str
  topology: str
  chips: int
  hosts: int
  gke_accelerator: str
  machine_type: str
  accelerator_type: str
  runtime_version: str

  @property
  def chips_per_host(self) -> int:
    return self.chips // self.hosts


def shape_of(topology: str, field: str = "islands.topology") -> Shape:
  """The slice "v5p:4x4x4": 64 chips on 16 hosts.

  >>> shape_of("v5p:4x4x4").accelerator_type, shape_of("v5p:4x4x4").hosts
  ('v5p-128', 16)

  Raises:
    ConfigError: there are no such slices.
  """
  match, fix = _TOPOLOGY.fullmatch(topology), "for example v5p:4x4x4, v6e:8x8 or v5e:4x4"
  name = match["kind"] if match else ""
  rule = f"must be a chip ({', '.join(KINDS)}) and a shape"
  require(name in KINDS, field, topology, rule, fix)
  kind, shape = KINDS[name], topology.partition(":")[2]
  sides = [int(side) for side in shape.split("x")]
  rule = f"slices of {name} have {kind.dimensions} dimensions"
  require(len(sides) == kind.dimensions, field, topology, rule, fix)
  chips = math.prod(sides)
  one_host = chips in kind.one_host
  rule = f"{chips} chips are neither one host nor whole hosts of {CHIPS_PER_HOST}"
  require(one_host or chips % CHIPS_PER_HOST == 0, field, topology, rule, fix)
  per_host = chips if one_host else CHIPS_PER_HOST
  return Shape(
    kind=name,
    topology=shape,
    chips=chips,
    hosts=chips // per_host,
    gke_accelerator=kind.gke_accelerator,
    machine_type=f"{kind.machine}-{per_host}t",
    accelerator_type=f"{kind.accelerator}-{chips * kind.cores_per_chip}",
    runtime_version=kind.runtime,
  )
