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

from ddiloco.checks import ConfigError as ConfigError
from ddiloco.checks import coerce, must, refuse_unknown, require, require_one_of
from ddiloco.config.schema import (
  MAX_LEARNERS,
  ChaosConfig,
  CheckpointConfig,
  DataConfig,
  InnerConfig,
  IslandsConfig,
  ModelConfig,
  NetworkConfig,
  OuterConfig,
  RunConfig,
  SyncConfig,
)
from ddiloco.config.schema import Fault as Fault
from ddiloco.config.schema import IslandConfig as IslandConfig

_T = typing.TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Config:
  """A whole run; `schema.py` says what each field of its sections means."""

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
    rule = "must lie between 0 and 2**32 - 1: initial values take no more bits of it"
    fix = f"use {self.seed % (1 << 32)}"
    require(0 <= self.seed < 1 << 32, "seed", self.seed, rule, fix)
    m = self.islands.num_learners
    rule = (
      f"must be at most {MAX_LEARNERS}, with those that join (chaos.faults): messages have no"
      " greater numbers"
    )
    fix = f"use at most {MAX_LEARNERS - self.chaos.num_joining()}"
    must("islands", self.islands, "num_learners", self.num_islands() <= MAX_LEARNERS, rule, fix)
    rule = f"must not exceed islands.num_learners ({m}), or no round would ever commit"
    good = self.sync.min_quorum <= m or not self.sync.num_shards
    must("sync", self.sync, "min_quorum", good, rule, f"use at most {m}")
    for learner in sorted({*range(self.num_islands()), *map(int, self.islands.overrides)}):
      island = self.islands.island(learner)
      island.require_even_batch(island.devices, self.inner.accumulation_steps, learner)
      chunks, vocab_size = island.loss_chunks, self.model.vocab_size
      rule = f"must divide model.vocab_size ({vocab_size}) ({learner=})"
      good = bool(self.model.custom) or vocab_size % chunks == 0
      must("islands", island, "loss_chunks", good, rule, f"use {math.gcd(chunks, vocab_size)}")
    rule = "a peer's moments are vectors as long as all parameters, which Muon does not have"
    inner = self.inner.custom or self.inner.optimizer
    good = (inner, self.checkpoint.rejoin) != ("muon", "peer")
    must("checkpoint", self.checkpoint, "rejoin", good, rule, "use 'own'")
    _check_images(self.model, self.data)
    _check_faults(self.chaos, m, self.sync.num_shards)

  def num_islands(self) -> int:
    """How many learners the plan has, including those that join later."""
    return self.islands.num_learners + self.chaos.num_joining()

  def tokens_per_step(self, learner: int) -> int:
    """Tokens one inner step of this learner trains on (B * T)."""
    return self.islands.batch_size_of(learner) * self.data.sequence_length

  @functools.cached_property
  def planned_tokens_per_step(self) -> int:
    """Tokens that one inner step of all planned learners together trains on."""
    return sum(self.tokens_per_step(m) for m in range(self.islands.num_learners))

  def planned_steps(self) -> int:
    """Inner steps each learner makes if all of them live and are equally fast."""
    return math.ceil(self.run.total_tokens / self.planned_tokens_per_step)

  def to_json(self) -> str:
    """Every final value, for printing and saving."""
    return json.dumps(dataclasses.asdict(self), indent=2)


def _check_images(model: ModelConfig, data: DataConfig) -> None:
  """Requires images, and room for text, for a model that takes an image before the text."""
  if model.custom or not model.image_size:
    return
  rule = "needs images and captions, and ddiloco's own corpora are text alone"
  fix = "set data.custom (configs/text_image.py does), or model.image_size = 0"
  must("model", model, "image_size", bool(data.custom), rule, fix)
  patches = model.num_patches
  rule = f"must leave text some room: an image takes the first {patches} positions"
  fix = f"use {2 * patches}, or larger patches (model.patch_size)"
  must("data", data, "sequence_length", data.sequence_length > patches, rule, fix)


def _check_faults(chaos: ChaosConfig, num_learners: int, num_shards: int) -> None:
  """Requires that faults strike roles that exist or join."""
  faults = chaos.of_roles()
  joining = {fault.role for fault in faults if fault.action == "join"}
  for fault in faults:
    kind, _, number = fault.role.partition("-")
    count = num_learners if kind == "learner" else num_shards
    if fault.action == "join":
      good = count <= int(number) < count + len(joining)
      rule = f"learners 0 to {count - 1} are there from the start, and others join in order"
      fix = f"use learner-{count}"
    else:
      good = int(number) < count or fault.role in joining
      rule = f"the run has {count} of that kind"
      fix = f"use {kind}-0 to {kind}-{count - 1}" if count else "drop this fault"
    must("chaos.faults", fault, "role", good, rule, fix)


def default() -> ml_collections.ConfigDict:
  """All defaults as a ConfigDict that refuses unknown fields. Experiment files start from this."""
  return changeable(Config())


def changeable(config: Config) -> ml_collections.ConfigDict:
  """The config's values as a ConfigDict that refuses unknown fields."""
  values = ml_collections.ConfigDict(dataclasses.asdict(config), allow_dotted_keys=True).lock()
  for section in values.values():
    for field in section.values() if isinstance(section, ml_collections.ConfigDict) else ():
      if isinstance(field, ml_collections.ConfigDict):  # a mapping, whose names are free
        field.unlock()
  return values


def from_dict(values: Mapping[str, Any] | ml_collections.ConfigDict) -> Config:
  """Checks `values` (nested; missing fields take their defaults) and freezes them.

  Raises:
    ConfigError: names the field, the value, the rule and the fix.
  """
  return coerce(Config, values, "")


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


def preset(presets: Mapping[str, _T], name: str) -> _T:
  """The preset that `--config=FILE:NAME` asks of an experiment file.

  Raises:
    ConfigError: the file has none of this name.
  """
  require_one_of("preset", name, presets)
  return presets[name]
