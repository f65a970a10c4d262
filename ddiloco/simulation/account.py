"""What a virtual run amounts to, from its events alone, with bounded memory. PURE."""

from __future__ import annotations

import collections
import math
import re
import statistics
from collections.abc import Mapping
from typing import Any

from ddiloco.resilience.goodput import Goodput, Ledger

Event = Mapping[str, Any]
KEPT = frozenset({"fault", "exit", "restart", "crash", "owns", "recalled", "run_finished"})
_NUMBER = re.compile(r"[0-9][0-9.]*")
STEP_FIELDS = ("kind", "time", "role", "seconds")
COMMIT_FIELDS = ("kind", "time", "role", "fragment", "round", "base_round", "participants")


class Account:
  """Takes a run's events one by one.

  `kept` are those, shortened, that recoveries, stalls and lost rounds are found from.
  """

  def __init__(self) -> None:
    self.kept: list[dict[str, Any]] = []
    self.steps = self.commits = self.merged_tokens = 0
    self.blocked_seconds = 0.0
    self.reasons: collections.Counter[str] = collections.Counter()  # why rounds committed
    self.missing: collections.Counter[str] = collections.Counter()  # why learners had no part
    self._ledger = Ledger()
    self._cut_at: dict[tuple[str, int], tuple[int, float]] = {}  # by learner and fragment
    self.sync_seconds: list[float] = []  # from a cut to the version that has it
    self.traffic: dict[str, tuple[int, int]] = {}  # by role: sent and received bytes

  def take(self, event: Event) -> None:
    """Enters one event; they come in order of time."""
    self._ledger.take(event)
    kind = event["kind"]
    if kind in KEPT:
      self.kept.append(dict(event))
    handler = getattr(self, f"_on_{kind}", None)
    if handler is not None:
      handler(event)

  def goodput(self) -> Goodput:
    """The ledger's account."""
    return self._ledger.report()

  def summary(self) -> dict[str, Any]:
    """All numbers but those of faults, as JSON has them."""
    found = self.goodput()
    part = [g.participation for g in found.learners.values() if math.isfinite(g.participation)]
    live = [g.liveness for g in found.learners.values() if math.isfinite(g.liveness)]
    sent = [pair[0] for role, pair in self.traffic.items() if role.startswith("learner")]
    taken = [pair[1] for role, pair in self.traffic.items() if role.startswith("learner")]
    return {
      "goodput": round(found.goodput, 5),
      "uptime": round(found.uptime, 5),
      "causes": {cause: round(share, 5) for cause, share in found.causes.items() if share},
      "participation": round(statistics.mean(part), 5) if part else None,
      "lowest_participation": round(min(part), 5) if part else None,
      "liveness": round(statistics.mean(live), 5) if live else None,
      "steps": self.steps,
      "commits": self.commits,
      "blocked_seconds": round(self.blocked_seconds, 3),
      "seconds_per_sync": _middle(self.sync_seconds),
      "learner_sent_bytes": round(statistics.mean(sent)) if sent else 0,
      "learner_received_bytes": round(statistics.mean(taken)) if taken else 0,
      "busiest_link_bytes": max(map(max, self.traffic.values()), default=0),
      "committed_because": dict(self.reasons.most_common()),
      "had_no_part_because": dict(self.missing.most_common()),
    }

  def _on_step(self, event: Event) -> None:
    self.steps += 1
    self.blocked_seconds += event["blocked_seconds"]
    self.kept.append({name: event[name] for name in STEP_FIELDS})

  def _on_commit(self, event: Event) -> None:
    self.commits += 1
    self.kept.append({name: event[name] for name in COMMIT_FIELDS})
    self.reasons[_NUMBER.sub("N", event["reason"].partition(" without ")[0])] += 1
    self.missing.update(_NUMBER.sub("N", why) for why in event["missing"].values())

  def _on_cut(self, event: Event) -> None:
    self._cut_at[event["role"], event["fragment"]] = event["round"], event["time"]

  def _on_apply(self, event: Event) -> None:
    cut = self._cut_at.get((event["role"], event["fragment"]))
    if event["included"] and cut is not None and cut[0] == event["round"]:
      self.sync_seconds.append(event["time"] - cut[1])

  def _on_traffic(self, event: Event) -> None:
    self.traffic[event["role"]] = event["sent_bytes"], event["received_bytes"]


def _middle(values: list[float]) -> dict[str, float] | None:
  if not values:
    return None
  ordered = sorted(values)
  tenths = ordered[len(ordered) // 10], ordered[len(ordered) * 9 // 10]
  return {
    "median": round(statistics.median(ordered), 4),
    "tenth": round(tenths[0], 4),
    "nine_tenths": round(tenths[1], 4),
  }
