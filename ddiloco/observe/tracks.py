"""What became of islands that died, and of the faults of a run. PURE, and bounded in size."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Any

from ddiloco.observe.history import Idle
from ddiloco.observe.islands import IslandState
from ddiloco.observe.style import rounded
from ddiloco.protocol import events
from ddiloco.protocol.events import Event, parse_role

# --- A learner that comes back: how the seconds from its death to its merge were spent
# And how long the others paused meanwhile

MOST_REJOINS = 200  # the newest are kept
FOR_GOOD_SECONDS = 30.0  # others are watched for so long when a learner is killed for good
MOST_WATCHED = 32  # kills at once; of more, the oldest are no longer watched


@dataclasses.dataclass(eq=False)
class WayBack:
  """The return of one learner. `planned`: a fault of the plan killed it.

  `pauses` has, by witness of a planned kill, its longest pause until the learner was merged again.
  """

  learner: int
  died: float
  planned: bool = False
  ends: dict[str, float] = dataclasses.field(default_factory=dict)  # by phase, in their order
  pauses: dict[int, float] = dataclasses.field(default_factory=dict)
  watched_until: float = math.inf  # at most

  def end(self, phase: str, time: float) -> None:
    """The phase ends. If several events end it, the first counts; time does not go back."""
    self.ends.setdefault(phase, max([self.died, time, *self.ends.values()]))

  def seconds(self, phase: str = "merge") -> float:
    """From its death to the end of a phase; NaN until then."""
    return self.ends.get(phase, math.nan) - self.died

  @property
  def phases(self) -> dict[str, float]:
    """The seconds of each phase."""
    starts = [self.died, *self.ends.values()]
    return {phase: end - start for (phase, end), start in zip(self.ends.items(), starts)}


class Rejoins:
  """Returns of learners in named phases. Takes a run's events in order of time.

  A phase lasts from the end of the one before it to the event that ends it:

  | phase      | ends when                                          | event                        |
  |------------|----------------------------------------------------|------------------------------|
  | detect     | its supervisor has noticed that it is dead         | `exit`, after a planned kill |
  | pause      | its next incarnation is started                    | `restart`                    |
  | away       | (instead of both, where no engine starts it) it    | `launched` or `started`      |
  |            | runs again                                         |                              |
  | process    | its process runs and has its imports               | `launched`                   |
  | devices    | JAX has its devices, and data are open             | `compiled`, less its seconds |
  | compile    | its programs are compiled, or were in the cache    | `compiled`                   |
  | restore    | its part of a snapshot is on the devices           | `started`                    |
  | receive    | every fragment has arrived                         | `joined`                     |
  | first_step | its first step has ended (an accelerator: begun)   | `step`                       |
  | merge      | a commit has its push                              | `commit`                     |

  A phase that an engine does not have is left out: a thread has no `process`. A learner that left
  in good order and joins later has not died.

  A planned kill has witnesses: the other islands that train when it strikes. One that is struck
  itself, or starts anew, before the killed learner is merged again, is none.
  """

  def __init__(self, islands: Mapping[int, IslandState], most: int = MOST_REJOINS):
    """`islands`: their states, as they are before the next event."""
    self.found: deque[WayBack] = deque(maxlen=most)
    self.left_out = 0  # returns before these
    self._islands = islands
    # By role.
    self._open: dict[str, WayBack] = {}
    self._seen: dict[str, tuple[int, float]] = {}  # incarnation and time of its own last event
    self._watched: deque[WayBack] = deque(maxlen=MOST_WATCHED)

  def add(self, event: Event) -> None:
    """Takes one event; any event of a learner's own shows that it lives."""
    for way in [each for each in self._watched if event.time > each.watched_until]:
      self._watch_no_more(way, way.watched_until)
    match event:
      case events.RunStarted():
        self._open, self._seen = {}, {}  # the whole run starts or resumes: no learner rejoins
        self._watched.clear()
      case events.Fault():
        if event.action == "kill":
          self._die(event.target, event.time, event)
        self._strike(event.target)
      case events.Exit():
        self._strike(event.target)
        self._exit(event)
      case events.Restart():
        self._strike(event.target)
        self._end(event.target, "pause", event.time)
        if self._left(event.target):
          self._seen.pop(event.target, None)  # what begins now is like a first life
      case events.Compiled(program=""):
        self._hear(event)
        self._end(event.target, "devices", event.time - max(0.0, event.seconds))
        self._end(event.target, "compile", event.time)
      case _:
        self._hear(event)

  def merge(self, event: events.Commit) -> list[int]:
    """Takes a commit; returns the learners whose way back ends with it."""
    back = [
      way
      for role in sorted(self._open.keys() & {f"learner-{m}" for m in event.weights})
      if "first_step" in (way := self._open[role]).ends
    ]
    for way in back:
      way.end("merge", event.time)
      del self._open[f"learner-{way.learner}"]
      self._watch_no_more(way, event.time)
    return [way.learner for way in back]

  def as_json(self, most: int = MOST_REJOINS) -> list[dict[str, Any]]:
    """The newest `most` returns, oldest first; `seconds` is None for a learner not merged yet."""
    return [
      {
        "learner": each.learner,
        "time": round(each.died, 3),
        "seconds": rounded(each.seconds(), 3),
        "phases": {phase: round(seconds, 3) for phase, seconds in each.phases.items()},
      }
      for each in list(self.found)[-most:]
    ]

  def gap_ratio(self, way: WayBack, now: float) -> float:
    """Longest pause of a surviving island around a kill, over its own median step gap; the worst.

    A pause that began before the kill counts in full; silence counts up to the merge of the killed
    learner, or for 30 s after a kill for good. `gap_seconds` of a step: since the end of the step
    before. NaN: no survivor. `now`: until then each of them would have been heard.
    """
    pauses = self._pauses(way, now) if way in self._watched else way.pauses
    ratios = (pause / self._islands[m].usual_gap for m, pause in pauses.items())
    return max((ratio for ratio in ratios if math.isfinite(ratio)), default=math.nan)

  def _die(self, role: str, time: float, kill: events.Fault | None = None) -> None:
    if role not in self._seen or self._left(role):  # one that never ran, or left, does not die
      return
    if role in self._open:
      self._watch_no_more(self._open[role], time)
    self.left_out += len(self.found) == self.found.maxlen
    way = self._open[role] = WayBack(parse_role(role)[1], time, kill is not None)
    self.found.append(way)
    if kill is not None:
      there = self._islands.items()
      way.pauses = {m: 0.0 for m, each in there if each.state == "running" and each.step}
      if kill.seconds < 0:
        way.watched_until = time + FOR_GOOD_SECONDS
      self._watched.append(way)

  def _exit(self, event: events.Exit) -> None:
    """Ends `detect`, which began at a planned kill if there was one, or else at its last event."""
    open_ = self._open.get(event.target)
    if open_ is None or open_.ends:
      _, last = self._seen.get(event.target, (0, event.time))
      self._die(event.target, min(event.time, last))
    self._end(event.target, "detect", event.time)

  def _hear(self, event: Event) -> None:
    """Takes an event that a learner itself recorded."""
    role, m = event.role, parse_role(event.role)[1]
    incarnation, last = self._seen.get(role, (event.incarnation, event.time))
    if event.incarnation < incarnation or not role.startswith("learner-"):
      return  # a late event of an earlier incarnation, or no learner's
    if event.incarnation > incarnation and role not in self._open:
      self._die(role, last)
    self._seen[role] = event.incarnation, max(last, event.time)
    if self._watched:
      self._watch(event, m)
    open_ = self._open.get(role)
    if open_ is None or event.time < open_.died:
      return
    match event:
      case events.Launched() | events.Started() if not open_.ends:
        open_.end("away", event.time)
      case events.Launched():
        open_.end("process", event.time)
      case events.Started():
        open_.end("restore", event.time)
      case events.Joined():
        open_.end("receive", event.time)
      case events.Step() if "receive" in open_.ends:
        open_.end("first_step", event.time)

  def _end(self, role: str, phase: str, time: float) -> None:
    if role in self._open:
      self._open[role].end(phase, time)

  def _watch(self, event: Event, m: int) -> None:
    """Notes how long a witness paused; one that leaves was silent until then."""
    match event:
      case events.Started():
        self._strike(event.role)
      case events.Step() | events.Stopped():
        for way in self._watched:
          if m in way.pauses and event.time > way.died:
            stopped = isinstance(event, events.Stopped)
            pause = event.time - self._islands[m].alive_at if stopped else event.gap_seconds
            way.pauses[m] = max(way.pauses[m], pause)

  def _strike(self, role: str) -> None:
    """An island that something strikes is no witness of another's kill, unless it had left."""
    kind, m = parse_role(role)
    if kind == "learner" and not self._left(role):
      for way in self._watched:
        way.pauses.pop(m, None)

  def _left(self, role: str) -> bool:
    """Whether the learner has left in good order."""
    island = self._islands.get(parse_role(role)[1])
    return island is not None and island.state == "left"

  def _watch_no_more(self, way: WayBack, time: float) -> None:
    if way in self._watched:
      way.pauses = self._pauses(way, time)
      self._watched.remove(way)

  def _pauses(self, way: WayBack, until: float) -> dict[int, float]:
    """By witness its longest pause; that of one which trains counts up to this time."""
    silent = {m: until - self._islands[m].alive_at for m in way.pauses}
    there = {m for m in way.pauses if self._islands[m].state == "running"}
    return {m: max(pause, silent[m] if m in there else 0.0) for m, pause in way.pauses.items()}


