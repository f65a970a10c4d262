"""What a learner knows: its fragments, its shards, how far it is. PURE."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ddiloco.protocol.messages import NOTHING, Publish, Pull, Push
from ddiloco.protocol.values import replace


@dataclasses.dataclass(frozen=True)
class Outstanding:
  """My push that no publish has answered yet; at most one per fragment."""

  push: Push  # without payload
  at_step: int  # my own step count when it was copied out


@dataclasses.dataclass(frozen=True)
class IncomingVersion:
  """A published version on its way onto the devices."""

  publish: Publish  # without payload
  mode: str
  merged: Outstanding | None  # my push that this version contains
  ready: bool = False


@dataclasses.dataclass(frozen=True)
class LearnerFragment:
  """One fragment, as this learner has it."""

  shard: int
  version: int = -1  # in the parameters
  round: int = NOTHING  # that made it: its identity, since version numbers may come twice
  received: int = -1  # newest version accepted; >= version
  steps_since_sync: int = 0  # from the copy-out if the sync had my push, else from receipt
  steps: int = 0  # in my parameters and not merged yet
  tokens: int = 0
  merged_tokens: int = 0  # of the whole run, as the shard says
  acknowledged_tokens: int = 0  # mine, merged
  discarded_tokens: int = 0  # mine, lost to an overwrite
  base_header: Publish | None = None  # what came with the newest version accepted, without payload
  fresh: bool = False  # its shard has sent me what it had, or had nothing newer than I
  outstanding: Outstanding | None = None
  pull: Pull | None = None  # asked and not answered yet
  incoming: tuple[IncomingVersion, ...] = ()

  @property
  def newest(self) -> int:
    """The round that made the newest version accepted."""
    return self.base_header.round if self.base_header else NOTHING


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
  fragments: tuple[LearnerFragment, ...]
  target_tokens: int  # merged from all learners; without shards: trained by me
  trains: bool = True
  step: int = 0  # mine, in this incarnation
  global_step: int = 0  # of the most advanced learner
  trained_tokens: int = 0
  step_seconds: float = 0.0
  stepped_at: float = 0.0  # when the newest step was over
  waited_seconds: float = 0.0  # that the newest publish waited for the end of a step
  idle_seconds: float = 0.0  # that, and what it waited once it was staged
  snapshot: int = 0  # the newest heard of; my state is captured for it
  # What it has heard of whom (`protocol/causality.py`).
  vector_clock: Mapping[int, int] = dataclasses.field(default_factory=dict)
  pushes_made: int = 0  # in this incarnation
  donor_seconds: float = 0.0  # that it waits for a peer's moments, when it joins
  wants: tuple[int, ...] = ()  # fragments whose moments it still waits for
  wants_until: float = 0.0
  ask_at: float = 0.0
  joined_global_step: int = 0  # the run's, when it joined
  donations: int = 0  # made, in this incarnation
  whole: bool = False  # it needs initial values sent, since it cannot make them
  leaving: bool = False  # makes no more steps, and goes when nothing is left to merge
  done: bool = False

  @property
  def joined(self) -> bool:
    return all(f.fresh and f.version >= 0 for f in self.fragments)

  @property
  def merged_tokens(self) -> int:
    """Of the whole run: what every fragment has merged at least."""
    return min((f.merged_tokens for f in self.fragments), default=0)


def schedule_step(state: LearnerState, tokens_per_step: int) -> int:
  """Where the run is in its schedule of learning rates: the step that has seen as many tokens.

  What is merged, and my own steps on top of it, as if all others kept pace with me: the mean of the
  fragments, rounded down. `tokens_per_step` is that of all planned learners together. In lock-step
  it is the global step. Where learners are down, slow, or more than planned, it is not: a schedule
  by the global step would be over too early, or never.
  """
  if not state.fragments:
    return state.step
  tokens = sum(f.merged_tokens + f.steps * tokens_per_step for f in state.fragments)
  return tokens // (len(state.fragments) * tokens_per_step)


def set_fragment(state: LearnerState, fragment: int, **changes) -> LearnerState:
  """The state with these fields of one fragment changed."""
  fragments = list(state.fragments)
  fragments[fragment] = replace(fragments[fragment], **changes)
  return replace(state, fragments=tuple(fragments))
