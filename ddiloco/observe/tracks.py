"""The timeline of the dashboard and the report: each role's states, and the faults. PURE.

It is kept up to date event by event, and bounded in size.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any

from ddiloco.observe.history import Idle, Median
from ddiloco.observe.islands import MemberState, phase, role_name
from ddiloco.protocol import events
from ddiloco.protocol.events import Event, parse_role

MOST_SPANS = 200  # of one role; of more, the shortest are drawn as part of their neighbours
MOST_MARKS = 200


class Tracks:
  """Spans of states by role, and marks for faults, exits, restarts and first merges after them."""

  def __init__(self) -> None:
    self.num_marks = 0
    self.num_absorbed = 0  # spans that are drawn as part of their neighbours
    self.marks: deque[dict[str, Any]] = deque(maxlen=MOST_MARKS)
    self._spans: dict[str, list[list]] = {}  # [start, end, state], closed
    self._open: dict[str, tuple[float, str, MemberState]] = {}  # since, state
    self._killed: set[str] = set()  # roles that a planned kill struck and that are still down

  def begin(self, role: str, time: float, member: MemberState) -> None:
    """The role is known from `time` on; no effect if it is known already."""
    if role not in self._open:
      self._open[role] = (time, phase(member.state), member)
      self._spans[role] = []

  def turn(self, role: str, time: float, member: MemberState, state: str) -> None:
    """The role is in this state from `time` on; until then it is in that of `member`."""
    state = phase(state)
    since, old, _ = self._open[role]
    if state == old and not (old == "running" and member.state_at(time) == "stalled"):
      return
    spans = self._spans[role]
    spans += _pieces(since, time, old, member, time)
    self._open[role] = (time, state, member)
    while len(spans) > MOST_SPANS:
      _absorb_shortest(spans)
      self.num_absorbed += 1

  def spans(self, now: float, seen: float) -> dict[str, list[list]]:
    """By role, [start, end, state] without gaps up to `now`; stalls are judged at time `seen`."""
    found = {
      role: self._spans[role] + _pieces(since, now, state, member, seen)
      for role, (since, state, member) in self._open.items()
    }
    return {role: spans for role, spans in found.items() if spans}

  def fault(self, event: events.Fault) -> None:
    """A planned fault strikes; the exit that follows a planned kill gets no mark."""
    kill = event.action == "kill"
    if kill:
      self._killed.add(event.target)
    text = f"{event.action}: {event.detail}".rstrip(": ")
    self.mark(event.time, event.target, "kill" if kill else "fault", text)

  def exit(self, event: events.Exit) -> None:
    """A role is down."""
    if event.target not in self._killed:
      self.mark(event.time, event.target, "exit", event.reason or "exit")

  def go_on(self) -> None:
    """The whole run starts again, and with it every role that was down."""
    self._killed.clear()

  def restart(self, event: events.Restart) -> None:
    """A role starts again."""
    self._killed.discard(event.target)
    self.mark(event.time, event.target, "restart", "restart")

  def mark(self, time: float, role: str, kind: str, text: str) -> None:
    """Adds a mark; the newest are kept."""
    self.num_marks += 1
    mark = {"time": round(time, 2), "role": role, "kind": kind}
    self.marks.append(mark | {"text": f"{role_name(role)}: {text}"})


def _pieces(start: float, end: float, state: str, member: MemberState, seen: float) -> list[list]:
  """The span; if an island fell silent before the span's end, the silent part is a stall."""
  silent_since = end
  if state == "running" and member.state_at(seen) == "stalled":
    silent_since = min(end, max(start, member.step_time))
  pieces = (start, silent_since, state), (silent_since, end, "stalled")
  return [[round(a, 2), round(b, 2), each] for a, b, each in pieces if each and a < b]


def _absorb_shortest(spans: list[list]) -> None:
  """Drops the shortest span; the span before it takes over its time."""
  i = min(range(1, len(spans)), key=lambda i: spans[i][1] - spans[i][0])
  spans[i - 1][1] = spans[i][1]
  del spans[i]


# --- Planned kills of learners, and the pauses of the islands that survived them
# PURE, and bounded: of many kills the newest are kept.

KILL_WINDOW_SECONDS = 30.0  # a kill's window lasts until its learner is merged, or for so long
MOST_KILLS = 200
MOST_WATCHED = 32  # kills at once; of more, the oldest are no longer watched
# An island that such an event hits is no witness of another's kill. Engines record these of a
# target, a role records `Started` itself.
_OF_TARGETS = (events.Fault, events.Exit, events.Restart)
_HITS = (*_OF_TARGETS, events.Started)
_DOWN = ("kill", "stall", "exit", "restart", "started")  # an island's last event if it is not there


