"""The timeline as it grows: what each role has been doing, and what struck it. PURE.

The same states as the report's (`history.role_spans`), kept up event by event and bounded in size.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from ddiloco.observe.events import Event, parse_role
from ddiloco.observe.history import phase
from ddiloco.observe.view import IslandView, RunView, role_name

MOST_SPANS = 200  # of one role; beyond that its shortest are drawn as part of their neighbours
MOST_MARKS = 200
_QUIET = frozenset({"push", "apply", "round", "traffic", "cut", "stage", "commit", "evaluation"})


class Lanes:
  """Spans of states by role, and marks for faults, exits, restarts and first merges after them."""

  def __init__(self) -> None:
    self.num_marks = 0
    self.marks: deque[dict[str, Any]] = deque(maxlen=MOST_MARKS)
    self._spans: dict[str, list[list]] = {}  # [start, end, state], closed
    self._open: dict[str, tuple[float, str]] = {}  # (since, state)
    self._killed: set[str] = set()  # roles that were, on purpose, and have not started again

  def add(self, event: Event, before: RunView, after: RunView) -> None:
    """One event, and the view before and after it."""
    kind, time = event["kind"], event["time"]
    if kind == "commit":
      self._merged_again(time, before, after)
    if kind in _QUIET:
      return
    learners = [parse_role(event["role"])[1]] if kind == "step" else after.islands
    for m in learners:
      old = before.islands.get(m, IslandView())
      self._turn(f"learner-{m}", time, old, after.islands[m].state if m in after.islands else "")
    if kind != "step":
      for s, shard in after.shards.items():
        self._turn(f"syncer-{s}", time, None, shard.state)
      self._mark(event, before)

  def spans(self, view: RunView, now: float, seen: float) -> dict[str, list[list]]:
    """By role, [start, end, state] without gaps up to `now`; stalls are judged as of `seen`."""
    result = {role: list(spans) for role, spans in self._spans.items()}
    for role, (since, state) in self._open.items():
      kind, number = parse_role(role)
      island = view.islands.get(number) if kind == "learner" else None
      result[role] = result.get(role, []) + _pieces(since, now, state, island, seen)
    return {role: spans for role, spans in result.items() if spans}

  def _turn(self, role: str, time: float, island: IslandView | None, state: str) -> None:
    """The role is in this state from `time` on; `island` is how it was until then."""
    state = phase(state)
    since, old = self._open.get(role, (time, ""))
    silent = old == "running" and island is not None and island.state_at(time) == "stalled"
    if state == old and not silent:
      return
    spans = self._spans.setdefault(role, [])
    spans += _pieces(since, time, old, island, time)
    self._open[role] = (time, state)
    while len(spans) > MOST_SPANS:
      _absorb_shortest(spans)

  def _merged_again(self, time: float, before: RunView, after: RunView) -> None:
    for m, island in before.islands.items():
      if island.returning and not after.islands[m].returning:
        self._put(time, f"learner-{m}", "merged", "is merged again")

  def _mark(self, event: Event, view: RunView) -> None:
    kind, time = event["kind"], event["time"]
    if kind not in ("fault", "exit", "restart"):
      return
    target = "-".join(map(str, parse_role(event["target"])))
    text = event.get("reason") or event.get("detail") or ""
    if kind == "fault":
      what, text = event["action"], f"{event['action']}: {text}".rstrip(": ")
      if what == "kill":
        self._killed.add(target)
        kind = "kill"
    island = view.islands.get(parse_role(target)[1]) if target.startswith("learner") else None
    if kind == "restart":
      self._killed.discard(target)
    if kind == "exit" and (
      target in self._killed or view.finished or (island and island.state == "left")
    ):
      return
    self._put(time, target, kind, text or kind)

  def _put(self, time: float, role: str, kind: str, text: str) -> None:
    self.num_marks += 1
    mark = {"time": round(time, 2), "role": role, "kind": kind}
    self.marks.append(mark | {"text": f"{role_name(role)}: {text}"})


def _pieces(
  start: float, end: float, state: str, island: IslandView | None, seen: float
) -> list[list]:
  """The span; if the island had fallen silent before it ended, the silent part is a stall."""
  if not state or end <= start:
    return []
  if state == "running" and island is not None and island.state_at(seen) == "stalled":
    silent_since = min(end, max(start, island.step_time))
    return _pieces(start, silent_since, state, None, seen) + [
      [round(silent_since, 2), round(end, 2), "stalled"]
    ]
  return [[round(start, 2), round(end, 2), state]]


def _absorb_shortest(spans: list[list]) -> None:
  """Drops the shortest span, and lets the one before it last until its end."""
  i = min(range(1, len(spans)), key=lambda i: spans[i][1] - spans[i][0])
  spans[i - 1][1] = spans[i][1]
  del spans[i]
