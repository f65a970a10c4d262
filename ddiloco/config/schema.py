"""Every section of a run's settings: what is trained, where, how, how long, and planned faults."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from ddiloco.checks import (
  is_number,
  must,
  not_negative,
  one_of,
  positive,
  require,
  share,
  typed_fields,
)

# --- What is trained, on what and how: model, data, inner and outer optimizer
# Model, data and inner optimizer may be the user's own (`ddiloco/custom.py`): a section's `custom`
# names a function that is called with the section; the section's `options` are for that function.

CUSTOM = re.compile(r"(?P<where>.+\.py|[A-Za-z_]\w*(\.[A-Za-z_]\w*)*):(?P<name>[A-Za-z_]\w*)")


MAX_LAYERS = 1 << 14


def _options() -> Any:
  """Free names. They count for equality of sections, but not for the hash: a dict has none."""
  return dataclasses.field(default_factory=dict, hash=False)


def _check_custom(section: str, config: Any) -> None:
  good = not config.custom or CUSTOM.fullmatch(config.custom) is not None
  rule = f"must name a function that makes the {section}, as FILE.py:NAME or PACKAGE.MODULE:NAME"
  fix = f"for example 'examples/own_model.py:{section}'; '' is ddiloco's own"
  must(section, config, "custom", good, rule, fix)
  good = bool(config.custom) or not config.options
  rule = f"are for {section}.custom alone, which is empty"
  must(section, config, "options", good, rule, f"set {section}.custom, or drop them")
  _check_json(section, config, "options")


def _check_json(section: str, config: Any, name: str) -> None:
  values = getattr(config, name)
  try:
    same = json.loads(json.dumps(values, allow_nan=False)) == values
  except (TypeError, ValueError, RecursionError):
    same = False
  rule = "must be what JSON can say: texts, numbers, true or false, lists (no tuples) and mappings"
  fix = "write them so; the run's config.json has them for all its roles"
  must(section, config, name, same, rule, fix)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A decoder-only transformer; `configs/dense.py` and `configs/moe.py` hold presets to 12B.

  With `custom` the model is the user's own, and the user's function gives the other fields their
  meaning.
  """

  custom: str = ""  # FILE.py:NAME or PACKAGE.MODULE:NAME of a function: ModelConfig -> Model
  options: Mapping[str, Any] = _options()  # for `custom`
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
  # A row's first positions may be an image's patches (models/layers.py). Such a model needs pairs
  # of images and captions, which `data.custom` must provide.
  image_size: int = 0  # pixels a side; 0: text alone
  patch_size: int = 2  # pixels a side of a patch, which becomes one token
  image_channels: int = 1  # 3: colour

  @property
  def num_patches(self) -> int:
    """P, the positions that an image takes."""
    return (self.image_size // self.patch_size) ** 2

  def __post_init__(self):
    _check_custom("model", self)
    positive("model", self, "vocab_size", "num_layers", "model_dim", "num_heads", "num_kv_heads")
    positive("model", self, "head_dim", "mlp_dim", "rope_theta", "norm_epsilon")
    positive("model", self, "capacity_factor", "patch_size", "image_channels")
    not_negative("model", self, "num_experts", "load_balance_weight", "image_size")
    rule = f"must be at most {MAX_LAYERS}: the plan of fragments lists all of them"
    must("model", self, "num_layers", self.num_layers <= MAX_LAYERS, rule, "use fewer")
    rule = f"must be whole patches of model.patch_size ({self.patch_size}) a side"
    fix = f"use {self.patch_size * max(1, round(self.image_size / self.patch_size))}"
    must("model", self, "image_size", self.image_size % self.patch_size == 0, rule, fix)
    one_of("model", self, "compute_dtype", "float32", "bfloat16")
    rule = f"must divide model.num_heads ({self.num_heads})"
    fix = f"use {math.gcd(self.num_heads, self.num_kv_heads)}"
    must("model", self, "num_kv_heads", self.num_heads % self.num_kv_heads == 0, rule, fix)
    rule = "must be even (rotary embedding turns pairs)"
    must("model", self, "head_dim", self.head_dim % 2 == 0, rule, f"use {self.head_dim + 1}")
    rule = f"must lie between 1 and model.num_experts ({self.num_experts})"
    fix = "lower it, or set model.num_experts = 0 for a dense model"
    good = not self.num_experts or 1 <= self.experts_per_token <= self.num_experts
    must("model", self, "experts_per_token", good, rule, fix)


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Where tokens come from. Every learner reads its own disjoint stream.

  With `custom` batches are the user's own; an example then counts as `sequence_length` tokens of
  the run's budget (`run.total_tokens`): 1 for images.
  """

  custom: str = ""  # names a function: DataConfig -> Source
  options: Mapping[str, Any] = _options()  # for `custom`
  # stdlib: the source files of Python's standard library; text: files by glob; tokens; synthetic.
  source: str = "stdlib"
  path: str = ""  # glob for text, file or glob for tokens (.bin)
  token_dtype: str = "uint16"  # of .bin files: uint16 or uint32
  tokenizer: str = "bytes"  # bytes, sentencepiece:FILE.model or huggingface:FILE.json
  sequence_length: int = 128  # T, tokens that a sequence predicts
  heldout_share: float = 0.05  # of the text: a fixed part that is never trained on
  heldout_sequences: int = 64  # in one evaluation

  def __post_init__(self):
    _check_custom("data", self)
    one_of("data", self, "source", "stdlib", "text", "tokens", "synthetic")
    one_of("data", self, "token_dtype", "uint16", "uint32")
    positive("data", self, "sequence_length", "heldout_sequences")
    rule = "must lie between 0 and 1, so that something is held out and something trained on"
    must("data", self, "heldout_share", 0 < self.heldout_share < 1, rule, "use 0.05")
    rule = f"is needed for sources text and tokens, and only there (source is {self.source!r})"
    fix = "set data.path to a glob, or data.source to 'text' or 'tokens'"
    must("data", self, "path", bool(self.path) == (self.source in ("text", "tokens")), rule, fix)
    kind, _, file = self.tokenizer.partition(":")
    rule = "must be bytes, sentencepiece:FILE or huggingface:FILE"
    fix = "use 'bytes', which needs no file"
    good = self.tokenizer == "bytes" or (kind in ("sentencepiece", "huggingface") and bool(file))
    must("data", self, "tokenizer", good, rule, fix)


@dataclasses.dataclass(frozen=True)
class InnerConfig:
  """AdamW or Muon on one island. The learning rate follows the run's merged tokens, not own steps.

  With `custom` an optax transform of the user replaces clipping, optimizer and weight decay; its
  updates are multiplied by the scheduled learning rate (`optax.sgd(1.0, momentum=0.9)`).
  """

  custom: str = ""  # names a function: InnerConfig -> optax.GradientTransformation
  options: Mapping[str, Any] = _options()  # for `custom`
  optimizer: str = "adamw"  # muon: hidden matrices take orthogonalized steps, all else Adam's
  learning_rate: float = 8e-3  # for tiny models; larger ones want less (configs/dense.py)
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
    _check_custom("inner", self)
    one_of("inner", self, "optimizer", "adamw", "muon")
    positive("inner", self, "learning_rate", "epsilon", "accumulation_steps")
    not_negative("inner", self, "warmup_steps", "decay_steps", "weight_decay", "clip_norm")
    share("inner", self, "b1", "b2")
    must("inner", self, "final_share", 0 <= self.final_share <= 1, "must lie in [0, 1]", "use 0.1")


@dataclasses.dataclass(frozen=True)
class OuterConfig:
  """Outer SGD on the merged outer gradient; momentum 0 is plain SGD."""

  learning_rate: float = 0.5
  momentum: float = 0.8
  nesterov: bool = True
  decay_share: float = 0.25  # the rate falls over this last share of the run's tokens; 0: never
  final_share: float = 0.05  # of the rate, at the end of the run

  def __post_init__(self):
    share("outer", self, "momentum", "decay_share")
    rule = "must lie in (0, 1]: a shard follows the momentum by its steps: there must be steps"
    must("outer", self, "final_share", 0 < self.final_share <= 1, rule, "use 0.05")
    # Within these bounds no outer step overflows (docs/design.md, "Rejected updates").
    bounded = self.learning_rate <= 1e3 and self.learning_rate * self.final_share >= 1e-12
    rule = "must be at most 1000, and at least 1e-12 when it has fallen to outer.final_share"
    must("outer", self, "learning_rate", bounded, rule, "use 0.5")


# --- Where it is trained: the islands' devices, meshes and batches


@dataclasses.dataclass(frozen=True)
class IslandConfig:
  """One island: its devices, its mesh and its batch. Islands of one run may all differ."""

  devices: int = 1  # 0: an even share of what JAX sees (a whole slice where devices have slices)
  hosts: int = 1  # processes, each with an even share of the devices; one leads (training/hosts.py)
  data: int = 1  # mesh axes; one may be -1: what the devices leave
  fsdp: int = -1
  tensor: int = 1
  batch_size: int = 8  # B, sequences a step
  # How the step is computed: these change its time and memory, not its result.
  attention: str = "auto"  # einsum, splash (TPU), cudnn (GPU, bf16); auto: the platform's best
  remat: str = "none"  # layers keep all (none), products, attention or only their inputs (full)
  loss_chunks: int = 1  # parts of the vocabulary; only one part's logits exist at a time
  topology: str = ""  # of TPUs, e.g. "v5p:4x4x4": the target of `ddiloco compile`
  min_step_seconds: float = 0.0  # a step lasts at least so long: for islands that share devices
  # Resources that a cluster (Ray) reserves for this island, e.g. {"TPU": 4}; empty: none.
  resources: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    not_negative("islands", self, "devices", "min_step_seconds")
    positive("islands", self, "hosts", "batch_size", "loss_chunks")
    rule = f"must be shared evenly by islands.hosts = {self.hosts} processes"
    fix = f"use {self.hosts * max(1, self.devices // self.hosts)}, or 0: all that each of them sees"
    must("islands", self, "devices", self.devices % self.hosts == 0, rule, fix)
    _check_json("islands", self, "resources")
    one_of("islands", self, "attention", "auto", "einsum", "splash", "cudnn")
    one_of("islands", self, "remat", "none", "products", "attention", "full")
    axes = (self.data, self.fsdp, self.tensor)
    good = all(a == -1 or a > 0 for a in axes) and axes.count(-1) <= 1
    rule, fix = "must be positive, at most one of them -1", "use data=1, fsdp=-1, tensor=1"
    require(good, "islands.(data, fsdp, tensor)", axes, rule, fix)
    if self.devices:
      self.mesh_shape(self.devices)

  def mesh_shape(self, devices: int) -> tuple[int, int, int]:
    """(data, fsdp, tensor) for an island that was given `devices` devices."""
    axes = (self.data, self.fsdp, self.tensor)
    known = math.prod(a for a in axes if a != -1)
    data, fsdp, tensor = (devices // known if a == -1 else a for a in axes)
    rule = f"must multiply to the island's {devices} devices"
    fix = f"use a multiple of {known} devices" if -1 in axes else "set one axis to -1"
    good = data * fsdp * tensor == devices
    require(good, "islands.(data, fsdp, tensor)", axes, rule, fix)
    return data, fsdp, tensor

  def require_even_batch(self, devices: int, accumulation_steps: int, learner: int) -> None:
    """Requires a batch that so many devices share evenly; 0: the number is not known yet."""
    whole = accumulation_steps * (self.data_shards(devices) if devices else 1)
    rule = f"must be a multiple of data x fsdp x inner.accumulation_steps = {whole} ({learner=})"
    fix = f"use {max(1, round(self.batch_size / whole)) * whole}"
    must("islands", self, "batch_size", self.batch_size % whole == 0, rule, fix)

  def data_shards(self, devices: int) -> int:
    """Into how many parts the batch is split: the data and fsdp axes together."""
    data, fsdp, _ = self.mesh_shape(devices)
    return data * fsdp


# Learners' numbers are smaller: a message's list has two numbers for each (`protocol/messages.py`).
MAX_LEARNERS = 1 << 15


@dataclasses.dataclass(frozen=True)
class IslandsConfig(IslandConfig):
  """All islands: common settings, and `overrides` by learner number, e.g. {"2": {"devices": 4}}."""

  num_learners: int = 4  # M, as planned; learners may come and go
  overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    super().__post_init__()
    positive("islands", self, "num_learners")
    for key, fields in self.overrides.items():
      rule, fix = "keys are learner numbers, also of those that join later", "rename it, e.g. '2'"
      require(is_number(key), "islands.overrides", key, rule, fix)
      typed_fields(IslandConfig, fields, f"islands.overrides.{key}")  # refuses wrong ones ...
      self.island(int(key))  # ... and the overrides together with the common settings

  def island(self, learner: int) -> IslandConfig:
    """The settings of one learner's island."""
    common = {f.name: getattr(self, f.name) for f in dataclasses.fields(IslandConfig)}
    return IslandConfig(**{**common, **self.overrides.get(str(learner), {})})


# --- How islands exchange what they learn: the protocol, and the network that carries it

CODECS = ("f32", "bf16", "int8", "int4")  # `core/codec.py` has their layouts


@dataclasses.dataclass(frozen=True)
class SyncConfig:
  """The protocol. Symbols of the paper in brackets; docs/design.md says what was measured."""

  num_shards: int = 2  # syncer shards; 0: no sync, every island trains alone
  num_fragments: int = 8  # P
  fragmentation: str = "balanced"  # balanced, layer, tensor or strided
  max_rows: int = 0  # embeddings with more rows are split into pieces of at most these; 0: never
  sync_period: int = 24  # H: inner steps between two syncs of the same fragment
  overlap_steps: int = 2  # tau: steps a sync may take without delaying a learner
  min_quorum: int = 1  # K: learners that must have pushed before a round commits
  grace_safety: float = 0.9  # gamma: share of the slack that waiting for more learners may use
  blocking: bool = False  # True: lock-step (DiLoCo, Streaming DiLoCo); learners wait for versions
  apply: str = "rebase"  # overwrite (the paper), mix (Streaming), rebase (no work is lost)
  mix_alpha: float = 0.5  # share of the local value that `mix` keeps
  merge: str = "rda"  # rda or average
  average_embeddings: bool = True  # embeddings are averaged also under rda
  push_codec: str = "f32"  # learner to shard: f32, bf16, int8 or int4
  publish_codec: str = "f32"  # shard to learner; a lossy codec is for updates, never for values
  value_threads: int = 0  # for the work on a fragment; 0: one a core, on a learner half of that
  error_feedback: bool = False  # learners add the rounding error of a push to their next one
  liveness_steps: float = 10.0  # a learner silent for so many of its own steps is lost ...
  liveness_seconds: float = 2.0  # ... but never sooner than this
  max_norm_ratio: float = 10.0  # rejects updates so much longer than others' and the learner's past
  quarantine_after: int = 3  # rejections in a row until a learner must rejoin
  snapshot_steps: int = 200  # global steps between two snapshots of the whole run; 0: never

  def __post_init__(self):
    not_negative("sync", self, "num_shards", "overlap_steps", "max_rows", "snapshot_steps")
    not_negative("sync", self, "value_threads")
    positive("sync", self, "num_fragments", "sync_period", "min_quorum", "liveness_steps")
    positive("sync", self, "liveness_seconds", "quarantine_after")
    one_of("sync", self, "fragmentation", "balanced", "layer", "tensor", "strided")
    one_of("sync", self, "apply", "overwrite", "mix", "rebase")
    one_of("sync", self, "merge", "rda", "average")
    one_of("sync", self, "push_codec", *CODECS)
    one_of("sync", self, "publish_codec", *CODECS)
    share("sync", self, "grace_safety")
    must("sync", self, "mix_alpha", 0 <= self.mix_alpha <= 1, "must lie in [0, 1]", "use 0.5")
    rule = "must be greater than 1"
    must("sync", self, "max_norm_ratio", self.max_norm_ratio > 1, rule, "use 10")
    rule = f"must not exceed sync.num_fragments ({self.num_fragments}): shards own whole fragments"
    fix = f"use at most {self.num_fragments}"
    must("sync", self, "num_shards", self.num_shards <= self.num_fragments, rule, fix)
    rule = f"must be smaller than sync.sync_period ({self.sync_period})"
    fix = f"use at most {self.sync_period - 1}"
    must("sync", self, "overlap_steps", self.overlap_steps < self.sync_period, rule, fix)
    rule = "is built into apply = 'rebase' (the rounding error stays local and goes out next time)"
    fix = "set it to False, or apply to 'overwrite' or 'mix'"
    good = not (self.error_feedback and self.apply == "rebase")
    must("sync", self, "error_feedback", good, rule, fix)


@dataclasses.dataclass(frozen=True)
class NetworkConfig:
  """How messages travel between processes. `patience_seconds` grows with what is measured."""

  streams: int = 1  # TCP connections per learner and shard that every fragment is spread over
  queue_bytes: int = 0  # of fragments queued for or from one peer; 0: three models in f32
  hello_seconds: float = 0.5  # between two attempts to reach a peer, doubling to 16 times this
  patience_seconds: float = 2.0  # least wait until a shard's buddy counts as away
  silence_seconds: float = 30.0  # messages for a peer that is silent for so long are dropped
  give_up_seconds: float = 600.0  # a learner that reaches no shard for so long ends, with an error
  drain_seconds: float = 25.0  # a role that is told to end has so long to get its work merged

  def __post_init__(self):
    positive("network", self, "streams", "hello_seconds", "patience_seconds")
    positive("network", self, "silence_seconds", "give_up_seconds")
    not_negative("network", self, "queue_bytes", "drain_seconds")
    must("network", self, "streams", self.streams <= 64, "must be at most 64", "use 8")


# --- How long a run is and what it leaves


@dataclasses.dataclass(frozen=True)
class RunConfig:
  """How long, how often to look, and what to leave behind."""

  total_tokens: int = 4_000_000  # merged into the global model; the run ends there
  init_from: str = ""  # weights to start from, else random: .safetensors, Orbax or a run's workdir
  evaluations: int = 20  # of the global model on the held-out split, over the run; 0: none
  evaluator_devices: int = 0  # of the evaluator alone (fsdp), no island's; 0: one CPU device
  compare_alone: bool = False  # afterwards train every island alone on as many of its own steps
  prompt: str = "def "  # of the sample that is printed at the end
  sample_tokens: int = 160
  # A role that dies is started again after restart_seconds, doubled with every death in a row, up
  # to a minute; after more than max_restarts in a row it is given up. A healthy period ends the row
  # (protocol/supervisor.py), and planned faults do not count.
  restart_seconds: float = 1.0
  max_restarts: int = 5
  # A learner whose loop has made no turn for so long, and for 20 of its usual steps, hangs: the
  # stacks of all its threads are logged, and it is left running. 0: learners are not watched.
  hang_seconds: float = 60.0

  def __post_init__(self):
    positive("run", self, "total_tokens")
    not_negative("run", self, "evaluations", "sample_tokens", "restart_seconds", "max_restarts")
    not_negative("run", self, "hang_seconds", "evaluator_devices")


# --- Snapshots: where they are, and how a restarted learner goes on


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """Snapshots of the whole run; `sync.snapshot_steps` says how often."""

  path: str = ""  # all roles must reach PATH/RUN, also gs://...; empty: WORKDIR/checkpoints
  keep: int = 2  # committed snapshots; older ones are deleted
  patience_seconds: float = 60.0  # for a learner's part of a snapshot, since that last grew
  rejoin: str = "own"  # inner optimizer of a restarted learner: own, peer or fresh
  warmup_steps: int = 20  # of the learning rate, for a learner that joins with fresh moments
  donor_seconds: float = 10.0  # how long rejoin = peer waits for another learner's moments

  def __post_init__(self):
    positive("checkpoint", self, "keep", "patience_seconds")
    not_negative("checkpoint", self, "warmup_steps", "donor_seconds")
    one_of("checkpoint", self, "rejoin", "own", "peer", "fresh")


# --- Planned faults: a plan is data, whatever engine performs it

TO_MESSAGES = ("cut", "drop", "delay", "duplicate", "reorder", "corrupt", "throttle")
INSIDE = ("slow", *TO_MESSAGES, "disk", "poison")  # performed by the role itself in all engines
ACTIONS = ("kill", "stall", *INSIDE, "join")


@dataclasses.dataclass(frozen=True)
class Fault:
  """One planned fault: what happens to which role, when (global step or time), for how long.

  | action    | what happens to the role                                      | its own field     |
  |-----------|---------------------------------------------------------------|-------------------|
  | kill      | is dead at once, back after `seconds` (-1: never)             |                   |
  | stall     | stands still                                                  |                   |
  | slow      | everything it does takes longer                               | `factor`          |
  | join      | a learner beyond islands.num_learners comes, leaves again     |                   |
  |           | after `seconds` (-1: stays)                                   |                   |
  | cut       | no message reaches it or leaves it                            |                   |
  | drop      | messages are lost                                             | `share` of them   |
  | delay     | messages take longer, and keep their order                    | `delay_seconds`   |
  | duplicate | messages come twice                                           | `share`           |
  | reorder   | messages are held up for up to `delay_seconds`, others pass   | `share`           |
  | corrupt   | bits of messages flip                                         | `share`           |
  | throttle  | its links carry at most `bits_per_second`, each direction     | `bits_per_second` |
  | disk      | its disk is full: nothing of a snapshot can be written        |                   |
  | poison    | its outer gradients are multiplied                            | `factor`          |

  All but kill and join end after `seconds`. Faults of messages concern the role's links to `peers`,
  or all its links.
  """

  action: str  # one of those above
  role: str  # "learner-2", "syncer-0", or "region-NAME": all of chaos.regions.NAME at once
  at_step: int = -1  # the global step; -1: by time
  at_seconds: float = -1.0  # since training began; -1: by step
  seconds: float = 5.0  # how long
  factor: float = 2.0
  share: float = 1.0
  delay_seconds: float = 0.5
  bits_per_second: float = 1e6
  peers: tuple[str, ...] = ()  # roles; "!learner-2": all but this one. Empty: all

  def __post_init__(self):
    one_of("chaos.faults", self, "action", *ACTIONS)
    rule = "must name a role or a region"
    fix = "use 'learner-2', 'syncer-0' or 'region-NAME'"
    good = _is_role(self.role) or self.role.startswith("region-")
    must("chaos.faults", self, "role", good, rule, fix)
    for peer in self.peers:
      fix = "use 'syncer-0', or '!syncer-0' for all but it"
      good = _is_role(peer.removeprefix("!"))
      require(good, "chaos.faults.peers", peer, "must name a role", fix)
    when = (self.at_step, self.at_seconds)
    good = (self.at_step >= 0) != (self.at_seconds >= 0)
    rule, fix = "exactly one of them says when", "set one and leave the other -1"
    require(good, "chaos.faults.(at_step, at_seconds)", when, rule, fix)
    rule = "must not be negative (kill and join take -1: for good)"
    good = self.seconds >= 0 or (self.action in ("kill", "join") and self.seconds == -1)
    must("chaos.faults", self, "seconds", good, rule, "use 5")
    least = 0 if self.action == "poison" else 1
    rule = f"must be at least {least}"
    must("chaos.faults", self, "factor", self.factor >= least, rule, "use 2")
    must("chaos.faults", self, "share", 0 < self.share <= 1, "must lie in (0, 1]", "use 0.5")
    not_negative("chaos.faults", self, "delay_seconds")
    positive("chaos.faults", self, "bits_per_second")


@dataclasses.dataclass(frozen=True)
class ChaosConfig:
  """Faults on purpose, as data."""

  faults: tuple[Fault, ...] = ()
  regions: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)  # name -> roles

  def __post_init__(self):
    for name, roles in self.regions.items():
      for role in roles:
        field, rule = f"chaos.regions.{name}", "must name a role"
        require(_is_role(role), field, role, rule, "use 'learner-2'")
    for fault in self.faults:
      kind, _, name = fault.role.partition("-")
      good = kind != "region" or name in self.regions
      rule = f"is none of chaos.regions ({', '.join(self.regions) or 'there are none'})"
      must("chaos.faults", fault, "role", good, rule, "add it there: name -> list of roles")

  def num_joining(self) -> int:
    """How many learners join by plan."""
    return len({fault.role for fault in self.faults if fault.action == "join"})

  def of_roles(self) -> tuple[Fault, ...]:
    """The faults by role: a fault of a region becomes one for each of its roles.

    A fault of a region's messages strikes only messages that leave or enter the region.
    """
    found: list[Fault] = []
    for fault in self.faults:
      kind, _, name = fault.role.partition("-")
      roles = self.regions[name] if kind == "region" else (fault.role,)
      outside = tuple(f"!{role}" for role in roles) if kind == "region" else ()
      peers = fault.peers or outside
      found += [dataclasses.replace(fault, role=role, peers=peers) for role in roles]
    return tuple(found)


def _is_role(name: str) -> bool:
  kind, _, number = name.partition("-")
  return kind in ("learner", "syncer") and is_number(number)