class Kill:
  """A planned kill of a learner, and its witnesses: the other islands that ran when it struck."""

  def __init__(self, learner: int, time: float, witnesses: set[int]):
    self.learner, self.time = learner, time
    self.joined = math.nan  # when its next life joined; NaN: it has not
    self.merged = math.nan  # the first commit with a push of that life; NaN: there is none
    self.hit: dict[int, float] = {}  # learners that something struck later, and when first
    # Longest pauses by witness: `soon` of those that began in the 30 s, `late` before the merge.
    self.soon = dict.fromkeys(witnesses, 0.0)
    self.late = dict.fromkeys(witnesses, 0.0)
    self._past: set[int] = set()  # witnesses with a step that began after the window

  @property
  def window_end(self) -> float:
    """The end of the window in which a survivor's pause counts as this kill's effect."""
    return self.time + KILL_WINDOW_SECONDS if math.isnan(self.merged) else self.merged

  @property
  def pauses(self) -> dict[int, float]:
    """By witness, the longest pause that overlaps the window."""
    return self.soon if math.isnan(self.merged) else self.late

  def follow(self, event: Event) -> None:
    """Notes when the killed learner joins and is merged again."""
    match event:
      case events.Joined() if math.isnan(self.joined) and event.time > self.time:
        if parse_role(event.role) == ("learner", self.learner):
          self.joined = event.time
      case events.Commit() if math.isnan(self.merged) and event.time > self.joined:
        if self.learner in event.weights:
          self.merged = event.time

  def step(self, m: int, event: events.Step) -> None:
    """A step of an island."""
    gap, began = event.gap_seconds, event.time - event.gap_seconds
    if m not in self.late or event.time <= self.time:
      return
    if began < self.time + KILL_WINDOW_SECONDS:
      self.soon[m] = max(self.soon[m], gap)
    if math.isnan(self.merged) or began < self.merged:
      self.late[m] = max(self.late[m], gap)
    elif began >= self.window_end:
      self._past.add(m)

  @property
  def over(self) -> bool:
    """Whether no later event can change it."""
    return not math.isnan(self.merged) and self._past >= self.late.keys()


class Kills:
  """The planned kills of a run. Takes its events in order of time."""

  def __init__(self) -> None:
    self.found: list[Kill] = []  # the newest
    self.left_out = 0  # kills before these
    self.medians: dict[int, Median] = defaultdict(Median)  # by learner, of its gaps between steps
    self._watched: list[Kill] = []
    self._said: dict[int, str] = {}  # by learner, the kind of its last event
    self._left: dict[int, float] = {}
    self._stepped: dict[int, float] = {}  # by learner, when its last step ended

  def add(self, event: Event) -> None:
    """One event."""
    about = parse_role(event.target if isinstance(event, _OF_TARGETS) else event.role)
    if isinstance(event, events.Step):
      self._step(about[1], event)
    else:
      for kill in self._watched:
        kill.follow(event)
    if about[0] == "learner":
      self._learner(about[1], event)
    self._watched = [kill for kill in self._watched if not kill.over]

  def _step(self, m: int, event: events.Step) -> None:
    self._stepped[m] = event.time
    self._left.pop(m, None)  # it is back; its silence until now was no pause
    if event.step > 1:  # the first step of a life compiles
      self.medians[m].add(event.gap_seconds)
    for kill in self._watched:
      kill.step(m, event)

  def _learner(self, m: int, event: Event) -> None:
    if isinstance(event, events.Stopped):
      self._left.setdefault(m, event.time)
    elif isinstance(event, _HITS) and m not in self._left:
      for kill in self._watched:
        kill.hit.setdefault(m, event.time)
    if isinstance(event, events.Fault) and event.action == "kill":
      self._begin(m, event.time)
    if isinstance(event, (*_HITS, events.Joined, events.Step)):
      self._said[m] = event.action if isinstance(event, events.Fault) else event.kind

  def _begin(self, learner: int, time: float) -> None:
    witnesses = {
      m
      for m in self._stepped
      if m != learner and m not in self._left and self._said.get(m) not in _DOWN
    }
    kill = Kill(learner, time, witnesses)
    self.found.append(kill)
    self._watched.append(kill)
    del self._watched[:-MOST_WATCHED]
    if len(self.found) > MOST_KILLS:
      self.found.pop(0)
      self.left_out += 1

  def ratio(self, kill: Kill, now: float) -> float:
    """Longest pause of a surviving island around a kill, over its own median step gap; the worst.

    A survivor is an island that ran before the kill, was not itself hit by a fault, exit or start
    inside the window (kill to first merge of the killed learner, else 30 s), and had not left.
    Pauses that overlap the window count in full. If a survivor never steps again, its silence
    counts up to the window's end. `gap_seconds` of a step: since the end of the step before. NaN:
    no survivor. `now`: the time of the newest event.
    """
    end = min(kill.window_end, now)
    ratios = []
    for m, pause in kill.pauses.items():
      usual = self.medians[m].value
      if usual > 0 and kill.hit.get(m, math.inf) > end:
        silent = min(end, self._left.get(m, end)) - self._stepped[m]
        ratios.append(max(pause, silent, 0.0) / usual)
    return max(ratios, default=math.nan)


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
    its update until it has a value that contains it, and pushes it again.
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
