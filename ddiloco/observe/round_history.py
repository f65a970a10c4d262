"""What the syncer is doing and why: open rounds, closed ones, who was left out. PURE."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from ddiloco.config import SyncConfig
from ddiloco.observe.island_state import DOWN, IslandState
from ddiloco.protocol import events, rules
from ddiloco.protocol.events import Event, parse_role

RECENT_ROUNDS = 12
MOST_REASONS = 8
OUTCOMES = {  # how the syncer's reason begins: what it comes to
  "all ": "all that were asked had answered",
  "quorum of ": "there was a quorum, and its grace was over",
  "only ": "given up: too few could still answer",
}
_NUMBER = re.compile(r"\d+(\.\d+)?(e[+-]?\d+)?")


@dataclasses.dataclass
class _Open:
  fragment: int
  since: float  # when it began
  asked: tuple[int, ...]
  pushed: set[int] = dataclasses.field(default_factory=set)
  pushed_at: float = 0.0  # the newest push


class Rounds:
  """Follows every round from its beginning to its end."""

  def __init__(self) -> None:
    self._open: dict[int, _Open] = {}  # by round
    self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT_ROUNDS)
    self._outcomes: Counter[str] = Counter()
    self._left_out: dict[int, Counter[str]] = {}
    self._grace: dict[int, float] = {}  # by fragment, of its last round
    self._closed_at: float | None = None

  def add(self, event: Event) -> None:
    """One event; kinds that are not about rounds are ignored."""
    match event:
      case events.Push():
        self._push(event)
      case events.Round():
        self._begin(event)
      case events.Commit():
        self._grace[event.fragment] = event.grace_seconds
        self._close(event, list(event.participants))
      case events.Abandoned():
        self._close(event, [])

  def waiting(self, islands: Mapping[int, IslandState], now: float, sync: SyncConfig | None) -> str:
    """Why the syncer waits, in plain words, as far as the log says by `now`."""
    if not self._open and self._closed_at is None:
      ready = sum(island.state == "running" for island in islands.values())
      need = f" of the {sync.min_quorum} it needs" if sync else ""
      return f"The first round begins when enough islands have made a step: {ready}{need} are up."
    if not self._open:
      period = f" {sync.sync_period} steps after its last sync" if sync else ""
      ago = f"the last round ended {max(0.0, now - (self._closed_at or 0.0)):.1f} s ago"
      return f"No round is open: a fragment falls due{period}; {ago}."
    first = min(self._open.values(), key=lambda each: each.since)
    since = max(0.0, now - first.since)
    more = f" and {len(self._open) - 1} more" if len(self._open) > 1 else ""
    why = self._reason(first, islands, now, sync)
    return f"Collecting fragment {first.fragment}{more} for {since:.1f} s; {why}."

  def _reason(
    self, round_: _Open, islands: Mapping[int, IslandState], now: float, sync: SyncConfig | None
  ) -> str:
    gone = {m for m, island in islands.items() if island.state in (*DOWN, "left")}
    pending = sorted(set(round_.asked) - round_.pushed - gone)
    if sync is None:
      return f"waiting for {_islands(pending)}" if pending else "all have answered"
    grace = self._grace.get(round_.fragment, 0.0)
    enough = len(round_.pushed) >= sync.min_quorum
    at = round_.pushed_at if enough else None
    decision = rules.decide(now, len(round_.pushed), pending, at, grace, sync)
    return decision.reason if decision.verdict == "wait" else f"about to end, {decision.reason}"

  def as_json(self) -> dict[str, Any]:
    """Open and recent rounds, and what all rounds came to."""
    total = max(1, sum(self._outcomes.values()))
    outcomes = [
      {"text": text, "count": count, "share": round(count / total, 4)}
      for text, count in self._outcomes.most_common(MOST_REASONS)
    ]
    left_out: list[dict[str, Any]] = [
      {"island": m, "reason": text, "count": count}
      for m, reasons in sorted(self._left_out.items())
      for text, count in reasons.most_common(2)
    ]
    return {
      "open": len(self._open),
      "recent": list(reversed(self._recent)),
      "outcomes": outcomes,
      "left_out": sorted(left_out, key=lambda each: -each["count"])[:MOST_REASONS],
    }

  def _begin(self, event: events.Round) -> None:
    p = event.fragment
    self._open = {r: each for r, each in self._open.items() if each.fragment != p}
    self._open[event.round] = _Open(p, event.time, event.asked)

  def _push(self, event: events.Push) -> None:
    open_ = self._open.get(event.round)
    if open_ is not None:
      open_.pushed.add(parse_role(event.role)[1])
      open_.pushed_at = max(open_.pushed_at, event.time)

  def _close(self, event: events.Commit | events.Abandoned, took_part: list[int]) -> None:
    self._open.pop(event.round, None)
    self._closed_at = max(self._closed_at or 0.0, event.time)
    reason = event.reason
    known = (text for begins, text in OUTCOMES.items() if reason.startswith(begins))
    self._outcomes[next(known, _NUMBER.sub("…", reason))] += 1
    committed = isinstance(event, events.Commit)
    missing = event.missing if committed else {}
    absent = {m: "counted as lost" if why == "lost" else why for m, why in missing.items()}
    absent |= {m: f"rejected: {why}" for m, why in event.rejected.items()}
    for m, why in absent.items():
      if m >= 0:
        self._left_out.setdefault(m, Counter())[_NUMBER.sub("…", why)] += 1
    self._recent.append(
      {
        "time": round(event.time, 2),
        "fragment": event.fragment,
        "version": event.version if committed else None,
        "took_part": took_part,
        "seconds": round(event.quorum_seconds + event.grace_seconds, 3) if committed else 0.0,
        "reason": reason,
        "absent": {str(m): why for m, why in absent.items() if m >= 0},
      }
    )


def _islands(numbers: list[int]) -> str:
  return ("island " if len(numbers) == 1 else "islands ") + ", ".join(map(str, numbers))
