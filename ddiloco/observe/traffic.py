"""What each role has sent and received, and how fast it does now. PURE."""

from __future__ import annotations

from collections import deque
from typing import Any

from ddiloco.observe.events import Event, parse_role
from ddiloco.observe.view import role_name

WINDOW_SECONDS = 10.0  # that the present rate is taken over


class Traffic:
  """Every role has one link; counters restart with each of its incarnations."""

  def __init__(self) -> None:
    self._before: dict[str, tuple[int, int]] = {}  # by role, what its earlier incarnations moved
    self._newest: dict[str, tuple[int, int, int]] = {}  # incarnation, sent, received
    self._recent: dict[str, deque[tuple[float, int, int]]] = {}  # time, sent, received; totals

  def add(self, event: Event) -> None:
    """One event of kind "traffic"; one of an incarnation that was replaced is ignored."""
    role, incarnation = event["role"], event["incarnation"]
    sent, received = event["sent_bytes"], event["received_bytes"]
    old, old_sent, old_received = self._newest.get(role, (incarnation, 0, 0))
    if incarnation < old:
      return
    before = self._before.get(role, (0, 0))
    if incarnation > old:
      before = (before[0] + old_sent, before[1] + old_received)
      self._before[role] = before
    self._newest[role] = (incarnation, sent, received)
    recent = self._recent.setdefault(role, deque())
    recent.append((event["time"], before[0] + sent, before[1] + received))
    while len(recent) > 2 and event["time"] - recent[1][0] >= WINDOW_SECONDS:
      recent.popleft()

  def as_json(self, now: float) -> list[dict[str, Any]]:
    """By role: bytes so far, and bytes per second lately (0 for one that has fallen silent)."""
    rows = []
    for role, recent in self._recent.items():
      (began, sent, received), (ended, all_sent, all_received) = recent[0], recent[-1]
      seconds = ended - began
      moving = seconds > 0 and now - ended < WINDOW_SECONDS
      rows.append(
        {
          "role": role,
          "name": role_name(role),
          "sent_bytes": all_sent,
          "received_bytes": all_received,
          "sent_bytes_per_second": round((all_sent - sent) / seconds) if moving else 0,
          "received_bytes_per_second": round((all_received - received) / seconds) if moving else 0,
        }
      )
    return sorted(rows, key=lambda row: parse_role(row["role"]))
