"""Every section of a run's settings: what is trained, where, how, how long, and planned faults."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from ddiloco.checks import (
  check,
  is_number,
  must,
  not_negative,
  positive,
  require,
  share,
  typed_fields,
)

# Types of fields: their rules are checked with every section.
Count = Annotated[int, positive]
Natural = Annotated[int, not_negative]
Positive = Annotated[float, positive]
NotNegative = Annotated[float, not_negative]
Share = Annotated[float, share]  # below 1

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
  rule = "is in this program alone: no other process of the run, and no later replay, finds it"
  fix = "name a file that has it (in a notebook, %%writefile makes one)"
  must(section, config, "custom", not config.custom.startswith("__main__:"), rule, fix)
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
  vocab_size: Count = 256  # at least the tokenizer's; bytes need 256
  num_layers: Count = 4
  model_dim: Count = 64  # D
  num_heads: Count = 4  # H, query heads
  num_kv_heads: Count = 2  # K, shared by groups of H/K query heads
  head_dim: Count = 16
  mlp_dim: Count = 192  # F, hidden width of the gated MLP (of each expert in a mixture)
  tied_embedding: bool = True  # False: the logits have a matrix of their own
  num_experts: Natural = 0  # E; 0 is dense
  experts_per_token: int = 2  # top-k of the router
  capacity_factor: Positive = 2.0  # slots of an expert per sequence over its even share
  load_balance_weight: NotNegative = 0.01  # of the auxiliary loss, computed inside one learner only
  rope_theta: Positive = 10_000.0
  norm_epsilon: Positive = 1e-6
  # Of activations and matmuls; parameters stay f32.
  compute_dtype: Literal["float32", "bfloat16"] = "float32"
  # A row's first positions may be an image's patches (models/layers.py). Such a model needs pairs
  # of images and captions, which `data.custom` must provide.
  image_size: Natural = 0  # pixels a side; 0: text alone
  patch_size: Count = 2  # pixels a side of a patch, which becomes one token
  image_channels: Count = 1  # 3: colour

  @property
  def num_patches(self) -> int:
    """P, the positions that an image takes."""
    return (self.image_size // self.patch_size) ** 2

  def __post_init__(self):
    _check_custom("model", self)
    check("model", self)
    rule = f"must be at most {MAX_LAYERS}: the plan of fragments lists all of them"
    must("model", self, "num_layers", self.num_layers <= MAX_LAYERS, rule, "use fewer")
    if self.custom:
      return
    rule = f"must be whole patches of model.patch_size ({self.patch_size}) a side"
    fix = f"use {self.patch_size * max(1, round(self.image_size / self.patch_size))}"
    must("model", self, "image_size", self.image_size % self.patch_size == 0, rule, fix)
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
  source: Literal["stdlib", "text", "tokens", "synthetic"] = "stdlib"
  path: str = ""  # glob for text, file or glob for tokens (.bin)
  token_dtype: Literal["uint16", "uint32"] = "uint16"  # of .bin files
  tokenizer: str = "bytes"  # bytes, sentencepiece:FILE.model or huggingface:FILE.json
  sequence_length: Count = 128  # T, tokens that a sequence predicts
  heldout_share: float = 0.05  # of the text: a fixed part that is never trained on
  heldout_sequences: Count = 64  # in one evaluation

  def __post_init__(self):
    _check_custom("data", self)
    check("data", self)
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
  # muon: hidden matrices take orthogonalized steps, all else Adam's.
  optimizer: Literal["adamw", "muon"] = "adamw"
  learning_rate: Positive = 8e-3  # for tiny models; larger ones want less (configs/dense.py)
  warmup_steps: Natural = 50
  decay_steps: Natural = 0  # cosine to the end; 0: derived from run.total_tokens and all islands
  final_share: float = 0.1  # of learning_rate, at the end of the decay
  b1: Share = 0.9
  b2: Share = 0.95
  epsilon: Positive = 1e-8
  weight_decay: NotNegative = 0.1  # on matrices only, not on norms
  clip_norm: NotNegative = 1.0  # global gradient norm; 0 turns clipping off
  accumulation_steps: Count = 1  # micro-batches a step

  def __post_init__(self):
    _check_custom("inner", self)
    check("inner", self)
    must("inner", self, "final_share", 0 <= self.final_share <= 1, "must lie in [0, 1]", "use 0.1")


@dataclasses.dataclass(frozen=True)
class OuterConfig:
  """Outer SGD on the merged outer gradient; momentum 0 is plain SGD."""

  learning_rate: float = 0.5
  momentum: Share = 0.8
  nesterov: bool = True
  decay_share: Share = 0.25  # the rate falls over this last share of the run's tokens; 0: never
  final_share: float = 0.05  # of the rate, at the end of the run

  def __post_init__(self):
    check("outer", self)
    rule = "must lie in (0, 1]: a shard follows the momentum by its steps: there must be steps"
    must("outer", self, "final_share", 0 < self.final_share <= 1, rule, "use 0.05")
    # Within these bounds no outer step overflows (docs/design.md, "Rejected pushes").
    bounded = self.learning_rate <= 1e3 and self.learning_rate * self.final_share >= 1e-12
    rule = "must be at most 1000, and at least 1e-12 when it has fallen to outer.final_share"
    fix = "use 0.5, and 0.05 for outer.final_share"
    must("outer", self, "learning_rate", bounded, rule, fix)


# --- Where it is trained: the islands' devices, meshes and batches


@dataclasses.dataclass(frozen=True)
class IslandConfig:
  """One island: its devices, its mesh and its batch. Islands of one run may all differ."""

  # 0: an even share of what JAX sees (a whole slice where devices have slices).
  devices: Natural = 1
  # Processes, each with an even share of the devices; one leads (training/hosts.py).
  hosts: Count = 1
  data: int = 1  # mesh axes; one may be -1: what the devices leave
  fsdp: int = -1
  tensor: int = 1
  batch_size: Count = 8  # B, sequences a step
  # How the step is computed: these change its time and memory, not its result.
  # splash: TPU; cudnn: GPU, bf16; auto: the platform's best.
  attention: Literal["auto", "einsum", "splash", "cudnn"] = "auto"
  # Layers keep all (none), products, attention or only their inputs (full).
  remat: Literal["none", "products", "attention", "full"] = "none"
  loss_chunks: Count = 1  # parts of the vocabulary; only one part's logits exist at a time
  topology: str = ""  # e.g. "v5p:4x4x4" or "h100:8", for `ddiloco compile` and `launch`
  # A step lasts at least so long: for islands that share devices.
  min_step_seconds: NotNegative = 0.0
  # Resources that a cluster (Ray) reserves for this island, e.g. {"TPU": 4}; empty: none.
  resources: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    check("islands", self)
    rule = f"must be shared evenly by islands.hosts = {self.hosts} processes"
    fix = f"use {self.hosts * max(1, self.devices // self.hosts)}, or 0: all that each of them sees"
    must("islands", self, "devices", self.devices % self.hosts == 0, rule, fix)
    _check_json("islands", self, "resources")
    axes = (self.data, self.fsdp, self.tensor)
    good = all(a == -1 or a > 0 for a in axes) and axes.count(-1) <= 1
    rule, fix = "must be positive, at most one of them -1", "use data=1, fsdp=-1, tensor=1"
    require(good, "islands.(data, fsdp, tensor)", axes, rule, fix)

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

  num_learners: Count = 4  # M, as planned; learners may come and go
  overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    super().__post_init__()
    for key, fields in self.overrides.items():
      rule, fix = "keys are learner numbers, also of those that join later", "rename it, e.g. '2'"
      require(is_number(key), "islands.overrides", key, rule, fix)
      typed_fields(IslandConfig, fields, f"islands.overrides.{key}")  # the rest: see `Config`

  def island(self, learner: int) -> IslandConfig:
    """The settings of one learner's island."""
    common = {f.name: getattr(self, f.name) for f in dataclasses.fields(IslandConfig)}
    return IslandConfig(**{**common, **self.overrides.get(str(learner), {})})

  def batch_size_of(self, learner: int) -> int:
    """The batch of one learner's island, without the checks of a whole `island`."""
    size: int = self.overrides.get(str(learner), {}).get("batch_size", self.batch_size)
    return size

  @functools.cached_property
  def batch_sizes(self) -> tuple[int, ...]:
    """Of every planned island; one number if all are equal."""
    sizes = tuple(self.batch_size_of(m) for m in range(self.num_learners))
    return sizes if len({*sizes}) > 1 else sizes[:1]


