"""A run's status as one JSON object, which the page shows, and as metrics for Prometheus. PURE.

The object's size depends on the number of islands and fragments, not on how long the run is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from ddiloco.config import SyncConfig
from ddiloco.observe.eventlog import FLUSH_SECONDS
from ddiloco.observe.islands import (
  DOWN,
  FIRST_STEP_SECONDS,
  UNKNOWN,
  IslandState,
  finite_or,
  phase,
  role_name,
)
from ddiloco.observe.run_state import RunState
from ddiloco.observe.style import clock_time, island_colour, rounded, time_unit
from ddiloco.protocol.events import Hung, parse_role

LAG_SECONDS = 2 * FLUSH_SECONDS  # an event may be so old when it is read: that is no stall
SILENT_SECONDS = 60.0  # a run without new events for so long is silent: no role writes
SHOWN_REJOINS = 12
OVER = {
  "finished": "The run is over: it merged all its tokens.",
  "stopped": "The run was stopped. It can go on from its newest snapshot, if it has one.",
  "failed": "The run has failed: it could not begin, or a shard or every quorum was gone for good.",
}


def status(
  run: RunState, now: float, sync: SyncConfig | None = None, reason: str = "", trouble: str = ""
) -> dict[str, Any]:
  """The status of a run.

  Args:
    run: its state from the events so far.
    now: seconds since it started; once the run is over, or its roles write no more, the time of its
      newest event counts instead.
    sync: the run's section; None: not known.
    reason: why the run ended, if another source than its events says it.
    trouble: why no further events can be read now.
  """
  state, text = _phase(run, now, reason, trouble)
  now = max(now, run.time) if state in ("starting", "running") else run.time
  seen = now - LAG_SECONDS if state == "running" else now
  fragments = run.fragments
  spans, account = run.spans(now, seen), run.ledger.report(run.time)
  islands = [_island(run, m, state, seen, fragments) for m in sorted(run.islands)]
  speed, rate = UNKNOWN, None
  if state == "running":
    speed = run.speed(seen)
    rate = round(finite_or(speed.tokens_per_second, 0))  # 0 if all islands stand still
  return {
    "name": run.name,
    "phase": state,
    "text": text,
    "seconds": round(now, 1),
    "seconds_left": rounded(run.seconds_left(now)) if state == "running" else None,
    "progress": rounded(run.progress),
    "tokens_done": round(run.tokens_done),
    "total_tokens": run.total_tokens,
    "tokens_per_second": rate,
    **speed.as_json(),
    "loss_unit": run.loss_unit,
    "heldout_loss": rounded(run.heldout_loss),
    "heldout_seconds": rounded(run.heldout_time),  # when it was measured
    "heldout_measures": {n: rounded(each) for n, each in run.heldout_measures.items()},
    "commits": run.commits,
    "restarts": run.restarts,
    "outer_gradients": {name: rounded(each) for name, each in run.outer_gradients.items()},
    "solo": (run.solo if state == "running" else "") or None,
    "merging": bool(run.num_shards),
    "islands": islands,
    "shards": _shards(run, seen),
    "fragments": [run.versions.get(p) for p in fragments],
    "waiting": _waiting(run, state, seen, sync),
    "goodput": account.as_json() if account.chip_seconds else None,
    "timeline": _timeline(run, spans),
    "curves": _curves(run),
    "rejoins": run.rejoins.as_json(SHOWN_REJOINS),
    "hangs": run.kinds[Hung],
    "links": run.traffic.as_json(seen),
    "odd_events": run.odd_events,
    "clocks": run.clocks.text(),
    "log_events": [
      {"time": round(log_event.time, 2), "text": log_event.text, "tone": log_event.tone}
      for log_event in run.log_events
    ],
  }


def _phase(run: RunState, now: float, reason: str, trouble: str) -> tuple[str, str]:
  """(empty, starting, running, silent or over; a sentence that explains it)."""
  if trouble:
    state = "silent" if run.num_events else "empty"
    return state, f"Nothing new is known, since the log cannot be read: {trouble}"
  reason = run.finished or reason
  if reason:
    return "over", OVER.get(reason, f"The run is over: {reason}.")
  if not run.num_events:
    return "empty", "Nothing is known yet: no role has written an event."
  started, silent = math.isfinite(run.first_step_time), now - run.time
  if silent > SILENT_SECONDS and {island.state for island in run.islands.values()} == {"left"}:
    return "over", "The run is over: every island has left."
  if silent > (_patience(run) if started else FIRST_STEP_SECONDS):
    ago = f"No role has written for {clock_time(silent)} ({time_unit(silent)})"
    why = "the run was killed, its disk is full, or it writes where this cannot read"
    return "silent", f"{ago}: {why}."
  if not started:
    return "starting", "The run is starting: islands load, compile and join."
  return "running", "The run is under way."


def _patience(run: RunState) -> float:
  """Seconds of silence that are not the run's end: shards write once a second, but islands alone
  only at the end of a step."""
  alone = [] if run.num_shards else run.islands.values()
  return max([SILENT_SECONDS, *(each.patience for each in alone if each.state == "running")])


def _island(run: RunState, m: int, state: str, seen: float, fragments: range) -> dict[str, Any]:
  island = run.islands[m]
  shown = _shown(island, state, seen)
  here = shown == "running"
  speed = island.speed if here else UNKNOWN
  return {
    "number": m,
    "colour": island_colour(m),
    "state": shown,
    "restarts": island.restarts,
    "chips": island.chips,
    "chip_kinds": list(island.chip_kinds),
    "step": island.step,
    "global_step": island.global_step,
    "loss": rounded(island.loss),
    "tokens": island.tokens,
    "tokens_per_second": rounded(speed.tokens_per_second),
    **speed.as_json(),
    "step_seconds": rounded(1 / (island.steps_per_second or math.nan)) if here else None,  # lately
    "starved": here and island.starved,
    "participation": run.participation(m),
    "participation_recent": rounded(island.participation),
    "missed_seconds": rounded(island.missed_time),  # when it last missed a commit
    "missed_reason": island.missed_reason or _never_there(run, island, shown, len(fragments)),
    "versions": [island.versions.get(p) for p in fragments],
  }


def _never_there(run: RunState, island: IslandState, shown: str, fragments: int) -> str:
  """Why an island has no part in the commits that no shard knows yet; "": it is known."""
  if shown != "joining" or island.step or not run.commits:
    return ""
  has = f"it joins, and has received {len(island.versions)} of {fragments} fragments"
  return has if island.lives else "nothing has been heard of it: was it started?"


def _shards(run: RunState, seen: float) -> list[dict[str, Any]]:
  return [
    {
      "number": s,
      "state": phase(shard.state_at(run.shards_at(seen))),
      "fragments": list(shard.fragments),
      "commits": shard.commits,
      "rejected": shard.rejected,
      "unheard": [  # islands that train
        m for m in sorted(shard.unheard) if run.islands[m].state_at(seen) == "running"
      ],
    }
    for s, shard in sorted(run.shards.items())
  ]


def _waiting(run: RunState, state: str, seen: float, sync: SyncConfig | None) -> str:
  if state in ("over", "silent"):
    return "No role waits: there is no run under way."
  if not run.num_shards:
    return "There is no syncer: every island trains alone."
  if sync is None:
    return "The run's config cannot be read, so it is not known."
  # At the time of the newest event: nothing later is known.
  text = run.rounds.waiting(run.islands, run.time, sync)
  judged = run.shards_at(seen)
  states = {s: shard.state_at(judged) for s, shard in sorted(run.shards.items())}
  away = {s: each for s, each in states.items() if each in (*DOWN, "stalled")}
  if away:
    who = f"{'Shard' if len(away) == 1 else 'Shards'} {', '.join(map(str, away))}"
    verb, whose, they = ("is", "its", "it is") if len(away) == 1 else ("are", "their", "they are")
    how = " or ".join(sorted({"down" if each in DOWN else each for each in away.values()}))
    others = "" if len(away) == len(states) else f" {text}"
    text = f"{who} {verb} {how}: {whose} fragments have no rounds until {they} back.{others}"
  return text


def _timeline(run: RunState, spans: dict[str, list[list]]) -> dict[str, Any]:
  order = sorted(spans, key=parse_role)
  return {
    "lanes": [{"role": r, "name": role_name(r), "spans": spans[r]} for r in order],
    "marks": [
      {"time": round(each.time, 2), "role": each.role, "kind": each.mark, "text": each.text}
      for each in run.marks
    ],
    "counts": dict(run.mark_counts),  # of all marks, also older ones
    "absorbed": run.absorbed,
  }


def _curves(run: RunState) -> dict[str, Any]:
  series, islands = run.curves.page, sorted(run.islands)
  return {
    "width_seconds": series.width_seconds,
    "heldout": [(round(e.time, 2), rounded(e.loss)) for e in run.curves.evaluations.items],
    "loss": {str(m): series.means(f"loss {m}") for m in islands},
    "step": {str(m): series.means(f"step {m}") for m in islands},  # seconds, beside "wait"
    "starved": {str(m): series.most(f"data {m}", f"step {m}") for m in islands},  # bins
    "wait": {str(m): series.means(f"wait {m}") for m in islands},  # for a shard, before the step
    "participation": {str(m): series.means(f"participation {m}") for m in islands},
    "commits": {str(s): series.counts(f"commits {s}") for s in sorted(run.shards)},
  }


def _shown(island: IslandState, run: str, seen: float) -> str:
  """The state to show. A finished run has no running islands; those of a silent run are unknown."""
  if island.state == "left":
    return "left"
  if run == "over":
    return "ended"
  return "unknown" if run == "silent" else phase(island.state_at(seen))


# --- The same in Prometheus' text format (version 0.0.4)

METRICS_KIND = "text/plain; version=0.0.4; charset=utf-8"
PHASES = ("empty", "starting", "running", "silent", "over")
STATES = ("joining", "running", "stalled", "quarantined", "down", "left", "ended", "unknown")
OF_RUN = {  # name: key of the status
  "run_seconds": "seconds",
  "run_progress_ratio": "progress",
  "run_tokens": "tokens_done",
  "run_tokens_per_second": "tokens_per_second",
  "run_tokens_per_second_per_chip": "tokens_per_second_per_chip",
  "run_mfu_ratio": "mfu",
  "heldout_loss": "heldout_loss",
  "heldout_seconds": "heldout_seconds",
  "commits_total": "commits",
  "hangs_total": "hangs",
}
OF_ISLANDS = {  # the same for each island
  "global_step": "global_step",
  "loss": "loss",
  "tokens_total": "tokens",
  "tokens_per_second": "tokens_per_second",
  "tokens_per_second_per_chip": "tokens_per_second_per_chip",
  "mfu_ratio": "mfu",
  "restarts_total": "restarts",
  "participation_ratio": "participation",
}
Metric = tuple[str, str, Mapping[Any, Any]]  # its name, its labels, and values by those of labels


def exposition(status: Mapping[str, Any]) -> str:
  """Every number of `status`, in its units; unknown ones are left out. While the log is still being
  read all are: counters would begin anew, and their rates be those of the reading."""
  lines = []
  for name, labels, values in _metrics(status):
    known = [(each, value) for each, value in values.items() if value is not None]
    if known:
      kind = "counter" if name.endswith("_total") else "gauge"
      lines.append(f"# TYPE ddiloco_{name} {kind}")
    for each, value in known:
      pairs = zip(labels.split(), each if isinstance(each, tuple) else (each,))
      text = ",".join(f'{label}="{_escaped(str(of))}"' for label, of in pairs)
      lines.append(f"ddiloco_{name}{f'{{{text}}}' if text else ''} {float(value)!r}")
  return "\n".join(lines) + "\n"


def _metrics(status: Mapping[str, Any]) -> Iterator[Metric]:
  yield "run_phase", "phase", {phase: status["phase"] == phase for phase in PHASES}
  if status["phase"] == "empty":
    return
  islands = {each["number"]: each for each in status["islands"]}
  account = status["goodput"] or {}
  single = {name: status[key] for name, key in OF_RUN.items()}
  single |= {f"outer_gradient_{name}": value for name, value in status["outer_gradients"].items()}
  single |= {"goodput_ratio": account.get("goodput"), "uptime_ratio": account.get("uptime")}
  for name, value in single.items():
    yield name, "", {"": value}
  yield "heldout_measure", "measure", status["heldout_measures"]
  states = {(m, s): each["state"] == s for m, each in islands.items() for s in STATES}
  yield "island_state", "island state", states
  for name, key in OF_ISLANDS.items():
    yield f"island_{name}", "island", {m: each[key] for m, each in islands.items()}
  yield "fragment_version", "fragment", dict(enumerate(status["fragments"]))
  shards = {shard["number"]: shard for shard in status["shards"]}
  states = {(s, each): shards[s]["state"] == each for s in shards for each in STATES}
  yield "shard_state", "shard state", states
  rejected = {s: each["rejected"] for s, each in shards.items()}
  yield "rejected_pushes_total", "shard", rejected
  for way in ("sent", "received"):
    moved = {link["role"]: link[f"{way}_bytes"] for link in status["links"]}
    yield f"{way}_bytes_total", "role", moved
  yield "lost_time_ratio", "cause", account.get("lost_time", {})


def _escaped(label: str) -> str:
  return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
