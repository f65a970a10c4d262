"""What a learner knows: its fragments, its shards, its clock. PURE."""

from __future__ import annotations

import dataclasses

from ddiloco.core.messages import Publish, Pull, Push


@dataclasses.dataclass(frozen=True)
class Outstanding:
  """My push that no publish has answered yet; at most one per fragment."""

  push: Push  # without payload
  at_step: int  # my own step count when it was cut


@dataclasses.dataclass(frozen=True)
class Incoming:
  """A published version on its way onto the devices."""

  publish: Publish  # without payload
  mode: str
  merged: Outstanding | None  # my push that this version contains
  ready: bool = False


@dataclasses.dataclass(frozen=True)
class FragmentClock:
  """One fragment, as this learner has it."""

  shard: int
  version: int = -1  # in the parameters
  received: int = -1  # newest version accepted; >= version
  since: int = 0  # steps since the last sync: from its cut if it had my push, else from receipt
  steps: int = 0  # in my parameters and not merged yet
  tokens: int = 0
  merged_tokens: int = 0  # of the whole run, as the shard says
  acknowledged_tokens: int = 0  # mine, merged
  discarded_tokens: int = 0  # mine, lost to an overwrite
  outstanding: Outstanding | None = None
  pull: Pull | None = None  # asked and not answered yet
  incoming: tuple[Incoming, ...] = ()


@dataclasses.dataclass(frozen=True)
class ShardView:
  incarnation: int = -1  # newest heard of; -1: not welcomed yet
  hellos: int = 0
  next_hello_at: float = 0.0


@dataclasses.dataclass(frozen=True)
class LearnerState:
  learner: int
  incarnation: int
  shards: tuple[ShardView, ...]
  fragments: tuple[FragmentClock, ...]
  target_tokens: int  # merged by everybody; without shards: trained by me
  trains: bool = True
  step: int = 0  # mine, in this incarnation
  clock: int = 0  # the run's: what learning rate and data position follow
  trained_tokens: int = 0
  step_seconds: float = 0.0
  leaving: bool = False  # makes no more steps, and goes when nothing is left to merge
  done: bool = False

  @property
  def joined(self) -> bool:
    return all(f.version >= 0 for f in self.fragments)

  @property
  def merged_tokens(self) -> int:
    """Of the whole run: what every fragment has merged at least."""
    return min((f.merged_tokens for f in self.fragments), default=0)