# --- How islands exchange what they learn: the protocol, and the network that carries it

Codec = Literal["f32", "bf16", "int8", "int4"]  # `core/codec.py` has their layouts
CODECS = typing.get_args(Codec)
# A report has three numbers, of up to 9 bytes each, for every fragment of its shard, which may own
# all of them; a header has at most a megabyte (`protocol/messages.py`).
MAX_FRAGMENTS = 1 << 15


@dataclasses.dataclass(frozen=True)
class SyncConfig:
  """The protocol. Symbols of the paper in brackets; docs/design.md says what was measured."""

  num_shards: Natural = 2  # syncer shards; 0: no sync, every island trains alone
  num_fragments: Count = 8  # P
  fragmentation: Literal["balanced", "layer", "tensor", "strided"] = "balanced"
  # Embeddings with more rows are split into pieces of at most these; 0: never.
  max_rows: Natural = 0
  sync_period: Count = 24  # H: inner steps between two syncs of the same fragment
  overlap_steps: Natural = 2  # tau: steps a sync may take; bounds grace; in lock-step, then wait
  min_quorum: Count = 1  # K: learners that start a round, and must have pushed when it commits
  grace_safety: Share = 0.9  # gamma: share of the slack that waiting for more learners may use
  blocking: bool = False  # True: lock-step (DiLoCo, Streaming DiLoCo); learners wait for versions
  # overwrite: the paper; mix: Streaming; rebase: work that is not merged yet is kept.
  apply: Literal["overwrite", "mix", "rebase"] = "rebase"
  mix_alpha: float = 0.5  # share of the local value that `mix` keeps
  merge: Literal["rda", "average"] = "rda"
  average_embeddings: bool = True  # embeddings are averaged also under rda
  push_codec: Codec = "f32"  # learner to shard
  publish_codec: Codec = "f32"  # shard to learner; a lossy codec is for updates, never for values
  value_threads: Natural = 0  # for the work on a fragment; 0: one a core, on a learner half of that
  error_feedback: bool = False  # learners add the rounding error of a push to their next one
  liveness_steps: Positive = 10.0  # a learner silent for so many of its own steps is lost ...
  liveness_seconds: Positive = 2.0  # ... but never sooner than this
  max_norm_ratio: float = 10.0  # rejects pushes so much longer than others' and than is usual
  quarantine_after: Count = 3  # rejections in a row until a learner must rejoin
  snapshot_steps: Natural = 200  # global steps between two snapshots of the whole run; 0: never

  def __post_init__(self):
    check("sync", self)
    must("sync", self, "mix_alpha", 0 <= self.mix_alpha <= 1, "must lie in [0, 1]", "use 0.5")
    rule = "must be greater than 1"
    must("sync", self, "max_norm_ratio", self.max_norm_ratio > 1, rule, "use 10")
    rule = f"must be at most {MAX_FRAGMENTS}: a report names every fragment of its shard"
    must("sync", self, "num_fragments", self.num_fragments <= MAX_FRAGMENTS, rule, "use fewer")
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


