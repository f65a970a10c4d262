"""Listeners of events that show a run while it goes on: the terminal's view, and TensorBoard.

On a terminal: a header with progress, the latest log events, a line per shard, a table of islands.
The table is last, since a terminal may have fewer lines than a run has islands.
Anywhere else (a notebook, a pipe, a log file): plain lines without control codes, one about every
ten seconds, later every fiftieth of the time since this start of the run, and one at once for every
log event (fault, exit, restart, joined, ...).

TensorBoard's scalars go to WORKDIR/tensorboard/ROLE. Both listeners take events from any thread,
and draw or write on a thread of their own.
"""

from __future__ import annotations

import itertools
import math
import os
import platform
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ddiloco.observe.guards import Drain, Warnings, warn
from ddiloco.observe.islands import IslandState, LogEvent, ShardState, outer_gradients, speed
from ddiloco.observe.run_state import RunState
from ddiloco.observe.style import clock_time, compact, island_colour, loss_text, percent, plain
from ddiloco.protocol.events import IMPORTANT, Commit, Evaluation, Event, Started, Step

FRAME_SECONDS = 1.0  # a frame costs some 5 ms of a core that also trains
SHORTEST_FRAME_SECONDS = 0.25  # between frames that an important event asks for
PLAIN_SECONDS = 10.0
SHOWN_LOG_EVENTS = 5
LEAST_NAME = 16  # characters of a run's name that are shown, also where figures need the room
_STATE_STYLES = {
  "running": "green",
  "joining": "cyan",
  "starting": "dim",
  "restarting": "cyan",
  "stalled": "yellow",
  "quarantined": "magenta",
  "lost": "bold red",
  "left": "dim",
}
_TONE_STYLES = {"bad": "red", "good": "green", "plain": "default"}


def render(view: RunState, now: float, width: int = 100) -> RenderableType:
  """The view as it looks `now` (seconds since the run started), for 80 columns or more."""
  parts: list[RenderableType] = [_header(view, now, width), _progress(view), Text()]
  if view.solo:
    parts += [Text(view.solo, style="bold yellow"), Text()]
  if view.log_events:
    parts += [*map(_log_event_line, list(view.log_events)[-SHOWN_LOG_EVENTS:]), Text()]
  if view.shards:
    shards = sorted(view.shards.items())
    parts += [*(_shard_line(s, shard, view.shards_at(now)) for s, shard in shards), Text()]
  return Group(*parts, _islands(view, now, gap=2 if width >= 100 else 1))


def plain_line(view: RunState, now: float) -> str:
  """The run in one line without control codes: its islands, and the shards that are not running."""
  islands = []
  for learner, island in sorted(view.islands.items()):
    state = island.state_at(now)
    at = f" step {island.step}" if island.step or state == "running" else ""
    if state == "joining" and view.fragments:
      at = f" (has received {len(island.versions)} of {len(view.fragments)} fragments)"
    islands.append(f"island {learner} {state}{at}")
  judged = view.shards_at(now)
  states = ((s, shard.state_at(judged)) for s, shard in sorted(view.shards.items()))
  shards = [f"shard {s} {state}" for s, state in states if state != "running"]
  said = [", ".join(each) for each in (islands, shards) if each]
  return " · ".join([f"[{clock_time(now)}] {_percent(view)}", *_figures(view, now), *said])


def _percent(view: RunState) -> str:
  """Unknown until the first shard serves: the run may go on from a snapshot."""
  return f"{percent(view.progress):>4}" if view.merged_tokens else "   –"


def _figures(view: RunState, now: float) -> list[str]:
  """Time left, held-out loss followed by the model's other measures, and speed: what is known."""
  left, loss = view.seconds_left(now), f"held-out loss {loss_text(view.heldout_loss)}"
  others = [f"{plain(name)} {loss_text(each)}" for name, each in view.heldout_measures.items()]
  parts = [
    view.finished or (f"{clock_time(left)} left" if math.isfinite(left) else ""),
    loss + f" ({', '.join(others)})" * bool(others) if math.isfinite(view.heldout_loss) else "",
    view.speed(now).text(),
  ]
  return [part for part in parts if part]


