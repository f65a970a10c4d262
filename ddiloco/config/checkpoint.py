"""What outlives a process: where snapshots go, and how a learner that comes back goes on."""

from __future__ import annotations

import dataclasses

from ddiloco.checked import not_negative, one_of, positive


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """Snapshots of the whole run; `sync.snapshot_steps` says how often."""

  path: str = ""  # folder that all roles reach, also gs://...; empty: WORKDIR/checkpoints
  keep: int = 2  # committed snapshots; older ones are deleted
  patience_seconds: float = 60.0  # a snapshot waits for a learner's part, then goes without it
  rejoin: str = "own"  # inner optimizer of a learner that comes back: own, peer or fresh
  warmup_steps: int = 20  # of the learning rate, for one that comes into a run with fresh moments
  donor_seconds: float = 10.0  # that rejoin = peer waits for another learner's moments

  def __post_init__(self):
    positive("checkpoint", self, "keep", "patience_seconds")
    not_negative("checkpoint", self, "warmup_steps", "donor_seconds")
    one_of("checkpoint", self, "rejoin", "own", "peer", "fresh")