MAX_STREAMS = 64


@dataclasses.dataclass(frozen=True)
class NetworkConfig:
  """How messages travel between processes. `patience_seconds` grows with what is measured."""

  streams: Count = 1  # TCP connections per learner and shard that every fragment is spread over
  # Of fragments queued for or from one peer; 0: of as many values as a shard owns, three times f32.
  queue_bytes: Natural = 0
  hello_seconds: Positive = 0.5  # between two attempts to reach a peer, doubling to 16 times this
  patience_seconds: Positive = 2.0  # least wait until a shard's buddy counts as away
  silence_seconds: Positive = 30.0  # messages for a peer that is silent for so long are dropped
  # A learner that reaches no shard for so long ends, with an error; so does an island one host of
  # which waits for its data for so long. At a run's end: for room on the disk, and of the processes
  # engine for an evaluator.
  give_up_seconds: Positive = 600.0
  drain_seconds: NotNegative = 25.0  # a role that is told to end has so long to get its work merged

  def __post_init__(self):
    check("network", self)
    rule = f"must be at most {MAX_STREAMS}"
    must("network", self, "streams", self.streams <= MAX_STREAMS, rule, "use 8")


# --- How long a run is and what it leaves


@dataclasses.dataclass(frozen=True)
class RunConfig:
  """How long, how often to look, and what to leave behind."""

  total_tokens: Count = 4_000_000  # merged into the global model; the run ends there
  init_from: str = ""  # weights to start from, else random: .safetensors, Orbax or a run's workdir
  evaluations: Natural = 20  # of the global model on the held-out split, over the run; 0: none
  evaluator_devices: Natural = 0  # of the evaluator alone (fsdp), no island's; 0: one CPU device
  compare_alone: bool = False  # afterwards train every island alone on as many of its own steps
  prompt: str = "def "  # of the sample that is printed at the end
  sample_tokens: Natural = 160
  # A role that dies is started again after restart_seconds, doubled with every death in a row, up
  # to a minute; after more than max_restarts in a row it is given up (an evaluator: tried again
  # each minute). A healthy period ends the row (protocol/supervisor.py), and planned faults do not
  # count.
  restart_seconds: NotNegative = 1.0
  max_restarts: Natural = 5
  # A role whose loop has made no turn for so long, and for 20 of its usual steps (a minute each
  # until that is known), hangs: the stacks of its process' threads are logged. The process of a
  # shard then ends, to be started again; that of a learner after network.give_up_seconds. 0: roles
  # are not watched.
  hang_seconds: NotNegative = 60.0

  def __post_init__(self):
    check("run", self)


