"""TensorBoard scalars: a listener of events that writes WORKDIR/tensorboard/{role}.

tensorboardX's SummaryWriter hands events to a queue of ten and blocks when it is full (for ever,
once its thread died of a full disk). So its file writer is driven here from our own background
thread: the training step only queues.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from pathlib import Path
from typing import Any

from ddiloco.observe.guards import Drain, warn
from ddiloco.observe.island_state import IslandState, speed
from ddiloco.protocol.events import Commit, Evaluation, Event, Started, Step

KINDS = (Started, Step, Commit, Evaluation)
_instance = itertools.count()


def scalars(event: Event, started: Started | None = None) -> tuple[int, dict[str, float]]:
  """(x, {tag: value}) of an event; no tags if it has nothing to plot.

  `started` began its incarnation, and says what a step's speed is measured by.

  Learners against the global step (steps); shards and the evaluator against merged tokens.
  """
  if isinstance(event, Step):
    measured = {  # not of every step: they are fetched late
      "loss": event.loss,
      "learning_rate": event.learning_rate,
      "grad_norm": event.grad_norm,
    }
    seconds = event.seconds
    rate = event.tokens / seconds if seconds > 0 else 0.0
    island = IslandState()
    if started is not None:
      island.start(started)
    fast = speed([(island, rate)])
    known = {"train/tokens_per_second_per_chip": fast.per_chip, "train/mfu": fast.mfu}
    return event.global_step, {
      "train/tokens_per_second": rate,
      **{tag: value for tag, value in known.items() if math.isfinite(value)},
      "train/step_seconds": seconds,
      **{f"train/{name}": value for name, value in measured.items() if value is not None},
    }
  if isinstance(event, Commit):
    took_part = len(event.participants)
    known = took_part + len(event.rejected) + len(event.missing)
    return event.merged_tokens, {
      "sync/participation": took_part / known if known else 0.0,
      "sync/quorum_seconds": event.quorum_seconds,
      "sync/grace_seconds": event.grace_seconds,
      "sync/merge_seconds": event.merge_seconds,
      **({} if event.agreement is None else {"sync/agreement": event.agreement}),
    }
  if isinstance(event, Evaluation):
    measured = {"loss": event.loss, **event.measures}
    return event.merged_tokens, {f"heldout/{name}": value for name, value in measured.items()}
  return 0, {}


class TensorBoard:
  """A listener for any number of roles. A failure is one warning; after it nothing is written."""

  def __init__(self, workdir: str | os.PathLike[str], flush_seconds: float = 2.0):
    self.failed = False
    self._folder = Path(workdir) / "tensorboard"
    self._suffix = f".{os.getpid()}.{next(_instance)}"  # two writers never share a file
    self._writers: dict[str, Any] = {}
    self._started: dict[str, Started] = {}  # by role, its newest incarnation's
    self._drain = Drain("tensorboard", self._write, flush_seconds)

  def __call__(self, event: Event) -> None:
    """Queues an event; what has no scalars is not even queued."""
    if isinstance(event, KINDS) and not self.failed:
      self._drain.put((time.time(), event))

  def close(self) -> None:
    """Writes what is queued."""
    self._drain.close()

  def _write(self, batch: list[tuple[float, Event]]) -> None:
    if self.failed or not batch:
      return
    try:
      for wall_time, event in batch:
        self._add(wall_time, event)
      for writer in self._writers.values():
        writer.flush()
    except Exception as error:  # whatever breaks in a library that only draws curves
      self.failed = True
      warn(f"no more TensorBoard scalars in {self._folder}: {error!r}. The run goes on.")

  def _add(self, wall_time: float, event: Event) -> None:
    from tensorboardX.proto import event_pb2, summary_pb2  # slow to import, and only needed here

    if isinstance(event, Started):
      self._started[event.role] = event
    step, values = scalars(event, self._started.get(event.role))
    if not values:
      return
    summary = summary_pb2.Summary(
      value=[summary_pb2.Summary.Value(tag=k, simple_value=float(v)) for k, v in values.items()]
    )
    message = event_pb2.Event(wall_time=wall_time, step=int(step), summary=summary)
    self._writer(event.role).write_event(message)

  def _writer(self, role: str) -> Any:
    if role not in self._writers:
      from tensorboardX.event_file_writer import EventsWriter

      (self._folder / role).mkdir(parents=True, exist_ok=True)
      prefix = str(self._folder / role / "events")
      self._writers[role] = EventsWriter(prefix, self._suffix)
    return self._writers[role]
