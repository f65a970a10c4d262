"""A run as one JSON object: what the dashboard shows, and scripts and Prometheus read. PURE.

`Board` takes the events in order of time; `status` says how the run stands at a moment. Its size
depends on the number of islands and fragments and not on how long the run is.
"""

from __future__ import annotations

import math
from typing import Any

from ddiloco.config import Config
from ddiloco.observe.events import FLUSH_SECONDS, Event, parse_role
from ddiloco.observe.history import phase
from ddiloco.observe.lanes import Lanes
from ddiloco.observe.rounds import Rounds
from ddiloco.observe.series import Series
from ddiloco.observe.style import clock_time, island_colour
from ddiloco.observe.traffic import Traffic
from ddiloco.observe.view import IslandView, RunView, fold, role_name
from ddiloco.resilience.goodput import Ledger

LAG_SECONDS = 2 * FLUSH_SECONDS  # an event may be so old when it is read: nobody stalls by that
SILENT_SECONDS = 60.0  # nothing new for so long: nobody is there who writes ...
STARTING_SECONDS = 900.0  # ... or so long before the first step, which compiles
MOST_EVALUATIONS = 240  # that are shown; of more, every other one is dropped
CURVE_VALUES = 4000  # of one kind of curve, all islands together
OVER = {
  "finished": "The run is over: it merged all its tokens.",
  "stopped": "The run was stopped. It can go on from its newest snapshot.",
  "failed": "The run has failed: a shard, or every possible quorum, was gone for good.",
}


