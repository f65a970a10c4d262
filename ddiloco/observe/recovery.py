"""What became of every fault of a run: when was its role part of the run again? PURE."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ddiloco.observe.events import Event


@dataclasses.dataclass(frozen=True)
class Recovery:
  """One fault. `seconds` from its strike to the first commit after its end that needed its role: a
  commit with the learner in it, or of the shard's own. NaN: the run ended before."""

  time: float
  target: str  # "learner/2"
  action: str
  planned_seconds: float
  seconds: float


def recoveries(events: Sequence[Event]) -> list[Recovery]:
  """Of every fault, in order of time.

  Args:
    events: of the whole run, in order of time.
  """
  commits: dict[str, list[float]] = {}
  for event in events:
    if event["kind"] == "commit":
      for who in (event["role"], *(f"learner-{m}" for m in event["participants"])):
        commits.setdefault(who, []).append(event["time"])
  found = []
  for event in events:
    if event["kind"] == "fault":
      lasts = event.get("seconds", 0.0)
      over = event["time"] + (lasts if lasts >= 0 else math.inf)
      if event["action"] == "join":  # nothing is over: it is to take part
        over = event["time"]
      times = commits.get(event["target"].replace("/", "-"), ())
      back = next((time for time in times if time > over), math.nan)
      seconds = back - event["time"]
      found.append(Recovery(event["time"], event["target"], event["action"], lasts, seconds))
  return found


def longest_stall_seconds(events: Sequence[Event]) -> float:
  """The longest time between the first step and the last in which no island made a step."""
  longest, covered = 0.0, math.nan
  for event in events:
    if event["kind"] == "step":
      begun = event["time"] - event["seconds"]
      longest = max(longest, begun - covered) if covered == covered else longest
      covered = max(covered, event["time"]) if covered == covered else event["time"]
  return longest


def lost_rounds(events: Sequence[Event]) -> list[tuple[int, int]]:
  """(fragment, round) of every commit that the fragment's last value was not made from."""
  bases: dict[tuple[int, int], int] = {}
  heads: dict[int, int] = {}
  for event in events:
    if event["kind"] == "commit":
      bases[event["fragment"], event["round"]] = event["base_round"]
    if event["kind"] in ("commit", "owns", "recalled"):
      heads[event["fragment"]] = event["round"]
  for fragment, head in heads.items():
    while (fragment, head) in bases:
      head = bases.pop((fragment, head))
  return sorted(bases)


def unplanned(events: Sequence[Event]) -> list[Mapping[str, Any]]:
  """Crashes, and exits that no fault of that role explains: nobody may die of another's fault.

  A kill explains its exit, and poison that a learner was quarantined.
  """
  poisoned = {e["target"] for e in events if e["kind"] == "fault" and e["action"] == "poison"}
  found = []
  for event in events:
    if event["kind"] == "crash":
      found.append(event)
    elif event["kind"] == "exit" and "by plan" not in event["reason"]:
      quarantined = event["reason"].startswith("quarantined")
      found += [] if quarantined and event["target"] in poisoned else [event]
  return found
