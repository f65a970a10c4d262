"""The key numbers of a run, from its events alone. PURE."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from ddiloco.observe.events import Event, parse_role
from ddiloco.observe.history import kills, learner_steps, median_gap, survivor_gap_ratio
from ddiloco.observe.view import RunView, fold
from ddiloco.resilience.goodput import Goodput, Ledger


def summarise(events: Sequence[Event]) -> dict[str, Any]:
  """The numbers of summary.json that the events give; `None` where they say nothing.

  Args:
    events: sorted by time, as `read_events` returns them; a log cut off anywhere will do.

  Returns:
    Plain JSON values. `participation` is by learner, the share of all commits it took part in;
    `bytes_sent` and `bytes_received` add up all roles, so each message counts once in either;
    `survivor_max_gap_ratio` is the longest pause of a surviving island around a planned kill of
    another (kill to its first merge after rejoining, else 30 s) over its own median step gap.
    `goodput`, `uptime` and the causes in `lost_time` are those of `resilience/goodput.py`.
  """
  view, ledger = RunView(), Ledger()
  for event in events:
    view = fold(view, event)
    ledger.take(event)
  started = [event for event in events if event["kind"] == "run_started"]
  commits = [event for event in events if event["kind"] == "commit"]
  losses = [event["loss"] for event in events if event["kind"] == "evaluation"]
  sent, received = traffic_totals(events)
  return {
    "name": view.name or None,
    "finished": view.finished or None,
    "seconds": round(view.time, 3) if events else None,
    "num_learners": len(view.islands),
    "num_shards": len(view.shards),
    "num_fragments": view.num_fragments,
    "total_tokens": view.total_tokens if started else None,
    "merged_tokens": round(view.tokens_done) if view.num_shards else 0,
    "trained_tokens": sum(island.tokens for island in view.islands.values()),
    "commits": len(commits),
    "participation": participation(commits, sorted(view.islands)),
    "rejected_updates": sum(len(event.get("rejected", ())) for event in events),
    "bytes_sent": sent,
    "bytes_received": received,
    "heldout_loss_first": _number(losses[0]) if losses else None,
    "heldout_loss_last": _number(losses[-1]) if losses else None,
    "faults": sum(event["kind"] == "fault" for event in events),
    "snapshots": sum(event["kind"] == "snapshot" for event in events),
    "restarts": sum(event["kind"] == "restart" for event in events),
    **_kills(events),
    "blocked_seconds": _number(
      sum(event["blocked_seconds"] for event in events if event["kind"] == "step")
    ),
    "learners": _learners(view, events),
    **_account(ledger.report()),
    "torn_lines": getattr(events, "torn_lines", 0),
  }


def _kills(events: Sequence[Event]) -> dict[str, Any]:
  found = kills(events)
  ratios = [survivor_gap_ratio(events, kill) for kill in found]
  return {
    "kills": [
      {
        "learner": kill.learner,
        "seconds": kill.time,
        "down_seconds": _number(kill.joined - kill.time),
        "merged_again_seconds": _number(kill.merged - kill.time),
        "survivor_gap_ratio": _number(ratio),
      }
      for kill, ratio in zip(found, ratios)
    ],
    "survivor_max_gap_ratio": _number(max(filter(math.isfinite, ratios), default=math.nan)),
  }


def _account(account: Goodput) -> dict[str, Any]:
  """Where the chip time went, as shares of it; liveness beside participation by learner."""
  return {
    "chip_seconds": _number(account.chip_seconds),
    "goodput": _number(account.goodput),
    "goodput_training": _number(account.goodput_training),
    "uptime": _number(account.uptime),
    "lost_time": {cause: round(share, 6) for cause, share in account.causes.items()},
    "liveness": {str(m): _number(each.liveness) for m, each in account.learners.items()},
  }


def participation(commits: Sequence[Event], learners: Sequence[int]) -> dict[str, float | None]:
  """By learner, the share of these commits it took part in; None without commits."""
  taking = [{int(m) for m in event["participants"]} for event in commits]
  return {
    str(m): round(sum(m in each for each in taking) / len(taking), 4) if taking else None
    for m in learners
  }


def traffic_totals(events: Sequence[Event]) -> tuple[int, int]:
  """(sent, received) bytes of all roles. Counters restart with every incarnation of a role."""
  totals: dict[tuple[str, int], tuple[int, int]] = defaultdict(lambda: (0, 0))
  for event in events:
    if event["kind"] == "traffic":
      key = (event["role"], event["incarnation"])
      sent, received = totals[key]
      totals[key] = (max(sent, event["sent_bytes"]), max(received, event["received_bytes"]))
  return sum(sent for sent, _ in totals.values()), sum(got for _, got in totals.values())


def _learners(view: RunView, events: Sequence[Event]) -> dict[str, Any]:
  steps = learner_steps(events)
  lives: dict[int, set[int]] = defaultdict(set)
  refused: dict[int, int] = defaultdict(int)
  for event in events:
    kind, number = parse_role(event["role"])
    if kind == "learner":
      lives[number].add(event["incarnation"])
      refused[number] += event["kind"] == "refused"
  return {
    str(m): {
      "lives": len(lives[m]),
      "steps": len(steps.get(m, ())),
      "tokens": island.tokens,
      "loss": _number(island.loss),
      "median_step_gap_seconds": _number(median_gap(steps.get(m, ()))),
      "refused_pushes": refused[m],
    }
    for m, island in sorted(view.islands.items())
  }


def _number(value: float) -> float | None:
  """Rounded for reading, None for what JSON cannot say."""
  return round(value, 6) if math.isfinite(value) else None
