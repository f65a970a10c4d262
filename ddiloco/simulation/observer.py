"""What a virtual run tells of itself, and where others may play a part in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddiloco.core.messages import Push
from ddiloco.core.protocol import StepDone
from ddiloco.core.syncer_state import FragmentState

if TYPE_CHECKING:
  from ddiloco.simulation.actors import Actor, Learner, Part, Role


class Observer:
  """Knows nothing and does nothing; override what you care about.

  A virtual run has no parameters. An observer may play them: keep what belongs to a learner in
  `actor.parameters`, which snapshots take along, and give payloads to cuts and given values.
  """

  def born(self, actor: Actor, part: Part | None) -> None:
    """An incarnation begins, with its part of a snapshot or with nothing."""

  def stepped(self, actor: Learner, done: StepDone, gap_seconds: float, blocked: float) -> None:
    """An inner step has ended; the reducer is told next. Seconds since the one before it ended, and
    of these, spent waiting for a shard."""

  def on(self, actor: Actor, action: Any, event: Any) -> Any:
    """It performs this action now (all but sends). Returns the payload of a `Cut` or `Give`."""

  def performed(self, actor: Actor, actions: Sequence[Any]) -> None:
    """All that one event has led to is done."""

  def pushed(self, actor: Learner, push: Push) -> None:
    """What was cut is encoded, and goes out for the first time."""

  def published(self, actor: Actor, message: Any) -> None:
    """A shard sends a version."""

  def saved(self, snapshot: int, role: Role, seconds: float, reason: str) -> None:
    """A part of a snapshot is written; not if there is a reason."""

  def complete(self, snapshot: int, cut: Mapping[Role, Part]) -> None:
    """All parts of a snapshot are there."""

  def holds(self, state: FragmentState) -> None:
    """A shard begins with this value of a snapshot."""

  def supervisor(self, kind: str, **fields: Any) -> None:
    """What an engine would note: fault, exit, restart."""