def _header(view: RunState, now: float, width: int) -> Text:
  said = "   ".join(["", f"{clock_time(now)} elapsed", *_figures(view, now)])
  name = Text(view.name or "ddiloco", style="bold")
  name.truncate(max(LEAST_NAME, width - len(said)), overflow="ellipsis")  # of a long one, a part
  return Text.assemble(name, said, no_wrap=True, overflow="ellipsis")


def _progress(view: RunState) -> Table:
  grid = Table.grid(padding=(0, 1), expand=True)
  grid.add_column(ratio=1)
  grid.add_column(justify="right", no_wrap=True)
  verb = "merged" if view.num_shards else "trained"
  done = compact(view.tokens_done) if view.merged_tokens else "–"
  tokens = f"{done} of {compact(view.total_tokens)} tokens {verb}"
  bar = ProgressBar(total=1.0, completed=view.progress, complete_style="#0072B2")
  grid.add_row(bar, f"{_percent(view)}  {tokens}")
  return grid


def _islands(view: RunState, now: float, gap: int) -> Table:
  known = any(math.isfinite(island.speed.mfu) for island in view.islands.values())
  numbers = ("restarts", "step", "global step", "loss", "tok/s", *(["MFU"] * known), "merged")
  look: dict[str, Any] = {"box": None, "expand": True, "header_style": "dim", "pad_edge": False}
  table = Table(padding=(0, gap, 0, 0), **look)
  for name in ("island", "state"):
    table.add_column(name, no_wrap=True)
  for name in numbers:
    table.add_column(name, justify="right", no_wrap=True)
  table.add_column("last missed round", ratio=1, no_wrap=True, overflow="ellipsis")
  for learner, island in sorted(view.islands.items()):
    state = island.state_at(now)
    table.add_row(
      Text(f"● {learner}", style=island_colour(learner)),
      Text(state, style=_STATE_STYLES.get(state, "default")),
      str(island.restarts),
      str(island.step),
      str(island.global_step),
      loss_text(island.loss),
      compact(island.tokens_per_second) if state == "running" else "–",
      *([_share(island.speed.mfu if state == "running" else math.nan)] * known),
      percent(island.participation) if island.took_part else "–",
      _missed(island, now),
    )
  return table


def _share(value: float) -> str:
  return percent(value, 1) if math.isfinite(value) else "–"


def _missed(island: IslandState, now: float) -> Text:
  if not island.missed_reason:
    return Text("–", style="dim")
  if island.took_part and not island.took_part[-1]:
    return Text(island.missed_reason)
  return Text(f"{clock_time(now - island.missed_time)} ago: {island.missed_reason}", style="dim")


def _shard_line(number: int, shard: ShardState, judged: float) -> Text:
  shown = shard.state_at(judged)
  state = f"{shown:<10}", _STATE_STYLES.get(shown, "default")
  counts = f"{shard.commits} rounds, {shard.rejected} rejected"
  said = f"■ shard {number:<3} ", state, f"  {counts}; last: {shard.last_reason or '–'}"
  return Text.assemble(*said, no_wrap=True, overflow="ellipsis")


def _log_event_line(log_event: LogEvent) -> Text:
  line = Text(f"{clock_time(log_event.time):>7}  ", style="dim", no_wrap=True, overflow="ellipsis")
  return line.append(log_event.text, style=_TONE_STYLES[log_event.tone])


