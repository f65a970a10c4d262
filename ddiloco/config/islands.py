"""Where it is trained: the islands' devices, meshes and batches."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from ddiloco.checked import build, is_number, not_negative, positive, require


@dataclasses.dataclass(frozen=True)
class IslandConfig:
  """One island: its devices, its mesh and its batch. Islands of one run may all differ."""

  devices: int = 1  # 0: an even share of what JAX sees (a whole slice where devices have slices)
  data: int = 1  # mesh axes; one may be -1: what the devices leave
  fsdp: int = -1
  tensor: int = 1
  batch_size: int = 8  # B, sequences a step
  pace_seconds: float = 0.0  # a step lasts at least so long: for islands that share their devices
  resources: Mapping[str, Any] = dataclasses.field(
    default_factory=dict
  )  # what a cluster (Ray) must give this island, e.g. {"TPU": 4}; empty: nothing is reserved

  def __post_init__(self):
    not_negative("islands", self, "devices", "pace_seconds")
    positive("islands", self, "batch_size")
    axes = (self.data, self.fsdp, self.tensor)
    require(
      all(a == -1 or a > 0 for a in axes) and axes.count(-1) <= 1,
      "islands.(data, fsdp, tensor)",
      axes,
      "mesh axes must be positive, at most one of them -1",
      "use data=1, fsdp=-1, tensor=1",
    )
    known = math.prod(a for a in axes if a != -1)
    require(
      not self.devices or (self.devices % known == 0 if -1 in axes else self.devices == known),
      "islands.devices",
      self.devices,
      f"must match the mesh axes data, fsdp, tensor = {axes}",
      f"use a multiple of {known}, or other axes",
    )

  def mesh_shape(self, devices: int) -> tuple[int, int, int]:
    """(data, fsdp, tensor) for an island that was given `devices` devices."""
    axes = (self.data, self.fsdp, self.tensor)
    known = math.prod(a for a in axes if a != -1)
    data, fsdp, tensor = (devices // known if a == -1 else a for a in axes)
    require(
      data * fsdp * tensor == devices,
      "islands.(data, fsdp, tensor)",
      axes,
      f"must multiply to the island's {devices} devices",
      "set one axis to -1",
    )
    return data, fsdp, tensor

  def data_shards(self, devices: int) -> int:
    """Into how many parts the batch is cut: the data and fsdp axes together."""
    data, fsdp, _ = self.mesh_shape(devices)
    return data * fsdp


@dataclasses.dataclass(frozen=True)
class IslandsConfig(IslandConfig):
  """All islands: common settings, and `overrides` by learner number, e.g. {"2": {"devices": 4}}."""

  num_learners: int = 4  # M; a hint, since learners come and go
  overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    super().__post_init__()
    positive("islands", self, "num_learners")
    for key, fields in self.overrides.items():
      require(
        is_number(key),
        "islands.overrides",
        key,
        "keys are learner numbers, also of those that join later",
        "rename the key, e.g. '2'",
      )
      build(IslandConfig, fields, f"islands.overrides.{key}")  # names and types
      self.island(int(key))  # and together with the common settings

  def island(self, learner: int) -> IslandConfig:
    """The settings of one learner's island."""
    common = {f.name: getattr(self, f.name) for f in dataclasses.fields(IslandConfig)}
    return IslandConfig(**{**common, **self.overrides.get(str(learner), {})})
