"""How islands exchange what they learn: the protocol, and the network that carries it."""

from __future__ import annotations

import dataclasses

from ddiloco.checked import not_negative, one_of, positive, require, share


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
  snapshot_steps: int = 200  # of the run's clock between two snapshots of the whole run; 0: never

  def __post_init__(self):
    not_negative("sync", self, "num_shards", "overlap_steps", "max_rows", "snapshot_steps")
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
class NetworkConfig:
  """How messages travel between processes. Every timeout grows with what is measured."""

  streams: int = 2  # TCP connections per learner and shard that fragments are spread over
  chunk_bytes: int = 1 << 20  # fragments travel in pieces of this size
  window_bytes: int = 64 << 20  # under way to one peer; at least bandwidth x round trip
  queue_bytes: int = 0  # of fragments waiting for or from one peer; 0: three f32 models
  hello_seconds: float = 0.5  # between two attempts to reach a peer, doubling to 16 times this
  patience_seconds: float = 2.0  # least wait until an unanswered chunk is sent again
  silence_seconds: float = 30.0  # what waits for a peer that is silent for so long is dropped
  give_up_seconds: float = 600.0  # a learner that reaches no shard for so long ends, with an error
  drain_seconds: float = 25.0  # a role that is told to end takes at most this long to lose nothing

  def __post_init__(self):
    positive("network", self, "streams", "chunk_bytes", "window_bytes", "hello_seconds")
    positive("network", self, "patience_seconds", "silence_seconds", "give_up_seconds")
    not_negative("network", self, "queue_bytes", "drain_seconds")
    require(
      4096 <= self.chunk_bytes <= 1 << 30,
      "network.chunk_bytes",
      self.chunk_bytes,
      "must lie between 4 KiB and 1 GiB",
      f"use {1 << 20}",
    )
    require(
      self.window_bytes >= self.chunk_bytes,
      "network.window_bytes",
      self.window_bytes,
      f"must hold at least one chunk (network.chunk_bytes = {self.chunk_bytes})",
      f"use {16 * self.chunk_bytes}",
    )