class LiveView:
  """A listener of any number of recorders that draws the run on its own thread, inside `with`.

  A call with an event only queues the event. The event `run_started` says all that the view needs
  to know of the run, and times of events when the run started by `clock`.
  """

  def __init__(
    self,
    console: Console | None = None,
    clock: Callable[[], float] = time.monotonic,
    plain_seconds: float = PLAIN_SECONDS,
  ):
    self._noted: list[LogEvent] = []
    self.view = RunState(noted=self._noted.append)
    self._start_time: float | None = None
    self._since = 0.0  # of a run that goes on, when this start of it began
    self._clock = clock
    # FORCE_COLOR, which continuous integration sets, would make a terminal of a log file.
    self._console = console or Console(force_terminal=None if os.isatty(1) else False)
    self._plain_seconds = self._next_plain = plain_seconds
    self._live: Live | None = None
    self._next_frame = 0.0

  def __enter__(self) -> LiveView:
    """Takes the terminal and begins to draw."""
    # On a terminal that can only append (TERM=dumb) a picture would stay away until the end.
    if self._console.is_terminal and not self._console.is_dumb_terminal:
      live = Live(console=self._console, auto_refresh=False, vertical_overflow="ellipsis")
      try:
        live.start()
        self._live = live
      except (OSError, ValueError) as error:  # the run goes on without a view
        warn(f"the live view has no output: {error}")
    self._drain = Drain("live view", self._consume, FRAME_SECONDS)
    return self

  def __exit__(self, *_: object) -> None:
    """Draws the last state, which stays on the screen, and gives the terminal back."""
    self._drain.close()
    try:
      if self._live is None:
        self._say(plain_line(self.view, self._now()))
      else:
        try:
          self._draw(self._live, self._now())
        finally:
          self._live.stop()
    except Exception as error:  # a closed terminal, for example: no reason to lose a run
      if not self._drain.failures:
        warn(f"the live view lost its output: {error}")

  def __call__(self, event: Event) -> None:
    """Queues an event; after the end it is ignored."""
    start = self._clock() - event.time  # or earlier: an engine of processes passes events on late
    if self._start_time is None:
      self._start_time, self._since = start, event.time
    self._start_time = min(self._start_time, start)
    self._drain.put(event)
    if type(event) in IMPORTANT:
      self._drain.wake()

  def _now(self) -> float:
    return 0.0 if self._start_time is None else self._clock() - self._start_time

  def _consume(self, batch: list[Event]) -> None:
    self._noted.clear()
    self.view.read(batch)
    now = self._now()
    if self._live is None:
      self._print_plain(now)
    elif now >= self._next_frame:
      self._draw(self._live, now)

  def _draw(self, live: Live, now: float) -> None:
    live.update(render(self.view, now, self._console.width), refresh=True)
    self._next_frame = now + SHORTEST_FRAME_SECONDS

  def _print_plain(self, now: float) -> None:
    for log_event in self._noted:
      self._say(f"[{clock_time(log_event.time)}] {log_event.text}")
    if now >= self._next_plain and not self.view.finished:  # the end says it, in `__exit__`
      self._say(plain_line(self.view, now))
      self._next_plain = now + max(self._plain_seconds, (now - self._since) / 50)

  def _say(self, line: str) -> None:
    self._console.file.write(line + "\n")
    self._console.file.flush()


# --- TensorBoard
# tensorboardX's SummaryWriter puts events into a queue of ten and blocks when the queue is full
# (for ever, once its thread died of a full disk). So records are made and written here, on a
# background thread: the training step only queues.

PLOTTED = (Started, Step, Commit, Evaluation)
MOST_UNWRITTEN = 4 << 20  # bytes of a role that wait for a disk, some 20,000 steps; more are lost
_instance = itertools.count()


