"""A learner that comes back, in named phases: where the seconds from its death to its merge went.

PURE. A phase lasts from the end of the one before it to the event that ends it:

| phase      | ends with                                           | told by                       |
|------------|-----------------------------------------------------|-------------------------------|
| detect     | its supervisor has noticed that it is dead          | `exit`, after a planned kill  |
| pause      | its next incarnation is started                     | `restart`                     |
| away       | (instead of both, where no engine starts it) it is  | `launched` or `started`       |
|            | there again                                         |                               |
| process    | its process is there, with its imports              | `launched`                    |
| devices    | JAX has its devices, and data are open              | `compiled`, less its seconds  |
| compile    | its programs are compiled, or were in the cache     | `compiled`                    |
| restore    | its part of a snapshot is on the devices            | `started`                     |
| receive    | every fragment has arrived                          | `joined`                      |
| first_step | its first step has ended                            | `step`                        |
| merge      | a commit has its push                               | `commit`                      |

A phase that an engine has not, as a thread has no process, is not there.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from typing import Any

from ddiloco.protocol import events
from ddiloco.protocol.events import Event, parse_role

PHASES = (
  *("detect", "pause", "away", "process", "devices", "compile", "restore", "receive"),
  *("first_step", "merge"),
)
MOST_REJOINS = 200  # the newest are kept


@dataclasses.dataclass
class WayBack:
  """One way back. `merged`: when it was part of the run again; NaN before, and if it never was."""

  learner: int
  died: float
  phases: dict[str, float] = dataclasses.field(default_factory=dict)  # seconds, in their order
  merged: float = math.nan
  reached: float = 0.0  # the end of its last phase

  @property
  def seconds(self) -> float:
    """From its death to its merge."""
    return self.merged - self.died

  def end(self, phase: str, time: float) -> None:
    """The phase ends; of two that say the same the first counts, and time does not go back."""
    if phase not in self.phases:
      self.phases[phase] = max(0.0, time - self.reached)
      self.reached = max(self.reached, time)


class Rejoins:
  """Takes a run's events in order of time."""

  def __init__(self, most: int = MOST_REJOINS):
    self.found: deque[WayBack] = deque(maxlen=most)
    self.left_out = 0  # before these
    self._open: dict[int, WayBack] = {}
    self._seen: dict[int, tuple[int, float]] = {}  # incarnation and time of its last own word

  def add(self, event: Event) -> None:
    """One event; those that no phase begins or ends with are signs of life at most."""
    match event:
      case events.RunStarted():
        self._open, self._seen = {}, {}  # all of it begins, or goes on: that is no rejoin
      case events.Fault(action="kill"):
        self._dies(event.target, event.time)
      case events.Exit():
        self._exit(event)
      case events.Restart():
        self._end(parse_role(event.target), "pause", event.time)
      case events.Compiled(program=""):
        who = parse_role(event.target)
        if event.role == event.target:
          self._hear(event)
        self._end(who, "devices", event.time - max(0.0, event.seconds))
        self._end(who, "compile", event.time)
      case events.Commit():
        for m in event.participants:
          self._merged(m, event.time)
      case _ if event.role.startswith("learner-"):
        self._hear(event)

  def as_json(self, most: int = MOST_REJOINS) -> list[dict[str, Any]]:
    """The newest, oldest first; seconds are None of one that is not merged."""
    return [
      {
        "learner": each.learner,
        "time": round(each.died, 3),
        "seconds": round(each.seconds, 3) if math.isfinite(each.seconds) else None,
        "phases": {phase: round(seconds, 3) for phase, seconds in each.phases.items()},
      }
      for each in list(self.found)[-most:]
    ]

  def _dies(self, target: str, time: float) -> WayBack | None:
    kind, m = parse_role(target)
    if kind != "learner" or m not in self._seen:  # one that never was there does not come back
      return None
    if len(self.found) == self.found.maxlen:
      self.left_out += 1
    self._open[m] = WayBack(m, time, reached=time)
    self.found.append(self._open[m])
    return self._open[m]

  def _exit(self, event: events.Exit) -> None:
    """Noticed: after a planned kill, of which the moment is known, or else after its last word."""
    kind, m = parse_role(event.target)
    if kind != "learner" or m not in self._seen:
      return
    open_ = self._open.get(m)
    if open_ is None or open_.phases:
      open_ = self._dies(event.target, min(event.time, self._seen[m][1]))
    if open_ is not None:
      open_.end("detect", event.time)

  def _hear(self, event: Event) -> None:
    """A word of a learner's own."""
    who = parse_role(event.role)
    m, (incarnation, last) = who[1], self._seen.get(who[1], (event.incarnation, event.time))
    if event.incarnation < incarnation:
      return  # a predecessor's last words
    if event.incarnation > incarnation and m not in self._open:
      self._dies(event.role, last)
    self._seen[m] = event.incarnation, max(last, event.time)
    open_ = self._open.get(m)
    if open_ is None or event.time < open_.died:
      return
    match event:
      case events.Launched() | events.Started() if not open_.phases:
        open_.end("away", event.time)
      case events.Launched():
        open_.end("process", event.time)
      case events.Started():
        open_.end("restore", event.time)
      case events.Joined():
        open_.end("receive", event.time)
      case events.Step() if "receive" in open_.phases:
        open_.end("first_step", event.time)

  def _end(self, who: tuple[str, int], phase: str, time: float) -> None:
    kind, m = who
    if kind == "learner" and m in self._open:
      self._open[m].end(phase, time)

  def _merged(self, m: int, time: float) -> None:
    open_ = self._open.get(m)
    if open_ is not None and "first_step" in open_.phases:
      open_.end("merge", time)
      open_.merged = time
      del self._open[m]