# --- What became of the faults of a run
# PURE. Memory grows with faults, exits and lost rounds, not with steps and commits.

SETTLED_ROUNDS = 1000  # of a fragment; older ones are judged once and for all


@dataclasses.dataclass
class Recovery:
  """One fault. `seconds`: from its strike to the first commit after its end that has the learner's
  push, or that the shard made. NaN: the run ended before that commit."""

  time: float
  target: str  # "learner-2"
  action: str
  planned_seconds: float
  seconds: float = math.nan


class Aftermath:
  """What became of the faults of a run. Takes all its events in order of time.

  Attributes:
    recoveries: of every fault, in order of time.
  """

  def __init__(self) -> None:
    self.recoveries: list[Recovery] = []
    self._awaited: list[tuple[float, Recovery]] = []  # when its fault is over
    self._idle = Idle()
    self._exits: list[events.Exit | events.Crash] = []  # that no kill explains
    self._poisoned: set[str] = set()
    self._rounds: dict[int, _Rounds] = defaultdict(_Rounds)  # by fragment

  def read(self, log: Iterable[Event]) -> Aftermath:
    """Takes a whole log."""
    for event in log:
      self.take(event)
    return self

  def take(self, event: Event) -> None:
    """Takes one event."""
    match event:
      case events.Step():
        self._idle.train(event.time - event.seconds, event.time)
      case events.Stage() | events.Apply():
        self._rounds[event.fragment].had.add(event.round)
      case events.Commit():
        self._rounds[event.fragment].commit(event.round, event.base_round)
        self._recover(event)
      case events.Owns() | events.Regained():
        self._rounds[event.fragment].head = event.round
      case events.Fault():
        self._strike(event)
      case events.Crash():
        self._exits.append(event)
      case events.Exit() if "by plan" not in event.reason:
        self._exits.append(event)

  @property
  def longest_stall_seconds(self) -> float:
    """The longest time, between the first step and the last, in which no island was in a step."""
    return self._idle.longest

  def _strike(self, event: events.Fault) -> None:
    if event.action == "poison":
      self._poisoned.add(event.target)
    found = Recovery(event.time, event.target, event.action, event.seconds)
    self.recoveries.append(found)
    # A join has not to end first: the learner is to take part at once.
    lasts = 0.0 if event.action == "join" else event.seconds
    if lasts >= 0:
      self._awaited.append((event.time + lasts, found))

  def _recover(self, event: events.Commit) -> None:
    there = {parse_role(event.role), *(("learner", m) for m in event.weights)}
    for each in list(self._awaited):
      over, fault = each
      if event.time > over and parse_role(fault.target) in there:
        fault.seconds = event.time - fault.time
        self._awaited.remove(each)

  def lost_rounds(self) -> list[tuple[int, int]]:
    """(fragment, round) of every commit that learners received but the newest value does not
    contain.

    A commit that died with its shard before any learner received it is not lost: a learner keeps
    its work until it has a value that contains it, and pushes it again.
    """
    return [(p, each) for p, rounds in sorted(self._rounds.items()) for each in rounds.lost()]

  def unplanned(self) -> list[events.Exit | events.Crash]:
    """Crashes, and exits that no fault of that role explains: no role may die of another's fault.

    A kill explains the exit of its role, poison that its learner was quarantined.
    """
    return [
      event
      for event in self._exits
      if isinstance(event, events.Crash)
      or event.target not in self._poisoned
      or not event.reason.startswith("quarantined")
    ]

  def numbers(self) -> dict[str, Any]:
    """The recoveries and what went wrong, in numbers."""
    back = [each.seconds for each in self.recoveries if math.isfinite(each.seconds)]
    return {
      "faults": len(self.recoveries),
      "recovered": len(back),
      "median_recovery_seconds": round(statistics.median(back), 3) if back else None,
      "worst_recovery_seconds": round(max(back), 3) if back else None,
      "longest_stall_seconds": round(self.longest_stall_seconds, 3),
      "lost_rounds": len(self.lost_rounds()),
      "unplanned": len(self.unplanned()),
    }


class _Rounds:
  """The newest commits of one fragment, and which of them its newest value does not contain."""

  def __init__(self) -> None:
    self.head = -1  # the round of the newest value
    self.had: set[int] = set()  # rounds that a learner received
    self._bases: dict[int, int] = {}  # by round, the round that it was made from
    self._lost: list[int] = []  # rounds before these

  def commit(self, round: int, base: int) -> None:
    """Adds a commit."""
    self._bases[round], self.head = base, round
    if len(self._bases) > 2 * SETTLED_ROUNDS:
      lost = set(self.lost())
      old = list(self._bases)[:-SETTLED_ROUNDS]
      self._lost += [each for each in old if each in lost]
      for each in old:
        del self._bases[each]
      self.had &= self._bases.keys()

  def lost(self) -> list[int]:
    """The lost rounds, in order."""
    others, head = dict(self._bases), self.head
    while head in others:
      head = others.pop(head)
    return [*self._lost, *sorted(others.keys() & self.had)]