# --- Snapshots: where they are, and how a restarted learner goes on


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """Snapshots of the whole run; `sync.snapshot_steps` says how often."""

  path: str = ""  # all roles must reach PATH/RUN, also gs://...; empty: WORKDIR/checkpoints
  keep: Count = 2  # committed snapshots; older ones are deleted
  patience_seconds: Positive = 60.0  # for a learner's part of a snapshot that does not grow
  rejoin: Literal["own", "peer", "fresh"] = "own"  # inner optimizer of a restarted learner
  warmup_steps: Natural = 20  # of the learning rate, for a learner that joins with fresh moments
  donor_seconds: NotNegative = 10.0  # that rejoin = peer waits at most for a fragment's moments

  def __post_init__(self):
    check("checkpoint", self)


# --- Planned faults: a plan is data, whatever engine performs it

ToMessages = Literal["cut", "drop", "delay", "duplicate", "reorder", "corrupt", "throttle"]
Inside = Literal["slow", ToMessages, "disk", "poison"]  # performed by the role itself
Action = Literal["kill", "stall", Inside, "join"]
TO_MESSAGES, INSIDE, ACTIONS = map(typing.get_args, (ToMessages, Inside, Action))


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

  action: Action  # one of those above
  role: str  # "learner-2", "syncer-0", or "region-NAME": all of chaos.regions.NAME at once
  at_step: int = -1  # the global step; -1: by time
  at_seconds: float = -1.0  # since training began; -1: by step
  seconds: float = 5.0  # how long
  factor: float = 2.0
  share: float = 1.0
  delay_seconds: NotNegative = 0.5
  bits_per_second: Positive = 1e6
  peers: tuple[str, ...] = ()  # roles; "!learner-2": all but this one. Empty: all

  def __post_init__(self):
    check("chaos.faults", self)
    rule = "must name a role or a region"
    fix = "use 'learner-2', 'syncer-0' or 'region-NAME'"
    good = _is_role(self.role) or self.role.startswith("region-")
    must("chaos.faults", self, "role", good, rule, fix)
    good = self.action != "join" or not self.role.startswith("syncer-")
    must("chaos.faults", self, "role", good, "only a learner can join", "use 'learner-4'")
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
      rule = f"is none of chaos.regions ({', '.join(map(repr, self.regions)) or 'there are none'})"
      must("chaos.faults", fault, "role", good, rule, "add it there: name -> list of roles")

  def num_joining(self) -> int:
    """How many learners join by plan."""
    return len({fault.role for fault in self.of_roles() if fault.action == "join"})

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
