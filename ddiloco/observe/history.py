"""What the events say of the whole run: spans of states, kills, survivors' pauses. PURE."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

from ddiloco.observe.events import Event, parse_role
from ddiloco.observe.view import STALL_SECONDS, STALL_STEPS, RunView, fold

_HITS = ("fault", "exit", "restart", "started")  # what makes an island no witness of another's kill
KILL_WINDOW_SECONDS = 30.0  # a kill is looked at for so long if the killed one is not merged before


@dataclasses.dataclass(frozen=True)
class Span:
  """A role was in `state` from `start` to `end`, in seconds since the run started."""

  start: float
  end: float
  state: str  # joining, running, stalled, down, quarantined


@dataclasses.dataclass(frozen=True)
class Kill:
  """A planned kill of a learner; the times that never came are NaN."""

  learner: int
  time: float
  restarted: float = math.nan
  joined: float = math.nan
  merged: float = math.nan  # the first commit with a push of its new life

  @property
  def window_end(self) -> float:
    """Until when the survivors are watched for a pause that this kill may have caused."""
    return self.time + KILL_WINDOW_SECONDS if math.isnan(self.merged) else self.merged


def learner_steps(events: Iterable[Event]) -> dict[int, list[Event]]:
  """Step events by learner, all incarnations together, in order of time."""
  steps: dict[int, list[Event]] = defaultdict(list)
  for event in events:
    if event["kind"] == "step":
      steps[parse_role(event["role"])[1]].append(event)
  return dict(sorted(steps.items()))


def median_gap(steps: Sequence[Event]) -> float:
  """Median seconds from step to step, without each life's first (it compiles); NaN if none."""
  gaps = [e["gap_seconds"] for e in steps if e["step"] > 1 and math.isfinite(e["gap_seconds"])]
  return statistics.median(gaps) if gaps else math.nan


def role_spans(events: Sequence[Event]) -> dict[str, list[Span]]:
  """For every learner and shard ("learner-2"), its states over time without gaps or overlaps.

  The states are those of the live view; silent times inside `running` become `stalled`. A role's
  spans end where it left, or with the log.
  """
  view = RunView()
  open_states: dict[str, tuple[float, str]] = {}
  spans: dict[str, list[Span]] = defaultdict(list)
  for event in events:
    view = fold(view, event)
    if event["kind"] in ("push", "apply", "round", "traffic"):
      continue
    states = {f"learner-{m}": phase(each.state) for m, each in view.islands.items()}
    states |= {f"syncer-{s}": phase(each.state) for s, each in view.shards.items()}
    for role, state in states.items():
      since, old = open_states.get(role, (event["time"], ""))
      if state != old:
        _close(spans[role], since, event["time"], old)
        open_states[role] = (event["time"], state)
  end = events[-1]["time"] if events else 0.0
  for role, (since, state) in open_states.items():
    _close(spans[role], since, end, state)
  steps = learner_steps(events)
  for role in list(spans):
    kind, number = parse_role(role)
    if kind == "learner" and number in steps:
      spans[role] = _with_stalls(spans[role], steps[number])
  return dict(sorted(spans.items()))


def phase(state: str) -> str:
  """A role's state as a timeline shows it: joining, running, stalled, down, ...; "": not there."""
  known = {"lost": "down", "restarting": "joining", "starting": "joining", "left": ""}
  return known.get(state, state)


def _close(spans: list[Span], start: float, end: float, state: str) -> None:
  if state and end > start:
    spans.append(Span(start, end, state))


def _with_stalls(spans: list[Span], steps: list[Event]) -> list[Span]:
  """Cuts the silent times out of running spans."""
  patience = max(STALL_SECONDS, STALL_STEPS * (median_gap(steps) if len(steps) > 2 else 0.0))
  times = [step["time"] for step in steps]
  silent = [(a, b) for a, b in itertools.pairwise(times) if b - a > patience]
  result: list[Span] = []
  for span in spans:
    start = span.start
    for a, b in silent if span.state == "running" else ():
      if start <= a and b <= span.end:
        _close(result, start, a, "running")
        result.append(Span(a, b, "stalled"))
        start = b
    _close(result, start, span.end, span.state)
  return result


def kills(events: Sequence[Event]) -> list[Kill]:
  """Planned kills of learners in order of time, each with its restart, rejoin and first merge."""
  found = []
  for event in events:
    if event["kind"] != "fault" or event["action"] != "kill":
      continue
    kind, learner = parse_role(event["target"])
    if kind == "learner":
      found.append(_follow(events, learner, event["time"]))
  return found


def _follow(events: Sequence[Event], learner: int, time: float) -> Kill:
  kill = Kill(learner, time)
  for event in events:
    if event["time"] < time:
      continue
    kind = event["kind"]
    if kind == "restart" and math.isnan(kill.restarted):
      if parse_role(event["target"]) == ("learner", learner):
        kill = dataclasses.replace(kill, restarted=event["time"])
    elif kind == "joined" and math.isnan(kill.joined) and event["time"] > time:
      if parse_role(event["role"]) == ("learner", learner):
        kill = dataclasses.replace(kill, joined=event["time"])
    elif kind == "commit" and event["time"] > kill.joined and _took_part(event, learner):
      return dataclasses.replace(kill, merged=event["time"])
  return kill


def _took_part(commit: Event, learner: int) -> bool:
  return learner in {int(m) for m in commit["participants"]}


def survivor_gap_ratio(events: Sequence[Event], kill: Kill) -> float:
  """Longest pause of a surviving island around a kill, over its own median step gap; the worst one.

  A survivor is an island that ran before the kill, was not itself hit by a fault, exit or start
  inside the window (kill to first merge of the killed one, else 30 s), and had not left. Pauses
  that overlap the window count in full, and so does the silence of one that never steps again.
  `gap_seconds` of a step: since the end of the one before. NaN: no survivor.
  """
  end = min(kill.window_end, events[-1]["time"]) if events else kill.time
  hit = {kill.learner}
  left: dict[int, float] = {}
  for event in events:
    kind, number = parse_role(event.get("target", event["role"]))
    if kind != "learner" or number in left:
      continue
    if event["kind"] == "stopped":
      left[number] = event["time"]
    elif event["kind"] in _HITS and kill.time <= event["time"] <= end:
      hit.add(number)
  ratios = []
  for learner, steps in learner_steps(events).items():
    usual = median_gap(steps)
    before = [step for step in steps if step["time"] <= kill.time]
    if learner in hit or not before or not usual > 0 or left.get(learner, end) <= kill.time:
      continue
    if _was_down(events, learner, kill.time):
      continue
    pauses = [
      step["gap_seconds"]
      for step in steps
      if step["time"] > kill.time and step["time"] - step["gap_seconds"] < end
    ]
    pauses.append(max(0.0, min(end, left.get(learner, end)) - steps[-1]["time"]))
    ratios.append(max(pauses) / usual)
  return max(ratios) if ratios else math.nan


def _was_down(events: Sequence[Event], learner: int, time: float) -> bool:
  """Whether the learner was dead, starting or stalled on purpose just before `time`."""
  last = ""
  for event in events:
    if event["time"] >= time:
      break
    about = parse_role(event.get("target", event["role"])) == ("learner", learner)
    if about and event["kind"] in (*_HITS, "joined", "step"):
      last = event.get("action", event["kind"])
  return last in ("kill", "stall", "exit", "restart", "started")