def scalars(event: Event, started: Started | None = None) -> tuple[int, dict[str, float]]:
  """(x, {tag: value}) of an event; no tags if it has nothing to plot.

  `x` is the global step for learners, merged tokens for shards and the evaluator. `started`: the
  `Started` event of the learner's incarnation; its devices and FLOPs give a step's speed and MFU.
  """
  if isinstance(event, Step):
    # Without a loss a step was only begun: of its time nothing is known yet.
    known = event.loss is not None and event.seconds > 0
    rate = event.tokens / event.seconds if known else math.nan
    island = IslandState()
    if started is not None:
      island.start(started)
    values = {
      "tokens_per_second": rate if known else None,
      **speed([(island, rate)]).as_json(),
      "step_seconds": event.seconds if known else None,
      "data_seconds": event.data_seconds,
      "loss": event.loss,  # None where they are fetched late, as the two below
      "learning_rate": event.learning_rate,
      "grad_norm": event.grad_norm,
    }
    found = {f"train/{name}": value for name, value in values.items() if value is not None}
    return event.global_step, found
  if isinstance(event, Commit):
    took_part = len(event.weights)
    known = took_part + len(event.rejected) + len(event.missing)
    return event.merged_tokens, {
      "sync/participation": took_part / known if known else 0.0,
      "sync/quorum_seconds": event.quorum_seconds,
      "sync/grace_seconds": event.grace_seconds,
      "sync/merge_seconds": event.merge_seconds,
      **{f"sync/{name}": value for name, value in outer_gradients(event).items()},
    }
  if isinstance(event, Evaluation):
    measured = {"loss": event.loss, **event.measures}
    return event.merged_tokens, {f"heldout/{name}": value for name, value in measured.items()}
  return 0, {}


class TensorBoard:
  """A listener for any number of roles.

  A write that fails, as on a full disk, is warned of, once until one succeeds; what it was to write
  is tried again.
  """

  def __init__(self, workdir: str | os.PathLike[str], flush_seconds: float = 2.0):
    self._folder = Path(workdir) / "tensorboard"
    about = f"{time.time():.0f}.{platform.node()}.{os.getpid()}.{next(_instance)}"
    self._name = f"events.out.tfevents.{about}"  # two boards never share a file
    self._warn = Warnings()
    self._started: dict[str, Started] = {}  # by role, its newest incarnation's
    self._unwritten: dict[str, bytearray] = {}  # by role, whole records
    self._drain = Drain("tensorboard", self._write, flush_seconds)

  def __call__(self, event: Event) -> None:
    """Queues an event, if it has scalars."""
    if isinstance(event, PLOTTED):
      self._drain.put((time.time(), event))

  def close(self) -> None:
    """Writes what is queued."""
    self._drain.close()

  def _write(self, batch: list[tuple[float, Event]]) -> None:
    for wall_time, event in batch:
      self._add(wall_time, event)
    try:
      for role, records in self._unwritten.items():
        if records:
          _append(self._folder / role / self._name, records)
      self._warn.over("unwritten")
    except OSError as error:
      text = f"TensorBoard scalars wait until {self._folder} can be written"
      self._warn("unwritten", f"{text}: {error}. The run goes on.")

  def _add(self, wall_time: float, event: Event) -> None:
    from tensorboardX.proto import event_pb2, summary_pb2  # slow to import, and only needed here

    if isinstance(event, Started):
      self._started[event.role] = event
    step, values = scalars(event, self._started.get(event.role))
    records = self._unwritten.setdefault(event.role, bytearray())
    if not values or len(records) > MOST_UNWRITTEN:
      return
    summary = summary_pb2.Summary(
      value=[summary_pb2.Summary.Value(tag=k, simple_value=float(v)) for k, v in values.items()]
    )
    records += _record(event_pb2.Event(wall_time=wall_time, step=int(step), summary=summary))


def _append(path: Path, records: bytearray) -> None:
  """Moves whole records to the end of a file, or none of them: no reader gets past a torn one."""
  from tensorboardX.proto.event_pb2 import Event as Message

  path.parent.mkdir(parents=True, exist_ok=True)
  with path.open("ab", buffering=0) as file:
    before = file.tell()
    head = b"" if before else _record(Message(wall_time=time.time(), file_version="brain.Event:2"))
    if file.write(head + records) < len(head + records):
      file.truncate(before)
      raise OSError("a part was written (is the disk full?)")
  records.clear()


def _record(message: Any) -> bytes:
  from tensorboardX.record_writer import masked_crc32c

  data = message.SerializeToString()
  length = struct.pack("<Q", len(data))
  parts = ((each, struct.pack("<I", masked_crc32c(each))) for each in (length, data))
  return b"".join(itertools.chain.from_iterable(parts))
