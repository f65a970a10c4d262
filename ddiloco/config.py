"""The one place with defaults: an ml_collections ConfigDict in, frozen validated dataclasses out.

An experiment file calls `default()`, changes lines, and returns the ConfigDict; the command line
may change more (`--config.sync.min_quorum=2`). `from_dict` turns it into a `Config`: unknown fields
are refused, every value is checked, and errors name the field, the value, the rule and the fix.
Nothing here touches a device, a file or JAX.
"""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from collections.abc import Mapping
from typing import Any

import ml_collections

from ddiloco.checked import (
  ConfigError,
  build,
  is_number,
  not_negative,
  one_of,
  positive,
  refuse_unknown,
  require,
  share,
)

__all__ = ["Config", "ConfigError", "Fault", "check_field", "default", "from_dict"]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A decoder-only transformer; `configs/dense.py` and `configs/moe.py` hold presets to 12B."""

  vocab_size: int = 256  # at least the tokenizer's; bytes need 256
  num_layers: int = 4
  model_dim: int = 64  # D
  num_heads: int = 4  # H, query heads
  num_kv_heads: int = 2  # K, shared by groups of H/K query heads
  head_dim: int = 16
  mlp_dim: int = 192  # F, hidden width of the gated MLP (of each expert in a mixture)
  num_experts: int = 0  # E; 0 is dense
  experts_per_token: int = 2  # top-k of the router
  capacity_factor: float = 2.0  # slots of an expert per sequence over its even share
  load_balance_weight: float = 0.01  # of the auxiliary loss, computed inside one learner only
  rope_theta: float = 10_000.0
  norm_epsilon: float = 1e-6
  compute_dtype: str = "float32"  # of activations and matmuls; parameters stay f32
  remat: bool = False  # recompute each layer in the backward pass instead of storing it

  def __post_init__(self):
    positive("model", self, "vocab_size", "num_layers", "model_dim", "num_heads", "num_kv_heads")
    positive("model", self, "head_dim", "mlp_dim", "rope_theta", "norm_epsilon")
    positive("model", self, "capacity_factor")
    not_negative("model", self, "num_experts", "load_balance_weight")
    one_of("model", self, "compute_dtype", "float32", "bfloat16")
    require(
      self.num_heads % self.num_kv_heads == 0,
      "model.num_kv_heads",
      self.num_kv_heads,
      f"must divide model.num_heads ({self.num_heads})",
      f"use {math.gcd(self.num_heads, self.num_kv_heads)}",
    )
    require(
      self.head_dim % 2 == 0,
      "model.head_dim",
      self.head_dim,
      "must be even (rotary embedding turns pairs)",
      f"use {self.head_dim + 1}",
    )
    require(
      not self.num_experts or 1 <= self.experts_per_token <= self.num_experts,
      "model.experts_per_token",
      self.experts_per_token,
      f"must lie between 1 and model.num_experts ({self.num_experts})",
      "lower it, or set model.num_experts = 0 for a dense model",
    )


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Where tokens come from. Every learner reads its own disjoint stream."""

  source: str = (
    "stdlib"  # stdlib: this Python's own library; text: files by glob; tokens; synthetic
  )
  path: str = ""  # glob for text, file or glob for tokens (.bin)
  token_dtype: str = "uint16"  # of .bin files: uint16 or uint32
  tokenizer: str = "bytes"  # bytes, sentencepiece:FILE.model or huggingface:FILE.json
  sequence_length: int = 128  # T, tokens a sequence predicts
  heldout_share: float = 0.05  # of the text, fixed, never trained on
  heldout_sequences: int = 64  # used for one evaluation

  def __post_init__(self):
    one_of("data", self, "source", "stdlib", "text", "tokens", "synthetic")
    one_of("data", self, "token_dtype", "uint16", "uint32")
    positive("data", self, "sequence_length", "heldout_sequences")
    require(
      0 < self.heldout_share < 1,
      "data.heldout_share",
      self.heldout_share,
      "must lie between 0 and 1, so that something is held out and something trained on",
      "use 0.05",
    )
    require(
      bool(self.path) == (self.source in ("text", "tokens")),
      "data.path",
      self.path,
      f"is needed for sources text and tokens and unused for others (source is {self.source!r})",
      "set data.path to a glob, or data.source to 'text' or 'tokens'",
    )
    kind, _, file = self.tokenizer.partition(":")
    require(
      self.tokenizer == "bytes" or (kind in ("sentencepiece", "huggingface") and bool(file)),
      "data.tokenizer",
      self.tokenizer,
      "must be bytes, sentencepiece:FILE or huggingface:FILE",
      "use 'bytes', which needs no file",
    )