class Board:
  """All that is known of a run, from its events.

  Args:
    config: the run's, for what its events may not say (single roles have no engine that says how
      many they should be); None: not known.
  """

  def __init__(self, config: Config | None = None):
    self.num_events = 0
    self.view = RunView() if config is None else _planned(config)
    self._sync = None if config is None else config.sync
    self._ledger = Ledger()
    self._lanes, self._rounds, self._traffic = Lanes(), Rounds(), Traffic()
    self._series = Series()
    self._heldout: list[tuple[float, float]] = []  # (time, loss)

  def add(self, event: Event) -> None:
    """One event.

    Raises:
      KeyError, TypeError, ValueError: it is not one that this version writes.
    """
    if not math.isfinite(event["time"]):
      raise ValueError(f"an event at {event['time']}")
    self.num_events += 1
    before, self.view = self.view, fold(self.view, event)
    self._lanes.add(event, before, self.view)
    self._rounds.add(event)
    self._curves(event)
    self._ledger.take(event)

  def _curves(self, event: Event) -> None:
    kind, time, number = event["kind"], event["time"], parse_role(event["role"])[1]
    series = self._series
    if kind == "step" and "loss" in event:
      series.add(f"loss {number}", time, event["loss"])
    elif kind == "evaluation" and math.isfinite(event["loss"]):
      self._heldout.append((round(time, 2), round(event["loss"], 4)))
      if len(self._heldout) > MOST_EVALUATIONS:
        del self._heldout[1:-1:2]
    elif kind == "traffic":
      self._traffic.add(event)
    elif kind == "commit":
      series.add(f"commits {number}", time)
      taking = {int(m) for m in event["participants"]}
      for m in self.view.islands:
        series.add(f"participation {m}", time, float(m in taking))
    elif kind == "run_started":
      series.keep_at_most(max(40, CURVE_VALUES // max(1, len(self.view.islands))))

  def status(self, now: float, reason: str = "") -> dict[str, Any]:
    """How the run stands.

    Args:
      now: seconds since it started; once it is over, or nobody writes any more, that moment counts.
      reason: why it ended, if that is known from elsewhere than its events.
    """
    view = self.view
    state, text = self._phase(now, reason)
    now = max(now, view.time) if state in ("starting", "running") else view.time
    seen = now - LAG_SECONDS if state == "running" else now
    islands = [self._island(m, state, seen) for m in sorted(view.islands)]
    rates = [i["tokens_per_second"] for i in islands if i["state"] == "running"]
    return {
      "name": view.name,
      "phase": state,
      "text": text,
      "seconds": round(now, 1),
      "seconds_left": _number(view.seconds_left(now)) if state == "running" else None,
      "progress": round(view.progress, 5),
      "tokens_done": round(view.tokens_done),
      "total_tokens": view.total_tokens,
      "tokens_per_second": round(sum(rate or 0 for rate in rates)) if state == "running" else None,
      "heldout_loss": _number(view.heldout_loss),
      "commits": self._rounds.commits,
      "merging": bool(view.num_shards or view.shards),
      "islands": islands,
      "shards": self._shards(),
      "fragments": [self._rounds.versions.get(p) for p in range(self._num_fragments())],
      "waiting": self._waiting(state, view.time),  # as far as the log goes: the rest is not known
      "goodput": self._goodput(view.time),
      "timeline": self._timeline(now, seen),
      "curves": self._curves_json(),
      "links": self._traffic.as_json(seen),
      "notes": [
        {"time": round(note.time, 2), "text": note.text, "tone": note.tone} for note in view.notes
      ],
    }

  def _phase(self, now: float, reason: str) -> tuple[str, str]:
    """(empty, starting, running, silent or over; what that means in a sentence)."""
    view, reason = self.view, self.view.finished or reason
    if reason:
      return "over", OVER.get(reason, f"The run is over: {reason}.")
    if not self.num_events:
      return "empty", "Nothing is known yet: no role has written an event."
    started, silent = math.isfinite(view.first_step_time), now - view.time
    if silent > SILENT_SECONDS and all(i.state == "left" for i in view.islands.values()):
      return "over", "The run is over: every island has left."
    if silent > (SILENT_SECONDS if started else STARTING_SECONDS):
      ago = f"Nobody has written for {clock_time(silent)} (min:s)"
      return "silent", f"{ago}: the run was killed, or it writes where this cannot read."
    if not started:
      return "starting", "The run is starting: islands load, compile and say hello."
    return "running", "The run is under way."

  def _num_fragments(self) -> int:
    return max([self.view.num_fragments, *(p + 1 for p in self._rounds.versions)])

  def _island(self, m: int, run: str, seen: float) -> dict[str, Any]:
    island = self.view.islands[m]
    state = _shown(island, run, seen)
    versions = self._rounds.learner_versions.get(m, {})
    commits = self._rounds.commits
    return {
      "number": m,
      "colour": island_colour(m),
      "state": state,
      "restarts": max(0, island.lives - 1),
      "step": island.step,
      "clock": island.clock,
      "loss": _number(island.loss),
      "tokens": island.tokens,
      "tokens_per_second": _number(island.tokens_per_second, 1) if state == "running" else None,
      "step_seconds": _number(island.step_seconds),
      "participation": round(self._rounds.joined[m] / commits, 4) if commits else None,
      "participation_recent": _number(island.participation),
      "versions": [versions.get(p) for p in range(self._num_fragments())],
    }

  def _shards(self) -> list[dict[str, Any]]:
    return [
      {
        "number": s,
        "state": phase(shard.state),
        "fragments": list(shard.fragments),
        "commits": shard.commits,
        "rejected": shard.rejected,
        "reason": shard.last_reason,
      }
      for s, shard in sorted(self.view.shards.items())
    ]

  def _waiting(self, state: str, now: float) -> dict[str, Any]:
    panel = self._rounds.as_json(self.view, now, self._sync)
    if state in ("over", "silent"):
      panel |= {"text": "Nobody waits: there is no run under way.", "open": 0}
    return panel

  def _goodput(self, now: float) -> dict[str, Any] | None:
    account = self._ledger.report(now)
    if not account.chip_seconds:
      return None
    return {
      "goodput": _number(account.goodput),
      "goodput_training": _number(account.goodput_training),
      "uptime": _number(account.uptime),
      "chip_seconds": round(account.chip_seconds, 1),
      "causes": {name: round(share, 5) for name, share in account.causes.items()},
      "islands": {
        str(m): {"goodput": _number(each.goodput), "liveness": _number(each.liveness)}
        for m, each in account.learners.items()
      },
    }

  def _timeline(self, now: float, seen: float) -> dict[str, Any]:
    spans = self._lanes.spans(self.view, now, seen)
    order = sorted(spans, key=parse_role)
    return {
      "lanes": [{"role": r, "name": role_name(r), "spans": spans[r]} for r in order],
      "marks": list(self._lanes.marks),
      "marks_left_out": self._lanes.num_marks - len(self._lanes.marks),
    }

  def _curves_json(self) -> dict[str, Any]:
    series, islands = self._series, sorted(self.view.islands)
    return {
      "width_seconds": series.width_seconds,
      "heldout": list(self._heldout),
      "loss": {str(m): series.means(f"loss {m}") for m in islands},
      "participation": {str(m): series.means(f"participation {m}", 2) for m in islands},
      "commits": {str(s): series.counts(f"commits {s}") for s in sorted(self.view.shards)},
    }


def _planned(config: Config) -> RunView:
  islands = {m: IslandView() for m in range(config.islands.num_learners)}
  shards = config.sync.num_shards
  return RunView(total_tokens=config.run.total_tokens, num_shards=shards, islands=islands)


def _shown(island: IslandView, run: str, seen: float) -> str:
  """A run that is over has no running islands, and of a silent one nobody knows."""
  if island.state == "left":
    return "left"
  if run == "over":
    return "ended"
  return "unknown" if run == "silent" else phase(island.state_at(seen))


def _number(value: float, digits: int = 4) -> float | None:
  """Rounded for the wire; None for what JSON cannot say."""
  return round(value, digits) if math.isfinite(value) else None
