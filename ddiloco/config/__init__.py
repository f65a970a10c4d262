"""The one place of defaults: an ml_collections ConfigDict in, frozen validated dataclasses out.

An experiment file calls `default()`, changes lines, and returns the ConfigDict; the command line
may change more (`--config.sync.min_quorum=2`). `from_dict` turns it into a `Config`: unknown fields
are refused, every value is checked, and errors name the field, the value, the rule and the fix.
Nothing here touches a device, a file or JAX. The sections are in `schema.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import typing
from collections.abc import Mapping
from typing import Any

import ml_collections

from ddiloco.checks import ConfigError, build, refuse_unknown, require
from ddiloco.config.schema import (
  MAX_LEARNERS,
  ChaosConfig,
  CheckpointConfig,
  DataConfig,
  Fault,
  InnerConfig,
  IslandConfig,
  IslandsConfig,
  ModelConfig,
  NetworkConfig,
  OuterConfig,
  RunConfig,
  SyncConfig,
)

__all__ = [
  "ChaosConfig",
  "CheckpointConfig",
  "Config",
  "ConfigError",
  "DataConfig",
  "Fault",
  "InnerConfig",
  "IslandConfig",
  "IslandsConfig",
  "ModelConfig",
  "NetworkConfig",
  "OuterConfig",
  "RunConfig",
  "SyncConfig",
  "changeable",
  "check_field",
  "default",
  "from_dict",
]


@dataclasses.dataclass(frozen=True)
class Config:
  """A whole run."""

  seed: int = 0
  model: ModelConfig = ModelConfig()
  data: DataConfig = DataConfig()
  inner: InnerConfig = InnerConfig()
  islands: IslandsConfig = IslandsConfig()
  sync: SyncConfig = SyncConfig()
  outer: OuterConfig = OuterConfig()
  network: NetworkConfig = NetworkConfig()
  checkpoint: CheckpointConfig = CheckpointConfig()
  run: RunConfig = RunConfig()
  chaos: ChaosConfig = ChaosConfig()

  def __post_init__(self):
    require(
      0 <= self.seed < 1 << 32,
      "seed",
      self.seed,
      "must lie between 0 and 2**32 - 1: initial values take no more bits of it",
      f"use {self.seed % (1 << 32)}",
    )
    m = self.islands.num_learners
    require(
      self.num_islands() <= MAX_LEARNERS,
      "islands.num_learners",
      m,
      f"must be at most {MAX_LEARNERS}, with those that join (chaos.faults): messages have no"
      " greater numbers",
      f"use at most {MAX_LEARNERS - self.chaos.num_joining()}",
    )
    require(
      self.sync.min_quorum <= m or not self.sync.num_shards,
      "sync.min_quorum",
      self.sync.min_quorum,
      f"must not exceed islands.num_learners ({m}), or no round would ever commit",
      f"use at most {m}",
    )
    for learner in sorted({*range(self.num_islands()), *map(int, self.islands.overrides)}):
      island = self.islands.island(learner)
      shards = island.data_shards(island.devices) if island.devices else 1
      whole = shards * self.inner.accumulation_steps
      require(
        island.batch_size % whole == 0,
        "islands.batch_size",
        island.batch_size,
        f"must be a multiple of data x fsdp x inner.accumulation_steps = {whole} ({learner=})",
        f"use {max(1, round(island.batch_size / whole)) * whole}",
      )
      chunks = 1 if self.model.custom else island.loss_chunks
      require(
        self.model.vocab_size % chunks == 0,
        "islands.loss_chunks",
        chunks,
        f"must divide model.vocab_size ({self.model.vocab_size}) ({learner=})",
        f"use {math.gcd(chunks, self.model.vocab_size)}",
      )
    require(
      (self.inner.optimizer, self.checkpoint.rejoin) != ("muon", "peer"),
      "checkpoint.rejoin",
      self.checkpoint.rejoin,
      "a peer's moments are vectors as long as all parameters, which Muon does not have",
      "use 'own'",
    )
    _check_images(self.model, self.data)
    _check_faults(self.chaos, m, self.sync.num_shards)

  def num_islands(self) -> int:
    """How many learners the plan has, including those that join later."""
    return self.islands.num_learners + self.chaos.num_joining()

  def tokens_per_step(self, learner: int) -> int:
    """Tokens one inner step of this learner trains on (B * T)."""
    own = self.islands.overrides.get(str(learner), {})  # checked by `IslandsConfig`
    return own.get("batch_size", self.islands.batch_size) * self.data.sequence_length

  def planned_tokens_per_step(self) -> int:
    """Tokens that one inner step of all planned learners together trains on."""
    return self._planned_tokens_per_step

  @functools.cached_property
  def _planned_tokens_per_step(self) -> int:
    return sum(self.tokens_per_step(m) for m in range(self.islands.num_learners))

  def planned_steps(self) -> int:
    """Inner steps each learner makes if all of them live and are equally fast."""
    return max(1, math.ceil(self.run.total_tokens / self.planned_tokens_per_step()))

  def to_json(self) -> str:
    """Every final value, for printing and saving."""
    return json.dumps(dataclasses.asdict(self), indent=2, default=list)


def _check_images(model: ModelConfig, data: DataConfig) -> None:
  """Requires images, and room for text, for a model that takes an image before the text."""
  if model.custom or not model.image_size:
    return
  require(
    bool(data.custom),
    "model.image_size",
    model.image_size,
    "needs images and captions, and ddiloco's own corpora are text alone",
    "set data.custom (configs/text_image.py does), or model.image_size = 0",
  )
  require(
    data.sequence_length > model.num_patches,
    "data.sequence_length",
    data.sequence_length,
    f"must leave text some room: an image takes the first {model.num_patches} positions",
    f"use {2 * model.num_patches}, or larger patches (model.patch_size)",
  )


def _check_faults(chaos: ChaosConfig, num_learners: int, num_shards: int) -> None:
  """Requires that faults strike roles that exist or join."""
  faults = chaos.of_roles()
  joining = {fault.role for fault in faults if fault.action == "join"}
  for fault in faults:
    kind, _, number = fault.role.partition("-")
    count = num_learners if kind == "learner" else num_shards
    if fault.action == "join":
      require(
        kind == "learner" and count <= int(number) < count + len(joining),
        "chaos.faults.role",
        fault.role,
        f"learners 0 to {count - 1} are there from the start, and others join in order",
        f"use learner-{count}",
      )
      continue
    require(
      int(number) < count or fault.role in joining,
      "chaos.faults.role",
      fault.role,
      f"the run has {count} of that kind",
      f"use {kind}-0 to {kind}-{count - 1}" if count else "drop this fault",
    )


def default() -> ml_collections.ConfigDict:
  """All defaults as a ConfigDict that refuses unknown fields. Experiment files start from this."""
  return changeable(Config())


def changeable(config: Config) -> ml_collections.ConfigDict:
  """The config's values as a ConfigDict that refuses unknown fields."""
  values = ml_collections.ConfigDict(dataclasses.asdict(config), allow_dotted_keys=True)
  free = {"islands": ("overrides", "resources"), "chaos": ("regions",)}  # fields with free names
  free |= dict.fromkeys(("model", "data", "inner"), ("options",))
  for section, names in free.items():
    for name in names:
      values[section][name].unlock()
  return values


def from_dict(values: Mapping[str, Any] | ml_collections.ConfigDict) -> Config:
  """Checks `values` (nested; missing fields take their defaults) and freezes them.

  Raises:
    ConfigError: names the field, the value, the rule and the fix.
  """
  return build(Config, values, "")


def check_field(path: str, value: Any) -> None:
  """Refuses a path such as "sync.min_quorum" that names no field; `value` is for the error."""
  cls: Any = Config
  where = ""
  for name in path.split("."):
    if where.endswith(".options"):
      return  # free names: options that the experiment file has given can be changed
    inside = dataclasses.is_dataclass(cls)
    require(inside, path, value, f"{where} has no fields", f"set {where} in the experiment file")
    refuse_unknown(where, {name: value}, typing.cast(type, cls))
    cls, where = typing.get_type_hints(cls)[name], f"{where}.{name}".lstrip(".")