@dataclasses.dataclass(frozen=True)
class InnerConfig:
  """AdamW on one island. The learning rate follows the run's clock, not the island's own count."""

  learning_rate: float = 8e-3  # islands want a higher one than data-parallel (docs/design.md)
  warmup_steps: int = 50
  decay_steps: int = 0  # cosine to the end; 0: derived from run.total_tokens and all islands
  final_share: float = 0.1  # of learning_rate, at the end of the decay
  b1: float = 0.9
  b2: float = 0.95
  epsilon: float = 1e-8
  weight_decay: float = 0.1  # on matrices only, not on norms
  clip_norm: float = 1.0  # global gradient norm; 0 turns clipping off
  accumulation_steps: int = 1  # micro-batches a step

  def __post_init__(self):
    positive("inner", self, "learning_rate", "epsilon", "accumulation_steps")
    not_negative("inner", self, "warmup_steps", "decay_steps", "weight_decay", "clip_norm")
    share("inner", self, "b1", "b2")
    require(
      0 <= self.final_share <= 1,
      "inner.final_share",
      self.final_share,
      "must lie in [0, 1]",
      "use 0.1",
    )


@dataclasses.dataclass(frozen=True)
class IslandConfig:
  """One island: its devices, its mesh and its batch. Islands of one run may all differ."""

  devices: int = 1  # 0: an even share of what JAX sees (a whole slice where devices have slices)
  data: int = 1  # mesh axes; one may be -1: what the devices leave
  fsdp: int = -1
  tensor: int = 1
  batch_size: int = 8  # B, sequences a step

  def __post_init__(self):
    not_negative("islands", self, "devices")
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
        is_number(key) and int(key) < self.num_learners,
        "islands.overrides",
        key,
        f"keys are learner numbers, '0' to '{self.num_learners - 1}'",
        "rename the key or raise islands.num_learners",
      )
      build(IslandConfig, fields, f"islands.overrides.{key}")  # names and types
      self.island(int(key))  # and together with the common settings

  def island(self, learner: int) -> IslandConfig:
    """The settings of one learner's island."""
    common = {f.name: getattr(self, f.name) for f in dataclasses.fields(IslandConfig)}
    return IslandConfig(**{**common, **self.overrides.get(str(learner), {})})


@dataclasses.dataclass(frozen=True)
class SyncConfig:
  """The protocol. Symbols of the paper in brackets; docs/design.md says what was measured."""

  num_shards: int = 2  # syncer shards; 0: nobody syncs, every island trains alone
  num_fragments: int = 8  # P
  fragmentation: str = "balanced"  # balanced, layer, tensor or strided
  max_rows: int = (
    0  # embeddings with more rows are split into pieces of at most this many; 0: never
  )
  sync_period: int = 24  # H: inner steps between two syncs of the same fragment
  overlap_steps: int = 2  # tau: steps a sync may take without anybody noticing
  min_quorum: int = 1  # K
  grace_safety: float = 0.9  # gamma: share of the slack that waiting for more learners may use
  blocking: bool = False  # True: lock-step (DiLoCo, Streaming DiLoCo); learners then do wait
  apply: str = "rebase"  # overwrite (the paper), mix (Streaming), rebase (no work is lost)
  mix_alpha: float = 0.5  # share of the local value that `mix` keeps
  merge: str = "rda"  # rda or average
  average_embeddings: bool = True  # embeddings are averaged also under rda
  push_codec: str = "f32"  # learner to shard: f32, bf16, int8 or int4
  publish_codec: str = "f32"  # shard to learner; a lossy one sends the update, never raw values
  error_feedback: bool = False  # learners add what rounding lost to their next push
  liveness_steps: float = 10.0  # silent for so many of its own steps: not available ...
  liveness_seconds: float = 2.0  # ... but never sooner than this
  max_norm_ratio: float = 10.0  # an update so much longer than others' and its own past is rejected
  quarantine_after: int = 3  # rejections in a row until a learner must rejoin

  def __post_init__(self):
    not_negative("sync", self, "num_shards", "overlap_steps", "max_rows")
    positive("sync", self, "num_fragments", "sync_period", "min_quorum", "liveness_steps")
    positive("sync", self, "liveness_seconds", "quarantine_after")
    one_of("sync", self, "fragmentation", "balanced", "layer", "tensor", "strided")
    one_of("sync", self, "apply", "overwrite", "mix", "rebase")
    one_of("sync", self, "merge", "rda", "average")
    one_of("sync", self, "push_codec", "f32", "bf16", "int8", "int4")
    one_of("sync", self, "publish_codec", "f32", "bf16", "int8", "int4")
    share("sync", self, "grace_safety")
    require(
      0 <= self.mix_alpha <= 1, "sync.mix_alpha", self.mix_alpha, "must lie in [0, 1]", "use 0.5"
    )
    require(
      self.max_norm_ratio > 1,
      "sync.max_norm_ratio",
      self.max_norm_ratio,
      "must be greater than 1",
      "use 10",
    )
    require(
      self.num_shards <= self.num_fragments,
      "sync.num_shards",
      self.num_shards,
      f"must not exceed sync.num_fragments ({self.num_fragments}): a shard owns whole fragments",
      f"use at most {self.num_fragments}",
    )
    require(
      self.overlap_steps < self.sync_period,
      "sync.overlap_steps",
      self.overlap_steps,
      f"must be smaller than sync.sync_period ({self.sync_period})",
      f"use at most {self.sync_period - 1}",
    )
    require(
      not (self.error_feedback and self.apply == "rebase"),
      "sync.error_feedback",
      True,
      "is built into apply = 'rebase' (the rounding error stays local and goes out next time)",
      "set it to False, or apply to 'overwrite' or 'mix'",
    )


@dataclasses.dataclass(frozen=True)
class OuterConfig:
  """Outer SGD on the merged outer gradient; momentum 0 is plain SGD."""

  learning_rate: float = 1.0
  momentum: float = 0.0
  nesterov: bool = True

  def __post_init__(self):
    positive("outer", self, "learning_rate")
    share("outer", self, "momentum")


@dataclasses.dataclass(frozen=True)
class RunConfig:
  """How long, how often to look, and what to leave behind."""

  total_tokens: int = 4_000_000  # merged into the global model; the run ends there
  evaluations: int = 20  # of the global model on the held-out split, spread over the run
  compare_alone: bool = False  # afterwards train every island alone on as many of its own steps
  prompt: str = "def "  # of the sample that is printed at the end
  sample_tokens: int = 160
  restart_seconds: float = 1.0  # until a crashed or quarantined role is back; doubles each time
  max_restarts: int = 5  # of one role (planned faults do not count)

  def __post_init__(self):
    positive("run", self, "total_tokens")
    not_negative("run", self, "evaluations", "sample_tokens", "restart_seconds", "max_restarts")


@dataclasses.dataclass(frozen=True)
class Fault:
  """One planned fault: what happens to which role, when (run's clock or time), for how long."""

  action: str  # kill, stall or slow
  role: str  # "learner/2" or "syncer/0"
  at_step: int = -1  # of the run's clock; -1: by time
  at_seconds: float = -1.0  # since the run started; -1: by step
  seconds: float = 5.0  # until a killed role restarts (-1: never), or a stall or slowness ends
  factor: float = 2.0  # by which `slow` stretches every step

  def __post_init__(self):
    one_of("chaos.faults", self, "action", "kill", "stall", "slow")
    kind, _, number = self.role.partition("/")
    require(
      kind in ("learner", "syncer") and is_number(number),
      "chaos.faults.role",
      self.role,
      "must name a role",
      "use 'learner/2' or 'syncer/0'",
    )
    require(
      (self.at_step >= 0) != (self.at_seconds >= 0),
      "chaos.faults.(at_step, at_seconds)",
      (self.at_step, self.at_seconds),
      "exactly one of them says when",
      "set one and leave the other -1",
    )
    require(
      self.seconds >= 0 or (self.action == "kill" and self.seconds == -1),
      "chaos.faults.seconds",
      self.seconds,
      "must not be negative (kill takes -1: never comes back)",
      "use 5",
    )
    require(self.factor >= 1, "chaos.faults.factor", self.factor, "must be at least 1", "use 2")


@dataclasses.dataclass(frozen=True)
class ChaosConfig:
  """Faults on purpose, as data."""

  faults: tuple[Fault, ...] = ()


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
  run: RunConfig = RunConfig()
  chaos: ChaosConfig = ChaosConfig()

  def __post_init__(self):
    m = self.islands.num_learners
    require(
      self.sync.min_quorum <= m or not self.sync.num_shards,
      "sync.min_quorum",
      self.sync.min_quorum,
      f"must not exceed islands.num_learners ({m}), or no round would ever commit",
      f"use at most {m}",
    )
    for learner in range(m):
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
    for fault in self.chaos.faults:
      kind, _, number = fault.role.partition("/")
      count = m if kind == "learner" else self.sync.num_shards
      require(
        int(number) < count,
        "chaos.faults.role",
        fault.role,
        f"the run has {count} of that kind",
        f"use {kind}/0 to {kind}/{count - 1}" if count else "drop this fault",
      )

  def tokens_per_step(self, learner: int) -> int:
    """Tokens one inner step of this learner trains on (B * T)."""
    return self.islands.island(learner).batch_size * self.data.sequence_length

  def planned_steps(self) -> int:
    """Inner steps each learner makes if all of them live and are equally fast."""
    together = sum(self.tokens_per_step(m) for m in range(self.islands.num_learners))
    return max(1, math.ceil(self.run.total_tokens / together))

  def to_json(self) -> str:
    """Every final value, for printing and saving."""
    return json.dumps(dataclasses.asdict(self), indent=2, default=list)


def default() -> ml_collections.ConfigDict:
  """All defaults as a ConfigDict that refuses unknown fields. Experiment files start from this."""
  config = ml_collections.ConfigDict(dataclasses.asdict(Config()))
  config.islands.overrides = ml_collections.ConfigDict()
  config.islands.overrides.unlock()
  return config


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
    inside = dataclasses.is_dataclass(cls)
    require(inside, path, value, f"{where} has no fields", f"set {where} in the experiment file")
    refuse_unknown(where, {name: value}, typing.cast(type, cls))
    cls, where = typing.get_type_hints(cls)[name], f"{where}.{name}".lstrip(".")
